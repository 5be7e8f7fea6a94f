"""How fast the engine samples: against `transformers` generate, google-tunix's sampler, itself, and the core.

    A experiments/bench_sampler.py --ours_python=python --transformers_python=A --tunix_python=B

A and B are the Pythons of environments with requirements-bench.txt and requirements-bench-tunix.txt; a rival whose
Python is not given, or does not have the package, is left out. All systems run in turn on one core, with one thread and
equal weights, which is checked first: by the log-probabilities of random tokens, and by what each one's sampler takes
to be the likeliest tokens.

Models: S has 4 layers of width 256 and 512 ids, M the shape of SmolLM2-135M; weights are random. Cases:

    S, M      32 (16) sequences, 64 prompt tokens, 128 new ones each
    groups    S: 4 prompts of 256 tokens x 16 samples x 64 new tokens; the rivals are the same engine with
              the prompt's keys copied to each sample, and with each sample a request of its own
    ragged    S: 128 requests, 64 prompt tokens, new tokens lognormal (median 48, sigma 0.8, at most 256), 16 slots
    growth    S: new tokens per second at sequences of 128 to 2048 tokens and 1 to 64 slots, and a plot of it

limit_fraction is the least time that the core's measured peaks allow for the arithmetic and for the reading of weights
and keys, over the CPU time taken. floor_fraction is the same with the weight products of the decode steps alone, timed
as plain calls: how far the sampler is from having no other cost. On a core that other work shares, trust `cpu_ratio`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
import functools
import importlib.util
import pathlib
import statistics
import sys
import tempfile
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # so that it runs as a file, too

import numpy as np  # noqa: E402

from experiments.rivals import growth, interleave, shapes  # noqa: E402

CASES = ("S", "M", "groups", "ragged", "growth")
TARGETS = {"S": (2.0, 3.0), "M": (1.2, 1.4), "groups": (2.0, None), "ragged": (3.0, None)}  # ratio wanted, hoped for
KINDS = ("dynamic", "static", "continuous")  # of transformers' generate
LOG_PROB_TOLERANCE = 1e-3  # nats, between systems


class Work(NamedTuple):
  """Prompts of one length, and what is asked for each."""

  prompts: list[list[int]]
  new_tokens: list[int]
  samples: int = 1

  @property
  def few(self) -> Work:
    """A little of it, for a check."""
    return Work(self.prompts[:4], [min(new, 16) for new in self.new_tokens[:4]])

  @property
  def requests(self) -> list[tuple[int, int, int]]:
    return [(len(prompt), new, self.samples) for prompt, new in zip(self.prompts, self.new_tokens, strict=True)]


class Arm(NamedTuple):
  """A system with the work: sample(seed) -> figures; greedy() -> tokens of a few prompts."""

  name: str
  sample: Callable[[int], dict[str, Any]]
  greedy: Callable[[], dict[str, Any]]


class Bench:
  """What all cases share: the systems, the settings, and the rows so far."""

  def __init__(self, workers: interleave.Workers, args: argparse.Namespace, folder: pathlib.Path):
    self.workers, self.args, self.ours = workers, args, workers["ours"]
    self.rows: list[dict[str, Any]] = []
    self.notes: list[str] = []
    self.progress = interleave.Progress(len(args.cases) * args.repetitions)
    self._folder = folder
    self._checked: set[str] = set()

  def load(self, name: str) -> str:
    """Loads a model into every system, and checks once that all have the same one; the name of its shape."""
    model = "QUICK" if self.args.quick else name
    folder = str(self._folder / model)
    self.ours.call("write_model", model=model, folder=folder)
    self.ours.call("load", folder=folder)
    rivals = [rival for rival in ("transformers", "tunix") if rival in self.workers]
    for rival in rivals:
      self.workers[rival].call("load", folder=folder, model=model)
    if model not in self._checked:
      self._checked.add(model)
      tokens = shapes.random_prompts(model, count=3, length=40, seed=1)
      expected = np.array(self.ours.call("log_probs", tokens=tokens))
      for rival in rivals:
        found = np.array(self.workers[rival].call("log_probs", tokens=tokens))
        self._check(f"{model}: log-probabilities of {rival} against ours", float(np.abs(found - expected).max()))
    return model

  def _check(self, what: str, difference: float) -> None:
    self.progress.say(f"{what}: {difference:.1e} nats apart at most")
    assert difference < LOG_PROB_TOLERANCE, (what, difference)

  def check_greedy(self, case: str, work: Work, arms: list[Arm]) -> None:
    """Each token that a sampler takes greedily is, by our scorer, the likeliest one."""
    for arm in arms:
      tokens = arm.greedy()["tokens"]
      rows = [prompt + new for prompt, new in zip(work.prompts, tokens)]
      gap = self.ours.call("greedy_gap", tokens=rows, prompt_tokens=len(work.prompts[0]))
      self._check(f"{case}: greedy tokens of {arm.name} against our likeliest", gap)

  def engine_arm(self, name: str, key: str, work: Work, options: dict[str, Any]) -> tuple[Arm, float]:
    """Our engine, and the seconds that its programs took to compile."""
    secs = self.ours.call("prepare_sampler", key=key, options=options)
    return self._arm(name, "ours", work, key=key), secs

  def _arm(self, name: str, worker: str, work: Work, **more: Any) -> Arm:
    call = functools.partial(self.workers[worker].call, "sample", **more)
    return Arm(
      name, lambda seed: call(seed=seed, **work._asdict()), lambda: call(seed=0, greedy=True, **work.few._asdict())
    )

  def tunix_arm(self, key: str, work: Work) -> tuple[Arm, float]:
    secs = self.workers["tunix"].call("prepare_sampler", key=key, **work._asdict())
    return self._arm("tunix", "tunix", work, key=key), secs

  def transformers_arm(self, name: str, kind: str, work: Work, *, slots: int) -> Arm:
    return self._arm(f"transformers {name}", "transformers", work, kind=kind, slots=slots)

  def run(self, arms: list[Arm]) -> dict[str, list[dict]]:
    return interleave.interleave(
      [(arm.name, arm.sample) for arm in arms], repetitions=self.args.repetitions, say=self.progress.advance
    )

  def limits(self, model: str, work: Work, *, steps: int, rows: int) -> dict[str, float]:
    """CPU seconds that the core needs at least, and those of the weight products of `steps` decode steps."""
    peaks = self.ours.call("peaks")
    reading, decoding = shapes.sampling_flops(model, work.requests)
    num_bytes = shapes.decode_bytes(model, work.requests, steps=steps)
    limit = reading / peaks["flops_per_sec"] + max(
      num_bytes / peaks["bytes_per_sec"], decoding / peaks["flops_per_sec"]
    )
    floor = self.floor(model, rows)
    return {"limit_secs": limit, "floor_step_secs": floor, "floor_secs": floor * steps, **peaks}

  def floor(self, model: str, rows: int) -> float:
    """CPU seconds of the weight products of one decode step alone."""
    return statistics.median(self.ours.call("floor", model=model, rows=rows)["secs"] for _ in range(9))

  def add(self, case: str, runs: dict[str, list[dict]], limits: dict[str, float], **more: Any) -> None:
    """A row for each rival; `fastest` marks the one that counts."""
    secs = interleave.median(runs["ours"], "cpu_secs")
    rivals = [name for name in runs if name != "ours"]
    best = max(rivals, key=lambda name: interleave.median(runs[name], "tokens_per_sec"), default=None)
    target, goal = TARGETS[case]
    for name in rivals or [None]:
      self.rows.append(interleave.compare(
        case, runs["ours"], runs.get(name), rival_name=name, figure="tokens_per_sec", higher_is_better=True,
        fastest=name is not None and name == best, target=target, goal=goal, limit_fraction=limits["limit_secs"] / secs,
        floor_fraction=limits["floor_secs"] / secs, **limits, **more,
      ))


def equal_lengths(bench: Bench, case: str) -> None:
  """S and M: everything starts and ends together."""
  model = bench.load(case)
  count, prompt_tokens, new = (4, 8, 9) if bench.args.quick else ({"S": 32, "M": 16}[case], 64, 128)
  work = Work(shapes.random_prompts(model, count=count, length=prompt_tokens), [new] * count)
  compile_secs = {}
  ours, compile_secs["ours"] = bench.engine_arm("ours", case, work, dict(
    slots=count, max_prompt_tokens=prompt_tokens, max_new_tokens=new, chunk_tokens=32, prompt_buckets=(prompt_tokens,),
    prefill_batches=(count,), kv_buckets=(*range(prompt_tokens, prompt_tokens + new, 32), prompt_tokens + new),
  ))
  arms = [ours]
  if "tunix" in bench.workers:
    tunix, compile_secs["tunix"] = bench.tunix_arm(case, work)
    arms.append(tunix)
  if "transformers" in bench.workers:
    arms += [bench.transformers_arm(kind, kind, work, slots=count) for kind in KINDS]
  bench.check_greedy(case, work, arms)
  runs = bench.run(arms)
  bench.add(case, runs, bench.limits(model, work, steps=new - 1, rows=count), compile_secs=compile_secs)


def groups(bench: Bench, case: str) -> None:
  """Many samples of few prompts: what it is worth to read a prompt once, and to keep its keys once."""
  model = bench.load("S")
  count, prompt_tokens, samples, new = (2, 8, 2, 5) if bench.args.quick else (4, 256, 16, 64)
  prompts = shapes.random_prompts(model, count=count, length=prompt_tokens)
  shared = Work(prompts, [new] * count, samples)
  alone = Work([prompt for prompt in prompts for _ in range(samples)], [new] * (count * samples))
  options = dict(
    slots=count * samples, max_prompt_tokens=prompt_tokens, max_new_tokens=new, chunk_tokens=16,
    prompt_buckets=(prompt_tokens,), prefill_batches=(count,),
  )
  arms = [
    bench.engine_arm("ours", "lanes", shared, {**options, "lane_samples": samples})[0],
    bench.engine_arm("ours, copied", "copied", shared, {**options, "lane_samples": 1})[0],
    bench.engine_arm("ours, not shared", "alone", alone, {**options, "lane_samples": 1})[0],
  ]
  bench.check_greedy(case, shared, arms[:2])
  bench.add(case, bench.run(arms), bench.limits(model, shared, steps=new - 1, rows=count * samples))


def ragged(bench: Bench, case: str) -> None:
  """Requests of very different lengths through few slots."""
  model = bench.load("S")
  count, prompt_tokens, slots, longest, chunk = (12, 8, 4, 24, 2) if bench.args.quick else (128, 64, 16, 256, 8)
  lengths = shapes.ragged_lengths(count, longest=longest)
  work = Work(shapes.random_prompts(model, count=count, length=prompt_tokens), lengths)
  ours, _ = bench.engine_arm("ours", case, work, dict(
    slots=slots, max_prompt_tokens=prompt_tokens, max_new_tokens=longest, chunk_tokens=chunk,
    prompt_buckets=(prompt_tokens,), prefill_batches=(1, 2, 4),
    kv_buckets=(*range(128, prompt_tokens + longest, 64), prompt_tokens + longest),
  ))
  arms = [ours]
  if "transformers" in bench.workers:
    arms += [
      bench.transformers_arm("in order", "dynamic", work, slots=slots),
      bench.transformers_arm("sorted", "dynamic", work._replace(new_tokens=sorted(lengths)), slots=slots),
      bench.transformers_arm("continuous", "continuous", work, slots=slots),
    ]
  runs = bench.run(arms)
  occupancy, with_queue, chunks = slot_occupancy(lengths, slots=slots, chunk_tokens=chunk)
  for run in runs["ours"]:
    assert (run["steps_with_queue"], len(run["step_secs"])) == (with_queue, chunks), (run, with_queue, chunks)
  limits = bench.limits(model, work, steps=chunks * chunk, rows=slots)
  bench.add(case, runs, limits, slot_occupancy=occupancy, mean_new_tokens=statistics.mean(lengths))


def slot_occupancy(lengths: list[int], *, slots: int, chunk_tokens: int) -> tuple[float, int, int]:
  """Share of the decode steps in which a slot had a sample to go on with, while requests were waiting.

  Followed by the engine's rule, first come first served, for nothing here ends before its length: the caller compares
  the number of chunks with what the engine did.

  Returns: the share; chunks after which requests still waited; chunks in all.
  """
  waiting, left = list(lengths), [None] * slots  # tokens that each slot has to decode yet
  used = offered = with_queue = chunks = 0
  while waiting or any(tokens is not None for tokens in left):
    for slot in range(slots):
      if left[slot] is None and waiting:
        left[slot] = waiting.pop(0) - 1  # the first token comes of the prompt
    chunks += 1
    if waiting:
      with_queue += 1
      offered += slots * chunk_tokens
      used += sum(min(tokens, chunk_tokens) for tokens in left)
    left = [None if tokens is None or tokens <= chunk_tokens else tokens - chunk_tokens for tokens in left]
  return used / max(offered, 1), with_queue, chunks


def growing(bench: Bench, case: str) -> None:
  """How the speed of decoding falls with the sequence and rises with the slots, and what it is made of."""
  model = bench.load("S")
  tokens, slots = ((16, 32), (1,)) if bench.args.quick else ((128, 256, 512, 1024, 2048), (1, 4, 16, 64))
  chunk, chunks = (2, 3) if bench.args.quick else (8, 4)
  new = 1 + chunk * chunks
  secs: dict[tuple[int, int], list[float]] = {(rows, length): [] for rows in slots for length in tokens}
  for rows, length in secs:
    options = dict(
      slots=rows, max_prompt_tokens=length - new, max_new_tokens=new, chunk_tokens=chunk, kv_buckets=(length,),
      prompt_buckets=(length - new,), prefill_batches=(1,),
    )
    bench.ours.call("prepare_sampler", key=f"{rows} {length}", options=options)
  for seed in range(bench.args.repetitions):
    for rows, length in secs:
      prompts = shapes.random_prompts(model, count=1, length=length - new)
      run = bench.ours.call(
        "sample", key=f"{rows} {length}", prompts=prompts, new_tokens=[new], samples=rows, seed=seed
      )
      secs[rows, length] += [each / chunk for each in run["step_secs"][1:]]  # the first one reads the prompt, too
    bench.progress.advance("growth")
  bench.ours.call("forget_samplers")
  peaks = bench.ours.call("peaks")
  floors = {rows: bench.floor(model, rows) for rows in slots}
  step_secs = {key: statistics.median(values) for key, values in secs.items()}
  bench.rows += growth.rows(case, model, step_secs, floors=floors, **peaks)
  bench.notes.append(growth.reason(model, step_secs, floors=floors))
  if importlib.util.find_spec("matplotlib") is None:
    print("no plot of growth: matplotlib is not installed where this runs", flush=True)
  else:
    growth.plot(step_secs, bench.args.out.with_name(f"{bench.args.out.stem}_growth.png"), title=bench.notes[-1])


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--transformers_python", default="", help="Python with requirements-bench.txt")
  parser.add_argument("--tunix_python", default="", help="Python with requirements-bench-tunix.txt")
  interleave.add_flags(parser, cases=CASES, out="bench_sampler.json")
  args = interleave.parse(parser, cases=CASES)
  run = {"S": equal_lengths, "M": equal_lengths, "groups": groups, "ragged": ragged, "growth": growing}
  with interleave.Workers(core=args.core) as workers, tempfile.TemporaryDirectory() as folder:
    versions = {"ours": workers.start("ours", "experiments.rivals.ours", python=args.ours_python, required=True)}
    for name, module in (("transformers", "hf"), ("tunix", "tunix_jax")):
      python = getattr(args, f"{name}_python")
      versions[name] = workers.start(name, f"experiments.rivals.{module}", python=python)
    bench = Bench(workers, args, pathlib.Path(folder))
    for case in args.cases:
      run[case](bench, case)
      machine = interleave.conditions(versions, core=args.core, repetitions=args.repetitions)
      interleave.write(args.out, bench.rows, machine, notes=bench.notes)
  print(interleave.table(bench.rows))
  print("\n".join(bench.notes))


if __name__ == "__main__":
  main()

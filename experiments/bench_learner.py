"""How fast the train step and whole on-policy steps are: against google-tunix's jitted step, TRL, and the core.

    python experiments/bench_learner.py --trl_python=A --tunix_python=B

A and B are the Pythons of environments with requirements-bench.txt and requirements-bench-tunix.txt; a rival whose
Python is not given, or does not have the package, is left out. All systems run in turn on one core, with one thread,
in float32 and without recomputing activations. That they do the same is checked as they go: log-probabilities first,
then the loss and the gradient's norm of every step timed.

    S, M      the TB loss with log_ref given, clipping, AdamW: 16 (4) rows of 64 prompt and 128 response tokens, 4 to a
              group; S has 4 layers of width 256, M the shape of SmolLM2-135M
    run       S: seconds of a whole step of `tba_jax.main` in mode `sync` (sample 8 prompts x 4 of 32 tokens, reward,
              reference, train) against TRL's GRPOTrainer on the same prompts (17 or 18 tokens), both with a reference

In the round "equal" all systems compute log-probabilities and entropies of all tokens ("tunix" entropies of the
responses' tokens, as its GRPO does). In the round "cheapest" ours and "TRL, responses" score responses alone, as both
do in a run; "tunix, no entropy" leaves the entropy out, logits it always computes for all tokens.

limit_fraction is the time that the core's measured peak allows for 6 FLOPs per weight and token, and attention, over
the CPU time taken. On a core that other work shares, trust `cpu_ratio`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
import pathlib
import sys
import tempfile
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # so that it runs as a file, too

import numpy as np  # noqa: E402

from experiments.rivals import interleave, shapes  # noqa: E402

CASES = ("S", "M", "run")
TARGETS = {("S", "tunix"): (1.0, None), ("M", "tunix"): (1.2, None), ("run", "TRL"): (1.25, 2.0)}  # ratio wanted, hoped
ROUNDS = {
  "equal": [("tunix", "tunix", {"entropy": True}), ("TRL", "trl", {"whole_rows": True})],
  "cheapest": [("tunix, no entropy", "tunix", {"entropy": False}), ("TRL, responses", "trl", {"whole_rows": False})],
}
GROUP = 4
LOG_PROB_TOLERANCE, STEP_TOLERANCE = 1e-3, 2e-3  # nats; relative, of loss and gradient norm
SETTINGS = dict(learning_rate=1e-5, clip_norm=1.0, b1=0.9, b2=0.99, eps=1e-8, beta=0.1, chunk_tokens=1024)


def make_data(ours: interleave.Worker, model: str, *, rows: int, prompt_tokens: int, new_tokens: int) -> dict[str, Any]:
  """Random prompts, responses and rewards, groups of GROUP rows; log_ref is near the model's own log-probabilities."""
  rng = np.random.default_rng(0)
  prompts = shapes.random_prompts(model, count=rows // GROUP, length=prompt_tokens)
  prompts = [prompt for prompt in prompts for _ in range(GROUP)]
  responses = shapes.random_prompts(model, count=rows, length=new_tokens, seed=1)
  log_pi = ours.call("log_probs", tokens=[a + b for a, b in zip(prompts, responses, strict=True)])
  log_ref = np.array(log_pi)[:, prompt_tokens:] + 0.1 * rng.standard_normal((rows, new_tokens))
  return {
    "prompts": prompts, "responses": responses, "log_ref": log_ref.tolist(), "rewards": rng.random(rows).tolist(),
    "group_ids": [row // GROUP for row in range(rows)],
  }


class Bench:
  """What all cases share: the systems, the settings, and the rows so far."""

  def __init__(self, workers: interleave.Workers, args: argparse.Namespace, folder: pathlib.Path):
    self.workers, self.args, self.ours = workers, args, workers["ours"]
    self.rows: list[dict[str, Any]] = []
    self.notes: list[str] = []
    self.profiles: dict[str, list[dict[str, Any]]] = {}
    self.progress = interleave.Progress(len(args.cases) * args.repetitions)
    self._folder = folder

  def load(self, name: str) -> tuple[str, str]:
    """Loads a model into every system; the name of its shape, and its folder."""
    model = "QUICK" if self.args.quick else name
    folder = str(self._folder / model)
    self.ours.call("write_model", model=model, folder=folder)
    self.ours.call("load", folder=folder)
    for rival in ("tunix", "trl"):
      if rival in self.workers:
        self.workers[rival].call("load", folder=folder, model=model)
    return model, folder

  def check_log_probs(self, model: str) -> None:
    if "tunix" in self.workers:
      tokens = shapes.random_prompts(model, count=3, length=40, seed=1)
      pair = [np.array(self.workers[name].call("log_probs", tokens=tokens)) for name in ("ours", "tunix")]
      difference = float(np.abs(pair[0] - pair[1]).max())
      self.progress.say(f"{model}: log-probabilities of tunix against ours: {difference:.1e} nats apart at most")
      assert difference < LOG_PROB_TOLERANCE, difference

  def interleave(self, arms: list[tuple[str, Callable[[int], dict[str, float]]]]) -> dict[str, list[dict]]:
    return interleave.interleave(arms, repetitions=self.args.repetitions, say=self.progress.advance)

  def add(self, case: str, runs: dict[str, list[dict]], **more: Any) -> None:
    rivals = [name for name in runs if name != "ours"]
    for name in rivals or [None]:
      target, goal = TARGETS.get((case, name), (None, None))
      self.rows.append(interleave.compare(
        case, runs["ours"], runs.get(name), rival_name=name, figure="secs", higher_is_better=False, target=target,
        goal=goal, **more,
      ))


def train_step(bench: Bench, case: str) -> None:
  """S and M: the step alone, in the rounds that are asked for."""
  model, _ = bench.load(case)
  bench.check_log_probs(model)
  rows, steps = {"S": (16, 3), "M": (4, 1)}[case]
  prompt_tokens, new = (8, 8) if bench.args.quick else (64, 128)
  data = make_data(bench.ours, model, rows=rows, prompt_tokens=prompt_tokens, new_tokens=new)
  peaks = bench.ours.call("peaks")
  limit = shapes.training_flops(model, rows=rows, tokens=prompt_tokens + new) / peaks["flops_per_sec"]
  for name in bench.args.rounds:
    ours = ("ours", "ours", {"micro_batches": rows // GROUP, "whole_rows": name == "equal"})
    arms = [ours, *(rival for rival in ROUNDS[name] if rival[1] in bench.workers)]
    runs, compile_secs = one_round(bench, case, data, arms, steps)
    secs = interleave.median(runs["ours"], "cpu_secs")
    bench.add(
      case, runs, round=name, tokens_per_sec=rows * (prompt_tokens + new) / secs, limit_fraction=limit / secs,
      limit_secs=limit, compile_secs=compile_secs, **peaks,
    )
  if "trl" in bench.workers and "equal" in bench.args.rounds:
    profile = bench.workers["trl"].call("profile")
    shown = ", ".join(f"{entry['operation']} {entry['share']:.0%}" for entry in profile[:6])
    bench.notes.append(f"{case}: seconds of TRL's step by operation: {shown}")
    bench.profiles[case] = profile
  for name in bench.workers:
    bench.workers[name].call("forget_learner")


def one_round(
  bench: Bench, case: str, data: dict[str, Any], arms: list[tuple[str, str, dict[str, Any]]], steps: int
) -> tuple[dict[str, list[dict]], dict[str, list[float]]]:
  """The runs of each arm (name, worker, options) from the same start, and CPU seconds of each time it was compiled.

  Fails if losses or gradient norms differ.
  """
  compile_secs = {}
  for name, worker, options in arms:
    compile_secs[name] = bench.workers[worker].call("prepare_learner", data=data, settings=SETTINGS, **options)
    shown = " and again ".join(f"{secs:.1f} s" for secs in compile_secs[name]) or "0 s"
    bench.progress.say(f"{case}: {name} is compiled in {shown} of CPU time")
  runs = bench.interleave([
    (name, lambda _, worker=worker: bench.workers[worker].call("train", steps=steps)) for name, worker, _ in arms
  ])
  seen = {name: np.array([(run["loss"], run["grad_norm"]) for run in each]) for name, each in runs.items()}
  for name in list(runs)[1:]:
    apart = float(np.abs(seen[name] / seen["ours"] - 1).max())
    bench.progress.say(f"{case}: losses and gradient norms of {name} and ours: {apart:.1e} apart (relative) at most")
    assert apart < STEP_TOLERANCE, (name, seen)
  return runs, compile_secs


def whole_steps(bench: Bench, case: str) -> None:
  """run: sample, reward, score, train, over and over."""
  _, folder = bench.load("S")
  settings = {**SETTINGS, "prompts": 8, "samples": 4, "new_tokens": 32, "micro_batches": 2, "chunk_tokens": 16,
              "num_train_prompts": 256}
  steps = 12
  if bench.args.quick:
    settings.update(prompts=2, samples=2, new_tokens=4, micro_batches=1, chunk_tokens=2, num_train_prompts=4)
    steps = 3
  asked = dict(folder=folder, settings=settings, steps=steps)
  arms = [("ours", lambda _: bench.ours.call("run", **asked))]
  if "trl" in bench.workers:
    prompts = bench.ours.call("task_prompts", count=settings["num_train_prompts"])
    arms.append(("TRL", lambda _: bench.workers["trl"].call("run", prompts=prompts, **asked)))
  runs = bench.interleave(arms)
  first_secs = {name: interleave.median(each, "first_secs") for name, each in runs.items()}
  bench.add(case, runs, limit_fraction=None, compile_secs=None, first_secs=first_secs)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--trl_python", default="", help="Python with requirements-bench.txt")
  parser.add_argument("--tunix_python", default="", help="Python with requirements-bench-tunix.txt")
  parser.add_argument("--rounds", default=",".join(ROUNDS), help="of S and M; of " + ",".join(ROUNDS))
  interleave.add_flags(parser, cases=CASES, out="bench_learner.json")
  args = interleave.parse(parser, cases=CASES)
  args.rounds = args.rounds.split(",")
  if unknown := sorted(set(args.rounds) - set(ROUNDS)):
    parser.error(f"--rounds: {', '.join(unknown)} is none of {', '.join(ROUNDS)}")
  run = {"S": train_step, "M": train_step, "run": whole_steps}
  with interleave.Workers(core=args.core) as workers, tempfile.TemporaryDirectory() as folder:
    versions = {}
    versions["ours"] = workers.start("ours", "experiments.rivals.ours_learner", python=args.ours_python, required=True)
    for name, module in (("tunix", "tunix_jax"), ("trl", "trl_torch")):
      versions[name] = workers.start(name, f"experiments.rivals.{module}", python=getattr(args, f"{name}_python"))
    bench = Bench(workers, args, pathlib.Path(folder))
    for case in args.cases:
      run[case](bench, case)
      machine = interleave.conditions(versions, core=args.core, repetitions=args.repetitions)
      interleave.write(args.out, bench.rows, machine, notes=bench.notes, profiles=bench.profiles)
  print(interleave.table(bench.rows))
  print("\n".join(bench.notes))


if __name__ == "__main__":
  main()

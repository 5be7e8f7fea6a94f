"""What searchers in other processes cost and give, by Ray, all on ONE machine.

    python experiments/cluster_bench.py weights --out runs/cluster_bench
    python experiments/cluster_bench.py weights --params=1.1e9 --out runs/cluster_bench
    python experiments/cluster_bench.py transfer --out runs/cluster_bench
    python experiments/cluster_bench.py inserts --out runs/cluster_bench
    python experiments/cluster_bench.py scaling --out runs/cluster_bench
    python experiments/cluster_bench.py pinned --out runs/cluster_bench

weights  a tree of bfloat16 goes into the object store of one Ray node and is fetched, its checksums compared, by an
         actor on the same node, by one on another (over TCP, on this machine's loopback), and by a second one there.
         Held: how long `publish` holds a trainer's thread whose steps (2 s, 1.1e9: 10 s) are slept.
transfer  to another node, from the arrays of one process's jax to those of another's: as parcels, and in turn by
         jax.experimental.transfer.
inserts  groups of 16 rollouts of 512 tokens into the exchange: from this process, and from 2 actors.
scaling  real runs, whose trainer's device is one core. The searchers' decoding is SIMULATED: they sleep, and bring 64
         random responses each time. fastN: for a second, N searchers of 1 to 16 in a process each and 64 in 8
         processes. slow2, slow64: for 8 seconds, so that 64 of them sample about as much as is trained.
pinned   real runs: the trainer on one core, one searcher on another; asynchronous, and on-policy in turn on the same
         actor; and on-policy in this process with both cores for each phase. Half of the sampled responses are trained.

Runs train the quickstart's model. One that is done is not made again. Each subcommand writes OUT/NAME.json;
`summary.json` has all that are there.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # so that it runs as a file, too

from experiments import async_speedup  # noqa: E402
from experiments.cluster_weights import package, transfer, weights  # noqa: E402
from experiments.rivals.interleave import conditions  # noqa: E402
from tba_jax.metrics import read_jsonl, write_atomic  # noqa: E402
from tba_jax.types import RolloutGroup  # noqa: E402

REPO = pathlib.Path(__file__).resolve().parent.parent
INSERT_SECS = 10.0
GROUP_SAMPLES, PROMPT_TOKENS, ROLLOUT_TOKENS = 16, 18, 512
DECODE_SECS = {"fast": 1.0, "slow": 8.0}  # simulated, of all slots
MANY, MANY_PROCESSES = 64, 8
SIMULATED = ("fast1", "fast2", "fast4", "fast8", "fast16", "fast64", "slow2", "slow64")
PINNED = ("async", "disaggregated", "colocated")


def make_group(seed: int, *, samples: int = GROUP_SAMPLES, tokens: int = ROLLOUT_TOKENS, vocab: int = 50_000
               ) -> RolloutGroup:
  """Random responses of full length."""
  rng, shape = np.random.default_rng(seed), (samples, tokens)
  return RolloutGroup(
      prompt_id=0, occurrence=0, attempt=0, prompt=np.full(PROMPT_TOKENS, 1, np.int32),
      tokens=rng.integers(1, vocab, shape).astype(np.int32), lengths=np.full(samples, tokens, np.int32),
      log_mu=-rng.random(shape, np.float32), log_ref=-rng.random(shape, np.float32),
      versions=np.zeros(shape, np.int32), rewards=rng.random(samples, np.float32), truncated=np.zeros(samples, bool),
      ref_version=0, temperature=1.0, texts=("",) * samples)


# --- Inserts ---


def inserts() -> dict[str, Any]:
  """Rollouts a second into the exchange."""
  import ray

  groups = [make_group(i) for i in range(64)]
  exchange, count, began = _exchange(), 0, time.monotonic()
  while (secs := time.monotonic() - began) < INSERT_SECS:
    count += _bring(exchange, groups)
  found = {"tokens": ROLLOUT_TOKENS, "from_this_process_per_second": count / secs}
  ray.init(include_dashboard=False, log_to_driver=False, runtime_env=package(), num_cpus=2)
  try:
    actors = [ray.remote(_Source).remote() for _ in range(2)]
    under_way = {actor.groups.remote(): actor for actor in actors for _ in range(2)}
    ray.wait(list(under_way), num_returns=len(under_way))
    exchange, count, began = _exchange(), 0, time.monotonic()
    while (secs := time.monotonic() - began) < INSERT_SECS:
      done = ray.wait(list(under_way))[0][0]
      actor = under_way.pop(done)
      under_way[actor.groups.remote()] = actor
      count += _bring(exchange, ray.get(done))
  finally:
    ray.shutdown()
  return {**found, "from_2_actors_per_second": count / secs}


class _Source:
  """An actor that has groups of rollouts; each answer is one of its own."""

  def __init__(self):
    self._groups = [make_group(i) for i in range(16)]

  def groups(self) -> list:
    return self._groups


def _exchange():
  from tba_jax.replay.buffer import ReplayBuffer
  from tba_jax.replay.flow import PromptLedger
  from tba_jax.runtime.exchange import Exchange

  buffer = ReplayBuffer(
      capacity=20_000, capacity_per_prompt=100, max_prompt_tokens=PROMPT_TOKENS, max_response_tokens=ROLLOUT_TOKENS,
      seed=0, recent_fraction=0.95)
  return Exchange(
      ledger=PromptLedger(4096, seed=0), buffer=buffer, groups_per_step=8, responses_per_prompt=GROUP_SAMPLES,
      fill_responses=0, max_staleness=-1, max_lead_steps=-1, hang_secs=60.0, say=print)


def _bring(exchange: Any, groups: Sequence[RolloutGroup]) -> int:
  """Rollouts brought; every group is one of the next occurrence, with a token that tells it from the ones before."""
  for group in groups:
    occurrence = exchange.next_occurrence()
    tokens = group.tokens.copy()
    tokens[:, 0] = occurrence.occurrence
    exchange.bring(occurrence, dataclasses.replace(
        group, prompt_id=occurrence.prompt_id, occurrence=occurrence.occurrence, tokens=tokens))
  return len(groups) * GROUP_SAMPLES


# --- Runs ---


def arm_config(arm: str, *, steps: int, responses: int):
  """Of one of SIMULATED, or of PINNED; S = `responses` of the latter."""
  simulated = arm in SIMULATED
  config = async_speedup.make_config(
      "async" if simulated else arm, seed=0, steps=steps, quick=False,
      searchers=int(arm[len("fast"):]) if simulated else 1).unlock()
  if simulated:
    config.sync.update(max_lead_steps=-1, every_steps=10)
    config.sft.steps = 0
  else:
    config.sample.responses_per_prompt = responses
    if config.runtime.mode == "sync":
      config.sample.slots = config.train.prompts_per_step * responses
  if arm not in (async_speedup.VERSION0, "colocated"):
    config.runtime.backend = "ray"
  return config.lock()


def run_arm(arm: str, out: pathlib.Path, *, steps: int, responses: int) -> NoReturn:
  """One run, in this process."""
  from tba_jax import build_remote, train
  from tba_jax.runtime import cluster

  config, folder = arm_config(arm, steps=steps, responses=responses), out / arm
  cores = sorted(os.sched_getaffinity(0))
  if config.runtime.backend == "ray":
    import ray

    init = ray.init
    pin(cores[:1])  # XLA makes as many threads as it sees cores

    def init_on_all_cores(*arguments: Any, **named: Any) -> None:
      os.sched_setaffinity(0, cores)  # for what this thread starts
      init(*arguments, num_cpus=MANY, **named)
      if arm in PINNED:
        pin(cores[:1])

    ray.init = init_on_all_cores
    build_remote.make_host = (functools.partial(_pinned_host, core=cores[-1]) if arm in PINNED else
                              functools.partial(_SimulatedHost, decode_secs=DECODE_SECS[arm[:len("fast")]]))
    if config.devices.searchers == MANY:
      cluster.ActorConnection = _shared_connection()
    compile_run = train._compile
    train._compile = lambda run: (_begin_all(run), compile_run(run))
  code, _, marks, _ = async_speedup.train_noted(config, folder, version0=out / async_speedup.VERSION0)
  write_atomic(folder / async_speedup.MARKS, json.dumps(marks))  # last: it says that the arm is done
  sys.exit(code)


def pin(cores: Iterable[int]) -> None:
  """Keeps all threads of this process to some cores."""
  for thread in os.listdir("/proc/self/task"):
    os.sched_setaffinity(int(thread), cores)


def _pinned_host(spec: Any, reference: Any, fetch: Any, *, core: int) -> Any:
  """A searcher's real host, on a core of its own."""
  from tba_jax import build_remote

  pin([core])
  return build_remote.make_host(spec, reference, fetch)


def _begin_all(run: Any) -> None:
  """Waits for all searchers' processes, which begin side by side."""
  waiting = run.searchers
  while waiting:
    waiting = [searcher for searcher in waiting if not searcher.ready(run.weights.latest(searcher.index))]


class _SimulatedHost:
  """Takes the place of a `SearcherHost` whose decoding costs nothing but time."""

  def __init__(self, spec: Any, reference: Any, fetch: Any, *, decode_secs: float):
    from tba_jax.searcher import SearcherCounts

    self._decode_secs, self._next_secs = decode_secs, decode_secs * (1 - spec.index % 16 / 16)  # not all at once
    self._fetch, self._index, sample = fetch, spec.index, spec.config["sample"]
    self._group = make_group(
        spec.index, samples=sample["responses_per_prompt"], tokens=sample["max_new_tokens"], vocab=20)
    self._counts, self._version, self._running, self._end_secs = SearcherCounts(), 0, [], 0.0

  def prepare(self, sent: Any) -> Any:
    self._take(sent)
    return self._report([])

  def turn(self, turn: Any) -> Any:
    from tba_jax.runtime.host import _TURN_SECS

    now, finished = time.monotonic(), []
    if turn.abandon:
      self._running = []
    if turn.weights is not None:
      self._take(turn.weights)
    if turn.occurrences and not self._running:
      self._end_secs, self._next_secs = now + self._next_secs, self._decode_secs
    self._running += turn.occurrences
    if turn.decode and self._running:
      time.sleep(max(0.0, min(self._end_secs - time.monotonic(), _TURN_SECS)))
      if time.monotonic() >= self._end_secs:
        finished, self._running = [(occurrence, self._of(occurrence)) for occurrence in self._running], []
    return self._report(finished)

  def log_pi(self, group: RolloutGroup) -> np.ndarray:
    return group.log_mu

  def _take(self, sent: Any) -> None:
    from tba_jax.runtime.parcels import unpack

    unpack(sent.parcel, self._fetch(sent.parcel.chunks))
    self._version = sent.version

  def _of(self, occurrence: Any) -> RolloutGroup:
    group = self._group
    self._counts.rollouts += len(group.lengths)
    self._counts.generated_tokens += int(group.lengths.sum())
    return dataclasses.replace(
        group, **dataclasses.asdict(occurrence), versions=np.full_like(group.tokens, self._version),
        searcher=self._index)

  def _report(self, finished: Sequence[Any]) -> Any:
    from tba_jax.runtime.host import Report

    return Report(
        finished=tuple(finished), counts=dataclasses.replace(self._counts), version=self._version,
        num_groups=len(self._running), load=len(self._running) * len(self._group.lengths), num_compiled=0,
        measures=False, spans=(), now_secs=time.monotonic())


def _shared_connection() -> type:
  """`cluster.ActorConnection` to one of several hosts in an actor, with a thread for each."""
  import ray

  from tba_jax.runtime import cluster

  actors: dict[int, Any] = {}

  class SharedConnection(cluster.ActorConnection):

    def begin(self, reference: Any, weights: Any) -> None:
      number = self._spec.index % MANY_PROCESSES
      if number not in actors:
        actors[number] = ray.remote(_SharedActor).options(
            runtime_env={"env_vars": self._environment}, max_concurrency=MANY).remote()
      ray.get(actors[number].make.remote(self._make_host, self._spec, reference))
      self._actor = types.SimpleNamespace(call=types.SimpleNamespace(
          remote=functools.partial(actors[number].call.remote, self._spec.index)))
      self._prepared = self._actor.call.remote("prepare", (weights,))

    def end(self) -> None:
      self._actor = self._prepared = None

  return SharedConnection


class _SharedActor:
  """The process of several hosts."""

  def __init__(self):
    self._hosts: dict[int, Any] = {}

  def make(self, make_host: Any, spec: Any, reference: Any) -> None:
    from tba_jax.runtime.cluster import fetch

    self._hosts[spec.index] = make_host(spec, reference, fetch)

  def call(self, index: int, method: str, arguments: Sequence[Any]) -> tuple[Any]:
    return (getattr(self._hosts[index], method)(*arguments),)


# --- What runs say ---


def pace(lines: Iterable[dict[str, float]], *, warm_steps: int) -> dict[str, float]:
  """Of a run's metrics, by step, behind the first `warm_steps`: rollouts a second, the median step, and the share of
  the time that the trainer waited for a batch."""
  first, *_, last = counted = [line for line in lines if "loss" in line and line["step"] >= warm_steps]
  secs = last["wall_seconds"] - first["wall_seconds"]
  return {
      "rollouts_per_second": (last["rollouts"] - first["rollouts"]) / secs,
      "step_seconds": statistics.median(line["step_seconds"] for line in counted[1:]),
      "wait_share": (last["trainer_wait_seconds"] - first["trainer_wait_seconds"]) / secs,
      "seconds": secs,
  }


def scaling(out: pathlib.Path, steps: int) -> dict[str, Any]:
  """Rollouts and steps against the number of searchers."""
  found = {}
  for arm in SIMULATED:
    _run_piece("scaling", arm, out, steps=steps)
    found[arm] = pace(read_jsonl(out / arm / "metrics.jsonl"), warm_steps=async_speedup.WARM_STEPS)
  step = {arm: found[arm]["step_seconds"] for arm in found}
  return {"decode_seconds_simulated": DECODE_SECS, "processes_of_64": MANY_PROCESSES, "arms": found,
          "step_of_64_over_2": {kind: step[f"{kind}64"] / step[f"{kind}2"] for kind in DECODE_SECS}}


def pinned(out: pathlib.Path, steps: int, responses: int) -> dict[str, Any]:
  """Trained responses a second."""
  arms = {}
  for arm in (async_speedup.VERSION0, *PINNED):
    _run_piece("pinned", arm, out, steps=steps, responses=responses)
    if arm in PINNED:
      arms[arm] = async_speedup.measure(out / arm)
  return {"responses_sampled_per_prompt": responses, **gains(arms)}


def gains(arms: dict[str, dict[str, Any]]) -> dict[str, Any]:
  """What asynchrony gains over both ways to alternate; its bound over the same devices in turn is that of the busier
  side."""
  names = ("trained_responses_per_second", "rollouts_per_second", "trainer_busy_share", "searchers_busy_share",
           "staleness_mean", "seconds", "steps")
  rate = {arm: found["trained_responses_per_second"] for arm, found in arms.items()}
  turns = arms["disaggregated"]
  train_secs, sample_secs = turns["trainer_busy_seconds"], turns["searchers_busy_seconds"]
  busy = {arm: found["cores_busy_for_others"] + found["cpu_seconds"] / found["seconds"] for arm, found in arms.items()}
  return {
      "over_disaggregated": rate["async"] / rate["disaggregated"], "over_colocated": rate["async"] / rate["colocated"],
      "bound_over_disaggregated": turns["seconds"] / max(train_secs, sample_secs),
      "arms": {arm: {name: arms[arm][name] for name in names} | {"cores_busy": busy[arm]} for arm in arms},
  }


def _run_piece(what: str, arm: str, out: pathlib.Path, **options: int) -> None:
  """Makes a run in a process of its own unless it is done."""
  if (out / arm / async_speedup.MARKS).is_file():
    return
  print(arm, file=sys.stderr, flush=True)
  environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(out / "xla")}
  log = out / f"{arm}.log"
  with log.open("w") as file:
    code = subprocess.run(
        [sys.executable, "-m", "experiments.cluster_bench", what, f"--out={out}", f"--run_arm={arm}",
         *(f"--{name}={value}" for name, value in options.items())],
        cwd=REPO, env=environment, stdout=file, stderr=file, check=False).returncode
  if code:
    raise SystemExit(f"{arm} ended with code {code}: {log.read_text(errors='replace')[-2000:]}")


class _Parser(argparse.ArgumentParser):
  """Says what is wrong in one line."""

  def error(self, message: str) -> NoReturn:
    self.exit(2, f"error: {message}\n")


def main(argv: list[str] | None = None) -> None:
  parser = _Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("what", choices=("weights", "transfer", "inserts", "scaling", "pinned"))
  parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for the runs and the results")
  parser.add_argument("--params", type=float, default=135e6, help="of the model whose weights are sent")
  parser.add_argument("--steps", type=int, default=40, help="of each run")
  parser.add_argument("--responses", type=int, default=32, help="sampled for a prompt where cores are pinned; 16 are "
                      "trained. The number with which both sides are busy for as long")
  parser.add_argument("--run_arm", help=argparse.SUPPRESS)
  args = parser.parse_args(argv)
  for name, least in (("params", 1e6), ("steps", 20), ("responses", 16)):
    if not getattr(args, name) >= least:
      parser.error(f"--{name}={getattr(args, name):g} must be at least {least:g}")
  if args.what == "pinned" and len(os.sched_getaffinity(0)) < 2:
    parser.error("pinned needs 2 cores, this process may use 1; run it where there are two")
  if not _has_ray():
    parser.error("this needs Ray: pip install -r requirements-cluster.txt")
  out = args.out.resolve()
  out.mkdir(parents=True, exist_ok=True)
  if args.run_arm:
    run_arm(args.run_arm, out, steps=args.steps, responses=args.responses)
  name = f"{args.what}_{args.params / 1e6:.0f}M" if args.what in ("weights", "transfer") else args.what
  found = {
      "weights": lambda: weights(int(args.params)), "transfer": lambda: transfer(int(args.params)),
      "inserts": inserts, "scaling": lambda: scaling(out, args.steps),
      "pinned": lambda: pinned(out, args.steps, args.responses)}[args.what]()
  machine = conditions(_versions(), core=-1, repetitions=1)
  found["machine"] = {key: machine[key] for key in ("commit", "date", "cpu", "cpus", "versions")}
  write_atomic(out / f"{name}.json", json.dumps(found, indent=2) + "\n")
  print(json.dumps(found, indent=2))
  parts = {path.stem: json.loads(path.read_text()) for path in sorted(out.glob("*.json")) if path.stem != "summary"}
  write_atomic(out / "summary.json", json.dumps(parts, indent=2) + "\n")


def _has_ray() -> bool:
  import importlib.util

  return importlib.util.find_spec("ray") is not None


def _versions() -> dict[str, str]:
  import importlib.metadata

  return {name: importlib.metadata.version(name) for name in ("jax", "ray")}


if __name__ == "__main__":
  main()

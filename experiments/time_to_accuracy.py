"""How long each way of training takes to one held-out accuracy on the same devices: on-policy RLOO, on-policy PPO with
a critic, VinePPO, asynchronous online DPO, and TBA.

    python -m experiments.time_to_accuracy
    python -m experiments.time_to_accuracy --decode_ms=200

The comparison of Bartoldson et al. 2025 (arXiv:2503.18929: 50 times as fast as VinePPO, 1.5 times as fast as
asynchronous DPO), in small, on the chains of `chains.py`. All start from one fine-tuned model and train on 3,840
responses by the runtime of the product. On-policy methods take turns: sample, then train, and nothing is older than the
weights. The asynchronous ones have a trainer and searchers at once, each on a virtual device of its own. Every arm has
the same grid of learning rates and batches; the best of it, by a tuning seed that is not among the seeds shown, is the
one that is there first, or if none is, that came nearest. VinePPO values the states behind every 4 tokens by 4
continuations (the paper: by 9, behind newlines).

As it is, one searcher: all devices are the same cores, so the figure to compare is the CPU seconds; how much other work
the machine did beside is written down. With `--decode_ms` decoding is SIMULATED: each chunk of tokens (here: a whole
response) takes so long besides, without a core, however many responses are in it, up to 32 on a device. This is the
paper's regime, in which responses are long and sampling takes most of the time. Of 4 devices, on-policy methods sample
on all (one engine of 128 slots), asynchronous ones on 3; the figure to compare is seconds.

The clock runs from the end of step 2, before which programs are compiled, and counts these 2 steps as the mean of the
others; weights are copied at some publishes and evaluated afterwards, on one sample a problem. Writes
time_to_accuracy.json (the same command goes on where it was stopped), .md and .png.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import pathlib
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # so that it runs as a file, too

from experiments import study
from experiments.async_speedup import evaluate, machine_busy_secs, seconds_to

GRID = ((4, 1e-4), (4, 3e-4), (16, 3e-4))  # prompts a step, learning rate
RESPONSES, NUM_COPIES, WARM_STEPS, TUNING_SEED = 3840, 15, 2, 0
DEVICES, SLOTS = 4, 32  # with simulated decoding; slots of a device
_SYNC = {"runtime.mode": "sync", "devices.searchers": 1, "devices.share": True}
_ASYNC = {"runtime.mode": "async", "devices.searchers": 1, "devices.share": False, "sync.every_steps": 1}
ARMS: dict[str, dict[str, Any]] = {
  "on-policy RLOO": {**_SYNC, "loss.name": "rloo"},
  "on-policy PPO": {**_SYNC, "loss.name": "ppo"},
  "VinePPO": {**_SYNC, "loss.name": "vineppo", "loss.vine_samples": 4, "loss.vine_step_tokens": 4},
  "async online DPO": {**_ASYNC, "loss.name": "dpo", "buffer.order": "fifo", "buffer.max_uses": 1,
                       "sync.max_lead_steps": 2},
  "TBA": {**_ASYNC, "loss.name": "tb_vargrad", "buffer.dedup": True, "sync.max_lead_steps": 4, "sync.every_steps": 2},
}


class Plan(NamedTuple):
  """What is compared."""

  responses: int
  decode_ms: int  # of a chunk, simulated; 0: decoding as it is
  target: float
  grid: Sequence[tuple[int, float]] = GRID

  def cell(self, arm: str, prompts: int, rate: float, seed: int) -> study.Cell:
    return {"arm": arm, "prompts": prompts, "rate": rate, "seed": seed, "responses": self.responses,
            "decode_ms": self.decode_ms}

  def tuning_cells(self, arms: Sequence[str] = tuple(ARMS)) -> list[study.Cell]:
    """The runs that settings are chosen from."""
    return [self.cell(arm, *setting, TUNING_SEED) for setting in self.grid for arm in arms]

  def best(self, found: study.Study, arm: str) -> tuple[int, float] | None:
    """Prompts and rate of the arm's tuning run that was first at the target, or, if none was, came nearest; None if
    one is missing."""
    runs = [found.find(**key) for key in self.tuning_cells([arm])]
    if None in runs:
      return None
    order = lambda run: (time_to(run, self.target) or math.inf, -max(point[2] for point in run["timed_curve"]))
    key = min(runs, key=order)["key"]
    return key["prompts"], key["rate"]

  def final_cells(self, found: study.Study, seeds: Sequence[int]) -> list[study.Cell]:
    """The runs that are shown: every arm at its best setting."""
    return [self.cell(arm, *self.best(found, arm), seed) for seed in seeds for arm in ARMS]


def changes_of(key: study.Cell) -> dict[str, Any]:
  """The settings of a cell."""
  rows = key["prompts"] * study.CHAINS["sample.responses_per_prompt"]
  changes = {
    **ARMS[key["arm"]], "seed": key["seed"], "train.learning_rate": key["rate"], "loss.beta_init": 0.05,
    "loss.beta_final": 0.05, "train.steps": max(1, key["responses"] // rows), "train.prompts_per_step": key["prompts"],
    "sample.slots": rows, "buffer.fill_responses": rows,
  }
  if key["decode_ms"]:
    takes_turns = changes["devices.share"]
    changes["sample.slots"] = SLOTS * DEVICES if takes_turns else SLOTS
    changes["devices.searchers"] = 1 if takes_turns else DEVICES - 1
  return changes


class Marks:
  """What is noted of a run while it goes on. decode_ms: that each chunk takes longer from step 1 to the last."""

  def __init__(self, steps: int, *, decode_ms: int):
    self._every, self._steps, self._decode_secs = max(1, steps // NUM_COPIES), steps, decode_ms / 1000
    self.at_step: dict[int, dict[str, float]] = {}
    self.copies: dict[int, Any] = {}
    self.run: Any = None

  @contextlib.contextmanager
  def watching(self) -> Iterator[None]:
    """Every publish within, and every chunk."""
    import jax

    from tba_jax.runtime.run import Run
    from tba_jax.sampling.engine import Engine

    publish, step = Run.publish, Engine.step

    def noted_publish(run: Run, *, wait: bool) -> None:
      publish(run, wait=wait)
      self.run = run
      self.at_step[run.step] = {"wall": time.monotonic(), "cpu": time.process_time(), "machine": machine_busy_secs()}
      if run.step and run.step % self._every == 0:
        self.copies[run.step] = jax.device_get(run.trainer.state.params)

    def slow_step(engine: Engine) -> Any:
      if engine.num_groups and 1 in self.at_step and self._steps not in self.at_step:  # no evaluation
        time.sleep(self._decode_secs)
      return step(engine)

    Run.publish, Engine.step = noted_publish, slow_step
    try:
      yield
    finally:
      Run.publish, Engine.step = publish, step

  def seconds(self, step: int, clock: str) -> float:
    """Up to a step; those of the first are the mean of the others'."""
    last = max(self.at_step)
    warm = min(WARM_STEPS, last - 1)
    since = lambda step: self.at_step[step][clock] - self.at_step[warm][clock]
    return since(step) + warm * since(last) / (last - warm)

  def curve(self, before: float) -> list[list[float]]:
    """[step, seconds, accuracy, CPU seconds], from the starting model's accuracy on."""
    return [[0, 0.0, before, 0.0]] + [
      [step, round(self.seconds(step, "wall"), 3), accuracy, round(self.seconds(step, "cpu"), 3)]
      for step, accuracy in evaluate(self.run, self.copies, temperature=1.0)]

  def cores_of_others(self) -> float:
    """Busy with other processes, mean over the run."""
    machine, cpu, wall = (self.seconds(max(self.at_step), clock) for clock in ("machine", "cpu", "wall"))
    return round((machine - cpu) / wall, 2)


def run(key: study.Cell, start: pathlib.Path, *, quick: bool) -> dict[str, Any]:
  """One run, and its accuracy over time."""
  began, changes = time.monotonic(), changes_of(key)
  marks = Marks(changes["train.steps"], decode_ms=key["decode_ms"])
  with marks.watching():
    found = study.run_cell(changes, start, quick=quick)
  return {**found, "timed_curve": marks.curve(found["before"]), "cores_of_others": marks.cores_of_others(),
          "seconds": round(time.monotonic() - began, 2)}


def time_to(run: study.Cell, target: float) -> float | None:
  """Seconds until a run had the accuracy, CPU seconds if its decoding was not simulated; None if it never had."""
  clock = 1 if run["key"]["decode_ms"] else 3
  return seconds_to([(point[0], point[clock], point[2]) for point in run["timed_curve"]], target)


def write(found: study.Study, out: pathlib.Path, seeds: Sequence[int], plan: Plan) -> str:
  """A table and a panel for each length of decoding."""
  from matplotlib import ticker

  lengths = sorted({one["key"]["decode_ms"] for one in found.cells})
  figure, axes = study.new_figure(len(lengths))
  text, target = [], plan.target
  for axis, decode_ms in zip(axes[0], lengths):
    plan = plan._replace(decode_ms=decode_ms)
    unit = f"seconds, decoding SIMULATED: {decode_ms} ms a chunk" if decode_ms else "CPU seconds"
    rows = {}
    for number, arm in enumerate(ARMS):
      setting = plan.best(found, arm)
      runs = [] if setting is None else [found.find(**plan.cell(arm, *setting, seed)) for seed in seeds]
      runs = [one for one in runs if one is not None]
      for one in runs:
        curve = one["timed_curve"]
        axis.plot([point[1 if decode_ms else 3] for point in curve], [100 * point[2] for point in curve],
                  color=f"C{number}", marker=".", linewidth=1, label=arm if one is runs[0] else None)
      if runs:
        rows[arm] = (setting, runs, [time_to(one, target) for one in runs])
    base = rows["TBA"][2] if "TBA" in rows else [None]
    lines = []
    for arm, (setting, runs, times) in rows.items():
      reached = [one for one in times if one is not None]
      mean = statistics.fmean(reached) if reached else math.nan
      spread = f"{mean:.1f} ± {(max(reached) - min(reached)) / 2:.1f}" if reached else ""
      steps = [seconds_to([(point[0], point[0], point[2]) for point in one["timed_curve"]], target) for one in runs]
      lines.append([
        arm, f"{setting[0]} prompts, {setting[1]:g}", f"{len(reached)} of {len(times)}", spread,
        f"{mean / statistics.fmean(base):.2f}" if reached and None not in base else "",
        f"{statistics.fmean(one for one in steps if one is not None):.0f}" if reached else "",
        study.mean_and_spread([max(point[2] for point in one["timed_curve"]) for one in runs]),
        f"{statistics.fmean(one['cores_of_others'] for one in runs):.1f}"])
    axis.axhline(100 * target, color="grey", linewidth=0.8)
    axis.set(xlabel=f"training: {unit}", ylabel="held-out accuracy, %")
    axis.set_xscale("symlog", linthresh=1)
    axis.set_xlim(left=0)
    axis.xaxis.set_major_locator(ticker.FixedLocator((0, 1, 2, 5, 10, 20, 50)))
    axis.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
    axis.xaxis.set_minor_locator(ticker.NullLocator())
    axis.grid(alpha=0.3)
    if lines:
      axis.legend(fontsize=8)
    text.append(f"{unit[0].upper()}{unit[1:]}; to {100 * target:.0f}% held-out accuracy, seeds "
                f"{', '.join(map(str, seeds))}: mean ± half the range.\n")
    text.append(study.table(
      ["", "best setting", "there", "time", "x TBA", "steps", "best accuracy", "cores busy for others"], lines))
  figure.savefig(out / "time_to_accuracy.png", dpi=120)
  (out / "time_to_accuracy.md").write_text("\n".join(text))
  return "\n".join(text)


def main(argv: Sequence[str] | None = None) -> study.Study:
  parser = study.common_flags(__doc__, name="time_to_accuracy")
  parser.add_argument("--seeds", type=study.numbers, default=(1, 2, 3), help="of the runs shown; not the tuning seed")
  parser.add_argument("--target", type=float, default=0.8, help="accuracy to reach")
  parser.add_argument("--decode_ms", type=int, default=0, help="simulated: so long takes each chunk besides; 0: none")
  args = parser.parse_args(argv)
  if TUNING_SEED in args.seeds:
    raise SystemExit(f"--seeds={args.seeds} must not hold the tuning seed {TUNING_SEED}; choose others")
  began = time.monotonic()
  study.set_up(num_devices=DEVICES)
  plan = Plan(RESPONSES, args.decode_ms, args.target)
  if args.quick:
    plan = plan._replace(responses=256, grid=GRID[:1])
  start = study.starting_model(quick=args.quick)
  about = {"what": "held-out accuracy against seconds and CPU seconds", "starting_model": study.checksum(start),
           "settings": study.CHAINS, "arms": ARMS}
  found = study.Study(args.out / "time_to_accuracy.json", about)
  done = True
  for make in (plan.tuning_cells, lambda: plan.final_cells(found, args.seeds)):
    done = done and found.run_missing(
      make(), lambda key: run(key, start, quick=args.quick), minutes=args.minutes, began=began)
  print(write(found, args.out, args.seeds, plan))
  print("finished" if done else "not finished: the same command goes on", file=sys.stderr)
  return found


if __name__ == "__main__":
  main()

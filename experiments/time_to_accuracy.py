"""How long each way of training takes to one held-out accuracy on the same devices: on-policy RLOO, on-policy PPO with
a critic, VinePPO, asynchronous online DPO, and TBA.

    python -m experiments.time_to_accuracy
    python -m experiments.time_to_accuracy --target=0.65 --seeds=1,2,3

The comparison of Bartoldson et al. 2025 (arXiv:2503.18929: 50 times as fast as VinePPO, 1.5 times as fast as
asynchronous DPO), in small. All start from the fine-tuned model of `study.py` and train on 3,840 responses. On-policy
methods take turns: all cores sample, then all cores train (on CPU one virtual device is all cores), and nothing is
older than the weights. The asynchronous ones have a trainer and a searcher, each on a virtual device of its own. Every
arm has the same grid of learning rates and batches and counts by the best of them: the one that is there first, or if
none is, that came nearest. VinePPO values the states behind every 4 tokens by 4 continuations (the paper: by 9, behind
newlines).

Seconds are from the first prompt sampled to the publish of the weights that have the accuracy, which copies are
evaluated for afterwards. All arms hold the same devices, so the ratio of seconds is that of device-seconds held; CPU
seconds are what was used of them, idle cores not counted, and the fairer figure where the machine does other work: how
much it did is written beside every run. Writes time_to_accuracy.json (the same command goes on where it was stopped),
.md and .png.
"""

from __future__ import annotations

import contextlib
import pathlib
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # so that it runs as a file, too

from experiments import study
from experiments.async_speedup import evaluate, machine_busy_secs, seconds_to

RATES, PROMPTS, RESPONSES, NUM_COPIES = (1e-4, 3e-5, 3e-4), (4, 16), 3840, 15
_SYNC = {"runtime.mode": "sync", "devices.searchers": 1, "devices.share": True}
_ASYNC = {"runtime.mode": "async", "devices.searchers": 1, "devices.share": False, "sync.every_steps": 1}
ARMS: dict[str, dict[str, Any]] = {
  "on-policy RLOO": {**_SYNC, "loss.name": "rloo"},
  "on-policy PPO": {**_SYNC, "loss.name": "ppo"},
  "VinePPO": {**_SYNC, "loss.name": "vineppo", "loss.vine_samples": 4, "loss.vine_step_tokens": 4},
  "async online DPO": {**_ASYNC, "loss.name": "dpo", "buffer.order": "fifo", "buffer.max_uses": 1,
                       "sync.max_lead_steps": 2},
  "TBA": {**_ASYNC, "loss.name": "tb_vargrad", "buffer.dedup": True, "sync.max_lead_steps": 4},
}


def cells(seeds: Sequence[int], responses: int, *, quick: bool = False) -> Iterator[study.Cell]:
  """Arm by arm within a setting, so that a study that is not finished compares what it has. `quick`: one setting."""
  for seed in seeds:
    for rate in RATES[:1] if quick else RATES:
      for prompts in PROMPTS[:1] if quick else PROMPTS:
        for arm in ARMS:
          yield {"arm": arm, "prompts": prompts, "rate": rate, "seed": seed, "responses": responses}


def changes_of(key: study.Cell) -> dict[str, Any]:
  """The settings of a cell."""
  rows = key["prompts"] * study.SMALL["sample.responses_per_prompt"]
  return {
    **ARMS[key["arm"]], "seed": key["seed"], "train.learning_rate": key["rate"],
    "train.steps": max(1, key["responses"] // rows), "train.prompts_per_step": key["prompts"],
    "train.micro_batches": key["prompts"], "sample.slots": rows, "buffer.fill_responses": rows,
  }


class Marks:
  """What is noted of a run while it goes on."""

  def __init__(self, steps: int):
    self._every = max(1, steps // NUM_COPIES)
    self.began: dict[str, float] | None = None
    self.at_step: dict[int, dict[str, float]] = {}
    self.copies: dict[int, Any] = {}
    self.run: Any = None

  @contextlib.contextmanager
  def watching(self) -> Iterator[None]:
    """Every publish within, and the first prompt that is sampled."""
    import jax

    from tba_jax.runtime.run import Run
    from tba_jax.searcher import Searcher

    publish, start = Run.publish, Searcher.start

    def noted_publish(run: Run, *, wait: bool) -> None:
      publish(run, wait=wait)
      self.run = run
      if run.step and run.step % self._every == 0:
        self.at_step[run.step] = _now()
        self.copies[run.step] = jax.device_get(run.trainer.state.params)

    def noted_start(searcher: Searcher, occurrence: Any) -> None:
      self.began = self.began or _now()
      start(searcher, occurrence)

    Run.publish, Searcher.start = noted_publish, noted_start
    try:
      yield
    finally:
      Run.publish, Searcher.start = publish, start

  def curve(self, before: float) -> list[list[float]]:
    """[step, seconds, accuracy, CPU seconds], from the starting model's accuracy on."""
    found = [[0, 0.0, before, 0.0]]
    for step, accuracy in evaluate(self.run, self.copies):
      since = {name: value - self.began[name] for name, value in self.at_step[step].items()}
      found.append([step, round(since["wall"], 3), accuracy, round(since["cpu"], 3)])
    return found

  def cores_of_others(self) -> float:
    """Busy with other processes, mean over the run."""
    last = self.at_step[max(self.at_step)]
    since = {name: value - self.began[name] for name, value in last.items()}
    return round((since["machine"] - since["cpu"]) / since["wall"], 2)


def _now() -> dict[str, float]:
  return {"wall": time.monotonic(), "cpu": time.process_time(), "machine": machine_busy_secs()}


def run(key: study.Cell, start: pathlib.Path, *, quick: bool) -> dict[str, Any]:
  """One run, and its accuracy over time."""
  began, changes = time.monotonic(), changes_of(key)
  marks = Marks(changes["train.steps"])
  with marks.watching():
    found = study.run_cell(changes, start, quick=quick)
  return {**found, "timed_curve": marks.curve(found["before"]), "cores_of_others": marks.cores_of_others(),
          "seconds": round(time.monotonic() - began, 2)}


def time_to(cell: study.Cell, target: float, *, cpu: bool = False) -> float | None:
  """Seconds, or CPU seconds, until a run had the accuracy; None if it never had."""
  return seconds_to([(point[0], point[3 if cpu else 1], point[2]) for point in cell["timed_curve"]], target)


def best(found: study.Study, arm: str, seed: int, responses: int, target: float, *, cpu: bool) -> study.Cell | None:
  """The arm's best setting on a seed, by seconds or CPU seconds to the target; if none has it, by accuracy."""
  runs = [cell for cell in found.cells
          if (cell["key"]["arm"], cell["key"]["seed"], cell["key"]["responses"]) == (arm, seed, responses)]
  reached = [cell for cell in runs if time_to(cell, target) is not None]
  if reached:
    return min(reached, key=lambda cell: time_to(cell, target, cpu=cpu))
  return max(runs, key=lambda cell: max(point[2] for point in cell["timed_curve"]), default=None)


def write(found: study.Study, args: Any, responses: int) -> str:
  """The table and the plot."""
  figure, axes = study.new_figure(2)
  lines, means = [], {}
  for number, arm in enumerate(ARMS):
    row: list[str] = [arm]
    for axis, cpu in zip(axes[0], (False, True)):
      chosen = [best(found, arm, seed, responses, args.target, cpu=cpu) for seed in args.seeds]
      chosen = [cell for cell in chosen if cell is not None]
      if not chosen:
        break
      for cell in chosen:
        axis.plot([point[3 if cpu else 1] for point in cell["timed_curve"]],
                  [100 * point[2] for point in cell["timed_curve"]], color=f"C{number}", marker="o", markersize=3,
                  label=arm if cell is chosen[0] else None)
      times = [time_to(cell, args.target, cpu=cpu) for cell in chosen]
      means[arm, cpu] = None if None in times else statistics.fmean(times)
      if not cpu:
        row += [" / ".join(f"{cell['key']['prompts']} prompts, {cell['key']['rate']:g}" for cell in chosen),
                study.mean_and_spread([max(point[2] for point in cell["timed_curve"]) for cell in chosen]),
                f"{statistics.fmean(cell['cores_of_others'] for cell in chosen):.1f}"]
    else:
      lines.append(row)
  for row in lines:
    for cpu in (False, True):
      mine, base = means[row[0], cpu], means.get(("TBA", cpu))
      row += ["not reached" if mine is None else f"{mine:.1f}", "" if None in (mine, base) else f"{mine / base:.2f}"]
  for axis, unit in zip(axes[0], ("seconds", "CPU seconds")):
    axis.axhline(100 * args.target, color="grey", linewidth=0.8)
    axis.set(xlabel=f"{unit} of training", ylabel="held-out accuracy, %")
    axis.grid(alpha=0.3)
  if lines:
    axes[0][0].legend(fontsize=8)
  figure.savefig(args.out / "time_to_accuracy.png", dpi=120)
  goal = f"to {100 * args.target:.0f}%"
  header = ["", "best setting", "best accuracy", "cores busy for others"]
  header += [f"s {goal}", "x TBA", f"CPU s {goal}", "x TBA"]
  text = study.table(header, lines)
  (args.out / "time_to_accuracy.md").write_text(text)
  return text


def main(argv: Sequence[str] | None = None) -> study.Study:
  parser = study.common_flags(__doc__, name="time_to_accuracy")
  parser.add_argument("--seeds", type=study.numbers, default=(1,))
  parser.add_argument("--target", type=float, default=0.6, help="accuracy to reach")
  args = parser.parse_args(argv)
  began = time.monotonic()
  study.set_up(num_devices=2)
  responses = 256 if args.quick else RESPONSES
  start = study.starting_model(quick=args.quick)
  about = {"what": "held-out accuracy against seconds and CPU seconds", "settings": study.SMALL, "arms": ARMS}
  found = study.Study(args.out / "time_to_accuracy.json", about)
  done = found.run_missing(
    cells(args.seeds, responses, quick=args.quick), lambda key: run(key, start, quick=args.quick), minutes=args.minutes,
    began=began)
  print(write(found, args, responses))
  print("finished" if done else "not finished: the same command goes on", file=sys.stderr)
  return found


if __name__ == "__main__":
  main()

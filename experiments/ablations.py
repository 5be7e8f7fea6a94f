"""What each setting of TBA does, one at a time, on the chains of `chains.py`: a table and a plot, as in section D of
the paper.

    python -m experiments.ablations
    python -m experiments.ablations --seeds=1,2,3 --only=m,k

Lockstep with TBA's own draw (a coin m per prompt, the rest from the whole buffer), `tb_vargrad`, from the one starting
model of `study.py`. Arms change one setting of the base, which is marked in the table.

Writes ablations.json, .md and .png.
"""

from __future__ import annotations

import pathlib
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # so that it runs as a file, too

from experiments import study

STEPS = 100
BASE = {
  "loss.name": "tb_vargrad", "loss.beta_init": 0.05, "loss.beta_final": 0.05, "train.steps": STEPS,
  "train.learning_rate": 3e-4, "runtime.lag": -1, "sync.every_steps": 4, "buffer.recent_fraction": 0.95,
  "buffer.dedup": False, "buffer.max_uses": 0, "buffer.priority": "uniform", "buffer.capacity": 20_000,
  "reference.reset_every_steps": 0, "sample.in_flight": False,
}


def _group_size(size: int) -> dict[str, int]:
  """K at the same 32 responses a step."""
  return {"train.responses_per_prompt": size, "sample.responses_per_prompt": size, "train.prompts_per_step": 32 // size}


# Setting -> value -> what it changes. The value that is the base's comes with no change.
ARMS: dict[str, dict[str, dict[str, Any]]] = {
  "m": {"0.0": {"buffer.recent_fraction": 0.0}, "0.5": {"buffer.recent_fraction": 0.5}, "0.95": {},
        "1.0": {"buffer.recent_fraction": 1.0}},
  "k": {"1": {"sync.every_steps": 1}, "4": {}, "10": {"sync.every_steps": 10}, "25": {"sync.every_steps": 25}},
  "K": {"2": _group_size(2), "4": _group_size(4), "8": {}, "16": _group_size(16)},
  "beta final": {"0.2": {"loss.beta_final": 0.2, "loss.beta_init": 0.2}, "0.05": {},
                 "0.01": {"loss.beta_final": 0.01, "loss.beta_decay_steps": 80},
                 "0.002": {"loss.beta_final": 0.002, "loss.beta_decay_steps": 80}},
  "priority": {"uniform": {}, "reward": {"buffer.priority": "reward", "buffer.recent_fraction": 0.5},
               "residual": {"buffer.priority": "residual", "buffer.recent_fraction": 0.5}},
  "dedup": {"no": {}, "yes": {"buffer.dedup": True}},
  "uses": {"1": {"buffer.max_uses": 1}, "4": {"buffer.max_uses": 4}, "no limit": {}},
  "searchers": {"1": {}, "2": {"devices.searchers": 2}, "4": {"devices.searchers": 4}},
  "reference reset": {"never": {}, "every 50": {"reference.reset_every_steps": 50},
                      "every 20": {"reference.reset_every_steps": 20}},
}


def cells(only: Sequence[str], seeds: Sequence[int], steps: int) -> Iterator[study.Cell]:
  """The base once a seed, and every arm that differs from it."""
  for seed in seeds:
    yield {"setting": "base", "value": "", "seed": seed, "steps": steps}
    for setting in only:
      for value, changes in ARMS[setting].items():
        if changes:
          yield {"setting": setting, "value": value, "seed": seed, "steps": steps}


def changes_of(key: study.Cell) -> dict[str, Any]:
  arm = {} if key["setting"] == "base" else ARMS[key["setting"]][key["value"]]
  return {**BASE, **arm, "seed": key["seed"], "train.steps": key["steps"]}


def outcomes(found: study.Study, setting: str, value: str, seeds: Sequence[int], steps: int) -> list[study.Cell]:
  """The finished runs of an arm, one a seed; of the base where the arm changes nothing."""
  if not ARMS[setting][value]:
    setting, value = "base", ""
  runs = [found.find(setting=setting, value=value, seed=seed, steps=steps) for seed in seeds]
  return [run for run in runs if run is not None]


def write(found: study.Study, args: Any, steps: int) -> str:
  """The table and the plot."""
  rows, shown = [], {}
  for setting in args.only:
    for value, changes in ARMS[setting].items():
      runs = outcomes(found, setting, value, args.seeds, steps)
      if runs:
        mean = lambda name: statistics.fmean(run["last"].get(name, float("nan")) for run in runs)
        rows.append([setting, value + ("" if changes else " (base)"),
                     study.mean_and_spread([run["after"] for run in runs]), f"{mean('staleness_mean'):.1f}",
                     f"{mean('kl_fresh'):.2f}", f"{mean('ess_share'):.2f}", f"{mean('entropy'):.2f}"])
        shown.setdefault(setting, []).append((value, [100 * run["after"] for run in runs]))
  seeds = ", ".join(map(str, args.seeds))
  text = f"Held-out accuracy in percent after {steps} steps, seeds {seeds}; one setting at a time.\n\n"
  header = ["setting", "value", "accuracy", "staleness", "KL to the reference, nats", "ESS share", "entropy"]
  text += study.table(header, rows)
  (args.out / "ablations.md").write_text(text)
  columns = min(5, max(1, len(shown)))
  figure, axes = study.new_figure(columns, rows=-(-max(1, len(shown)) // columns), height=2.9, width=2.6)
  for axis in axes.flat[len(shown):]:
    axis.set_visible(False)
  for axis, (setting, points) in zip(axes.flat, shown.items()):
    for place, (_, values) in enumerate(points):
      axis.plot([place] * len(values), values, "o", color="#4878a8", alpha=0.5)
    axis.plot(range(len(points)), [statistics.fmean(values) for _, values in points], color="#4878a8")
    axis.set_xticks(range(len(points)), [value for value, _ in points], rotation=30)
    axis.set(title=setting, ylim=(0, 100))
    axis.grid(alpha=0.3)
  for row in axes:
    row[0].set_ylabel("held-out accuracy, %")
  figure.savefig(args.out / "ablations.png", dpi=110)
  return text


def main(argv: Sequence[str] | None = None) -> study.Study:
  parser = study.common_flags(__doc__, name="ablations")
  parser.add_argument("--seeds", type=study.numbers, default=(1,))
  parser.add_argument("--only", type=study.names, default=tuple(ARMS), help=f"settings: {', '.join(ARMS)}")
  args = parser.parse_args(argv)
  unknown = [name for name in args.only if name not in ARMS]
  if unknown:
    raise SystemExit(f"--only={','.join(unknown)} is not among {', '.join(ARMS)}; choose of these")
  began = time.monotonic()
  study.set_up()
  steps = 3 if args.quick else STEPS
  start = study.starting_model(quick=args.quick)
  about = {"what": "accuracy by setting of TBA", "starting_model": study.checksum(start),
           "base": {**study.CHAINS, **BASE}}
  found = study.Study(args.out / "ablations.json", about)
  run = lambda key: study.run_cell(changes_of(key), start, quick=args.quick)
  done = found.run_missing(cells(args.only, args.seeds, steps), run, minutes=args.minutes, began=began)
  print(write(found, args, steps))
  print("finished" if done else "not finished: the same command goes on", file=sys.stderr)
  return found


if __name__ == "__main__":
  main()

"""What staleness does to each objective: held-out accuracy against an exact lag, from one starting model.

    python -m experiments.off_policy
    python -m experiments.off_policy --losses=tb_vargrad,rloo --lags=0,16 --seeds=1,2 --minutes=30

Lockstep on the chains of `chains.py`, by the loop of `bare.py`. Whole groups are sampled, each used once, oldest first,
nothing deduplicated: after `lag` updates to fill the queue every trained row is exactly `lag` updates old, and
`--updates` more follow (at lag 64 there are thus 64 updates more, on samples of the starting model). All objectives
have the same KL strength (where they have a KL term at all: dr_grpo and cispo have none, and dpo's beta is the inverse
temperature of its preference model), the same clipping of the gradient and, where they clip ratios, the range of their
papers.

The learning rate comes from one grid of 3 on a tuning seed that is not among the seeds shown. It is chosen twice: at
lag 0 ("rate of lag 0": what happens to a working setup as it is made asynchronous), and at each lag ("rate of its lag":
the best that the objective can do there on this grid).

Writes off_policy.json (every run; the same command goes on where it was stopped), off_policy.md and off_policy.png.
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

LOSSES = ("tb_vargrad", "tba_prime", "reinforce", "rloo", "ppo_clip", "dr_grpo", "cispo", "dpo")
LAGS, SEEDS, TUNING_SEED = (0, 4, 16, 64), (1, 2, 3), 0
RATES = (1e-4, 3e-4, 1e-3)
UPDATES = 200
BETA = 0.05
CHOICES = ("rate of lag 0", "rate of its lag")


def changes_of(key: study.Cell) -> dict[str, Any]:
  """The settings of a cell."""
  lag, groups, samples = key["lag"], study.CHAINS["train.prompts_per_step"], study.CHAINS["sample.responses_per_prompt"]
  return {
    "loss.name": key["loss"], "loss.beta_init": BETA, "loss.beta_final": BETA, "seed": key["seed"],
    "train.learning_rate": key["rate"], "train.steps": key["updates"] + lag, "runtime.lag": lag,
    "buffer.order": "fifo", "buffer.max_uses": 1, "buffer.capacity": max(1024, (lag + 1) * groups * samples),
  }


def cell(loss: str, lag: int, seed: int, rate: float, updates: int) -> study.Cell:
  return {"loss": loss, "lag": lag, "seed": seed, "rate": rate, "updates": updates}


def tuning_cells(losses: Sequence[str], lags: Sequence[int], updates: int) -> Iterator[study.Cell]:
  """The runs that learning rates are chosen from."""
  for lag in lags:
    for loss in losses:
      for rate in RATES:
        yield cell(loss, lag, TUNING_SEED, rate, updates)


def best_rate(found: study.Study, loss: str, lag: int, updates: int) -> float | None:
  """Of the tuning runs of an objective at a lag, the rate that ended highest (the lower of equals); None if one is
  missing."""
  after = [found.after(**cell(loss, lag, TUNING_SEED, rate, updates)) for rate in RATES]
  return None if None in after else RATES[after.index(max(after))]


def chosen_rate(found: study.Study, loss: str, lag: int, updates: int, choice: str) -> float | None:
  """`best_rate` by one of the choices."""
  return best_rate(found, loss, 0 if choice == CHOICES[0] else lag, updates)


def final_cells(
  found: study.Study, losses: Sequence[str], lags: Sequence[int], seeds: Sequence[int], updates: int, choice: str
) -> Iterator[study.Cell]:
  """The runs that are shown, with rates by one of the choices."""
  for seed in seeds:
    for lag in lags:
      for loss in losses:
        yield cell(loss, lag, seed, chosen_rate(found, loss, lag, updates, choice), updates)


def outcomes(
  found: study.Study, loss: str, lag: int, seeds: Sequence[int], updates: int, choice: str
) -> list[study.Cell]:
  """The finished runs of an objective at a lag, one a seed."""
  rate = chosen_rate(found, loss, lag, updates, choice)
  cells = [] if rate is None else [found.find(**cell(loss, lag, seed, rate, updates)) for seed in seeds]
  return [one for one in cells if one is not None]


def write_table(found: study.Study, path: pathlib.Path, losses: Sequence[str], lags: Sequence[int],
                seeds: Sequence[int], updates: int) -> str:
  """Accuracy in percent by objective and lag for both choices of the rate, CPU time, how far off-policy rows were."""
  text = [f"Held-out accuracy in percent (one sample a problem) after {updates} updates at the lag, seeds "
          f"{', '.join(map(str, seeds))}: mean ± half the range.\n"]
  before = [one["before"] for one in found.cells]
  if before:
    text.append(f"The starting model has {100 * statistics.fmean(before):.1f}. Runs in all: {len(before)}.\n")
  for choice in CHOICES:
    rows = []
    for loss in losses:
      runs = {lag: outcomes(found, loss, lag, seeds, updates, choice) for lag in lags}
      if any(runs.values()):
        rates = [chosen_rate(found, loss, lag, updates, choice) for lag in lags]
        cost = update_cost(found, loss, lags, seeds, updates)
        rows.append([f"`{loss}`", *(study.mean_and_spread([one["after"] for one in runs[lag]]) for lag in lags),
                     " / ".join("?" if rate is None else f"{rate:g}" for rate in rates),
                     "" if cost is None else f"{cost:.1f}", sum(map(len, runs.values()))])
    if rows:
      text.append(study.table([choice, *(f"lag {lag}" for lag in lags), "rates", "CPU ms an update", "runs"], rows))
  rows = []
  for loss in losses:
    for rate in RATES:
      tuned = [found.after(**cell(loss, lag, TUNING_SEED, rate, updates)) for lag in lags]
      if any(tuned):
        rows.append([f"`{loss}`", f"{rate:g}", *("" if one is None else f"{100 * one:.1f}" for one in tuned)])
  if rows:
    text.append(f"The runs that rates were chosen from, seed {TUNING_SEED}: one seed, each rate at each lag.\n")
    text.append(study.table(["objective", "rate", *(f"lag {lag}" for lag in lags)], rows))
  rows = []
  for loss in losses:
    runs = {lag: outcomes(found, loss, lag, seeds, updates, CHOICES[0]) for lag in lags}
    mean = lambda name: [_mean_of(runs[lag], name) for lag in lags]
    if any(runs.values()):
      rows.append([f"`{loss}`", *(" / ".join(mean(name)) for name in ("ess_share", "clip_share", "kl_fresh"))])
  if rows:
    where = f"lag {' / '.join(map(str, lags))}"
    text.append(f"At the rate of lag 0, by lag ({where}): effective sample size of the ratios and share of clipped "
                f"tokens in the last {study.LAST_STEPS} updates, and KL of the final policy to the reference, nats.\n")
    text.append(study.table(["objective", "ESS share", "clipped", "KL"], rows))
  path.write_text("\n".join(text))
  return "\n".join(text)


def _mean_of(runs: Sequence[study.Cell], name: str) -> str:
  values = [run["last"][name] for run in runs if name in run["last"]]
  return f"{statistics.fmean(values):.2f}" if values else "-"


def update_cost(found: study.Study, loss: str, lags: Sequence[int], seeds: Sequence[int], updates: int) -> float | None:
  """CPU milliseconds of an update with its sampling and its share of the evaluations; the median run, for the first of
  an objective compiles."""
  each = [1000 * one["train_seconds"] / (updates + lag)
          for lag in lags for choice in CHOICES for one in outcomes(found, loss, lag, seeds, updates, choice)]
  return statistics.median(each) if each else None


def plot(found: study.Study, path: pathlib.Path, losses: Sequence[str], lags: Sequence[int], seeds: Sequence[int],
         updates: int) -> None:
  """Accuracy against lag, a panel for each choice of the rate; CPU time of an update."""
  figure, axes = study.new_figure(3, height=4.4)
  colors = [f"C{number}" for number in range(len(losses))]
  for axis, choice in zip(axes[0], CHOICES):
    for number, loss in enumerate(losses):
      points = [(place, [100 * one["after"] for one in outcomes(found, loss, lag, seeds, updates, choice)])
                for place, lag in enumerate(lags)]
      points = [(place, values) for place, values in points if values]
      if points:
        places = [place + 0.06 * (number - (len(losses) - 1) / 2) for place, _ in points]
        means = [statistics.fmean(values) for _, values in points]
        reach = [[mean - min(v) for mean, (_, v) in zip(means, points)],
                 [max(v) - mean for mean, (_, v) in zip(means, points)]]
        ours = loss.startswith("tb")
        axis.errorbar(places, means, yerr=reach, label=loss, marker="o", markersize=4, capsize=2, color=colors[number],
                      linewidth=2.2 if ours else 1.2, linestyle="-" if ours else "--")
    axis.set_xticks(range(len(lags)), [str(lag) for lag in lags])
    axis.set(title=f"learning rate: {choice}", xlabel="lag, updates (bars: all seeds)", ylabel="held-out accuracy, %")
    axis.grid(alpha=0.3)
  axes[0][1].sharey(axes[0][0])
  if axes[0][0].get_legend_handles_labels()[0]:
    axes[0][0].legend(fontsize=8)
  costs = [update_cost(found, loss, lags, seeds, updates) or 0.0 for loss in losses]
  axes[0][2].barh(range(len(losses)), costs, color=colors)
  axes[0][2].set_yticks(range(len(losses)), losses)
  axes[0][2].invert_yaxis()
  axes[0][2].set(title="time", xlabel="CPU ms an update, sampling included")
  figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> study.Study:
  parser = study.common_flags(__doc__, name="off_policy")
  parser.add_argument("--losses", type=study.names, default=LOSSES)
  parser.add_argument("--lags", type=study.numbers, default=LAGS)
  parser.add_argument("--seeds", type=study.numbers, default=SEEDS, help="of the runs shown; not the tuning seed")
  parser.add_argument("--updates", type=int, default=UPDATES, help="after the lag has filled")
  args = parser.parse_args(argv)
  if TUNING_SEED in args.seeds:
    raise SystemExit(f"--seeds={args.seeds} must not hold the tuning seed {TUNING_SEED}; choose others")
  began = time.monotonic()
  study.set_up()
  updates = 3 if args.quick else args.updates
  start = study.starting_model(quick=args.quick)
  about = {"what": "held-out accuracy by objective, lag, seed and learning rate",
           "starting_model": study.checksum(start), "beta": BETA, "rates": RATES, "tuning_seed": TUNING_SEED,
           "settings": study.CHAINS}
  found = study.Study(args.out / "off_policy.json", about)
  run = lambda key: study.run_bare_cell(changes_of(key), start, quick=args.quick)
  done = True
  for choice, tuned_lags in zip(CHOICES, ((0,), args.lags)):
    for make in (lambda: tuning_cells(args.losses, tuned_lags, updates),
                 lambda: final_cells(found, args.losses, args.lags, args.seeds, updates, choice)):
      done = done and found.run_missing(make(), run, minutes=args.minutes, began=began)
  shown = (args.losses, args.lags, args.seeds, updates)
  print(write_table(found, args.out / "off_policy.md", *shown))
  plot(found, args.out / "off_policy.png", *shown)
  print("finished" if done else "not finished: the same command goes on", file=sys.stderr)
  return found


if __name__ == "__main__":
  main()

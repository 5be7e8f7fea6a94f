"""Win rate against KL over the checkpoints of runs: how much preference each bought, and for what distance.

    python experiments/tldr_frontier.py --workdir=runs/tldr --workdir=runs/other --out=frontier

Each checkpoint that a run keeps (raise checkpoint.keep for more than the last few) is evaluated as by
`tba_jax.evaluate`: greedy summaries judged by the gold model, `--samples` of each prompt for the KL divergence to the
run's version 0 at the run's temperature, the greedy summaries' perplexity under version 0 and their length. OUT gets
frontier.json, the screen a table, and frontier.png win rate over KL and over perplexity with 95% intervals, a line a
run. The same command again goes on where it was stopped. It works for any task whose evaluation is greedy.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # so that it runs as a file, too

from tba_jax import evaluate  # noqa: E402


def checkpoints(workdir: pathlib.Path) -> list[int]:
  """The steps that a run keeps, ascending. Raises: ValueError where there is none."""
  steps = sorted(int(path.name) for path in (workdir / "checkpoints").glob("*") if path.name.isdigit())
  if not steps:
    raise ValueError(f"--workdir={workdir} holds no checkpoint; give the workdir of a run.")
  return steps


def folder_names(workdirs: Sequence[pathlib.Path]) -> list[str]:
  """A folder in OUT for each run: the workdir's last part, or the whole path where several end alike."""
  names = [workdir.name for workdir in workdirs]
  whole = ["_".join(part for part in workdir.parts if part != workdir.anchor) for workdir in workdirs]
  return [name if name and names.count(name) == 1 else path for name, path in zip(names, whole)]


def points_of(workdir: pathlib.Path, folder: pathlib.Path, options: Sequence[str]) -> list[dict[str, Any]]:
  """A point for each checkpoint of a run, evaluated in FOLDER/STEP; `options` are those of `tba_jax.evaluate`.

  Raises: ValueError for bad input, and for a run whose evaluations sample.
  """
  found = []
  for step in checkpoints(workdir):
    args = evaluate.make_parser().parse_args(
      [f"--workdir={workdir}", f"--step={step}", f"--out={folder / str(step)}", *options])
    summary = evaluate.run(args)
    if "greedy" not in summary:
      raise ValueError(f"--workdir={workdir} is of task {summary['task']!r}, whose evaluations sample; give a run of a "
                       "task that is evaluated greedily, as tldr.")
    found.append({
      "step": step, "win_rate": summary["greedy"], "kl": summary["kl"], "tokens": summary["greedy_tokens"],
      "reference_perplexity": summary["reference_perplexity"],
    })
  return found


def plot(frontier: dict[str, list[dict[str, Any]]], path: pathlib.Path) -> None:
  """Win rate over KL and over perplexity, a line a run, points labelled with their steps."""
  import matplotlib

  matplotlib.use("agg")
  import matplotlib.pyplot as plt

  figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True, constrained_layout=True)
  for name, points in frontier.items():
    rates = [point["win_rate"]["mean"] for point in points]
    below_above = lambda key: [
      [abs(point[key]["mean"] - end) for point, end in zip(points, ends)]
      for ends in zip(*(point[key]["interval"] for point in points))]
    kls, perplexities = [p["kl"]["mean"] for p in points], [p["reference_perplexity"] for p in points]
    style = dict(yerr=below_above("win_rate"), marker="o", capsize=2, label=name)
    axes[0].errorbar(kls, rates, xerr=below_above("kl"), **style)
    axes[1].errorbar(perplexities, rates, **style)
    for ax, xs in zip(axes, (kls, perplexities)):
      for x, rate, point in zip(xs, rates, points):
        ax.annotate(str(point["step"]), (x, rate), xytext=(4, 4), textcoords="offset points", fontsize=8)
  axes[0].set(xlabel="KL to version 0 (nats a response)", ylabel="win rate")
  axes[1].set(xlabel="perplexity under version 0")
  for ax in axes:
    ax.grid(alpha=0.3)
    ax.margins(x=0.1)  # room for the labels
  axes[0].legend()
  figure.savefig(path, dpi=110)
  plt.close(figure)


def main(argv: Sequence[str] | None = None) -> dict[str, list[dict[str, Any]]]:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--workdir", type=pathlib.Path, action="append", required=True, help="of a run; may be repeated")
  parser.add_argument("--out", type=pathlib.Path, required=True, help="folder to write")
  parser.add_argument("--samples", type=int, default=4, help="of each prompt, for the KL divergence")
  parser.add_argument("--size", type=int, help="prompts at most; default: as in the run")
  args = parser.parse_args(argv)
  if args.samples < 1:
    parser.error(f"--samples={args.samples} must be at least 1: the KL divergence is taken of them")
  if args.out.exists() and not args.out.is_dir():
    parser.error(f"--out={args.out} is a file; give a folder")
  options = [f"--samples={args.samples}"] + ([] if args.size is None else [f"--size={args.size}"])
  try:
    frontier = {str(workdir): points_of(workdir, args.out / name, options)
                for workdir, name in zip(args.workdir, folder_names(args.workdir))}
  except (ValueError, OSError) as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
  args.out.mkdir(parents=True, exist_ok=True)
  (args.out / "frontier.json").write_text(json.dumps(frontier, indent=2) + "\n")
  for name, points in frontier.items():
    print(f"\n{name}\n{'step':>8}  {'win rate':>22}  {'KL (nats)':>22}  {'perplexity':>10}  {'tokens':>7}")
    for point in points:
      rate, kl = point["win_rate"], point["kl"]
      print(f"{point['step']:>8}  {rate['mean']:>6.1%} {rate['interval'][0]:>6.1%} to {rate['interval'][1]:<6.1%}"
            f"  {kl['mean']:>6.2f} {kl['interval'][0]:>6.2f} to {kl['interval'][1]:<6.2f}"
            f"  {point['reference_perplexity']:>10.3f}  {point['tokens']:>7.1f}")
  if importlib.util.find_spec("matplotlib") is None:
    print("no plot: matplotlib is not installed", flush=True)
  else:
    plot(frontier, args.out / "frontier.png")
  return frontier


if __name__ == "__main__":
  main()

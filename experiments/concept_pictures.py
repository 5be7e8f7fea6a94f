"""Draws the pictures of docs/concepts.md: python experiments/concept_pictures.py

They show a schedule and a draw that are made up, with the same charts as a run's report.
"""

from __future__ import annotations

import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # so that it runs as a file, too

from tba_jax.report import svg  # noqa: E402

FOLDER = pathlib.Path("docs/images")
_STEP, _DECODE, _PUBLISH = 1.0, 1.6, 0.12  # seconds of a made-up run


def turns() -> str:
  """On-policy: decode, step, publish, decode, ...: somebody always waits."""
  boxes = {"step": [], "decode": [], "publish": []}
  at = 0.0
  for _ in range(3):
    boxes["decode"] += [(1, at, at + _DECODE, 0.0, 1.0), (2, at, at + 0.75 * _DECODE, 0.0, 1.0)]
    at += _DECODE
    boxes["step"].append((0, at, at + _STEP, 0.0, 1.0))
    at += _STEP
    boxes["publish"].append((0, at, at + _PUBLISH, 0.0, 1.0))
    at += _PUBLISH
  return _lanes(boxes, "On-policy: they take turns")


def asynchronous() -> str:
  """TBA: searchers decode on and on, the trainer steps on and on."""
  boxes = {"step": [], "decode": [], "publish": []}
  for lane, long in ((1, _DECODE), (2, 0.75 * _DECODE)):
    starts = np.arange(0.0, 8.0, long)
    boxes["decode"] += [(lane, start, min(start + long - 0.04, 8.15), 0.0, 1.0) for start in starts]
  at = _DECODE  # the buffer fills once
  while at + _STEP < 8.1:
    boxes["step"].append((0, at, at + _STEP, 0.0, 1.0))
    boxes["publish"].append((0, at + _STEP, at + _STEP + 0.06, 0.0, 1.0))
    at += _STEP + 0.06
  return _lanes(boxes, "TBA: nobody waits; weights arrive while the searchers decode")


def _lanes(boxes: dict, title: str) -> str:
  return svg.lanes(
    ("trainer", "searcher0", "searcher1"), boxes, colors={"step": "f1", "decode": "f0", "publish": "f3"}, title=title,
    x_axis=svg.Axis("seconds (made up). Orange: optimizer step. Blue: decode. Purple: publish weights."),
    x_range=(0.0, 8.16), width=820)


def ages() -> str:
  """How old the rows of a batch are, with m = 0.95: most are of the last versions, a few as old as the run."""
  steps, rng = 60, np.random.default_rng(0)
  edges = (0, 1, 2, 3, 4, 8, 16, 32, 64)
  table = np.zeros((steps, len(edges)))
  for step in range(steps):
    recent = rng.choice((1, 2, 3), size=133, p=(0.2, 0.6, 0.2))
    anywhere = rng.integers(1, step + 2, size=7)
    for age in np.minimum(np.concatenate([recent, anywhere]), step):
      table[step, np.searchsorted(edges, age, side="right") - 1] += 1 / 140
  names = ("0", "1", "2", "3", "4–7", "8–15", "16–31", "32–63", "64–")
  return svg.heat_map(
    table, x_edges=np.arange(steps + 1.0), rows=names, title="Age of the rows of a batch (made up, m = 0.95)",
    x_axis=svg.Axis("optimizer steps"), y_label="updates", width=820, height=230)


def main() -> None:
  """Writes the pictures."""
  FOLDER.mkdir(parents=True, exist_ok=True)
  for picture in (turns, asynchronous, ages):
    (FOLDER / f"{picture.__name__}.svg").write_text(svg.standalone(picture()), encoding="utf-8")


if __name__ == "__main__":
  main()

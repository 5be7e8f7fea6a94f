"""From the lines of several runs to curves: runs that differ by seed alone become one mean with a band."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from tba_jax.report.run_files import RunFiles
from tba_jax.report.svg import Line

# What a curve can be drawn over, and the column that says where.
AXES = {"steps": "step", "time": "wall_seconds", "tokens": "trained_tokens"}
# Keys whose value differs between runs of one experiment without making them different experiments.
_NOT_SETTINGS = ("seed",)


@dataclasses.dataclass(frozen=True)
class Group:
  """Runs of one config, up to the seed."""

  name: str
  color: int
  runs: tuple[RunFiles, ...]


def group_runs(runs: Sequence[RunFiles]) -> list[Group]:
  """Runs by config, in the order of their first; a group is named after the settings in which it differs from others.

  Groups that differ in no setting that all have, and single runs, go by the folder's name.
  """
  by_config: dict[tuple, list[RunFiles]] = {}
  for run in runs:
    settings = tuple(sorted((key, repr(value)) for key, value in run.config.items() if key not in _NOT_SETTINGS))
    by_config.setdefault(settings, []).append(run)
  members = list(by_config.values())
  differing = [key for key in differences([group[0] for group in members]) if key not in _NOT_SETTINGS]
  groups = []
  for color, group in enumerate(members):
    own = ", ".join(f"{key}={group[0].config.get(key, '-')}" for key in differing[:3])
    name = own if own and len(own) <= 60 else group[0].name
    name += f" ({len(group)} seeds)" if len(group) > 1 else ""
    groups.append(Group(name, color, tuple(group)))
  names = [group.name for group in groups]
  return [dataclasses.replace(group, name=f"{group.name} ({group.runs[0].name})")
          if names.count(group.name) > 1 else group for group in groups]


def differences(runs: Sequence[RunFiles]) -> list[str]:
  """Keys of the config that do not hold the same in all runs, sorted."""
  keys = sorted({key for run in runs for key in run.config})
  return [key for key in keys if len({repr(run.config.get(key)) for run in runs}) > 1]


def thinned(x: np.ndarray, y: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
  """At most `most` points: mean of x and y, least and greatest y of neighbours. NaN values are left out of a mean."""
  known = np.isfinite(y) & np.isfinite(x)
  x, y = x[known], y[known]
  if len(x) <= most:
    return x, y, y, y
  edges = np.linspace(0, len(x), most + 1).astype(int)[:-1]
  counts = np.diff(np.append(edges, len(x)))
  mean = lambda values: np.add.reduceat(values, edges) / counts
  return mean(x), mean(y), np.minimum.reduceat(y, edges), np.maximum.reduceat(y, edges)


def curve(
  group: Group, values: Sequence[tuple[np.ndarray, np.ndarray]], *, most: int, dots: bool = False
) -> Line | None:
  """The line of a group: of one run with the spread of what was thinned out, of several the mean over seeds.

  Args:
    values: (x [N], y [N]) of each run of the group, x ascending.
    most: points.
  Returns: None where no run has a value. A band of several seeds reaches from the least to the greatest of those runs
    that are there at x; the mean is of the same.
  """
  parts = [thinned(x, y, most) for x, y in values]
  parts = [part for part in parts if len(part[0])]
  if not parts:
    return None
  if len(parts) == 1:
    x, y, low, high = parts[0]
    has_band = (high > low).any()
    return Line(group.name, group.color, x, y, low if has_band else None, high if has_band else None, dots)
  if dots and len({part[0].tobytes() for part in parts}) == 1:
    grid = parts[0][0]  # evaluations at the same steps are not interpolated
  else:
    grid = np.linspace(min(p[0][0] for p in parts), max(p[0][-1] for p in parts), most)
  rows = np.array([np.interp(grid, x, y, left=np.nan, right=np.nan) for x, y, _, _ in parts])
  there = np.isfinite(rows)
  grid, rows, there = grid[there.any(0)], rows[:, there.any(0)], there[:, there.any(0)]
  mean = np.where(there, rows, 0.0).sum(0) / there.sum(0)
  low, high = np.where(there, rows, np.inf).min(0), np.where(there, rows, -np.inf).max(0)
  return Line(group.name, group.color, grid, mean, low, high, dots and len(grid) < 100)


def time_unit(runs: Sequence[RunFiles]) -> tuple[str, float]:
  """(name, seconds) of the unit in which the longest run is read well."""
  longest = max((run.train["wall_seconds"][-1] for run in runs if len(run.train.get("wall_seconds", ()))), default=0.0)
  return next((name, secs) for name, secs, least in (("hours", 3600.0, 3 * 3600), ("minutes", 60.0, 180), ("s", 1.0, 0))
              if longest >= least)


def per_second(columns: Mapping[str, np.ndarray], key: str) -> np.ndarray:
  """Growth of a running total a second of the run's clock: share of the time, for a total in seconds."""
  if key not in columns or len(columns[key]) < 2:
    return np.full(len(columns.get("step", ())), np.nan)
  secs = np.diff(columns["wall_seconds"], prepend=np.nan)
  return np.where(secs > 0, np.diff(columns[key], prepend=np.nan) / np.where(secs > 0, secs, 1.0), np.nan)

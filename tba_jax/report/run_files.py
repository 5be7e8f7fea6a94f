"""Reads what a run left in its workdir, also while it goes on and also when the files are larger than one wants to
read.

metrics.jsonl is read whole. The timeline of a long run is read in windows spread over it, rollouts at places spread
over them. A torn last line is left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import pathlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np

from tba_jax import metrics
from tba_jax.alarms import WARNINGS_FILE
from tba_jax.config_schema import flatten
from tba_jax.limits import MACHINE_FILE, Limits
from tba_jax.meters import TIMELINE_FILE, union
from tba_jax.report import speed

CONFIG_FILE = "config.json"
_WHOLE_BYTES = 32 * 2**20  # of a timeline that is read whole
_WINDOW_BYTES = 256 * 2**10  # of a longer one, each
_NUM_WINDOWS = 96
_BREAK_SECS = 20.0  # without a span: the run was stopped


@dataclasses.dataclass(frozen=True)
class Activity:
  """Who did what when. `covered` [M, 2] is the time that was read, disjoint and ascending; all times in seconds since
  1970."""

  actors: tuple[str, ...]
  kinds: tuple[str, ...]
  actor: np.ndarray  # int [N], of each span
  kind: np.ndarray  # int [N]
  start: np.ndarray  # float64 [N]
  end: np.ndarray  # float64 [N]
  covered: np.ndarray
  is_whole: bool


@dataclasses.dataclass(frozen=True)
class RunFiles:
  """One run. `train` and `evals` hold {key: float64 [steps]}, NaN where a line lacks the key; both are sorted by step
  and hold "step", "wall_seconds" (of the run, without pauses) and "trained_tokens"."""

  folder: pathlib.Path
  config: dict[str, Any]  # flat
  results: dict[str, Any] | None  # None: not finished
  train: dict[str, np.ndarray]
  evals: dict[str, np.ndarray]
  staleness: list[dict[int, int]]  # of each line of `train`: responses by staleness; {} where it is not told
  activity: Activity | None
  rollouts: list[dict[str, Any]]
  warnings: list[str]
  limits: Limits | None  # of the machine; None where the run does not tell

  @property
  def name(self) -> str:
    return self.folder.name or str(self.folder)

  @property
  def seed(self) -> Any:
    return self.config.get("seed")


def read_run(folder: pathlib.Path, *, num_rollouts: int, rollout_bytes: int) -> RunFiles:
  """Everything of a run that a page shows.

  Args:
    num_rollouts, rollout_bytes: how many sampled rollouts are taken at most, and how large they may be together.
  Raises: ValueError if the folder holds no run, or a file of it is damaged beyond its last line.
  """
  if not (folder / CONFIG_FILE).is_file():
    raise ValueError(f"{folder} holds no run (there is no {CONFIG_FILE} in it); give the --workdir of one")

  def read(name: str, how: Callable[[pathlib.Path], Any], without: Any = None) -> Any:
    path = folder / name
    with _naming(path):
      return how(path) if path.is_file() else without

  config = read(CONFIG_FILE, lambda path: flatten(_read_object(path)))
  results, limits = read(metrics.RESULTS_FILE, _read_object), read(MACHINE_FILE, _read_limits)
  train, evals, staleness = read(metrics.METRICS_FILE, _read_metrics, ({}, {}, []))
  train |= speed.shares(train, limits)
  activity = read(TIMELINE_FILE, _read_activity)
  rollouts = _read_rollouts(folder / "rollouts", num=num_rollouts, most_bytes=rollout_bytes)
  warnings = read(WARNINGS_FILE, lambda path: [line["text"] for line in metrics.read_jsonl(path)], [])
  return RunFiles(folder, config, results, train, evals, staleness, activity, rollouts, warnings, limits)


@contextlib.contextmanager
def _naming(path: pathlib.Path) -> Iterator[None]:
  """What a damaged file makes of its reader becomes a ValueError that names it."""
  try:
    yield
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    if str(path) in str(error):
      raise
    raise ValueError(f"{path} is damaged, or of another version ({type(error).__name__}: {error}); mend it, or take it "
                     "out of the folder") from error


def _read_object(path: pathlib.Path) -> dict[str, Any]:
  found = json.loads(path.read_text(encoding="utf-8"))
  if not isinstance(found, dict):
    raise ValueError("it is not a JSON object")
  return found


def _read_limits(path: pathlib.Path) -> Limits:
  found = Limits(**_read_object(path))
  for field in dataclasses.fields(Limits):
    value = getattr(found, field.name)
    if "float" in field.type and not isinstance(value, (int, float)) and not (value is None and "None" in field.type):
      raise ValueError(f"{field.name}={value!r} is not a number")
  return found


# --- metrics.jsonl ---


def number(value: Any) -> float:
  """A number as a run's files hold it, where one that is not finite is a string; NaN for anything else."""
  if isinstance(value, (int, float)):
    return float(value)
  return {"Infinity": math.inf, "-Infinity": -math.inf}.get(value, math.nan)


def _columns(lines: list[dict[str, float]]) -> dict[str, np.ndarray]:
  lines.sort(key=lambda line: line["step"])
  keys = sorted({key for line in lines for key in line})
  return {key: np.array([line.get(key, math.nan) for line in lines], np.float64) for key in keys}


def _read_metrics(path: pathlib.Path) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], list[dict[int, int]]]:
  train, evals, staleness = [], [], {}
  for record in metrics.read_jsonl(path):
    counts = record.pop("staleness_counts", None)
    line = {key: number(value) for key, value in record.items()}
    if "eval_accuracy" in line:
      evals.append(line)
    else:
      train.append(line)
      staleness[line["step"]] = {int(age): int(count) for age, count in (counts or {}).items()}
  train_columns, eval_columns = _columns(train), _columns(evals)
  missing = {"wall_seconds", "wall_time", "trained_tokens"} - set(train_columns)
  if train and missing:
    raise ValueError(f"no line of a step has {', '.join(sorted(missing))}")
  if evals:
    eval_columns |= _clocks_of_evals(train_columns, eval_columns)
  return train_columns, eval_columns, [staleness[step] for step in train_columns.get("step", ())]


def _clocks_of_evals(train: Mapping[str, np.ndarray], evals: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """When in the run, and after how many trained tokens, each evaluation's weights were reached.

  Lines of evaluations have a wall clock only. Up to the first step the run's own clock is that one, shifted.
  """
  if not len(train.get("step", ())):
    nothing = np.zeros_like(evals["step"])
    return {"wall_seconds": evals["wall_time"] - evals["wall_time"][0], "trained_tokens": nothing}
  steps, walls = train["step"], train["wall_seconds"]
  # To the weights' step belongs the time of that step; step 0 was over when its evaluation was.
  began = np.maximum(walls[0] - (train["wall_time"][0] - evals["wall_time"]), 0.0)
  return {
    "wall_seconds": np.where(evals["step"] < steps[0], np.minimum(began, walls[0]),
                             np.interp(evals["step"], steps, walls)),
    "trained_tokens": np.interp(evals["step"], np.concatenate([[0.0], steps]),
                                np.concatenate([[0.0], train["trained_tokens"]])),
  }


# --- timeline.jsonl ---


def _windows(file: BinaryIO, size: int) -> Iterator[list[bytes]]:
  """Whole lines: of the whole file, or of windows spread over it, the first and the last bytes among them."""
  if size <= _WHOLE_BYTES:
    yield file.read().split(b"\n")[:-1]
    return
  for start in np.linspace(0, size - _WINDOW_BYTES, _NUM_WINDOWS).astype(int).tolist():
    file.seek(start)
    lines = file.read(_WINDOW_BYTES).split(b"\n")
    yield lines[(1 if start else 0) : -1]


def _read_activity(path: pathlib.Path) -> Activity | None:
  size = path.stat().st_size
  actors: dict[str, int] = {}
  kinds: dict[str, int] = {}
  spans, covered = [], []
  if not size:
    return None
  with open(path, "rb") as file:
    for lines in _windows(file, size):
      here = []
      for line in lines:
        span = json.loads(line)
        here.append((actors.setdefault(span["actor"], len(actors)), kinds.setdefault(span["kind"], len(kinds)),
                     span["start_secs"], span["end_secs"]))
      if here:
        spans += here
        # A window's lines are spans that ended in it: before the first end it knows only a part.
        ends = [span[3] for span in here]
        covered.append((min(ends) if size > _WHOLE_BYTES else min(span[2] for span in here), max(ends)))
  if not spans:
    return None
  actor, kind, start, end = (np.array(column) for column in zip(*spans))
  names = tuple(sorted(actors, key=lambda name: (name != "trainer", len(name), name)))
  place = np.array([names.index(name) for name in actors])
  whole = size <= _WHOLE_BYTES
  known = _without_pauses(np.stack([start, end], 1)) if whole else union(np.array(covered, np.float64))
  return Activity(names, tuple(kinds), place[actor], kind, start, end, known, whole)


def _without_pauses(spans: np.ndarray) -> np.ndarray:
  """The time from the first span to the last, without stretches in which nobody did anything for long."""
  busy = union(spans)
  if not len(busy):
    return np.array([[spans[:, 0].min(), spans[:, 1].max()]])
  cuts = np.flatnonzero(busy[1:, 0] - busy[:-1, 1] > _BREAK_SECS)
  first, last = np.concatenate([[0], cuts + 1]), np.concatenate([cuts, [len(busy) - 1]])
  return np.stack([busy[first, 0], busy[last, 1]], 1)


# --- rollouts/ ---


def _read_rollouts(folder: pathlib.Path, *, num: int, most_bytes: int) -> list[dict[str, Any]]:
  """Rollouts spread over each file, newest last; "kind" says which file. `most_bytes` is of their lines together."""
  paths = sorted(folder.glob("*.jsonl"), key=lambda path: path.stem != "train") if folder.is_dir() else []
  found = []
  for path in paths:
    share = 0.75 if path.stem == "train" else 0.25 / max(1, len(paths) - 1)
    lines = _spread_lines(path, max(1, int(num * share)))
    average = sum(map(len, lines)) / max(1, len(lines))
    most = max(1, int(most_bytes * share / max(1.0, average)))
    chosen = Counter(np.linspace(0, len(lines) - 1, min(most, len(lines))).round().astype(int).tolist())
    with _naming(path):
      found += [{"kind": path.stem, **json.loads(lines[index].decode("utf-8", errors="replace"))}
                for index in sorted(chosen)]
  return found


def _spread_lines(path: pathlib.Path, num: int) -> list[bytes]:
  """At most `num` whole lines: all of a small file, else those at places spread evenly over it and the last ones."""
  size = path.stat().st_size
  with open(path, "rb") as file:
    if size <= _WHOLE_BYTES:
      lines = file.read().split(b"\n")[:-1]
      return [lines[i] for i in np.unique(np.linspace(0, len(lines) - 1, min(num, len(lines))).round().astype(int))]
    lines = []
    for start in np.linspace(0, size, num, endpoint=False).astype(int).tolist():
      file.seek(start)
      if start:
        file.readline()  # the rest of a line that began before
      line = file.readline()
      if line.endswith(b"\n") and (not lines or line != lines[-1]):
        lines.append(line[:-1])
    return lines

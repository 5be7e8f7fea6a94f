"""What is measured over a run: who was busy when, how stale the trained rows were, how long each side waited.

Nothing here decides anything: the numbers go to metrics.py. All classes may be used from several threads.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tba_jax.disk import AppendedFile, Disk
from tba_jax.metrics import to_json_line

TIMELINE_FILE = "timeline.jsonl"
PROFILE_FOLDER = "profile"

_MOST_SPANS = 2000  # kept one by one


# --- Timeline ---


class Span(NamedTuple):
  """A stretch of time in which an actor did one kind of thing; seconds on the timeline's clock."""

  actor: str
  kind: str
  start_secs: float
  end_secs: float


class Timeline:
  """Appends every span, once it ends, to workdir/timeline.jsonl, and adds up who did what, and beside whom.

  The file's times are seconds since 1970, advanced by a clock that never steps back, so that a resumed run continues
  it. Questions are answered for the time since `begin`; a span that is still open counts up to now. Of old spans only
  the sums are kept, so that memory does not grow with the run; one that is added that late counts in the file alone.
  """

  def __init__(
    self, workdir: str | os.PathLike[str] | None, *, disk: Disk | None = None,
    clock: Callable[[], float] = time.monotonic,
  ):
    """`workdir` None: no file."""
    self._clock = clock
    self._epoch_secs = time.time() - clock()
    self._lock = threading.Lock()
    self._spans: list[Span] = []
    self._open: dict[int, Span] = {}  # by a number of its own, with end_secs still unknown
    self._num_opened = 0
    self._began_secs = self._summed_secs = clock()  # what was before the second is in the sums alone
    self._sums: Counter[tuple[str, ...]] = Counter()  # see _sum
    self._file = None
    if workdir is not None:
      path = pathlib.Path(workdir) / TIMELINE_FILE
      path.parent.mkdir(parents=True, exist_ok=True)
      _end_torn_line(path)
      self._file = AppendedFile(path, disk=disk)

  def begin(self) -> None:
    """What counts begins now."""
    with self._lock:
      self._began_secs = self._summed_secs = self._clock()
      self._spans, self._sums = [], Counter()

  @contextlib.contextmanager
  def span(self, actor: str, kind: str, **more: Any) -> Iterator[None]:
    """Records the time inside; also when the body raises. `more` goes to the file only."""
    with self._lock:
      number = self._num_opened
      self._num_opened += 1
      start_secs = self._clock()
      self._open[number] = Span(actor, kind, start_secs, np.inf)
    try:
      yield
    finally:
      with self._lock:
        if number in self._open:
          self._end(number, more)

  def now_secs(self) -> float:
    """The timeline's clock."""
    return self._clock()

  def add(self, actor: str, kind: str, start_secs: float, end_secs: float) -> None:
    """Records a span that was measured elsewhere, on this timeline's clock."""
    with self._lock:
      self._keep(Span(actor, kind, start_secs, end_secs), {})

  def end_open(self, actor: str) -> None:
    """Ends the actor's open spans now: it was given up, and may never leave them."""
    with self._lock:
      for number in [number for number, span in self._open.items() if span.actor == actor]:
        self._end(number, {})

  def _end(self, number: int, more: Mapping[str, Any]) -> None:
    self._keep(self._open.pop(number)._replace(end_secs=self._clock()), more)

  def _keep(self, done: Span, more: Mapping[str, Any]) -> None:
    self._spans.append(done)
    if len(self._spans) > _MOST_SPANS:
      until = float(np.median([span.end_secs for span in self._spans]))
      self._sums, self._summed_secs = self._sum(until), until
      self._spans = [span for span in self._spans if span.end_secs > until]
    if self._file is not None:
      start, end = self._epoch_secs + done.start_secs, self._epoch_secs + done.end_secs
      self._file.append(
          to_json_line({"actor": done.actor, "kind": done.kind, "start_secs": start, "end_secs": end, **more}).encode())

  def _sum(self, until_secs: float) -> Counter[tuple[str, ...]]:
    """Seconds from `begin` on by (actor, kind), and by (actor, kind, other kind) those in which any other actor did
    that."""
    clipped: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for span in (*self._spans, *self._open.values()):
      ends = (max(span.start_secs, self._summed_secs), min(span.end_secs, until_secs))
      clipped.setdefault((span.actor, span.kind), []).append(ends)
    busy = {key: union(np.array(ends, np.float64)) for key, ends in clipped.items()}
    sums = Counter(self._sums)
    for (actor, kind), own in busy.items():
      sums[actor, kind] += total_secs(own)
      for other_kind in {kind for _, kind in busy}:
        others = [times for (other, what), times in busy.items() if other != actor and what == other_kind]
        if others:
          both = union(np.concatenate(others))
          either = total_secs(union(np.concatenate([own, both])))
          sums[actor, kind, other_kind] += total_secs(own) + total_secs(both) - either
    return sums

  def busy_secs(self, actor: str, kind: str) -> float:
    """Seconds in which the actor did this kind of thing."""
    with self._lock:
      return self._sum(self._clock())[actor, kind]

  def shares(self, actors: Sequence[str], *, but: Collection[str] = ()) -> dict[str, float]:
    """Share of the time that an actor spent in each kind, on average; nested kinds overlap.

    Args:
      but: kinds that are left out.
    """
    with self._lock:
      now = self._clock()
      sums, whole = self._sum(now), len(actors) * (now - self._began_secs)
    secs: Counter[str] = Counter()
    for key, value in sums.items():
      if len(key) == 2 and key[0] in actors and key[1] not in but:
        secs[key[1]] += value
    return {kind: secs[kind] / whole for kind in sorted(secs)} if whole > 0 else {}

  def busy_overlap(self, actor: str, kind: str, *, other_kind: str) -> float:
    """Share of the time in which the actor did `kind` and any other actor did `other_kind`; NaN if the actor never did.

    For "searchers decode during half of the trainer's steps": `busy_overlap("trainer", "step", other_kind="decode")`.
    """
    with self._lock:
      sums = self._sum(self._clock())
    return sums[actor, kind, other_kind] / sums[actor, kind] if sums[actor, kind] > 0 else float("nan")

  def close(self) -> None:
    """Ends the file. Spans that end later still count."""
    if self._file is not None:
      self._file.close()


def _end_torn_line(path: pathlib.Path) -> None:
  """Cuts what a killed process left after the last newline, or its half line would spoil the next one."""
  if not path.exists():
    return
  with open(path, "r+b") as file:
    content = file.read()
    file.truncate(content.rfind(b"\n") + 1)


def union(intervals: np.ndarray) -> np.ndarray:
  """The same times as disjoint, ascending intervals [M, 2]; touching ones are joined, empty ones dropped."""
  intervals = intervals[intervals[:, 1] > intervals[:, 0]]
  if not len(intervals):
    return np.zeros((0, 2))
  intervals = intervals[np.argsort(intervals[:, 0], kind="stable")]
  reach = np.maximum.accumulate(intervals[:, 1])
  first = np.concatenate([[True], intervals[1:, 0] > reach[:-1]])
  last = np.concatenate([first[1:], [True]])
  return np.stack([intervals[first, 0], reach[last]], axis=1)


def total_secs(intervals: np.ndarray) -> float:
  """Length of disjoint intervals."""
  return float(np.sum(intervals[:, 1] - intervals[:, 0]))


# --- Profile ---


class Profile:
  """Jax's own profile of some steps, in workdir/profile: every device program and what Python did meanwhile.

  TensorBoard shows it with its profile plugin, Perfetto reads the .trace.json.gz in it.
  """

  def __init__(self, workdir: str | os.PathLike[str], *, steps: Sequence[int], say: Callable[[str], None]):
    """`steps`: first and last one; () for none."""
    self._folder, self._steps, self._say = pathlib.Path(workdir) / PROFILE_FOLDER, tuple(steps), say
    self._is_on = False

  def after_step(self, step: int) -> None:
    """Begins after the step before the first one (0: before all), ends after the last."""
    import jax

    if self._steps and step == self._steps[0] - 1:
      jax.profiler.start_trace(str(self._folder))
      self._is_on = True
    if self._is_on and step >= self._steps[1]:
      self.close()

  def close(self) -> None:
    """Writes what there is; a run that is stopped within the steps keeps it."""
    import jax

    if self._is_on:
      self._is_on = False
      jax.profiler.stop_trace()
      self._say(f"profile written to {self._folder}")


# --- Staleness and waits ---


_CLEAR = 0.05  # a side that waits for less than this share of the time hardly waits


def bottleneck(trainer_waits: float, searchers_wait: float) -> str:
  """Who holds up whom, by the share of the time that each side waits for the other, as one line to read.

  Where neither waits, searchers run free: what they sample beyond the trainer's need is no waiting.
  """
  if trainer_waits < _CLEAR and searchers_wait < _CLEAR:
    return (f"none: neither waits for the other (trainer {trainer_waits:.0%}, searchers {searchers_wait:.0%} of the "
            "time)")
  slow, fast, share = ("searchers", "the trainer waits", trainer_waits) if trainer_waits >= searchers_wait else (
      "the trainer", "searchers wait", searchers_wait)
  other = f"searchers for {searchers_wait:.0%}" if slow == "searchers" else f"the trainer for {trainer_waits:.0%}"
  return f"{slow}: {fast} for {share:.0%} of the time, {other}"


class StalenessStats:
  """Exact histogram of the staleness (optimizer updates) of every response trained on."""

  def __init__(self):
    self._counts: Counter[int] = Counter()
    self._lock = threading.Lock()

  def add(self, staleness: np.ndarray) -> None:
    """Counts the responses of one step: integers >= 0, of any shape."""
    staleness = np.asarray(staleness)
    assert np.issubdtype(staleness.dtype, np.integer) and (staleness >= 0).all(), staleness
    values, counts = np.unique(staleness, return_counts=True)
    self.add_counts(dict(zip(values.tolist(), counts.tolist())))

  def add_counts(self, counts: Mapping[int, int]) -> None:
    """Counts responses that are counted already, by staleness."""
    with self._lock:
      self._counts.update(counts)

  def summary(self) -> dict[str, float]:
    """{"staleness_mean", "staleness_p95", "staleness_max"}; p95 is the least s that 95% of responses do not exceed.

    NaN where nothing was trained.
    """
    with self._lock:
      values = np.array(sorted(self._counts), np.int64)
      counts = np.array([self._counts[value] for value in values.tolist()], np.int64)
    if not len(values):
      return {key: float("nan") for key in ("staleness_mean", "staleness_p95", "staleness_max")}
    # In integers: 0.95 n in floating point can land above a count that is exactly 95%.
    p95 = values[np.argmax(100 * np.cumsum(counts) >= 95 * counts.sum())]
    return {
      "staleness_mean": float((values * counts).sum() / counts.sum()),
      "staleness_p95": float(p95),
      "staleness_max": float(values[-1]),
    }

  def histogram(self) -> dict[str, int]:
    """Responses trained on, by staleness; keys are numbers as text, ascending."""
    with self._lock:
      return {str(value): self._counts[value] for value in sorted(self._counts)}

  def state_dict(self) -> dict[str, list[int]]:
    """JSON-able; `load_state_dict` continues from it."""
    with self._lock:
      values = sorted(self._counts)
      return {"values": values, "counts": [self._counts[value] for value in values]}

  def load_state_dict(self, state: Mapping[str, Any]) -> None:
    with self._lock:
      self._counts = Counter({int(value): int(count) for value, count in zip(state["values"], state["counts"])})


class WaitMeter:
  """Seconds each side waited for the other; those of several searchers add up. An open wait counts up to now."""

  def __init__(self, *, clock: Callable[[], float] = time.monotonic):
    self._clock = clock
    self._secs: Counter[str] = Counter()
    self._open: dict[int, tuple[str, float]] = {}
    self._num_opened = 0
    self._lock = threading.Lock()

  @contextlib.contextmanager
  def waiting(self, side: str) -> Iterator[None]:
    """Counts the time inside; also when the body raises."""
    with self._lock:
      number = self._num_opened
      self._num_opened += 1
      self._open[number] = (side, self._clock())
    try:
      yield
    finally:
      with self._lock:
        _, began_secs = self._open.pop(number)
        self._secs[side] += self._clock() - began_secs

  def seconds(self, side: str) -> float:
    with self._lock:
      now = self._clock()
      return float(self._secs[side] + sum(now - began for other, began in self._open.values() if other == side))

  def state_dict(self) -> dict[str, float]:
    """JSON-able; `load_state_dict` continues from it. Waits that are still open are included up to now."""
    with self._lock:
      now, total = self._clock(), Counter(self._secs)
      for side, began_secs in self._open.values():
        total[side] += now - began_secs
      return dict(total)

  def load_state_dict(self, state: Mapping[str, float]) -> None:
    with self._lock:
      self._secs = Counter({side: float(secs) for side, secs in state.items()})

"""Where the replay buffer keeps its rows: preallocated arrays, linked in order of arrival, and the prompts they answer.

Nothing here draws, locks or counts; `buffer.py` does. Virtual memory is reserved once and becomes real as rows are
written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tba_jax.types import Draw, RolloutGroup

TOKEN_COLUMNS = ("tokens", "log_mu", "log_ref")  # of an arrived row they change with its ref_version alone
_ROW_COLUMNS = (
  "slot",
  "length",
  "reward",
  "truncated",
  "occurrence",
  "attempt",
  "oldest_version",
  "newest_version",
  "ref_version",
  "uses",
  "arrival",
  "first_arrival",
  "residual",
)
_ARRIVAL_BITS = 40  # of a key: a row each microsecond for twelve days
_LATEST = np.iinfo(np.int32).max
_CHUNK_ROWS = 4096  # rows copied at a time when saving, so that a large buffer is never held twice in between


class RowStore:
  """Rows (one response each) in arrays of `capacity` rows, linked from oldest to newest, each pointing to its prompt's
  slot.

  A handle names a row and what it held: arrival * capacity + row. It stays unambiguous after the row has been given to
    another response.
  """

  def __init__(
    self, *, capacity: int, max_prompt_tokens: int, max_response_tokens: int, with_advantages: bool = False
  ):
    self.capacity = capacity
    self.token_columns = TOKEN_COLUMNS + ("advantages",) * with_advantages
    self.tokens = np.empty((capacity, max_response_tokens), np.int32)
    self.log_mu = np.empty((capacity, max_response_tokens), np.float32)
    self.log_ref = np.empty((capacity, max_response_tokens), np.float32)
    self.advantages = np.empty((capacity, max_response_tokens), np.float32) if with_advantages else None
    self.slot = np.empty(capacity, np.int32)
    self.length = np.empty(capacity, np.int32)
    self.reward = np.empty(capacity, np.float32)
    self.truncated = np.empty(capacity, np.bool_)
    self.occurrence = np.empty(capacity, np.int64)
    self.attempt = np.empty(capacity, np.int32)
    self.oldest_version = np.empty(capacity, np.int32)
    self.newest_version = np.empty(capacity, np.int32)
    self.ref_version = np.empty(capacity, np.int32)
    self.uses = np.empty(capacity, np.int32)
    self.arrival = np.empty(capacity, np.int64)  # -1 where a row has been freed
    self.first_arrival = np.empty(capacity, np.int64)  # of the sampling group
    self.residual = np.empty(capacity, np.float64)

    self.prompt_tokens = np.empty((capacity, max_prompt_tokens), np.int32)
    self.prompt_length = np.empty(capacity, np.int32)
    self.prompt_id = np.empty(capacity, np.int64)
    self.rows_of_slot = np.zeros(capacity, np.int32)
    self.slots: dict[int, int] = {}  # prompt id -> slot

    self._next = np.empty(capacity, np.int32)
    self._previous = np.empty(capacity, np.int32)
    self.oldest = self.newest = -1
    self.num_live = 0
    self.sum_versions = 0  # of the oldest tokens of live rows; an exact integer, so that the mean age costs nothing
    self.next_arrival = 0
    self._free_rows, self._next_row = [], 0
    self._free_slots, self._next_slot = [], 0
    self._unused: dict[int, int] = {}  # first arrival of each sampling group that waits for a draw -> its live rows

  def append(self, group: RolloutGroup, samples: np.ndarray, *, residual: float) -> np.ndarray:
    """Writes the chosen samples of a group, in order, as the newest rows; there must be room. Returns the rows, int64
    [n].
    """
    num = len(samples)
    assert self.num_live + num <= self.capacity
    rows = np.array([self._free_rows.pop() if self._free_rows else self._fresh_row() for _ in range(num)], np.int64)
    lengths = group.lengths[samples]
    width = int(lengths.max())
    real = np.arange(width) < lengths[:, None]
    for name in self.token_columns:
      stored = getattr(self, name)
      stored[rows, :width] = np.where(real, getattr(group, name)[samples, :width], 0)
      stored[rows, width:] = 0
    versions = group.versions[samples, :width]
    oldest = np.where(real, versions, _LATEST).min(axis=1)
    slot = self._take_slot(group)
    self.rows_of_slot[slot] += num
    self.slot[rows] = slot
    self.length[rows] = lengths
    self.reward[rows] = group.rewards[samples]
    self.truncated[rows] = group.truncated[samples]
    self.occurrence[rows] = group.occurrence
    self.attempt[rows] = group.attempt
    self.oldest_version[rows] = oldest
    self.newest_version[rows] = np.where(real, versions, -1).max(axis=1)
    self.ref_version[rows] = group.ref_version
    self.uses[rows] = 0
    self.arrival[rows] = np.arange(self.next_arrival, self.next_arrival + num)
    self.first_arrival[rows] = self.next_arrival
    self.residual[rows] = residual
    self._link(rows)
    self._unused[self.next_arrival] = num
    self.next_arrival += num
    self.num_live += num
    self.sum_versions += int(oldest.sum(dtype=np.int64))
    return rows

  def remove(self, row: int) -> None:
    """Frees a live row, and its prompt's slot with the prompt's last row."""
    before, after = int(self._previous[row]), int(self._next[row])
    if before >= 0:
      self._next[before] = after
    else:
      self.oldest = after
    if after >= 0:
      self._previous[after] = before
    else:
      self.newest = before
    self.arrival[row] = -1
    self.num_live -= 1
    group = int(self.first_arrival[row])
    if group in self._unused:
      self._unused[group] -= 1
      if not self._unused[group]:
        del self._unused[group]
    self.sum_versions -= int(self.oldest_version[row])
    self._free_rows.append(row)
    slot = int(self.slot[row])
    self.rows_of_slot[slot] -= 1
    if self.rows_of_slot[slot] == 0:
      del self.slots[int(self.prompt_id[slot])]
      self._free_slots.append(slot)

  def use(self, rows: np.ndarray) -> None:
    """A draw took these live rows."""
    self.uses[rows] += 1
    self.set_aside(rows)

  def set_aside(self, rows: np.ndarray) -> None:
    """The sampling groups of these live rows do not count as unused any more: used, or none that a draw could take."""
    for group in np.unique(self.first_arrival[rows]).tolist():
      self._unused.pop(group, None)

  @property
  def num_unused_groups(self) -> int:
    """Sampling groups with live rows that draws can take and that no draw has taken any of."""
    return len(self._unused)

  def group_of(self, row: int) -> list[int]:
    """The live rows of the sampling group of a row, in sampling order; for orders in which groups stay whole."""
    first = self.first_arrival[row]
    while self._previous[row] >= 0 and self.first_arrival[self._previous[row]] == first:
      row = int(self._previous[row])
    rows = [row]
    while self._next[rows[-1]] >= 0 and self.first_arrival[self._next[rows[-1]]] == first:
      rows.append(int(self._next[rows[-1]]))
    return rows

  def rows_of(self, prompt_id: int) -> np.ndarray:
    """The live rows of a prompt, int64, in no order that means anything; O(rows ever used)."""
    live = self.arrival[: self._next_row] >= 0
    return np.flatnonzero(live & (self.slot[: self._next_row] == self.slots.get(prompt_id, -1)))

  def oldest_rows(self, count: int) -> list[int]:
    """The `count` oldest live rows, oldest first."""
    rows, row = [], self.oldest
    for _ in range(count):
      rows.append(row)
      row = int(self._next[row])
    return rows

  def handles(self, rows: np.ndarray) -> np.ndarray:
    return self.arrival[rows] * self.capacity + rows

  def is_live(self, handles: np.ndarray) -> np.ndarray:
    """bool, of the shape of the handles: whether the row still holds what it held; -1 names nothing."""
    rows = handles % self.capacity
    return (handles >= 0) & (rows < self._next_row) & (self.arrival[rows] == handles // self.capacity)

  def live_rows(self, handles: np.ndarray) -> np.ndarray:
    """The rows of those handles that are live; int64, in the order given."""
    return handles[self.is_live(handles)] % self.capacity

  def live_rows_unordered(self) -> np.ndarray:
    """All live rows by their numbers; O(n)."""
    return np.flatnonzero(self.arrival[: self._next_row] >= 0)

  def live_by_arrival(self) -> np.ndarray:
    """All live rows, oldest first; O(n log n), for saving and loading only."""
    rows = self.live_rows_unordered()
    # Rows are filled in order and in turn: long runs, which it merges.
    return rows[np.argsort(self.arrival[rows], kind="stable")]

  def gather(
    self, groups: Sequence[np.ndarray], weights: Sequence[float], *, num_rows: int, version: int, ref_version: int
  ) -> Draw:
    """Copies rows into a draw: group after group, each filled up to `num_rows` with rows that are not valid.

    Args:
      groups: live rows of each training group, int64, 1 to num_rows of them.
      weights: of the groups.
      version: that rows which are not valid claim, so that their staleness is 0.
      ref_version: of the reference now; rows that another one scored get a log_ref of NaN.
    """
    rows = np.full((len(groups), num_rows), -1, np.int64)
    for place, group in enumerate(groups):
      rows[place, : len(group)] = group
    slots = np.repeat(self.slot[rows[:, 0]], num_rows)
    rows = rows.reshape(-1)
    valid = rows >= 0
    padding = ~valid

    def take(column: np.ndarray, places: np.ndarray, fill: int) -> np.ndarray:
      taken = column.take(places, axis=0)
      taken[padding] = fill
      return taken

    log_ref = take(self.log_ref, rows, 0)
    log_ref[valid & (self.ref_version[rows] != ref_version)] = np.nan
    return Draw(
      prompts=take(self.prompt_tokens, slots, 0),
      prompt_lengths=take(self.prompt_length, slots, 0),
      tokens=take(self.tokens, rows, 0),
      lengths=take(self.length, rows, 0),
      log_mu=take(self.log_mu, rows, 0),
      log_ref=log_ref,
      versions=take(self.oldest_version, rows, version),
      rewards=take(self.reward, rows, 0),
      truncated=take(self.truncated, rows, 0),
      group_ids=np.repeat(np.arange(len(groups), dtype=np.int32), num_rows),
      valid=valid,
      weights=np.repeat(np.asarray(weights, np.float32), num_rows),
      prompt_ids=self.prompt_id[slots],
      occurrences=take(self.occurrence, rows, -1),
      rows=np.where(valid, self.handles(rows), -1),
      advantages=None if self.advantages is None else take(self.advantages, rows, 0),
    )

  def keys(self, rows: np.ndarray) -> np.ndarray:
    """int64; a live row's key stands for what is in its token columns."""
    return self.arrival[rows] + (self.ref_version[rows].astype(np.int64) << _ARRIVAL_BITS)  # log_ref is of that one

  def pack(self, rows: np.ndarray) -> dict[str, np.ndarray]:
    """The real tokens and log-probabilities of rows, one row after the other."""
    return {name: _pack(getattr(self, name), rows, self.length) for name in self.token_columns}

  def save(
    self, missing: Callable[[np.ndarray], np.ndarray] | None = None
  ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Live rows and prompts as arrays (of tokens the real ones only, oldest row first), and JSON-able scalars.

    Args:
      missing: `keys` of the live rows -> bool, whose tokens to save; by default those of all. "token_rows" names them.
    """
    rows = self.live_by_arrival()
    slots = np.array(sorted(self.slots.values()), np.int64)
    arrays = {name: getattr(self, name)[rows] for name in _ROW_COLUMNS}
    keys = self.keys(rows)
    token_rows = rows if missing is None else rows[missing(keys)]
    arrays |= self.pack(token_rows) | {
      "key": keys,
      "token_rows": token_rows,
      "rows": rows,
      "slots": slots,
      "prompt_id": self.prompt_id[slots],
      "prompt_length": self.prompt_length[slots],
      "prompt_tokens": _pack(self.prompt_tokens, slots, self.prompt_length),
      "unused": np.array(sorted(self._unused), np.int64),
      "free_rows": np.array(self._free_rows, np.int64),
      "free_slots": np.array(self._free_slots, np.int64),
    }
    return arrays, {"next_row": self._next_row, "next_slot": self._next_slot, "next_arrival": self.next_arrival}

  def load(self, arrays: dict[str, np.ndarray], scalars: dict[str, Any]) -> None:
    """Restores what `save` gave into a store that has held nothing yet, row numbers and the order of free rows
    included.
    """
    assert self._next_row == 0
    rows, slots = np.asarray(arrays["rows"]), np.asarray(arrays["slots"])
    assert np.array_equal(arrays["token_rows"], rows), "tokens of only some rows are no whole state"
    for name in _ROW_COLUMNS:
      getattr(self, name)[rows] = arrays[name]
    for name in self.token_columns:
      _unpack(getattr(self, name), rows, self.length, arrays[name])
    self.prompt_id[slots], self.prompt_length[slots] = arrays["prompt_id"], arrays["prompt_length"]
    _unpack(self.prompt_tokens, slots, self.prompt_length, arrays["prompt_tokens"])
    self.slots = dict(zip(self.prompt_id[slots].tolist(), slots.tolist(), strict=True))
    self.rows_of_slot[slots] = np.bincount(self.slot[rows], minlength=self.capacity)[slots]
    self._free_rows = np.asarray(arrays["free_rows"]).tolist()
    self._free_slots = np.asarray(arrays["free_slots"]).tolist()
    self.arrival[self._free_rows] = -1
    self._next_row, self._next_slot = scalars["next_row"], scalars["next_slot"]
    self.next_arrival, self.num_live = scalars["next_arrival"], len(rows)
    self.sum_versions = int(self.oldest_version[rows].sum(dtype=np.int64))
    unused, counts = np.unique(self.first_arrival[rows], return_counts=True)
    kept = np.isin(unused, arrays["unused"])
    self._unused = dict(zip(unused[kept].tolist(), counts[kept].tolist(), strict=True))
    if len(rows):
      self._link(rows)

  def _fresh_row(self) -> int:
    self._next_row += 1
    return self._next_row - 1

  def _take_slot(self, group: RolloutGroup) -> int:
    slot = self.slots.get(group.prompt_id)
    if slot is None:
      if self._free_slots:
        slot = self._free_slots.pop()
      else:
        slot, self._next_slot = self._next_slot, self._next_slot + 1
      self.slots[group.prompt_id] = slot
      self.prompt_id[slot] = group.prompt_id
      self.prompt_length[slot] = len(group.prompt)
      self.prompt_tokens[slot] = 0
      self.prompt_tokens[slot, : len(group.prompt)] = group.prompt
    return slot

  def _link(self, rows: np.ndarray) -> None:
    self._next[rows[:-1]], self._next[rows[-1]] = rows[1:], -1
    self._previous[rows[1:]], self._previous[rows[0]] = rows[:-1], self.newest
    if self.newest >= 0:
      self._next[self.newest] = rows[0]
    else:
      self.oldest = int(rows[0])
    self.newest = int(rows[-1])


def _pack(stored: np.ndarray, rows: np.ndarray, length: np.ndarray) -> np.ndarray:
  """The first `length` entries of each of the given rows, one after the other."""
  lengths = length[rows]
  ends = np.cumsum(lengths, dtype=np.int64)
  packed = np.empty(int(ends[-1]) if len(rows) else 0, stored.dtype)
  for start in range(0, len(rows), _CHUNK_ROWS):
    part = slice(start, start + _CHUNK_ROWS)
    real = np.arange(stored.shape[1]) < lengths[part, None]
    packed[ends[start] - lengths[start] : ends[part][-1]] = stored[rows[part]][real]
  return packed


def _unpack(stored: np.ndarray, rows: np.ndarray, length: np.ndarray, packed: np.ndarray) -> None:
  """The inverse of `_pack`; entries beyond a row's length become 0."""
  lengths = length[rows]
  ends = np.cumsum(lengths, dtype=np.int64)
  for start in range(0, len(rows), _CHUNK_ROWS):
    part = slice(start, start + _CHUNK_ROWS)
    real = np.arange(stored.shape[1]) < lengths[part, None]
    block = np.zeros(real.shape, stored.dtype)
    block[real] = packed[ends[start] - lengths[start] : ends[part][-1]]
    stored[rows[part]] = block

"""The replay buffer: scored responses grouped by prompt in host memory, drawn as training groups. Safe to use from
several threads.

Two orders. "tba" (Bartoldson et al. 2025, section 4): a coin per prompt of the batch, with probability
`recent_fraction` a prompt whose responses arrived lately, newest responses first; otherwise a prompt uniformly and its
responses by priority. "fifo": whole sampling groups, each exactly once, those of the oldest weights first and among
these those that came first: a long response that comes late is not overtaken for good. The buffer does not wait: who
wants a batch asks `can_draw` or catches `NotEnoughData`.
"""

from __future__ import annotations

import copy
import heapq
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from tba_jax.replay.checks import (
  MIN_ROWS, check_draw, check_group, check_group_fits, check_residuals, check_settings, check_state,
)
from tba_jax.replay.choice import TbaChoice
from tba_jax.replay.copies import RowCopies
from tba_jax.replay.indexes import ResponseIndex, VersionIndex, distinct_samples, hash_response
from tba_jax.replay.near_duplicates import NearRows
from tba_jax.replay.store import RowStore
from tba_jax.types import Draw, RolloutGroup

_COUNTERS = (
  "added", "duplicates", "near_duplicates", "evicted_capacity", "evicted_prompt_capacity", "evicted_age",
  "evicted_age_unused", "evicted_age_unused_tokens", "evicted_uses", "discarded", "rows_drawn", "groups_drawn", "groups_short",
  "prompts_skipped", "recent_misses", "priorities_too_late", "rescored",
)


class NotEnoughData(Exception):
  """The buffer cannot give the batch that was asked for yet; nothing was drawn."""


class ReplayBuffer(RowCopies):
  """See the module. Every row that was ever added is live, or in exactly one of these counters of `stats()`:
  duplicates, near_duplicates, evicted_capacity, evicted_prompt_capacity, evicted_age, evicted_uses, discarded.
  """

  def __init__(
    self, *, capacity: int, capacity_per_prompt: int, max_prompt_tokens: int, max_response_tokens: int, seed: int,
    recent_fraction: float, priority: str = "uniform", priority_temperature: float = 1.0, max_uses: int = 0,
    max_staleness: int = -1, dedup: bool = True, order: str = "tba", single_prompt: bool = False, ref_version: int = 0,
    near_duplicate: float = 0.0, with_advantages: bool = False,
  ):
    """Reserves virtual memory for `capacity` rows; memory becomes real as rows are written.

    Args:
      capacity: rows in all; the oldest leave.
      capacity_per_prompt: newest rows kept of each prompt; plays no part in "fifo" or with `single_prompt`.
      max_prompt_tokens, max_response_tokens: the size of a row.
      seed: of the generator of every draw.
      recent_fraction: probability that a prompt (with `single_prompt`: a response) comes from what arrived lately.
      priority: of the other draws. "uniform"; "reward": responses by softmax(reward / priority_temperature);
        "residual": prompts by (mean |TB residual|) ** (1 / priority_temperature), with importance weights in the draw.
      max_uses: a row leaves once it has been drawn so often; 0: no limit.
      max_staleness: a row may be trained at version v if v - (version of its oldest token) <= max_staleness; -1: no
        limit.
      dedup: of identical responses to one prompt only the newest is kept.
      order: "tba" or "fifo".
      single_prompt: the task has one prompt, so that the coin is tossed for each response.
      ref_version: version of the reference policy that the newest groups are scored by.
      near_duplicate: of responses to one prompt whose edit distance is less than this share of their two lengths
        together only the one of the highest reward is kept, the older one of equals; 0: all are. Needs `dedup`. A new
        row is compared with all rows of its prompt.
      with_advantages: rows hold an advantage for each token, which every group must bring.
    Raises:
      ValueError: a setting out of range, or settings that contradict each other.
    """
    self._settings = {
      "capacity": capacity, "capacity_per_prompt": capacity_per_prompt, "max_prompt_tokens": max_prompt_tokens,
      "max_response_tokens": max_response_tokens, "recent_fraction": recent_fraction, "priority": priority,
      "priority_temperature": priority_temperature, "max_uses": max_uses, "max_staleness": max_staleness,
      "dedup": dedup, "order": order, "single_prompt": single_prompt,
      "near_duplicate": near_duplicate,
    }
    check_settings(**self._settings)
    self._with_advantages = with_advantages
    self.priority, self.order = priority, order
    self._capacity, self._capacity_per_prompt = capacity, capacity_per_prompt
    self._max_uses, self._max_staleness, self._dedup = max_uses, max_staleness, dedup
    self._fifo, self._single = order == "fifo", single_prompt
    self._lock = threading.Lock()
    self._rng = np.random.Generator(np.random.PCG64(seed))
    self._counts = dict.fromkeys(_COUNTERS, 0)
    self._by_length: dict[int, dict[str, int]] = {}  # see age_losses
    self._ref_version = ref_version
    self._temperature: float | None = None  # of the first group; the others must agree
    self._version = 0  # newest that the caller has spoken of
    self._published = [0, 0]  # arrival numbers at the last two publishes
    self._max_residual = 1.0
    self._reset_rows()

  def _reset_rows(self) -> None:
    settings, capacity = self._settings, self._capacity
    self._store = RowStore(
      capacity=capacity,
      max_prompt_tokens=settings["max_prompt_tokens"],
      max_response_tokens=settings["max_response_tokens"],
      with_advantages=self._with_advantages,
    )
    self._index = ResponseIndex(capacity) if self._dedup else None
    share = settings["near_duplicate"]
    self._near = NearRows(capacity, share=share) if share else None
    self._by_version = VersionIndex(capacity) if self._max_staleness >= 0 else None
    self._num_groups = 0  # queued, "fifo" only
    # Heap of oldest version, first arrival, first row; groups that left stay in it.
    self._queue: list[tuple[int, int, int]] = []
    self._choice = TbaChoice(  # of nothing in "fifo"
      self._store,
      capacity=capacity,
      **{name: settings[name] for name in ("recent_fraction", "priority", "priority_temperature", "single_prompt")},
    )

  def add(self, group: RolloutGroup, *, newest_version: int | None = None) -> None:
    """Takes in a sampling group as the newest rows; what no longer fits, or is now a duplicate, leaves.

    Args:
      group: rows 0..S-1 count as arriving in this order. Not kept, nothing of it is aliased.
      newest_version: the trainer's version, if known: no token can have been sampled by a later one.

    Raises:
      ValueError: arrays that do not belong together, values that cannot be trained on, rows too long for the buffer, a
        temperature or reference other than the buffer's, or a version from the future.
    """
    check_group(
      group, settings=self._settings, newest_version=newest_version, with_advantages=self._with_advantages)
    samples, keys = distinct_samples(group) if self._dedup else (np.arange(len(group.lengths)), [])
    with self._lock:
      self._check_against_rows(group)
      self._temperature = float(group.temperature)
      store = self._store
      self._counts["added"] += len(group.lengths)
      self._counts["duplicates"] += len(group.lengths) - len(samples)
      if self._fifo and len(samples) < MIN_ROWS:
        self._counts["discarded"] += len(samples)
        self._counts["prompts_skipped"] += 1
        return
      if self._fifo:
        while store.num_live + len(samples) > self._capacity:
          self._remove_group(store.group_of(store.oldest), "evicted_capacity")
        rows = store.append(group, samples, residual=0.0)
        self._enqueue(int(rows[0]))
      else:
        samples, keys = self._make_room(group, samples, keys)
        if not len(samples):
          return
        rows = store.append(group, samples, residual=self._max_residual)
        if self._near is not None:
          self._near.enter(rows, store)
        for key, row in zip(keys, rows.tolist(), strict=self._dedup):
          self._index.add(key, row)
        self._choice.enter(rows)
      if self._by_version is not None:
        self._by_version.add(rows, store)
        self._count_by_length("added", rows)

  def mark_publish(self, version: int) -> None:
    """The trainer published weights: "recent" is from now on what arrived since the publish before this one."""
    with self._lock:
      self._version = max(self._version, int(version))
      self._published = [self._published[1], self._store.next_arrival]
      self._choice.age(self._published[0])

  def set_reference(self, ref_version: int) -> None:
    """The reference policy moved: draws give rows that an older one scored without a log_ref, see `update_log_ref`."""
    with self._lock:
      self._ref_version = int(ref_version)

  def update_log_ref(self, rows: np.ndarray, log_ref: np.ndarray, *, ref_version: int) -> None:
    """Sets log_ref [n, T] of rows by their handles `Draw.rows`, as a reference scored them; what has left is passed
    over."""
    with self._lock:
      live = self._store.is_live(rows)
      kept = rows[live] % self._capacity
      self._store.log_ref[kept, : log_ref.shape[1]], self._store.ref_version[kept] = log_ref[live], ref_version
      self._counts["rescored"] += len(rows)

  def can_draw(self, *, num_prompts: int, responses_per_prompt: int, version: int) -> bool:
    """Whether `draw` with the same arguments would give a batch. Like it, drops rows that are too old at `version`."""
    check_draw(num_prompts, responses_per_prompt, single_prompt=self._single and not self._fifo)
    with self._lock:
      self._drop_stale(version)
      return self._num_available() >= num_prompts

  def draw(self, *, num_prompts: int, responses_per_prompt: int, version: int) -> Draw:
    """A batch of `num_prompts` training groups of 2 to K = `responses_per_prompt` valid rows each, none repeated.

    Args:
      version: that the batch will be trained at, so with batches drawn ahead the trainer's version plus these.

    Returns:
      Always N = num_prompts * responses_per_prompt rows, group by group; a shorter group ends in rows that are not
      `valid`: length 0, handle -1, the group's ids and weight. Arrays are the caller's own.

    Raises:
      NotEnoughData: fewer groups can be formed; nothing was drawn.
      ValueError: sizes out of range.
    """
    check_draw(num_prompts, responses_per_prompt, single_prompt=self._single and not self._fifo)
    with self._lock:
      self._drop_stale(version)
      if self._num_available() < num_prompts:
        raise NotEnoughData(
          f"num_prompts={num_prompts} groups were asked for, {self._num_available()} with {MIN_ROWS} or more usable "
          f"responses are there at version {version}; add more groups first."
        )
      if self._fifo:
        queued = [self._store.group_of(row) for row in self._first_in_queue(num_prompts)]
        groups, weights = [np.array(rows[:responses_per_prompt], np.int64) for rows in queued], [1.0] * num_prompts
      else:
        if not self._single:
          self._counts["prompts_skipped"] += len(self._store.slots) - len(self._choice)
        groups, weights, num_misses = self._choice.choose(
          self._rng, num_prompts=num_prompts, responses_per_prompt=responses_per_prompt)
        self._counts["recent_misses"] += num_misses
      draw = self._store.gather(
        groups, weights, num_rows=responses_per_prompt, version=version, ref_version=self._ref_version)
      drawn = np.concatenate(groups)
      self._store.use(drawn)
      self._counts["rows_drawn"] += len(drawn)
      self._counts["groups_drawn"] += num_prompts
      self._counts["groups_short"] += sum(len(group) < responses_per_prompt for group in groups)
      if self._fifo:
        for rows in queued:
          self._remove_group(rows, "evicted_uses", num_used=responses_per_prompt)
      elif self._max_uses:
        self._remove(drawn[self._store.uses[drawn] >= self._max_uses].tolist(), "evicted_uses")
      return draw

  def update_priorities(self, rows: np.ndarray, values: np.ndarray) -> None:
    """Sets |TB residual| of rows by their handles `Draw.rows`; what has left and padding are passed over.

    A new row starts with the largest residual seen (at least 1), so that everything is looked at once.

    Raises:
      ValueError: the buffer does not draw by residual, the shapes differ, or a value is not finite.
    """
    rows, values = np.asarray(rows, np.int64), np.abs(np.asarray(values, np.float64))
    check_residuals(rows, values, priority=self.priority)
    with self._lock:
      live = self._store.is_live(rows)
      self._counts["priorities_too_late"] += int((rows >= 0).sum() - live.sum())
      if live.any():
        updated = rows[live] % self._capacity
        self._store.residual[updated] = values[live]
        self._max_residual = max(self._max_residual, float(values[live].max()))
        for slot in np.unique(self._store.slot[updated]).tolist():
          self._choice.refresh(slot)

  def stats(self) -> dict[str, float]:
    """Counters since the start (rows unless named otherwise), and the state now; age from the newest known version."""
    with self._lock:
      store = self._store
      mean_version = store.sum_versions / store.num_live if store.num_live else float(self._version)
      return self._counts | {
        "live_rows": store.num_live,
        "unused_groups": store.num_unused_groups,
        "fill": store.num_live / self._capacity,
        "live_prompts": len(store.slots),
        "drawable_groups": self._num_available(),
        "recent": self._choice.num_recent,
        "mean_age": self._version - mean_version,
      }

  def age_losses(self) -> dict[str, dict[str, int]]:
    """By the power of two that a response's length does not exceed: rows "added", and rows "lost": too old before their
    first use.

    Counted while there is a `max_staleness`; empty without. What is lost must not be of one length: that would be a
    bias.
    """
    with self._lock:
      return {str(bucket): dict(self._by_length[bucket]) for bucket in sorted(self._by_length)}

  def state_dict(self, *, missing: Callable[[np.ndarray], np.ndarray] | None = None) -> dict[str, dict[str, Any]]:
    """All that later draws depend on: {"arrays": live rows only, numpy arrays; "scalars": JSON-able}; copies.

    Args:
      missing: keys of the live rows (int64) -> bool, whose tokens and log-probabilities the caller does
        not have yet; those of the others are left out, and have to be put in again before `load_state_dict`.
    """
    with self._lock:
      arrays, scalars = self._store.save(missing)
      arrays |= self._choice.save()
      scalars |= {
        "settings": dict(self._settings),
        "rng": copy.deepcopy(self._rng.bit_generator.state),
        "counts": dict(self._counts),
        "by_length": {str(bucket): dict(counts) for bucket, counts in self._by_length.items()},
        "ref_version": self._ref_version,
        "temperature": self._temperature,
        "version": self._version,
        "published": list(self._published),
        "max_residual": self._max_residual,
      }
      return {"arrays": arrays, "scalars": scalars}

  def load_state_dict(self, state: dict[str, dict[str, Any]], *, newest_version: int | None = None) -> None:
    """Replaces everything by what `state_dict` gave: from then on this buffer does what that one would have done.

    Args:
      newest_version: the version that the run resumes at, if known; no row can be newer.

    Raises:
      ValueError: the state is of a buffer with other settings, or holds rows from the future. This buffer is then
        unchanged.
    """
    arrays, scalars = state["arrays"], state["scalars"]
    check_state(arrays, scalars, settings=self._settings, newest_version=newest_version)
    with self._lock:
      self._reset_rows()
      self._store.load(arrays, scalars)
      self._rng.bit_generator.state = copy.deepcopy(scalars["rng"])
      self._counts = dict(scalars["counts"])
      self._by_length = {int(bucket): dict(counts) for bucket, counts in scalars["by_length"].items()}
      self._ref_version, self._temperature = scalars["ref_version"], scalars["temperature"]
      self._version, self._published = scalars["version"], list(scalars["published"])
      self._max_residual = scalars["max_residual"]
      self._rebuild(arrays)

  # What follows is called with the lock held.

  def _check_against_rows(self, group: RolloutGroup) -> None:
    store, slot = self._store, self._store.slots.get(group.prompt_id)
    known = None if slot is None else store.prompt_tokens[slot, : store.prompt_length[slot]]
    check_group_fits(
      group,
      temperature=self._temperature,
      ref_version=self._ref_version,
      prompt=known,
      only_known=self._single and not self._fifo and store.num_live > 0,
    )

  def _make_room(self, group: RolloutGroup, samples: np.ndarray, keys: list[int]) -> tuple[np.ndarray, list[int]]:
    """Removes what the samples replace or push out; returns those samples, with their hashes, that stay themselves."""
    store, prompt_id = self._store, group.prompt_id
    if self._near is not None:
      kept = self._near.keep_better(group, samples, store, remove=lambda rows: self._remove(rows, "near_duplicates"))
      self._counts["near_duplicates"] += len(samples) - len(kept)
      samples, keys = samples[kept], [keys[place] for place in kept.tolist()]
    for sample, key in zip(samples[: len(keys)].tolist(), keys, strict=True):
      row = self._index.find(key, prompt_id, group.tokens[sample, : group.lengths[sample]], store)
      if row >= 0:
        self._remove([row], "duplicates")
    if not self._single:
      surplus = max(len(samples) - self._capacity_per_prompt, 0)
      self._counts["evicted_prompt_capacity"] += surplus
      samples, keys = samples[surplus:], keys[surplus:]
      old = self._choice.rows_of.get(store.slots.get(prompt_id, -1), ())
      self._remove(list(old[: max(len(old) + len(samples) - self._capacity_per_prompt, 0)]), "evicted_prompt_capacity")
    self._remove(store.oldest_rows(max(store.num_live + len(samples) - self._capacity, 0)), "evicted_capacity")
    return samples, keys

  def _remove(self, rows: list[int], reason: str) -> None:
    """Frees live rows and counts them; what draws choose from follows."""
    self._counts[reason] += len(rows)
    by_prompt = not self._fifo and not self._single
    slots = dict.fromkeys(self._store.slot[rows].tolist()) if by_prompt else ()
    for row in rows:
      if self._index is not None:
        self._index.remove(row)
      if not self._fifo:
        self._choice.leave(row)
      self._store.remove(row)
    for slot in slots:
      self._choice.refresh(slot)

  def _enqueue(self, row: int) -> None:
    """A whole group, by its first row, waits for its turn."""
    store = self._store
    oldest = int(store.oldest_version[store.group_of(row)].min())
    heapq.heappush(self._queue, (oldest, int(store.arrival[row]), row))
    self._num_groups += 1

  def _first_in_queue(self, count: int) -> list[int]:
    """The first rows of the `count` groups whose turn it is; they leave the queue."""
    chosen: list[int] = []
    while len(chosen) < count:
      _, arrival, row = heapq.heappop(self._queue)
      if self._store.arrival[row] == arrival:
        chosen.append(row)
    return chosen

  def queued_versions(self) -> list[int]:
    """Of the oldest token of each queued group ("fifo"), in the order of their turns."""
    with self._lock:
      return sorted(oldest for oldest, arrival, row in self._queue if self._store.arrival[row] == arrival)

  def _remove_group(self, rows: list[int], reason: str, *, num_used: int | None = None) -> None:
    """Frees a whole queued group; the rows beyond the first `num_used`, if given, count as discarded."""
    self._num_groups -= 1
    self._remove(rows[:num_used], reason)
    if num_used is not None:
      self._remove(rows[num_used:], "discarded")

  def _drop_stale(self, version: int) -> None:
    self._version = max(self._version, int(version))
    if self._by_version is None:
      return
    for row in self._by_version.take_older(version - self._max_staleness, self._store):
      if self._store.arrival[row] < 0:
        continue  # left with its group a moment ago
      rows = self._store.group_of(row) if self._fifo else [row]
      self._count_by_length("lost", np.array(rows)[self._store.uses[rows] == 0])
      if self._fifo:
        self._remove_group(rows, "evicted_age")
      else:
        self._remove(rows, "evicted_age")

  def _count_by_length(self, what: str, rows: np.ndarray) -> None:
    lengths = self._store.length[rows]
    if what == "lost":
      self._counts["evicted_age_unused"] += len(rows)
      self._counts["evicted_age_unused_tokens"] += int(lengths.sum())
    for bucket, count in zip(*np.unique(1 << np.ceil(np.log2(lengths)).astype(int), return_counts=True)):
      counts = self._by_length.setdefault(int(bucket), {"added": 0, "lost": 0})
      counts[what] += int(count)

  def _num_available(self) -> int:
    """Groups that a batch could hold now."""
    if self._fifo:
      return self._num_groups
    return int(len(self._choice) >= MIN_ROWS) if self._single else len(self._choice)

  def _rebuild(self, arrays: dict[str, np.ndarray]) -> None:
    """Derives what is not saved from the rows of the store."""
    store, rows = self._store, np.asarray(arrays["rows"])
    if self._by_version is not None:
      self._by_version.add(rows, store)
    if self._fifo:
      for row in rows[store.arrival[rows] == store.first_arrival[rows]].tolist():
        self._enqueue(row)
      return
    if self._near is not None:
      self._near.enter(rows, store)
    if self._index is not None:
      for row, prompt_id in zip(rows.tolist(), store.prompt_id[store.slot[rows]].tolist(), strict=True):
        self._index.add(hash_response(prompt_id, store.tokens[row, : store.length[row]].tobytes()), row)
    self._choice.load(arrays, rows=rows, recent_since=self._published[0])

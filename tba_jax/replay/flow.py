"""Which prompt is sampled next, and whether a searcher may start sampling it: the ledger of prompts and the admission
rule.

The guarantee that nothing too old is trained on is the buffer's check at the draw; admission only keeps searchers from
wasting work.
"""

from __future__ import annotations

import heapq
import threading
from typing import Any

import numpy as np

from tba_jax.types import Occurrence


class PromptLedger:
  """Hands out prompts in one global order and remembers which are being sampled. Safe to use from several threads.

  Occurrence n is the prompt at place n % num_prompts of the seeded permutation of epoch n // num_prompts, whoever asks
  and whenever: each prompt has exactly one occurrence per epoch. An occurrence ends by `finish` (its group is in the
  buffer) or `drop`, or comes back by `requeue`.
  """

  def __init__(self, num_prompts: int, *, seed: int):
    if num_prompts < 1:
      raise ValueError(f"num_prompts={num_prompts} must be at least 1; give the task some prompts.")
    self._num_prompts, self._seed = num_prompts, seed
    self._lock = threading.Lock()
    self._next = 0
    self._pending: list[tuple[int, int]] = []  # heap of (occurrence, attempt)
    self._in_flight: dict[int, int] = {}  # occurrence -> attempt
    self._num_finished = self._num_dropped = self._num_requeued = 0
    self._epoch, self._order = -1, np.empty(0, np.int64)

  def take(self) -> Occurrence:
    """The next prompt to sample: the oldest one that came back, or else a new one. There always is one."""
    with self._lock:
      if self._pending:
        occurrence, attempt = heapq.heappop(self._pending)
      else:
        occurrence, attempt = self._next, 0
        self._next += 1
      self._in_flight[occurrence] = attempt
      return Occurrence(occurrence, self._prompt_of(occurrence), attempt)

  def claim(self, occurrence: Occurrence) -> None:
    """This very one is being sampled, whoever's turn it would be."""
    with self._lock:
      self._pending = [item for item in self._pending if item[0] != occurrence.occurrence]
      self._pending += [(skipped, 0) for skipped in range(self._next, occurrence.occurrence)]
      heapq.heapify(self._pending)
      self._next = max(self._next, occurrence.occurrence + 1)
      self._in_flight[occurrence.occurrence] = occurrence.attempt

  def finish(self, occurrence: Occurrence) -> None:
    """Its group is in the buffer. ValueError if it is not in flight."""
    with self._lock:
      self._end(occurrence)
      self._num_finished += 1

  def requeue(self, occurrence: Occurrence) -> None:
    """It was not sampled to the end: it is handed out again, with fresh keys, before any new one. ValueError if not in
    flight.
    """
    with self._lock:
      self._end(occurrence)
      heapq.heappush(self._pending, (occurrence.occurrence, occurrence.attempt + 1))
      self._num_requeued += 1

  def drop(self, occurrence: Occurrence) -> None:
    """It is given up; its prompt comes again in the next epoch. ValueError if it is not in flight."""
    with self._lock:
      self._end(occurrence)
      self._num_dropped += 1

  def is_in_flight(self, occurrence: Occurrence) -> bool:
    """Whether this attempt at it is still the one that is waited for."""
    with self._lock:
      return self._in_flight.get(occurrence.occurrence) == occurrence.attempt

  def in_flight(self) -> tuple[Occurrence, ...]:
    """What has been taken and has not ended, oldest first."""
    with self._lock:
      return tuple(
        Occurrence(number, self._prompt_of(number), attempt) for number, attempt in sorted(self._in_flight.items())
      )

  def stats(self) -> dict[str, int]:
    """Occurrences: "taken" are new ones handed out, "in_flight" and "pending" are now, others count events."""
    with self._lock:
      return {
        "taken": self._next,
        "in_flight": len(self._in_flight),
        "pending": len(self._pending),
        "finished": self._num_finished,
        "dropped": self._num_dropped,
        "requeued": self._num_requeued,
        "epoch": self._next // self._num_prompts,
      }

  def state_dict(self) -> dict[str, Any]:
    """JSON-able. What is in flight is saved as pending with the SAME attempt: a resume repeats exactly what was rolled
    back.
    """
    with self._lock:
      pending = sorted(self._pending + list(self._in_flight.items()))
      return {
        "num_prompts": self._num_prompts,
        "seed": self._seed,
        "next": self._next,
        "pending": [list(item) for item in pending],
        "finished": self._num_finished,
        "dropped": self._num_dropped,
        "requeued": self._num_requeued,
      }

  def load_state_dict(self, state: dict[str, Any]) -> None:
    """Replaces everything by what `state_dict` gave.

    Raises:
      ValueError: it is of a ledger with another number of prompts or another seed, whose order would be another.
    """
    for name, here in (("num_prompts", self._num_prompts), ("seed", self._seed)):
      if state[name] != here:
        raise ValueError(
          f"the saved ledger has {name}={state[name]}, here it is {here}; resume with the data and seed of the run."
        )
    with self._lock:
      self._next = state["next"]
      self._pending = [(occurrence, attempt) for occurrence, attempt in state["pending"]]
      heapq.heapify(self._pending)
      self._in_flight = {}
      self._num_finished, self._num_dropped, self._num_requeued = state["finished"], state["dropped"], state["requeued"]

  def _end(self, occurrence: Occurrence) -> None:
    if self._in_flight.get(occurrence.occurrence) != occurrence.attempt:
      raise ValueError(
        f"{occurrence} is not in flight; an occurrence ends once, by finish, requeue or drop, after take handed it out."
      )
    del self._in_flight[occurrence.occurrence]

  def _prompt_of(self, occurrence: int) -> int:
    epoch, place = divmod(occurrence, self._num_prompts)
    if epoch != self._epoch:
      self._epoch, self._order = epoch, np.random.default_rng([self._seed, epoch]).permutation(self._num_prompts)
    return int(self._order[place])


def may_start_group(
  *,
  trainer_version: int,
  searcher_version: int,
  unused_groups: int,
  running_groups: int,
  groups_per_step: int,
  max_staleness: int,
) -> bool:
  """Whether a group started now will still be fresh enough when its turn comes: u + floor((Q + R) / B) - v <=
  max_staleness.

  Exact for once-through, oldest-first use: Q + R groups come before this one, B of them leave with each step.

  Args:
    trainer_version: u, the version at which the NEXT batch to be drawn will be trained: applied updates plus batches
      drawn ahead.
    searcher_version: v, of the weights that would sample the group.
    unused_groups: Q, live groups in the buffer that no batch has drawn.
    running_groups: R, groups being sampled, by all searchers.
    groups_per_step: B.
    max_staleness: in versions; -1: no limit.

  Raises:
    ValueError: the searcher is ahead of the trainer, which happens only if versions were not rolled back together.
  """
  if searcher_version > trainer_version:
    raise ValueError(
      f"searcher_version={searcher_version} is ahead of trainer_version={trainer_version}; after a resume give "
      "the searchers the weights of the checkpoint."
    )
  if max_staleness < 0:
    return True
  return trainer_version + (unused_groups + running_groups) // groups_per_step - searcher_version <= max_staleness


def check_flow(max_staleness: int, sync_every_steps: int) -> None:
  """Refuses a limit that would stop the run: before each publish the trainer is sync_every_steps - 1 updates ahead of
  the searchers.

  Raises:
    ValueError: sync_every_steps < 1, or 0 <= max_staleness < sync_every_steps - 1.
  """
  if sync_every_steps < 1:
    raise ValueError(f"sync_every_steps={sync_every_steps} must be at least 1.")
  if 0 <= max_staleness < sync_every_steps - 1:
    raise ValueError(
      f"max_staleness={max_staleness} is less than sync_every_steps - 1 = {sync_every_steps - 1}: the trainer would "
      "run out of rollouts before it publishes, and wait for ever; set max_staleness to "
      f"{sync_every_steps - 1} or more, -1 for no limit, or publish more often."
    )

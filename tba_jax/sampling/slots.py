"""Which sample decodes in which slot, and whose prompt each lane of slots holds. Host bookkeeping without arrays."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
  """A sample in a slot."""

  group: int
  sample: int


class SlotTable:
  """`num_slots` slots in lanes of `lane_samples` neighbours. A lane serves one group at a time, by one set of weights.

  In lanes of more than one, a lane that falls free waits until all its slots are, unless its group has samples left:
  those begin in it, on the prompt that it holds.
  """

  def __init__(self, num_slots: int, lane_samples: int):
    self.lane_samples = lane_samples
    self.rows: list[Row | None] = [None] * num_slots
    self._lanes: list[tuple[int, int] | None] = [None] * (num_slots // lane_samples)  # group, generation of the weights

  @property
  def num_running(self) -> int:
    """Slots that hold a sample."""
    return sum(row is not None for row in self.rows)

  def clear(self) -> None:
    """Nothing runs."""
    self.rows = [None] * len(self.rows)
    self._lanes = [None] * len(self._lanes)

  def claim(
    self, group: int, *, samples: range, generation: int, groups_waiting: int
  ) -> tuple[list[int], list[int]]:
    """Puts the first of a group's waiting samples into free slots.

    Returns: the slots, in order of `samples`, and those of their lanes that need the group's prompt.

    In lanes of more than one, empty lanes are shared out among the groups that wait: a group that runs through few
    lanes several times leaves fewer slots idle at its end than one that takes many lanes once.
    """
    empty = [lane for lane in range(len(self._lanes)) if not any(self._slots_of(lane))]
    held = [lane for lane, holds in enumerate(self._lanes) if holds == (group, generation) and lane not in empty]
    share = len(empty) if self.lane_samples == 1 else max(1, len(empty) // max(1, groups_waiting))
    want = len(samples)
    slots: list[int] = []
    placed: list[int] = []
    for lane in (*held, *empty[:share]):
      first = lane * self.lane_samples
      free = [slot for slot in range(first, first + self.lane_samples) if self.rows[slot] is None]
      taken = free[: want - len(slots)]
      if taken and lane not in held:
        placed.append(lane)
        self._lanes[lane] = (group, generation)
      slots += taken
      if len(slots) == want:
        break
    for sample, slot in zip(samples, slots):
      self.rows[slot] = Row(group, sample)
    return slots, placed

  def renew(self, generation: int) -> None:
    """What every lane with samples holds is of these weights now."""
    self._lanes = [holds and (holds[0], generation) for holds in self._lanes]

  def first_running(self) -> dict[int, int]:
    """A slot that runs, of each lane that has one: {slot: lane}."""
    found = {}
    for lane in range(len(self._lanes)):
      slot = next((lane * self.lane_samples + i for i, row in enumerate(self._slots_of(lane)) if row is not None), None)
      if slot is not None:
        found[slot] = lane
    return found

  def _slots_of(self, lane: int) -> list[Row | None]:
    return self.rows[lane * self.lane_samples : (lane + 1) * self.lane_samples]

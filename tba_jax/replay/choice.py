"""What order "tba" draws from: the rows of each prompt, and which prompts (with one prompt: which rows) may be chosen.
"""

from __future__ import annotations

import array

import numpy as np

from tba_jax.replay import priorities
from tba_jax.replay.checks import MIN_ROWS
from tba_jax.replay.store import RowStore


class TbaChoice:
  """Follows the rows of a store as they come and go, and chooses training groups among them.

  A unit is what the coin is tossed for: the slot of a prompt with rows enough for a group, or with `single_prompt` a
  row. Not thread-safe; the settings are those of `ReplayBuffer`.
  """

  def __init__(
    self, store: RowStore, *, capacity: int, recent_fraction: float, priority: str, priority_temperature: float,
    single_prompt: bool,
  ):
    self._store, self._single = store, single_prompt
    self._priority, self._priority_temperature = priority, priority_temperature
    self._recent_since = 0  # arrival number
    self.rows_of: dict[int, array.array] = {}  # slot -> its rows, oldest first; none with one prompt
    self._chooser = priorities.UnitChooser(
      capacity,
      recent_fraction=recent_fraction,
      weighted=priority == "residual" or (priority == "reward" and single_prompt),
    )

  def __len__(self) -> int:
    return len(self._chooser)

  @property
  def num_recent(self) -> int:
    return self._chooser.num_recent

  def enter(self, rows: np.ndarray) -> None:
    """Fresh rows of one group, oldest first, may be chosen."""
    if self._single:
      weights = self._row_weights(rows)
      for row, weight in zip(rows.tolist(), weights.tolist(), strict=True):
        self._chooser.enter(row, weight=weight)
      return
    slot = int(self._store.slot[rows[0]])
    of_prompt = self.rows_of.setdefault(slot, array.array("q"))
    of_prompt.extend(rows.tolist())
    if len(of_prompt) >= MIN_ROWS:
      self._chooser.enter(slot, weight=self._prompt_weight(slot))
    else:
      self._store.set_aside(rows)  # admission must not wait for somebody to use what cannot be drawn

  def leave(self, row: int) -> None:
    """A row that is about to leave the store; `refresh` its slot once all rows of the moment have left."""
    if self._single:
      self._chooser.leave(row)
    else:
      self.rows_of[int(self._store.slot[row])].remove(row)

  def refresh(self, slot: int) -> None:
    """Brings the unit of a prompt up to date after it lost rows or got new residuals."""
    rows = self.rows_of[slot]
    if len(rows) < MIN_ROWS:
      self._chooser.leave(slot)
      if rows:
        self._store.set_aside(np.array(rows))
      else:
        del self.rows_of[slot]
      return
    if not self._is_recent(slot):
      self._chooser.age(slot)
    self._chooser.set_weight(slot, self._prompt_weight(slot))

  def age(self, recent_since: int) -> None:
    """Recent is from now on what has a row of this arrival number or later."""
    self._recent_since = recent_since
    for unit in self._chooser.recent():
      if not self._is_recent(unit):
        self._chooser.age(unit)

  def choose(
    self, rng: np.random.Generator, *, num_prompts: int, responses_per_prompt: int
  ) -> tuple[list[np.ndarray], list[float], int]:
    """Rows of each training group, the groups' importance weights, and the number of prompts that should have been
    recent while none was left."""
    if self._single:
      choice = self._chooser.choose(rng, min(responses_per_prompt, len(self._chooser)))
      return [np.array(choice.units, np.int64)], [1.0], choice.num_recent_misses
    choice = self._chooser.choose(rng, num_prompts)
    groups = [
      self._choose_rows(rng, slot, responses_per_prompt, newest=newest)
      for slot, newest in zip(choice.units, choice.from_recent, strict=True)
    ]
    return groups, choice.importance, choice.num_recent_misses

  def save(self) -> dict[str, np.ndarray]:
    """What cannot be told from the rows of the store."""
    return self._chooser.save()

  def load(self, arrays: dict[str, np.ndarray], *, rows: np.ndarray, recent_since: int) -> None:
    """Goes on from `save` in a new object; `rows` are those of the store, oldest first."""
    self._recent_since = recent_since
    units = np.asarray(arrays["units"])
    if self._single:
      weights = self._row_weights(units)
    else:
      for row, slot in zip(rows.tolist(), self._store.slot[rows].tolist(), strict=True):
        self.rows_of.setdefault(slot, array.array("q")).append(row)
      weights = np.array([self._prompt_weight(slot) for slot in units.tolist()])
    self._chooser.load(arrays, weights=weights)

  def _choose_rows(self, rng: np.random.Generator, slot: int, count: int, *, newest: bool) -> np.ndarray:
    rows = np.array(self.rows_of[slot], np.int64)
    if newest:
      return rows[::-1][:count]
    scores = self._store.reward[rows] / self._priority_temperature if self._priority == "reward" else None
    return rows[priorities.choose_rows(rng, len(rows), count, scores=scores)]

  def _prompt_weight(self, slot: int) -> float:
    if self._priority != "residual":
      return 1.0
    return priorities.residual_weight(
      self._store.residual[np.array(self.rows_of[slot])], temperature=self._priority_temperature
    )

  def _row_weights(self, rows: np.ndarray) -> np.ndarray:
    if self._priority != "reward":
      return np.ones(len(rows))
    return priorities.reward_weight(self._store.reward[rows], temperature=self._priority_temperature)

  def _is_recent(self, unit: int) -> bool:
    newest_row = unit if self._single else self.rows_of[unit][-1]
    return bool(self._store.arrival[newest_row] >= self._recent_since)

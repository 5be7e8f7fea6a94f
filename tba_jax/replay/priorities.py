"""What the replay buffer draws by: sets that are drawn from uniformly, a tree that is drawn from by weight, and the
weights themselves.

Plain data structures over small integers (rows or prompt slots). Every operation costs O(1) or O(log n), and every
state is a function of its saved contents, bit for bit, so that a restored structure draws what the unbroken one would
have drawn.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

PRIORITIES = ("uniform", "reward", "residual")

RESIDUAL_FLOOR = 1e-3  # nats; a group that is fitted perfectly can still be drawn (PER's epsilon, Schaul et al. 2016)
MAX_EXPONENT = 600.0  # exp(600) * 1e6 rows still fits a float64


class DrawSet:
  """A set of integers in [0, capacity) with a uniform draw. Members can be hidden for a while (what a batch already
  holds).

  Members lie in one array, the hidden ones at its end. Their order depends on history, so it is part of the state.
  """

  def __init__(self, capacity: int):
    self._members = np.empty(capacity, np.int32)
    self._places = np.zeros(capacity, np.int32)  # place + 1; zeros are memory that nothing has touched yet
    self._size = 0
    self._num_hidden = 0

  def __len__(self) -> int:
    return self._size

  def __contains__(self, member: int) -> bool:
    return self._places[member] > 0

  @property
  def num_visible(self) -> int:
    return self._size - self._num_hidden

  def members(self) -> np.ndarray:
    """A copy of the members, in the order that draws depend on."""
    return self._members[: self._size].copy()

  def add(self, member: int) -> None:
    assert self._num_hidden == 0
    if self._places[member] == 0:
      self._members[self._size] = member
      self._size += 1
      self._places[member] = self._size

  def discard(self, member: int) -> None:
    assert self._num_hidden == 0
    if self._places[member] > 0:
      self._move(member, self._size - 1)
      self._places[member] = 0
      self._size -= 1

  def choose(self, rng: np.random.Generator) -> int:
    """One visible member, each with the same probability."""
    return int(self._members[rng.integers(self.num_visible)])

  def hide(self, member: int) -> None:
    """Keeps a member from being chosen until `show_all`; no effect on others, or on what is no member."""
    if 0 < self._places[member] <= self.num_visible:
      self._move(member, self.num_visible - 1)
      self._num_hidden += 1

  def show_all(self) -> None:
    self._num_hidden = 0

  def assign(self, members: np.ndarray, *, num_hidden: int = 0) -> None:
    """Replaces the contents by `members` (distinct, in this order), of which the last `num_hidden` are hidden."""
    self._places[self._members[: self._size]] = 0
    self._size, self._num_hidden = len(members), num_hidden
    self._members[: self._size] = members
    self._places[members] = np.arange(1, self._size + 1)

  def copy_from(self, other: DrawSet) -> None:
    self.assign(other._members[: other._size], num_hidden=other._num_hidden)

  def _move(self, member: int, place: int) -> None:
    """Swaps a member with the one at `place`."""
    old, displaced = self._places[member] - 1, self._members[place]
    self._members[old], self._members[place] = displaced, member
    self._places[displaced], self._places[member] = old + 1, place + 1


class SumTree:
  """Weights of the integers in [0, capacity), drawn from in proportion; O(log capacity) to set and to draw.

  A parent is always recomputed as the sum of its two children, never adjusted by a difference: no rounding is carried
    along, and a
  tree built anew from the same weights is the same tree, bit for bit.
  """

  def __init__(self, capacity: int):
    self._num_leaves = 1 << max(capacity - 1, 1).bit_length()
    self._sums = np.zeros(2 * self._num_leaves)

  @property
  def total(self) -> float:
    return float(self._sums[1])

  def get(self, member: int) -> float:
    return float(self._sums[self._num_leaves + member])

  def set(self, member: int, weight: float) -> None:
    sums, node = self._sums, self._num_leaves + member
    sums[node] = weight
    while node > 1:
      node >>= 1
      sums[node] = sums[2 * node] + sums[2 * node + 1]

  def assign(self, members: np.ndarray, weights: np.ndarray) -> None:
    """Replaces all weights; members that are not named weigh 0."""
    self._sums[:] = 0
    self._sums[self._num_leaves + np.asarray(members, np.int64)] = weights
    first = self._num_leaves
    while first > 1:
      pairs = self._sums[first : 2 * first]
      self._sums[first // 2 : first] = pairs[0::2] + pairs[1::2]
      first //= 2

  def choose(self, rng: np.random.Generator) -> int:
    """One member with probability weight / total; the total must be positive."""
    sums, node = self._sums, 1
    point = rng.random() * sums[1]
    while node < self._num_leaves:
      node *= 2
      left = sums[node]
      # Rounding may leave a point at or beyond all that lies right of here: a subtree that weighs nothing is never
      # entered.
      if point >= left and sums[node + 1] > 0:
        point -= left
        node += 1
    return node - self._num_leaves


def choose_rows(rng: np.random.Generator, num_rows: int, count: int, *, scores: np.ndarray | None = None) -> np.ndarray:
  """Chooses `count` of `num_rows` without replacement: uniformly, or one after the other from softmax(scores) of what
  is left.

  The second by the Gumbel top-k trick (Kool et al. 2019, arXiv:1903.06059): the k largest of scores + Gumbel noise, in
  descending order, are distributed like k successive draws. Any range of scores is exact.

  Returns:
    int64 [min(count, num_rows)], distinct, in the order drawn.
  """
  if scores is None:
    return rng.permutation(num_rows)[:count]
  noisy = np.asarray(scores, np.float64) + rng.gumbel(size=num_rows)
  return np.argsort(-noisy, kind="stable")[:count]


def reward_weight(rewards: np.ndarray, *, temperature: float) -> np.ndarray:
  """exp(reward / temperature), float64 [n]: the weight of a response among all responses of the one prompt of a task.

  Raises:
    ValueError: the exponent is too large for a sum over a whole buffer.
  """
  exponents = np.asarray(rewards, np.float64) / temperature
  if np.abs(exponents).max(initial=0.0) > MAX_EXPONENT:
    raise ValueError(
      f"reward / priority_temperature reaches {np.abs(exponents).max():.4g}, more than {MAX_EXPONENT:.0f}, which no "
      f"sum over the buffer can hold; raise priority_temperature={temperature} or scale the reward."
    )
  return np.exp(exponents)


def residual_weight(residuals: np.ndarray, *, temperature: float) -> float:
  """(mean |TB residual| of a prompt's responses + floor) ** (1 / temperature): the weight of a prompt among all
  prompts.

  1 / temperature is the exponent alpha of prioritised replay (Schaul et al. 2016, arXiv:1511.05952). The priority
  chooses prompts, and a prompt's responses uniformly, so that one importance weight per group corrects it and centring
  within a group still holds.
  """
  return float((residuals.mean() + RESIDUAL_FLOOR) ** (1.0 / temperature))


def importance_weight(weight: float, *, total: float, num_members: int) -> float:
  """(1 / n) / (weight / total): what makes a draw by weight count as a uniform draw from the same n members.

  Its mean over draws is 1, so it is not divided by its largest value as in PER: groups that came by the recency coin
    weigh 1 beside it.
  It does not explode in the loss either: where the weight is small, so is the residual, which the gradient is
    proportional to.
  """
  return total / (num_members * weight)


class Choice(NamedTuple):
  units: list[int]  # distinct
  from_recent: list[bool]  # came by the coin for recent ones
  importance: list[float]  # weight that makes a draw by weight count as a uniform one; 1 for recent ones
  num_recent_misses: int  # coins for a recent unit where there was none outside the batch


class UnitChooser:
  """Chooses the units of a batch by a coin: recent ones, without replacement over batches, or any, uniformly or by
  weight.

  A unit is whatever the batch holds at most once: a prompt's slot, or, where there is one prompt only, a row.
  """

  def __init__(self, capacity: int, *, recent_fraction: float, weighted: bool):
    self._recent_fraction = recent_fraction
    self._weights = SumTree(capacity) if weighted else None
    self._all = DrawSet(capacity)
    self._recent = DrawSet(capacity)
    self._recent_left = DrawSet(capacity)  # those of the recent ones that this pass over them has not drawn yet

  def __len__(self) -> int:
    return len(self._all)

  @property
  def num_recent(self) -> int:
    return len(self._recent)

  def recent(self) -> list[int]:
    return self._recent.members().tolist()

  def enter(self, unit: int, *, weight: float = 1.0) -> None:
    """A unit with something new: it is recent, and this pass has not drawn it."""
    for members in (self._all, self._recent, self._recent_left):
      members.add(unit)
    self.set_weight(unit, weight)

  def set_weight(self, unit: int, weight: float) -> None:
    if self._weights is not None:
      self._weights.set(unit, weight)

  def age(self, unit: int) -> None:
    """A unit is recent no more."""
    self._recent.discard(unit)
    self._recent_left.discard(unit)

  def leave(self, unit: int) -> None:
    self.age(unit)
    self._all.discard(unit)
    self.set_weight(unit, 0.0)

  def choose(self, rng: np.random.Generator, count: int) -> Choice:
    """Chooses `count` units of at least as many. A pass over the recent ones starts again when none is left that the
    batch lacks.
    """
    assert count <= len(self._all)
    units, from_recent, importance, num_recent_misses = [], [], [], 0
    drawn_in_pass, hidden_weights = [], []
    for coin in (rng.random(count) < self._recent_fraction).tolist():
      recent, weight = coin and self._recent.num_visible > 0, 1.0
      if recent:
        if self._recent_left.num_visible == 0:
          self._recent_left.copy_from(self._recent)
          drawn_in_pass.clear()
        unit = self._recent_left.choose(rng)
        drawn_in_pass.append(unit)
      else:
        num_recent_misses += int(coin)
        if self._weights is None:
          unit = self._all.choose(rng)
        else:
          unit = self._weights.choose(rng)
          weight = importance_weight(
            self._weights.get(unit), total=self._weights.total, num_members=self._all.num_visible
          )
      units.append(unit)
      from_recent.append(recent)
      importance.append(weight)
      for members in (self._all, self._recent, self._recent_left):
        members.hide(unit)
      if self._weights is not None:
        hidden_weights.append(self._weights.get(unit))
        self._weights.set(unit, 0.0)
    for members in (self._all, self._recent, self._recent_left):
      members.show_all()
    for unit in drawn_in_pass:
      self._recent_left.discard(unit)
    if self._weights is not None:
      for unit, weight in zip(units, hidden_weights, strict=True):
        self._weights.set(unit, weight)
    return Choice(units, from_recent, importance, num_recent_misses)

  def save(self) -> dict[str, np.ndarray]:
    """The members in the order that draws depend on. Weights are not saved, they follow from what the units hold."""
    return {
      "units": self._all.members(),
      "recent_units": self._recent.members(),
      "recent_left_units": self._recent_left.members(),
    }

  def load(self, arrays: dict[str, np.ndarray], *, weights: np.ndarray | None) -> None:
    """Restores what `save` gave; `weights` are of arrays["units"], in their order."""
    self._all.assign(np.asarray(arrays["units"]))
    self._recent.assign(np.asarray(arrays["recent_units"]))
    self._recent_left.assign(np.asarray(arrays["recent_left_units"]))
    if self._weights is not None:
      self._weights.assign(np.asarray(arrays["units"]), weights)

"""The structures that draws go through, against exact probabilities (chi-square) and plain Python models."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats as scipy_stats

from tba_jax.replay import priorities

NUM_DRAWS = 100_000
# Seeds are fixed: what passes once passes for good. A distribution wrong by a few per cent has p < 1e-20 at this many
# draws.
P_VALUE = 1e-3


def assert_distributed(counts, probabilities):
  counts, expected = np.asarray(counts, np.float64), np.asarray(probabilities, np.float64) * np.sum(counts)
  assert counts[expected == 0].sum() == 0
  seen = expected > 0
  assert scipy_stats.chisquare(counts[seen], expected[seen]).pvalue > P_VALUE


def pair_probabilities(weights):
  """Of drawing i and then j != i, one after the other in proportion to weights."""
  p = np.asarray(weights, np.float64) / np.sum(weights)
  table = p[:, None] * p[None, :] / (1 - p[:, None])
  np.fill_diagonal(table, 0)
  return table.reshape(-1)


def test_draw_set_does_what_a_python_set_does_and_draws_uniformly():
  rng = np.random.default_rng(0)
  members, model = priorities.DrawSet(40), set()
  for _ in range(3000):
    member, action = int(rng.integers(40)), rng.integers(2)
    if action:
      members.add(member)
      model.add(member)
    else:
      members.discard(member)
      model.discard(member)
    assert len(members) == len(model) and (member in members) == (member in model)
  assert sorted(members.members().tolist()) == sorted(model)
  hidden = sorted(model)[::2]
  for member in hidden:
    members.hide(member)
    members.hide(member)  # hiding twice is hiding once
  visible = sorted(model - set(hidden))
  assert members.num_visible == len(visible)
  drawn = np.array([members.choose(rng) for _ in range(NUM_DRAWS)])
  assert_distributed(np.bincount(drawn, minlength=40), np.isin(np.arange(40), visible) / len(visible))
  members.show_all()
  assert members.num_visible == len(model)


def test_draw_set_restores_its_order():
  rng = np.random.default_rng(1)
  members = priorities.DrawSet(30)
  for member in rng.permutation(30).tolist() + rng.permutation(30)[:9].tolist():
    (members.discard if member in members else members.add)(member)
  restored = priorities.DrawSet(30)
  restored.assign(np.array([3, 4]))
  restored.assign(members.members())
  assert 3 in restored or 3 not in members
  ours, theirs = np.random.default_rng(2), np.random.default_rng(2)
  assert [members.choose(ours) for _ in range(50)] == [restored.choose(theirs) for _ in range(50)]


@pytest.mark.parametrize("capacity", [2, 3, 8, 21])
def test_sum_tree_draws_in_proportion(capacity):
  rng = np.random.default_rng(capacity)
  weights = rng.exponential(size=capacity)
  weights[2::5] = 0.0
  tree = priorities.SumTree(capacity)
  for member in rng.permutation(capacity).tolist():
    tree.set(member, 7.0)
    tree.set(member, weights[member])
  np.testing.assert_allclose(tree.total, weights.sum(), rtol=1e-14)
  drawn = np.array([tree.choose(rng) for _ in range(NUM_DRAWS)])
  assert_distributed(np.bincount(drawn, minlength=capacity), weights / weights.sum())


def test_sum_tree_built_anew_is_the_same_bit_for_bit_and_never_gives_a_weightless_member():
  rng = np.random.default_rng(3)
  tree, weights = priorities.SumTree(300), np.zeros(300)
  for _ in range(5000):
    member = int(rng.integers(300))
    weights[member] = float(np.exp(rng.normal() * 20)) * rng.integers(
      2
    )  # 40 orders of magnitude: differences would drown the small
    tree.set(member, weights[member])
  anew = priorities.SumTree(300)
  anew.assign(np.arange(300), weights)
  np.testing.assert_array_equal(anew._sums, tree._sums)
  for member in np.argsort(-weights)[
    : np.count_nonzero(weights) - 1
  ].tolist():  # take the heavy ones away: the lightest is still found
    tree.set(member, 0.0)
  assert tree.choose(rng) == np.flatnonzero(weights)[np.argmin(weights[weights > 0])]


def test_sum_tree_gives_no_weightless_member_where_rounding_puts_the_point_past_all_weight():
  class AlmostOne:
    def random(self):
      return np.nextafter(1.0, 0.0)

  rng = np.random.default_rng(12)
  for _ in range(2000):
    weights = rng.random(13) * (rng.random(13) < 0.5)
    weights[rng.integers(13)] = 1.0
    tree = priorities.SumTree(13)
    tree.assign(np.arange(13), weights)
    assert weights[tree.choose(AlmostOne())] > 0


@pytest.mark.parametrize("scores", [None, np.array([0.0, 1.0, -1.0, 2.0]), np.array([1000.0, 999.0, 1001.0, 1000.5])])
def test_choose_rows_draws_one_after_the_other_from_the_softmax(scores):
  rng = np.random.default_rng(4)
  pairs = np.array([priorities.choose_rows(rng, 4, 2, scores=scores) for _ in range(NUM_DRAWS)])
  weights = np.ones(4) if scores is None else np.exp(scores - scores.max())
  assert_distributed(np.bincount(pairs[:, 0] * 4 + pairs[:, 1], minlength=16), pair_probabilities(weights))


def test_choose_rows_repeats_none_and_gives_all_if_there_are_fewer():
  rng = np.random.default_rng(5)
  for scores in (None, np.zeros(5)):
    assert sorted(priorities.choose_rows(rng, 5, 9, scores=scores).tolist()) == [0, 1, 2, 3, 4]


def test_weights_of_rewards_and_residuals():
  np.testing.assert_allclose(
    priorities.reward_weight(np.array([0.0, 1.0, -2.0]), temperature=0.5), [1.0, np.e**2, np.e**-4]
  )
  alpha = 0.6  # PER's exponent is 1 / temperature
  got = priorities.residual_weight(np.array([1.0, 3.0, 5.0]), temperature=1 / alpha)
  np.testing.assert_allclose(got, (3.0 + priorities.RESIDUAL_FLOOR) ** alpha)
  with pytest.raises(
    ValueError, match=r"reward / priority_temperature reaches 1000, more than 600.*raise priority_temperature=0.01"
  ):
    priorities.reward_weight(np.array([10.0]), temperature=0.01)


def make_chooser(num_units, num_recent, *, recent_fraction, weights=None):
  chooser = priorities.UnitChooser(num_units, recent_fraction=recent_fraction, weighted=weights is not None)
  for unit in range(num_units):
    chooser.enter(unit, weight=1.0 if weights is None else weights[unit])
  for unit in range(num_recent, num_units):
    chooser.age(unit)
  return chooser


def test_coin_chooses_recent_units_as_often_as_stated():
  rng = np.random.default_rng(6)
  chooser = make_chooser(10, 4, recent_fraction=0.3)
  choices = [chooser.choose(rng, 1) for _ in range(NUM_DRAWS)]
  from_recent = np.array([choice.from_recent[0] for choice in choices])
  units = np.array([choice.units[0] for choice in choices])
  assert_distributed(np.bincount(from_recent), [0.7, 0.3])
  assert_distributed(np.bincount(units[~from_recent], minlength=10), np.full(10, 0.1))  # any unit, the recent ones too
  passes = units[from_recent][: from_recent.sum() // 4 * 4].reshape(-1, 4)
  assert (np.sort(passes, axis=1) == np.arange(4)).all()  # without replacement, recycled when empty
  orders = {order: i for i, order in enumerate(itertools.permutations(range(4)))}
  assert_distributed(
    np.bincount([orders[tuple(order)] for order in passes.tolist()], minlength=24), np.full(24, 1 / 24)
  )


def test_batch_repeats_no_unit_and_counts_coins_without_a_recent_unit():
  rng = np.random.default_rng(7)
  chooser = make_chooser(6, 2, recent_fraction=1.0)
  for _ in range(200):
    choice = chooser.choose(rng, 5)
    assert len(set(choice.units)) == 5
    assert choice.from_recent == [True, True, False, False, False] and choice.num_recent_misses == 3
    assert set(choice.units[:2]) == {0, 1}


def test_batch_of_uniform_units_is_a_simple_random_sample():
  rng = np.random.default_rng(8)
  chooser = make_chooser(5, 0, recent_fraction=0.0)
  batches = np.array([chooser.choose(rng, 2).units for _ in range(NUM_DRAWS // 2)])
  assert_distributed(np.bincount(batches[:, 0] * 5 + batches[:, 1], minlength=25), pair_probabilities(np.ones(5)))


def test_weighted_units_come_in_proportion_and_importance_weights_undo_it():
  rng = np.random.default_rng(9)
  weights = np.array([0.1, 0.5, 1.0, 4.0])
  chooser = make_chooser(4, 0, recent_fraction=0.0, weights=weights)
  choices = [chooser.choose(rng, 2) for _ in range(NUM_DRAWS // 2)]
  units, importance = np.array([c.units for c in choices]), np.array([c.importance for c in choices])
  assert_distributed(np.bincount(units[:, 0] * 4 + units[:, 1], minlength=16), pair_probabilities(weights))
  # Weighted by its importance each pick counts as a uniform one: the first over all units, the second over those that
  # the first left.
  for place, chosen, share in (
    (0, np.ones(len(units), bool), [1 / 4] * 4),
    (1, units[:, 0] == 3, [1 / 3, 1 / 3, 1 / 3, 0]),
  ):
    picks, weight = units[chosen, place], importance[chosen, place]
    for unit in range(4):
      terms = np.where(picks == unit, weight, 0.0)
      assert abs(terms.mean() - share[unit]) <= 4 * terms.std() / np.sqrt(len(terms))
  assert [
    chooser._weights.get(unit) for unit in range(4)
  ] == weights.tolist()  # a batch leaves the weights as they were


def test_recent_units_weigh_one():
  chooser = make_chooser(4, 4, recent_fraction=1.0, weights=[1.0, 2.0, 3.0, 4.0])
  assert chooser.choose(np.random.default_rng(0), 4).importance == [1.0] * 4


def test_chooser_restores_to_the_same_draws():
  rng = np.random.default_rng(10)
  weights = rng.random(12) + 0.1
  chooser = make_chooser(12, 6, recent_fraction=0.5, weights=weights)
  chooser.choose(rng, 3)
  chooser.leave(2)
  saved = chooser.save()
  restored = priorities.UnitChooser(12, recent_fraction=0.5, weighted=True)
  restored.load(saved, weights=weights[saved["units"]])
  ours, theirs = np.random.default_rng(11), np.random.default_rng(11)
  for _ in range(100):
    assert chooser.choose(ours, 4) == restored.choose(theirs, 4)

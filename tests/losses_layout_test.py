"""What every registered loss must not depend on: order of rows, packing, padding, micro-batches, numbers of groups."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import losses_cases as cases
import numpy as np
import pytest

from tba_jax.losses.registry import LOSSES

BETA = 0.05
NAMES = sorted(LOSSES)


def compare(actual, wanted):
  np.testing.assert_allclose(actual[0], wanted[0], rtol=1e-5, atol=1e-6)
  cases.assert_same(actual[1], wanted[1], rtol=2e-5, atol=1e-6)
  assert actual[2].keys() == wanted[2].keys()
  for name, value in wanted[2].items():
    assert np.isfinite(value), name
    np.testing.assert_allclose(actual[2][name], value, rtol=2e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("name", NAMES)
def test_order_packing_padding_and_group_numbers_change_nothing(name):
  case, fn = cases.standard_case(21), LOSSES[name].fn
  wanted = cases.run(fn, case, beta=BETA)
  assert max(np.abs(g).max(initial=0) for g in wanted[1].values()) > 1e-3
  assert (wanted[1][9] == 0).all()  # the row that is not valid
  order = np.random.default_rng(0).permutation(len(case.log_pi))
  compare(cases.run(fn, case, beta=BETA, order=order, pack=True, pad_rows=2, pad_responses=3, relabel=[2, 0, 1], seed=5), wanted)


@pytest.mark.parametrize("name", NAMES)
def test_micro_batches_of_whole_groups_add_up(name):
  case, fn = cases.standard_case(22), LOSSES[name].fn
  wanted = cases.run(fn, case, beta=BETA)
  loss, grads, metrics = 0.0, {}, dict.fromkeys(wanted[2], 0.0)
  for log_pi, batch, places in cases.micro_batches(case, [[1], [2, 0]], pack=True, pad_responses=1):
    part = cases.evaluate(fn, log_pi, batch, places, beta=BETA)
    loss, grads = loss + part[0], grads | part[1]
    metrics = {key: value + part[2][key] for key, value in metrics.items()}
  compare((loss, grads, metrics), wanted)


@pytest.mark.parametrize("name", NAMES)
def test_a_group_split_over_micro_batches_learns_through_fixed_coefficients(name):
  """Two passes: d loss / d log_pi of the whole batch, then sum(coefficients x log_pi) piece by piece gives the whole gradient."""
  case, fn = cases.standard_case(23), LOSSES[name].fn
  log_pi, batch, _ = cases.lay_out(case, pack=False)
  log_pi = jnp.nan_to_num(log_pi)
  direction = jnp.asarray(np.random.default_rng(0).normal(size=log_pi.shape), jnp.float32)

  def scores(theta, rows):  # a toy model: smooth in two parameters, any row alone
    return log_pi[rows] + theta[0] * direction[rows] + jnp.square(theta[1]) * jnp.sin(direction[rows])

  theta, everything = jnp.array([0.01, 0.1], jnp.float32), np.arange(log_pi.shape[0])
  whole = jax.grad(lambda t: fn(scores(t, everything), batch, beta=jnp.float32(BETA))[0])(theta)
  coefficients = jax.grad(lambda x: fn(x, batch, beta=jnp.float32(BETA))[0])(scores(theta, everything))
  pieces = sum(jax.grad(lambda t, rows=rows: jnp.sum(coefficients[rows] * scores(t, rows)))(theta) for rows in np.split(everything, 5))
  np.testing.assert_allclose(pieces, whole, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rewards", [[1.0] * 8, [0.35] * 7 + [1.0]])
def test_equal_and_nearly_equal_rewards_stay_finite_and_small(name, rewards):
  case = cases.make_case([2, 3, 0, 4, 2, 3, 1, 2], [0] * 8, seed=24, rewards=rewards, spread=0.05)
  loss, grads, metrics = cases.run(LOSSES[name].fn, case, beta=BETA)
  assert np.isfinite([loss, *metrics.values()]).all()
  assert max(np.abs(g).max(initial=0) for g in grads.values()) < 2.0
  assert metrics["equal_reward_groups"] == float(len(set(rewards)) == 1)


@pytest.mark.parametrize("name", NAMES)
def test_two_responses_and_empty_ones_are_fine(name):
  case = cases.make_case([0, 3, 0, 0], [0, 0, 1, 1], seed=25)
  loss, grads, metrics = cases.run(LOSSES[name].fn, case, beta=BETA)
  assert np.isfinite([loss, *metrics.values(), *np.concatenate(list(grads.values()))]).all()


@pytest.mark.parametrize("name", NAMES)
def test_huge_log_ratios_stay_finite(name):
  case = cases.standard_case(26)
  for log in (case.log_ref, case.log_mu):
    log[0], log[2] = cases.exact(log[0] - 40.0), cases.exact(log[2] + 40.0)
    log[4] = cases.exact(log[4] - 200.0)
  loss, grads, metrics = cases.run(LOSSES[name].fn, case, beta=BETA)
  assert np.isfinite([loss, *metrics.values(), *np.concatenate(list(grads.values()))]).all()

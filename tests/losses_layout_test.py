"""What every registered loss must not depend on: order of rows, packing, padding, micro-batches, numbers of groups."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import losses_cases as cases
import numpy as np
import pytest

from tba_jax.losses import segments
from tba_jax.losses.registry import LOSSES, head_keywords

BETA = 0.05
NAMES = sorted(LOSSES)
WITH_COMMON_METRICS = ("tb_vargrad",)  # the shared metrics are one piece of code: once is enough


@functools.lru_cache(maxsize=None)
def loss(name):
  """The loss; one that reads a scalar head gets one that depends on the responses' tokens and rewards only."""
  spec = LOSSES[name]
  if not spec.needs_head:
    return spec.fn

  def with_head(log_pi, batch, *, beta):
    scalar = 0.3 * batch.log_mu + segments.at_tokens(segments.kept(batch.rewards, batch), batch)
    return spec.fn(log_pi, batch, beta=beta, **head_keywords(spec, scalar, batch))

  return with_head


def compare(actual, wanted):
  np.testing.assert_allclose(actual[0], wanted[0], rtol=1e-5, atol=1e-6)
  cases.assert_same(actual[1], wanted[1], rtol=2e-5, atol=1e-6)
  assert actual[2].keys() == wanted[2].keys()
  for name, value in wanted[2].items():
    assert np.isfinite(value), name
    np.testing.assert_allclose(actual[2][name], value, rtol=2e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("name", NAMES)
def test_order_packing_padding_and_group_numbers_change_nothing(name):
  case, fn = cases.standard_case(29), loss(name)
  wanted = cases.run(fn, case, beta=BETA, common=name in WITH_COMMON_METRICS)
  assert max(np.abs(g).max(initial=0) for g in wanted[1].values()) > 1e-3
  assert (wanted[1][9] == 0).all()  # the row that is not valid
  order = np.random.default_rng(0).permutation(len(case.log_pi))
  layout = dict(order=order, pack=True, relabel=[2, 0, 1], seed=5)
  compare(cases.run(fn, case, beta=BETA, common=name in WITH_COMMON_METRICS, **layout), wanted)


@pytest.mark.parametrize("name", NAMES)
def test_micro_batches_of_whole_groups_add_up(name):
  case, fn = cases.standard_case(22), loss(name)
  wanted = cases.run(fn, case, beta=BETA, common=name in WITH_COMMON_METRICS)
  total, grads, metrics = 0.0, {}, dict.fromkeys(wanted[2], 0.0)
  for log_pi, batch, places in cases.micro_batches(case, [[1], [2, 0]], pack=True):
    part = cases.evaluate(fn, log_pi, batch, places, beta=BETA, common=name in WITH_COMMON_METRICS)
    total, grads = total + part[0], grads | part[1]
    metrics = {key: value + part[2][key] for key, value in metrics.items()}
  compare((total, grads, metrics), wanted)


@pytest.mark.parametrize("name", ["tb_vargrad", "grpo", "dpo"])
def test_a_group_split_over_micro_batches_learns_through_fixed_coefficients(name):
  """Two passes: d loss / d log_pi of the whole batch, then sum(coefficients x log_pi) by pieces: the whole gradient."""
  case, fn = cases.standard_case(23), loss(name)
  log_pi, batch, _ = cases.lay_out(case)
  log_pi = jnp.nan_to_num(log_pi)
  direction = jnp.asarray(np.random.default_rng(0).normal(size=log_pi.shape), jnp.float32)

  def scores(theta, rows):  # a toy model: smooth in two parameters, each row by itself
    return log_pi[rows] + theta[0] * direction[rows] + jnp.square(theta[1]) * jnp.sin(direction[rows])

  theta, everything = jnp.array([0.01, 0.1], jnp.float32), np.arange(log_pi.shape[0])
  whole = jax.jit(jax.grad(lambda t: fn(scores(t, everything), batch, beta=jnp.float32(BETA))[0]))(theta)
  coefficients = cases.compiled(fn)(scores(theta, everything), batch, jnp.float32(BETA))[1]
  part = jax.jit(jax.grad(lambda t, rows: jnp.sum(coefficients[rows] * scores(t, rows))))
  pieces = sum(part(theta, rows) for rows in np.split(everything, 4))  # groups of 4 and 3 rows are cut
  np.testing.assert_allclose(pieces, whole, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rewards", [[1.0] * 8, [0.35] * 7 + [1.0]])
def test_equal_and_nearly_equal_rewards_stay_finite_and_small(name, rewards):
  case = cases.make_case([2, 3, 0, 4, 2, 3, 1, 2], [0] * 8, seed=24, rewards=rewards, spread=0.05)
  value, grads, metrics = cases.run(loss(name), case, beta=BETA, common=name in WITH_COMMON_METRICS)
  assert np.isfinite([value, *metrics.values()]).all()
  assert max(np.abs(g).max(initial=0) for g in grads.values()) < 2.0


@pytest.mark.parametrize("name", NAMES)
def test_two_responses_and_empty_ones_are_fine(name):
  case = cases.make_case([0, 3, 0, 0], [0, 0, 1, 1], seed=25)
  value, grads, metrics = cases.run(loss(name), case, beta=BETA, common=name in WITH_COMMON_METRICS)
  assert np.isfinite([value, *metrics.values(), *np.concatenate(list(grads.values()))]).all()


def test_rows_sharded_over_devices_are_the_same():
  """Groups are cut by the sharding of rows; per-response arrays are replicated."""
  case, fn = cases.standard_case(31), loss("tb_vargrad")
  wanted = cases.run(fn, case, beta=BETA, common=True)
  log_pi, batch, places = cases.lay_out(case)
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))
  by_rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
  whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  batch = batch._replace(**{
    name: jax.device_put(value, by_rows if value.ndim == 2 else whole) for name, value in batch._asdict().items()
  })
  compare(cases.evaluate(fn, jax.device_put(log_pi, by_rows), batch, places, beta=BETA, common=True), wanted)


def test_a_layout_without_any_padding_is_the_same():
  case, fn = cases.standard_case(30), loss("tb_vargrad")
  exact = cases.run(fn, case, beta=BETA, common=True, num=len(case.log_pi))
  compare(exact, cases.run(fn, case, beta=BETA, common=True))


@pytest.mark.parametrize("name", NAMES)
def test_huge_log_ratios_stay_finite(name):
  case = cases.standard_case(26)
  for log in (case.log_ref, case.log_mu):
    log[0], log[2] = cases.exact(log[0] - 40.0), cases.exact(log[2] + 40.0)
    log[4] = cases.exact(log[4] - 200.0)
  value, grads, metrics = cases.run(loss(name), case, beta=BETA, common=name in WITH_COMMON_METRICS)
  assert np.isfinite([value, *metrics.values(), *np.concatenate(list(grads.values()))]).all()

"""PPO with a critic against float64 loops over responses, its special cases, and what a head's numbers become."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import losses_cases as cases
import numpy as np
import pytest

from tba_jax.losses import segments
from tba_jax.losses.actor_critic import clipped_value_error, gae, ppo
from tba_jax.losses.policy_gradient import score_function
from tba_jax.losses.registry import LOSSES, head_keywords

BETA = float(np.float32(0.05))


def with_values(case: cases.Case, seed: int = 0) -> list[np.ndarray]:
  rng = np.random.default_rng(seed + 100)
  return [cases.exact(rng.normal(size=len(x))) for x in case.log_pi]


def at_places(values, places) -> jax.Array:
  out = np.full((cases.NUM_ROWS, cases.WIDTH), np.nan, np.float32)  # what must not count
  for i, (row, span) in places.items():
    out[row, span] = values[i]
  return jnp.asarray(out)


def token_rewards(case: cases.Case, i: int, beta: float) -> np.ndarray:
  rewards = -beta * (case.log_pi[i] - case.log_ref[i])
  if len(rewards):
    rewards[-1] += case.rewards[i]
  return rewards


def advantages_by_definition(rewards: np.ndarray, values: np.ndarray, lam: float) -> np.ndarray:
  """Sums of lam^d delta_(t+d), each written out."""
  ahead = np.append(values[1:], 0.0)[: len(values)]
  delta = rewards + ahead - values
  return np.array([sum(lam**d * delta[t + d] for d in range(len(delta) - t)) for t in range(len(delta))])


def run_ppo(case: cases.Case, values, *, beta=BETA, old=None, layout=None, **options):
  """(loss, gradient by log_pi, gradient by values), lists of arrays a response, and metrics."""
  log_pi, batch, places = cases.lay_out(case, **(layout or {}))
  old_values = {} if old is None else {"old_values": at_places(old, places)}

  def value(log_pi, values):
    return ppo(log_pi, batch, beta=jnp.float32(beta), values=values, **old_values, **options)

  (loss, metrics), grads = jax.jit(jax.value_and_grad(value, argnums=(0, 1), has_aux=True))(
    log_pi, at_places(values, places))
  for grad in grads:
    total = sum(np.abs(grad[row, span]).sum() for row, span in places.values())
    np.testing.assert_allclose(np.abs(grad).sum(), total, rtol=1e-6)
  by_response = [{i: np.asarray(g[row, span], np.float64) for i, (row, span) in places.items()} for g in grads]
  return float(loss), *by_response, {name: float(x) for name, x in metrics.items()}


def oracle(case: cases.Case, values, moved, moved_values, *, lam, clip, value_clip, old=None):
  """The loss with ratios at `moved` and values at `moved_values`, advantages at the case's own."""
  total, error, num_tokens = 0.0, 0.0, 0
  for i in np.flatnonzero(case.valid):
    advantages = advantages_by_definition(token_rewards(case, i, BETA), values[i], lam)
    returns = advantages + values[i]
    for t, advantage in enumerate(advantages):
      ratio = np.exp(moved[i][t] - case.log_mu[i][t])
      total -= case.weights[i] * min(ratio * advantage, np.clip(ratio, 1 - clip, 1 + clip) * advantage)
      anchor = (values if old is None else old)[i][t]
      held = anchor + np.clip(moved_values[i][t] - anchor, -value_clip, value_clip)
      error += case.weights[i] * max((moved_values[i][t] - returns[t]) ** 2, (held - returns[t]) ** 2)
    num_tokens += len(advantages)
  return total / case.num + 0.5 * error / num_tokens


@pytest.mark.parametrize("lam, pack, with_old", [(1.0, False, False), (0.8, True, True), (0.0, False, False)])
def test_ppo_equals_float64_loops(lam, pack, with_old):
  case = cases.standard_case(71, spread=0.4)
  values = with_values(case)
  old = with_values(case, seed=1) if with_old else None
  settings = dict(lam=lam, clip=0.2, value_clip=0.5, old=old)
  loss, grads, value_grads, metrics = run_ppo(
    case, values, gae_lambda=lam, value_clip=0.5, old=old, layout=dict(pack=pack))
  np.testing.assert_allclose(loss, oracle(case, values, case.log_pi, values, **settings), rtol=2e-5)
  by_log_pi = cases.differentiate(lambda moved: oracle(case, values, moved, values, **settings), case)
  cases.assert_same(grads, by_log_pi, rtol=3e-5, atol=2e-6)
  as_case = cases.standard_case(71)
  as_case.log_pi = values  # only so that `differentiate` moves these
  by_values = cases.differentiate(lambda moved: oracle(case, values, case.log_pi, moved, **settings), as_case)
  cases.assert_same(value_grads, by_values, rtol=3e-5, atol=2e-6)
  errors = np.concatenate([
    advantages_by_definition(token_rewards(case, i, BETA), values[i], lam) for i in np.flatnonzero(case.valid)])
  np.testing.assert_allclose(metrics["value_error"], np.mean(errors**2), rtol=2e-5)
  assert 0.02 < metrics["clip_share"] < 0.9


def test_without_values_and_kl_at_ratio_1_it_is_reinforce_with_the_whole_reward():
  case = cases.standard_case(72)
  case.log_mu = case.log_pi
  grads = run_ppo(case, [np.zeros(len(x)) for x in case.log_pi], beta=0.0, gae_lambda=1.0)[1]
  plain = lambda log_pi, batch, *, beta: (
    score_function(log_pi, batch.rewards, batch), dict.fromkeys(cases.COMMON_METRICS, 0.0))
  cases.assert_same(grads, cases.run(plain, case, beta=0.0)[1])


def test_values_that_are_right_leave_nothing_to_learn():
  """Each value the sum of the rewards to come: no temporal difference is left, whatever lambda."""
  case = cases.standard_case(73)
  values = [np.cumsum(token_rewards(case, i, BETA)[::-1])[::-1] for i in range(len(case.log_pi))]
  _, grads, value_grads, metrics = run_ppo(case, values, gae_lambda=0.7)
  assert max(np.abs(g).max(initial=0) for g in (*grads.values(), *value_grads.values())) < 1e-6
  assert metrics["value_error"] < 1e-12


def test_a_value_that_has_moved_towards_its_return_beyond_the_clip_takes_no_gradient():
  error = lambda v: clipped_value_error(v, jnp.float32(1.0), jnp.float32(0.0), value_clip=0.2)
  assert float(jax.grad(error)(0.5)) == 0.0 and float(error(0.5)) == pytest.approx(0.8**2)
  assert float(jax.grad(error)(0.1)) == pytest.approx(2 * (0.1 - 1.0))
  assert float(jax.grad(error)(-0.5)) == pytest.approx(2 * (-0.5 - 1.0))  # away from it: as without a clip


def test_gae_of_one_response_is_not_touched_by_its_neighbour_in_a_packed_row():
  case = cases.make_case([3, 4], [0, 1], seed=74)
  _, batch, places = cases.lay_out(case, pack=True)
  assert places[0][0] == places[1][0]
  values = with_values(case)
  infinite = [np.full(3, np.inf), values[1]]
  found = gae(jnp.zeros((cases.NUM_ROWS, cases.WIDTH)), at_places(infinite, places), batch, gae_lambda=0.9)
  row, span = places[1]
  np.testing.assert_allclose(found[row, span], advantages_by_definition(np.zeros(4), values[1], 0.9), rtol=1e-5)


def test_ppo_without_values_is_refused():
  with pytest.raises(ValueError, match="values=None is not enough for loss 'ppo': give the value of each state"):
    cases.run(ppo, cases.standard_case(75), beta=BETA)


def test_log_z_is_what_the_head_reads_before_the_first_token():
  case = cases.standard_case(76)  # response 6, of group 2, is empty
  _, batch, places = cases.lay_out(case, pack=True)
  numbers = [np.array([10.0 * case.groups[i] + 0.5 * t for t in range(len(x))]) for i, x in enumerate(case.log_pi)]
  scalar = jnp.nan_to_num(at_places(numbers, places), nan=7.0)
  found = np.asarray(head_keywords(LOSSES["flowrl"], scalar, batch)["log_z"])[: len(case.groups)]
  np.testing.assert_array_equal(found[case.valid], 10.0 * case.groups[case.valid])
  assert head_keywords(LOSSES["ppo"], scalar, batch)["values"] is scalar


def test_decayed_suffix_sums_equal_a_loop():
  case = cases.standard_case(77)
  _, batch, places = cases.lay_out(case, pack=True)
  values = with_values(case)
  found = segments.suffix_sums(at_places(values, places), batch, decay=0.6)
  for i, (row, span) in places.items():
    wanted = [sum(0.6**d * values[i][t + d] for d in range(len(values[i]) - t)) for t in range(len(values[i]))]
    np.testing.assert_allclose(found[row, span], np.array(wanted) * case.valid[i], rtol=2e-5, atol=1e-6)

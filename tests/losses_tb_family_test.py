"""The relatives of trajectory balance and online DPO against float64 numpy, and their special cases."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import losses_cases as cases
import losses_trajectory_balance_test as toy
import numpy as np
import pytest
import scipy.optimize

from tba_jax.losses import trajectory_balance as tb
from tba_jax.losses.preference import dpo

BETA = float(np.float32(0.05))


def deltas(case, log_pi, *, beta=BETA):
  return cases.sums(case.log_ref) + case.rewards / beta - cases.sums(log_pi)


def padded(values):
  return jnp.asarray(np.concatenate([values, np.full(cases.NUM_RESPONSES - len(values), np.nan)]), jnp.float32)


# --- a given log Z -------------------------------------------------------------------------------------------


def learned_z_value(case, log_pi, log_z):
  residuals = log_z - deltas(case, log_pi)
  return BETA / 2 * (case.weights * residuals**2)[case.valid].sum() / case.num


def test_tb_learned_z_equals_float64_numpy_and_teaches_log_z():
  case = cases.standard_case(71)
  log_z = cases.exact(np.array([2.0, -1.0, 0.5])[case.groups])
  fn = functools.partial(tb.tb_learned_z, log_z=padded(log_z))
  cases.check(fn, case, lambda case, moved: learned_z_value(case, moved, log_z), beta=BETA)
  log_pi, batch, _ = cases.lay_out(case)
  grad = jax.jit(jax.grad(lambda z: tb.tb_learned_z(log_pi, batch, beta=jnp.float32(BETA), log_z=z)[0]))(padded(log_z))
  wanted = BETA * case.weights * (log_z - deltas(case, case.log_pi)) * case.valid / case.num
  np.testing.assert_allclose(grad[: len(wanted)], wanted, rtol=2e-5, atol=1e-7)
  assert (np.asarray(grad[len(wanted):]) == 0).all()


def test_tb_learned_z_at_the_mean_of_delta_is_vargrad():
  case = cases.standard_case(72)
  delta = deltas(case, case.log_pi)
  log_z = delta - cases.centred(case, delta)
  fn = functools.partial(tb.tb_learned_z, log_z=padded(log_z))
  ours, theirs = cases.run(fn, case, beta=BETA), cases.run(tb.tb_vargrad, case, beta=BETA)
  np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-5)
  cases.assert_same(ours[1], theirs[1])


@pytest.mark.parametrize("fn", [tb.tb_learned_z, tb.flowrl])
def test_log_z_must_be_given(fn):
  with pytest.raises(ValueError, match=rf"log_z=None is not enough for loss '{fn.__name__}'"):
    cases.run(fn, cases.standard_case(73), beta=BETA)


def test_flowrl_equals_float64_numpy():
  case = cases.standard_case(74)
  log_z = cases.exact(np.array([0.2, -0.1, 0.5])[case.groups])
  rewards = cases.standardised(case, floor=1e-4)

  def oracle(case, moved):
    total = 0.0
    for i in np.flatnonzero(case.valid):
      length = max(len(moved[i]), 1)
      weight = np.clip(np.exp((case.log_pi[i] - case.log_mu[i]).sum()), 0.8, 1.2)
      residual = log_z[i] + moved[i].sum() / length - rewards[i] / BETA - case.log_ref[i].sum() / length
      total += case.weights[i] * weight * residual**2
    return BETA / 2 * total / case.num

  _, _, metrics = cases.check(functools.partial(tb.flowrl, log_z=padded(log_z)), case, oracle, beta=BETA)
  assert 0.1 < metrics["clip_share"] < 0.95


def test_flowrl_on_single_tokens_and_policy_is_tb_with_a_given_log_z_on_standardised_rewards():
  case = cases.make_case([1] * 6, [0, 0, 0, 1, 1, 1], seed=75)
  case.log_mu = case.log_pi
  log_z = padded(np.repeat([0.3, -0.4], 3))
  flow = cases.run(functools.partial(tb.flowrl, log_z=log_z), case, beta=BETA)
  case.rewards = cases.standardised(case, floor=1e-4)
  given = cases.run(functools.partial(tb.tb_learned_z, log_z=log_z), case, beta=BETA)
  np.testing.assert_allclose(flow[0], given[0], rtol=1e-5)
  cases.assert_same(flow[1], given[1])


# --- other divergences ---------------------------------------------------------------------------------------


def linex(x, c):
  return (np.exp(c * x) - c * x - 1) / c**2


@pytest.mark.parametrize("alpha", [0.5, 0.0, -1.0])
def test_tb_f_divergence_equals_float64_numpy_with_a_searched_log_z(alpha):
  """log Z is found by a numerical search here, so that its closed form is under test too."""
  case, c, beta = cases.standard_case(76), 1 - alpha, 0.5

  def oracle(case, moved):
    fixed, delta, total = deltas(case, case.log_pi, beta=beta), deltas(case, moved, beta=beta), 0.0
    for m in case.members():
      search = scipy.optimize.minimize_scalar(
        lambda z, m=m: linex(fixed[m] - z, c).mean(), bounds=(fixed[m].min(), fixed[m].max()), method="bounded",
        options={"xatol": 1e-10},
      )
      total += (case.weights[m] * linex(delta[m] - search.x, c)).sum()
    return beta * total / case.num

  cases.check(functools.partial(tb.tb_f_divergence, alpha=alpha), case, oracle, beta=beta, rtol=1e-4, atol=2e-6)


def test_tb_f_divergence_at_alpha_1_is_vargrad_and_tends_to_it():
  case = cases.standard_case(77)
  wanted = cases.run(tb.tb_vargrad, case, beta=0.5)[1]
  cases.assert_same(cases.run(functools.partial(tb.tb_f_divergence, alpha=1.0), case, beta=0.5)[1], wanted)
  near = functools.partial(tb.tb_f_divergence, alpha=0.999)
  cases.assert_same(cases.run(near, case, beta=0.5)[1], wanted, rtol=5e-3, atol=1e-4)


def test_tb_f_divergence_refuses_alpha_above_1():
  with pytest.raises(ValueError, match=r"alpha=1.5 must be at most 1"):
    cases.run(functools.partial(tb.tb_f_divergence, alpha=1.5), cases.standard_case(78), beta=BETA)


@pytest.mark.parametrize("alpha", [pytest.param(0.5, marks=pytest.mark.slow), 0.0])
def test_off_policy_minimum_is_the_tilted_reference_for_other_divergences(alpha):
  assert toy.total_variation_after_training(functools.partial(tb.tb_f_divergence, alpha=alpha), beta=0.3) < 0.02


# --- TBA' ----------------------------------------------------------------------------------------------------


def clamped_advantages(case, *, clamp):
  log_ratio = np.array([np.clip(p - r, -clamp, clamp).sum() for p, r in zip(case.log_pi, case.log_ref)])
  return cases.centred(case, case.rewards) - BETA * cases.centred(case, log_ratio)


@pytest.mark.parametrize("how", ["response_sum", "token_mean"])
def test_tba_prime_equals_float64_numpy(how):
  def oracle(case, moved):
    advantages = clamped_advantages(case, clamp=0.2)
    valid = np.flatnonzero(case.valid)
    total = -sum(case.weights[i] * advantages[i] * moved[i].sum() for i in valid)
    return total / (case.num if how == "response_sum" else sum(len(moved[i]) for i in valid))

  fn = functools.partial(tb.tba_prime, log_ratio_clamp=0.2, aggregate=how)
  _, _, metrics = cases.check(fn, cases.standard_case(81), oracle, beta=BETA)
  assert 0.1 < metrics["clip_share"] < 0.9


def test_tba_prime_ratio_equals_float64_numpy():
  def oracle(case, moved):
    advantages, total = clamped_advantages(case, clamp=10.0), 0.0
    for i in np.flatnonzero(case.valid):
      total -= case.weights[i] * advantages[i] * np.minimum(np.exp(moved[i] - case.log_mu[i]), 1.3).sum()
    return total / case.num

  fn = functools.partial(tb.tba_prime_ratio, ratio_cap=1.3)
  _, _, metrics = cases.check(fn, cases.standard_case(82, spread=0.5), oracle, beta=BETA)
  assert 0.1 < metrics["clip_share"] < 0.9


def test_tba_prime_without_active_clamps_has_the_gradient_of_vargrad():
  case = cases.standard_case(83)
  wanted = cases.run(tb.tb_vargrad, case, beta=BETA)[1]
  cases.assert_same(cases.run(tb.tba_prime, case, beta=BETA)[1], wanted)
  case.log_mu = case.log_pi
  cases.assert_same(cases.run(tb.tba_prime_ratio, case, beta=BETA)[1], wanted)


# --- DPO -----------------------------------------------------------------------------------------------------


def dpo_value(case, moved):
  log_ratio, total = cases.sums(moved) - cases.sums(case.log_ref), 0.0
  for m in case.members():
    r = case.rewards[m]
    if r.max() > r.min():
      pairs = [(i, j) for i in m[r == r.max()] for j in m[r == r.min()]]
      total += np.mean([case.weights[i] * np.log1p(np.exp(-BETA * (log_ratio[i] - log_ratio[j]))) for i, j in pairs])
  return total / len(case.members())


@pytest.mark.parametrize("rewards", ["distinct", "binary"])
def test_dpo_equals_float64_numpy(rewards):
  case = cases.standard_case(84)
  if rewards == "binary":
    case.rewards = np.array([1.0, 0, 1, 0, 1, 1, 1, 0, 1, 0])  # group 2 is all right: no pair
  cases.check(dpo, case, dpo_value, beta=BETA)


def test_dpo_moves_best_and_worst_only():
  case = cases.make_case([2, 3, 1, 2], [0] * 4, seed=85, rewards=[0.1, 0.9, 0.5, 0.3])
  _, grads, metrics = cases.run(dpo, case, beta=BETA)
  assert (grads[1] < 0).all() and (grads[0] > 0).all() and (grads[2] == 0).all() and (grads[3] == 0).all()
  log_ratio = cases.sums(case.log_pi) - cases.sums(case.log_ref)
  np.testing.assert_allclose(metrics["preference_margin"], log_ratio[1] - log_ratio[0], rtol=1e-5)
  assert metrics["preference_accuracy"] == float(log_ratio[1] > log_ratio[0])

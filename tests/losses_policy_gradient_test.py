"""Ratio-free policy gradients and supervised learning against float64 numpy."""

from __future__ import annotations

import losses_cases as cases
import numpy as np

from tba_jax.losses.policy_gradient import reinforce, rloo
from tba_jax.losses.supervised import sft
from tba_jax.losses.trajectory_balance import tb_vargrad

BETA = float(np.float32(0.05))


def test_rloo_advantage_is_against_the_mean_of_the_others():
  case = cases.standard_case(31)
  shaped = cases.shaped_rewards(case, beta=BETA)
  _, grads, _ = cases.run(rloo, case, beta=BETA)
  for members in case.members():
    for i in members:
      others = [shaped[j] for j in members if j != i]
      wanted = -(shaped[i] - np.mean(others)) * case.weights[i] / case.num
      np.testing.assert_allclose(grads[i], np.full(len(case.log_pi[i]), wanted), rtol=2e-5, atol=1e-7)


def test_reinforce_equals_trajectory_balance_in_gradient_not_in_value():
  case = cases.standard_case(32)
  loss, grads, _ = cases.run(reinforce, case, beta=BETA)
  tb_loss, tb_grads, _ = cases.run(tb_vargrad, case, beta=BETA)
  cases.assert_same(grads, tb_grads)
  assert abs(loss - tb_loss) > 1e-2


def test_reinforce_without_beta_uses_rewards_alone():
  case = cases.standard_case(33)
  _, grads, _ = cases.run(reinforce, case, beta=0.0)
  for members in case.members():
    for i in members:
      wanted = -(case.rewards[i] - case.rewards[members].mean()) * case.weights[i] / case.num
      np.testing.assert_allclose(grads[i], np.full(len(case.log_pi[i]), wanted), rtol=2e-5, atol=1e-7)


def test_a_group_of_one_has_no_leave_one_out_baseline():
  case = cases.make_case([3, 2, 4], [0, 1, 1], seed=34)
  assert (cases.run(rloo, case, beta=BETA)[1][0] == 0).all()


def test_sft_is_the_mean_over_tokens():
  case = cases.standard_case(35)
  loss, grads, metrics = cases.run(sft, case, beta=0.0)
  valid = np.flatnonzero(case.valid)
  num_tokens = sum(len(case.log_pi[i]) for i in valid)
  np.testing.assert_allclose(loss, -sum(case.weights[i] * case.log_pi[i].sum() for i in valid) / num_tokens, rtol=1e-6)
  np.testing.assert_allclose(metrics["nll"], -sum(case.log_pi[i].sum() for i in valid) / num_tokens, rtol=1e-6)
  wanted = {i: np.full(len(x), -case.weights[i] * case.valid[i] / num_tokens) for i, x in enumerate(case.log_pi)}
  cases.assert_same(grads, wanted)

"""The metrics that all losses share, against float64 numpy."""

from __future__ import annotations

import losses_cases as cases
import numpy as np

from tba_jax.losses.diagnostics import finish_metrics
from tba_jax.losses.policy_gradient import reinforce

BETA = 0.05


def metrics_of(case):
  return cases.run(reinforce, case, beta=BETA, common=True)[2]


def test_metrics_equal_float64_numpy():
  case = cases.standard_case(91)
  metrics, valid, groups = metrics_of(case), np.flatnonzero(case.valid), case.members()
  to_ref = cases.sums(case.log_pi) - cases.sums(case.log_ref)
  to_mu = cases.sums(case.log_pi) - cases.sums(case.log_mu)
  tokens = [np.abs(case.log_pi[i] - case.log_mu[i]) for i in valid]
  advantages = cases.centred(case, cases.shaped_rewards(case, beta=BETA))
  beta_log_z = np.array([cases.shaped_rewards(case, beta=BETA)[m].mean() for m in groups])
  weights = [np.exp(to_mu[m]) for m in groups]
  wanted = {
    "reward": case.rewards[valid].mean(),
    "reward_group_std": np.mean([case.rewards[m].std() for m in groups]),
    "equal_reward_groups": 0.0,
    "truncated": case.truncated[valid].mean(),
    "log_ratio_ref": to_ref[valid].mean(),
    "residual_abs": np.abs(advantages[valid]).mean(),
    "beta_log_z": beta_log_z.mean(),
    "beta_log_z_square": (beta_log_z**2).mean(),
    "log_ratio_mu_abs": np.concatenate(tokens).mean(),
    "log_ratio_mu_max": np.mean([t.max(initial=0) for t in tokens]),
    "ess_share": np.mean([w.sum() ** 2 / (len(w) * (w**2).sum()) for w in weights]),
  }
  for percent in (5, 50, 95):
    wanted[f"log_ratio_mu_q{percent:02d}"] = np.mean(
      [np.sort(to_mu[m])[int(np.round(percent / 100 * (len(m) - 1)))] for m in groups]
    )
  assert metrics.keys() == wanted.keys()
  for name, value in wanted.items():
    np.testing.assert_allclose(metrics[name], value, rtol=2e-5, atol=1e-6, err_msg=name)
  finished = finish_metrics(metrics)
  assert "beta_log_z_square" not in finished
  np.testing.assert_allclose(finished["beta_log_z_std"], beta_log_z.std(), rtol=1e-4)


def test_effective_sample_size_is_1_on_policy_and_1_over_k_when_one_row_holds_all():
  case = cases.make_case([2, 3, 2, 4], [0] * 4, seed=92)
  case.log_mu = case.log_pi
  assert metrics_of(case)["ess_share"] == 1.0
  case.log_mu = [case.log_pi[0] - 100.0, *case.log_pi[1:]]  # a ratio of e^200
  np.testing.assert_allclose(metrics_of(case)["ess_share"], 0.25, rtol=1e-6)


def test_share_of_groups_with_equal_rewards():
  case = cases.make_case([1] * 6, [0, 0, 1, 1, 2, 2], seed=93, rewards=[0.35, 0.35, 1, 0, 1, 1])
  np.testing.assert_allclose(metrics_of(case)["equal_reward_groups"], 2 / 3, rtol=1e-6)

"""Clipped and importance-weighted losses against float64 numpy that shares no code, and their special cases."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import losses_cases as cases
import numpy as np
import pytest

from tba_jax.losses import clipped, importance
from tba_jax.losses.policy_gradient import pass_at_k, pass_at_k_rate, reinforce, rloo

BETA = float(np.float32(0.05))
FLOOR = 1e-4


def on_policy_case(seed: int, **kwargs) -> cases.Case:
  case = cases.standard_case(seed, **kwargs)
  case.log_mu = case.log_pi
  return case


def grads_of(fn, case, *, beta=BETA):
  return cases.run(fn, case, beta=beta)[1]


def clip_value(ratio: float, advantage: float, low: float, high: float) -> float:
  return min(ratio * advantage, np.clip(ratio, 1 - low, 1 + high) * advantage)


def token_clip_oracle(advantages_of, *, low=0.2, high=0.2, how="response_sum", kl_weight=0.0):
  def value(case, moved):
    advantages, total, num_tokens = advantages_of(case), 0.0, 0
    for i in np.flatnonzero(case.valid):
      ratio = np.exp(moved[i] - case.log_mu[i])
      gap = case.log_ref[i] - moved[i]
      kl = kl_weight * (np.exp(gap) - gap - 1)
      each = sum(clip_value(r, advantages[i], low, high) for r in ratio) - kl.sum()
      total -= case.weights[i] * each / (max(len(ratio), 1) if how == "response_mean" else 1)
      num_tokens += len(ratio)
    return total / (num_tokens if how == "token_mean" else case.num)

  return value


def shaped(case):
  return cases.centred(case, cases.shaped_rewards(case, beta=BETA))


def raw(case):
  return cases.centred(case, case.rewards)


def scaled(case):
  return cases.standardised(case, floor=FLOOR)


def leave_one_out(case):
  out, rewards = np.zeros(len(case.log_pi)), cases.shaped_rewards(case, beta=BETA)
  for members in case.members():
    for i in members:
      out[i] = rewards[i] - np.mean([rewards[j] for j in members if j != i])
  return out


@pytest.mark.parametrize("fn, oracle", [
  (clipped.ppo_clip, token_clip_oracle(shaped)),
  (clipped.grpo, token_clip_oracle(scaled, how="response_mean", kl_weight=BETA)),
  (clipped.dr_grpo, token_clip_oracle(raw)),
  (clipped.dapo, token_clip_oracle(scaled, high=0.28, how="token_mean")),
], ids=["ppo_clip", "grpo", "dr_grpo", "dapo"])
def test_token_clip_losses_equal_float64_numpy(fn, oracle):
  _, _, metrics = cases.check(fn, cases.standard_case(51, spread=0.5), oracle, beta=BETA)
  assert 0.05 < metrics["clip_share"] < 0.9


def sequence_clip_oracle(advantages_of, *, low, high, per_length):
  def value(case, moved):
    advantages, total = advantages_of(case), 0.0
    for i in np.flatnonzero(case.valid):
      gap = (moved[i] - case.log_mu[i]).sum() / (max(len(moved[i]), 1) if per_length else 1)
      total -= case.weights[i] * clip_value(np.exp(gap), advantages[i], low, high)
    return total / case.num

  return value


@pytest.mark.parametrize("fn, oracle", [
  (clipped.gspo, sequence_clip_oracle(scaled, low=3e-4, high=4e-4, per_length=True)),
  (clipped.proximal_rloo, sequence_clip_oracle(leave_one_out, low=0.2, high=0.2, per_length=False)),
], ids=["gspo", "proximal_rloo"])
def test_response_clip_losses_equal_float64_numpy(fn, oracle):
  _, _, metrics = cases.check(fn, cases.standard_case(52), oracle, beta=BETA)
  assert 0.1 < metrics["clip_share"] < 0.9


@pytest.mark.parametrize("mix", [0.0, 0.4])
def test_decoupled_ppo_equals_float64_numpy(mix):
  cap = 1.5

  def oracle(case, moved):
    advantages, total = shaped(case), 0.0
    for i in np.flatnonzero(case.valid):
      prox = (1 - mix) * case.log_pi[i] + mix * case.log_mu[i]
      behaviour = np.exp(prox - case.log_mu[i])
      for t in range(len(prox)):
        if behaviour[t] <= cap:
          ratio = np.exp(moved[i][t] - prox[t])
          total -= case.weights[i] * behaviour[t] * clip_value(ratio, advantages[i], 0.2, 0.2)
    return total / case.num

  fn = functools.partial(clipped.decoupled_ppo, proximal_mix=mix, behaviour_cap=cap)
  _, _, metrics = cases.check(fn, cases.standard_case(53, spread=0.6), oracle, beta=BETA)
  assert 0.05 < metrics["clip_share"] < 0.9


def test_decoupled_ppo_around_the_sampler_is_ppo():
  case = cases.standard_case(54)
  around_sampler = functools.partial(clipped.decoupled_ppo, proximal_mix=1.0)
  cases.assert_same(grads_of(around_sampler, case), grads_of(clipped.ppo_clip, case))


def score_oracle(token_weights, *, how="response_sum"):
  """-sum of weight x detached token weights x log_pi; token_weights(case, i) -> array over the tokens of response i."""

  def value(case, moved):
    valid = np.flatnonzero(case.valid)
    total = -sum(case.weights[i] * (token_weights(case, i) * moved[i]).sum() for i in valid)
    return total / (sum(len(moved[i]) for i in valid) if how == "token_mean" else case.num)

  return value


def ratio_of(case, i):
  return np.exp(case.log_pi[i] - case.log_mu[i])


def vtrace_weights(case, i, *, rho_cap=1.0, c_cap=1.0):
  """The V-trace recursion as written: values of all states are the baseline, the reward comes with the last token."""
  rewards = cases.shaped_rewards(case, beta=BETA)
  members = np.flatnonzero((case.groups == case.groups[i]) & case.valid)
  baseline, length = rewards[members].mean(), len(case.log_pi[i])
  rho, c = np.minimum(ratio_of(case, i), rho_cap), np.minimum(ratio_of(case, i), c_cap)
  values = np.append(np.full(length, baseline), 0.0)  # the state after the last token is terminal
  reward = np.zeros(length)
  if length:
    reward[-1] = rewards[i]
  targets = np.zeros(length + 1)
  for t in reversed(range(length)):
    delta = rho[t] * (reward[t] + values[t + 1] - values[t])
    targets[t] = values[t] + delta + c[t] * (targets[t + 1] - values[t + 1])
  return np.array([rho[t] * (reward[t] + targets[t + 1] - values[t]) for t in range(length)])


def topr_weights(case, i):
  advantage = shaped(case)[i]
  weight = 1.0 if advantage >= 0 else min(np.prod(ratio_of(case, i)), 1.0)
  return np.full(len(case.log_pi[i]), weight * advantage)


def topk_weights(case, i, *, top_k, cap):
  multiplier = top_k * (1 - np.exp(case.log_pi[i])) ** (top_k - 1)
  return np.minimum(ratio_of(case, i), cap) * multiplier * shaped(case)[i]


@pytest.mark.parametrize("fn, oracle", [
  (functools.partial(importance.cispo, ratio_floor=0.8, ratio_cap=1.3),
   score_oracle(lambda case, i: np.clip(ratio_of(case, i), 0.8, 1.3) * scaled(case)[i], how="token_mean")),
  (importance.topr, score_oracle(topr_weights)),
  (importance.vtrace, score_oracle(vtrace_weights)),
  (functools.partial(importance.vtrace, rho_cap=1.6, c_cap=1.2),
   score_oracle(functools.partial(vtrace_weights, rho_cap=1.6, c_cap=1.2))),
  (functools.partial(importance.topk_off_policy, top_k=3, ratio_cap=1.5),
   score_oracle(functools.partial(topk_weights, top_k=3, cap=1.5))),
  (functools.partial(importance.topk_off_policy, top_k=1, ratio_cap=1e6),
   score_oracle(lambda case, i: ratio_of(case, i) * shaped(case)[i])),
], ids=["cispo", "topr", "vtrace", "vtrace_caps", "topk_3", "topk_1_is_importance_weighted_reinforce"])
def test_importance_weighted_losses_equal_float64_numpy(fn, oracle):
  cases.check(fn, cases.standard_case(55, spread=0.5), oracle, beta=BETA)


@pytest.mark.parametrize("fn, plain", [
  (clipped.ppo_clip, reinforce), (clipped.decoupled_ppo, reinforce), (importance.topr, reinforce),
  (importance.vtrace, reinforce), (functools.partial(importance.topk_off_policy, top_k=1), reinforce),
  (clipped.proximal_rloo, rloo),
], ids=["ppo_clip", "decoupled_ppo", "topr", "vtrace", "topk_1", "proximal_rloo"])
def test_at_ratio_one_the_gradient_is_the_plain_one(fn, plain):
  case = on_policy_case(56)
  cases.assert_same(grads_of(fn, case), grads_of(plain, case))


def test_gspo_and_cispo_at_ratio_one_are_grpo_and_dapo():
  case = on_policy_case(57)
  cases.assert_same(grads_of(clipped.gspo, case), grads_of(clipped.grpo, case, beta=0.0))
  cases.assert_same(grads_of(importance.cispo, case), grads_of(clipped.dapo, case))


def test_grpo_without_std_and_length_division_is_dr_grpo():
  case = cases.standard_case(58)
  plain = functools.partial(clipped.grpo, divide_by_std=False, aggregate="response_sum")
  cases.assert_same(grads_of(plain, case, beta=0.0), grads_of(clipped.dr_grpo, case))
  shorter = functools.partial(clipped.dr_grpo, divisor_tokens=4.0)
  cases.assert_same(grads_of(shorter, case), {i: g / 4 for i, g in grads_of(clipped.dr_grpo, case).items()})


def test_dr_grpo_is_k_minus_1_over_k_of_rloo():
  case = on_policy_case(59)
  ours, theirs = grads_of(clipped.dr_grpo, case), grads_of(rloo, case, beta=0.0)
  for members in case.members():
    for i in members:
      np.testing.assert_allclose(ours[i], (len(members) - 1) / len(members) * theirs[i], rtol=2e-5, atol=1e-7)


def test_nearly_equal_rewards_are_not_blown_up():
  """Rewards apart by rounding only: a standard deviation of 1e-8 must not turn into advantages of 1."""
  case = cases.make_case([2] * 8, [0] * 8, seed=60, rewards=[0.35] * 7 + [0.35 + 3e-8])
  assert max(np.abs(g).max() for g in grads_of(clipped.grpo, case, beta=0.0).values()) < 1e-3


def test_without_an_advantage_nothing_counts_as_clipped():
  case = cases.make_case([3, 2, 4], [0] * 3, seed=65, rewards=[0.5] * 3, spread=1.0)
  loss, grads, metrics = cases.run(clipped.dapo, case, beta=BETA)
  assert loss == 0.0 and metrics["clip_share"] == 0.0 and all((g == 0).all() for g in grads.values())


def test_unknown_aggregate_is_refused():
  case = cases.standard_case(61)
  with pytest.raises(ValueError, match="aggregate='mean' must be response_sum, response_mean or token_mean"):
    cases.run(functools.partial(clipped.ppo_clip, aggregate="mean"), case, beta=BETA)


# --- pass@k
# ---------------------------------------------------------------------------------------------------------------------


def best_of_k_shares(rewards: np.ndarray, k: int) -> np.ndarray:
  """Equation 33 of the paper by enumeration of all subsets."""
  out, subsets = np.zeros(len(rewards)), list(itertools.combinations(range(len(rewards)), k))
  for subset in subsets:
    for i in subset:
      out[i] += (max(rewards[j] for j in subset) - max(rewards[j] for j in subset if j != i)) / len(subsets)
  return out


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("ties", [False, True])
def test_pass_at_k_equals_enumeration(k, ties):
  case = cases.standard_case(62)
  if ties:
    case.rewards = np.round(case.rewards)

  def oracle(case, moved):
    total = 0.0
    for members in case.members():
      if len(members) >= k:
        total -= (case.weights[members] * best_of_k_shares(case.rewards[members], k) * cases.sums(moved)[members]).sum()
    return total / len(case.members())

  _, _, metrics = cases.check(functools.partial(pass_at_k, k=k), case, oracle, beta=BETA)
  best = [np.mean([max(case.rewards[list(s)]) for s in itertools.combinations(m, k)]) if len(m) >= k else 0.0
          for m in case.members()]
  np.testing.assert_allclose(metrics["best_of_k"], np.mean(best), rtol=1e-5, atol=1e-6)


def test_pass_at_1_is_rloo_for_groups_of_one_size():
  case = cases.make_case([2, 3, 1, 4, 2, 3], [0, 1, 0, 1, 1, 0], seed=63)
  cases.assert_same(grads_of(functools.partial(pass_at_k, k=1), case), grads_of(rloo, case, beta=0.0))


def mean_gradient(loss, rewards, logits):
  """-gradient by the logits of a policy on 3 responses, its exact mean over all draws of n = 3."""
  draws = np.array(list(itertools.product(range(3), repeat=3)))
  p = np.exp(logits) / np.exp(logits).sum()
  num = draws.size
  f32 = jnp.float32
  batch = cases.lay_out(cases.make_case([1], [0]))[1]._replace(
    sequence_ids=jnp.arange(num, dtype=jnp.int32)[:, None], log_mu=jnp.zeros((num, 1)), log_ref=jnp.zeros((num, 1)),
    rewards=jnp.asarray(rewards[draws].reshape(-1), f32), group_ids=jnp.repeat(jnp.arange(len(draws)), 3),
    valid=jnp.ones(num, bool), truncated=jnp.zeros(num, bool),
    weights=jnp.asarray(np.repeat(np.prod(p[draws], axis=1) * len(draws), 3), f32),
    num_responses=f32(num), num_groups=f32(len(draws)), num_tokens=f32(num),
  )
  picks = jnp.asarray(draws.reshape(-1, 1))
  gradient = jax.jit(jax.grad(lambda x: loss(jax.nn.log_softmax(x)[picks], batch, beta=f32(0.0))[0]))
  return -gradient(jnp.asarray(logits, f32))


def differences(value, at):
  """Central differences of value(float64 [3])."""
  return [(value(at + e) - value(at - e)) / 2e-5 for e in 1e-5 * np.eye(3)]


def test_pass_at_k_is_unbiased():
  """The exact mean over all draws is the gradient of the mean best of k = 2."""
  rewards, logits = np.array([0.0, 0.3, 1.0]), np.array([0.4, -0.2, -0.9])

  def mean_best(x):
    p = np.exp(x) / np.exp(x).sum()
    return sum(p[a] * p[b] * max(rewards[a], rewards[b]) for a in range(3) for b in range(3))

  np.testing.assert_allclose(mean_gradient(pass_at_k, rewards, logits), differences(mean_best, logits), atol=2e-6)


@pytest.mark.parametrize("loss", [pass_at_k, pass_at_k_rate])
def test_pass_at_zero_is_refused(loss):
  with pytest.raises(ValueError, match="k=0 must be at least 1"):
    cases.run(functools.partial(loss, k=0), cases.standard_case(64), beta=BETA)


@pytest.mark.parametrize("k", [1, 4])
def test_pass_at_k_by_the_rate_of_the_others(k):
  rewards = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0]
  case = cases.standard_case(66, rewards=rewards)

  def oracle(case, moved):
    total = 0.0
    for members in case.members():
      for i in members:
        others = [case.rewards[j] for j in members if j != i]
        rate = np.mean(others)
        total -= case.weights[i] * k * (1 - rate) ** (k - 1) * (case.rewards[i] - rate) * moved[i].sum()
    return total / case.num

  _, _, metrics = cases.check(functools.partial(pass_at_k_rate, k=k), case, oracle, beta=BETA)
  rates = [np.mean([case.rewards[j] for j in m if j != i]) for m in case.members() for i in m]
  np.testing.assert_allclose(metrics["pass_weight"], np.mean([k * (1 - rate) ** (k - 1) for rate in rates]), rtol=1e-5)


def test_pass_at_k_by_rate_is_unbiased_for_two_tries_and_pulls_at_the_hardest_prompts():
  logits, rewards = np.array([0.4, -0.2, -0.9]), np.array([0.0, 1.0, 1.0])
  fails = lambda x: np.exp(x[0]) / np.exp(x).sum()
  two = mean_gradient(functools.partial(pass_at_k_rate, k=2), rewards, logits)
  np.testing.assert_allclose(two, differences(lambda x: 1 - fails(x) ** 2, logits), atol=2e-6)
  # With the two others the power of their rate is a mean over 0, 1/2 and 1, each as likely as a binomial says.
  p = 1 - fails(logits)
  exact = sum(weight * 3 * (1 - rate) ** 2 for rate, weight in ((0, (1 - p) ** 2), (0.5, 2 * p * (1 - p)), (1, p**2)))
  three = mean_gradient(functools.partial(pass_at_k_rate, k=3), rewards, logits)
  np.testing.assert_allclose(three, exact * np.array(differences(lambda x: 1 - fails(x), logits)), atol=2e-6)

"""Trajectory balance against float64 numpy that shares no code with it, and the identities it must obey."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import losses_cases as cases
import numpy as np
import optax
import pytest

from tba_jax.losses import policy_gradient, segments
from tba_jax.losses.trajectory_balance import tb_vargrad
from tba_jax.types import Batch

BETA = float(np.float32(0.05))


def plain_tb(case: cases.Case, log_pi: list[np.ndarray], *, beta: float, detached=None) -> float:
  """(beta / 2) mean of weight (log Z - delta)^2 as the paper writes it; log Z is of `detached`, if given."""
  delta = cases.sums(case.log_ref) + case.rewards / beta - cases.sums(log_pi)
  fixed = delta if detached is None else cases.sums(case.log_ref) + case.rewards / beta - cases.sums(detached)
  total = 0.0
  for members in case.members():
    total += (case.weights[members] * (fixed[members].mean() - delta[members]) ** 2).sum()
  return beta / 2 * total / case.num


def advantages(case: cases.Case, *, beta: float) -> np.ndarray:
  log_ratio = cases.sums(case.log_pi) - cases.sums(case.log_ref)
  out = np.zeros(len(case.log_pi))
  for members in case.members():
    r, k = case.rewards[members], log_ratio[members]
    out[members] = (r - r.mean()) - beta * (k - k.mean())
  return out


def policy_gradient_of(case: cases.Case, *, beta: float) -> dict:
  scale = -advantages(case, beta=beta) * case.weights / case.num
  return {i: np.full(len(x), scale[i]) for i, x in enumerate(case.log_pi)}


def test_value_and_gradient_equal_float64_numpy():
  case = cases.standard_case()
  loss, grads, _ = cases.run(tb_vargrad, case, beta=BETA)
  np.testing.assert_allclose(loss, plain_tb(case, case.log_pi, beta=BETA), rtol=1e-5)
  numeric = cases.differentiate(lambda moved: plain_tb(case, moved, beta=BETA, detached=case.log_pi), case)
  cases.assert_same(grads, numeric)


@pytest.mark.parametrize("beta", [1.0, 0.05, 0.004])
def test_gradient_is_minus_mean_of_advantage_times_score(beta):
  case = cases.standard_case(3)
  cases.assert_same(cases.run(tb_vargrad, case, beta=beta)[1], policy_gradient_of(case, beta=beta))


def test_factors_of_the_unscaled_and_the_squared_scaled_loss():
  case = cases.standard_case(4)
  wanted = policy_gradient_of(case, beta=BETA)  # -mean(A grad log_pi)
  grads = cases.run(tb_vargrad, case, beta=BETA)[1]
  unscaled = cases.differentiate(lambda moved: 2 / BETA * plain_tb(case, moved, beta=BETA, detached=case.log_pi), case)
  cases.assert_same(unscaled, {i: 2 / BETA * g for i, g in wanted.items()}, atol=1e-4)
  cases.assert_same({i: 2 / BETA * g for i, g in grads.items()}, unscaled, atol=1e-4)
  squared = {i: BETA**2 * g for i, g in unscaled.items()}
  cases.assert_same(squared, {i: 2 * BETA * g for i, g in wanted.items()})


def test_rloo_with_kl_is_k_over_k_minus_1_times_it():
  case = cases.standard_case(5)
  grads = cases.run(tb_vargrad, case, beta=BETA)[1]
  rloo = cases.run(policy_gradient.rloo, case, beta=BETA)[1]
  for members in case.members():
    k = len(members)
    for i in members:
      np.testing.assert_allclose(rloo[i], k / (k - 1) * grads[i], rtol=1e-5, atol=1e-7)


def test_two_responses_regress_the_gap_of_log_ratios_on_the_gap_of_rewards():
  case = cases.make_case([3, 2, 4, 1], [0, 0, 1, 1], seed=6)
  log_ratio = cases.sums(case.log_pi) - cases.sums(case.log_ref)
  gaps = log_ratio[::2] - log_ratio[1::2] - (case.rewards[::2] - case.rewards[1::2]) / BETA
  # (log Z - delta)^2 of either row is (gap / 2)^2.
  np.testing.assert_allclose(cases.run(tb_vargrad, case, beta=BETA)[0], BETA / 2 * np.mean(gaps**2 / 4), rtol=1e-5)


def test_is_the_mean_over_pairs_of_squared_differences():
  case = cases.make_case([3, 2, 4, 1, 5], [0] * 5, seed=7)
  delta = cases.sums(case.log_ref) + case.rewards / BETA - cases.sums(case.log_pi)
  k = len(delta)
  # Variance = (1 / 2K^2) sum over ordered pairs; the loss carries the factor beta / 2 on top.
  pairs = sum((a - b) ** 2 for a, b in itertools.product(delta, delta)) / (2 * k**2)
  np.testing.assert_allclose(cases.run(tb_vargrad, case, beta=BETA)[0], BETA / 2 * pairs, rtol=1e-5)


def test_stop_gradient_is_a_no_op_for_the_same_unweighted_rows_only():
  case = cases.standard_case(8)
  through = cases.differentiate(lambda moved: plain_tb(case, moved, beta=BETA), case)
  cases.assert_same(cases.run(tb_vargrad, case, beta=BETA)[1], through)
  case.weights = cases.exact(np.random.default_rng(0).uniform(0.2, 2.0, len(case.weights)))
  through = cases.differentiate(lambda moved: plain_tb(case, moved, beta=BETA), case)
  stopped = cases.differentiate(lambda moved: plain_tb(case, moved, beta=BETA, detached=case.log_pi), case)
  cases.assert_same(cases.run(tb_vargrad, case, beta=BETA)[1], stopped)
  assert max(np.abs(through[i] - stopped[i]).max(initial=0) for i in through) > 1e-3


@pytest.mark.parametrize("constant", [0.7, 1000.0])
def test_constant_added_to_all_rewards_of_one_prompt_changes_nothing(constant):
  case = cases.standard_case(9)
  case.rewards = np.round(case.rewards * 64) / 64  # so that adding the constant is exact in float32
  before = cases.run(tb_vargrad, case, beta=BETA)
  case.rewards = np.where(case.groups == 1, case.rewards + np.round(constant * 64) / 64, case.rewards)
  after = cases.run(tb_vargrad, case, beta=BETA)
  np.testing.assert_allclose(after[0], before[0], rtol=1e-6)
  cases.assert_same(after[1], before[1], rtol=1e-5)


def test_zero_at_the_tilted_reference():
  case = cases.standard_case(10)
  beta, log_z = 0.25, np.array([3.0, -2.0, 0.5])
  case.log_pi = [np.zeros(0)] * len(case.log_pi)
  for i, ref in enumerate(case.log_ref):
    spread = (case.rewards[i] / beta - log_z[case.groups[i]]) / max(len(ref), 1)
    case.log_pi[i] = ref + spread
  case.rewards[6] = beta * log_z[case.groups[6]]  # the empty response: its log-ratio can only be 0
  loss, grads, _ = cases.run(tb_vargrad, case, beta=beta)
  assert loss < 1e-11
  assert max(np.abs(g).max(initial=0) for g in grads.values()) < 1e-6


def test_log_z_goes_by_group_id_not_by_position():
  """Two prompts of three rows valued 1 and 10: log Z must be 1 and 10, a reshape over the wrong axis says 4 and 7."""
  case = cases.make_case([1] * 6, [0, 0, 0, 1, 1, 1], rewards=[1, 1, 1, 10, 10, 10])
  case.log_ref = case.log_pi
  loss, grads, metrics = cases.run(tb_vargrad, case, beta=1.0, common=True)
  assert loss == 0.0 and all((g == 0).all() for g in grads.values())
  log_pi, batch, _ = cases.lay_out(case)
  delta = segments.response_sums(batch.log_ref - log_pi, batch) + batch.rewards
  np.testing.assert_allclose(segments.group_means(delta, batch)[:6], [1, 1, 1, 10, 10, 10], rtol=1e-6)
  np.testing.assert_allclose([metrics["beta_log_z"], metrics["beta_log_z_square"]], [5.5, 50.5], rtol=1e-6)


def test_huge_log_ratios_stay_finite_and_right():
  case = cases.standard_case(11)
  case.log_pi[0] = cases.exact(case.log_ref[0] + 40.0)
  case.log_pi[4] = cases.exact(case.log_ref[4] - 40.0)
  loss, grads, metrics = cases.run(tb_vargrad, case, beta=BETA, common=True)
  np.testing.assert_allclose(loss, plain_tb(case, case.log_pi, beta=BETA), rtol=1e-5)
  cases.assert_same(grads, policy_gradient_of(case, beta=BETA))
  assert np.isfinite(list(metrics.values())).all()


def test_small_beta_keeps_the_digits_of_the_log_ratios():
  """beta = 1e-6, rewards near 1000: r / beta is 1e9, where float32 has a grain of 64 nats; centred parts keep k."""
  case = cases.make_case([4, 4, 4], [0, 0, 0], seed=12, rewards=[1000.0] * 3)
  beta = 1e-6
  grads = cases.run(tb_vargrad, case, beta=beta)[1]
  wanted = policy_gradient_of(case, beta=beta)
  assert max(np.abs(g).max() for g in wanted.values()) > 1e-8
  cases.assert_same(grads, wanted, rtol=1e-4, atol=0)


# 12 x 0.7 in float32: the sum rounds, and sum / 12 is not 0.7
@pytest.mark.parametrize("rewards", [[1.0] * 8, [0.35] * 7 + [1.0], [0.7] * 12])
def test_equal_and_nearly_equal_rewards(rewards):
  lengths = [1, 2, 3, 2] * (len(rewards) // 4)
  case = cases.make_case(lengths, [0] * len(rewards), seed=13, rewards=rewards)
  cases.assert_same(cases.run(tb_vargrad, case, beta=BETA)[1], policy_gradient_of(case, beta=BETA))
  case.log_pi = case.log_ref
  grads = cases.run(tb_vargrad, case, beta=BETA)[1]
  equal = len(set(rewards)) == 1
  assert (max(np.abs(g).max() for g in grads.values()) == 0.0) == equal


def test_a_group_of_one_teaches_nothing():
  case = cases.make_case([3, 2, 4], [0, 1, 1], seed=14)
  assert (cases.run(tb_vargrad, case, beta=BETA)[1][0] == 0).all()


def test_a_truncated_row_is_learnt_from_like_any_other():
  case = cases.standard_case(15)
  before = cases.run(tb_vargrad, case, beta=BETA, common=True)
  case.truncated = ~case.truncated
  after = cases.run(tb_vargrad, case, beta=BETA, common=True)
  assert after[0] == before[0]
  assert after[2]["truncated"] == pytest.approx(1 - before[2]["truncated"])


# --- The minimum, from off-policy data only ------------------------------------------------------------------

VOCAB, MAX_TOKENS = 3, 3  # token 0 stops; a response of MAX_TOKENS tokens needs no stop


def all_responses() -> list[tuple[int, ...]]:
  out = []
  for length in range(1, MAX_TOKENS + 1):
    for tokens in itertools.product(range(VOCAB), repeat=length):
      stops = [t == 0 for t in tokens]
      if not any(stops[:-1]) and (stops[-1] or length == MAX_TOKENS):
        out.append(tokens)
  return out


RESPONSES = all_responses()
PREFIXES = sorted({r[:t] for r in RESPONSES for t in range(len(r))})


def token_logprobs(logits, prefix_rows, tokens):
  return jnp.take_along_axis(jax.nn.log_softmax(logits)[prefix_rows], tokens[..., None], -1)[..., 0]


def response_logprobs(logits: np.ndarray) -> np.ndarray:
  """Exact log-probabilities of every response in float64."""
  log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  return np.array([sum(log_p[PREFIXES.index(r[:t]), r[t]] for t in range(len(r))) for r in RESPONSES])


def off_policy_data(*, behaviour: np.ndarray, reference: np.ndarray, rewards: np.ndarray, groups: int, k: int):
  """Responses of another policy as a batch: `groups` groups of k rows, all of one prompt."""
  rng = np.random.default_rng(0)
  probabilities = np.exp(response_logprobs(behaviour))
  picks = rng.choice(len(RESPONSES), size=groups * k, p=probabilities / probabilities.sum())
  num = len(picks)
  ref_log_p = reference - np.log(np.exp(reference).sum(-1, keepdims=True))
  tokens, prefix_rows = np.zeros((num, MAX_TOKENS), np.int32), np.zeros((num, MAX_TOKENS), np.int32)
  sequence_ids, log_ref = np.full((num, MAX_TOKENS), num, np.int32), np.zeros((num, MAX_TOKENS), np.float32)
  for row, pick in enumerate(picks):
    for t, token in enumerate(RESPONSES[pick]):
      prefix = PREFIXES.index(RESPONSES[pick][:t])
      tokens[row, t], prefix_rows[row, t], sequence_ids[row, t] = token, prefix, row
      log_ref[row, t] = ref_log_p[prefix, token]
  f32, ones = jnp.float32, jnp.ones(num)
  batch = Batch(
    tokens=jnp.asarray(tokens), positions=jnp.asarray(tokens), segment_ids=jnp.asarray(tokens),
    sequence_ids=jnp.asarray(sequence_ids), log_mu=jnp.zeros((num, MAX_TOKENS)), log_ref=jnp.asarray(log_ref),
    rewards=jnp.asarray(rewards[picks], f32), group_ids=jnp.repeat(jnp.arange(groups), k), valid=ones > 0,
    truncated=ones < 0, weights=ones, num_responses=f32(num), num_groups=f32(groups),
    num_tokens=f32((sequence_ids < num).sum()),
  )
  return batch, jnp.asarray(prefix_rows), picks


def total_variation_after_training(loss_fn, *, beta: float, steps: int = 1500) -> float:
  rng = np.random.default_rng(1)
  shape = (len(PREFIXES), VOCAB)
  reference, behaviour = rng.normal(size=shape), rng.normal(size=shape)
  rewards = rng.uniform(0, 1, len(RESPONSES))
  policies = dict(behaviour=behaviour, reference=reference)
  batch, prefix_rows, picks = off_policy_data(**policies, rewards=rewards, groups=256, k=8)
  assert set(picks) == set(range(len(RESPONSES)))  # full support
  optimizer = optax.adam(optax.cosine_decay_schedule(0.1, steps))

  def value(logits):
    return loss_fn(token_logprobs(logits, prefix_rows, batch.tokens), batch, beta=jnp.float32(beta))[0]

  def step(_, carry):
    logits, opt_state = carry
    grads = jax.grad(value)(logits)
    updates, opt_state = optimizer.update(grads, opt_state)
    return optax.apply_updates(logits, updates), opt_state

  start = jnp.asarray(reference, jnp.float32)
  logits, _ = jax.jit(lambda: jax.lax.fori_loop(0, steps, step, (start, optimizer.init(start))))()
  target = np.exp(response_logprobs(reference) + rewards / beta)
  target /= target.sum()
  return 0.5 * np.abs(np.exp(response_logprobs(np.asarray(logits, np.float64))) - target).sum()


def test_off_policy_minimum_is_the_tilted_reference():
  assert len(RESPONSES) == 15
  logits = np.random.default_rng(2).normal(size=(len(PREFIXES), VOCAB))
  np.testing.assert_allclose(np.exp(response_logprobs(logits)).sum(), 1)
  assert total_variation_after_training(tb_vargrad, beta=0.3) < 0.02


def test_the_reference_itself_is_far_from_that_minimum():
  assert total_variation_after_training(tb_vargrad, beta=0.3, steps=1) > 0.15

"""Policy gradients without importance ratios: REINFORCE with a baseline from the group.

The value of these losses means nothing, only their gradient does. Losses with ratios are in clipped.py and
importance.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tba_jax.losses import segments
from tba_jax.losses.diagnostics import common_metrics
from tba_jax.types import Batch


def mean_baseline(log_pi: jax.Array, batch: Batch, *, beta: jax.Array) -> jax.Array:
  """(r - mean r) - beta (k - mean k) over the group's valid rows, no gradient; the parts centred apart. Returns [N]."""
  log_ratio = jax.lax.stop_gradient(segments.response_sums(log_pi - batch.log_ref, batch))
  return segments.centre(batch.rewards, batch) - beta * segments.centre(log_ratio, batch)


def leave_one_out(centred: jax.Array, batch: Batch) -> jax.Array:
  """Turns values minus their group's mean into values minus the mean of the OTHERS ([N]): x K / (K - 1), 0 if K = 1.

  The product form is exact and, unlike sums over the others, keeps equal rewards at exactly 0.
  """
  count = segments.group_counts(batch)
  return jnp.where(count > 1.0, centred * count / jnp.maximum(count - 1.0, 1.0), 0.0)


def score_function(log_pi: jax.Array, advantages: jax.Array, batch: Batch) -> jax.Array:
  """-mean over valid responses of weight advantage log_pi: its gradient is that of REINFORCE. Returns a scalar."""
  fixed = jax.lax.stop_gradient(advantages * batch.weights)
  return segments.mean_of_responses(-fixed * segments.response_sums(log_pi, batch), batch)


def reinforce(log_pi: jax.Array, batch: Batch, *, beta: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
  """REINFORCE with the group's mean as baseline and the KL penalty in the reward.

      A = (r - mean r) - beta (k - mean k),  k = log_pi - log_ref;   gradient = -mean(weight A grad log_pi)

  Its gradient is that of `tb_vargrad` at every beta and on any data; only the value and the reading differ. As a policy
  gradient it is right on policy alone. beta = 0 leaves the reference out.

  Source: Williams 1992 (REINFORCE with a baseline); the equality with trajectory balance: Bartoldson et al. 2025,
  arXiv:2503.18929, appendix A.

  Args:
    log_pi: log-probability of each token, nats, aligned with the token.
    batch: uses log_ref, rewards, groups, weights.
    beta: weight of the KL penalty, reward units per nat, >= 0.
  Returns: scalar whose gradient is the policy gradient; metrics.
  """
  segments.check_layout(log_pi, batch)
  advantages = mean_baseline(log_pi, batch, beta=beta)
  return score_function(log_pi, advantages, batch), common_metrics(log_pi, batch, beta=beta)


def rloo(log_pi: jax.Array, batch: Batch, *, beta: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
  """REINFORCE leave-one-out: the baseline of a response is the mean of the other responses of its group.

      r' = r - beta (log_pi - log_ref);   A_i = r'_i - mean of r'_j over j != i
      gradient = -mean(weight A grad log_pi)

  K / (K - 1) times the gradient of `tb_vargrad` for a group of K valid rows. No ratio: on policy only, like
  `reinforce`.

  Source: Ahmadian et al. 2024, arXiv:2402.14740 (after Kool et al. 2019).

  Args and returns: as `reinforce`. A group with one valid row has no baseline and adds nothing.
  """
  segments.check_layout(log_pi, batch)
  advantages = leave_one_out(mean_baseline(log_pi, batch, beta=beta), batch)
  return score_function(log_pi, advantages, batch), common_metrics(log_pi, batch, beta=beta)


def pass_at_k(
  log_pi: jax.Array, batch: Batch, *, beta: jax.Array, k: int = 2
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """PKPO: policy gradient of the mean best reward of k tries (pass@k for 0/1 rewards), unbiased from n >= k responses.

      s_i = (1 / C(n, k)) sum over subsets I of size k that hold i of (max of r over I - max of r over I without i)
      gradient = -mean over groups of sum over i of weight s_i grad log_pi

  Only a response that is best in a subset has a share, and what it wins is the gap to the second best; so, with rows
  ranked by reward from 0, s_i = sum over j below i of (r_i - r_j) C(rank_j, k - 2) / C(n, k). k = 1 is `rloo`
  without KL.

  Source: Walder and Karkhanis 2025, arXiv:2505.15201, equation 33 (the estimator it recommends); k = 1: its section
  4.1.

  Args:
    log_pi: log-probability of each token, nats, aligned with the token.
    batch: uses rewards, groups, weights.
    beta: not used: the maximum is over the task's rewards.
    k: tries, >= 1, a static number. A group with fewer than max(k, 2) valid rows adds nothing.
  Returns: scalar whose gradient is the policy gradient; metrics with `best_of_k`, the unbiased estimate of the best
    reward of k tries, mean over groups.
  Raises: ValueError for k < 1.
  """
  segments.check_layout(log_pi, batch)
  if k < 1:
    raise ValueError(f"k={k} must be at least 1.")
  count = segments.group_counts(batch)
  if k == 1:
    shares = leave_one_out(segments.centre(batch.rewards, batch), batch) / jnp.maximum(count, 1.0)
  else:
    shares = _best_of_k_shares(batch, k=k)
  sums = segments.kept(shares * batch.weights * segments.response_sums(log_pi, batch), batch)
  loss = -jnp.sum(sums) / jnp.maximum(batch.num_groups, 1.0)
  # max@k = sum over rows of r C(rank, k - 1) / C(n, k) = sum of r (k / n) C(rank, k - 1) / C(n - 1, k - 1).
  ranks = segments.group_ranks(batch.rewards, batch)
  chance = k / jnp.maximum(count, 1.0) * _binomial_ratio(ranks, count - 1.0, k=k - 1)
  best = segments.mean_of_groups(segments.group_sums(batch.rewards * chance, batch), batch)
  return loss, common_metrics(log_pi, batch, beta=beta) | {"best_of_k": best}


def pass_at_k_rate(
  log_pi: jax.Array, batch: Batch, *, beta: jax.Array, k: int = 2
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Policy gradient of the chance that one of k tries succeeds, by each prompt's own rate of success; rewards 0 or 1.

      d/d theta (1 - (1 - p)^k) = k (1 - p)^(k - 1) dp / d theta
      gradient = -mean over responses of weight k (1 - p_i)^(k - 1) (r_i - p_i) grad log_pi_i
      p_i = mean of r_j over j != i, the group's other responses

  Prompts that already succeed count the less, the larger k. p_i knows nothing of response i, so it is a baseline that
  costs no bias; the factor is unbiased for k <= 2 only, for its power is of an estimate. `pass_at_k` is unbiased for
  every k, at the price of a group of at least k. k = 1 is `rloo` without KL.

  Source: the derivative above; the leave-one-out estimates are those of `rloo` (Ahmadian et al. 2024,
  arXiv:2402.14740).

  Args: as `pass_at_k`; rewards between 0 and 1 are taken as chances of success, others are cut off there in p_i.
  Returns: scalar whose gradient is the policy gradient; metrics with `pass_weight`, mean k (1 - p_i)^(k - 1). A group
    with one valid row adds nothing.
  Raises: ValueError for k < 1.
  """
  segments.check_layout(log_pi, batch)
  if k < 1:
    raise ValueError(f"k={k} must be at least 1.")
  centred = leave_one_out(segments.centre(batch.rewards, batch), batch)
  rate = jnp.clip(segments.kept(batch.rewards - centred, batch), 0.0, 1.0)
  multiplier = k * (1.0 - rate) ** (k - 1)
  loss = score_function(log_pi, multiplier * centred, batch)
  weight = segments.mean_of_responses(multiplier, batch)
  return loss, common_metrics(log_pi, batch, beta=beta) | {"pass_weight": weight}


def _best_of_k_shares(batch: Batch, *, k: int) -> jax.Array:
  """s_i of `pass_at_k` for k >= 2: float32 [N]."""
  rewards = segments.kept(batch.rewards, batch)
  ranks = segments.group_ranks(rewards, batch)
  count = segments.group_counts(batch)
  same = batch.valid[:, None] & batch.valid[None, :] & (batch.group_ids[:, None] == batch.group_ids[None, :])
  below = same & (ranks[None, :] < ranks[:, None])
  # C(rank_j, k - 2) / C(n, k) = k (k - 1) / (n (n - 1)) x C(rank_j, k - 2) / C(n - 2, k - 2), free of
  # factorials.
  second = _binomial_ratio(ranks, count - 2.0, k=k - 2) * k * (k - 1) / jnp.maximum(count * (count - 1.0), 1.0)
  return jnp.sum(jnp.where(below, (rewards[:, None] - rewards[None, :]) * second[None, :], 0.0), axis=1)


def _binomial_ratio(top: jax.Array, whole: jax.Array, *, k: int) -> jax.Array:
  """C(top, k) / C(whole, k) for integers top <= whole in arrays; 0 where whole < k."""
  result = jnp.where(whole >= k, 1.0, 0.0)
  for i in range(k):
    result = result * jnp.maximum(top - i, 0.0) / jnp.maximum(whole - i, 1.0)
  return result

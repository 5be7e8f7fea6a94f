"""What every loss reports about its batch, so that two losses at two stalenesses can be laid side by side.

Every number is a sum over this (micro-)batch divided by a count of the whole batch, so the numbers of micro-batches add
up; `finish_metrics` turns the added-up second moments into standard deviations. Nothing here takes a gradient.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tba_jax.losses import segments
from tba_jax.types import Batch

SQUARE_SUFFIX = "_square"
# Made of log_ref; `kl_term` is GRPO's own.
OF_REFERENCE = frozenset(("log_ratio_ref", "residual_abs", "beta_log_z", "beta_log_z_square", "kl_term"))
STD_SUFFIX = "_std"


def common_metrics(log_pi: jax.Array, batch: Batch, *, beta: jax.Array) -> dict[str, jax.Array]:
  """Measures rewards, the distance to the reference and the distance to the policy that sampled.

  Rewards: `reward` mean over responses; `reward_group_std` mean over groups of the standard deviation within one;
  `equal_reward_groups` share of groups whose rewards are all equal (no signal for a baseline method); `truncated` share
  of responses.

  Reference: `log_ratio_ref` mean of log_pi - log_ref over the responses DRAWN, nats a response. It is no KL divergence
  unless the policy itself sampled them, and may be negative. `residual_abs` mean |(r - mean r) - beta (k - mean k)|,
  reward units: beta times |log Z - delta| (in this unit it stays finite as beta goes to 0). `beta_log_z` mean over
  groups of mean r - beta mean k, reward units: beta times the estimate of log Z; `beta_log_z_square` of its square.

  Sampler (all of log_pi - log_mu, nats): `log_ratio_mu_abs` mean |.| a token; `log_ratio_mu_max` mean over responses of
  the largest |.| of a token; `log_ratio_mu_q05`, `_q50`, `_q95` of whole responses, nearest-rank quantiles within a
  group, mean over groups; `ess_share` effective sample size of the responses' ratios, (sum w)^2 / (K sum w^2) within a
  group, mean over groups: 1 on policy, 1 / K where one response holds all the weight.
  """
  log_pi = jax.lax.stop_gradient(log_pi)
  metrics = _reward_metrics(batch)
  metrics |= _reference_metrics(log_pi, batch, beta=beta)
  metrics |= _sampler_metrics(log_pi, batch)
  return metrics


def finish_metrics(metrics: dict[str, jax.Array]) -> dict[str, jax.Array]:
  """Replaces each `x_square` (mean of squares, beside the mean `x`) by `x_std`. Call once, on a whole batch."""
  finished = {}
  for name, value in metrics.items():
    if name.endswith(SQUARE_SUFFIX):
      mean = metrics[name.removesuffix(SQUARE_SUFFIX)]
      finished[name.removesuffix(SQUARE_SUFFIX) + STD_SUFFIX] = jnp.sqrt(jnp.maximum(value - jnp.square(mean), 0.0))
    else:
      finished[name] = value
  return finished


def clip_share(clipped: jax.Array, batch: Batch) -> dict[str, jax.Array]:
  """Share of tokens (bool [B, T]) or of responses (bool [N]) that a loss's clip took the gradient from, or capped."""
  clipped = jax.lax.stop_gradient(clipped).astype(jnp.float32)
  mean = segments.mean_of_tokens(clipped, batch) if clipped.ndim == 2 else segments.mean_of_responses(clipped, batch)
  return {"clip_share": mean}


def effective_sample_share(log_weights: jax.Array, batch: Batch) -> jax.Array:
  """(sum w)^2 / (K sum w^2) of each group for w = exp(log_weights [N]), free of overflow: [N], the group's value."""
  largest = segments.group_max(log_weights, batch)
  weights = segments.kept(jnp.exp(segments.kept(log_weights - largest, batch)), batch)
  total, squares = segments.group_sums(weights, batch), segments.group_sums(jnp.square(weights), batch)
  return jnp.square(total) / jnp.maximum(segments.group_counts(batch) * squares, 1.0)


def group_quantiles(values: jax.Array, batch: Batch, *, percents: tuple[int, ...]) -> list[jax.Array]:
  """Nearest-rank quantiles of `values` [N] within each group; every row carries its group's. Returns one [N] each."""
  ranks, count = segments.group_ranks(values, batch), segments.group_counts(batch)

  def pick(percent: int) -> jax.Array:
    wanted = jnp.round(percent / 100 * (count - 1.0)).astype(jnp.int32)
    return segments.group_sums(jnp.where(ranks == wanted, values, 0.0), batch)

  return [pick(percent) for percent in percents]


def _reward_metrics(batch: Batch) -> dict[str, jax.Array]:
  equal = segments.group_max(batch.rewards, batch) == -segments.group_max(-batch.rewards, batch)
  return {
    "reward": segments.mean_of_responses(batch.rewards, batch),
    "reward_group_std": segments.mean_of_groups(segments.group_stds(batch.rewards, batch), batch),
    "equal_reward_groups": segments.mean_of_groups(equal.astype(jnp.float32), batch),
    "truncated": segments.mean_of_responses(batch.truncated.astype(jnp.float32), batch),
  }


def _reference_metrics(log_pi: jax.Array, batch: Batch, *, beta: jax.Array) -> dict[str, jax.Array]:
  log_ratio = segments.response_sums(log_pi - batch.log_ref, batch)
  advantages = segments.centre(batch.rewards, batch) - beta * segments.centre(log_ratio, batch)
  beta_log_z = segments.group_means(batch.rewards, batch) - beta * segments.group_means(log_ratio, batch)
  return {
    "log_ratio_ref": segments.mean_of_responses(log_ratio, batch),
    "residual_abs": segments.mean_of_responses(jnp.abs(advantages), batch),
    "beta_log_z": segments.mean_of_groups(beta_log_z, batch),
    "beta_log_z" + SQUARE_SUFFIX: segments.mean_of_groups(jnp.square(beta_log_z), batch),
  }


def _sampler_metrics(log_pi: jax.Array, batch: Batch) -> dict[str, jax.Array]:
  per_token = log_pi - batch.log_mu
  log_ratio = segments.response_sums(per_token, batch)
  metrics = {
    "log_ratio_mu_abs": segments.mean_of_tokens(jnp.abs(per_token), batch),
    "log_ratio_mu_max": segments.mean_of_responses(segments.response_max(jnp.abs(per_token), batch), batch),
    "ess_share": segments.mean_of_groups(effective_sample_share(log_ratio, batch), batch),
  }
  percents = (5, 50, 95)
  for percent, quantile in zip(percents, group_quantiles(log_ratio, batch, percents=percents)):
    metrics[f"log_ratio_mu_q{percent:02d}"] = segments.mean_of_groups(quantile, batch)
  return metrics

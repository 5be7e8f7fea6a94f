"""PPO with a critic: the value of every state within a response, learnt by a head beside the model.

The other clipped losses, whose baseline is the group's mean, are in clipped.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tba_jax.losses import ratios, segments
from tba_jax.losses.diagnostics import SQUARE_SUFFIX, clip_share, common_metrics
from tba_jax.types import Batch


def gae(token_rewards: jax.Array, values: jax.Array, batch: Batch, *, gae_lambda: float) -> jax.Array:
  """Generalised advantage estimates without discount, of what follows each token. No gradient. Returns [B, T].

      delta_t = reward_t + V_(t+1) - V_t,  V after the last token 0;   A_t = sum over d of gae_lambda^d delta_(t+d)

  A response that hit the length limit ends there like any other: its reward is final, nothing follows it.

  Source: Schulman et al. 2016, arXiv:1506.02438, equation 16 at gamma = 1.

  Args:
    token_rewards: of each token, reward units, [B, T].
    values: of the state before each token, [B, T].
    gae_lambda: 1: reward to come minus value; 0: the temporal difference alone.
  """
  delta = token_rewards + segments.following(values, batch) - values
  return segments.suffix_sums(jax.lax.stop_gradient(delta), batch, decay=gae_lambda)


def clipped_value_error(
  values: jax.Array, returns: jax.Array, old_values: jax.Array, *, value_clip: float
) -> jax.Array:
  """max of (V - return)^2 and (old V + clip(V - old V, +-value_clip) - return)^2, per entry: PPO's value loss.

  Where V has moved from the old value by more than the bound, and towards the return, it takes no gradient.

  Source: the public code of PPO (openai/baselines, ppo2), as documented by TorchRL's ClipPPOLoss (clip_value).
  """
  bounded = old_values + jnp.clip(values - old_values, -value_clip, value_clip)
  free, held = jnp.square(values - returns), jnp.square(bounded - returns)
  return jnp.where(held > free, held, free)


def ppo(
  log_pi: jax.Array, batch: Batch, *, beta: jax.Array, values: jax.Array | None = None,
  old_values: jax.Array | None = None, clip_low: float = 0.2, clip_high: float = 0.2, gae_lambda: float = 0.95,
  value_clip: float = 0.2, aggregate: str = "response_sum",
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """PPO: clipped token ratios, advantages from a learnt value of each state, the KL penalty in each token's reward.

      reward_t = (r at the last token) - beta (log_pi_t - log_ref_t), no gradient;   A_t by `gae`
      loss = -mean over responses of sum over tokens of weight min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A)
             + 1/2 mean over tokens of weight (value error: `clipped_value_error` to A_t + V_t)

  The two parts share no parameter, as the head sends no gradient into the model: the second only teaches the head, at
  its own rate. With values of 0 and gae_lambda = 1 the first is `ppo_clip` without a baseline where beta is 0.

  Source: Schulman et al. 2017, arXiv:1707.06347, with the per-token KL penalty of Ziegler et al. 2019,
  arXiv:1909.08593. Differs: advantages are not whitened over the batch (micro-batches would each have their own), the
  KL penalty is of the current policy, and the critic reads the policy's hidden states instead of being a model.

  Args: as `ppo_clip`.
    values: of the state before each token, reward units, [B, T]; they take the gradient of the second part.
    old_values: those that value_clip is around. Default: the values themselves as the step begins, which is right where
      a batch serves one update (nothing is clipped then).
    gae_lambda: see `gae`. value_clip: see `clipped_value_error`, reward units.
  Returns: scalar loss; metrics with `clip_share` (of tokens), `value_error` (mean square of value to return over
    tokens), `value_target` (mean return of tokens) and `value_target_square`: the head has learnt something where the
    error is less than the variance of its target.
  Raises: ValueError where values are not given.
  """
  segments.check_layout(log_pi, batch)
  if values is None:
    raise ValueError("values=None is not enough for loss 'ppo': give the value of each state, or use ppo_clip.")
  values = segments.masked(values, batch)
  penalty = beta * segments.masked(log_pi - batch.log_ref, batch)
  rewards = segments.at_tokens(segments.kept(batch.rewards, batch), batch)
  final = jnp.where(segments.last_token_mask(batch), rewards, 0.0)
  fixed = jax.lax.stop_gradient(values)
  advantages = gae(jax.lax.stop_gradient(final - penalty), fixed, batch, gae_lambda=gae_lambda)
  log_ratio = segments.masked(log_pi - batch.log_mu, batch)
  objective, clipped = ratios.clipped_objective(log_ratio, advantages, clip_low=clip_low, clip_high=clip_high)
  weights = segments.at_tokens(batch.weights, batch)
  loss = segments.aggregate(-weights * objective, batch, how=aggregate)
  returns = advantages + fixed
  error = clipped_value_error(values, returns, fixed if old_values is None else old_values, value_clip=value_clip)
  metrics = {
    "value_error": segments.mean_of_tokens(jnp.square(fixed - returns), batch),
    "value_target": segments.mean_of_tokens(returns, batch),
    "value_target" + SQUARE_SUFFIX: segments.mean_of_tokens(jnp.square(returns), batch),
  }
  loss = loss + 0.5 * segments.mean_of_tokens(weights * error, batch)
  return loss, common_metrics(log_pi, batch, beta=beta) | clip_share(clipped, batch) | metrics

"""Policy gradients weighted by capped importance ratios that take no gradient: updates are tamed, none is dropped.

The value of these losses means nothing, only their gradient does: -mean of (detached weight x A x grad log_pi). All
need log_mu.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tba_jax.losses import ratios, segments
from tba_jax.losses.diagnostics import clip_share, common_metrics
from tba_jax.losses.policy_gradient import mean_baseline, score_function
from tba_jax.types import Batch


def _weighted_scores(log_pi: jax.Array, coefficients: jax.Array, batch: Batch, *, aggregate: str) -> jax.Array:
  """-aggregate of weight coefficient log_pi over tokens, coefficients [B, T] without gradient."""
  fixed = jax.lax.stop_gradient(segments.masked(coefficients, batch)) * segments.at_tokens(batch.weights, batch)
  return segments.aggregate(-fixed * segments.masked(log_pi, batch), batch, how=aggregate)


def cispo(
  log_pi: jax.Array, batch: Batch, *, beta: jax.Array, ratio_floor: float = 0.0, ratio_cap: float = 5.0,
  std_floor: float = 1e-4, aggregate: str = "token_mean",
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Clipped importance-sampling weights: REINFORCE on tokens, weighted by a clipped ratio that takes no gradient.

      gradient = -mean over tokens of weight clip(ratio_t, ratio_floor, ratio_cap) A grad log_pi_t,  A as in GRPO

  Unlike PPO's clip, a token beyond the bound still learns. The paper sets no lower bound and does not state its upper
  one; the default here is ours.

  Source: MiniMax-M1, arXiv:2506.13585, equations 4 and 5.

  Args:
    log_pi: log-probability of each token, nats, aligned with the token.
    batch: uses log_mu, rewards, groups, weights.
    beta: not used.
    ratio_floor, ratio_cap: bounds of a token's ratio.
  Returns: scalar whose gradient is the policy gradient; metrics with `clip_share` (of tokens).
  """
  segments.check_layout(log_pi, batch)
  rho = ratios.ratio(segments.masked(log_pi - batch.log_mu, batch))
  clipped = (rho < ratio_floor) | (rho > ratio_cap)
  advantages = segments.at_tokens(segments.standardise(batch.rewards, batch, floor=std_floor), batch)
  loss = _weighted_scores(log_pi, jnp.clip(rho, ratio_floor, ratio_cap) * advantages, batch, aggregate=aggregate)
  return loss, common_metrics(log_pi, batch, beta=beta) | clip_share(clipped, batch)


def topr(
  log_pi: jax.Array, batch: Batch, *, beta: jax.Array, negative_cap: float = 1.0
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Tapered off-policy REINFORCE: good responses as in supervised learning, bad ones with a truncated ratio.

      gradient = -mean of weight w A grad log_pi
      w = 1 where A >= 0, min(exp(log_pi - log_mu), negative_cap) where A < 0

  Whole responses. Once a bad response has become unlikely its push fades, so its probability is not driven to 0 for
  ever.

  Source: Le Roux et al. 2025, arXiv:2503.14286 (the gradient of its section 3). Its baseline is a tuned constant; here
  A = (r - mean r) - beta (k - mean k) within the group.

  Args and returns: as `cispo`; beta weighs the KL penalty in the reward, needs log_ref; `clip_share` of responses.
  """
  segments.check_layout(log_pi, batch)
  advantages = mean_baseline(log_pi, batch, beta=beta)
  log_ratio = jax.lax.stop_gradient(segments.response_sums(log_pi - batch.log_mu, batch))
  tapered = ratios.capped_ratio(log_ratio, cap=negative_cap)
  clipped = (advantages < 0.0) & (tapered >= negative_cap)
  loss = score_function(log_pi, advantages * jnp.where(advantages < 0.0, tapered, 1.0), batch)
  return loss, common_metrics(log_pi, batch, beta=beta) | clip_share(clipped, batch)


def vtrace(
  log_pi: jax.Array, batch: Batch, *, beta: jax.Array, rho_cap: float = 1.0, c_cap: float = 1.0
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """V-trace's policy gradient with the group's mean as the value of every state and the reward at the last token T.

      rho_t = min(ratio_t, rho_cap),  c_t = min(ratio_t, c_cap)
      gradient = -mean over responses of sum over t of weight w_t A grad log_pi_t
      w_T = rho_T;   w_t = rho_t c_(t+1) ... c_(T-1) rho_T   for t < T

  That is rho_t (r_t + v_(t+1) - V) for v the V-trace targets, undiscounted, with the KL penalty in the reward, so that
  A = (r - mean r) - beta (k - mean k); with a constant V every temporal difference but the last is 0. The weight of a
  token is the truncated ratio of the rest of the response; ratios of earlier tokens do not enter. On policy it is
  `reinforce`.

  Source: Espeholt et al. 2018 (IMPALA), arXiv:1802.01561, the V-trace target and its policy gradient.

  Args and returns: as `cispo`; beta weighs the KL penalty in the reward, needs log_ref; `clip_share` of tokens with
  ratio > rho_cap.
  """
  segments.check_layout(log_pi, batch)
  log_ratio = jax.lax.stop_gradient(segments.masked(log_pi - batch.log_mu, batch))
  log_ratio = jnp.clip(log_ratio, -ratios.MAX_LOG_RATIO, ratios.MAX_LOG_RATIO)
  log_rho, log_c = jnp.minimum(log_ratio, jnp.log(rho_cap)), jnp.minimum(log_ratio, jnp.log(c_cap))
  last = segments.last_token_mask(batch)
  # The last token's own c does not enter: its factor is rho.
  ahead = segments.suffix_sums(jnp.where(last, log_rho, log_c), batch)
  following = jnp.where(last, 0.0, ahead - log_c)
  weights = ratios.ratio(segments.masked(log_rho + following, batch))
  advantages = segments.at_tokens(mean_baseline(log_pi, batch, beta=beta), batch)
  loss = _weighted_scores(log_pi, weights * advantages, batch, aggregate="response_sum")
  return loss, common_metrics(log_pi, batch, beta=beta) | clip_share(log_ratio > jnp.log(rho_cap), batch)


def topk_off_policy(
  log_pi: jax.Array, batch: Batch, *, beta: jax.Array, top_k: int = 2, ratio_cap: float = 20.0
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Top-K off-policy correction: learn towards being among K draws, not towards being the only one.

      gradient = -mean over responses of sum over t of weight min(ratio_t, ratio_cap) lambda_t A grad log_pi_t
      lambda_t = K (1 - pi_t)^(K-1)

  An action is a token here: lambda_t is the derivative of 1 - (1 - pi_t)^K, the chance to draw the token at least once
  in K tries; it is near K for unlikely tokens and fades as pi_t grows. At top_k = 1 this is importance-weighted
  REINFORCE. As in the source only the ratio of the action itself enters (first order), capped; the cap's default is
  ours.

  Source: Chen et al. 2019, arXiv:1812.02353 (top-K correction and weight capping). Differs: a group baseline and the KL
  penalty in the reward, A = (r - mean r) - beta (k - mean k).

  Args and returns: as `cispo`; beta weighs the KL penalty in the reward, needs log_ref.
  """
  segments.check_layout(log_pi, batch)
  current = jax.lax.stop_gradient(segments.masked(log_pi, batch))
  log_ratio = segments.masked(current - batch.log_mu, batch)
  others = jnp.maximum(-jnp.expm1(current), 0.0)
  multiplier = top_k * others ** (top_k - 1)
  advantages = segments.at_tokens(mean_baseline(log_pi, batch, beta=beta), batch)
  capped = ratios.capped_ratio(log_ratio, cap=ratio_cap)
  loss = _weighted_scores(log_pi, capped * multiplier * advantages, batch, aggregate="response_sum")
  return loss, common_metrics(log_pi, batch, beta=beta) | clip_share(capped >= ratio_cap, batch)

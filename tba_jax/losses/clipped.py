"""Clipped surrogate objectives: PPO with a group baseline and its relatives. All need log_mu.

Every loss is -mean of min(ratio A, clip(ratio) A); they differ in the level of the ratio (token or response), in the
advantage A and in how tokens are averaged. At ratio 1 their gradient is that of REINFORCE with the same advantage and
the same averaging.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tba_jax.losses import ratios, segments
from tba_jax.losses.diagnostics import clip_share, common_metrics
from tba_jax.losses.policy_gradient import leave_one_out, mean_baseline
from tba_jax.types import Batch


def _token_clip(
  log_pi: jax.Array, batch: Batch, advantages: jax.Array, *, clip_low: float, clip_high: float, aggregate: str
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Clips the ratio of each token; every token of a response has the response's advantage [N]."""
  log_ratio = segments.masked(log_pi - batch.log_mu, batch)
  per_token = segments.at_tokens(jax.lax.stop_gradient(advantages), batch)
  objective, clipped = ratios.clipped_objective(log_ratio, per_token, clip_low=clip_low, clip_high=clip_high)
  loss = segments.aggregate(-segments.at_tokens(batch.weights, batch) * objective, batch, how=aggregate)
  return loss, clip_share(clipped, batch)


def ppo_clip(
  log_pi: jax.Array, batch: Batch, *, beta: jax.Array, clip_low: float = 0.2, clip_high: float = 0.2,
  aggregate: str = "response_sum",
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """PPO's clipped surrogate with the group's mean as baseline instead of a critic.

      A = (r - mean r) - beta (k - mean k),  k = log_pi - log_ref, no gradient;   ratio_t = exp(log_pi_t - log_mu_t)
      loss = -mean over responses of sum over tokens of weight min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A)

  Source: Schulman et al. 2017, arXiv:1707.06347. Differs: no critic; the KL penalty is of the current
  policy, so that at ratio 1 the gradient is that of `reinforce`; `aggregate` sums over tokens by default for the same
  reason.

  Args:
    log_pi: log-probability of each token, nats, aligned with the token.
    batch: uses log_mu, log_ref, rewards, groups, weights.
    beta: weight of the KL penalty in the reward, reward units per nat, >= 0.
    clip_low, clip_high: how far a ratio may fall below or rise above 1 before its gradient is dropped.
    aggregate: see `segments.aggregate`.
  Returns: scalar loss, reward units; metrics with `clip_share` (of tokens).
  """
  segments.check_layout(log_pi, batch)
  advantages = mean_baseline(log_pi, batch, beta=beta)
  loss, clip = _token_clip(log_pi, batch, advantages, clip_low=clip_low, clip_high=clip_high, aggregate=aggregate)
  return loss, common_metrics(log_pi, batch, beta=beta) | clip


def vineppo(
  log_pi: jax.Array, batch: Batch, *, beta: jax.Array, clip_low: float = 0.2, clip_high: float = 0.2,
  aggregate: str = "response_sum",
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """VinePPO: PPO's clipped surrogate whose advantages come from continuations sampled within the response.

      A_t = V(s_(j+1)) - V(s_j) for every token t of step j, the reward in the place of V at the end
      loss = -mean over responses of sum over tokens of
             weight [min(ratio_t A_t, clip(ratio_t, 1 - clip_low, 1 + clip_high) A_t) - beta (exp(d_t) - d_t - 1)]

  V(s) is the mean reward of responses that were begun at s and finished by the policy that sampled (`tba_jax.vine`):
  unbiased, without a critic. d_t = log_ref_t - log_pi_t. Where V is the group's mean at the first state and nothing is
  sampled in between it is `ppo_clip` with that baseline.

  Source: Kazemnejad et al. 2024, arXiv:2410.01679: the advantage r + V_MC(s_(t+1)) - V_MC(s_t) without discount; the
  KL term stands beside the objective, as in their public configurations.

  Args: as `ppo_clip`; the batch also has `advantages`. beta weighs the KL term.
  Returns: scalar loss; metrics with `clip_share` (of tokens), `kl_term` as in `grpo`, and `advantage_abs`, the mean
    |A_t| of tokens: 0 where no step of a response changed what it will earn.
  Raises: ValueError where the batch has no advantages.
  """
  segments.check_layout(log_pi, batch)
  if batch.advantages is None:
    raise ValueError("advantages=None is not enough for loss 'vineppo': give each token's, or use ppo_clip.")
  log_ratio = segments.masked(log_pi - batch.log_mu, batch)
  advantages = segments.masked(jax.lax.stop_gradient(batch.advantages), batch)
  objective, clipped = ratios.clipped_objective(log_ratio, advantages, clip_low=clip_low, clip_high=clip_high)
  loss = segments.aggregate(-segments.at_tokens(batch.weights, batch) * objective, batch, how=aggregate)
  kl_loss, kl_term = _kl_term(log_pi, batch, aggregate=aggregate)
  metrics = {"kl_term": kl_term, "advantage_abs": segments.mean_of_tokens(jnp.abs(advantages), batch)}
  return loss + beta * kl_loss, common_metrics(log_pi, batch, beta=beta) | clip_share(clipped, batch) | metrics


def _kl_term(log_pi: jax.Array, batch: Batch, *, aggregate: str) -> tuple[jax.Array, jax.Array]:
  """(weighted, with gradient; unweighted, without) aggregate over tokens of exp(d) - d - 1, d = log_ref - log_pi."""
  gap = jnp.clip(segments.masked(batch.log_ref - log_pi, batch), -ratios.MAX_LOG_RATIO, ratios.MAX_LOG_RATIO)
  estimate = jnp.expm1(gap) - gap
  weighted = segments.aggregate(segments.at_tokens(batch.weights, batch) * estimate, batch, how=aggregate)
  return weighted, segments.aggregate(jax.lax.stop_gradient(estimate), batch, how=aggregate)


def grpo(
  log_pi: jax.Array, batch: Batch, *, beta: jax.Array, clip_low: float = 0.2, clip_high: float = 0.2,
  divide_by_std: bool = True, std_floor: float = 1e-4, aggregate: str = "response_mean",
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Group relative policy optimisation: standardised rewards, clipped token ratios, a KL term beside the objective.

      A = (r - mean r) / (std r + std_floor) within the group;   d_t = log_ref_t - log_pi_t
      loss = -mean over responses of mean over tokens of
             weight [min(ratio A, clip(ratio) A) - beta (exp(d_t) - d_t - 1)]

  Source: Shao et al. 2024 (DeepSeekMath), arXiv:2402.03300. The paper names neither the divisor of
  the standard deviation nor a floor under it: here K, and `std_floor` so that rounding in nearly equal rewards is not
  blown up.

  Args: as `ppo_clip`; beta weighs the KL estimate, a loss term of its own here (unbiased for samples of log_pi only).
    divide_by_std: False leaves the rewards' scale (Dr. GRPO's first change; the second is aggregate="response_sum").
  Returns: scalar loss; metrics with `clip_share` (of tokens) and `kl_term` (the mean estimate, unweighted by beta).
  """
  segments.check_layout(log_pi, batch)
  centred = segments.centre(batch.rewards, batch)
  advantages = segments.standardise(batch.rewards, batch, floor=std_floor) if divide_by_std else centred
  loss, clip = _token_clip(log_pi, batch, advantages, clip_low=clip_low, clip_high=clip_high, aggregate=aggregate)
  kl_loss, kl_term = _kl_term(log_pi, batch, aggregate=aggregate)
  return loss + beta * kl_loss, common_metrics(log_pi, batch, beta=beta) | clip | {"kl_term": kl_term}


def dr_grpo(
  log_pi: jax.Array, batch: Batch, *, beta: jax.Array, clip_low: float = 0.2, clip_high: float = 0.2,
  divisor_tokens: float = 1.0,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """GRPO done right: no division by the standard deviation, none by the response's own length, no KL term.

      A = r - mean r
      loss = -mean over responses of (1 / divisor_tokens) sum over tokens of weight min(ratio A, clip(ratio) A)

  A is (K - 1) / K of the leave-one-out advantage. `divisor_tokens` is a constant (the paper's code: the generation
  budget); 1 keeps the gradient that of whole-response log-probabilities.

  Source: Liu et al. 2025, arXiv:2503.20783. Args and returns: as `ppo_clip`; beta is not used.
  """
  segments.check_layout(log_pi, batch)
  advantages = segments.centre(batch.rewards, batch)
  loss, clip = _token_clip(log_pi, batch, advantages, clip_low=clip_low, clip_high=clip_high, aggregate="response_sum")
  return loss / divisor_tokens, common_metrics(log_pi, batch, beta=beta) | clip


def dapo(
  log_pi: jax.Array, batch: Batch, *, beta: jax.Array, clip_low: float = 0.2, clip_high: float = 0.28,
  std_floor: float = 1e-4,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """DAPO's loss: GRPO's advantage, a higher upper clip, a mean over all tokens of the batch, no KL term.

      loss = -mean over the response tokens of the batch of weight min(ratio A, clip(ratio, 1 - 0.2, 1 + 0.28) A)

  Source: Yu et al. 2025, arXiv:2503.14476. Its dynamic sampling and overlong reward shaping are no part of
  the loss: a group of equal rewards stays in and adds exactly 0, though its tokens count in the mean.

  Args and returns: as `ppo_clip`; beta is not used.
  """
  segments.check_layout(log_pi, batch)
  advantages = segments.standardise(batch.rewards, batch, floor=std_floor)
  loss, clip = _token_clip(log_pi, batch, advantages, clip_low=clip_low, clip_high=clip_high, aggregate="token_mean")
  return loss, common_metrics(log_pi, batch, beta=beta) | clip


def gspo(
  log_pi: jax.Array, batch: Batch, *, beta: jax.Array, clip_low: float = 3e-4, clip_high: float = 4e-4,
  std_floor: float = 1e-4,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Group sequence policy optimisation: the geometric mean of a response's token ratios, clipped as one.

      s = exp(mean over tokens of log_pi - log_mu);   loss = -mean over responses of weight min(s A, clip(s) A)

  A as in GRPO. The clip range is that of a length-normalised ratio, hence small.

  Source: Zheng et al. 2025, arXiv:2507.18071.

  Args and returns: as `ppo_clip`, with `clip_share` of responses; beta is not used.
  """
  segments.check_layout(log_pi, batch)
  lengths = jnp.maximum(segments.response_lengths(batch), 1.0)
  log_ratio = segments.response_sums(log_pi - batch.log_mu, batch) / lengths
  advantages = segments.standardise(batch.rewards, batch, floor=std_floor)
  objective, clipped = ratios.clipped_objective(log_ratio, advantages, clip_low=clip_low, clip_high=clip_high)
  loss = segments.mean_of_responses(-batch.weights * objective, batch)
  return loss, common_metrics(log_pi, batch, beta=beta) | clip_share(clipped, batch)


def proximal_rloo(
  log_pi: jax.Array, batch: Batch, *, beta: jax.Array, clip_low: float = 0.2, clip_high: float = 0.2
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """RLOO for off-policy data: the whole response's ratio times the leave-one-out advantage, clipped as in PPO.

      ratio = exp(log_pi - log_mu) of the whole response;   loss = -mean of weight min(ratio A, clip(ratio) A)

  A is the leave-one-out advantage of r - beta (log_pi - log_ref); beta = 0 gives the raw reward of Bartoldson et al.
  2025, arXiv:2503.18929, equation 6. Not divided by length: long responses leave the clip range after a small change.

  Source: Noukhovitch et al. 2024, arXiv:2410.18252, whose public code (mnoukhov/async_rlhf) clips the whole-response
  ratio and takes the KL penalty of the policy that sampled; here it is of the current one, as in `rloo`, whose gradient
  this is at ratio 1.

  Args and returns: as `ppo_clip`, with `clip_share` of responses.
  """
  segments.check_layout(log_pi, batch)
  advantages = leave_one_out(mean_baseline(log_pi, batch, beta=beta), batch)
  log_ratio = segments.response_sums(log_pi - batch.log_mu, batch)
  objective, clipped = ratios.clipped_objective(log_ratio, advantages, clip_low=clip_low, clip_high=clip_high)
  loss = segments.mean_of_responses(-batch.weights * objective, batch)
  return loss, common_metrics(log_pi, batch, beta=beta) | clip_share(clipped, batch)


def decoupled_ppo(
  log_pi: jax.Array, batch: Batch, *, beta: jax.Array, clip_low: float = 0.2, clip_high: float = 0.2,
  proximal_mix: float = 0.0, behaviour_cap: float = 5.0, aggregate: str = "response_sum",
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """PPO whose trust region is around a proximal policy, not around the stale policy that sampled.

      loss = -mean of weight w min(ratio A, clip(ratio) A),   w = exp(log_prox - log_mu), ratio = exp(log_pi - log_prox)

  w takes no gradient, and a token with w > behaviour_cap is left out. log_prox =
  log_pi + proximal_mix (log_mu - log_pi), no gradient: with 0 the proximal policy is the policy itself as the step
  begins, which is exact for one update per batch (no ratio is clipped then, only w is capped); with 1 it is the sampler
  and the loss is `ppo_clip`; between them the interpolation of A-3PO.

  Source: Hilton et al. 2021 (decoupling, as documented by TorchRL's ClipPPOLoss); AReaL (documentation of its
  asynchronous loss, and its behav_imp_weight_cap, which filters tokens); A-3PO, arXiv:2512.06547, for the
  interpolation, whose weight follows staleness there.

  Args and returns: as `ppo_clip`; `clip_share` counts tokens that the clip or the cap took the gradient from.
  """
  segments.check_layout(log_pi, batch)
  advantages = segments.at_tokens(mean_baseline(log_pi, batch, beta=beta), batch)
  current = jax.lax.stop_gradient(log_pi)
  log_prox = current + proximal_mix * (batch.log_mu - current)
  behaviour = ratios.ratio(segments.masked(log_prox - batch.log_mu, batch))
  dropped = behaviour > behaviour_cap
  log_ratio = segments.masked(log_pi - log_prox, batch)
  objective, clipped = ratios.clipped_objective(log_ratio, advantages, clip_low=clip_low, clip_high=clip_high)
  weights = jnp.where(dropped, 0.0, behaviour) * segments.at_tokens(batch.weights, batch)
  loss = segments.aggregate(-weights * objective, batch, how=aggregate)
  return loss, common_metrics(log_pi, batch, beta=beta) | clip_share(clipped | dropped, batch)

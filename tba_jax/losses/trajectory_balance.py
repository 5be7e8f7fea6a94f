"""Trajectory balance: regress the policy's log-ratio to the reference on the reward, one free log Z per prompt.

`tb_vargrad` is the loss of this project. It needs no importance weights: the minimiser is pi proportional to
pi_ref exp(reward / beta) whichever full-support policy made the responses. Its relatives change one thing each; where
one does need ratios (`flowrl`, `tba_prime_ratio`), it says so.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tba_jax.losses import ratios, segments
from tba_jax.losses.diagnostics import clip_share, common_metrics
from tba_jax.types import Batch


def scaled_residuals(log_pi: jax.Array, batch: Batch, *, beta: jax.Array) -> jax.Array:
  """beta x (log Z - delta) of every valid response, log Z the mean of its group's valid rows: [N], reward units.

  With k = log_pi - log_ref (summed over the response) this is beta (k - mean k) - (r - mean r) = -A, A the advantage of
  policy-gradient language. It is computed in this beta-scaled form, and the two parts are centred apart, because delta
  itself holds r / beta: at small beta that term is huge, common to the group, and would swallow the digits of the
  log-ratios. Log-ratios are summed token by token for the same reason: two log-probabilities of -300 never meet as
  sums.

  The gradient is that of beta log_pi of the row itself: none flows through log Z.
  """
  log_ratio = segments.response_sums(log_pi - batch.log_ref, batch)
  fixed = jax.lax.stop_gradient(log_ratio)
  # (log_ratio - fixed) is exactly 0: it carries the gradient and leaves the well-rounded value alone.
  return beta * (segments.centre(fixed, batch) + (log_ratio - fixed)) - segments.centre(batch.rewards, batch)


def tb_vargrad(log_pi: jax.Array, batch: Batch, *, beta: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Trajectory balance with the VarGrad estimate of log Z, times beta / 2.

      delta = log_ref + reward / beta - log_pi            whole-response sums
      log Z = stop_gradient(mean of delta over the group's valid rows)
      loss  = (beta / 2) mean over valid responses of weight (log Z - delta)^2

  The paper's loss times beta / 2: the gradient is then exactly -mean(weight A grad log_pi) with
  A = (r - mean r) - beta (k - mean k), k = log_pi - log_ref, so a learning rate or a clipping norm means the same at
  every beta. Without the factor it is 2 / beta times that. log Z is of the unweighted rows: importance weights say how
  often a row counts, not what its prompt's constant is; where the weights of a group are equal (as the replay buffer
  makes them) stopping the gradient of log Z is a no-op.

  Source: Bartoldson et al. 2025, arXiv:2503.18929, equations 4 and 5; VarGrad: Richter et al. 2020, arXiv:2010.10436.
  Differs from TBA: groups go by id, not by a reshape that is right only for one prompt per micro-batch; the factor
  beta / 2.

  Args:
    log_pi: log-probability of each token under the policy being trained, nats, aligned with the token.
    batch: uses log_ref, rewards, groups, weights; not log_mu.
    beta: temperature of the target, reward units per nat, > 0.
  Returns: scalar loss, reward units; metrics.
  """
  segments.check_layout(log_pi, batch)
  residuals = scaled_residuals(log_pi, batch, beta=beta)
  loss = segments.mean_of_responses(batch.weights * jnp.square(residuals), batch) / (2.0 * beta)
  return loss, common_metrics(log_pi, batch, beta=beta)


def tb_learned_z(
  log_pi: jax.Array, batch: Batch, *, beta: jax.Array, log_z: jax.Array | None = None
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Trajectory balance with a log Z per prompt that is learnt, here by a head over the prompt's last hidden state.

      loss = (beta / 2) mean over valid responses of weight (log_z + log_pi - log_ref - reward / beta)^2

  The gradient reaches log_z too: d loss / d log_z is beta x the mean residual, so its own learning rate should grow as
  beta falls. With log_z = the mean of delta over the group (no gradient) this is `tb_vargrad`. Works with one response
  per prompt.

  Source: Malkin et al. 2022, trajectory balance with a learned log Z, as stated in Bartoldson et al. 2025,
  arXiv:2503.18929, equation 3.

  Args: as `tb_vargrad`.
    log_z: float32 [N], nats, each response's estimate for its prompt (rows of a group carry the same value).
  Returns: scalar loss, reward units; metrics with `residual_z_abs`, mean |beta (log_z - delta)|, reward units.
  Raises: ValueError where log_z is not given.
  """
  segments.check_layout(log_pi, batch)
  log_z = _given_log_z("tb_learned_z", log_z)
  log_ratio = segments.response_sums(log_pi - batch.log_ref, batch)
  residuals = beta * (log_z + log_ratio) - batch.rewards
  loss = segments.mean_of_responses(batch.weights * jnp.square(segments.kept(residuals, batch)), batch) / (2.0 * beta)
  residual_abs = segments.mean_of_responses(jnp.abs(jax.lax.stop_gradient(residuals)), batch)
  return loss, common_metrics(log_pi, batch, beta=beta) | {"residual_z_abs": residual_abs}


def flowrl(
  log_pi: jax.Array, batch: Batch, *, beta: jax.Array, log_z: jax.Array | None = None, clip_low: float = 0.2,
  clip_high: float = 0.2, std_floor: float = 1e-4,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """FlowRL: trajectory balance per token on standardised rewards, a learned log Z, a clipped importance weight.

      loss = (beta / 2) mean of weight w (log_z + (log_pi - log_ref) / length - r' / beta)^2
      r' = (r - mean r) / (std r + std_floor) within the group
      w = clip(exp(log_pi - log_mu), 1 - clip_low, 1 + clip_high)

  w is of the whole response and takes no gradient. FlowRL's reward coefficient (15 in its code) is 1 / beta here; the
  factor beta / 2 is ours, as in `tb_vargrad`. Its minimum is not the tilted reference: dividing by the length changes
  the target.

  Source: Zhu et al. 2025, arXiv:2509.15207, the objective as printed in its public repository; variants of its code
  take the geometric mean for w, or cap it at 10.

  Args and raises: as `tb_learned_z`; log_z is in nats per token. Returns: scalar loss; metrics with `clip_share` (of
  responses).
  """
  segments.check_layout(log_pi, batch)
  log_z = _given_log_z("flowrl", log_z)
  lengths = jnp.maximum(segments.response_lengths(batch), 1.0)
  log_ratio = segments.response_sums(log_pi - batch.log_ref, batch) / lengths
  shaped = segments.standardise(batch.rewards, batch, floor=std_floor)
  residuals = beta * (log_z + log_ratio) - shaped
  rho = ratios.ratio(jax.lax.stop_gradient(segments.response_sums(log_pi - batch.log_mu, batch)))
  importance = jnp.clip(rho, 1.0 - clip_low, 1.0 + clip_high)
  squares = jnp.square(segments.kept(residuals, batch))
  loss = segments.mean_of_responses(batch.weights * importance * squares, batch) / (2.0 * beta)
  return loss, common_metrics(log_pi, batch, beta=beta) | clip_share(rho != importance, batch)


def tb_f_divergence(
  log_pi: jax.Array, batch: Batch, *, beta: jax.Array, alpha: float = 0.5
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Trajectory balance with another regression loss than the square: another divergence, the same minimum.

      x = delta - log Z;   g(x) = (exp(c x) - c x - 1) / c^2 with c = 1 - alpha  (Linex; c -> 0 is x^2 / 2)
      log Z = (1 / c) log mean exp(c delta) over the group's valid rows (no gradient; c -> 0 is the mean)
      loss = beta mean over valid responses of weight g(x)

  On policy the expected gradient is that of the alpha-divergence, up to a positive factor per prompt that is 1 at the
  minimum: alpha = 1 is the reverse KL, where this loss is `tb_vargrad` itself; alpha = 0 the forward KL; a lower alpha
  covers more modes. log Z minimises the unweighted loss of the group (our choice; for the square it is VarGrad's mean),
  so that a row's coefficient is beta (1 - K softmax(c delta)) / c: bounded, whatever the log-ratios.

  Source: Hu et al. 2024, arXiv:2410.02596 (Linex and theorem 4.1, as documented by torchgfn's losses); the family over
  alpha for language models: Fawkes and Hartford 2026, arXiv:2605.15417, figure 1.

  Args: as `tb_vargrad`.
    alpha: which divergence, below or equal 1; a static number.
  Returns: scalar loss, reward units; metrics.
  Raises: ValueError for alpha > 1 (the loss would grow without bound on one unlikely row).
  """
  segments.check_layout(log_pi, batch)
  if alpha > 1.0:
    raise ValueError(f"alpha={alpha} must be at most 1 (1 is tb_vargrad, 0 the forward KL).")
  if alpha == 1.0:
    return tb_vargrad(log_pi, batch, beta=beta)
  slope = 1.0 - alpha
  # delta minus its group's mean, nats: the softmax below needs no more, and the mean is well rounded.
  centred = -scaled_residuals(log_pi, batch, beta=beta) / beta
  fixed = jax.lax.stop_gradient(slope * centred)
  largest = segments.kept(segments.group_max(fixed, batch), batch)
  mean_exp = segments.group_means(jnp.exp(segments.kept(fixed - largest, batch)), batch)
  log_z = segments.kept(largest + jnp.log(jnp.maximum(mean_exp, jnp.finfo(jnp.float32).tiny)), batch)
  scaled = segments.kept(slope * centred - log_z, batch)
  loss = beta * segments.mean_of_responses(batch.weights * (jnp.expm1(scaled) - scaled), batch) / slope**2
  return loss, common_metrics(log_pi, batch, beta=beta)


def tba_prime(
  log_pi: jax.Array, batch: Batch, *, beta: jax.Array, log_ratio_clamp: float = 10.0, aggregate: str = "response_sum"
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """TBA': trajectory balance written as a token-level policy gradient with the KL inside the advantage.

      k = sum over tokens of clamp(log_pi - log_ref, -log_ratio_clamp, log_ratio_clamp), no gradient
      A = (r - mean r) - beta (k - mean k);   loss = -sum over tokens of weight A log_pi_t

  Normalised as `tb_vargrad` by default (sum over tokens, mean over responses of the whole batch): where no clamp is
  active the two gradients are equal. The authors' code divides by the tokens of a micro-batch; aggregate="token_mean"
  is that, with the whole batch as the micro-batch.

  Source: Bartoldson et al. 2025, arXiv:2503.18929, equation 7, and the public code bbartoldson/tba-prime (loss.py at
  71c1716). Differs: mean k is of the current policy, as k is; the code takes it from log-probabilities of the sampler.

  Args: as `tb_vargrad`.
    log_ratio_clamp: bound of a token's log-ratio to the reference, nats.
  Returns: scalar whose gradient is the policy gradient; metrics with `clip_share` (of tokens beyond the clamp).
  """
  segments.check_layout(log_pi, batch)
  advantages, clamped = _clamped_advantages(log_pi, batch, beta=beta, log_ratio_clamp=log_ratio_clamp)
  scores = segments.at_tokens(batch.weights * advantages, batch) * segments.masked(log_pi, batch)
  loss = segments.aggregate(-scores, batch, how=aggregate)
  return loss, common_metrics(log_pi, batch, beta=beta) | clip_share(clamped, batch)


def tba_prime_ratio(
  log_pi: jax.Array, batch: Batch, *, beta: jax.Array, log_ratio_clamp: float = 10.0, ratio_cap: float = 8.0,
  aggregate: str = "response_sum",
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """`tba_prime` on importance ratios: loss = -sum over tokens of weight A min(exp(log_pi_t - log_mu_t), ratio_cap).

  The ratio is differentiated through: below the cap a token's gradient is ratio x A, above it there is none (a detached
  ratio, as in `cispo`, would keep it). At ratio 1 the gradient is that of `tba_prime`.

  Source: the optional importance ratio of bbartoldson/tba-prime (loss.py at 71c1716), cap 8.

  Args and returns: as `tba_prime`; needs log_mu; `clip_share` also counts tokens beyond the cap.
  """
  segments.check_layout(log_pi, batch)
  advantages, clamped = _clamped_advantages(log_pi, batch, beta=beta, log_ratio_clamp=log_ratio_clamp)
  rho = ratios.capped_ratio(segments.masked(log_pi - batch.log_mu, batch), cap=ratio_cap)
  scores = segments.at_tokens(batch.weights * advantages, batch) * rho
  loss = segments.aggregate(-scores, batch, how=aggregate)
  return loss, common_metrics(log_pi, batch, beta=beta) | clip_share(clamped | (rho >= ratio_cap), batch)


def _clamped_advantages(
  log_pi: jax.Array, batch: Batch, *, beta: jax.Array, log_ratio_clamp: float
) -> tuple[jax.Array, jax.Array]:
  """(A [N] with each token's log-ratio to the reference clamped, where the clamp was active [B, T]); no gradient."""
  per_token = jax.lax.stop_gradient(segments.masked(log_pi - batch.log_ref, batch))
  log_ratio = segments.response_sums(jnp.clip(per_token, -log_ratio_clamp, log_ratio_clamp), batch)
  advantages = segments.centre(batch.rewards, batch) - beta * segments.centre(log_ratio, batch)
  return advantages, jnp.abs(per_token) > log_ratio_clamp


def _given_log_z(loss: str, log_z: jax.Array | None) -> jax.Array:
  if log_z is None:
    raise ValueError(f"log_z=None is not enough for loss {loss!r}: give one estimate per response, or use tb_vargrad.")
  return log_z

"""Trajectory balance: regress the policy's log-ratio to the reference on the reward, one free constant (log Z) per prompt.

No importance weights anywhere: the minimiser is pi proportional to pi_ref exp(reward / beta) whichever full-support policy made the
responses. Losses that do need ratios are in policy_gradient.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tba_jax.losses import segments
from tba_jax.losses.diagnostics import common_metrics
from tba_jax.types import Batch


def scaled_residuals(log_pi: jax.Array, batch: Batch, *, beta: jax.Array) -> jax.Array:
  """beta x (log Z - delta) of every valid response, log Z the plain mean of its group's valid rows: float32 [N], reward units.

  With k = log_pi - log_ref (summed over the response) this is beta (k - mean k) - (r - mean r) = -A, A the advantage of
  policy-gradient language. It is computed in this beta-scaled form, and the two parts are centred apart, because delta itself holds
  r / beta: at small beta that term is huge, common to the group, and would swallow the digits of the log-ratios.
  Log-ratios are summed token by token for the same reason: two log-probabilities of -300 never meet as sums.

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

  The paper's loss times beta / 2: the gradient is then exactly -mean(weight A grad log_pi), A = (r - mean r) - beta (k - mean k),
  k = log_pi - log_ref, so a learning rate or a clipping norm means the same at every beta. Without the factor it is -(2 / beta)
  times that mean. log Z is of the unweighted rows: importance weights say how often a row counts, not what its prompt's constant is;
  where the weights of a group are equal (as the replay buffer makes them) stopping the gradient of log Z is a no-op.

  Source: Bartoldson et al. 2025, arXiv:2503.18929, equations 4 and 5; VarGrad: Richter et al. 2020, arXiv:2010.10436.
  Differs from TBA: groups go by id, not by a reshape that is right only for one prompt per micro-batch; the factor beta / 2.

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

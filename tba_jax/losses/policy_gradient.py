"""Policy gradients without importance ratios: REINFORCE with a group baseline, KL to the reference inside the reward.

The value of these losses means nothing, only their gradient does. Losses with ratios are in importance.py.
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
  """Turns values minus their group's mean into values minus the mean of the OTHERS: x K / (K - 1); 0 where K = 1. Returns [N].

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

  Its gradient is that of `tb_vargrad` at every beta and on any data; only the value and the reading differ. As a policy gradient it
  is right on policy alone. beta = 0 leaves the reference out.

  Source: Williams 1992 (REINFORCE with a baseline); the equality with trajectory balance: Bartoldson et al. 2025, arXiv:2503.18929,
  appendix A.

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

      r' = r - beta (log_pi - log_ref);   A_i = r'_i - mean of r'_j over j != i;   gradient = -mean(weight A grad log_pi)

  K / (K - 1) times the gradient of `tb_vargrad` for a group of K valid rows. No ratio: on policy only, like `reinforce`.

  Source: Ahmadian et al. 2024, arXiv:2402.14740 (after Kool et al. 2019).

  Args and returns: as `reinforce`. A group with one valid row has no baseline and adds nothing.
  """
  segments.check_layout(log_pi, batch)
  advantages = leave_one_out(mean_baseline(log_pi, batch, beta=beta), batch)
  return score_function(log_pi, advantages, batch), common_metrics(log_pi, batch, beta=beta)

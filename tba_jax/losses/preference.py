"""Losses on pairs of responses of one prompt, made on line from the rewards."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tba_jax.losses import segments
from tba_jax.losses.diagnostics import common_metrics
from tba_jax.types import Batch


def dpo(log_pi: jax.Array, batch: Batch, *, beta: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Online DPO: the best response of each group against its worst.

      loss = mean over groups of -log sigmoid(beta [(log_pi - log_ref)(best) - (log_pi - log_ref)(worst)])

  Several best or worst responses (as with a 0/1 reward): the mean over all pairs of a best and a worst one, which is
  what drawing a pair at random gives on average; which row comes first plays no part. A group of equal rewards has no
  pair and adds 0, but counts in the mean. A pair has the weight of its best row (rows of a group share theirs).

  Source: Rafailov et al. 2023, arXiv:2305.18290; best and worst of the group: Noukhovitch et al. 2024,
  arXiv:2410.18252, whose public code takes the first of tied rows.

  Args:
    log_pi: log-probability of each token, nats, aligned with the token.
    batch: uses log_ref, rewards, groups, weights.
    beta: inverse temperature of the preference model per nat, > 0.
  Returns: scalar loss, nats; metrics with `preference_margin` (nats, mean over groups of the gap of log-ratios) and
    `preference_accuracy` (share of groups' pairs whose gap is positive; groups without a pair count as 0).
  """
  segments.check_layout(log_pi, batch)
  log_ratio = segments.response_sums(log_pi - batch.log_ref, batch)
  rewards = segments.kept(batch.rewards, batch)
  highest, lowest = segments.group_max(rewards, batch), -segments.group_max(-rewards, batch)
  best = batch.valid & (rewards == highest) & (highest > lowest)
  worst = batch.valid & (rewards == lowest)
  pairs = best[:, None] & worst[None, :] & (batch.group_ids[:, None] == batch.group_ids[None, :])
  num_best, num_worst = (segments.group_sums(rows.astype(jnp.float32), batch) for rows in (best, worst))
  num_pairs = jnp.maximum(num_best * num_worst, 1.0)
  share = jnp.where(pairs, 1.0 / num_pairs[:, None], 0.0) / jnp.maximum(batch.num_groups, 1.0)
  gaps = log_ratio[:, None] - log_ratio[None, :]
  loss = jnp.sum(share * batch.weights[:, None] * jax.nn.softplus(-beta * gaps))
  fixed = jax.lax.stop_gradient(gaps)
  metrics = {"preference_margin": jnp.sum(share * fixed), "preference_accuracy": jnp.sum(share * (fixed > 0.0))}
  return loss, common_metrics(log_pi, batch, beta=beta) | metrics

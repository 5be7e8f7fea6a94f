"""Losses that learn from examples alone: no reward, no reference, no groups."""

from __future__ import annotations

import jax

from tba_jax.losses import segments
from tba_jax.losses.diagnostics import common_metrics
from tba_jax.types import Batch


def sft(log_pi: jax.Array, batch: Batch, *, beta: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Mean negative log-likelihood of the response tokens: loss = -sum of weight log_pi / response tokens of the whole
  batch.

  A mean over tokens, not over responses: long examples count by their length. `beta` is not used.

  Args:
    log_pi: log-probability of each token, nats, aligned with the token.
    batch: uses sequence ids, valid, weights.
  Returns: scalar loss, nats per token; metrics (`nll` is the loss without weights).
  """
  segments.check_layout(log_pi, batch)
  loss = segments.mean_of_tokens(-segments.at_tokens(batch.weights, batch) * log_pi, batch)
  nll = segments.mean_of_tokens(-jax.lax.stop_gradient(log_pi), batch)
  return loss, common_metrics(log_pi, batch, beta=beta) | {"nll": nll}

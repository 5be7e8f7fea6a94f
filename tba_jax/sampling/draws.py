"""Drawing one token a row from logits: Gumbel noise that follows from a key and an index, and filters of the tail."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

KEY_IMPL = "threefry2x32"  # rbg's draws depend on the slot under vmap; threefry's do not


class Filters(NamedTuple):
  """Each row's cut of its distribution; see `requests.SampleRequest`. (0, 1, 0) cuts nothing."""

  top_k: Any  # int32 [B]
  top_p: Any  # float32 [B]
  min_p: Any  # float32 [B]


def filter_logits(scaled: jax.Array, filters: Filters) -> jax.Array:
  """-inf where a row's filters cut. scaled: float32 [B, V], logits / temperature, -inf at ids that do not exist."""
  top_k, top_p, min_p = (values[:, None] for values in filters)
  ordered = -jnp.sort(-scaled, axis=-1)
  last = scaled.shape[-1] - 1
  least = jnp.take_along_axis(ordered, jnp.where(top_k > 0, jnp.minimum(top_k - 1, last), last), axis=-1)
  probabilities = jax.nn.softmax(jnp.where(ordered >= least, ordered, -jnp.inf), axis=-1)
  before = jnp.cumsum(probabilities, axis=-1) - probabilities
  num_kept = jnp.sum(before < top_p, axis=-1, keepdims=True)
  nucleus = jnp.take_along_axis(ordered, jnp.maximum(num_kept - 1, 0), axis=-1)
  # Rounding must not cut a row that asked for everything.
  least = jnp.where(top_p < 1, jnp.maximum(least, nucleus), least)
  least = jnp.maximum(least, ordered[:, :1] + jnp.log(min_p))
  return jnp.where(scaled >= least, scaled, -jnp.inf)


def _first_of_largest(scores: jax.Array) -> jax.Array:
  """`jnp.argmax` over the last axis, int32. That is one reduction over pairs, which XLA:CPU does not vectorise, and with
  it all that the scores are made of: 16 ms for 16 rows of 49,152 scores and their noise, where this takes 5."""
  indices = jax.lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
  largest = jnp.max(scores, axis=-1, keepdims=True)
  return jnp.min(jnp.where(scores == largest, indices, scores.shape[-1] - 1), axis=-1)


def sample_tokens(
  logits: jax.Array,
  keys: jax.Array,
  indices: jax.Array,
  temperatures: jax.Array,
  *,
  log_mu_temperature: float,
  filters: Filters | None = None,
) -> tuple[jax.Array, jax.Array]:
  """One token a row: argmax of logits / temperature + Gumbel noise, which is a draw from softmax(logits / temperature).

  Args:
    logits: float32 [B, V]; ids that must not be sampled are -inf.
    keys: uint32 [B, 2], threefry key of each row's sample.
    indices: int32 [B], index of the token within its response. The noise is a function of (key, index) alone.
    temperatures: float32 [B]; 0 takes the argmax of the logits, without noise.
    log_mu_temperature: the run's temperature.
    filters: None compiles no filtering, which costs a sort of the vocabulary wherever any row is filtered.
  Returns:
    tokens int32 [B]; float32 [B], their log-probabilities under the full vocabulary at `log_mu_temperature`: what was
    sampled from where the row's temperature is the run's. Of a filtered row: under the filtered distribution at the
    row's temperature.
  """
  greedy = temperatures <= 0

  def noise(key: jax.Array, index: jax.Array) -> jax.Array:
    key = jax.random.fold_in(jax.random.wrap_key_data(key, impl=KEY_IMPL), index)
    return jax.random.gumbel(key, (logits.shape[-1],), jnp.float32)

  scaled = logits / jnp.where(greedy, 1.0, temperatures)[:, None]
  log_p = logits / log_mu_temperature
  if filters is not None:
    cut = ((filters.top_k > 0) | (filters.top_p < 1) | (filters.min_p > 0))[:, None]

    def apply(scaled: jax.Array, log_p: jax.Array) -> tuple[jax.Array, jax.Array]:
      kept = filter_logits(scaled, filters)
      return jnp.where(cut, kept, scaled), jnp.where(cut, kept, log_p)

    scaled, log_p = jax.lax.cond(jnp.any(cut), apply, lambda *arrays: arrays, scaled, log_p)
  scores = scaled + jax.vmap(noise)(keys, indices)
  tokens = _first_of_largest(jnp.where(greedy[:, None], logits, scores))
  chosen = jnp.take_along_axis(log_p, tokens[:, None], axis=-1)[:, 0]
  return tokens, chosen - jax.nn.logsumexp(log_p, axis=-1)

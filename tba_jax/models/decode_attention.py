"""Attention of decoding: the newest tokens of many rows over what is cached, which rows may share in part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from tba_jax.models.attention import MASKED
from tba_jax.models.cache import LayerCache


class Part(NamedTuple):
  """Some of the keys and values that B queries look at. Row r of the cache is seen by queries r B/R to (r + 1) B/R - 1.
  """

  layer: LayerCache  # of R rows with S entries; R divides B
  mask: jax.Array  # bool [B, T, S], True where the query may see the entry


def decode_attention(
  q: jax.Array, parts: Sequence[Part], *, scale: float, softcap: float | None = None
) -> jax.Array:
  """Softmax attention over all parts together. Scores and sums are float32; an int8 part is read as it is.

  The parts are never joined: each gives its scores' exponentials and weighted sum under the common maximum. The queries
  that share a row of a part meet it in one matrix product, so it is read once for all of them.

  Args:
    q: [B, T, Q, H]; query head i reads kv head i // (Q / K).
    scale: of the scores. softcap: c * tanh(scores / c) before the mask, or None.
  Returns: [B, T, Q, H] in q's dtype.
  """
  scores = [_scores(q, part, scale=scale, softcap=softcap) for part in parts]  # each [R, K, n, G, T, S]
  highest = [_by_query(jnp.max(s, axis=-1)) for s in scores]  # each [B, T, K, G]
  top = jnp.max(jnp.stack(highest), axis=0) if len(parts) > 1 else highest[0]
  total, context = 0.0, 0.0
  for part, s in zip(parts, scores, strict=True):
    weights = jnp.exp(s - _by_row(top, s.shape[0])[..., None])
    total = total + _by_query(jnp.sum(weights, axis=-1))
    if part.layer.v_scale is not None:
      weights = weights * part.layer.v_scale[:, :, None, None, None]
    summed = _times_values(weights.astype(q.dtype), part.layer.v.astype(q.dtype))
    rows, _, shared, _, length, width = summed.shape
    context = context + summed.transpose(0, 2, 4, 1, 3, 5).reshape(rows * shared, length, *top.shape[2:], width)
  return (context / total[..., None]).reshape(q.shape).astype(q.dtype)


def _scores(q: jax.Array, part: Part, *, scale: float, softcap: float | None) -> jax.Array:
  """Masked scores float32 [R, K, n, G, T, S]."""
  batch, length, num_heads, width = q.shape
  rows, num_kv_heads, entries = part.layer.k.shape[:3]
  q = q.reshape(rows, batch // rows, length, num_kv_heads, num_heads // num_kv_heads, width)
  scores = _times_keys(q, part.layer.k.astype(q.dtype)) * scale
  if part.layer.k_scale is not None:
    scores = scores * part.layer.k_scale[:, :, None, None, None]
  if softcap is not None:
    scores = softcap * jnp.tanh(scores / softcap)
  mask = part.mask.reshape(rows, 1, batch // rows, 1, length, entries)
  return jnp.where(mask, scores, MASKED)


# Few queries to a row of keys: what XLA:CPU makes of the plain products depends on their number and on which side they
# stand. One query is quick with what is cached on the left: for 128 rows of 160 keys of 64 the scores take 0.31 ms, the
# sums 0.28 (0.46 plainly). Two or three: for 48 such rows and three queries the scores take 0.38 ms plainly, 0.23 one
# after the other, the sums 0.17 plainly and 0.22 one after the other.


def _times_keys(q: jax.Array, k: jax.Array) -> jax.Array:
  """Scores float32 [R, K, n, G, T, S] of q [R, n, T, K, G, H] and k [R, K, S, H]."""

  def plain(q: jax.Array, k: jax.Array) -> jax.Array:
    return jnp.einsum("RnTKGH,RKSH->RKnGTS", q, k, preferred_element_type=jnp.float32)

  def few(q: jax.Array, k: jax.Array) -> jax.Array:
    q = q.transpose(0, 3, 1, 4, 2, 5).reshape(*k.shape[:2], num_queries, k.shape[-1])
    scores = [_one_product("RKSH,RKH->RKS", k, q[:, :, i]) for i in range(num_queries)]
    return jnp.stack(scores, axis=2).reshape(shape)

  rows, shared, length, num_kv_heads, group, _ = q.shape
  num_queries, shape = shared * length * group, (rows, num_kv_heads, shared, group, length, k.shape[2])
  return jax.lax.platform_dependent(q, k, cpu=few, default=plain) if num_queries < 4 else plain(q, k)


def _times_values(weights: jax.Array, v: jax.Array) -> jax.Array:
  """Sums float32 [R, K, n, G, T, H] of v [R, K, S, H] by weights [R, K, n, G, T, S]."""

  def plain(weights: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.einsum("RKnGTS,RKSH->RKnGTH", weights, v, preferred_element_type=jnp.float32)

  def one(weights: jax.Array, v: jax.Array) -> jax.Array:
    return _one_product("RKSH,RKS->RKH", v, weights.reshape(v.shape[:3])).reshape(shape)

  shape = (*weights.shape[:-1], v.shape[-1])
  is_one = shape[2:5] == (1, 1, 1)
  return jax.lax.platform_dependent(weights, v, cpu=one, default=plain) if is_one else plain(weights, v)


def _one_product(equation: str, cached: jax.Array, x: jax.Array) -> jax.Array:
  """The einsum in float32; the barrier keeps the compiler from turning it around again."""
  return jax.lax.optimization_barrier(jnp.einsum(equation, cached, x, preferred_element_type=jnp.float32))


def _by_query(x: jax.Array) -> jax.Array:
  """[R, K, n, G, T] as [B, T, K, G]."""
  rows, num_kv_heads, shared, group, length = x.shape
  return x.transpose(0, 2, 4, 1, 3).reshape(rows * shared, length, num_kv_heads, group)


def _by_row(x: jax.Array, rows: int) -> jax.Array:
  """[B, T, K, G] as [R, K, n, G, T]."""
  batch, length, num_kv_heads, group = x.shape
  return x.reshape(rows, batch // rows, length, num_kv_heads, group).transpose(0, 3, 1, 4, 2)

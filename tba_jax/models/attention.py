"""The one place where attention is computed. Scores and softmax are float32 whatever the operands are."""

from __future__ import annotations

import jax
import jax.numpy as jnp

# Finite, so that a row that may see nothing gives an even average rather than NaN. Such rows are padding and nobody
# reads them.
MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)


def attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, *, scale: float, softcap: float | None = None,
              backend: str = "xla", kv_layout: str = "BSKH") -> jax.Array:
  """Grouped-query attention.

  Args:
    q: [B, T, Q, H]. k, v: [B, S, K, H]; query head i reads kv head i // (Q / K).
    mask: bool [B, T, S], True where the query may see the key.
    scale: of the scores. softcap: c * tanh(scores / c) before the mask, or None.
    kv_layout: of k and v; "BKSH" is that of the decode cache.
    backend: "xla"; "cudnn" for NVIDIA's fused kernel (16-bit operands, no soft cap).
  Returns: [B, T, Q, H] in v's dtype.
  Raises: ValueError for an unknown backend, and for a soft cap that the backend cannot do.
  """
  if backend == "cudnn":
    assert kv_layout == "BSKH", kv_layout
    if softcap is not None:
      raise ValueError(f"attention backend 'cudnn' has no soft cap, but the model has {softcap}; use backend='xla'.")
    return jax.nn.dot_product_attention(q, k, v, mask=mask[:, None], scale=scale, implementation="cudnn")
  if backend != "xla":
    raise ValueError(f"attention backend {backend!r} is unknown; it must be 'xla' or 'cudnn'.")
  batch, length, num_heads, head_dim = q.shape
  num_kv_heads = k.shape[kv_layout.index("K")]
  q = q.reshape(batch, length, num_kv_heads, num_heads // num_kv_heads, head_dim)
  scores = jnp.einsum(f"BTKGH,{kv_layout}->BKGTS", q, k, preferred_element_type=jnp.float32) * scale
  if softcap is not None:
    scores = softcap * jnp.tanh(scores / softcap)
  scores = jnp.where(mask[:, None, None], scores, MASKED)
  probs = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
  return jnp.einsum(f"BKGTS,{kv_layout}->BTKGH", probs, v).reshape(batch, length, num_heads, head_dim)


def segment_mask(positions: jax.Array, segment_ids: jax.Array) -> jax.Array:
  """bool [B, T, T]: causal by position within a segment; segment 0 is padding, which sees nothing and is not seen."""
  same = segment_ids[:, :, None] == segment_ids[:, None, :]
  real = segment_ids[:, None, :] > 0
  return same & real & (positions[:, None, :] <= positions[:, :, None])

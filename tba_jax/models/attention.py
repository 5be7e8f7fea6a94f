"""The one place where attention is computed. Scores and softmax are float32 whatever the operands are.

`attention` is given a mask; `over_sequences` is given segments and makes what its backend needs of them. The TPU
kernels are in kernels.py.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tba_jax.models import kernels

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
    raise ValueError(f"attention backend {backend!r} is unknown here; it must be 'xla' or 'cudnn'.")
  batch, length, num_heads, head_dim = q.shape
  num_kv_heads = k.shape[kv_layout.index("K")]
  q = q.reshape(batch, length, num_kv_heads, num_heads // num_kv_heads, head_dim)
  scores = jnp.einsum(f"BTKGH,{kv_layout}->BKGTS", q, k, preferred_element_type=jnp.float32) * scale
  if softcap is not None:
    scores = softcap * jnp.tanh(scores / softcap)
  scores = jnp.where(mask[:, None, None], scores, MASKED)
  probs = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
  return jnp.einsum(f"BKGTS,{kv_layout}->BTKGH", probs, v).reshape(batch, length, num_heads, head_dim)


def over_sequences(positions: jax.Array, segment_ids: jax.Array, *, scale: float, softcap: float | None = None,
                   window: int | None = None, backend: str = "xla",
                   mesh: Mesh | None = None) -> Callable[..., jax.Array]:
  """Causal attention of whole sequences, as a function `attend(q, k, v, sliding)` for every layer of a model.

  q: [B, T, Q, H]; k, v: [B, T, K, H]. sliding: whether the layer sees `window` positions only, its own counted; a bool,
  or an array of one bool where layers are scanned.

  Args:
    positions, segment_ids: int32 [B, T]. A token sees those of its own segment at positions up to its own; segment 0 is
      padding, whose outputs are finite and mean nothing. See `kernels.splash` for what it asks of their order.
    scale, softcap: as in `attention`. window: None if no layer slides.
    backend: "xla" or "cudnn" (see `attention`), or "splash".
    mesh: where the arrays lie, if on several devices; only "splash" needs it.
  Raises: ValueError for an unknown backend, and for a soft cap that the backend cannot do.
  """
  if backend not in kernels.TRAIN_BACKENDS:
    raise ValueError(f"attention backend {backend!r} is unknown; it must be one of "
                     f"{', '.join(kernels.TRAIN_BACKENDS)}.")
  if backend == "splash":

    def splash(q: jax.Array, k: jax.Array, v: jax.Array, sliding: bool | jax.Array) -> jax.Array:
      def run(window: int | None) -> Callable[..., jax.Array]:
        return lambda q, k, v: kernels.splash(
          q, k, v, segment_ids, scale=scale, softcap=softcap, window=window, mesh=mesh)

      if window is None or isinstance(sliding, bool):
        return run(window if sliding is True else None)(q, k, v)
      return jax.lax.cond(sliding, run(window), run(None), q, k, v)

    return splash
  full = segment_mask(positions, segment_ids)
  near = None if window is None else full & (positions[:, :, None] - positions[:, None, :] < window)

  def masked(q: jax.Array, k: jax.Array, v: jax.Array, sliding: bool | jax.Array) -> jax.Array:
    mask = full if near is None else jnp.where(sliding, near, full)
    return attention(q, k, v, mask, scale=scale, softcap=softcap, backend=backend)

  return masked


def segment_mask(positions: jax.Array, segment_ids: jax.Array) -> jax.Array:
  """bool [B, T, T]: causal by position within a segment; segment 0 is padding, which sees nothing and is not seen."""
  same = segment_ids[:, :, None] == segment_ids[:, None, :]
  real = segment_ids[:, None, :] > 0
  return same & real & (positions[:, None, :] <= positions[:, :, None])

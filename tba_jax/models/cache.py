"""What decoding remembers of a layer: keys and values, in the precision of the computation or in fewer bits.

An int8 cache keeps one float32 scale for every head's key and value of a token: its largest absolute entry over 127.
Scores and weighted sums are linear in keys and values, so the scales multiply scores and probabilities and no cache is
ever turned back into floats.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

CACHE_DTYPES = ("float32", "bfloat16", "int8")


class LayerCache(NamedTuple):
  """One layer's keys and values of B rows with S entries. Heads lie before entries: on CPU attention then reads it 4
  times faster."""

  k: jax.Array  # [B, K, S, H]
  v: jax.Array  # [B, K, S, H]
  k_scale: jax.Array | None = None  # float32 [B, K, S], of int8 entries
  v_scale: jax.Array | None = None


Cache = tuple[LayerCache, ...]  # one per layer


def empty_layer(batch: int, num_kv_heads: int, length: int, head_dim: int, dtype: jax.typing.DTypeLike) -> LayerCache:
  """A layer's cache without content."""
  shape = (batch, num_kv_heads, length, head_dim)
  scales = [jnp.zeros(shape[:-1], jnp.float32) for _ in "kv"] if jnp.dtype(dtype) == jnp.int8 else [None, None]
  return LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), *scales)


def stored(k: jax.Array, v: jax.Array, dtype: jax.typing.DTypeLike) -> LayerCache:
  """Keys and values [B, T, K, H] as a cache of T entries."""
  k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
  if jnp.dtype(dtype) != jnp.int8:
    return LayerCache(k.astype(dtype), v.astype(dtype))
  (k, k_scale), (v, v_scale) = _quantise(k), _quantise(v)
  return LayerCache(k, v, k_scale, v_scale)


def widened(layer: LayerCache, width: int) -> LayerCache:
  """Heads filled up with zeros to `width`, as kernels want them."""
  padding = ((0, 0), (0, 0), (0, 0), (0, width - layer.k.shape[-1]))
  return layer._replace(k=jnp.pad(layer.k, padding), v=jnp.pad(layer.v, padding))


def loaded(layer: LayerCache, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, jax.Array]:
  """Keys and values [B, K, S, H] of a cache in `dtype`: what attention over the cache amounts to."""
  if layer.k_scale is None:
    return layer.k.astype(dtype), layer.v.astype(dtype)
  return tuple(
    (x.astype(jnp.float32) * scale[..., None]).astype(dtype)
    for x, scale in ((layer.k, layer.k_scale), (layer.v, layer.v_scale))
  )


def _quantise(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """int8 and float32 scales of the last axis; a row of zeros has scale 0."""
  x = x.astype(jnp.float32)
  scale = jnp.max(jnp.abs(x), axis=-1) / 127.0
  return jnp.round(x / jnp.where(scale > 0, scale, 1.0)[..., None]).astype(jnp.int8), scale


def write_front(cache: Cache, new: Cache) -> Cache:
  """`new`, of as many rows, over the first entries of `cache`. Raises: ValueError if it has more entries."""
  if num_entries(new) > num_entries(cache):
    raise ValueError(
      f"prompts padded to {num_entries(new)} tokens do not fit a cache of {num_entries(cache)} slots; lengthen the "
      "cache."
    )
  return jax.tree.map(lambda old, x: jax.lax.dynamic_update_slice(old, x, (0,) * old.ndim), cache, new)


def write_tokens(layer: LayerCache, new: LayerCache, entries: jax.Array) -> LayerCache:
  """The one entry of each row of `new` at entry `entries` int32 [B] of that row; outside the cache it is dropped."""
  rows = jnp.arange(entries.shape[0])

  def write(old: jax.Array, x: jax.Array) -> jax.Array:
    return old.at[rows, :, entries].set(x[:, :, 0], mode="drop", indices_are_sorted=True, unique_indices=True)

  return jax.tree.map(write, layer, new)


def write_entry(layer: LayerCache, new: LayerCache, entry: jax.Array) -> LayerCache:
  """The one entry of each row of `new` at the same entry of all rows: one block, where `write_tokens` must go row by
  row."""

  def write(old: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(old, x, entry, axis=2)

  return jax.tree.map(write, layer, new)


def append(cache: Cache, new: Cache, lengths: jax.Array) -> Cache:
  """`new`, of as many rows, behind the first `lengths` int32 [B] entries of each row. A row in which it does not fit
  gets it shifted to where it does, and is then no good."""
  assert num_entries(new) <= num_entries(cache), (num_entries(new), num_entries(cache))

  def write(old: jax.Array, x: jax.Array) -> jax.Array:
    return jax.vmap(lambda row, y, length: jax.lax.dynamic_update_slice_in_dim(row, y, length, axis=1))(old, x, lengths)

  return jax.tree.map(write, cache, new)


def empty_like(cache: Cache, length: int) -> Cache:
  """Another cache of as many rows, with `length` entries and no content."""
  return jax.tree.map(lambda leaf: jnp.zeros((*leaf.shape[:2], length, *leaf.shape[3:]), leaf.dtype), cache)


def first_entries(cache: Cache, length: int) -> Cache:
  """The first `length` entries of every row."""
  return jax.tree.map(lambda leaf: leaf[:, :, :length], cache)


def num_entries(cache: Cache) -> int:
  """Entries of a row."""
  return cache[0].k.shape[2]


def row_bytes(cache: Cache) -> int:
  """Bytes of one row, from shapes."""
  return sum(leaf.size * leaf.dtype.itemsize // leaf.shape[0] for leaf in jax.tree.leaves(cache))

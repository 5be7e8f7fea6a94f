"""Attention by the TPU kernels that jax ships: splash attention over whole sequences, paged attention for decoding.

Both compute what `attention.attention` computes, on TPU alone. What a kernel asks of shapes is met here, by padding
that is cut off again, or refused: `check_train_backend` and `check_sample_backend` say at launch whether a backend
suits a model; which platform and dtype it needs is checked with the config.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from tba_jax.models.variants import ModelConfig
from tba_jax.sharding import LOGICAL_TO_MESH

TRAIN_BACKENDS = ("xla", "splash", "cudnn")
SAMPLE_BACKENDS = ("xla", "paged")

LANES = 128  # width of a TPU vector register; blocks of keys are multiples of it
# Rows and columns of scores that a splash kernel holds at once, largest first.
SPLASH_BLOCKS = (512, 384, 256, 128)
# Cache slots that the decode kernel fetches at once, largest first; a row is read up to the end of its last block.
DECODE_BLOCKS = (256, 128, 64, 32, 16)


def check_train_backend(cfg: ModelConfig, backend: str) -> None:
  """Raises ValueError for a model that "cudnn" cannot train or score. The other backends take every model."""
  if backend != "cudnn":
    return
  if cfg.attn_softcap is not None:
    raise ValueError(f"'cudnn' has no soft cap, but this model caps its scores at {cfg.attn_softcap}; use xla.")
  if cfg.head_dim % 8 or cfg.head_dim > 256:
    raise ValueError(f"'cudnn' takes heads of a multiple of 8 up to 256, but this model has {cfg.head_dim}; use xla.")


def check_sample_backend(cfg: ModelConfig, backend: str) -> None:
  """Raises ValueError for a model that "paged" cannot decode: its kernel knows no sliding window."""
  num_sliding = sum(cfg.sliding_layers)
  if backend == "paged" and num_sliding:
    raise ValueError(f"'paged' has no sliding window, but {num_sliding} of this model's {cfg.num_layers} layers see "
                     f"only {cfg.window} tokens; use xla.")


# --- Whole sequences ---


def splash(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, *, scale: float,
           softcap: float | None = None, window: int | None = None, mesh: Mesh | None = None) -> jax.Array:
  """Causal attention within segments, without [T, T] arrays in memory, forward or backward.

  It goes by where tokens stand in the row: those of a segment are adjacent and in the order of their positions, which
  rise by 1, as everything that is trained or scored here is laid out.

  Args:
    q: [B, T, Q, H]. k, v: [B, T, K, H]; query head i reads kv head i // (Q / K).
    segment_ids: int32 [B, T]; 0 is padding, whose outputs are finite and mean nothing.
    scale: of the scores; multiplied into q, in q's dtype. softcap: c * tanh(scores / c), or None.
    window: a token sees itself and the window - 1 before it; None: all before it.
    mesh: rows are split over "data" and "fsdp", heads over "tensor".
  Returns: [B, T, Q, H] in q's dtype.
  """
  run = functools.partial(_splash_rows, scale=scale, softcap=softcap, window=window)
  if mesh is None:
    return run(q, k, v, segment_ids)
  rows, tensor = LOGICAL_TO_MESH["batch"], LOGICAL_TO_MESH["heads"]
  queries = PartitionSpec(rows, None, tensor, None)
  keys = PartitionSpec(rows, None, _kv_axis(k.shape[2], mesh), None)

  def local(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
    heads = _local_kv_heads(q.shape[2], k.shape[2], mesh, num_heads=num_heads, num_kv_heads=num_kv_heads)
    if heads is not None:
      k, v = (jnp.take(x, heads, axis=2) for x in (k, v))
    return run(q, k, v, segment_ids)

  num_heads, num_kv_heads = q.shape[2], k.shape[2]
  in_specs = (queries, keys, keys, PartitionSpec(rows, None))
  return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=queries, check_vma=False)(q, k, v, segment_ids)


def _splash_rows(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, *, scale: float,
                 softcap: float | None, window: int | None) -> jax.Array:
  """`splash` on one device."""
  # Here, not at the top: a second of imports that only TPUs need.
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel_lib
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as mask_lib

  num_tokens, num_heads = q.shape[1], q.shape[2]
  length = -(-num_tokens // LANES) * LANES
  block = next(size for size in SPLASH_BLOCKS if length % size == 0)
  padding = ((0, 0), (0, length - num_tokens))
  q, k, v = (jnp.pad(x, (*padding, (0, 0), (0, 0))).swapaxes(1, 2) for x in (q, k, v))
  segment_ids = jnp.pad(segment_ids, padding)
  q = (q.astype(jnp.float32) * scale).astype(q.dtype)
  shape = (length, length)
  mask = mask_lib.CausalMask(shape) if window is None else mask_lib.LocalMask(shape, (window - 1, 0), 0)
  kernel = kernel_lib.make_splash_mha_single_device(
    mask_lib.MultiHeadMask([mask] * num_heads), attn_logits_soft_cap=softcap,
    block_sizes=kernel_lib.BlockSizes(
      block_q=block, block_kv=block, block_q_dkv=block, block_kv_dkv=block, block_q_dq=block, block_kv_dq=block),
  )
  out = jax.vmap(lambda q, k, v, ids: kernel(q, k, v, segment_ids=kernel_lib.SegmentIds(ids, ids)))(
    q, k, v, segment_ids)
  return out.swapaxes(1, 2)[:, :num_tokens]


# --- Decoding ---


def decode_attention(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array, *, scale: float,
                     softcap: float | None = None, mesh: Mesh | None = None) -> jax.Array:
  """One query a row against the row's cache, of which only the blocks up to its length are read, where they lie.

  Args:
    q: [B, Q, H]. k, v: bfloat16 [B, K, S, C], the cache as the model keeps it: C = `cache_width(H)`, zeros beyond H,
      and S a multiple of 16, best `cache_length(...)`.
    lengths: int32 [B], slots that the row sees, in 1..S; less counts as 1 and more as S.
    scale: of the scores; multiplied into q. softcap: c * tanh(scores / c), or None.
    mesh: rows are split over "data" and "fsdp", heads over "tensor".
  Returns: [B, Q, H] in q's dtype.
  Raises: ValueError for a cache of another dtype, width or length.
  """
  head_dim, width = q.shape[-1], k.shape[-1]
  if width != cache_width(head_dim):
    raise ValueError(f"a cache of width {width} must be of width {cache_width(head_dim)} for paged attention.")
  if k.dtype != jnp.bfloat16:
    raise ValueError(f"paged attention reads its cache as bfloat16, but it is {k.dtype}; use a bfloat16 cache, or xla.")
  if k.shape[2] % DECODE_BLOCKS[-1]:
    raise ValueError(f"a cache of {k.shape[2]} slots must be a multiple of {DECODE_BLOCKS[-1]} for paged attention.")
  lengths = jnp.clip(lengths, 1, k.shape[2])
  q = jnp.pad(q, ((0, 0), (0, 0), (0, width - head_dim)))
  run = functools.partial(_paged_rows, scale=scale, softcap=softcap)
  if mesh is None:
    return run(q, k, v, lengths, jnp.arange(k.shape[1]))[..., :head_dim]
  num_heads, num_kv_heads = q.shape[1], k.shape[1]
  rows, tensor = LOGICAL_TO_MESH["batch"], LOGICAL_TO_MESH["heads"]
  queries = PartitionSpec(rows, tensor, None)
  keys = PartitionSpec(rows, _kv_axis(num_kv_heads, mesh), None, None)

  def local(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> jax.Array:
    heads = _local_kv_heads(q.shape[1], k.shape[1], mesh, num_heads=num_heads, num_kv_heads=num_kv_heads)
    return run(q, k, v, lengths, jnp.arange(k.shape[1]) if heads is None else heads)

  in_specs = (queries, keys, keys, PartitionSpec(rows))
  out = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=queries, check_vma=False)(q, k, v, lengths)
  return out[..., :head_dim]


def write_slots(cached: jax.Array, new: jax.Array, positions: jax.Array, *, mesh: Mesh | None = None) -> jax.Array:
  """A cache [B, K, S, C] with new keys or values [B, K, H] at each row's position, int32 [B]; a row whose position is
  outside writes nothing. `mesh` as in `decode_attention`.

  Every (row, head) is an entry of the scatter of its own. One that writes all heads of a slot at once is the same, but
  then the TPU compiler lays the cache out with heads beside each other, and copies all of it before every kernel.
  """

  def local(cached: jax.Array, new: jax.Array, positions: jax.Array) -> jax.Array:
    rows, heads = jnp.arange(cached.shape[0])[:, None], jnp.arange(cached.shape[1])
    return cached.at[rows, heads, positions[:, None]].set(
      new, mode="drop", indices_are_sorted=True, unique_indices=True
    )

  new = jnp.pad(new, ((0, 0), (0, 0), (0, cached.shape[3] - new.shape[2]))).astype(cached.dtype)
  if mesh is None:
    return local(cached, new, positions)
  rows, heads = LOGICAL_TO_MESH["batch"], _kv_axis(cached.shape[1], mesh)
  slots = PartitionSpec(rows, heads)
  return jax.shard_map(local, mesh=mesh, in_specs=(slots, slots, PartitionSpec(rows)), out_specs=slots,
                       check_vma=False)(cached, new, positions)


def cache_length(length: int) -> int:
  """The shortest cache for `length` tokens that `decode_attention` reads in large blocks."""
  block = DECODE_BLOCKS[0] if length > DECODE_BLOCKS[0] else DECODE_BLOCKS[1]
  return -(-length // block) * block


def cache_width(head_dim: int) -> int:
  """The width of a head in a cache that `decode_attention` reads: on TPU a narrower one takes as much memory."""
  return -(-head_dim // LANES) * LANES


def _paged_rows(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array, kv_heads: jax.Array, *, scale: float,
                softcap: float | None) -> jax.Array:
  """`decode_attention` on one device. kv_heads: int32 [N], the kv head of each N-th of the query heads.

  Every (row, entry of kv_heads) is a sequence of the kernel with one kv head, whose pages lie in the cache one after
  another: a view of the cache, never a copy.
  """
  from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

  batch, num_heads, head_dim = q.shape
  _, num_kv_heads, num_slots, _ = k.shape
  page = next(size for size in DECODE_BLOCKS if num_slots % size == 0)
  num_pages, num_groups = num_slots // page, kv_heads.shape[0]
  pages = lambda x: x.reshape(1, batch * num_kv_heads * num_pages, page, head_dim)
  first = (jnp.arange(batch)[:, None] * num_kv_heads + kv_heads) * num_pages  # [B, N]
  indices = first.reshape(-1, 1) + jnp.arange(num_pages)
  scaled = (q.astype(jnp.float32) * scale).astype(q.dtype)
  out = paged_attention(
    scaled.reshape(batch * num_groups, num_heads // num_groups, head_dim), pages(k), pages(v),
    jnp.repeat(lengths, num_groups), indices.astype(jnp.int32), attn_logits_soft_cap=softcap, pages_per_compute_block=1,
  )
  return out.reshape(batch, num_heads, head_dim)


# --- Heads on a mesh ---


def _kv_axis(num_kv_heads: int, mesh: Mesh) -> str | None:
  """The mesh axis of kv heads; None where it does not divide them and each device has all, as with their kernels."""
  axis = LOGICAL_TO_MESH["kv_heads"]
  return axis if num_kv_heads % mesh.shape[axis] == 0 else None


def _local_kv_heads(local_heads: int, local_kv_heads: int, mesh: Mesh, *, num_heads: int,
                    num_kv_heads: int) -> jax.Array | None:
  """int32 [N]: inside shard_map, the kv head of each N-th of this device's query heads; None: its kv heads in order."""
  axis = LOGICAL_TO_MESH["heads"]
  if mesh.shape[axis] == 1 or local_kv_heads < num_kv_heads:
    return None
  per_kv_head = num_heads // num_kv_heads
  run = math.gcd(local_heads, per_kv_head)  # so many neighbours read one kv head, wherever the device's heads begin
  first = jax.lax.axis_index(axis) * local_heads + jnp.arange(local_heads // run) * run
  return first // per_kv_head

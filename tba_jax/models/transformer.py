"""Decoders as pure functions over a parameter tree: scoring with layers scanned, prefill and decode with them unrolled.

The tree is a plain nested dict; its leaves under "layers" carry a leading layer axis. `unstack` gives the decode
layout, in which "layers" is a tuple with one dict per layer: unrolled layers decode faster and their caches are updated
in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np

from tba_jax.models import attention as attention_lib
from tba_jax.models import cache as cache_lib
from tba_jax.models import kernels
from tba_jax.models import rope as rope_lib
from tba_jax.models.cache import Cache, LayerCache
from tba_jax.models.decode_attention import Part, decode_attention
from tba_jax.models.layers import Block, Norm, Pick
from tba_jax.models.variants import ModelConfig

Params = dict[str, Any]

EMBEDDING_STD = 0.02
REMAT_POLICIES = {
  "none": None,
  "full": jax.checkpoint_policies.nothing_saveable,
  "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


def init_params(cfg: ModelConfig, key: jax.Array, dtype: jax.typing.DTypeLike = jnp.float32) -> Params:
  """Random parameters: kernels of variance 1 / fan-in, embeddings of standard deviation 0.02, unit norms, zero biases.
  """
  embed_key, pos_key, head_key, layers_key = jax.random.split(key, 4)

  def table(key: jax.Array, rows: int) -> jax.Array:
    return EMBEDDING_STD * jax.random.normal(key, (rows, cfg.hidden_size))

  def layer(key: jax.Array) -> Params:
    return nnx.to_pure_dict(nnx.state(Block(cfg, nnx.Rngs(key)), nnx.Param))

  final_norm = Norm(cfg.hidden_size, kind=cfg.norm, eps=cfg.norm_eps)
  params = {
    "embed": {"table": table(embed_key, cfg.num_embeddings)},
    "layers": jax.vmap(layer)(jax.random.split(layers_key, cfg.num_layers)),
    "final_norm": nnx.to_pure_dict(nnx.state(final_norm, nnx.Param)),
  }
  if cfg.positions == "learned":
    params["pos_embed"] = {"table": table(pos_key, cfg.max_positions)}
  if not cfg.tie_embeddings:
    params["lm_head"] = {"kernel": table(head_key, cfg.num_embeddings).T}
  return jax.tree.map(lambda x: x.astype(dtype), params)


def abstract_params(cfg: ModelConfig, dtype: jax.typing.DTypeLike = jnp.float32) -> Params:
  """The shapes and dtypes of `init_params` without the arrays."""
  return jax.eval_shape(lambda key: init_params(cfg, key, dtype), jax.random.key(0))


@functools.lru_cache(maxsize=64)
def _graphdefs(cfg: ModelConfig, adapted: tuple[str, ...] = ()) -> tuple[nnx.GraphDef, nnx.GraphDef]:
  """The modules of a block and of the final norm without their parameters, to be merged with a slice of the tree.

  `adapted`: paths within a block of the linear layers that come with an adapter.
  """

  def make_block() -> Block:
    block = Block(cfg, nnx.Rngs(0))
    for name in adapted:
      functools.reduce(getattr, name.split("/"), block).adapt()
    return block

  block = nnx.eval_shape(make_block)
  norm = nnx.eval_shape(lambda: Norm(cfg.hidden_size, kind=cfg.norm, eps=cfg.norm_eps))
  return nnx.graphdef(block), nnx.graphdef(norm)


def _adapted(layers: Params) -> tuple[str, ...]:
  """Paths within a block of the linear layers that have an adapter."""
  leaves = jax.tree_util.tree_leaves_with_path(layers)
  names = (jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves)
  return tuple(sorted(name.removesuffix("/lora_a") for name in names if name.endswith("/lora_a")))


def _embed(
  params: Params, cfg: ModelConfig, tokens: jax.Array, positions: jax.Array, dtype: jax.typing.DTypeLike
) -> jax.Array:
  """[..., D]. Ids out of range are clipped: they stand in padding, where any id must do, and the default fill is NaN.
  """
  x = jnp.take(params["embed"]["table"], tokens, axis=0, mode="clip").astype(dtype)
  if cfg.scale_embeddings:
    x = x * jnp.asarray(cfg.hidden_size**0.5, dtype)
  if cfg.positions == "learned":
    x = x + jnp.take(params["pos_embed"]["table"], positions, axis=0, mode="clip").astype(dtype)
  return x


def rope_tables(cfg: ModelConfig, positions: jax.Array) -> list[tuple[jax.Array, jax.Array]] | None:
  """One (cos, sin), each f32 [..., 1, rotary_dim / 2], for each rotation that the model's layers use at positions
  [...]; the second is that of the sliding layers. None for a model without rotations."""
  if cfg.positions != "rope":
    return None
  table = functools.partial(rope_lib.rope_table, positions, rotary_dim=cfg.rotary_dim)
  tables = [table(theta=cfg.rope_theta, scaling=cfg.rope_scaling)]
  if cfg.rope_local_theta is not None:
    tables.append(table(theta=cfg.rope_local_theta, scaling=None))
  return tables


def _within_window(
  cfg: ModelConfig, mask: jax.Array, query_positions: jax.Array, key_positions: jax.Array
) -> jax.Array:
  """The mask of the sliding layers."""
  return mask & (query_positions[:, :, None] - key_positions[:, None, :] < cfg.window)


def hidden_states(params: Params, cfg: ModelConfig, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array, *,
                  dtype: jax.typing.DTypeLike, remat: str = "none", backend: str = "xla",
                  mesh: Mesh | None = None,
                  constrain: Callable[[jax.Array], jax.Array] | None = None) -> jax.Array:
  """Final-normed hidden states of whole sequences, for scoring and training.

  Args:
    params: stacked layers, perhaps with adapters (see `models.lora`).
    tokens, positions, segment_ids: int32 [B, T]. A token sees those of its own segment at positions up to its own;
      segment 0 is padding, whose outputs are finite and mean nothing.
    dtype: of the computation; norms and softmax are float32 within it.
    remat: what the backward pass keeps of a layer: "none" (everything), "dots" (matrix products), "full" (its input
      only).
    backend, mesh: of `attention.over_sequences`.
    constrain: applied to the residual stream [B, T, D] at every layer, to pin its sharding.
  Returns: [B, T, D] in dtype.
  Raises: ValueError for an unknown remat policy.
  """
  if remat not in REMAT_POLICIES:
    raise ValueError(f"remat={remat!r} is unknown; it must be one of {', '.join(REMAT_POLICIES)}.")
  block_def, norm_def = _graphdefs(cfg, _adapted(params["layers"]))
  constrain = constrain or (lambda x: x)
  ropes = rope_tables(cfg, positions)
  attend_all = attention_lib.over_sequences(
    positions, segment_ids, scale=cfg.query_scale, softcap=cfg.attn_softcap,
    window=cfg.window if any(cfg.sliding_layers) else None, backend=backend, mesh=mesh)

  def body(x: jax.Array, layer: tuple[Params, jax.Array]) -> tuple[jax.Array, None]:
    layer_params, sliding = layer
    rope = None if ropes is None else ropes[0]
    if cfg.rope_local_theta is not None:
      rope = jax.tree.map(lambda full, local: jnp.where(sliding, local, full), *ropes)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, None]:
      return attend_all(q, k, v, all(cfg.sliding_layers) or sliding), None

    x, _ = nnx.merge(block_def, layer_params)(x, rope, attend)
    return constrain(x), None

  if remat != "none":
    body = jax.checkpoint(body, policy=REMAT_POLICIES[remat], prevent_cse=False)
  sliding = np.array(cfg.sliding_layers or (False,) * cfg.num_layers)
  x, _ = jax.lax.scan(body, constrain(_embed(params, cfg, tokens, positions, dtype)), (params["layers"], sliding))
  return nnx.merge(norm_def, params["final_norm"])(x)


def masked_logits(params: Params, cfg: ModelConfig, hidden: jax.Array, masked: float) -> jax.Array:
  """As `logits`, with `masked` at ids that do not exist."""
  if cfg.tie_embeddings:
    out = _times_table(hidden, params["embed"]["table"].astype(hidden.dtype))
  else:
    head = jax.tree.map(lambda leaf: leaf.astype(hidden.dtype), params["lm_head"])
    out = jnp.einsum("...D,DV->...V", hidden, head["kernel"], preferred_element_type=jnp.float32)
    if "lora_a" in head:
      inner = jnp.einsum("...D,DR->...R", hidden, head["lora_a"])
      out = out + jnp.einsum("...R,RV->...V", inner, head["lora_b"], preferred_element_type=jnp.float32)
  if cfg.final_softcap is not None:
    out = cfg.final_softcap * jnp.tanh(out / cfg.final_softcap)
  if cfg.vocab_size < cfg.num_embeddings:
    out = jnp.where(jnp.arange(cfg.num_embeddings) < cfg.vocab_size, out, masked)
  return out


def _times_table(hidden: jax.Array, table: jax.Array) -> jax.Array:
  """float32 [..., V] of hidden [..., D] and a table [V, D].

  For few rows, as in decoding, XLA:CPU is faster with the table on the left, which then need not be rearranged (16 rows
  by 49,152 x 576: 15 ms for 23; from 64 rows on it is slower). The barrier keeps the product from being turned around
  again.
  """

  def right(hidden: jax.Array, table: jax.Array) -> jax.Array:
    return jnp.einsum("...D,VD->...V", hidden, table, preferred_element_type=jnp.float32)

  def left(hidden: jax.Array, table: jax.Array) -> jax.Array:
    return jax.lax.optimization_barrier(jnp.einsum("VD,BD->VB", table, hidden, preferred_element_type=jnp.float32)).T

  if hidden.ndim != 2 or hidden.shape[0] > 32:
    return right(hidden, table)
  return jax.lax.platform_dependent(hidden, table, cpu=left, default=right)


def logits(params: Params, cfg: ModelConfig, hidden: jax.Array) -> jax.Array:
  """float32 [..., V] from hidden [..., D]; either layout of params. Accumulated in float32; -inf at ids that do not
  exist.
  """
  return masked_logits(params, cfg, hidden, -jnp.inf)


def unstack(params: Params) -> Params:
  """The decode layout: "layers" as a tuple of one dict per layer."""
  num_layers = jax.tree.leaves(params["layers"])[0].shape[0]
  layers = tuple(jax.tree.map(lambda x, i=i: x[i], params["layers"]) for i in range(num_layers))
  return {**params, "layers": layers}


def check_positions(cfg: ModelConfig, length: int) -> None:
  """Raises ValueError if sequences of `length` tokens are beyond a table of learned positions."""
  if cfg.positions == "learned" and length > cfg.max_positions:
    raise ValueError(
      f"a cache of {length} tokens is longer than the {cfg.max_positions} positions that this model has learned; "
      "shorten prompts or responses."
    )


def init_cache(cfg: ModelConfig, *, batch: int, length: int, dtype: jax.typing.DTypeLike,
               backend: str = "xla") -> Cache:
  """An empty cache for `batch` rows of up to `length` tokens; `dtype` is one of `cache.CACHE_DTYPES`, `backend` one of
  `kernels.SAMPLE_BACKENDS`.

  Raises: ValueError if `length` is beyond a table of learned positions.
  """
  check_positions(cfg, length)
  width = kernels.cache_width(cfg.head_dim) if backend == "paged" else cfg.head_dim
  return tuple(cache_lib.empty_layer(batch, cfg.num_kv_heads, length, width, dtype) for _ in range(cfg.num_layers))


def _run_layers(
  params: Params, cfg: ModelConfig, x: jax.Array, ropes: list[tuple[jax.Array, jax.Array]] | None,
  attend: Callable[[int, bool, jax.Array, jax.Array, jax.Array], tuple[jax.Array, LayerCache]],
  pick: Pick | None = None,
) -> tuple[jax.Array, Cache]:
  """The unrolled layers and the final norm over x [B, T, D], with the `rope_tables` of its positions.

  `attend(layer, sliding, q, k, v)` gives the context and the layer's cache with the new keys and values in it. The last
  layer computes only the positions that `pick` picks, all by default.
  """
  block_def, norm_def = _graphdefs(cfg)
  new_cache = []
  for i, layer_params in enumerate(params["layers"]):
    sliding = bool(cfg.sliding_layers) and cfg.sliding_layers[i]
    rope = None if ropes is None else ropes[-1 if sliding else 0]
    picked = pick if i == cfg.num_layers - 1 else None
    x, kept = nnx.merge(block_def, layer_params)(x, rope, functools.partial(attend, i, sliding), picked)
    new_cache.append(kept)
  return nnx.merge(norm_def, params["final_norm"])(x), tuple(new_cache)


def prefill(params: Params, cfg: ModelConfig, tokens: jax.Array, lengths: jax.Array, *, dtype: jax.typing.DTypeLike,
            cache_dtype: jax.typing.DTypeLike | None = None, backend: str = "xla",
            mesh: Mesh | None = None) -> tuple[jax.Array, Cache]:
  """Reads prompts. Of the last layer only what is asked for is computed: keys, values, and each prompt's last token.

  Args:
    params: decode layout. tokens: int32 [B, P], padded on the right. lengths: int32 [B], each in 1..P.
    dtype: of the computation. cache_dtype: of the cache, by default the same. Keys and values are rounded to it before
      they are attended to, as decoding will see them.
    backend: one of `kernels.SAMPLE_BACKENDS`; "paged" reads prompts by the splash kernel. mesh: where the arrays lie.
  Returns: logits f32 [B, V] after each prompt's last token, and a cache of P entries. Entries at and beyond a row's
    length hold values that mean nothing; decoding writes each of them before it reads it.
  """
  batch, num_prompt = tokens.shape
  positions = jnp.broadcast_to(jnp.arange(num_prompt, dtype=jnp.int32), (batch, num_prompt))
  run = attention_lib.over_sequences(
    positions, (positions < lengths[:, None]).astype(jnp.int32), scale=cfg.query_scale, softcap=cfg.attn_softcap,
    window=cfg.window if any(cfg.sliding_layers) else None, backend="splash" if backend == "paged" else "xla",
    mesh=mesh,
  )

  last = lengths - 1
  visible = _visible(cfg, last, jnp.zeros_like(last), lengths, num_prompt)

  def at_last(x: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, last.reshape(batch, *[1] * (x.ndim - 1)), axis=1)

  def attend(i: int, sliding: bool, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, LayerCache]:
    kept = cache_lib.stored(k, v, cache_dtype or dtype)
    if i == cfg.num_layers - 1:
      context = decode_attention(q, [Part(kept, visible[sliding])], scale=cfg.query_scale, softcap=cfg.attn_softcap)
    else:
      context = run(q, *(x.swapaxes(1, 2) for x in cache_lib.loaded(kept, dtype)), sliding)
    if backend == "paged":
      kept = cache_lib.widened(kept, kernels.cache_width(cfg.head_dim))
    return context, kept

  # Constants of the program: else XLA:CPU fuses sines and cosines into the rotations, each head's of each layer.
  with jax.ensure_compile_time_eval():
    ropes = rope_tables(cfg, jnp.arange(num_prompt, dtype=jnp.int32)[None])
  x, cache = _run_layers(params, cfg, _embed(params, cfg, tokens, positions, dtype), ropes, attend, at_last)
  return logits(params, cfg, x[:, 0]), cache


class Before(NamedTuple):
  """Keys and values that a step reads and does not write: what precedes those in the cache that it writes to."""

  cache: Cache  # of R rows; row r is continued by rows r B/R to (r + 1) B/R - 1 of the step
  lengths: jax.Array  # int32 [R], entries of each row that count


def decode_step(params: Params, cfg: ModelConfig, tokens: jax.Array, positions: jax.Array, cache: Cache, *,
                dtype: jax.typing.DTypeLike, before: Sequence[Before] = (), entry: jax.Array | None = None,
                ropes: list[tuple[jax.Array, jax.Array]] | None = None, backend: str = "xla",
                mesh: Mesh | None = None) -> tuple[jax.Array, Cache]:
  """One token for every row; rows are independent.

  Args:
    params: decode layout. tokens: int32 [B]. positions: int32 [B], where each row's token stands in its sequence. A row
      whose token falls outside the cache writes nothing.
    cache: entry s holds position s, or what precedes it shifts that by its lengths; donate it, so that it is updated in
      place.
    before: what precedes the cache, in this order: a prompt that rows share, what a row has decoded so far.
    entry: int32, the entry at which the tokens of all rows fall, where it is one; it must be inside the cache. Writing
      it does not go row by row.
    ropes: `rope_tables` of positions[:, None], for a caller that has them from before a loop: in one, XLA:CPU computes
      them again for each head of each layer.
    backend: "paged" reads the cache by the TPU's kernel, which goes as far as each row's own length: for a cache made
      for it, with nothing before it. mesh: where the arrays lie.
  Returns: logits f32 [B, V] for the next token of each row, and the cache.
  """
  ropes = rope_tables(cfg, positions[:, None]) if ropes is None else ropes
  if backend == "paged":
    return _decode_step_paged(params, cfg, tokens, positions, cache, ropes, dtype=dtype, mesh=mesh)
  batch, starts, masks = positions.shape[0], jnp.zeros_like(positions), []
  for part in before:
    lengths = jnp.repeat(part.lengths, batch // part.lengths.shape[0])
    masks.append(_visible(cfg, positions, starts, lengths, cache_lib.num_entries(part.cache)))
    starts += lengths
  entries = positions - starts
  masks.append(_visible(cfg, positions, starts, entries + 1, cache_lib.num_entries(cache)))

  def attend(i: int, sliding: bool, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, LayerCache]:
    new = cache_lib.stored(k, v, cache[i].k.dtype)
    if entry is None:
      kept = cache_lib.write_tokens(cache[i], new, entries)
    else:
      kept = cache_lib.write_entry(cache[i], new, entry)
    layers = [*(part.cache[i] for part in before), kept]
    parts = [Part(layer, mask[sliding]) for layer, mask in zip(layers, masks, strict=True)]
    return decode_attention(q, parts, scale=cfg.query_scale, softcap=cfg.attn_softcap), kept

  x = _embed(params, cfg, tokens[:, None], positions[:, None], dtype)
  x, cache = _run_layers(params, cfg, x, ropes, attend)
  return logits(params, cfg, x[:, 0]), cache


def _decode_step_paged(params: Params, cfg: ModelConfig, tokens: jax.Array, positions: jax.Array, cache: Cache,
                       ropes: list[tuple[jax.Array, jax.Array]] | None, *, dtype: jax.typing.DTypeLike,
                       mesh: Mesh | None) -> tuple[jax.Array, Cache]:
  def attend(i: int, sliding: bool, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, LayerCache]:
    assert not sliding, "kernels.check_sample_backend refuses such models"
    kept = LayerCache(*(
      kernels.write_slots(old, new[:, 0], positions, mesh=mesh) for old, new in zip((cache[i].k, cache[i].v), (k, v))
    ))
    context = kernels.decode_attention(
      q[:, 0], kept.k, kept.v, positions + 1, scale=cfg.query_scale, softcap=cfg.attn_softcap, mesh=mesh
    )
    return context[:, None], kept

  x = _embed(params, cfg, tokens[:, None], positions[:, None], dtype)
  x, cache = _run_layers(params, cfg, x, ropes, attend)
  return logits(params, cfg, x[:, 0]), cache


def _visible(
  cfg: ModelConfig, positions: jax.Array, starts: jax.Array, lengths: jax.Array, num_entries: int
) -> list[jax.Array]:
  """Masks bool [B, 1, S] of a token at `positions` [B] over S entries, of which the first `lengths` [B] count and stand
  at positions from `starts` [B] on: of full and, where the model has them, of sliding layers."""
  entries = jnp.arange(num_entries, dtype=jnp.int32)[None]
  mask = (entries < lengths[:, None])[:, None]
  if not any(cfg.sliding_layers):
    return [mask]
  return [mask, _within_window(cfg, mask, positions[:, None], starts[:, None] + entries)]

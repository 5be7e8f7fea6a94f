"""The device side of sampling: pure functions that prefill prompts, fill slots and decode a chunk of tokens.

A slot is a row of a fixed batch. What is sampled in a slot depends on the weights, the prompt and the sample's key
alone: rows never mix, and the noise of token i of a sample is a function of (key, i). The engine (engine.py) owns the
host side: queues, which slot holds what, and when to call what is here. Nothing here keeps state or moves data to the
host.

Slots come in lanes of n neighbours. With n = 1 a slot's cache holds a prompt and what follows. With n > 1 a lane holds
one prompt, stored once, and each of its n slots only what it samples after it: samples of one prompt share its keys and
values, in memory and, as one matrix product, in attention.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from tba_jax import compiler_options
from tba_jax.models import cache as cache_lib
from tba_jax.models import transformer
from tba_jax.models.cache import Cache
from tba_jax.models.transformer import Before
from tba_jax.models.variants import ModelConfig
from tba_jax.sampling.draws import Filters, sample_tokens

_BATCH_AXES = ("data", "fsdp")


class DecodeState(NamedTuple):
  """Everything that decoding reads and writes for B slots. Donated to `insert` and `decode_chunk`."""

  cache: Cache  # of B rows
  tokens: jax.Array  # int32 [B], the last token sampled; its keys and values are not in the cache yet
  log_mu: jax.Array  # float32 [B], of that token
  positions: jax.Array  # int32 [B], where that token belongs in the cache
  counts: jax.Array  # int32 [B], tokens sampled so far
  limits: jax.Array  # int32 [B], counts at which the row ends without a stop token
  live: jax.Array  # bool [B]
  keys: jax.Array  # uint32 [B, 2]
  temperatures: jax.Array  # float32 [B], 0 = greedy
  filters: Filters
  prefix: Cache | None  # of B / n rows: the lanes' prompts; None in lanes of one
  prefix_lengths: jax.Array | None  # int32 [B / n]


class ChunkOutput(NamedTuple):
  """What the host learns from a chunk of n tokens. Row 0 is each slot's last token from before the chunk."""

  tokens: jax.Array  # int32 [n + 1, B]
  log_mu: jax.Array  # float32 [n + 1, B]
  counts: jax.Array  # int32 [B], after the chunk
  live: jax.Array  # bool [B], after the chunk


_Carry = tuple[jax.Array, DecodeState, jax.Array, jax.Array]  # of a chunk's loop: step, state, tokens, log_mu


class Admission(NamedTuple):
  """What to place in each of B slots; entries of slots that are not admitted mean nothing."""

  admitted: np.ndarray  # bool [B]
  sources: np.ndarray  # int32 [B], row of the prefilled prompts
  lengths: np.ndarray  # int32 [B], tokens of the prompt
  limits: np.ndarray  # int32 [B]
  keys: np.ndarray  # uint32 [B, 2]
  temperatures: np.ndarray  # float32 [B]
  filters: Filters  # of numpy arrays
  lanes: np.ndarray  # bool [B / n], lanes that get a prompt
  lane_sources: np.ndarray  # int32 [B / n], row of the prefilled prompts
  lane_lengths: np.ndarray  # int32 [B / n], tokens of the prompt


def empty_admission(slots: int, num_lanes: int) -> Admission:
  """Nothing for any slot or lane; to be filled in."""
  rows, lanes = functools.partial(np.zeros, slots), functools.partial(np.zeros, num_lanes)
  return Admission(
    admitted=rows(bool), sources=rows(np.int32), lengths=rows(np.int32), limits=rows(np.int32),
    keys=np.zeros((slots, 2), np.uint32), temperatures=rows(np.float32),
    filters=Filters(rows(np.int32), np.ones(slots, np.float32), rows(np.float32)),
    lanes=lanes(bool), lane_sources=lanes(np.int32), lane_lengths=lanes(np.int32),
  )


class SlotShardings(NamedTuple):
  """How the slots lie on a mesh. Hashable: a static argument of the programs."""

  rows: NamedSharding
  cache: NamedSharding

  @property
  def num_row_shards(self) -> int:
    return math.prod(self.rows.mesh.shape.get(axis, 1) for axis in _BATCH_AXES)


def slot_shardings(mesh: Mesh, cfg: ModelConfig) -> SlotShardings:
  """Rows over the mesh axes `data` and `fsdp`, kv heads over `tensor`, or whole where it does not divide them."""
  batch_axes = tuple(axis for axis in _BATCH_AXES if axis in mesh.axis_names)
  num_tensor = mesh.shape.get("tensor", 1)
  heads = "tensor" if num_tensor > 1 and cfg.num_kv_heads % num_tensor == 0 else None
  return SlotShardings(
    rows=NamedSharding(mesh, PartitionSpec(batch_axes)), cache=NamedSharding(mesh, PartitionSpec(batch_axes, heads))
  )


def _mesh(shardings: SlotShardings | None) -> Mesh | None:
  return None if shardings is None else shardings.rows.mesh


def init_state(
  cfg: ModelConfig, *, slots: int, cache_tokens: int, cache_dtype: Any, lane_samples: int, prefix_tokens: int,
  attention: str = "xla",
) -> DecodeState:
  """State of `slots` dead rows. In lanes of more than one, a prompt has up to `prefix_tokens` and a slot's cache only
  what follows it."""
  rows = functools.partial(jnp.zeros, (slots,))
  prefix, prefix_lengths = None, None
  if lane_samples > 1:
    transformer.check_positions(cfg, prefix_tokens + cache_tokens)  # the two stand one behind the other
    num_lanes = slots // lane_samples
    prefix = transformer.init_cache(cfg, batch=num_lanes, length=prefix_tokens, dtype=cache_dtype)
    prefix_lengths = jnp.zeros(num_lanes, jnp.int32)
  return DecodeState(
    prefix=prefix,
    prefix_lengths=prefix_lengths,
    cache=transformer.init_cache(cfg, batch=slots, length=cache_tokens, dtype=cache_dtype, backend=attention),
    tokens=rows(jnp.int32),
    log_mu=rows(jnp.float32),
    positions=rows(jnp.int32),
    counts=rows(jnp.int32),
    limits=rows(jnp.int32),
    live=rows(bool),
    keys=jnp.zeros((slots, 2), jnp.uint32),
    temperatures=rows(jnp.float32),
    filters=Filters(rows(jnp.int32), jnp.ones(slots), rows(jnp.float32)),
  )


@functools.lru_cache(maxsize=64)  # so that engines of one shape, and one engine twice, compile it once
def make_init_state(
  cfg: ModelConfig, rows: Sharding, cache: Sharding, **sizes: Any
) -> tuple[Callable[[], DecodeState], int]:
  """What makes an empty state on devices (the arguments of `init_state` are `sizes`), and the bytes of its caches on
  each device."""
  init = functools.partial(init_state, cfg, **sizes)
  shapes = jax.eval_shape(init)
  caches = jax.tree.leaves((shapes.cache, shapes.prefix))
  cache_bytes = sum(int(np.prod(cache.shard_shape(leaf.shape))) * leaf.dtype.itemsize for leaf in caches)
  shardings = jax.tree.map(lambda _: rows, shapes)._replace(
    cache=jax.tree.map(lambda _: cache, shapes.cache), prefix=jax.tree.map(lambda _: cache, shapes.prefix)
  )
  return jax.jit(init, out_shardings=shardings), cache_bytes


def constrain(state: DecodeState, shardings: SlotShardings | None) -> DecodeState:
  """Pins the state to its place on a mesh, so that what a program returns can be donated to the next one."""
  if shardings is None:
    return state
  rows = jax.lax.with_sharding_constraint(state._replace(cache=None, prefix=None), shardings.rows)
  caches = jax.lax.with_sharding_constraint((state.cache, state.prefix), shardings.cache)
  return rows._replace(cache=caches[0], prefix=caches[1])


def _ends(tokens: jax.Array, counts: jax.Array, limits: jax.Array, stop_ids: tuple[int, ...]) -> jax.Array:
  stopped = jnp.isin(tokens, jnp.array(stop_ids, jnp.int32)) if stop_ids else jnp.zeros(tokens.shape, bool)
  return stopped | (counts >= limits)


def _prefill(
  params: Any, tokens: jax.Array, lengths: jax.Array, *, cfg: ModelConfig, dtype: Any, cache_dtype: Any,
  attention: str, shardings: SlotShardings | None,
) -> tuple[jax.Array, Cache]:
  """Runs N right-padded prompts. tokens int32 [N, P], lengths int32 [N] >= 1.

  Returns: logits float32 [N, V] after each prompt's last token; a cache of length P, of which row i is meaningful below
    lengths[i].
  """
  if shardings is not None and tokens.shape[0] % shardings.num_row_shards == 0:
    tokens, lengths = jax.lax.with_sharding_constraint((tokens, lengths), shardings.rows)
  logits, cache = transformer.prefill(
    params, cfg, tokens, lengths, dtype=dtype, cache_dtype=cache_dtype, backend=attention, mesh=_mesh(shardings))
  if shardings is not None:  # every batch shard may need any prompt, so the prompts' rows are whole everywhere
    by_heads = NamedSharding(shardings.cache.mesh, PartitionSpec(None, *shardings.cache.spec[1:]))
    cache = jax.lax.with_sharding_constraint(cache, by_heads)
    logits = jax.lax.with_sharding_constraint(logits, NamedSharding(shardings.rows.mesh, PartitionSpec()))
  return logits, cache


@functools.partial(
  jax.jit,
  static_argnames=("stop_ids", "log_mu_temperature", "filtering", "shardings"),
  donate_argnames=("state",),
)
def insert(
  state: DecodeState,
  logits: jax.Array,
  prompts: Cache,
  admission: Admission,
  *,
  stop_ids: tuple[int, ...],
  log_mu_temperature: float,
  filtering: bool,
  shardings: SlotShardings | None,
) -> DecodeState:
  """Copies prompts that `prefill` read into their lanes and samples the first tokens of the admitted slots.

  `filtering` says whether rows may have filters; without it they are not looked at.
  """
  slots = state.tokens.shape[0]
  sources = admission.sources
  tokens, log_mu = sample_tokens(
    logits[sources],
    admission.keys,
    jnp.zeros_like(sources),
    admission.temperatures,
    log_mu_temperature=log_mu_temperature,
    filters=admission.filters if filtering else None,
  )
  counts = jnp.ones_like(sources)
  fresh = DecodeState(
    cache=None,
    tokens=tokens,
    log_mu=log_mu,
    positions=admission.lengths,
    counts=counts,
    limits=admission.limits,
    live=~_ends(tokens, counts, admission.limits, stop_ids),
    keys=admission.keys,
    temperatures=admission.temperatures,
    filters=admission.filters,
    prefix=None,
    prefix_lengths=None,
  )

  def choose(new: jax.Array, old: jax.Array) -> jax.Array:
    return jnp.where(admission.admitted.reshape(slots, *[1] * (old.ndim - 1)), new, old)

  merged = jax.tree.map(choose, fresh, state._replace(cache=None, prefix=None, prefix_lengths=None))
  # A lane that gets nothing writes beyond the end, where it is dropped; each elsewhere, for indices are unique.
  lanes = jnp.arange(admission.lanes.shape[0])
  destinations = jnp.where(admission.lanes, lanes, lanes + lanes.shape[0])

  def place(old: jax.Array, new: jax.Array) -> jax.Array:
    new = new[admission.lane_sources]
    return old.at[destinations, :, : new.shape[2]].set(new, mode="drop", unique_indices=True)

  if state.prefix is None:
    merged = merged._replace(cache=jax.tree.map(place, state.cache, prompts))
  else:
    merged = merged._replace(
      cache=state.cache,
      prefix=jax.tree.map(place, state.prefix, prompts),
      prefix_lengths=jnp.where(admission.lanes, admission.lane_lengths, state.prefix_lengths),
    )
  return constrain(merged, shardings)


def _decode_chunk(
  params: Any,
  state: DecodeState,
  *,
  cfg: ModelConfig,
  num_tokens: int,
  kv_length: int,
  prefix_length: int,
  stop_ids: tuple[int, ...],
  log_mu_temperature: float,
  filtering: bool,
  dtype: Any,
  attention: str,
  shardings: SlotShardings | None,
) -> tuple[DecodeState, ChunkOutput]:
  """Decodes up to `num_tokens` tokens in every live row, in one loop on the device that ends early when no row lives.

  Only the first `kv_length` cache entries, and `prefix_length` of the lanes' prompts, are read; the caller vouches that
  no live row has more when the chunk begins. They are cut out before the loop: cutting inside each step makes XLA:CPU
  copy them there, which costs more than it saves. The loop does not write to them. What it adds lies in a small cache
  of its own, where every row is at the same entry, and moves behind the rest at the end.
  """
  slots, begun, held = state.tokens.shape[0], state.positions, (state.cache, state.prefix)
  paged = attention == "paged"  # whose kernel reads, and writes, where the cache lies
  options = dict(dtype=dtype, backend=attention, mesh=_mesh(shardings))
  own_lengths = state.positions
  if not paged:
    before = []
    if state.prefix is not None:
      before.append(Before(cache_lib.first_entries(state.prefix, prefix_length), state.prefix_lengths))
      own_lengths = own_lengths - jnp.repeat(state.prefix_lengths, slots // state.prefix_lengths.shape[0])
    before.append(Before(cache_lib.first_entries(state.cache, kv_length), own_lengths))
    options |= dict(before=before)
    state = state._replace(cache=cache_lib.empty_like(state.cache, num_tokens))
  state = constrain(state._replace(prefix=None), shardings)
  ropes = transformer.rope_tables(cfg, begun[:, None] + jnp.arange(num_tokens, dtype=jnp.int32))  # each [B, n, 1, ...]
  tokens = jnp.zeros((num_tokens + 1, slots), jnp.int32).at[0].set(state.tokens)
  log_mu = jnp.zeros((num_tokens + 1, slots), jnp.float32).at[0].set(state.log_mu)

  def step(carry: _Carry) -> _Carry:
    index, state, tokens, log_mu = carry
    live = state.live
    # A dead row computes along. What it writes, at entry 0 of its slot or behind what it had, is written over by what
    # begins there next.
    if paged:
      where = dict(positions=jnp.where(live, state.positions, 0))
    else:
      where = dict(positions=begun + index, entry=index)
    turned = jax.tree.map(lambda table: jax.lax.dynamic_slice_in_dim(table, index, 1, axis=1), ropes)
    logits, cache = transformer.decode_step(
      params, cfg, state.tokens, cache=state.cache, ropes=turned, **where, **options)
    sampled, sampled_log_mu = sample_tokens(
      logits,
      state.keys,
      state.counts,
      state.temperatures,
      log_mu_temperature=log_mu_temperature,
      filters=state.filters if filtering else None,
    )
    counts = state.counts + live
    state = state._replace(
      cache=cache,
      tokens=jnp.where(live, sampled, state.tokens),
      log_mu=jnp.where(live, sampled_log_mu, state.log_mu),
      positions=state.positions + live,
      counts=counts,
      live=live & ~_ends(sampled, counts, state.limits, stop_ids),
    )
    return index + 1, state, tokens.at[index + 1].set(state.tokens), log_mu.at[index + 1].set(state.log_mu)

  def proceed(carry: _Carry) -> jax.Array:
    return (carry[0] < num_tokens) & jnp.any(carry[1].live)

  _, state, tokens, log_mu = jax.lax.while_loop(proceed, step, (jnp.int32(0), state, tokens, log_mu))
  if not paged:
    cache, new = held[0], state.cache
    if num_tokens < cache_lib.num_entries(cache):  # else no row can go on
      cache = cache_lib.append(cache, new, own_lengths)
    state = state._replace(cache=cache)
  state = constrain(state._replace(prefix=held[1]), shardings)
  return state, ChunkOutput(tokens=tokens, log_mu=log_mu, counts=state.counts, live=state.live)


class Programs(NamedTuple):
  """What takes the time of sampling, jitted; see `_prefill` and `_decode_chunk`."""

  prefill: Callable[..., tuple[jax.Array, Cache]]
  decode_chunk: Callable[..., tuple[DecodeState, ChunkOutput]]


def _jit_programs(of_both: dict[str, Any], of_chunk: dict[str, Any]) -> Programs:
  """With these options of the compiler."""
  prefill = jax.jit(
    _prefill, static_argnames=("cfg", "dtype", "cache_dtype", "attention", "shardings"), compiler_options=of_both)
  decode_chunk = jax.jit(
    _decode_chunk,
    static_argnames=(
      "cfg", "num_tokens", "kv_length", "prefix_length", "stop_ids", "log_mu_temperature", "filtering", "dtype",
      "attention", "shardings",
    ),
    donate_argnames=("state",),
    compiler_options={**of_both, **of_chunk},
  )
  return Programs(prefill, decode_chunk)


# A program's temporary memory is one block by default. One of 32 MB or more malloc takes from the system and gives back
# with each call, and every page of it is made anew; smaller ones it keeps.
_SMALL_BLOCKS = {"xla_multiheap_size_constraint_per_heap": 31_000_000}
prefill, decode_chunk = _jit_programs({}, {})


@functools.cache
def programs_on(platform: str) -> Programs:
  """As they are best compiled for a platform, the same ones for all its engines."""
  if platform != "cpu":
    return Programs(prefill, decode_chunk)
  return _jit_programs(compiler_options.of_sampling(platform), _SMALL_BLOCKS)


@functools.partial(jax.jit, static_argnames=("cfg", "dtype", "attention", "shardings"), donate_argnames=("state",))
def recompute(
  params: Any,
  state: DecodeState,
  tokens: jax.Array,
  lengths: jax.Array,
  slots: jax.Array,
  lanes: jax.Array,
  *,
  cfg: ModelConfig,
  dtype: Any,
  attention: str,
  shardings: SlotShardings | None,
) -> DecodeState:
  """Makes the keys and values of N samples under way anew, with these weights. Their next tokens do not change.

  Args:
    tokens: int32 [N, T], prompt and what was sampled after it less its last token, padded on the right.
    lengths: int32 [N], tokens that count.
    slots: int32 [N], each once; numbers beyond the slots stand for none.
    lanes: int32 [N], the lane whose prompt the row renews too, each once; numbers beyond the lanes stand for none.
  """
  cache_dtype = state.cache[0].k.dtype
  _, new = transformer.prefill(
    params, cfg, tokens, lengths, dtype=dtype, cache_dtype=cache_dtype, backend=attention, mesh=_mesh(shardings))
  if state.prefix is None:
    length = min(tokens.shape[1], cache_lib.num_entries(state.cache))

    def place(old: jax.Array, x: jax.Array) -> jax.Array:
      return old.at[slots, :, :length].set(x[:, :, :length], mode="drop", unique_indices=True)

    return constrain(state._replace(cache=jax.tree.map(place, state.cache, new)), shardings)
  per_lane = state.tokens.shape[0] // state.prefix_lengths.shape[0]
  starts = state.prefix_lengths.at[slots // per_lane].get(mode="clip")
  entries = starts[:, None] + jnp.arange(cache_lib.num_entries(state.cache))

  def place_prompt(old: jax.Array, x: jax.Array) -> jax.Array:
    length = min(x.shape[2], old.shape[2])
    return old.at[lanes, :, :length].set(x[:, :, :length], mode="drop", unique_indices=True)

  def place_rest(old: jax.Array, x: jax.Array) -> jax.Array:
    index = entries[:, None, :] if x.ndim == 3 else entries[:, None, :, None]
    rest = jnp.take_along_axis(x, jnp.minimum(index, x.shape[2] - 1), axis=2)
    return old.at[slots].set(rest, mode="drop", unique_indices=True)

  state = state._replace(
    prefix=jax.tree.map(place_prompt, state.prefix, new), cache=jax.tree.map(place_rest, state.cache, new)
  )
  return constrain(state, shardings)

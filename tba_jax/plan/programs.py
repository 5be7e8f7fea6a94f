"""The jitted programs that a run uses, with shapes and shardings in place of arrays, and what stays in memory.

With build.py and train.py this is what reads the config. The functions are those of the run, made by build.py.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from ml_collections import ConfigDict

from tba_jax import build, learner, sharding
from tba_jax.models import lora as lora_lib
from tba_jax.models import transformer
from tba_jax.models.variants import ModelConfig
from tba_jax.replay.collate import BatchShape, batch_shapes
from tba_jax.runtime.trainer import abstract_batch
from tba_jax.sampling import decode
from tba_jax.sampling.shapes import Shapes, make_shapes
from tba_jax.searcher_places import make_convert, place_searcher


class Resident(NamedTuple):
  """Something that stays in a device's memory for the whole run."""

  content: str
  device_bytes: int


@dataclasses.dataclass(frozen=True)
class Program:
  """One jitted function at one shape.

  `variants`: how many programs of its kind a run compiles, one for each declared shape; this is the largest.
  `unknown_trips`: how often its loops without a constant bound run.
  """

  name: str
  lower: Callable[[], Any]
  variants: int
  unknown_trips: float = 1.0


@dataclasses.dataclass(frozen=True)
class Part:
  """A trainer or a searcher: what it keeps, what it runs, and the size of what is published to it (or by it)."""

  devices: tuple[jax.Device, ...]
  residents: tuple[Resident, ...]
  programs: tuple[Program, ...]
  published_bytes: int  # on each of its devices


def trainer_part(config: ConfigDict, cfg: ModelConfig, devices: Sequence[jax.Device]) -> Part:
  """The trainer on these devices: the train step at its largest batch, and the conversion of what is published."""
  mesh = sharding.make_mesh(devices)
  lora, train = build.lora_settings(config), config.train
  step, optimizer = build.make_step(config, cfg, mesh)
  whole = transformer.abstract_params(cfg, build.param_dtype(config))
  base = _put(whole, sharding.param_shardings(whole, mesh))
  head = learner.make_head(config.loss.name, learning_rate=config.loss.head_learning_rate)
  state = _put(*learner.abstract_state(cfg, optimizer, lora=lora, head=head, mesh=mesh))
  layout = sharding.batch_sharding(mesh, with_advantages=build.has_advantages(config))
  batch = abstract_batch(largest_batch(config, len(devices)), layout)
  beta = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
  frozen = () if lora is None else (base,)
  residents = [
    Resident("parameters" if lora is None else "adapters", _bytes(state.params)),
    Resident("optimizer state", _bytes(state.opt_state)),
    Resident("batches, one ahead", 2 * _bytes(batch)),
  ]
  programs = [
    Program(
      "train step", lambda: step.lower(state, batch, beta, *frozen), 1 if train.packing else len(train.length_buckets),
      micro_batches_in_use(config, len(devices), (config.sample.max_prompt_tokens + config.sample.max_new_tokens) / 2)),
  ]
  if lora is None:
    convert = make_convert(jnp.dtype(config.sample.dtype))
    # Where the compiler lays the copy out is known after the compile; it is split like what it is made of.
    published = _put(_cast(whole, config.sample.dtype), sharding.param_shardings(whole, mesh))
    programs.append(Program("publish", lambda: convert.lower(state.params), 1))
  else:
    published = state.params
    residents.insert(0, Resident("frozen base", _bytes(base)))
  residents.append(Resident("copy being published", _bytes(published)))
  if head is not None:
    residents.append(Resident("scalar head and its optimizer state", _bytes((state.head, state.head_opt_state))))
  if config.reference.reset_every_steps:
    copy = _put(_cast(whole, config.sample.dtype), sharding.param_shardings(whole, mesh))
    residents.append(Resident("reference", _bytes(copy)))
  if config.reference.ema_decay:
    residents.append(Resident("average for the reference", _bytes(state.params)))
  return Part(tuple(devices), tuple(residents), tuple(programs), _bytes(published))


def largest_batch(config: ConfigDict, num_devices: int) -> BatchShape:
  """The largest batch that a step is compiled for."""
  return max(all_batches(config, num_devices), key=lambda shape: shape.num_rows * shape.row_tokens)


def all_batches(config: ConfigDict, num_devices: int) -> tuple[BatchShape, ...]:
  """Every batch that a step is compiled for, on a trainer of `num_devices`."""
  train = config.train
  return batch_shapes(
    num_responses=train.prompts_per_step * train.responses_per_prompt, row_multiple=train.micro_batches * num_devices,
    length_buckets=train.length_buckets[-1:] if train.packing else train.length_buckets,
  )


def micro_batches_in_use(config: ConfigDict, num_devices: int, mean_tokens: float) -> int:
  """How many micro-batches a step computes: all, or of packed rows those that sequences of this mean length fill."""
  train = config.train
  if not train.packing:
    return train.micro_batches
  (shape,) = all_batches(config, num_devices)
  part_tokens = shape.num_rows // train.micro_batches * shape.row_tokens
  num_tokens = train.prompts_per_step * train.responses_per_prompt * mean_tokens
  return min(train.micro_batches, math.ceil(num_tokens / part_tokens))


def searcher_part(config: ConfigDict, cfg: ModelConfig, devices: Sequence[jax.Device]) -> Part:
  """A searcher on these devices: a chunk of decoding, prefill and refill of slots, scoring, at their largest shapes."""
  sample, place = config.sample, place_searcher(cfg, devices)
  lora, dtype, cache_dtype = build.lora_settings(config), jnp.dtype(sample.dtype), jnp.dtype(sample.cache_dtype)
  shapes, one = engine_shapes(config), place.mesh is None
  whole = _cast(transformer.abstract_params(cfg), dtype)
  weights = _put(jax.eval_shape(transformer.unstack, whole), place.weights)
  reference = _put(whole, place.reference)
  shardings = None if one else decode.slot_shardings(place.mesh, cfg)
  everywhere = SingleDeviceSharding(devices[0]) if one else NamedSharding(place.mesh, PartitionSpec())
  where = (everywhere, everywhere) if one else shardings
  state = _slots(cfg, shapes, cache_dtype, sample.attention, *where)
  sampling = decode.programs_on(devices[0].platform)
  options = dict(
    stop_ids=(cfg.vocab_size - 1,), log_mu_temperature=float(sample.temperature), filtering=False, shardings=shardings)
  prompts = (shapes.prefill_batches[-1], shapes.prompt_buckets[-1])
  ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
  model = dict(cfg=cfg, dtype=dtype, attention=sample.attention, shardings=shardings)
  prefill = functools.partial(
    sampling.prefill.lower, weights, ints(*prompts), ints(prompts[0]), cache_dtype=cache_dtype, **model)
  chunk = functools.partial(
    sampling.decode_chunk.lower, weights, state, cfg=cfg, num_tokens=sample.chunk_tokens, dtype=dtype,
    attention=sample.attention, kv_length=shapes.kv_buckets[-1], prefix_length=shapes.prefix_buckets[-1], **options)
  score = build.make_scorer(config, cfg, place.mesh)
  texts = (ints(sample.responses_per_prompt, config.train.length_buckets[-1]),) * 3
  num = collections.Counter(kind for kind, *_ in shapes.programs())
  # The chunk that reads whole caches. One that reads less copies that out first: memory for the time of a chunk, at most
  # what its bucket holds, which is not counted.
  programs = [
    Program("decode", chunk, num["decode"], float(sample.chunk_tokens)),
    Program("prefill", prefill, num["prefill"]),
    Program("score", lambda: score.lower(reference, *texts), len(config.train.length_buckets)),
  ]
  if sample.recompute_kv:
    rows = (ints(prompts[0]),) * 3
    again = functools.partial(
      decode.recompute.lower, weights, state, ints(prompts[0], shapes.recompute_buckets[-1]), *rows, **model)
    programs.append(Program("recompute", again, num["recompute"]))
  cache_bytes = _bytes((state.cache, state.prefix))
  residents = [
    Resident("weights", _bytes(weights)),
    Resident("weights that arrive", _bytes(weights)),
    Resident("reference", _bytes(reference)),
    Resident(f"cache of {sample.slots} slots", cache_bytes),
    # Two calls' results, in proportion: the compiler's figure takes the place of this one.
    Resident("prefilled prompts", 2 * cache_bytes * prompts[0] * prompts[1] // (sample.slots * shapes.cache_tokens)),
  ]
  for extra in build.extra_models(config):
    layout = everywhere if one else extra.layout(place.mesh)
    residents.append(Resident(extra.name, _bytes(_put(extra.tree, layout))))
  if config.eval.every_steps:  # an evaluation holds on to its version while newer ones arrive
    residents.insert(2, Resident("weights under evaluation", _bytes(weights)))
  if sample.lane_samples > 1:  # evaluations have an engine of their own
    alone = _slots(cfg, engine_shapes(config, lane_samples=1), cache_dtype, sample.attention, *where)
    residents.append(Resident("cache under evaluation", _bytes(alone.cache)))
  moved = weights if lora is None else lora_lib.abstract_adapters(cfg, settings=lora)
  if lora is not None:
    moved = _put(moved, everywhere if one else sharding.param_shardings(moved, place.mesh))
  return Part(tuple(devices), tuple(residents), tuple(programs), _bytes(moved))


def trees_beside(config: ConfigDict) -> dict[str, Any]:
  """Shapes of the parameters of the task's own models, and of a victim's cache, by name."""
  return {each.name: each.tree for each in build.extra_models(config)}


def engine_shapes(config: ConfigDict, *, lane_samples: int | None = None) -> Shapes:
  """The sizes of a searcher's engine, by its own defaults."""
  sample = config.sample
  return make_shapes(
    slots=sample.slots, lane_samples=sample.lane_samples if lane_samples is None else lane_samples,
    **build.engine_limits(config), chunk_tokens=sample.chunk_tokens, recompute_kv=sample.recompute_kv,
    attention=sample.attention)


def _slots(
  cfg: ModelConfig, shapes: Shapes, cache_dtype: Any, attention: str, rows: Sharding, cache: Sharding
) -> decode.DecodeState:
  state = jax.eval_shape(functools.partial(
    decode.init_state, cfg, slots=shapes.slots, cache_tokens=shapes.slot_tokens, cache_dtype=cache_dtype,
    lane_samples=shapes.lane_samples, prefix_tokens=shapes.max_prompt_tokens,
    attention=attention))
  rest = _put(state._replace(cache=None, prefix=None), rows)
  return rest._replace(cache=_put(state.cache, cache), prefix=_put(state.prefix, cache))


def host_bytes(config: ConfigDict) -> int:
  """What the full replay buffer takes: per response its token columns, at most one prompt, and scalars."""
  sample, columns = config.sample, 3 + build.has_advantages(config)
  return config.buffer.capacity * (4 * (columns * sample.max_new_tokens + sample.max_prompt_tokens) + 100)


def _cast(tree: Any, dtype: Any) -> Any:
  return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(dtype)), tree)


def _put(tree: Any, where: Any) -> Any:
  """The tree with shardings. `where`: a device, a sharding, or a tree of shardings."""
  if isinstance(where, jax.Device):
    where = SingleDeviceSharding(where)
  if isinstance(where, Sharding):
    where = jax.tree.map(lambda _: where, tree)
  return jax.tree.map(lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s), tree, where)


def _bytes(tree: Any) -> int:
  """On each device."""
  return sum(
    int(np.prod(leaf.sharding.shard_shape(leaf.shape), dtype=np.int64)) * np.dtype(leaf.dtype).itemsize
    for leaf in jax.tree.leaves(tree)
  )

"""Where searchers live, and in what layout and dtype published parameters come to them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tba_jax import sharding
from tba_jax.models import lora as lora_lib
from tba_jax.models import transformer
from tba_jax.models.lora import LoraSettings
from tba_jax.models.variants import ModelConfig
from tba_jax.weights import WeightStore


class Place(NamedTuple):
  """Where a searcher lives."""

  device_or_mesh: jax.Device | Mesh
  weights: Any  # placement of parameters in the decode layout
  reference: Any  # placement of stacked parameters
  mesh: Mesh | None


def place_searcher(cfg: ModelConfig, devices: Sequence[jax.Device]) -> Place:
  """One device, or tensor parallelism over several."""
  if len(devices) == 1:
    return Place(devices[0], devices[0], devices[0], None)
  mesh = sharding.make_mesh(devices, fsdp=1, tensor=len(devices))
  stacked = sharding.param_shardings(transformer.abstract_params(cfg, jnp.float32), mesh)
  layer = jax.tree.map(lambda s: NamedSharding(mesh, PartitionSpec(*s.spec[1:])), stacked["layers"])
  return Place(mesh, {**stacked, "layers": (layer,) * cfg.num_layers}, stacked, mesh)


def make_convert(dtype: Any) -> Callable[[Any], Any]:
  """Parameters of the trainer -> the decode layout in a searcher's dtype; jitted."""
  return jax.jit(lambda tree: transformer.unstack(jax.tree.map(lambda x: x.astype(dtype), tree)))


def copy_of_adapters() -> Callable[[Any], Any]:
  """Adapters as they are moved: of their own buffers; jitted."""
  return jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))


def make_weight_store(
    cfg: ModelConfig, lora: LoraSettings | None, places: Sequence[Place], references: Sequence[Any], dtype: Any, *,
    timeout_secs: float,
) -> WeightStore:
  """Moves all parameters in the decode layout; or adapters alone, which each searcher merges with its reference."""
  if lora is None:
    return WeightStore(make_convert(dtype), [place.weights for place in places], timeout_secs=timeout_secs)
  abstract = lora_lib.abstract_adapters(cfg, settings=lora)
  merge = functools.partial(lora_lib.merge_unstacked, scale=lora.scale)
  placements, expand = [], []
  for place, reference in zip(places, references, strict=True):
    on_mesh = place.mesh is not None
    placements.append(sharding.param_shardings(abstract, place.mesh) if on_mesh else place.weights)
    expand.append(functools.partial(jax.jit(merge, out_shardings=place.weights if on_mesh else None), reference))
  return WeightStore(copy_of_adapters(), placements, expand=expand, timeout_secs=timeout_secs)

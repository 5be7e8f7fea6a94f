"""Meshes out of devices, and where each array of a run lies on them: two tables, and functions that read the tables.

Mesh axes: "data" replicates parameters and splits rows, "fsdp" splits both, "tensor" splits heads, MLP width and
vocabulary. A parameter without a rule is an error, never a silent replica. Nothing here sets a default device or a
global mesh: several meshes of one process are used by several threads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tba_jax.types import Batch

MESH_AXES = ("data", "fsdp", "tensor")

# Fields of a Batch that are [B, T]; the others are per response, or counts.
PER_TOKEN_FIELDS = ("tokens", "positions", "segment_ids", "sequence_ids", "log_mu", "log_ref", "advantages")

LOGICAL_TO_MESH: dict[str | None, str | tuple[str, ...] | None] = {
  "batch": ("data", "fsdp"),
  "embed": "fsdp",
  "heads": "tensor",
  "kv_heads": "tensor",
  "head_dim": None,
  "mlp": "tensor",
  "vocab": "tensor",
  "layers": None,
  None: None,
}

# Dimensions that are replicated where their mesh axis does not divide them: a model with fewer kv heads than
# tensor-parallel devices is ordinary (each device then holds all of them, as they are small), and so is a vocabulary of
# a prime number of rows. Heads, MLP width and model width must divide: replicating those would make the axis pointless
# without anybody noticing.
REPLICATED_IF_UNEVEN = frozenset({"kv_heads", "vocab"})

# Regular expression over the "/"-joined path -> logical axis of each dimension. The first rule whose whole pattern
# matches holds.
PARAM_AXES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
  (r"embed/table", ("vocab", "embed")),
  (r"pos_embed/table", (None, "embed")),
  (r"layers/attn/q/kernel", ("layers", "embed", "heads", "head_dim")),
  (r"layers/attn/[kv]/kernel", ("layers", "embed", "kv_heads", "head_dim")),
  (r"layers/attn/o/kernel", ("layers", "heads", "head_dim", "embed")),
  (r"layers/attn/q/bias", ("layers", "heads", "head_dim")),
  (r"layers/attn/[kv]/bias", ("layers", "kv_heads", "head_dim")),
  (r"layers/attn/o/bias", ("layers", None)),
  (r"layers/attn/[qk]_norm/(scale|bias)", ("layers", None)),
  (r"layers/mlp/(gate|up)/kernel", ("layers", "embed", "mlp")),
  (r"layers/mlp/down/kernel", ("layers", "mlp", "embed")),
  (r"layers/mlp/(gate|up)/bias", ("layers", "mlp")),
  (r"layers/mlp/down/bias", ("layers", None)),
  (r"layers/\w+_norm/(scale|bias)", ("layers", None)),
  (r"final_norm/(scale|bias)", (None,)),
  (r"lm_head/kernel", ("embed", "vocab")),
  (r"lm_head/bias", ("vocab",)),
  # A reward model's head.
  (r"score/kernel", ("embed", None)),
  (r"score/bias", (None,)),
  # A number for each token, learnt beside the model.
  (r"scalar_head/hidden/kernel", ("embed", None)),
  (r"scalar_head/hidden/bias", (None,)),
  (r"scalar_head/out/kernel", (None, None)),
  (r"scalar_head/out/bias", (None,)),
  # Encoders, whose layers have the names of a decoder's.
  (r"embed/word/table", ("vocab", "embed")),
  (r"embed/(position|token_type)/table", (None, "embed")),
  (r"embed/norm/(scale|bias)", (None,)),
  (r"(pooler|classifier)/kernel", ("embed", None)),
  (r"(pooler|classifier)/bias", (None,)),
  # Adapters: like the kernels they belong to, the rank on every device.
  (r"layers/(attn/[qkv]|mlp/(gate|up))/lora_a", ("layers", "embed", None)),
  (r"layers/attn/q/lora_b", ("layers", None, "heads", "head_dim")),
  (r"layers/attn/[kv]/lora_b", ("layers", None, "kv_heads", "head_dim")),
  (r"layers/mlp/(gate|up)/lora_b", ("layers", None, "mlp")),
  (r"layers/attn/o/lora_a", ("layers", "heads", "head_dim", None)),
  (r"layers/mlp/down/lora_a", ("layers", "mlp", None)),
  (r"layers/(attn/o|mlp/down)/lora_b", ("layers", None, "embed")),
  (r"lm_head/lora_a", ("embed", None)),
  (r"lm_head/lora_b", (None, "vocab")),
)


def make_mesh(devices: Sequence[jax.Device], *, data: int = 1, fsdp: int = -1, tensor: int = 1) -> Mesh:
  """A mesh of exactly these devices with axes ("data", "fsdp", "tensor"), tensor neighbours closest in the list.

  Args:
    devices: in the order of `jax.devices()`.
    data, fsdp, tensor: sizes of the axes; at most one may be -1, what the others leave.
  Raises: ValueError if the sizes do not multiply to the number of devices.
  """
  sizes = {"data": data, "fsdp": fsdp, "tensor": tensor}
  asked = ", ".join(f"{name}={size}" for name, size in sizes.items())
  free = [name for name, size in sizes.items() if size == -1]
  if len(free) > 1 or any(size < 1 for size in sizes.values() if size != -1):
    raise ValueError(f"mesh sizes must be at least 1, and at most one of them -1 (the rest); found {asked}.")
  known = math.prod(size for size in sizes.values() if size != -1)
  if free:
    sizes[free[0]] = len(devices) // known
  if math.prod(sizes.values()) != len(devices):
    raise ValueError(
      f"a mesh of {asked} does not fit {len(devices)} devices; the product of the sizes must be {len(devices)} "
      "(-1 stands for the rest)."
    )
  return Mesh(np.array(devices, dtype=object).reshape(tuple(sizes[name] for name in MESH_AXES)), MESH_AXES)


def num_batch_shards(mesh: Mesh | None) -> int:
  """Devices over which rows are split: a batch's rows must be a multiple of this (times the micro-batches)."""
  return 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]


def param_shardings(params: Any, mesh: Mesh) -> Any:
  """Tree of NamedShardings for a parameter tree (or one of ShapeDtypeStructs), from the two tables.

  Raises: ValueError for a parameter that no rule names or whose rank is another, and for a dimension of heads, MLP
    width or model width that its mesh axis does not divide. kv heads and vocabulary are replicated in that case.
  """
  return jax.tree_util.tree_map_with_path(
    lambda path, leaf: NamedSharding(mesh, param_spec(path_name(path), tuple(leaf.shape), mesh)), params
  )


def param_spec(name: str, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
  """PartitionSpec of one parameter, by its "/"-joined name. Raises as `param_shardings`."""
  axes = next((axes for pattern, axes in PARAM_AXES if re.fullmatch(pattern, name)), None)
  if axes is None:
    raise ValueError(f"parameter {name!r} {shape} has no sharding rule; add one to PARAM_AXES in tba_jax/sharding.py.")
  if len(axes) != len(shape):
    raise ValueError(f"parameter {name!r} has shape {shape}, but its sharding rule names {len(axes)} axes: {axes}.")
  return PartitionSpec(*(_mesh_axis(name, axis, size, mesh) for axis, size in zip(axes, shape)))


def state_shardings(state: Any, params: Any, shardings: Any, mesh: Mesh) -> Any:
  """Shardings of a state that holds the parameters or copies of them (optimizer moments), each like the parameter it
  belongs to.

  A leaf belongs to the parameter whose path its own path ends with, if their shapes are equal; anything else (counts,
  factored moments) is replicated.

  Args:
    state: tree of arrays or ShapeDtypeStructs, such as a TrainState.
    params: parameter tree of arrays or ShapeDtypeStructs.
    shardings: NamedShardings in the structure of `params`.
    mesh: that of the shardings.
  """
  by_name = {
    path_name(path): (tuple(leaf.shape), sharding)
    for (path, leaf), sharding in zip(jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(shardings))
  }
  replicated = NamedSharding(mesh, PartitionSpec())

  def leaf_sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
    parts = path_name(path).split("/")
    for start in range(len(parts)):  # the longest suffix first: "pos_embed/table" is not "embed/table"
      shape, sharding = by_name.get("/".join(parts[start:]), (None, None))
      if shape == tuple(leaf.shape):
        return sharding
    return replicated

  return jax.tree_util.tree_map_with_path(leaf_sharding, state)


def batch_sharding(mesh: Mesh, *, with_advantages: bool = False) -> Batch:
  """A Batch of NamedShardings: rows are split over "data" and "fsdp", what is per response is on every device. None in
  the place of advantages where batches have none."""
  rows = NamedSharding(mesh, PartitionSpec(LOGICAL_TO_MESH["batch"], None))
  everywhere = NamedSharding(mesh, PartitionSpec())
  names = [name for name in Batch._fields if with_advantages or name != "advantages"]
  return Batch(**{name: rows if name in PER_TOKEN_FIELDS else everywhere for name in names})


def activation_constraint(mesh: Mesh | None) -> Callable[[jax.Array], jax.Array] | None:
  """Pins activations [B, T, D] to the rows' devices, whole in T and D; None without a mesh.

  With it the compiler gathers weights layer by layer (FSDP); left alone it may split the model width of activations
  instead.
  """
  if mesh is None:
    return None
  rows = NamedSharding(mesh, PartitionSpec(LOGICAL_TO_MESH["batch"], None, None))
  return lambda x: jax.lax.with_sharding_constraint(x, rows)


def by_rows(mesh: Mesh | None, f: Callable[..., Any]) -> Callable[..., Any]:
  """f(params, *rows) run on each of the rows' devices by itself, with `params` whole there; f where there is but one.

  For loops over pieces of rows: left to the compiler, parameters that are split over "fsdp" would be gathered, and
  their gradients summed over the devices, in every turn of the loop: with this once, before and after it. What is split
  over "tensor" stays so. The first axes of rows and results must be multiples of `num_batch_shards`.
  """
  if num_batch_shards(mesh) == 1:
    return f
  axes = LOGICAL_TO_MESH["batch"]
  rows = PartitionSpec(axes)

  def local(params: Any, *arrays: jax.Array) -> Any:
    # Before the loop, so that the sum of the gradients comes after it.
    return f(jax.tree.map(lambda x: jax.lax.pcast(x, axes, to="varying"), params), *arrays)

  def mapped(params: Any, *arrays: jax.Array) -> Any:
    in_specs = (PartitionSpec(), *(rows for _ in arrays))
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=rows, axis_names=set(axes))(params, *arrays)

  return mapped


def split_devices(
  devices: Sequence[jax.Device], *, trainer: int, searchers: int, per_searcher: int, share: bool
) -> tuple[list[jax.Device], list[list[jax.Device]]]:
  """Devices of the trainer and of each searcher.

  Args:
    devices: all that may be used, in the order of `jax.devices()`.
    trainer: devices of the trainer; -1: all that the searchers leave (with `share`: all).
    searchers: number of searchers, >= 1.
    per_searcher: devices of each searcher, >= 1.
    share: whether a device may serve several parts. Searchers then take the trainer's devices only when there are no
      others left; with one device everything shares it.
  Returns: the trainer's devices and one list per searcher. Without `share` all are disjoint.
  Raises: ValueError if a size is below 1 or the parts need more devices than exist.
  """
  for name, value in (("searchers", searchers), ("per_searcher", per_searcher)):
    if value < 1:
      raise ValueError(f"{name}={value} must be at least 1.")
  if trainer < 1 and trainer != -1:
    raise ValueError(f"trainer={trainer} must be at least 1 device, or -1 for all that the searchers leave.")
  devices = list(devices)
  for_searchers = searchers * per_searcher
  if share:
    for_trainer = len(devices) if trainer == -1 else trainer
    for name, value in (("trainer", for_trainer), ("per_searcher", per_searcher)):
      if value > len(devices):
        raise ValueError(f"{name}={value} needs more devices than exist: found {len(devices)}; lower {name}.")
    order = devices[for_trainer:] + devices[:for_trainer]
    take = lambda i: [order[(i * per_searcher + j) % len(order)] for j in range(per_searcher)]
    return devices[:for_trainer], [take(i) for i in range(searchers)]
  needed = for_searchers + max(trainer, 1)
  if needed > len(devices):
    least = "at least 1" if trainer == -1 else str(trainer)
    raise ValueError(
      f"more exclusive devices than exist: {least} for the trainer and {searchers} searchers x {per_searcher} need "
      f"{needed}, found {len(devices)}; lower trainer, searchers or per_searcher, "
      "or let the parts share devices with share=True."
    )
  for_trainer = len(devices) - for_searchers if trainer == -1 else trainer
  first = [for_trainer + i * per_searcher for i in range(searchers)]
  return devices[:for_trainer], [devices[start : start + per_searcher] for start in first]


def devices_of_run(
  devices: Sequence[jax.Device], *, trainer: int, searchers: int, per_searcher: int, share: bool, num_processes: int = 1
) -> tuple[list[jax.Device], list[list[jax.Device]]]:
  """`split_devices`, also for a trainer over several processes: it has the same devices of each, and searchers are on
  those of process 0. `trainer` counts them all; searchers 0: they are elsewhere."""
  own = [device for device in devices if num_processes == 1 or device.process_index == 0]
  for_trainer, for_searchers = own[: trainer // num_processes], []
  if searchers:
    for_trainer, for_searchers = split_devices(
      own, trainer=trainer // num_processes, searchers=searchers, per_searcher=per_searcher, share=share)
  if num_processes > 1:
    places = {own.index(device) for device in for_trainer}
    seen: dict[int, int] = {}
    for_trainer = []
    for device in devices:
      seen[device.process_index] = seen.get(device.process_index, -1) + 1
      if seen[device.process_index] in places:
        for_trainer.append(device)
  return for_trainer, for_searchers


def dispatched(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
  """f of a tree, jitted, so that it returns at once on XLA's CPU backend too: there a program without arithmetic counts
  as cheap and is run by the caller, which for a model's worth of copies would be the trainer's time. So it has a
  product beside it."""
  program = jax.jit(lambda tree, few: (f(tree), few @ few))
  return lambda tree: program(tree, np.eye(32, dtype=np.float32))[0]


def put_alike(tree: Any, shardings: Any) -> Any:
  """`device_put`, also onto a mesh of several processes that all have the same arrays."""

  def put(leaf: Any, where: NamedSharding) -> jax.Array:
    if where.is_fully_addressable or (isinstance(leaf, jax.Array) and not leaf.is_fully_addressable):
      return jax.device_put(leaf, where)
    host = np.asarray(leaf)
    return jax.make_array_from_callback(host.shape, where, lambda index: host[index])

  return jax.tree.map(put, tree, shardings)


def path_name(path: tuple[Any, ...]) -> str:
  """"/"-joined names of a pytree path: dict keys, fields and indices alike."""
  return jax.tree_util.keystr(path, simple=True, separator="/")


def _mesh_axis(name: str, axis: str | None, size: int, mesh: Mesh) -> str | tuple[str, ...] | None:
  mesh_axis = LOGICAL_TO_MESH[axis]
  if mesh_axis is None:
    return None
  shards = _axis_size(mesh_axis, mesh)
  if size % shards == 0:
    return mesh_axis
  if axis in REPLICATED_IF_UNEVEN:
    return None
  raise ValueError(
    f"parameter {name!r}: its {axis!r} dimension of {size} does not divide over {mesh_axis}={shards} devices; "
    f"choose a size of the mesh axis {mesh_axis!r} that divides {size}."
  )


def _axis_size(mesh_axis: str | tuple[str, ...], mesh: Any) -> int:
  names = (mesh_axis,) if isinstance(mesh_axis, str) else mesh_axis
  return math.prod(mesh.shape[name] for name in names)

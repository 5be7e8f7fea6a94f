"""A parameter tree out of tensors on disk: matched by name and shape first, then read and placed one leaf at a time.

Each leaf is assembled layer by layer in host memory and placed before the next is begun, so the host needs room for
about one leaf beside the model. It is strict: nothing is read before every name and shape fits, so what fails is an
error and never a model with some of its weights.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors

from tba_jax.checkpoints.stored import DTYPES, StoredTensor
from tba_jax.models.hf_names import HfTensor

Put = Callable[[tuple[str, ...], np.ndarray], jax.Array]
OnBytes = Callable[[int, int], None]  # (done_bytes, of_bytes)

_FINITE_CHUNK = 1 << 24  # elements checked at a time, so that the check needs little memory beside the tensor


def no_progress(done_bytes: int, of_bytes: int) -> None:
  """Tells nobody."""


def some(names: Sequence[str]) -> str:
  """The first of many names, for an error message."""
  return ", ".join(names[:3])


def check_num_layers(num_layers: int, tensors: Mapping[str, StoredTensor], source: str) -> None:
  """Before a table of all layers is made: config.json may say anything. Raises: ValueError."""
  if num_layers > len(tensors):
    raise ValueError(
      f"{source}: config.json says that there are {num_layers} layers, but the checkpoint has {len(tensors)} tensors "
      "in all; config.json is of another model, or damaged."
    )


def by_table_name(
  tensors: Mapping[str, StoredTensor], table_name: Callable[[str], str], entries: Sequence[HfTensor], source: str
) -> dict[str, StoredTensor]:
  """The tensors under the names that `entries` have for them; what is not in `entries` keeps its own name.

  Args:
    table_name: from a checkpoint's spelling to the table's; some checkpoints leave out a prefix.
  Raises: ValueError if two tensors are the same one of the model.
  """
  known = {entry.hf_name for entry in entries}
  renamed: dict[str, str] = {}
  for name in tensors:
    # What the table does not know keeps its name, so that the error about it names what is in the file.
    new = table_name(name)
    new = new if new in known else name
    if new in renamed:
      raise ValueError(f"{source}: {renamed[new]} and {name} are the same tensor of the model; remove one.")
    renamed[new] = name
  return {new: tensors[name] for new, name in renamed.items()}


def check_match(
  entries: Sequence[HfTensor], tensors: Mapping[str, StoredTensor], *, skipped: Callable[[str], bool], hint: str,
  source: str,
) -> None:
  """Makes sure that the tensors are exactly those of `entries`, in the shapes that config.json implies.

  Args:
    skipped: whether a tensor that is not in `entries` may be there all the same.
    hint: what in config.json decides which tensors there are, for the message about missing ones.
  Raises: ValueError naming what is missing, extra, misshapen or no float.
  """
  wanted = {entry.hf_name: entry.transform.hf_shape for entry in entries}
  missing = sorted(set(wanted) - set(tensors))
  if missing:
    raise ValueError(
      f"{source}: {len(missing)} tensors that config.json implies are missing, among them {some(missing)}; the "
      f"checkpoint is incomplete, or config.json (for example {hint}) is of another model."
    )
  extra = sorted(name for name in set(tensors) - set(wanted) if not skipped(name))
  if extra:
    raise ValueError(
      f"{source}: {len(extra)} tensors are not part of the model that config.json describes, among them "
      f"{some(extra)}; config.json is of another model, or the checkpoint has parts that are not supported."
    )
  for name, shape in wanted.items():
    if tensors[name].shape != shape:
      raise ValueError(f"{source}: tensor {name} has shape {tensors[name].shape}, but config.json implies {shape}.")
    if tensors[name].dtype not in DTYPES:
      raise ValueError(
        f"{source}: tensor {name} is of type {tensors[name].dtype}; supported are {', '.join(DTYPES)}. Quantised "
        "checkpoints must be converted to one of these first."
      )


def load_tree(
  entries: Sequence[HfTensor], tensors: Mapping[str, StoredTensor], *, num_layers: int, dtype: jax.typing.DTypeLike,
  put: Put | None, source: str, shardings: Any = None, on_progress: OnBytes = no_progress,
) -> dict[str, Any]:
  """Reads the leaves that `entries` name, as a nested dict.

  Args:
    entries, tensors: as `check_match` has passed them.
    dtype: of all leaves.
    put: `put(tree_path, array)` places one finished leaf; None for `jnp.asarray`.
    shardings: instead of `put`: a tree of shardings of the same structure. Each device's part of a leaf is assembled by
      itself, and only the parts of this process.
    on_progress: told of every leaf (done_bytes, of_bytes).
  Raises: ValueError for a tensor that cannot be read or is not finite in `dtype`.
  """
  leaves: dict[tuple[str, ...], list[HfTensor]] = collections.defaultdict(list)
  for entry in entries:
    leaves[entry.path].append(entry)
  shapes = {path: (num_layers,) * (parts[0].layer is not None) + tuple(parts[0].transform.tree_shape)
            for path, parts in leaves.items()}
  sizes = {path: math.prod(shape) * np.dtype(dtype).itemsize for path, shape in shapes.items()}
  params: dict[str, Any] = {}
  done_bytes = 0
  for path, parts in leaves.items():
    shape = shapes[path]
    if shardings is None:
      (array,) = _assemble(parts, tensors, [tuple(slice(0, n) for n in shape)], np.dtype(dtype), source)
      leaf = jnp.asarray(array) if put is None else put(path, array)
    else:
      sharding = shardings
      for key in path:
        sharding = sharding[key]
      leaf = _load_sharded(parts, tensors, shape, sharding, np.dtype(dtype), source)
    node = params
    for key in path[:-1]:
      node = node.setdefault(key, {})
    node[path[-1]] = leaf
    done_bytes += sizes[path]
    on_progress(done_bytes, sum(sizes.values()))
  return params


def _load_sharded(
  entries: Sequence[HfTensor], tensors: Mapping[str, StoredTensor], shape: tuple[int, ...], sharding: Any,
  dtype: np.dtype, source: str,
) -> jax.Array:
  ordered = sorted({_box(index, shape) for index in sharding.addressable_devices_indices_map(shape).values()})
  arrays = _assemble(entries, tensors, [tuple(slice(*bounds) for bounds in box) for box in ordered], dtype, source)
  by_box = dict(zip(ordered, arrays, strict=True))
  return jax.make_array_from_callback(shape, sharding, lambda index: by_box[_box(index, shape)])


def _box(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
  return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _assemble(
  entries: Sequence[HfTensor], tensors: Mapping[str, StoredTensor], boxes: Sequence[tuple[slice, ...]],
  dtype: np.dtype, source: str,
) -> list[np.ndarray]:
  """The given boxes of one leaf; every tensor is read once, whatever the number of boxes."""
  arrays = [np.empty([part.stop - part.start for part in box], dtype) for box in boxes]
  for entry in entries:
    targets = [
      (box, array)
      for box, array in zip(boxes, arrays, strict=True)
      if entry.layer is None or box[0].start <= entry.layer < box[0].stop
    ]
    if not targets:
      continue
    try:
      with np.errstate(over="ignore"):  # an overflow is an error below, with the tensor's name
        tensor = tensors[entry.hf_name].read().astype(dtype, copy=False)
    except safetensors.SafetensorError as error:
      raise ValueError(
        f"{source}: tensor {entry.hf_name} cannot be read ({error}); copy or download the checkpoint again."
      ) from error
    if not _all_finite(tensor):
      raise ValueError(
        f"{source}: tensor {entry.hf_name} holds NaN or infinity as {dtype}; the checkpoint is damaged, or its numbers "
        "do not fit this dtype."
      )
    leaf = entry.transform.to_tree(tensor)
    for box, array in targets:
      if entry.layer is None:
        array[...] = leaf[box]
      else:
        array[entry.layer - box[0].start] = leaf[box[1:]]
  return arrays


def _all_finite(array: np.ndarray) -> bool:
  flat = array.reshape(-1)
  return all(bool(np.isfinite(flat[i : i + _FINITE_CHUNK]).all()) for i in range(0, flat.size, _FINITE_CHUNK))

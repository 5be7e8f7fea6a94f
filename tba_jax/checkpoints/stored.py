"""Tensors on disk under their Hugging Face names: listed and checked first, read one at a time later.

Opens the safetensors files of a model folder. Pickled weights are refused: unpickling runs whatever code the file
holds.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any

import ml_dtypes  # noqa: F401  (lets numpy know bfloat16, which safetensors then returns)
import numpy as np
import safetensors

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = ("F32", "F16", "BF16")


@dataclasses.dataclass(frozen=True)
class StoredTensor:
  """One tensor of a checkpoint. `read()` brings it to the host; nothing is kept between reads.

  `dtype` is by safetensors' names. A parameter's must be one of DTYPES; buffers that are skipped may have any.
  """

  shape: tuple[int, ...]
  read: Callable[[], np.ndarray]
  dtype: str = "F32"


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """The object in a JSON file. Raises: ValueError if it is not valid JSON or not an object."""
  try:
    found = json.loads(path.read_text(encoding="utf-8"))
  except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
    raise ValueError(f"{path} is not valid JSON ({error}); copy or download it again.") from error
  if not isinstance(found, dict):
    raise ValueError(f"{path} must hold a JSON object, found {type(found).__name__}.")
  return found


def open_safetensors(folder: pathlib.Path) -> dict[str, StoredTensor]:
  """Lists the tensors of model.safetensors, or of the shards that model.safetensors.index.json names.

  Raises: ValueError if there are no such files, only pickled ones, files that are cut or damaged, a tensor in two
    shards, or an index that disagrees with its shards.
  """
  single, index = folder / _SINGLE, folder / _INDEX
  if single.is_file() and index.is_file():
    raise ValueError(
      f"{folder} holds both {_SINGLE} and {_INDEX}, which may be two different models; remove one of them."
    )
  if single.is_file():
    return _open_file(single)
  if not index.is_file():
    raise ValueError(_no_weights(folder))
  found = read_json(index)
  weight_map = found["weight_map"] if "weight_map" in found else None
  if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
    raise ValueError(f"{index} has no weight_map of tensors to files; copy or download it again.")
  tensors: dict[str, StoredTensor] = {}
  for name in sorted(set(weight_map.values())):
    if pathlib.PurePath(name).name != name or not (folder / name).is_file():
      raise ValueError(f"{index} names {name!r}, which is not a file of {folder}; copy or download the missing shard.")
    shard = _open_file(folder / name)
    doubled = sorted(set(shard) & set(tensors))
    if doubled:
      raise ValueError(
        f"{folder}: tensor {doubled[0]} is in two shards ({len(doubled)} such); this is not one checkpoint."
      )
    tensors |= shard
    listed = {tensor for tensor, file in weight_map.items() if file == name}
    if listed != set(shard):
      wrong = sorted(listed ^ set(shard))
      raise ValueError(
        f"{index} and {name} disagree about {len(wrong)} tensors, the first of which is {wrong[0]}; the folder mixes "
        "two checkpoints or is incomplete."
      )
  return tensors


def _no_weights(folder: pathlib.Path) -> str:
  pickled = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for p in folder.glob(pattern))
  if pickled:
    return (
      f"{folder} holds only pickled weights ({pickled[0]}). They are refused: a pickle runs code when it is loaded. "
      "Convert it once "
      "where you trust it, with transformers' from_pretrained and save_pretrained, which writes safetensors."
    )
  return f"{folder} holds no weights: neither {_SINGLE} nor {_INDEX} is there."


def _open_file(path: pathlib.Path) -> dict[str, StoredTensor]:
  tensors = {}
  try:
    with safetensors.safe_open(path, framework="np") as file:
      for name in file.keys():
        part = file.get_slice(name)
        tensors[name] = StoredTensor(tuple(part.get_shape()), _reader(path, name), part.get_dtype())
  except safetensors.SafetensorError as error:
    raise ValueError(f"{path} is cut or damaged ({error}); copy or download it again.") from error
  return tensors


def _reader(path: pathlib.Path, name: str) -> Callable[[], np.ndarray]:
  def read() -> np.ndarray:
    # Opened anew each time: pages of an open mapping would stay counted against this process until the whole model is
    # read.
    with safetensors.safe_open(path, framework="np") as file:
      return file.get_tensor(name)

  return read

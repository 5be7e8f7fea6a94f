"""Models in and out, as the folders that transformers reads and writes: decoders, and reward models made of them.

A checkpoint that does not fit its config.json exactly is an error, never a model with some of its weights. Nothing is
unpickled and no code from a checkpoint runs.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import pathlib
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import safetensors.numpy

from tba_jax.checkpoints.gguf import read_gguf
from tba_jax.checkpoints.locate import locate
from tba_jax.checkpoints.stored import StoredTensor, open_safetensors, read_json
from tba_jax.checkpoints.streaming import (
  OnBytes, Put, by_table_name, check_match, check_num_layers, load_tree, no_progress, some)
from tba_jax.models import encoder, hf_names
from tba_jax.models.transformer import abstract_params
from tba_jax.models.variants import HARMLESS, ModelConfig, from_huggingface, pad_id, to_huggingface
from tba_jax.tokenizer import Tokenizer, load_tokenizer


def load_model(
  path: str | pathlib.Path,
  *,
  dtype: jax.typing.DTypeLike,
  put: Put | None = None,
  shardings: Any = None,
  extra_stop_ids: Sequence[int] = (),
  on_progress: OnBytes = no_progress,
) -> tuple[ModelConfig, dict[str, Any], Tokenizer]:
  """Loads config, parameters and tokenizer of a decoder.

  Args:
    path: a folder, a .gguf file, "package:NAME" or a hub name, as `locate` takes it.
    dtype: of all parameters.
    put: `put(tree_path, array)` places one finished leaf. Default: `jnp.asarray`.
    shardings: instead of `put`: a tree of shardings like the parameters. Each device's part of a leaf is assembled by
      itself, and only the parts of this process.
    extra_stop_ids: ids that end a response beside those that the model names.
    on_progress: told of every leaf (done_bytes, of_bytes).
  Returns: the config (with `vocab_size` lowered to the ids that the tokenizer has), parameters, tokenizer.
  Raises: ValueError naming the file and what is wrong with it.
  """
  if put is not None and shardings is not None:
    raise ValueError("give put or shardings, not both.")
  path = locate(path)
  source = str(path)
  if path.is_dir():
    cfg = _read_config(read_json(path / "config.json"), source)
    tokenizer = load_tokenizer(path, extra_stop_ids)
    tensors: Mapping[str, StoredTensor] = open_safetensors(path)
  else:
    model = read_gguf(path)
    cfg, tensors = _read_config(model.config, source), model.tensors
    tokenizer = dataclasses.replace(
      model.tokenizer, stop_ids=tuple(sorted({*model.tokenizer.stop_ids, *extra_stop_ids}))
    )
  cfg, tokenizer = _fit_vocabulary(cfg, tokenizer, source)
  check_num_layers(cfg.num_layers, tensors, source)
  entries = hf_names.hf_to_tree(cfg)
  tensors = by_table_name(tensors, lambda name: hf_names.table_name(cfg, name), entries, source)
  tied = {hf_names.TIED_NAMES[cfg.family][0]} if cfg.tie_embeddings else set()
  check_match(
    entries, tensors, skipped=lambda name: name in tied or hf_names.is_extra(cfg, name),
    hint=f"tie_word_embeddings={cfg.tie_embeddings}", source=source,
  )
  if cfg.tie_embeddings:
    _check_tied(cfg, tensors, source)
  params = load_tree(
    entries, tensors, num_layers=cfg.num_layers, dtype=dtype, put=put, shardings=shardings, source=source,
    on_progress=on_progress,
  )
  return cfg, params, tokenizer


def load_reward_model(
  path: str | pathlib.Path, *, dtype: jax.typing.DTypeLike, put: Put | None = None
) -> tuple[ModelConfig, dict[str, Any], Tokenizer]:
  """Loads a decoder with a scalar head instead of one over the vocabulary, for `heads.scalar_scores`.

  Both public layouts are read. transformers' `*ForSequenceClassification`, with `score.weight`, reads its score at the
  last token that is not config.json's pad_token_id. Reward models of summarisation work (arXiv:2403.17031), with
  `scalar_head`, keep the decoder's config under `base_config` and subtract `bias` from the score; they pad with the
  tokenizer's own padding, and a head over the vocabulary beside the scalar one is skipped.

  Args: as `load_model`; .gguf files hold no reward models. The score head is float32 whatever `dtype` is.
  Returns: the config with `score_pad_id`, parameters with "score" and without "lm_head", tokenizer.
  Raises: ValueError naming the file and what is wrong with it.
  """
  path = locate(path)
  source = str(path)
  if not path.is_dir():
    raise ValueError(f"{source}: a .gguf file holds no reward model; give a folder with config.json and safetensors.")
  config, shift = read_json(path / "config.json"), 0.0
  if "base_config" in config:
    config, shift = _summarisation_config(config, source)
  cfg, tokenizer = _fit_vocabulary(_read_config(config, source), load_tokenizer(path, generates=False), source)
  stored = open_safetensors(path)
  check_num_layers(cfg.num_layers, stored, source)
  body = [entry for entry in hf_names.hf_to_tree(cfg) if entry.path[0] != "lm_head"]
  head = hf_names.scalar_head(cfg, stored, source=source)
  tensors = by_table_name(stored, lambda name: hf_names.table_name(cfg, name), [*body, *head], source)
  is_classifier = head[0].hf_name == hf_names.SCALAR_HEADS[0][0]
  lm_head = set() if is_classifier else {hf_names.TIED_NAMES[cfg.family][0]}
  check_match(
    [*body, *head], tensors,
    skipped=lambda name: hf_names.table_name(cfg, name) in lm_head or hf_names.is_extra(cfg, name),
    hint=f"num_hidden_layers={cfg.num_layers}", source=source,
  )
  if shift:
    tensors = _shifted(tensors, head[-1].hf_name, shift, source)
  shared = dict(num_layers=cfg.num_layers, put=put, source=source)
  params = load_tree(body, tensors, dtype=dtype, **shared) | load_tree(head, tensors, dtype=np.float32, **shared)
  skipped_id = pad_id(config) if is_classifier else tokenizer.hf.pad_token_id
  return dataclasses.replace(cfg, score_pad_id=skipped_id), params, tokenizer


# Beside the decoder's own config.
_SUMMARISATION_FIELDS = {"base_config", "base_model", "bias", "hidden_size"}


def _summarisation_config(config: Mapping[str, Any], source: str) -> tuple[dict[str, Any], float]:
  """The decoder's config and what is subtracted from every score."""
  unknown = sorted(set(config) - _SUMMARISATION_FIELDS - HARMLESS)
  base = config["base_config"]
  if unknown or not isinstance(base, dict):
    raise ValueError(
      f"{source}: config.json has a base_config, as reward models of summarisation work do; its other fields must be "
      f"among {', '.join(sorted(_SUMMARISATION_FIELDS))}, found {', '.join(unknown) or type(base).__name__}."
    )
  width = base["hidden_size"] if "hidden_size" in base else None
  if "hidden_size" in config and width is not None and config["hidden_size"] != width:
    raise ValueError(f"{source}: config.json has hidden_size={config['hidden_size']}, but its base_config {width}.")
  shift = config["bias"] if "bias" in config else 0.0
  if type(shift) not in (int, float) or not math.isfinite(shift):
    raise ValueError(f"{source}: config.json has bias={shift!r}; it must be a finite number.")
  return base, float(shift)


def _shifted(
  tensors: Mapping[str, StoredTensor], name: str, shift: float, source: str
) -> dict[str, StoredTensor]:
  if not name.endswith(".bias"):
    raise ValueError(f"{source}: config.json has bias={shift}, but the checkpoint has no scalar_head.bias.")
  stored = tensors[name]
  return {**tensors, name: StoredTensor(stored.shape, lambda: stored.read().astype(np.float32) - np.float32(shift))}


def _read_config(config: Mapping[str, Any], source: str) -> ModelConfig:
  if "model_type" in config and config["model_type"] in encoder.FAMILIES:
    raise ValueError(f"{source}: model_type={config['model_type']!r} is an encoder, no decoder; load_encoder reads it.")
  try:
    return from_huggingface(config)
  except ValueError as error:
    raise ValueError(f"{source}: {error}") from error


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


def _check_tied(cfg: ModelConfig, tensors: Mapping[str, StoredTensor], source: str) -> None:
  """A tied head that is stored as well must be the embedding, or one of the two would be lost in silence."""
  head, embedding = hf_names.TIED_NAMES[cfg.family]
  if head in tensors and tensors[head].shape != tensors[embedding].shape:
    raise ValueError(
      f"{source}: config.json says tie_word_embeddings=true, so {head} must have the shape "
      f"{tensors[embedding].shape} of {embedding}, found {tensors[head].shape}; the checkpoint is damaged, or of "
      "another model."
    )
  if head in tensors and not np.array_equal(tensors[head].read(), tensors[embedding].read()):
    raise ValueError(
      f"{source}: config.json says tie_word_embeddings=true, but {head} and {embedding} differ; set it to false if the "
      "head is meant to be its own."
    )


def save_model(
  folder: str | pathlib.Path,
  cfg: ModelConfig,
  params: Mapping[str, Any],
  tokenizer: Tokenizer,
  *,
  shard_bytes: int = 4 << 30,
  on_progress: OnBytes = no_progress,
) -> None:
  """Writes a folder that transformers and `load_model` read: config, generation config, tokenizer, safetensors.

  Everything is written to a temporary folder beside it, which is renamed at the end: a crash leaves no half-written
  model behind. The parameters keep their dtype; the host holds one file's worth of them at a time.

  Args:
    folder: must not exist yet, or be empty.
    params: all addressable from this process, with layers stacked; f32, f16 or bf16.
    shard_bytes: largest size of one safetensors file (a single tensor may exceed it).
    on_progress: told of every tensor (done_bytes, of_bytes).
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
    _write_safetensors(temporary, cfg, params, shard_bytes, on_progress)
    _give_ordinary_modes(temporary)
    if folder.exists():
      folder.rmdir()
    temporary.rename(folder)
  finally:
    shutil.rmtree(temporary, ignore_errors=True)  # after the rename there is nothing left to remove


def _give_ordinary_modes(folder: pathlib.Path) -> None:
  """What the umask gives: mkdtemp and safetensors make what they write private."""
  mode = (folder / "config.json").stat().st_mode & 0o777  # of a file that was opened in the ordinary way
  for file in folder.iterdir():
    file.chmod(mode)
  folder.chmod(mode | (mode & 0o444) >> 2)


def _check_params(cfg: ModelConfig, params: Mapping[str, Any]) -> None:
  expected = {jax.tree_util.keystr(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(abstract_params(cfg))}
  found = {jax.tree_util.keystr(path): tuple(leaf.shape) for path, leaf in jax.tree.leaves_with_path(dict(params))}
  wrong = sorted(
    name for name in {*expected, *found} if name not in expected or name not in found or expected[name] != found[name]
  )
  if wrong:
    raise ValueError(
      f"the parameters are not those of this config: {len(wrong)} leaves are missing, extra or misshapen, among them "
      f"{some(wrong)}."
    )


def _write_safetensors(
  folder: pathlib.Path, cfg: ModelConfig, params: Mapping[str, Any], shard_bytes: int,
  on_progress: OnBytes,
) -> None:
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
  weight_map, done_bytes = {}, 0
  for i, names in enumerate(shards, start=1):
    file = "model.safetensors" if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
    # The metadata tells transformers that the layout is its own.
    tensors = {}
    for name in names:
      tensors[name] = _tensor(params, by_name[name])
      done_bytes += tensors[name].nbytes
      on_progress(done_bytes, total_bytes)
    safetensors.numpy.save_file(tensors, folder / file, metadata={"format": "pt"})
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

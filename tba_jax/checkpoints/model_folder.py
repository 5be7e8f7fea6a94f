"""`<workdir>/model/`: what a checkpoint is of, so that it can be read without the folder that the model came from."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from typing import Any

from tba_jax.models.lora import LoraSettings
from tba_jax.models.variants import ModelConfig, from_huggingface, to_huggingface
from tba_jax.tokenizer import Tokenizer, load_tokenizer


def save_model_folder(
  folder: pathlib.Path, cfg: ModelConfig, tokenizer: Tokenizer, lora: LoraSettings | None = None
) -> None:
  """Writes config.json, the tokenizer, and lora.json if the checkpoints hold adapters."""
  folder.mkdir(parents=True, exist_ok=True)
  tokenizer.save(folder)
  save_json_atomic(folder / "config.json", to_huggingface(cfg))
  if lora is not None:
    save_json_atomic(folder / "lora.json", dataclasses.asdict(lora))


def read_model_folder(folder: pathlib.Path) -> tuple[ModelConfig, Tokenizer]:
  """The model and the tokenizer that `save_model_folder` wrote."""
  cfg, tokenizer = from_huggingface(json.loads((folder / "config.json").read_text())), load_tokenizer(folder)
  return dataclasses.replace(cfg, vocab_size=min(cfg.num_embeddings, tokenizer.vocab_size)), tokenizer


def read_lora(folder: pathlib.Path) -> LoraSettings | None:
  """Settings of the adapters that the checkpoints hold; None if they hold the whole model."""
  path = folder / "lora.json"
  return LoraSettings(**json.loads(path.read_text())) if path.is_file() else None


def save_json_atomic(path: pathlib.Path, value: Any) -> None:
  """Writes JSON so that a reader sees the old file or the new one, whole."""
  temporary = path.with_name(path.name + ".tmp")
  with open(temporary, "w") as f:
    json.dump(value, f, indent=2, sort_keys=True)
    f.flush()
    os.fsync(f.fileno())
  os.replace(temporary, path)

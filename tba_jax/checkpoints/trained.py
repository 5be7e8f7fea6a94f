"""The model of a run's checkpoint, on the host: adapters merged into the model that they were trained on."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from tba_jax.checkpoints.model_folder import read_lora, read_model_folder
from tba_jax.checkpoints.run_state import load_initial, load_params
from tba_jax.models import lora as lora_lib
from tba_jax.models import transformer
from tba_jax.models.lora import LoraSettings
from tba_jax.models.variants import ModelConfig
from tba_jax.tokenizer import Tokenizer


def load_trained(workdir: pathlib.Path, *, step: int | None = None) -> tuple[int, ModelConfig, Any, Tokenizer]:
  """Step, config, float32 parameters and tokenizer of a checkpoint (default: the newest), also while the run goes on.

  Raises: ValueError if the workdir holds no such checkpoint.
  """
  cfg, tokenizer, lora = _read_model(workdir)
  whole = _on_host(transformer.abstract_params(cfg, jnp.float32))
  trained = whole if lora is None else _on_host(lora_lib.abstract_adapters(cfg, settings=lora))
  step, params = load_params(workdir, trained, step=step)
  if lora is not None:
    params = lora_lib.merge(load_initial(workdir, whole), params, scale=lora.scale)
  return step, cfg, params, tokenizer


def load_version_0(workdir: pathlib.Path) -> tuple[ModelConfig, Any]:
  """Config and float32 parameters that a run began with: its reference, as long as that does not move.

  Raises: ValueError as `load_trained`.
  """
  cfg, _, _ = _read_model(workdir)
  return cfg, load_initial(workdir, _on_host(transformer.abstract_params(cfg, jnp.float32)))


def _read_model(workdir: pathlib.Path) -> tuple[ModelConfig, Tokenizer, LoraSettings | None]:
  if not (workdir / "model" / "config.json").is_file():
    raise ValueError(f"{workdir} is not the workdir of a run: it has no model/config.json; give the --workdir of one.")
  return *read_model_folder(workdir / "model"), read_lora(workdir / "model")


def _on_host(tree: Any) -> Any:
  """With shardings in host memory, whatever the trainer ran on: no accelerator is needed to read weights."""
  host = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
  return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=host), tree)

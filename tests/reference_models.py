"""Tiny random models of transformers, as the reference that the decoders are held to. Not a test module."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from tba_jax.models import hf_names
from tba_jax.models import transformer
from tba_jax.models.variants import ModelConfig, from_huggingface


def reference_model(model_type: str, *, seed: int = 0, **fields: Any) -> torch.nn.Module:
  """A model of transformers with weights large enough that every part of the maths shows in its log-probabilities."""
  torch.manual_seed(seed)
  config = transformers.AutoConfig.for_model(model_type, **fields)
  model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
  with torch.no_grad():
    for name, parameter in model.named_parameters():
      spread = 0.2 if parameter.ndim > 1 else 0.1
      base = 1.0 if "norm" in name and parameter.ndim == 1 and "gemma" not in model_type and "bias" not in name else 0.0
      parameter.copy_(base + spread * torch.randn_like(parameter))
  return model


def converted(model: torch.nn.Module) -> tuple[ModelConfig, dict[str, Any]]:
  """The same model here: config.json and tensors, by our own reading of both."""
  cfg = from_huggingface({**model.config.to_dict(), "architectures": [type(model).__name__]})
  return cfg, tree_from_tensors(cfg, {name: tensor.numpy() for name, tensor in model.state_dict().items()})


def tree_from_tensors(cfg: ModelConfig, tensors: dict[str, np.ndarray]) -> dict[str, Any]:
  tree = jax.tree.map(lambda leaf: np.full(leaf.shape, np.nan, leaf.dtype), transformer.abstract_params(cfg))
  for entry in hf_names.hf_to_tree(cfg):
    *folders, leaf = entry.path
    node = tree
    for folder in folders:
      node = node[folder]
    node[leaf][... if entry.layer is None else entry.layer] = entry.transform.to_tree(tensors[entry.hf_name])
  return jax.tree.map(jnp.asarray, tree)


def reference_logits(model: torch.nn.Module, tokens: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
  """float32 [B, T, V] of rows of tokens; `mask` [B, T] is 0 at padding, and positions then count real tokens."""
  tokens = torch.tensor(np.asarray(tokens, np.int64))
  arguments = {}
  if mask is not None:
    mask = torch.tensor(np.asarray(mask, np.int64))
    arguments = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
  with torch.no_grad():
    return model(input_ids=tokens, **arguments).logits.float().numpy()

"""Tiny random models of transformers, as the reference that the decoders are held to. Not a test module."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from parity import require
from tba_jax.models import hf_names
from tba_jax.models import transformer
from tba_jax.models.variants import ModelConfig, from_huggingface

torch = require("torch")
transformers = require("transformers")

_SMALL = dict(
  hidden_size=48, intermediate_size=40, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
  vocab_size=131
)
_SIZES = {
  name: _SMALL[name] for name in (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"
  )
}
# Without a pad_token_id, for torch gives the row of that id no gradient.
_GEMMA = dict(_SMALL, head_dim=10, query_pre_attn_scalar=7, num_hidden_layers=4, sliding_window=8, pad_token_id=None)

# Name of a case -> model_type and fields of its config.json. Windows are shorter than the sequences they meet, sizes
# are odd where they may be, so that a wrong axis, a missed option or a default read for a value changes the numbers.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
  "llama": ("llama", dict(_SMALL, rope_theta=50000.0)),
  "llama-biases": ("llama",
                                 dict(_SMALL, num_attention_heads=3, num_key_value_heads=1, head_dim=10,
                                 attention_bias=True, mlp_bias=True,
                                 tie_word_embeddings=True, rms_norm_eps=1e-3)),
  "llama-one-group": ("llama", dict(_SMALL, num_key_value_heads=6, hidden_act="gelu")),
  "llama-llama3": ("llama", dict(_SMALL, rope_scaling=dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32))),
  "llama-linear": ("llama", dict(_SMALL, rope_scaling=dict(rope_type="linear", factor=3.0))),
  "llama-yarn": ("llama", dict(_SMALL, rope_scaling=dict(
    rope_type="yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=8.0, beta_slow=0.5))),
  "mistral": ("mistral", dict(_SMALL, sliding_window=8, head_dim=10)),
  "mistral-unlimited": ("mistral", dict(_SMALL, sliding_window=None)),
  "qwen2": ("qwen2", dict(_SMALL, tie_word_embeddings=True, sliding_window=8)),
  "qwen2-window": ("qwen2", dict(_SMALL, use_sliding_window=True, sliding_window=8, max_window_layers=1)),
  "qwen3": ("qwen3", dict(_SMALL, head_dim=10, rope_theta=1e6)),
  "gemma": ("gemma", dict(_SMALL, head_dim=10)),
  "gemma2": ("gemma2", dict(_GEMMA, attn_logit_softcapping=1.5, final_logit_softcapping=4.0)),
  "gemma2-uncapped": (
    "gemma2", dict(_GEMMA, attn_logit_softcapping=None, final_logit_softcapping=None, tie_word_embeddings=False)
  ),
  "gemma3": ("gemma3_text", dict(_GEMMA, rope_theta=50000.0, rope_local_base_freq=20.0, sliding_window_pattern=3)),
  "gemma3-linear": ("gemma3_text", dict(_GEMMA, rope_scaling=dict(rope_type="linear", factor=8.0), layer_types=[
    "full_attention", "sliding_attention", "sliding_attention", "full_attention"], final_logit_softcapping=4.0)),
  "gpt_neox": ("gpt_neox", dict(_SIZES, rotary_pct=0.25, rotary_emb_base=500.0)),
  "gpt_neox-serial": ("gpt_neox",
                                       dict(_SIZES, rotary_pct=0.5, use_parallel_residual=False,
                                       tie_word_embeddings=True, hidden_act="gelu_new",
                                       attention_bias=False)),
  "gpt2": ("gpt2", dict(n_embd=48, n_layer=3, n_head=6, vocab_size=131, n_positions=80)),
  "gpt2-untied": ("gpt2", dict(n_embd=48, n_layer=3, n_head=3, n_inner=40, vocab_size=131, tie_word_embeddings=False)),
}


def reference_model(model_type: str, *, seed: int = 0, auto: Any = None, **fields: Any) -> torch.nn.Module:
  """A model of transformers with weights large enough that every part of the maths shows in its log-probabilities."""
  torch.manual_seed(seed)
  config = transformers.AutoConfig.for_model(model_type, **fields)
  model = (auto or transformers.AutoModelForCausalLM).from_config(config, attn_implementation="eager").eval()
  with torch.no_grad():
    for name, parameter in model.named_parameters():
      scales = ("norm" in name or ".ln_" in name) and name.endswith("weight") and "gemma" not in model_type
      parameter.copy_((1.0 if scales else 0.0) + 0.2 * torch.randn_like(parameter))
  return model


def converted(model: torch.nn.Module) -> tuple[ModelConfig, dict[str, Any]]:
  """The same model here: config.json and tensors, by our own reading of both."""
  cfg = from_huggingface({**model.config.to_dict(), "architectures": [type(model).__name__]})
  return cfg, tree_from_tensors(cfg, {name: tensor.numpy() for name, tensor in model.state_dict().items()})


def tree_from_tensors(cfg: ModelConfig, tensors: dict[str, np.ndarray]) -> dict[str, Any]:
  tensors = {hf_names.table_name(cfg, name): tensor for name, tensor in tensors.items()}
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

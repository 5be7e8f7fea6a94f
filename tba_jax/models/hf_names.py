"""Hugging Face tensor names: which leaf of our tree each tensor is, and how its layout becomes ours.

A table is complete in both directions: every leaf of `abstract_params` is named once, and a checkpoint's tensor that
is neither named nor in the family's list of known extras is an error of the reader. A fused tensor (qkv in one)
appears once per part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import re
from typing import Any

import jax
import numpy as np

from tba_jax.models.transformer import abstract_params
from tba_jax.models.variants import ModelConfig


@dataclasses.dataclass(frozen=True)
class Transform:
  """Their array -> ours: reshape to `split`, take `part` = (axis, index, count) if the tensor is fused, then transpose
  by `perm`.
  """

  hf_shape: tuple[int, ...]
  split: tuple[int, ...]
  perm: tuple[int, ...]
  part: tuple[int, int, int] | None = None

  @property
  def tree_shape(self) -> tuple[int, ...]:
    """Shape of one layer's leaf of our tree."""
    shape = [n for axis, n in enumerate(self.split) if self.part is None or axis != self.part[0]]
    return tuple(shape[axis] for axis in self.perm)

  def to_tree(self, array: np.ndarray) -> np.ndarray:
    """One layer's leaf (a view where numpy can). Raises ValueError when the tensor has another shape than the config
    implies.
    """
    if tuple(array.shape) != self.hf_shape:
      raise ValueError(
        f"the tensor has shape {tuple(array.shape)}, but config.json implies {self.hf_shape}; is it of another model?"
      )
    array = array.reshape(self.split)
    if self.part is not None:
      array = array.take(self.part[1], axis=self.part[0])
    return array.transpose(self.perm)

  def _from_tree(self, array: np.ndarray) -> np.ndarray:
    return array.transpose(np.argsort(self.perm))


@dataclasses.dataclass(frozen=True)
class HfTensor:
  """One leaf: `path` in our tree, `layer` its index on the stacked axis (None outside the layers)."""

  hf_name: str
  path: tuple[str, ...]
  layer: int | None
  transform: Transform


def to_huggingface_tensor(entries: Sequence[HfTensor], leaves: Sequence[np.ndarray]) -> np.ndarray:
  """The tensor that entries of one hf_name were read from, contiguous: the inverse of `Transform.to_tree`. leaves[i]
  belongs to entries[i].
  """
  transform = entries[0].transform
  assert len({entry.hf_name for entry in entries}) == 1
  parts = [entry.transform._from_tree(leaf) for entry, leaf in zip(entries, leaves, strict=True)]
  if transform.part is None:
    assert len(parts) == 1, entries
    return np.ascontiguousarray(parts[0]).reshape(transform.hf_shape)
  axis, _, count = transform.part
  order = [entry.transform.part[1] for entry in entries]
  assert sorted(order) == list(range(count)), entries
  stacked = np.stack([parts[order.index(i)] for i in range(count)], axis=axis)
  # Contiguous, for safetensors writes an array's bytes as they lie, and a stack of transposed parts is not in order.
  return np.ascontiguousarray(stacked).reshape(transform.hf_shape)


# Pattern of the HF name ({i} is the layer), our path, transform. Leaves that a model lacks (biases, a tied head) are
# left out by shape.
LLAMA = (
  ("model.embed_tokens.weight", "embed/table", "same"),
  ("model.layers.{i}.input_layernorm.weight", "layers/attn_norm/scale", "same"),
  ("model.layers.{i}.self_attn.q_proj.weight", "layers/attn/q/kernel", "heads_out"),
  ("model.layers.{i}.self_attn.q_proj.bias", "layers/attn/q/bias", "heads_bias"),
  ("model.layers.{i}.self_attn.k_proj.weight", "layers/attn/k/kernel", "heads_out"),
  ("model.layers.{i}.self_attn.k_proj.bias", "layers/attn/k/bias", "heads_bias"),
  ("model.layers.{i}.self_attn.v_proj.weight", "layers/attn/v/kernel", "heads_out"),
  ("model.layers.{i}.self_attn.v_proj.bias", "layers/attn/v/bias", "heads_bias"),
  ("model.layers.{i}.self_attn.o_proj.weight", "layers/attn/o/kernel", "heads_in"),
  ("model.layers.{i}.self_attn.o_proj.bias", "layers/attn/o/bias", "same"),
  ("model.layers.{i}.post_attention_layernorm.weight", "layers/mlp_norm/scale", "same"),
  ("model.layers.{i}.mlp.gate_proj.weight", "layers/mlp/gate/kernel", "swap"),
  ("model.layers.{i}.mlp.gate_proj.bias", "layers/mlp/gate/bias", "same"),
  ("model.layers.{i}.mlp.up_proj.weight", "layers/mlp/up/kernel", "swap"),
  ("model.layers.{i}.mlp.up_proj.bias", "layers/mlp/up/bias", "same"),
  ("model.layers.{i}.mlp.down_proj.weight", "layers/mlp/down/kernel", "swap"),
  ("model.layers.{i}.mlp.down_proj.bias", "layers/mlp/down/bias", "same"),
  ("model.norm.weight", "final_norm/scale", "same"),
  ("lm_head.weight", "lm_head/kernel", "swap"),
)

_QK_NORMS = (
  ("model.layers.{i}.self_attn.q_norm.weight", "layers/attn/q_norm/scale", "same"),
  ("model.layers.{i}.self_attn.k_norm.weight", "layers/attn/k_norm/scale", "same"),
)
# With norms on both sides of the MLP, the name that Llama gives to the one before it belongs to the one after
# attention.
_POST_NORMS = (
  ("model.layers.{i}.post_attention_layernorm.weight", "layers/post_attn_norm/scale", "same"),
  ("model.layers.{i}.pre_feedforward_layernorm.weight", "layers/mlp_norm/scale", "same"),
  ("model.layers.{i}.post_feedforward_layernorm.weight", "layers/post_mlp_norm/scale", "same"),
)
_GEMMA2 = tuple(row for row in LLAMA if row[1] != "layers/mlp_norm/scale") + _POST_NORMS

GPT_NEOX = (
  ("gpt_neox.embed_in.weight", "embed/table", "same"),
  ("gpt_neox.layers.{i}.input_layernorm.weight", "layers/attn_norm/scale", "same"),
  ("gpt_neox.layers.{i}.input_layernorm.bias", "layers/attn_norm/bias", "same"),
  ("gpt_neox.layers.{i}.attention.query_key_value.weight", "layers/attn/q/kernel", "neox_0"),
  ("gpt_neox.layers.{i}.attention.query_key_value.weight", "layers/attn/k/kernel", "neox_1"),
  ("gpt_neox.layers.{i}.attention.query_key_value.weight", "layers/attn/v/kernel", "neox_2"),
  ("gpt_neox.layers.{i}.attention.query_key_value.bias", "layers/attn/q/bias", "neox_bias_0"),
  ("gpt_neox.layers.{i}.attention.query_key_value.bias", "layers/attn/k/bias", "neox_bias_1"),
  ("gpt_neox.layers.{i}.attention.query_key_value.bias", "layers/attn/v/bias", "neox_bias_2"),
  ("gpt_neox.layers.{i}.attention.dense.weight", "layers/attn/o/kernel", "heads_in"),
  ("gpt_neox.layers.{i}.attention.dense.bias", "layers/attn/o/bias", "same"),
  ("gpt_neox.layers.{i}.post_attention_layernorm.weight", "layers/mlp_norm/scale", "same"),
  ("gpt_neox.layers.{i}.post_attention_layernorm.bias", "layers/mlp_norm/bias", "same"),
  ("gpt_neox.layers.{i}.mlp.dense_h_to_4h.weight", "layers/mlp/up/kernel", "swap"),
  ("gpt_neox.layers.{i}.mlp.dense_h_to_4h.bias", "layers/mlp/up/bias", "same"),
  ("gpt_neox.layers.{i}.mlp.dense_4h_to_h.weight", "layers/mlp/down/kernel", "swap"),
  ("gpt_neox.layers.{i}.mlp.dense_4h_to_h.bias", "layers/mlp/down/bias", "same"),
  ("gpt_neox.final_layer_norm.weight", "final_norm/scale", "same"),
  ("gpt_neox.final_layer_norm.bias", "final_norm/bias", "same"),
  ("embed_out.weight", "lm_head/kernel", "swap"),
)

# GPT-2 keeps its kernels as [in, out].
GPT2 = (
  ("transformer.wte.weight", "embed/table", "same"),
  ("transformer.wpe.weight", "pos_embed/table", "same"),
  ("transformer.h.{i}.ln_1.weight", "layers/attn_norm/scale", "same"),
  ("transformer.h.{i}.ln_1.bias", "layers/attn_norm/bias", "same"),
  ("transformer.h.{i}.attn.c_attn.weight", "layers/attn/q/kernel", "gpt2_0"),
  ("transformer.h.{i}.attn.c_attn.weight", "layers/attn/k/kernel", "gpt2_1"),
  ("transformer.h.{i}.attn.c_attn.weight", "layers/attn/v/kernel", "gpt2_2"),
  ("transformer.h.{i}.attn.c_attn.bias", "layers/attn/q/bias", "gpt2_bias_0"),
  ("transformer.h.{i}.attn.c_attn.bias", "layers/attn/k/bias", "gpt2_bias_1"),
  ("transformer.h.{i}.attn.c_attn.bias", "layers/attn/v/bias", "gpt2_bias_2"),
  ("transformer.h.{i}.attn.c_proj.weight", "layers/attn/o/kernel", "heads_in_straight"),
  ("transformer.h.{i}.attn.c_proj.bias", "layers/attn/o/bias", "same"),
  ("transformer.h.{i}.ln_2.weight", "layers/mlp_norm/scale", "same"),
  ("transformer.h.{i}.ln_2.bias", "layers/mlp_norm/bias", "same"),
  ("transformer.h.{i}.mlp.c_fc.weight", "layers/mlp/up/kernel", "same"),
  ("transformer.h.{i}.mlp.c_fc.bias", "layers/mlp/up/bias", "same"),
  ("transformer.h.{i}.mlp.c_proj.weight", "layers/mlp/down/kernel", "same"),
  ("transformer.h.{i}.mlp.c_proj.bias", "layers/mlp/down/bias", "same"),
  ("transformer.ln_f.weight", "final_norm/scale", "same"),
  ("transformer.ln_f.bias", "final_norm/bias", "same"),
  ("lm_head.weight", "lm_head/kernel", "swap"),
)

HF_NAMES = {
  "llama": LLAMA, "mistral": LLAMA, "qwen2": LLAMA, "gemma": LLAMA, "qwen3": LLAMA + _QK_NORMS, "gemma2": _GEMMA2,
  "gemma3_text": _GEMMA2 + _QK_NORMS, "gpt_neox": GPT_NEOX, "gpt2": GPT2,
}

# Tensors that checkpoints carry beside the parameters: buffers that are computed here.
_ROTARY = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)
EXTRA_NAMES = {
  **dict.fromkeys(HF_NAMES, _ROTARY),
  "gpt_neox": (r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
  "gpt2": (r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",),
}

# Where the head is tied, its name may be in the checkpoint as well; it must then hold the same numbers as the
# embedding.
TIED_NAMES = {
  **dict.fromkeys(HF_NAMES, ("lm_head.weight", "model.embed_tokens.weight")),
  "gpt_neox": ("embed_out.weight", "gpt_neox.embed_in.weight"),
  "gpt2": ("lm_head.weight", "transformer.wte.weight"),
}

# Checkpoints of the bare model, without a head, leave this prefix out.
_PREFIXES = {**dict.fromkeys(HF_NAMES, "model."), "gpt_neox": "gpt_neox.", "gpt2": "transformer."}
# Reward models in the layout of summarisation work keep the decoder under this name, beside `scalar_head`.
_BACKBONE = "lm_backbone."
SCALAR_HEADS = (("score.weight", "score.bias"), ("scalar_head.weight", "scalar_head.bias"))
_ALIASES = {("gpt_neox", "lm_head.weight"): "embed_out.weight"}


def table_name(cfg: ModelConfig, hf_name: str) -> str:
  """The name under which the family's table has a checkpoint's tensor, which may be spelt without its prefix or in a
  newer way.
  """
  hf_name = hf_name.removeprefix(_BACKBONE)
  if (cfg.family, hf_name) in _ALIASES:
    return _ALIASES[cfg.family, hf_name]
  prefix = _PREFIXES[cfg.family]
  patterns = {pattern for pattern, _, _ in HF_NAMES[cfg.family]} | {name for names in SCALAR_HEADS for name in names}
  if hf_name.startswith(prefix) or hf_name in patterns:
    return hf_name
  return prefix + hf_name


def hf_to_tree(cfg: ModelConfig) -> list[HfTensor]:
  """All tensors of a checkpoint of this model, one entry per leaf and layer, in the order of the table."""
  shapes = {
    "/".join(key.key for key in path): leaf.shape for path, leaf in jax.tree.leaves_with_path(abstract_params(cfg))
  }
  entries, used = [], set()
  for pattern, path, kind in HF_NAMES[cfg.family]:
    if path not in shapes:
      continue
    used.add(path)
    stacked = path.startswith("layers/")
    transform = transform_of(kind, shapes[path][1:] if stacked else shapes[path])
    for layer in range(cfg.num_layers) if stacked else (None,):
      entries.append(HfTensor(pattern.format(i=layer), tuple(path.split("/")), layer, transform))
  assert used == set(shapes), f"the table of {cfg.family} does not name {sorted(set(shapes) - used)}"
  return entries


def scalar_head(cfg: ModelConfig, stored: Mapping[str, Any], *, source: str) -> list[HfTensor]:
  """The tensors of a reward model's scalar head, leaves score/kernel [D, 1] and score/bias [1], by the names that are
  there.

  Args:
    stored: anything with a `shape`, by name.
    source: for error messages.
  Raises: ValueError if neither layout, or more than one, is there, or if there are several scores.
  """
  found = [names for names in SCALAR_HEADS if names[0] in stored]
  if len(found) != 1:
    layouts = " or ".join(names[0] for names in SCALAR_HEADS)
    raise ValueError(
      f"{source}: a reward model needs one of the tensors {layouts}; this checkpoint has {len(found)} of them."
    )
  weight, bias = found[0]
  if tuple(stored[weight].shape) != (1, cfg.hidden_size):
    raise ValueError(
      f"{source}: tensor {weight} has shape {tuple(stored[weight].shape)}, but a reward model of this config has one "
      f"score, {(1, cfg.hidden_size)}; a classifier of several labels is none."
    )
  entries = [HfTensor(weight, ("score", "kernel"), None, transform_of("swap", (cfg.hidden_size, 1)))]
  return entries + ([HfTensor(bias, ("score", "bias"), None, transform_of("same", (1,)))] if bias in stored else [])


def is_extra(cfg: ModelConfig, hf_name: str) -> bool:
  """Whether a tensor that `hf_to_tree` does not name is a known buffer, to be skipped."""
  return any(re.fullmatch(pattern, hf_name) for pattern in EXTRA_NAMES[cfg.family])


def transform_of(kind: str, shape: tuple[int, ...]) -> Transform:
  """The transform of a named kind onto a leaf of this shape (one layer's). HF kernels are [out, in], ours [in, out]."""
  if kind == "same":
    return Transform(shape, shape, tuple(range(len(shape))))
  if kind == "swap":
    return Transform(shape[::-1], shape[::-1], (1, 0))
  if kind == "heads_bias":
    return Transform((shape[0] * shape[1],), shape, (0, 1))
  if kind == "heads_out":  # ours [D, heads, H]
    width, heads, size = shape
    return Transform((heads * size, width), (heads, size, width), (2, 0, 1))
  if kind == "heads_in":  # ours [heads, H, D]
    heads, size, width = shape
    return Transform((width, heads * size), (width, heads, size), (1, 2, 0))
  if kind == "heads_in_straight":
    heads, size, width = shape
    return Transform((heads * size, width), shape, (0, 1, 2))
  family, *bias, part = kind.split("_")
  if bias:  # of a fused tensor; ours [heads, H]
    heads, size = shape
    if family == "neox":
      return Transform((heads * 3 * size,), (heads, 3, size), (0, 1), (1, int(part), 3))
    return Transform((3 * heads * size,), (3, heads, size), (0, 1), (0, int(part), 3))
  width, heads, size = shape
  if family == "neox":  # q, k and v of a head lie together
    return Transform((heads * 3 * size, width), (heads, 3, size, width), (2, 0, 1), (1, int(part), 3))
  assert family == "gpt2", kind
  return Transform((width, 3 * heads * size), (width, 3, heads, size), (0, 1, 2), (1, int(part), 3))

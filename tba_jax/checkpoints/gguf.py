"""Reads a GGUF file as if it were a Hugging Face model folder: a config.json dict, tensors under Hugging Face names,
and a tokenizer.

Quantised tensors are dequantised to float32 one at a time by the `gguf` package. Import only: nothing is written in
this format, and weights are never kept quantised. The conventions undone here are those of llama.cpp's converter: rows
of the q and k projections of arch "llama" are interleaved for its rotary embedding, and Gemma's norm weights carry the
1 that Hugging Face adds at run time.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tba_jax.checkpoints import gguf_tokenizer
from tba_jax.checkpoints.stored import StoredTensor
from tba_jax.tokenizer import Tokenizer

if TYPE_CHECKING:
  import gguf

# Readers of the metadata under "arch.": a key that must be there, and one with a default.
_Take = Callable[[str], Any]
_TakeOr = Callable[[str, Any], Any]

_QUANT_TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
_ARCHITECTURES = ("llama", "qwen2", "gemma3")

# GGUF name -> Hugging Face name, shared by all three architectures. {} is the layer.
_TENSOR_NAMES = {
  "token_embd.weight": "model.embed_tokens.weight",
  "output_norm.weight": "model.norm.weight",
  "output.weight": "lm_head.weight",
  "attn_norm.weight": "model.layers.{}.input_layernorm.weight",
  "attn_q.weight": "model.layers.{}.self_attn.q_proj.weight",
  "attn_k.weight": "model.layers.{}.self_attn.k_proj.weight",
  "attn_v.weight": "model.layers.{}.self_attn.v_proj.weight",
  "attn_q.bias": "model.layers.{}.self_attn.q_proj.bias",
  "attn_k.bias": "model.layers.{}.self_attn.k_proj.bias",
  "attn_v.bias": "model.layers.{}.self_attn.v_proj.bias",
  "attn_output.weight": "model.layers.{}.self_attn.o_proj.weight",
  "attn_output.bias": "model.layers.{}.self_attn.o_proj.bias",
  "ffn_gate.weight": "model.layers.{}.mlp.gate_proj.weight",
  "ffn_up.weight": "model.layers.{}.mlp.up_proj.weight",
  "ffn_down.weight": "model.layers.{}.mlp.down_proj.weight",
}
_FFN_NORM = {"ffn_norm.weight": "model.layers.{}.post_attention_layernorm.weight"}
_GEMMA_NORMS = {
  "post_attention_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
  "ffn_norm.weight": "model.layers.{}.pre_feedforward_layernorm.weight",
  "post_ffw_norm.weight": "model.layers.{}.post_feedforward_layernorm.weight",
  "attn_q_norm.weight": "model.layers.{}.self_attn.q_norm.weight",
  "attn_k_norm.weight": "model.layers.{}.self_attn.k_norm.weight",
}

# Llama 3.1 to 3.3 store their rotary scaling as 1/frequency factors; these two settings are all that Meta released.
_LLAMA3_ROPE_FACTORS = (8.0, 32.0)
_LLAMA3_ROPE = {
  "rope_type": "llama3",
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 8192,
}


@dataclasses.dataclass(frozen=True)
class GgufModel:
  """What a Hugging Face model folder holds, out of one GGUF file."""

  config: dict[str, Any]
  tensors: dict[str, StoredTensor]
  tokenizer: Tokenizer


def read_gguf(path: str | pathlib.Path) -> GgufModel:
  """Opens a GGUF file of a Llama, Qwen2 or Gemma 3 model. Tensors are read later, one by one.

  Raises: ValueError if the file is missing, damaged, split in parts, of another architecture, uses another quantisation
    than F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, or holds metadata or tensors whose meaning is
    not known here.
  """
  import gguf  # only who reads such a file needs the package

  path = pathlib.Path(path)
  if not path.is_file():
    raise ValueError(f"{path} is not a file; give the path of a .gguf file.")
  try:
    reader = gguf.GGUFReader(path)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
  # The reader checks nothing: a cut or damaged file shows as whatever the wrong bytes happen to break.
  except (ValueError, IndexError, KeyError, OverflowError, TypeError, UnicodeDecodeError) as error:
    raise ValueError(
      f"{path} is not a complete GGUF file ({type(error).__name__}: {error}); copy or download it again."
    ) from error
  arch = _required(metadata, "general.architecture", path)
  if arch not in _ARCHITECTURES:
    raise ValueError(f"{path}: architecture {arch!r} is not supported; supported are {', '.join(_ARCHITECTURES)}.")
  if "split.count" in metadata and metadata["split.count"] > 1:
    raise ValueError(
      f"{path} is one of {metadata['split.count']} parts; merge them into one file with llama.cpp's gguf-split --merge."
    )

  raw = {tensor.name: tensor for tensor in reader.tensors}
  for tensor in reader.tensors:
    if tensor.tensor_type.name not in _QUANT_TYPES:
      raise ValueError(
        f"{path}: tensor {tensor.name} is of type {tensor.tensor_type.name}; supported are {', '.join(_QUANT_TYPES)}. "
        "Take a file quantised as one of these (Q8_0 is closest to the original)."
      )
  rope_freqs = raw.pop("rope_freqs.weight", None)
  config = _config(arch, metadata, raw, None if rope_freqs is None else _dequantise(rope_freqs), path)
  tensors: dict[str, StoredTensor] = {}
  for name, tensor in raw.items():
    tensors[_huggingface_name(name, arch, path)] = _tensor(tensor, name, arch, config)
  return GgufModel(config, tensors, gguf_tokenizer.build_tokenizer(metadata, source=str(path)))


def _required(metadata: Mapping[str, Any], key: str, path: pathlib.Path) -> Any:
  if key not in metadata:
    raise ValueError(
      f"{path}: metadata key {key} is missing; the file was not written by llama.cpp's converter, or is damaged."
    )
  return metadata[key]


def _huggingface_name(name: str, arch: str, path: pathlib.Path) -> str:
  layer = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
  names = {**_TENSOR_NAMES, **(_GEMMA_NORMS if arch == "gemma3" else _FFN_NORM)}
  stem = layer.group(2) if layer else name
  if stem not in names or ("{}" in names[stem]) != bool(layer):
    raise ValueError(
      f"{path}: tensor {name} is not part of a dense {arch} model as known here; this file cannot be loaded."
    )
  return names[stem].format(layer.group(1)) if layer else names[stem]


def _dequantise(tensor: gguf.ReaderTensor) -> np.ndarray:
  import gguf.quants

  # GGUF lists dimensions fastest first; Hugging Face slowest first.
  return gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False).reshape(_shape(tensor))


def _shape(tensor: gguf.ReaderTensor) -> tuple[int, ...]:
  return tuple(int(n) for n in tensor.shape[::-1])


def _tensor(tensor: gguf.ReaderTensor, name: str, arch: str, config: Mapping[str, Any]) -> StoredTensor:
  def read() -> np.ndarray:
    weights = _dequantise(tensor)
    if arch == "llama" and ".attn_q." in name:
      return _undo_rope_interleave(weights, config["num_attention_heads"])
    if arch == "llama" and ".attn_k." in name:
      return _undo_rope_interleave(weights, config["num_key_value_heads"])
    if arch == "gemma3" and name.endswith("norm.weight"):
      return weights - 1
    return weights

  return StoredTensor(_shape(tensor), read)


def _undo_rope_interleave(weights: np.ndarray, num_heads: int) -> np.ndarray:
  """Rows [N H, ...] of each head: llama.cpp keeps the two entries that turn together side by side."""
  half = weights.shape[0] // num_heads // 2
  return weights.reshape(num_heads, half, 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def _config(
  arch: str, metadata: Mapping[str, Any], raw: Mapping[str, Any], rope_freqs: np.ndarray | None, path: pathlib.Path
) -> dict[str, Any]:
  """The config.json that the model had before conversion. Each key of the architecture is used, checked, or refused."""
  left = {key[len(arch) + 1 :]: value for key, value in metadata.items() if key.startswith(arch + ".")}

  def take(key: str) -> Any:
    if key not in left:
      raise ValueError(f"{path}: metadata key {arch}.{key} is missing; the file cannot be loaded.")
    value = left.pop(key)
    # Shortest decimal that is this float32: 1e-05, as in the original config, rather than 9.999999747378752e-06.
    return float(str(np.float32(value))) if isinstance(value, float) else value

  def take_or(key: str, default: Any) -> Any:
    return take(key) if key in left else default

  num_heads, hidden_size = take("attention.head_count"), take("embedding_length")
  embed = raw.get("token_embd.weight")
  if embed is None:
    raise ValueError(f"{path}: tensor token_embd.weight is missing; the file cannot be loaded.")
  config = {
    "vocab_size": _shape(embed)[0],
    "hidden_size": hidden_size,
    "intermediate_size": take("feed_forward_length"),
    "num_hidden_layers": take("block_count"),
    "num_attention_heads": num_heads,
    "num_key_value_heads": take_or("attention.head_count_kv", num_heads),
    "head_dim": take_or("attention.key_length", hidden_size // num_heads),
    "max_position_embeddings": take("context_length"),
    "rms_norm_eps": take("attention.layer_norm_rms_epsilon"),
    "rope_theta": take_or("rope.freq_base", 10000.0),
    "tie_word_embeddings": "output.weight" not in raw,
    "attention_dropout": 0.0,
  }
  must_equal = {
    "attention.value_length": config["head_dim"],
    "rope.dimension_count": config["head_dim"],
    "expert_count": 0,
    "expert_used_count": 0,
    "vocab_size": config["vocab_size"],
  }
  for key, wanted in must_equal.items():
    found = take_or(key, wanted)
    if found != wanted:
      raise ValueError(f"{path}: {arch}.{key}={found}, but only {wanted} is supported for this model.")
  scaling = _rope_scaling(take_or, rope_freqs, config, arch, path)
  if scaling is not None:
    config["rope_scaling"] = scaling
  config |= _FAMILY[arch](config, raw, take, take_or)
  if left:
    raise ValueError(
      f"{path}: metadata keys {', '.join(f'{arch}.{key}' for key in sorted(left))} are not known here; "
      "ignoring them could give a wrong model."
    )
  return config


def _rope_scaling(
  take_or: _TakeOr, rope_freqs: np.ndarray | None, config: Mapping[str, Any], arch: str, path: pathlib.Path
) -> dict[str, Any] | None:
  kind, factor = take_or("rope.scaling.type", "none"), take_or("rope.scaling.factor", 1.0)
  if kind not in ("none", "linear"):
    raise ValueError(f"{path}: {arch}.rope.scaling.type={kind!r} is not supported; only none and linear are.")
  if rope_freqs is None:
    return {"rope_type": "linear", "factor": factor} if kind == "linear" and factor != 1.0 else None
  for factor in _LLAMA3_ROPE_FACTORS:
    if np.allclose(rope_freqs, _llama3_divisors(config["rope_theta"], config["head_dim"], factor), rtol=1e-3):
      return {**_LLAMA3_ROPE, "factor": factor}
  raise ValueError(
    f"{path}: rope_freqs.weight is not that of a released Llama 3.1, 3.2 or 3.3 model, so its rope_scaling cannot be "
    "told; load the original safetensors folder instead."
  )


def _llama3_divisors(theta: float, head_dim: int, factor: float) -> np.ndarray:
  """By how much Llama 3 slows each rotary frequency, f64 [H / 2]: from 1 for short wavelengths to `factor` for long."""
  wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
  low, high, length = (
    _LLAMA3_ROPE["low_freq_factor"],
    _LLAMA3_ROPE["high_freq_factor"],
    _LLAMA3_ROPE["original_max_position_embeddings"],
  )
  smooth = np.clip((length / wavelengths - low) / (high - low), 0, 1)
  return 1 / ((1 - smooth) / factor + smooth)


def _llama_fields(config: Mapping[str, Any], raw: Mapping[str, Any], take: _Take, take_or: _TakeOr) -> dict[str, Any]:
  biases = "blk.0.attn_q.bias" in raw
  return {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "attention_bias": biases,
    "mlp_bias": False,
  }


def _qwen2_fields(config: Mapping[str, Any], raw: Mapping[str, Any], take: _Take, take_or: _TakeOr) -> dict[str, Any]:
  return {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "use_sliding_window": False,
  }


def _gemma3_fields(config: Mapping[str, Any], raw: Mapping[str, Any], take: _Take, take_or: _TakeOr) -> dict[str, Any]:
  # Mostly not in the file, for llama.cpp has it in its code: every sixth layer attends globally, local layers rotate
  # with base 10000, and queries are scaled by the head width except in the 27B model (62 layers), where it is width /
  # heads.
  num_layers = config["num_hidden_layers"]
  is_27b = num_layers == 62
  pattern = take_or("attention.sliding_window_pattern", 6)
  slides = pattern if isinstance(pattern, list) else [(i + 1) % pattern != 0 for i in range(num_layers)]
  return {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"],
    "sliding_window": take("attention.sliding_window"),
    "layer_types": ["sliding_attention" if local else "full_attention" for local in slides],
    "rope_local_base_freq": take_or("rope.freq_base_swa", 10000.0),
    "attn_logit_softcapping": None,
    "final_logit_softcapping": take_or("final_logit_softcapping", None),
  }


_FAMILY = {"llama": _llama_fields, "qwen2": _qwen2_fields, "gemma3": _gemma3_fields}

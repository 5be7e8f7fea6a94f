"""What kind of value each field of a config.json holds, checked before anything is computed from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any


def _is_whole(value: Any) -> bool:
  return isinstance(value, int) and not isinstance(value, bool)


def _is_positive(value: Any) -> bool:
  return (_is_whole(value) or isinstance(value, float)) and math.isfinite(value) and value > 0


def _or_null(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
  return lambda value: value is None or test(value)


_COUNT = ("a whole number of at least 1", lambda v: _is_whole(v) and v >= 1)
_COUNT_OR_NULL = ("a whole number of at least 1, or null", _or_null(_COUNT[1]))
_WHOLE_OR_NULL = ("a whole number, or null", _or_null(_is_whole))
_POSITIVE = ("a finite number above 0", _is_positive)
_POSITIVE_OR_NULL = ("a finite number above 0, or null", _or_null(_is_positive))
_FLAG = ("true or false", lambda v: isinstance(v, bool))
_FLAG_OR_NULL = ("true or false, or null", _or_null(_FLAG[1]))
_TEXT = ("a string", lambda v: isinstance(v, str))
_TEXTS_OR_NULL = (
  "a list of strings, or null", _or_null(lambda v: isinstance(v, list) and all(isinstance(x, str) for x in v))
)
_OBJECT_OR_NULL = ("an object, or null", _or_null(lambda v: isinstance(v, Mapping)))

# A name means the same in every family, and inside rope_scaling and rope_parameters.
_KINDS = {
  **dict.fromkeys((
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "max_position_embeddings", "type_vocab_size", "n_embd", "n_layer", "n_head", "n_positions",
    "sliding_window_pattern", "_sliding_window_pattern",
  ), _COUNT),
  **dict.fromkeys((
    "num_key_value_heads", "head_dim", "n_inner", "original_max_position_embeddings", "num_labels"
  ), _COUNT_OR_NULL),
  **dict.fromkeys(("sliding_window", "pad_token_id"), _WHOLE_OR_NULL),
  "max_window_layers": ("a whole number of at least 0", lambda v: _is_whole(v) and v >= 0),
  **dict.fromkeys((
    "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "query_pre_attn_scalar", "factor", "low_freq_factor",
    "high_freq_factor",
  ), _POSITIVE),
  **dict.fromkeys((
    "final_logit_softcapping", "attn_logit_softcapping", "rope_theta", "rope_local_base_freq", "rotary_emb_base",
    "rotary_pct", "partial_rotary_factor", "beta_fast", "beta_slow", "attention_factor",
  ), _POSITIVE_OR_NULL),
  **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias", "use_parallel_residual", "truncate"), _FLAG),
  "use_sliding_window": _FLAG_OR_NULL,
  **dict.fromkeys(
    ("model_type", "hidden_act", "hidden_activation", "activation_function", "rope_type", "type"), _TEXT
  ),
  **dict.fromkeys(("architectures", "layer_types"), _TEXTS_OR_NULL),
  **dict.fromkeys(
    ("rope_scaling", "rope_parameters", "id2label", "full_attention", "sliding_attention"), _OBJECT_OR_NULL
  ),
}


def check_kinds(config: Mapping[str, Any]) -> None:
  """Raises: ValueError naming the first field whose value is of another kind than its name says."""
  for name, value in config.items():
    if name in _KINDS and not _KINDS[name][1](value):
      raise ValueError(f"config.json has {name}={value!r}; it must be {_KINDS[name][0]}.")

"""Model families as data: what a Hugging Face config.json says about the maths, as one frozen record of options.

`from_huggingface` reads or refuses every field: a field that it does not know is an error, because a field skipped in
silence is a model that is subtly another one. What is known to leave the forward pass alone is listed in HARMLESS.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from tba_jax.models import rope
from tba_jax.models.fields import check_kinds
from tba_jax.models.rope import RopeScaling


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
  """Everything that changes a decoder's maths or shapes. Hashable, so that it can be a static argument of jit.

  `vocab_size` counts the token ids that exist; `num_embeddings` (V) counts the rows of the table, which may hold
  padding rows that are never sampled and take no part in any normaliser. A window w lets a position see itself and the
  w - 1 positions before it.
  """

  family: str
  vocab_size: int
  num_embeddings: int
  hidden_size: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  mlp_size: int
  max_positions: int
  norm_eps: float
  tie_embeddings: bool
  query_scale: float  # attention logits are query_scale * q.k
  activation: str = "silu"  # a key of layers.ACTIVATIONS
  gated_mlp: bool = True
  norm: str = "rms"  # rms | rms_plus_one (scale is 1 + w) | layer (with a bias)
  qkv_bias: bool = False
  o_bias: bool = False
  mlp_bias: bool = False
  qk_norm: bool = False  # RMS norm of each query and key head before the rotation
  post_norms: bool = False  # norms of the attention and MLP outputs before they join the residual
  parallel_residual: bool = False  # attention and MLP both read the block's input
  positions: str = "rope"  # rope | learned
  rotary_dim: int = 0  # the first rotary_dim entries of a head turn; 0 with learned positions
  rope_theta: float = 10000.0
  rope_scaling: RopeScaling | None = None
  rope_local_theta: float | None = None  # of the sliding layers where that is another rotation; never scaled
  window: int | None = None
  sliding_layers: tuple[bool, ...] = ()  # which layers use the window; () when none does
  scale_embeddings: bool = False  # multiply them by sqrt(D)
  attn_softcap: float | None = None
  final_softcap: float | None = None
  score_pad_id: int | None = None  # of a reward model: its score is read at the last token that is not this one

  def __post_init__(self):
    if not 0 < self.vocab_size <= self.num_embeddings:
      raise ValueError(
        f"vocab_size={self.vocab_size} must be between 1 and num_embeddings={self.num_embeddings}, the rows of the "
        "embedding table; is this the tokenizer of another model?"
      )
    if self.num_kv_heads <= 0 or self.num_heads % self.num_kv_heads:
      raise ValueError(f"num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}.")
    if self.positions == "rope" and self.rotary_dim < 2:
      raise ValueError(f"rotary_dim={self.rotary_dim} must be at least 2 with positions='rope'.")
    if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
      raise ValueError(f"rotary_dim={self.rotary_dim} must be even and at most head_dim={self.head_dim}.")
    if self.sliding_layers and (len(self.sliding_layers) != self.num_layers or self.window is None):
      raise ValueError(
        f"sliding_layers has {len(self.sliding_layers)} entries and window={self.window}; it needs one entry for "
        f"each of num_layers={self.num_layers} and a window."
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
  """How one model_type writes its config.json.

  `fields` maps a field of theirs to the options of ours that it sets, and is read in both directions. `defaults` holds
  what transformers assumes where config.json is silent. `fixed` are options that the family has without saying so.
  `only` lists fields whose other values are maths that we do not have. `rope` and `windows` name how rotations and
  sliding windows are written.
  """

  architecture: str
  fields: Mapping[str, tuple[str, ...]]
  defaults: Mapping[str, Any]
  fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  only: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
  rope: str = "plain"  # none | plain | partial | by_layer_type
  rope_theta: float = 10000.0  # assumed where config.json is silent
  windows: str = "none"  # none | all layers | upper: those from max_window_layers on | pattern: all but every n-th
  window_pattern: int = 0  # n of the pattern that is assumed where config.json is silent
  pad_id: int | None = None  # assumed where config.json is silent; only a reward model reads it
  stem: str = ""  # of the names of its other architectures, where it is not that of `architecture`


_FIELDS = {
  "vocab_size": ("num_embeddings",),
  "hidden_size": ("hidden_size",),
  "num_hidden_layers": ("num_layers",),
  "num_attention_heads": ("num_heads",),
  "num_key_value_heads": ("num_kv_heads",),
  "head_dim": ("head_dim",),
  "intermediate_size": ("mlp_size",),
  "max_position_embeddings": ("max_positions",),
  "rms_norm_eps": ("norm_eps",),
  "tie_word_embeddings": ("tie_embeddings",),
  "hidden_act": ("activation",),
}
_DEFAULTS = {
  "num_key_value_heads": None, "head_dim": None, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
  "hidden_act": "silu",
}
_ATTENTION_BIAS = {"attention_bias": ("qkv_bias", "o_bias")}
_GEMMA_DEFAULTS = {
  **_DEFAULTS, "head_dim": 256, "max_position_embeddings": 8192, "tie_word_embeddings": True, "attention_bias": False,
}
_GEMMA_FIXED = {"norm": "rms_plus_one", "scale_embeddings": True}
_GEMMA_ONLY = {"use_bidirectional_attention": (None, False)}
_GEMMA2_FIELDS = {
  **{name: targets for name, targets in _FIELDS.items() if name != "hidden_act"}, **_ATTENTION_BIAS,
  "hidden_activation": ("activation",), "query_pre_attn_scalar": ("query_scale",),
  "final_logit_softcapping": ("final_softcap",),
}
_GEMMA2_DEFAULTS = {**_GEMMA_DEFAULTS, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256}

FAMILIES: dict[str, Family] = {
  "llama": Family(  # and SmolLM2, TinyLlama, RhoMath
    architecture="LlamaForCausalLM",
    fields={**_FIELDS, **_ATTENTION_BIAS, "mlp_bias": ("mlp_bias",)},
    defaults={**_DEFAULTS, "max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False},
    only={"rope_interleaved": (False,)},
  ),
  "mistral": Family(
    architecture="MistralForCausalLM",
    fields=_FIELDS,
    defaults={**_DEFAULTS, "num_key_value_heads": 8, "max_position_embeddings": 131072},
    windows="all",
  ),
  "qwen2": Family(
    architecture="Qwen2ForCausalLM",
    fields=_FIELDS,
    defaults={**_DEFAULTS, "num_key_value_heads": 32, "max_position_embeddings": 32768},
    fixed={"qkv_bias": True},
    only={"use_mrope": (False,)},
    windows="upper",
  ),
  "qwen3": Family(
    architecture="Qwen3ForCausalLM",
    fields={**_FIELDS, **_ATTENTION_BIAS},
    defaults={
      **_DEFAULTS, "num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768, "attention_bias": False
    },
    fixed={"qk_norm": True},
    windows="upper",
  ),
  "gemma": Family(
    architecture="GemmaForCausalLM",
    fields={**_FIELDS, **_ATTENTION_BIAS},
    defaults={**_GEMMA_DEFAULTS, "hidden_act": "gelu_pytorch_tanh"},
    pad_id=0,
    fixed=_GEMMA_FIXED,
    only={**_GEMMA_ONLY, "hidden_act": ("gelu", "gelu_pytorch_tanh"), "hidden_activation": (None, "gelu_pytorch_tanh")},
  ),
  "gemma2": Family(
    architecture="Gemma2ForCausalLM",
    fields={**_GEMMA2_FIELDS, "attn_logit_softcapping": ("attn_softcap",)},
    defaults={**_GEMMA2_DEFAULTS, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
    pad_id=0,
    fixed={**_GEMMA_FIXED, "post_norms": True},
    only={**_GEMMA_ONLY, "hidden_act": ("gelu_pytorch_tanh",)},
    windows="pattern",
    window_pattern=2,
  ),
  "gemma3_text": Family(
    architecture="Gemma3ForCausalLM",
    stem="Gemma3Text",
    fields=_GEMMA2_FIELDS,
    defaults={**_GEMMA2_DEFAULTS, "max_position_embeddings": 131072, "final_logit_softcapping": None},
    pad_id=0,
    fixed={**_GEMMA_FIXED, "post_norms": True, "qk_norm": True},
    only={**_GEMMA_ONLY, "attn_logit_softcapping": (None,), "hidden_act": ("gelu_pytorch_tanh",)},
    rope="by_layer_type",
    rope_theta=1000000.0,
    windows="pattern",
    window_pattern=6,
  ),
  "gpt_neox": Family(
    architecture="GPTNeoXForCausalLM",
    fields={
      **{name: _FIELDS[name] for name in (
        "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "max_position_embeddings",
        "tie_word_embeddings", "hidden_act"
      )},
      **_ATTENTION_BIAS, "num_attention_heads": ("num_heads", "num_kv_heads"), "layer_norm_eps": ("norm_eps",),
      "use_parallel_residual": ("parallel_residual",),
    },
    defaults={
      "max_position_embeddings": 2048, "layer_norm_eps": 1e-5, "tie_word_embeddings": False, "hidden_act": "gelu",
      "attention_bias": True, "use_parallel_residual": True,
    },
    fixed={"norm": "layer", "gated_mlp": False, "mlp_bias": True, "head_dim": None},
    rope="partial",
  ),
  "gpt2": Family(
    architecture="GPT2LMHeadModel",
    fields={
      "vocab_size": ("num_embeddings",), "n_embd": ("hidden_size",), "n_layer": ("num_layers",),
      "n_head": ("num_heads", "num_kv_heads"), "n_inner": ("mlp_size",), "n_positions": ("max_positions",),
      "layer_norm_epsilon": ("norm_eps",), "activation_function": ("activation",),
      "tie_word_embeddings": ("tie_embeddings",),
    },
    defaults={
      "n_inner": None, "n_positions": 1024, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new",
      "tie_word_embeddings": True,
    },
    fixed={
      "norm": "layer", "gated_mlp": False, "mlp_bias": True, "qkv_bias": True, "o_bias": True, "head_dim": None,
      "positions": "learned", "rotary_dim": 0,
    },
    only={
      "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,),
      "reorder_and_upcast_attn": (False, True),
    },
    rope="none",
  ),
}

# Names of activation functions, theirs to ours.
ACTIVATION_NAMES = {
  "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
  "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu",
}
_ACTIVATIONS_WRITTEN = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu"}

_WINDOW_FIELDS = {
  "none": (),
  "all": ("sliding_window",),
  "upper": ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
  "pattern": ("sliding_window", "layer_types", "sliding_window_pattern", "_sliding_window_pattern"),
}
_LAYER_TYPES = {"full_attention": False, "sliding_attention": True}

# Fields that any family may carry and whose other values are maths that we do not have.
ONLY_EVERYWHERE = {
  "add_cross_attention": (False,), "auto_map": (None,), "cross_attention_hidden_size": (None,),
  "is_decoder": (False, True), "is_encoder_decoder": (False,), "pruned_heads": (None, {}),
  "quantization_config": (None,), "tie_encoder_decoder": (False,),
}

# Fields that do not change the forward pass: bookkeeping, token ids, generation settings, initialisation, and
# dropout, which neither scoring nor training applies here (a policy with dropout has no one probability for a token).
HARMLESS = frozenset("""
  _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path architectures attention_dropout
  attn_pdrop bad_words_ids begin_suppress_tokens bos_token_id cache_implementation chunk_size_feed_forward
  classifier_dropout decoder_start_token_id diversity_penalty do_sample dtype early_stopping embd_pdrop
  encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task forced_bos_token_id
  forced_eos_token_id gradient_checkpointing hidden_dropout id2label initializer_range is_llama_config label2id
  length_penalty max_length min_length model_type n_ctx no_repeat_ngram_size num_beam_groups num_beams num_labels
  num_return_sequences output_attentions output_hidden_states output_scores pad_token_id prefix pretraining_tp
  problem_type remove_invalid_values repetition_penalty resid_pdrop return_dict return_dict_in_generate sep_token_id
  summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj suppress_tokens
  task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p torch_dtype torchscript
  transformers.js_config transformers_version typical_p unsloth_fixed unsloth_version use_bfloat16 use_cache
""".split())


def from_huggingface(config: Mapping[str, Any]) -> ModelConfig:
  """The options that a config.json stands for. `vocab_size` comes out as the number of table rows; the tokenizer may
  lower it.

  Raises: ValueError for a model_type that is not in FAMILIES, a field that is not known, and a value whose maths we do
    not have.
  """
  name, family = _family_of(config)
  known = {
    *family.fields, *family.only, *rope.FIELDS[family.rope], *_WINDOW_FIELDS[family.windows], *ONLY_EVERYWHERE,
    *HARMLESS
  }
  unknown = sorted(set(config) - known)
  if unknown:
    raise ValueError(
      f"config.json has fields that a {name} model here does not know: "
      f"{', '.join(f'{k}={config[k]!r}' for k in unknown)}. "
      "They may change the model; if they cannot, add them to HARMLESS in models/variants.py."
    )
  check_kinds({field: value for field, value in config.items() if field not in family.only})
  for field, allowed in {**ONLY_EVERYWHERE, **family.only}.items():
    if field in config and config[field] not in allowed:
      raise ValueError(f"config.json has {field}={config[field]!r}; a {name} model here takes only {_either(allowed)}.")
  raw = {**family.defaults, **config}
  missing = sorted(set(family.fields) - set(raw))
  if missing:
    raise ValueError(f"config.json lacks {', '.join(missing)}, which a {name} model needs.")
  options = dict(family.fixed)
  for field, targets in family.fields.items():
    options.update({target: raw[field] for target in targets})
  return _complete(name, family, options, config)


def pad_id(config: Mapping[str, Any]) -> int | None:
  """The padding id of a config.json that `from_huggingface` has accepted, which decides where a reward is read."""
  return config["pad_token_id"] if "pad_token_id" in config else FAMILIES[config["model_type"]].pad_id


def _family_of(config: Mapping[str, Any]) -> tuple[str, Family]:
  if "model_type" not in config:
    raise ValueError("config.json has no model_type, so its family is unknown.")
  check_kinds({key: config[key] for key in ("model_type", "architectures") if key in config})
  name = config["model_type"]
  if name not in FAMILIES:
    raise ValueError(f"model_type={name!r} is not supported; it must be one of {', '.join(sorted(FAMILIES))}.")
  family = FAMILIES[name]
  architectures = config["architectures"] if "architectures" in config else None
  stem = family.stem or family.architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
  allowed = {family.architecture, f"{stem}Model", f"{stem}ForSequenceClassification"}
  if architectures and not set(architectures) <= allowed:
    raise ValueError(
      f"config.json has architectures={list(architectures)}; model_type={name!r} takes {_either(sorted(allowed))}."
    )
  return name, family


def _complete(name: str, family: Family, options: dict[str, Any], config: Mapping[str, Any]) -> ModelConfig:
  """Turns their values into ours and fills in what follows from other options, as transformers does."""
  if options["head_dim"] is None:
    if options["hidden_size"] % options["num_heads"]:
      raise ValueError(
        f"hidden_size={options['hidden_size']} must be a multiple of num_heads={options['num_heads']} where head_dim "
        "is not given."
      )
    options["head_dim"] = options["hidden_size"] // options["num_heads"]
  if options["num_kv_heads"] is None:
    options["num_kv_heads"] = options["num_heads"]
  if options["mlp_size"] is None:
    options["mlp_size"] = 4 * options["hidden_size"]
  if options["activation"] not in ACTIVATION_NAMES:
    raise ValueError(
      f"the activation {options['activation']!r} is not supported; it must be {_either(sorted(ACTIVATION_NAMES))}."
    )
  # Gemma's first checkpoints say "gelu" and mean the tanh form.
  options["activation"] = "gelu_tanh" if name == "gemma" else ACTIVATION_NAMES[options["activation"]]
  options["query_scale"] = (options["query_scale"] if "query_scale" in options else options["head_dim"]) ** -0.5
  options["window"], options["sliding_layers"] = _read_windows(family, config, options["num_layers"])
  options = {
    **rope.read(family.rope, config, default_theta=family.rope_theta, head_dim=options["head_dim"],
                max_positions=options["max_positions"], any_sliding=bool(options["sliding_layers"])),
    **options,
  }
  return ModelConfig(family=name, vocab_size=options["num_embeddings"], **options)


def _read_windows(family: Family, config: Mapping[str, Any], num_layers: int) -> tuple[int | None, tuple[bool, ...]]:
  """(window, sliding_layers) out of the fields that the family's way of writing windows has."""
  if family.windows == "none":
    return None, ()
  values = {name: config[name] for name in _WINDOW_FIELDS[family.windows] if name in config}
  window = values["sliding_window"] if "sliding_window" in values else 4096
  if family.windows == "all":
    sliding = (window is not None,) * num_layers
  elif family.windows == "upper":
    if not ("use_sliding_window" in values and values["use_sliding_window"]):
      window = None
    first = values["max_window_layers"] if "max_window_layers" in values else 28
    sliding = tuple(window is not None and i >= first for i in range(num_layers))
  else:
    patterns = [values[name] for name in ("sliding_window_pattern", "_sliding_window_pattern") if name in values]
    every = patterns[0] if patterns else family.window_pattern
    sliding = tuple(bool((i + 1) % every) for i in range(num_layers))
  if "layer_types" in values and values["layer_types"] is not None:
    kinds = values["layer_types"]
    if len(kinds) != num_layers or not set(kinds) <= set(_LAYER_TYPES):
      raise ValueError(
        f"config.json has layer_types={list(kinds)}; it needs one of {_either(_LAYER_TYPES)} for each of {num_layers} "
        "layers."
      )
    sliding = tuple(_LAYER_TYPES[kind] for kind in kinds)
  if not any(sliding):
    return None, ()
  if window is None or window < 1:
    raise ValueError(f"config.json has sliding_window={window} with sliding layers; it must be at least 1.")
  return window, sliding


def to_huggingface(cfg: ModelConfig) -> dict[str, Any]:
  """The config.json of a model: what `from_huggingface` reads back to the same options (up to vocab_size) and
  transformers loads.
  """
  family = FAMILIES[cfg.family]
  config: dict[str, Any] = {"model_type": cfg.family, "architectures": [family.architecture]}
  for name, targets in family.fields.items():
    config[name] = getattr(cfg, targets[0])
    if targets == ("activation",):
      config[name] = _ACTIVATIONS_WRITTEN[cfg.activation]
    elif targets == ("query_scale",):
      config[name] = round(cfg.query_scale**-2)
  config.update(rope.write(
    family.rope, theta=cfg.rope_theta, scaling=cfg.rope_scaling, local_theta=cfg.rope_local_theta,
    partial=cfg.rotary_dim / cfg.head_dim,
  ))
  sliding = cfg.sliding_layers or (False,) * cfg.num_layers
  if family.windows == "all":
    config["sliding_window"] = cfg.window
  elif family.windows != "none":
    config["layer_types"] = ["sliding_attention" if each else "full_attention" for each in sliding]
    config.update({} if cfg.window is None else {"sliding_window": cfg.window})
  if family.windows == "upper":
    first = sliding.index(True) if any(sliding) else cfg.num_layers
    config.update(use_sliding_window=any(sliding), max_window_layers=first)
  return config


def _either(values: Iterable[Any]) -> str:
  return " or ".join(repr(value) for value in values)


def new_model_config(
  *, hidden_size: int, num_layers: int, num_heads: int, num_kv_heads: int, head_dim: int, mlp_size: int,
  max_positions: int, tie_embeddings: bool, rope_theta: float, norm_eps: float, vocab_size: int,
) -> ModelConfig:
  """A Llama-type decoder of these sizes."""
  return from_huggingface({
    "model_type": "llama", "vocab_size": vocab_size, "hidden_size": hidden_size, "num_hidden_layers": num_layers,
    "num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "head_dim": head_dim,
    "intermediate_size": mlp_size, "max_position_embeddings": max_positions, "tie_word_embeddings": tie_embeddings,
    "rope_theta": rope_theta, "rms_norm_eps": norm_eps,
  })

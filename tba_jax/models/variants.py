"""Model families as data: what a Hugging Face config.json says about the maths, as one frozen record of options.

`from_huggingface` reads or refuses every field: a field that it does not know is an error, because a field skipped in silence is a model
that is subtly another one. What is known to leave the forward pass alone is listed in HARMLESS.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tba_jax.models.rope import RopeScaling, read_rope_scaling, write_rope_scaling


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
  """Everything that changes a decoder's maths or shapes. Hashable, so that it can be a static argument of jit.

  `vocab_size` counts the token ids that exist; `num_embeddings` (V) counts the rows of the table, which may hold padding rows that are
  never sampled and take no part in any normaliser. A window w lets a position see itself and the w - 1 positions before it.
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
  rope_local_theta: float | None = None  # of the sliding layers where it differs; never scaled
  window: int | None = None
  sliding_layers: tuple[bool, ...] = ()  # which layers use the window; () when none does
  scale_embeddings: bool = False  # multiply them by sqrt(D)
  attn_softcap: float | None = None
  final_softcap: float | None = None

  def __post_init__(self):
    if not 0 < self.vocab_size <= self.num_embeddings:
      raise ValueError(
        f"vocab_size={self.vocab_size} must be between 1 and num_embeddings={self.num_embeddings}, the rows of the embedding table; "
        "is this the tokenizer of another model?"
      )
    if self.num_kv_heads <= 0 or self.num_heads % self.num_kv_heads:
      raise ValueError(f"num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}.")
    if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
      raise ValueError(f"rotary_dim={self.rotary_dim} must be even and at most head_dim={self.head_dim}.")
    if self.sliding_layers and (len(self.sliding_layers) != self.num_layers or self.window is None):
      raise ValueError(
        f"sliding_layers has {len(self.sliding_layers)} entries and window={self.window}; it needs one entry for each of "
        f"num_layers={self.num_layers} and a window."
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
  """How one model_type writes its config.json.

  `fields` maps a field of theirs to the options of ours that it sets, and is read in both directions. `defaults` holds what
  transformers assumes where config.json is silent. `fixed` are options that the family has without saying so. `only` lists fields
  whose other values are maths that we do not have.
  """

  architecture: str
  fields: Mapping[str, tuple[str, ...]]
  defaults: Mapping[str, Any]
  fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  only: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)


COMMON_FIELDS = {
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
COMMON_DEFAULTS = {
  "num_key_value_heads": None,
  "head_dim": None,
  "rms_norm_eps": 1e-6,
  "tie_word_embeddings": False,
  "hidden_act": "silu",
}

FAMILIES: dict[str, Family] = {
  "llama": Family(
    architecture="LlamaForCausalLM",
    fields={**COMMON_FIELDS, "attention_bias": ("qkv_bias", "o_bias"), "mlp_bias": ("mlp_bias",)},
    defaults={**COMMON_DEFAULTS, "max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False},
  ),
}

# Names of activation functions, theirs to ours.
ACTIVATION_NAMES = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
                    "gelu_fast": "gelu_tanh", "relu": "relu"}

ROPE_FIELDS = ("rope_theta", "rope_scaling", "rope_parameters")

# Fields that any family may carry and whose other values are maths that we do not have.
ONLY_EVERYWHERE = {
  "is_encoder_decoder": (False,), "add_cross_attention": (False,), "is_decoder": (False, True), "quantization_config": (None,),
  "auto_map": (None,), "pruned_heads": (None, {}), "tie_encoder_decoder": (False,), "cross_attention_hidden_size": (None,),
}

# Fields that do not change the forward pass: bookkeeping, token ids, generation settings, initialisation, and dropout, which neither
# scoring nor training applies here (a policy with dropout has no one probability for a token).
HARMLESS = frozenset("""
  _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path architectures attention_dropout attention_probs_dropout_prob attn_pdrop
  bad_words_ids begin_suppress_tokens bos_token_id cache_implementation chunk_size_feed_forward decoder_start_token_id
  diversity_penalty do_sample dtype early_stopping embd_pdrop encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty
  finetuning_task forced_bos_token_id forced_eos_token_id hidden_dropout hidden_dropout_prob id2label initializer_range
  label2id length_penalty max_length min_length model_type no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences
  output_attentions output_hidden_states output_scores pad_token_id prefix pretraining_tp problem_type remove_invalid_values
  repetition_penalty resid_pdrop return_dict return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature
  tf_legacy_loss tokenizer_class top_k top_p torch_dtype torchscript transformers_version typical_p unsloth_version unsloth_fixed use_bfloat16 use_cache
""".split())


def from_huggingface(config: Mapping[str, Any]) -> ModelConfig:
  """The options that a config.json stands for. `vocab_size` comes out as the number of table rows; the tokenizer may lower it.

  Raises: ValueError for a model_type that is not in FAMILIES, a field that is not known, and a value whose maths we do not have.
  """
  family_name, family = _family_of(config)
  known = {*family.fields, *family.only, *ROPE_FIELDS, *ONLY_EVERYWHERE, *HARMLESS}
  unknown = sorted(set(config) - known)
  if unknown:
    raise ValueError(
      f"config.json has fields that a {family_name} model here does not know: {', '.join(f'{k}={config[k]!r}' for k in unknown)}. "
      "They may change the model; if they cannot, add them to HARMLESS in models/variants.py."
    )
  for name, allowed in {**ONLY_EVERYWHERE, **family.only}.items():
    if name in config and config[name] not in allowed:
      raise ValueError(f"config.json has {name}={config[name]!r}; a {family_name} model here takes only {_either(allowed)}.")
  raw = {**family.defaults, **config}
  missing = sorted(set(family.fields) - set(raw))
  if missing:
    raise ValueError(f"config.json lacks {', '.join(missing)}, which a {family_name} model needs.")
  options = dict(family.fixed)
  for name, targets in family.fields.items():
    options.update({target: raw[name] for target in targets})
  return _complete(family_name, options, raw)


def _family_of(config: Mapping[str, Any]) -> tuple[str, Family]:
  if "model_type" not in config:
    raise ValueError("config.json has no model_type, so its family is unknown.")
  name = config["model_type"]
  if name not in FAMILIES:
    raise ValueError(f"model_type={name!r} is not supported; it must be one of {', '.join(sorted(FAMILIES))}.")
  family = FAMILIES[name]
  architectures = config["architectures"] if "architectures" in config else None
  stem = family.architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
  allowed = {family.architecture, f"{stem}Model", f"{stem}ForSequenceClassification", f"{stem}ForTokenClassification"}
  if architectures and not set(architectures) <= allowed:
    raise ValueError(f"config.json has architectures={list(architectures)}; model_type={name!r} takes {_either(sorted(allowed))}.")
  return name, family


def _complete(family: str, options: dict[str, Any], raw: Mapping[str, Any]) -> ModelConfig:
  """Fills in what follows from other options, as transformers does."""
  if options["head_dim"] is None:
    options["head_dim"] = options["hidden_size"] // options["num_heads"]
  if options["num_kv_heads"] is None:
    options["num_kv_heads"] = options["num_heads"]
  if options["activation"] not in ACTIVATION_NAMES:
    raise ValueError(f"hidden_act={options['activation']!r} is not supported; it must be {_either(sorted(ACTIVATION_NAMES))}.")
  options["activation"] = ACTIVATION_NAMES[options["activation"]]
  theta, scaling = read_rope_scaling(raw, max_positions=options["max_positions"])
  options.setdefault("query_scale", options["head_dim"] ** -0.5)
  options.setdefault("rotary_dim", options["head_dim"])
  return ModelConfig(family=family, vocab_size=options["num_embeddings"], rope_theta=theta, rope_scaling=scaling, **options)


def to_huggingface(cfg: ModelConfig) -> dict[str, Any]:
  """The config.json of a model: what `from_huggingface` reads back to the same options (up to vocab_size) and transformers loads."""
  family = FAMILIES[cfg.family]
  config: dict[str, Any] = {"model_type": cfg.family, "architectures": [family.architecture]}
  for name, targets in family.fields.items():
    config[name] = getattr(cfg, targets[0])
  config["hidden_act"] = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu"}[cfg.activation]
  config.update(write_rope_scaling(cfg.rope_theta, cfg.rope_scaling))
  return config


def _either(values) -> str:
  return " or ".join(repr(value) for value in values)

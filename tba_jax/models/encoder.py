"""BERT-like encoders (BERT, RoBERTa, MiniLM): sequence classification and sentence embeddings, for rewards and metrics.

Inference only. The tree is a plain nested dict as a decoder's: "embed" (word, position, token_type tables and a norm),
"layers" stacked on a leading axis, and, for a sequence classifier, "pooler" and "classifier".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from tba_jax.models import attention as attention_lib
from tba_jax.models.fields import check_kinds
from tba_jax.models.hf_names import HfTensor, transform_of
from tba_jax.models.layers import Attention, Mlp, Norm
from tba_jax.models.variants import ACTIVATION_NAMES, HARMLESS, ModelConfig, ONLY_EVERYWHERE

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig:
  """Everything that changes an encoder's maths or shapes. Hashable."""

  family: str  # bert | roberta
  vocab_size: int
  hidden_size: int
  num_layers: int
  num_heads: int
  mlp_size: int
  max_positions: int  # rows of the position table
  num_token_types: int
  position_offset: int  # row of the table at which the first token stands
  norm_eps: float
  activation: str
  max_tokens: int  # longest row that may be encoded, special tokens included
  labels: tuple[str, ...] = ()  # of a sequence classifier; () for a bare encoder, which has no head

  @property
  def block(self) -> ModelConfig:
    """The same as options of a decoder's attention and MLP."""
    return ModelConfig(
      family=self.family, vocab_size=self.vocab_size, num_embeddings=self.vocab_size, hidden_size=self.hidden_size,
      num_layers=self.num_layers, num_heads=self.num_heads, num_kv_heads=self.num_heads,
      head_dim=self.hidden_size // self.num_heads,
      mlp_size=self.mlp_size, max_positions=self.max_positions, norm_eps=self.norm_eps, tie_embeddings=True,
      query_scale=(self.hidden_size // self.num_heads) ** -0.5, activation=self.activation, gated_mlp=False,
      norm="layer",
      qkv_bias=True, o_bias=True, mlp_bias=True, positions="learned",
    )


_FIELDS = {
  "vocab_size": "vocab_size", "hidden_size": "hidden_size", "num_hidden_layers": "num_layers",
  "num_attention_heads": "num_heads",
  "intermediate_size": "mlp_size", "max_position_embeddings": "max_positions", "type_vocab_size": "num_token_types",
  "layer_norm_eps": "norm_eps", "hidden_act": "activation",
}
_DEFAULTS = {"hidden_act": "gelu", "layer_norm_eps": 1e-12, "type_vocab_size": 2, "max_position_embeddings": 512}
_ONLY = {**ONLY_EVERYWHERE, "is_decoder": (False,), "position_embedding_type": ("absolute",)}
# Dropout, the share of an embedding and its head (we have no such head), and the settings of training and export tools.
_HARMLESS = HARMLESS | {
  "attention_probs_dropout_prob", "hidden_dropout_prob", "tie_word_embeddings", "model_name", "directionality"
}
FAMILIES = ("bert", "roberta")
_DEFAULT_PAD = {"bert": 0, "roberta": 1}


def encoder_from_huggingface(config: Mapping[str, Any]) -> EncoderConfig:
  """The options that a config.json stands for. Raises ValueError for another model_type or architecture, unknown fields
  and maths we do not have.
  """
  check_kinds(config)
  family = config["model_type"] if "model_type" in config else None
  if family not in FAMILIES:
    raise ValueError(
      f"model_type={family!r} is no encoder that is supported; it must be one of {', '.join(FAMILIES)}."
    )
  unknown = sorted(set(config) - {*_FIELDS, *_ONLY, *_HARMLESS})
  if unknown:
    raise ValueError(
      f"config.json has fields that a {family} encoder here does not know: "
      f"{', '.join(f'{k}={config[k]!r}' for k in unknown)}."
    )
  for name, allowed in _ONLY.items():
    if name in config and config[name] not in allowed:
      raise ValueError(f"config.json has {name}={config[name]!r}; a {family} encoder here takes only {allowed[0]!r}.")
  raw = {**_DEFAULTS, **config}
  missing = sorted(set(_FIELDS) - set(raw))
  if missing:
    raise ValueError(f"config.json lacks {', '.join(missing)}, which a {family} encoder needs.")
  options = {ours: raw[theirs] for theirs, ours in _FIELDS.items()}
  if options["activation"] not in ACTIVATION_NAMES:
    raise ValueError(f"hidden_act={options['activation']!r} is not supported.")
  options["activation"] = ACTIVATION_NAMES[options["activation"]]
  if options["hidden_size"] % options["num_heads"]:
    raise ValueError(
      f"hidden_size={options['hidden_size']} must be a multiple of num_attention_heads={options['num_heads']}."
    )
  pad = config["pad_token_id"] if "pad_token_id" in config else _DEFAULT_PAD[family]
  # RoBERTa counts positions from the row after that of its padding token.
  offset = pad + 1 if family == "roberta" else 0
  return EncoderConfig(
    family=family, position_offset=offset, max_tokens=options["max_positions"] - offset,
    labels=_labels(family, config), **options,
  )


def _labels(family: str, config: Mapping[str, Any]) -> tuple[str, ...]:
  """Names of a sequence classifier's outputs, in their order; () for a model without that head."""
  stem = {"bert": "Bert", "roberta": "Roberta"}[family]
  architectures = (config["architectures"] if "architectures" in config else None) or [f"{stem}Model"]
  classifier = f"{stem}ForSequenceClassification"
  allowed = {f"{stem}Model", f"{stem}ForMaskedLM", f"{stem}ForPreTraining", classifier}
  if not set(architectures) <= allowed:
    raise ValueError(
      f"config.json has architectures={list(architectures)}; a {family} encoder here takes "
      f"{', '.join(sorted(allowed))}."
    )
  if classifier not in architectures:
    return ()
  if "id2label" in config and config["id2label"] is not None:
    return tuple(name for _, name in sorted((int(i), name) for i, name in config["id2label"].items()))
  number = config["num_labels"] if "num_labels" in config else 2  # as transformers assumes
  return tuple(f"LABEL_{i}" for i in range(number))


class EncoderBlock(nnx.Module):
  """Attention and MLP, each followed by the norm of its sum with the residual."""

  def __init__(self, cfg: EncoderConfig, rngs: nnx.Rngs):
    self.attn, self.mlp = Attention(cfg.block, rngs), Mlp(cfg.block, rngs)
    self.attn_norm = Norm(cfg.hidden_size, kind="layer", eps=cfg.norm_eps)
    self.mlp_norm = Norm(cfg.hidden_size, kind="layer", eps=cfg.norm_eps)

  def __call__(self, x: jax.Array, attend: Callable[..., tuple[jax.Array, None]]) -> jax.Array:
    attended, _ = self.attn(x, None, attend)
    x = self.attn_norm(x + attended)
    return self.mlp_norm(x + self.mlp(x))


@functools.lru_cache(maxsize=16)
def _graphdefs(cfg: EncoderConfig) -> tuple[nnx.GraphDef, nnx.GraphDef]:
  block = nnx.eval_shape(lambda: EncoderBlock(cfg, nnx.Rngs(0)))
  norm = nnx.eval_shape(lambda: Norm(cfg.hidden_size, kind="layer", eps=cfg.norm_eps))
  return nnx.graphdef(block), nnx.graphdef(norm)


def encode(params: Params, cfg: EncoderConfig, tokens: jax.Array, lengths: jax.Array, *, dtype: jax.typing.DTypeLike,
           token_types: jax.Array | None = None) -> jax.Array:
  """Hidden states [B, T, D] in dtype of tokens int32 [B, T], padded on the right; outputs at padding mean nothing.

  Args:
    lengths: int32 [B]. token_types: int32 [B, T], which text of a pair a token is of; None for 0 everywhere.
  Raises: ValueError if T is beyond the position table.
  """
  num_tokens = tokens.shape[1]
  if num_tokens + cfg.position_offset > cfg.max_positions:
    raise ValueError(
      f"rows of {num_tokens} tokens are too long for this encoder, which takes {cfg.max_tokens}; cut them first."
    )
  block_def, norm_def = _graphdefs(cfg)
  embed = params["embed"]
  x = jnp.take(
    embed["word"]["table"], tokens, axis=0, mode="clip"
  ) + embed["position"]["table"][cfg.position_offset :][:num_tokens]
  x = x + (
    embed["token_type"]["table"][0] if token_types is None else jnp.take(
      embed["token_type"]["table"], token_types, axis=0
    )
  )
  x = nnx.merge(norm_def, embed["norm"])(x.astype(dtype))
  mask = jnp.broadcast_to((jnp.arange(num_tokens) < lengths[:, None])[:, None, :], (*tokens.shape, num_tokens))

  def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, None]:
    return attention_lib.attention(q, k, v, mask, scale=cfg.block.query_scale), None

  def body(x: jax.Array, layer: Params) -> tuple[jax.Array, None]:
    return nnx.merge(block_def, layer)(x, attend), None

  return jax.lax.scan(body, x, params["layers"])[0]


def classify(params: Params, cfg: EncoderConfig, tokens: jax.Array, lengths: jax.Array, *, dtype: jax.typing.DTypeLike,
             token_types: jax.Array | None = None) -> jax.Array:
  """Logits float32 [B, labels] of a sequence classifier, from the first token. Arguments as in `encode`."""
  first = encode(params, cfg, tokens, lengths, dtype=dtype, token_types=token_types)[:, 0].astype(jnp.float32)
  pooled = jnp.tanh(first @ params["pooler"]["kernel"] + params["pooler"]["bias"])
  return pooled @ params["classifier"]["kernel"] + params["classifier"]["bias"]


def embed_sentences(
  params: Params, cfg: EncoderConfig, tokens: jax.Array, lengths: jax.Array, *, dtype: jax.typing.DTypeLike
) -> jax.Array:
  """Unit vectors float32 [B, D]: the mean of a text's hidden states, normalised (as sentence-transformers' MiniLM)."""
  hidden = encode(params, cfg, tokens, lengths, dtype=dtype).astype(jnp.float32)
  real = (jnp.arange(tokens.shape[1]) < lengths[:, None])[..., None]
  mean = jnp.sum(jnp.where(real, hidden, 0.0), axis=1) / jnp.maximum(lengths, 1)[:, None]
  return mean / jnp.maximum(jnp.linalg.norm(mean, axis=-1, keepdims=True), 1e-12)


# Names without the prefix of the bare model, our leaf, and the transform of `hf_names`.
_EMBED_NAMES = (
  ("embeddings.word_embeddings.weight", "embed/word/table", "same"),
  ("embeddings.position_embeddings.weight", "embed/position/table", "same"),
  ("embeddings.token_type_embeddings.weight", "embed/token_type/table", "same"),
  ("embeddings.LayerNorm.weight", "embed/norm/scale", "same"),
  ("embeddings.LayerNorm.bias", "embed/norm/bias", "same"),
)
_LAYER_NAMES = (
  *((f"attention.self.{name}.{kind}", f"attn/{leaf}", transform)
    for name, letter in (("query", "q"), ("key", "k"), ("value", "v"))
    for kind, leaf,
    transform in (("weight", f"{letter}/kernel", "heads_out"), ("bias", f"{letter}/bias", "heads_bias"))),
  ("attention.output.dense.weight", "attn/o/kernel", "heads_in"),
  ("attention.output.dense.bias", "attn/o/bias", "same"),
  ("attention.output.LayerNorm.weight", "attn_norm/scale", "same"),
  ("attention.output.LayerNorm.bias", "attn_norm/bias", "same"),
  ("intermediate.dense.weight", "mlp/up/kernel", "swap"),
  ("intermediate.dense.bias", "mlp/up/bias", "same"),
  ("output.dense.weight", "mlp/down/kernel", "swap"),
  ("output.dense.bias", "mlp/down/bias", "same"),
  ("output.LayerNorm.weight", "mlp_norm/scale", "same"),
  ("output.LayerNorm.bias", "mlp_norm/bias", "same"),
)
# Where the two dense layers of the classifier are. RoBERTa's own "pooler" is not part of its classifier.
_HEAD_NAMES = {
  "bert": {"pooler": "pooler.dense", "classifier": "classifier"},
  "roberta": {"pooler": "classifier.dense", "classifier": "classifier.out_proj"},
}
# Other tasks' heads and buffers. A pooler belongs to the classifier; without one nothing here reads it.
_UNUSED = ("cls.", "lm_head.", "embeddings.position_ids", "embeddings.token_type_ids", "pooler.")


def table_name(cfg: EncoderConfig, hf_name: str) -> str:
  """The name under which `encoder_tensors` has a checkpoint's tensor: without the model's prefix, norms spelt newly."""
  name = hf_name.removeprefix(f"{cfg.family}.")
  return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def is_unused(cfg: EncoderConfig, hf_name: str) -> bool:
  """Whether a tensor that `encoder_tensors` does not name is of another task, or a buffer, and to be skipped."""
  return table_name(cfg, hf_name).startswith(_UNUSED)


def encoder_tensors(cfg: EncoderConfig) -> list[HfTensor]:
  """All tensors of a checkpoint of this encoder, one entry per leaf and layer."""
  block = jax.eval_shape(lambda: nnx.to_pure_dict(nnx.state(EncoderBlock(cfg, nnx.Rngs(0)), nnx.Param)))
  width = cfg.hidden_size
  rows = {"word": cfg.vocab_size, "position": cfg.max_positions, "token_type": cfg.num_token_types}
  entries = []
  for name, path, kind in _EMBED_NAMES:
    part = path.split("/")[1]
    entries.append(_entry(name, path, None, kind, (rows[part], width) if part in rows else (width,)))
  for name, path, kind in _LAYER_NAMES:
    shape = functools.reduce(lambda node, key: node[key], path.split("/"), block).shape
    for i in range(cfg.num_layers):
      entries.append(_entry(f"encoder.layer.{i}.{name}", f"layers/{path}", i, kind, shape))
  if cfg.labels:
    for part, size in (("pooler", width), ("classifier", len(cfg.labels))):
      prefix = _HEAD_NAMES[cfg.family][part]
      entries.append(_entry(f"{prefix}.weight", f"{part}/kernel", None, "swap", (width, size)))
      entries.append(_entry(f"{prefix}.bias", f"{part}/bias", None, "same", (size,)))
  return entries


def _entry(hf_name: str, path: str, layer: int | None, kind: str, shape: tuple[int, ...]) -> HfTensor:
  return HfTensor(hf_name, tuple(path.split("/")), layer, transform_of(kind, shape))


def abstract_params(cfg: EncoderConfig, dtype: jax.typing.DTypeLike = jnp.float32) -> Params:
  """The shapes and dtypes of an encoder's parameters."""
  tree: Params = {}
  for entry in encoder_tensors(cfg):
    shape = entry.transform.tree_shape
    shape = shape if entry.layer is None else (cfg.num_layers, *shape)
    *folders, last = entry.path
    node = functools.reduce(lambda node, key: node.setdefault(key, {}), folders, tree)
    node[last] = jax.ShapeDtypeStruct(shape, dtype)
  return tree

"""Models that say how much of an attribute (toxicity, say) a text has: log-probabilities of one named class.

Three kinds, told apart by the model's config.json: an encoder with a classifier's head reads the answer alone and has
the class among its labels; a decoder with a scalar head reads the answer alone, its class has probability
sigmoid(score); any other decoder is a guard, which reads attack and answer in its chat template and whose verdict is
the first token after it.
"""

from __future__ import annotations

from collections.abc import Sequence
import functools
from typing import Any, Protocol

import jax
from jax.sharding import Mesh, NamedSharding
import jax.numpy as jnp
import numpy as np

from tba_jax import sharding
from tba_jax.checkpoints.encoders import load_encoder
from tba_jax.checkpoints.huggingface import load_model, load_reward_model
from tba_jax.checkpoints.locate import locate
from tba_jax.checkpoints.stored import read_json
from tba_jax.models import encoder
from tba_jax.models.encoder import EncoderConfig
from tba_jax.models.heads import token_logprobs
from tba_jax.models.variants import ModelConfig
from tba_jax.tasks.reward_model import RewardModel
from tba_jax.tokenizer import Tokenizer

_ROWS_AT_ONCE = 32
_LENGTH_MULTIPLE = 64
# What Llama Guard 3 writes before its verdict.
_BEFORE_VERDICT = "\n\n"


class Scorer(Protocol):
  """(attacks, answers), one answer to each attack -> log-probability of the class, float32 [n], nats."""

  def __call__(self, attacks: Sequence[str], answers: Sequence[str]) -> np.ndarray: ...


class EncoderScorer:
  """A classifier's log-probability of one of its labels. Raises: ValueError if it has no such label."""

  def __init__(self, cfg: EncoderConfig, params: Any, tokenizer: Tokenizer, *, class_name: str, dtype: Any):
    if class_name not in cfg.labels:
      raise ValueError(f"scorer_class={class_name!r} is no label of the scorer, which has "
                       f"{', '.join(cfg.labels) or 'none: it is no classifier'}; use one of its own.")
    self._cfg, self._params, self._tokenizer = cfg, params, tokenizer
    self._index = cfg.labels.index(class_name)
    self._logits = jax.jit(functools.partial(encoder.classify, cfg=cfg, dtype=dtype))

  def __call__(self, attacks: Sequence[str], answers: Sequence[str]) -> np.ndarray:
    del attacks
    return _in_pieces(self._piece, answers)

  def _piece(self, texts: Sequence[str]) -> np.ndarray:
    tokens, lengths = self._tokenizer.encode_rows(texts, max_tokens=self._cfg.max_tokens)
    logits = self._logits(self._params, tokens=tokens, lengths=np.maximum(lengths, 1))
    return np.asarray(jax.nn.log_softmax(logits, axis=-1))[:, self._index]


class RewardScorer:
  """log sigmoid of a scalar head's score of the answer, cut to what the model takes."""

  def __init__(self, model: RewardModel, tokenizer: Tokenizer, *, max_tokens: int):
    self._model, self._tokenizer, self._max_tokens = model, tokenizer, max_tokens

  def __call__(self, attacks: Sequence[str], answers: Sequence[str]) -> np.ndarray:
    del attacks
    return _in_pieces(self._piece, answers)

  def _piece(self, texts: Sequence[str]) -> np.ndarray:
    # An empty answer is read as a space: there must be a token to read the score at.
    rows = [np.array(self._tokenizer.encode(text or " ")[: self._max_tokens], np.int32) for text in texts]
    return np.asarray(jax.nn.log_sigmoid(self._model(rows)))


class GuardScorer:
  """Log-probability, over the whole vocabulary, that a guard's verdict on (attack, answer) begins with the class name.

  Source: the use of Llama Guard in Lee et al. 2024, arXiv:2405.18540, and its code. Raises: ValueError for a model
  without a chat template.
  """

  def __init__(self, cfg: ModelConfig, params: Any, tokenizer: Tokenizer, *, class_name: str, dtype: Any):
    if not tokenizer.has_chat_template:
      raise ValueError("the scorer is a decoder without a classifier's head and without a chat template; a guard needs "
                       "the template of its conversations.")
    self._params, self._tokenizer = params, tokenizer
    self._verdict = tokenizer.encode(class_name)[0]
    self._max_tokens = cfg.max_positions
    self._log_probs = jax.jit(functools.partial(_last_log_probs, cfg=cfg, dtype=dtype))

  def __call__(self, attacks: Sequence[str], answers: Sequence[str]) -> np.ndarray:
    return _in_pieces(self._piece, list(zip(attacks, answers)))

  def _piece(self, pairs: Sequence[tuple[str, str]]) -> np.ndarray:
    rows = []
    for attack, answer in pairs:
      chat = [{"role": "user", "content": attack}, {"role": "assistant", "content": answer}]
      ids = [*self._tokenizer.chat(chat), *self._tokenizer.encode(_BEFORE_VERDICT), self._verdict]
      rows.append(ids[-self._max_tokens :])  # the end holds what is judged
    longest = max(map(len, rows))
    width = min(self._max_tokens, -(-longest // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE)
    tokens, lengths = np.zeros((len(rows), width), np.int32), np.array([len(ids) for ids in rows], np.int32)
    for row, ids in zip(tokens, rows):
      row[: len(ids)] = ids
    return np.asarray(self._log_probs(self._params, tokens, lengths))


def _last_log_probs(params: Any, tokens: jax.Array, lengths: jax.Array, *, cfg: ModelConfig, dtype: Any) -> jax.Array:
  """float32 [B], of the last token of each row."""
  at = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
  segment_ids = (at < lengths[:, None]).astype(jnp.int32)
  log_p, _ = token_logprobs(params, cfg, tokens, at, segment_ids, temperature=1.0, dtype=dtype)
  return jnp.take_along_axis(log_p, lengths[:, None] - 1, axis=1)[:, 0]


def _in_pieces(score: Any, items: Sequence[Any]) -> np.ndarray:
  """score(items) float32 [n], by calls of exactly _ROWS_AT_ONCE items: one number of rows is compiled."""
  found = []
  for start in range(0, len(items), _ROWS_AT_ONCE):
    piece = list(items[start : start + _ROWS_AT_ONCE])
    filled = piece + piece[-1:] * (_ROWS_AT_ONCE - len(piece))
    found.append(score(filled)[: len(piece)])
  return np.concatenate(found).astype(np.float32)


def put_beside(device_or_mesh: jax.Device | Mesh) -> Any:
  """`put` of the loaders: a leaf onto a device, or over a mesh by the rules of `sharding`."""

  def put(tree_path: tuple[str, ...], array: np.ndarray) -> jax.Array:
    if not isinstance(device_or_mesh, Mesh):
      return jax.device_put(array, device_or_mesh)
    spec = sharding.param_spec("/".join(tree_path), array.shape, device_or_mesh)
    return jax.device_put(array, NamedSharding(device_or_mesh, spec))

  return put


def load_scorer(path: str, device_or_mesh: jax.Device | Mesh, *, class_name: str, dtype: Any) -> Scorer:
  """The scorer that a model folder holds, see the module.

  Raises: ValueError if the model cannot be loaded or does not know the class.
  """
  folder, put = locate(path), put_beside(device_or_mesh)
  config = read_json(folder / "config.json") if folder.is_dir() else {}  # a .gguf file holds a decoder
  architectures = config["architectures"] if "architectures" in config else None
  if "model_type" in config and config["model_type"] in encoder.FAMILIES:
    return EncoderScorer(*load_encoder(path, dtype=dtype, put=put), class_name=class_name, dtype=dtype)
  if "base_config" in config or any(name.endswith("ForSequenceClassification") for name in architectures or ()):
    cfg, params, tokenizer = load_reward_model(path, dtype=dtype, put=put)
    return RewardScorer(RewardModel(cfg, params, dtype=dtype), tokenizer, max_tokens=cfg.max_positions)
  return GuardScorer(*load_model(path, dtype=dtype, put=put), class_name=class_name, dtype=dtype)

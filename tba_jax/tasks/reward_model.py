"""A decoder with a scalar head beside a searcher: scores of rows of tokens, by few compiled shapes."""

from __future__ import annotations

from collections.abc import Sequence
import functools
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import jax.numpy as jnp
import numpy as np

from tba_jax import sharding
from tba_jax.checkpoints.huggingface import load_reward_model
from tba_jax.models import transformer
from tba_jax.models.heads import scalar_scores
from tba_jax.models.variants import ModelConfig
from tba_jax.tokenizer import Tokenizer

_LENGTH_MULTIPLE = 64  # rows are padded to multiples of this


class RewardModel:
  """Scores whole texts, given as ids of the policy's tokenizer.

  Args:
    cfg, params: as `load_reward_model` gives them. dtype: of the computation.
  """

  def __init__(self, cfg: ModelConfig, params: Any, *, dtype: Any):
    self._params = params
    self._score = jax.jit(functools.partial(_score, cfg=cfg, dtype=dtype))
    self._max_tokens = cfg.max_positions

  def __call__(self, rows: Sequence[np.ndarray]) -> np.ndarray:
    """float32 [len(rows)], each read at the end of its row. Raises: ValueError for a row that is too long."""
    longest = max(len(row) for row in rows)
    if longest > self._max_tokens:
      raise ValueError(f"a text of {longest} tokens is longer than the {self._max_tokens} that the reward model takes.")
    width = min(self._max_tokens, -(-longest // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE)
    tokens = np.zeros((1 << (len(rows) - 1).bit_length(), width), np.int32)
    lengths = np.ones(len(tokens), np.int32)  # of the rows that only fill the batch up
    for i, row in enumerate(rows):
      tokens[i, : len(row)], lengths[i] = row, len(row)
    return np.asarray(self._score(self._params, tokens, lengths))[: len(rows)]


def _score(params: Any, tokens: jax.Array, lengths: jax.Array, *, cfg: ModelConfig, dtype: Any) -> jax.Array:
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
  segment_ids = (positions < lengths[:, None]).astype(jnp.int32)
  return scalar_scores(params, cfg, tokens, positions, segment_ids, dtype=dtype)


def load_beside(path: str, device_or_mesh: jax.Device | Mesh, tokenizer: Tokenizer, *, dtype: Any) -> RewardModel:
  """Loads a reward model onto a searcher's device, or sharded over its mesh.

  Args:
    path: as for `load_reward_model`.
    tokenizer: the policy's.
  Raises: ValueError if the model cannot be loaded or has another vocabulary: it is given the policy's ids.
  """
  on_mesh = isinstance(device_or_mesh, Mesh)

  def put(tree_path: tuple[str, ...], array: np.ndarray) -> jax.Array:
    if not on_mesh:
      return jax.device_put(array, device_or_mesh)
    spec = sharding.param_spec("/".join(tree_path), array.shape, device_or_mesh)
    return jax.device_put(array, NamedSharding(device_or_mesh, spec))

  cfg, params, own = load_reward_model(path, dtype=dtype, put=put)
  vocabulary = own.hf.get_vocab()
  for token, index in tokenizer.hf.get_vocab().items():
    if index < tokenizer.vocab_size and vocabulary.get(token) != index:
      raise ValueError(
        f"reward model {path} has another vocabulary than the policy (token {token!r} is {vocabulary.get(token)}, not "
        f"{index}); use one that was trained on the policy's tokenizer."
      )
  return RewardModel(cfg, params, dtype=dtype)


def new_reward_model(cfg: ModelConfig, device_or_mesh: jax.Device | Mesh, *, seed: int) -> RewardModel:
  """Random weights, for runs that only try the path: what it prefers means nothing."""
  params = new_reward_params(cfg, jax.random.key(seed))
  target = NamedSharding(device_or_mesh, PartitionSpec()) if isinstance(device_or_mesh, Mesh) else device_or_mesh
  return RewardModel(cfg, jax.device_put(params, target), dtype=jnp.float32)


def new_reward_params(cfg: ModelConfig, key: jax.Array) -> Any:
  """A new decoder's parameters (tied embeddings) with a scalar head."""
  body, head = jax.random.split(key)
  scale = cfg.hidden_size**-0.5
  kernel = scale * jax.random.normal(head, (cfg.hidden_size, 1), jnp.float32)
  return {**transformer.init_params(cfg, body, jnp.float32), "score": {"kernel": kernel}}

"""What is read off the hidden states: log-probabilities of tokens, and a reward model's score of a sequence."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tba_jax import sharding
from tba_jax.models.transformer import Params, hidden_states, masked_logits
from tba_jax.models.variants import ModelConfig

# Finite in place of -inf, so that 0 * logit is 0 in the entropy and in its gradient; exp of it is exactly 0.
NOT_A_TOKEN = -1e30


def token_logprobs(params: Params, cfg: ModelConfig, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array, *,
                   temperature: float | jax.Array, dtype: jax.typing.DTypeLike, remat: str = "none",
                   chunk_tokens: int = 1024,
                   backend: str = "xla", mesh: Mesh | None = None,
                   constrain: Callable[[jax.Array], jax.Array] | None = None) -> tuple[jax.Array, jax.Array]:
  """Log-probability of every token given those before it in its segment, and the entropy of its distribution.

  The policy is softmax(logits / temperature) over the full vocabulary. The head runs over pieces of the row with
  rematerialisation, so that no [B, T, V] array exists in the forward or the backward pass.

  Args:
    params: stacked layers. tokens, positions, segment_ids: int32 [B, T] as in `hidden_states`; the tokens of a segment
      are adjacent.
    temperature: > 0. dtype, remat, backend, mesh, constrain: as in `hidden_states`.
    chunk_tokens: about how many tokens' logits (f32, V each) exist at once, over all rows.
  Returns: (log_p, entropy), float32 [B, T] in nats, aligned with the token that is scored; 0 at the first token of a
    segment and at padding.
  """
  hidden = hidden_states(
    params, cfg, tokens, positions, segment_ids, dtype=dtype, remat=remat, backend=backend, mesh=mesh,
    constrain=constrain
  )
  scored = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] > 0)
  head = {name: params[name] for name in ("embed", "lm_head") if name in params}
  run = functools.partial(
    _chunked_head, cfg=cfg, temperature=temperature, size=max(1, chunk_tokens // tokens.shape[0]))
  if tokens.shape[0] % sharding.num_batch_shards(mesh) == 0:
    run = sharding.by_rows(mesh, run)
  log_p, entropy = run(head, hidden[:, :-1], tokens[:, 1:])
  first = ((0, 0), (1, 0))
  return jnp.pad(jnp.where(scored, log_p, 0.0), first), jnp.pad(jnp.where(scored, entropy, 0.0), first)


def _chunked_head(head: Params, hidden: jax.Array, targets: jax.Array, *, cfg: ModelConfig,
                  temperature: float | jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
  """(log_p, entropy) [B, T] of targets [B, T] under the head's distributions at hidden [B, T, D], `size` positions at
  once."""
  batch, length = targets.shape
  if length == 0:
    return jnp.zeros((batch, 0)), jnp.zeros((batch, 0))
  size = min(length, size)
  num_chunks = -(-length // size)
  pad = num_chunks * size - length

  def split(x: jax.Array) -> jax.Array:  # [B, T, ...] -> [chunks, B, size, ...]; rows, and so their sharding, stay
    x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(batch, num_chunks, size, *x.shape[2:]), 1, 0)

  @jax.checkpoint
  def score(chunk_hidden: jax.Array, chunk_targets: jax.Array, head: Params) -> tuple[jax.Array, jax.Array]:
    z = masked_logits(head, cfg, chunk_hidden, NOT_A_TOKEN) / temperature
    log_normaliser = jax.nn.logsumexp(z, axis=-1)
    at_target = jnp.take_along_axis(z, chunk_targets[..., None], axis=-1, mode="clip")[..., 0]
    mean = jnp.sum(jnp.exp(z - log_normaliser[..., None]) * z, axis=-1)
    return at_target - log_normaliser, log_normaliser - mean

  _, chunks = jax.lax.scan(lambda carry, chunk: (carry, score(*chunk, head)), None, (split(hidden), split(targets)))
  log_p, entropy = (jnp.moveaxis(x, 0, 1).reshape(batch, -1)[:, :length] for x in chunks)
  return log_p, entropy


def scalar_scores(params: Params, cfg: ModelConfig, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array, *,
                  dtype: jax.typing.DTypeLike, backend: str = "xla") -> jax.Array:
  """A reward model's score of each row, read at the row's last token that is not `cfg.score_pad_id`.

  So it was trained: where the padding id is the end of text as well, the score is that of the token before the end.

  Args:
    params: stacked layers and "score", a "kernel" [D, 1] and perhaps a "bias" [1]; no head over the vocabulary is read.
    tokens, positions, segment_ids: int32 [B, T] as in `hidden_states`, one sequence a row; a row without tokens scores
      nothing sensible.
  Returns: float32 [B].
  """
  hidden = hidden_states(params, cfg, tokens, positions, segment_ids, dtype=dtype, backend=backend)
  read = segment_ids > 0
  if cfg.score_pad_id is not None:
    read &= tokens != cfg.score_pad_id
  last = jnp.max(jnp.where(read, jnp.arange(tokens.shape[1]), 0), axis=1)
  hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0].astype(jnp.float32)
  score = hidden @ params["score"]["kernel"].astype(jnp.float32)
  return (score + params["score"]["bias"] if "bias" in params["score"] else score)[:, 0]

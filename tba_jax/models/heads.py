"""What is read off the hidden states: log-probabilities of tokens, a number for each, a reward model's score."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tba_jax import sharding
from tba_jax.models.scalar_head import NAME as SCALAR_HEAD
from tba_jax.models.scalar_head import read_scalar
from tba_jax.models.transformer import Params, hidden_states, masked_logits
from tba_jax.models.variants import ModelConfig

# Finite in place of -inf, so that 0 * logit is 0 in the entropy and in its gradient; exp of it is exactly 0.
NOT_A_TOKEN = -1e30


def token_logprobs(params: Params, cfg: ModelConfig, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array, *,
                   temperature: float | jax.Array, dtype: jax.typing.DTypeLike, remat: str = "none",
                   chunk_tokens: int = 1024, wanted: jax.Array | None = None, most_wanted: int = 0,
                   backend: str = "xla", mesh: Mesh | None = None,
                   constrain: Callable[[jax.Array], jax.Array] | None = None) -> tuple[jax.Array, ...]:
  """Log-probability of every token given those before it in its segment, and the entropy of its distribution.

  The policy is softmax(logits / temperature) over the full vocabulary. The head runs over pieces of the row with
  rematerialisation, so that no [B, T, V] array exists in the forward or the backward pass, unless one piece is all.

  Args:
    params: stacked layers, perhaps with a `scalar_head`. tokens, positions, segment_ids: int32 [B, T] as in
      `hidden_states`; the tokens of a segment are adjacent.
    temperature: > 0. dtype, remat, backend, mesh, constrain: as in `hidden_states`.
    chunk_tokens: about how many tokens' logits (f32, V each) exist at once, over all rows.
    wanted: bool [B, T], adjacent tokens of each row, at most `most_wanted` of them: the head runs for these alone, and
      others score 0. None: all tokens.
  Returns: (log_p, entropy), float32 [B, T] in nats, aligned with the token that is scored; 0 at the first token of a
    segment, at padding and at what is not wanted. The entropy is a measurement: it takes no gradient, which would cost
    a step passes over the logits. With a scalar head (log_p, entropy, scalar): entry t of that is read off the hidden
    state that token t is predicted from, so it knows the tokens before it and no more.
  """
  hidden = hidden_states(
    params, cfg, tokens, positions, segment_ids, dtype=dtype, remat=remat, backend=backend, mesh=mesh,
    constrain=constrain
  )
  scored = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] > 0)
  head = {name: params[name] for name in ("embed", "lm_head") if name in params}
  run = functools.partial(
    _chunked_head, cfg=cfg, temperature=temperature, size=max(1, chunk_tokens // tokens.shape[0]))
  rows = (hidden[:, :-1], tokens[:, 1:])
  if wanted is not None and most_wanted < tokens.shape[1] - 1:
    run, rows = functools.partial(_in_window, run, size=most_wanted), (*rows, wanted[:, 1:])
  if tokens.shape[0] % sharding.num_batch_shards(mesh) == 0:
    run = sharding.by_rows(mesh, run)
  of_head = scored if wanted is None else scored & wanted[:, 1:]
  log_p, entropy = (jnp.where(of_head, values, 0.0) for values in run(head, *rows))
  scalar = (read_scalar(params[SCALAR_HEAD], hidden[:, :-1]),) if SCALAR_HEAD in params else ()
  scalar = tuple(jnp.where(scored, values, 0.0) for values in scalar)
  return tuple(jnp.pad(values, ((0, 0), (1, 0))) for values in (log_p, entropy, *scalar))


def _in_window(run: Callable[..., tuple[jax.Array, jax.Array]], head: Params, hidden: jax.Array, targets: jax.Array,
               wanted: jax.Array, *, size: int) -> tuple[jax.Array, jax.Array]:
  """run(head, hidden, targets) at those `size` adjacent positions of each row that hold all that is wanted in it, and 0
  elsewhere."""
  length = targets.shape[1]
  first = jnp.minimum(jnp.argmax(wanted, axis=1), length - size)
  take = jax.vmap(functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=size))
  put = jax.vmap(lambda values, at: jax.lax.dynamic_update_slice_in_dim(jnp.zeros(length), values, at, 0))
  log_p, entropy = run(head, take(hidden, first), take(targets, first))
  return put(log_p, first), put(entropy, first)


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

  def score(chunk_hidden: jax.Array, chunk_targets: jax.Array, head: Params) -> tuple[jax.Array, jax.Array]:
    return _of_targets(masked_logits(head, cfg, chunk_hidden, NOT_A_TOKEN) / temperature, chunk_targets)

  if num_chunks == 1:  # its logits exist at once as it is, and need not be computed again
    return score(hidden, targets, head)
  again = jax.checkpoint(score)
  _, chunks = jax.lax.scan(lambda carry, chunk: (carry, again(*chunk, head)), None, (split(hidden), split(targets)))
  log_p, entropy = (jnp.moveaxis(x, 0, 1).reshape(batch, -1)[:, :length] for x in chunks)
  return log_p, entropy


@jax.custom_vjp
def _of_targets(z: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
  """log softmax(z) at the targets, and the entropy, of logits z [..., V]: [...] each.

  Its gradient is written out, so that it is one pass over the logits, without a scatter; that of the entropy is left
  out.
  """
  return _of_targets_forward(z, targets)[0]


def _of_targets_forward(z: jax.Array, targets: jax.Array) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
  largest = jnp.max(z, axis=-1, keepdims=True)
  shifted = z - largest
  weights = jnp.exp(shifted)
  total = jnp.sum(weights, axis=-1)
  log_total = jnp.log(total)
  at_targets = jnp.take_along_axis(shifted, targets[..., None], axis=-1, mode="clip")[..., 0]
  entropy = log_total - jnp.sum(weights * shifted, axis=-1) / total
  return (at_targets - log_total, entropy), (z, targets, largest[..., 0] + log_total)


def _of_targets_backward(kept: tuple[jax.Array, ...], gradients: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
  z, targets, log_normaliser = kept
  probs = jnp.exp(z - log_normaliser[..., None])
  chosen = jnp.clip(targets, 0, z.shape[-1] - 1)[..., None] == jnp.arange(z.shape[-1])
  return gradients[0][..., None] * (chosen - probs), None


_of_targets.defvjp(_of_targets_forward, _of_targets_backward)


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

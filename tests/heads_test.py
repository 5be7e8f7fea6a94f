"""Log-probabilities: chunking, gradients against torch, the normaliser, and what is never held in memory."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parity import require
import reference_models
from tba_jax.models import transformer
from tba_jax.models.heads import token_logprobs

torch = require("torch")

VOCAB_SIZE = 131


@functools.lru_cache(maxsize=None)
def both(case: str):
  model_type, fields = reference_models.CASES[case]
  model = reference_models.reference_model(model_type, **fields)
  return model, *reference_models.converted(model)


def batch(num_rows: int, length: int, seed: int = 0):
  tokens = np.random.default_rng(seed).integers(0, VOCAB_SIZE, (num_rows, length)).astype(np.int32)
  return tokens, np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape), np.ones_like(tokens)


# Both tie the head to the embedding; the second caps its logits.
@pytest.mark.parametrize("case", ["llama-biases", "gemma2"])
def test_gradients_equal_those_of_torch(case):
  model, cfg, params = both(case)
  tokens, positions, segment_ids = batch(2, 14)
  weights = np.random.default_rng(1).normal(size=(2, 14)).astype(np.float32)

  def loss(params):
    log_p, entropy = token_logprobs(
      params, cfg, tokens, positions, segment_ids, temperature=0.7, dtype=jnp.float32, chunk_tokens=10
    )
    return (weights * (log_p + 0.3 * entropy)).sum()  # of the entropy there is none

  gradient = jax.jit(jax.grad(loss))(params)
  model.zero_grad()
  log_probs = torch.log_softmax(model(input_ids=torch.tensor(tokens.astype(np.int64))).logits[:, :-1] / 0.7, dim=-1)
  log_p = log_probs.gather(-1, torch.tensor(tokens[:, 1:, None].astype(np.int64)))[..., 0]
  (torch.tensor(weights[:, 1:]) * log_p).sum().backward()
  expected = reference_models.tree_from_tensors(
    cfg, {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
  )
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=2e-4 * np.abs(y).max()), gradient, expected)


@pytest.mark.parametrize("chunk_tokens", [1, 3 * 4, 10**6])
def test_chunks_change_neither_values_nor_gradients(chunk_tokens):
  _, cfg, params = both("llama")
  tokens, positions, segment_ids = batch(3, 11)

  def whole(params):  # all logits at once
    hidden = transformer.hidden_states(params, cfg, tokens, positions, segment_ids, dtype=jnp.float32)
    log_probs = jax.nn.log_softmax(transformer.logits(params, cfg, hidden[:, :-1]) / 1.3)
    return jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1)[..., 0].sum()

  def chunked(params):
    return token_logprobs(
      params, cfg, tokens, positions, segment_ids, temperature=jnp.float32(1.3), dtype=jnp.float32,
      chunk_tokens=chunk_tokens
    )[0].sum()

  expected, found = (jax.jit(jax.value_and_grad(f))(params) for f in (whole, chunked))
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), found, expected)


@pytest.mark.parametrize("chunk_tokens", [3 * 2, 10**6])
def test_the_head_at_wanted_tokens_alone_gives_their_values_and_gradients(chunk_tokens):
  _, cfg, params = both("llama")
  tokens, positions, segment_ids = batch(4, 12)
  wanted = np.zeros((4, 12), bool)  # from the first token to be scored, in the middle, to the end; none
  wanted[0, 1:4] = wanted[1, 5:10] = wanted[2, 8:] = True
  weights = np.random.default_rng(1).normal(size=(4, 12)).astype(np.float32)

  def loss(params, **which):
    log_p, entropy = token_logprobs(params, cfg, tokens, positions, segment_ids, temperature=0.7, dtype=jnp.float32,
                                    chunk_tokens=chunk_tokens, **which)
    log_p, entropy = (jnp.where(wanted, values, 0.0) for values in (log_p, entropy)) if not which else (log_p, entropy)
    return (weights * log_p).sum(), (log_p, entropy)

  run = lambda **which: jax.jit(jax.value_and_grad(functools.partial(loss, **which), has_aux=True))(params)
  expected, found = run(), run(wanted=wanted, most_wanted=5)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-5), found, expected)
  assert (np.asarray(found[0][1][0])[wanted] < 0).all()
  shapes = _shapes(jax.make_jaxpr(functools.partial(loss, wanted=wanted, most_wanted=5))(params).jaxpr)
  assert max(np.prod(shape) for shape in shapes if VOCAB_SIZE in shape and cfg.hidden_size not in shape) \
    <= 4 * 5 * VOCAB_SIZE


def test_rows_of_the_table_that_are_no_tokens_are_out_of_the_normaliser():
  model, cfg, params = both("llama")
  cfg = dataclasses.replace(cfg, vocab_size=100)
  tokens, positions, segment_ids = batch(1, 12)
  tokens = tokens % 100
  reference = reference_models.reference_logits(model, tokens).astype(np.float64)[0, :-1, :100] / 0.7
  reference -= np.log(np.exp(reference).sum(-1, keepdims=True))

  def score(params):
    return token_logprobs(params, cfg, tokens, positions, segment_ids, temperature=0.7, dtype=jnp.float32)

  log_p, entropy = score(params)
  np.testing.assert_allclose(
    log_p[0, 1:], np.take_along_axis(reference, tokens[0, 1:, None], -1)[:, 0], rtol=0, atol=2e-5
  )
  np.testing.assert_allclose(entropy[0, 1:], -(np.exp(reference) * reference).sum(-1), rtol=0, atol=2e-5)
  gradient = jax.grad(lambda p: sum(x.sum() for x in score(p)))(params)["lm_head"]["kernel"]
  assert np.isfinite(gradient).all() and (gradient[:, 100:] == 0).all() and (gradient[:, :100] != 0).any()
  hidden = transformer.hidden_states(params, cfg, tokens, positions, segment_ids, dtype=jnp.float32)
  logits = np.asarray(transformer.logits(params, cfg, hidden))
  assert (logits[..., 100:] == -np.inf).all() and np.isfinite(logits[..., :100]).all()


def test_first_tokens_and_padding_score_zero():
  _, cfg, params = both("llama")
  tokens, positions, _ = batch(2, 8)
  segment_ids = np.array([[0, 0, 1, 1, 1, 2, 2, 2], [1, 1, 0, 0, 0, 0, 0, 0]], np.int32)
  log_p, entropy = token_logprobs(params, cfg, tokens, positions, segment_ids, temperature=1.0, dtype=jnp.float32)
  scored = np.array([[0, 0, 0, 1, 1, 0, 1, 1], [0, 1, 0, 0, 0, 0, 0, 0]], bool)
  assert (np.asarray(log_p)[~scored] == 0).all() and (np.asarray(entropy)[~scored] == 0).all()
  assert (np.asarray(log_p)[scored] < 0).all() and (np.asarray(entropy)[scored] > 0).all()
  single = token_logprobs(
    params, cfg, tokens[:, :1], positions[:, :1], segment_ids[:, :1], temperature=1.0, dtype=jnp.float32
  )
  assert all(x.shape == (2, 1) and (x == 0).all() for x in single)


def _shapes(jaxpr) -> set[tuple[int, ...]]:
  """Shapes of every array that a program and its inner programs compute."""
  shapes = set()
  for equation in jaxpr.eqns:
    shapes |= {tuple(variable.aval.shape) for variable in equation.outvars if hasattr(variable.aval, "shape")}
    for inner in jax.tree.leaves(
      list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
    ):
      inner = getattr(inner, "jaxpr", inner)
      if hasattr(inner, "eqns"):
        shapes |= _shapes(inner)
  return shapes


def test_logits_of_all_positions_never_exist_forward_or_backward():
  _, cfg, params = both("llama")
  tokens, positions, segment_ids = batch(4, 33)

  def loss(params, chunk_tokens):
    return sum(x.sum() for x in token_logprobs(
      params, cfg, tokens, positions, segment_ids, temperature=1.0, dtype=jnp.float32, chunk_tokens=chunk_tokens))

  def largest(chunk_tokens):
    shapes = _shapes(jax.make_jaxpr(jax.grad(functools.partial(loss, chunk_tokens=chunk_tokens)))(params).jaxpr)
    return max(np.prod(shape) for shape in shapes if VOCAB_SIZE in shape and cfg.hidden_size not in shape) // VOCAB_SIZE

  assert largest(16) == 16
  assert largest(10**6) == 4 * 32  # the search does see the logits

"""Attention over shared and quantised caches against plain softmax attention in float64, and whole models that use it.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reference_models
import tiny
from tba_jax.models import cache as cache_lib
from tba_jax.models import transformer
from tba_jax.models.decode_attention import Part, decode_attention
from tba_jax.models.variants import ModelConfig

LANES, PER_LANE, KV_HEADS, GROUP, WIDTH = 2, 3, 2, 2, 8
ROWS, HEADS = LANES * PER_LANE, KV_HEADS * GROUP


def plain(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray, softcap: float | None) -> np.ndarray:
  """float64; every row has all its keys [B, K, S, H] for itself."""
  out = np.zeros(q.shape)
  for row in range(len(q)):
    for head in range(HEADS):
      scores = k[row, head // GROUP] @ q[row, 0, head] * 0.3
      if softcap:
        scores = softcap * np.tanh(scores / softcap)
      weights = np.where(mask[row, 0], np.exp(scores - scores.max()), 0.0)
      out[row, 0, head] = weights @ v[row, head // GROUP] / weights.sum()
  return out


def two_parts(seed: int, dtype: str, magnitude: float = 1.0) -> tuple[np.ndarray, list[Part], list[Part]]:
  """q; a prefix of 5 entries a lane and 4 more a row; and the same as a single part that every row has for itself."""
  rng = np.random.default_rng(seed)
  q = magnitude * rng.normal(size=(ROWS, 1, HEADS, WIDTH)).astype(np.float32)
  store = lambda rows, entries: cache_lib.stored(
    *(jnp.asarray(rng.normal(size=(rows, entries, KV_HEADS, WIDTH)), jnp.float32) for _ in "kv"), dtype)
  prefix, own = store(LANES, 5), store(ROWS, 4)
  prefix_mask = np.repeat(np.arange(5) < np.array([[5], [2]]), PER_LANE, axis=0)[:, None]
  own_mask = (np.arange(4) < np.array([1, 2, 3, 4, 1, 2])[:, None])[:, None]
  joined = jax.tree.map(lambda x, y: jnp.concatenate([jnp.repeat(x, PER_LANE, axis=0), y], axis=2), prefix, own)
  whole = Part(joined, np.concatenate([prefix_mask, own_mask], axis=-1))
  return q, [Part(own, own_mask), Part(prefix, prefix_mask)], [whole]


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_shared_and_whole_caches_give_softmax_attention(dtype, softcap):
  q, shared, whole = two_parts(0, dtype)
  k, v = (np.asarray(x, np.float64) for x in cache_lib.loaded(whole[0].layer, jnp.float32))
  expected = plain(q.astype(np.float64), k, v, whole[0].mask, softcap)
  for parts in (shared, whole):
    found = jax.jit(functools.partial(decode_attention, scale=0.3, softcap=softcap))(q, parts)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)


def test_scores_far_apart_in_the_parts_neither_overflow_nor_vanish():
  q, shared, whole = two_parts(1, "float32", magnitude=300.0)
  k, v = (np.asarray(x, np.float64) for x in (whole[0].layer.k, whole[0].layer.v))
  expected = plain(q.astype(np.float64), k, v, whole[0].mask, None)
  np.testing.assert_allclose(decode_attention(q, shared, scale=0.3), expected, rtol=0, atol=2e-4)


def test_an_int8_cache_is_within_half_a_step_and_keeps_zeros():
  k = np.random.default_rng(2).normal(size=(2, 5, KV_HEADS, WIDTH)).astype(np.float32)
  k[0, 1] = 0
  layer = cache_lib.stored(jnp.asarray(k), jnp.asarray(10 * k), "int8")
  assert layer.k.dtype == jnp.int8 and layer.k_scale.shape == layer.k.shape[:-1]
  for found, exact in zip(cache_lib.loaded(layer, jnp.float32), (k, 10 * k)):
    exact = exact.swapaxes(1, 2)
    step = np.abs(exact).max(axis=-1, keepdims=True) / 127
    assert (np.abs(found - exact) <= 0.5001 * step).all()
    assert (np.asarray(found)[0, :, 1] == 0).all()
    assert np.abs(found - exact).max() > 0  # something was rounded
  assert cache_lib.row_bytes((layer,)) == 2 * 5 * KV_HEADS * (WIDTH + 4)


def decode_with_prefix(
  cfg: ModelConfig, params: transformer.Params, prompts: np.ndarray, lengths: np.ndarray, tokens: np.ndarray, dtype: str
) -> np.ndarray:
  """Logits [rows, steps, V] of continuations `tokens` [lanes * per lane, steps] of one prompt a lane. Three tokens on,
  what is cached of them is read only, and a cache of its own takes the rest, in which all rows are at one entry."""
  decode_params = transformer.unstack(params)
  step = jax.jit(functools.partial(transformer.decode_step, cfg=cfg, dtype=jnp.float32))
  _, prefix = jax.jit(functools.partial(transformer.prefill, cfg=cfg, dtype=jnp.float32, cache_dtype=dtype))(
    decode_params, tokens=prompts, lengths=lengths)
  cache = transformer.init_cache(cfg, batch=len(tokens), length=tokens.shape[1], dtype=dtype)
  before, starts = [transformer.Before(prefix, lengths)], np.repeat(lengths, len(tokens) // len(lengths))
  found = []
  for i in range(tokens.shape[1]):
    if i == 3:
      before.append(transformer.Before(cache, np.full(len(tokens), i, np.int32)))
      cache = cache_lib.empty_like(cache, tokens.shape[1] - i)
    logits, cache = step(
      decode_params, tokens=tokens[:, i], positions=starts + i, cache=cache, before=before,
      entry=None if i < 3 else jnp.int32(i - 3))
    found.append(np.asarray(logits))
  return np.stack(found, axis=1)


@pytest.mark.parametrize("case", ["llama", "gemma2", "gpt2"])
def test_rows_on_a_shared_prompt_equal_transformers(case):
  """gemma2 has sliding layers and soft caps, gpt2 learned positions."""
  model_type, fields = reference_models.CASES[case]
  model = reference_models.reference_model(model_type, **fields)
  cfg, params = reference_models.converted(model)
  rng = np.random.default_rng(3)
  lengths = np.array([17, 6], np.int32)
  prompts = rng.integers(0, cfg.vocab_size, (2, 20)).astype(np.int32)
  tokens = rng.integers(0, cfg.vocab_size, (6, 7)).astype(np.int32)
  found = decode_with_prefix(cfg, params, prompts, lengths, tokens, "float32")
  for row in range(6):
    prompt = prompts[row // 3, : lengths[row // 3]]
    expected = reference_models.reference_logits(model, np.concatenate([prompt, tokens[row]])[None])[0, len(prompt) :]
    np.testing.assert_allclose(found[row, :, : cfg.vocab_size], expected, rtol=0, atol=5e-5)


def test_an_int8_cache_stays_near_a_float32_one():
  cfg = tiny.tiny_config()
  params = tiny.tiny_params(cfg, 0)
  rng = np.random.default_rng(4)
  prompts, tokens = (rng.integers(0, cfg.vocab_size, (2, n)).astype(np.int32) for n in (9, 12))
  lengths = np.array([9, 4], np.int32)
  exact, rounded = (decode_with_prefix(cfg, params, prompts, lengths, tokens, dtype) for dtype in ("float32", "int8"))
  real = slice(0, cfg.vocab_size)
  gap = np.abs(jax.nn.log_softmax(exact[..., real]) - jax.nn.log_softmax(rounded[..., real])).max()
  assert 0 < gap < 0.1

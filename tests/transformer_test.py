"""Decoders against transformers: scoring, prefill and decoding of every family."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parity import require
import reference_models
from tba_jax.models import transformer
from tba_jax.models.cache import write_front
from tba_jax.models.heads import token_logprobs

torch = require("torch")

VOCAB_SIZE, LENGTH = 131, 64
# Decoding shares its maths with scoring; what it adds (cache, windows, two rotations, learned positions) is in these.
DECODED = ("llama", "llama-biases", "mistral", "qwen2-window", "qwen3", "gemma", "gemma2", "gemma3", "gpt_neox", "gpt2")


@functools.lru_cache(maxsize=None)
def both(case: str):
  """(transformers' model, our config, our parameters)."""
  model_type, fields = reference_models.CASES[case]
  model = reference_models.reference_model(model_type, **fields)
  return model, *reference_models.converted(model)


def rows_of(layout: list[list[tuple[int, np.ndarray]]], rng: np.random.Generator):
  """(tokens, positions, segment_ids) [B, LENGTH]: each row holds sequences at given offsets, and ids that mean nothing
  elsewhere.
  """
  tokens = rng.integers(0, VOCAB_SIZE, (len(layout), LENGTH)).astype(np.int32)
  positions, segment_ids = rng.integers(0, LENGTH, tokens.shape).astype(np.int32), np.zeros_like(tokens)
  for row, sequences in enumerate(layout):
    for segment, (start, sequence) in enumerate(sequences, start=1):
      place = slice(start, start + len(sequence))
      tokens[row, place], positions[row, place], segment_ids[row, place] = sequence, np.arange(len(sequence)), segment
  return tokens, positions, segment_ids


def reference_scores(model, sequence: np.ndarray, temperature: float) -> tuple[np.ndarray, np.ndarray]:
  """float64 (log-probabilities, entropies) of a sequence's tokens from the second on."""
  log_probs = torch.log_softmax(
    torch.tensor(reference_models.reference_logits(model, sequence[None])[0, :-1]).double() / temperature, -1
  )
  log_p = log_probs.gather(-1, torch.tensor(sequence[1:, None].astype(np.int64)))[:, 0]
  return log_p.numpy(), -(log_probs.exp() * log_probs).sum(-1).numpy()


@pytest.mark.parametrize("case", reference_models.CASES)
def test_logprobs_of_padded_and_packed_rows_equal_those_of_transformers(case):
  model, cfg, params = both(case)
  rng = np.random.default_rng(0)
  whole, left, right, first, second = (rng.integers(0, VOCAB_SIZE, n).astype(np.int32) for n in (64, 51, 45, 30, 34))
  layout = [[(0, whole)], [(13, left)], [(0, right)], [(0, first), (30, second)]]
  tokens, positions, segment_ids = rows_of(layout, rng)
  score = jax.jit(functools.partial(token_logprobs, cfg=cfg, temperature=0.7, dtype=jnp.float32, chunk_tokens=4 * 20))
  log_p, entropy = score(params, tokens=tokens, positions=positions, segment_ids=segment_ids)
  expected_log_p, expected_entropy = np.zeros(tokens.shape), np.zeros(tokens.shape)
  for row, sequences in enumerate(layout):
    for start, sequence in sequences:
      place = slice(start + 1, start + len(sequence))
      expected_log_p[row, place], expected_entropy[row, place] = reference_scores(model, sequence, 0.7)
  assert expected_log_p.std() > 0.5  # the model has an opinion, so the comparison means something
  np.testing.assert_allclose(log_p, expected_log_p, rtol=0, atol=2e-5)
  np.testing.assert_allclose(entropy, expected_entropy, rtol=0, atol=2e-5)


@pytest.mark.parametrize("case", [
  pytest.param(case, marks=[] if case in DECODED else pytest.mark.slow) for case in reference_models.CASES
])
def test_greedy_decoding_equals_transformers_and_the_uncached_forward(case):
  model, cfg, params = both(case)
  num_new, num_slots = 12, 40
  rng = np.random.default_rng(1)
  lengths = np.array([5, 17], np.int32)
  prompts = rng.integers(0, VOCAB_SIZE, (2, 20)).astype(np.int32)
  decode_params = transformer.unstack(params)
  step = jax.jit(
    functools.partial(transformer.decode_step, cfg=cfg, dtype=jnp.float32), donate_argnames="cache"
  )
  cache = transformer.init_cache(cfg, batch=2, length=num_slots, dtype=jnp.float32)
  logits, read = jax.jit(functools.partial(transformer.prefill, cfg=cfg, dtype=jnp.float32))(
    decode_params, tokens=prompts, lengths=lengths
  )
  cache = write_front(cache, read)
  seen, produced = [logits], []
  for i in range(num_new):
    produced.append(jnp.argmax(seen[-1], axis=-1).astype(jnp.int32))
    logits, cache = step(decode_params, tokens=produced[-1], positions=jnp.asarray(lengths + i), cache=cache)
    seen.append(logits)
  produced, seen = np.stack(produced, axis=1), np.stack(seen, axis=1)
  for row, length in enumerate(lengths):
    prompt = torch.tensor(prompts[row : row + 1, :length].astype(np.int64))
    generated = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=num_new, do_sample=False,
                               eos_token_id=None,
                               pad_token_id=0)
    np.testing.assert_array_equal(produced[row], generated[0, length:].numpy())
    uncached = reference_models.reference_logits(model, generated.numpy())[0, length - 1 :]
    np.testing.assert_allclose(seen[row], uncached, rtol=0, atol=5e-5)


@pytest.mark.parametrize("case", ["llama", *(pytest.param(case, marks=pytest.mark.slow) for case in ("gpt2", "gemma3"))])
def test_ids_under_padding_change_nothing_and_a_row_of_padding_is_finite(case):
  _, cfg, params = both(case)
  rng = np.random.default_rng(2)
  tokens = rng.integers(0, VOCAB_SIZE, (3, 16)).astype(np.int32)
  positions = np.broadcast_to(np.arange(16, dtype=np.int32), tokens.shape)
  segment_ids = np.ones_like(tokens)
  segment_ids[0, 11:], segment_ids[1, :5], segment_ids[2] = 0, 0, 0
  forward = jax.jit(functools.partial(transformer.hidden_states, cfg=cfg, dtype=jnp.float32))
  other = np.where(
    segment_ids == 0, np.array([-1, 10**6, 3])[rng.integers(0, 3, tokens.shape)], tokens
  ).astype(np.int32)
  hidden, hidden_other = (
    forward(params, tokens=x, positions=positions, segment_ids=segment_ids) for x in (tokens, other)
  )
  np.testing.assert_array_equal(hidden[segment_ids > 0], hidden_other[segment_ids > 0])
  assert np.isfinite(hidden).all() and np.isfinite(hidden_other).all()
  gradient = jax.grad(lambda p: token_logprobs(
    p, cfg, other, positions, segment_ids, temperature=1.0, dtype=jnp.float32)[0].sum())(params)
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def _filled_cache(cfg, params, prompts, lengths, num_slots):
  cache = transformer.init_cache(cfg, batch=len(prompts), length=num_slots, dtype=jnp.float32)
  logits, read = transformer.prefill(
    transformer.unstack(params), cfg, jnp.asarray(prompts), jnp.asarray(lengths), dtype=jnp.float32
  )
  return logits, write_front(cache, read)


def test_last_slot_is_used_and_a_position_beyond_it_writes_nothing():
  model, cfg, params = both("llama")
  sequence = np.random.default_rng(3).integers(0, VOCAB_SIZE, 8).astype(np.int32)
  _, cache = _filled_cache(cfg, params, sequence[None, :7].repeat(2, 0), [7, 7], 8)
  step = functools.partial(transformer.decode_step, transformer.unstack(params), cfg, dtype=jnp.float32)
  logits, full = step(jnp.asarray([sequence[7]] * 2), jnp.asarray([7, 7]), cache)
  np.testing.assert_allclose(
    logits[0], reference_models.reference_logits(model, sequence[None])[0, 7], rtol=0, atol=5e-5
  )
  _, after = step(jnp.asarray([1, 1]), jnp.asarray([8, 6]), full)
  for before_layer, after_layer in zip(full, after, strict=True):
    for x, y in zip(before_layer[:2], after_layer[:2], strict=True):
      np.testing.assert_array_equal(x[0], y[0])
      assert (x[1, :, 6] != y[1, :, 6]).any()


def test_rows_decode_independently():
  _, cfg, params = both("gemma2")
  prompts = np.random.default_rng(4).integers(0, VOCAB_SIZE, (2, 2, 12)).astype(np.int32)
  prompts[1, 0] = prompts[0, 0]  # the first row stays, the second is another prompt of another length
  step = jax.jit(functools.partial(transformer.decode_step, cfg=cfg, dtype=jnp.float32))
  results = []
  for batch, other_length in zip(prompts, (12, 3), strict=True):
    _, cache = _filled_cache(cfg, params, batch, [9, other_length], 16)
    logits, _ = step(
      transformer.unstack(params), tokens=jnp.asarray([5, 6]), positions=jnp.asarray([9, other_length]), cache=cache
    )
    results.append(np.asarray(logits))
  np.testing.assert_array_equal(results[0][0], results[1][0])
  assert (results[0][1] != results[1][1]).any()


def test_a_donated_cache_is_updated_in_place():
  _, cfg, params = both("llama")
  cache = transformer.init_cache(cfg, batch=2, length=4096, dtype=jnp.float32)

  def chunk(params, cache, tokens, positions):
    def body(carry, _):
      cache, tokens, positions = carry
      logits, cache = transformer.decode_step(params, cfg, tokens, positions, cache, dtype=jnp.float32)
      return (cache, jnp.argmax(logits, -1).astype(jnp.int32), positions + 1), None

    return jax.lax.scan(body, (cache, tokens, positions), None, length=4)[0][0]

  start = jnp.zeros(2, jnp.int32)
  memory = jax.jit(chunk, donate_argnums=1).lower(
    transformer.unstack(params), cache, start, start
  ).compile().memory_analysis()
  one_layer = cache[0][0].nbytes
  assert memory.alias_size_in_bytes >= 2 * cfg.num_layers * one_layer
  assert memory.temp_size_in_bytes < one_layer


def test_bfloat16_decoding_agrees_with_bfloat16_scoring():
  _, cfg, params = both("llama")
  sequence = np.random.default_rng(6).integers(0, VOCAB_SIZE, (1, 12)).astype(np.int32)
  decode_params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), transformer.unstack(params))
  cache = transformer.init_cache(cfg, batch=1, length=16, dtype=jnp.bfloat16)
  logits, read = transformer.prefill(
    decode_params, cfg, jnp.asarray(sequence[:, :11]), jnp.asarray([11]), dtype=jnp.bfloat16
  )
  cache = write_front(cache, read)
  logits, cache = transformer.decode_step(
    decode_params, cfg, jnp.asarray(sequence[:, 11]), jnp.asarray([11]), cache, dtype=jnp.bfloat16
  )
  assert logits.dtype == jnp.float32 and {x.dtype for x in jax.tree.leaves(cache)} == {jnp.dtype(jnp.bfloat16)}
  positions = np.arange(12, dtype=np.int32)[None]
  hidden = transformer.hidden_states(params, cfg, sequence, positions, np.ones_like(positions), dtype=jnp.bfloat16)
  scored = transformer.logits(params, cfg, hidden[:, -1])
  exact = transformer.logits(
    params, cfg,
    transformer.hidden_states(params, cfg, sequence, positions, np.ones_like(positions), dtype=jnp.float32)[:, -1]
  )
  spread = float(jnp.std(exact))
  assert np.abs(logits - scored).max() < 0.1 * spread and np.abs(scored - exact).max() < 0.1 * spread


@pytest.mark.parametrize("remat", ["full", "dots"])
def test_rematerialisation_saves_memory_and_changes_neither_values_nor_gradients(remat):
  _, cfg, params = both("gemma3")
  tokens = np.random.default_rng(7).integers(0, VOCAB_SIZE, (4, 64)).astype(np.int32)
  positions = np.broadcast_to(np.arange(64, dtype=np.int32), tokens.shape)

  def program(remat):
    def loss(params):
      log_p, _ = token_logprobs(
        params, cfg, tokens, positions, np.ones_like(tokens), temperature=1.0, dtype=jnp.float32, remat=remat
      )
      return log_p.mean()

    return jax.jit(jax.value_and_grad(loss)).lower(params).compile()

  kept, recomputed = program("none"), program(remat)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), kept(params), recomputed(params)
  )
  assert recomputed.memory_analysis().temp_size_in_bytes < 0.8 * kept.memory_analysis().temp_size_in_bytes


def test_fresh_parameters_have_the_tree_of_the_config_and_say_nothing_yet():
  _, cfg, _ = both("gemma2-uncapped")
  params = transformer.init_params(cfg, jax.random.key(0))
  assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(
    lambda x: (x.shape, x.dtype), transformer.abstract_params(cfg)
  )
  # Variance 1 / fan-in, and 1 / (2 layers) since it joins the residual.
  kernel = params["layers"]["mlp"]["down"]["kernel"]
  assert abs(float(kernel.std()) / (cfg.mlp_size * 2 * cfg.num_layers) ** -0.5 - 1) < 0.05
  assert not np.array_equal(kernel[0], kernel[1])
  assert (params["final_norm"]["scale"] == 0).all()  # 1 + w
  tokens = np.random.default_rng(8).integers(0, VOCAB_SIZE, (2, 16)).astype(np.int32)
  positions = np.broadcast_to(np.arange(16, dtype=np.int32), tokens.shape)
  _, entropy = token_logprobs(params, cfg, tokens, positions, np.ones_like(tokens), temperature=1.0, dtype=jnp.float32)
  assert float(entropy[:, 1:].min()) > 0.95 * np.log(VOCAB_SIZE)


def test_mistakes_are_named():
  _, cfg, params = both("llama")
  tokens = jnp.zeros((1, 4), jnp.int32)
  with pytest.raises(ValueError, match="remat='some' is unknown; it must be one of none, full, dots"):
    transformer.hidden_states(params, cfg, tokens, tokens, tokens + 1, dtype=jnp.float32, remat="some")
  with pytest.raises(ValueError, match="padded to 4 tokens do not fit a cache of 3 slots"):
    _filled_cache(cfg, params, np.zeros((1, 4), np.int32), [4], 3)
  with pytest.raises(ValueError, match="attention backend 'flash' is unknown; it must be one of xla, splash, cudnn"):
    transformer.hidden_states(params, cfg, tokens, tokens, tokens + 1, dtype=jnp.float32, backend="flash")
  _, learned, _ = both("gpt2")
  with pytest.raises(ValueError, match="a cache of 81 tokens is longer than the 80 positions that this"):
    transformer.init_cache(learned, batch=1, length=81, dtype=jnp.float32)
  _, capped, capped_params = both("gemma2")
  with pytest.raises(ValueError, match="'cudnn' has no soft cap, but the model has 1.5"):
    transformer.hidden_states(capped_params, capped, tokens, tokens, tokens + 1, dtype=jnp.float32, backend="cudnn")

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
from tba_jax.models.heads import token_logprobs

torch = require("torch")

VOCAB_SIZE, LENGTH = 131, 64


@functools.lru_cache(maxsize=None)
def both(case: str):
  """(transformers' model, our config, our parameters)."""
  model_type, fields = reference_models.CASES[case]
  model = reference_models.reference_model(model_type, **fields)
  return model, *reference_models.converted(model)


def rows_of(layout: list[list[tuple[int, np.ndarray]]], rng: np.random.Generator):
  """(tokens, positions, segment_ids) [B, LENGTH]: each row holds sequences at given offsets, and ids that mean nothing elsewhere."""
  tokens = rng.integers(0, VOCAB_SIZE, (len(layout), LENGTH)).astype(np.int32)
  positions, segment_ids = rng.integers(0, LENGTH, tokens.shape).astype(np.int32), np.zeros_like(tokens)
  for row, sequences in enumerate(layout):
    for segment, (start, sequence) in enumerate(sequences, start=1):
      place = slice(start, start + len(sequence))
      tokens[row, place], positions[row, place], segment_ids[row, place] = sequence, np.arange(len(sequence)), segment
  return tokens, positions, segment_ids


def reference_scores(model, sequence: np.ndarray, temperature: float) -> tuple[np.ndarray, np.ndarray]:
  """float64 (log-probabilities, entropies) of a sequence's tokens from the second on."""
  log_probs = torch.log_softmax(torch.tensor(reference_models.reference_logits(model, sequence[None])[0, :-1]).double() / temperature, -1)
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


@pytest.mark.parametrize("case", reference_models.CASES)
def test_greedy_decoding_equals_transformers_and_the_uncached_forward(case):
  model, cfg, params = both(case)
  num_new, num_slots = 12, 40
  rng = np.random.default_rng(1)
  lengths = np.array([5, 17], np.int32)
  prompts = rng.integers(0, VOCAB_SIZE, (2, 20)).astype(np.int32)
  decode_params = transformer.unstack(params)
  step = jax.jit(functools.partial(transformer.decode_step, cfg=cfg, dtype=jnp.float32, kv_length=32), donate_argnames="cache")
  cache = transformer.init_cache(cfg, batch=2, length=num_slots, dtype=jnp.float32)
  logits, cache = jax.jit(functools.partial(transformer.prefill, cfg=cfg, dtype=jnp.float32))(
    decode_params, tokens=prompts, lengths=lengths, cache=cache
  )
  seen, produced = [logits], []
  for i in range(num_new):
    produced.append(jnp.argmax(seen[-1], axis=-1).astype(jnp.int32))
    logits, cache = step(decode_params, tokens=produced[-1], positions=jnp.asarray(lengths + i), cache=cache)
    seen.append(logits)
  produced, seen = np.stack(produced, axis=1), np.stack(seen, axis=1)
  for row, length in enumerate(lengths):
    prompt = torch.tensor(prompts[row : row + 1, :length].astype(np.int64))
    generated = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=num_new, do_sample=False, eos_token_id=None,
                               pad_token_id=0)
    np.testing.assert_array_equal(produced[row], generated[0, length:].numpy())
    uncached = reference_models.reference_logits(model, generated.numpy())[0, length - 1 :]
    np.testing.assert_allclose(seen[row], uncached, rtol=0, atol=5e-5)

"""Every family in shapes drawn at random: in from a folder of transformers', scored, decoded, and out to one again."""

from __future__ import annotations

import functools
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import parity
import reference_models
import tiny_tokenizers
from huggingface_test import equal_bits
from tba_jax import score
from tba_jax.checkpoints.huggingface import load_model, save_model
from tba_jax.models import transformer
from tba_jax.models.heads import token_logprobs
from tba_jax.models.variants import FAMILIES
from transformer_test import rows_of

torch = parity.require("torch")
transformers = parity.require("transformers")

NUM_ROWS, VOCAB_SIZE, LENGTH, NUM_DRAWS = 333, 320, 64, 6  # 13 rows of the table are no tokens


def drawn(family: str, number: int) -> dict[str, Any]:
  """Fields of a small config.json: heads, widths, ties, biases and rotations as they fall."""
  rng = np.random.default_rng([zlib.crc32(family.encode()), number])
  pick = lambda *values: values[rng.integers(len(values))]
  heads, kv_heads = pick((3, 1), (3, 3), (5, 1), (6, 2), (6, 6), (4, 1))
  width = 8 * heads
  if family == "gpt2":
    return dict(
      n_embd=width, n_head=heads, n_layer=2, n_inner=pick(None, 36), vocab_size=NUM_ROWS, n_positions=70,
      tie_word_embeddings=pick(True, False), bos_token_id=0, eos_token_id=0,  # the defaults, 50256, are no ids here
    )
  fields = dict(
    hidden_size=width, num_attention_heads=heads, num_hidden_layers=3, intermediate_size=pick(36, 50),
    vocab_size=NUM_ROWS, max_position_embeddings=128, tie_word_embeddings=pick(True, False),
  )
  theta = pick(500.0, 10000.0, 1e6)
  if family == "gpt_neox":
    return {
      **fields, "rotary_pct": pick(0.25, 0.5, 1.0), "rotary_emb_base": theta, "attention_bias": pick(True, False),
      "use_parallel_residual": pick(True, False),
    }
  fields |= dict(num_key_value_heads=kv_heads, rope_theta=theta, head_dim=pick(8, 10, 14))
  if family in ("llama", "qwen3", "gemma", "gemma2", "gemma3_text"):
    fields["attention_bias"] = pick(True, False)
  if family == "llama":
    fields["mlp_bias"] = pick(True, False)
  if family.startswith("gemma"):
    fields["pad_token_id"] = None
  if family in ("mistral", "gemma2", "gemma3_text"):
    fields["sliding_window"] = pick(5, 16)
  if family in ("gemma2", "gemma3_text"):
    fields |= dict(query_pre_attn_scalar=pick(8, 11), final_logit_softcapping=pick(None, 4.0))
  return fields


def reference_log_probs(model: torch.nn.Module, sequence: np.ndarray) -> np.ndarray:
  """float64 [T, VOCAB_SIZE]: rows of the table that are no tokens are out of the normaliser."""
  z = reference_models.reference_logits(model, sequence[None])[0, :, :VOCAB_SIZE].astype(np.float64)
  return z - z.max(-1, keepdims=True) - np.log(np.exp(z - z.max(-1, keepdims=True)).sum(-1, keepdims=True))


def check_log_probs(model: torch.nn.Module, cfg, params, rng: np.random.Generator) -> None:
  whole, left, right, first, second = (rng.integers(0, VOCAB_SIZE, n).astype(np.int32) for n in (64, 51, 45, 30, 34))
  layout = [[(0, whole)], [(13, left)], [(0, right)], [(0, first), (30, second)]]
  tokens, positions, segment_ids = rows_of(layout, rng)
  log_p, _ = jax.jit(functools.partial(token_logprobs, cfg=cfg, temperature=1.0, dtype=jnp.float32))(
    params, tokens=tokens, positions=positions, segment_ids=segment_ids
  )
  expected = np.zeros(tokens.shape)
  for row, sequences in enumerate(layout):
    for start, sequence in sequences:
      log_probs = reference_log_probs(model, sequence)[:-1]
      expected[row, start + 1 : start + len(sequence)] = log_probs[np.arange(len(sequence) - 1), sequence[1:]]
  assert expected.std() > 0.5
  np.testing.assert_allclose(log_p, expected, rtol=0, atol=2e-5)


def check_greedy(model: torch.nn.Module, cfg, params, rng: np.random.Generator) -> None:
  prompts, lengths = rng.integers(0, VOCAB_SIZE, (2, 20)).astype(np.int32), np.array([5, 20], np.int32)
  found = score.greedy_tokens(
    transformer.unstack(params), prompts, lengths, cfg=cfg, num_tokens=10, dtype=jnp.float32
  )
  for prompt, length, continuation in zip(prompts, lengths, np.asarray(found), strict=True):
    sequence = prompt[:length]
    for _ in range(10):
      sequence = np.append(sequence, reference_log_probs(model, sequence)[-1].argmax())
    assert continuation.tolist() == sequence[length:].tolist()


@pytest.mark.parametrize(("family", "number"), [
  pytest.param(family, number, marks=[] if (family, number) in {("llama", 1), ("gemma3_text", 2)} else pytest.mark.slow)
  for family in FAMILIES for number in range(NUM_DRAWS)
])
def test_a_model_in_drawn_shapes_scores_and_decodes_as_in_transformers(family: str, number: int, tmp_path):
  model = reference_models.reference_model(family, **drawn(family, number))
  tiny_tokenizers.save(tmp_path, eos_token="<|im_end|>")
  model.save_pretrained(tmp_path, max_shard_size="40KB")
  (tmp_path / "generation_config.json").unlink(missing_ok=True)
  cfg, params, _ = load_model(tmp_path, dtype=jnp.float32)
  assert (cfg.vocab_size, cfg.num_embeddings) == (VOCAB_SIZE, NUM_ROWS)
  rng = np.random.default_rng(number)
  check_log_probs(model, cfg, params, rng)
  check_greedy(model, cfg, params, rng)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_in_drawn_shapes_goes_out_again_bit_for_bit(family: str, number: int, tmp_path):
  model = reference_models.reference_model(family, **drawn(family, number))
  tiny_tokenizers.save(tmp_path / "theirs", eos_token="<|im_end|>")
  model.save_pretrained(tmp_path / "theirs")
  (tmp_path / "theirs" / "generation_config.json").unlink(missing_ok=True)
  cfg, params, tokenizer = load_model(tmp_path / "theirs", dtype=jnp.float32)
  save_model(tmp_path / "ours", cfg, params, tokenizer, shard_bytes=40_000)
  assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 1
  cfg_again, params_again, _ = load_model(tmp_path / "ours", dtype=jnp.float32)
  assert cfg_again == cfg and equal_bits(params_again, params)
  again, report = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path / "ours", attn_implementation="eager", output_loading_info=True
  )
  assert not any(report.values()), report
  for (name, x), (_, y) in zip(model.named_parameters(), again.named_parameters(), strict=True):
    assert torch.equal(x, y), name
  tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, (1, 24))
  logits, expected = (reference_models.reference_logits(x, tokens) for x in (again, model))
  np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)

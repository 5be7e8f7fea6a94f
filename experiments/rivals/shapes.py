"""The models and requests that the benchmarks use. No package beyond numpy, for every environment reads this."""

from __future__ import annotations

import numpy as np

# Fields of a Llama's config.json. M has the shape of SmolLM2-135M; QUICK is for the test that the scripts run.
# rope_theta is the one that google-tunix's Llama uses, whatever its config says.
MODELS = {
  "S": dict(
    hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4, intermediate_size=688,
    vocab_size=512, rope_theta=1e6,
  ),
  "M": dict(
    hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536,
    vocab_size=49_152, rope_theta=1e6,
  ),
  "QUICK": dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, intermediate_size=48,
    vocab_size=256, rope_theta=1e6,
  ),
}
COMMON = dict(
  model_type="llama", max_position_embeddings=4096, rms_norm_eps=1e-5, tie_word_embeddings=True, hidden_act="silu",
  attention_bias=False, mlp_bias=False,
)
PAD_ID, STOP_ID = 0, 1  # the stop token is never asked for: every sample has a length that is given


def head_dim(model: str) -> int:
  return MODELS[model]["hidden_size"] // MODELS[model]["num_attention_heads"]


def num_layer_weights(model: str) -> int:
  """Weights in the matrices of the layers."""
  m, h = MODELS[model], head_dim(model)
  attention = 2 * m["hidden_size"] * (m["num_attention_heads"] + m["num_key_value_heads"]) * h
  return m["num_hidden_layers"] * (attention + 3 * m["hidden_size"] * m["intermediate_size"])


def num_head_weights(model: str) -> int:
  return MODELS[model]["hidden_size"] * MODELS[model]["vocab_size"]


def matrices(model: str) -> list[tuple[int, int]]:
  """(in, out) of every weight product of one token, in order, the head last."""
  m, h = MODELS[model], head_dim(model)
  d, q, k, f = m["hidden_size"], m["num_attention_heads"] * h, m["num_key_value_heads"] * h, m["intermediate_size"]
  layer = [(d, q), (d, k), (d, k), (q, d), (d, f), (d, f), (f, d)]
  return layer * m["num_hidden_layers"] + [(d, m["vocab_size"])]


def random_prompts(model: str, *, count: int, length: int, seed: int = 0) -> list[list[int]]:
  """Random ids, none of them special."""
  rng = np.random.default_rng(seed)
  return rng.integers(2, MODELS[model]["vocab_size"], size=(count, length)).tolist()


def ragged_lengths(count: int, *, longest: int = 256, seed: int = 0) -> list[int]:
  """New tokens of requests as answers have them: lognormal, median 48, sigma 0.8, at most `longest`."""
  lengths = np.random.default_rng(seed).lognormal(np.log(48), 0.8, size=count)
  return np.clip(np.round(lengths), 1, longest).astype(int).tolist()


def sampling_flops(model: str, requests: list[tuple[int, int, int]]) -> tuple[float, float]:
  """Multiplications and additions that sampling needs at least: of reading each prompt once, and of decoding.

  Args:
    requests: (prompt tokens, new tokens, samples) of each prompt.
  """
  m = MODELS[model]
  per_key = 4 * m["num_hidden_layers"] * m["num_attention_heads"] * head_dim(model)  # q k and p v
  layers, head = num_layer_weights(model), num_head_weights(model)
  reading = decoding = 0.0
  for prompt, new, samples in requests:
    reading += 2 * layers * prompt + 2 * head + per_key * prompt * (prompt + 1) / 2
    decoded = new - 1  # the first new token comes of the prompt's logits
    decoding += samples * (2 * (layers + head) * decoded + per_key * sum(range(prompt + 1, prompt + new)))
  return reading, decoding


def cache_token_bytes(model: str) -> int:
  """Keys and values of one token in float32."""
  m = MODELS[model]
  return 4 * 2 * m["num_hidden_layers"] * m["num_key_value_heads"] * head_dim(model)


def decode_bytes(model: str, requests: list[tuple[int, int, int]], *, steps: int) -> float:
  """Bytes that `steps` decode steps must read: every weight once a step, and each sample's keys and values."""
  weights = 4 * (num_layer_weights(model) + num_head_weights(model))
  keys = sum(samples * sum(range(prompt + 1, prompt + new)) for prompt, new, samples in requests)
  return steps * weights + keys * cache_token_bytes(model)


def training_flops(model: str, *, rows: int, tokens: int) -> float:
  """6 per weight and token, forward and backward, and causal attention's products thrice."""
  m = MODELS[model]
  per_key = 4 * m["num_hidden_layers"] * m["num_attention_heads"] * head_dim(model)
  products = 6 * (num_layer_weights(model) + num_head_weights(model)) * tokens
  return rows * (products + 3 * per_key * tokens * (tokens + 1) / 2)

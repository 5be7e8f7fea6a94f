"""Drawing tokens against numpy: distribution, log-probabilities, noise, filters; and how slots lie on a mesh."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import tiny
from tba_jax import sharding
from tba_jax.models import transformer
from tba_jax.sampling import decode, draws
from tba_jax.sampling.engine import sample_keys

TEMPERATURE = 0.7


def log_softmax(x: np.ndarray) -> np.ndarray:
  x = x.astype(np.float64)
  shifted = x - x.max(-1, keepdims=True)
  return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def test_draws_follow_the_softmax_at_the_rows_temperature():
  logits = np.array([2.0, 1.0, 0.0, -1.0, -np.inf, 0.5], np.float32)
  num = 20_000
  keys = sample_keys(3, occurrence=5, attempt=0, num_samples=num)
  tokens, _ = draws.sample_tokens(
    jnp.tile(logits, (num, 1)),
    keys,
    jnp.zeros(num, jnp.int32),
    jnp.full(num, TEMPERATURE),
    log_mu_temperature=TEMPERATURE,
  )
  expected = np.exp(log_softmax(logits / TEMPERATURE)) * num
  found = np.bincount(np.asarray(tokens), minlength=6)
  assert found[4] == 0
  possible = expected > 0
  chi_square = ((found - expected)[possible] ** 2 / expected[possible]).sum()
  assert chi_square < 18.5, (found, expected)  # 4 degrees of freedom, p = 0.001


def test_successive_tokens_of_a_sample_are_independent():
  num = 10_000
  key = np.tile(sample_keys(0, occurrence=0, attempt=0, num_samples=1), (num, 1))
  tokens, _ = draws.sample_tokens(
    jnp.zeros((num, 2)), key, jnp.arange(num, dtype=jnp.int32), jnp.ones(num), log_mu_temperature=1.0
  )
  tokens = np.asarray(tokens)
  pairs = np.bincount(2 * tokens[:-1] + tokens[1:], minlength=4)
  assert ((pairs - num / 4) ** 2 / (num / 4)).sum() < 16.3  # 3 degrees of freedom, p = 0.001


@pytest.mark.parametrize("temperature", [0.0, TEMPERATURE, 1.3])
def test_log_mu_is_of_the_full_vocabulary_at_the_runs_temperature(temperature):
  rng = np.random.default_rng(0)
  logits = rng.normal(size=(50, 40)).astype(np.float32) * 3
  logits[:, 37:] = -np.inf
  keys = sample_keys(0, occurrence=1, attempt=0, num_samples=50)
  tokens, log_mu = draws.sample_tokens(
    jnp.asarray(logits),
    keys,
    jnp.arange(50, dtype=jnp.int32),
    jnp.full(50, temperature),
    log_mu_temperature=TEMPERATURE,
  )
  expected = log_softmax(logits / TEMPERATURE)[np.arange(50), tokens]
  np.testing.assert_allclose(log_mu, expected, atol=2e-6, rtol=1e-6)
  if temperature == 0:
    np.testing.assert_array_equal(tokens, logits.argmax(-1))
  else:
    assert (np.asarray(tokens) != logits.argmax(-1)).any()


def test_a_known_pair_of_logits():
  # log p = logits / T, then normalised. Dividing the log-probability by T (-0.627) or leaving T out (-0.313) is wrong.
  _, log_mu = draws.sample_tokens(
    jnp.array([[1.0, 0.0]]), np.zeros((1, 2), np.uint32), jnp.zeros(1, jnp.int32), jnp.zeros(1), log_mu_temperature=0.5
  )
  np.testing.assert_allclose(log_mu, [-0.1269], atol=1e-4)


def test_noise_of_a_row_is_that_of_its_key_and_index_alone():
  logits = jax.random.normal(jax.random.key(0), (6, 33))
  keys = sample_keys(9, occurrence=2, attempt=1, num_samples=6)
  indices = np.array([0, 7, 1, 300, 4, 7], np.int32)
  tokens, _ = draws.sample_tokens(logits, keys, indices, jnp.ones(6), log_mu_temperature=1.0)
  for row in range(6):
    key = jax.random.fold_in(jax.random.wrap_key_data(jnp.asarray(keys[row]), impl="threefry2x32"), indices[row])
    assert tokens[row] == jnp.argmax(logits[row] + jax.random.gumbel(key, (33,), jnp.float32))


def kept_by_hand(p: np.ndarray, top_k: int, top_p: float, min_p: float) -> set[int]:
  """Ids that survive top_k, then top_p of what is left, then min_p; float64, one row, no ties."""
  order = [int(i) for i in np.argsort(-p) if p[i] > 0]
  order = order[: top_k or None]
  total, mass, kept = sum(p[i] for i in order), 0.0, []
  for i in order:
    if mass >= top_p and top_p < 1:
      break
    kept.append(i)
    mass += p[i] / total
  return {i for i in kept if p[i] >= min_p * p[kept[0]]}


def test_filters_keep_what_is_kept_by_hand():
  rng = np.random.default_rng(0)
  num, num_ids = 300, 30
  scaled = (3 * rng.normal(size=(num, num_ids))).astype(np.float32)
  scaled[:, -2:] = -np.inf
  top_k = rng.choice([0, 1, 3, 10, 100], num).astype(np.int32)
  top_p = rng.choice([1e-6, 0.3, 0.8, 0.99, 1.0], num).astype(np.float32)
  min_p = rng.choice([0.0, 0.01, 0.2, 1.0], num).astype(np.float32)
  kept = np.isfinite(draws.filter_logits(scaled, draws.Filters(top_k, top_p, min_p)))
  p = np.exp(log_softmax(scaled))
  sizes = set()
  for row in range(num):
    expected = kept_by_hand(p[row], int(top_k[row]), float(top_p[row]), float(min_p[row]))
    assert set(np.flatnonzero(kept[row])) == expected, (top_k[row], top_p[row], min_p[row])
    sizes.add(len(expected))
  assert len(sizes) > 10  # from one id to all that exist
  assert 1 in sizes and num_ids - 2 in sizes


def test_a_known_cut():
  """Full log p of the first token is -0.440; of the two that are kept, -0.313."""
  one = dict(keys=np.zeros((1, 2), np.uint32), indices=jnp.zeros(1, jnp.int32), temperatures=jnp.full(1, 1e-3))
  logits = jnp.array([[2.0, 1.0, 0.0, -1.0]])
  _, full = draws.sample_tokens(logits, **one, log_mu_temperature=1.0)
  np.testing.assert_allclose(full, [-0.4402], atol=1e-4)
  one["temperatures"] = jnp.ones(1)
  filters = draws.Filters(jnp.full(1, 2), jnp.ones(1), jnp.zeros(1))
  token, cut = draws.sample_tokens(logits, **one, log_mu_temperature=0.5, filters=filters)
  np.testing.assert_allclose(cut, [[-0.3133, -1.3133][int(token[0])]], atol=1e-4)


def test_kv_heads_are_split_over_tensor_where_it_divides_them_and_whole_elsewhere():
  cfg = tiny.tiny_config()  # 2 kv heads
  devices = np.array(jax.devices()[:8])
  split = decode.slot_shardings(Mesh(devices.reshape(2, 2, 2), ("data", "fsdp", "tensor")), cfg)
  assert split.rows.spec == PartitionSpec(("data", "fsdp")) and split.num_row_shards == 4
  assert split.cache.spec == PartitionSpec(("data", "fsdp"), "tensor")
  whole = decode.slot_shardings(Mesh(devices.reshape(2, 4), ("data", "tensor")), cfg)
  assert whole.cache.spec == PartitionSpec(("data",), None) and whole.num_row_shards == 2


@pytest.mark.parametrize("lane_samples", [1, 2])
@pytest.mark.parametrize("on_mesh", [False, True])
def test_a_chunk_neither_copies_nor_moves_the_cache(on_mesh, lane_samples):
  cfg, slots, length = tiny.tiny_config(), 8, 1024
  mesh = sharding.make_mesh(jax.devices()[:4], data=2, fsdp=1, tensor=2) if on_mesh else None
  shardings = decode.slot_shardings(mesh, cfg) if on_mesh else None
  one = SingleDeviceSharding(jax.devices()[0])
  init, cache_bytes = decode.make_init_state(
    cfg, *(shardings or (one, one)), slots=slots, cache_tokens=length, cache_dtype=jnp.dtype(jnp.float32),
    lane_samples=lane_samples, prefix_tokens=16)
  params = jax.device_put(
    transformer.unstack(tiny.tiny_params(cfg, 0)), NamedSharding(mesh, PartitionSpec()) if on_mesh else one)
  compiled = decode.decode_chunk.lower(
    params, init(), cfg=cfg, num_tokens=4, kv_length=length, prefix_length=16, stop_ids=(), log_mu_temperature=1.0,
    filtering=False, dtype=jnp.float32, attention="xla", shardings=shardings).compile()
  memory = compiled.memory_analysis()
  assert memory.alias_size_in_bytes >= cache_bytes and memory.temp_size_in_bytes < cache_bytes / cfg.num_layers
  for line in compiled.as_text().splitlines():
    assert not re.search(r"\[[\d,]*,1024,8\]\S* (all-gather|all-to-all|collective-permute|copy)\(", line), line

"""Predictions against what runs here: a train step and decoding on one CPU device, by peaks measured beside them.

All of it in CPU time, that of all threads together: by the clock a peak, measured in a few hundredths of a second, is
that of a free core in the best of some runs, and a step of seconds never has one on a machine where others work.
"""

from __future__ import annotations

import dataclasses
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax import learner, optimizers
from tba_jax.losses.registry import make_loss
from tba_jax.models import transformer
from tba_jax.models.variants import from_huggingface
from tba_jax import chips, work
from tba_jax.plan import predict
from tba_jax.replay.collate import collate_supervised
from tba_jax.sampling import decode
from tba_jax.sharding import make_mesh

CFG = from_huggingface(dict(
  model_type="llama", vocab_size=8192, hidden_size=512, num_hidden_layers=6, num_attention_heads=8,
  num_key_value_heads=4, intermediate_size=1536, max_position_embeddings=512))


def typical_secs(run) -> tuple[float, chips.Chip]:
  """Medians of three: the CPU time of a run, after one that compiles, and the peaks, each measured right before a run,
  so that other work, which slows caches and memory, slows both."""
  run()
  found, peaks = [], []
  for _ in range(3):
    peaks.append(chips.measure_cpu(1, clock=time.process_time))
    began = time.process_time()
    run()
    found.append(time.process_time() - began)
  speeds = ("peak_flops", "hbm_bytes_per_sec", "hbm_share")
  return statistics.median(found), dataclasses.replace(
    peaks[0], **{name: statistics.median(getattr(each, name) for each in peaks) for name in speeds})


@pytest.mark.slow
def test_train_step_and_decode_within_a_factor_of_two():
  params = jax.device_put(transformer.init_params(CFG, jax.random.key(0)), jax.devices()[0])

  rows, tokens = 8, 128
  schedule = optimizers.make_schedule("constant", learning_rate=1e-5)
  optimizer = optimizers.make_optimizer("adamw", schedule=schedule, clip_norm=1.0)
  mesh = make_mesh(jax.devices()[:1])
  step = learner.make_train_step(
    CFG, make_loss("sft"), optimizer, temperature=1.0, compute_dtype=jnp.float32, remat="full", micro_batches=2,
    chunk_tokens=256, whole_groups_per_micro_batch=True, mesh=mesh)
  batch = collate_supervised(
    [([1] * 64, list(range(2, 66))) for _ in range(rows)], row_multiple=rows, length_buckets=(tokens,), pack=False)
  states = [learner.init_train_state(jax.tree.map(jnp.copy, params), optimizer, mesh=mesh)]

  def train():
    states[0] = jax.block_until_ready(step(states[0], batch, np.float32(1.0)))[0]

  step_secs, step_chip = typical_secs(train)
  of_step = work.train_work(
    CFG, rows=rows, row_tokens=tokens, head_row_tokens=tokens - 1, micro_batches=2, remat="full", one_pass=True,
    adapters_only=False, optimizer="adamw", compute_bytes=4, devices=1, fused_attention=False)

  slots, length, chunk = 16, 256, 16
  weights = transformer.unstack(params)
  state = decode.init_state(
    CFG, slots=slots, cache_tokens=length, cache_dtype=jnp.float32, lane_samples=1, prefix_tokens=0)
  decoding = [state._replace(
    live=jnp.ones(slots, bool), limits=jnp.full(slots, 10_000), temperatures=jnp.ones(slots),
    positions=jnp.full(slots, 8))]

  def run_chunk():
    decoding[0] = decoding[0]._replace(positions=jnp.full(slots, 8))
    decoding[0], output = decode.programs_on("cpu").decode_chunk(
      weights, decoding[0], cfg=CFG, num_tokens=chunk, kv_length=length, prefix_length=0, stop_ids=(), attention="xla",
      log_mu_temperature=1.0, filtering=False, dtype=jnp.float32, shardings=None)
    jax.block_until_ready(output)

  chunk_secs, chunk_chip = typical_secs(run_chunk)
  of_token = work.decode_work(
    CFG, slots=slots, kv_length=length, cache_length=length, chunk_tokens=chunk, compute_bytes=4,
    cache_bytes=4, devices=1)
  step_ratio = predict.terms(of_step, 0.0, step_chip).secs / step_secs
  decode_ratio = predict.terms(of_token.times(chunk), 0.0, chunk_chip).secs / chunk_secs
  print(f"predicted / measured: train step {step_ratio:.2f}, decoded token {decode_ratio:.2f}")
  assert 0.5 < step_ratio < 2 and 0.5 < decode_ratio < 2, (step_ratio, decode_ratio)

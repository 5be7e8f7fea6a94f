"""What the machine could do at most: the counts against an own sum over a model's arrays, the shares against figures by
hand."""

from __future__ import annotations

import types

import jax
import numpy as np
import pytest

from tba_jax import chips
from tba_jax.limits import Limits, limits_of
from tba_jax.models import transformer
from tba_jax.report import speed
import tiny


def _limits(cfg, device, **changes):
  settings = dict(trainer_devices=4, searcher_devices=2, share=False, adapters_only=False, sample_bytes=2,
                  cache_dtype="bfloat16", slots=8, lane_samples=1)
  return limits_of(cfg, device, **(settings | changes))


@pytest.mark.parametrize("tied", [True, False])
def test_counts_are_those_of_the_models_matrices(tied):
  cfg = tiny.tiny_config(tie_word_embeddings=tied)
  device = types.SimpleNamespace(platform="tpu", device_kind="TPU v5 lite")
  found = _limits(cfg, device)
  params = transformer.abstract_params(cfg)
  matrices = sum(leaf.size for path, leaf in jax.tree_util.tree_leaves_with_path(params)
                 if leaf.ndim >= 2 and "norm" not in jax.tree_util.keystr(path))
  table = cfg.num_embeddings * cfg.hidden_size
  num = matrices if tied else matrices - table  # an embedding that is no head is looked up, not multiplied with
  assert found.train_flops_per_token == 6 * num and found.sample_flops_per_token == 2 * num
  assert _limits(cfg, device, adapters_only=True).train_flops_per_token == 4 * num
  assert found.sample_weight_bytes == 2 * num / 8
  cache = transformer.init_cache(cfg, batch=1, length=1, dtype="bfloat16")
  assert found.cache_token_bytes == sum(leaf.size * 2 for leaf in jax.tree.leaves(cache) if leaf.ndim > 1)
  assert found.trainer_flops_per_sec == 4 * 197e12 and found.searcher_bytes_per_sec == 2 * 819e9
  assert not found.one_machine


def test_peaks_of_devices():
  cfg = tiny.tiny_config()
  v4 = _limits(cfg, types.SimpleNamespace(platform="tpu", device_kind="TPU v4"))
  assert v4.trainer_flops_per_sec == 4 * 275e12
  unknown = _limits(cfg, types.SimpleNamespace(platform="gpu", device_kind="NVIDIA X"))
  assert unknown.trainer_flops_per_sec is None and unknown.peaks == "not known for this kind of device"
  cpu = _limits(cfg, jax.devices()[0])
  assert cpu.one_machine and cpu.trainer_flops_per_sec == cpu.searcher_flops_per_sec > 1e9
  assert chips.chip_of(jax.devices()[1]) is chips.chip_of(jax.devices()[0]), "measured once"


def test_shares_by_hand():
  limits = Limits(
      device_kind="x", peaks="", trainer_devices=1, searcher_devices=1, one_machine=False,
      trainer_flops_per_sec=6e6, searcher_flops_per_sec=2e6, searcher_bytes_per_sec=1e6, train_flops_per_token=6e3,
      sample_flops_per_token=2e3, sample_weight_bytes=500.0, cache_token_bytes=100.0, lane_samples=2)
  columns = {
      "prompt_tokens": np.array([10.0, 30.0]), "response_tokens": np.array([10.0, 10.0]),
      "trained_tokens_per_second": np.array([100.0, 50.0]), "generated_tokens_per_second": np.array([40.0, 50.0]),
      "trained_tokens": np.array([100.0, 200.0]), "step_seconds": np.array([0.5, 0.5])}
  # 1,000 tokens/s in all; half of them, then a quarter, are of responses. A sampled token: 1 ms of arithmetic, (500 +
  # 100 (prompt / 2 + 5)) bytes of memory: 1.5 and 2.5 ms.
  found = speed.shares(columns, limits)
  np.testing.assert_allclose(found["trainer_share"], [100 / 500, 50 / 250])
  np.testing.assert_allclose(found["searcher_share"], [40 * 1.5e-3, 50 * 2.5e-3])
  trainer, in_step, searchers = speed.speeds(columns, limits)
  # 3 s; 200 + 400 tokens of prompts and responses take 0.6 s at the peak.
  np.testing.assert_allclose(trainer[1:3], (200 / 3, 200 / 0.6))
  np.testing.assert_allclose(in_step[1:3], (200.0, 200 / 0.6))
  np.testing.assert_allclose(searchers[1:3], ((40 * 1 + 50 * 2) / 3, 1 / 2e-3))
  assert searchers.bound == "memory"
  assert speed.shares(columns, None) == {} and speed.speeds({}, limits) == []

"""What is said of memory before it is taken."""

from __future__ import annotations

import json
import os

import jax
import pytest

from configs import quickstart
from tba_jax import build, placement
from tba_jax.config import ConfigError
from tba_jax.placement import Placement

PLACED = [
  Placement("trainer", "0-1", "parameters", 1000, 2000),
  Placement("trainer", "0-1", "gradients", 500, 1000),
  Placement("searcher 0", "2", "weights", 300, 300),
  Placement("searcher 1", "3", "weights", 300, 300),
  Placement("host", "memory", "replay buffer", 10**15, 10**15),
]


def test_a_line_a_part_and_like_parts_together():
  assert placement.summary(PLACED).splitlines() == [
    "trainer: 1,500 bytes a device (parameters 1,000, gradients 500)",
    "searcher 0, searcher 1: 300 bytes a device (weights 300)",
    "host: 1,000,000,000,000,000 bytes (replay buffer 1,000,000,000,000,000)",
  ]


def test_what_just_fits_is_taken_and_a_byte_more_is_refused():
  placement.check_fits(PLACED, {"0-1": 1500, "2": 300, "3": 300})
  with pytest.raises(ValueError,
                     match=r"devices 0-1 would hold 1,500 bytes each but have 1,499 \(trainer: parameters 1,000, trai"):
    placement.check_fits(PLACED, {"0-1": 1499, "2": 300, "3": 300})


def test_cpu_devices_share_the_machines_memory_and_the_lazy_buffer_does_not_count():
  limits = placement.device_limits(jax.devices(), PLACED)
  assert limits == {"all": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")}
  placement.check_fits(PLACED, {"all": 3600})
  with pytest.raises(ValueError, match="devices all would hold 3,600 bytes but have 3,599"):
    placement.check_fits(PLACED, {"all": 3599})


def test_a_model_with_too_few_learned_positions_is_refused_before_any_device_work(tmp_path):
  (tmp_path / "config.json").write_text(json.dumps({
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 300, "n_embd": 32, "n_layer": 2,
    "n_head": 2, "n_positions": 39, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
  }))
  config = quickstart.get_config("smoke").unlock()  # 22 prompt and 18 new tokens
  config.model.path = str(tmp_path)
  message = r"sample.max_prompt_tokens \+ sample.max_new_tokens: a cache of 40 tokens is longer than the 39 positions"
  with pytest.raises(ConfigError, match=message):
    build.model_config(config)
  config.sample.max_new_tokens = 17
  assert build.model_config(config).max_positions == 39

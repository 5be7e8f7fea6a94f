"""The run's programs compile for a TPU slice that is not here. In one process, for a toy; needs libtpu."""

from __future__ import annotations

import importlib.util
import os
import pathlib

import pytest

if importlib.util.find_spec("libtpu") is None:
  pytest.skip("libtpu (684 MB) is not installed: pip install -r requirements-tpu.txt", allow_module_level=True)

from tba_jax.plan import programs, topology  # noqa: E402
from tba_jax.plan.compiler import compile_program  # noqa: E402

REPO = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module", name="halves")
def fixture_halves():
  """The two halves of a v5e:2x4 on one host, trainer and searcher."""
  before = dict(os.environ)
  topology.prepare_environment(num_cpu_devices=8)
  found = topology.open_slice("v5e:2x4")
  os.environ.clear()
  os.environ.update(before)
  assert found.num_hosts == 1 and len(found.devices) == 8 and found.devices[0].platform == "tpu"
  return found.devices[:4], found.devices[4:]


@pytest.fixture(scope="module", name="config")
def fixture_config():
  spec = importlib.util.spec_from_file_location("plan_aot_config", REPO / "configs/quickstart.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  config = module.get_config("smoke")
  with config.unlocked():
    config.model.architecture.update(
      hidden_size=256, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=64, mlp_size=512)
    config.train.update(micro_batches=2, prompts_per_step=8, compute_dtype="bfloat16", remat="full")
    config.sample.dtype = "bfloat16"
  return config


@pytest.fixture(scope="module", name="cfg")
def fixture_cfg(config):
  from tba_jax import build

  return build.model_config(config)


def compiled(part, name, tmp_path):
  [program] = [program for program in part.programs if program.name == name]
  return compile_program(program, target="test", cache=tmp_path)


def arguments(part, *contents):
  sizes = {resident.content: resident.device_bytes for resident in part.residents}
  return sum(sizes[content] for content in contents)


def test_train_step(config, cfg, halves, tmp_path):
  part = programs.trainer_part(config, cfg, halves[0])
  found = compiled(part, "train step", tmp_path)
  state = arguments(part, "parameters", "optimizer state")
  assert state <= found.alias_bytes <= found.argument_bytes, "the state is donated"
  assert found.argument_bytes < 1.6 * state  # the compiler pads small arrays to its tiles; a replica would be 4 times
  assert found.temp_bytes > 0 and found.overflow_bytes == 0
  assert {"all-gather", "collective-permute"} & set(found.collectives) and found.link_bytes > 0


def test_searcher_of_four_devices(config, cfg, halves, tmp_path):
  part = programs.searcher_part(config, cfg, halves[1])
  prefill, decode = compiled(part, "prefill", tmp_path), compiled(part, "decode", tmp_path)
  cache = arguments(part, f"cache of {config.sample.slots} slots")
  weights = arguments(part, "weights")
  assert weights <= prefill.argument_bytes < 1.6 * weights
  assert weights + cache <= decode.argument_bytes and decode.alias_bytes >= 0.9 * cache, "the cache is donated"
  assert decode.collectives and prefill.collectives, "heads are split over four devices"
  assert max(prefill.overflow_bytes, decode.overflow_bytes) == 0


def test_decode_on_one_device_has_no_collectives(config, cfg, halves, tmp_path):
  found = compiled(programs.searcher_part(config, cfg, halves[1][:1]), "decode", tmp_path)
  assert found.link_bytes == 0 and found.code_bytes > 0


def test_a_slice_that_cannot_be_is_one_line(halves):
  text = r"--topology=v5e:3x5 is no slice that libtpu can make \(.*\); for example v5e:2x4"
  with pytest.raises(ValueError, match=text):
    topology.open_slice("v5e:3x5")

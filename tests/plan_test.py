"""Plans: arithmetic by hand, splits, memory, one whole plan on CPU devices, and what bad input says."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from tba_jax.chips import CHIPS, Chip
from tba_jax.config import DeviceCounts
from tba_jax.models.known import KNOWN
from tba_jax.models.variants import from_huggingface
from tba_jax.plan import beside, planner, predict, programs, report, splits
from tba_jax.plan.compiler import Compiled, compile_program
from tba_jax.work import Work

REPO = pathlib.Path(__file__).resolve().parent.parent
RHO = from_huggingface(KNOWN["realtreetune/rho-1b-sft-gsm8k"])
CHIP = Chip(name="round", peak_flops=1e12, hbm_bytes=1000, hbm_bytes_per_sec=1e10, link_bytes_per_sec=1e9,
            host_bytes=1e9, mfu=0.5, hbm_share=0.5, sources={})


def load_config(path: str, argument: str | None = None):
  spec = importlib.util.spec_from_file_location("plan_test_config", REPO / path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.get_config(argument)


# --- Arithmetic ---


def test_terms():
  terms = predict.terms(Work(flops=1e12, hbm_bytes=2e10), 8e8, CHIP)
  assert (terms.compute_secs, terms.memory_secs, terms.link_secs) == pytest.approx((2.0, 4.0, 1.0))
  assert terms.secs == pytest.approx(5.0)
  cpu = dataclasses.replace(CHIP, overlaps=False)
  assert predict.terms(Work(flops=1e12, hbm_bytes=2e10), 8e8, cpu).secs == pytest.approx(7.0)


def unpacked_config():
  """GSM8K in rows of one response each."""
  config = load_config("configs/gsm8k.py")
  with config.unlocked():
    config.train.update(packing=False, micro_batches=7)
  return config


LOAD = planner.workload(unpacked_config(), RHO, 100, 200)


def predicted(load=LOAD, chip=CHIPS["v5e"], *, trainer=4, searchers=4, share=False, judges=None, **changes):
  return predict.predict(
    RHO, dataclasses.replace(load, **changes), chip, trainer=trainer, searchers=searchers, per_searcher=1, share=share,
    published_bytes=2_200_000_000, step_link_bytes=0.0, decode_link_bytes=0.0, prefill_link_bytes=0.0,
    score_link_bytes=0.0, beside=judges or {})


def test_workload_of_a_config():
  assert LOAD.step_tokens == LOAD.score_tokens == 768, "100 + 512 tokens"
  assert LOAD.kv_length == 1024 and LOAD.cache_length == 1024 and LOAD.prefill_tokens == 128
  assert LOAD.one_pass and not LOAD.bounded and LOAD.reuses and not LOAD.alternates


def test_prediction_by_hand():
  p = predicted()
  # 140 rows of 768: 8 FLOPs a parameter of the layers and token (full remat), less what the recomputation skips.
  per_token = 8 * (RHO.num_layers * 44.04e6 + 65.5e6) * 140 * 768
  assert p.step_work.flops * 4 == pytest.approx(per_token, rel=0.2)
  assert p.step.compute_secs == pytest.approx(p.step_work.flops / (197e12 * 0.57))
  # A token of 96 slots: weights once, 96 x 1024 entries of 22,528 bytes.
  assert p.decode_work.hbm_bytes == pytest.approx(2 * 1.034e9 + 96 * 1024 * 22_528, rel=0.05)
  token_secs = p.decode_work.hbm_bytes / (819e9 * 0.7)
  occupancy = 200 / (200 + 15.5)
  group_secs = 24 * 200 * token_secs / (96 * occupancy) + p.prefill.secs / 4 + p.score.secs
  assert p.sampled_tokens_per_sec == pytest.approx(4 * 24 * 200 / group_secs)
  assert p.fresh_ratio == pytest.approx(p.step.secs / (7 * group_secs / 4))
  assert p.steps_per_hour == pytest.approx(3600 / p.step.secs) and p.trainer_idle == 0 and p.searcher_idle == 0
  assert p.transfer_secs == pytest.approx(2.2e9 / (4.5e10 * 0.8))
  assert p.staleness_updates > 0.75 * 2 + 0.5


def test_lanes_read_a_prompt_once():
  config = load_config("configs/gsm8k.py")
  config.sample.update(lane_samples=24, cache_dtype="int8")
  load = planner.workload(config, RHO, 100, 200)
  assert (load.kv_length, load.prefix_length, load.cache_length) == (512, 128, 512)
  entry = 22_528 / 2 + 22 * 2 * 4 * 4  # int8, and a float32 scale for each head's key and value
  nothing = predicted(load, kv_length=0, prefix_length=0, cache_length=0)
  read = predicted(load).decode_work.hbm_bytes - nothing.decode_work.hbm_bytes
  assert read == pytest.approx((96 * 512 + 4 * 128) * entry)


def test_packed_rows_by_hand():
  packed = planner.workload(load_config("configs/gsm8k.py"), RHO, 100, 200)
  assert packed.step_tokens == 1024 and packed.score_tokens == 768 and not packed.one_pass
  # 42,000 tokens fill 11 micro-batches of 4 x 1,024; a second forward pass makes 10 FLOPs of 8.
  per_token = 10 * (RHO.num_layers * 44.04e6 + 65.5e6) * 11 * 4 * 1024
  assert predicted(packed).step_work.flops * 4 == pytest.approx(per_token, rel=0.2)
  assert programs.micro_batches_in_use(load_config("configs/gsm8k.py"), 4, 300) == 11
  assert programs.micro_batches_in_use(unpacked_config(), 4, 300) == 7
  assert programs.all_batches(load_config("configs/gsm8k.py"), 4) == ((140, 1024, 140),)


def test_who_waits():
  free = predicted()
  assert free.fresh_ratio > 1, "the searchers are the faster side here"
  bounded = predicted(bounded=True)
  assert bounded.searcher_idle == pytest.approx(1 - 1 / free.fresh_ratio)
  assert bounded.sampled_tokens_per_sec == pytest.approx(free.sampled_tokens_per_sec / free.fresh_ratio)
  slow = predicted(num_samples=24 * 8, reuses=False)  # the trainer waits for responses that it may use only once
  assert slow.trainer_idle > 0 and slow.fresh_ratio == pytest.approx(1.0)
  turns = predicted(alternates=True)
  assert turns.trainer_idle + turns.searcher_idle == pytest.approx(1.0) and turns.staleness_updates == 0


def test_models_of_the_task_take_time_of_the_searchers():
  """A reward model reads 24 responses; a victim answers 24 attacks 5 times in 64 slots, and a scorer reads the answers.
  """
  tree = {"embed": {"table": jax.ShapeDtypeStruct((100, 10), jnp.bfloat16)},
          "layers": {"kernel": jax.ShapeDtypeStruct((2, 10, 30), jnp.bfloat16)},
          "lm_head": {"kernel": jax.ShapeDtypeStruct((10, 100), jnp.bfloat16)}}
  sizes = dict(num_samples=24, mean_prompt_tokens=100, mean_response_tokens=200, devices=2)
  (read,) = beside.group_works({"gold reward model": tree, "reward model": tree}, {}, **sizes).items()
  assert read == ("reward model", Work(2 * 600 * 24 * 300 / 2, 1200 / 2))
  args = dict(victim_samples=5, victim_slots=64, victim_max_prompt_tokens=96, victim_max_new_tokens=60)
  works = beside.group_works({"victim model": tree, "scorer model": tree, "victim cache": ()}, args, **sizes)
  assert works == {
    "victim model": Work(2 * 1600 * (24 * 48 + 120 * 30) / 2, (2 * 30 + 1) * 3200 / 2),
    "scorer model": Work(2 * 600 * 120 * 78 / 2, 1200 / 2)}
  slow = Work(flops=3 * 197e12 * 0.57, hbm_bytes=0.0)
  alone, judged = predicted(), predicted(judges={"reward model": slow})
  group_secs = [4 * 24 * 200 / p.sampled_tokens_per_sec for p in (alone, judged)]
  assert judged.beside["reward model"].secs == pytest.approx(3.0)
  assert group_secs[1] - group_secs[0] == pytest.approx(3.0)


def test_fresh_steps_count_no_repetition():
  few = predicted(searchers=1, num_samples=24 * 8)
  assert few.fresh_ratio < 1
  assert predict.fresh_steps_per_hour(few) == pytest.approx(few.steps_per_hour * few.fresh_ratio)


# --- Splits and memory ---


def test_splits_divide_batch_and_model():
  found = list(splits.candidates(unpacked_config(), RHO, 8))
  assert {counts.trainer for counts in found} == {1, 2, 4}, "divisors of 20 rows and of width 2048"
  assert all(counts.trainer + counts.searchers * counts.per_searcher == 8 and not counts.share for counts in found)
  assert DeviceCounts(4, 4, 1, False) in found and DeviceCounts(4, 1, 4, False) in found
  fixed = unpacked_config()
  fixed.devices.per_searcher = 2
  assert list(splits.candidates(fixed, RHO, 8)) == [DeviceCounts(2, 3, 2, False), DeviceCounts(4, 2, 2, False)]
  own = load_config("configs/quickstart.py")
  assert list(splits.candidates(own, RHO, 8)) == [DeviceCounts(1, 2, 1, False)], "the config counts its devices"


def test_models_that_the_task_brings_count_in_searchers_memory():
  config = load_config("configs/gsm8k.py")
  with config.unlocked():
    config.task_args = dict(reward_model="EleutherAI/pythia-1b-deduped", gold_reward_model="", reward_dtype="float32",
                            victim_model="meta-llama/Llama-3.1-8B", victim_slots=8, victim_max_prompt_tokens=96,
                            victim_max_new_tokens=32)
  part = programs.searcher_part(config, RHO, jax.devices()[:2])
  sizes = {resident.content: resident.device_bytes for resident in part.residents}
  assert sizes["reward model"] == pytest.approx(4 * 1_011_781_632 / 2, rel=0.01), "float32, split over two devices"
  assert sizes["victim model"] == pytest.approx(2 * 8_030_261_248 / 2, rel=0.01), "in the dtype of sampling"
  assert sizes["victim cache"] == 8 * 128 * 2 * 32 * 8 * 128 * 2 / 2, "keys and values of 32 layers, 8 heads of 128"
  assert "gold reward model" not in sizes


def test_lanes_and_recomputation_of_a_searcher():
  config = load_config("configs/quickstart.py", "smoke")
  config.sample.update(lane_samples=4, recompute_kv=True, cache_dtype="int8")
  cfg = planner.build.model_config(config)
  part = programs.searcher_part(config, cfg, jax.devices()[:2])
  num = {program.name: program.variants for program in part.programs}
  assert num["recompute"] == len(programs.engine_shapes(config).recompute_buckets) and num["decode"] == 1
  assert all("func.func public @main" in program.lower().as_text() for program in part.programs)
  sizes = {resident.content: resident.device_bytes for resident in part.residents}
  # 16 slots of 18 tokens and 4 prompts of 22, against 16 slots of 40; the only kv head is on both devices.
  assert sizes["cache of 16 slots"] / sizes["cache under evaluation"] == pytest.approx((16 * 18 + 4 * 22) / (16 * 40))


PART = programs.Part(
  devices=(), residents=(programs.Resident("weights", 300), programs.Resident("prefilled prompts", 1)),
  programs=tuple(programs.Program(name, None, num) for name, num in (("decode", 3), ("score", 1), ("prefill", 2))),
  published_bytes=300)


def test_memory_adds_up():
  compiled = (
    Compiled("decode", output_bytes=50, alias_bytes=40, temp_bytes=100, code_bytes=5), Compiled("score", temp_bytes=20),
    Compiled("prefill", output_bytes=10, temp_bytes=30, code_bytes=2))
  memory = splits.compiled_memory(PART, compiled, CHIP)
  assert memory.residents == {"weights": 300, "prefilled prompts": 20}
  assert (memory.temporaries, memory.worst_program) == (320, "check of log-probabilities"), "300 restacked + 20"
  assert memory.code == 3 * 5 + 2 * 2 and memory.reserve == 50
  assert memory.needed == 320 + 320 + 19 + 50 and memory.fits
  assert not dataclasses.replace(memory, capacity=708).fits
  shared = splits.shared_memory(memory, memory)
  assert shared.needed == memory.needed + 320 + 19, "residents and code twice, temporaries of one at a time"


def test_an_overflow_does_not_fit():
  memory = splits.compiled_memory(
    PART, (Compiled("decode", overflow_bytes=5_000), Compiled("score"), Compiled("prefill")), CHIP)
  assert memory.worst_program == "decode" and memory.temporaries == 5_000 and not memory.fits


def test_an_overflow_is_read_out_of_the_compilers_words(tmp_path):
  class Lowered:
    def as_text(self):
      return "a program"

    def compile(self):
      raise jax.errors.JaxRuntimeError(
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.50G of 15.75G hbm. Exceeded by 4.75G.")

  program = programs.Program("decode", Lowered, 1)
  found = compile_program(program, target="here", cache=tmp_path)
  assert found.overflow_bytes == 20.5 * 2**30
  assert compile_program(program, target="here", cache=tmp_path) == found, "from the cache"
  assert compile_program(dataclasses.replace(program, name="other"), target="here", cache=tmp_path).name == "other"


# --- A whole plan ---


@pytest.mark.slow
def test_a_plan_of_the_quickstart_on_cpu_devices(tmp_path, monkeypatch):
  config = load_config("configs/quickstart.py", "smoke")
  make = lambda: planner.make_plan(config, "cpu:8", config_name="quickstart", cache=tmp_path, most_compiled=3)
  plan = make()
  assert plan.recommended == "1 + 2 x 1" and [entry.fits for entry in plan.entries] == [True]
  [entry] = plan.entries
  model = entry.trainer_memory.residents["parameters"]
  assert model == 103_552 and entry.trainer_memory.residents["optimizer state"] == pytest.approx(2 * model, rel=1e-3)
  assert entry.trainer_memory.residents["copy being published"] == pytest.approx(model, rel=0.01)
  assert entry.searcher_memory.residents["weights"] == entry.searcher_memory.residents["reference"] == model
  cache = 16 * 40 * 2 * 1 * 16 * 2 * 4  # slots, tokens, k and v, heads, head width, layers, bytes
  assert entry.searcher_memory.residents["cache of 16 slots"] == pytest.approx(cache, rel=0.01)
  plain = json.loads(json.dumps(report.as_json(plan)))
  assert plain["entries"][0]["trainer_memory"]["needed"] == entry.trainer_memory.needed
  text = report.as_markdown(plan)
  assert "**Recommended: 1 + 2 x 1**" in text and f"{model:,}" in text and "measured here" in text

  def refuse(*_):
    raise AssertionError("a second plan must not compile")

  monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
  monkeypatch.setattr(planner.chips, "measure_cpu", lambda _: plan.chip)
  assert make() == plan


# --- Bad input ---


def run_plan(*arguments):
  variables = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
  return subprocess.run([sys.executable, "-m", "tba_jax.plan", *arguments], cwd=REPO, env=variables, timeout=120,
                        capture_output=True, text=True, check=False)


CONFIG = "--config=configs/gsm8k.py"


@pytest.mark.parametrize("arguments, line", [
  ([CONFIG], "--topology is missing; give a slice, for example --topology=v5e:2x4 (or cpu:8)"),
  ([CONFIG, "--topology=v9:2x4"],
   "--topology=v9:2x4 must be CHIP:SHAPE with a chip of v4, v5e, v5p, v6e, cpu; for example v5e:2x4 or cpu:8"),
  ([CONFIG, "--topology=cpu:0"],
   "--topology=cpu:0 must be CHIP:SHAPE with a chip of v4, v5e, v5p, v6e, cpu; for example v5e:2x4 or cpu:8"),
  ([CONFIG, "--topology=v5e-8"],
   "--topology=v5e-8 must be CHIP:SHAPE with a chip of v4, v5e, v5p, v6e, cpu; for example v5e:2x4 or cpu:8"),
  ([CONFIG, "--topologie=v5e:2x4"], "--topologie is not a flag; did you mean --topology?"),
])
def test_bad_input_is_one_line(arguments, line):
  result = run_plan(*arguments)
  assert (result.returncode, result.stderr) == (2, f"error: {line}\n")


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="libtpu is installed")
def test_a_slice_needs_libtpu():
  result = run_plan(CONFIG, "--topology=v5e:2x4")
  assert result.returncode == 2
  assert result.stderr.startswith("error: --topology=v5e:2x4 needs libtpu, the TPU compiler, which is not ")
  assert result.stderr.count("\n") == 1


def test_more_devices_than_the_slice_has(tmp_path):
  config = load_config("configs/quickstart.py", "smoke")
  with pytest.raises(ValueError, match="need 3 devices of their own, but there are 2"):
    planner.make_plan(config, "cpu:2", config_name="", cache=tmp_path, most_compiled=1)

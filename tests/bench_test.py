"""The benchmarks run, and what they count is right. Rivals are not needed: their rows are left out."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest

from experiments import bench_sampler
from experiments.rivals import growth, interleave, shapes
from experiments.rivals.stopwatch import Stopwatch
from tba_jax.models import transformer
from tba_jax.models.variants import from_huggingface

REPO = pathlib.Path(__file__).resolve().parent.parent


def run_script(tmp_path, name, *flags):
  out = tmp_path / "results.json"
  environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}  # one device, as for a user
  done = subprocess.run(
    [sys.executable, f"experiments/{name}.py", "--quick", "--repetitions=2", f"--out={out}", *flags],
    cwd=REPO, env=environment, capture_output=True, text=True, check=False,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  return json.loads(out.read_text()), done.stdout


def check_own_rows(results, cases, figure):
  assert [row["case"] for row in results["results"]] == cases
  for row in results["results"]:
    assert row["unit"] == figure and row["ours"] > 0
    assert row["rival_name"] is None or row["ratio"] == pytest.approx(
      row["ours"] / row["rival"] if figure == "tokens_per_sec" else row["rival"] / row["ours"]
    )
  assert results["machine"]["versions"]["ours"]["jax"] and results["machine"]["commit"]


@pytest.mark.slow
def test_sampler_benchmark_runs_without_rivals(tmp_path):
  results, printed = run_script(tmp_path, "bench_sampler", "--cases=S")
  check_own_rows(results, ["S"], "tokens_per_sec")
  for rival in ("transformers", "tunix"):
    assert f"{rival} is left out: no Python was named for it" in printed
  assert 0 < results["results"][0]["limit_fraction"] < 1
  assert "greedy tokens of ours against our likeliest: 0.0e+00 nats apart" in printed


@pytest.mark.slow
def test_sampler_benchmark_runs_groups_ragged_and_growth(tmp_path):
  results, _ = run_script(tmp_path, "bench_sampler", "--cases=groups,ragged,growth")
  cases = [row["case"] for row in results["results"]]
  assert set(cases) == {"groups", "ragged", "growth"} and cases.count("growth") == 2
  assert results["notes"][0].startswith("Growth: with 1 slot a step takes ")


@pytest.mark.slow
def test_learner_benchmark_runs_without_rivals(tmp_path):
  results, printed = run_script(tmp_path, "bench_learner", "--cases=S")
  check_own_rows(results, ["S"], "secs")
  assert "trl is left out: no Python was named for it" in printed
  assert results["results"][0]["compile_secs"]["ours"][0] > 0


@pytest.mark.slow
def test_learner_benchmark_runs_whole_steps(tmp_path):
  results, _ = run_script(tmp_path, "bench_learner", "--cases=run")
  check_own_rows(results, ["run"], "secs")


def test_unknown_case_is_refused(tmp_path):
  done = subprocess.run(
    [sys.executable, "experiments/bench_sampler.py", "--cases=S,XL"], cwd=REPO, capture_output=True, text=True,
    check=False,
  )
  assert done.returncode == 2 and "--cases: XL is none of S, M, groups, ragged, growth" in done.stderr


def test_a_rival_that_is_absent_or_broken_is_left_out_with_the_reason(capsys):
  with interleave.Workers(core=max(os.sched_getaffinity(0))) as workers:
    assert workers.start("absent", "experiments.rivals.shapes", python="/nowhere/python") is None
    assert workers.start("broken", "experiments.rivals.nothing", python=sys.executable) is None
    with pytest.raises(interleave.WorkerError, match="No module named 'experiments.rivals.nothing'"):
      workers.start("ours", "experiments.rivals.nothing", python=sys.executable, required=True)
    assert not list(workers)
  printed = capsys.readouterr().out
  assert "absent is left out: [Errno 2]" in printed and "broken is left out: ModuleNotFoundError" in printed


def test_ratio_says_how_many_times_better_ours_is():
  ours, rival = [{"secs": 2.0}, {"secs": 1.0}, {"secs": 4.0}], [{"secs": 6.0}, {"secs": 2.0}, {"secs": 5.0}]
  faster = interleave.compare("c", ours, rival, rival_name="r", figure="secs", higher_is_better=False)
  assert (faster["ours"], faster["rival"], faster["ratio"], faster["ratios"]) == (2.0, 5.0, 2.5, [3.0, 2.0, 1.25])
  assert interleave.compare("c", ours, rival, rival_name="r", figure="secs", higher_is_better=True)["ratio"] == 0.4
  with_cpu = [[{"tokens_per_sec": x, "cpu_secs": x} for x in xs] for xs in ((4.0, 1.0, 2.0), (3.0, 9.0, 6.0))]
  row = interleave.compare("c", *with_cpu, rival_name="r", figure="tokens_per_sec", higher_is_better=True)
  assert row["ratio"] == 2 / 6 and row["cpu_ratio"] == 6 / 2


def test_stopwatch_counts_cpu_time_apart_from_waiting():
  watch = Stopwatch()
  time.sleep(0.2)
  began = time.process_time()
  while time.process_time() - began < 0.05:
    pass
  times = watch.read(parts=2)
  assert 0.125 <= times["secs"] and 0.025 <= times["cpu_secs"] < 0.09


@pytest.mark.parametrize("model", sorted(shapes.MODELS))
def test_weights_are_counted_as_the_model_has_them(model):
  import jax

  params = transformer.abstract_params(from_huggingface({**shapes.COMMON, **shapes.MODELS[model]}))
  kernels = sum(
    leaf.size for path, leaf in jax.tree_util.tree_leaves_with_path(params["layers"]) if "kernel" in str(path[-1])
  )
  assert shapes.num_layer_weights(model) == kernels
  assert shapes.num_head_weights(model) == params["embed"]["table"].size
  assert sum(rows * columns for rows, columns in shapes.matrices(model)) == kernels + params["embed"]["table"].size


def test_sampling_is_counted_token_by_token():
  m, model = shapes.MODELS["QUICK"], "QUICK"
  weights, head = shapes.num_layer_weights(model), shapes.num_head_weights(model)
  prompt, new, samples = 5, 4, 3
  keys = 4 * m["num_hidden_layers"] * m["hidden_size"]  # one query with one key: 2 for q k, 2 for p v, over all heads
  reading = sum(2 * weights + keys * position for position in range(1, prompt + 1)) + 2 * head
  decoding = samples * sum(2 * (weights + head) + keys * position for position in range(prompt + 1, prompt + new))
  assert shapes.sampling_flops(model, [(prompt, new, samples)]) == (reading, decoding)
  cached = 2 * m["num_hidden_layers"] * m["num_key_value_heads"] * 16 * 4  # keys and values, 16 wide, float32
  expected = 3 * 4 * (weights + head) + samples * cached * (6 + 7 + 8)
  assert shapes.decode_bytes(model, [(prompt, new, samples)], steps=3) == expected


def test_training_is_six_flops_a_weight_and_token():
  m, model = shapes.MODELS["QUICK"], "QUICK"
  weights = shapes.num_layer_weights(model) + shapes.num_head_weights(model)
  attention = 3 * 4 * m["num_hidden_layers"] * m["hidden_size"] * (1 + 2 + 3)
  assert shapes.training_flops(model, rows=2, tokens=3) == 2 * (6 * weights * 3 + attention)


def test_ragged_lengths_are_lognormal_around_48():
  lengths = shapes.ragged_lengths(20_000)
  assert abs(np.median(lengths) - 48) < 1.5 and max(lengths) == 256 and min(lengths) >= 1
  assert abs(np.quantile(np.log(lengths), 0.16) - (np.log(48) - 0.8)) < 0.03
  assert shapes.ragged_lengths(128) == shapes.ragged_lengths(128)


def test_slot_occupancy_by_hand():
  # 2 slots, chunks of 2. The first chunk: 4 and 2 tokens, of which 3 and 1 are decoded; 2 + 1 of 4 steps are used and a
  # request waits. Then 1 is left beside the third request's 4; nothing waits any more.
  assert bench_sampler.slot_occupancy([4, 2, 5], slots=2, chunk_tokens=2) == (3 / 4, 1, 3)
  assert bench_sampler.slot_occupancy([1], slots=1, chunk_tokens=4) == (0.0, 0, 1)


def test_reason_for_growth_is_the_line_that_made_the_steps():
  model, secs = "S", {}
  for slots in (1, 64):
    for tokens in (128, 1024, 2048):
      secs[slots, tokens] = 1e-3 * slots**0.5 + 2e-7 * slots * tokens
  text = growth.reason(model, secs, floors={1: 5e-4, 64: 6e-3})
  assert "with 1 slot a step takes 1.00 ms whatever the length (weight products alone 0.50 ms)" in text
  assert "with 64 slots a step takes 8.00 ms" in text and text.count("0.20 us for each cached token, 41.0 GB/s") == 2


SCRIPTS = [path.stem for path in sorted((REPO / "experiments").glob("*.py")) if "__main__" in path.read_text()]


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_finds_its_imports_as_a_file(name, tmp_path):
  environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
  load = f"import runpy; runpy.run_path({str(REPO / 'experiments' / name)!r} + '.py', run_name='loaded')"
  done = subprocess.run(
    [sys.executable, "-c", load], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr

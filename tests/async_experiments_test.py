"""The experiments on asynchrony: their arithmetic on made-up runs; slow: each in its shortest form, with real
processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from experiments import async_speedup, checkpoint_stall, kill_resume, soak


def _made_up_run(folder, *, secs_per_step, busy, accuracy=(), cpu=1.0):
  """12 steps; the trainer works for `busy` of each, the searcher for half of each; `cpu` cores are busy."""
  folder.mkdir(parents=True)
  marks, lines = [{"step": 0, "wall_time": 1000.0, "cpu_secs": 5.0, "machine_busy_secs": 50.0}], []
  spans = [{"actor": "searcher0", "kind": "decode", "start_secs": 999.0, "end_secs": 1000.0}]
  for step in range(1, 13):
    end = 1000.0 + secs_per_step * step
    marks.append({"step": step, "wall_time": end, "cpu_secs": 5.0 + cpu * secs_per_step * step,
                  "machine_busy_secs": 50.0 + (cpu + 0.25) * secs_per_step * step})
    lines.append({"step": step, "loss": 1.0, "rollouts": 20 * step})
    spans.append({"actor": "trainer", "kind": "step", "start_secs": end - busy * secs_per_step, "end_secs": end})
    spans.append({"actor": "searcher0", "kind": "decode", "start_secs": end - 0.5 * secs_per_step, "end_secs": end})
  (folder / "marks.json").write_text(json.dumps(marks))
  for name, records in (("metrics.jsonl", lines), ("timeline.jsonl", spans)):
    (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
  (folder / "config.json").write_text(json.dumps({"devices": {"searchers": 1}}))
  (folder / "results.json").write_text(json.dumps(
      {"trained_responses": 120, "steps": 12, "staleness_mean": 1.0, "bottleneck": "the trainer: made up"}))
  if accuracy:
    (folder / "accuracy.json").write_text(json.dumps(accuracy))


def test_speedup_is_of_rates_and_the_ideal_of_busy_and_cpu_seconds(tmp_path):
  for seed, slower in (("0", 1.0), ("1", 1.1)):
    curve = lambda last: [(0, 0.25), (6, 0.5), (12, last)]
    _made_up_run(tmp_path / "disaggregated" / f"seed{seed}", secs_per_step=1.0, busy=0.4, accuracy=curve(0.8), cpu=1.2)
    _made_up_run(tmp_path / "async" / f"seed{seed}", secs_per_step=0.6 * slower, busy=0.9, accuracy=curve(0.75))
    _made_up_run(tmp_path / "colocated" / f"seed{seed}", secs_per_step=0.75, busy=0.5, accuracy=curve(0.9))
  found = async_speedup.summarise(tmp_path, num_cores=2)
  sync = found["arms"]["disaggregated"]["0"]
  assert sync["steps"] == 7 and sync["seconds"] == pytest.approx(7.0)
  assert sync["trained_responses_per_second"] == pytest.approx(10.0)
  assert (sync["trainer_busy_share"], sync["searchers_busy_share"]) == pytest.approx((0.4, 0.5))
  assert sync["rollouts_per_second"] == pytest.approx(20.0)
  assert sync["cores_busy_for_others"] == pytest.approx(0.25)
  assert found["ideal_of_sides"] == pytest.approx((0.4 + 0.5) / 0.5)
  assert found["ideal_of_cores"] == found["ideal"] == pytest.approx(2 / 1.2)
  assert found["speedup_over_disaggregated"] == pytest.approx((1 / 0.6 + 1 / 0.66) / 2)
  assert found["speedup_over_colocated_by_seed"] == pytest.approx([0.75 / 0.6, 0.75 / 0.66])
  assert found["share_of_ideal"] == pytest.approx((1 / 0.6 + 1 / 0.66) / 2 * 1.2 / 2)
  goal = 0.95 * 0.75
  assert found["accuracy_goal"] == goal and found["final_accuracy_mean"]["colocated"] == pytest.approx(0.9)
  # The first token came a second before the first publish.
  steps = 6 + 6 * (goal - 0.5) / 0.25
  assert found["seconds_to_accuracy"]["async"] == pytest.approx([1 + steps * 0.6, 1 + steps * 0.66])
  assert found["seconds_to_accuracy_mean"]["disaggregated"] == pytest.approx(1 + 6 + 6 * (goal - 0.5) / 0.3)
  pytest.importorskip("matplotlib")
  async_speedup.plot(found, tmp_path / "summary.png")
  assert (tmp_path / "summary.png").read_bytes().startswith(b"\x89PNG")


def test_time_to_an_accuracy_is_interpolated():
  curve = [(0, -1.0, 0.2), (4, 3.0, 0.3), (8, 7.0, 0.5), (12, 11.0, 0.4)]
  assert async_speedup.seconds_to(curve, 0.4) == pytest.approx(5.0)
  assert async_speedup.seconds_to(curve, 0.2) == -1.0
  assert async_speedup.seconds_to(curve, 0.6) is None


def test_a_leak_a_new_thread_and_a_late_compilation_are_seen():
  steady = [{"seconds": 10.0 * i, "resident_bytes": 1000 + (500 if i < 6 else 0), "own_bytes": 700, "threads": 9}
            for i in range(60)]
  found = soak.judge(steady, [5.0, 20.0], warm_secs=60.0)
  assert (found["resident_growth"], found["own_growth"], found["threads_first"], found["threads_last"],
          found["compilations_after_warm_up"]) == (0.0, 0.0, 9, 9, 0)
  leaking = [dict(sample, resident_bytes=1000 + i, threads=9 + (i > 50)) for i, sample in enumerate(steady)]
  found = soak.judge(leaking, [5.0, 300.0], warm_secs=60.0)
  assert found["resident_growth"] == pytest.approx(1055 / 1012 - 1, abs=0.003) and found["own_growth"] == 0.0
  assert found["threads_most"] == 10 and found["compilations_after_warm_up"] == 1


def test_a_compilation_is_seen_in_the_log():
  """Or the soak test would find none because it looks for words that jax does not say."""
  code = "import jax; jax.jit(lambda x: x + 1)(1.0)"
  env = dict(os.environ, JAX_LOG_COMPILES="1", JAX_PLATFORMS="cpu")
  said = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True).stderr
  assert said.count(soak.COMPILED) == 1


@pytest.mark.slow
def test_async_speedup_in_short(tmp_path, capsys):
  short = ["--out", str(tmp_path), "--quick", "--seeds=0"]
  found = async_speedup.main(short)
  assert set(found["arms"]) == {"async", "disaggregated", "colocated", "sampling1", "sampling2"}
  assert found["ideal"] > 1 and found["speedup_over_disaggregated"] > 0 and found["speedup_over_colocated"] > 0
  assert [step for step, _, _ in found["arms"]["async"]["0"]["accuracy"]] == list(range(7))
  assert json.loads((tmp_path / "summary.json").read_text())["arms"]
  assert "async, seed 0" in capsys.readouterr().err
  async_speedup.main(short)
  assert "seed" not in capsys.readouterr().err, "arms that are done are not run again"


@pytest.mark.slow
def test_kill_resume_in_short(tmp_path):
  found = kill_resume.main(["--out", str(tmp_path / "out.json"), "--kills", "4", "--steps", "10"])
  assert found["equal"] and found["kills"] == 4 and found["runs_compared"] >= 1
  assert kill_resume.add_piece(tmp_path / "out.json", found["pieces"][0] | {"seed": 1})["kills"] == 8


@pytest.mark.slow
def test_soak_in_short(tmp_path):
  found = soak.main(
      ["--out", str(tmp_path / "out.json"), "--minutes", "1.5", "--warm_minutes", "0.5", "--every_secs", "2"])
  assert found["steps"] > 0 and found["threads_first"] == found["threads_last"]


@pytest.mark.slow
def test_checkpoint_stall_in_short(tmp_path):
  found = checkpoint_stall.main(
      ["--out", str(tmp_path / "out.json"), "--buffer_gb", "0.05", "--repeats", "2", "--step_secs", "100"])
  assert found["publish_stall_share"] < 0.01 and found["checkpoint_stall_share_of_one_step"] < 0.02

"""The experiments on asynchrony: their arithmetic on made-up runs; slow: each in its shortest form, with real
processes."""

from __future__ import annotations

import json
import xml.etree.ElementTree

import pytest

from experiments import async_speedup, checkpoint_stall, kill_resume, soak


def _made_up_run(folder, *, secs_per_step, busy):
  """12 steps; the trainer works for `busy` of each, the searcher for half of each."""
  folder.mkdir(parents=True)
  lines, spans = [], []
  for step in range(1, 13):
    end = 1000.0 + secs_per_step * step
    lines.append({"step": step, "loss": 1.0, "wall_time": end, "wall_seconds": end - 990.0, "rollouts": 20 * step})
    spans.append({"actor": "trainer", "kind": "step", "start_secs": end - busy * secs_per_step, "end_secs": end})
    spans.append({"actor": "searcher0", "kind": "decode", "start_secs": end - 0.5 * secs_per_step, "end_secs": end})
    if step % 4 == 0:
      lines.append({"step": step, "eval_accuracy": step / 20, "wall_time": end, "wall_seconds": 0.0})
  (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
  (folder / "timeline.jsonl").write_text("".join(json.dumps(span) + "\n" for span in spans))
  (folder / "config.json").write_text(json.dumps({"devices": {"searchers": 1}}))
  (folder / "results.json").write_text(json.dumps(
      {"trained_responses": 120, "steps": 12, "staleness_mean": 1.0, "bottleneck": "the trainer: made up"}))


def test_speedup_is_of_rates_and_the_ideal_of_busy_seconds(tmp_path):
  _made_up_run(tmp_path / "disaggregated", secs_per_step=1.0, busy=0.4)
  _made_up_run(tmp_path / "async", secs_per_step=0.6, busy=0.9)
  _made_up_run(tmp_path / "colocated", secs_per_step=0.75, busy=0.5)
  found = async_speedup.summarise(tmp_path)
  sync = found["arms"]["disaggregated"]
  assert sync["steps"] == 8 and sync["seconds"] == pytest.approx(8.0)
  assert sync["trained_responses_per_second"] == pytest.approx(10.0)
  assert (sync["trainer_busy_share"], sync["searchers_busy_share"]) == pytest.approx((0.4, 0.5))
  assert sync["rollouts_per_second"] == pytest.approx(20.0)
  assert found["ideal_speedup"] == pytest.approx((0.4 + 0.5) / 0.5)
  assert found["speedup_over_disaggregated"] == pytest.approx(1 / 0.6)
  assert found["speedup_over_colocated"] == pytest.approx(0.75 / 0.6)
  assert found["share_of_ideal"] == pytest.approx((1 / 0.6) / 1.8)
  async_speedup.plot(found, tmp_path / "summary.svg")
  bars = [bar for bar in xml.etree.ElementTree.parse(tmp_path / "summary.svg").getroot() if bar.tag.endswith("rect")]
  assert [float(bar.get("height")) for bar in bars] == pytest.approx([160.0, 96.0, 128.0], abs=0.1)


def test_time_to_an_accuracy_is_interpolated():
  curve = [(0, -1.0, 0.2), (4, 3.0, 0.3), (8, 7.0, 0.5), (12, 11.0, 0.4)]
  assert async_speedup.seconds_to(curve, 0.4) == pytest.approx(5.0)
  assert async_speedup.seconds_to(curve, 0.2) == -1.0
  assert async_speedup.seconds_to(curve, 0.6) is None


def test_a_leak_a_new_thread_and_a_late_compilation_are_seen():
  steady = [{"seconds": 10.0 * i, "resident_bytes": 1000 + (500 if i < 6 else 0), "threads": 9} for i in range(60)]
  found = soak.judge(steady, [5.0, 20.0], warm_secs=60.0)
  assert (found["growth"], found["threads_first"], found["threads_last"],
          found["compilations_after_warm_up"]) == (0.0, 9, 9, 0)
  leaking = [dict(sample, resident_bytes=1000 + i, threads=9 + (i > 50)) for i, sample in enumerate(steady)]
  found = soak.judge(leaking, [5.0, 300.0], warm_secs=60.0)
  assert found["growth"] == pytest.approx(1055 / 1012 - 1, abs=0.003)
  assert found["threads_most"] == 10 and found["compilations_after_warm_up"] == 1


@pytest.mark.slow
def test_async_speedup_in_short(tmp_path, capsys):
  found = async_speedup.main(["--out", str(tmp_path), "--quick", "--accuracy"])
  assert set(found["arms"]) == {
      "async", "disaggregated", "colocated", "sampling1", "sampling2", "async_accuracy", "disaggregated_accuracy",
      "colocated_accuracy"
  }
  assert found["ideal_speedup"] > 1 and found["speedup_over_disaggregated"] > 0 and found["speedup_over_colocated"] > 0
  assert json.loads((tmp_path / "summary.json").read_text())["arms"]
  began = capsys.readouterr()
  async_speedup.main(["--out", str(tmp_path), "--quick", "--accuracy"])
  assert "]" not in capsys.readouterr().err and "[" in began.err, "arms that are done are not run again"


@pytest.mark.slow
def test_kill_resume_in_short(tmp_path):
  found = kill_resume.main(["--out", str(tmp_path / "out.json"), "--kills", "4", "--steps", "10"])
  assert found["equal"] and found["kills"] == 4 and found["runs_compared"] >= 1


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

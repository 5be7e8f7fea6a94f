"""Files of a run: strict JSON lines, resume, TensorBoard events, rollouts, the progress line, the results."""

import io
import json
import math
import struct
import subprocess
import sys
import threading

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto import event_pb2
from tensorboardX.record_writer import masked_crc32c

import parity
from tba_jax import metrics


def _strict(text):
  """json.loads that refuses NaN and Infinity, as any strict parser does."""
  def refuse(name):
    raise AssertionError(f"{name} is not JSON")
  return json.loads(text, parse_constant=refuse)


def _lines(path):
  return [_strict(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def _events(folder):
  """Events of a folder, read by the framing of TFRecord: length, its checksum, record, its checksum."""
  events = []
  for path in sorted(folder.iterdir()):
    content, at = path.read_bytes(), 0
    while at < len(content):
      (length,) = struct.unpack_from("<Q", content, at)
      record = content[at + 12 : at + 12 + length]
      assert struct.unpack_from("<I", content, at + 8) == (masked_crc32c(content[at : at + 8]),)
      assert struct.unpack_from("<I", content, at + 12 + length) == (masked_crc32c(record),)
      events.append(event_pb2.Event.FromString(record))
      at += 16 + length
  return events


def _scalars(events):
  return {(event.step, value.tag): value.simple_value for event in events for value in event.summary.value}


def test_scalars_of_all_kinds_become_strict_json(tmp_path):
  writer = metrics.MetricsWriter(tmp_path, resume_step=-1)
  writer.write(3, {
    "a": jnp.float32(0.5), "b": np.int64(7), "c": math.nan, "d": jnp.float32(-jnp.inf), "e": np.float32("inf"),
    "f": None, "g": True, "h": "näme", "i": np.arange(2), "j": np.float64(0.1),
  })
  (line,) = _lines(tmp_path / "metrics.jsonl")  # before close: flushed
  assert line.pop("wall_time") > 1.6e9
  assert line == {
    "step": 3, "a": 0.5, "b": 7, "c": "NaN", "d": "-Infinity", "e": "Infinity", "f": None, "g": True, "h": "näme",
    "i": [0, 1], "j": 0.1,
  }
  writer.close()


def test_tensorboard_events_are_the_finite_numbers(tmp_path):
  writer = metrics.MetricsWriter(tmp_path, resume_step=-1)
  writer.write(0, {"train/reward": 0.25, "bad": math.nan, "name": "x"})
  writer.write(1, {"train/reward": jnp.float32(0.75), "count": 12})
  before_close = _scalars(_events(tmp_path / "tensorboard"))
  writer.close()
  expected = {(0, "train/reward"): 0.25, (1, "train/reward"): 0.75, (1, "count"): 12.0}
  assert before_close == expected == _scalars(_events(tmp_path / "tensorboard"))


def test_tensorboard_itself_reads_the_events_also_after_a_resume(tmp_path):
  accumulator = parity.require("tensorboard.backend.event_processing.event_accumulator")
  for resume_step, values in ((-1, {0: 0.0, 1: 0.5, 2: 1.0, 3: 1.5, 4: 2.0}), (2, {3: 30.0})):
    writer = metrics.MetricsWriter(tmp_path, resume_step=resume_step)
    for step, value in values.items():
      writer.write(step, {"reward": value, "staleness_counts": {"1": 3}, "bad": math.nan})
    writer.close()
  events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
  assert events.Tags()["scalars"] == ["reward"]
  assert [(event.step, event.value) for event in events.Scalars("reward")] == [(0, 0.0), (1, 0.5), (2, 1.0), (3, 30.0)]


def test_resume_cuts_lines_beyond_its_step_and_hides_their_events(tmp_path):
  writer = metrics.MetricsWriter(tmp_path, resume_step=-1)
  for step in range(5):
    writer.write(step, {"x": step})
  writer.close()
  with open(tmp_path / "metrics.jsonl", "a") as file:
    file.write('{"step": 5, "x"')  # killed within a line
  writer = metrics.MetricsWriter(tmp_path, resume_step=2)
  writer.write(3, {"x": 30})
  writer.close()
  assert [(line["step"], line["x"]) for line in _lines(tmp_path / "metrics.jsonl")] == [(0, 0), (1, 1), (2, 2), (3, 30)]
  assert not list(tmp_path.glob("*.tmp"))
  starts = [event.step for event in _events(tmp_path / "tensorboard")
            if event.session_log.status == event_pb2.SessionLog.START]
  assert starts == [0, 3]  # TensorBoard drops what was written before the second start from step 3 on


def test_a_new_run_empties_what_a_crash_before_its_first_checkpoint_left(tmp_path):
  for value in (1, 2):
    lines = metrics.JsonLines(tmp_path / "a.jsonl", resume_step=-1)
    lines.write({"step": 0, "x": value})
    lines.close()
  assert _lines(tmp_path / "a.jsonl") == [{"step": 0, "x": 2}]


def test_a_cut_that_is_interrupted_leaves_the_old_file(tmp_path, monkeypatch):
  path = tmp_path / "a.jsonl"
  path.write_text('{"step": 0}\n{"step": 1}\n')
  def fail(*args):
    raise OSError("power cut")
  monkeypatch.setattr(metrics.os, "replace", fail)
  with pytest.raises(OSError, match="power cut"):
    metrics.JsonLines(path, resume_step=0)
  assert path.read_text() == '{"step": 0}\n{"step": 1}\n'


def test_killed_process_loses_no_finished_line(tmp_path):
  code = """
import os, signal, sys
from tba_jax import metrics
writer = metrics.MetricsWriter(sys.argv[1], resume_step=-1)
log = metrics.RolloutLog(sys.argv[1], resume_step=-1)
for step in range(3):
  writer.write(step, {"x": step})
  log.write(step, prompt="p", response="r", reward=0.0, version=0, num_prompt_tokens=1, num_response_tokens=1,
            truncated=False)
os.kill(os.getpid(), signal.SIGKILL)
"""
  assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60).returncode == -9
  assert [line["x"] for line in _lines(tmp_path / "metrics.jsonl")] == [0, 1, 2]
  assert [line["step"] for line in _lines(tmp_path / "rollouts" / "train.jsonl")] == [0, 1, 2]
  assert len(_scalars(_events(tmp_path / "tensorboard"))) == 3


def test_reading_names_file_and_line(tmp_path):
  path = tmp_path / "a.jsonl"
  path.write_text('{"step": 0}\n{oops\n{"step": 1}\n')
  with pytest.raises(ValueError, match=r"a\.jsonl, line 2: not JSON \(.*\); delete the line"):
    list(metrics.read_jsonl(path))
  path.write_text('{"step": 0}\n[1, 2]\n')
  with pytest.raises(ValueError, match=r"a\.jsonl, line 2: \[1, 2\] is not a JSON object; delete the line"):
    list(metrics.read_jsonl(path))
  path.write_bytes(b'{"step": 0}\n{"step": 1, "text": "\xc3')  # cut within a character
  assert list(metrics.read_jsonl(path)) == [{"step": 0}]


def test_threads_do_not_mix_their_lines(tmp_path):
  writer = metrics.MetricsWriter(tmp_path, resume_step=-1)
  def work(number):
    for step in range(50):
      writer.write(step, {f"t{number}": "x" * 200})
  threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  writer.close()
  assert len(_lines(tmp_path / "metrics.jsonl")) == 200


# --- Rollouts ---


def _write_rollout(log, step, *, response="2 + 2 = 4", **more):
  log.write(step, prompt="How many?", response=response, reward=np.float32(1), version=np.int32(4),
            num_prompt_tokens=3, num_response_tokens=7, truncated=np.bool_(False), **more)


def test_rollouts_are_readable_and_cut_on_resume(tmp_path):
  log = metrics.RolloutLog(tmp_path, resume_step=-1)
  odd = "a\nb\u2028c\ud83d é \x00"  # line breaks of all sorts, half a surrogate pair, a NUL
  _write_rollout(log, 1, response=odd, prompt_id=17)
  _write_rollout(log, 2)
  _write_rollout(log, 2, kind="eval")
  log.close()
  first, second = metrics.read_jsonl(tmp_path / "rollouts" / "train.jsonl")
  assert first == {
    "step": 1, "reward": 1.0, "version": 4, "num_prompt_tokens": 3, "num_response_tokens": 7, "truncated": False,
    "prompt_id": 17, "prompt": "How many?", "response": odd,
  }
  assert second["response"] == "2 + 2 = 4"
  assert "é" in (tmp_path / "rollouts" / "train.jsonl").read_text(encoding="utf-8")
  log = metrics.RolloutLog(tmp_path, resume_step=1)
  log.close()
  assert [line["step"] for line in metrics.read_jsonl(tmp_path / "rollouts" / "train.jsonl")] == [1]
  assert list(metrics.read_jsonl(tmp_path / "rollouts" / "eval.jsonl")) == []


# --- Progress ---


class _Terminal(io.StringIO):
  def isatty(self):
    return True


def _update(progress, step, **changes):
  values = dict(reward=0.41234, accuracy=0.5, loss=1.25e-3, staleness=1.5, trained_tokens_per_second=1234.5,
                generated_tokens_per_second=98.76)
  progress.update(step, **{**values, **changes})


def test_plain_lines_every_few_seconds_and_at_the_end():
  now, stream = [100.0], io.StringIO()
  progress = metrics.Progress(21, start_step=10, stream=stream, interval_secs=5.0, clock=lambda: now[0])
  for step in range(11, 22):
    now[0] += 2.0
    _update(progress, step, accuracy=math.nan if step == 11 else 0.5)
  progress.message("checkpoint saved")
  progress.close()
  lines = stream.getvalue().splitlines()
  assert lines[0] == ("step 11/21  ETA 0:20  batch reward 0.412  accuracy -  loss 0.00125  staleness 1.5  "
                      "tok/s trained 1234 sampled 98.8")
  assert [line.split()[1] for line in lines[:-1]] == ["11/21", "14/21", "17/21", "20/21", "21/21"]
  assert lines[-2].startswith("step 21/21  ETA 0:00") and lines[-1] == "checkpoint saved"


def test_one_live_line_in_a_terminal():
  stream = _Terminal()
  progress = metrics.Progress(3, stream=stream)
  for step in range(1, 4):
    _update(progress, step)
  progress.message("[not markup]")
  progress.close()
  text = stream.getvalue()
  assert "step 3/3" in text and "[not markup]" in text
  # The last state is left on one line of its own: nothing wrapped, nothing repeated below.
  assert text.count("\n") <= 3


def test_stage_counts_its_rate_from_the_first_update_on():
  now, stream = [0.0], io.StringIO()
  stage = metrics.StageProgress("fine-tuning", 40, stream=stream, interval_secs=5.0, clock=lambda: now[0])
  now[0] = 60.0  # compiling
  for done in range(1, 41):
    stage.update(done, f"loss {done}")
    now[0] += 1.0 if done < 39 else 0.5
  stage.close()
  lines = stream.getvalue().splitlines()
  assert lines[0] == "fine-tuning 1/40  loss 1  0/s  ETA ?"
  assert lines[1] == "fine-tuning 6/40  loss 6  1/s  ETA 0:34"
  assert [line.split()[1] for line in lines[-2:]] == ["36/40", "40/40"]  # the last one comes at once


def test_a_slow_stage_is_told_and_a_short_one_is_not():
  now, said = [0.0], []
  stage = metrics.SlowStage("filling", 1200, say=said.append, interval_secs=10.0, clock=lambda: now[0])
  for done in range(0, 1201, 100):
    stage.update(done)
    now[0] += 4.0
  assert said == ["filling 300/1,200  25/s  ETA 0:36", "filling 600/1,200  25/s  ETA 0:24",
                  "filling 900/1,200  25/s  ETA 0:12"]
  short = metrics.SlowStage("filling", 3, say=said.append, interval_secs=10.0, clock=lambda: now[0])
  for done in range(4):
    short.update(done)
    now[0] += 3.0
  assert len(said) == 3


def test_a_bar_of_bytes_ends_with_all_of_them(capsys):
  on_progress = metrics.bytes_bar("loading")
  for done in (100_000, 2_400_000, 5_000_001):
    on_progress(done, 5_000_001)
  lines = capsys.readouterr().err.splitlines()
  assert lines[0].startswith("loading, MB: 0/5 ") and lines[-1].startswith("loading, MB: 5/5 ")
  metrics.bytes_bar("writing")(10, 10)
  assert capsys.readouterr().err.startswith("writing, MB: 1/1 ")


@pytest.mark.parametrize("secs, text", [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3723, "1:02:03"), (-1, "0:00")])
def test_times_as_people_read_them(secs, text):
  assert metrics.format_secs(secs) == text


# --- Results ---


def _results(**changes):
  results = dict(
    accuracy_before=0.46, accuracy_after=0.8125, eval_size=512, wall_seconds=251.0, train_seconds=80.0, steps=120,
    rollouts=12345, rollouts_per_second=154.3, trained_tokens=98765, trained_tokens_per_second=1234.5,
    generated_tokens=123456, staleness_mean=1.53, staleness_p95=3.0, staleness_max=5.0, trainer_wait_seconds=2.34,
    searcher_wait_seconds=11.0, logprob_gap_max=1e-5, seed=0, mode="async", loss="tb_vargrad",
    bottleneck="searchers: the trainer waits for 43% of the time, searchers for 2%",
  )
  return {**results, **changes}


def test_results_are_whole_strict_and_complete(tmp_path):
  metrics.write_results(tmp_path, _results(logprob_gap_max=jnp.float32(jnp.nan), extra=np.int32(3)))
  found = _strict((tmp_path / "results.json").read_text())
  assert set(metrics.RESULT_KEYS) | {"extra"} == set(found)
  assert found["logprob_gap_max"] == "NaN" and found["extra"] == 3 and found["accuracy_after"] == 0.8125
  incomplete = _results()
  del incomplete["steps"], incomplete["seed"]
  with pytest.raises(ValueError, match="results lack steps, seed; every run must report them"):
    metrics.write_results(tmp_path, incomplete)
  assert _strict((tmp_path / "results.json").read_text()) == found
  assert not list(tmp_path.glob("*.tmp"))


def test_table_shows_every_figure():
  text = metrics.results_table(_results())
  rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")]
  assert dict(row for row in rows if row[0]) == {
    "held-out accuracy before (512 problems)": "46.0%",
    "held-out accuracy after": "81.2% (+35.2 points)",
    "wall-clock": "4:11 (of it training 1:20)",
    "steps": "120",
    "rollouts per second": "154.3 (12,345 rollouts)",
    "trained tokens per second": "1,234 (98,765 tokens)",
    "staleness mean / p95 / max (updates)": "1.53 / 3 / 5",
    "trainer waited (s)": "2.3",
    "searchers waited (s, summed)": "11.0",
    "bottleneck": "searchers: the trainer waits for 43% of the time, searchers for 2%",
  }
  assert "tb_vargrad, async, seed 0" in text


def test_table_of_a_run_stopped_early():
  text = metrics.results_table(_results(accuracy_after=None, staleness_mean=math.nan))
  assert "held-out accuracy after                 | - " in text and "points" not in text and "- / 3 / 5" in text

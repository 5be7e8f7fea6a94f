"""Faults injected into whole runs, each with the outcome that the docs promise. The model is tiny, everything else is
the real thing."""

from __future__ import annotations

import collections
import errno
import itertools
import threading
import time

import pytest

from tba_jax.checkpoints import run_state
from tba_jax.checkpoints.segments import SegmentStore
from tba_jax.disk import AppendedFile
from tba_jax.runtime.run import Run
from tba_jax.runtime.settings import StopFlag
from tba_jax.searcher import Searcher
from tba_jax.tasks.arithmetic import ArithmeticTask
from tba_jax.weights import WeightStore
import runs

HANG_SECS = 4.0  # longer than any step of these runs, on a busy machine too


pytestmark = pytest.mark.usefixtures("compile_once", "easy_reward")


@pytest.fixture
def release():
  """What hanging calls wait for; set at the end, so that no thread outlives the test."""
  event = threading.Event()
  yield event
  event.set()


def _meta(workdir):
  """What the newest checkpoint says of the run."""
  state = run_state.RunState(workdir, keep=2)
  args = run_state.ocp.args.Composite(meta=run_state.ocp.args.JsonRestore())
  meta = state._manager.restore(state._manager.latest_step(), args=args)["meta"]
  state.close()
  return meta


def _accounts(workdir):
  """Every occurrence that was ever handed out is finished, dropped, or pending."""
  ledger = _meta(workdir)["exchange"]["ledger"]
  assert ledger["next"] == ledger["finished"] + ledger["dropped"] + len(ledger["pending"]), ledger
  return ledger


def _hang_reward(monkeypatch, release, at):
  calls = itertools.count(1)

  def reward(self, prompt, response_text, *, truncated):
    if next(calls) == at:
      release.wait(120)
    return runs.easy_reward(self, prompt, response_text, truncated=truncated)

  monkeypatch.setattr(ArithmeticTask, "reward", reward)


def test_a_grader_that_never_returns_is_left_behind_and_its_group_comes_again(tmp_path, monkeypatch, capsys, release):
  _hang_reward(monkeypatch, release, at=70)
  config = runs.short_config(
      # No step without new rollouts.
      runtime__hang_secs=HANG_SECS, runtime__searcher_restarts=3, devices__searchers=1, buffer__max_uses=1)
  assert runs.run(config, tmp_path / "run") == 0
  said = capsys.readouterr().err
  assert "the reward of prompt" in said and f"has not returned for {HANG_SECS:g} s in thread grader" in said
  assert "raised and is restarted (1 of 3 restarts)" in said and "prompts are handed out again" in said
  assert runs.results(tmp_path / "run")["searcher_restarts"] >= 1
  assert _accounts(tmp_path / "run")["requeued"] >= 1


def test_a_grader_that_never_returns_stops_lockstep_with_a_checkpoint(tmp_path, monkeypatch, capsys, release):
  _hang_reward(monkeypatch, release, at=80)
  config = runs.short_config(runtime__mode="lockstep", runtime__hang_secs=HANG_SECS, devices__searchers=1)
  assert runs.run(config, tmp_path / "run") == 1
  assert "error: the reward of prompt" in capsys.readouterr().err
  _accounts(tmp_path / "run")
  monkeypatch.undo()
  runs.use_easy_reward(monkeypatch)
  assert runs.run(config, tmp_path / "run") == 0, "the same command goes on"
  assert runs.run(config, tmp_path / "whole") == 0
  assert runs.untimed(tmp_path / "run") == runs.untimed(tmp_path / "whole"), "to the bits of the unbroken run"


def test_a_searcher_that_hangs_is_replaced_and_its_late_groups_are_dropped(tmp_path, monkeypatch, capsys, release):
  step, replace = Searcher.step, Run.replace_searcher
  hung, late = [], []

  def hanging(self):
    done = step(self)
    if done and self.index == 1 and not hung:  # it has finished groups in its hands
      hung.append(self)
      release.wait(120)
      late.extend(done)
    return done

  def replaced(self, index):
    release.set()  # it wakes as soon as it was given up
    return replace(self, index)

  monkeypatch.setattr(Searcher, "step", hanging)
  monkeypatch.setattr(Run, "replace_searcher", replaced)
  config = runs.short_config(train__steps=10, runtime__hang_secs=HANG_SECS, runtime__searcher_restarts=3)
  # The trainer must live on the other searcher alone until the hang is seen, and long enough after it for the late
  # groups to come.
  watched = Run.after_step
  monkeypatch.setattr(Run, "after_step", lambda self: (watched(self), time.sleep(0 if late else 0.7)))
  assert runs.run(config, tmp_path / "run") == 0
  said = capsys.readouterr().err
  assert "searcher 1 has been in 'decode' for" not in said  # it hangs after the chunk, outside of any span
  assert "searcher 1 has been in 'after score'" in said
  assert "its thread is left behind and another searcher takes its place" in said
  found = runs.results(tmp_path / "run")
  assert found["searcher_restarts"] >= 1 and found["late_groups"] == len(late) > 0
  assert _accounts(tmp_path / "run")["requeued"] >= len(late)
  assert [line["step"] for line in runs.lines(tmp_path / "run") if "loss" in line] == list(range(1, 11))


@pytest.mark.slow
def test_searchers_that_always_hang_stop_the_run_with_a_checkpoint(tmp_path, monkeypatch, capsys, release):
  calls, step = itertools.count(1), Searcher.step

  def hanging(self):
    if next(calls) > 60:
      release.wait(120)
    return step(self)

  monkeypatch.setattr(Searcher, "step", hanging)
  config = runs.short_config(train__steps=5000, runtime__hang_secs=HANG_SECS, runtime__searcher_restarts=0,
                             runtime__stop_timeout_secs=1.0)
  began = time.monotonic()
  assert runs.run(config, tmp_path / "run") == 1
  assert time.monotonic() - began < 60
  said = capsys.readouterr().err
  assert "(runtime.searcher_restarts=0 restarts are used up)" in said and "has been in" in said
  _accounts(tmp_path / "run")


def test_a_searcher_ten_times_slower_than_the_other_holds_nobody_up(tmp_path, monkeypatch):
  step, made = Searcher.step, [0, 0]

  def slow(self):
    began = time.monotonic()
    done = step(self)
    made[self.index] += len(done)
    if self.index == 0:
      time.sleep(9 * (time.monotonic() - began))
    return done

  monkeypatch.setattr(Searcher, "step", slow)
  assert runs.run(runs.short_config(train__steps=12), tmp_path / "run") == 0
  found = runs.results(tmp_path / "run")
  assert found["searcher_restarts"] == 0 and found["steps"] == 12
  assert made[1] > 2 * made[0] > 0


def test_a_transfer_that_fails_stops_the_run_and_no_version_is_claimed_that_did_not_arrive(
    tmp_path, monkeypatch, capsys):
  move = WeightStore._move

  def failing(self, converted, version):
    if version >= 3:
      raise ConnectionError("link down")
    move(self, converted, version)

  config = runs.short_config(devices__searchers=1, sync__every_steps=1, checkpoint__every_steps=1)
  with monkeypatch.context() as patch:
    patch.setattr(WeightStore, "_move", failing)
    assert runs.run(config, tmp_path / "run") == 1
  assert "link down" in capsys.readouterr().err
  assert _meta(tmp_path / "run")["published_version"] == 2
  _accounts(tmp_path / "run")
  assert runs.run(config, tmp_path / "run") == 0


def test_a_full_buffer_lets_the_oldest_go_and_the_run_goes_on(tmp_path):
  config = runs.short_config(devices__searchers=1, buffer__capacity=24, buffer__fill_responses=16, train__steps=8)
  assert runs.run(config, tmp_path / "run") == 0
  last = [line for line in runs.lines(tmp_path / "run") if "loss" in line][-1]
  assert last["buffer_evicted_capacity"] > 0 and last["buffer_live_rows"] <= 24


def test_prompts_that_run_out_begin_a_new_epoch(tmp_path):
  config = runs.short_config(devices__searchers=1, task_args__num_train_prompts=5, buffer__max_uses=1, train__steps=8)
  assert runs.run(config, tmp_path / "run") == 0
  assert _accounts(tmp_path / "run")["next"] > 2 * 5


def test_a_wall_clock_that_jumps_changes_nothing(tmp_path, monkeypatch):
  config = runs.short_config(runtime__mode="lockstep", runtime__hang_secs=60.0, devices__searchers=1)
  assert runs.run(config, tmp_path / "steady") == 0
  real, after_step = time.time, Run.after_step

  def jump(self):
    after_step(self)
    if self.step in (2, 4):
      shift = 86_400 if self.step == 2 else -86_400
      monkeypatch.setattr(time, "time", lambda: real() + shift)

  monkeypatch.setattr(Run, "after_step", jump)
  assert runs.run(config, tmp_path / "jumping") == 0
  assert runs.untimed(tmp_path / "steady") == runs.untimed(tmp_path / "jumping")
  found = runs.results(tmp_path / "jumping")
  assert 0 < found["train_seconds"] <= found["wall_seconds"] < 3600


def test_a_disk_that_is_full_for_a_while_costs_a_checkpoint_and_not_the_run(tmp_path, monkeypatch, capsys):
  write, calls = SegmentStore._write_file, itertools.count(1)

  def full(self, name, payload):
    if next(calls) == 2:
      raise OSError(errno.ENOSPC, "No space left on device")
    write(self, name, payload)

  config = runs.short_config(runtime__mode="lockstep", checkpoint__every_steps=2, devices__searchers=1,
                             sync__every_steps=2)
  assert runs.run(config, tmp_path / "whole") == 0
  with monkeypatch.context() as patch:
    patch.setattr(SegmentStore, "_write_file", full)
    stop, after_step = StopFlag(), Run.after_step
    patch.setattr(Run, "after_step", lambda self: (after_step(self), self.step == 5 and stop.set("the test")))
    assert runs.run(config, tmp_path / "run", stop) == 0
  said = capsys.readouterr().err
  assert ("the checkpoint of step 4 could not be written (No space left on device); training goes on, the "
          "checkpoint of step 2 stands") in said
  assert runs.run(config, tmp_path / "run") == 0
  assert runs.untimed(tmp_path / "run") == runs.untimed(tmp_path / "whole")


def test_a_disk_that_takes_no_metrics_for_a_while_does_not_end_the_run_and_nothing_is_lost(
    tmp_path, monkeypatch, capsys):
  config = runs.short_config(devices__searchers=1, train__steps=8)
  full, write, after_step = threading.Event(), AppendedFile._write, Run.after_step

  def refusing(self, record):
    if full.is_set():
      raise OSError(errno.ENOSPC, "No space left on device")
    write(self, record)

  def watched(self):
    after_step(self)
    if self.step in (2, 5):
      full.set() if self.step == 2 else full.clear()
      lengths.append(len((tmp_path / "run" / "metrics.jsonl").read_bytes()))

  def counted(self, record):
    appended[self.path] += 1
    append(self, record)

  lengths, appended, append = [], collections.Counter(), AppendedFile.append
  monkeypatch.setattr(AppendedFile, "append", counted)
  monkeypatch.setattr(AppendedFile, "_write", refusing)
  monkeypatch.setattr(Run, "after_step", watched)
  assert runs.run(config, tmp_path / "run") == 0
  said = capsys.readouterr().err
  assert said.count("No space left on device") == 1 and said.count("the disk takes files again") == 1
  assert "cannot be written (No space left on device); training goes on" in said
  assert lengths[0] == lengths[-1], "nothing reached the disk meanwhile"
  assert [line["step"] for line in runs.lines(tmp_path / "run") if "loss" in line] == list(range(1, 9))
  for name in ("metrics.jsonl", "rollouts/train.jsonl", "timeline.jsonl", "consumption.jsonl"):
    assert len(runs.lines(tmp_path / "run", name)) == appended[tmp_path / "run" / name] > 0, name

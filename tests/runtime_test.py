"""Whole short runs: determinism, exact lags, resumes, faults. The model is tiny and untrained, everything else is the
real thing."""

from __future__ import annotations

import dataclasses
import shutil
import threading
import time

import numpy as np
import pytest

import jax

from tba_jax.checkpoints import run_state
from tba_jax.config import ConfigError
from tba_jax.evaluate import Interrupted
from tba_jax.models import transformer
from tba_jax import build, metrics
from tba_jax.runtime.run import Run
from tba_jax.runtime.settings import StopFlag
from tba_jax.runtime.trainer import Trainer
from tba_jax.tasks.arithmetic import ArithmeticTask
from tba_jax.types import Draw
import runs


pytestmark = pytest.mark.usefixtures("compile_once", "easy_reward")


def _weights(workdir):
  cfg, _ = build.read_model_folder(workdir / "model")
  step, params = run_state.load_params(workdir, transformer.abstract_params(cfg))
  return step, [np.asarray(leaf) for leaf in jax.tree.leaves(params)]


def _same_weights(a, b):
  (step_a, left), (step_b, right) = _weights(a), _weights(b)
  assert step_a == step_b
  for x, y in zip(left, right, strict=True):
    np.testing.assert_array_equal(x, y)


def _stop_after_step(monkeypatch, stop, step, once=lambda: True):
  """Asks the run to stop as soon as `step` steps are logged and `once()` is true; the trainer is held until then."""
  write = metrics.MetricsWriter.write

  def watched(self, at, scalars):
    write(self, at, scalars)
    if "loss" in scalars and at == step:
      give_up = time.monotonic() + 60
      while not once() and time.monotonic() < give_up:
        time.sleep(0.01)
      stop.set("the test")

  monkeypatch.setattr(metrics.MetricsWriter, "write", watched)


@pytest.mark.parametrize("lag", [-1, 2])
def test_lockstep_twice_is_bitwise_equal(tmp_path, lag):
  config = runs.short_config(runtime__mode="lockstep", runtime__lag=lag)
  for name in ("a", "b"):
    assert runs.run(config, tmp_path / name) == 0
  assert runs.untimed(tmp_path / "a") == runs.untimed(tmp_path / "b")
  assert len({line["loss"] for line in runs.untimed(tmp_path / "a") if "loss" in line
             }) == 6, "the runs must have learnt something"
  _same_weights(tmp_path / "a", tmp_path / "b")
  assert runs.lines(tmp_path / "a", "rollouts/train.jsonl") == runs.lines(tmp_path / "b", "rollouts/train.jsonl")


@pytest.mark.parametrize("mode, lag, expected", [
    ("lockstep", 0, [0] * 6), ("lockstep", 3, [0, 1, 2, 3, 3, 3]), ("sync", -1, [0] * 6)])
def test_every_row_has_exactly_the_lag(tmp_path, mode, lag, expected):
  assert runs.run(runs.short_config(runtime__mode=mode, runtime__lag=lag), tmp_path / "run") == 0
  trained = [line for line in runs.lines(tmp_path / "run") if "loss" in line]
  assert [line["staleness_mean"] for line in trained] == expected
  assert [line["staleness_max"] for line in trained] == expected
  assert runs.results(tmp_path / "run")["staleness_max"] == max(expected)


@pytest.mark.parametrize("lag, every, stop_at", [(-1, 2, 3), pytest.param(2, 1, 4, marks=pytest.mark.slow)])
def test_lockstep_stopped_and_resumed_is_bitwise_the_unbroken_run(tmp_path, monkeypatch, lag, every, stop_at):
  config = runs.short_config(runtime__mode="lockstep", runtime__lag=lag, sync__every_steps=every, eval__every_steps=3)
  assert runs.run(config, tmp_path / "whole") == 0
  with monkeypatch.context() as patch:
    stop = StopFlag()
    _stop_after_step(patch, stop, stop_at)
    assert runs.run(config, tmp_path / "broken", stop) == 0
  assert not (tmp_path / "broken" / "results.json").exists()
  assert runs.run(config, tmp_path / "broken") == 0
  assert runs.untimed(tmp_path / "whole") == runs.untimed(tmp_path / "broken")
  _same_weights(tmp_path / "whole", tmp_path / "broken")
  whole, broken = runs.results(tmp_path / "whole"), runs.results(tmp_path / "broken")
  timed = ("second", "searchers_decode", "shares")
  assert {k: v for k, v in whole.items() if not any(word in k for word in timed)} == {
      k: v for k, v in broken.items() if not any(word in k for word in timed)}


@pytest.mark.parametrize("at", [0, 4])
def test_an_evaluation_that_was_logged_and_not_saved_is_not_there_twice(tmp_path, monkeypatch, at):
  """The folder as a kill leaves it right after an evaluation: the checkpoint of the same step does not know of it."""
  config = runs.short_config(runtime__mode="lockstep", eval__every_steps=2, checkpoint__every_steps=4)
  record = Run.record_evaluation

  def copied(self, *arguments, step):
    record(self, *arguments, step=step)
    if step == at:
      self.run_state.join()
      shutil.copytree(tmp_path / "whole", tmp_path / "killed")

  with monkeypatch.context() as patch:
    patch.setattr(Run, "record_evaluation", copied)
    assert runs.run(config, tmp_path / "whole") == 0
  assert runs.lines(tmp_path / "killed")[-1]["step"] == at
  assert runs.run(config, tmp_path / "killed") == 0
  assert runs.untimed(tmp_path / "killed") == runs.untimed(tmp_path / "whole")
  for name in ("rollouts/eval.jsonl", "rollouts/train.jsonl"):
    assert runs.lines(tmp_path / "killed", name) == runs.lines(tmp_path / "whole", name)


def test_checkpoints_that_cannot_be_read_are_told_in_one_line(tmp_path):
  config = runs.short_config(runtime__mode="lockstep", train__steps=2)
  assert runs.run(config, tmp_path) == 0
  (tmp_path / "results.json").unlink()
  for path in (tmp_path / "checkpoints").glob("*/meta/*"):
    path.write_text("{}" if path.name == "metadata" else "")
  with pytest.raises(ConfigError, match=r"checkpoints: .*none of the steps \[2\] can be read; restore them from a"):
    runs.run(config, tmp_path)
  assert (tmp_path / "config.json").is_file()


def test_a_stop_in_the_middle_of_decoding_repeats_the_same_rollouts(tmp_path, monkeypatch):
  config = runs.short_config(runtime__mode="lockstep", sample__chunk_tokens=2)
  assert runs.run(config, tmp_path / "whole") == 0
  with monkeypatch.context() as patch:
    from tba_jax.searcher import Searcher
    stop, calls, step = StopFlag(), [], Searcher.step

    def watched(self):
      calls.append(1)
      if len(calls) == 31:
        stop.set("the test")
      return step(self)

    patch.setattr(Searcher, "step", watched)
    assert runs.run(config, tmp_path / "broken", stop) == 0
  assert stop.is_set()
  assert runs.run(config, tmp_path / "broken") == 0
  assert runs.untimed(tmp_path / "whole") == runs.untimed(tmp_path / "broken")
  _same_weights(tmp_path / "whole", tmp_path / "broken")


def test_async_run_ends_with_all_its_files(tmp_path, capsys):
  config = runs.short_config(eval__every_steps=3, checkpoint__every_steps=2)
  assert runs.run(config, tmp_path / "run") == 0
  found = runs.results(tmp_path / "run")
  assert set(metrics.RESULT_KEYS) <= set(found)
  assert found["steps"] == 6 and found["trained_responses"] == 96 and found["eval_size"] == 8
  assert found["logprob_tokens_compared"] > 0 and found["logprob_gap_max"] < 1e-4
  trained = [line for line in runs.lines(tmp_path / "run") if "loss" in line]
  assert [line["step"] for line in trained] == [1, 2, 3, 4, 5, 6]
  assert sum(line["response_tokens"] * 16 for line in trained) == pytest.approx(found["trained_tokens"])
  assert {line["step"] for line in runs.lines(tmp_path / "run") if "eval_accuracy" in line} == {0, 3, 6}
  for name in ("tensorboard", "rollouts/train.jsonl", "rollouts/eval.jsonl", "checkpoints", "timeline.jsonl",
               "config.json"):
    assert (tmp_path / "run" / name).exists(), name
  assert "held-out accuracy before (8 problems)" in capsys.readouterr().out
  assert runs.run(config, tmp_path / "run") == 0  # again: the results, nothing is trained
  assert "holds a finished run" in capsys.readouterr().out


def test_async_stop_and_resume_accounts_for_every_occurrence(tmp_path, monkeypatch):
  config = runs.short_config(train__steps=8)
  with monkeypatch.context() as patch:
    stop = StopFlag()
    _stop_after_step(patch, stop, 4)
    assert runs.run(config, tmp_path / "run", stop) == 0
  stopped_at = runs.lines(tmp_path / "run")[-1]["step"]
  assert stopped_at in (4, 5)  # a batch already in hand is trained too
  state = run_state.RunState(tmp_path / "run", keep=2)
  meta = state._manager.restore(stopped_at,
                                args=run_state.ocp.args.Composite(meta=run_state.ocp.args.JsonRestore()))["meta"]
  state.close()
  ledger = meta["exchange"]["ledger"]
  assert ledger["next"] == ledger["finished"] + ledger["dropped"] + len(ledger["pending"])
  assert runs.run(config, tmp_path / "run") == 0
  assert runs.results(tmp_path / "run")["steps"] == 8
  assert [line["step"] for line in runs.lines(tmp_path / "run") if "loss" in line] == list(range(1, 9))


def test_evaluations_that_take_longer_than_the_steps_between_them_do_not_pile_up(tmp_path, monkeypatch, capsys):
  evaluate, under_way = Run.evaluate, []

  def slow(self, searcher, weights, *, step, stopped):
    while step == 0 and self.step < 7:  # the first one goes on while the trainer takes steps
      time.sleep(0.01)
    under_way.append(len(self.evaluations_under_way()))
    return evaluate(self, searcher, weights, step=step, stopped=stopped)

  monkeypatch.setattr(Run, "evaluate", slow)
  config = runs.short_config(train__steps=8, eval__every_steps=1, devices__searchers=2)
  assert runs.run(config, tmp_path / "run") == 0
  assert max(under_way) == 4
  assert {0, 1, 2, 3, 8} <= _evaluated_steps(tmp_path / "run") <= {0, 1, 2, 3, 7, 8}
  assert capsys.readouterr().err.count("step 4: 4 evaluations are not over yet; this one is left out") == 1


def test_an_evaluation_under_way_at_a_stop_is_made_by_the_resumed_run_at_its_own_version(tmp_path, monkeypatch, capsys):
  config = runs.short_config(train__steps=8, eval__every_steps=2, train__learning_rate=1e-2)
  evaluate, given = Run.evaluate, []

  def watched(self, searcher, weights, *, step, stopped):
    if step == 4:
      given.append((weights.version, jax.tree.map(np.array, weights.params)))
      while len(given) == 1:
        if stopped():
          raise Interrupted
        time.sleep(0.01)
    return evaluate(self, searcher, weights, step=step, stopped=stopped)

  monkeypatch.setattr(Run, "evaluate", watched)
  with monkeypatch.context() as patch:
    stop = StopFlag()
    _stop_after_step(patch, stop, 7, once=lambda: given)
    assert runs.run(config, tmp_path / "run", stop) == 0
  assert len(given) == 1 and _evaluated_steps(tmp_path / "run") == {0, 2}
  with open(tmp_path / "run" / "metrics.jsonl", "a") as file:  # as a kill leaves it after this evaluation
    file.write('{"step": 4, "eval_accuracy": 0.5}\n')
  capsys.readouterr()
  assert runs.run(config, tmp_path / "run") == 0
  said = capsys.readouterr().err
  assert "step 4: its evaluation was not over when the checkpoint was written and is made again" in said
  lines = [line for line in runs.lines(tmp_path / "run") if "eval_accuracy" in line]
  assert sorted(line["step"] for line in lines) == [0, 2, 4, 6, 8]
  assert all(line["eval_version"] == line["step"] for line in lines)
  (version, before), (version_again, again) = given
  assert version == version_again == 4
  jax.tree.map(np.testing.assert_array_equal, before, again)


def _evaluated_steps(workdir):
  return {line["step"] for line in runs.lines(workdir) if "eval_accuracy" in line}


def test_a_reward_that_raises_once_restarts_the_searcher(tmp_path, monkeypatch, capsys):
  calls = []

  def reward(self, prompt, response_text, *, truncated):
    calls.append(threading.current_thread().name)
    if len(calls) == 40:
      raise ZeroDivisionError("grader bug")
    return runs.easy_reward(self, prompt, response_text, truncated=truncated)

  monkeypatch.setattr(ArithmeticTask, "reward", reward)
  assert runs.run(runs.short_config(), tmp_path / "run") == 0
  assert runs.results(tmp_path / "run")["searcher_restarts"] == 1
  said = capsys.readouterr().err
  assert "raised and is restarted (1 of 1 restarts)" in said and "grader bug" in said and "in reward" in said


@pytest.mark.parametrize("mode", ["async", "lockstep"])
def test_a_reward_that_always_raises_stops_the_run_with_a_checkpoint(tmp_path, monkeypatch, capsys, mode):
  calls = []

  def reward(self, prompt, response_text, *, truncated):
    calls.append(1)
    if len(calls) > 120:
      raise ZeroDivisionError("grader bug")
    return runs.easy_reward(self, prompt, response_text, truncated=truncated)

  monkeypatch.setattr(ArithmeticTask, "reward", reward)
  threads = threading.active_count()
  assert runs.run(runs.short_config(train__steps=200, runtime__mode=mode), tmp_path / "run") == 1
  said = capsys.readouterr().err
  assert "ZeroDivisionError" in said and "grader bug" in said
  assert any(path.name.isdigit() for path in (tmp_path / "run" / "checkpoints").iterdir())
  deadline = time.monotonic() + 10
  while threading.active_count() > threads and time.monotonic() < deadline:
    time.sleep(0.05)
  assert not [t.name for t in threading.enumerate() if t.name.startswith("searcher")]


def test_a_nan_reward_removes_that_row_only(tmp_path, monkeypatch):
  calls = []

  def reward(self, prompt, response_text, *, truncated):
    calls.append(1)
    return float("nan") if len(calls) % 10 == 0 else runs.easy_reward(self, prompt, response_text, truncated=truncated)

  monkeypatch.setattr(ArithmeticTask, "reward", reward)
  assert runs.run(runs.short_config(runtime__mode="lockstep"), tmp_path / "run") == 0
  found = runs.results(tmp_path / "run")
  assert found["bad_rewards"] > 5
  assert all(np.isfinite(line["loss"]) for line in runs.lines(tmp_path / "run") if "loss" in line)
  last = [line for line in runs.lines(tmp_path / "run") if "loss" in line][-1]
  assert last["buffer_added"] + last["bad_rewards"] == last["rollouts"]


def test_nonfinite_updates_are_skipped_counted_and_stop_the_run(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(build, "make_loss", lambda name: lambda log_pi, batch, *, beta: (log_pi.sum() * np.nan, {}))
  draws, prepare = [], Trainer.prepare
  monkeypatch.setattr(Trainer, "prepare", lambda self, draw: (draws.append(draw), prepare(self, draw))[1])
  assert runs.run(runs.short_config(runtime__mode="lockstep", train__max_nonfinite_in_row=2), tmp_path / "run") == 1
  said = capsys.readouterr().err
  assert "the last 2 updates had a loss or gradient that is not finite (train.max_nonfinite_in_row=2)" in said
  dumped = np.load(tmp_path / "run" / "nonfinite_step_2.npz")
  assert len(draws) == 2 and draws[0].tokens.tobytes() != draws[1].tokens.tobytes()
  not_asked_for = {"advantages"}
  assert set(dumped) == {field.name for field in dataclasses.fields(Draw)} - not_asked_for
  for name, array in dumped.items():
    np.testing.assert_array_equal(array, getattr(draws[1], name), err_msg=name)
  assert [line["skipped"] for line in runs.lines(tmp_path / "run") if "loss" in line] == [1.0]


def test_stop_while_decoding_joins_all_threads_within_ten_seconds(tmp_path, monkeypatch):
  stop = StopFlag()
  seen = []

  def reward(self, prompt, response_text, *, truncated):
    seen.append(1)
    if len(seen) == 60:
      stop.set("the test")
      seen.append(time.monotonic())
    return runs.easy_reward(self, prompt, response_text, truncated=truncated)

  monkeypatch.setattr(ArithmeticTask, "reward", reward)
  assert runs.run(runs.short_config(train__steps=5000), tmp_path / "run", stop) == 0
  assert time.monotonic() - next(x for x in seen if x != 1) < 10
  assert not [t.name for t in threading.enumerate() if t.name.startswith("searcher")]


@pytest.mark.slow
def test_shared_prompts_sample_what_copies_sample(tmp_path):
  for name, changes in (("copies", {}), ("lanes", dict(sample__lane_samples=4))):
    config = runs.short_config(runtime__mode="lockstep", train__steps=2, log__rollouts_per_step=16, **changes)
    assert runs.run(config, tmp_path / name) == 0
  copies, lanes = (runs.lines(tmp_path / name, "rollouts/train.jsonl") for name in ("copies", "lanes"))
  first = lambda lines: {(line["occurrence"], line["response"]) for line in lines if line["version"] == 0}
  assert first(lanes) == first(copies) and len(first(lanes)) >= 4
  for name in ("copies", "lanes"):
    assert runs.results(tmp_path / name)["logprob_gap_max"] < 1e-4


@pytest.mark.slow
def test_an_int8_cache_with_recomputation_in_an_async_run(tmp_path):
  config = runs.short_config(sample__lane_samples=4, sample__cache_dtype="int8", sample__recompute_kv=True,
                             eval__every_steps=3)
  assert runs.run(config, tmp_path) == 0
  assert 1e-6 < runs.results(tmp_path)["logprob_gap_max"] < 0.05
  assert [line["step"] for line in runs.lines(tmp_path) if "eval_accuracy" in line] == [0, 3, 6]


def test_a_cache_that_cannot_fit_is_refused_with_its_bytes(tmp_path):
  config = runs.short_config(sample__slots=4_000_000_000, sft__steps=0)
  with pytest.raises(
      ConfigError, match=r"memory: devices all would hold [\d,]{15,} bytes but have [\d,]+ "
      r"\(.*searcher 0: cache of 4000000000 slots [\d,]+.*lower sample.slots"):
    runs.run(config, tmp_path)
  assert not (tmp_path / "checkpoints").exists() or not list((tmp_path / "checkpoints").iterdir())

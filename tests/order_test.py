"""An asynchronous run, followed again in lockstep: the same batches, the same losses, the same bits."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tba_jax import build
from tba_jax.checkpoints import run_state
from tba_jax.config import ConfigError
from tba_jax.models import transformer
from tba_jax.runtime.order import OrderLog
from tba_jax.runtime.run import Run
from tba_jax.runtime.settings import StopFlag
import runs


pytestmark = pytest.mark.usefixtures("compile_once", "easy_reward")


def _params(workdir):
  cfg, _ = build.read_model_folder(workdir / "model")
  return [np.asarray(leaf)
          for leaf in jax.tree.leaves(run_state.load_params(workdir, transformer.abstract_params(cfg))[1])]


def test_a_run_stopped_and_resumed_is_replayed_in_lockstep_to_the_same_bits(tmp_path, monkeypatch):
  shared = dict(sample__in_flight=False, train__steps=8, buffer__max_staleness=4, buffer__max_uses=2,
                sync__every_steps=2, eval__every_steps=4)
  with monkeypatch.context() as patch:
    stop, after_step = StopFlag(), Run.after_step
    patch.setattr(Run, "after_step", lambda self: (after_step(self), self.step == 4 and stop.set("the test")))
    assert runs.run(runs.short_config(**shared), tmp_path / "threads", stop) == 0
  assert runs.run(runs.short_config(**shared), tmp_path / "threads") == 0
  replayed = runs.short_config(**shared, runtime__mode="lockstep", runtime__replay_order=str(tmp_path / "threads"))
  assert runs.run(replayed, tmp_path / "replay") == 0
  for name in ("loss", "reward", "grad_norm", "staleness_mean", "version"):
    series = [[line[name] for line in runs.lines(tmp_path / run) if "loss" in line] for run in ("threads", "replay")]
    assert series[0] == series[1] and len(series[0]) == 8, name
  for ours, theirs in zip(_params(tmp_path / "threads"), _params(tmp_path / "replay"), strict=True):
    np.testing.assert_array_equal(ours, theirs)
  for name in ("accuracy_before", "accuracy_after", "staleness_histogram"):
    assert runs.results(tmp_path / "threads")[name] == runs.results(tmp_path / "replay")[name]
  with pytest.raises(ConfigError, match="train.learning_rate=0.5 must be 0.0001, as in runtime.replay_order"):
    runs.short_config(**shared, runtime__mode="lockstep", runtime__replay_order=str(tmp_path / "threads"),
                      train__learning_rate=0.5)


def test_the_log_is_cut_to_what_a_checkpoint_knows(tmp_path):
  log = OrderLog(tmp_path)
  log.cut(0)
  for number in range(5):
    log.write({"event": "publish", "version": number, "step": number})
  log.close()
  resumed = OrderLog(tmp_path)
  resumed.cut(3)
  resumed.write({"event": "publish", "version": 9, "step": 9})
  resumed.close()
  assert [event["version"] for event in runs.lines(tmp_path, "consumption.jsonl")] == [0, 1, 2, 9]


@pytest.mark.parametrize("changes, says", [
    (dict(runtime__mode="async"), "needs runtime.mode=lockstep and runtime.lag=-1"),
    (dict(sample__in_flight=True), "needs sample.in_flight=False, there and here"),
    (dict(), "has no config.json; give the workdir of an async run"),
    (dict(buffer__priority="residual"), "does not know when residuals were handed back"),
    (dict(sample__temperature_ladder=(0.5, 1.0)), "samples on one searcher"),
])
def test_what_cannot_be_replayed_is_refused(tmp_path, changes, says):
  settings = dict(runtime__mode="lockstep", sample__in_flight=False, runtime__replay_order=str(tmp_path)) | changes
  with pytest.raises(ConfigError, match=says):
    runs.short_config(**settings)

"""Metrics in Weights & Biases: a run against a stand-in for the package, which needs no network."""

from __future__ import annotations

import importlib
import json
import sys

import pytest

from tba_jax import config as config_lib
from tba_jax import train
from tba_jax.runtime.settings import StopFlag
import runs

pytestmark = pytest.mark.usefixtures("compile_once", "easy_reward")

_STAND_IN = """
calls = []

class Error(Exception):
  pass

class Settings:
  def __init__(self, console):
    self.console = console

class Run:
  refuses = False
  def define_metric(self, name, step_metric):
    calls.append(("define_metric", name, step_metric))
  def log(self, numbers):
    if Run.refuses:
      raise Error("gone away")
    calls.append(("log", numbers))
  def finish(self):
    calls.append(("finish",))

no_login = False

def init(**named):
  if no_login:
    raise Error("No API key configured")
  calls.append(("init", named))
  return Run()
"""


@pytest.fixture
def wandb(tmp_path, monkeypatch):
  """The stand-in, as the package that is imported."""
  (tmp_path / "packages" / "wandb").mkdir(parents=True)
  (tmp_path / "packages" / "wandb" / "__init__.py").write_text(_STAND_IN)
  monkeypatch.syspath_prepend(str(tmp_path / "packages"))
  monkeypatch.delitem(sys.modules, "wandb", raising=False)
  yield importlib.import_module("wandb")
  sys.modules.pop("wandb", None)


def _of(wandb, name):
  return [call[1:] for call in wandb.calls if call[0] == name]


@pytest.mark.slow
def test_a_run_and_its_resume_are_one_run_there_with_all_that_metrics_jsonl_holds(tmp_path, wandb):
  config = runs.short_config(runtime__mode="lockstep", log__wandb="a project", train__steps=4, eval__every_steps=2)
  stop = StopFlag()
  log = wandb.Run.log
  wandb.Run.log = lambda self, numbers: (log(self, numbers), numbers["step"] == 2 and stop.set("the test"))
  assert train.run(config, str(tmp_path / "run"), stop=stop) == 0
  wandb.Run.log = log
  assert train.run(config, str(tmp_path / "run"), stop=StopFlag()) == 0
  first, second = (named for (named,) in _of(wandb, "init"))
  assert first["id"] == second["id"] == json.loads((tmp_path / "run" / "wandb.json").read_text())["id"]
  assert first["project"] == "a project" and first["resume"] == "allow" and first["config"]["train"]["steps"] == 4
  assert first["settings"].console == "off" and first["dir"] == str(tmp_path / "run")
  assert _of(wandb, "define_metric") == [("*", "step")] * 2 and len(_of(wandb, "finish")) == 2
  logged = [numbers for (numbers,) in _of(wandb, "log")]
  lines = [{key: value for key, value in line.items() if isinstance(value, (int, float)) and key != "wall_time"}
           for line in runs.lines(tmp_path / "run")]
  assert logged == lines
  assert {line["step"] for line in logged if "eval_accuracy" in line} == {0, 2, 4}


def test_what_goes_wrong_there_is_said(tmp_path, wandb, capsys):
  config = runs.short_config(runtime__mode="lockstep", log__wandb="p", train__steps=2)
  wandb.no_login = True
  with pytest.raises(config_lib.ConfigError, match="log.wandb: wandb cannot begin a run in project 'p' .No API key "
                     "configured.; run `wandb login` once, set WANDB_MODE=offline"):
    train.run(config, str(tmp_path / "run"), stop=StopFlag())
  wandb.no_login, wandb.Run.refuses = False, True
  assert train.run(config, str(tmp_path / "run"), stop=StopFlag()) == 0
  assert capsys.readouterr().err.count("error: wandb takes no more metrics (gone away); training goes on") == 1

"""Real signals to a real process: it finishes the step, writes a checkpoint, exits 0, and the same command goes on to
the same bits."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

import runs
from tba_jax.runtime.settings import StopFlag
from tba_jax.searcher import Searcher

REPO = pathlib.Path(__file__).resolve().parent.parent
# An untrained model seldom stops, so responses are scored as they are; nothing is learnt, everything is exercised.
SHORT = ("--config=configs/quickstart.py:smoke", "--config.sft.steps=0", "--config.train.steps=14",
         "--config.eval.size=8", "--config.sample.truncated=score", "--config.checkpoint.every_steps=0")


def _start(workdir, *flags, cache):
  env = dict(os.environ, JAX_PLATFORMS="cpu", JAX_COMPILATION_CACHE_DIR=str(cache), XLA_FLAGS="")
  return subprocess.Popen([sys.executable, "-m", "tba_jax.main", f"--workdir={workdir}", *SHORT, *flags], cwd=REPO,
                          env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _wait_for_step(process, workdir, step):
  deadline = time.monotonic() + 300
  while time.monotonic() < deadline and process.poll() is None:
    path = workdir / "metrics.jsonl"
    if path.exists() and any('"loss"' in line and f'"step": {step},' in line for line in path.read_text().splitlines()):
      return
    time.sleep(0.01)
  process.kill()  # or its pipes would never end
  pytest.fail(f"step {step} was not reached: {process.communicate()}")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
  return tmp_path_factory.mktemp("xla")


@pytest.mark.slow
def test_sigterm_in_lockstep_resumes_to_the_bits_of_the_unbroken_run(tmp_path, cache):
  whole, broken = tmp_path / "whole", tmp_path / "broken"
  process = _start(whole, "--config.runtime.mode=lockstep", cache=cache)
  _, said = process.communicate(timeout=300)
  assert process.returncode == 0, said
  process = _start(broken, "--config.runtime.mode=lockstep", cache=cache)
  _wait_for_step(process, broken, 5)
  process.send_signal(signal.SIGTERM)
  began = time.monotonic()
  _, said = process.communicate(timeout=60)
  assert process.returncode == 0 and time.monotonic() - began < 10, said
  assert "SIGTERM: stopping, with a checkpoint, once the step under way is done" in said
  assert "by SIGTERM; the same command resumes from" in said
  assert not (broken / "results.json").exists()
  process = _start(broken, "--config.runtime.mode=lockstep", cache=cache)
  _, said = process.communicate(timeout=300)
  assert process.returncode == 0 and "resumed at step" in said, said
  assert runs.untimed(whole) == runs.untimed(broken)


# SIGINT: the next test begins with it.
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_signal_in_async_mode_ends_all_threads_within_ten_seconds(tmp_path, cache, number):
  process = _start(tmp_path / "run", "--config.train.steps=100000", cache=cache)
  _wait_for_step(process, tmp_path / "run", 3)
  process.send_signal(number)
  began = time.monotonic()
  _, said = process.communicate(timeout=60)
  assert process.returncode == 0 and time.monotonic() - began < 10, said
  assert any(path.name.isdigit() for path in (tmp_path / "run" / "checkpoints").iterdir())


def test_a_second_ctrl_c_ends_the_process_at_once_with_130(tmp_path, cache):
  process = _start(tmp_path / "run", "--config.train.steps=100000", cache=cache)
  _wait_for_step(process, tmp_path / "run", 1)
  process.send_signal(signal.SIGINT)
  said = b""
  while b"Ctrl-C again stops at once" not in said:
    more = os.read(process.stderr.fileno(), 65536)
    assert more, said
    said += more
  process.send_signal(signal.SIGINT)
  began = time.monotonic()
  process.communicate(timeout=60)
  assert process.returncode == 130 and time.monotonic() - began < 2
  written = list((tmp_path / "run" / "checkpoints").glob("[0-9]*"))
  assert not written, "one Ctrl-C writes a checkpoint, the second stops that"


def test_kill_9_goes_on_from_the_last_checkpoint_to_the_same_bits(tmp_path, cache):
  flags = ("--config.runtime.mode=lockstep", "--config.checkpoint.every_steps=2")
  whole, broken = tmp_path / "whole", tmp_path / "broken"
  process = _start(whole, *flags, cache=cache)
  _, said = process.communicate(timeout=300)
  assert process.returncode == 0, said
  for step in (3, 6, 11):
    process = _start(broken, *flags, cache=cache)
    _wait_for_step(process, broken, step)
    process.kill()
    process.communicate()
  process = _start(broken, *flags, cache=cache)
  _, said = process.communicate(timeout=300)
  assert process.returncode == 0, said
  assert runs.untimed(whole) == runs.untimed(broken)


def test_a_stop_while_programs_compile_starts_nothing_and_the_run_resumes(tmp_path, monkeypatch, capfd):
  stop, warmup = StopFlag(), Searcher.warmup

  def warmup_stopped(self, stopped):
    stop.set("a test")
    warmup(self, stopped)

  config = runs.short_config(train__steps=2, eval__every_steps=0)
  with monkeypatch.context() as patch:
    patch.setattr(Searcher, "warmup", warmup_stopped)
    assert runs.run(config, tmp_path, stop) == 0
  said = capfd.readouterr().err
  assert "stopped at step 0 by a test; the same command resumes" in said and "searcher 1  " not in said
  assert not (tmp_path / "results.json").exists()
  assert runs.run(config, tmp_path) == 0
  assert runs.results(tmp_path)["steps"] == 2

"""Runs whose trainer is several processes: equal to the run of one, stopped, resumed, cut short, refused."""

from __future__ import annotations

import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest

import runs

pytestmark = pytest.mark.slow

REPO = pathlib.Path(__file__).resolve().parent.parent
SMALL = ("--config.eval.size=8", "--config.devices.trainer=2", "--config.devices.searchers=1")


class Processes:
  """A run of the command in several processes of this machine."""

  def __init__(self, workdir: pathlib.Path, *flags: str, number: int = 2, only: tuple[int, ...] | None = None,
               **environment: str):
    self.workdir = workdir
    with socket.create_server(("127.0.0.1", 0)) as server:
      port = server.getsockname()[1]
    self.logs, self.started = {}, {}
    for i in range(number) if only is None else only:
      together = () if number == 1 else (
          f"--coordinator=127.0.0.1:{port}", f"--num_processes={number}", f"--process_id={i}")
      self._start(i, [*SMALL, *flags, *together], environment)

  def _start(self, i: int, flags: list[str], environment: dict[str, str]) -> None:
    cache = {"JAX_COMPILATION_CACHE_DIR": str(self.workdir.parent / "xla"),
             "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1"}
    self.logs[i] = self.workdir.with_suffix(f".{i}.log")
    command = [sys.executable, "-m", "tba_jax.main", "--config=configs/quickstart.py:smoke"]
    self.started[i] = subprocess.Popen(
        [*command, f"--workdir={self.workdir}", *flags], cwd=REPO,
        env={**cache, **os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", **environment},
        stderr=self.logs[i].open("w"), stdout=subprocess.DEVNULL)

  def log(self, i: int = 0) -> str:
    return self.logs[i].read_text()

  def wait_for_step(self, step: int) -> None:
    path, began = self.workdir / "metrics.jsonl", time.monotonic()
    while not (path.exists() and max((line["step"] for line in runs.lines(self.workdir)), default=0) >= step):
      assert all(process.poll() is None for process in self.started.values()), self.log(0) + self.log(1)
      assert time.monotonic() - began < 240.0, self.log(0) + self.log(1)
      time.sleep(0.1)

  def codes(self, secs: float = 240.0) -> list[int]:
    """Exit codes, in the order of the processes."""
    try:
      return [self.started[i].wait(timeout=secs) for i in sorted(self.started)]
    finally:
      for process in self.started.values():
        process.kill()


def same_run(two, one) -> None:
  two, one = runs.untimed(two), runs.untimed(one)
  assert len(two) == len(one) > 6
  for got, expected in zip(two, one):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
      assert got[name] == (pytest.approx(value, rel=1e-3, abs=1e-5) if isinstance(value, float) else value), name


def test_two_processes_make_the_run_of_one(tmp_path):
  flags = ("--config.runtime.mode=sync",)  # with fine-tuning before, whose state is a checkpoint of its own
  two = Processes(tmp_path / "two", *flags)
  assert two.codes() == [0, 0], two.log(0) + two.log(1)
  one = Processes(tmp_path / "one", *flags, number=1)
  assert one.codes() == [0], one.log(0)
  same_run(tmp_path / "two", tmp_path / "one")


def test_a_follower_that_is_told_to_stop_stops_the_run_which_goes_on_from_its_checkpoint(tmp_path):
  flags = ("--config.sft.steps=0", "--config.sample.truncated=score", "--config.train.steps=40")
  run = Processes(tmp_path / "run", *flags)
  run.wait_for_step(3)
  run.started[1].send_signal(signal.SIGTERM)
  assert run.codes() == [0, 0], run.log(0) + run.log(1)
  assert "by SIGTERM of process 1; the same command resumes from" in run.log(0)
  step = runs.lines(tmp_path / "run")[-1]["step"]
  assert 3 <= step < 40
  again = Processes(tmp_path / "run", *flags)
  assert again.codes() == [0, 0], again.log(0) + again.log(1)
  assert f"resumed at step {step} of 40" in again.log(0)
  assert runs.results(tmp_path / "run")["steps"] == 40


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_is_gone_ends_the_others_within_seconds(tmp_path, victim, by):
  flags = ("--config.sft.steps=0", "--config.sample.truncated=score", "--config.train.steps=100000", "--restarts=0")
  run = Processes(tmp_path / "run", *flags)
  run.wait_for_step(3)
  run.started[victim].send_signal(by)
  began = time.monotonic()
  try:
    code = run.started[1 - victim].wait(timeout=60)
  finally:
    for process in run.started.values():
      process.kill()
  assert time.monotonic() - began < (10.0 if by == signal.SIGKILL else 40.0)
  assert code in ((1,) if victim == 1 else (1, -signal.SIGABRT))  # jax, too, ends those whose coordinator is gone
  if code == 1:
    assert f"error: process {victim} of the trainer's 2 is gone" in run.log(1 - victim)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_is_killed_comes_again_and_the_run_goes_on_by_itself_to_the_same_weights(tmp_path, victim):
  flags = ("--config.sft.steps=0", "--config.sample.truncated=score", "--config.train.steps=14",
           "--config.runtime.mode=lockstep", "--config.checkpoint.every_steps=2")
  run = Processes(tmp_path / "run", *flags)
  run.wait_for_step(5)
  os.kill(runs.child_of(run.started[victim].pid), signal.SIGKILL)
  assert run.codes() == [0, 0], run.log(0) + run.log(1)
  assert "was killed by SIGKILL" in run.log(victim) and "it is started again from" in run.log(1 - victim)
  assert "resumed at step" in run.log(0)
  whole = Processes(tmp_path / "whole", *flags)
  assert whole.codes() == [0, 0], whole.log(0) + whole.log(1)
  assert runs.untimed(tmp_path / "run") == runs.untimed(tmp_path / "whole")
  runs.assert_same_weights(tmp_path / "run", tmp_path / "whole")


def test_what_cannot_be_is_refused_in_every_process_within_half_a_minute(tmp_path):
  began = time.monotonic()
  alone = Processes(tmp_path / "alone", only=(1,))
  missed = Processes(tmp_path / "missed", only=(0,))
  wrong = Processes(tmp_path / "wrong", "--config.reference.reset_every_steps=5")
  data = Processes(tmp_path / "data", "--config.model.path=/nowhere")
  assert alone.codes() == missed.codes() == [2]
  assert time.monotonic() - began < 60.0  # of which imports take some, with others beside them
  assert "start it there:\n  python -m tba_jax.main --config=configs/quickstart.py:smoke" in alone.log(1)
  assert "--process_id=0" in alone.log(1) and "--process_id=1" in missed.log(0)
  assert wrong.codes() == data.codes() == [2, 2]
  for i in range(2):
    assert "error: reference.reset_every_steps=5 needs a trainer of one process" in wrong.log(i)
    assert "error: model.path='/nowhere'" in data.log(i)


def test_slurm_says_who_is_who(tmp_path):
  flags = ("--config.sft.steps=0", "--config.train.steps=1", "--config.sample.truncated=score", "--coordinator=auto")
  job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
  run = Processes(tmp_path / "run", only=())
  for i in range(2):
    run._start(i, [*SMALL, *flags], {**job, "SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)})
  assert run.codes() == [0, 0], run.log(0) + run.log(1)

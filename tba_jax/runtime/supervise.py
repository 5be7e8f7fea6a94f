"""A parent that starts a run's process again where that is killed. It imports no jax and holds no device.

What is started again: a process that a signal killed (SIGKILL of the kernel's out-of-memory killer, SIGSEGV, ...), that
ended with a code nobody gave it, or that ended with GONE because another of the trainer's processes is gone. What is
passed on: the codes of an end, of a stop on request, of an exception and of bad input.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

DONE, FAULT, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
GONE = 75  # of a supervised process: another of the trainer's is gone, this one would go on with it
RESTARTS = 3  # in a row without a newer checkpoint

Checkpoint = tuple[int, str]  # after so many steps, "training" or "fine-tuning"

_PARENT = "TBA_JAX_SUPERVISOR"
_PR_SET_PDEATHSIG = 1  # of Linux's sys/prctl.h
_PAUSE_SECS = 1.0  # before a start, times the attempts in a row
_LONG_SECS = 300.0  # a start that lived so long has got somewhere, where no checkpoint is seen


def is_child() -> bool:
  """Whether a supervisor started this process; from here on it dies with its supervisor (on Linux), by SIGKILL."""
  parent = os.environ.pop(_PARENT, None)  # not for processes that this one starts
  if parent is None:
    return False
  prctl = getattr(ctypes.CDLL(None), "prctl", None)
  if prctl is not None:
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
  if os.getppid() != int(parent):  # it died before
    os._exit(FAULT)
  return True


class Job(Protocol):
  """The trainer's process, or processes, that can be started again and again."""

  def run(self) -> int:
    """Starts it and returns its exit code, negative: the signal that killed it."""

  def send(self, number: int) -> None:
    """Gives it a signal, if it runs; called in a signal handler."""

  def describe(self) -> str:
    """Which process was started last, for messages."""

  def checkpoints(self) -> set[Checkpoint]:
    """Those that its workdir has."""


def supervise(job: Job, *, restarts: int, say: Callable[[str], None]) -> int:
  """Starts the job, again where it was killed, and returns its last exit code.

  Args:
    restarts: at most so many in a row without a newer checkpoint.
    say: prints a line for the user.
  """
  seen, in_row, is_first = job.checkpoints(), 0, True
  with _Signals(job) as signals:
    while True:
      if signals.stopped_by is not None:
        say("stopped before the trainer was started again; the same command resumes")
        return DONE
      began = time.monotonic()
      code = job.run()
      if signals.stopped_by is not None or not _was_killed(code, is_first=is_first):
        return _own_code(code)
      lived, found = time.monotonic() - began, job.checkpoints()
      if found - seen or (not found and lived > _LONG_SECS):
        in_row = 0
      seen, is_first = seen | found, False
      what, last = f"{job.describe()} {_end(code)} after {lived:.0f} s", _newest(found)
      if in_row == restarts:
        say(f"error: {what}; {in_row} restart{'s' * (in_row != 1)} in a row brought no checkpoint newer than {last}, "
            "so it is not started again (--restarts). If the kernel killed it for memory, dmesg says so: lower "
            "sample.slots, buffer.capacity or train.prompts_per_step. The same command resumes:\n  " + resume_command())
        return FAULT
      in_row += 1
      say(f"{what}; it is started again from {last} (restart {in_row} of {restarts} without a newer checkpoint)")
      time.sleep(_PAUSE_SECS * in_row)


def _was_killed(code: int, *, is_first: bool) -> bool:
  """Whether an exit code is none that a run gives itself."""
  if code == BAD_INPUT:  # not bad, once a process was at work with it: those that share the trainer missed each other
    return not is_first
  return code not in (DONE, FAULT, INTERRUPTED, -signal.SIGTERM, -signal.SIGINT)


def resume_command() -> str:
  return " ".join(["python -m tba_jax.main", *sys.argv[1:]])


class _Signals:
  """While it is entered, signals that ask this process to stop or to pause reach the job."""

  def __init__(self, job: Job):
    self._job = job
    self.stopped_by: int | None = None

  def __enter__(self) -> _Signals:
    self._before = {number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT)}
    self._before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._suspend)
    return self

  def __exit__(self, *exception: object) -> None:
    for number, handler in self._before.items():
      signal.signal(number, handler)

  def _stop(self, number: int, frame: object) -> None:
    del frame
    self.stopped_by = number
    self._job.send(number)

  def _suspend(self, number: int, frame: object) -> None:
    del number, frame
    self._job.send(signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)
    self._job.send(signal.SIGCONT)


class Child:
  """A job of one process of this machine.

  Args:
    command: with what it is started.
    workdir: of its checkpoints.
    environment: of the process, this one's by default.
  """

  def __init__(self, command: Sequence[str], *, workdir: pathlib.Path, environment: Mapping[str, str] | None = None):
    self._command, self._workdir, self._environment = list(command), workdir, environment
    self._process: subprocess.Popen | None = None
    self._early: int | None = None  # a signal that came while it was being started

  def run(self) -> int:
    environment = {**(os.environ if self._environment is None else self._environment), _PARENT: str(os.getpid())}
    # In a group of its own: Ctrl-C would come from the terminal and from here, and twice means at once.
    self._process, self._early = None, None
    self._process = subprocess.Popen(self._command, env=environment, process_group=0)
    if self._early is not None:
      self._process.send_signal(self._early)
    return self._process.wait()

  def send(self, number: int) -> None:
    if self._process is None:
      self._early = number
    else:
      self._process.send_signal(number)

  def describe(self) -> str:
    return f"the trainer's process {self._process.pid}"

  def checkpoints(self) -> set[Checkpoint]:
    return checkpoints_in(self._workdir)


def checkpoints_in(workdir: pathlib.Path) -> set[Checkpoint]:
  """Those that are whole: others have longer names."""
  return {(int(path.name), kind) for kind, folder in (("training", "."), ("fine-tuning", "fine_tuning"))
          for path in (workdir / folder / "checkpoints").glob("*") if path.name.isdecimal()}


def _newest(found: set[Checkpoint]) -> str:
  trained = [step for step, kind in found if kind == "training"]
  return (f"step {max(trained)}" if trained else f"step {max(found)[0]} of the fine-tuning" if found else
          "the beginning")


def _end(code: int) -> str:
  if code == GONE:
    return "ended with another of the trainer's processes"
  return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def _own_code(code: int) -> int:
  """As a shell says it."""
  return 128 - code if code < 0 else FAULT if code == GONE else code

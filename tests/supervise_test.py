"""The parent that starts a killed run again: small programs in the place of the run, real signals."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

REPO = pathlib.Path(__file__).resolve().parent.parent

# Starts a program with FOLDER as its argument, as main does.
PARENT = """
import pathlib, sys
from tba_jax.runtime import supervise
supervise._PAUSE_SECS = 0.01
folder = pathlib.Path(sys.argv[1])
child = supervise.Child([sys.executable, str(folder / "child.py"), str(folder)], workdir=folder)
code = supervise.supervise(child, restarts=int(sys.argv[2]), say=lambda text: print(text, file=sys.stderr, flush=True))
assert "jax" not in sys.modules
sys.exit(code)
"""

# Writes a line for each start; `number`: of this start, from 0.
CHILD = """
import os, pathlib, signal, sys, time
from tba_jax.runtime import supervise
assert supervise.is_child() and not supervise.is_child()
folder = pathlib.Path(sys.argv[1])
starts = folder / "starts"
number = len(starts.read_text().splitlines()) if starts.exists() else 0
def checkpoint(step):
  (folder / "checkpoints" / str(step)).mkdir(parents=True)
def begun():
  with starts.open("a") as file:
    print(os.getpid(), file=file, flush=True)
def kill(by=signal.SIGKILL):
  begun()
  os.kill(os.getpid(), by)
"""


class Parent:

  def __init__(self, folder, program, *, restarts=3):
    self._starts = folder / "starts"
    (folder / "child.py").write_text(CHILD + program)
    self.process = subprocess.Popen([sys.executable, "-c", PARENT, str(folder), str(restarts)], cwd=REPO,
                                    env={**os.environ, "PYTHONPATH": str(REPO)}, stderr=subprocess.PIPE, text=True)

  def starts(self) -> list[int]:
    """Processes, in their order."""
    return [int(line) for line in self._starts.read_text().splitlines()] if self._starts.exists() else []

  def wait_for_start(self) -> int:
    end = time.monotonic() + 20.0
    while not self.starts():
      assert time.monotonic() < end and self.process.poll() is None
      time.sleep(0.01)
    return self.starts()[-1]

  def end(self) -> tuple[int, str]:
    _, said = self.process.communicate(timeout=30)
    return self.process.returncode, said


@pytest.mark.parametrize("program, code", [
  ("begun(); sys.exit(0)", 0), ("begun(); raise RuntimeError", 1), ("begun(); sys.exit(2)", 2),
  ("begun(); sys.exit(130)", 130), ("kill(signal.SIGTERM)", 143),
])
def test_an_end_that_the_run_gives_itself_is_passed_on(tmp_path, program, code):
  parent = Parent(tmp_path, program)
  assert parent.end()[0] == code and len(parent.starts()) == 1


def test_a_killed_process_is_started_again_and_what_brings_checkpoints_may_be_killed_often(tmp_path):
  parent = Parent(tmp_path, "checkpoint(number)\nkill([signal.SIGKILL, signal.SIGSEGV][number % 2]) if number < 4 else "
                  "(begun(), sys.exit(0))", restarts=1)
  code, said = parent.end()
  assert code == 0 and len(parent.starts()) == 5, said
  assert "was killed by SIGKILL" in said and "was killed by SIGSEGV" in said
  assert "it is started again from step 3 (restart 1 of 1 without a newer checkpoint)" in said


def test_without_a_newer_checkpoint_it_gives_up_with_what_was_tried(tmp_path):
  parent = Parent(tmp_path, "checkpoint(7) if not number else None\nkill()", restarts=2)
  code, said = parent.end()
  assert code == 1 and len(parent.starts()) == 3, said
  last = said[said.index("error: "):]
  assert "2 restarts in a row brought no checkpoint newer than step 7" in last
  assert "The same command resumes:\n  python -m tba_jax.main" in last


def test_processes_that_lost_another_try_to_meet_again(tmp_path):
  parent = Parent(tmp_path, "begun(); sys.exit([supervise.GONE, 2, 0][number])")
  code, said = parent.end()
  assert code == 0 and len(parent.starts()) == 3, said


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_stop_reaches_the_process_once_and_nothing_is_started_again(tmp_path, by):
  parent = Parent(tmp_path, """
caught = []
def ask(number, frame):
  caught.append(number)
for number in (signal.SIGTERM, signal.SIGINT):
  signal.signal(number, ask)
begun()
while not caught:
  time.sleep(0.01)
time.sleep(0.2)
print(caught, file=sys.stderr)
os.kill(os.getpid(), signal.SIGKILL)
""")
  parent.wait_for_start()
  parent.process.send_signal(by)
  code, said = parent.end()
  assert code == 137 and len(parent.starts()) == 1, said
  assert said.startswith(f"[{int(by)}]"), said


def test_the_process_dies_with_its_parent(tmp_path):
  parent = Parent(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN); begun(); time.sleep(60)")
  child = parent.wait_for_start()
  parent.process.kill()
  parent.end()
  end = time.monotonic() + 5.0
  while pathlib.Path(f"/proc/{child}").exists() and _state(child) != "Z":
    assert time.monotonic() < end, "the process outlives its parent"
    time.sleep(0.01)


def _state(pid: int) -> str:
  try:
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
  except OSError:
    return "Z"

"""Grades mathematical answers in processes that can be killed: sympy may run for ever on what a model writes.

Usable from any thread (math-verify by itself is not: its time limits are signals). An answer that cannot be graded is
an error of its own kind, counted, and never called wrong. No accelerator is touched: a worker has no jax.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent import futures
import dataclasses
import json
import os
import pathlib
import queue
import select
import subprocess
import sys
import threading
import time
from typing import NamedTuple
import weakref

_WORKER = pathlib.Path(__file__).with_name("math_worker.py")
_HIDE_ACCELERATORS = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
_START_SECS = 120.0  # importing sympy takes one; on a machine that is short of CPU, longer


class Verdict(NamedTuple):
  """Whether an answer equals the gold one; or the `error`: "timeout", "memory", "crash", or what raised."""

  right: bool
  error: str = ""


@dataclasses.dataclass
class PoolCounts:
  """What a pool did so far. `timeouts` and `crashes` are among the `errors`."""

  graded: int = 0
  right: int = 0
  errors: int = 0
  timeouts: int = 0
  crashes: int = 0


class _Worker:
  """One process, from its start to its death; used by one thread at a time."""

  def __init__(self, memory_bytes: int, last_resort_secs: float):
    self.process = subprocess.Popen(
      [sys.executable, "-P", str(_WORKER), str(memory_bytes), str(last_resort_secs)],
      stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
      env={**os.environ, **_HIDE_ACCELERATORS},
      start_new_session=True,  # Ctrl-C is for the run, which may still have answers to grade
    )  # fmt: skip
    self._first_reply: dict | None = None

  def wait_ready(self) -> None:
    """Raises: RuntimeError if the process cannot do its work."""
    if self._first_reply is None:
      self._first_reply = self._read(time.monotonic() + _START_SECS) or {"fatal": "the grader's process did not start"}
    if "fatal" in self._first_reply:
      reason = self._first_reply["fatal"]
      raise RuntimeError(f"answers cannot be graded: {reason}; math-verify is one of the packages of requirements.txt")

  def ask(self, gold: str, answer: str, deadline_secs: float) -> Verdict:
    """Raises: BrokenPipeError if the process was dead before it was asked."""
    self.process.stdin.write(json.dumps({"gold": gold, "answer": answer}).encode() + b"\n")
    self.process.stdin.flush()
    deadline = time.monotonic() + deadline_secs
    reply = self._read(deadline)
    if reply is None:
      return Verdict(False, "timeout" if time.monotonic() >= deadline else "crash")
    return Verdict(False, reply["error"]) if "error" in reply else Verdict(reply["right"])

  def _read(self, deadline: float) -> dict | None:
    """The next line; None if the deadline passes or the process ends before it is whole."""
    stdout, line = self.process.stdout.fileno(), b""
    waiting = select.poll()
    waiting.register(stdout, select.POLLIN)
    while not line.endswith(b"\n"):
      left = deadline - time.monotonic()
      if left <= 0 or not waiting.poll(left * 1_000):
        return None
      piece = os.read(stdout, 65_536)
      if not piece:
        return None
      line += piece
    return json.loads(line)

  def end(self) -> None:
    """Kills the process and takes its exit status, so that no zombie is left."""
    self.process.kill()
    self.process.wait()
    self.process.stdout.close()
    try:
      self.process.stdin.close()
    except BrokenPipeError:
      pass  # what it had not read of the last request is lost with it


class MathPool:
  """A fixed number of worker processes that grade answers, restarted when they die or must be killed.

  Args:
    num_workers: processes. Each takes about 150 MB.
    deadline_secs: for one answer, counted from when a worker takes it; then the worker is killed.
    memory_bytes: address space of a worker; what needs more is an error.
  Raises: ValueError for fewer than 1 worker. Answers raise RuntimeError if no worker can start, or after `close`.
  """

  def __init__(self, *, num_workers: int = 2, deadline_secs: float = 3.0, memory_bytes: int = 1 << 30):
    if num_workers < 1:
      raise ValueError(f"num_workers={num_workers} must be at least 1; raise it.")
    self.counts = PoolCounts()
    self._deadline_secs, self._memory_bytes = deadline_secs, memory_bytes
    self._lock = threading.Lock()
    self._workers: set[_Worker] = set()
    self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    self._threads = futures.ThreadPoolExecutor(num_workers, thread_name_prefix="math_pool")
    for _ in range(num_workers):
      self._idle.put(self._start())
    self._finalizer = weakref.finalize(self, _end_all, self._workers, self._threads)  # at exit, too

  def grade(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
    """Verdicts of (gold, answer) pairs, all at once; LaTeX without dollar signs or \\boxed."""
    verdicts = list(self._threads.map(lambda pair: self._grade_one(*pair), pairs))
    with self._lock:
      counts = self.counts
      counts.graded += len(verdicts)
      counts.right += sum(verdict.right for verdict in verdicts)
      counts.errors += sum(bool(verdict.error) for verdict in verdicts)
      counts.timeouts += sum(verdict.error == "timeout" for verdict in verdicts)
      counts.crashes += sum(verdict.error == "crash" for verdict in verdicts)
    return verdicts

  def close(self) -> None:
    """Ends all processes; an answer being graded is an error. May be called twice."""
    self._finalizer()

  def _start(self) -> _Worker:
    worker = _Worker(self._memory_bytes, self._deadline_secs + 2)
    self._workers.add(worker)
    return worker

  def _replace(self, worker: _Worker) -> _Worker:
    worker.end()
    with self._lock:
      if not self._finalizer.alive:
        raise RuntimeError("this pool is closed.")
      self._workers.discard(worker)
      return self._start()

  def _grade_one(self, gold: str, answer: str) -> Verdict:
    worker = self._idle.get()
    try:
      while True:
        worker.wait_ready()
        try:
          verdict = worker.ask(gold, answer, self._deadline_secs)
          break
        except BrokenPipeError:  # it died while it had nothing to do: not this answer's fault
          worker = self._replace(worker)
      if verdict.error in ("timeout", "memory", "crash"):
        worker = self._replace(worker)
      return verdict
    finally:
      self._idle.put(worker)


def _end_all(workers: set[_Worker], threads: futures.ThreadPoolExecutor) -> None:
  for worker in list(workers):
    worker.end()
  threads.shutdown(wait=False, cancel_futures=True)

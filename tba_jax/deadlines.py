"""What may never come back: threads that say what they do, calls with a deadline, and the end of a process that hangs.

A thread of Python cannot be killed. One that hangs is left behind and its work is done by another; where the main
thread itself hangs, nothing is left but to say where and to end the process. Time is `awake_secs`: neither a changed
wall clock nor a process or machine that was suspended counts as silence.
"""

from __future__ import annotations

import faulthandler
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any


_TICK_SECS, _MOST_SECS = 0.25, 1.0


class AwakeClock:
  """Seconds in which this process was running. A thread looks at a monotonic clock often; a gap counts for a second at
  most."""

  def __init__(self, *, clock: Callable[[], float] = time.monotonic, ticks: bool = True):
    """`ticks`: whether a thread looks; without it only who asks does."""
    self._clock, self._last, self._awake = clock, clock(), 0.0
    self._lock = threading.Lock()
    self._ticker = threading.Thread(target=self._tick, name="awake clock", daemon=True) if ticks else None

  def __call__(self) -> float:
    with self._lock:
      if self._ticker is not None and self._ticker.ident is None:
        self._ticker.start()
      now = self._clock()
      self._awake += min(now - self._last, _MOST_SECS)
      self._last = now
      return self._awake

  def _tick(self) -> None:
    while True:
      time.sleep(_TICK_SECS)
      self()


awake_secs = AwakeClock()


def wait_until(done: Callable[[float], bool], *, secs: float) -> bool:
  """Calls `done(timeout)`, which waits for up to that long, until it says true; False after `secs` of waking time."""
  end = awake_secs() + secs
  while (left := end - awake_secs()) > 0:
    if done(min(left, _MOST_SECS)):
      return True
  return False


def join_thread(thread: threading.Thread, *, secs: float) -> bool:
  """Whether the thread ends within `secs` of waking time."""

  def ended(timeout: float) -> bool:
    thread.join(timeout)
    return not thread.is_alive()

  return wait_until(ended, secs=secs)


class Hung(RuntimeError):
  """Something did not come back within its deadline."""


class Heartbeat:
  """What a thread does at the moment, and since when."""

  def __init__(self, name: str, *, clock: Callable[[], float] = awake_secs):
    self.name, self._clock = name, clock
    self._last = ("start", clock())

  def beat(self, doing: str) -> None:
    """The thread is alive, and begins to do this."""
    self._last = (doing, self._clock())

  @property
  def doing(self) -> str:
    return self._last[0]

  @property
  def silent_secs(self) -> float:
    return self._clock() - self._last[1]


class Caller:
  """Calls functions in a thread of its own, so that one that never returns costs its caller a deadline. For one caller
  at a time."""

  def __init__(self, name: str):
    self._name = name
    self._calls: queue.SimpleQueue | None = None  # of the thread; None while there is none

  def call(self, function: Callable[[], Any], *, secs: float, what: str) -> Any:
    """What `function()` returns; what it raises is raised here.

    Raises: Hung after `secs`, naming `what`. Its thread is left behind and ends when the function returns.
    """
    if self._calls is None:
      self._calls = queue.SimpleQueue()
      threading.Thread(target=_serve, args=(self._calls,), name=self._name, daemon=True).start()
    answers: queue.SimpleQueue = queue.SimpleQueue()
    self._calls.put((function, answers))
    answer: list[tuple[Any, BaseException | None]] = []

    def answered(timeout: float) -> bool:
      try:
        answer.append(answers.get(timeout=timeout))
      except queue.Empty:
        return False
      return True

    if not wait_until(answered, secs=secs):
      self.close()
      raise Hung(f"{what} has not returned for {secs:g} s in thread {self._name}, which is left behind "
                 f"(runtime.hang_secs={secs:g})")
    value, error = answer[0]
    if error is not None:
      raise error
    return value

  def close(self) -> None:
    """Ends the thread, once it is back from what it was called for."""
    if self._calls is not None:
      self._calls.put(None)
      self._calls = None


def _serve(calls: queue.SimpleQueue) -> None:
  while (call := calls.get()) is not None:
    function, answers = call
    try:
      answers.put((function(), None))
    except BaseException as error:  # raised again in the caller's thread
      answers.put((None, error))


class Watchdog:
  """Ends the process, after saying where every thread is, when all of the given heartbeats are silent for `secs`.

  For heartbeats of the main thread: whatever it hangs in (a device, a file system), no exception can be raised there.
  """

  def __init__(
      self,
      heartbeats: Callable[[], Sequence[Heartbeat]],
      *,
      secs: float,
      say: Callable[[str], None],
      end: Callable[[int], Any] = os._exit,
  ):
    self._heartbeats, self._secs, self._say, self._end = heartbeats, secs, say, end
    self._closed = threading.Event()
    self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

  def __enter__(self) -> Watchdog:
    self._thread.start()
    return self

  def __exit__(self, *exception: Any) -> None:
    self._closed.set()
    self._thread.join(timeout=5.0)

  def _watch(self) -> None:
    while not self._closed.wait(min(1.0, self._secs / 4)):
      last = min(self._heartbeats(), key=lambda heartbeat: heartbeat.silent_secs)
      if last.silent_secs > self._secs:
        self._say(f"error: {last.name} has been in {last.doing!r} for {last.silent_secs:.0f} s "
                  f"(runtime.hang_secs={self._secs:g}); the process ends without a checkpoint of this moment, the same "
                  "command resumes from the last one. Where every thread is:")
        faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
        self._end(1)
        return

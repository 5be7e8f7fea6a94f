"""Writing beside training: in a thread, with a deadline, and what a disk says that refuses."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from tba_jax.deadlines import Hung, join_thread
from tba_jax.disk import DISK_ERRORS
from tba_jax.host_memory import give_back


class Writing:
  """A write under way in a thread of its own, which does not keep a process alive that is to end."""

  def __init__(self, write: Callable[[], None], what: str, *, gives_back: bool = False):
    """`gives_back`: free host memory, once it is over."""
    self.what, self.error, self._write, self._gives_back = what, None, write, gives_back
    self.thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
    self.thread.start()

  def join(self, timeout_secs: float) -> None:
    """Waits for its end. Raises: Hung if it takes too long."""
    if not join_thread(self.thread, secs=timeout_secs):
      raise Hung(f"{self.what} not written after {timeout_secs:g} s (thread {self.thread.name}, "
                 f"runtime.hang_secs={timeout_secs:g})")

  def _run(self) -> None:
    try:
      self._write()
    except BaseException as error:  # raised by whoever joins
      self.error = error
    finally:
      self._write = None  # and with it the copies that it wrote, which would else stay until the next one
      if self._gives_back:
        give_back()


def under_way(writing: Writing | None) -> bool:
  return writing is not None and writing.thread.is_alive()


def disk_says(error: BaseException | None) -> str | None:
  """What a full, failing or slow disk said, if that is behind an exception."""
  while error is not None:
    if isinstance(error, TimeoutError):
      return "timed out"  # also what orbax, which goes by the wall clock, says when that jumps
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
      return os.strerror(error.errno)
    error = error.__cause__ or error.__context__
  return None

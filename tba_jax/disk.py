"""Files that a run appends to for as long as it goes on, also while the disk is full.

What a full or failing disk refuses waits in memory and is written, in its order, when there is room again. A run is
told once that something waits and once that all of it is written. A record stands whole or not at all.
"""

from __future__ import annotations

import errno
import os
import pathlib
import threading
from collections import deque
from collections.abc import Callable

from absl import logging

DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}  # what a full or failing disk says
_MOST_WAITING_BYTES = 32 * 2**20  # of one file; what comes beyond is lost


class Disk:
  """What the files of a run share: which of them have something waiting, and who is told. Safe from several threads."""

  def __init__(self, say: Callable[[str], None] = logging.error):
    self.say = say
    self._waiting: set[pathlib.Path] = set()
    self._lock = threading.Lock()

  def refuse(self, path: pathlib.Path, error: OSError) -> None:
    """Something for `path` waits now."""
    with self._lock:
      is_first = not self._waiting
      self._waiting.add(path)
    if is_first:
      self.say(f"error: {path} cannot be written ({os.strerror(error.errno)}); training goes on, and what the run's "
               "files would get waits in memory; make room on the disk")

  def accept(self, path: pathlib.Path) -> None:
    """Nothing for `path` waits any more."""
    with self._lock:
      is_last = self._waiting == {path}
      self._waiting.discard(path)
    if is_last:
      self.say("the disk takes files again; what waited in memory is written")


class AppendedFile:
  """Appends records to a file, each on its way to the disk when `append` returns. Safe from several threads.

  An error that is not of the disk is raised.
  """

  def __init__(self, path: str | os.PathLike[str], *, disk: Disk | None = None):
    self.path, self._disk = pathlib.Path(path), disk or Disk()
    self.num_lost = 0  # records that found no room in memory either, or were waiting when the file was closed
    self._waiting: deque[bytes] = deque()
    self._waiting_bytes = 0
    self._file = None
    self._closed = self._refused = False
    self._lock = threading.Lock()
    self._write_waiting()

  def append(self, record: bytes) -> None:
    """Writes one record; nothing of it after `close`."""
    with self._lock:
      if self._closed:
        return
      if self._waiting_bytes + len(record) > _MOST_WAITING_BYTES:
        self.num_lost += 1
      else:
        self._waiting.append(record)
        self._waiting_bytes += len(record)
      self._write_waiting()

  def close(self) -> None:
    with self._lock:
      self._closed = True
      self._write_waiting()
      self.num_lost += len(self._waiting)
      if self._file is not None:
        self._file.close()
    if self.num_lost:
      self._disk.say(f"error: {self.path} lacks {self.num_lost} records, for which there was no room")

  def _write_waiting(self) -> None:
    try:
      if self._file is None:
        self._file = open(self.path, "ab", buffering=0)
      while self._waiting:
        self._write(self._waiting[0])
        self._waiting_bytes -= len(self._waiting.popleft())
    except OSError as error:
      if error.errno not in DISK_ERRORS:
        raise
      self._refused = True
      self._disk.refuse(self.path, error)
      return
    if self._refused:
      self._refused = False
      self._disk.accept(self.path)

  def _write(self, record: bytes) -> None:
    size = os.fstat(self._file.fileno()).st_size
    rest = memoryview(record)
    try:
      while rest:
        rest = rest[self._file.write(rest):]  # a disk that is nearly full takes a part
    except OSError:
      self._file.truncate(size)
      raise

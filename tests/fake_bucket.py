"""A bucket on the local disk, where epath looks for Google's: an fsspec filesystem of single objects, which can fail.

Its objects appear when they are closed, all at once. There are no folders, and nothing is renamed or appended to.
"""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import threading
import time
import uuid

import fsspec
from etils.epath import backend

ROOT = "TBA_FAKE_BUCKET"  # environment variable: folder of the buckets


class FakeBucket(fsspec.AbstractFileSystem):
  protocol = ("gcs", "gs")
  cachable = False
  lock = threading.Lock()
  fails = staticmethod(lambda what, path: None)  # raises, as a store in trouble does
  write_secs = 0.0  # what a write of a part takes
  writes: list[str] = []  # names in the order in which they were written or removed

  def _file(self, path):
    return pathlib.Path(os.environ[ROOT]) / self._strip_protocol(path)

  def _open(self, path, mode="rb", **kwargs):
    del kwargs
    type(self).fails(mode, path)
    if mode == "rb":
      file = self._file(path)
      if not file.is_file():
        raise FileNotFoundError(path)
      return open(file, "rb")
    if mode != "wb":
      raise NotImplementedError(f"an object store has no mode {mode}")
    return _Object(self, path)

  def open(self, path, mode="rb", **kwargs):
    return self._open(path, mode, **kwargs)

  def rm(self, path, recursive=False, maxdepth=None):
    assert not recursive and maxdepth is None
    type(self).fails("rm", path)
    file = self._file(path)
    file.unlink()
    with contextlib.suppress(OSError):  # of a folder that holds something else
      for parent in file.parents:
        parent.rmdir()
    with self.lock:
      self.writes.append("-" + self._strip_protocol(path))

  def mv(self, *args, **kwargs):
    raise NotImplementedError("an object store renames nothing")

  def ls(self, path, detail=True, **kwargs):
    raise NotImplementedError("listings are not asked for")


class _Object(io.BytesIO):

  def __init__(self, store, path):
    super().__init__()
    self._store, self._path = store, path

  def write(self, part):
    time.sleep(self._store.write_secs)
    return super().write(part)

  def close(self):
    if self.closed:
      return
    payload = self.getvalue()
    super().close()
    type(self._store).fails("close", self._path)
    file = self._store._file(self._path)
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.parent / f".{uuid.uuid4().hex}"
    temporary.write_bytes(payload)
    os.replace(temporary, file)
    with self._store.lock:
      self._store.writes.append(self._store._strip_protocol(self._path))


def use(root) -> None:
  """From here on gs:// is below `root`."""
  os.environ[ROOT] = str(root)
  os.environ["EPATH_USE_TF"] = "false"
  fsspec.register_implementation("gcs", FakeBucket, clobber=True)
  backend.fsspec_backend._get_filesystem.cache_clear()
  FakeBucket.fails, FakeBucket.writes = staticmethod(lambda what, path: None), []


@contextlib.contextmanager
def failing(error=lambda: OSError("503 backend error"), *, when=lambda what, path: what != "rb"):
  """What `when` says of raises, meanwhile."""
  def fails(what, path):
    if when(what, path):
      raise error()

  before, FakeBucket.fails = FakeBucket.fails, staticmethod(fails)
  try:
    yield
  finally:
    FakeBucket.fails = before

"""What stands around a run: its folder and the lock on it, the signals that stop it, and how bad input is told."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import signal
import sys
from collections.abc import Iterator
from typing import Any

from ml_collections import ConfigDict

from tba_jax import config as config_lib
from tba_jax import metrics
from tba_jax.runtime.settings import StopFlag


@contextlib.contextmanager
def workdir_of_this_run(folder: pathlib.Path, config: ConfigDict) -> Iterator[None]:
  """Makes the folder, keeps other processes out of it, and writes config.json; bad input takes back what it had just
  made.

  Raises: ConfigError if the folder cannot be made or another process is using it.
  """
  try:
    folder.mkdir(parents=True, exist_ok=True)
    lock = open(folder / ".lock", "a")
  except OSError as error:
    raise config_lib.ConfigError(
        [f"workdir={str(folder)!r} cannot be written ({error.strerror}); give another --workdir"]) from error
  with lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      raise config_lib.ConfigError(
          [f"workdir={str(folder)!r} is in use by another process; wait for it, or give another --workdir"]) from error
    path = folder / config_lib.CONFIG_FILE
    is_new = not path.exists()
    metrics.write_atomic(path, config_lib.to_json(config))
    try:
      yield
    except config_lib.ConfigError:
      if is_new:
        path.unlink()  # or the corrected command would be refused as another config
      raise


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopFlag]:
  """SIGTERM and Ctrl-C ask the run to stop at the next step; a second Ctrl-C ends it at once."""
  stop = StopFlag()

  def ask(number: int, frame: Any) -> None:
    del frame
    name = signal.Signals(number).name
    if stop.is_set() and number == signal.SIGINT:
      os._exit(130)  # an exception could be raised inside a callback of XLA, which drops it
    stop.set(name)
    line = (f"\n{name}: stopping, with a checkpoint, once the step under way is done and one whose batch was drawn; Ctrl-C "
            "again stops at once, without one\n")
    os.write(2, line.encode())

  before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
  try:
    yield stop
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)


@contextlib.contextmanager
def as_config_error(key: str) -> Iterator[None]:
  """What a model or data set says of itself becomes an error of the config."""
  try:
    yield
  except (ValueError, KeyError, OSError) as error:
    raise config_lib.ConfigError([f"{key}: {error}"]) from error


def memory_advice(error: BaseException) -> str | None:
  """What to do about a program that did not fit in a device's memory; None for any other error."""
  if "RESOURCE_EXHAUSTED" not in str(error):
    return None
  return ("out of device memory: raise train.micro_batches, set train.remat=full, lower sample.slots or "
          "sample.max_new_tokens, store the cache in sample.cache_dtype=bfloat16 or int8, or use more devices; python -m "
          "tba_jax.plan says what fits")


@contextlib.contextmanager
def advising_on_memory() -> Iterator[None]:
  """An error of memory is followed by what to do about it, and raised on."""
  try:
    yield
  except Exception as error:
    advice = memory_advice(error)
    if advice is not None:
      say(f"error: {advice}")
    raise


def say(text: str) -> None:
  print(text, file=sys.stderr, flush=True)

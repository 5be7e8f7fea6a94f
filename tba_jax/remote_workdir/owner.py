"""Which process writes a run's objects: `owner.json`, written anew every half minute for as long as it does.

A store has no locks, so this is a promise that the processes keep to each other. Whether an owner is alive is judged by
whether it goes on writing, not by the clocks of two machines. Two that claim at the same moment are told apart when the
later of them reads what it wrote; where both read before the other wrote, the first loses at its next renewal.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from tba_jax.remote_workdir.store import OWNER_FILE, RemoteError, Store

_RENEW_SECS = 30.0
_STALE_SECS = 100.0  # three renewals, and some
_SURELY_SECS = 3600.0  # so old by the clocks that nobody need wait; they do not differ by that


class Owner:
  """This process as the owner, until `release`."""

  def __init__(self, store: Store, *, say: Callable[[str], None], renew_secs: float = _RENEW_SECS,
               stale_secs: float = _STALE_SECS):
    """Waits until an owner that no longer writes is known to be gone.

    Raises: RemoteError if another process is the owner, or the store cannot be written.
    """
    self._store, self._say, self._renew_secs = store, say, renew_secs
    self._own = {"host": socket.gethostname(), "pid": os.getpid(), "token": secrets.token_hex(8)}
    self._ending, self.lost = threading.Event(), False
    try:
      self._await_others(stale_secs)
      self._write()
      found = self._read() or {}
      if found.get("token") != self._own["token"]:
        raise self._in_use(found)
    except RemoteError:
      raise
    except Exception as error:  # clients of stores have no error in common
      raise store.unreadable(error) from error
    self._thread = threading.Thread(target=self._renew, name="workdir owner", daemon=True)
    self._thread.start()

  def is_lost(self) -> bool:
    """Whether another process has taken the workdir; asks the store. Raises what its client raises."""
    found = None if self.lost else self._read()
    if found is not None and found.get("token") != self._own["token"]:
      self.lose(_whose(found))
    return self.lost

  def lose(self, to: str) -> None:
    """Another process is the owner from here on: that is said, once."""
    if not self.lost:
      self.lost = True
      self._say(f"error: {self._store.url} was taken over by {to}; nothing more is uploaded there")

  def release(self) -> None:
    """Lets others have the workdir at once."""
    self._ending.set()
    self._thread.join(timeout=5.0)
    try:
      if not self.is_lost():
        self._store.remove(OWNER_FILE)
    except Exception:  # the store does not answer: whoever comes waits for a minute or two
      pass

  def _await_others(self, stale_secs: float) -> None:
    first = self._read()
    if first is None or _is_gone(first):
      return
    self._say(f"{self._store.url} was last written by {_whose(first)}; waiting for {stale_secs:.0f} s to see whether "
              "it still runs")
    deadline = time.monotonic() + stale_secs
    while time.monotonic() < deadline:
      time.sleep(min(5.0, self._renew_secs / 4))
      found = self._read()
      if found is None:
        return
      if found != first:
        raise self._in_use(found)

  def _in_use(self, found: dict[str, Any]) -> RemoteError:
    return RemoteError(f"workdir={self._store.url!r} is in use by {_whose(found)}; wait for it, or give another "
                       "--workdir")

  def _read(self) -> dict[str, Any] | None:
    try:
      found = json.loads(self._store.read(OWNER_FILE))
    except FileNotFoundError:
      return None
    except ValueError:
      return {}
    return found if isinstance(found, dict) else {}

  def _write(self) -> None:
    self._store.write(OWNER_FILE, json.dumps(self._own | {"renewed": time.time()}).encode())

  def _renew(self) -> None:
    while not self._ending.wait(self._renew_secs):
      try:
        if self.is_lost():
          return
        self._write()
      except Exception:  # the uploads meet the same store, and tell
        pass


def _whose(found: dict[str, Any]) -> str:
  return f"process {found.get('pid', '?')} on {found.get('host', '?')}"


def _is_gone(found: dict[str, Any]) -> bool:
  """Whether an owner is known to run no more, without waiting for its next renewal."""
  renewed = found.get("renewed")
  if not isinstance(renewed, (int, float)) or time.time() - renewed > _SURELY_SECS:
    return True
  if found.get("host") != socket.gethostname() or not isinstance(found.get("pid"), int):
    return False
  try:
    os.kill(found["pid"], 0)
  except ProcessLookupError:
    return True
  except OSError:
    pass
  return False

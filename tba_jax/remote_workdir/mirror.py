"""Carries a run's local folder to the bucket while the run goes on, in a thread of its own.

The run knows nothing of it. A pass takes the newest checkpoint that the bucket lacks: what it needs, then the logs as
they are by then (so they are never behind the checkpoint), then the manifest, and last what is no longer needed is
removed. A failing store costs the run nothing: passes are repeated, further and further apart.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from tba_jax.metrics import write_atomic
from tba_jax.remote_workdir.owner import Owner
from tba_jax.remote_workdir.store import (
    STATE_FILE, Manifest, Store, first_line, in_parallel, is_fixed, is_mirrored, name_of_step, number_of_step)

EVERY_SECS = 60.0  # between passes without a new checkpoint
_SHARE = 0.1  # of the time at most goes into such passes, for logs are uploaded whole
_LOOK_SECS = 1.0  # between looks for a new checkpoint
_RETRY_SECS = (1.0, 60.0)  # first and longest wait after a failure
PATIENCE_SECS = 600.0  # at the end of a run, without a byte that gets through

Stamp = tuple[int, int]  # bytes and time of change (ns) of a local file


@dataclasses.dataclass
class MirrorState:
  """What of a local folder is in the bucket; kept in the folder.

  `base`: the manifest that the folder was last equal to or ahead of; `pending`: token of one that was being written.
  `sent`: by name, stamp, bytes and checksum of what was uploaded or downloaded. `elsewhere`: checkpoints that are in
  the bucket alone, since the run was taken up on this machine from step `taken_up`.
  """

  url: str
  base: Manifest
  pending: str = ""
  sent: dict[str, tuple[Stamp, tuple[int, str]]] = dataclasses.field(default_factory=dict)
  elsewhere: set[str] = dataclasses.field(default_factory=set)
  taken_up: int = -1

  def save(self, folder: pathlib.Path) -> None:
    write_atomic(folder / STATE_FILE, json.dumps({
        "url": self.url, "base": self.base.to_json(), "pending": self.pending, "sent": self.sent,
        "elsewhere": sorted(self.elsewhere), "taken_up": self.taken_up}))

  @classmethod
  def load(cls, folder: pathlib.Path) -> MirrorState | None:
    """None where there is none, or none that can be read."""
    try:
      found = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
      sent = {name: (tuple(stamp), tuple(what)) for name, (stamp, what) in found["sent"].items()}
      return cls(found["url"], Manifest.from_json(found["base"]), found["pending"], sent, set(found["elsewhere"]),
                 found["taken_up"])
    except (OSError, ValueError, KeyError, TypeError):
      return None


def files_of(folder: pathlib.Path) -> dict[str, Stamp]:
  """Stamps by name of all that a workdir has for the bucket; what goes away meanwhile is left out."""
  found = {}
  for parent, _, names in os.walk(folder):
    for name in names:
      path = os.path.join(parent, name)
      relative = os.path.relpath(path, folder).replace(os.sep, "/")
      if is_mirrored(relative) and not os.path.islink(path):
        try:
          found[relative] = stamp_of(path)
        except FileNotFoundError:
          pass
  return found


def stamp_of(path: str | os.PathLike[str]) -> Stamp:
  status = os.stat(path)
  return status.st_size, status.st_mtime_ns


def meta_of_step(folder: pathlib.Path, step: str) -> dict[str, Any] | None:
  """What a checkpoint says of itself; None if it is gone, or does not say."""
  try:
    found = json.loads((folder / step / "meta" / "metadata").read_text(encoding="utf-8"))
  except (OSError, ValueError):
    return None
  return found if isinstance(found, dict) else None


def segments_of_step(folder: pathlib.Path, step: str) -> list[str]:
  """Names of the files with the rows of the replay buffer that a checkpoint counts on."""
  return [f"rollout_segments/{name}" for name in (meta_of_step(folder, step) or {}).get("segments") or ()]


class Mirror:
  """Uploads one folder until `finish`."""

  def __init__(self, folder: pathlib.Path, store: Store, owner: Owner, state: MirrorState, *,
               say: Callable[[str], None], every_secs: float = EVERY_SECS):
    self.folder, self._store, self._owner, self._state = folder, store, owner, state
    self._say, self._every_secs = say, every_secs
    self._wake, self._ending, self._over = threading.Event(), threading.Event(), threading.Event()
    self._is_whole = self._given_up = False
    self._garbage: set[str] = set()  # objects that no manifest names any more, as far as they are not in `sent`
    self._tokens = {state.base.token}  # of manifests that are this run's, also those whose upload seemed to fail
    self._error: Exception | None = None  # of the last pass
    self._sent_at = time.monotonic()  # something got through
    self._reached: dict[str, int] = {}  # by name, bytes that got through in the best of all tries
    self._thread = threading.Thread(target=self._loop, name="workdir mirror", daemon=True)

  def start(self) -> None:
    self._thread.start()

  def finish(self, *, patience_secs: float = PATIENCE_SECS) -> bool:
    """Uploads what is left. Returns whether all of it is in the bucket; if not, why is said.

    `patience_secs`: without a byte that gets through.
    """
    self._sent_at = time.monotonic()
    self._ending.set()
    self._wake.set()
    reason = ""
    try:
      told_at = time.monotonic() + 5.0
      while not self._over.wait(0.2):
        if time.monotonic() > told_at:
          self._say(f"uploading what is left to {self._store.url}")
          told_at = math.inf
        if time.monotonic() - self._sent_at > patience_secs:
          break
    except KeyboardInterrupt:
      reason = "stopped by Ctrl-C"
    self.stop()
    if self._is_whole:
      self._say(f"all of the run is in {self._store.url}")
    else:
      reason = reason or (first_line(self._error) if self._error else f"no answer within {patience_secs:.0f} s")
      self._say_missing(reason)
    return self._is_whole

  def stop(self) -> None:
    """No pass begins any more, and one under way names nothing more."""
    self._given_up = True
    self._wake.set()

  def _say_missing(self, reason: str) -> None:
    missing = [stamp for name, stamp in files_of(self.folder).items() if not self._has(name, stamp)]
    self._say(f"error: {len(missing)} files ({sum(size for size, _ in missing) / 1e6:.1f} MB) of {self.folder} are not "
              f"in {self._store.url} ({reason}); keep that folder: the same command on this machine uploads them")

  def _has(self, name: str, stamp: Stamp) -> bool:
    """Whether the bucket has a file as it is here."""
    state = self._state
    known = name in state.base.fixed or name in state.base.loose
    return known and name in state.sent and state.sent[name][0] == stamp

  # --- The thread ---

  def _loop(self) -> None:
    failures = 0
    while not self._given_up:
      is_last, began = self._ending.is_set(), time.monotonic()
      self._wake.clear()
      if self._ending.is_set() or self._given_up:
        self._wake.set()
      try:
        is_whole = not self._owner.is_lost() and self._pass()
        if self._owner.lost:
          self._error = PermissionError("another process has taken it over")
          break
      except Exception as error:  # clients of stores have no error in common; the run goes on whatever happens here
        failures, self._error = failures + 1, error
        if failures == 1:
          self._say(f"error: {self._store.url} cannot be written ({first_line(error)}); training goes on, uploads are "
                    f"tried again, and until then the run is in {self.folder} alone")
        self._rest(min(_RETRY_SECS[0] * 2 ** (failures - 1), _RETRY_SECS[1]), is_last)
        continue
      if failures:
        self._say(f"{self._store.url} takes files again")
      failures, self._error = 0, None
      if is_last and is_whole:
        self._is_whole = True
        break
      if is_whole:
        self._wait(max(self._every_secs, (time.monotonic() - began) * (1 / _SHARE - 1)))
      else:
        self._rest(_RETRY_SECS[0] / 10, is_last)
    self._over.set()

  def _rest(self, secs: float, is_last: bool) -> None:
    """Waits, shorter if the run ends meanwhile."""
    if is_last:
      time.sleep(min(secs, 5.0))
    else:
      self._wake.wait(secs)

  def _wait(self, secs: float) -> None:
    """Until the next pass: there is a new checkpoint, or the time is over, or the run ends."""
    deadline = time.monotonic() + secs
    while not self._wake.wait(_LOOK_SECS) and time.monotonic() < deadline:
      known = self._state.base.steps() | self._state.elsewhere
      if any(f"{parent}/{number}" not in known for parent in ("checkpoints", "fine_tuning/checkpoints")
             for number in _names_in(self.folder / parent) if number.isdecimal()):
        return

  # --- One pass ---

  def _pass(self) -> bool:
    """Uploads at most one checkpoint, and all else. Returns whether the bucket then has the folder."""
    files, state = files_of(self.folder), self._state
    fixed, waiting = {}, []  # of the next manifest; checkpoints that are not in the bucket
    steps = filter(None, set(map(name_of_step, files)))
    for step in sorted(steps, key=lambda step: (step.startswith("checkpoints/"), number_of_step(step))):
      known = state.base.files_of(step)
      here = {name: stamp for name, stamp in files.items() if name.startswith(step + "/")}
      if known and all(name in known and self._has(name, stamp) for name, stamp in here.items()):
        fixed |= known  # also while it is being removed here
      else:
        waiting.append((step, set(here)))
    fixed |= self._send(name for name in files if is_fixed(name) and name_of_step(name) is None)
    if waiting:
      step, names = waiting.pop()
      sent = self._send(names)
      # A checkpoint that is removed meanwhile, or was being removed, has fewer files now than before.
      now = {name for name in files_of(self.folder / step)}
      segments = segments_of_step(self.folder, step)
      if {f"{step}/{name}" for name in now} == names == set(sent) and all(name in fixed for name in segments):
        fixed |= sent
      elif now:
        waiting.append((step, names))
    loose = self._send_loose()
    self._forget_elsewhere(fixed)
    fixed |= {name: what for step in self._state.elsewhere for name, what in state.base.files_of(step).items()}
    fixed |= self._segments_elsewhere(fixed)
    self._write_manifest(Manifest(fixed, tuple(sorted(loose))))
    return not waiting

  def _send_loose(self) -> list[str]:
    """Results last: what names a run finished comes after all of it."""
    names = [name for name in files_of(self.folder) if not is_fixed(name)]
    sent = list(self._send(name for name in names if name != "results.json"))
    return sent + list(self._send(name for name in names if name == "results.json"))

  def _send(self, names: Iterable[str]) -> dict[str, tuple[int, str]]:
    """Uploads those that the bucket does not have as they are. Returns bytes and checksum of all but the ones that went
    away here."""
    found: dict[str, tuple[int, str]] = {}

    def send(name: str) -> None:
      path, sent = self.folder / name, self._state.sent
      try:
        stamp = stamp_of(path)
        if name not in sent or sent[name][0] != stamp:
          sent[name] = (stamp, self._store.upload(path, name, on_bytes=functools.partial(self._note, name)))
          self._sent_at = time.monotonic()
        found[name] = sent[name][1]
      except FileNotFoundError:
        if path.exists():
          raise  # of the store
        self._garbage.add(name)  # a part of it may have come there

    in_parallel(send, sorted(names))
    return found

  def _note(self, name: str, num_bytes: int) -> None:
    if num_bytes > self._reached.get(name, 0):  # else a file that fails in its middle again and again would count
      self._reached[name], self._sent_at = num_bytes, time.monotonic()

  def _forget_elsewhere(self, fixed: dict[str, tuple[int, str]]) -> None:
    """Checkpoints that another machine left: once there is a newer one of this machine, only the best evaluated stays.
    """
    self._state.elsewhere -= set(map(name_of_step, fixed))
    newest = max((step for step in set(map(name_of_step, fixed)) if step and step.startswith("checkpoints/")),
                 key=number_of_step, default=None)
    if not self._state.elsewhere or newest is None or number_of_step(newest) <= self._state.taken_up:
      return
    meta = meta_of_step(self.folder, newest)
    if meta is not None:
      best = (meta.get("totals") or {}).get("best_step", -1)
      self._state.elsewhere &= {f"checkpoints/{best}"}

  def _segments_elsewhere(self, fixed: dict[str, tuple[int, str]]) -> dict[str, tuple[int, str]]:
    """Segments that are not here, while one of the checkpoints that are not here may count on them."""
    if not self._state.elsewhere:
      return {}
    return {name: what for name, what in self._state.base.fixed.items()
            if name.startswith("rollout_segments/") and name not in fixed}

  def _write_manifest(self, manifest: Manifest) -> None:
    """Makes it the one that holds, and removes what only the one before named."""
    state = self._state
    if (manifest.fixed, manifest.loose) != (state.base.fixed, tuple(state.base.loose)):
      there = self._store.read_manifest()
      if there is not None and there.token not in self._tokens:
        self._owner.lose("another process, which went on from here")
      if self._owner.lost or self._given_up:  # nothing under another owner's hands
        return
      self._garbage |= {*state.base.fixed, *state.base.loose}
      state.pending = manifest.token
      self._tokens.add(manifest.token)
      state.save(self.folder)  # before the bucket's: a run killed in between must know it as its own
      self._store.write_manifest(manifest)
      state.base, state.pending = manifest, ""
    named = {*manifest.fixed, *manifest.loose}
    garbage = (state.sent.keys() | self._garbage) - named
    in_parallel(self._store.remove, sorted(garbage))
    for name in garbage:
      state.sent.pop(name, None)
    self._garbage = set()
    state.save(self.folder)


def _names_in(folder: pathlib.Path) -> list[str]:
  try:
    return os.listdir(folder)
  except FileNotFoundError:
    return []

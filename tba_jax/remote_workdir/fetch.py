"""From the bucket to this machine: taking up a run that another machine left, and copies for those who read one."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import pathlib
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator

from tba_jax.disk import DISK_ERRORS
from tba_jax.metrics import bytes_bar
from tba_jax.remote_workdir.mirror import (
    EVERY_SECS, PATIENCE_SECS, Mirror, MirrorState, files_of, segments_of_step, stamp_of)
from tba_jax.remote_workdir.owner import Owner
from tba_jax.remote_workdir.store import (
    MANIFEST_FILE, Damaged, Manifest, RemoteError, Store, in_parallel, is_remote, local_folder, name_of_step,
    number_of_step)

_CONFIG_FILE, _RESULTS_FILE = "config.json", "results.json"
_NUM_TRIES = 3  # of a reader, whose run replaces what is being read


# --- A run ---


@contextlib.contextmanager
def mirrored(url: str, cache: pathlib.Path, *, say: Callable[[str], None], every_secs: float = EVERY_SECS,
             patience_secs: float = PATIENCE_SECS) -> Iterator[tuple[pathlib.Path, Callable[[], bool]]]:
  """The local folder of a run in a bucket, with what the bucket has of it, and a thread that carries it there.

  Yields: the folder; and a function that uploads the rest and says whether all of it is in the bucket. What is raised
  inside has it called, too.
  Raises: RemoteError if the bucket cannot be used, another process uses it, or the run went on in two places.
  """
  store = Store(url)
  manifest = store.read_manifest()
  if manifest is not None and _RESULTS_FILE in manifest.loose:  # it is over: to be shown, and left as it is
    with local_copy(url, checkpoint=False) as folder:
      yield folder, lambda: True
    return
  owner = Owner(store, say=say)
  try:
    folder = local_folder(url, cache)
    state = take_up(store, folder, say=say)
    mirror = Mirror(folder, store, owner, state, say=say, every_secs=every_secs)
    say(f"{store.url} is kept in {folder} on this machine, from where it is uploaded")
    mirror.start()
    try:
      yield folder, lambda: mirror.finish(patience_secs=patience_secs)
    except BaseException:
      mirror.finish(patience_secs=min(patience_secs, 20.0))
      raise
    finally:
      mirror.stop()
  finally:
    owner.release()


def take_up(store: Store, folder: pathlib.Path, *, say: Callable[[str], None]) -> MirrorState:
  """Makes a run's local folder the newest that there is of it: downloads it, or leaves it as it is.

  Raises: RemoteError if both it and the bucket went on from where they were equal, or the bucket has something else.
  """
  manifest, state = store.read_manifest(), MirrorState.load(folder)
  has_run = (folder / _CONFIG_FILE).is_file()
  if manifest is None:
    _refuse_foreign(store)
  if manifest is None or not has_run and _CONFIG_FILE not in manifest.loose:
    return _begin(store, folder)
  if has_run and state is not None and manifest.token in (state.base.token, state.pending):
    return dataclasses.replace(state, base=manifest, pending="")
  if has_run:
    base = state.base.steps() if state is not None else set()
    ahead, went_on = _steps_of(folder) - base, manifest.steps() - base
    if (ahead or (folder / _RESULTS_FILE).is_file()) and went_on:
      raise RemoteError(
          f"workdir={store.url!r} went on in two places: {folder} has {_newest(ahead)}, which the bucket lacks, and "
          f"the bucket has {_newest(went_on)} of another machine; give another --workdir, or remove that folder to go "
          "on from the bucket")
    if not went_on:
      sent = {} if state is None else {
          name: known for name, known in state.sent.items() if manifest.fixed.get(name) == known[1]}
      return MirrorState(store.url, manifest, sent=sent)
  return _download_run(store, manifest, folder, say)


def _refuse_foreign(store: Store) -> None:
  try:
    store.read(_CONFIG_FILE)
  except FileNotFoundError:
    return
  except Exception as error:  # clients of stores have no error in common
    raise store.unreadable(error) from error
  raise RemoteError(f"workdir={store.url!r} has files of a run but no {MANIFEST_FILE}, so it was not uploaded by one; "
                    "copy it to this machine (gcloud storage cp -r) and give that folder, or give another --workdir")


def _begin(store: Store, folder: pathlib.Path) -> MirrorState:
  """Of a run of which the bucket has nothing. It gets an empty manifest: what follows is known as this run's."""
  state = MirrorState(store.url, Manifest())
  with _telling_of(store, folder):
    folder.mkdir(parents=True, exist_ok=True)
    state.save(folder)
    store.write_manifest(state.base)
  return state


def _download_run(store: Store, manifest: Manifest, folder: pathlib.Path, say: Callable[[str], None]) -> MirrorState:
  """The newest checkpoint that is whole, and all but the other ones. The folder is there when all of it is."""
  say(f"downloading {store.url} to {folder}")
  new = folder.with_name(folder.name + ".download")
  steps = {step for step in manifest.steps() if step.startswith("checkpoints/")}
  if "initial/_CHECKPOINT_METADATA" not in manifest.fixed:
    steps = steps or manifest.steps()  # fine-tuning's, of use until it is over
  plain = [name for name in manifest.fixed if name_of_step(name) is None and not name.startswith("rollout_segments/")]
  with _telling_of(store, folder):
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    largest = max((sum(size for size, _ in manifest.files_of(step).values()) for step in steps), default=0)
    rest = sum(size for name, (size, _) in manifest.fixed.items() if name_of_step(name) is None)
    bar = _Bar(f"downloading {store.url}", rest + largest)
    try:
      _download(store, manifest, [*plain, *manifest.loose], new, bar)
    except Damaged as error:
      raise RemoteError(f"workdir={store.url!r} is damaged ({error}); give another --workdir") from error
    taken = _newest_whole(store, manifest, steps, new, bar, say)
    bar.close()
    sent = {name: (stamp, manifest.fixed.get(name, (stamp[0], ""))) for name, stamp in files_of(new).items()}
    elsewhere = {step for step in manifest.steps() - {taken} if step.startswith("checkpoints/")}
    is_tba = taken is not None and taken.startswith("checkpoints/")
    state = MirrorState(store.url, manifest, sent=sent, elsewhere=elsewhere,
                        taken_up=number_of_step(taken) if is_tba else -1)
    state.save(new)
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(new, folder)
  return state


def _newest_whole(store: Store, manifest: Manifest, steps: set[str], into: pathlib.Path, bar: _Bar,
                  say: Callable[[str], None]) -> str | None:
  """Downloads a checkpoint and what it needs. None if there are none. Raises: RemoteError if none is whole."""
  for step in sorted(steps, key=number_of_step, reverse=True):
    try:
      _download(store, manifest, manifest.files_of(step), into, bar)
      segments = segments_of_step(into, step)
      lost = [name for name in segments if name not in manifest.fixed]
      if lost:
        raise Damaged(f"{store.url}/{lost[0]} is missing")
      _download(store, manifest, [name for name in segments if not (into / name).exists()], into, bar)
      return step
    except Damaged as error:
      say(f"error: {step} of {store.url} is not whole ({error}); trying the one before")
      shutil.rmtree(into / step, ignore_errors=True)
      shutil.rmtree(into / "rollout_segments", ignore_errors=True)
  if steps:
    raise RemoteError(f"workdir={store.url!r}: none of {sorted(steps, key=number_of_step)} is whole; give another "
                      "--workdir")
  return None


class _Bar:
  """Progress of a download in bytes. Safe from several threads."""

  def __init__(self, text: str, of_bytes: int):
    self._update, self._of, self._done, self._lock = bytes_bar(text), max(1, of_bytes), 0, threading.Lock()

  def add(self, num_bytes: int) -> None:
    with self._lock:
      self._done += num_bytes
      self._update(min(self._done, self._of - 1), self._of)

  def close(self) -> None:
    self._update(self._of, self._of)


def _download(store: Store, manifest: Manifest, names: Iterable[str], into: pathlib.Path, bar: _Bar) -> None:
  def one(name: str) -> None:
    store.download(name, into / name, manifest.fixed.get(name))
    bar.add(manifest.fixed.get(name, (0, ""))[0])

  in_parallel(one, names)


@contextlib.contextmanager
def _telling_of(store: Store, folder: pathlib.Path) -> Iterator[None]:
  """Errors of the local disk and of the store become RemoteErrors."""
  try:
    yield
  except (RemoteError, Damaged):
    raise
  except Exception as error:  # clients of stores have no error in common
    if isinstance(error, OSError) and error.errno in DISK_ERRORS | {errno.EACCES, errno.EPERM}:
      raise RemoteError(f"{folder} cannot be written ({error.strerror}); make room there, or set XDG_CACHE_HOME (runs) "
                        "or TMPDIR (copies to read) to a folder elsewhere") from error
    raise store.unreadable(error) from error


def _steps_of(folder: pathlib.Path) -> set[str]:
  return {step for step in map(name_of_step, files_of(folder)) if step}


def _newest(steps: set[str]) -> str:
  return max(steps, key=number_of_step, default="its results")


# --- Readers ---


@contextlib.contextmanager
def local_copy(workdir: str | os.PathLike[str], *, checkpoint: bool, step: int | None = None, version_0: bool = False
               ) -> Iterator[pathlib.Path]:
  """The folder of a run to read: itself, or for a URL a temporary copy of what is needed. The run may be going on.

  Args:
    checkpoint: the trained parameters of `step` (default: the newest) and the model, instead of logs and results.
    version_0: its parameters, too; they are always there where the checkpoint holds adapters.
  Raises: RemoteError if there is no such run or step in the bucket, or the bucket cannot be read.
  """
  if not is_remote(workdir):
    yield pathlib.Path(workdir)
    return
  store = Store(str(workdir))
  with tempfile.TemporaryDirectory(prefix="tba_jax_") as top:
    folder = pathlib.Path(top) / store.url.rpartition("/")[2]
    for left in reversed(range(_NUM_TRIES)):
      manifest = store.read_manifest()
      if manifest is None:
        raise RemoteError(f"{store.url} holds no run (there is no {MANIFEST_FILE} in it); give the --workdir of one")
      names = _of_checkpoint(store, manifest, step, version_0) if checkpoint else [
          name for name in manifest.loose if name.partition("/")[0] not in ("tensorboard", "profile", "wandb")]
      shutil.rmtree(folder, ignore_errors=True)
      try:
        with _telling_of(store, folder):
          folder.mkdir(parents=True)
          bar = _Bar(f"downloading {store.url}", sum(manifest.fixed.get(name, (0, ""))[0] for name in names))
          _download(store, manifest, names, folder, bar)
          bar.close()
        break
      except Damaged as error:  # also what the run replaces while it is read
        if not left:
          raise RemoteError(f"{store.url} is damaged ({error})") from error
    yield folder


@contextlib.contextmanager
def copy_of_config(url: str) -> Iterator[pathlib.Path]:
  """A folder with the config.json of a run in a bucket, or with nothing if there is none."""
  store = Store(url)
  manifest = store.read_manifest()
  with tempfile.TemporaryDirectory(prefix="tba_jax_") as top:
    if manifest is not None and _CONFIG_FILE in manifest.loose:
      try:
        with _telling_of(store, pathlib.Path(top)):
          store.download(_CONFIG_FILE, pathlib.Path(top) / _CONFIG_FILE)
      except Damaged as error:
        raise RemoteError(f"workdir={store.url!r} is damaged ({error}); give another --workdir") from error
    yield pathlib.Path(top)


def _of_checkpoint(store: Store, manifest: Manifest, step: int | None, version_0: bool) -> list[str]:
  steps = sorted(number_of_step(found) for found in manifest.steps() if found.startswith("checkpoints/"))
  if not steps:
    raise RemoteError(f"{store.url}: no checkpoint there; train first, or give the workdir of a run")
  if step is not None and step not in steps:
    raise RemoteError(f"step={step}: {store.url} has no such checkpoint; it has {steps}")
  chosen = f"checkpoints/{steps[-1] if step is None else step}"
  folders = ["model", *(["initial"] if version_0 or "model/lora.json" in manifest.fixed else [])]
  read = [name for name in manifest.files_of(chosen) if name.removeprefix(chosen + "/").partition("/")[0] not in (
      "buffer", "published", "evaluations", "reference")]
  return [_CONFIG_FILE, *read, *(name for name in manifest.fixed if name.partition("/")[0] in folders)]

"""The objects of one run in a bucket, and the manifest that says which of them belong together.

A run's files lie in the bucket under their names in the workdir; beside them are `mirror.json`, the manifest, and
`owner.json` (`owner.py`). An object store replaces one object at once and nothing more, so the manifest is one object:
what it names was uploaded before it, what it no longer names is removed after it. A checkpoint is there when it is
named. Nothing here lists a bucket, renames or appends.

Files that never change once they have their name (checkpoints, segments of the replay buffer, version 0, the model) are
named with their size and checksum: `fixed`. All others (logs, settings, results) are `loose`: taken as they are, for a
resumed run cuts its logs back to its checkpoint.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import logging
import pathlib
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

SCHEME = "gs://"
MANIFEST_FILE, OWNER_FILE = "mirror.json", "owner.json"
STATE_FILE = ".mirror.json"  # in the local folder: what of it is in the bucket
_FORMAT = 1
_CHUNK_BYTES = 8 * 2**20
_NUM_AT_ONCE = 8
_STEP = re.compile(r"((?:fine_tuning/)?checkpoints/\d+)/.")
_FIXED_FOLDERS = ("rollout_segments", "initial", "model")


class RemoteError(ValueError):
  """What a user has to know about a workdir in a bucket: name, what was found, the way out."""


class Damaged(Exception):
  """An object is missing, or not what the manifest says."""


def is_remote(workdir: Any) -> bool:
  """Whether a workdir is a URL of a bucket."""
  return str(workdir).startswith(SCHEME)


def workdir_argument(text: str) -> pathlib.Path | str:
  """A workdir of a command line: a path, or a URL as it is."""
  return text if is_remote(text) else pathlib.Path(text)


def local_folder(url: str, cache: pathlib.Path) -> pathlib.Path:
  """Where the run of a URL works on this machine."""
  path = url.rstrip("/").removeprefix(SCHEME)
  readable = re.sub(r"[^A-Za-z0-9._-]+", "_", path)[-80:]
  return cache / "workdirs" / f"{readable}-{hashlib.blake2b(path.encode(), digest_size=4).hexdigest()}"


def name_of_step(name: str) -> str | None:
  """"checkpoints/20" of a file of that checkpoint, also of fine-tuning's; None of any other file."""
  found = _STEP.match(name)
  return found[1] if found else None


def number_of_step(step: str) -> int:
  """20 of "checkpoints/20"."""
  return int(step.rpartition("/")[2])


def is_fixed(name: str) -> bool:
  """Whether a file never changes once it has its name."""
  return name_of_step(name) is not None or name.partition("/")[0] in _FIXED_FOLDERS


def is_mirrored(name: str) -> bool:
  """Whether a file of a workdir goes to the bucket: not while it has no name yet, no lock, and nothing unreadable."""
  return not (name.endswith(".tmp") or ".orbax-checkpoint-tmp" in name or name in (".lock", STATE_FILE)
              or name.startswith("unreadable_checkpoints/"))


@dataclasses.dataclass(frozen=True)
class Manifest:
  """Which objects belong together.

  `fixed`: bytes and checksum by name. `token` differs between any two manifests.
  """

  fixed: Mapping[str, tuple[int, str]] = dataclasses.field(default_factory=dict)
  loose: Sequence[str] = ()
  token: str = dataclasses.field(default_factory=lambda: secrets.token_hex(8))

  def steps(self) -> set[str]:
    """Names of the checkpoints, as "checkpoints/20"."""
    return {step for step in map(name_of_step, self.fixed) if step}

  def files_of(self, step: str) -> dict[str, tuple[int, str]]:
    return {name: what for name, what in self.fixed.items() if name.startswith(step + "/")}

  def to_json(self) -> dict[str, Any]:
    return {"format": _FORMAT, "token": self.token, "loose": sorted(self.loose),
            "fixed": {name: list(self.fixed[name]) for name in sorted(self.fixed)}}

  @classmethod
  def from_json(cls, found: Mapping[str, Any]) -> Manifest:
    """Raises: ValueError, KeyError or TypeError if it is none."""
    if found["format"] != _FORMAT:
      raise ValueError(f"format {found['format']}")
    return cls({name: (size, checksum) for name, (size, checksum) in found["fixed"].items()}, tuple(found["loose"]),
               found["token"])


class Store:
  """The objects below one URL. Safe from several threads; whatever the store's client raises comes out."""

  def __init__(self, url: str):
    """Raises: RemoteError if the URL names no folder of a bucket, or what reads buckets is not installed."""
    self.url = url.rstrip("/")
    parts = self.url.removeprefix(SCHEME).split("/")
    if not is_remote(url) or len(parts) < 2 or any(part in ("", ".", "..") for part in parts):
      raise RemoteError(f"workdir={url!r} must be {SCHEME}BUCKET/FOLDER, a folder in a bucket")
    _check_client(url)
    from etils import epath

    # Each try of a request that fails would be a traceback; what it comes to is told here.
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
    self._root = epath.Path(self.url)

  def read(self, name: str) -> bytes:
    """Raises: FileNotFoundError if there is no such object."""
    with (self._root / name).open("rb") as file:
      return file.read()

  def write(self, name: str, payload: bytes) -> None:
    """Replaces one object at once."""
    with (self._root / name).open("wb") as file:
      file.write(payload)

  def remove(self, name: str) -> None:
    (self._root / name).unlink(missing_ok=True)

  def upload(self, path: pathlib.Path, name: str, *, on_bytes: Callable[[int], None] = lambda num_bytes: None
             ) -> tuple[int, str]:
    """Returns bytes and checksum of what was read. Raises: FileNotFoundError if the file is gone.

    `on_bytes` is told how many have gone to the store, of files of more than 8 MiB.
    """
    with open(path, "rb") as source, (self._root / name).open("wb") as target:
      return _copy(source, target, on_bytes)

  def download(self, name: str, path: pathlib.Path, expected: tuple[int, str] | None = None) -> None:
    """Raises: Damaged if the object is missing or not as expected; OSError if the file cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
      source = (self._root / name).open("rb")
    except FileNotFoundError as error:
      raise Damaged(f"{self.url}/{name} is missing") from error
    with open(path, "wb") as target:
      try:
        with source as opened:
          found = _copy(opened, target)
      except FileNotFoundError as error:
        raise Damaged(f"{self.url}/{name} is missing") from error
    if expected is not None and found != tuple(expected):
      raise Damaged(f"{self.url}/{name} has {found[0]} bytes of {expected[0]}, or their checksum is another")

  def read_manifest(self) -> Manifest | None:
    """None where there is none. Raises: RemoteError if the bucket cannot be read, or holds something else there."""
    try:
      payload = self.read(MANIFEST_FILE)
    except FileNotFoundError:
      return None
    except Exception as error:  # clients of stores have no error in common
      raise self.unreadable(error) from error
    try:
      return Manifest.from_json(json.loads(payload))
    except (ValueError, KeyError, TypeError) as error:
      raise RemoteError(f"{self.url}/{MANIFEST_FILE} is not what this version writes ({type(error).__name__}: {error}"
                        "); go on with the version of this program that wrote it, or give another --workdir") from error

  def write_manifest(self, manifest: Manifest) -> None:
    self.write(MANIFEST_FILE, json.dumps(manifest.to_json()).encode())

  def unreadable(self, error: Exception) -> RemoteError:
    """What to tell of an error of the store at the start."""
    return RemoteError(f"workdir={self.url!r} cannot be reached ({first_line(error)}); are the bucket's name, the "
                       "credentials (gcloud auth application-default login) and their rights (to read, write and "
                       "delete objects) right?")


def first_line(error: BaseException) -> str:
  """An error in one line."""
  return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def in_parallel(do: Callable[[str], None], names: Iterable[str]) -> None:
  """`do` of each name, several at once. Raises the first error, when what was under way is over.

  By threads that do not keep the process from ending, as those of concurrent.futures would while a store hangs.
  """
  waiting, errors, lock = list(names)[::-1], [], threading.Lock()

  def work() -> None:
    while True:
      with lock:
        if not waiting or errors:
          return
        name = waiting.pop()
      try:
        do(name)
      except Exception as error:  # raised below, in the caller's thread
        errors.append(error)

  threads = [threading.Thread(target=work, daemon=True) for _ in range(min(_NUM_AT_ONCE, len(waiting)))]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  if errors:
    raise errors[0]


def _check_client(url: str) -> None:
  if importlib.util.find_spec("tensorflow") is not None:
    return  # epath then reads by it
  import fsspec

  try:
    fsspec.get_filesystem_class("gcs")
  except ImportError as error:
    raise RemoteError(f"workdir={url!r} needs gcsfs, which is not installed; pip install -r requirements-gcs.txt"
                      ) from error


def _copy(source: Any, target: Any, on_bytes: Callable[[int], None] = lambda num_bytes: None) -> tuple[int, str]:
  size, digest = 0, hashlib.blake2b(digest_size=16)
  while chunk := source.read(_CHUNK_BYTES):
    target.write(chunk)
    digest.update(chunk)
    if size:  # of the first a client may have kept all
      on_bytes(size)
    size += len(chunk)
  return size, digest.hexdigest()

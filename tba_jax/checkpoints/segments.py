"""Rows of the replay buffer on disk: immutable, checksummed files that are added and removed whole, never changed.

A row is written once, under a key that changes if its contents do. So a checkpoint costs what is new, not what is
there. It knows nothing of buffers: rows are keys, lengths and packed columns.

A file is one line of JSON {"bytes", "checksum"} and then arrays in the safetensors format.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import secrets
import threading
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import safetensors.numpy

SEGMENT_ROWS = 8192  # of one file at most
_SPARSE = 0.25  # a segment of which less than this share is alive is written anew, so that the dead ones can go


@dataclasses.dataclass(frozen=True)
class _Segment:
  name: str
  keys: np.ndarray  # int64 [n], each once


class DamagedSegment(ValueError):
  """A segment file is missing, cut, or not what was written."""


class SegmentStore:
  """The segments of one run, in the order that a checkpoint lists them.

  One thread may write while another asks: rows that are promised count as written.
  """

  def __init__(self, folder: str | os.PathLike, columns: Mapping[str, type]):
    """`columns`: name and dtype of what there is for each token of a row."""
    self._folder, self._columns = pathlib.Path(folder), dict(columns)
    self._segments: list[_Segment] = []
    self._lock = threading.Lock()

  @property
  def names(self) -> list[str]:
    """What a checkpoint has to remember."""
    with self._lock:
      return [segment.name for segment in self._segments]

  def missing(self, keys: np.ndarray) -> np.ndarray:
    """Which of the live rows have to be written before a checkpoint of them: bool [n].

    Those that no segment holds, and those of segments that are mostly dead; these segments are not listed any more.

    Args:
      keys: of all live rows, int64 [n], each once.
    """
    held, kept = np.zeros(len(keys), bool), []
    with self._lock:
      for segment in self._segments:
        alive = np.isin(keys, segment.keys, assume_unique=True)
        if alive.sum() >= _SPARSE * len(segment.keys):
          kept.append(segment)
          held |= alive
      self._segments = kept
    return ~held

  def promise(self, keys: np.ndarray) -> str:
    """Lists a segment of rows that are in the caller's hands, each key once. Returns its name, for `fulfil`."""
    name = f"{int(keys[0]):012d}-{secrets.token_hex(4)}.rows"  # a resumed run may repeat keys, never names
    with self._lock:
      self._segments.append(_Segment(name, np.ascontiguousarray(keys)))
    return name

  def fulfil(self, name: str, keys: np.ndarray, lengths: np.ndarray, columns: Mapping[str, np.ndarray]) -> None:
    """Writes a promised segment; it is on disk when this returns.

    Raises: OSError if it cannot be written. It is then not listed any more, and nothing of its file is left.
    """
    arrays = {key: np.ascontiguousarray(columns[key], dtype) for key, dtype in self._columns.items()}
    arrays |= {"key": np.ascontiguousarray(keys), "length": np.ascontiguousarray(lengths)}
    try:
      self._write_file(name, safetensors.numpy.save(arrays))
    except BaseException:
      with self._lock:
        self._segments = [segment for segment in self._segments if segment.name != name]
      raise

  def write(self, keys: np.ndarray, lengths: np.ndarray, columns: Mapping[str, np.ndarray]) -> list[str]:
    """Appends rows as new segments, on disk when it returns; returns their names.

    Args:
      keys, lengths: int64, int32 [n].
      columns: entries of the rows, one row after the other, [sum of lengths] each.
    Raises: OSError if they cannot be written; nothing of the file that failed is left.
    """
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    names = []
    for first in range(0, len(keys), SEGMENT_ROWS):
      last = min(first + SEGMENT_ROWS, len(keys))
      part = {name: columns[name][ends[first]:ends[last]] for name in self._columns}
      names.append(self.promise(keys[first:last]))
      self.fulfil(names[-1], keys[first:last], lengths[first:last], part)
    return names

  def _write_file(self, name: str, payload: bytes) -> None:
    self._folder.mkdir(parents=True, exist_ok=True)
    header = json.dumps({"bytes": len(payload), "checksum": _checksum(payload)}) + "\n"
    temporary = self._folder / (name + ".tmp")
    try:
      with open(temporary, "wb") as file:
        file.write(header.encode())
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())
      os.replace(temporary, self._folder / name)
    except OSError:
      temporary.unlink(missing_ok=True)
      raise
    folder = os.open(self._folder, os.O_RDONLY)
    try:
      os.fsync(folder)  # the name, too, must outlive a power cut
    finally:
      os.close(folder)

  def load(self, names: Sequence[str], keys: np.ndarray) -> dict[str, np.ndarray]:
    """Takes up the segments of a checkpoint and reads rows from them.

    Args:
      names: as the checkpoint lists them; where two hold a row, it is the same.
      keys: of the rows wanted, int64 [n], each once.

    Returns: columns packed in the order of `keys`.
    Raises: DamagedSegment; also if a row is in none of them. This store is then as it was.
    """
    segments, parts = [], []
    order = np.argsort(keys, kind="stable")
    wanted = np.ones(len(keys), bool)
    for name in names:
      arrays = self._read_file(name)
      segments.append(_Segment(name, arrays["key"]))
      chosen = np.isin(arrays["key"], keys[wanted], assume_unique=True)
      places = order[np.searchsorted(keys, arrays["key"][chosen], sorter=order)]
      wanted[places] = False
      starts = np.cumsum(arrays["length"], dtype=np.int64) - arrays["length"]
      parts.append((places, starts[chosen], arrays["length"][chosen], arrays))
    if wanted.any():
      raise DamagedSegment(f"{self._folder}: {int(wanted.sum())} rows of the buffer are in none of the {len(names)} "
                           "segments that the checkpoint lists")
    columns = self._gather(parts, len(keys))
    with self._lock:
      self._segments = segments
    return columns

  def _gather(self, parts: Sequence[tuple], num_rows: int) -> dict[str, np.ndarray]:
    """Rows of several segments at their places, one after the other."""
    lengths = np.zeros(num_rows, np.int64)
    for places, _, part_lengths, _ in parts:
      lengths[places] = part_lengths
    starts = np.cumsum(lengths) - lengths
    columns = {name: np.empty(int(lengths.sum()), dtype) for name, dtype in self._columns.items()}
    for places, sources, part_lengths, arrays in parts:
      source, target = _ranges(sources, part_lengths), _ranges(starts[places], part_lengths)
      for name, column in columns.items():
        column[target] = arrays[name][source]
    return columns

  def _read_file(self, name: str) -> dict[str, np.ndarray]:
    path = self._folder / name
    try:
      with open(path, "rb") as file:
        header = json.loads(file.readline())
        payload = file.read()
    except (OSError, ValueError) as error:
      raise DamagedSegment(f"{path} cannot be read ({error})") from error
    if len(payload) != header["bytes"] or _checksum(payload) != header["checksum"]:
      raise DamagedSegment(f"{path} is cut or damaged: {len(payload)} bytes of {header['bytes']}, or their checksum is "
                           "another")
    return safetensors.numpy.load(payload)

  def remove_except(self, names: Collection[str]) -> None:
    """Deletes the files that neither the given checkpoints nor the current list need."""
    needed = {*names, *self.names}
    if self._folder.is_dir():
      for path in self._folder.iterdir():
        if path.name not in needed:
          path.unlink()


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
  """start, start + 1, ..., start + length - 1 of each range, one after the other."""
  ends = np.cumsum(lengths, dtype=np.int64)
  return np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(starts - (ends - lengths), lengths)


def _checksum(payload: bytes) -> str:
  return hashlib.blake2b(payload, digest_size=16).hexdigest()

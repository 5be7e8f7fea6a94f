"""Trees of arrays on their way between processes: bytes in bounded chunks with checksums, and what they are.

A chunk goes into an object store as it is, so a model of any size passes with one chunk's worth of memory beside it,
and what arrives is read in place where the store allows.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

CHUNK_BYTES = 256 * 2**20


class Parcel(NamedTuple):
  """A tree of arrays, `chunks` being wherever `put` has put them."""

  treedef: Any
  leaves: tuple[tuple[tuple[int, ...], str], ...]  # shape and dtype
  checksums: tuple[int, ...]  # CRC-32 of each chunk
  chunks: tuple[Any, ...]


def pack(tree: Any, put: Callable[[np.ndarray], Any], *, chunk_bytes: int = CHUNK_BYTES) -> Parcel:
  """Makes a parcel of a tree.

  Args:
    tree: arrays of numpy or jax, the latter addressable from this process.
    put: stores a chunk (uint8 [N]) and returns what `unpack` is given for it; it may keep the array.
    chunk_bytes: size of all chunks but the last.
  """
  leaves, treedef = jax.tree.flatten(tree)
  described = tuple((tuple(leaf.shape), np.dtype(leaf.dtype).name) for leaf in leaves)
  checksums, chunks = [], []
  for chunk in _chunks(leaves, chunk_bytes):
    checksums.append(zlib.crc32(chunk))
    chunks.append(put(chunk))
  return Parcel(treedef, described, tuple(checksums), tuple(chunks))


def _chunks(leaves: Sequence[Any], chunk_bytes: int) -> Iterator[np.ndarray]:
  parts, size = [], 0
  for leaf in leaves:
    left = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
    while left.size:
      part, left = left[: chunk_bytes - size], left[chunk_bytes - size :]
      parts.append(part)
      size += part.size
      if size == chunk_bytes:
        yield _joined(parts)
        parts, size = [], 0
  if parts:
    yield _joined(parts)


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
  return parts[0] if len(parts) == 1 else np.concatenate(parts)


def unpack(parcel: Parcel, chunks: Sequence[np.ndarray]) -> Any:
  """The tree again, as numpy arrays, which share the chunks' memory where a leaf lies in one chunk.

  Args:
    chunks: what `parcel.chunks` stand for, uint8 [N].
  Raises: ValueError if a chunk is not what was sent.
  """
  for number, (chunk, checksum) in enumerate(zip(chunks, parcel.checksums, strict=True)):
    if zlib.crc32(chunk) != checksum:
      raise ValueError(f"chunk {number} of {len(chunks)} of a parcel arrived with other bytes than were sent "
                       f"(CRC-32 {zlib.crc32(chunk):08x}, sent {checksum:08x})")
  left = list(reversed([np.asarray(chunk) for chunk in chunks]))

  def take(num_bytes: int) -> np.ndarray:
    parts = []
    while num_bytes:
      chunk = left.pop()
      part, rest = chunk[:num_bytes], chunk[num_bytes:]
      if rest.size:
        left.append(rest)
      parts.append(part)
      num_bytes -= part.size
    return _joined(parts) if parts else np.empty(0, np.uint8)

  leaves = []
  for shape, name in parcel.leaves:
    dtype = jax.numpy.dtype(name)
    found = take(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
    if found.ctypes.data % dtype.itemsize:  # a view must begin at a multiple of its items
      found = found.copy()
    leaves.append(found.view(dtype).reshape(shape))
  return jax.tree.unflatten(parcel.treedef, leaves)

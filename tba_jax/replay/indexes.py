"""Finding rows of the replay buffer: equal responses by their tokens, and what has become too old by version.

Neither index is saved: both follow from the rows.
"""

from __future__ import annotations

import array

import numpy as np

from tba_jax.replay.store import RowStore
from tba_jax.types import RolloutGroup


class ResponseIndex:
  """Finds the live row of a prompt that holds given tokens: by hash, then by comparing the tokens themselves.

  Rows of one hash form a chain through `_chain`. Hashes differ between processes and are never saved.
  """

  def __init__(self, capacity: int):
    self._heads: dict[int, int] = {}
    self._chain = np.empty(capacity, np.int32)
    self._keys = np.empty(capacity, np.int64)

  def find(self, key: int, prompt_id: int, tokens: np.ndarray, store: RowStore) -> int:
    """The row, or -1."""
    row = self._heads.get(key, -1)
    while row >= 0:
      length = int(store.length[row])
      if (
        length == len(tokens)
        and store.prompt_id[store.slot[row]] == prompt_id
        and np.array_equal(store.tokens[row, :length], tokens)
      ):
        return row
      row = int(self._chain[row])
    return -1

  def add(self, key: int, row: int) -> None:
    self._keys[row] = key
    self._chain[row] = self._heads.get(key, -1)
    self._heads[key] = row

  def remove(self, row: int) -> None:
    """Takes a row out of the chain of its hash."""
    key = int(self._keys[row])
    following = int(self._chain[row])
    head = self._heads[key]
    if head != row:
      while self._chain[head] != row:
        head = int(self._chain[head])
      self._chain[head] = following
    elif following >= 0:
      self._heads[key] = following
    else:
      del self._heads[key]


class VersionIndex:
  """Rows by the version of their oldest token. Entries of rows that have left stay until their version is too old."""

  def __init__(self, capacity: int):
    self._capacity = capacity
    self._handles: dict[int, array.array] = {}

  def add(self, rows: np.ndarray, store: RowStore) -> None:
    """Remembers live rows."""
    versions, handles = store.oldest_version[rows].tolist(), store.handles(rows).tolist()
    for version, handle in zip(versions, handles, strict=True):
      self._handles.setdefault(version, array.array("q")).append(handle)
    for version in set(versions):
      # Mostly rows that have left: a trainer that stands still while searchers go on must not cost memory for ever.
      if len(self._handles[version]) > 2 * self._capacity:
        live = store.live_rows(np.array(self._handles[version]))
        self._handles[version] = array.array("q", store.handles(live).tolist())

  def take_older(self, version: int, store: RowStore) -> list[int]:
    """The live rows whose oldest token is older than `version`, by age; they are forgotten here."""
    old = sorted(key for key in self._handles if key < version)
    return [row for key in old for row in store.live_rows(np.array(self._handles.pop(key))).tolist()]


def distinct_samples(group: RolloutGroup) -> tuple[np.ndarray, list[int]]:
  """The samples of a group without those that a later sample equals, int64 [n], and the hashes of their responses."""
  tokens = np.ascontiguousarray(group.tokens, np.int32)
  last: dict[bytes, int] = {}
  for sample, length in enumerate(group.lengths.tolist()):
    content = tokens[sample, :length].tobytes()
    last.pop(content, None)
    last[content] = sample
  return np.fromiter(last.values(), np.int64, len(last)), [hash_response(group.prompt_id, content) for content in last]


def hash_response(prompt_id: int, tokens: bytes) -> int:
  return hash((prompt_id, tokens))

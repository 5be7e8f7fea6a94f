"""Responses that are almost the same: by edit distance of their tokens, over all rows of a prompt at once.

Source: the replay buffer of Lee et al. 2024, arXiv:2405.18540, keeps the better of two attacks whose edit distance is
less than a quarter of their summed length. A new row is compared with all others; what cannot be near, by length and by
which tokens occur, is left out of the exact comparison.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tba_jax.replay.store import RowStore
from tba_jax.types import RolloutGroup

_BITS = 128


def edit_distances(tokens: np.ndarray, others: np.ndarray, lengths: np.ndarray) -> np.ndarray:
  """Levenshtein distance of tokens [n] to each of `others` [C, T], of which the first `lengths` [C] count; int [C]."""
  at = np.arange(others.shape[1] + 1, dtype=np.int16)
  distances = np.broadcast_to(at, (len(others), len(at))).copy()  # of no token to the first 0, 1, ... of each other
  for token in tokens:
    changed = np.minimum(distances[:, 1:] + 1, distances[:, :-1] + (others != token))
    whole = np.concatenate([distances[:, :1] + 1, changed], axis=1)
    distances = np.minimum.accumulate(whole - at, axis=1) + at  # and insertions, from any place to the left
  return distances[np.arange(len(others)), lengths]


def signatures(tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
  """Which tokens occur in each row of [n, T], hashed to bits: uint64 [n, 2]."""
  bit = (tokens.astype(np.uint32) * np.uint32(2654435761) >> np.uint32(25)).astype(np.uint64)  # the upper 7 bits
  real = np.arange(tokens.shape[1]) < lengths[:, None]
  words = [np.where(real & (bit >> np.uint64(6) == word), np.uint64(1) << (bit & np.uint64(63)), np.uint64(0))
           for word in range(_BITS // 64)]
  return np.stack([np.bitwise_or.reduce(word, axis=1) for word in words], axis=1)


def may_be_near(
  signature: np.ndarray, length: int, others: np.ndarray, lengths: np.ndarray, *, share: float
) -> np.ndarray:
  """bool [C]: whether rows of these signatures [C, 2] and lengths can be near one of `signature` [2] and `length`.

  Each token that occurs in only one of two rows costs an edit, and so does each that one of them is longer by.
  """
  missing = np.bitwise_count(signature & ~others).sum(axis=1, dtype=np.int64)
  extra = np.bitwise_count(others & ~signature).sum(axis=1, dtype=np.int64)
  least = np.maximum(np.maximum(missing, extra), np.abs(lengths - length))
  return least < share * (length + lengths)


class NearRows:
  """Finds the rows of a store that a response is near to: whose distance is less than `share` of the two lengths
  together."""

  def __init__(self, capacity: int, *, share: float):
    self._signatures, self._share = np.zeros((capacity, _BITS // 64), np.uint64), share

  def enter(self, rows: np.ndarray, store: RowStore) -> None:
    """These rows hold something new."""
    self._signatures[rows] = signatures(store.tokens[rows], store.length[rows])

  def find(self, tokens: np.ndarray, prompt_id: int, store: RowStore) -> np.ndarray:
    """Live rows of the prompt, int64."""
    rows = store.rows_of(prompt_id)
    own = signatures(tokens[None], np.array([len(tokens)]))[0]
    rows = rows[may_be_near(own, len(tokens), self._signatures[rows], store.length[rows], share=self._share)]
    distances = edit_distances(tokens, store.tokens[rows], store.length[rows])
    return rows[distances < self._share * (len(tokens) + store.length[rows])]

  def keep_better(
    self, group: RolloutGroup, samples: np.ndarray, store: RowStore, *, remove: Callable[[list[int]], None]
  ) -> np.ndarray:
    """Places in `samples` (distinct ones of the group) of those that are near no better one; int64, ascending.

    Rows that these are near to and better than are handed to `remove`, which takes them out of the store. Of a response
    that a row holds already the new one is kept, whatever its reward.
    """
    tokens, lengths, rewards = group.tokens[samples], group.lengths[samples], group.rewards[samples]
    kept = []
    for place in self.best_of_each(tokens, lengths, rewards).tolist():
      response = tokens[place, : lengths[place]]
      rows = self.find(response, group.prompt_id, store)
      same = [row for row in rows.tolist() if np.array_equal(store.tokens[row, : store.length[row]], response)]
      if same or not (store.reward[rows] >= rewards[place]).any():
        kept.append(place)
        remove([row for row in rows.tolist() if row not in same])
    return np.array(kept, np.int64)

  def best_of_each(self, tokens: np.ndarray, lengths: np.ndarray, rewards: np.ndarray) -> np.ndarray:
    """Of responses [n, T] those of which no two are near, the best by reward of what is; int64, ascending."""
    kept: list[int] = []
    for row in np.argsort(-rewards, kind="stable").tolist():
      distances = edit_distances(tokens[row, : lengths[row]], tokens[kept], lengths[kept])
      if not (distances < self._share * (lengths[row] + lengths[kept])).any():
        kept.append(row)
    return np.array(sorted(kept), np.int64)

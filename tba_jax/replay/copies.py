"""Rows of the replay buffer as they are copied out while it is in use, to be written to disk beside training."""

from __future__ import annotations

import threading

import numpy as np

from tba_jax.replay.store import RowStore

_COPY_ROWS = 256  # with the lock held


class RowCopies:
  """What `checkpoints.run_state.RunState.spill` needs of the buffer, which has the lock and the rows."""

  _lock: threading.Lock
  _store: RowStore

  def live_keys(self) -> tuple[np.ndarray, np.ndarray]:
    """Handles of all live rows, oldest first, and their keys, as `missing` of `state_dict` is asked for them."""
    with self._lock:
      rows = self._store.live_rows_unordered()
      handles, keys = self._store.handles(rows), self._store.keys(rows)
    order = np.argsort(handles, kind="stable")
    return handles[order], keys[order]

  def copy_rows(self, handles: np.ndarray) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Keys, lengths and packed token columns of those rows that are still live; a few at a time, so that nobody waits
    long for the buffer."""
    parts = []
    for first in range(0, len(handles), _COPY_ROWS):
      with self._lock:
        rows = self._store.live_rows(handles[first : first + _COPY_ROWS])
        parts.append((self._store.keys(rows), self._store.length[rows], self._store.pack(rows)))
    columns = {name: np.concatenate([part[2][name] for part in parts]) for name in self._store.token_columns}
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts]), columns

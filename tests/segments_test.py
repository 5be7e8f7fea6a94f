"""Segment files against a dictionary of rows: whatever lives and dies, what is read is what was written."""

from __future__ import annotations

import numpy as np
import pytest

from tba_jax.checkpoints import segments

COLUMNS = {"tokens": np.int32, "log_mu": np.float32}


def _row(arrival):
  rng = np.random.default_rng(arrival)
  length = int(rng.integers(1, 6))
  return {"tokens": rng.integers(0, 99, length).astype(np.int32), "log_mu": rng.random(length, np.float32)}


def _packed(arrivals):
  rows = [_row(arrival) for arrival in arrivals]
  lengths = np.array([len(row["tokens"]) for row in rows], np.int32)
  return lengths, {name: np.concatenate([row[name] for row in rows] or [np.zeros(0)]).astype(dtype)
                   for name, dtype in COLUMNS.items()}


def _checkpoint(store, alive):
  alive = np.array(sorted(alive), np.int64)
  fresh = alive[store.missing(alive)]
  lengths, columns = _packed(fresh)
  store.write(fresh, lengths, columns)
  return fresh


@pytest.mark.parametrize("seed", range(4))
def test_every_checkpoint_reads_back_its_rows_whatever_died_since(tmp_path, monkeypatch, seed):
  monkeypatch.setattr(segments, "SEGMENT_ROWS", 7)
  rng = np.random.default_rng(seed)
  store, alive, next_arrival, checkpoints = segments.SegmentStore(tmp_path, COLUMNS), set(), 0, []
  for _ in range(12):
    for _ in range(int(rng.integers(0, 20))):
      alive.add(next_arrival)
      next_arrival += 1
    if alive:
      num_lost = int(rng.integers(0, len(alive) // 2 + 1))
      alive -= set(rng.choice(sorted(alive), size=num_lost, replace=False).tolist())
    _checkpoint(store, alive)
    checkpoints.append((store.names, sorted(alive)))
    kept = checkpoints[-2:]
    store.remove_except({name for names, _ in kept for name in names})
    for names, rows in kept:
      found = segments.SegmentStore(tmp_path, COLUMNS).load(names, np.array(rows, np.int64))
      for name, expected in _packed(rows)[1].items():
        np.testing.assert_array_equal(found[name], expected)
        assert found[name].dtype == COLUMNS[name]


def test_only_what_is_new_is_written_and_sparse_segments_are_given_up(tmp_path):
  store = segments.SegmentStore(tmp_path, COLUMNS)
  assert _checkpoint(store, range(20)).tolist() == list(range(20))
  assert _checkpoint(store, range(5, 22)).tolist() == [20, 21]
  assert _checkpoint(store, [*range(15, 20), 20, 21]).tolist() == [], "a quarter is alive"
  assert _checkpoint(store, [17, 18, 19, 20, 21]).tolist() == [17, 18, 19], "less than a quarter: written anew"
  store.remove_except(())
  assert len(list(tmp_path.iterdir())) == 2 == len(store.names)


def test_a_resumed_store_goes_on_where_the_checkpoint_was(tmp_path):
  store = segments.SegmentStore(tmp_path, COLUMNS)
  _checkpoint(store, range(10))
  names = store.names
  _checkpoint(store, range(14))  # rolled back: the process died before the step that lists it
  resumed = segments.SegmentStore(tmp_path, COLUMNS)
  resumed.load(names, np.arange(10))
  assert _checkpoint(resumed, range(12)).tolist() == [10, 11]
  resumed.remove_except(resumed.names)
  assert sorted(path.name for path in tmp_path.iterdir()) == sorted(resumed.names)


@pytest.mark.parametrize(
    "damage, says", [(lambda path: path.write_bytes(path.read_bytes()[:-3]), "is cut or damaged"),
                     (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\x00"
                                                    if path.read_bytes()[-1] else path.read_bytes()[:-1] + b"\x01"),
                      "is cut or damaged"), (lambda path: path.write_bytes(b""), "cannot be read"),
                     (lambda path: path.unlink(), "cannot be read"),])
def test_damage_is_found(tmp_path, damage, says):
  store = segments.SegmentStore(tmp_path, COLUMNS)
  _checkpoint(store, range(10))
  damage(next(tmp_path.iterdir()))
  with pytest.raises(segments.DamagedSegment, match=says):
    segments.SegmentStore(tmp_path, COLUMNS).load(store.names, np.arange(10))


def test_rows_that_no_listed_segment_holds_are_an_error(tmp_path):
  store = segments.SegmentStore(tmp_path, COLUMNS)
  _checkpoint(store, range(10))
  with pytest.raises(segments.DamagedSegment, match="2 rows of the buffer are in none of the 1 segments"):
    store.load(store.names, np.arange(12))

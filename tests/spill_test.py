"""Rows of a real replay buffer that are written beside training: every checkpoint reads back as the whole state was."""

from __future__ import annotations

import errno
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollouts import make_buffer, make_group

from tba_jax.checkpoints import run_state, segments
from tba_jax.types import TrainState

SEGMENT_ROWS = 8


@pytest.fixture(autouse=True)
def small_segments(monkeypatch):
  monkeypatch.setattr(segments, "SEGMENT_ROWS", SEGMENT_ROWS)
  monkeypatch.setattr(run_state, "SEGMENT_ROWS", SEGMENT_ROWS)


def _state() -> TrainState:
  return TrainState({"a": jnp.ones(3)}, {}, jnp.int32(1), jnp.int32(1), jnp.int32(0))


def _restored(workdir) -> run_state.Snapshot:
  like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), _state())
  return run_state.RunState(workdir, keep=2).restore(like, None)


def _save(state, buffer, step):
  """As a run does; returns the rows whose tokens it had to copy, and what must be read back."""
  state.join()
  arrays = buffer.state_dict(missing=state.missing)["arrays"]
  state.save(run_state.Snapshot(step, _state(), None, arrays, {}))
  return arrays["token_rows"], buffer.state_dict()["arrays"]


def _assert_restores(workdir, whole, step):
  got = _restored(workdir)
  assert got.step == step
  for name in whole:
    np.testing.assert_array_equal(got.buffer[name], whole[name], err_msg=name)


def _add(buffer, rng, first, num):
  for number in range(first, first + num):
    buffer.add(make_group(rng, prompt_id=number % 40, occurrence=number, vocab=10_000))


def _wait(state):
  state._spilling.thread.join(30)


def test_a_checkpoint_copies_only_what_no_whole_segment_holds(tmp_path):
  rng, buffer = np.random.default_rng(0), make_buffer()
  state = run_state.RunState(tmp_path, keep=2)
  _add(buffer, rng, 0, 11)  # 44 rows: 5 segments and 4 rows
  state.spill(buffer, 44)
  _wait(state)
  copied, whole = _save(state, buffer, 1)
  assert len(copied) == 4 and len(whole["rows"]) == 44
  state.join()
  _assert_restores(tmp_path, whole, 1)
  _add(buffer, rng, 11, 1)
  state.spill(buffer, 44 + 4)
  assert not state.is_spilling(), "not for half a segment"
  state.close()


@pytest.mark.parametrize("seed", range(3))
def test_rows_that_come_leave_and_are_scored_again_while_others_are_written(tmp_path, seed):
  """A checkpoint is begun at any moment of a spill; what it must hold is taken whole at the same moment."""
  rng, buffer = np.random.default_rng(seed), make_buffer(capacity=120, dedup=False)
  state, number, ref_version = run_state.RunState(tmp_path, keep=2), 0, 0
  for step in range(1, 7):
    for _ in range(int(rng.integers(1, 6))):
      num = int(rng.integers(1, 9))
      _add(buffer, rng, number, num)
      number += num
      state.spill(buffer, 4 * number)
      handles, _ = buffer.live_keys()
      again, ref_version = rng.choice(handles, size=min(5, len(handles)), replace=False), ref_version + 1
      buffer.update_log_ref(again, rng.random((len(again), 8)).astype(np.float32), ref_version=ref_version)
    _, whole = _save(state, buffer, step)
    _add(buffer, rng, number, 3)  # beside the write
    number += 3
    state.join()
    _assert_restores(tmp_path, whole, step)
  files = {path.name for path in (tmp_path / "rollout_segments").iterdir()}
  listed = {name for names in state._names_of_step.values() for name in names}
  assert listed <= files and not [name for name in files if name.endswith(".tmp")]
  state.close()


def test_only_rows_that_still_live_are_copied():
  rng, buffer = np.random.default_rng(0), make_buffer(capacity=20, dedup=False)
  _add(buffer, rng, 0, 5)
  handles, _ = buffer.live_keys()
  _add(buffer, rng, 5, 2)
  keys, lengths, columns = buffer.copy_rows(handles)
  whole = buffer.state_dict()["arrays"]
  assert len(keys) == 12
  np.testing.assert_array_equal(keys, whole["key"][:12])
  np.testing.assert_array_equal(lengths, whole["length"][:12])
  np.testing.assert_array_equal(columns["log_ref"], whole["log_ref"][: lengths.sum()])


def test_a_checkpoint_that_counts_on_a_spill_waits_for_it_and_fails_with_it(tmp_path, monkeypatch):
  said, rng, buffer = [], np.random.default_rng(0), make_buffer()
  state = run_state.RunState(tmp_path, keep=2, say=said.append)
  _add(buffer, rng, 0, 2)
  _save(state, buffer, 1)
  state.join()
  _add(buffer, rng, 2, 8)
  begun, go_on, write = threading.Event(), threading.Event(), segments.SegmentStore._write_file

  def full(self, name, payload):
    if begun.is_set():
      return write(self, name, payload)  # room for the checkpoint's own rows, but not for those that it counts on
    begun.set()
    go_on.wait(30)
    raise OSError(errno.ENOSPC, "No space left on device")

  with monkeypatch.context() as patch:
    patch.setattr(segments.SegmentStore, "_write_file", full)
    state.spill(buffer, 40)
    assert begun.wait(30)
    copied, _ = _save(state, buffer, 2)
    assert len(copied) == 32 - SEGMENT_ROWS, "the segment under way is counted on"
    go_on.set()
    state.join()
  assert said == ["error: the checkpoint of step 2 could not be written (No space left on device); training goes on, "
                  "the checkpoint of step 1 stands; make room on the disk"]
  copied, whole = _save(state, buffer, 3)  # room was made
  assert len(copied) == 32
  state.join()
  _assert_restores(tmp_path, whole, 3)
  assert segments.SegmentStore._write_file is write
  state.close()


def test_a_spill_promises_and_gives_up_nothing_once_a_checkpoint_has_looked(tmp_path, monkeypatch):
  rng, buffer = np.random.default_rng(0), make_buffer()
  state = run_state.RunState(tmp_path, keep=2)
  _add(buffer, rng, 0, 10)
  looked, live_keys = threading.Event(), buffer.live_keys

  def late():
    found = live_keys()
    looked.wait(30)
    return found

  monkeypatch.setattr(buffer, "live_keys", late)
  state.spill(buffer, 40)
  arrays = buffer.state_dict(missing=state.missing)["arrays"]
  looked.set()
  _wait(state)
  assert state._segments.names == [] and len(arrays["token_rows"]) == 40
  state.close()


def test_a_spill_that_the_disk_refuses_loses_nothing_and_is_said_and_another_error_is_raised(tmp_path, monkeypatch):
  said, rng, buffer = [], np.random.default_rng(0), make_buffer()
  state = run_state.RunState(tmp_path, keep=2, say=said.append)
  _add(buffer, rng, 0, 5)

  def failing(error):
    def fail(self, name, payload):
      raise error
    return fail

  with monkeypatch.context() as patch:
    patch.setattr(segments.SegmentStore, "_write_file", failing(OSError(errno.ENOSPC, "No space left on device")))
    state.spill(buffer, 20)
    _wait(state)
  copied, whole = _save(state, buffer, 1)
  assert said == ["error: rows of the replay buffer could not be written (No space left on device); training goes on, "
                  "and the next checkpoint tries again; make room on the disk"]
  assert len(copied) == 20
  state.join()
  _assert_restores(tmp_path, whole, 1)
  _add(buffer, rng, 5, 5)
  monkeypatch.setattr(segments.SegmentStore, "_write_file", failing(TypeError("no such thing")))
  state.spill(buffer, 40)
  _wait(state)
  with pytest.raises(TypeError, match="no such thing"):
    state.spill(buffer, 60)
  state.close()

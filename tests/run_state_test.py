"""Checkpoints of a run: bitwise round trip, retention, and the way back when the newest one is damaged."""

from __future__ import annotations

import dataclasses
import errno
import gc
import pathlib
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.checkpoints import run_state
from tba_jax.deadlines import Hung
from tba_jax.types import TrainState


def _state(seed: int) -> TrainState:
  key = jax.random.key(seed)
  params = {"a": jax.random.normal(key, (5, 3)), "layers": {"b": jax.random.normal(key, (2, 4))}}
  return TrainState(params, {"mu": jax.tree.map(lambda x: x * 0.5, params)}, jnp.int32(seed), jnp.int32(seed + 1),
                    jnp.int32(0))


def _buffer(step: int) -> dict[str, np.ndarray]:
  """As ReplayBuffer.state_dict gives: rows 4, 1, 2 hold 2, 3 and 1 tokens; `none` is empty."""
  lengths = np.array([2, 3, 1], np.int32)
  rows = np.array([4, 1, 2])
  tokens = np.arange(6, dtype=np.int32) + step
  return {"rows": rows, "token_rows": rows, "key": np.array([6, 5, 9]), "length": lengths, "tokens": tokens,
          "log_mu": tokens * np.float32(0.5), "log_ref": -tokens.astype(np.float32),
          "none": np.zeros((0, 7), np.float32)}


def _snapshot(step: int, published=None) -> run_state.Snapshot:
  return run_state.Snapshot(step, _state(step), published, _buffer(0), {"generator": 2**127 + step, "order": [3, 1, 2]})


def _save(state, snapshot):
  """As a run does: only the rows that no segment holds yet."""
  buffer = dict(snapshot.buffer)
  missing = state.missing(buffer["key"])
  chosen = np.repeat(missing, buffer["length"])
  buffer |= {name: buffer[name][chosen] for name in run_state.SEGMENT_COLUMNS} | {"token_rows": buffer["rows"][missing]}
  state.save(dataclasses.replace(snapshot, buffer=buffer), wait=True)


def _like(tree):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def _equal(a, b):
  jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


@pytest.mark.parametrize("with_published", [False, True])
def test_round_trip_is_bitwise(tmp_path, with_published):
  published = {"layers": ({"w": jnp.ones((2, 2), jnp.bfloat16)}, {"w": jnp.zeros((2, 2), jnp.bfloat16)})}
  saved = _snapshot(7, published if with_published else None)
  state = run_state.RunState(tmp_path, keep=2)
  _save(state, saved)
  state.close()
  got = run_state.RunState(tmp_path, keep=2).restore(_like(saved.train_state), _like(published))
  assert got.step == 7 and got.meta["generator"] == 2**127 + 7 and got.meta["order"] == [3, 1, 2]
  _equal(got.train_state, saved.train_state)
  assert got.buffer["none"].shape == (0, 7)
  _equal(got.buffer, saved.buffer)
  if with_published:
    _equal(got.published, published)
  else:
    assert got.published is None


def test_saved_state_does_not_change_when_the_trainer_donates_its_buffers(tmp_path):
  state = run_state.RunState(tmp_path, keep=1)
  big = TrainState({"w": jnp.full((1024, 1024), 1.0)}, {}, jnp.int32(1), jnp.int32(1), jnp.int32(0))
  like = _like(big)
  state.save(run_state.Snapshot(1, big, None, {}, {}))
  step = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
  for _ in range(5):
    big = step(big)
  state.join()
  got = state.restore(like, None)
  np.testing.assert_array_equal(np.asarray(got.train_state.params["w"]), 1.0)


def test_a_written_checkpoint_leaves_no_copy_of_the_state(tmp_path):

  def num_arrays():  # of the shapes of _state; what other tests left may go meanwhile
    gc.collect()
    return sum(not array.is_deleted() and array.shape in ((5, 3), (2, 4)) for array in jax.live_arrays())

  state, snapshot = run_state.RunState(tmp_path, keep=1), _snapshot(1)
  before = num_arrays()
  state.save(dataclasses.replace(snapshot, buffer={}))
  state._writing.thread.join(60)
  assert not state._writing.thread.is_alive()
  assert num_arrays() <= before
  state.close()


def test_keeps_the_newest_and_the_best(tmp_path):
  state = run_state.RunState(tmp_path, keep=2)
  for step in range(1, 6):
    _save(state, _snapshot(step))
    if step == 2:
      state.mark_best(2)
  state.close()
  kept = {int(p.name) for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit()}
  assert kept == {2, 4, 5}


def test_a_damaged_step_falls_back_to_the_one_before_and_says_so(tmp_path, caplog):
  state = run_state.RunState(tmp_path, keep=3)
  _save(state, _snapshot(1))
  _save(state, _snapshot(2))
  state.close()
  for path in pathlib.Path(tmp_path / "checkpoints" / "2" / "train").rglob("*"):
    if path.is_file():
      path.write_bytes(b"")
  state = run_state.RunState(tmp_path, keep=3)
  with caplog.at_level("ERROR"):
    got = state.restore(_like(_state(0)), None)
  assert got.step == 1
  assert "checkpoint of step 2 cannot be read" in caplog.text
  for path in (tmp_path / "checkpoints" / "1" / "train").rglob("*"):
    if path.is_file():
      path.write_bytes(b"")
  with pytest.raises(ValueError, match=r"checkpoints: none of the steps \[2, 1\] can be read; restore them from a "
                     "copy, go on with the version of this program that wrote them, or start in a new workdir"):
    state.restore(_like(_state(0)), None)


def test_steps_that_cannot_be_read_are_kept_aside(tmp_path, monkeypatch):
  said = []
  monkeypatch.setattr(run_state.logging, "warning", lambda text, *values: said.append(text % values))
  state = run_state.RunState(tmp_path, keep=3)
  for step in (1, 2, 3):
    _save(state, _snapshot(step))
  for content in (b"newest", b"again"):
    for step in (2, 3):
      (tmp_path / "checkpoints" / str(step) / "mark").write_bytes(content)
    state.set_aside_steps_after(1)
    assert {p.name for p in (tmp_path / "checkpoints").iterdir()} == {"1"}
    for step in (2, 3):
      _save(state, _snapshot(step))  # the run goes on from 1 and comes by 2 and 3 again
  state.set_aside_steps_after(3)
  state.close()
  assert {p.name for p in (tmp_path / "checkpoints").iterdir()} == {"1", "2", "3"}
  aside = tmp_path / "unreadable_checkpoints"
  assert {p.name: (p / "mark").read_bytes() for p in aside.iterdir()} == {
      "2": b"newest", "3": b"newest", "2.1": b"again", "3.1": b"again"}
  assert f"checkpoint of step 3, which could not be read, is kept as {aside / '3.1'}" in said


def test_initial_params_and_params_of_one_step(tmp_path):
  state = run_state.RunState(tmp_path, keep=5)
  assert not state.has_initial()
  params = _state(3).params
  state.save_initial(params)
  assert state.has_initial()
  _equal(state.load_initial(_like(params)), params)
  for step in (4, 9):
    _save(state, _snapshot(step))
  assert run_state.load_params(tmp_path, _like(params))[0] == 9
  step, got = run_state.load_params(tmp_path, _like(params), step=4)
  assert step == 4
  _equal(got, _state(4).params)
  with pytest.raises(ValueError, match=r"step=5: .* has no such checkpoint; it has \[4, 9\]"):
    run_state.load_params(tmp_path, _like(params), step=5)
  with pytest.raises(ValueError, match="no checkpoint there"):
    run_state.load_params(tmp_path / "nowhere", _like(params))


def _segment_files(workdir):
  return sorted(path.name for path in (workdir / "rollout_segments").iterdir())


def test_a_row_is_written_once_and_a_damaged_segment_falls_back_to_the_step_before(tmp_path, caplog):
  state = run_state.RunState(tmp_path, keep=3)
  _save(state, _snapshot(1))
  first = _segment_files(tmp_path)
  _save(state, _snapshot(2))
  assert _segment_files(tmp_path) == first, "nothing new, nothing written"
  more = _snapshot(3)
  grown = {name: np.concatenate([more.buffer[name], np.asarray(new, more.buffer[name].dtype)]) for name, new in {
      "rows": [0], "key": [12], "length": [2], "tokens": [70, 71], "log_mu": [1, 2], "log_ref": [3, 4]}.items()}
  more = dataclasses.replace(more, buffer=more.buffer | grown | {"token_rows": grown["rows"]})
  _save(state, more)
  second = [name for name in _segment_files(tmp_path) if name not in first]
  assert len(second) == 1
  state.close()
  state = run_state.RunState(tmp_path, keep=3)
  got = state.restore(_like(_state(0)), None)
  assert got.step == 3
  _equal(got.buffer, more.buffer)
  path = tmp_path / "rollout_segments" / second[0]
  path.write_bytes(path.read_bytes()[:-1] + b"?")
  with caplog.at_level("ERROR"):
    got = run_state.RunState(tmp_path, keep=3).restore(_like(_state(0)), None)
  assert got.step == 2 and "checkpoint of step 3 cannot be read (DamagedSegment" in caplog.text
  assert "is cut or damaged" in caplog.text
  _equal(got.buffer, _buffer(0))


def test_segments_that_no_step_needs_are_removed(tmp_path):
  state = run_state.RunState(tmp_path, keep=2)
  for step in range(1, 5):
    snapshot = _snapshot(step)
    key = np.array([3, 4, 5]) + 10 * step  # other rows at every step
    _save(state, dataclasses.replace(snapshot, buffer=snapshot.buffer | {"key": key}))
  assert [int(name.split("-")[0]) for name in _segment_files(tmp_path)] == [33, 43]
  assert run_state.RunState(tmp_path, keep=2).restore(_like(_state(0)), None).step == 4


@pytest.mark.parametrize("what", ["segment", "step"])
def test_a_full_disk_leaves_the_older_checkpoint_and_says_so(tmp_path, monkeypatch, what):
  said = []
  state = run_state.RunState(tmp_path, keep=2, say=said.append)
  _save(state, _snapshot(1))

  def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")

  with monkeypatch.context() as patch:
    if what == "segment":
      patch.setattr(run_state.os, "fsync", full)
    else:
      patch.setattr(state._manager, "save", full)
    snapshot = _snapshot(2)
    _save(state, dataclasses.replace(snapshot, buffer=snapshot.buffer | {"key": np.array([25, 26, 29])}))
  assert state.num_failed == 1
  assert said == ["error: the checkpoint of step 2 could not be written (No space left on device); training goes on, "
                  "the checkpoint of step 1 stands; make room on the disk"]
  assert not [name for name in _segment_files(tmp_path) if name.endswith(".tmp")]
  got = run_state.RunState(tmp_path, keep=2).restore(_like(_state(0)), None)
  assert got.step == 1
  _equal(got.buffer, _buffer(0))
  _save(state, _snapshot(3))  # room was made
  assert run_state.RunState(tmp_path, keep=2).restore(_like(_state(0)), None).step == 3


def test_an_error_that_is_not_of_the_disk_is_raised(tmp_path, monkeypatch):
  state = run_state.RunState(tmp_path, keep=2)
  monkeypatch.setattr(state._manager, "save", lambda *args, **kwargs: (_ for _ in ()).throw(TypeError("no such item")))
  with pytest.raises(TypeError, match="no such item"):
    _save(state, _snapshot(1))


def test_a_checkpoint_that_hangs_raises_in_time(tmp_path, monkeypatch):
  release = threading.Event()
  state = run_state.RunState(tmp_path, keep=2, timeout_secs=0.3)
  monkeypatch.setattr(state._manager, "save", lambda *args, **kwargs: release.wait(30))
  with pytest.raises(
      Hung, match=r"the checkpoint of step 1 is not written after 0.3 s \(thread checkpoint, runtime.hang_secs=0.3\)"):
    _save(state, _snapshot(1))
  release.set()

"""Checkpoints of a run: bitwise round trip, retention, and the way back when the newest one is damaged."""

from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.checkpoints import run_state
from tba_jax.types import TrainState


def _state(seed: int) -> TrainState:
  key = jax.random.key(seed)
  params = {"a": jax.random.normal(key, (5, 3)), "layers": {"b": jax.random.normal(key, (2, 4))}}
  return TrainState(params, {"mu": jax.tree.map(lambda x: x * 0.5, params)}, jnp.int32(seed), jnp.int32(seed + 1), jnp.int32(0))


def _snapshot(step: int, published=None) -> run_state.Snapshot:
  buffer = {"tokens": np.arange(6, dtype=np.int32).reshape(2, 3) + step, "none": np.zeros((0, 7), np.float32)}
  return run_state.Snapshot(step, _state(step), published, buffer, {"generator": 2**127 + step, "order": [3, 1, 2]})


def _like(tree):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def _equal(a, b):
  jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


@pytest.mark.parametrize("with_published", [False, True])
def test_round_trip_is_bitwise(tmp_path, with_published):
  published = {"layers": ({"w": jnp.ones((2, 2), jnp.bfloat16)}, {"w": jnp.zeros((2, 2), jnp.bfloat16)})}
  saved = _snapshot(7, published if with_published else None)
  state = run_state.RunState(tmp_path, keep=2)
  state.save(saved, wait=True)
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


def test_keeps_the_newest_and_the_best(tmp_path):
  state = run_state.RunState(tmp_path, keep=2)
  for step in range(1, 6):
    state.save(_snapshot(step), wait=True)
    if step == 2:
      state.mark_best(2)
  state.close()
  kept = {int(p.name) for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit()}
  assert kept == {2, 4, 5}


def test_a_damaged_step_falls_back_to_the_one_before_and_says_so(tmp_path, caplog):
  state = run_state.RunState(tmp_path, keep=3)
  state.save(_snapshot(1), wait=True)
  state.save(_snapshot(2), wait=True)
  state.close()
  for path in pathlib.Path(tmp_path / "checkpoints" / "2" / "train").rglob("*"):
    if path.is_file():
      path.write_bytes(b"")
  state = run_state.RunState(tmp_path, keep=3)
  with caplog.at_level("ERROR"):
    got = state.restore(_like(_state(0)), None)
  assert got.step == 1
  assert "checkpoint of step 2 cannot be read" in caplog.text


def test_initial_params_and_params_of_one_step(tmp_path):
  state = run_state.RunState(tmp_path, keep=5)
  assert not state.has_initial()
  params = _state(3).params
  state.save_initial(params)
  assert state.has_initial()
  _equal(state.load_initial(_like(params)), params)
  for step in (4, 9):
    state.save(_snapshot(step), wait=True)
  assert run_state.load_params(tmp_path, _like(params))[0] == 9
  step, got = run_state.load_params(tmp_path, _like(params), step=4)
  assert step == 4
  _equal(got, _state(4).params)
  with pytest.raises(ValueError, match=r"step=5: .* has no such checkpoint; it has \[4, 9\]"):
    run_state.load_params(tmp_path, _like(params), step=5)
  with pytest.raises(ValueError, match="no checkpoint there"):
    run_state.load_params(tmp_path / "nowhere", _like(params))

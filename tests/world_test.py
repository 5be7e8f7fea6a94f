"""Processes that are one trainer: how they meet and end, and that what they train is what one process trains."""

from __future__ import annotations

import os
import pathlib
import queue
import socket
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest

import two_processes
from tba_jax import build, sharding
from tba_jax.deadlines import Hung
from tba_jax.models import transformer
from tba_jax.runtime import world as world_lib
from tba_jax.runtime.settings import StopFlag
from tba_jax.runtime.world import CannotMeet, Link, World, meet

REPO = pathlib.Path(__file__).resolve().parent.parent


def free_port() -> int:
  with socket.create_server(("127.0.0.1", 0)) as server:
    return server.getsockname()[1]


# --- The connection ---


class Pair:
  """A head and a follower in one process; what they say before they end, and with which code, is kept."""

  def __init__(self):
    self.said, self.ended = queue.SimpleQueue(), queue.SimpleQueue()
    with socket.create_server(("127.0.0.1", 0)) as server:
      theirs = socket.create_connection(server.getsockname())
      ours = server.accept()[0]
    self.sockets = {0: ours, 1: theirs}
    self.head, self.follower = self._world(0, {1: Link(ours)}), self._world(1, {0: Link(theirs)})

  def _world(self, number, links) -> World:
    return World(links, process_id=number, num_processes=2, jax_address="", say=self.said.put,
                 end=lambda code: self.ended.put((number, code)))


@pytest.fixture
def pair(monkeypatch):
  monkeypatch.setattr(world_lib, "_PING_SECS", 0.05)
  made = Pair()
  yield made
  for of in (made.head, made.follower):
    of._closing = True
  for connection in made.sockets.values():
    connection.close()


def test_orders_come_in_their_order_with_arrays_as_they_are(pair):
  arrays = [np.arange(6, dtype=np.int32).reshape(2, 3), np.zeros((0, 4), np.float32), np.asarray(2.5, np.float32),
            np.asarray(jax.numpy.full((3,), 1.5, jax.numpy.bfloat16))]
  pair.head.order("first", number=3)
  pair.head.send(1, "second", {"a": [1, 2]}, arrays)
  assert pair.follower.next_order() == ("first", {"number": 3}, [])
  kind, fields, got = pair.follower.next_order()
  assert (kind, fields) == ("second", {"a": [1, 2]})
  for sent, array in zip(arrays, got, strict=True):
    assert (sent.dtype, sent.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(sent.astype(np.float32), array.astype(np.float32))


def test_the_head_waits_until_everything_is_done_and_no_longer_than_the_deadline(pair):
  thread = threading.Thread(target=lambda: pair.follower.answer(pair.follower.next_order().fields["number"]))
  thread.start()
  pair.head.wait_for_all(secs=10.0, what="compiling")
  thread.join()
  with pytest.raises(Hung, match=r"process 1 of the trainer is not through with compiling after 0.2 s \(runtime.hang"):
    pair.head.wait_for_all(secs=0.2, what="compiling")


def test_a_process_that_is_gone_ends_the_other(pair):
  pair.sockets[1].shutdown(socket.SHUT_RDWR)
  ended = sorted(pair.ended.get(timeout=5.0) for _ in range(2))  # the follower sees its own end closed, too
  assert ended[0] == (0, 1)
  assert "error: process 1 of the trainer's 2 is gone" in "".join(pair.said.get(timeout=1.0) for _ in range(2))


def test_a_process_that_says_nothing_any_more_ends_the_other(pair, monkeypatch):
  monkeypatch.setattr(world_lib, "_SILENT_SECS", 0.3)
  monkeypatch.setattr(pair.follower, "_closing", True)  # it pings no more
  assert pair.ended.get(timeout=5.0) == (0, 1)
  assert "it has said nothing for" in pair.said.get(timeout=1.0)


def test_a_follower_that_fails_says_why(pair):
  pair.follower.fail("RESOURCE_EXHAUSTED: no memory")
  assert sorted(pair.ended.get(timeout=5.0) for _ in range(2)) == [(0, 1), (1, 1)]
  assert "process 1 of the trainer's 2 is gone (RESOURCE_EXHAUSTED: no memory)" in pair.said.get(timeout=1.0)


def test_a_signal_to_a_follower_stops_the_head(pair):
  pair.head.stop, pair.follower.stop = StopFlag(), StopFlag()
  pair.follower.stop.set("SIGTERM")
  deadline = time.monotonic() + 5.0
  while not pair.head.stop.is_set() and time.monotonic() < deadline:
    time.sleep(0.01)
  assert pair.head.stop.reason == "SIGTERM of process 1"


def test_the_end_is_no_fault(pair):
  def obey():
    assert pair.follower.next_order().fields == {"code": 2, "text": "task: no data"}
    pair.follower.goodbye()

  thread = threading.Thread(target=obey)
  thread.start()
  began = time.monotonic()
  pair.head.close(2, "task: no data")
  assert time.monotonic() - began < 5.0
  thread.join()
  pair.sockets[1].shutdown(socket.SHUT_RDWR)
  time.sleep(0.2)
  assert pair.ended.empty() and pair.said.empty()


# --- Meeting ---


def _meet(results, port, process_id, *, num_processes=2, identity="config", secs=10.0):
  try:
    results[process_id] = meet(
        f"127.0.0.1:{port}", num_processes=num_processes, process_id=process_id, identity=identity,
        command=lambda number: f"tba --process_id={number}", say=print, secs=secs)
  except CannotMeet as error:
    results[process_id] = str(error)


def _meet_all(*asked, port=None):
  """What each process got: a world, or why not."""
  results, port = {}, port or free_port()
  threads = [threading.Thread(target=_meet, args=(results, port, process_id), kwargs=named)
             for process_id, named in asked]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  for world in results.values():
    if isinstance(world, World):
      world._closing = True
  return results


def test_all_meet_whoever_comes_first():
  found = _meet_all((2, dict(num_processes=3)), (1, dict(num_processes=3)), (0, dict(num_processes=3)))
  assert {world.jax_address for world in found.values()} == {found[0].jax_address}
  assert [found[i].process_id for i in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("other, text", [
    ((1, dict(identity="another")), "process 1 was started with another config than process 0; start all with the"),
    ((1, dict(num_processes=3)), "process 1 was started with --num_processes=3, process 0 with 2; give all the same"),
    ((5, dict(num_processes=2)), "--process_id=5 came twice; give each process its own, from 0 to 1"),
])
def test_processes_that_do_not_fit_are_refused_and_both_are_told(other, text):
  found = _meet_all((0, {}), other)
  assert text in found[0] and found[other[0]] == found[0]


def test_who_is_missing_is_named_with_its_command():
  short = dict(num_processes=3, secs=0.5)
  port = free_port()
  found = _meet_all((0, short), (2, short), port=port)
  assert found[0] == (f"process 1 of 3 did not come to 127.0.0.1:{port} within 0.5 s; start all of them within that "
                      "time, each on its machine:\n  tba --process_id=1")
  assert found[2] == found[0]
  found = _meet_all((1, short), port=port)
  assert found[1].startswith(f"process 0 was not found at --coordinator=127.0.0.1:{port} within 0.5 s")
  assert found[1].endswith("start it there:\n  tba --process_id=0")


def test_a_port_that_is_taken_is_told():
  with socket.create_server(("127.0.0.1", 0)) as server:
    found = _meet_all((0, {}), port=server.getsockname()[1])
  assert "cannot be listened on by process 0" in found[0] and "a port that is free there" in found[0]


# --- Training ---


def test_two_processes_train_what_one_does(tmp_path):
  """Loss, gradient, three SGD steps, and an update that is skipped for what one process alone has; then a checkpoint
  that is gone on from, and weights for a searcher."""
  port = free_port()
  env = {**os.environ, "PYTHONPATH": f"{REPO}{os.pathsep}{REPO / 'tests'}",
         "XLA_FLAGS": os.environ["XLA_FLAGS"].replace("_device_count=8", "_device_count=1")}
  processes = [subprocess.Popen(
      [sys.executable, "tests/two_processes.py", str(port), "2", str(number), str(tmp_path)], cwd=REPO, env=env,
      stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for number in range(2)]
  config = two_processes.config()  # the same in this process, on one device
  cfg = two_processes.make_cfg(config)
  start = two_processes.first_params(config)
  trainer = build.build_trainer(
      config, cfg, jax.tree.map(jax.numpy.array, start), sharding.make_mesh(jax.devices()[:1]), tmp_path)
  metrics = two_processes.train(trainer, config, range(1))
  first = jax.device_get(trainer.state.params)
  metrics += two_processes.train(trainer, config, range(1, 4))
  expected = two_processes.summary(first, transformer.unstack(trainer.state.params), [*metrics, *metrics[2:]])
  said = [process.communicate(timeout=120)[0] for process in processes]
  assert [process.returncode for process in processes] == [0, 0], "".join(said)
  assert "well done" in said[1]

  assert [step["skipped"] for step in metrics] == [0.0, 1.0, 0.0, 0.0]
  with np.load(tmp_path / "head.npz") as found:
    assert set(found) == set(expected)
    start = {f"first/{sharding.path_name(path)}": leaf for path, leaf in jax.tree_util.tree_leaves_with_path(start)}
    for name, value in expected.items():
      got = found[name]
      if name in start:  # the first step's gradient
        value, got = ((start[name] - after) / two_processes.LEARNING_RATE for after in (value, got))
      np.testing.assert_allclose(got, value, rtol=1e-5, atol=1e-5 * max(1.0, np.abs(value).max()), err_msg=name)

"""Published weights: whole, correctly labelled, and independent of buffers that the trainer gives away."""

from __future__ import annotations

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax import weights
from tba_jax.deadlines import Hung


def _store(devices):
  return weights.WeightStore(jax.jit(lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32), tree)), devices,
                             timeout_secs=30.0)


def test_published_weights_survive_donation_on_a_shared_device():
  device = jax.devices()[0]
  store = _store([device])
  params = {"a": jax.device_put(np.arange(8, dtype=np.float32), device)}
  store.publish(params, 3)
  step = jax.jit(lambda tree: jax.tree.map(lambda x: x * -1.0, tree), donate_argnums=0)
  step(params)
  store.join()
  assert store.latest(0).version == 3
  np.testing.assert_array_equal(np.asarray(store.latest(0).params["a"]), np.arange(8, dtype=np.float32))


def test_every_searcher_sees_one_version_whole_under_concurrent_publishing():
  devices = jax.devices()[:3]
  store = _store(devices[1:])
  tree = lambda v: {f"w{i}": jax.device_put(np.full((64, 64), v, np.float32), devices[0]) for i in range(6)}
  store.publish(tree(0), 0, wait=True)
  torn, stop = [], threading.Event()

  def watch(searcher):
    while not stop.is_set():
      seen = store.latest(searcher)
      values = {float(np.asarray(leaf)[0, 0]) for leaf in seen.params.values()}
      if values != {float(seen.version)}:
        torn.append((seen.version, values))

  watchers = [threading.Thread(target=watch, args=(i,)) for i in range(2)]
  for thread in watchers:
    thread.start()
  for version in range(1, 40):
    store.publish(tree(version), version)
  store.join()
  stop.set()
  for thread in watchers:
    thread.join(timeout=10)
  assert not torn
  assert {store.latest(i).version for i in range(2)} == {39}
  assert [next(iter(store.latest(i).params["w0"].devices())) for i in range(2)] == devices[1:]


def test_a_searchers_device_never_holds_more_than_two_versions(monkeypatch):
  trainer, searcher = jax.devices()[:2]
  shape, most, block = (33, 7), [], jax.block_until_ready
  live = lambda: sum(x.shape == shape and x.devices() == {searcher} for x in jax.live_arrays())

  def counted(tree):
    block(tree)
    most.append(live())

  store = _store([searcher])
  monkeypatch.setattr(jax, "block_until_ready", counted)
  for version in range(6):
    store.publish({"a": jax.device_put(np.full(shape, version, np.float32), trainer)}, version)
  store.join()
  assert max(most) == 2 and live() == 1


def test_failed_transfer_raises_and_keeps_the_old_label(monkeypatch):
  store = _store(jax.devices()[:1])
  params = {"a": jnp.ones(4)}
  store.publish(params, 1, wait=True)
  monkeypatch.setattr(jax, "block_until_ready", lambda tree: (_ for _ in ()).throw(RuntimeError("link down")))
  with pytest.raises(RuntimeError, match="link down"):
    store.publish(params, 2, wait=True)
  assert store.latest(0).version == 1


def test_asking_before_the_first_publish_is_an_error():
  with pytest.raises(RuntimeError, match="before any were published"):
    _store(jax.devices()[:1]).latest(0)


def test_a_transfer_that_hangs_raises_in_time_and_says_what_it_waited_for(monkeypatch):
  store = weights.WeightStore(jax.jit(lambda tree: tree), jax.devices()[:1], timeout_secs=0.3)
  store.publish({"a": jnp.ones(4)}, 1, wait=True)
  release = threading.Event()
  monkeypatch.setattr(jax, "block_until_ready", lambda tree: release.wait(30))
  store.publish({"a": jnp.ones(4)}, 2)
  with pytest.raises(Hung,
                     match=r"weights of version 2 have not arrived at the searchers after 0.3 s \(thread weights"):
    store.join()
  assert store.latest(0).version == 1
  release.set()


@pytest.mark.slow  # it times, and other work on the machine counts
def test_publishing_returns_before_the_conversion_is_done():
  """On CPU too, where a program of copies alone would be run by the caller."""
  store = weights.WeightStore(jax.jit(lambda tree: jax.tree.map(jnp.copy, tree)), jax.devices()[1:2], timeout_secs=60.0)
  params = {"a": jax.device_put(np.zeros(2**24, np.float32), jax.devices()[0])}  # 64 MB
  publish, whole = [], []
  for version in range(4):
    began = time.perf_counter()
    store.publish(params, version)
    publish.append(time.perf_counter() - began)
    store.join()
    whole.append(time.perf_counter() - began)
  assert min(publish[1:]) < 0.2 * min(whole[1:]), (publish, whole)


def test_pinned_weights_are_of_the_moment_of_pinning():
  store = _store(jax.devices()[1:2])
  params = {"a": jax.device_put(np.arange(8, dtype=np.float32), jax.devices()[0])}
  pinned = store.pin(params, 5, searcher=0)
  jax.jit(lambda tree: jax.tree.map(lambda x: x * -1.0, tree), donate_argnums=0)(params)
  found = pinned()
  assert found.version == 5 and found.params["a"].devices() == {jax.devices()[1]}
  np.testing.assert_array_equal(np.asarray(found.params["a"]), np.arange(8, dtype=np.float32))

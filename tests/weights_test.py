"""Published weights: whole, correctly labelled, and independent of buffers that the trainer gives away."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax import weights


def _store(devices):
  return weights.WeightStore(jax.jit(lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32), tree)), devices)


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

"""Weights on their way to other processes of one machine: the parts `weights` and `transfer` of `cluster_bench.py`."""

from __future__ import annotations

import pathlib
import statistics
import time
from typing import Any

import numpy as np

REPO = pathlib.Path(__file__).resolve().parent.parent
ROUNDS = 5  # of transfer


def package() -> dict[str, Any]:
  """What an actor of the benchmark needs."""
  return {"env_vars": {"PYTHONPATH": str(REPO), "JAX_PLATFORMS": "cpu"}}


def _tree(num_params: int) -> dict[str, np.ndarray]:
  """Random bits of bfloat16 in 32 leaves."""
  import jax

  leaf = np.random.default_rng(0).integers(0, 2**16, (32, num_params // 32 // 1024, 1024), np.uint16)
  return {str(i): layer.view(jax.numpy.bfloat16) for i, layer in enumerate(leaf)}


def weights(num_params: int) -> dict[str, Any]:
  """Seconds and GB/s of a parcel on its way to an actor, and how long publishing holds a trainer."""
  import ray
  from ray.cluster_utils import Cluster

  from tba_jax.runtime.cluster import put
  from tba_jax.runtime.parcels import pack

  store_bytes = max(200_000_000, 3 * 2 * num_params)
  cluster = Cluster(initialize_head=True, head_node_args={
      "num_cpus": 1, "resources": {"here": 1}, "object_store_memory": store_bytes})
  there = cluster.add_node(num_cpus=2, resources={"there": 2}, object_store_memory=store_bytes)
  ray.init(address=cluster.address, log_to_driver=False, runtime_env=package())
  tree = _tree(num_params)
  num_bytes = sum(leaf.nbytes for leaf in tree.values())
  where = {"same_node": "here", "other_node": "there", "other_node_again": "there"}  # the last finds what is there
  secs: dict[str, list[float]] = {name: [] for name in ("put", *where)}
  try:
    actors = {name: ray.remote(_Receiver).options(resources={node: 1}).remote() for name, node in where.items()}
    ray.get([actor.receive.remote(pack({"a": np.zeros(4)}, put)) for actor in actors.values()])
    for _ in range(3 if num_bytes < 1e9 else 1):
      began = time.monotonic()
      parcel = pack(tree, put)
      secs["put"].append(time.monotonic() - began)
      for name, actor in actors.items():
        secs[name].append(ray.get(actor.receive.remote(parcel)))
      del parcel
    found = {"params": num_params, "bytes": num_bytes, **paces(num_bytes, secs)}
    del tree, actors
    cluster.remove_node(there)  # with what its store has touched
    found["held"] = _held(num_params, put, step_secs=2.0 if num_bytes < 1e9 else 10.0)
  finally:
    ray.shutdown()
    cluster.shutdown()
  return found


def paces(num_bytes: int, secs: dict[str, list[float]]) -> dict[str, Any]:
  """Medians of the seconds of putting and of each way of fetching; GB/s from the trainer's memory to the actor's."""
  middle = {name: statistics.median(values) for name, values in secs.items()}
  speed = {name: num_bytes / 1e9 / (middle["put"] + value) for name, value in middle.items() if name != "put"}
  return {"seconds": middle, "gigabytes_per_second": speed}


class _Receiver:
  """An actor that takes parcels."""

  def receive(self, parcel: Any) -> float:
    """Seconds until the tree was whole, its bytes checked."""
    from tba_jax.runtime.cluster import fetch
    from tba_jax.runtime.parcels import unpack

    began = time.monotonic()
    unpack(parcel, fetch(parcel.chunks))
    return time.monotonic() - began


def _held(num_params: int, put: Any, *, step_secs: float) -> dict[str, float]:
  """Of a trainer whose device computes elsewhere: it sleeps for its steps and publishes after each.

  Its 32 leaves are one array, float32, so that a large model's fit; what is published of them is as large as ever.
  """
  import jax

  from tba_jax.runtime.remote import SharedWeightStore

  leaf = jax.device_put(np.ones((num_params // 32 // 1024, 1024), np.float32))
  params = {str(i): leaf for i in range(32)}
  store = SharedWeightStore(jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf.astype(jax.numpy.bfloat16), tree)),
                            device=jax.devices()[0], put=put, timeout_secs=300.0)
  store.publish(params, 0, wait=True)
  began = time.monotonic()
  store.publish(params, 1, wait=True)
  move_secs = time.monotonic() - began
  held, began = [], time.monotonic()
  for version in range(2, 9):
    before = time.monotonic()
    store.publish(params, version)
    held.append(time.monotonic() - before)
    time.sleep(step_secs)
  wall = time.monotonic() - began
  store.join()
  return {"step_seconds": step_secs, "move_seconds": move_secs, "publish_seconds": statistics.mean(held),
          "publish_seconds_each": held, "share": sum(held) / wall}


# --- jax.experimental.transfer ---


def transfer(num_params: int) -> dict[str, Any]:
  """Seconds from the arrays of one jax to those of another, in a process on another Ray node, in turn: as parcels, and
  by jax.experimental.transfer over 1 and 4 connections."""
  import jax
  import ray
  from jax.experimental import transfer as jax_transfer
  from ray.cluster_utils import Cluster

  from tba_jax.runtime.cluster import put
  from tba_jax.runtime.parcels import pack

  store_bytes = max(200_000_000, 3 * 2 * num_params)
  cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": store_bytes})
  cluster.add_node(num_cpus=2, resources={"there": 2}, object_store_memory=store_bytes)
  ray.init(address=cluster.address, log_to_driver=False, runtime_env=package())
  arrays = jax.block_until_ready({name: jax.device_put(leaf) for name, leaf in _tree(num_params).items()})
  num_bytes = sum(leaf.nbytes for leaf in arrays.values())
  shapes = {name: (leaf.shape, leaf.dtype.name) for name, leaf in arrays.items()}
  servers = {f"transfer_{n}": jax_transfer.start_transfer_server(
      jax.devices()[0].client, "127.0.0.1:0", ["127.0.0.1:0"] * n) for n in (1, 4)}
  secs: dict[str, list[float]] = {name: [] for name in ("parcels", *servers)}
  try:
    actor = ray.remote(_Puller).options(resources={"there": 1}).remote(
        {name: (server.address(), int(name.rpartition("_")[2])) for name, server in servers.items()})
    for number in range(ROUNDS + 1):  # the first is dropped: connections are made in it
      for name in secs:
        began = time.monotonic()
        if name == "parcels":
          found = ray.get(actor.unpack.remote(pack(jax.device_get(arrays), put)))
        else:
          servers[name].await_pull(number, arrays)
          found = ray.get(actor.pull.remote(name, number, shapes))
        secs[name] += [time.monotonic() - began] if number else []
        if found != _checksum(arrays):
          raise SystemExit(f"{name} brought other bits")
  finally:
    ray.shutdown()
    cluster.shutdown()
  return {"params": num_params, "bytes": num_bytes, "seconds": secs, "gigabytes_per_second": {
      name: [num_bytes / 1e9 / value for value in sorted((min(taken), statistics.median(taken), max(taken)))]
      for name, taken in secs.items()}}


class _Puller:
  """An actor that takes weights into its own jax."""

  def __init__(self, addresses: dict[str, tuple[str, int]]):
    import jax
    from jax.experimental import transfer as jax_transfer

    client = jax.devices()[0].client
    self._servers = [jax_transfer.start_transfer_server(client, "127.0.0.1:0", ["127.0.0.1:0"] * connections)
                     for _, connections in addresses.values()]
    self._links = {name: server.connect(address) for server, (name, (address, _)) in zip(
        self._servers, addresses.items(), strict=True)}

  def pull(self, name: str, number: int, shapes: dict[str, Any]) -> int:
    import jax

    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = {leaf: jax.ShapeDtypeStruct(shape, dtype, sharding=place) for leaf, (shape, dtype) in shapes.items()}
    return _checksum(jax.block_until_ready(self._links[name].pull(number, like)))

  def unpack(self, parcel: Any) -> int:
    import jax

    from tba_jax.runtime.cluster import fetch
    from tba_jax.runtime.parcels import unpack

    tree = unpack(parcel, fetch(parcel.chunks))
    return _checksum(jax.block_until_ready(jax.device_put(tree)))


def _checksum(arrays: dict[str, Any]) -> int:
  """Of the first kilobytes of each leaf, which costs nothing."""
  import zlib

  checksum = 0
  for name in sorted(arrays):
    checksum = zlib.crc32(np.asarray(arrays[name][0]).tobytes(), checksum)
  return checksum

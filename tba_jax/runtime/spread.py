"""Trees of arrays between the head's memory and a mesh of several processes: each process is sent the parts of its own
devices, and sends back what it alone holds.

No device takes part, so that a checkpoint or a publish goes on beside training, and no device ever holds a whole tree.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from tba_jax.deadlines import Hung, wait_until
from tba_jax.runtime.world import Message, World
from tba_jax.types import Batch

Index = tuple[slice, ...]


def parts_of(sharding: NamedSharding, shape: Sequence[int], process: int) -> list[Index]:
  """What the devices of a process hold of an array, each part once, in an order that all processes agree on."""
  found = {}
  for device, index in sharding.devices_indices_map(tuple(shape)).items():
    if device.process_index == process:
      found.setdefault(_bounds(index, shape), index)
  return list(found.values())


def assemble(shape: Sequence[int], sharding: NamedSharding, parts: Sequence[np.ndarray]) -> jax.Array:
  """The array of which this process has these parts, in the order of `parts_of`."""
  own = parts_of(sharding, shape, jax.process_index())
  by_bounds = {_bounds(index, shape): part for index, part in zip(own, parts, strict=True)}
  return jax.make_array_from_callback(tuple(shape), sharding, lambda index: by_bounds[_bounds(index, shape)])


def own_parts(array: jax.Array) -> list[tuple[list[list[int]], np.ndarray]]:
  """Parts of an array that no process before this one has: [start, stop] by dimension, and the values."""
  return [(list(map(list, _bounds(shard.index, array.shape))), np.asarray(shard.data))
          for shard in array.addressable_shards if shard.replica_id == 0]


def _bounds(index: Index, shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
  return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


class Gathered:
  """A tree on its way to this process's memory; called, it waits for it.

  Args:
    tree: the arrays, of which this process's own parts are read when they are called for.
    secs: deadline.
  """

  def __init__(self, tree: Any, *, secs: float):
    self._leaves, self._treedef = jax.tree.flatten(tree)
    self._secs = secs
    self._host = [np.empty(leaf.shape, leaf.dtype) for leaf in self._leaves]
    self._missing = sum(array.size for array in self._host)
    own = sum(shard.data.size for leaf in self._leaves for shard in leaf.addressable_shards if shard.replica_id == 0)
    self._elsewhere = self._missing - own
    self._changed = threading.Condition()
    self._reading = threading.Lock()

  def take(self, message: Message) -> bool:
    """A part that another process has sent. Returns whether others are still to come."""
    values = message.arrays[0]
    self._elsewhere -= values.size
    self._fill(message.fields["leaf"], message.fields["bounds"], values)
    return self._elsewhere > 0

  def __call__(self) -> Any:
    """The tree as numpy arrays. Raises: Hung if parts are missing after the deadline."""
    with self._reading:
      leaves, self._leaves = self._leaves, []
      for number, leaf in enumerate(leaves):
        for bounds, values in own_parts(leaf):
          self._fill(number, bounds, values)

    def whole(timeout: float) -> bool:
      with self._changed:
        return self._changed.wait_for(lambda: not self._missing, timeout)

    if not wait_until(whole, secs=self._secs):
      raise Hung(f"the other processes' parts of {sum(array.nbytes for array in self._host):,} bytes have not come "
                 f"within {self._secs:g} s (runtime.hang_secs={self._secs:g})")
    return jax.tree.unflatten(self._treedef, self._host)

  def _fill(self, leaf: int, bounds: Sequence[Sequence[int]], values: np.ndarray) -> None:
    self._host[leaf][tuple(slice(*bound) for bound in bounds)] = values
    with self._changed:
      self._missing -= values.size
      self._changed.notify_all()


def assemble_batch(shapes: Mapping[str, Sequence[int]], placement: Batch, parts: Sequence[np.ndarray]) -> Batch:
  """A batch of which this process has these parts, field by field in the order of `shapes`."""
  left, fields = list(parts), {}
  for name, shape in shapes.items():
    place = getattr(placement, name)
    count = len(parts_of(place, shape, jax.process_index()))
    fields[name] = assemble(shape, place, left[:count])
    left = left[count:]
  return Batch(**fields)


def send_parts(world: World, number: int, tree: Any) -> Callable[[], None]:
  """A follower's answer to a `Gathered` tree: what sends its parts, in whichever thread calls it."""
  leaves = jax.tree.leaves(tree)

  def send() -> None:
    for leaf, array in enumerate(leaves):
      for bounds, values in own_parts(array):
        world.send(0, "part", {"number": number, "leaf": leaf, "bounds": bounds}, [values])

  return send

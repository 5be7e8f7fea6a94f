"""Versioned weights on their way from the trainer to the searchers: converted once, moved device to device, swapped whole.

What is moved need not be what is sampled with: adapters are moved alone, and merged on each searcher's own devices.

`publish` is dispatched before the next optimizer step, which donates the trainer's buffers, and always makes buffers of its own. A
searcher sees all of version v or all of version w, never a mixture, and a version is visible only after its transfer has succeeded:
a failed transfer raises in the trainer and leaves the searchers on the weights, and the label, that they have.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
from typing import Any, Callable, Sequence

import jax


@dataclasses.dataclass(frozen=True)
class Weights:
  """Parameters in a searcher's layout and on its devices, with the number of optimizer updates they have seen.

  `moved` is what came from the trainer: the parameters themselves, or what they were made of.
  """

  version: int
  params: Any
  moved: Any


class WeightStore:
  """The newest published weights of every searcher.

  Args:
    convert: params of the trainer -> params in the searcher's layout and dtype, jitted, on the trainer's devices.
    placements: for each searcher, what `jax.device_put` takes as the place of the converted tree (a device, a sharding or a tree).
    expand: for each searcher, moved tree -> parameters that it samples with, on its devices. Default: the moved tree.
  """

  def __init__(
      self,
      convert: Callable[[Any], Any],
      placements: Sequence[Any],
      *,
      expand: Sequence[Callable[[Any], Any]] | None = None,
  ):
    self._convert = convert
    self._placements = list(placements)
    self._expand = list(expand) if expand is not None else [lambda moved: moved] * len(self._placements)
    self._lock = threading.Lock()
    self._latest: list[Weights | None] = [None] * len(self._placements)
    self._mover = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="weights")
    self._moving: concurrent.futures.Future | None = None

  def publish(self, params: Any, version: int, *, wait: bool = False) -> None:
    """Starts the move of `params` to all searchers; with `wait`, returns when they are there.

    Raises: what the previous transfer, or with `wait` this one, failed with.
    """
    self.join()
    moved = self._dispatch(params)
    self._moving = self._mover.submit(self._finish, moved, version)
    if wait:
      self.join()

  def pin(self, params: Any, version: int, *, searcher: int) -> Weights:
    """A private copy on one searcher, as for an evaluation at a fixed version; what is published stays as it is."""
    moved = jax.device_put(self._convert(params), self._placements[searcher], may_alias=False)
    return Weights(version, self._expand[searcher](moved), moved)

  def adopt(self, moved: Any, version: int) -> None:
    """Puts restored weights in place, as they were moved (`Weights.moved`): a copy for each searcher."""
    copies = [jax.device_put(moved, place, may_alias=False) for place in self._placements]
    self._finish(copies, version)

  def abstract(self, params: Any, *, searcher: int) -> Any:
    """Shapes, dtypes and shardings of what is moved to one searcher, as a checkpoint is restored to."""
    place = self._placements[searcher]
    sharding = jax.sharding.SingleDeviceSharding(place) if isinstance(place, jax.Device) else place
    converted = jax.eval_shape(self._convert, params)
    if isinstance(sharding, jax.sharding.Sharding):
      sharding = jax.tree.map(lambda _: sharding, converted)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), converted, sharding)

  def latest(self, searcher: int) -> Weights:
    """The newest weights that have arrived at a searcher. Raises RuntimeError before the first publish."""
    with self._lock:
      weights = self._latest[searcher]
    if weights is None:
      raise RuntimeError(f"searcher {searcher} asked for weights before any were published")
    return weights

  def join(self) -> None:
    """Waits for the transfer under way, if any, and raises what it failed with."""
    moving, self._moving = self._moving, None
    if moving is not None:
      moving.result()

  def close(self) -> None:
    self._mover.shutdown(wait=True)

  def _dispatch(self, params: Any) -> list[Any]:
    # may_alias=False: where trainer and searcher share a device, a leaf that the conversion leaves alone would otherwise be the
    # trainer's own buffer, which the next optimizer step deletes.
    converted = self._convert(params)
    return [jax.device_put(converted, place, may_alias=False) for place in self._placements]

  def _finish(self, moved: list[Any], version: int) -> None:
    jax.block_until_ready(moved)
    expanded = [expand(tree) for expand, tree in zip(self._expand, moved, strict=True)]
    jax.block_until_ready(expanded)
    with self._lock:
      self._latest = [Weights(version, params, tree) for params, tree in zip(expanded, moved, strict=True)]

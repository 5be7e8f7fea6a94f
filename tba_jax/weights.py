"""Versioned weights on their way from the trainer to the searchers: converted once, moved device to device, swapped
whole.

What is moved need not be what is sampled with: adapters are moved alone, and merged on each searcher's own devices.

The conversion is dispatched before the next optimizer step, which donates the trainer's buffers, and always makes
buffers of its own; the move is made by a thread beside the trainer's. One transfer is under way at a time, so that a
searcher's devices hold at most two versions: the one in use and the one that arrives. A searcher sees all of version v
or all of version w, never a mixture, and a version is visible only after its transfer has succeeded: a failed transfer
raises in the trainer and leaves the searchers on the weights, and the label, that they have.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from typing import Any, Callable, Sequence

import jax

from tba_jax.deadlines import Hung, join_thread
from tba_jax.sharding import dispatched


@dataclasses.dataclass(frozen=True)
class Weights:
  """Parameters in a searcher's layout and on its devices, with the number of optimizer updates they have seen.

  `moved` is what came from the trainer: the parameters themselves, or what they were made of.
  """

  version: int
  params: Any
  moved: Any


@dataclasses.dataclass(frozen=True)
class Pinned:
  """Weights of one version for one searcher, not on its devices yet; what is published stays as it is.

  `converted` is the tree as it will be moved: arrays of its own, on the trainer's devices or, restored, the host's.
  Called, by the searcher's thread, it moves them there.
  """

  version: int
  converted: Any
  _receive: Callable[[Any, int], Weights]

  def __call__(self) -> Weights:
    return self._receive(self.converted, self.version)


class _Transfer:
  """A move under way in a thread of its own, which does not keep a process alive that is to end."""

  def __init__(self, move: Callable[[], None], version: int):
    self.version, self.error, self._move = version, None, move
    self.thread = threading.Thread(target=self._run, name="weights", daemon=True)
    self.thread.start()

  def _run(self) -> None:
    try:
      self._move()
    except BaseException as error:  # raised by whoever joins
      self.error = error


class WeightStore:
  """The newest published weights of every searcher.

  Args:
    convert: params of the trainer -> params in the searcher's layout and dtype, jitted, on the trainer's devices.
    placements: for each searcher, what `jax.device_put` takes as the place of the converted tree (a device, a sharding
      or a tree).
    timeout_secs: longest wait for a transfer.
    expand: for each searcher, moved tree -> parameters that it samples with, on its devices. Default: the moved tree.
  """

  def __init__(
      self,
      convert: Callable[[Any], Any],
      placements: Sequence[Any],
      *,
      timeout_secs: float,
      expand: Sequence[Callable[[Any], Any]] | None = None,
  ):
    self._convert_abstractly, self._convert_dispatched = convert, dispatched(convert)
    self._fetch: Callable[[str, Any], Callable[[], Any]] | None = None
    self._placements, self._timeout_secs = list(placements), timeout_secs
    self._expand = list(expand) if expand is not None else [lambda moved: moved] * len(self._placements)
    self._lock = threading.Lock()
    self._latest: list[Weights | None] = [None] * len(self._placements)
    self._moving: _Transfer | None = None

  def fetch_by(self, fetch: Callable[[str, Any], Callable[[], Any]]) -> None:
    """From now on what is converted is brought to this process's memory on the way: the trainer's mesh is one of several
    processes. `fetch("published", tree)` begins that and returns what waits for it."""
    self._fetch = fetch

  def publish(self, params: Any, version: int, *, wait: bool = False) -> None:
    """Starts the move of `params` to all searchers; with `wait`, returns when they are there.

    Raises: what the previous transfer, or with `wait` this one, failed with; Hung if it takes longer than the deadline.
    """
    self.join()
    converted = self._convert(params)
    self._moving = _Transfer(lambda: self._move(converted, version), version)
    if wait:
      self.join()

  def pin(self, params: Any, version: int, *, searcher: int) -> Pinned:
    """A private copy for one searcher, as for an evaluation at a fixed version; `params` may be donated afterwards."""
    return self.pinned(self._convert(params), version, searcher=searcher)

  def pinned(self, converted: Any, version: int, *, searcher: int) -> Pinned:
    """The same of a tree that is converted already, as a checkpoint holds it."""
    return Pinned(version, converted, functools.partial(self.received, searcher=searcher))

  def received(self, converted: Any, version: int, *, searcher: int) -> Weights:
    """A converted tree, from wherever it came, as weights of a searcher; what is published stays as it is."""
    converted = converted() if callable(converted) else converted
    moved = jax.device_put(converted, self._placements[searcher], may_alias=False)
    return Weights(version, self._expand[searcher](moved), moved)

  def adopt(self, moved: Any, version: int) -> None:
    """Puts restored weights in place, as they were moved (`Weights.moved`): a copy for each searcher."""
    self._move(moved, version)

  def abstract(self, params: Any, *, searcher: int) -> Any:
    """Shapes, dtypes and shardings of what is moved to one searcher, as a checkpoint is restored to."""
    place = self._placements[searcher]
    sharding = jax.sharding.SingleDeviceSharding(place) if isinstance(place, jax.Device) else place
    converted = jax.eval_shape(self._convert_abstractly, params)
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
    """Waits for the transfer under way, if any.

    Raises: what it failed with; Hung if it takes longer than the deadline.
    """
    moving, self._moving = self._moving, None
    if moving is None:
      return
    if not join_thread(moving.thread, secs=self._timeout_secs):
      raise Hung(f"weights of version {moving.version} have not arrived at the searchers after {self._timeout_secs:g} "
                 f"s (thread {moving.thread.name}, runtime.hang_secs={self._timeout_secs:g})")
    if moving.error is not None:
      raise moving.error

  def _convert(self, params: Any) -> Any:
    """Dispatches the conversion and returns at once: the tree, or what waits for it."""
    converted = self._convert_dispatched(params)
    return converted if self._fetch is None else self._fetch("published", converted)

  def _move(self, converted: Any, version: int) -> None:
    converted = converted() if callable(converted) else converted
    # may_alias=False: where trainer and searcher share a device, a leaf that the conversion leaves alone would
    # otherwise be the trainer's own buffer, which the next optimizer step deletes.
    moved = [jax.device_put(converted, place, may_alias=False) for place in self._placements]
    jax.block_until_ready(moved)
    expanded = [expand(tree) for expand, tree in zip(self._expand, moved, strict=True)]
    jax.block_until_ready(expanded)
    with self._lock:
      self._latest = [Weights(version, params, tree) for params, tree in zip(expanded, moved, strict=True)]

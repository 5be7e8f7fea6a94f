"""Searchers as actors of a Ray cluster: where they are placed, what their processes are told, how they are called.

The trainer, the buffer and the ledger stay in the process that was started. Nothing is shared but Ray's object store: a
searcher's machine needs the same packages and the data that the task reads, and no common file system. Ray is imported
when a run asks for it.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np

from tba_jax.runtime.host import Report, SearcherHost, SentWeights
from tba_jax.runtime.on_slice import SEATED
from tba_jax.runtime.remote import HostDied

_POLL_SECS = 0.1

# libtpu divides a host by these: chips of a process, as x,y,z.
_CHIP_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}


def resources(platform: str, devices: int) -> dict[str, Any]:
  """What Ray is asked for, for a process with so many devices of a platform ("cpu", "gpu", "tpu")."""
  if platform == "tpu":
    return {"num_cpus": 1, "resources": {"TPU": devices}}
  return {"num_cpus": 1, "num_gpus": devices} if platform == "gpu" else {"num_cpus": 1}


def environment(platform: str, devices: int, *, own: Mapping[str, str]) -> dict[str, str]:
  """Environment of such a process, which jax reads when it is imported.

  Without bounds libtpu takes the process for one of a slice and waits for the slice's other hosts. Which chips are
  visible is set by Ray, which knows who holds the others.

  Args:
    own: this process's environment; what concerns the cache of compiled programs is passed on.
  Raises: ValueError for a number of TPU chips that no part of a host has.
  """
  passed = {name: own[name] for name in ("JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME") if name in own}
  if platform == "cpu":
    return {**passed, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
  if platform == "gpu":
    return {**passed, "JAX_PLATFORMS": "cuda,cpu"}
  if devices not in _CHIP_BOUNDS:
    raise ValueError(f"devices.per_searcher={devices} TPU chips are no part of a host; use one of "
                     f"{', '.join(map(str, _CHIP_BOUNDS))}")
  return {**passed, "JAX_PLATFORMS": "tpu,cpu", **_bounds(devices)}


def _bounds(chips: int) -> dict[str, str]:
  """For libtpu: a process of its own with so many chips of this host. Older releases read the last two."""
  return {"TPU_PROCESS_BOUNDS": "1,1,1", "TPU_CHIPS_PER_PROCESS_BOUNDS": _CHIP_BOUNDS[chips],
          "TPU_HOST_BOUNDS": "1,1,1", "TPU_CHIPS_PER_HOST_BOUNDS": _CHIP_BOUNDS[chips]}


def keep_to_this_host(trainer_devices: int, environ: MutableMapping[str, str]) -> None:
  """Tells libtpu, before it looks for devices, that the trainer's process is no part of a slice of several hosts.

  What the user has set stays. Without devices.trainer (0) nothing is known and nothing is set; elsewhere than on a TPU
  nobody reads it.
  """
  for name, value in (_bounds(trainer_devices) if trainer_devices in _CHIP_BOUNDS else {}).items():
    environ.setdefault(name, value)


@contextlib.contextmanager
def joined(address: str, *, platform: str, trainer_devices: int) -> Iterator[None]:
  """This process as a driver of the cluster at `address` ("": one of this machine alone, for as long as it lasts).

  An accelerator's devices that the trainer uses are reserved, so that no searcher is placed on them.
  Raises: ValueError if there is no cluster at the address.
  """
  import ray

  own_cluster = {} if address else {"include_dashboard": False}
  if not address:
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 would starve searchers that share the trainer's cores
  package = str(pathlib.Path(__file__).resolve().parent.parent)
  # ray.init sets handlers of its own, under which a SIGTERM would end the process without a checkpoint.
  handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
  try:
    # What searchers have to say comes back in calls. This package is sent along, so that all run the same one.
    ray.init(address=address or "local", log_to_driver=False, configure_logging=False,
             runtime_env={"py_modules": [package]}, **own_cluster)
  except (ConnectionError, RuntimeError, ValueError) as error:
    raise ValueError(f"runtime.ray_address={address!r} could not be joined ({error}); start Ray on every machine (ray "
                     "start --head, ray start --address=HEAD), or leave the address empty for this machine alone"
                     ) from None
  for number, handler in handlers.items():
    signal.signal(number, handler)
  seat = None
  try:
    if platform != "cpu" and SEATED not in os.environ:
      strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
          ray.get_runtime_context().get_node_id(), soft=False)
      taken = {**resources(platform, trainer_devices), "num_cpus": 0}
      seat = ray.remote(_Seat).options(scheduling_strategy=strategy, **taken).remote()
      ray.get(seat.sit.remote())
    yield
  finally:
    del seat
    ray.shutdown()


class _Seat:
  """Holds the trainer's devices against Ray."""

  def sit(self) -> None:
    """Returns when the devices are held."""


def put(chunk: np.ndarray) -> Any:
  """A chunk into the object store."""
  import ray

  return ray.put(chunk)


def fetch(chunks: Sequence[Any]) -> list[np.ndarray]:
  """Chunks out of the object store: read in place on the machine that has them, or brought there once."""
  import ray

  return ray.get(list(chunks))


class ActorConnection:
  """A host in an actor. See `remote.Connection`.

  Args:
    make_host: a function of a module, called in the actor with `spec`, the reference and `fetch`.
    spec: what else the host is made of.
    name: of the searcher, for messages.
    platform, devices: of the actor's process.
  """

  def __init__(self, make_host: Callable[..., SearcherHost], spec: Any, *, name: str, platform: str, devices: int):
    self._make_host, self._spec, self._name = make_host, spec, name
    self._resources = resources(platform, devices)
    self._environment = environment(platform, devices, own=os.environ)
    self._actor: Any = None
    self._prepared: Any = None

  def begin(self, reference: SentWeights, weights: SentWeights) -> None:
    import ray

    self.end()
    actor = ray.remote(_Actor).options(
        runtime_env={"env_vars": self._environment}, max_restarts=0, max_task_retries=0, **self._resources)
    self._actor = actor.remote(self._make_host, self._spec, reference)
    self._prepared = self._actor.call.remote("prepare", (weights,))

  def poll(self) -> Report | None:
    answer = self._result(self._prepared, timeout=_POLL_SECS)
    return None if answer is None else answer[0]

  def describe(self) -> str:
    return (f"it waits for a node with {self._resources} free, or loads and compiles; the cluster has "
            f"{_of_cluster('cluster_resources')}, free {_of_cluster('available_resources')}")

  def call(self, method: str, *arguments: Any) -> Any:
    if self._actor is None:
      raise HostDied(f"{self._name} was ended")
    pending = self._actor.call.remote(method, arguments)
    while (done := self._result(pending, timeout=1.0)) is None:
      pass
    return done[0]

  def end(self) -> None:
    import ray

    if self._actor is not None and ray.is_initialized():
      ray.kill(self._actor)
    self._actor = self._prepared = None

  def _result(self, pending: Any, *, timeout: float) -> Any:
    """What the actor answered, a tuple of one; None if it has not yet."""
    import ray

    try:
      ready, _ = ray.wait([pending], timeout=timeout)
      return ray.get(pending) if ready else None
    except ray.exceptions.RayTaskError as error:
      raise error.as_instanceof_cause() from None
    except ray.exceptions.RayError as error:
      raise HostDied(f"the process of {self._name} is gone ({type(error).__name__}): {error}") from None


def _of_cluster(kind: str) -> dict[str, float]:
  import ray

  return {name: amount for name, amount in getattr(ray, kind)().items() if name in ("CPU", "GPU", "TPU")}


class _Actor:
  """The process of a host."""

  def __init__(self, make_host: Callable[..., SearcherHost], spec: Any, reference: SentWeights):
    self._host = make_host(spec, reference, fetch)

  def call(self, method: str, arguments: tuple[Any, ...]) -> tuple[Any]:
    """What the host's method returns, in a tuple, for it may be None."""
    return (getattr(self._host, method)(*arguments),)

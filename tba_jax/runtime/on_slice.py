"""A trainer's processes on the hosts of a TPU slice that Ray reserves: a job of `supervise.py`.

Ray's slice placement group has a bundle for each host of one slice. An actor in each starts the command there, as
`--coordinator=HOST:PORT --num_processes=N --process_id=I`; the number of a process is that of its host in the slice, by
which libtpu orders the devices. This module imports no jax, and Ray when it is used.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tba_jax.runtime import supervise

SEATED = "TBA_JAX_SEATED"  # of a process whose devices Ray holds already

_RESERVE_SECS = 600.0
_LAST_SECS = 60.0  # for the other processes to end when one has
_POLL_SECS, _SAY_SECS = 0.2, 60.0
_WORKER_ID = "ray.io/tpu-worker-id"  # label of a node, set by Ray
# Of the command's own environment, what its processes are to have, too.
_PASSED = ("JAX_", "XLA_", "LIBTPU_", "XDG_CACHE_HOME", "HF_", "WANDB_", "RAY_AUTH_", "PYTHONPATH")
# What Ray tells its own workers: a driver that they start is none, and has all chips of its host.
_RAYS_OWN = ("RAY_JOB_ID", "RAY_RAYLET_PID", "RAY_CLIENT_MODE", "TPU_VISIBLE_CHIPS")
_RAYS_NAMES = {"v5e": "v5litepod"}


class Slice(NamedTuple):
  """A kind of slice, as v6e:4x4, by Ray's name of the kind."""

  accelerator: str
  topology: str

  def __str__(self) -> str:
    return f"{self.accelerator}:{self.topology}"


class Place(NamedTuple):
  """Where an actor is."""

  host: str  # address
  port: int  # free there
  worker_id: str  # of the host in its slice; "": Ray does not know


def parse(text: str) -> Slice:
  """Raises: ValueError for what is no KIND:TOPOLOGY."""
  found = re.fullmatch(r"(v\d+\w*):(\d+(?:x\d+){1,2})", text.lower())
  if not found:
    raise ValueError(f"{text} must be KIND:TOPOLOGY, for example v6e:4x4 or v5p:2x2x2")
  accelerator, topology = found.groups()
  return Slice(_RAYS_NAMES.get(accelerator, accelerator), topology)


def bundles(asked: Slice) -> tuple[int, dict[str, float]]:
  """How many hosts a slice has, and what Ray is asked for of each. Raises: ValueError if there is no such slice."""
  from ray.util.tpu import get_tpu_worker_resources

  return get_tpu_worker_resources(asked.topology, asked.accelerator)


def order(places: Sequence[Place]) -> list[int]:
  """Which actor has process 0, 1, ... Raises: ValueError if two are the same host of the slice."""
  ids = [place.worker_id for place in places]
  if not all(name.isdecimal() for name in ids):
    return list(range(len(places)))
  if len(set(ids)) < len(ids):
    raise ValueError(f"the hosts of the slice have the numbers {', '.join(ids)}; each must have its own")
  return sorted(range(len(places)), key=lambda i: int(ids[i]))


def command(arguments: Sequence[str], *, address: str, num_processes: int, process_id: int) -> list[str]:
  """What is started on a host, behind `python`. `arguments`: of this command."""
  kept, left = [], iter(arguments)
  for argument in left:
    name, sign, _ = argument.lstrip("-").partition("=")
    if name not in ("trainer_slice", "restarts") or not argument.startswith("-"):
      kept.append(argument)
    elif not sign:
      next(left, None)  # its value is an argument of its own
  together = [] if num_processes == 1 else [
      f"--coordinator={address}", f"--num_processes={num_processes}", f"--process_id={process_id}"]
  return ["-m", "tba_jax.main", *kept, *together]


def environment(own: Mapping[str, str], *, of_worker: Mapping[str, str]) -> dict[str, str]:
  """Of a process of the trainer. Where it is in the slice, and with whom, libtpu finds as in any process on that host.

  Args:
    own: of the command that was started.
    of_worker: of the Ray worker on the host.
  """
  base = {name: value for name, value in of_worker.items() if name not in _RAYS_OWN}
  return {**base, **{name: value for name, value in own.items() if name.startswith(_PASSED)}, SEATED: "1"}


class SliceJob:
  """See the module, and `supervise.Job`.

  Args:
    group: Ray's placement group, ready; `resources`: of each of its `number` bundles.
    arguments: of the command.
    workdir: on the host of process 0.
    say: prints a line for the user.
  """

  def __init__(self, group: Any, *, number: int, resources: Mapping[str, float], arguments: Sequence[str],
               workdir: pathlib.Path, say: Callable[[str], None]):
    self._group, self._number, self._resources = group, number, dict(resources)
    self._arguments, self._workdir, self._say = list(arguments), workdir, say
    self._hosts: list[Any] = []  # actors, by process
    self._signals: list[int] = []
    self._found: set[supervise.Checkpoint] | None = None  # checkpoints; None before the first look

  def run(self) -> int:
    import ray

    self._signals.clear()
    if not self._hosts and not self._begin():
      return supervise.DONE  # a stop was asked for meanwhile
    try:
      place = ray.get(self._hosts[0].enter.remote(os.getcwd()))  # another port than the last time
    except ray.exceptions.RayActorError:
      self._end()
      return -signal.SIGKILL
    address = f"{place.host}:{place.port}"
    running = {
        host.run.remote(command(self._arguments, address=address, num_processes=self._number, process_id=i),
                        str(self._workdir)): i for i, host in enumerate(self._hosts)}
    codes, until, is_whole = {}, None, True
    while running:
      for number in iter(lambda: self._signals.pop(0) if self._signals else None, None):
        for i in running.values():
          self._hosts[i].send.remote(number)
      for done in ray.wait(list(running), timeout=_POLL_SECS)[0]:
        codes[running.pop(done)] = code = _code_of(done)
        is_whole = is_whole and code is not None
        until = until or time.monotonic() + _LAST_SECS
      if until is not None and time.monotonic() > until:
        for i in running.values():
          ray.kill(self._hosts[i])
    self._look()
    if not is_whole:
      self._end()
    # What ended the others is more to the point than that they ended.
    killed = [-signal.SIGKILL if code is None else code for code in codes.values() if code is None or code < 0]
    return killed[0] if killed else codes[0]

  def send(self, number: int) -> None:
    self._signals.append(number)  # calls of Ray are not for signal handlers

  def describe(self) -> str:
    return f"one of the trainer's {self._number} processes on the slice"

  def checkpoints(self) -> set[supervise.Checkpoint]:
    """Those on the host of process 0 when it was there last."""
    if self._found is None:
      self._found = set()
      if self._begin():
        self._look()
    return self._found

  def _begin(self) -> bool:
    """An actor on each host, in the order of the processes; waits for hosts that Ray has lost. False if a signal came.
    """
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    of_bundle = {name: amount for name, amount in self._resources.items() if name != "CPU"}
    self._hosts = [
        ray.remote(_Host).options(
            num_cpus=self._resources["CPU"], resources=of_bundle, max_concurrency=4, max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=i),
        ).remote(dict(os.environ)) for i in range(self._number)]
    entered = [host.enter.remote(os.getcwd()) for host in self._hosts]
    began = said = time.monotonic()
    while len(ray.wait(entered, num_returns=self._number, timeout=_POLL_SECS)[0]) < self._number:
      if self._signals:
        self._end()
        return False
      if time.monotonic() - said > _SAY_SECS:
        said = time.monotonic()
        self._say(f"waits for the {self._number} hosts of the slice, for {said - began:.0f} s")
    try:
      places = ray.get(entered)
    except ray.exceptions.RayTaskError as error:
      raise error.as_instanceof_cause() from None
    self._hosts = [self._hosts[i] for i in order(places)]
    return True


  def _look(self) -> None:
    import ray

    with contextlib.suppress(ray.exceptions.RayActorError):
      self._found = set(ray.get(self._hosts[0].checkpoints.remote(str(self._workdir))))

  def _end(self) -> None:
    import ray

    for host in self._hosts:
      ray.kill(host)
    self._hosts = []


def _code_of(done: Any) -> int | None:
  """None where the actor died, with its process or with its machine."""
  import ray

  try:
    return ray.get(done)
  except ray.exceptions.RayActorError:
    return None


class _Host:
  """The actor on a host of the slice."""

  def __init__(self, own: dict[str, str]):
    self._own, self._child = own, None

  def enter(self, folder: str) -> Place:
    """Goes to the checkout. Raises: ValueError if there is none."""
    import ray

    if not pathlib.Path(folder, "tba_jax").is_dir():
      raise ValueError(f"{folder}, where the command was started, is no checkout on {socket.gethostname()}; have one "
                       "under the same path on every host of the slice")
    os.chdir(folder)
    host = ray.util.get_node_ip_address()
    node = ray.get_runtime_context().get_node_id()
    labels = next(node_["Labels"] for node_ in ray.nodes() if node_["NodeID"] == node)
    with socket.create_server((host, 0)) as server:
      return Place(host, server.getsockname()[1], labels.get(_WORKER_ID, ""))

  def run(self, arguments: Sequence[str], workdir: str) -> int:
    """Exit code of the process."""
    self._child = supervise.Child(
        [sys.executable, *arguments], workdir=pathlib.Path(workdir),
        environment=environment(self._own, of_worker=os.environ))
    return self._child.run()

  def send(self, number: int) -> None:
    if self._child is not None:
      self._child.send(number)

  def checkpoints(self, workdir: str) -> list[supervise.Checkpoint]:
    return sorted(supervise.checkpoints_in(pathlib.Path(workdir)))


@contextlib.contextmanager
def reserved(asked: Slice, *, ray_address: str, arguments: Sequence[str], workdir: pathlib.Path,
             say: Callable[[str], None]) -> Iterator[SliceJob]:
  """The job on a slice, which is Ray's again afterwards.

  Raises: ValueError if there is no cluster, or no such slice comes free in time.
  """
  import ray
  from ray.util.tpu import SlicePlacementGroup

  number, resources = bundles(asked)
  try:
    ray.init(address=ray_address, configure_logging=False,
             runtime_env={"py_modules": [str(pathlib.Path(__file__).resolve().parent.parent)]})
  except (ConnectionError, RuntimeError, ValueError) as error:
    raise ValueError(f"runtime.ray_address={ray_address!r} could not be joined ({error})") from None
  try:
    say(f"waits for a slice {asked}: {number} hosts with {resources} each")
    try:
      placed = SlicePlacementGroup(asked.topology, asked.accelerator, head_reservation_timeout_s=_RESERVE_SECS)
    except (RuntimeError, TimeoutError) as error:
      raise ValueError(f"Ray has no slice {asked} for it, after waiting for {_RESERVE_SECS:.0f} s at most ({error})"
                       ) from None
    try:
      if not placed.slice_placement_group.wait(_RESERVE_SECS):
        raise ValueError(f"the slice {asked} has not all of its {number} hosts after {_RESERVE_SECS:.0f} s")
      placed.release_head_pgs()
      yield SliceJob(placed.slice_placement_group, number=number, resources=resources, arguments=arguments,
                     workdir=workdir, say=say)
    finally:
      placed.shutdown()
  finally:
    ray.shutdown()

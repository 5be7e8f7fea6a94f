"""Processes that are one trainer: how they meet, what the first orders the others to do, and the end of all when one is
gone.

Process 0, the head, decides everything; the others follow its orders. These go over a TCP connection from each
follower to the head, beside the devices: a follower that waits for an order occupies no device, a process that is gone
is noticed at once, and none that waits in a collective operation can keep the others from ending. Each process says
once a second that it is there.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tba_jax.deadlines import Hung, awake_secs, wait_until
from tba_jax.runtime.settings import StopFlag

MEET_SECS = 20.0  # that processes wait for each other at the start
_PING_SECS, _SILENT_SECS = 1.0, 20.0
_END_SECS = 15.0  # for the last order to be followed

FAULT = 1


class CannotMeet(ValueError):
  """The processes of a run did not find together, or do not fit."""


class Message(NamedTuple):
  """`fields` are JSON."""

  kind: str
  fields: dict[str, Any]
  arrays: list[np.ndarray]


class Link:
  """A connection that carries messages: JSON, and arrays as they are. Several threads may send, one receives."""

  def __init__(self, connection: socket.socket):
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    self._socket, self._sending, self._heard = connection, threading.Lock(), awake_secs()

  @property
  def silent_secs(self) -> float:
    """Since the last byte came."""
    return awake_secs() - self._heard

  def send(self, kind: str, fields: Mapping[str, Any] | None = None, arrays: Sequence[np.ndarray] = ()) -> None:
    """Raises: OSError if the connection is gone."""
    described = [[list(array.shape), array.dtype.name] for array in arrays]
    header = json.dumps([kind, fields or {}, described]).encode()
    with self._sending:
      self._socket.sendall(struct.pack("!I", len(header)) + header)
      for array in arrays:
        if array.size:
          self._socket.sendall(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

  def receive(self, *, secs: float | None = None) -> Message:
    """The next message. Raises: OSError if the connection is gone, or TimeoutError after `secs` without a byte."""
    self._socket.settimeout(secs)
    (size,) = struct.unpack("!I", self._read(bytearray(4)))
    kind, fields, described = json.loads(bytes(self._read(bytearray(size))))
    arrays = [np.empty(shape, np.dtype(name)) for shape, name in described]
    for array in arrays:
      self._read(array.reshape(-1).view(np.uint8))
    self._socket.settimeout(None)
    return Message(kind, fields, arrays)

  def _read(self, into: Any) -> Any:
    left = memoryview(into)
    while left.nbytes:
      count = self._socket.recv_into(left)
      if not count:
        raise ConnectionResetError("the other end closed the connection")
      left, self._heard = left[count:], awake_secs()
    return into

  def close(self) -> None:
    self._socket.close()


class World:
  """The processes of a run that have met. Of the head or of a follower.

  Args:
    links: by process: of the head, to each follower; of a follower, to the head.
    process_id, num_processes: of this one, and of all.
    jax_address: for `jax.distributed`.
    say: prints a line for the user.
    lost_code: that this process ends with where another is gone.
    end: ends this process.
  """

  def __init__(self, links: Mapping[int, Link], *, process_id: int, num_processes: int, jax_address: str,
               say: Callable[[str], None], lost_code: int = FAULT, end: Callable[[int], Any] = os._exit):
    self.process_id, self.num_processes, self.jax_address = process_id, num_processes, jax_address
    self.stop: StopFlag | None = None  # of a follower: it is told to the head; of the head: a follower's is set there
    self._links, self._say, self._lost_code, self._end = dict(links), say, lost_code, end
    self._orders: queue.SimpleQueue[Message] = queue.SimpleQueue()
    self._numbers = itertools.count()
    self._changed = threading.Condition()
    self._done: dict[int, set[int]] = {}  # processes by the number of what they have done
    self._sinks: dict[int, Callable[[Message], bool]] = {}
    self._gone: set[int] = set()  # that have said goodbye
    self._closing = False
    self._told_stop = False
    for number, link in self._links.items():
      threading.Thread(target=self._listen, args=(number, link), name=f"process {number}", daemon=True).start()
      threading.Thread(target=self._ping, args=(link,), name=f"ping {number}", daemon=True).start()
    threading.Thread(target=self._watch, name="processes", daemon=True).start()

  @property
  def is_head(self) -> bool:
    return self.process_id == 0

  # --- The head ---

  def order(self, kind: str, **fields: Any) -> None:
    """Tells all followers to do something; they do it in the order of the calls."""
    for number in self._links:
      self.send(number, kind, fields)

  def send(self, number: int, kind: str, fields: Mapping[str, Any], arrays: Sequence[np.ndarray] = ()) -> None:
    """Tells one process something."""
    try:
      self._links[number].send(kind, fields, arrays)
    except OSError as error:
      self._lost(number, str(error))

  def wait_for_all(self, *, secs: float, what: str) -> None:
    """Returns when the followers have done all that they were ordered. Raises: Hung after `secs`."""
    number = next(self._numbers)
    with self._changed:
      self._done[number] = set()
    self.order("answer", number=number)

    def all_done(timeout: float) -> bool:
      with self._changed:
        return self._changed.wait_for(lambda: len(self._done[number]) == len(self._links), timeout)

    if not wait_until(all_done, secs=secs):
      missing = sorted(set(self._links) - self._done[number])
      raise Hung(f"process {missing[0]} of the trainer is not through with {what} after {secs:g} s "
                 f"(runtime.hang_secs={secs:g})")

  def sink(self, take: Callable[[Message], bool]) -> int:
    """A number under which followers `send` parts of something; `take` is called in a thread of its own, and returns
    whether there are more to come."""
    number = next(self._numbers)
    self._sinks[number] = take
    return number

  def close(self, code: int, text: str = "") -> None:
    """Ends the followers with an exit code, and what they are to say before; returns when they have ended."""
    self._closing = True
    self.order("end", code=code, text=text)
    with self._changed:
      self._changed.wait_for(lambda: len(self._gone) == len(self._links), _END_SECS)

  # --- A follower ---

  def next_order(self) -> Message:
    """Blocks until there is one."""
    return self._orders.get()

  def answer(self, number: int) -> None:
    """All orders up to here are done."""
    self.send(0, "done", {"number": number})

  def goodbye(self) -> None:
    """The last word, after the order to end."""
    self.send(0, "goodbye", {})

  def fail(self, text: str) -> None:
    """This process cannot go on: says so to the head, and ends."""
    self._closing = True
    self.send(0, "failed", {"text": text})
    self._end(FAULT)

  # --- Both ---

  def _listen(self, number: int, link: Link) -> None:
    while True:
      try:
        message = link.receive()
      except OSError as error:
        if not self._closing:
          self._lost(number, str(error))
        return
      if message.kind == "ping":
        continue
      if self.is_head:
        self._hear(number, message)
      else:
        if message.kind == "end":
          self._closing = True
          threading.Timer(_END_SECS, self._end, (message.fields["code"] or FAULT,)).start()
        self._orders.put(message)

  def _hear(self, number: int, message: Message) -> None:
    if message.kind == "part":
      with self._changed:  # parts come from several followers, in a thread each
        if not self._sinks[message.fields["number"]](message):
          del self._sinks[message.fields["number"]]
    elif message.kind == "stop":
      if self.stop is not None:
        self.stop.set(f"{message.fields['reason']} of process {number}")
    elif message.kind == "failed":
      self._lost(number, message.fields["text"], code=FAULT)
    else:
      with self._changed:
        if message.kind == "goodbye":
          self._gone.add(number)
        else:
          self._done[message.fields["number"]].add(number)
        self._changed.notify_all()

  def _ping(self, link: Link) -> None:
    while not self._closing:
      try:
        link.send("ping")
      except OSError:  # the thread that listens says it
        return
      time.sleep(_PING_SECS)

  def _watch(self) -> None:
    while not self._closing:
      time.sleep(_PING_SECS / 2)
      for number, link in self._links.items():
        if link.silent_secs > _SILENT_SECS and not self._closing:
          self._lost(number, f"it has said nothing for {link.silent_secs:.0f} s")
      if not self.is_head and not self._told_stop and self.stop is not None and self.stop.is_set():
        self._told_stop = True
        self.send(0, "stop", {"reason": self.stop.reason})

  def _lost(self, number: int, reason: str, *, code: int | None = None) -> None:
    """A process is gone: no step can end, nor can a checkpoint be taken, and whoever waits for a device hears no
    exception."""
    self._say(f"error: process {number} of the trainer's {self.num_processes} is gone ({reason.strip()}); process "
              f"{self.process_id} ends too, without a checkpoint of this moment, and the same commands resume from the "
              "last one")
    self._end(self._lost_code if code is None else code)


def meet(address: str, *, num_processes: int, process_id: int, identity: str, command: Callable[[int], str],
         say: Callable[[str], None], secs: float = MEET_SECS, lost_code: int = FAULT) -> World:
  """Waits until all processes are there.

  Args:
    address: HOST:PORT of the head, which listens there.
    identity: what must be equal in all, as the config's JSON.
    command: what a process is started with, by its id; for messages.
    say: prints a line for the user.
    lost_code: see `World`.
  Raises: CannotMeet, in each process that is there.
  """
  host, _, port = address.rpartition(":")
  hello = {"process_id": process_id, "num_processes": num_processes, "identity": identity}
  shared = dict(process_id=process_id, num_processes=num_processes, say=say, lost_code=lost_code)
  if process_id == 0:
    links, jax_address = _welcome(host, int(port), hello, command, secs)
    return World(links, jax_address=jax_address, **shared)
  link, jax_address = _greet(host, int(port), hello, command, secs)
  return World({0: link}, jax_address=jax_address, **shared)


def _welcome(host: str, port: int, own: Mapping[str, Any], command: Callable[[int], str], secs: float
             ) -> tuple[dict[int, Link], str]:
  """The head's part."""
  end, links, arrived, problems = time.monotonic() + secs, {}, [], []
  try:
    server = socket.create_server((host, port))
  except (OSError, OverflowError) as error:
    raise CannotMeet(f"--coordinator={host}:{port} cannot be listened on by process 0 ({error}); give the address of "
                     "the machine that process 0 runs on, and a port that is free there") from None
  with server:
    while len(links) < own["num_processes"] - 1 and not problems and (left := end - time.monotonic()) > 0:
      server.settimeout(left)
      try:
        link = Link(server.accept()[0])
        hello = link.receive(secs=5.0).fields
        problems += _misfits(own, hello, taken=links)
      except (OSError, ValueError, KeyError, TypeError):  # nobody came, or someone who is no process of a run
        continue
      arrived.append(link)
      links[hello["process_id"]] = link
  missing = [i for i in range(1, own["num_processes"]) if i not in links]
  if missing and not problems:
    commands = "".join(f"\n  {command(i)}" for i in missing)
    problems.append(f"process{'es' * (len(missing) > 1)} {', '.join(map(str, missing))} of {own['num_processes']} did "
                    f"not come to {host}:{port} within {secs:g} s; start all of them within that time, each on its machine:"
                    f"{commands}")
  jax_port = _free_port(host)
  for link in arrived:
    with contextlib.suppress(OSError):  # one that is gone by now is noticed by those who listen to it
      link.send("refused" if problems else "welcome", {"problems": problems, "port": jax_port})
  if problems:
    for link in arrived:
      link.close()
    raise CannotMeet("\n".join(problems))
  return links, f"{host}:{jax_port}"


def _misfits(own: Mapping[str, Any], hello: Mapping[str, Any], *, taken: Iterable[int]) -> Iterator[str]:
  number = hello["process_id"]
  if hello["num_processes"] != own["num_processes"]:
    yield (f"process {number} was started with --num_processes={hello['num_processes']}, process 0 with "
           f"{own['num_processes']}; give all the same")
  elif number in taken or not 0 < number < own["num_processes"]:
    yield f"--process_id={number} came twice; give each process its own, from 0 to {own['num_processes'] - 1}"
  elif hello["identity"] != own["identity"]:
    yield f"process {number} was started with another config than process 0; start all with the same flags"


def _greet(host: str, port: int, hello: Mapping[str, Any], command: Callable[[int], str], secs: float
           ) -> tuple[Link, str]:
  """A follower's part."""
  end = time.monotonic() + secs
  while True:
    try:
      link = Link(socket.create_connection((host, port), timeout=max(0.1, end - time.monotonic())))
      break
    except (OSError, OverflowError) as error:
      if time.monotonic() > end:
        raise CannotMeet(f"process 0 was not found at --coordinator={host}:{port} within {secs:g} s ({error}); start "
                         f"it there:\n  {command(0)}") from None
      time.sleep(0.2)
  try:
    link.send("hello", hello)
    answer = link.receive(secs=max(1.0, end + 3.0 - time.monotonic()))
    if answer.kind == "refused":
      link.close()
      raise CannotMeet("\n".join(answer.fields["problems"]))
    return link, f"{host}:{answer.fields['port']}"
  except OSError as error:
    link.close()
    raise CannotMeet(f"process 0 at {host}:{port} gave no answer within {secs:g} s ({error}); start all processes "
                     f"within that time:\n  {command(0)}") from None


def _free_port(host: str) -> int:
  with socket.create_server((host, 0)) as server:
    return server.getsockname()[1]

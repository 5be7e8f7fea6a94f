"""A searcher in another process, behind the interface of one in this process.

`RemoteSearcher` stands beside the trainer for a `Searcher` that a `host.SearcherHost` owns where the devices are, so
that the drivers, the exchange and the restarts of the local runtime serve both. What carries the calls (`Connection`)
is not known here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from tba_jax.deadlines import Heartbeat
from tba_jax.meters import Timeline
from tba_jax.runtime.host import Report, SentWeights, Turn
from tba_jax.runtime.parcels import Parcel, pack
from tba_jax.runtime.reference import Reference
from tba_jax.sampling.engine import SampledGroup, SampleRequest
from tba_jax.searcher import SearcherCounts
from tba_jax.tasks.base import GroupReward, Responses
from tba_jax.types import Occurrence, Prompt, RolloutGroup
from tba_jax.weights import Pinned, Weights, WeightStore

_SAY_SECS = 60.0

Put = Callable[[np.ndarray], Any]


class Connection(Protocol):
  """Makes a host somewhere and calls it. Whatever the host raises is raised here; its death as HostDied."""

  def begin(self, reference: SentWeights, weights: SentWeights) -> None:
    """Asks for a new host, in the place of one that there was, and returns at once."""

  def poll(self) -> Report | None:
    """What the new host's `prepare` returned; None while it is not ready. Waits for a moment at most."""

  def describe(self) -> str:
    """What `poll` waits for."""

  def call(self, method: str, *arguments: Any) -> Any:
    """What the host's method returns."""

  def end(self) -> None:
    """Ends the host, whatever it does."""


class HostDied(RuntimeError):
  """The process of a searcher, or its machine, is gone."""


class RemoteSearcher:
  """The interface of `Searcher`, over a connection. `ready` is to be true before anything else is asked of it.

  Args:
    slots, num_samples: of the searcher's engine, and samples a group.
    reference: that the host scores by, until `set_reference`.
    in_turn: hosts are used one after the other, as lockstep does: every host is waited for at the start, and a turn
      begins with the newest weights. Else hosts join when they are there, and fetch weights beside the decoding.
    timeline: that the host's spans go to.
    say: prints a line for the user.
  """

  def __init__(self, index: int, connection: Connection, *, slots: int, num_samples: int, reference: SentWeights,
               in_turn: bool, timeline: Timeline, say: Callable[[str], None]):
    self.index, self.heartbeat = index, Heartbeat(f"searcher{index}")
    self._connection, self._slots, self._num_samples = connection, slots, num_samples
    self._in_turn, self._timeline, self._say = in_turn, timeline, say
    self._reference, self._given = reference, None
    self._sent_reference: SentWeights | None = None
    self._sent_weights: Weights | None = None
    self._occurrences: list[Occurrence] = []  # to start with the next turn
    self._abandon = False  # with the next turn
    self._earlier_counts = SearcherCounts()  # of hosts before this one
    self._report: Report | None = None  # the last; None while there is no host
    self._asked_secs: float | None = None  # when a host was asked for
    self._said_secs = 0.0

  # --- The host's life ---

  def ready(self, weights: Weights) -> bool:
    """Whether there is a host; asks for one, which will begin with these weights, if there is none."""
    if self._report is not None:
      return True
    if self._asked_secs is None:
      self._asked_secs = self._said_secs = time.monotonic()
      self._sent_reference, self._sent_weights = self._reference, weights
      self._given, self._abandon = weights, False
      self._connection.begin(self._sent_reference, SentWeights(weights.version, weights.params))
    try:
      self._report = self._connection.poll()
    except BaseException:
      self._lose()
      raise
    now = time.monotonic()
    if self._report is None:
      if now - self._said_secs > _SAY_SECS:
        self._said_secs = now
        self._say(f"searcher {self.index} is not there yet, after {now - self._asked_secs:.0f} s: "
                  f"{self._connection.describe()}")
      return False
    self._say(f"searcher {self.index} is ready after {now - self._asked_secs:.0f} s")
    return True

  def warmup(self, stopped: Callable[[], bool] = lambda: False) -> None:
    """Waits for the first searcher's host, or for every one's, until it is `stopped`; hosts compile as they begin."""
    while (self.index == 0 or self._in_turn) and not stopped() and not self.ready(self._given):
      self.heartbeat.beat("waiting for its host")

  def _call(self, method: str, *arguments: Any) -> Any:
    try:
      return self._connection.call(method, *arguments)
    except HostDied:
      self._lose()
      raise

  def _lose(self) -> None:
    """The next use begins with a new host."""
    self._earlier_counts, self._report, self._asked_secs = self.counts, None, None
    self._connection.end()

  def close(self) -> None:
    """Ends the host."""
    self._connection.end()

  # --- As a searcher ---

  @property
  def version(self) -> int:
    return self._report.version

  @property
  def num_compiled(self) -> int:
    return 0 if self._report is None else self._report.num_compiled

  @property
  def counts(self) -> SearcherCounts:
    return _sum(self._earlier_counts, SearcherCounts() if self._report is None else self._report.counts)

  @counts.setter
  def counts(self, counts: SearcherCounts) -> None:
    own = SearcherCounts() if self._report is None else self._report.counts
    self._earlier_counts = _sum(counts, own, sign=-1)

  def use_programs_of(self, other: RemoteSearcher) -> None:
    """A new host compiles for itself, or finds what the cache on its disk has."""

  def give(self, weights: Weights) -> None:
    """Sends newer weights with the next turn; to an idle host at once."""
    self._given = weights
    if self._report is not None and self.is_idle() and self._given is not self._sent_weights:
      self._turn(decode=False, wait=True)

  def forget_weights(self) -> None:
    """The host may not have what it was sent; it is sent again."""
    self._sent_weights = None

  def set_reference(self, reference: Parcel, ref_version: int) -> None:
    """From the next turn on groups are scored by this reference; may be called from another thread."""
    self._reference = SentWeights(ref_version, reference)

  def reference_weights(self) -> Weights:
    """Stands for the reference, as an evaluation's weights."""
    return Weights(self._reference.version, None, None)

  def wants_work(self) -> bool:
    return self._report.load + len(self._occurrences) * self._num_samples < self._slots

  def is_idle(self) -> bool:
    return not self._occurrences and (self._abandon or self._report is None or self._report.num_groups == 0)

  def start(self, occurrence: Occurrence) -> None:
    self._occurrences.append(occurrence)

  def step(self) -> list[tuple[Occurrence, RolloutGroup | None]]:
    """A turn of the host's."""
    return list(self._turn(decode=True, wait=self._in_turn).finished)

  def _turn(self, *, decode: bool, wait: bool) -> Report:
    reference, weights = self._reference, self._given
    turn = Turn(
        self._abandon, None if weights is self._sent_weights else SentWeights(weights.version, weights.params), wait,
        None if reference is self._sent_reference else reference, tuple(self._occurrences), decode)
    self._abandon, self._occurrences = False, []
    self.heartbeat.beat("a turn of its host")
    self._report = self._call("turn", turn)
    self._sent_weights, self._sent_reference = weights, reference
    self.heartbeat.beat("after a turn of its host")
    late = self._timeline.now_secs() - self._report.now_secs  # the two clocks' difference, and the way back
    for span in self._report.spans:
      self._timeline.add(span.actor, span.kind, span.start_secs + late, span.end_secs + late)
    return self._report

  def abandon(self) -> None:
    """Drops what is under way, the host with its next turn."""
    self._abandon, self._occurrences = True, []

  def log_pi(self, group: RolloutGroup) -> np.ndarray | None:
    return self._call("log_pi", group)

  def score_by_reference(self, prompt: Prompt, sampled: SampledGroup) -> np.ndarray:
    return self._call("score_by_reference", prompt, sampled)

  @property
  def eval_reward(self) -> GroupReward:
    """The host's reward of evaluations."""
    return (_MeasuringRemoteReward if self._report.measures else _RemoteReward)(self._call)

  @contextlib.contextmanager
  def lend_engine(self) -> Iterator[RemoteEngine]:
    """The host's engine for an evaluation at other weights, while no rollout is under way."""
    assert self.is_idle()
    if self._abandon or self._reference is not self._sent_reference:  # what is evaluated may ask for the reference
      self._turn(decode=False, wait=True)
    try:
      yield RemoteEngine(self._call)
    finally:
      if self._report is not None:
        self._call("take_back")


def _sum(a: SearcherCounts, b: SearcherCounts, *, sign: int = 1) -> SearcherCounts:
  names = [field.name for field in dataclasses.fields(SearcherCounts)]
  return SearcherCounts(**{name: getattr(a, name) + sign * getattr(b, name) for name in names})


class _RemoteReward:
  """A reward of groups that the host gives."""

  def __init__(self, call: Callable[..., Any]):
    self._call = call

  def __call__(self, prompt: Prompt, responses: Responses) -> np.ndarray:
    return self._call("grade", prompt, responses)


class _MeasuringRemoteReward(_RemoteReward):
  """One that also says something of all responses together."""

  def measure(self, texts: Sequence[str]) -> dict[str, float]:
    return self._call("measure", texts)


class RemoteEngine:
  """What an evaluation needs of an engine."""

  def __init__(self, call: Callable[..., Any]):
    self._call = call
    self._requests: list[SampleRequest] = []
    self.num_groups = 0

  def set_weights(self, params: Parcel | None, version: int) -> None:
    self._call("lend", SentWeights(version, params))

  def submit(self, request: SampleRequest) -> None:
    self._requests.append(request)
    self.num_groups += 1

  def step(self) -> list[SampledGroup]:
    requests, self._requests = self._requests, []
    groups = self._call("lent_step", requests)
    self.num_groups -= len(groups)
    return groups

  def cancel(self) -> None:
    self._requests, self.num_groups = [], 0


class SharedWeightStore(WeightStore):
  """Weights for searchers in other processes: one copy on this host, put once per version, for all of them.

  Args:
    convert, timeout_secs: see `WeightStore`.
    device: on which the copy is kept, a CPU's where there is one.
    put: see `parcels.pack`.
  """

  def __init__(self, convert: Callable[[Any], Any], *, device: jax.Device, put: Put, timeout_secs: float):
    super().__init__(convert, [device], timeout_secs=timeout_secs, expand=[lambda moved: pack(moved, put)])

  def latest(self, searcher: int) -> Weights:
    return super().latest(0)

  def pinned(self, converted: Any, version: int, *, searcher: int) -> Pinned:
    return super().pinned(converted, version, searcher=0)

  def abstract(self, params: Any, *, searcher: int) -> Any:
    return super().abstract(params, searcher=0)


class SharedReference(Reference):
  """A reference that moves, for searchers in other processes: one parcel for all of them."""

  def __init__(self, *arguments: Any, put: Put, num_searchers: int, **named: Any):
    super().__init__(*arguments, searcher_places=(), **named)
    self._put, self._num_searchers = put, num_searchers

  def copies(self) -> list[Any]:
    return [pack(jax.device_get(self.params), self._put)] * self._num_searchers

"""A searcher in another process, behind the interface of one in this process.

`SearcherHost` lives where the devices are and owns a `Searcher`; `RemoteSearcher` stands for it beside the trainer, so
that the drivers, the exchange and the restarts of the local runtime serve both. One call takes new weights and
occurrences there and brings finished groups back; what carries the call (`Connection`) is not known here.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from tba_jax.deadlines import Heartbeat
from tba_jax.meters import Timeline
from tba_jax.runtime.parcels import Parcel, pack, unpack
from tba_jax.runtime.reference import Reference
from tba_jax.sampling.engine import SampledGroup, SampleRequest
from tba_jax.searcher import Searcher, SearcherCounts
from tba_jax.tasks.base import Responses
from tba_jax.types import Occurrence, Prompt, RolloutGroup
from tba_jax.weights import Weights, WeightStore

# A host decodes on by itself while it has no free slot and nothing to bring, for so long at most.
_TURN_SECS = 0.5
_SAY_SECS = 60.0

Put = Callable[[np.ndarray], Any]
Fetch = Callable[[Sequence[Any]], Sequence[np.ndarray]]


class Span(NamedTuple):
  """A stretch of time in which an actor did one kind of thing; seconds on the clock of whoever measured it."""

  actor: str
  kind: str
  start_secs: float
  end_secs: float


class Spans:
  """What a host's searcher has done since it was asked last. Of one thread."""

  def __init__(self):
    self._ended: list[Span] = []

  @contextlib.contextmanager
  def span(self, actor: str, kind: str) -> Iterator[None]:
    start = time.monotonic()
    try:
      yield
    finally:
      self._ended.append(Span(actor, kind, start, time.monotonic()))

  def take(self) -> tuple[Span, ...]:
    ended, self._ended = tuple(self._ended), []
    return ended


class SentWeights(NamedTuple):
  """Weights on their way, as they are moved (`Weights.moved`); None in the place of a parcel: the host's reference."""

  version: int
  parcel: Parcel | None


class Turn(NamedTuple):
  """What a host is asked to do."""

  abandon: bool  # first of all, what is under way
  weights: SentWeights | None
  wait_for_weights: bool  # else they are fetched beside the decoding, and used when they are there
  reference: SentWeights | None
  occurrences: tuple[Occurrence, ...]  # to start
  decode: bool


class Report(NamedTuple):
  """What came of it."""

  finished: tuple[tuple[Occurrence, RolloutGroup | None], ...]
  counts: SearcherCounts
  version: int
  num_groups: int  # under way
  load: int  # samples in slots or waiting for one
  num_compiled: int
  spans: tuple[Span, ...]
  now_secs: float  # on the clock of the spans


# --- Where the devices are ---


class SearcherHost:
  """Owns a searcher and does what it is told, one call at a time.

  Args:
    weights: what moves a tree to this searcher's devices; of one searcher, number 0.
    place_reference: the same for the reference, stacked.
    spans: that the searcher writes to.
    fetch: the chunks of a parcel.
  """

  def __init__(self, searcher: Searcher, *, slots: int, weights: WeightStore, place_reference: Callable[[Any], Any],
               spans: Spans, fetch: Fetch):
    self._searcher, self._slots, self._weights, self._spans = searcher, slots, weights, spans
    self._place_reference, self._fetch = place_reference, fetch
    self._puller = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights")
    self._pulling: concurrent.futures.Future | None = None
    self._wanted: SentWeights | None = None  # newer than what is being pulled
    self._lent = contextlib.ExitStack()
    self._lent_engine: Any = None

  def prepare(self, sent: SentWeights) -> Report:
    """Takes the first weights and compiles everything."""
    self._pull(sent)
    self._searcher.give(self._weights.latest(0))
    self._searcher.warmup()
    return self._report(())

  def turn(self, turn: Turn) -> Report:
    """Takes what is new, starts groups, decodes."""
    searcher = self._searcher
    if turn.abandon:
      searcher.abandon()
    if turn.reference is not None:
      searcher.set_reference(self._place_reference(self._open(turn.reference.parcel)), turn.reference.version)
    if turn.weights is not None:
      self._want(turn.weights, wait=turn.wait_for_weights)
    searcher.give(self._newest())
    for occurrence in turn.occurrences:
      searcher.start(occurrence)
    finished: list[tuple[Occurrence, RolloutGroup | None]] = []
    began = time.monotonic()
    while turn.decode and not finished and not searcher.is_idle():
      finished = searcher.step()
      if searcher.wants_work() or time.monotonic() - began > _TURN_SECS:
        break
      searcher.give(self._newest())
    return self._report(finished)

  def log_pi(self, group: RolloutGroup) -> np.ndarray | None:
    return self._searcher.log_pi(group)

  def score_by_reference(self, prompt: Prompt, sampled: SampledGroup) -> np.ndarray:
    return self._searcher.score_by_reference(prompt, sampled)

  def grade(self, prompt: Prompt, responses: Responses) -> np.ndarray:
    """The reward of evaluations."""
    return self._searcher.eval_reward(prompt, responses)

  def lend(self, sent: SentWeights) -> None:
    """Begins an evaluation at these weights."""
    self._lent_engine = self._lent.enter_context(self._searcher.lend_engine())
    weights = (self._searcher.reference_weights() if sent.parcel is None else
               self._weights.received(self._open(sent.parcel), sent.version, searcher=0))
    self._lent_engine.set_weights(weights.params, weights.version)

  def lent_step(self, requests: Sequence[SampleRequest]) -> list[SampledGroup]:
    """Submits to the lent engine and decodes a chunk."""
    for request in requests:
      self._lent_engine.submit(request)
    return self._lent_engine.step()

  def take_back(self) -> None:
    """Ends the evaluation, and drops what of it is under way."""
    if self._lent_engine is not None:
      self._lent_engine.cancel()
      self._lent_engine = None
      self._lent.close()
    self._searcher.forget_weights()

  def _report(self, finished: Sequence[tuple[Occurrence, RolloutGroup | None]]) -> Report:
    searcher, engine = self._searcher, self._searcher.engine
    return Report(
        finished=tuple(finished), counts=dataclasses.replace(searcher.counts), version=searcher.version,
        num_groups=engine.num_groups, load=engine.num_running + engine.num_queued, num_compiled=searcher.num_compiled,
        spans=self._spans.take(), now_secs=time.monotonic())

  def _open(self, parcel: Parcel) -> Any:
    return unpack(parcel, self._fetch(parcel.chunks))

  def _pull(self, sent: SentWeights) -> None:
    self._weights.adopt(self._open(sent.parcel), sent.version)

  def _want(self, sent: SentWeights, *, wait: bool) -> None:
    self._newest()
    if self._pulling is None:
      self._pulling = self._puller.submit(self._pull, sent)
    else:
      self._wanted = sent  # whatever waited is too old by now
    while wait and self._pulling is not None:
      self._pulling.result()
      self._newest()

  def _newest(self) -> Weights:
    """The newest weights that have arrived. Raises what a transfer failed with."""
    if self._pulling is not None and self._pulling.done():
      pulling, self._pulling = self._pulling, None
      pulling.result()
      if self._wanted is not None:
        self._pulling, self._wanted = self._puller.submit(self._pull, self._wanted), None
    return self._weights.latest(0)


# --- Beside the trainer ---


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

  def warmup(self) -> None:
    """Waits for the first searcher's host, or for every one's; hosts compile as they begin."""
    while (self.index == 0 or self._in_turn) and not self.ready(self._given):
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

  def eval_reward(self, prompt: Prompt, responses: Responses) -> np.ndarray:
    return self._call("grade", prompt, responses)

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

  def pin(self, params: Any, version: int, *, searcher: int) -> Callable[[], Weights]:
    return super().pin(params, version, searcher=0)

  def abstract(self, params: Any, *, searcher: int) -> Any:
    return super().abstract(params, searcher=0)


class SharedReference(Reference):
  """A reference that moves, for searchers in other processes: one parcel for all of them."""

  def __init__(self, *arguments: Any, put: Put, num_searchers: int, **named: Any):
    super().__init__(*arguments, searcher_places=(), **named)
    self._put, self._num_searchers = put, num_searchers

  def copies(self) -> list[Any]:
    return [pack(jax.device_get(self.params), self._put)] * self._num_searchers

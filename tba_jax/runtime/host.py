"""The other end of a `RemoteSearcher`: a searcher in a process of its own, told what to do by calls.

One call, a turn, takes new weights and occurrences there and brings finished groups back.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from tba_jax.runtime.parcels import Parcel, unpack
from tba_jax.sampling.engine import SampledGroup, SampleRequest
from tba_jax.searcher import Searcher, SearcherCounts
from tba_jax.tasks.base import MeasuringReward, Responses
from tba_jax.types import Occurrence, Prompt, RolloutGroup
from tba_jax.weights import Weights, WeightStore

# A host decodes on by itself while it has no free slot and nothing to bring, for so long at most.
_TURN_SECS = 0.5

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
  measures: bool  # whether the reward of evaluations is a `MeasuringReward`
  spans: tuple[Span, ...]
  now_secs: float  # on the clock of the spans


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

  def measure(self, texts: Sequence[str]) -> dict[str, float]:
    """What that reward says of all responses together."""
    return self._searcher.eval_reward.measure(texts)

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
        measures=isinstance(searcher.eval_reward, MeasuringReward), spans=self._spans.take(), now_secs=time.monotonic())

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

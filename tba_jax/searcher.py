"""Prompts to rollouts: decode, grade, score under the reference. One searcher owns one engine and is driven by one
thread.

A searcher knows nothing of buffers or of the trainer. It is given occurrences of prompts and gives back finished
groups; which weights it holds is decided by whoever drives it, between two calls of `step`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tba_jax import compiler_options
from tba_jax.deadlines import Caller, Heartbeat
from tba_jax.models import transformer
from tba_jax.sampling.engine import Engine, SampledGroup, SampleRequest, sample_keys
from tba_jax.tasks.base import GroupReward, Responses, grade
from tba_jax.types import Occurrence, Prompt, RolloutGroup
from tba_jax.vine import State, VineGroup, VineSettings
from tba_jax.weights import Weights

TRUNCATED_POLICIES = ("score", "zero", "mask")

Score = Callable[[Any, jax.Array, jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class SampleSettings:
  """How rollouts are made; the same for every searcher of a run."""

  seed: int
  num_samples: int  # S
  temperature: float
  max_new_tokens: int
  # What a response without a stop token earns: "score" (graded as it is), "zero", "mask" (the row is left out).
  truncated: str
  length_buckets: tuple[int, ...]  # row lengths at which groups are scored
  hang_secs: float  # after which the grading of a group is given up
  score_reference: bool = True  # false: the loss never reads log_ref, which is 0 then
  vine: VineSettings | None = None  # for a loss that wants advantages within responses


@dataclasses.dataclass
class SearcherCounts:
  """What a searcher did since it was made."""

  rollouts: int = 0
  generated_tokens: int = 0  # those of continuations, which are no rollouts, among them
  truncated: int = 0
  bad_rewards: int = 0  # rows left out because their reward, or a value within them, was not finite
  masked: int = 0  # rows left out by the policy for truncated responses
  dropped_groups: int = 0  # fewer than 2 rows were left


@dataclasses.dataclass(frozen=True)
class LogprobGap:
  """|log_mu - log_pi| of one group, log_pi by the trainer's path at the version that sampled it; nats per token."""

  version: int
  max: float
  p95: float
  num_tokens: int

  @classmethod
  def of(cls, group: RolloutGroup, log_pi: np.ndarray) -> LogprobGap:
    """The comparison of a group, all of one version, with what `Searcher.log_pi` gave for it."""
    real = np.arange(group.tokens.shape[1]) < group.lengths[:, None]
    gap = np.abs(log_pi - group.log_mu)[real]
    return cls(int(group.versions[0, 0]), float(gap.max()), float(np.quantile(gap, 0.95)), int(gap.size))


class Searcher:
  """Turns occurrences into graded, scored groups.

  Args:
    engine: for this searcher alone; it has this many `slots`. eval_engine: the same, or another for evaluations.
    score: (stacked params, tokens, positions, segment_ids) -> log_p; the trainer's scoring function, jitted.
    score_decode_layout: the same of parameters in the engine's layout, see `make_decode_layout_scorer`.
    reference: parameters of the frozen reference, stacked, on this searcher's devices.
    prompts: of the task, by prompt id.
    reward: of groups sampled here; `eval_reward` of the evaluations that this searcher is given.
    response_text: token ids up to the stop token -> text that is graded.
    temperature: at which this searcher samples; log_mu is at the settings' temperature nevertheless, as log_pi and
      log_ref are.
    span: `with span(kind)` around each stretch of work, for the timeline.

  `heartbeat` says what is being done, so that others can see a searcher that hangs.
  """

  def __init__(
      self,
      *,
      index: int,
      engine: Engine,
      eval_engine: Engine,
      slots: int,
      score: Score,
      score_decode_layout: Score,
      reference: Any,
      ref_version: int,
      prompts: Sequence[Prompt],
      reward: GroupReward,
      eval_reward: GroupReward,
      response_text: Callable[[Sequence[int]], str],
      settings: SampleSettings,
      temperature: float,
      span: Callable[[str], Any],
  ):
    self.index, self.heartbeat = index, Heartbeat(f"searcher{index}")
    self.engine, self._eval_engine, self._slots = engine, eval_engine, slots
    self.counts = SearcherCounts()
    self._score, self._score_decode_layout = score, score_decode_layout
    self._reference = (reference, ref_version)
    self._programs: dict[tuple[Score, int], Any] = {}  # compiled scores by the length of their rows
    self._prompts, self._reward, self._response_text = prompts, reward, response_text
    self.eval_reward = eval_reward
    self._settings, self._temperature = settings, temperature
    self._span, self._grader = span, Caller(f"grader{index}")
    self._vines: dict[Occurrence, VineGroup] = {}  # groups whose values are being sampled
    self._given: Weights | None = None  # the newest the engine was given; in effect when the engine's version says so

  def ready(self, weights: Weights) -> bool:
    """Whether it can be used; one in another process may have to begin, with these weights."""
    return True

  @property
  def version(self) -> int:
    """Of the weights that a group started now will begin with. (Groups under way may still be of older ones.)"""
    return self._given.version

  def reference_weights(self) -> Weights:
    """The reference in the layout that the engine takes."""
    reference, ref_version = self._reference
    params = jax.jit(transformer.unstack)(reference)
    return Weights(ref_version, params, params)

  def score_by_reference(self, prompt: Prompt, sampled: SampledGroup) -> np.ndarray:
    """log_ref float32 [S, T] of a sampled group, 0 beyond the lengths."""
    return self._score_rows(self._score, self._reference[0], prompt.tokens, sampled.tokens, sampled.lengths)

  def set_reference(self, reference: Any, ref_version: int) -> None:
    """From now on groups are scored by this reference; may be called from another thread."""
    self._reference = (reference, ref_version)

  def use_programs_of(self, other: Searcher) -> None:
    """Takes over what another one on the same devices has compiled."""
    self._programs = other._programs

  def _compile_scores(self, decode_params: Any) -> None:
    """Compiles the scoring programs for every shape of a group, so that none is compiled while the run goes on."""

    def compiled(score: Score, params: Any, bucket: int) -> Any:
      rows = (jax.ShapeDtypeStruct((self._settings.num_samples, bucket), jnp.int32),) * 3
      platform = next(iter(jax.tree.leaves(params)[0].devices())).platform
      return score.lower(params, *rows).compile(compiler_options.of_sequences(platform))

    with concurrent.futures.ThreadPoolExecutor() as pool:
      under_way = {
          (score, bucket): pool.submit(compiled, score, params, bucket) for bucket in self._settings.length_buckets
          for score, params in ((self._score, self._reference[0]), (self._score_decode_layout, decode_params))}
      self._programs = {key: program.result() for key, program in under_way.items()}

  def give(self, weights: Weights) -> None:
    """Hands over newer weights; the engine decides when they take effect."""
    if self._given is None or weights.params is not self._given.params:
      self.engine.set_weights(weights.params, weights.version)
      self._given = weights

  @contextlib.contextmanager
  def lend_engine(self) -> Iterator[Engine]:
    """The engine for an evaluation at other weights, while no rollout is under way. Of two engines one holds a cache.
    """
    assert self.is_idle()
    try:
      if self._eval_engine is not self.engine:
        self.engine.release()
      yield self._eval_engine
    finally:
      if self._eval_engine is self.engine:
        self.forget_weights()
      else:
        self._eval_engine.release()

  def forget_weights(self) -> None:
    """Something else used the engine; the next `give` hands over whatever it is given."""
    self._given = None

  def warmup(self, stopped: Callable[[], bool] = lambda: False) -> None:
    """Compiles every program by running it on nothing; needs weights. After this a step is never long because of a
    compiler. When `stopped` says so, it leaves off after the program under way."""
    self.engine.warmup(stopped)
    if self._eval_engine is not self.engine and not stopped():
      self.engine.release()
      self._eval_engine.set_weights(self._given.params, self._given.version)
      self._eval_engine.warmup(stopped)
      self._eval_engine.release()
    if not stopped():
      self._compile_scores(self._given.params)

  @property
  def num_compiled(self) -> int:
    """Sampling programs called so far."""
    return sum(engine.num_compiled for engine in {self.engine, self._eval_engine})

  def wants_work(self) -> bool:
    """Whether another group would find a free slot."""
    return self.engine.num_running + self.engine.num_queued < self._slots

  def is_idle(self) -> bool:
    return self.engine.num_groups == 0

  def start(self, occurrence: Occurrence) -> None:
    """Queues the group of an occurrence. Its samples depend on the weights, the prompt and these keys alone."""
    s = self._settings
    keys = sample_keys(s.seed, occurrence=occurrence.occurrence, attempt=occurrence.attempt, num_samples=s.num_samples)
    self.engine.submit(SampleRequest(
        tag=occurrence, prompt=self._prompts[occurrence.prompt_id].tokens, keys=keys, temperature=self._temperature,
        max_new_tokens=s.max_new_tokens))

  def step(self) -> list[tuple[Occurrence, RolloutGroup | None]]:
    """Decodes one chunk; grades and scores the groups that it finished. None: fewer than 2 usable rows, the prompt is
    skipped. Where values within responses are wanted, a group is finished when they are.

    Raises: deadlines.Hung if the grading of a group does not come back; whatever grading raises. The groups that the
      chunk finished are then lost to the engine: whoever drives this searcher knows which occurrences it has started.
    """
    with self._doing("decode"):
      sampled = self.engine.step()
    if self._settings.vine is None:
      return [(group.tag, self._finish(group)) for group in sampled]
    return [(vine.occurrence, self._finish(vine.sampled, vine)) for vine in self._with_values(sampled)]

  def _with_values(self, sampled: Sequence[SampledGroup]) -> list[VineGroup]:
    """Queues continuations of sampled groups, takes up those that have come. Returns groups that now lack no value.

    Weights that are taken in flight value the states by the policy as it is then.
    """
    s, complete = self._settings, []
    for found in sampled:
      if isinstance(found.tag, State):
        vine = self._vines[found.tag.occurrence]
        vine.add(found.tag, self._value(vine, found))
      else:
        left_out = found.truncated & (s.truncated == "mask")
        vine = VineGroup(self._prompts[found.tag.prompt_id].tokens, found, s.vine, left_out=left_out)
        self._vines[found.tag] = vine
        for request in vine.requests(seed=s.seed, temperature=self._temperature, max_new_tokens=s.max_new_tokens):
          self.engine.submit(request)
      if vine.is_complete:
        complete.append(self._vines.pop(vine.occurrence))
    return complete

  def _value(self, vine: VineGroup, found: SampledGroup) -> float:
    """Mean reward of the continuations of a state; NaN if none can be graded."""
    self.counts.generated_tokens += int(found.lengths.sum())
    _, rewards = self._grade_whole(vine.joined(found), vine.occurrence)
    keep = np.isfinite(rewards)
    if self._settings.truncated == "mask":
      keep &= ~found.truncated
    return float(rewards[keep].mean(dtype=np.float64)) if keep.any() else float("nan")

  @contextlib.contextmanager
  def _doing(self, kind: str) -> Iterator[None]:
    self.heartbeat.beat(kind)
    with self._span(kind):
      yield
    self.heartbeat.beat(f"after {kind}")

  def abandon(self) -> None:
    """Drops what is under way."""
    self.engine.cancel()
    self._vines.clear()

  def close(self) -> None:
    """Ends the grader's thread."""
    self._grader.close()

  def log_pi(self, group: RolloutGroup) -> np.ndarray | None:
    """log_pi [S, T] by the trainer's path at the weights that sampled the group; None if they are not at hand any
    more."""
    held = self._given
    if held is None or not all((group.versions[i, :n] == held.version).all() for i, n in enumerate(group.lengths)):
      return None
    return self._score_rows(self._score_decode_layout, held.params, group.prompt, group.tokens, group.lengths)

  def _finish(self, sampled: SampledGroup, vine: VineGroup | None = None) -> RolloutGroup | None:
    occurrence, prompt = sampled.tag, self._prompts[sampled.tag.prompt_id]
    self.counts.rollouts += len(sampled.lengths)
    self.counts.generated_tokens += int(sampled.lengths.sum())
    self.counts.truncated += int(sampled.truncated.sum())
    texts, rewards = self._grade_whole(sampled, occurrence)
    keep = np.isfinite(rewards)
    if vine is not None:
      advantages = vine.advantages(rewards)
      keep &= np.isfinite(advantages).all(axis=1) | (sampled.truncated & (self._settings.truncated == "mask"))
    self.counts.bad_rewards += int((~keep).sum())
    if self._settings.truncated == "mask":
      self.counts.masked += int((keep & sampled.truncated).sum())
      keep &= ~sampled.truncated
    if keep.sum() < 2:  # with one response the loss is zero whatever the policy
      self.counts.dropped_groups += 1
      return None
    reference, ref_version = self._reference
    log_ref = np.zeros(sampled.tokens.shape, np.float32)
    if self._settings.score_reference:
      with self._doing("score"):
        log_ref = self._score_rows(self._score, reference, prompt.tokens, sampled.tokens, sampled.lengths)
    longest = int(sampled.lengths[keep].max())
    return RolloutGroup(
        prompt_id=occurrence.prompt_id, occurrence=occurrence.occurrence, attempt=occurrence.attempt,
        prompt=prompt.tokens, tokens=sampled.tokens[keep, :longest], lengths=sampled.lengths[keep],
        log_mu=sampled.log_mu[keep, :longest], log_ref=log_ref[keep, :longest],
        versions=sampled.versions[keep, :longest], rewards=rewards[keep], truncated=sampled.truncated[keep],
        ref_version=ref_version, temperature=self._settings.temperature, searcher=self.index,
        texts=tuple(text for text, k in zip(texts, keep) if k),
        advantages=None if vine is None else advantages[keep, :longest])

  def _grade_whole(self, sampled: SampledGroup, occurrence: Occurrence) -> tuple[list[str], np.ndarray]:
    """Texts and rewards float32 [S] of whole responses."""
    prompt = self._prompts[occurrence.prompt_id]
    with self._doing("grade"):
      texts = [self._response_text(row[:n]) for row, n in zip(sampled.tokens, sampled.lengths)]
      return texts, self._grader.call(
          lambda: self._grade(prompt, texts, sampled), secs=self._settings.hang_secs,
          what=f"the reward of prompt {prompt.prompt_id} (occurrence {occurrence.occurrence})")

  def _grade(self, prompt: Prompt, texts: Sequence[str], sampled: SampledGroup) -> np.ndarray:
    """Rewards float32 [S]; NaN for a response that could not be graded."""
    rewards = np.zeros(len(texts), np.float32)
    graded = np.flatnonzero(~sampled.truncated if self._settings.truncated == "zero" else np.ones(len(texts), bool))
    if len(graded):
      rewards[graded] = grade(self._reward, prompt, Responses(
          texts=tuple(texts[i] for i in graded), tokens=tuple(sampled.tokens[i, :sampled.lengths[i]] for i in graded),
          truncated=sampled.truncated[graded]))
    return rewards

  def _score_rows(self, score: Score, params: Any, prompt: np.ndarray, tokens: np.ndarray,
                  lengths: np.ndarray) -> np.ndarray:
    """log_p float32 [S, T] of the responses, 0 beyond their lengths."""
    rows = response_rows(prompt, tokens, lengths, length_buckets=self._settings.length_buckets)
    # Rows that were left out are empty here: one shape for every number of usable rows.
    rows = [np.pad(array, ((0, self._settings.num_samples - len(array)), (0, 0))) for array in rows]
    program = self._programs.get((score, rows[0].shape[1]), score)
    log_p = np.asarray(program(params, *rows))[: len(lengths), len(prompt):len(prompt) + tokens.shape[1]]
    log_p = np.pad(log_p, ((0, 0), (0, tokens.shape[1] - log_p.shape[1])))
    return np.where(np.arange(tokens.shape[1]) < lengths[:, None], log_p, 0.0).astype(np.float32)


def response_rows(prompt: np.ndarray, tokens: np.ndarray, lengths: np.ndarray, *,
                  length_buckets: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """tokens, positions, segment_ids (int32 [S, bucket]) of the rows prompt + response, padded on the right to the
  smallest bucket.

  Raises: ValueError if the longest row fits no bucket.
  """
  totals = len(prompt) + lengths
  bucket = next((size for size in length_buckets if size >= totals.max()), None)
  if bucket is None:
    raise ValueError(f"prompt + response of {totals.max()} tokens fit none of length_buckets={tuple(length_buckets)}")
  rows = np.zeros((len(lengths), bucket), np.int32)
  rows[:, :len(prompt)] = prompt
  width = min(tokens.shape[1], bucket - len(prompt))
  rows[:, len(prompt):len(prompt) + width] = tokens[:, :width]
  at = np.arange(bucket, dtype=np.int32)
  real = at < totals[:, None]
  return np.where(real, rows, 0), np.where(real, at, 0).astype(np.int32), real.astype(np.int32)


def make_decode_layout_scorer(score: Score) -> Score:
  """`score` of parameters in the decode layout, jitted."""
  return jax.jit(lambda params, *rows: score(restack(params), *rows))


def restack(decode_params: Any) -> Any:
  """The inverse of `transformer.unstack`: layers stacked on a leading axis again."""
  layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *decode_params["layers"])
  return {**decode_params, "layers": layers}


@functools.partial(jax.jit, static_argnames="dtype")
def cast(params: Any, *, dtype: Any) -> Any:
  """The tree in another dtype, in buffers of its own; numpy arrays stay in the host's memory."""
  copy = lambda leaf: leaf.astype(dtype) if isinstance(leaf, np.ndarray) else jnp.copy(leaf.astype(dtype))
  return jax.tree.map(copy, params)

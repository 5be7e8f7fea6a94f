"""Everything that a run consists of, and what all its modes do alike: log a step, publish, evaluate, save, resume."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from tba_jax.alarms import Alarms
from tba_jax.checkpoints.run_state import RunState, Snapshot
from tba_jax.deadlines import Heartbeat
from tba_jax.evaluate import Evaluation, evaluate_greedy
from tba_jax.meters import Profile, StalenessStats, Timeline, WaitMeter
from tba_jax.metrics import MetricsWriter, Progress, RolloutLog, SlowStage
from tba_jax.runtime.exchange import Exchange
from tba_jax.runtime.reference import Reference
from tba_jax.runtime.sampled_kl import sampled_kl
from tba_jax.runtime.settings import RunSettings, StopFlag, Totals
from tba_jax.runtime.trainer import Prepared, StepReport, Trainer
from tba_jax.searcher import LogprobGap, Searcher, SearcherCounts
from tba_jax.tasks.base import SampledEvalTask, Task
from tba_jax.types import Draw, Prompt, RolloutGroup
from tba_jax.weights import Weights, WeightStore

# A loss reports the truncated rows of its batch under the shorter name.
_COUNT_NAMES = {"truncated": "truncated_rollouts"}
_SEARCHER_COUNTS = tuple(field.name for field in dataclasses.fields(SearcherCounts))

_MOST_UNDER_EVALUATION = 4  # each has a copy of the weights in the sampler's dtype on the devices


class Run:
  """The parts of a run and its books. Drivers (`lockstep`, `local`) decide who does what when.

  `reference`: None where it never moves. `make_searcher` makes another searcher with an index, on the devices that the
  first one with it has. `began`: time.monotonic() when the process began its work. Thread-safe where searchers call it:
  `note_group`, `note_gap`, `record_evaluation`.
  """

  def __init__(
      self,
      *,
      settings: RunSettings,
      task: Task,
      eval_prompts: Sequence[Prompt],
      trainer: Trainer,
      reference: Reference | None,
      searchers: list[Searcher],
      make_searcher: Callable[[int], Searcher],
      exchange: Exchange,
      weights: WeightStore,
      run_state: RunState,
      writer: MetricsWriter,
      rollouts: RolloutLog,
      alarms: Alarms,
      timeline: Timeline,
      waits: WaitMeter,
      profile: Profile,
      progress: Progress,
      stop: StopFlag,
      began: float,
  ):
    self.settings, self.task, self.eval_prompts = settings, task, eval_prompts
    self.trainer, self.searchers, self.exchange, self.weights = trainer, searchers, exchange, weights
    self.reference = reference
    self.run_state, self.writer, self.rollouts, self.alarms = run_state, writer, rollouts, alarms
    self.timeline, self.waits, self.profile = timeline, waits, profile
    self.progress, self.stop = progress, stop
    self.heartbeat = Heartbeat("the main thread")  # of the thread that trains and, in lockstep, samples
    self._make_searcher = make_searcher
    self.staleness = StalenessStats()
    self.totals = Totals()
    self.published_version = -1
    self._began = began
    self._train_began: float | None = None
    self._lock = threading.Lock()
    # Since the last logged step, at most what is logged of them; with log_pi [S, T] by the trainer's path if compared.
    self._fresh_groups: list[tuple[RolloutGroup, np.ndarray | None]] = []
    self._gaps: list[LogprobGap] = []  # since the last logged step
    self._logged_at: tuple[float, int, int] | None = None  # time, trained and generated tokens when last logged
    self._accuracy = math.nan
    # By step: weights whose evaluation was asked for and is not over.
    self._under_evaluation: dict[int, Callable[[], Weights]] = {}
    self._told_of_late_evaluations = False
    self.num_evaluated = 0
    self._to_book: StepReport | None = None  # of the step finished last
    self._fill = SlowStage("filling the buffer: responses", exchange.fill_responses, say=progress.message)

  # --- What searchers report ---

  def note_group(self, searcher: Searcher, group: RolloutGroup) -> None:
    """Compares one group a version with the trainer's path, and keeps a few for people to read, such a one first."""
    log_pi = self._compare(searcher, group)
    wanted = self.settings.rollouts_per_step
    with self._lock:
      if log_pi is not None:
        self._fresh_groups = [(group, log_pi), *self._fresh_groups][:wanted]
      elif len(self._fresh_groups) < wanted:
        self._fresh_groups.append((group, None))

  def note_gap(self, gap: LogprobGap) -> None:
    """Books a comparison of the sampler's log-probabilities with the trainer's."""
    with self._lock:
      self._gaps.append(gap)
      totals = self.totals
      totals.logprob_gap_max = max(totals.logprob_gap_max, gap.max)
      totals.logprob_gap_p95 = max(totals.logprob_gap_p95, gap.p95)
      totals.logprob_tokens_compared += gap.num_tokens

  def _compare(self, searcher: Searcher, group: RolloutGroup) -> np.ndarray | None:
    """Once per version: log_pi [S, T] of this group by the trainer's path, if its weights are still at hand."""
    version = int(group.versions[0, 0])
    if not self.exchange.claim_check(version):
      return None
    log_pi = searcher.log_pi(group)
    if log_pi is None:
      self.exchange.unclaim_check(version)
    else:
      self.note_gap(LogprobGap.of(group, log_pi))
    return log_pi

  def replace_searcher(self, index: int) -> Searcher:
    """Another searcher in the place of one that was given up, whose counts stand."""
    old, self.searchers[index] = self.searchers[index], self._make_searcher(index)
    self.searchers[index].use_programs_of(old)
    if self.reference is not None:
      self.searchers[index].set_reference(self.reference.copies()[index], self.reference.version)
    with self._lock:
      for name in _SEARCHER_COUNTS:
        setattr(self.totals, name, getattr(self.totals, name) + getattr(old.counts, name))
    return self.searchers[index]

  # --- Steps ---

  @contextlib.contextmanager
  def doing(self, kind: str) -> Iterator[None]:
    """A stretch of the main thread's work, for the timeline and for those who watch whether it goes on."""
    self.heartbeat.beat(kind)
    with self.timeline.span("trainer", kind):
      yield
    self.heartbeat.beat(f"after {kind}")

  @property
  def step(self) -> int:
    """Optimizer steps attempted so far."""
    return self.trainer.steps

  def begin_training(self) -> None:
    if self._train_began is None:
      self._train_began = time.monotonic()
      self._logged_at = (self._train_began, self.totals.trained_tokens, self.searcher_counts()["generated_tokens"])
      self.timeline.begin()
      self.progress.start_clock()
      self.profile.after_step(self.step)

  def tell_fill(self) -> None:
    """Before the first batch: how far the buffer is."""
    if self._train_began is None:
      self._fill.update(self.exchange.num_arrived)

  def prepare(self, draw: Draw) -> Prepared:
    """The batch of a draw, by one reference. Goes on beside a step that is under way."""
    if self.reference is not None:
      draw, again = self.reference.rescore(draw)
      self.exchange.update_log_ref(draw.rows[again], draw.log_ref[again], ref_version=self.reference.version)
    return self.trainer.prepare(draw)

  def may_draw_ahead(self) -> bool:
    """Whether the next batch may be drawn while a step is under way.

    A checkpoint holds no batch that is drawn and not trained, and rows are not to be scored by a reference about to be
    replaced.
    """
    step = self.step + 1
    moves = self.reference is not None and self.reference.is_due(step)
    return step < self.settings.steps and not moves and not self.checkpoint_due(step) and not self.stop.is_set()

  def finish_step(self) -> None:
    """Waits for the step under way. Its version counts from here on; its books may be done while the next step runs."""
    assert self._to_book is None
    self._to_book = self.trainer.finish()
    self.profile.after_step(self.step)
    self.exchange.advance(self.trainer.version)
    if self.reference is not None:
      self.reference.after_step(self.trainer.state.params)
      if self.reference.is_due(self.step) and self.trainer.version > self.reference.version:
        self._use_reference(self.reference.move(self.trainer.state.params, self.trainer.version))

  def _use_reference(self, copies: Sequence[Any]) -> None:
    """Buffer and searchers go over to the trainer's reference; a copy for each searcher is on its way to it."""
    self.exchange.set_reference(self.reference.version)  # first: groups of a newer reference would be refused
    for searcher, params in zip(self.searchers, copies, strict=True):
      searcher.set_reference(params, self.reference.version)

  def after_step(self) -> None:
    """Books and logs the step that was finished last, unless that has been done."""
    report, self._to_book = self._to_book, None
    if report is None:
      return
    totals = self.totals
    totals.trained_tokens += report.num_tokens
    totals.trained_responses += int(report.draw.valid.sum())
    totals.skipped_updates += int(report.metrics["skipped"])
    self.staleness.add(report.staleness)
    if report.residuals is not None:
      self.exchange.update_priorities(report.draw.rows, report.residuals)
    with self._lock:
      groups, self._fresh_groups = self._fresh_groups, []
      gaps, self._gaps = self._gaps, []
    for group, log_pi in groups:
      self._log_rollout(group, log_pi)
    self._log_scalars(report, gaps)
    self.run_state.spill(self.exchange.buffer, self.exchange.num_arrived)

  def _log_scalars(self, report: StepReport, gaps: list[LogprobGap]) -> None:
    counts = self.searcher_counts()
    now = time.monotonic()
    then, trained, generated = self._logged_at
    secs = max(now - then, 1e-9)
    rates = {
        "trained_tokens_per_second": (self.totals.trained_tokens - trained) / secs,
        "generated_tokens_per_second": (counts["generated_tokens"] - generated) / secs,
    }
    self._logged_at = (now, self.totals.trained_tokens, counts["generated_tokens"])
    valid = report.draw.valid
    staleness = report.staleness
    buffer = self.exchange.buffer.stats()
    scalars = {
        **report.metrics,
        "version": self.trainer.version,
        "reward": float(report.draw.rewards[valid].mean()),
        "prompt_tokens": float(report.draw.prompt_lengths[valid].mean()),
        "response_tokens": float(report.draw.lengths[valid].mean()),
        "staleness_mean": float(staleness.mean()),
        "staleness_max": int(staleness.max()),
        "staleness_counts": dict(zip(*np.unique(staleness, return_counts=True))),  # responses by staleness
        "trained_tokens": self.totals.trained_tokens,
        "real_token_share": report.real_token_share,
        **{_COUNT_NAMES.get(name, name): value for name, value in counts.items()},
        **{f"buffer_{name}": value for name, value in buffer.items()},
        "draws_per_insert": buffer["rows_drawn"] / max(1, buffer["added"]),
        **rates,
        "step_seconds": report.secs,
        "trainer_wait_seconds": self.waits.seconds("trainer"),
        "searcher_wait_seconds": self.waits.seconds("searcher"),
        "wall_seconds": self.wall_secs(),
    }
    if gaps:
      scalars |= {"logprob_gap_max": max(gap.max for gap in gaps), "logprob_gap_p95": max(gap.p95 for gap in gaps),
                  "logprob_tokens_compared": sum(gap.num_tokens for gap in gaps)}
    self.writer.write(self.step, scalars)
    for text in self.alarms.after_step({"step": self.step, **scalars}):
      self.progress.message(text)
    self.progress.update(self.step, reward=scalars["reward"], accuracy=self._accuracy, loss=report.metrics["loss"],
                         staleness=scalars["staleness_mean"], **rates)

  def _log_rollout(self, group: RolloutGroup, log_pi: np.ndarray | None) -> None:
    length = int(group.lengths[0])
    by_token = {"token_log_mu": group.log_mu, "token_log_ref": group.log_ref, "token_log_pi": log_pi}
    self.rollouts.write(
        self.step, prompt=self.task.train_prompts()[group.prompt_id].text, response=group.texts[0],
        reward=float(group.rewards[0]), version=int(group.versions[0, :length].min()),
        num_prompt_tokens=len(group.prompt), num_response_tokens=length, truncated=bool(group.truncated[0]),
        searcher=group.searcher, occurrence=group.occurrence, log_mu=float(group.log_mu[0, :length].sum()),
        log_ref=float(group.log_ref[0, :length].sum()), prompt_id=group.prompt_id,
        token_ids=group.tokens[0, :length].tolist(),
        token_texts=self.task.tokenizer.pieces(group.tokens[0, :length].tolist()),
        **{name: np.round(values[0, :length].astype(np.float64), 4).tolist()
           for name, values in by_token.items() if values is not None})

  def searcher_counts(self) -> dict[str, int]:
    """Sums over all searchers and earlier processes."""
    return {name: getattr(self.totals, name) + sum(getattr(s.counts, name) for s in self.searchers)
            for name in _SEARCHER_COUNTS}

  def publish(self, *, wait: bool) -> None:
    """Sends the trainer's weights to the searchers."""
    with self.doing("publish"):
      self.weights.publish(self.trainer.state.params, self.trainer.version, wait=wait)
    self.published_version = self.trainer.version
    self.exchange.mark_publish(self.trainer.version, step=self.step)

  # --- Evaluation ---

  def evaluation_due(self) -> bool:
    """Whether the weights of this step are to be evaluated and have not been: before the first step, every few, after
    the last."""
    every, step = self.settings.eval_every_steps, self.step
    wanted = step == 0 or step >= self.settings.steps or (every > 0 and step % every == 0)
    with self._lock:
      due = wanted and step > max((self.totals.last_eval_step, *self._under_evaluation))
      left_out = due and step < self.settings.steps and len(self._under_evaluation) >= _MOST_UNDER_EVALUATION
    if left_out and not self._told_of_late_evaluations:
      self._told_of_late_evaluations = True
      self.progress.message(
          f"step {step}: {_MOST_UNDER_EVALUATION} evaluations are not over yet; this one is left out, and others that "
          f"find as many. Each holds a copy of the weights. Raise eval.every_steps={every}, or lower eval.size")
    return due and not left_out

  def initial_weights(self) -> Weights:
    """Version 0 for the first searcher, in a run that has gone on from there: the reference, or where that has moved,
    from disk."""
    if self.reference is None or self.reference.version == 0:
      return self.searchers[0].reference_weights()
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self.trainer.state.params)
    return self.weights.pin(self.run_state.load_initial(like), 0, searcher=0)()

  def begin_evaluation(self) -> Callable[[], Weights]:
    """The weights of this step, whose evaluation is under way from here on: a checkpoint keeps them until it is over.
    """
    weights = self.weights.pin(self.trainer.state.params, self.trainer.version, searcher=0)
    with self._lock:
      self._under_evaluation[self.step] = weights
    return weights

  def evaluations_under_way(self) -> dict[int, Callable[[], Weights]]:
    """Weights by step; right after a resume those that are to be evaluated again."""
    with self._lock:
      return dict(self._under_evaluation)

  def evaluate(self, searcher: Searcher, weights: Weights, *, step: int, stopped: Callable[[], bool]) -> Evaluation:
    """Accuracy at pinned weights on an idle searcher, greedy unless the task samples its evaluations."""
    with self.timeline.span(f"searcher{searcher.index}", "eval"), searcher.lend_engine() as engine:
      result = evaluate_greedy(
          engine, weights, self.eval_prompts, reward=searcher.eval_reward, response_text=self.task.response_text,
          max_new_tokens=self.settings.max_new_tokens, stopped=stopped, seed=(self.settings.seed + 1) % 2**32,
          temperature=self.settings.temperature if isinstance(self.task, SampledEvalTask) else 0.0,
          on_progress=self._eval_progress(step, searcher.heartbeat))
      kl = sampled_kl(searcher, engine, self.eval_prompts, self.settings, stopped=stopped)
    self.record_evaluation(result, kl, step=step)
    return result

  def _eval_progress(self, step: int, heartbeat: Heartbeat) -> Callable[[int], None]:
    """Beats at every chunk, and says every few seconds how far a long evaluation is."""
    stage = SlowStage(f"step {step}: evaluating", len(self.eval_prompts), say=self.progress.message)

    def on_progress(done: int) -> None:
      heartbeat.beat("eval")
      stage.update(done)

    return on_progress

  def record_evaluation(self, result: Evaluation, kl: dict[str, float], *, step: int) -> None:
    """Logs an evaluation at the step whose weights it is of."""
    with self._lock:
      totals, self._accuracy = self.totals, result.accuracy
      self._under_evaluation.pop(step, None)
      totals.last_eval_step = max(totals.last_eval_step, step)
      if step == 0 and self.settings.steps:
        totals.accuracy_before, totals.measures_before = result.accuracy, result.measures
      if step >= self.settings.steps:
        totals.accuracy_after, totals.measures_after = result.accuracy, result.measures
      if not result.accuracy <= totals.accuracy_best:
        totals.accuracy_best, totals.best_step = result.accuracy, step
        self.run_state.mark_best(step)
    self.writer.write(step, result.scalars() | kl)
    for response in result.responses[:32]:
      self.rollouts.write(
          step, prompt=response.prompt.text, response=response.text, reward=response.reward, version=result.version,
          num_prompt_tokens=len(response.prompt.tokens), num_response_tokens=response.num_tokens,
          truncated=response.truncated, kind="eval")
    self.num_evaluated += 1
    how = "sampled" if isinstance(self.task, SampledEvalTask) else "greedy"
    also = "".join(f", {name} {value:.3f}" for name, value in result.measures.items())
    self.progress.message(f"step {step}: held-out accuracy {result.accuracy:.1%} on {result.size} prompts ({how}, "
                          f"version {result.version}){also}")

  # --- Checkpoints ---

  def checkpoint_due(self, step: int | None = None) -> bool:
    """Whether the run is to be saved after `step` (default: this one) steps."""
    every, step = self.settings.checkpoint_every_steps, self.step if step is None else step
    return every > 0 and step % every == 0

  def wall_secs(self) -> float:
    return self.totals.wall_secs + time.monotonic() - self._began

  def train_secs(self) -> float:
    return self.totals.train_secs + (0.0 if self._train_began is None else time.monotonic() - self._train_began)

  def save(self, *, wait: bool = False) -> None:
    """Writes a checkpoint of this moment; no step may be under way."""
    self.after_step()
    with self.doing("checkpoint"):
      self.run_state.join()
      self.weights.join()  # what was published last is what the searchers will have been given
      arrays, exchange = self.exchange.state_dict(missing=self.run_state.missing)
      counts = self.searcher_counts()
      with self._lock:
        totals = dataclasses.asdict(self.totals) | counts
        # That of this step is due after a resume, by the weights of the train state.
        under_way = {step: weights for step, weights in self._under_evaluation.items() if step != self.step}
        gaps = [dataclasses.asdict(gap) for gap in self._gaps]
      totals |= {"wall_secs": self.wall_secs(), "train_secs": self.train_secs()}
      self.published_version = self.weights.latest(0).version  # of what did arrive
      held_back = self.published_version != self.trainer.version
      meta = {
          "exchange": exchange, "totals": {k: v for k, v in totals.items() if not _is_nan(v)}, "gaps": gaps,
          "published_version": self.published_version, "staleness": self.staleness.state_dict(),
          "waits": self.waits.state_dict(),
          "ref_version": 0 if self.reference is None else self.reference.version,
          "accuracy": None if math.isnan(self._accuracy) else self._accuracy,
          "evaluations": {str(step): weights.version if step else 0 for step, weights in under_way.items()},
      }
      published = self.weights.latest(0).moved if held_back else None
      reference = None if self.reference is None else self.reference.state()
      converted = {step: weights.converted for step, weights in under_way.items() if step}  # version 0 is on disk
      self.run_state.save(
          Snapshot(self.step, self.trainer.state, published, arrays, meta, reference, converted), wait=wait)

  def resume(self, snapshot: Snapshot) -> None:
    """Goes on from a checkpoint."""
    self.run_state.set_aside_steps_after(snapshot.step)
    self.trainer.restore(snapshot.train_state)
    meta = snapshot.meta
    self.exchange.load_state_dict(snapshot.buffer, meta["exchange"], version=self.trainer.version)
    if self.reference is not None:
      self._use_reference(self.reference.restore(snapshot.reference, meta["ref_version"]))
    self.totals = Totals(**meta["totals"])
    self.staleness.load_state_dict(meta["staleness"])
    self.waits.load_state_dict(meta["waits"])
    self._gaps = [LogprobGap(**gap) for gap in meta["gaps"]]
    self._accuracy = math.nan if meta["accuracy"] is None else meta["accuracy"]
    if self.totals.best_step >= 0:
      self.run_state.mark_best(self.totals.best_step)
    for step, version in sorted((int(step), version) for step, version in meta["evaluations"].items()):
      self._under_evaluation[step] = self.initial_weights if step == 0 else self.weights.pinned(
          snapshot.evaluations[step], version, searcher=0)
    self.published_version = meta["published_version"]
    if snapshot.published is None:
      self.weights.publish(self.trainer.state.params, self.trainer.version, wait=True)
    else:
      self.weights.adopt(snapshot.published, self.published_version)


def _is_nan(value: Any) -> bool:
  return isinstance(value, float) and np.isnan(value)

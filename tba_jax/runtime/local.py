"""Asynchronous mode on the devices of one process: a thread per searcher, the trainer in the calling thread.

While a step runs the trainer books the one before, and draws and places the next batch; it publishes weights every few steps and
hands evaluations to the first searcher; it waits for nothing but an empty buffer. A searcher that raises is restarted on its own
engine, its prompts are handed out again with fresh keys; when it has raised too often the run stops, with a checkpoint.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from typing import NamedTuple

from tba_jax.evaluate import Interrupted
from tba_jax.runtime.run import Run
from tba_jax.runtime.trainer import Prepared
from tba_jax.searcher import Searcher
from tba_jax.weights import Weights


class SearcherFailed(RuntimeError):
  """A searcher raised more often than it may be restarted."""


class EvalJob(NamedTuple):
  """Weights to evaluate, pinned on the first searcher, and the step they are of."""

  step: int
  weights: Weights


class SearcherThread:
  """Runs one searcher until it is told to stop. What it raises is kept for the trainer's thread to see."""

  def __init__(self, run: Run, searcher: Searcher, jobs: queue.SimpleQueue[EvalJob] | None):
    self.searcher, self.error = searcher, None
    self._run, self._jobs = run, jobs
    self._name = f"searcher{searcher.index}"
    self._stop = threading.Event()
    self._job: EvalJob | None = None
    self._thread = threading.Thread(target=self._main, name=self._name, daemon=True)
    self._thread.start()

  def ask_to_stop(self) -> None:
    self._stop.set()

  def join(self, timeout: float) -> bool:
    self._thread.join(timeout)
    return not self._thread.is_alive()

  def unfinished_job(self) -> EvalJob | None:
    """The evaluation that the thread had taken on when it ended."""
    return self._job

  def _main(self) -> None:
    try:
      while not self._stop.is_set():
        self._turn()
    except BaseException as error:  # handed to the trainer's thread, which restarts or stops loudly
      self.error = error

  def _turn(self) -> None:
    """Takes newer weights, starts groups, decodes a chunk; or evaluates; or waits."""
    run, searcher = self._run, self.searcher
    if self._job is None and self._jobs is not None and not self._jobs.empty():
      self._job = self._jobs.get()
    if self._job is not None and searcher.is_idle():
      try:
        run.evaluate(searcher, self._job.weights, step=self._job.step, stopped=self._stop.is_set)
      except Interrupted:
        searcher.forget_weights()
        return
      self._job = None
      return
    searcher.give(run.weights.latest(searcher.index))
    while self._job is None and searcher.wants_work():
      occurrence = run.exchange.try_start(version=searcher.version)
      if occurrence is None:
        break
      searcher.start(occurrence)
    if searcher.is_idle():
      with run.timeline.span(self._name, "wait"), run.waits.waiting("searcher"):
        run.exchange.wait_to_start(version=lambda: run.weights.latest(searcher.index).version)
      return
    for occurrence, group in searcher.step():
      if group is not None:
        run.check_gap(searcher, group)
        run.note_group(group)
      run.exchange.bring(occurrence, group)


class SearcherPool:
  """The searcher threads of a run: starts, watches, restarts and joins them."""

  def __init__(self, run: Run):
    self._run = run
    self.jobs: queue.SimpleQueue[EvalJob] = queue.SimpleQueue()
    self.num_jobs_given = 0
    self._threads = [self._start(searcher) for searcher in run.searchers]

  def _start(self, searcher: Searcher) -> SearcherThread:
    return SearcherThread(self._run, searcher, self.jobs if searcher.index == 0 else None)

  def watch(self) -> None:
    """Restarts searchers that have raised. Raises: SearcherFailed when one has no restarts left, from its error."""
    for i, thread in enumerate(self._threads):
      if thread.error is None:
        continue
      run, error, searcher = self._run, thread.error, thread.searcher
      text = "".join(traceback.format_exception(error)).rstrip()
      lost = searcher.abandon()
      run.exchange.give_back(lost)
      run.totals.searcher_restarts += 1
      if run.totals.searcher_restarts > run.settings.searcher_restarts:
        raise SearcherFailed(
            f"searcher {searcher.index} raised {type(error).__name__}: {error} (runtime.searcher_restarts="
            f"{run.settings.searcher_restarts} restarts are used up)") from error
      run.progress.message(f"searcher {searcher.index} raised and is restarted ({run.totals.searcher_restarts} of "
                           f"{run.settings.searcher_restarts} restarts); {len(lost)} prompts are handed out again:\n{text}")
      searcher.forget_weights()
      job = thread.unfinished_job()
      if job is not None:
        self.jobs.put(job)
      self._threads[i] = self._start(searcher)

  def evaluate(self, step: int, weights: Weights) -> None:
    """Queues an evaluation for the first searcher."""
    self.jobs.put(EvalJob(step, weights))
    self.num_jobs_given += 1

  def stop(self, timeout_secs: float) -> list[str]:
    """Ends all threads; names those that did not end in time."""
    self._run.exchange.stop()
    for thread in self._threads:
      thread.ask_to_stop()
    deadline = time.monotonic() + timeout_secs
    late = [thread.searcher.index for thread in self._threads if not thread.join(max(0.0, deadline - time.monotonic()))]
    for thread in self._threads:
      if thread.searcher.index not in late:
        thread.searcher.abandon()  # a resume hands their prompts out again, with the same keys
    return [f"searcher {index}" for index in late]


def run_async(run: Run) -> None:
  """Drives a run to its end or to a stop; the caller saves and sums up.

  Raises: SearcherFailed; whatever the trainer's step raises. Threads are joined in every case.
  """
  pool = SearcherPool(run)
  try:
    _train(run, pool)
    _await_evaluations(run, pool)
  finally:
    late = pool.stop(run.settings.stop_timeout_secs)
    if late:
      raise RuntimeError(f"{', '.join(late)} did not end within runtime.stop_timeout_secs={run.settings.stop_timeout_secs}")


def _train(run: Run, pool: SearcherPool) -> None:
  settings = run.settings
  if run.step > 0 and run.totals.last_eval_step < 0:  # the run was stopped before its first evaluation was through
    pool.evaluate(0, run.initial_weights())
  _evaluate_if_due(run, pool)
  prepared = _next_batch(run, pool, version=run.trainer.version) if run.step < settings.steps else None
  while prepared is not None:
    run.begin_training()
    with run.timeline.span("trainer", "step"):
      run.trainer.dispatch(prepared)
      prepared = None
      try:
        run.after_step()  # the one before
        if run.may_draw_ahead():
          draw = run.exchange.try_draw(version=run.trainer.version + 1)
          prepared = None if draw is None else run.prepare(draw)
      finally:  # whatever ends the run: its last checkpoint is of a moment between two steps
        run.finish_step()
    if run.step % settings.sync_every_steps == 0:
      run.publish(wait=False)
    _evaluate_if_due(run, pool)
    pool.watch()
    if prepared is None:  # a batch in hand is trained before anything else, also when the run is to stop
      run.after_step()
      if run.checkpoint_due():
        run.save()
      if run.step >= settings.steps or run.stop.is_set():
        return
      prepared = _next_batch(run, pool, version=run.trainer.version)


def _next_batch(run: Run, pool: SearcherPool, *, version: int) -> Prepared | None:
  """Waits for rollouts, if it must; None if the run was stopped."""

  def alive() -> None:
    pool.watch()
    if run.stop.is_set():
      run.exchange.stop()

  with run.timeline.span("trainer", "wait"), run.waits.waiting("trainer"):
    draw = run.exchange.wait_draw(version=version, alive=alive)
  return None if draw is None else run.prepare(draw)


def _evaluate_if_due(run: Run, pool: SearcherPool) -> None:
  if run.evaluation_due():
    run.mark_evaluating()
    pool.evaluate(run.step, run.weights.pin(run.trainer.state.params, run.trainer.version, searcher=0))


def _await_evaluations(run: Run, pool: SearcherPool) -> None:
  """Waits for the evaluations under way; the last of them is of the final weights."""
  run.exchange.close_admission()
  while run.num_evaluated < pool.num_jobs_given and not run.stop.is_set():
    pool.watch()
    time.sleep(0.02)

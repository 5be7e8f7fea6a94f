"""Asynchronous mode on the devices of one process: a thread per searcher, the trainer in the calling thread.

While a step runs the trainer books the one before, and draws and places the next batch; it publishes weights every few
steps and hands evaluations to the first searcher; it waits for nothing but an empty buffer. A searcher that raises is
restarted on its own engine. One that hangs cannot be ended: its thread is left behind and a new searcher takes its
place and its devices. Either way its prompts are handed out again with fresh keys, what it may still bring is dropped,
and when that has happened too often the run stops, with a checkpoint.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable
from typing import NamedTuple

from tba_jax.evaluate import Interrupted
from tba_jax.runtime.run import Run
from tba_jax.runtime.trainer import Prepared
from tba_jax.searcher import Searcher
from tba_jax.weights import Weights


class SearcherFailed(RuntimeError):
  """Searchers raised or hung more often than they may be restarted."""


class EvalJob(NamedTuple):
  """Weights to evaluate, pinned for the first searcher, and the step they are of."""

  step: int
  weights: Callable[[], Weights]


class SearcherThread:
  """Runs one searcher until it is told to stop. What it raises is kept for the trainer's thread to see."""

  def __init__(self, run: Run, searcher: Searcher, jobs: queue.SimpleQueue[EvalJob] | None, *, owner: int):
    self.searcher, self.error, self.owner = searcher, None, owner
    self._run, self._jobs = run, jobs
    self._name = f"searcher{searcher.index}"
    self._stop = threading.Event()
    self._job: EvalJob | None = None
    searcher.heartbeat.beat("start")
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
    searcher.heartbeat.beat("looking for work")
    if not searcher.ready(run.weights.latest(searcher.index)):
      return
    if self._job is None and self._jobs is not None and not self._jobs.empty():
      self._job = self._jobs.get()
    if self._job is not None and searcher.is_idle():
      try:
        run.evaluate(searcher, self._job.weights(), step=self._job.step, stopped=self._stop.is_set)
      except Interrupted:
        searcher.forget_weights()
        return
      self._job = None
      return
    searcher.give(run.weights.latest(searcher.index))
    while self._job is None and searcher.wants_work():
      occurrence = run.exchange.try_start(version=searcher.version, owner=self.owner)
      if occurrence is None:
        break
      searcher.start(occurrence)
    if searcher.is_idle():
      with run.timeline.span(self._name, "wait"), run.waits.waiting("searcher"):
        run.exchange.wait_to_start(version=lambda: run.weights.latest(searcher.index).version)
      return
    for occurrence, group in searcher.step():
      if run.exchange.bring(occurrence, group) and group is not None:
        run.note_group(searcher, group)


class SearcherPool:
  """The searcher threads of a run: starts, watches, restarts and joins them."""

  def __init__(self, run: Run):
    self._run = run
    self.jobs: queue.SimpleQueue[EvalJob] = queue.SimpleQueue()
    self.num_jobs_given = 0
    self._num_started = 0
    self._threads = [self._start(searcher) for searcher in run.searchers]

  def _start(self, searcher: Searcher) -> SearcherThread:
    self._num_started += 1
    return SearcherThread(self._run, searcher, self.jobs if searcher.index == 0 else None, owner=self._num_started)

  def watch(self) -> None:
    """Restarts searchers that have raised, replaces those that hang. Raises: SearcherFailed when no restarts are left.
    """
    for i, thread in enumerate(self._threads):
      heartbeat = thread.searcher.heartbeat
      if thread.error is not None:
        self._threads[i] = self._restart(thread)
      elif heartbeat.silent_secs > self._run.settings.hang_secs:
        self._threads[i] = self._replace(thread, heartbeat.doing, heartbeat.silent_secs)

  def _restart(self, thread: SearcherThread) -> SearcherThread:
    error, searcher = thread.error, thread.searcher
    searcher.abandon()
    self._give_up(thread, f"raised {type(error).__name__}: {error}", "raised and is restarted", error)
    self._run.progress.message("".join(traceback.format_exception(error)).rstrip())
    searcher.forget_weights()
    return self._start(searcher)

  def _replace(self, thread: SearcherThread, doing: str, secs: float) -> SearcherThread:
    run, index = self._run, thread.searcher.index
    thread.ask_to_stop()
    what = (f"has been in {doing!r} for {secs:.0f} s (thread searcher{index}, "
            f"runtime.hang_secs={run.settings.hang_secs:g})")
    self._give_up(thread, what, f"{what}: its thread is left behind and another searcher takes its place", None)
    run.timeline.end_open(f"searcher{index}")
    return self._start(run.replace_searcher(index))

  def _give_up(self, thread: SearcherThread, failed: str, message: str, error: BaseException | None) -> None:
    """Hands a searcher's prompts out again, counts, and says so."""
    run, index = self._run, thread.searcher.index
    lost = run.exchange.disown(thread.owner)
    run.totals.searcher_restarts += 1
    if run.totals.searcher_restarts > run.settings.searcher_restarts:
      raise SearcherFailed(
          f"searcher {index} {failed} (runtime.searcher_restarts={run.settings.searcher_restarts} restarts are used up)"
      ) from error
    run.progress.message(f"searcher {index} {message} ({run.totals.searcher_restarts} of "
                         f"{run.settings.searcher_restarts} restarts); {len(lost)} prompts are handed out again")
    job = thread.unfinished_job()
    if job is not None:
      self.jobs.put(job)

  def evaluate(self, step: int, weights: Callable[[], Weights]) -> None:
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
        thread.searcher.close()
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
      raise RuntimeError(f"{', '.join(late)} did not end within "
                         f"runtime.stop_timeout_secs={run.settings.stop_timeout_secs}")


def _train(run: Run, pool: SearcherPool) -> None:
  settings = run.settings
  for step, weights in run.evaluations_under_way().items():
    run.progress.message(f"step {step}: its evaluation was not over when the checkpoint was written and is made again")
    pool.evaluate(step, weights)
  _evaluate_if_due(run, pool)
  prepared = _next_batch(run, pool, version=run.trainer.version) if run.step < settings.steps else None
  while prepared is not None:
    run.begin_training()
    with run.doing("step"):
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
    run.heartbeat.beat("wait")
    run.tell_fill()
    pool.watch()
    if run.stop.is_set():
      run.exchange.stop()

  with run.doing("wait"), run.waits.waiting("trainer"):
    draw = run.exchange.wait_draw(version=version, alive=alive)
  return None if draw is None else run.prepare(draw)


def _evaluate_if_due(run: Run, pool: SearcherPool) -> None:
  if run.evaluation_due():
    pool.evaluate(run.step, run.begin_evaluation())


def _await_evaluations(run: Run, pool: SearcherPool) -> None:
  """Waits for the evaluations under way; the last of them is of the final weights."""
  run.exchange.close_admission()
  while run.num_evaluated < pool.num_jobs_given and not run.stop.is_set():
    run.heartbeat.beat("wait for evaluations")
    pool.watch()
    time.sleep(0.02)

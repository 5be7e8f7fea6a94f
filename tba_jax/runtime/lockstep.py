"""One thread, a fixed schedule: sample a round, train a step, publish. Bitwise reproducible, and resumable to the same
bits.

With `lag` n >= 0 the buffer is a queue of whole groups, n steps' worth ahead of the trainer, so that every trained row
is exactly n versions old after the first n steps; `sync` is lag 0, on-policy. With lag -1 each step samples one batch's
worth of groups and draws as TBA does.
"""

from __future__ import annotations

import dataclasses

from tba_jax.evaluate import Interrupted
from tba_jax.runtime.run import Run
from tba_jax.types import Draw, Occurrence, RolloutGroup


def run_lockstep(run: Run) -> None:
  """Drives a run to its end or to a stop; the caller saves and sums up."""
  settings = run.settings
  while not run.stop.is_set():
    if run.evaluation_due() and not _evaluate(run):
      return
    if run.step >= settings.steps:
      return
    run.begin_training()
    draw = _sample_and_draw(run)
    if draw is None:
      return
    with run.doing("step"):
      run.trainer.dispatch(run.prepare(draw))
      run.finish_step()
    run.after_step()
    if run.step % settings.sync_every_steps == 0:
      run.publish(wait=True)
    if run.checkpoint_due():
      run.save()


def _evaluate(run: Run) -> bool:
  """Evaluates the trainer's weights; False if it was interrupted."""
  searcher = run.searchers[0]
  weights = run.weights.pin(run.trainer.state.params, run.trainer.version, searcher=0)()
  try:
    run.evaluate(searcher, weights, step=run.step, stopped=run.stop.is_set)
  except Interrupted:
    searcher.forget_weights()
    return False
  return True


def _sample_and_draw(run: Run) -> Draw | None:
  """Rounds of sampling until a batch can be drawn; None if the run was stopped. A round that was begun is kept whole or
  not at all."""
  settings, buffer = run.settings, run.exchange.buffer
  while True:
    num_groups = settings.groups_per_step
    if settings.lag >= 0:
      ahead = min(settings.lag + 1, settings.steps - run.step) * settings.groups_per_step
      num_groups = max(0, ahead - buffer.stats()["drawable_groups"])
    with run.waits.waiting("trainer"):
      finished = _sample_round(run, num_groups)
    if finished is None:
      return None
    for occurrence, group in finished:
      if group is not None:
        run.note_group(run.searchers[group.searcher], group)
      run.exchange.bring(occurrence, group)
    run.tell_fill()
    draw = run.exchange.try_draw(version=run.trainer.version)
    if draw is not None:
      return draw
    if run.stop.is_set():
      return None
    run.exchange.check_usable()


def _sample_round(run: Run, num_groups: int) -> list[tuple[Occurrence, RolloutGroup | None]] | None:
  """Groups of the next occurrences, in their order, shared out to the searchers in turn; None if the run was stopped
  meanwhile.

  What ends a round early, an exception too, takes it back: the ledger still has its occurrences under way, so that a
  resume hands them out again, with the same keys.
  """
  before = [dataclasses.replace(searcher.counts) for searcher in run.searchers]
  for searcher in run.searchers:
    searcher.give(run.weights.latest(searcher.index))
  for i in range(num_groups):
    run.searchers[i % len(run.searchers)].start(run.exchange.next_occurrence())
  finished: list[tuple[Occurrence, RolloutGroup | None]] = []
  whole = False
  try:
    for searcher in run.searchers:
      while not searcher.is_idle() and not run.stop.is_set():
        finished += searcher.step()
    whole = all(searcher.is_idle() for searcher in run.searchers)
  finally:
    if not whole:
      for searcher, counts in zip(run.searchers, before):
        searcher.abandon()
        searcher.counts = counts
  return sorted(finished, key=lambda item: item[0].occurrence) if whole else None

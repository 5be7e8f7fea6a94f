"""The order in which an asynchronous run used what its searchers brought: written as it happens, and followed again in
lockstep.

What a run computes depends on threads in one way only: in which order groups arrive, batches are drawn and weights are
published. With that order, the keys and the weights of each group, everything comes out again, to the bit on one
machine.
"""

from __future__ import annotations

import os
import pathlib
from collections import deque
from collections.abc import Sequence
from typing import Any

from tba_jax.disk import AppendedFile, Disk
from tba_jax.metrics import read_jsonl, to_json_line, write_atomic
from tba_jax.runtime.run import Run
from tba_jax.types import Draw, Occurrence, RolloutGroup
from tba_jax.weights import Weights

ORDER_FILE = "consumption.jsonl"


class OrderLog:
  """Appends events to workdir/consumption.jsonl: "group" (arrived), "draw" (the occurrences of a batch), "aged" (a draw
  found too little, and dropped what was too old), "publish"."""

  def __init__(self, workdir: str | os.PathLike[str], *, disk: Disk | None = None):
    self._path, self._disk = pathlib.Path(workdir) / ORDER_FILE, disk
    self._file: AppendedFile | None = None

  def write(self, event: dict[str, Any]) -> None:
    self._file.append(to_json_line(event).encode())

  def cut(self, count: int) -> None:
    """To be called first. A resumed run goes on after its first `count` events; later ones were rolled back."""
    assert self._file is None
    kept = list(read_jsonl(self._path))[:count] if count else []
    if len(kept) < count:
      kept.append({"event": "lost", "count": count - len(kept)})
    write_atomic(self._path, "".join(map(to_json_line, kept)))
    self._file = AppendedFile(self._path, disk=self._disk)

  def close(self) -> None:
    self._file.close()


class Diverged(RuntimeError):
  """What comes out is not what the log says."""


def run_replay(run: Run, source: str | os.PathLike[str]) -> None:
  """Drives a run in the order that another one, of the same config but for its runtime, has logged. Stops where that
  one stopped.

  Raises: Diverged if a batch is not of the occurrences that the log names, or if the log has lost events to a full
    disk.
  """
  events = list(read_jsonl(pathlib.Path(source) / ORDER_FILE))
  lost = sum(event["count"] for event in events if event["event"] == "lost")
  if lost:
    raise Diverged(f"{source}/{ORDER_FILE} lacks {lost} events, which a full disk did not take: that run cannot be "
                   "replayed")
  last_use = {event["version"]: place
              for place, event in enumerate(events) if event["event"] == "group" and event["kept"]}
  held: dict[int, Weights] = {}
  drawn: deque[Draw] = deque()  # not trained yet: a batch may have been drawn while the step before it ran
  place = 0
  _hold(run, held)
  _evaluate_if_due(run)
  while place < len(events) and not run.stop.is_set():
    event = events[place]
    if event["event"] == "group":
      end = next((at for at in range(place, len(events)) if events[at]["event"] != "group"), len(events))
      _bring(run, events[place:end], held)
      place = end
    else:
      if event["event"] == "draw":
        drawn.append(_draw(run, event))
      elif event["event"] == "aged":
        if run.exchange.try_draw(version=event["version"]) is not None:
          raise Diverged(f"a batch could be drawn at version {event['version']} where the log says that none could")
      elif event["step"] > 0:  # the first publish is of version 0 and was made before
        while run.step < event["step"]:
          _train(run, drawn.popleft())
        run.publish(wait=True)
        _hold(run, held)
      place += 1
    for version in [version
                    for version in held if last_use.get(version, -1) < place and version != run.published_version]:
      del held[version]
  while drawn and not run.stop.is_set():
    _train(run, drawn.popleft())


def _hold(run: Run, held: dict[int, Weights]) -> None:
  weights = run.weights.latest(0)
  held[weights.version] = weights


def _bring(run: Run, events: Sequence[dict[str, Any]], held: dict[int, Weights]) -> None:
  """Samples groups that arrived one after the other, by the weights that each was of, and brings them in that order."""
  searcher = run.searchers[0]
  found: dict[int, RolloutGroup | None] = {}
  kept = [event for event in events if event["kept"]]
  for version in sorted({event["version"] for event in kept}):
    searcher.give(held[version])
    for event in kept:
      if event["version"] == version:
        searcher.start(_occurrence(event))
    while not searcher.is_idle():
      run.heartbeat.beat("sampling")
      found |= {occurrence.occurrence: group for occurrence, group in searcher.step()}
  for event in events:
    occurrence = _occurrence(event)
    group = found.get(occurrence.occurrence)
    if group is not None:
      run.note_group(searcher, group)
    run.exchange.bring_again(occurrence, group)


def _occurrence(event: dict[str, Any]) -> Occurrence:
  return Occurrence(event["occurrence"], event["prompt_id"], event["attempt"])


def _draw(run: Run, event: dict[str, Any]) -> Draw:
  draw = run.exchange.try_draw(version=event["version"])
  found = None if draw is None else draw.occurrences[draw.valid].tolist()
  if found != event["occurrences"]:
    raise Diverged(f"the batch of step {run.step + 1} is of the occurrences {found}, the log says "
                   f"{event['occurrences']}: the run that is replayed had other data, settings or code")
  return draw


def _train(run: Run, draw: Draw) -> None:
  run.begin_training()
  with run.doing("step"):
    run.trainer.dispatch(run.prepare(draw))
    run.finish_step()
  run.after_step()
  _evaluate_if_due(run)


def _evaluate_if_due(run: Run) -> None:
  if run.evaluation_due():
    weights = run.weights.pin(run.trainer.state.params, run.trainer.version, searcher=0)()
    run.evaluate(run.searchers[0], weights, step=run.step, stopped=run.stop.is_set)

"""Where searchers and the trainer meet: the ledger of prompts, the replay buffer and flow control, behind one condition
variable.

Searchers ask to start a group and bring finished ones; the trainer asks for batches. Every wait is metered, gives up
when the run is stopped, and says what it waits for when it takes long. Nothing is held while a device works.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from tba_jax.deadlines import awake_secs
from tba_jax.replay.buffer import NotEnoughData, ReplayBuffer
from tba_jax.replay.flow import PromptLedger, may_start_group
from tba_jax.types import Draw, Occurrence, RolloutGroup

_LOOK_SECS = 0.1  # how often a wait looks at the stop flag by itself
_SAY_SECS = 60.0
_MANY_STEPS = 50  # steps' worth of prompts after which a run without a single batch is given up


class NoUsableRollouts(RuntimeError):
  """Prompts are sampled and sampled, and no batch can be made of the responses."""


class Stalled(RuntimeError):
  """The trainer waits, no group is being sampled, and none was begun for too long."""


class Exchange:
  """See the module. One object per run, used by every thread.

  Args:
    groups_per_step, responses_per_prompt: of a training batch.
    fill_responses: responses that must have arrived before the first batch is drawn.
    max_staleness: admission bound in updates, -1: none.
    hang_secs: the trainer's wait raises after so long without a group that ended or is being sampled.
    max_lead_steps: searchers stop when the groups sampled are so many steps' worth more than the groups drawn, -1: they
      run free.
    say: prints a line for the user.
  """

  def __init__(
      self,
      *,
      ledger: PromptLedger,
      buffer: ReplayBuffer,
      groups_per_step: int,
      responses_per_prompt: int,
      fill_responses: int,
      max_staleness: int,
      max_lead_steps: int,
      hang_secs: float,
      say: Callable[[str], None],
  ):
    self.ledger, self.buffer = ledger, buffer
    self._groups_per_step, self._responses_per_prompt = groups_per_step, responses_per_prompt
    self._fill_responses, self._max_staleness, self._max_lead_steps = fill_responses, max_staleness, max_lead_steps
    self._hang_secs, self._say = hang_secs, say
    # Told of everything in its order, see runtime/order.py.
    self.on_event: Callable[[dict[str, Any]], None] = lambda event: None
    self.num_events = 0
    self._oldest_first = buffer.order == "fifo"
    # By number: occurrences being sampled, whose, from which version on.
    self._held: dict[int, tuple[Occurrence, int, int]] = {}
    self._disowned: set[int] = set()
    self.num_late_groups = 0  # brought by a searcher that had been given up
    self._changed = threading.Condition()  # over an RLock: describe() is also called with it held
    self._stopped, self._admits = False, True
    self._trainer_version = 0
    self._next_version = 0  # at which the next batch to be drawn will be trained
    self._num_arrived = 0  # responses, over the whole run
    self._checked_version = -1
    self._starving = False  # the last attempt to draw found no batch
    self._ended_at_draw = 0  # occurrences that had ended, with a group or without, when the last batch was drawn

  @property
  def num_arrived(self) -> int:
    """Responses over the whole run."""
    return self._num_arrived

  @property
  def fill_responses(self) -> int:
    """As many arrive before the first batch is drawn."""
    return self._fill_responses

  # --- Searchers ---

  def try_start(self, *, version: int, owner: int = 0) -> Occurrence | None:
    """The next occurrence, if flow control lets a searcher that holds `version` start a group now.

    Args:
      owner: who samples it, for `disown`.
    """
    with self._changed:
      if owner in self._disowned or not self._may_start(version):
        return None
      occurrence = self.ledger.take()
      self._held[occurrence.occurrence] = (occurrence, owner, version)
      return occurrence

  def next_occurrence(self) -> Occurrence:
    """The next occurrence, for a driver that controls the flow by its own schedule."""
    with self._changed:
      return self.ledger.take()

  def close_admission(self) -> None:
    """No group may be started any more."""
    with self._changed:
      self._admits = False

  def wait_to_start(self, *, version: Callable[[], int]) -> bool:
    """Blocks until a group may be started; False when the run was stopped or `_LOOK_SECS` have passed."""
    with self._changed:
      if not self._may_start(version()):
        self._changed.wait(_LOOK_SECS)
      return self._may_start(version())

  def _may_start(self, version: int) -> bool:
    if self._stopped or not self._admits or self._lead_is_reached():
      return False
    running = self.ledger.stats()["in_flight"]
    # Neither bound may stop the initial fill: rows that are left out count against the bounds and not towards the fill.
    if self._max_staleness < 0 or self._num_arrived < self._fill_responses:
      return True
    unused = int(self.buffer.stats()["unused_groups"])
    return may_start_group(
        trainer_version=self._next_version, searcher_version=version, unused_groups=unused, running_groups=running,
        groups_per_step=self._groups_per_step, max_staleness=self._max_staleness)

  def _lead_is_reached(self) -> bool:
    """The lead is what was sampled less what was drawn. Groups that no draw has touched would not do: TBA's draw leaves
    some for ever."""
    ledger = self.ledger.stats()
    running = ledger["in_flight"]
    filled = self._num_arrived + running * self._responses_per_prompt >= self._fill_responses
    ahead = ledger["finished"] + running - self.buffer.stats()["groups_drawn"]
    # Groups that were evicted or are of no use stay in the lead, so it must not hold while the trainer finds no batch.
    bound = self._max_lead_steps >= 0 and filled and not self._starving
    return bound and ahead >= self._max_lead_steps * self._groups_per_step

  def bring(self, occurrence: Occurrence, group: RolloutGroup | None) -> bool:
    """Books an occurrence as finished and puts its group, if it has one, into the buffer; one atomic act.

    Returns: False if it is too late: the occurrence was taken from its searcher, and this is dropped and counted.
    """
    with self._changed:
      if not self.ledger.is_in_flight(occurrence):
        self.num_late_groups += 1
        return False
      _, _, began = self._held.pop(occurrence.occurrence, (None, 0, 0))
      version = began if group is None else int(group.versions[0, 0])
      self._event({"event": "group", **dataclasses.asdict(occurrence), "version": version, "kept": group is not None})
      self._take_in(occurrence, group)
      return True

  def bring_again(self, occurrence: Occurrence, group: RolloutGroup | None) -> None:
    """Books a group of an occurrence that another run's order names, whoever's turn it would be here."""
    with self._changed:
      self.ledger.claim(occurrence)
      self._take_in(occurrence, group)

  def _take_in(self, occurrence: Occurrence, group: RolloutGroup | None) -> None:
    if group is None:
      self.ledger.drop(occurrence)
    else:
      self.buffer.add(group, newest_version=self._trainer_version)
      self.ledger.finish(occurrence)
      self._num_arrived += len(group.lengths)
    self._changed.notify_all()

  def disown(self, owner: int) -> list[Occurrence]:
    """An owner is given up: others will take what it was sampling, with fresh keys; it may start nothing and bring
    nothing more."""
    with self._changed:
      self._disowned.add(owner)
      lost = [occurrence for occurrence, of, _ in self._held.values() if of == owner]
      for occurrence in lost:
        del self._held[occurrence.occurrence]
        self.ledger.requeue(occurrence)
      self._changed.notify_all()
      return lost

  def claim_check(self, version: int) -> bool:
    """True for one caller per version: whose group is to be compared with the trainer's log-probabilities."""
    with self._changed:
      if version <= self._checked_version:
        return False
      self._checked_version = version
      return True

  def unclaim_check(self, version: int) -> None:
    """The claimed comparison could not be made; the next group of that version may."""
    with self._changed:
      self._checked_version = min(self._checked_version, version - 1)

  # --- Trainer ---

  def try_draw(self, *, version: int) -> Draw | None:
    """A batch to train at `version`, or None while there is not enough of it."""
    with self._changed:
      return self._try_draw(version)

  def _try_draw(self, version: int) -> Draw | None:
    self._starving = self._num_arrived >= self._fill_responses  # until a batch is found below
    self._next_version = version  # also after a skipped update, which a batch drawn ahead had counted as applied
    if self._num_arrived < self._fill_responses:
      return None
    shape = dict(num_prompts=self._groups_per_step, responses_per_prompt=self._responses_per_prompt, version=version)
    num_aged = self.buffer.stats()["evicted_age"]
    if not self.buffer.can_draw(**shape) or self._must_wait_for_running(version):
      if self.buffer.stats()["evicted_age"] != num_aged:
        self._event({"event": "aged", "version": version})
      return None
    try:
      draw = self.buffer.draw(**shape)
    except NotEnoughData:
      return None
    self._next_version, self._starving = version + 1, False
    self._ended_at_draw = self._num_ended()
    self._event({"event": "draw", "version": version, "occurrences": draw.occurrences[draw.valid].tolist()})
    self._changed.notify_all()
    return draw

  def _event(self, event: dict[str, Any]) -> None:
    self.num_events += 1
    self.on_event(event)

  def _must_wait_for_running(self, version: int) -> bool:
    """Whether a batch drawn now would make a group that is still being sampled too old before its turn.

    Groups are used oldest first, but long responses come later than short ones that began with them. Drawing what is
    there at once would lose the long ones to age: a waste, and a bias towards short responses. With everybody's last
    version known, the batch may be drawn if the others can all be used in time, `groups_per_step` with each version.
    """
    if not self._oldest_first or self._max_staleness < 0:
      return False
    waiting = self.buffer.queued_versions()[self._groups_per_step:]
    running = [began for _, _, began in self._held.values() if began + self._max_staleness >= version]
    last = sorted([(began + self._max_staleness, 0) for began in waiting] +
                  [(began + self._max_staleness, 1) for began in running])
    num_running = 0
    for place, (until, is_running) in enumerate(last):
      num_running += is_running
      if until < version + 1 + place // self._groups_per_step and num_running:
        return True
    return False

  def wait_draw(self, *, version: int, alive: Callable[[], None]) -> Draw | None:
    """Blocks until a batch can be drawn; None when the run was stopped.

    Args:
      version: at which the batch will be trained.
      alive: raises if nobody is left who could bring groups; called at every look.
    """
    began = said = moved = awake_secs()
    num_ended = self._num_ended()
    while True:
      alive()
      with self._changed:
        if self._stopped:
          return None
        draw = self._try_draw(version)
        if draw is not None:
          return draw
        self.check_usable()
        if self._num_ended() != num_ended or self.ledger.stats()["in_flight"]:
          num_ended, moved = self._num_ended(), awake_secs()
        self._changed.wait(_LOOK_SECS)
      now = awake_secs()
      if now - moved > self._hang_secs:
        raise Stalled(f"nothing is being sampled and no batch can be drawn, for {now - moved:.0f} s "
                      f"(runtime.hang_secs={self._hang_secs:g}): {self.describe()}")
      if now - said > _SAY_SECS:
        said = now
        self._say(f"the trainer (thread {threading.current_thread().name}) has waited {now - began:.0f} s for "
                  f"rollouts: {self.describe()}")

  @property
  def num_arrived(self) -> int:
    """Responses that came into the buffer, over the whole run."""
    return self._num_arrived

  def check_usable(self) -> None:
    """Raises NoUsableRollouts if many prompts were sampled since the last batch and still none can be drawn."""
    with self._changed:
      if self._num_ended() - self._ended_at_draw <= _MANY_STEPS * self._groups_per_step + self._fill_responses:
        return
      raise NoUsableRollouts(
          f"no batch can be drawn: {self.describe()}. A prompt needs 2 usable responses that differ (buffer.dedup); "
          "look at sample.temperature, sample.truncated and the rewards.")

  def _num_ended(self) -> int:
    ledger = self.ledger.stats()
    return ledger["finished"] + ledger["dropped"]

  def describe(self) -> str:
    """What is there and what is under way, in words."""
    with self._changed:
      buffer, ledger = self.buffer.stats(), self.ledger.stats()
      return (f"{self._num_arrived} responses have arrived (first batch at {self._fill_responses}), "
              f"{buffer['live_rows']} are in the buffer ({buffer['duplicates']} duplicates left out), "
              f"{ledger['in_flight']} groups are being sampled, {ledger['dropped']} were dropped with fewer than 2 "
              f"usable responses, the trainer is at version {self._trainer_version}")

  def advance(self, version: int) -> None:
    """The trainer has applied updates up to `version`. A batch drawn ahead may already have moved the next draw's
    version further."""
    with self._changed:
      self._trainer_version = version
      self._changed.notify_all()

  def update_priorities(self, rows: np.ndarray, residuals: np.ndarray) -> None:
    """What a step found of the rows it trained on, see `ReplayBuffer.update_priorities`."""
    with self._changed:
      self.buffer.update_priorities(rows, residuals)

  def mark_publish(self, version: int, *, step: int) -> None:
    """Weights of `version`, of after `step` steps, were published: from here on a new recent set begins."""
    with self._changed:
      self._event({"event": "publish", "version": version, "step": step})
      self.buffer.mark_publish(version)
      self._changed.notify_all()

  def set_reference(self, ref_version: int) -> None:
    """The reference moves; called before any searcher scores by the new one."""
    with self._changed:
      self.buffer.set_reference(ref_version)

  def update_log_ref(self, rows: np.ndarray, log_ref: np.ndarray, *, ref_version: int) -> None:
    """Keeps what rows were given when they were scored again."""
    with self._changed:
      self.buffer.update_log_ref(rows, log_ref, ref_version=ref_version)

  def stop(self) -> None:
    """Ends every wait."""
    with self._changed:
      self._stopped = True
      self._changed.notify_all()

  # --- Checkpoints ---

  def state_dict(
      self, *, missing: Callable[[np.ndarray], np.ndarray] | None = None
  ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays and JSON of buffer and ledger, taken at one moment. `missing`: see `ReplayBuffer.state_dict`."""
    with self._changed:
      state = self.buffer.state_dict(missing=missing)
      return state["arrays"], {
          "buffer": state["scalars"], "ledger": self.ledger.state_dict(), "num_arrived": self._num_arrived,
          "num_events": self.num_events, "checked_version": self._checked_version
      }

  def load_state_dict(self, arrays: dict[str, np.ndarray], state: dict[str, Any], *, version: int) -> None:
    with self._changed:
      self.buffer.load_state_dict({"arrays": arrays, "scalars": state["buffer"]}, newest_version=version)
      self.ledger.load_state_dict(state["ledger"])
      self._num_arrived, self._checked_version = state["num_arrived"], state["checked_version"]
      self.num_events = state["num_events"]
      self._trainer_version = self._next_version = version
      self._ended_at_draw = self._num_ended()

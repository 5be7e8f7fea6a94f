"""What a run is told, what it adds up, and the flag that ends it: plain values, without the parts they are about."""

from __future__ import annotations

import dataclasses
import math
import threading


class StopFlag:
  """Asks a run to end at the next step boundary; set by signals and by tests."""

  def __init__(self):
    self._event = threading.Event()
    self.reason = ""

  def set(self, reason: str) -> None:
    if not self._event.is_set():
      self.reason = reason
    self._event.set()

  def is_set(self) -> bool:
    return self._event.is_set()


@dataclasses.dataclass(frozen=True)
class RunSettings:
  """Named values of the config that the drivers need."""

  seed: int
  mode: str
  loss: str
  steps: int
  groups_per_step: int
  responses_per_prompt: int
  lag: int  # -1: the draw of TBA
  sync_every_steps: int
  eval_every_steps: int
  eval_kl_prompts: int
  samples_per_prompt: int  # S
  checkpoint_every_steps: int
  max_new_tokens: int
  temperature: float
  rollouts_per_step: int
  searcher_restarts: int
  replay_order: str  # folder of the run whose order is followed; "": none
  hang_secs: float
  stop_timeout_secs: float


@dataclasses.dataclass
class Totals:
  """Sums over the whole run, earlier processes of a resumed one included. Saved with every checkpoint."""

  wall_secs: float = 0.0  # of the processes before this one
  train_secs: float = 0.0  # from the first draw on, of the processes before this one
  trained_tokens: int = 0
  trained_responses: int = 0
  skipped_updates: int = 0
  rollouts: int = 0
  generated_tokens: int = 0
  truncated: int = 0
  bad_rewards: int = 0
  masked: int = 0
  dropped_groups: int = 0
  searcher_restarts: int = 0
  logprob_gap_max: float = 0.0
  logprob_gap_p95: float = 0.0  # the largest of the groups' p95
  logprob_tokens_compared: int = 0
  accuracy_before: float = math.nan
  accuracy_after: float = math.nan
  accuracy_best: float = math.nan
  # What else the first and the last evaluation found, by name.
  measures_before: dict[str, float] = dataclasses.field(default_factory=dict)
  measures_after: dict[str, float] = dataclasses.field(default_factory=dict)
  best_step: int = -1
  last_eval_step: int = -1

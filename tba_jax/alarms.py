"""What a run says by itself when its numbers mean that something is wrong: one line a condition, once, with what to do.

Nothing here stops a run; a loss that is not finite does (train.max_nonfinite_in_row).
"""

from __future__ import annotations

import math
import os
import pathlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tba_jax.disk import Disk
from tba_jax.metrics import METRICS_FILE, JsonLines, read_jsonl

WARNINGS_FILE = "warnings.jsonl"
WINDOW_STEPS = 20
IDLE_SHARE = 0.5  # of the time
FAR_NATS = 1.0  # |log pi - log ref| a token: few tokens are then likely under both
OLD_UPDATES = 32.0  # mean staleness; the paper's runs stay well below

Line = Mapping[str, Any]  # of metrics.jsonl


class Alarm(NamedTuple):
  """A condition: `found` gives the words of its warning that hold the numbers, None while all is well."""

  name: str
  found: Callable[[Sequence[Line]], str | None]
  advice: str


def _mean(lines: Sequence[Line], key: str) -> float:
  return sum(line[key] for line in lines) / len(lines)


def _zero(lines: Sequence[Line]) -> str | None:
  if any(line["reward"] != 0 or line["equal_reward_groups"] < 1 for line in lines):
    return None
  return f"every response of {_window(lines)} was graded 0 ({_mean(lines, 'truncated'):.0%} of them were truncated)"


def _tie(lines: Sequence[Line]) -> str | None:
  if any(line["equal_reward_groups"] < 1 for line in lines) or all(line["reward"] == 0 for line in lines):
    return None
  return f"in every group of {_window(lines)} all rewards tie (their mean is {_mean(lines, 'reward'):.3g})"


def _far(lines: Sequence[Line]) -> str | None:
  if "log_ratio_ref" not in lines[-1]:  # an objective that reads no reference
    return None
  nats = _mean(lines, "log_ratio_ref") / max(_mean(lines, "response_tokens"), 1.0)
  if math.isfinite(nats) and abs(nats) <= FAR_NATS:
    return None
  return f"log pi - log ref is {nats:+.2g} nats a token over {_window(lines)}: the policy runs away from its reference"


def _old(lines: Sequence[Line]) -> str | None:
  updates = _mean(lines, "staleness_mean")
  return None if updates <= OLD_UPDATES else (
    f"the responses trained on in {_window(lines)} are {updates:.0f} updates old on average")


def _window(lines: Sequence[Line]) -> str:
  return f"steps {lines[0]['step']} to {lines[-1]['step']}"


def _idle(key: str, who: str, num: int) -> Callable[[Sequence[Line]], str | None]:
  """Of a running total of seconds that `num` of them waited."""

  def found(lines: Sequence[Line]) -> str | None:
    secs = lines[-1]["wall_seconds"] - lines[0]["wall_seconds"]
    share = (lines[-1][key] - lines[0][key]) / (secs * num) if secs > 0 else 0.0
    return f"{who} waited for {share:.0%} of the time of {_window(lines)}" if share > IDLE_SHARE else None

  return found


def _numbers(line: Line) -> Line:
  """A line as it was before it was written: what is no number there is null in the file."""
  return {name: math.nan if value is None else value for name, value in line.items()}


class Alarms:
  """Watches the lines of metrics.jsonl over the last WINDOW_STEPS steps. Each condition is told once a run, and kept in
  workdir/warnings.jsonl as {"step", "name", "text"}."""

  def __init__(
    self, workdir: str | os.PathLike[str], *, resume_step: int, num_searchers: int, is_async: bool,
    disk: Disk | None = None,
  ):
    """`resume_step` as for `metrics.JsonLines`; `is_async`: else the sides take turns, and how old rows are is
    chosen."""
    path = pathlib.Path(workdir) / WARNINGS_FILE
    self._file = JsonLines(path, resume_step=resume_step, disk=disk)
    self._told = {line["name"] for line in read_jsonl(path)} if path.exists() else set()  # a full disk makes no file
    self._alarms = [
      Alarm("zero_reward", _zero, "read rollouts/train.jsonl: does the grader find the answers, is "
            "sample.max_new_tokens too short, can the model do the task at all?"),
      Alarm("ties", _tie, "only the KL term is trained on; take prompts of another difficulty, raise "
            "sample.temperature or train.responses_per_prompt"),
      Alarm("far_from_reference", _far, "lower train.learning_rate, raise loss.beta_final, or go back to the best "
            "checkpoint"),
    ]
    if is_async:
      self._alarms += [
        Alarm("stale", _old, "raise buffer.recent_fraction, set buffer.max_staleness, lower sync.every_steps, or give "
              "searchers more devices"),
        Alarm("trainer_idle", _idle("trainer_wait_seconds", "the trainer", 1), "give searchers more devices "
              "(devices.searchers), let each rollout be used more often (buffer.max_uses), or shorten responses"),
        Alarm("searchers_idle", _idle("searcher_wait_seconds", "searchers", num_searchers), "let them run ahead "
              "(sync.max_lead_steps, buffer.max_staleness), or give devices of theirs to the trainer "
              "(devices.trainer)"),
      ]
    self._lines: deque[Line] = deque(maxlen=WINDOW_STEPS)
    metrics = pathlib.Path(workdir) / METRICS_FILE
    if resume_step >= 0 and metrics.exists():  # the window goes on where it was, so that a resumed run warns alike
      self._lines.extend(_numbers(line) for line in read_jsonl(metrics)
                         if "loss" in line and line["step"] <= resume_step)

  @property
  def told(self) -> list[str]:
    """Names of the conditions that were told in this run."""
    return sorted(self._told)

  def after_step(self, line: Line) -> list[str]:
    """The warnings of conditions that hold over the window now and were not told before."""
    self._lines.append(line)
    if len(self._lines) < WINDOW_STEPS:
      return []
    lines, texts = list(self._lines), []
    for alarm in self._alarms:
      words = None if alarm.name in self._told else alarm.found(lines)
      if words is not None:
        self._told.add(alarm.name)
        texts.append(f"warning: {words}; {alarm.advice}")
        self._file.write({"step": line["step"], "name": alarm.name, "text": texts[-1]})
    return texts

  def close(self) -> None:
    self._file.close()

"""What a task is to the rest of the system: prompts in, a reward for the text of a response out.

A task knows its data, its prompt format and its grading. It knows no buffer or config, and a model or device only where
its reward needs one: it is constructed from named values, gives the same prompts for the same values, and may be used
from several searcher threads at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import math
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from tba_jax.tokenizer import Tokenizer
from tba_jax.types import Prompt

MAX_DROPPED_SHARE = 0.01


@dataclasses.dataclass(frozen=True)
class TaskSettings:
  """What a run tells every task; a class of FILE.py:CLASS is called CLASS(tokenizer, settings, **task_args)."""

  seed: int
  data_path: str  # data.path
  max_prompt_tokens: int
  num_eval_prompts: int  # as many are evaluated at most; 0: the whole split
  num_sft_examples: int  # as many are learnt from before the first update


class Responses(NamedTuple):
  """Responses to one prompt, graded together."""

  texts: tuple[str, ...]  # what `response_text` made of the tokens
  tokens: tuple[np.ndarray, ...]  # int32, up to and with the stop token, if there is one
  truncated: np.ndarray  # bool [S]


GroupReward = Callable[[Prompt, Responses], np.ndarray]  # float32 [S]; NaN for a response that could not be graded


@runtime_checkable
class Task(Protocol):
  """Prompts, and a reward for each response to one."""

  name: str
  tokenizer: Tokenizer

  def train_prompts(self) -> Sequence[Prompt]:
    """Prompts to learn from. `prompt_id` is the index in this list; equal texts are two prompts."""

  def eval_prompts(self) -> Sequence[Prompt]:
    """Held-out prompts, with ids of their own from 0. They are never trained on."""

  def reward(self, prompt: Prompt, response_text: str, *, truncated: bool) -> float:
    """Finite reward of a response; 1 means right where a task has right answers.

    Args:
      prompt: of `train_prompts` or `eval_prompts`.
      response_text: what `response_text` made of the tokens: the response only, without the prompt.
      truncated: the length limit was hit before a stop token. The run's policy for such rows is applied before this is
        called; a task may still care.
    """

  def response_text(self, tokens: Sequence[int]) -> str:
    """The text that is graded: tokens up to the first stop token, which is left out with all that follows it."""


@runtime_checkable
class GroupRewardTask(Task, Protocol):
  """A task that grades a group at a time: by a model beside the searcher, or by several processes."""

  def make_reward(self, device_or_mesh: Any, *, for_eval: bool) -> GroupReward:
    """The reward for one searcher, which calls it from one thread at a time; `Task.reward` is not used then.

    Args:
      device_or_mesh: the searcher's, where a model that rewards must live.
      for_eval: the reward of evaluations, of which 1 counts as a success.
    """


@runtime_checkable
class MeasuringReward(Protocol):
  """A reward of groups that can also say something of all responses of an evaluation together."""

  def measure(self, texts: Sequence[str]) -> dict[str, float]:
    """Numbers by name, as how varied the responses are."""


@runtime_checkable
class SampledEvalTask(Task, Protocol):
  """A task whose evaluations sample at the run's temperature instead of decoding greedily."""

  samples_evaluations: bool


@runtime_checkable
class AnswerTask(Task, Protocol):
  """A task whose responses end in an answer, so that several responses can vote (maj@k)."""

  def final_answer(self, response_text: str) -> str | None:
    """The answer that a response gives; None if it gives none."""


@runtime_checkable
class SupervisedTask(Task, Protocol):
  """A task that also has written solutions, for supervised fine-tuning before the first update."""

  def sft_examples(self) -> Sequence[tuple[list[int], list[int]]]:
    """(prompt tokens, response tokens) pairs; a response ends with a stop token, which is learnt like the rest."""


def make_reward(task: Task, device_or_mesh: Any, *, for_eval: bool) -> GroupReward:
  """The task's reward of groups; of a task that grades one by one, made of `Task.reward`."""
  if isinstance(task, GroupRewardTask):
    return task.make_reward(device_or_mesh, for_eval=for_eval)

  def one_by_one(prompt: Prompt, responses: Responses) -> np.ndarray:
    found = [
      task.reward(prompt, text, truncated=bool(truncated))
      for text, truncated in zip(responses.texts, responses.truncated)
    ]
    return np.array([_number(reward, task.name) for reward in found], np.float32)

  return one_by_one


def grade(reward: GroupReward, prompt: Prompt, responses: Responses) -> np.ndarray:
  """What `reward` gives, float32 [S]. Raises: ValueError unless that is one number for each response."""
  found = np.asarray(reward(prompt, responses), np.float32)
  if found.shape != (len(responses.texts),):
    raise ValueError(
      f"the reward of prompt {prompt.prompt_id} gave an array of shape {found.shape} for {len(responses.texts)} "
      "responses; it must give one number for each, NaN for one that cannot be graded"
    )
  return found


def _number(reward: Any, name: str) -> float:
  """A reward as a number; None is NaN. Raises: TypeError for anything that is none, text of digits included."""
  if reward is None:
    return math.nan
  if isinstance(reward, (str, bytes)) or np.ndim(reward):
    raise TypeError(
      f"reward() of task {name} gave {reward!r}; it must give one number, or NaN or None for a response that cannot be "
      "graded"
    )
  return float(reward)


def fitting(
  name: str, split: str, encoded: Sequence[tuple[Any, list[int]]], *, max_prompt_tokens: int
) -> list[tuple[Any, list[int]]]:
  """The (row, prompt ids) pairs whose prompt fits; a printed line says how many were dropped.

  Raises: ValueError if more than MAX_DROPPED_SHARE would be dropped.
  """
  kept = [(row, ids) for row, ids in encoded if len(ids) <= max_prompt_tokens]
  num_dropped = len(encoded) - len(kept)
  if num_dropped > MAX_DROPPED_SHARE * len(encoded):
    longest = max(len(ids) for _, ids in encoded)
    raise ValueError(
      f"max_prompt_tokens={max_prompt_tokens} would drop {num_dropped} of {len(encoded)} {split} prompts (the longest "
      f"has {longest} tokens), more than {MAX_DROPPED_SHARE:.0%}; raise sample.max_prompt_tokens."
    )
  if num_dropped:
    print(f"{name}: dropped {num_dropped} of {len(encoded)} {split} prompts longer than {max_prompt_tokens} tokens.")
  return kept


def decode_response(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
  """Text of the tokens before the first stop token; special tokens are left out."""
  ids = [int(token) for token in tokens]
  end = next((index for index, token in enumerate(ids) if token in tokenizer.stop_ids), len(ids))
  return tokenizer.decode(ids[:end])


def primary_stop_id(tokenizer: Tokenizer) -> int:
  """The stop token that written solutions end with: the tokenizer's end of text if it stops, else the first stop id."""
  end_of_text = tokenizer.hf.eos_token_id
  return end_of_text if end_of_text in tokenizer.stop_ids else tokenizer.stop_ids[0]

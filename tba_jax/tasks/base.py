"""What a task is to the rest of the system: prompts in, a reward for the text of a response out.

A task knows its data, its prompt format and its grading. It knows no model, device, buffer or config: it is constructed
from named values, gives the same prompts for the same values, and may be used from several searcher threads at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from tba_jax.tokenizer import Tokenizer
from tba_jax.types import Prompt


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
class SupervisedTask(Task, Protocol):
  """A task that also has written solutions, for supervised fine-tuning before the first update."""

  def sft_examples(self) -> Sequence[tuple[list[int], list[int]]]:
    """(prompt tokens, response tokens) pairs; a response ends with a stop token, which is learnt like the rest."""


def decode_response(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
  """Text of the tokens before the first stop token; special tokens are left out."""
  ids = [int(token) for token in tokens]
  end = next((index for index, token in enumerate(ids) if token in tokenizer.stop_ids), len(ids))
  return tokenizer.decode(ids[:end])


def primary_stop_id(tokenizer: Tokenizer) -> int:
  """The stop token that written solutions end with: the tokenizer's end of text if it stops, else the first stop id."""
  end_of_text = tokenizer.hf.eos_token_id
  return end_of_text if end_of_text in tokenizer.stop_ids else tokenizer.stop_ids[0]

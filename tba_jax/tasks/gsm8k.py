"""GSM8K: grade-school word problems, graded by their final number (Cobbe et al. 2021, arXiv:2110.14168).

Reward 1 if the number that the response gives equals the gold one, else 0; see `rewards.numeric_answer` for what counts
as giving a number. There is no reward for format and no penalty for length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import re
from typing import NamedTuple

import numpy as np

from tba_jax.rewards import numeric_answer
from tba_jax.tasks.base import decode_response, fitting, primary_stop_id
from tba_jax.tasks.characters import make_character_tokenizer
from tba_jax.tasks.gsm8k_data import SPLITS, Row, load_rows, make_rows
from tba_jax.tokenizer import Tokenizer
from tba_jax.types import Prompt

INSTRUCTION = "Reason briefly, step by step. On the last line write #### followed by the answer as a number."

_CALCULATOR = re.compile(r"<<[^<>]*>>")


def rho_sft_prompt(question: str) -> str:
  """The format that realtreetune/rho-1b-sft-GSM8K was fine-tuned on: its response starts with a newline.

  Differs from TBA: its code writes `[MATH TASK]` and puts that newline at the prompt's end, which the model never saw.
  """
  return f"[MATH_TASK] Problem:\n{question}\n\nSolution:"


def _encode_plain(tokenizer: Tokenizer, question: str) -> list[int]:
  ids = tokenizer.encode(rho_sft_prompt(question), add_special_tokens=True)  # begin of text, for models with one
  while ids and ids[-1] in tokenizer.stop_ids:  # some tokenizers end every text, and so would the prompt
    ids.pop()
  return ids


def _encode_chat(tokenizer: Tokenizer, question: str) -> list[int]:
  return tokenizer.chat([{"role": "user", "content": f"{question}\n\n{INSTRUCTION}"}])


class PromptFormat(NamedTuple):
  """How a question becomes a prompt."""

  encode: Callable[[Tokenizer, str], list[int]]
  text: Callable[[str], str]  # for people; of a chat it is the question alone
  before_solution: str  # how a written solution begins


PROMPT_FORMATS = {
  "rho_sft": PromptFormat(_encode_plain, rho_sft_prompt, "\n"),
  "chat": PromptFormat(_encode_chat, lambda question: question, ""),
}


def solution_text(answer: str) -> str:
  """A written solution without the `<<48/2=24>>` marks of the data set's calculator."""
  return _CALCULATOR.sub("", answer)


def gold_answer(row: Row) -> str:
  """The number after '####'. Raises ValueError, naming the row, if there is none."""
  gold = row.answer.rpartition("####")[2].strip() if "####" in row.answer else ""
  try:
    numeric_answer.grade("", gold)
  except ValueError as error:
    raise ValueError(
      f"{row.source}: the answer must end in '#### N' with a number N; it ends in {row.answer[-40:]!r}."
    ) from error
  return gold


class Gsm8kTask:
  """GSM8K's train split to learn from and its test split to evaluate on.

  Args:
    tokenizer: of the model; None: one of characters, for a new model.
    prompt_format: "rho_sft" (plain text, for base and fine-tuned models) or "chat" (the tokenizer's chat template).
    max_prompt_tokens: longer prompts are dropped, counted in `num_dropped` and reported by a printed line.
    jsonl_folder, tfds_folder: see `gsm8k_data.load_rows`.
    num_generated: instead of data, make as many problems to learn from and a quarter as many to evaluate on; 0: read
      data. seed: of these.
  Raises: ValueError for an unknown format, missing or malformed data, or if more than 1% of a split would be dropped.
  """

  name = "gsm8k"

  def __init__(
    self,
    tokenizer: Tokenizer | None,
    *,
    prompt_format: str,
    max_prompt_tokens: int,
    jsonl_folder: str = "",
    tfds_folder: str = "",
    num_generated: int = 0,
    seed: int = 0,
  ):
    if prompt_format not in PROMPT_FORMATS:
      raise ValueError(f"prompt_format={prompt_format!r} is unknown; choose one of {', '.join(PROMPT_FORMATS)}.")
    self.tokenizer = tokenizer or make_character_tokenizer()
    self.num_dropped: dict[str, int] = {}
    self._format = PROMPT_FORMATS[prompt_format]
    self._max_prompt_tokens = max_prompt_tokens
    if num_generated:
      train = make_rows(num_generated, split="train", seed=seed)
      test = make_rows(max(1, num_generated // 4), split="test", seed=seed)
    else:
      train, test = (load_rows(split, jsonl_folder=jsonl_folder, tfds_folder=tfds_folder) for split in SPLITS)
    self._train_rows, self._train_prompts = self._build("train", train)
    _, self._eval_prompts = self._build("test", test)

  def train_prompts(self) -> Sequence[Prompt]:
    return self._train_prompts

  def eval_prompts(self) -> Sequence[Prompt]:
    return self._eval_prompts

  def reward(self, prompt: Prompt, response_text: str, *, truncated: bool) -> float:
    return numeric_answer.grade(response_text, prompt.answer)

  def final_answer(self, response_text: str) -> str | None:
    """What a majority is counted of."""
    found = numeric_answer.extract(response_text)
    return None if found is None else str(found)

  def response_text(self, tokens: Sequence[int]) -> str:
    return decode_response(self.tokenizer, tokens)

  def sft_examples(self) -> Sequence[tuple[list[int], list[int]]]:
    """The train split's written solutions, without calculator marks; the last line is '#### N'."""
    pairs = zip(self._train_prompts, self._train_rows)
    return [(prompt.tokens.tolist(), self._solution(prompt, row)) for prompt, row in pairs]

  def _solution(self, prompt: Prompt, row: Row) -> list[int]:
    text, start = self._format.before_solution + solution_text(row.answer), prompt.tokens.tolist()
    # Some tokenizers put a space before any text, which no sampled response begins with: encoded behind its prompt, a
    # solution has none. (A chat's prompt is more than its text and never matches; its solution is encoded by itself.)
    together = self.tokenizer.encode(prompt.text + text, add_special_tokens=True)
    ids = together[len(start) :] if together[: len(start)] == start else self.tokenizer.encode(text)
    while ids and ids[-1] in self.tokenizer.stop_ids:
      ids.pop()
    return [*ids, primary_stop_id(self.tokenizer)]

  def _build(self, split: str, rows: Sequence[Row]) -> tuple[list[Row], list[Prompt]]:
    """Rows whose prompts fit, and their prompts."""
    encoded = [(row, self._format.encode(self.tokenizer, row.question)) for row in rows]
    kept = fitting(self.name, split, encoded, max_prompt_tokens=self._max_prompt_tokens)
    self.num_dropped[split] = len(rows) - len(kept)
    prompts = [
      Prompt(index, np.array(ids, np.int32), self._format.text(row.question), gold_answer(row))
      for index, (row, ids) in enumerate(kept)
    ]
    return [row for row, _ in kept], prompts

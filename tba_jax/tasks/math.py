"""Competition mathematics with boxed answers: MATH to learn from, MATH-500 to evaluate on (Hendrycks et al. 2021,
arXiv:2103.03874; Lightman et al. 2023, arXiv:2305.20050).

Reward 1 if the last \\boxed{...} of the response equals the gold answer by math-verify, else 0; a response that could
not be graded earns NaN, which leaves it out of the batch, and is counted. See `rewards.boxed_answer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
import random
from typing import Any, NamedTuple
import zlib

import numpy as np

from tba_jax.rewards.boxed_answer import boxed_answer, grade_boxed
from tba_jax.rewards.math_pool import MathPool
from tba_jax.tasks.base import GroupReward, Responses, decode_response, fitting, primary_stop_id
from tba_jax.tasks.characters import make_character_tokenizer
from tba_jax.tasks.jsonl import JsonRow, read_jsonl
from tba_jax.tokenizer import Tokenizer
from tba_jax.types import Prompt

# Differs from TBA': its instruction lost the braces in an f-string, so that the model was shown boxed12.
INSTRUCTION = "Reason step by step, and put your final answer in \\boxed{} at the end."


class Problem(NamedTuple):
  """A problem with its answer, and with a written solution where the data has one."""

  text: str
  answer: str
  solution: str


def _problem(row: JsonRow) -> Problem:
  """Raises: ValueError, naming the row, if there is neither an answer nor a solution that boxes one."""
  solution = row.fields["solution"] if isinstance(row.fields.get("solution"), str) else ""
  answer = row.fields["answer"] if isinstance(row.fields.get("answer"), str) else boxed_answer(solution)
  if not answer or not answer.strip():
    raise ValueError(f"{row.source} has neither a text 'answer' nor a 'solution' with a \\boxed answer; add one.")
  return Problem(row.fields["problem"], answer, solution)


def make_problems(num_problems: int, *, split: str, seed: int) -> list[Problem]:
  """Sums of two fractions, all different, none in both "train" and "test". They stand in for MATH in short runs."""
  rng = random.Random(f"fractions {split} {seed}")
  found: dict[str, Problem] = {}
  while len(found) < num_problems:
    a, b, c, d = (rng.randint(1, 9) for _ in range(4))
    if (zlib.crc32(f"{a} {b} {c} {d}".encode()) % 4 == 0) != (split == "test"):
      continue
    text = f"Compute $\\frac{{{a}}}{{{b}}}+\\frac{{{c}}}{{{d}}}$."
    total = Fraction(a, b) + Fraction(c, d)
    answer = str(total) if total.denominator == 1 else f"\\frac{{{total.numerator}}}{{{total.denominator}}}"
    found[text] = Problem(text, answer, f"It is $\\boxed{{{answer}}}$.")
  return list(found.values())


class MathTask:
  """Problems as chats that ask for a boxed answer.

  Args:
    tokenizer: of the model, with a chat template; None: one of characters, for a new model.
    max_prompt_tokens: longer prompts are dropped and reported by a printed line.
    jsonl_folder: holds train.jsonl and test.jsonl with "problem" and "answer" (or a "solution" that boxes it) a line.
    num_generated: as many problems are made to learn from, and a quarter as many to evaluate on; 0: data is read.
    seed: of generated problems.
    grader_processes: that grade at the same time. They are started here and end with this task.
    grader_deadline_secs: for one answer.
  Raises: ValueError for missing or malformed data, or if more than 1% of a split would be dropped.
  """

  name = "math"

  def __init__(
    self, tokenizer: Tokenizer | None, *, max_prompt_tokens: int, jsonl_folder: str, num_generated: int, seed: int,
    grader_processes: int, grader_deadline_secs: float,
  ):  # fmt: skip
    self.tokenizer = tokenizer or make_character_tokenizer()
    self._max_prompt_tokens = max_prompt_tokens
    if num_generated:
      train = make_problems(num_generated, split="train", seed=seed)
      test = make_problems(max(1, num_generated // 4), split="test", seed=seed)
    else:
      train, test = ([_problem(row) for row in read_jsonl(jsonl_folder, split, texts=("problem",))]
                     for split in ("train", "test"))  # fmt: skip
    self._train_problems, self._train_prompts = self._build("train", train)
    _, self._eval_prompts = self._build("test", test)
    self.pool = MathPool(num_workers=grader_processes, deadline_secs=grader_deadline_secs)

  def train_prompts(self) -> Sequence[Prompt]:
    return self._train_prompts

  def eval_prompts(self) -> Sequence[Prompt]:
    return self._eval_prompts

  def reward(self, prompt: Prompt, response_text: str, *, truncated: bool) -> float:
    return grade_boxed([response_text], prompt.answer, self.pool)[0]

  def make_reward(self, device_or_mesh: Any, *, for_eval: bool) -> GroupReward:
    """Grades the responses of a group at the same time."""
    del device_or_mesh, for_eval

    def reward(prompt: Prompt, responses: Responses) -> np.ndarray:
      return np.array(grade_boxed(responses.texts, prompt.answer, self.pool), np.float32)

    return reward

  def final_answer(self, response_text: str) -> str | None:
    """What a majority is counted of: the LaTeX as it stands."""
    return boxed_answer(response_text)

  def response_text(self, tokens: Sequence[int]) -> str:
    return decode_response(self.tokenizer, tokens)

  def sft_examples(self) -> Sequence[tuple[list[int], list[int]]]:
    """The train split's written solutions; rows without one are left out. Raises: ValueError if none has one."""
    stop = primary_stop_id(self.tokenizer)
    examples = [
      (prompt.tokens.tolist(), [*self.tokenizer.encode(problem.solution), stop])
      for prompt, problem in zip(self._train_prompts, self._train_problems)
      if problem.solution.strip()
    ]
    if not examples:
      raise ValueError("train.jsonl has no text 'solution' in any row to fine-tune on; set sft.steps=0.")
    return examples

  def _build(self, split: str, problems: Sequence[Problem]) -> tuple[list[Problem], list[Prompt]]:
    encoded = [
      (problem, self.tokenizer.chat([{"role": "user", "content": f"{problem.text}\n\n{INSTRUCTION}"}]))
      for problem in problems
    ]
    kept = fitting(self.name, split, encoded, max_prompt_tokens=self._max_prompt_tokens)
    prompts = [
      Prompt(index, np.array(ids, np.int32), problem.text, problem.answer) for index, (problem, ids) in enumerate(kept)
    ]
    return [problem for problem, _ in kept], prompts

"""Grades a response by what it puts in its last \\boxed{...}, as MATH writes its answers (arXiv:2103.03874).

Equal strings are equal answers; everything else is decided by math-verify in the processes of a `math_pool`.
"""

from __future__ import annotations

from collections.abc import Sequence
import math
import re

from tba_jax.rewards.math_pool import MathPool

MAX_ANSWER_CHARS = 500  # the longest gold answer of MATH-500 has 53; what is longer is no answer

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{|\\boxed\s+(?P<bare>-?[0-9.]+)")
_CHOICE = re.compile(r"[\s$.]*(?:,|;|or|and|or also)?[\s$]*")  # between two boxes that are one answer
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


def boxed_answer(text: str) -> str | None:
  """The content of the last box of a text, None without one. Boxes beside each other are one answer of several parts.

  So '\\boxed{6} or \\boxed{7}' is '6, 7', which is right where both are asked for, and hedging does not pay. After a
  closing think tag only what follows it counts. A box that is never closed holds nothing.
  """
  text = _CONTROL.sub("", text.rpartition("</think>")[2])
  boxes: list[tuple[int, int, str]] = []  # start, end, content
  for match in _BOX.finditer(text):
    if boxes and match.start() < boxes[-1][1]:
      continue  # inside the one before
    end = match.end() if match["bare"] else _closing_brace(text, match.end())
    if end is not None:
      boxes.append((match.start(), end, match["bare"] or text[match.end() : end - 1]))
  if not boxes:
    return None
  first = len(boxes) - 1
  while first and _CHOICE.fullmatch(text, boxes[first - 1][1], boxes[first][0]):
    first -= 1
  return ", ".join(content.strip() for _, _, content in boxes[first:])


def _closing_brace(text: str, start: int) -> int | None:
  """The place behind the brace that closes one opened just before `start`."""
  depth = 1
  for at in range(start, min(len(text), start + MAX_ANSWER_CHARS + 2)):
    if text[at] in "{}" and text[at - 1] != "\\":
      depth += 1 if text[at] == "{" else -1
      if depth == 0:
        return at + 1
  return None


def grade_boxed(texts: Sequence[str], gold: str, pool: MathPool) -> list[float]:
  """Rewards of responses to one problem: 1 right, 0 wrong or no boxed answer, NaN where the grader failed.

  Args:
    gold: the answer, LaTeX without dollar signs.
  """
  answers = [boxed_answer(text) for text in texts]
  wanted = gold.strip()
  rewards = [float(answer == wanted) for answer in answers]
  open_ = [i for i, answer in enumerate(answers) if answer and answer != wanted and len(answer) <= MAX_ANSWER_CHARS]
  for i, verdict in zip(open_, pool.grade([(wanted, answers[i]) for i in open_])):
    rewards[i] = math.nan if verdict.error else float(verdict.right)
  return rewards

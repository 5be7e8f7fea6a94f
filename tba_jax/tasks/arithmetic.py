"""Word problems with two operations, made by a generator: a task that a small model learns on a laptop in minutes.

    Nora packs 4 boxes of 5 pears, then sells 9. How many pears are left?
    4 * 5 = 20, 20 - 9 = 11, answer is 11

The closed vocabulary has the numbers 0 to 99 as single tokens, so nothing hides in the spelling of numbers; every
result on the way lies in that range. The written solutions are a mixture, as people write them: most give the bare
answer, worked out in the head and off by a little half of the time; the others show the work, and are right. Fine-tuned
on them, a model's likeliest response is a bare answer. It can do better than that, and finding out is what
reinforcement learning is for here.

Training, held-out and fine-tuning problems are disjoint by their text, and more: no two of the three sets share a kind
of problem with the same numbers, so that nothing but arithmetic answers a problem of another set.
"""

from __future__ import annotations

from collections.abc import Sequence
import functools
import random
from typing import NamedTuple
import zlib

import numpy as np
import tokenizers
import transformers

from tba_jax.tasks.base import decode_response
from tba_jax.tokenizer import Tokenizer, make_tokenizer
from tba_jax.types import Prompt

MAX_NUMBER = 99  # the largest with a token of its own
MAX_TERM = 9  # of the numbers in a text that are added or taken away
MAX_FACTOR = 5  # of those that are multiplied, or added up to be multiplied
MAX_PROMPT_TOKENS = 22
MAX_RESPONSE_TOKENS = 18

SLIP_SHARE = 0.5  # of the bare answers among the fine-tuning examples are wrong, by at most MAX_SLIP
MAX_SLIP = 3

# Which of the kinds with their numbers belong to which set, in percent.
SPLITS = {"eval": range(0, 15), "train": range(15, 35), "sft": range(35, 100)}

PAD, STOP, UNKNOWN = "<pad>", "<stop>", "<unk>"

NAMES = (
  "Ada Amir Anna Ben Carla Chen Dana Diego Ella Emil Fatima Felix Grace Hugo Ines Ivan Jada Jonas Kai Lena "
  "Luis Maya Milo Nora Omar Paula Priya Quinn Rosa Sam Tara Theo Uma Vera Wes Yuki"
).split()
THINGS = (
  "apples beads books bricks candles cards coins cups eggs flowers keys kites lemons marbles muffins nails pears pens "
  "plums puzzles ribbons seeds shells socks spoons stamps stickers stones tickets toys"
).split()
BOXES = "bags bowls boxes crates jars rows shelves trays".split()
GAINS = "buys finds gets makes wins".split()
LOSSES = "breaks drops loses sells uses".split()
PEOPLE = "cousins friends guests neighbors pupils".split()
COLORS = "blue green red white".split()


class Template(NamedTuple):
  """One kind of problem: its text, and the two operations in the order of the work; 'r' is the result of the first."""

  text: str
  first: str  # over the numbers a, b, c
  second: str  # over r and what is left


TEMPLATES = (
  Template("{name} has {a} {things}, {gain} {b} more and {lose} {c}. How many {things} are left?", "a + b", "r - c"),
  Template("{name} has {a} {things} and {lose} {b}. Then {name} {gain} {c}. How many {things} now?", "a - b", "r + c"),
  Template("{name} {gain} {a} {things}, then {b}, then {c} more. How many {things} in all?", "a + b", "r + c"),
  Template("{name} had {a} {things} but {lose} {b} today and {c} later. How many are left?", "a - b", "r - c"),
  Template("{name} packs {a} {boxes} of {b} {things}, then {lose} {c}. How many {things} are left?", "a * b", "r - c"),
  Template("{name} has {c} {things} and {gain} {a} {boxes} of {b}. How many {things} in all?", "a * b", "r + c"),
  Template("{name} gives {a} {color} and {b} {color2} {things} to each of {c} {people}. How many?", "a + b", "r * c"),
  Template("{name} had {a} {boxes} but {lose} {b}. Each holds {c} {things}. How many {things}?", "a - b", "r * c"),
)


class Problem(NamedTuple):
  """A problem with its solution."""

  kind: str  # of problem, with its numbers
  text: str
  answer: int
  work: str  # both equations


def _apply(operation: str, values: dict[str, int]) -> tuple[int, str]:
  """Result and equation of 'x op y'."""
  left, sign, right = operation.split()
  x, y = values[left], values[right]
  result = {"+": x + y, "-": x - y, "*": x * y}[sign]
  return result, f"{x} {sign} {y} = {result}"


def _factors(template: Template) -> str:
  """The numbers that take part in the multiplication."""
  if "*" in template.second:
    return template.first + template.second
  return template.first if "*" in template.first else ""


def make_problem(rng: random.Random) -> Problem:
  """A random problem whose numbers and results all lie in 0..99, those of the text in 2..9."""
  template = rng.choice(TEMPLATES)
  while True:
    values = {number: rng.randint(2, MAX_FACTOR if number in _factors(template) else MAX_TERM) for number in "abc"}
    values["r"], first = _apply(template.first, values)
    answer, second = _apply(template.second, values)
    if 0 < values["r"] <= MAX_NUMBER and 0 <= answer <= MAX_NUMBER:
      break
  color, color2 = rng.sample(COLORS, 2)
  words = dict(
    name=rng.choice(NAMES), things=rng.choice(THINGS), boxes=rng.choice(BOXES), gain=rng.choice(GAINS),
    lose=rng.choice(LOSSES), people=rng.choice(PEOPLE), color=color, color2=color2,
  )  # fmt: skip
  kind = f"{TEMPLATES.index(template)} {values['a']} {values['b']} {values['c']}"
  return Problem(kind, template.text.format(**values, **words), answer, f"{first}, {second}")


def make_problems(num_problems: int, *, split: str, seed: int) -> list[Problem]:
  """Problems with different texts, of the kinds and numbers that belong to a split of SPLITS; `seed` shuffles who does.

  Words alone allow a hundred thousand texts for each kind and numbers, so this ends.
  """
  rng = random.Random(f"word problems {split} {seed}")
  problems: dict[str, Problem] = {}
  while len(problems) < num_problems:
    problem = make_problem(rng)
    if zlib.crc32(f"{seed} {problem.kind}".encode()) % 100 in SPLITS[split]:
      problems.setdefault(problem.text, problem)
  return list(problems.values())


@functools.cache
def make_arithmetic_tokenizer() -> Tokenizer:
  """The closed vocabulary: every word, sign and number is one token, and `<pad>` and `<stop>` are different ones."""
  words = {*NAMES, *THINGS, *BOXES, *GAINS, *LOSSES, *PEOPLE, *COLORS, *"+-*=,.?", "answer", "is"}
  for template in TEMPLATES:
    words.update(word for word in _split(template.text) if word.isalpha())
  ordered = [PAD, STOP, UNKNOWN, *map(str, range(MAX_NUMBER + 1)), *sorted(words)]
  model = tokenizers.models.WordLevel({word: index for index, word in enumerate(ordered)}, unk_token=UNKNOWN)
  backend = tokenizers.Tokenizer(model)
  backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  hf = transformers.PreTrainedTokenizerFast(
    tokenizer_object=backend, pad_token=PAD, eos_token=STOP, unk_token=UNKNOWN, clean_up_tokenization_spaces=False
  )
  return make_tokenizer(hf, source="word problems")


def _split(template: str) -> list[str]:
  return "".join(char if char.isalnum() or char in "{}" else " " for char in template).split()


class ArithmeticTask:
  """Two-operation word problems. Reward 1 if the response ends in 'answer is N' with the right N, else 0.

  Args:
    seed: of the problems. Prompts and examples are functions of these arguments.
    num_train_prompts, num_eval_prompts, num_sft_examples: sizes of the three sets; none depends on the other two.
    sft_share_with_work: share of the fine-tuning examples whose solution shows the work, 0 to 1.
  Raises: ValueError for a size below 1 (0 for num_sft_examples) or a share outside 0..1.
  """

  name = "arithmetic"

  def __init__(
    self, *, seed: int = 0, num_train_prompts: int = 4_096, num_eval_prompts: int = 512, num_sft_examples: int = 25_600,
    sft_share_with_work: float = 0.3,
  ):  # fmt: skip
    for label, size, least in (
      ("num_train_prompts", num_train_prompts, 1),
      ("num_eval_prompts", num_eval_prompts, 1),
      ("num_sft_examples", num_sft_examples, 0),
    ):
      if size < least:
        raise ValueError(f"{label}={size} must be at least {least}; raise it.")
    if not 0 <= sft_share_with_work <= 1:
      raise ValueError(f"sft_share_with_work={sft_share_with_work} must lie between 0 and 1; it is a share.")
    self.tokenizer = make_arithmetic_tokenizer()
    self._eval_prompts = self._prompts(make_problems(num_eval_prompts, split="eval", seed=seed))
    self._train_prompts = self._prompts(make_problems(num_train_prompts, split="train", seed=seed))
    self._sft_problems = make_problems(num_sft_examples, split="sft", seed=seed)
    self._share_with_work, self._seed = sft_share_with_work, seed

  def train_prompts(self) -> Sequence[Prompt]:
    return self._train_prompts

  def eval_prompts(self) -> Sequence[Prompt]:
    return self._eval_prompts

  def reward(self, prompt: Prompt, response_text: str, *, truncated: bool) -> float:
    """1 if the last words are 'answer is N' and N is right. What stands before, work or not, earns nothing."""
    return float(response_text.split()[-3:] == ["answer", "is", prompt.answer])

  def final_answer(self, response_text: str) -> str | None:
    """What a majority is counted of."""
    words = response_text.split()
    return words[-1] if words[-3:-1] == ["answer", "is"] else None

  def response_text(self, tokens: Sequence[int]) -> str:
    return decode_response(self.tokenizer, tokens)

  def sft_examples(self) -> Sequence[tuple[list[int], list[int]]]:
    rng = random.Random(f"fine-tuning {self._seed}")
    return [
      (self.tokenizer.encode(problem.text), self.tokenizer.encode(self._solution(problem, rng)))
      for problem in self._sft_problems
    ]

  def _solution(self, problem: Problem, rng: random.Random) -> str:
    if rng.random() < self._share_with_work:
      return f"{problem.work}, answer is {problem.answer}{STOP}"
    slips = [answer for answer in range(problem.answer - MAX_SLIP, problem.answer + MAX_SLIP + 1) if 0 <= answer]
    slips.remove(problem.answer)
    return f"answer is {rng.choice(slips) if rng.random() < SLIP_SHARE else problem.answer}{STOP}"

  def _prompts(self, problems: Sequence[Problem]) -> list[Prompt]:
    return [
      Prompt(index, np.array(self.tokenizer.encode(problem.text), np.int32), problem.text, str(problem.answer))
      for index, problem in enumerate(problems)
    ]

from __future__ import annotations

import re

import numpy as np
import pytest

from tba_jax.tasks import arithmetic
from tba_jax.tasks.arithmetic import MAX_PROMPT_TOKENS, MAX_RESPONSE_TOKENS, ArithmeticTask
from tba_jax.tasks.base import SupervisedTask, Task


@pytest.fixture(scope="module")
def task() -> ArithmeticTask:
  return ArithmeticTask(seed=3, num_train_prompts=4_096, num_eval_prompts=600, num_sft_examples=8_000)


def solve(text: str) -> int:
  """A second solver: by the verbs and the order of the sentence, not by the generator's formulas."""
  a, b, c = map(int, re.findall(r"\d+", text))
  signs = ["-" if word in arithmetic.LOSSES else "+" for word in re.findall(r"[a-z]+", text) if _is_verb(word)]
  if " packs " in text:
    return a * b - c
  if " to each of " in text:
    return (a + b) * c
  if "Each holds" in text:
    return (a - b) * c
  if re.search(r"\d+ \w+ of \d+", text):
    return a + b * c
  if " had " in text:
    return a - b - c
  if ", then " in text:
    return a + b + c
  return a + {"+": b, "-": -b}[signs[0]] + {"+": c, "-": -c}[signs[1]]


def _is_verb(word: str) -> bool:
  return word in arithmetic.LOSSES + arithmetic.GAINS


def is_true(equation: str) -> bool:
  x, sign, y, equals, result = equation.split()
  return equals == "=" and {"+": int(x) + int(y), "-": int(x) - int(y), "*": int(x) * int(y)}[sign] == int(result)


def test_it_is_a_task(task):
  assert isinstance(task, Task) and isinstance(task, SupervisedTask)


def test_train_eval_and_sft_share_no_text(task):
  train = {prompt.text for prompt in task.train_prompts()}
  held_out = {prompt.text for prompt in task.eval_prompts()}
  sft_tokens = {tuple(prompt) for prompt, _ in task.sft_examples()}
  assert (len(train), len(held_out), len(sft_tokens)) == (4_096, 600, 8_000)
  assert not train & held_out
  tokens = {prompt.text: tuple(prompt.tokens.tolist()) for prompt in (*task.train_prompts(), *task.eval_prompts())}
  assert len(set(tokens.values())) == len(tokens)  # different texts are different tokens, so comparing tokens suffices
  assert not sft_tokens & set(tokens.values())


def test_no_two_sets_share_a_kind_of_problem_with_its_numbers(task):
  lists = ("GAINS", "LOSSES", "THINGS", "BOXES", "PEOPLE", "COLORS")
  exchangeable = {word for name in lists for word in getattr(arithmetic, name)}

  def kind(text: str) -> tuple[str, ...]:
    return tuple(word for word in re.findall(r"[a-z]+|\d+", text) if word not in exchangeable)

  held_out = {kind(prompt.text) for prompt in task.eval_prompts()}
  trained = {kind(prompt.text) for prompt in task.train_prompts()}
  fine_tuned = {kind(task.tokenizer.decode(prompt)) for prompt, _ in task.sft_examples()}
  assert not held_out & trained and not held_out & fine_tuned and not trained & fine_tuned
  assert len(held_out) > 200 and len(trained) > 500 and len(fine_tuned) > 500


def test_every_problem_has_the_answer_that_a_second_solver_finds(task):
  for prompt in (*task.train_prompts(), *task.eval_prompts()):
    assert solve(prompt.text) == int(prompt.answer), prompt.text


def test_all_eight_kinds_occur_often(task):
  openings = [re.sub(r"\d+", "0", prompt.text) for prompt in task.train_prompts()]
  shares = {
    "packs": sum(" packs " in text for text in openings),
    "gives": sum(" gives " in text for text in openings),
    "holds": sum("holds" in text for text in openings),
    "later": sum("later" in text for text in openings),
    "now": sum(" now?" in text for text in openings),
    "of": sum(bool(re.search(r"0 \w+ of 0\. How", text)) for text in openings),
    "then": sum(bool(re.search(r", then 0, then 0 more", text)) for text in openings),
    "and": sum(bool(re.search(r"0 more and", text)) for text in openings),
  }
  assert sum(shares.values()) == 4_096
  assert min(shares.values()) > 4_096 / 8 * 0.5


def test_lengths_vocabulary_and_special_tokens(task):
  tokenizer = task.tokenizer
  examples = task.sft_examples()
  prompts = [prompt.tokens for prompt in (*task.train_prompts(), *task.eval_prompts())]
  assert max(map(len, prompts)) <= MAX_PROMPT_TOKENS
  assert max(len(response) for _, response in examples) <= MAX_RESPONSE_TOKENS
  unknown = tokenizer.hf.unk_token_id
  assert not any((tokens == unknown).any() for tokens in prompts)
  assert not any(unknown in prompt or unknown in response for prompt, response in examples)
  assert tokenizer.hf.pad_token_id not in tokenizer.stop_ids
  assert tokenizer.vocab_size == len(tokenizer.hf.get_vocab()) < 256
  assert [tokenizer.encode(str(number)) for number in (0, 7, 42, 99)] == [[3 + n] for n in (0, 7, 42, 99)]


def test_hundreds_of_thousands_of_texts_exist():
  one, other = (
    {problem.text for problem in arithmetic.make_problems(5_000, split="train", seed=seed)} for seed in (0, 1)
  )
  # Two samples of n out of m equally likely texts share n^2 / m: 50 or more unless m is above 500,000.
  assert len(one & other) < 20


def test_a_share_of_the_examples_shows_the_work_and_is_right(task):
  examples = task.sft_examples()
  num_with_work, errors = 0, []
  for prompt, response in examples:
    text = task.response_text(response)
    assert response[-1] in task.tokenizer.stop_ids and not any(i in task.tokenizer.stop_ids for i in response[:-1])
    words = text.split()
    assert words[-3:-1] == ["answer", "is"]
    problem = task.tokenizer.decode(prompt)
    error = abs(int(words[-1]) - solve(problem))
    if "=" not in words:
      errors.append(error)
    else:
      num_with_work += 1
      assert error == 0, problem
      first, second = text.removesuffix(f" , answer is {words[-1]}").split(" , ")
      assert is_true(first) and is_true(second)
      assert second.endswith(f"= {words[-1]}")
  share, size = num_with_work / len(examples), len(examples)
  assert abs(share - 0.3) < 4 * np.sqrt(0.3 * 0.7 / size)
  assert max(errors) == arithmetic.MAX_SLIP  # wrong bare answers are off by a little
  assert abs(np.mean(np.array(errors) > 0) - arithmetic.SLIP_SHARE) < 4 * np.sqrt(0.25 / len(errors))


@pytest.mark.parametrize(
  ("response", "wanted"),
  [
    ("answer is {right} <stop>", 1),
    ("3 + 4 = 7 , 7 * 2 = 14 , answer is {right} <stop>", 1),  # the work is not graded
    ("answer is {wrong} , answer is {right} <stop>", 1),
    ("answer is {right} , answer is {wrong} <stop>", 0),
    ("answer is {right} <stop> answer is {wrong} <stop>", 1),  # nothing after the stop token counts
    ("answer is {wrong} <stop> answer is {right} <stop>", 0),
    ("answer is {wrong} <stop>", 0),
    ("answer is {right} {wrong} <stop>", 0),
    ("answer is {right} .", 0),
    ("{right} <stop>", 0),
    ("answer {right} <stop>", 0),
    ("answer is <stop> {right}", 0),
    ("<stop>", 0),
    ("answer is <pad> {right} <stop>", 1),  # special tokens are no text
  ],
)
def test_reward(task, response, wanted):
  prompt = next(prompt for prompt in task.train_prompts() if 10 < int(prompt.answer) < 90)
  text = response.format(right=prompt.answer, wrong=int(prompt.answer) + 1)
  tokens = task.tokenizer.encode(text)
  assert task.reward(prompt, task.response_text(tokens), truncated=False) == wanted


def test_guessing_does_not_pay(task):
  answers = [prompt.answer for prompt in task.eval_prompts()]
  assert max(answers.count(answer) for answer in set(answers)) / len(answers) < 0.1


def test_seeds_and_sizes():
  def texts(**kwargs):
    task = ArithmeticTask(**{"num_train_prompts": 20, "num_eval_prompts": 10, "num_sft_examples": 5} | kwargs)
    prompts = [[prompt.text for prompt in prompts] for prompts in (task.eval_prompts(), task.train_prompts())]
    return [*prompts, task.sft_examples()]

  assert texts(seed=1) == texts(seed=1)
  assert texts(seed=1) != texts(seed=2)
  assert texts(seed=1, num_train_prompts=30)[0] == texts(seed=1)[0]  # the held-out set stays when the others grow
  small = ArithmeticTask(num_train_prompts=5, num_sft_examples=0)
  assert [prompt.prompt_id for prompt in small.train_prompts()] == [*range(5)] and not small.sft_examples()


@pytest.mark.parametrize(
  ("kwargs", "message"),
  [
    ({"num_train_prompts": 0}, "num_train_prompts=0 must be at least 1"),
    ({"num_eval_prompts": 0}, "num_eval_prompts=0 must be at least 1"),
    ({"num_sft_examples": -1}, "num_sft_examples=-1 must be at least 0"),
    ({"sft_share_with_work": 1.5}, "sft_share_with_work=1.5 must lie between 0 and 1"),
  ],
)
def test_wrong_arguments(kwargs, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    ArithmeticTask(**kwargs)


def test_shares_of_zero_and_one():
  for share in (0.0, 1.0):
    task = ArithmeticTask(num_train_prompts=1, num_eval_prompts=1, num_sft_examples=50, sft_share_with_work=share)
    assert {"=" in task.response_text(response) for _, response in task.sft_examples()} == {share == 1.0}

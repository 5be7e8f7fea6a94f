"""MATH as a task: prompts, rewards through the grader's processes, written solutions, and what bad data says."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import sympy

from tba_jax.tasks.base import GroupRewardTask, Responses, SupervisedTask, make_reward
from tba_jax.tasks.characters import make_character_tokenizer
from tba_jax.tasks.math import INSTRUCTION, MathTask, make_problems
from tests.tiny_tokenizers import chat_tokenizer

ROWS = [
  {"problem": "What is $1+1$?", "answer": "2", "solution": r"It is $\boxed{2}$.", "level": 1},
  {"problem": "Halve $1$.", "solution": r"First $\boxed{1}$, halved $\boxed{\frac{1}{2}}$.", "level": "Level 2"},
  {"problem": "What is $x$ if $x-1=2$?", "answer": "3"},
]


def write(folder, *, train=ROWS, test=ROWS[:1]):
  for name, rows in (("train", train), ("test", test)):
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  return str(folder)


@pytest.fixture
def make_task():
  tasks = []

  def make(folder="", **options):
    settings = dict(max_prompt_tokens=400, num_generated=0, seed=0, grader_processes=1, grader_deadline_secs=5.0)
    tokenizer = options.pop("tokenizer", chat_tokenizer())
    tasks.append(MathTask(tokenizer, jsonl_folder=folder, **(settings | options)))
    return tasks[-1]

  yield make
  for task in tasks:
    task.pool.close()


def test_prompts_are_chats_that_ask_for_a_box_with_its_braces(make_task, tmp_path):
  task = make_task(write(tmp_path))
  assert isinstance(task, SupervisedTask) and isinstance(task, GroupRewardTask)
  text = task.tokenizer.hf.decode(task.train_prompts()[0].tokens, skip_special_tokens=False)
  assert text == f"<|im_start|>user\nWhat is $1+1$?\n\n{INSTRUCTION}<|im_end|>\n<|im_start|>assistant\n"
  assert r"\boxed{}" in INSTRUCTION
  assert [prompt.answer for prompt in task.train_prompts()] == ["2", r"\frac{1}{2}", "3"]
  assert [prompt.prompt_id for prompt in task.eval_prompts()] == [0]


def test_rewards_of_a_group_and_of_one(make_task, tmp_path):
  task = make_task(write(tmp_path))
  prompt = task.train_prompts()[1]
  texts = (r"\boxed{0.5}", r"\boxed{2}", "1/2", r"so $\boxed{\frac12}$", r"\boxed{9^{9^{9^9}}}")
  responses = Responses(texts, tuple(np.zeros(1, np.int32) for _ in texts), np.zeros(len(texts), bool))
  task.pool._deadline_secs = 1.0  # or the last one would be waited for
  rewards = make_reward(task, None, for_eval=False)(prompt, responses)
  np.testing.assert_array_equal(rewards, np.array([1, 0, 0, 1, math.nan], np.float32))
  assert task.reward(prompt, texts[0], truncated=False) == 1 and task.pool.counts.timeouts == 1


def test_written_solutions_end_in_the_stop_token(make_task, tmp_path):
  task = make_task(write(tmp_path))
  examples = task.sft_examples()
  assert [prompt for prompt, _ in examples] == [prompt.tokens.tolist() for prompt in task.train_prompts()[:2]]
  assert all(response[-1] in task.tokenizer.stop_ids for _, response in examples)
  texts = [task.response_text(response) for _, response in examples]
  assert texts == [row["solution"] for row in ROWS[:2]]
  assert [task.reward(p, text, truncated=False) for p, text in zip(task.train_prompts(), texts)] == [1, 1]
  with pytest.raises(ValueError, match="has no text 'solution' in any row"):
    make_task(write(tmp_path, train=ROWS[2:])).sft_examples()


def test_generated_problems_have_the_answers_that_sympy_finds():
  problems = {split: make_problems(60, split=split, seed=3) for split in ("train", "test")}
  texts = {split: {problem.text for problem in found} for split, found in problems.items()}
  assert len(texts["train"]) == len(texts["test"]) == 60 and not texts["train"] & texts["test"]
  assert problems["train"] == make_problems(60, split="train", seed=3) != make_problems(60, split="train", seed=4)
  for problem in problems["train"]:
    plain = [text.replace(r"\frac{", "(").replace("}{", ")/(").replace("}", ")")
             for text in (problem.text, problem.answer)]
    assert sympy.sympify(plain[0].split("$")[1]) == sympy.sympify(plain[1])


def test_generated_problems_need_no_tokenizer_and_no_data(make_task):
  task = make_task(tokenizer=None, num_generated=8)
  assert task.tokenizer is make_character_tokenizer() and len(task.train_prompts()) == 8
  assert len(task.eval_prompts()) == 2
  prompt = task.train_prompts()[0]
  assert task.tokenizer.hf.decode(prompt.tokens, skip_special_tokens=False).startswith("<user>Compute $")
  prompts, responses = zip(*task.sft_examples())
  assert task.tokenizer.hf.unk_token_id not in np.concatenate([*prompts, *responses])


@pytest.mark.parametrize("row, line", [
  ({"problem": "What?"}, "train.jsonl line 2 has neither a text 'answer' nor a 'solution' with a .boxed answer; add "
                         "one"),
  ({"problem": "What?", "solution": "It is 5."}, "train.jsonl line 2 has neither"),
  ({"answer": "5"}, "train.jsonl line 2 has no text 'problem'"),
])
def test_bad_rows_are_named(make_task, tmp_path, row, line):
  with pytest.raises(ValueError, match=line):
    make_task(write(tmp_path, train=[ROWS[0], row]))


def test_long_prompts_are_refused(make_task, tmp_path):
  with pytest.raises(ValueError, match="max_prompt_tokens=20 would drop 3 of 3 train prompts"):
    make_task(write(tmp_path), max_prompt_tokens=20)


def test_math_500_loads(make_task, shared_data, tmp_path):
  lines = (shared_data / "math500" / "test.jsonl").read_text(encoding="utf8")
  for split in ("train", "test"):
    (tmp_path / f"{split}.jsonl").write_text(lines, encoding="utf8")
  task = make_task(str(tmp_path), max_prompt_tokens=4096)
  assert len(task.eval_prompts()) == 500 and len(task.sft_examples()) == 500

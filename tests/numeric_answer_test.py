"""The verdicts of tests/data/numeric_answers.jsonl were written by people's rules, not by running the grader."""

from __future__ import annotations

import ast
from fractions import Fraction
import json
import pathlib
import random
import threading
import time

import pytest

from tba_jax.rewards import numeric_answer
from tba_jax.rewards.numeric_answer import extract, grade

CORPUS = pathlib.Path(__file__).parent / "data" / "numeric_answers.jsonl"
FEW_SHOT = "Q: 3 + 4?\nA: 7\n#### 7\n\nQ: 5 + 6?\nA:"

# Gold, completion, what is wanted: cases in which four public graders disagree.
DISPUTED = (
  ("1000", "The total is 1,000.", 1),
  ("1000", "#### 1,000", 1),
  ("18", "#### 18.", 1),
  ("18", "#### $18", 1),
  ("18", "#### $18.00", 1),
  ("18", "She makes $18.00 every day.", 1),
  ("18", "18 dollars", 1),
  ("18", "**18**", 1),
  ("18", r"\boxed{18}", 1),
  ("18", r"\boxed{18\text{ dollars}}", 1),
  ("-5", "The answer is -5", 1),
  ("-5", "The answer is \u22125", 1),
  ("5", "ages 3-5", 1),
  ("8", "10-2=8, so 8 apples in 2 boxes", 0),
  ("8", "10-2=8, so 8 apples in 2 boxes\n#### 8", 1),
  ("7", "Answer: 7 (see step 2)", 1),
  ("0.5", "1/2", 1),
  ("0.5", r"\frac{1}{2}", 1),
  ("70000", "$70,000", 1),
  ("70000", "70.000", 0),
  ("5", "5.0", 1),
  ("5", "05", 1),
  ("7", "####7", 1),
  ("7", "#### 7\n#### 8", 0),
  ("6", r"\boxed{6} or \boxed{7}", 0),
  ("7", r"\boxed{6} or \boxed{7}", 0),
  ("73", "2*234 = 437\n\u2705 Final Answer: **73**", 1),
  ("2/3", r"\frac{2}{3}", 1),
  ("2/3", "2/3", 1),
  ("2/3", r"$\frac23$", 1),
  ("2/3", r"\frac23", 1),
  ("2/3", "0.6667", 1),
  ("2/3", "0.67", 0),
  (r"(1,\frac{9}{2})", "(1,4.5)", 1),
  ("-3", "The answer is +3", 0),
  ("-3", "The answer is -3", 1),
  ("18", "#### 18" + ". Here are 7 more words" * 20, 1),
  ("2", "9**9**9**9", 0),
  ("9", "9**9**9", 0),
  ("2", "two", 0),
  ("5", "", 0),
  ("5", "  ", 0),
  ("5", "####", 0),
  ("5", "5" * 100_000, 0),
  ("5", "\x005", 1),
)


@pytest.mark.parametrize(("gold", "text", "wanted"), DISPUTED)
def test_disputed_cases(gold, text, wanted):
  assert grade(text, gold) == wanted


def test_corpus():
  rows = [json.loads(line) for line in CORPUS.read_text(encoding="utf8").splitlines()]
  assert len(rows) >= 400 and len({(row["gold"], row["text"]) for row in rows}) == len(rows)
  assert 0.4 < sum(row["reward"] for row in rows) / len(rows) < 0.75  # neither verdict is the safe guess
  wrong = [row for row in rows if grade(row["text"], row["gold"]) != row["reward"]]
  assert not wrong


def test_every_gsm8k_gold_is_right_for_itself_and_wrong_for_its_neighbour(shared_data):
  golds, texts = [], []
  for name in ("train", "test"):
    for line in (shared_data / "gsm8k" / f"{name}.jsonl").read_text(encoding="utf8").splitlines():
      texts.append(json.loads(line)["answer"])
      golds.append(texts[-1].split("####")[1].strip())
  assert len(golds) == 7_473 + 1_319
  for gold, text in zip(golds, texts):
    neighbour = str(Fraction(gold.replace(",", "")) + 1)
    assert grade(text, gold) == 1, text
    assert grade(text, neighbour) == 0, text
    assert grade(f"#### {neighbour}", gold) == 0, text
    assert extract(text) == Fraction(gold.replace(",", ""))


FRAGMENTS = (
  *("\\boxed{", "}", "{", "####", "#### ", "answer is ", "Answer:", "\n", " ", "$", "1", "9", "0", ",", ".", "-"),
  *("/", "*", "**", "^", "\\frac", "\\frac{1}{2}", "%", "e5", "x", "10^", "or ", "and ", "(", ")", "=", "not ", "_"),
  *("\u2212", "\u00bd", "\u00b2", "\u00e9", "\u0967", "\U0001f600", "\ud800", "\x00", "\x01"),
  *("18 apples", "1,000", "\\text{", "million", "k"),
)
REPEATED = (*FRAGMENTS, "1 ", "1/", "1,", "\\boxed{1}", "answers ", "a", "1 and ", "(1,2)", "Rs ", "{,}")


def test_ten_thousand_random_strings_neither_crash_nor_take_long():
  rng = random.Random(0)
  slowest, started = 0.0, time.perf_counter()
  for index in range(10_000):
    text = "".join(rng.choices(FRAGMENTS, k=rng.choice([1, 4, 10, 40])))
    if index % 50 == 0:
      text = text * rng.randrange(1, 3_000)
    gold = "(1, 2)" if index % 10 == 0 else "18"
    before = time.thread_time()  # of this thread only: other work on the machine must not fail the test
    assert grade(text, gold) in (0.0, 1.0)
    slowest = max(slowest, time.thread_time() - before)
  assert slowest < 0.05
  assert time.perf_counter() - started < 60


@pytest.mark.parametrize("fragment", REPEATED)
def test_hundred_thousand_characters_of_one_fragment_take_under_50_ms(fragment):
  text = fragment * (100_000 // len(fragment))
  for gold in ("18", "(1, 2)"):
    before = time.thread_time()
    grade(text, gold)
    assert time.thread_time() - before < 0.05


def test_towers_of_powers_are_not_evaluated():
  before = time.thread_time()
  towers = ("9**9**9", "9**9**9**9", "9^9^9^9", "10^10^10", "1e999999999", "10^999999999")
  for text in (*towers, "#### 9**9**9", r"\boxed{9^{9^9}}"):
    assert grade(text, "9") == grade(text, "2") == 0
  assert time.thread_time() - before < 0.05
  tree = ast.parse(pathlib.Path(numeric_answer.__file__).read_text(encoding="utf8"))
  called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
  assert not called & {"eval", "exec", "compile", "__import__"}


def test_a_worker_thread_gives_the_same_verdicts():
  rows = [json.loads(line) for line in CORPUS.read_text(encoding="utf8").splitlines()]
  here = [grade(row["text"], row["gold"]) for row in rows]
  there = []
  thread = threading.Thread(target=lambda: there.extend(grade(row["text"], row["gold"]) for row in rows))
  thread.start()
  thread.join()
  assert there == here


def test_the_prompt_is_not_graded():
  assert grade(FEW_SHOT, "7") == 1  # why a task must pass the completion only: a prompt with an answer would pay
  assert grade("", "7") == 0


@pytest.mark.parametrize("gold", ["", "none", "3 or 4", "3 apples and 4 pears", "x + 1", "9" * 40, "1/0", "(1, x)"])
def test_a_gold_that_is_no_number_is_refused(gold):
  with pytest.raises(ValueError, match="gold answer .* is not a number"):
    grade("#### 3", gold)


def test_extract_tells_no_answer_from_a_wrong_one():
  assert extract("I do not know") is None
  assert extract("#### 3 or 4") is None
  assert extract("so it costs $1,080.50.") == Fraction(2161, 2)

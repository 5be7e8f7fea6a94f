"""Tasks by name and by file: the page that explains them, run as it stands, and what mistakes in a file say."""

from __future__ import annotations

import pathlib
import re

import pytest
import runs

from tba_jax import config_schema
from tba_jax.config import ConfigError
from tba_jax.tasks import registry
from tba_jax.tasks.arithmetic import ArithmeticTask
from tba_jax.tasks.base import SupervisedTask, TaskSettings
from tests.tiny_tokenizers import chat_tokenizer

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "add_a_task.md"
SETTINGS = TaskSettings(seed=0, data_path="", max_prompt_tokens=24, num_eval_prompts=16, num_sft_examples=8)


@pytest.fixture
def countdown(tmp_path):
  code = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
  (tmp_path / "countdown.py").write_text(code)
  return f"{tmp_path}/countdown.py:Countdown"


def test_the_page_builds_countdown(countdown):
  task = registry.make_task(countdown, None, SETTINGS, {"largest": 5, "num_train_prompts": 20})
  assert isinstance(task, SupervisedTask) and (len(task.train_prompts()), len(task.eval_prompts())) == (20, 16)
  assert not {p.text for p in task.train_prompts()} & {p.text for p in task.eval_prompts()}
  solved = 0
  for prompt, (tokens, response) in zip(task.train_prompts(), task.sft_examples()):
    assert tokens == prompt.tokens.tolist()
    text = task.response_text(response)
    if text == "?":
      assert task.reward(prompt, text, truncated=False) == 0
      continue
    solved += 1
    assert task.reward(prompt, text, truncated=False) == 1
    assert task.reward(prompt, f" ( {text} ) ", truncated=False) == 1
    for wrong in (f"{text}+1", text[1:], "", "2", f"{text};1", f"f({text})", "9**9**9", f"-({text})",
                  "__import__('os')"):
      assert task.reward(prompt, wrong, truncated=False) == 0
  assert 0 < solved < 16, "some examples solve their game, others give up"
  again = registry.make_task(countdown, chat_tokenizer(), SETTINGS, {})
  assert len(again.train_prompts()) == 2048


_WITH_PROMPTS = """
import numpy as np
from tba_jax.tasks.characters import make_character_tokenizer
from tba_jax.types import Prompt


class Mine:
  name, tokenizer = "m", make_character_tokenizer()

  def __init__(self, tokenizer, settings):
    del tokenizer, settings

  reward = response_text = None
  train_prompts = eval_prompts = lambda self: [{}]
"""


@pytest.mark.parametrize("code, args, line", [
    ("x = 1\ny = 1 / 0\n", {}, r"mine.py line 2 raises ZeroDivisionError: division by zero; correct the file"),
    ("import absent_package", {}, "line 1 raises ModuleNotFoundError: No module named 'absent_package'"),
    ("class Other:\n  pass\nclass Mine2:\n  pass", {}, "has no class Mine; it has Mine2, Other"),
    ("class Mine:\n  def __init__(self, tokenizer, settings, *, a=1): pass", {"b": 2},
     r"cannot be called with \(tokenizer, settings, b=...\): got an unexpected keyword argument 'b'; it takes "
     r"\(tokenizer, settings, \*, a=1\)"),
    ("class Mine:\n  def __init__(self, tokenizer, settings): pass\n  name = 'm'\n  tokenizer = 0", {},
     "has no train_prompts, eval_prompts, reward, response_text; a task needs all of name, tokenizer,"),
    ("class Mine:\n  def __init__(self, tokenizer, settings): pass\n  name = 'm'\n  tokenizer = None\n"
     "  train_prompts = eval_prompts = reward = response_text = lambda self: []", {},
     "has no tokenizer of its own for a "
     "new model"),
    ("class Mine:\n  def __init__(self, tokenizer, settings): pass\n  name = 'm'\n  tokenizer = 0\n"
     "  train_prompts = eval_prompts = reward = response_text = lambda self: []", {},
     "mine.py:Mine: tokenizer is of type int; keep the one that the class is given, or make"),
    (_WITH_PROMPTS.replace("[{}]", "[]"), {}, r"train_prompts\(\) of .* gives no prompts"),
    (_WITH_PROMPTS.format("Prompt(0, np.array([5, 999], np.int32), '', '')"), {},
     r"train_prompts\(\) of .*: entry 0 holds token id 999, but the model's are 0 to \d+; encode texts by"),
    ("class Mine:\n  def __init__(self, tokenizer, settings):\n    self.words = {}['words']", {},
     r"mine.py line 3 raises KeyError: 'words'; correct the file"),
    ("from tba_jax.tasks.characters import make_character_tokenizer\n"
     "class Mine:\n  def __init__(self, tokenizer, settings): pass\n  name, tokenizer = 'm', "
     "make_character_tokenizer()\n"
     "  reward = response_text = eval_prompts = None\n  def train_prompts(self):\n    return self.rows", {},
     r"mine.py line 7 raises AttributeError: 'Mine' object has no attribute 'rows'; correct the file"),
    (_WITH_PROMPTS.format("'1 2 ->'"), {},
     r"train_prompts\(\) of .*: entry 0 is a str; make it a tba_jax.types.Prompt"),
    (_WITH_PROMPTS.format("Prompt(0, [1, 2], '', '')"), {}, "tokens of entry 0 are a list; they must be a vector of"),
    (_WITH_PROMPTS.format("Prompt(0, np.arange(2), '', '')"), {}, r"tokens of entry 0 are int64 \(2,\); they must"),
    (_WITH_PROMPTS.format("Prompt(0, np.zeros(0, np.int32), '', '')"), {}, r"are int32 \(0,\); they must"),
])  # fmt: skip
def test_mistakes_in_a_file(tmp_path, code, args, line):
  (tmp_path / "mine.py").write_text(code)
  with pytest.raises(ValueError, match=line):
    registry.make_task(f"{tmp_path}/mine.py:Mine", None, SETTINGS, args)


_EXAMPLES = _WITH_PROMPTS.replace("[{}]", "[Prompt(0, np.array([5], np.int32), '', '')]").replace("None", "len") + """
  def sft_examples(self):
    return {}
"""


@pytest.mark.parametrize("code, line", [
    (_EXAMPLES.replace("sft_examples", "examples"), r"mine.py:Mine has no sft_examples\(\) to fine-tune on; give it"),
    (_EXAMPLES.format("self.rows"), "mine.py line 17 raises AttributeError: 'Mine' object has no attribute 'rows'"),
    (_EXAMPLES.format("[]"), r"sft_examples\(\) of .* gives none; fine-tuning needs at least one, or set sft.steps=0"),
    (_EXAMPLES.format("[([1], [2]), ('1', '2')]"), "entry 1 must be a pair of lists of token ids, neither of them"),
    (_EXAMPLES.format("[([1], [])]"), "entry 0 must be a pair of lists"),
    (_EXAMPLES.format("[[1, 2, 3]]"), "entry 0 must be a pair of lists"),
    (_EXAMPLES.format("[7]"), "entry 0 must be a pair of lists"),
    (_EXAMPLES.format("[([1], [-1])]"), "entry 0 holds token id -1, but the model's are 0 to 49; encode"),
    (_EXAMPLES.format("[([1], [2]), ([1], [2] * 9), ([1] * 5, [2] * 6)]"),
     r"2 of 3 are longer than the 8 tokens that train.length_buckets ends at \(entry 2 has 11\); add a bucket, or"),
])  # fmt: skip
def test_mistakes_in_the_examples_of_a_file(tmp_path, code, line):
  (tmp_path / "mine.py").write_text(code)
  name = f"{tmp_path}/mine.py:Mine"
  task = registry.make_task(name, None, SETTINGS, {})
  with pytest.raises(ValueError, match=line):
    registry.sft_examples(name, task, most=4, longest=8, vocab_size=50)


def test_a_run_refuses_them_before_the_first_step(tmp_path, monkeypatch):
  monkeypatch.setattr(ArithmeticTask, "sft_examples", lambda self: [([1], [2]), ([3], [])])
  with pytest.raises(ConfigError) as caught:
    runs.run(runs.short_config(sft__steps=4, sft__warmup_steps=1), tmp_path)
  line = "sft: sft_examples() of arithmetic: entry 1 must be a pair of lists of token ids, neither of them empty."
  assert tuple(caught.value.problems) == (line,)
  assert not (tmp_path / "config.json").exists(), "or the corrected command would be refused"


def test_as_many_examples_as_asked_for_are_checked(countdown):
  task = registry.make_task(countdown, None, SETTINGS, {})
  options = dict(longest=40, vocab_size=task.tokenizer.vocab_size)
  assert registry.sft_examples(countdown, task, most=3, **options) == task.sft_examples()[:3]


def test_a_file_that_is_not_there():
  with pytest.raises(ValueError,
                     match="absent.py is not a file; give the path of a Python file and the name of a class"):
    registry.load_class("absent.py:Mine")


def test_prompts_over_the_limit_are_refused():
  with pytest.raises(ValueError,
                     match="sample.max_prompt_tokens=5 is less than the longest prompt of arithmetic; raise it to "):
    args = {"num_train_prompts": 4, "sft_share_with_work": 0.5}
    registry.make_task("arithmetic", None, TaskSettings(0, "", 5, 4, 4), args)


def test_names_and_arguments_of_named_tasks():
  with pytest.raises(ValueError,
                     match="task 'gsm8' is not known; known are arithmetic, gsm8k, math, redteam, tldr, or"):
    registry.make_task("gsm8", None, SETTINGS, {})
  with pytest.raises(ValueError,
                     match=r"task_args of gsm8k are missing; it takes exactly num_generated \(an integer"):
    registry.make_task("gsm8k", None, SETTINGS, {})


def test_every_name_is_known_everywhere():
  assert set(registry.TASKS) == set(config_schema.TASKS) == set(config_schema.TASK_ARGS)

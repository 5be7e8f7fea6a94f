"""What all tasks share: rewards of groups, and the searcher that asks for them."""

from __future__ import annotations

import re
import types

import numpy as np
import pytest

from tba_jax.sampling.engine import SampledGroup
from tba_jax.searcher import Searcher, SampleSettings
from tba_jax.tasks.base import Responses, grade, make_reward
from tba_jax.types import Prompt

PROMPT = Prompt(0, np.zeros(2, np.int32), "", "")


def _responses(*texts, truncated=()):
  cut = np.array([i in truncated for i in range(len(texts))])
  return Responses(texts, tuple(np.arange(len(text), dtype=np.int32) for text in texts), cut)


def test_a_task_that_grades_one_by_one():
  seen = []

  def reward(prompt, text, *, truncated):
    seen.append((prompt, text, truncated))
    return {"none": None, "nan": float("nan")}.get(text, len(text))

  group_reward = make_reward(types.SimpleNamespace(name="mine", reward=reward), None, for_eval=False)
  found = group_reward(PROMPT, _responses("a", "none", "nan", "bcd", truncated=(3,)))
  np.testing.assert_array_equal(found, np.array([1, np.nan, np.nan, 3], np.float32))
  assert found.dtype == np.float32
  assert seen == [(PROMPT, "a", False), (PROMPT, "none", False), (PROMPT, "nan", False), (PROMPT, "bcd", True)]


@pytest.mark.parametrize("given", ["right", "1.0", [0.5]])
def test_a_reward_that_is_no_number_is_named(given):
  task = types.SimpleNamespace(name="mine", reward=lambda prompt, text, *, truncated: given)
  with pytest.raises(TypeError, match=rf"reward\(\) of task mine gave {re.escape(repr(given))}; it must give"):
    make_reward(task, None, for_eval=False)(PROMPT, _responses("a"))


@pytest.mark.parametrize("given, shape", [(0.5, "()"), ([1.0], "(1,)"), ([[1.0], [0.0]], "(2, 1)")])
def test_a_group_reward_must_give_one_number_for_each_response(given, shape):
  reward = lambda prompt, responses: given
  message = re.escape(f"the reward of prompt 0 gave an array of shape {shape} for 4 responses; it must give one number")
  with pytest.raises(ValueError, match=message):
    _searcher(reward, "score")._grade(PROMPT, ["1", "2", "3", "4"], _sampled())
  np.testing.assert_array_equal(grade(lambda *_: [1, None], PROMPT, _responses("a", "b")), [1.0, np.nan])


def _searcher(reward, truncated):
  settings = SampleSettings(
    seed=0, num_samples=4, temperature=1.0, max_new_tokens=3, truncated=truncated, length_buckets=(8,),
    hang_secs=5.0,
  )
  return Searcher(
    index=0, engine=None, eval_engine=None, slots=4, score=None, score_decode_layout=None, reference=None,
    ref_version=0, prompts=[PROMPT], reward=reward,
    eval_reward=reward, response_text=lambda tokens: "".join(map(str, tokens)), settings=settings, temperature=1.0,
    span=None,
  )


def _sampled():
  lengths = np.array([3, 1, 2, 3])
  tokens = np.array([[1, 2, 3], [4, 0, 0], [5, 6, 0], [7, 8, 9]], np.int32)
  return types.SimpleNamespace(tokens=tokens, lengths=lengths, truncated=np.array([True, False, False, True]))


def test_the_searcher_hands_over_whole_groups_without_what_the_policy_zeroes():
  asked = []

  def reward(prompt, responses):
    asked.append(responses)
    return np.arange(1, 1 + len(responses.texts), dtype=np.float32)

  assert set(SampledGroup._fields if hasattr(SampledGroup, "_fields") else SampledGroup.__dataclass_fields__) >= {
    "tokens", "lengths", "truncated"}
  texts = ["123", "4", "56", "789"]
  for policy, wanted, texts_asked in (
    ("score", [1, 2, 3, 4], ("123", "4", "56", "789")), ("mask", [1, 2, 3, 4], ("123", "4", "56", "789")),
    ("zero", [0, 1, 2, 0], ("4", "56")),
  ):
    rewards = _searcher(reward, policy)._grade(PROMPT, texts, _sampled())
    np.testing.assert_array_equal(rewards, wanted)
    responses = asked.pop()
    assert responses.texts == texts_asked
    assert ["".join(map(str, tokens)) for tokens in responses.tokens] == list(texts_asked)
    assert responses.truncated.tolist() == [len(text) == 3 for text in texts_asked]


def test_nothing_is_asked_about_a_group_that_was_cut_off_altogether():
  sampled = _sampled()
  sampled.truncated[:] = True
  rewards = _searcher(lambda prompt, responses: 1 / 0, "zero")._grade(PROMPT, ["1"] * 4, sampled)
  np.testing.assert_array_equal(rewards, np.zeros(4))

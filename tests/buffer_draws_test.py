"""What the replay buffer draws, against the distributions that it states (chi-square, fixed seeds)."""

from __future__ import annotations

import numpy as np
import pytest
from rollouts import make_buffer, make_group
from scipy import stats as scipy_stats

DRAWS = pytest.mark.parametrize("num_draws", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])


def recent_and_old(*, num_old, num_recent, **settings):
  """Prompts 0.. are old, those from num_old on are recent; 4 rows each."""
  rng = np.random.default_rng(1)
  buffer = make_buffer(**settings)
  for prompt_id in range(num_old + num_recent):
    if prompt_id == num_old:
      buffer.mark_publish(0)
      buffer.mark_publish(0)
    buffer.add(make_group(rng, prompt_id=prompt_id, occurrence=prompt_id))
  return buffer


def test_recent_is_what_arrived_between_the_last_two_publishes_and_since():
  buffer, rng = make_buffer(recent_fraction=1.0), np.random.default_rng(2)
  for prompt_id in range(4):
    for copy in range(2):
      buffer.add(make_group(rng, prompt_id=prompt_id, occurrence=2 * prompt_id + copy))
    if prompt_id < 3:
      buffer.mark_publish(prompt_id)
  # Publishes came after prompts 0, 1 and 2: prompt 2 lies between the last two, 3 after them.
  assert buffer.stats()["recent"] == 2
  draws = [buffer.draw(num_prompts=1, responses_per_prompt=4, version=3) for _ in range(20)]
  assert [
    sorted((int(a.prompt_ids[0]), int(b.prompt_ids[0]))) for a, b in zip(draws[::2], draws[1::2], strict=True)
  ] == [[2, 3]] * 10
  for draw in draws:  # newest responses first: the four of the prompt's second group, last one first
    assert (draw.occurrences == 2 * draw.prompt_ids + 1).all() and (np.diff(draw.rows // 1000) == -1).all()
  assert buffer.stats()["recent_misses"] == 0
  buffer.mark_publish(3)
  buffer.mark_publish(3)
  assert buffer.stats()["recent"] == 0
  buffer.draw(num_prompts=4, responses_per_prompt=4, version=3)
  assert buffer.stats()["recent_misses"] == 4
  buffer.add(make_group(rng, prompt_id=1, occurrence=9))  # an old prompt with something new
  assert buffer.draw(num_prompts=1, responses_per_prompt=3, version=3).occurrences.tolist() == [9, 9, 9]


@DRAWS
def test_share_of_recent_prompts_and_of_every_old_one_is_as_stated(num_draws: int):
  m, num_old, num_recent = 0.6, 6, 3
  buffer = recent_and_old(num_old=num_old, num_recent=num_recent, recent_fraction=m)
  prompts = [buffer.draw(num_prompts=1, responses_per_prompt=2, version=0).prompt_ids[0] for _ in range(num_draws)]
  counts = np.bincount(prompts, minlength=9)
  # Old prompts come by the second way only: multinomial. (Recent ones come in passes, which is less than binomial
  # noise.)
  by_priority = (1 - m) / (num_old + num_recent)
  observed = [*counts[:num_old], counts[num_old:].sum()]
  expected = np.array([by_priority] * num_old + [m + num_recent * by_priority]) * num_draws
  assert scipy_stats.chisquare(observed, expected).pvalue > 1e-3


@DRAWS
@pytest.mark.parametrize("priority", ["uniform", "reward"])
def test_responses_of_a_prompt_come_by_priority(priority, num_draws: int):
  rewards, temperature = np.array([0.0, 0.5, 1.0, 2.0]), 0.8
  buffer = make_buffer(recent_fraction=0.0, priority=priority, priority_temperature=temperature)
  rng = np.random.default_rng(3)
  for prompt_id in range(5):
    buffer.add(make_group(rng, prompt_id=prompt_id, rewards=rewards))
  draws = [buffer.draw(num_prompts=5, responses_per_prompt=2, version=0) for _ in range(num_draws // 5)]
  first = np.concatenate([draw.rewards[0::2] for draw in draws])
  second = np.concatenate([draw.rewards[1::2] for draw in draws])
  p = np.exp(rewards / temperature) if priority == "reward" else np.ones(4)
  p /= p.sum()
  table = p[:, None] * p[None, :] / (1 - p[:, None])
  observed = np.array([[((first == a) & (second == b)).sum() for b in rewards] for a in rewards])
  off = ~np.eye(4, dtype=bool)
  assert np.trace(observed) == 0 and scipy_stats.chisquare(observed[off], table[off] * num_draws).pvalue > 1e-3


@DRAWS
@pytest.mark.parametrize("priority", ["uniform", "reward"])
def test_one_prompt_tosses_the_coin_for_each_response(priority, num_draws: int):
  temperature = 0.5
  buffer, rng = (
    make_buffer(
      single_prompt=True,
      capacity_per_prompt=2,
      priority=priority,
      priority_temperature=temperature,
      recent_fraction=0.25,
    ),
    np.random.default_rng(4),
  )
  rewards = np.array([0.0, 0.3, 0.6, 1.0, 0.1, 0.8], np.float32)
  for occurrence, part in enumerate((rewards[:4], rewards[4:])):  # capacity_per_prompt=2 plays no part
    if occurrence:
      buffer.mark_publish(0)
      buffer.mark_publish(0)
    buffer.add(make_group(rng, num_samples=len(part), rewards=part, occurrence=occurrence))
  draws = [buffer.draw(num_prompts=1, responses_per_prompt=2, version=0) for _ in range(num_draws)]
  first = np.array([draw.rewards[0] for draw in draws])
  p = np.exp(rewards.astype(np.float64) / temperature) if priority == "reward" else np.ones(6)
  p = 0.75 * p / p.sum()
  observed = [*((first == reward).sum() for reward in rewards[:4]), np.isin(first, rewards[4:]).sum()]
  assert scipy_stats.chisquare(observed, np.array([*p[:4], 0.25 + p[4:].sum()]) * num_draws).pvalue > 1e-3
  assert all(draw.rows[0] != draw.rows[1] and draw.valid.all() and (draw.weights == 1).all() for draw in draws)
  short = buffer.draw(num_prompts=1, responses_per_prompt=9, version=0)
  assert short.valid.sum() == 6 and len(set(short.rows[short.valid])) == 6


@DRAWS
def test_residuals_choose_prompts_and_one_weight_per_group_undoes_it(num_draws: int):
  buffer, rng = (
    make_buffer(recent_fraction=0.0, priority="residual", priority_temperature=2.0),
    np.random.default_rng(5),
  )
  for prompt_id in range(4):
    buffer.add(make_group(rng, prompt_id=prompt_id))
  draw = buffer.draw(num_prompts=4, responses_per_prompt=4, version=0)
  np.testing.assert_allclose(draw.weights, 1.0)  # nothing known yet: all prompts weigh the same
  residuals = np.array([0.1, 0.4, 1.0, 5.0])[draw.prompt_ids] * np.tile([0.5, 1.5, 0.0, 2.0], 4)  # means 0.1, 0.4, 1, 5
  buffer.update_priorities(draw.rows, -residuals)
  p = np.sqrt(np.array([0.1, 0.4, 1.0, 5.0]) + 1e-3)
  p /= p.sum()
  draws = [buffer.draw(num_prompts=1, responses_per_prompt=3, version=0) for _ in range(num_draws)]
  prompts = np.array([draw.prompt_ids[0] for draw in draws])
  assert scipy_stats.chisquare(np.bincount(prompts, minlength=4), p * num_draws).pvalue > 1e-3
  for draw in draws[:200]:
    np.testing.assert_allclose(draw.weights, 0.25 / p[draw.prompt_ids[0]], rtol=1e-6)
  buffer.add(make_group(rng, prompt_id=4, occurrence=4))  # starts with the largest residual seen, 10
  weight = np.sqrt(10.0 + 1e-3)
  seen = sum(buffer.draw(num_prompts=1, responses_per_prompt=2, version=0).prompt_ids[0] == 4 for _ in range(4000))
  q = weight / (weight + np.sqrt(np.array([0.1, 0.4, 1.0, 5.0]) + 1e-3).sum())
  assert abs(seen - 4000 * q) < 4 * np.sqrt(4000 * q * (1 - q))


def test_priorities_of_rows_that_have_left_go_nowhere():
  buffer, rng = make_buffer(recent_fraction=0.0, priority="residual", capacity_per_prompt=4), np.random.default_rng(6)
  for prompt_id in range(2):
    buffer.add(make_group(rng, prompt_id=prompt_id))
  draw = buffer.draw(num_prompts=2, responses_per_prompt=5, version=0)
  buffer.add(make_group(rng, prompt_id=0, occurrence=7))  # takes over the rows of prompt 0
  buffer.update_priorities(draw.rows, np.where(draw.prompt_ids == 0, 1e6, 0.25))
  arrays = buffer.state_dict()["arrays"]
  assert sorted(arrays["residual"]) == [0.25] * 4 + [1.0] * 4 and buffer.stats()["priorities_too_late"] == 4

"""Each mistake that the replay buffer refuses, with the text that says so; and that nothing of a refused call stays
behind.
"""

from __future__ import annotations

import numpy as np
import pytest
import rollouts
from rollouts import make_group


def make_buffer(**settings):
  return rollouts.make_buffer(**(dict(capacity=20, max_prompt_tokens=3, max_response_tokens=6) | settings))


@pytest.mark.parametrize(
  ("settings", "text"),
  [
    (dict(capacity=1), r"capacity=1 must be at least 2; raise it"),
    (dict(capacity_per_prompt=1), r"capacity_per_prompt=1 must be at least 2"),
    (dict(max_prompt_tokens=0), r"max_prompt_tokens=0 must be at least 1"),
    (dict(max_response_tokens=0), r"max_response_tokens=0 must be at least 1"),
    (dict(max_uses=-1), r"max_uses=-1 must be at least 0"),
    (dict(max_staleness=-2), r"max_staleness=-2 must be at least -1"),
    (dict(capacity=2**31), r"capacity=2147483648 rows must be less than 2\*\*31; lower it"),
    (dict(recent_fraction=1.5), r"recent_fraction=1.5 is a probability; choose one from 0 to 1"),
    (dict(recent_fraction=float("nan")), r"recent_fraction=nan is a probability"),
    (
      dict(priority_temperature=0.0),
      r"priority_temperature=0.0 must be positive and finite; for no preference take priority='uniform'",
    ),
    (dict(priority="newest"), r"priority='newest' is not known; choose one of uniform, reward, residual"),
    (dict(order="lifo"), r"order='lifo' is not known; choose one of tba, fifo"),
    (dict(order="fifo"), r"whole sampling groups exactly once, which dedup=True, .* set dedup=False"),
    (dict(order="fifo", dedup=False, priority="reward"), r"exactly once, which dedup=False, priority='reward'"),
    (dict(order="fifo", dedup=False, max_uses=2), r"max_uses=2 would break"),
    (dict(near_duplicate=1.0), r"near_duplicate=1.0 is a share of two lengths; choose one from 0 \(off\) to less"),
    (dict(near_duplicate=0.1, dedup=False), r"near_duplicate=0.1 leaves responses out, which order='tba' and dedup=F"),
    (
      dict(single_prompt=True, priority="residual"),
      r"priority='residual' chooses between prompts, but single_prompt=True says",
    ),
  ],
)
def test_refuses_settings(settings, text):
  with pytest.raises(ValueError, match=text):
    make_buffer(**settings)


@pytest.mark.parametrize(
  ("fields", "text"),
  [
    (
      dict(log_mu=np.zeros((4, 5), np.float32)),
      r"prompt_id=1, occurrence=9: log_mu has shape \(4, 5\), but tokens \(4, 6\) ask for \(4, 6\)",
    ),
    (
      dict(log_ref=np.zeros((3, 6), np.float32)),
      r"log_ref has shape \(3, 6\), .* every sampled token needs one entry in each array",
    ),
    (dict(versions=np.zeros(4, np.int32)), r"versions has shape \(4,\), but tokens"),
    (dict(lengths=[1, 1, 1]), r"lengths has shape \(3,\), but tokens \(4, 6\) ask for \(4,\)"),
    (dict(rewards=[1.0]), r"rewards has shape \(1,\)"),
    (dict(truncated=np.zeros((4, 1), bool)), r"truncated has shape \(4, 1\)"),
    (dict(tokens=np.zeros(6, np.int32)), r"tokens \(6,\) must be \[S, T\] with S >= 1"),
    (dict(prompt=np.zeros((1, 2), np.int32)), r"prompt \(1, 2\) must be \[P\]"),
    (
      dict(prompt=np.zeros(4, np.int32)),
      r"the prompt has 4 tokens, but a row holds 1 to max_prompt_tokens=3; raise it or leave out",
    ),
    (dict(prompt=np.zeros(0, np.int32)), r"the prompt has 0 tokens"),
    (dict(lengths=[0, 1, 2, 3]), r"lengths reach from 0 to 3, but must be from 1 to the 6 entries of tokens"),
    (dict(lengths=[7, 1, 2, 3]), r"lengths reach from 1 to 7"),
    (
      dict(width=8, lengths=[7, 1, 2, 3]),
      r"the 8 entries of tokens and at most max_response_tokens=6; raise it or lower the sampler's",
    ),
    (dict(num_samples=21), r"21 samples do not fit capacity=20 rows; raise it"),
    (
      dict(rewards=[0, 1, np.nan, 2]),
      r"rewards \[0.0, 1.0, nan, 2.0\] must be finite; leave out the samples that could not be scored",
    ),
    (dict(rewards=[0, 1, np.inf, 2]), r"must be finite"),
    (dict(log_mu=np.full((4, 6), -np.inf, np.float32)), r"log_mu is not finite at a sampled token"),
    (dict(log_ref=np.full((4, 6), np.nan, np.float32)), r"log_ref is not finite at a sampled token"),
    (dict(version=-1), r"versions go down to -1; a version counts optimizer updates from 0"),
    (dict(version=6), r"a token of version 6 comes from the future, the trainer is at version 5; after a resume drop"),
    (
      dict(temperature=1.0),
      r"temperature=1.0 of a group differs from the buffer's 0.7; .* keep one temperature for the run",
    ),
    (
      dict(ref_version=3),
      r"ref_version=3 of a group is newer than the buffer's 0; call set_reference before anything is scored by a new",
    ),
    (
      dict(prompt=np.array([9], np.int32)),
      r"prompt_id=1 names other prompt tokens than before; give each prompt an id of its own",
    ),
  ],
)
def test_refuses_groups_and_keeps_nothing_of_them(fields, text):
  rng = np.random.default_rng(0)
  buffer = make_buffer()
  buffer.add(make_group(rng, prompt_id=1, version=5), newest_version=5)
  before = buffer.stats()
  with pytest.raises(ValueError, match=text):
    buffer.add(make_group(rng, **(dict(prompt_id=1, occurrence=9) | fields)), newest_version=5)
  assert buffer.stats() == before


def test_values_beyond_a_response_length_are_not_looked_at():
  rng = np.random.default_rng(1)
  garbage = np.zeros((4, 6), np.float32)
  garbage[:, 3:] = np.nan
  buffer = make_buffer()
  buffer.add(
    make_group(rng, lengths=[3] * 4, log_mu=garbage, log_ref=garbage, versions=np.where(garbage == 0, 2, -7)),
    newest_version=2,
  )
  assert not np.isnan(buffer.draw(num_prompts=1, responses_per_prompt=4, version=2).log_mu).any()


def test_refuses_draws():
  buffer = make_buffer()
  for sizes in ((0, 2), (1, 1)):
    for ask in (buffer.draw, buffer.can_draw):
      with pytest.raises(
        ValueError, match=rf"num_prompts={sizes[0]} must be at least 1 and responses_per_prompt={sizes[1]} at least 2"
      ):
        ask(num_prompts=sizes[0], responses_per_prompt=sizes[1], version=0)


def test_refuses_a_second_prompt_in_a_buffer_of_one():
  rng = np.random.default_rng(2)
  buffer = make_buffer(single_prompt=True, priority="reward", priority_temperature=0.001)
  buffer.add(make_group(rng, rewards=[0.0, 0.1, 0.2, 0.3]))
  with pytest.raises(
    ValueError, match=r"prompt_id=1 is a second prompt in a buffer of one \(single_prompt=True\); set it to False"
  ):
    buffer.add(make_group(rng, prompt_id=1, rewards=[0.0] * 4))
  with pytest.raises(
    ValueError,
    match=r"num_prompts=2, but the buffer is of one prompt .* set num_prompts=1 and raise responses_per_prompt",
  ):
    buffer.draw(num_prompts=2, responses_per_prompt=2, version=0)
  with pytest.raises(ValueError, match=r"reward / priority_temperature reaches 700, more than 600"):
    buffer.add(make_group(rng, rewards=[0.7, 0.0, 0.0, 0.0]))
  assert buffer.stats()["added"] == 4


def test_refuses_residuals_that_it_cannot_use():
  with pytest.raises(
    ValueError, match=r"priority='uniform' takes no residuals; set priority='residual' or do not update"
  ):
    make_buffer().update_priorities(np.array([0]), np.array([1.0]))
  buffer = make_buffer(priority="residual")
  with pytest.raises(ValueError, match=r"rows \(1,\) and values \(2,\) must be of one length"):
    buffer.update_priorities(np.array([0]), np.array([1.0, 2.0]))
  with pytest.raises(
    ValueError, match=r"values holds a residual that is not finite; leave out the rows of a skipped update"
  ):
    buffer.update_priorities(np.array([0, -1]), np.array([np.nan, 2.0]))


def test_refuses_states_of_other_settings_or_from_the_future_and_stays_as_it_was():
  rng = np.random.default_rng(3)
  saved = make_buffer()
  for version in range(97, 104):
    saved.add(make_group(rng, prompt_id=version, version=version, num_samples=2))
  state = saved.state_dict()
  other = make_buffer(capacity=30, priority="reward")
  with pytest.raises(
    ValueError, match=r"the saved buffer has capacity=20 \(here 30\), priority='uniform' \(here 'reward'\); resume with"
  ):
    other.load_state_dict(state)
  same = make_buffer()
  same.add(make_group(rng))
  with pytest.raises(
    ValueError, match=r"the saved buffer: a token of version 103 comes from the future, the trainer is at version 100"
  ):
    same.load_state_dict(state, newest_version=100)
  assert same.stats()["live_rows"] == 4
  same.load_state_dict(state, newest_version=103)
  assert same.stats()["live_rows"] == 14

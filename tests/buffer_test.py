"""The replay buffer against a model in plain lists, and against itself after a resume."""

from __future__ import annotations

import concurrent.futures
import json

import numpy as np
import pytest
from rollouts import make_buffer, make_group

from tba_jax.replay import indexes
from tba_jax.replay.buffer import NotEnoughData
from tba_jax.types import Draw

WAYS_OUT = (
  "duplicates",
  "evicted_capacity",
  "evicted_prompt_capacity",
  "evicted_age",
  "evicted_uses",
  "discarded",
)


def contents(buffer):
  """(prompt id, tokens, occurrence, uses, oldest version) of each live row, oldest first."""
  arrays = buffer.state_dict()["arrays"]
  prompt_ids = dict(zip(arrays["slots"].tolist(), arrays["prompt_id"].tolist(), strict=True))
  tokens = np.split(arrays["tokens"], np.cumsum(arrays["length"])[:-1])
  return [
    (prompt_ids[slot], tuple(t.tolist()), occurrence, uses, version)
    for slot, t, occurrence, uses, version in zip(
      arrays["slot"].tolist(),
      tokens,
      arrays["occurrence"].tolist(),
      arrays["uses"].tolist(),
      arrays["oldest_version"].tolist(),
      strict=bool(len(arrays["slot"])),
    )
  ]


def assert_accounts(buffer):
  stats = buffer.stats()
  assert stats["added"] == stats["live_rows"] + sum(stats[name] for name in WAYS_OUT)


class ListModel:
  """What the buffer may hold, in lists. A row is a dict; newest last."""

  def __init__(self, *, capacity, capacity_per_prompt, max_uses, max_staleness, dedup):
    self.limits = capacity, capacity_per_prompt, max_uses, max_staleness
    self.dedup = dedup
    self.rows = []

  def add(self, group):
    capacity, per_prompt, _, _ = self.limits
    for s, length in enumerate(group.lengths):
      row = dict(
        prompt=group.prompt_id,
        tokens=tuple(group.tokens[s, :length].tolist()),
        occurrence=group.occurrence,
        uses=0,
        version=int(group.versions[s, :length].min()),
        log_mu=group.log_mu[s, :length],
        log_ref=group.log_ref[s, :length],
        reward=group.rewards[s],
        truncated=group.truncated[s],
        prompt_tokens=group.prompt,
      )
      if self.dedup:
        self.rows = [r for r in self.rows if (r["prompt"], r["tokens"]) != (row["prompt"], row["tokens"])]
      self.rows.append(row)
    surplus = max(sum(r["prompt"] == group.prompt_id for r in self.rows) - per_prompt, 0)
    for row in [r for r in self.rows if r["prompt"] == group.prompt_id][:surplus]:
      self.rows = [r for r in self.rows if r is not row]
    self.rows = self.rows[-capacity:]

  def drop_stale(self, version):
    if self.limits[3] >= 0:
      self.rows = [r for r in self.rows if version - r["version"] <= self.limits[3]]

  def take(self, draw: Draw, *, num_prompts, responses_per_prompt, version):
    """Checks a draw row by row, and uses the rows up."""
    seen = []
    assert len(draw.valid) == num_prompts * responses_per_prompt
    for i in np.flatnonzero(draw.valid):
      length = draw.lengths[i]
      (row,) = [r for r in self.rows if r["reward"] == draw.rewards[i]]  # rewards are random: each has one row
      assert (row["prompt"], row["occurrence"]) == (draw.prompt_ids[i], draw.occurrences[i])
      assert row["tokens"] == tuple(draw.tokens[i, :length].tolist())
      seen.append(id(row))
      np.testing.assert_array_equal(draw.log_mu[i, :length], row["log_mu"])
      np.testing.assert_array_equal(draw.log_ref[i, :length], row["log_ref"])
      np.testing.assert_array_equal(draw.prompts[i, : draw.prompt_lengths[i]], row["prompt_tokens"])
      assert (draw.truncated[i], draw.versions[i]) == (row["truncated"], row["version"])
      assert (
        not draw.tokens[i, length:].any() and not draw.log_mu[i, length:].any() and not draw.log_ref[i, length:].any()
      )
      row["uses"] += 1
    assert len(set(seen)) == len(seen)
    assert (
      (draw.rows[~draw.valid] == -1).all()
      and not draw.lengths[~draw.valid].any()
      and not draw.tokens[~draw.valid].any()
    )
    groups = draw.prompt_ids.reshape(num_prompts, responses_per_prompt)
    assert (groups == groups[:, :1]).all() and len(set(groups[:, 0])) == num_prompts  # no prompt twice
    np.testing.assert_array_equal(draw.group_ids, np.repeat(np.arange(num_prompts), responses_per_prompt))
    valid = draw.valid.reshape(num_prompts, responses_per_prompt)
    available = [sum(r["prompt"] == prompt for r in self.rows) for prompt in groups[:, 0]]
    np.testing.assert_array_equal(valid.sum(axis=1), np.minimum(available, responses_per_prompt))
    assert (valid.sum(axis=1) >= 2).all()
    if self.limits[2]:
      self.rows = [r for r in self.rows if r["uses"] < self.limits[2]]

  def contents(self):
    return [(r["prompt"], r["tokens"], r["occurrence"], r["uses"], r["version"]) for r in self.rows]


@pytest.mark.parametrize("collide", [False, True])
@pytest.mark.parametrize(
  "limits",
  [
    dict(capacity=60, capacity_per_prompt=7, max_uses=0, max_staleness=-1, dedup=True),
    dict(capacity=40, capacity_per_prompt=30, max_uses=2, max_staleness=3, dedup=True),
    dict(capacity=500, capacity_per_prompt=3, max_uses=1, max_staleness=2, dedup=False),
  ],
)
def test_holds_and_draws_what_a_model_in_lists_does(limits, collide, monkeypatch):
  if collide:  # equal hashes of unequal responses: only the comparison of tokens tells them apart
    monkeypatch.setattr(indexes, "hash_response", lambda prompt_id, tokens: len(tokens) % 2)
  rng = np.random.default_rng(0)
  buffer, model = make_buffer(**limits), ListModel(**limits)
  version, num_draws = 0, 0
  for step in range(400):
    num_samples = int(rng.integers(1, 6))
    group = make_group(
      rng,
      prompt_id=int(rng.integers(9)),
      occurrence=step,
      num_samples=num_samples,
      vocab=3,
      width=3,
      versions=np.maximum(version - rng.integers(3, size=(num_samples, 3)), 0),
    )
    buffer.add(group, newest_version=version)
    model.add(group)
    assert buffer.stats()["live_rows"] == len(model.rows)
    if step % 3 == 0:
      model.drop_stale(version)
      drawable = [p for p in range(9) if sum(r["prompt"] == p for r in model.rows) >= 2]
      assert buffer.can_draw(num_prompts=3, responses_per_prompt=4, version=version) == (len(drawable) >= 3)
      if len(drawable) >= 3:
        draw = buffer.draw(num_prompts=3, responses_per_prompt=4, version=version)
        model.take(draw, num_prompts=3, responses_per_prompt=4, version=version)
        num_draws += 1
        version += 1
        buffer.mark_publish(version)
    assert contents(buffer) == model.contents()
    assert_accounts(buffer)
  assert num_draws > 50


SETTINGS = [
  dict(),
  dict(priority="reward", max_uses=3, max_staleness=4),
  dict(priority="residual", priority_temperature=1.7),
  dict(order="fifo", dedup=False, max_staleness=6),
  dict(single_prompt=True, priority="reward", priority_temperature=0.3),
  dict(single_prompt=True, max_uses=2, max_staleness=5),
]


def run_random_operations(buffer, rng, num_steps, *, start, version):
  """Adds, publishes, draws and updates at random; what happens depends on `rng` and on the buffer's answers alone.
  Returns the draws.
  """
  draws, single = [], buffer._settings["single_prompt"]
  num_prompts = 1 if single else 3
  for step in range(start, start + num_steps):
    buffer.add(
      make_group(
        rng,
        prompt_id=0 if single else int(rng.integers(12)),
        occurrence=step,
        num_samples=int(rng.integers(1, 6)),
        vocab=4,
        width=4,
        version=version,
      )
    )
    if rng.random() < 0.5 and buffer.can_draw(num_prompts=num_prompts, responses_per_prompt=4, version=version):
      draws.append(buffer.draw(num_prompts=num_prompts, responses_per_prompt=4, version=version))
      version += 1
      if buffer.priority == "residual":
        old = draws[int(rng.integers(max(len(draws) - 3, 0), len(draws)))]
        buffer.update_priorities(old.rows, np.where(old.valid, rng.exponential(size=len(old.rows)), np.nan))
    if rng.random() < 0.2:
      buffer.mark_publish(version)
    if rng.random() < 0.01:
      buffer.set_reference(0)
  return draws, version


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(map(str, s.values())) or "plain")
def test_resumed_buffer_draws_what_the_unbroken_one_draws(settings, seed):
  rng = np.random.default_rng([seed, 1])
  settings = dict(capacity=60, capacity_per_prompt=9) | settings
  unbroken = make_buffer(seed=seed, **settings)
  num_steps = int(rng.integers(1, 150))
  _, version = run_random_operations(unbroken, rng, num_steps, start=0, version=0)
  saved = unbroken.state_dict()
  saved["scalars"] = json.loads(json.dumps(saved["scalars"]))  # must survive a text file
  resumed = make_buffer(seed=seed + 99, **settings)
  run_random_operations(
    resumed, np.random.default_rng(3), 20, start=0, version=0
  )  # what it held before must not matter
  resumed.load_state_dict(saved, newest_version=version)
  (ours, _), (theirs, _) = (
    run_random_operations(b, np.random.default_rng([seed, 2]), 150, start=num_steps, version=version)
    for b in (unbroken, resumed)
  )
  assert len(ours) == len(theirs) > 30
  for one, other in zip(ours, theirs, strict=True):
    for field in Draw.__dataclass_fields__:
      np.testing.assert_array_equal(getattr(one, field), getattr(other, field), err_msg=field)
  assert unbroken.stats() == resumed.stats()
  assert_accounts(resumed)
  one, other = unbroken.state_dict(), resumed.state_dict()
  assert one["scalars"] == other["scalars"]
  for name in one["arrays"]:
    np.testing.assert_array_equal(one["arrays"][name], other["arrays"][name], err_msg=name)


def test_state_holds_live_rows_only_and_aliases_nothing():
  rng = np.random.default_rng(0)
  buffer = make_buffer(capacity=100_000, max_response_tokens=512)
  group = make_group(rng, num_samples=3, lengths=[2, 5, 1])
  buffer.add(group)
  before = buffer.state_dict()
  assert len(before["arrays"]["tokens"]) == 8
  assert sum(array.nbytes for array in before["arrays"].values()) < 1000
  kept = before["arrays"]["tokens"].copy()
  for occurrence in range(5):
    buffer.add(make_group(rng, occurrence=occurrence))
  np.testing.assert_array_equal(before["arrays"]["tokens"], kept)


def test_duplicates_keep_the_newest_and_know_prompts_apart():
  buffer, rng = make_buffer(), np.random.default_rng(7)
  tokens = np.array([[1, 2, 3], [1, 2, 3], [1, 2, 9], [1, 2, 9]], np.int32)
  buffer.add(
    make_group(rng, width=3, tokens=tokens, lengths=[3, 2, 2, 3])
  )  # rows 1 and 2 are equal: the tail is not part of them
  assert [row[1] for row in contents(buffer)] == [(1, 2, 3), (1, 2), (1, 2, 9)]
  buffer.add(make_group(rng, width=3, tokens=tokens, lengths=[3, 3, 3, 3], prompt_id=1, occurrence=1))
  buffer.add(make_group(rng, num_samples=1, width=3, tokens=tokens[:1], lengths=[2], occurrence=2))
  assert [row[:3] for row in contents(buffer)] == [
    (0, (1, 2, 3), 0),
    (0, (1, 2, 9), 0),
    (1, (1, 2, 3), 1),
    (1, (1, 2, 9), 1),
    (0, (1, 2), 2),
  ]
  assert buffer.stats()["duplicates"] == 4


def test_age_counts_from_the_oldest_token_and_the_limit_itself_is_kept():
  buffer, rng = make_buffer(max_staleness=2), np.random.default_rng(8)
  in_flight = np.array([[3] * 4 + [4] * 2] * 4, np.int32)  # weights arrived at token 4
  buffer.add(make_group(rng, versions=in_flight, lengths=[6] * 4), newest_version=4)
  assert buffer.draw(num_prompts=1, responses_per_prompt=2, version=5).versions.tolist() == [3, 3]
  assert buffer.stats()["mean_age"] == 2.0
  with pytest.raises(
    NotEnoughData, match=r"num_prompts=1 groups were asked for, 0 with 2 or more usable responses .* version 6"
  ):
    buffer.draw(num_prompts=1, responses_per_prompt=2, version=6)
  assert (buffer.stats()["evicted_age"], buffer.stats()["evicted_age_unused"]) == (4, 2)


def test_prompts_with_one_row_are_skipped_and_counted():
  buffer, rng = make_buffer(), np.random.default_rng(9)
  for prompt_id in range(3):
    buffer.add(make_group(rng, prompt_id=prompt_id, num_samples=prompt_id + 1))
  for _ in range(10):
    draw = buffer.draw(num_prompts=2, responses_per_prompt=3, version=0)
    assert sorted(draw.prompt_ids[draw.valid].tolist()) == [1, 1, 2, 2, 2]
  assert buffer.stats()["prompts_skipped"] == 10 and buffer.stats()["groups_short"] == 10
  assert not buffer.can_draw(num_prompts=3, responses_per_prompt=3, version=0)


def moved_reference(**settings):
  """A buffer whose reference has moved to version 3: two groups of 4 by the old one, one of them late, and one by the
  new."""
  buffer, rng = make_buffer(**settings), np.random.default_rng(10)
  buffer.add(make_group(rng))
  buffer.set_reference(3)
  buffer.add(make_group(rng))  # was under way when the reference moved
  buffer.add(make_group(rng, ref_version=3))
  return buffer


def test_rows_of_an_older_reference_come_without_log_ref_until_they_are_given_one():
  buffer, shape = moved_reference(capacity_per_prompt=12,
                                  recent_fraction=1.0), dict(num_prompts=1, responses_per_prompt=8, version=0)
  draw = buffer.draw(**shape)  # newest first
  assert np.isnan(draw.log_ref).all(axis=1).tolist() == [False] * 4 + [True] * 4
  given = np.full_like(draw.log_ref, 0.5)
  buffer.update_log_ref(draw.rows[4:6], given[4:6], ref_version=3)
  copy = make_buffer(capacity_per_prompt=12, recent_fraction=1.0)
  copy.load_state_dict(buffer.state_dict())
  for each in (buffer, copy):
    again = each.draw(**shape)
    np.testing.assert_array_equal(again.log_ref[:4], draw.log_ref[:4])
    assert (again.log_ref[4:6, 0] == 0.5).all() and np.isnan(again.log_ref[6:]).all()
    assert each.stats()["rescored"] == 2
    assert_accounts(each)


def test_a_queue_hands_out_rows_of_older_references_too():
  buffer = moved_reference(order="fifo", dedup=False)
  draws = [buffer.draw(num_prompts=1, responses_per_prompt=6, version=0) for _ in range(3)]
  for draw, old in zip(draws, (True, True, False), strict=True):
    assert np.isnan(draw.log_ref).any(axis=1).tolist() == [old] * 4 + [False] * 2
  buffer.update_log_ref(draws[0].rows[:4], draws[2].log_ref[:4], ref_version=3)  # they have left
  assert_accounts(buffer)


def test_rows_that_have_left_are_passed_over_when_log_ref_comes():
  buffer, rng = make_buffer(capacity=4), np.random.default_rng(11)
  buffer.add(make_group(rng))
  buffer.set_reference(1)
  draw = buffer.draw(num_prompts=1, responses_per_prompt=4, version=0)
  buffer.add(make_group(rng, ref_version=1))  # takes their places
  kept = buffer.draw(num_prompts=1, responses_per_prompt=4, version=0)
  buffer.update_log_ref(draw.rows, np.zeros_like(draw.log_ref), ref_version=1)
  again = buffer.draw(num_prompts=1, responses_per_prompt=4, version=0)
  assert sorted(again.log_ref[:, 0].tolist()) == sorted(kept.log_ref[:, 0].tolist())
  assert (again.log_ref[:, 0] != 0).all()


def test_fifo_gives_whole_groups_once_in_order():
  buffer, rng = make_buffer(order="fifo", dedup=False), np.random.default_rng(11)
  groups = [
    make_group(rng, prompt_id=i % 2, occurrence=i, vocab=1, lengths=[1] * 4) for i in range(6)
  ]  # all responses are equal
  for group in groups:
    buffer.add(group)
  buffer.add(make_group(rng, prompt_id=5, num_samples=1))  # no group at all
  for step in range(2):
    draw = buffer.draw(num_prompts=3, responses_per_prompt=3, version=0)
    assert draw.occurrences.tolist() == np.repeat([3 * step, 3 * step + 1, 3 * step + 2], 3).tolist()
    assert draw.group_ids.tolist() == np.repeat([0, 1, 2], 3).tolist()
    expected = np.concatenate(
      [group.log_mu[:3, 0] for group in groups[3 * step : 3 * step + 3]]
    )  # first K of S, in sampling order
    np.testing.assert_array_equal(draw.log_mu[:, 0], expected)
  with pytest.raises(NotEnoughData):
    buffer.draw(num_prompts=1, responses_per_prompt=3, version=0)
  stats = buffer.stats()
  assert (stats["evicted_uses"], stats["discarded"], stats["prompts_skipped"], stats["live_rows"]) == (18, 7, 1, 0)
  assert_accounts(buffer)


def test_fifo_drops_whole_groups():
  buffer, rng = make_buffer(order="fifo", dedup=False, capacity=10, max_staleness=1), np.random.default_rng(12)
  for occurrence in range(3):
    buffer.add(make_group(rng, occurrence=occurrence))
  assert [row[2] for row in contents(buffer)] == [1] * 4 + [2] * 4  # 12 rows in 10: the oldest group left whole
  mixed = np.zeros((4, 6), np.int32)
  mixed[1:] = 5  # one response is old
  buffer.add(make_group(rng, occurrence=3, versions=mixed, lengths=[6] * 4))
  buffer.add(make_group(rng, occurrence=4, version=1))
  draw = buffer.draw(num_prompts=1, responses_per_prompt=4, version=2)
  assert draw.occurrences.tolist() == [4] * 4 and buffer.stats()["evicted_age"] == 4
  assert not buffer.can_draw(num_prompts=1, responses_per_prompt=4, version=2)
  assert_accounts(buffer)


def test_buffered_groups_are_trained_next_after_a_resume():
  """Ids 0..7: four generated, two trained, saved, restored: the next two are the buffered ones, and each id is used
  once.
  """
  buffer, rng = make_buffer(order="fifo", dedup=False), np.random.default_rng(13)
  for i in range(4):
    buffer.add(make_group(rng, prompt_id=i, occurrence=i))
  trained = buffer.draw(num_prompts=2, responses_per_prompt=4, version=0).prompt_ids[::4].tolist()
  resumed = make_buffer(order="fifo", dedup=False)
  resumed.load_state_dict(buffer.state_dict())
  for i in range(4, 8):
    resumed.add(make_group(rng, prompt_id=i, occurrence=i))
  for _ in range(3):
    trained += resumed.draw(num_prompts=2, responses_per_prompt=4, version=0).prompt_ids[::4].tolist()
  assert trained == list(range(8))


def test_threads_add_and_draw_at_once():
  buffer = make_buffer(capacity=120, max_uses=4, priority="residual", max_staleness=50)
  version = [0]

  def add(seed):
    rng = np.random.default_rng(seed)
    for step in range(400):
      prompt_id, occurrence = int(rng.integers(20)), 1000 * seed + step
      buffer.add(make_group(rng, prompt_id=prompt_id, occurrence=occurrence, version=version[0], vocab=4))

  def draw(adding):
    rng = np.random.default_rng(0)
    while not all(future.done() for future in adding):
      if buffer.can_draw(num_prompts=2, responses_per_prompt=3, version=version[0]):
        draw = buffer.draw(num_prompts=2, responses_per_prompt=3, version=version[0])
        # A prompt's first token is its id: no row is torn.
        assert (draw.prompts[:, 0] == draw.prompt_ids)[draw.valid].all()
        buffer.update_priorities(draw.rows, rng.random(6))
        version[0] += 1
        buffer.mark_publish(version[0])

  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    adding = [pool.submit(add, seed) for seed in (1, 2, 3)]
    for future in (*adding, pool.submit(draw, adding)):
      future.result(60)
  assert buffer.stats()["groups_drawn"] > 50 and buffer.stats()["added"] == 4800
  assert_accounts(buffer)


def test_versions_that_never_get_old_do_not_pile_up():
  buffer, rng = make_buffer(capacity=10, capacity_per_prompt=4, max_staleness=1), np.random.default_rng(14)
  for occurrence in range(200):  # the trainer stands still
    buffer.add(make_group(rng, prompt_id=occurrence % 3, occurrence=occurrence))
  assert sum(len(handles) for handles in buffer._by_version._handles.values()) <= 2 * 10 + 4
  assert buffer.stats()["live_rows"] == 10
  assert not buffer.can_draw(num_prompts=1, responses_per_prompt=2, version=2) and buffer.stats()["evicted_age"] == 10


def test_groups_that_wait_for_a_draw_are_counted_and_those_that_cannot_be_drawn_are_not():
  buffer, rng = make_buffer(recent_fraction=0.0, capacity_per_prompt=4, max_staleness=1), np.random.default_rng(15)
  equal = dict(tokens=np.ones((4, 6), np.int32), lengths=[6] * 4)
  buffer.add(make_group(rng, prompt_id=0, **equal))  # four equal responses are one: nothing that could be drawn
  assert buffer.stats()["unused_groups"] == 0
  buffer.add(make_group(rng, prompt_id=1, version=1))
  buffer.add(make_group(rng, prompt_id=2, version=1, num_samples=1))
  buffer.add(make_group(rng, prompt_id=2, num_samples=1))
  assert buffer.stats()["unused_groups"] == 2
  assert buffer.can_draw(num_prompts=1, responses_per_prompt=4, version=2)  # prompt 2 keeps one row
  assert buffer.stats()["unused_groups"] == 1
  resumed = make_buffer(recent_fraction=0.0, capacity_per_prompt=4, max_staleness=1)
  resumed.load_state_dict(buffer.state_dict())
  for one in (buffer, resumed):
    assert one.stats()["unused_groups"] == 1
    one.draw(num_prompts=1, responses_per_prompt=4, version=2)
    assert one.stats()["unused_groups"] == 0
  buffer.add(make_group(rng, prompt_id=3, version=2))
  buffer.add(make_group(rng, prompt_id=3, version=2, occurrence=1))  # takes the place of the group before
  assert buffer.stats()["unused_groups"] == 1

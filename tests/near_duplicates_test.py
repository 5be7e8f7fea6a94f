"""Near duplicates: distances against a recursion, what a buffer keeps against the rule written out."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from rollouts import make_buffer, make_group

from tba_jax.replay.near_duplicates import edit_distances, may_be_near, signatures

SHARE = 0.25


def distance(a, b) -> int:
  """Levenshtein's by its definition."""

  @functools.cache
  def between(i, j):
    if not i or not j:
      return i + j
    return min(between(i - 1, j) + 1, between(i, j - 1) + 1, between(i - 1, j - 1) + (a[i - 1] != b[j - 1]))

  return between(len(a), len(b))


@pytest.mark.parametrize("vocab", [2, 6])
def test_distances_are_levenshteins(vocab):
  rng = np.random.default_rng(vocab)
  for _ in range(40):
    tokens, others = rng.integers(vocab, size=rng.integers(1, 10)), rng.integers(vocab, size=(12, 9))
    lengths = rng.integers(1, 10, size=12)
    wanted = [distance(tokens.tolist(), row[:n].tolist()) for row, n in zip(others, lengths)]
    assert edit_distances(tokens, others, lengths).tolist() == wanted
    own = signatures(tokens[None].astype(np.int32), np.array([len(tokens)]))[0]
    may = may_be_near(own, len(tokens), signatures(others.astype(np.int32), lengths), lengths, share=SHARE)
    assert may[np.array(wanted) < SHARE * (len(tokens) + lengths)].all()  # none that is near is passed over


def test_most_of_what_is_far_is_passed_over():
  rng = np.random.default_rng(0)
  tokens, lengths = rng.integers(50_000, size=(500, 20)).astype(np.int32), rng.integers(8, 21, size=500)
  found = signatures(tokens, lengths)
  may = may_be_near(found[0], int(lengths[0]), found, lengths, share=SHARE)
  assert may[0] and may.sum() < 50


def is_near(a, b) -> bool:
  return distance(a, b) < SHARE * (len(a) + len(b))


class Model:
  """The better of what is near, the newest of what is equal; rows as {tokens: reward}, by prompt."""

  def __init__(self):
    self.rows: dict[int, dict[tuple[int, ...], float]] = {}

  def add(self, group):
    responses = {tuple(row[:n].tolist()): (i, r) for i, (row, n, r) in enumerate(
      zip(group.tokens, group.lengths, group.rewards.tolist()))}  # of equal ones the last
    kept = []
    for response in sorted(responses, key=lambda key: (-responses[key][1], responses[key][0])):
      if not any(is_near(response, other) for other in kept):
        kept.append(response)
    rows = self.rows.setdefault(group.prompt_id, {})
    for response in sorted(kept, key=lambda key: responses[key][0]):
      close = [other for other in rows if is_near(response, other)]
      if response not in rows and any(rows[other] >= responses[response][1] for other in close):
        continue
      for other in close:
        del rows[other]
      rows[response] = responses[response][1]


@pytest.mark.parametrize("single", [True, False])
def test_the_better_of_what_is_near_stays(single):
  rng = np.random.default_rng(0)
  buffer = make_buffer(near_duplicate=SHARE, single_prompt=single, capacity_per_prompt=500, priority="reward")
  model = Model()
  for occurrence in range(120):
    prompt = 0 if single else int(rng.integers(3))
    group = make_group(rng, prompt_id=prompt, occurrence=occurrence, vocab=5, width=8, num_samples=6,
                       rewards=rng.integers(8, size=6) / 8)  # with ties
    buffer.add(group)
    model.add(group)
    if occurrence == 60:  # a buffer that goes on from a checkpoint decides alike
      resumed = make_buffer(near_duplicate=SHARE, single_prompt=single, capacity_per_prompt=500, priority="reward")
      resumed.load_state_dict(buffer.state_dict())
      buffer = resumed
  store = buffer._store
  found = {prompt: {tuple(store.tokens[row, : store.length[row]].tolist()): float(store.reward[row])
                    for row in store.rows_of(prompt)} for prompt in model.rows}
  assert found == model.rows and sum(map(len, found.values())) > 20
  stats = buffer.stats()
  assert stats["near_duplicates"] > 200 and stats["live_rows"] == sum(map(len, found.values()))
  assert stats["added"] == stats["live_rows"] + stats["near_duplicates"] + stats["duplicates"]
  draw = buffer.draw(num_prompts=1, responses_per_prompt=8, version=0)
  assert draw.valid.sum() == 8

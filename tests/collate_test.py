"""Rows of a draw against an independent unpacking that walks the batch token by token."""

from __future__ import annotations

import collections
import dataclasses

import numpy as np
import pytest

from tba_jax.replay.collate import batch_shapes, collate, collate_supervised
from tba_jax.types import Batch, Draw

BUCKETS = (8, 16, 24)


def random_draw(seed: int, *, num_rows: int = 13, prompt: int = 9, response: int = 11, invalid: float = 0.2) -> Draw:
  """Random rows; whatever lies beyond a length is rubbish that must never show up in a batch."""
  rng = np.random.default_rng(seed)
  return Draw(
    prompts=rng.integers(1, 1000, (num_rows, prompt), dtype=np.int32),
    prompt_lengths=rng.integers(1, prompt + 1, num_rows, dtype=np.int32),
    tokens=rng.integers(1, 1000, (num_rows, response), dtype=np.int32),
    lengths=rng.integers(1, response + 1, num_rows, dtype=np.int32),
    log_mu=rng.normal(size=(num_rows, response)).astype(np.float32),
    log_ref=rng.normal(size=(num_rows, response)).astype(np.float32),
    versions=rng.integers(0, 5, num_rows, dtype=np.int32),
    rewards=rng.normal(size=num_rows).astype(np.float32),
    truncated=rng.random(num_rows) < 0.3,
    group_ids=np.sort(rng.integers(0, 4, num_rows, dtype=np.int32)),
    valid=rng.random(num_rows) >= invalid,
    weights=rng.random(num_rows).astype(np.float32),
    prompt_ids=np.arange(num_rows),
    occurrences=np.arange(num_rows),
    rows=np.arange(num_rows),
    advantages=rng.normal(size=(num_rows, response)).astype(np.float32),
  )


def unpack(batch: Batch) -> dict[int, dict[str, list]]:
  """Response index -> its tokens, found by walking the rows; nothing is shared with collate."""
  num_responses = len(batch.rewards)
  found = {}
  for row in range(batch.tokens.shape[0]):
    spans = collections.defaultdict(list)
    for column in range(batch.tokens.shape[1]):
      if batch.segment_ids[row, column]:
        spans[int(batch.segment_ids[row, column])].append(column)
    assert sorted(spans) == list(range(1, len(spans) + 1))
    for columns in spans.values():
      assert columns == list(range(columns[0], columns[-1] + 1))
      assert batch.positions[row, columns].tolist() == list(range(len(columns)))
      owners = batch.sequence_ids[row, columns].tolist()
      trained = [c for c, owner in zip(columns, owners) if owner != num_responses]
      assert trained == columns[-len(trained) :], "response tokens are the end of a sequence"
      (index,) = {int(batch.sequence_ids[row, c]) for c in trained}
      assert index not in found
      found[index] = {
        "prompt": batch.tokens[row, columns[: -len(trained)]].tolist(),
        "response": batch.tokens[row, trained].tolist(),
        "log_mu": batch.log_mu[row, trained].tolist(),
        "log_ref": batch.log_ref[row, trained].tolist(),
      }
      if batch.advantages is not None:  # of supervised examples there are none
        found[index]["advantages"] = batch.advantages[row, trained].tolist()
  return found


def expected(draw: Draw) -> dict[int, dict[str, list]]:
  rows = {}
  for i in np.flatnonzero(draw.valid):
    length = draw.lengths[i]
    rows[int(i)] = {
      "prompt": draw.prompts[i, : draw.prompt_lengths[i]].tolist(),
      "response": draw.tokens[i, :length].tolist(),
      "log_mu": draw.log_mu[i, :length].tolist(),
      "advantages": draw.advantages[i, :length].tolist(),
      "log_ref": draw.log_ref[i, :length].tolist(),
    }
  return rows


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_unpacking_gives_back_every_token_and_log_probability(seed: int, pack: bool):
  draw = random_draw(seed)
  batch = collate(draw, row_multiple=4, length_buckets=BUCKETS, pack=pack)
  assert unpack(batch) == expected(draw)
  outside = batch.sequence_ids == len(batch.rewards)
  assert not batch.log_mu[outside].any() and not batch.log_ref[outside].any()
  assert not batch.advantages[outside].any()
  padding = batch.segment_ids == 0
  assert not batch.tokens[padding].any() and not batch.positions[padding].any() and outside[padding].all()


@pytest.mark.parametrize("pack", [False, True])
def test_per_response_arrays_and_counts(pack: bool):
  draw = random_draw(3)
  batch = collate(draw, row_multiple=4, length_buckets=BUCKETS, pack=pack)
  num, valid = len(draw.lengths), draw.valid
  assert len(batch.rewards) == 16 and batch.valid.tolist() == [*valid.tolist(), False, False, False]
  np.testing.assert_array_equal(batch.rewards[:num][valid], draw.rewards[valid])
  np.testing.assert_array_equal(batch.weights[:num][valid], draw.weights[valid])
  np.testing.assert_array_equal(batch.truncated[:num], draw.truncated)
  np.testing.assert_array_equal(batch.group_ids[:num], draw.group_ids)
  assert batch.num_responses == sum(valid)
  assert batch.num_groups == len({g for g, ok in zip(draw.group_ids, valid) if ok})
  assert batch.num_tokens == sum(n for n, ok in zip(draw.lengths, valid) if ok)


def test_row_i_is_response_i_and_padding_rows_are_empty():
  draw = random_draw(5, num_rows=6, invalid=0.0)
  draw.valid[2] = False
  batch = collate(draw, row_multiple=4, length_buckets=BUCKETS)
  assert batch.tokens.shape == (8, 24)
  for row in range(8):
    owners = set(batch.sequence_ids[row].tolist()) - {8}
    assert owners == (set() if row in (2, 6, 7) else {row})
    assert batch.segment_ids[row].any() == (row not in (2, 6, 7))


@pytest.mark.parametrize("pack", [False, True])
def test_order_of_the_rows_of_a_draw_does_not_matter(pack: bool):
  draw = random_draw(7)
  order = np.random.default_rng(1).permutation(len(draw.lengths))
  shuffled = Draw(**{f.name: getattr(draw, f.name)[order] for f in dataclasses.fields(Draw)})
  first = unpack(collate(draw, row_multiple=2, length_buckets=BUCKETS, pack=pack))
  second = unpack(collate(shuffled, row_multiple=2, length_buckets=BUCKETS, pack=pack))
  assert second == {i: first[int(old)] for i, old in enumerate(order) if int(old) in first}


def test_smallest_bucket_that_holds_the_longest_sequence():
  draw = random_draw(0, invalid=0.0)
  draw.prompt_lengths[:], draw.lengths[:] = 3, 5
  for pack in (False, True):
    assert collate(draw, row_multiple=1, length_buckets=BUCKETS, pack=pack).tokens.shape[1] == 8
  draw.lengths[4] = 6
  assert collate(draw, row_multiple=1, length_buckets=BUCKETS).tokens.shape[1] == 16


def test_packing_by_hand():
  lengths = [7, 1, 4, 2, 2]  # with a prompt of one token: 8, 2, 5, 3, 3 in rows of 8 -> [8], [5, 3], [3, 2]
  batch = collate_supervised([([9], [i + 1] * n) for i, n in enumerate(lengths)], row_multiple=1, length_buckets=(8,))
  assert batch.segment_ids.tolist() == [[1] * 8, [1] * 5 + [2] * 3, [1] * 3 + [2] * 2 + [0] * 3]
  assert batch.tokens.tolist() == [[9] + [1] * 7, [9, 3, 3, 3, 3, 9, 4, 4], [9, 5, 5, 9, 2, 0, 0, 0]]
  assert batch.positions[1].tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
  assert batch.sequence_ids.tolist() == [[5] + [0] * 7, [5, 2, 2, 2, 2, 5, 3, 3], [5, 4, 4, 5, 1, 5, 5, 5]]


@pytest.mark.parametrize("pack", [False, True])
def test_shapes_are_the_declared_ones(pack: bool):
  declared = set(batch_shapes(num_responses=13, row_multiple=2, length_buckets=BUCKETS, pack=pack))
  assert {shape.num_rows for shape in declared} == ({2, 4, 6, 8, 12, 14} if pack else {14})
  assert len(declared) == (18 if pack else 3)
  seen = set()
  for seed in range(60):
    draw = random_draw(seed, response=1 + seed % 11, prompt=1 + seed % 9)
    batch = collate(draw, row_multiple=2, length_buckets=BUCKETS, pack=pack)
    seen.add((*batch.tokens.shape, len(batch.rewards)))
  assert seen <= declared
  assert len(seen) > 2


def test_supervised_examples_are_valid_groups_of_their_own():
  examples = [([1, 2], [3, 4, 5]), ([6], [7]), ([8, 9, 10], [11, 12])]
  batch = collate_supervised(examples, row_multiple=2, length_buckets=BUCKETS, num_responses=5)
  rows = unpack(batch)
  assert [(rows[i]["prompt"], rows[i]["response"])
          for i in range(3)] == [([1, 2], [3, 4, 5]), ([6], [7]), ([8, 9, 10], [11, 12])]
  assert batch.valid.tolist() == [True] * 3 + [False] * 3 and not batch.rewards.any()
  assert (batch.num_responses, batch.num_groups, batch.num_tokens) == (3, 3, 6)


def test_a_draw_without_any_valid_row_is_all_padding():
  draw = random_draw(2)
  draw.valid[:] = False
  for pack in (False, True):
    batch = collate(draw, row_multiple=2, length_buckets=BUCKETS, pack=pack)
    assert not batch.segment_ids.any() and batch.num_responses == batch.num_groups == batch.num_tokens == 0


def test_error_messages():
  draw = random_draw(0, invalid=0.0)
  draw.prompt_lengths[0], draw.lengths[0] = 9, 11
  with pytest.raises(ValueError, match=r"have 20 tokens, more than the largest of length_buckets=\(8, 16\)"):
    collate(draw, row_multiple=1, length_buckets=(8, 16))
  with pytest.raises(ValueError, match=r"length_buckets=\(16, 8\) must be token counts in ascending order"):
    collate(draw, row_multiple=1, length_buckets=(16, 8))
  with pytest.raises(ValueError, match="row_multiple=0 must be at least 1"):
    collate(draw, row_multiple=0, length_buckets=BUCKETS)
  with pytest.raises(ValueError, match="a valid row has an empty prompt"):
    collate_supervised([([], [1])], row_multiple=1, length_buckets=BUCKETS)
  with pytest.raises(ValueError, match="a valid row has an empty response"):
    collate_supervised([([1], [])], row_multiple=1, length_buckets=BUCKETS)
  with pytest.raises(ValueError, match="3 examples do not fit num_responses=2"):
    collate_supervised([([1], [1])] * 3, row_multiple=1, length_buckets=BUCKETS, num_responses=2)

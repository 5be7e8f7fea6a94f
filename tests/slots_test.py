"""Which slots a group gets, and how much of a cache a chunk reads."""

from __future__ import annotations

from tba_jax.sampling.shapes import make_shapes
from tba_jax.sampling.slots import Row, SlotTable


def claim(table: SlotTable, group: int, samples: range, *, generation: int = 0, groups_waiting: int = 1):
  return table.claim(group, samples=samples, generation=generation, groups_waiting=groups_waiting)


def test_lanes_of_one_are_taken_in_order_and_as_many_as_wanted():
  table = SlotTable(4, 1)
  assert claim(table, 7, range(2), groups_waiting=9) == ([0, 1], [0, 1])
  table.rows[0] = None
  assert claim(table, 8, range(5, 10), groups_waiting=9) == ([0, 2, 3], [0, 2, 3])
  assert table.rows == [Row(8, 5), Row(7, 1), Row(8, 6), Row(8, 7)] and table.num_running == 4


def test_empty_lanes_are_shared_out_among_the_groups_that_wait():
  table = SlotTable(8, 2)
  assert claim(table, 0, range(6), groups_waiting=2) == ([0, 1, 2, 3], [0, 1])
  assert claim(table, 1, range(6), groups_waiting=1) == ([4, 5, 6, 7], [2, 3])
  assert claim(table, 2, range(6)) == ([], [])


def test_a_groups_next_samples_begin_in_its_own_lanes_without_the_prompt_again():
  table = SlotTable(4, 2)
  claim(table, 0, range(2))
  claim(table, 1, range(2))
  table.rows[1] = None
  assert claim(table, 1, range(2, 3)) == ([], [])  # the lane is of group 0 while a sample of it runs
  assert claim(table, 0, range(2, 5)) == ([1], [])
  table.rows[0] = table.rows[1] = None
  assert claim(table, 1, range(2, 3)) == ([0], [0])


def test_a_prompt_of_older_weights_is_not_used_again_unless_it_was_renewed():
  table = SlotTable(2, 2)
  claim(table, 0, range(1))
  assert claim(table, 0, range(1, 2), generation=1) == ([], [])
  table.renew(1)
  assert table.first_running() == {0: 0}
  assert claim(table, 0, range(1, 2), generation=1) == ([1], [])


def test_the_first_running_slot_of_each_lane():
  table = SlotTable(6, 2)
  claim(table, 0, range(2))
  claim(table, 1, range(2), groups_waiting=2)
  table.rows[0] = None
  assert table.first_running() == {1: 0, 2: 1}
  table.clear()
  assert table.first_running() == {} and table.num_running == 0


def test_a_cache_is_cut_only_where_that_moves_less_memory_than_reading_all_of_it():
  sizes = dict(slots=4, max_prompt_tokens=256, max_new_tokens=256, recompute_kv=False)
  reads = lambda shapes, need: shapes.reads(
    prefix_tokens=need if shapes.lane_samples > 1 else 0, slot_tokens=need)
  copies = make_shapes(lane_samples=1, chunk_tokens=16, kv_buckets=(128, 256, 300, 512), **sizes)
  # 300 entries are cut out, each as dear as 8 readings: 2,400, against 16 tokens that would read 212 more each.
  assert [reads(copies, need) for need in (0, 128, 129, 257, 301)] == [(0, 128), (0, 128), (0, 256), (0, 300), (0, 512)]
  few = make_shapes(lane_samples=1, chunk_tokens=4, kv_buckets=(128, 256, 512), **sizes)
  assert [reads(few, need) for need in (128, 129)] == [(0, 128), (0, 512)]
  lanes = make_shapes(lane_samples=2, chunk_tokens=12, kv_buckets=(64, 128, 256), **sizes)
  assert [reads(lanes, need) for need in (64, 65, 128, 129)] == [(128, 64), (128, 128), (128, 128), (256, 256)]

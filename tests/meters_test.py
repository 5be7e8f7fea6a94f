"""Timeline arithmetic against a dense grid, staleness against numpy, waits against a clock that the test moves."""

import json
import math
import threading

import numpy as np
import pytest

from tba_jax import meters
from tba_jax.meters import StalenessStats, Timeline, WaitMeter, bottleneck, total_secs, union


class _Clock:
  def __init__(self):
    self.now = 1000.0

  def __call__(self):
    return self.now


def _covered(intervals, num_cells):
  """Which unit cells [i, i + 1) the integer intervals cover: the slow way."""
  cells = np.zeros(num_cells, bool)
  for start, end in intervals:
    for cell in range(int(start), int(end)):
      cells[cell] = True
  return cells


@pytest.mark.parametrize("seed", range(30))
def test_union_equals_a_grid(seed):
  rng = np.random.default_rng(seed)
  start = rng.integers(0, 60, int(rng.integers(0, 12)))
  intervals = np.stack([start, np.minimum(60, start + rng.integers(0, 9, len(start)))], axis=1).astype(np.float64)
  joined = union(intervals)
  np.testing.assert_array_equal(_covered(joined, 60), _covered(intervals, 60))
  assert (joined[:, 0] < joined[:, 1]).all() and (joined[1:, 0] > joined[:-1, 1]).all()
  assert total_secs(joined) == _covered(intervals, 60).sum()


@pytest.mark.parametrize("seed", range(6))
def test_busy_overlap_equals_a_grid(seed, monkeypatch):
  """Spans of several actors and kinds, nested and overlapping, entered in order of time on a clock of whole seconds.

  With every second seed most of them are only in the sums when they are asked for.
  """
  monkeypatch.setattr(meters, "_MOST_SPANS", 2000 if seed % 2 else 4)
  rng = np.random.default_rng(seed)
  clock = _Clock()
  timeline = Timeline(None, clock=clock)
  events, spans = [], []
  for number in range(40):
    actor = ("trainer", "searcher0", "searcher1")[number % 3]
    kind = ("step", "decode", "wait")[rng.integers(3)]
    start = int(rng.integers(0, 190))
    end = start + int(rng.integers(1, 10))
    spans.append((actor, kind, start, end))
    events += [(start, 1, number), (end, 0, number)]
  opened = {}
  for time, begins, number in sorted(events):
    clock.now = 1000.0 + time
    if begins:
      opened[number] = timeline.span(*spans[number][:2])
      opened[number].__enter__()
    else:
      opened.pop(number).__exit__(None, None, None)

  def grid(actors, kinds):
    return _covered([(s, e) for actor, kind, s, e in spans if actor in actors and kind in kinds], 200)

  for kind in ("step", "wait"):
    own = grid({"trainer"}, {kind})
    for other_kind in ("decode", "step"):
      others = grid({"searcher0", "searcher1"}, {other_kind})
      found = timeline.busy_overlap("trainer", kind, other_kind=other_kind)
      assert found == pytest.approx((own & others).sum() / own.sum(), abs=1e-12)
      assert 0 <= found < 1
    assert timeline.busy_secs("trainer", kind) == own.sum()


def test_open_spans_count_up_to_now_and_failed_ones_up_to_their_end():
  clock = _Clock()
  timeline = Timeline(None, clock=clock)
  assert math.isnan(timeline.busy_overlap("trainer", "step", other_kind="decode"))
  with timeline.span("s", "decode"):
    clock.now += 1
    with pytest.raises(RuntimeError), timeline.span("trainer", "step"):
      clock.now += 2
      raise RuntimeError
    clock.now += 4
    assert timeline.busy_secs("s", "decode") == 7
    assert timeline.busy_overlap("trainer", "step", other_kind="decode") == 1.0
    assert timeline.busy_overlap("s", "decode", other_kind="step") == pytest.approx(2 / 7)


def test_memory_does_not_grow_with_the_run_and_nothing_is_lost_by_that(monkeypatch):
  monkeypatch.setattr(meters, "_MOST_SPANS", 50)
  clock = _Clock()
  timeline = Timeline(None, clock=clock)
  for number in range(1000):
    with timeline.span("trainer", "step"):
      clock.now += 1
      with timeline.span(f"searcher{number % 3}", "decode"):
        clock.now += 1
  assert len(timeline._spans) <= 50
  assert timeline.busy_secs("trainer", "step") == 2000
  assert timeline.busy_overlap("trainer", "step", other_kind="decode") == 0.5
  assert timeline.shares(["searcher0", "searcher1", "searcher2"]) == pytest.approx({"decode": 1 / 6})


def test_a_span_measured_elsewhere_counts_where_it_was():
  clock = _Clock()
  timeline = Timeline(None, clock=clock)
  with timeline.span("trainer", "step"):
    clock.now += 4
  timeline.add("searcher5", "decode", 1001.0, 1003.0)
  assert timeline.busy_secs("searcher5", "decode") == 2
  assert timeline.busy_overlap("trainer", "step", other_kind="decode") == 0.5


def test_timeline_file_continues_after_a_torn_line(tmp_path):
  for run in range(2):
    clock = _Clock()
    timeline = Timeline(tmp_path, clock=clock)
    with timeline.span("trainer", "step", step=run):
      clock.now += 1.5
    timeline.close()
    with timeline.span("trainer", "step"):  # a thread that ends after the file does not fail
      clock.now += 1
    with open(tmp_path / "timeline.jsonl", "a") as file:
      file.write('{"actor": "tra')
  Timeline(tmp_path).close()
  lines = [json.loads(line) for line in (tmp_path / "timeline.jsonl").read_text().splitlines()]
  assert [(line["actor"], line["kind"], line["step"]) for line in lines] == [("trainer", "step", i) for i in range(2)]
  for line in lines:
    assert line["end_secs"] - line["start_secs"] == pytest.approx(1.5, abs=1e-5) and line["start_secs"] > 1.6e9


def test_timeline_from_many_threads(tmp_path):
  timeline = Timeline(tmp_path)
  def work(number):
    for _ in range(100):
      with timeline.span(f"searcher{number}", "decode"):
        pass
  threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  timeline.close()
  actors = [json.loads(line)["actor"] for line in (tmp_path / "timeline.jsonl").read_text().splitlines()]
  assert sorted(actors) == sorted(f"searcher{number}" for number in range(4) for _ in range(100))


# --- Staleness ---


@pytest.mark.parametrize("seed", range(10))
def test_staleness_equals_numpy_over_all_responses(seed):
  rng = np.random.default_rng(seed)
  stats, every = StalenessStats(), []
  for _ in range(rng.integers(1, 6)):
    batch = rng.geometric(0.3, size=rng.integers(1, 40)) - 1
    stats.add(batch.astype(np.int32))
    every.append(batch)
  every = np.concatenate(every)
  assert stats.summary() == {
    "staleness_mean": pytest.approx(every.mean()), "staleness_max": every.max(),
    "staleness_p95": np.percentile(every, 95, method="inverted_cdf"),
  }


def test_staleness_p95_at_its_border_and_empty():
  stats = StalenessStats()
  assert all(math.isnan(value) for value in stats.summary().values())
  stats.add(np.array([0] * 19 + [9]))  # exactly 95% are 0
  assert stats.summary()["staleness_p95"] == 0
  stats.add(np.array([9]))
  assert stats.summary()["staleness_p95"] == 9


def test_staleness_continues_after_a_resume():
  one, two = StalenessStats(), StalenessStats()
  one.add(np.array([0, 3, 3]))
  two.load_state_dict(json.loads(json.dumps(one.state_dict())))
  for stats in (one, two):
    stats.add(np.array([[1, 7]]))
  assert one.summary() == two.summary() and two.summary()["staleness_mean"] == 14 / 5


# --- Waits ---


def test_waits_add_up_per_side_also_while_open_and_after_errors():
  clock = _Clock()
  meter = WaitMeter(clock=clock)
  assert meter.seconds("trainer") == 0
  with meter.waiting("searcher"), meter.waiting("searcher"):  # two searchers at once
    clock.now += 3
    assert meter.seconds("searcher") == 6 and meter.state_dict() == {"searcher": 6}
    with pytest.raises(RuntimeError), meter.waiting("trainer"):
      clock.now += 1
      raise RuntimeError
  clock.now += 100
  assert (meter.seconds("trainer"), meter.seconds("searcher")) == (1, 8)
  other = WaitMeter(clock=clock)
  other.load_state_dict(json.loads(json.dumps(meter.state_dict())))
  with other.waiting("trainer"):
    clock.now += 2
  assert (other.seconds("trainer"), other.seconds("searcher")) == (3, 8)


@pytest.mark.parametrize("waits, says", [
    ((0.43, 0.02), "searchers: the trainer waits for 43% of the time, searchers for 2%"),
    ((0.01, 0.3), "the trainer: searchers wait for 30% of the time, the trainer for 1%"),
    ((0.01, 0.0), "none: neither waits for the other (trainer 1%, searchers 0% of the time)"),
])
def test_the_bottleneck_is_who_is_waited_for(waits, says):
  assert bottleneck(*waits) == says


def test_shares_are_of_the_time_since_and_average_over_actors():
  clock = _Clock()
  timeline = Timeline(None, clock=clock)
  decoding, waiting, others = timeline.span("a", "decode"), timeline.span("b", "wait"), timeline.span("c", "decode")
  for at, act in ((0, decoding.__enter__), (0, others.__enter__), (2, timeline.begin), (3, waiting.__enter__),
                  (4, lambda: decoding.__exit__(None, None, None)), (9, lambda: waiting.__exit__(None, None, None))):
    clock.now = 1000.0 + at
    act()
  clock.now = 1010.0
  assert timeline.shares(["a", "b"]) == pytest.approx({"decode": 2 / 16, "wait": 6 / 16})
  assert timeline.shares(["a", "b"], but=("wait",)) == pytest.approx({"decode": 2 / 16})
  assert timeline.shares(["c"]) == pytest.approx({"decode": 1.0})


def test_an_actor_given_up_is_busy_no_more():
  clock = _Clock()
  timeline = Timeline(None, clock=clock)
  hanging = timeline.span("searcher1", "decode")
  hanging.__enter__()
  clock.now += 5
  timeline.end_open("searcher1")
  clock.now += 100
  hanging.__exit__(None, None, None)  # it came back after all
  assert timeline.busy_secs("searcher1", "decode") == 5


def test_the_histogram_counts_responses_by_staleness():
  stats = StalenessStats()
  stats.add(np.array([0, 2, 2, 10]))
  stats.add(np.array([2]))
  assert stats.histogram() == {"0": 1, "2": 3, "10": 1}

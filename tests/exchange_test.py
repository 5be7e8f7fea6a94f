"""Flow control between searchers and trainer, by itself: no model, no device."""

from __future__ import annotations

import dataclasses
import threading
import time

import numpy as np
import pytest

from tba_jax.replay.buffer import ReplayBuffer
from tba_jax.replay.flow import PromptLedger
from tba_jax.runtime.exchange import Exchange, NoUsableRollouts, Stalled
from tba_jax.types import RolloutGroup

K = 3


def _exchange(*, order="fifo", **changes):
  max_staleness = changes.get("max_staleness", -1)
  buffer = ReplayBuffer(capacity=1000, capacity_per_prompt=100, max_prompt_tokens=4, max_response_tokens=4, seed=0,
                        recent_fraction=0.5, max_staleness=max_staleness, order=order, dedup=order == "tba")
  settings = dict(groups_per_step=2, responses_per_prompt=K, fill_responses=0, max_staleness=-1, max_lead_steps=-1,
                  hang_secs=60.0, say=lambda text: None)
  return Exchange(ledger=PromptLedger(50, seed=0), buffer=buffer, **(settings | changes))


def _group(occurrence, version=0):
  tokens = np.arange(K * 2, dtype=np.int32).reshape(K, 2) + 10 * occurrence.occurrence
  ones = np.ones((K, 2), np.float32)
  return RolloutGroup(
      prompt_id=occurrence.prompt_id, occurrence=occurrence.occurrence, attempt=occurrence.attempt,
      prompt=np.array([1], np.int32), tokens=tokens, lengths=np.full(K, 2, np.int32), log_mu=-ones, log_ref=-ones,
      versions=np.full((K, 2), version, np.int32), rewards=np.arange(K, dtype=np.float32), truncated=np.zeros(K, bool),
      ref_version=0, temperature=1.0)


def _sample(exchange, num, version=0):
  for _ in range(num):
    occurrence = exchange.try_start(version=version)
    exchange.bring(occurrence, _group(occurrence, version))


def test_the_lead_counts_running_and_unused_groups_and_ends_with_a_draw():
  exchange = _exchange(max_lead_steps=2)  # 2 steps of 2 groups
  started = [exchange.try_start(version=0) for _ in range(5)]
  assert [occurrence is not None for occurrence in started] == [True] * 4 + [False]
  for occurrence in started[:4]:
    exchange.bring(occurrence, _group(occurrence))
  assert exchange.try_start(version=0) is None, "brought groups are unused until a batch takes them"
  assert exchange.try_draw(version=0) is not None
  assert [exchange.try_start(version=0) is not None for _ in range(3)] == [True, True, False]


def test_the_lead_never_stops_the_initial_fill():
  exchange = _exchange(max_lead_steps=0, fill_responses=4 * K)
  _sample(exchange, 4)
  assert exchange.try_start(version=0) is None
  assert exchange.try_draw(version=0) is not None


def test_no_draw_before_the_fill():
  exchange = _exchange(fill_responses=4 * K)
  _sample(exchange, 3)
  assert exchange.try_draw(version=0) is None
  _sample(exchange, 1)
  assert exchange.try_draw(version=0) is not None


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_admission_keeps_every_trained_row_within_the_limit_without_losing_any(max_staleness):
  exchange = _exchange(max_staleness=max_staleness)
  for version in range(12):
    while (occurrence := exchange.try_start(version=version)) is not None:
      exchange.bring(occurrence, _group(occurrence, version))
    draw = exchange.try_draw(version=version)
    assert draw is not None, "nobody waits for ever"
    assert (version - draw.versions).max() <= max_staleness
    exchange.advance(version + 1)
  assert exchange.buffer.stats()["evicted_age_unused"] == 0
  assert (version - draw.versions).max() == max_staleness, "the bound is used, not only kept"


def test_a_batch_drawn_ahead_counts_for_the_version_it_will_be_trained_at():
  exchange = _exchange(max_staleness=1)
  _sample(exchange, 4, version=0)
  assert exchange.try_start(version=0) is None  # would be trained at version 2
  assert exchange.try_draw(version=0) is not None
  assert exchange.try_start(version=0) is None  # version 1 trains the two that are there, version 2 this one
  exchange.advance(1)
  assert exchange.try_start(version=1) is not None


def test_a_searcher_given_up_loses_its_prompts_and_brings_and_starts_nothing_more():
  exchange = _exchange()
  first, kept, second = (exchange.try_start(version=0, owner=owner) for owner in (1, 2, 1))
  assert exchange.disown(1) == [first, second]
  assert exchange.try_start(version=0, owner=1) is None
  assert exchange.bring(first, _group(first)) is False, "late: its attempt is not waited for any more"
  again = exchange.try_start(version=0, owner=3)
  assert (again.occurrence, again.prompt_id, again.attempt) == (first.occurrence, first.prompt_id, first.attempt + 1)
  assert exchange.bring(first, _group(first)) is False, "the old attempt stays late while the new one is under way"
  assert exchange.bring(again, _group(again)) is True and exchange.bring(kept, _group(kept)) is True
  assert exchange.num_late_groups == 2 and exchange.buffer.stats()["added"] == 2 * K
  assert exchange.try_start(version=0, owner=3).occurrence == second.occurrence
  ledger = exchange.ledger.stats()
  assert (ledger["taken"], ledger["finished"], ledger["in_flight"], ledger["requeued"]) == (3, 2, 1, 2)


def test_a_trainer_that_nobody_samples_for_is_told_so_in_time():
  exchange = _exchange(hang_secs=0.3)
  began = time.monotonic()
  with pytest.raises(Stalled, match=r"nothing is being sampled .* \(runtime.hang_secs=0.3\): 0 responses have arrived"):
    exchange.wait_draw(version=0, alive=lambda: None)
  assert 0.3 <= time.monotonic() - began < 5
  exchange.try_start(version=0)  # one under way: whoever samples it is watched by its heartbeat, the wait goes on
  threading.Timer(0.8, exchange.stop).start()
  assert exchange.wait_draw(version=0, alive=lambda: None) is None


def test_a_group_without_usable_rows_is_dropped_not_waited_for():
  exchange = _exchange(max_lead_steps=1)
  for _ in range(2):
    exchange.bring(exchange.try_start(version=0), None)
  assert exchange.try_start(version=0) is not None
  assert exchange.ledger.stats()["dropped"] == 2


def test_waits_end_when_the_run_is_stopped():
  exchange = _exchange(max_lead_steps=0)
  found = []
  waiter = threading.Thread(target=lambda: found.append(exchange.wait_draw(version=0, alive=lambda: None)))
  waiter.start()
  time.sleep(0.05)
  began = time.monotonic()
  exchange.stop()
  waiter.join(timeout=5)
  assert not waiter.is_alive() and found == [None] and time.monotonic() - began < 1
  assert exchange.wait_to_start(version=lambda: 0) is False


def test_the_trainers_wait_ends_when_a_group_arrives_and_raises_what_the_watch_raises():
  exchange = _exchange()
  _sample(exchange, 1)
  late = threading.Timer(0.1, lambda: _sample(exchange, 1))
  late.start()
  assert exchange.wait_draw(version=0, alive=lambda: None).valid.sum() == 2 * K

  def dead():
    raise RuntimeError("searcher 0 died")

  with pytest.raises(RuntimeError, match="searcher 0 died"):
    exchange.wait_draw(version=0, alive=dead)


def test_a_long_wait_says_what_it_waits_for(monkeypatch):
  said = []
  monkeypatch.setattr("tba_jax.runtime.exchange._SAY_SECS", 0.05)
  exchange = _exchange(fill_responses=100, say=said.append)
  _sample(exchange, 2)
  threading.Timer(0.4, exchange.stop).start()
  assert exchange.wait_draw(version=0, alive=lambda: None) is None
  assert "the trainer (thread MainThread) has waited" in said[0]
  assert "6 responses have arrived (first batch at 100), 6 are in the buffer (0 duplicates left out), " in said[0]
  assert "0 duplicates left out), 0 groups are being sampled" in said[0]


def test_one_comparison_per_version():
  exchange = _exchange()
  assert [exchange.claim_check(v) for v in (0, 0, 1, 0)] == [True, False, True, False]
  exchange.unclaim_check(1)
  assert exchange.claim_check(1)


def test_a_skipped_update_does_not_close_admission():
  exchange = _exchange(max_staleness=0)
  _sample(exchange, 2)
  assert exchange.try_draw(version=0) is not None
  exchange.advance(0)  # the update was skipped: the next batch will be trained at version 0 again
  assert exchange.try_draw(version=0) is None
  assert exchange.try_start(version=0) is not None


def test_rows_left_out_do_not_use_up_the_fill():
  exchange = _exchange(max_staleness=0, fill_responses=2 * K)
  exchange.bring(exchange.try_start(version=0), None)
  first = exchange.try_start(version=0)
  exchange.bring(first, dataclasses.replace(_group(first), **{name: getattr(_group(first), name)[:2] for name in (
      "tokens", "lengths", "log_mu", "log_ref", "versions", "rewards", "truncated")}))
  for _ in range(2):
    assert exchange.try_draw(version=0) is None
    _sample(exchange, 1)
  assert exchange.try_draw(version=0) is not None


def test_groups_that_left_unused_do_not_hold_searchers_back_for_ever():
  exchange = _exchange(max_lead_steps=1, max_staleness=0)
  _sample(exchange, 2)
  exchange.advance(1)  # whatever made it so: both groups are too old now
  assert exchange.try_start(version=1) is None
  assert exchange.try_draw(version=1) is None
  _sample(exchange, 2, version=1)
  assert exchange.try_draw(version=1) is not None


@pytest.mark.parametrize("lead", [-1, 2])
def test_a_run_that_can_never_draw_is_given_up_with_the_reason(lead):
  exchange = _exchange(order="tba", max_lead_steps=lead)
  with pytest.raises(NoUsableRollouts,
                     match=r"no batch can be drawn: .* \(\d+ duplicates left out\).*sample.temperature"):
    for _ in range(1000):
      occurrence = exchange.try_start(version=0)
      if occurrence is not None:
        same = np.zeros((K, 2), np.int32)
        exchange.bring(occurrence, dataclasses.replace(_group(occurrence), tokens=same))
      assert exchange.try_draw(version=0) is None
      exchange.check_usable()


@pytest.mark.parametrize("order", ["tba", "fifo"])
def test_a_resumed_exchange_goes_on_as_the_unbroken_one(order):
  exchange = _exchange(order=order)
  _sample(exchange, 5)
  exchange.try_draw(version=0)
  running = exchange.try_start(version=0)
  arrays, state = exchange.state_dict()
  resumed = _exchange(order=order)
  resumed.load_state_dict(arrays, state, version=0)
  assert resumed.try_start(version=0) == running, "what was under way is handed out again, with the same keys"
  for one in (exchange, resumed):
    one.bring(running, _group(running))
    _sample(one, 2)
  for _ in range(2):
    a, b = exchange.try_draw(version=0), resumed.try_draw(version=0)
    np.testing.assert_array_equal(a.tokens, b.tokens)
    np.testing.assert_array_equal(a.occurrences, b.occurrences)

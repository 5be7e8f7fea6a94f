"""The bound on staleness: exact at the boundary, and kept without losing groups to age. A simulated clock, no model, no
device."""

from __future__ import annotations

import heapq

import numpy as np
import pytest

from tba_jax.replay.buffer import ReplayBuffer
from tba_jax.replay.flow import PromptLedger
from tba_jax.runtime.exchange import Exchange
from tba_jax.types import RolloutGroup

MAX_TOKENS = 256


def _buffer(order, max_staleness):
  return ReplayBuffer(capacity=10_000, capacity_per_prompt=100, max_prompt_tokens=1, max_response_tokens=MAX_TOKENS,
                      seed=0, recent_fraction=0.5, max_staleness=max_staleness, order=order, dedup=False)


def _group(number, versions, lengths, *, newer_tokens=0):
  """Versions [S]: of each response's first token; those of later ones rise by `newer_tokens` each."""
  shape = (len(lengths), int(lengths.max()))
  zeros = np.zeros(shape, np.float32)
  per_token = np.asarray(versions, np.int32)[:, None] + newer_tokens * np.arange(shape[1], dtype=np.int32)
  return RolloutGroup(
      prompt_id=number, occurrence=number, attempt=0, prompt=np.array([1], np.int32), tokens=np.zeros(shape, np.int32),
      lengths=lengths, log_mu=zeros, log_ref=zeros, versions=per_token, rewards=np.zeros(len(lengths), np.float32),
      truncated=np.zeros(len(lengths), bool), ref_version=0, temperature=1.0)


@pytest.mark.parametrize("order", ["tba", "fifo"])
def test_a_row_is_kept_at_the_limit_and_dropped_one_beyond_by_its_oldest_token(order):
  lengths = np.array([3, 3], np.int32)
  for version, drawn in ((7, True), (8, False)):
    buffer = _buffer(order, max_staleness=2)
    buffer.add(_group(0, [5, 5], lengths, newer_tokens=1))  # tokens of versions 5, 6, 7
    asked = dict(num_prompts=1, responses_per_prompt=2, version=version)
    assert buffer.can_draw(**asked) is drawn
    if drawn:
      assert (version - buffer.draw(**asked).versions).tolist() == [2, 2]
    else:
      assert buffer.stats()["evicted_age_unused"] == 2
      assert buffer.age_losses() == {"4": {"added": 2, "lost": 2}}
      assert buffer.stats()["evicted_age_unused_tokens"] == 6


def test_a_batch_drawn_ahead_is_checked_at_the_version_it_will_be_trained_at():
  buffer = _buffer("fifo", max_staleness=2)
  exchange = Exchange(ledger=PromptLedger(50, seed=0), buffer=buffer, groups_per_step=1, responses_per_prompt=2,
                      fill_responses=0, max_staleness=2, max_lead_steps=-1, hang_secs=60.0, say=print)
  for _ in range(2):
    occurrence = exchange.try_start(version=0)
    exchange.bring(occurrence, _group(occurrence.occurrence, [0, 0], np.array([1, 1], np.int32)))
  exchange.advance(2)
  assert exchange.try_draw(version=2) is not None  # trained at 2, may be 2 old
  assert exchange.try_draw(version=3) is None  # while that step runs: this one would be trained at 3


def _simulate(*, max_staleness, groups_per_step, running, step_secs, sync_every=1, seed=0, steps=250):
  """Searchers that sample `running` groups at once, responses of log-normal lengths, a trainer that draws whenever it
  can."""
  rng = np.random.default_rng(seed)
  buffer = _buffer("fifo", max_staleness)
  exchange = Exchange(ledger=PromptLedger(100_000, seed=0), buffer=buffer, groups_per_step=groups_per_step,
                      responses_per_prompt=4, fill_responses=0, max_staleness=max_staleness, max_lead_steps=-1,
                      hang_secs=60.0, say=print)
  now = waited = 0.0
  version = published = 0
  under_way, trained_at = [], None
  generated, trained, staleness = [], [], []
  while version < steps:
    while len(under_way) < running and (occurrence := exchange.try_start(version=published)) is not None:
      lengths = np.clip(np.exp(rng.normal(4, 0.8, 4)), 1, MAX_TOKENS).astype(np.int32)
      heapq.heappush(under_way, (now + 0.01 * lengths.max(), occurrence.occurrence, occurrence, published, lengths))
    if trained_at is None and (draw := exchange.try_draw(version=version)) is not None:
      trained_at = now + step_secs
      trained += draw.lengths[draw.valid].tolist()
      staleness += (version - draw.versions[draw.valid]).tolist()
    events = ([trained_at] if trained_at is not None else []) + ([under_way[0][0]] if under_way else [])
    assert events, "nobody can go on: a deadlock"
    waited += (min(events) - now) * (trained_at is None)
    now = min(events)
    if trained_at == now:
      version, trained_at = version + 1, None
      exchange.advance(version)
      if version % sync_every == 0:
        published = version
        exchange.mark_publish(published, step=version)
    while under_way and under_way[0][0] <= now:
      _, _, occurrence, began, lengths = heapq.heappop(under_way)
      exchange.bring(occurrence, _group(occurrence.occurrence, [began] * 4, lengths))
      generated += lengths.tolist()
  return {
      "lost_tokens": buffer.stats()["evicted_age_unused_tokens"], "generated": np.array(generated),
      "trained": np.array(trained), "max_staleness": max(staleness), "waited": waited / now
  }


@pytest.mark.parametrize("case", [
    dict(max_staleness=1, groups_per_step=4, running=8, step_secs=1.0),
    dict(max_staleness=2, groups_per_step=4, running=8, step_secs=1.0),
    dict(max_staleness=4, groups_per_step=4, running=16, step_secs=0.3),
    dict(max_staleness=8, groups_per_step=4, running=32, step_secs=0.5),
    dict(max_staleness=4, groups_per_step=4, running=16, step_secs=0.5, sync_every=2),
], ids=str)
def test_with_admission_and_oldest_first_use_nothing_is_lost_to_age_and_long_responses_are_trained_as_often(case):
  """Drawing whatever is there, instead of waiting for the long ones whose turn it is, loses 8 to 20% of the rows here,
  the long ones."""
  found = _simulate(**case)
  assert found["lost_tokens"] < 0.02 * found["generated"].sum(), found
  assert found["max_staleness"] <= case["max_staleness"]
  ratio = found["trained"].mean() / found["generated"].mean()
  assert abs(ratio - 1) < 0.02, ratio
  for low, high in ((1, 32), (32, 64), (64, 128), (128, MAX_TOKENS + 1)):
    share = lambda lengths: ((lengths >= low) & (lengths < high)).mean()
    assert abs(share(found["trained"]) - share(found["generated"])) < 0.02, (low, high)

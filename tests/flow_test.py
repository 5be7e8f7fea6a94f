"""The ledger's order and what a resume does to it; the admission rule in a simulation of searchers and a trainer."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest
from rollouts import make_group

from tba_jax.replay.buffer import ReplayBuffer
from tba_jax.replay.flow import PromptLedger, check_flow, may_start_group
from tba_jax.types import Occurrence


def test_every_prompt_has_one_occurrence_per_epoch_in_an_order_of_its_own():
  ledger = PromptLedger(7, seed=3)
  taken = [ledger.take() for _ in range(35)]
  assert [o.occurrence for o in taken] == list(range(35)) and {o.attempt for o in taken} == {0}
  epochs = np.array([o.prompt_id for o in taken]).reshape(5, 7)
  assert (np.sort(epochs, axis=1) == np.arange(7)).all()
  assert len({tuple(epoch) for epoch in epochs.tolist()}) > 1
  again = [PromptLedger(7, seed=3) for _ in range(2)]
  assert [o.prompt_id for o in taken[:20]] == [(again[0]).take().prompt_id for _ in range(20)]  # the seed alone decides
  assert [o.prompt_id for o in taken[:7]] != [(PromptLedger(7, seed=4)).take().prompt_id for _ in range(7)]


def test_what_comes_back_is_handed_out_first_with_the_next_attempt():
  ledger = PromptLedger(5, seed=0)
  taken = [ledger.take() for _ in range(4)]
  ledger.finish(taken[0])
  ledger.requeue(taken[3])
  ledger.requeue(taken[1])
  assert ledger.in_flight() == (taken[2],)
  assert ledger.take() == Occurrence(1, taken[1].prompt_id, 1) and ledger.take() == Occurrence(3, taken[3].prompt_id, 1)
  assert ledger.take().occurrence == 4
  ledger.drop(taken[2])
  assert ledger.stats() == {
    "taken": 5,
    "in_flight": 3,
    "pending": 0,
    "finished": 1,
    "dropped": 1,
    "requeued": 2,
    "epoch": 1,
  }
  for occurrence in (taken[0], taken[1], Occurrence(77, 0)):  # ended, of an older attempt, never handed out
    for end in (ledger.finish, ledger.requeue, ledger.drop):
      with pytest.raises(ValueError, match=r"is not in flight; an occurrence ends once, by finish, requeue or drop"):
        end(occurrence)


def test_resume_repeats_what_was_in_flight_with_the_same_attempt():
  ledger = PromptLedger(6, seed=1)
  taken = [ledger.take() for _ in range(5)]
  ledger.requeue(taken[4])
  retried = ledger.take()
  assert retried.attempt == 1
  ledger.finish(taken[1])
  ledger.requeue(taken[2])
  saved = json.loads(json.dumps(ledger.state_dict()))
  resumed = PromptLedger(6, seed=1)
  resumed.take()
  resumed.load_state_dict(saved)
  assert resumed.in_flight() == ()
  assert [resumed.take() for _ in range(4)] == [taken[0], Occurrence(2, taken[2].prompt_id, 1), taken[3], retried]
  assert ledger.take() == Occurrence(2, taken[2].prompt_id, 1) and ledger.take() == resumed.take()
  for changed, text in (
    (PromptLedger(5, seed=1), "num_prompts=6, here it is 5"),
    (PromptLedger(6, seed=2), "seed=1, here it is 2"),
  ):
    with pytest.raises(ValueError, match=f"the saved ledger has {text}; resume with the data and seed of the run"):
      changed.load_state_dict(saved)


@pytest.mark.parametrize("seed", range(5))
def test_every_id_is_used_exactly_once_per_epoch_whatever_breaks(seed):
  """Searchers fail, the run stops and resumes from its last checkpoint at random points: what was finished counts once,
  none is lost.
  """
  rng = np.random.default_rng(seed)
  ledger, used, in_flight, saved = PromptLedger(8, seed=seed), [], [], None
  while len(used) < 40:
    action = rng.random()
    if action < 0.5 and ledger.stats()["taken"] < 48:
      in_flight.append(ledger.take())
    elif in_flight and action < 0.8:
      occurrence = in_flight.pop(int(rng.integers(len(in_flight))))
      ledger.finish(occurrence)
      used.append(occurrence)
    elif in_flight and action < 0.9:
      ledger.requeue(in_flight.pop(int(rng.integers(len(in_flight)))))
    elif action < 0.95:
      saved = json.dumps(ledger.state_dict()), list(used)
    elif saved is not None:
      ledger, in_flight, used = PromptLedger(8, seed=seed), [], list(saved[1])
      ledger.load_state_dict(json.loads(saved[0]))
    elif not in_flight and ledger.stats()["taken"] == 48:
      break
  while ledger.stats()["taken"] < 48 or ledger.in_flight() or ledger.stats()["pending"]:
    if ledger.stats()["taken"] < 48 or ledger.stats()["pending"]:
      ledger.take()
    for occurrence in ledger.in_flight():
      ledger.finish(occurrence)
      used.append(occurrence)
  assert sorted(o.occurrence for o in used) == list(range(48))
  by_epoch = [[o.prompt_id for o in used if o.occurrence // 8 == epoch] for epoch in range(6)]
  assert all(sorted(ids) == list(range(8)) for ids in by_epoch)


def test_threads_share_one_order():
  ledger, taken = PromptLedger(10, seed=0), []

  def work():
    for _ in range(500):
      occurrence = ledger.take()
      ledger.finish(occurrence)
      taken.append(occurrence.occurrence)

  threads = [threading.Thread(target=work) for _ in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(30)
  assert sorted(taken) == list(range(2000)) and ledger.in_flight() == ()


def simulate(
  rng, *, k, groups_per_step, max_staleness, num_searchers, slots, num_steps, prefetch, in_order, max_secs=20_000
):
  """Searchers and a trainer on a clock of one tick; the buffer is the real one. Returns (staleness of each trained
  group, dropped rows, steps done). Without a step done in all the time the run is stuck.
  """
  unchecked = ReplayBuffer(
    capacity=10_000,
    capacity_per_prompt=4,
    max_prompt_tokens=4,
    max_response_tokens=4,
    seed=0,
    recent_fraction=0.0,
    order="fifo",
    dedup=False,
    max_staleness=max_staleness,
  )
  ledger = PromptLedger(50, seed=0)
  applied, published, held = 0, 0, [0] * num_searchers
  running = []  # (finish time, occurrence, version, searcher), in order of start
  drawn, train_until, staleness = [], 0, []
  for now in range(max_secs):
    if drawn and now >= train_until:  # the step ends: one update, and every k of them a publish
      staleness += [applied - version for version in drawn.pop(0)]
      applied += 1
      train_until = now + int(rng.integers(1, 4))
      if applied % k == 0:
        published = applied
      if applied >= num_steps:
        break
    while running and (running[0][0] <= now if in_order else any(r[0] <= now for r in running)):
      place = 0 if in_order else next(i for i, r in enumerate(running) if r[0] <= now)
      _, occurrence, version, _ = running.pop(place)
      unchecked.add(
        make_group(rng, prompt_id=0, num_samples=2, width=2, occurrence=occurrence.occurrence, version=version)
      )
      ledger.finish(occurrence)
    trained_at = applied + len(drawn)
    if len(drawn) <= prefetch and unchecked.can_draw(
      num_prompts=groups_per_step, responses_per_prompt=2, version=trained_at
    ):
      if not drawn:
        train_until = now + int(rng.integers(1, 4))
      drawn.append(
        unchecked.draw(num_prompts=groups_per_step, responses_per_prompt=2, version=trained_at).versions[::2].tolist()
      )
    for searcher in rng.permutation(num_searchers).tolist():
      if rng.random() < 0.3:  # weights arrive with a delay
        held[searcher] = published
      while sum(r[3] == searcher for r in running) < slots and may_start_group(
        trainer_version=applied + len(drawn),
        searcher_version=held[searcher],
        unused_groups=unchecked.stats()["drawable_groups"],
        running_groups=len(running),
        groups_per_step=groups_per_step,
        max_staleness=max_staleness,
      ):
        running.append((now + int(rng.integers(1, 9)), ledger.take(), held[searcher], searcher))
  return staleness, unchecked.stats()["evicted_age"], applied


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(("k", "max_staleness"), [(1, 0), (1, 3), (2, 1), (2, 4), (5, 4), (5, 7)])
def test_admission_keeps_every_trained_group_fresh_and_nothing_stops(k, max_staleness, prefetch):
  for seed in range(3):
    rng = np.random.default_rng(seed)
    check_flow(max_staleness, k)
    staleness, num_dropped, num_steps = simulate(
      rng,
      k=k,
      groups_per_step=int(rng.integers(1, 5)),
      max_staleness=max_staleness,
      num_searchers=int(rng.integers(1, 4)),
      slots=int(rng.integers(1, 5)),
      num_steps=60,
      prefetch=prefetch,
      in_order=True,
    )
    assert num_steps == 60
    assert num_dropped == 0  # groups used in the order of their start: admission alone suffices
    assert max(staleness) <= max_staleness


def test_groups_that_finish_out_of_order_are_caught_when_they_are_drawn():
  rng = np.random.default_rng(0)
  staleness, num_dropped, num_steps = simulate(
    rng, k=2, groups_per_step=2, max_staleness=2, num_searchers=3, slots=4, num_steps=150, prefetch=1, in_order=False
  )
  assert num_steps == 150 and num_dropped > 0 and max(staleness) <= 2


@pytest.mark.parametrize("k", [2, 3, 5])
def test_a_limit_below_the_publish_interval_stops_the_run_and_is_refused(k):
  staleness, _, num_steps = simulate(
    np.random.default_rng(0),
    k=k,
    groups_per_step=2,
    max_staleness=k - 2,
    num_searchers=2,
    slots=2,
    num_steps=60,
    prefetch=0,
    in_order=True,
    max_secs=3000,
  )
  assert num_steps == k - 1  # stuck just before its first publish
  with pytest.raises(
    ValueError, match=rf"max_staleness={k - 2} is less than sync_every_steps - 1 = {k - 1}: the trainer would run out"
  ):
    check_flow(k - 2, k)
  check_flow(-1, k)


def test_rule_at_its_boundary():
  rule = dict(trainer_version=7, searcher_version=4, groups_per_step=3, max_staleness=4)
  assert may_start_group(unused_groups=2, running_groups=3, **rule)  # 7 + 1 - 4 = 4
  assert not may_start_group(unused_groups=2, running_groups=4, **rule)  # 7 + 2 - 4 = 5
  assert may_start_group(unused_groups=10**6, running_groups=4, **(rule | {"max_staleness": -1}))
  with pytest.raises(
    ValueError, match=r"searcher_version=8 is ahead of trainer_version=7; after a resume give the searchers"
  ):
    may_start_group(unused_groups=0, running_groups=0, **(rule | {"searcher_version": 8}))


def test_refuses_numbers_that_mean_nothing():
  with pytest.raises(ValueError, match=r"num_prompts=0 must be at least 1; give the task some prompts"):
    PromptLedger(0, seed=0)
  with pytest.raises(ValueError, match=r"sync_every_steps=0 must be at least 1"):
    check_flow(3, 0)

"""Heartbeats on a clock that the test moves, calls that never return, and the watchdog's last word."""

from __future__ import annotations

import threading
import time

import pytest

from tba_jax.deadlines import AwakeClock, Caller, Heartbeat, Hung, Watchdog


def test_a_heartbeat_is_silent_since_its_last_beat_on_its_own_clock():
  now = [100.0]
  heartbeat = Heartbeat("searcher0", clock=lambda: now[0])
  now[0] = 103.0
  assert (heartbeat.doing, heartbeat.silent_secs) == ("start", 3.0)
  heartbeat.beat("decode")
  now[0] = 104.5
  assert (heartbeat.doing, heartbeat.silent_secs) == ("decode", 1.5)


def test_a_process_that_was_suspended_was_not_silent():
  now = [0.0]
  clock = AwakeClock(clock=lambda: now[0], ticks=False)
  for at, expected in ((0.25, 0.25), (0.5, 0.5), (3600.5, 1.5), (3601.0, 2.0)):
    now[0] = at
    assert clock() == expected


def test_a_call_gives_what_the_function_gives_in_one_thread_of_its_own():
  caller, names = Caller("grader7"), []
  for value in range(3):
    assert caller.call(lambda: names.append(threading.current_thread().name) or value, secs=5.0, what="it") == value
  assert names == ["grader7"] * 3
  with pytest.raises(KeyError, match="lost"):
    caller.call(lambda: {}["lost"], secs=5.0, what="it")
  caller.close()
  deadline = time.monotonic() + 5
  while any(t.name == "grader7" for t in threading.enumerate()) and time.monotonic() < deadline:
    time.sleep(0.01)
  assert not any(t.name == "grader7" for t in threading.enumerate())


def test_a_call_that_hangs_costs_its_deadline_and_the_next_one_works():
  caller, release, late = Caller("grader8"), threading.Event(), []
  began = time.monotonic()
  with pytest.raises(
      Hung, match=r"the reward of prompt 3 has not returned for 0.2 s in thread grader8, .*runtime.hang_secs=0.2"):
    caller.call(lambda: (release.wait(30), late.append("late"))[1], secs=0.2, what="the reward of prompt 3")
  assert 0.2 <= time.monotonic() - began < 5
  assert caller.call(lambda: "next", secs=5.0, what="it") == "next"
  release.set()
  caller.close()
  deadline = time.monotonic() + 5
  while any(t.name == "grader8" for t in threading.enumerate()) and time.monotonic() < deadline:
    time.sleep(0.01)
  assert late == ["late"] and not any(t.name == "grader8"
                                      for t in threading.enumerate()), "a thread left behind ends by itself"


def test_the_watchdog_ends_a_process_whose_main_thread_hangs_and_says_where(capfd):
  main, other = Heartbeat("the main thread"), Heartbeat("searcher0")
  said, ended = [], threading.Event()
  main.beat("step")
  with Watchdog(lambda: [main, other], secs=0.4, say=said.append, end=lambda code: (said.append(code), ended.set())):
    for _ in range(8):  # one of them beats: nothing happens
      other.beat("decode")
      time.sleep(0.1)
    assert not said
    assert ended.wait(10)
  assert "error: searcher0 has been in 'decode' for" in said[0] and "runtime.hang_secs=0.4" in said[0] and said[1] == 1
  assert "test_the_watchdog_ends" in capfd.readouterr().err, "the stack of the hanging thread"


def test_the_watchdog_is_silent_while_work_goes_on():
  main, said = Heartbeat("the main thread"), []
  with Watchdog(lambda: [main], secs=0.5, say=said.append, end=said.append):
    for _ in range(10):
      main.beat("step")
      time.sleep(0.1)
  time.sleep(0.7)
  assert not said

"""The grader of boxed answers: verdicts, and that nothing a model can write hangs it, kills it or leaves processes
behind."""

from __future__ import annotations

import json
import math
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time

import pytest

from tba_jax.rewards.boxed_answer import boxed_answer, grade_boxed
from tba_jax.rewards.math_pool import MathPool, Verdict

REPO = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def pool():
  pool = MathPool(num_workers=2, deadline_secs=5.0)
  yield pool
  pool.close()


def _alive(pid: int) -> bool:
  """Whether a process exists; a zombie does."""
  return pathlib.Path(f"/proc/{pid}").exists()


def _pids(pool: MathPool) -> list[int]:
  return [worker.process.pid for worker in pool._workers]


# --- What counts as the answer ---


@pytest.mark.parametrize("text, answer", [
  (r"so it is $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
  (r"first \boxed{3}, and after a while we find \boxed{4}", "4"),
  (r"\boxed{6} or \boxed{7}", "6, 7"),
  (r"$\boxed{6}$ and $\boxed{7}$", "6, 7"),
  (r"\fbox{12}", "12"),
  (r"\boxed {12}", "12"),
  (r"\boxed 12", "12"),
  (r"\boxed{x \in \{1, 2\}}", r"x \in \{1, 2\}"),
  (r"\boxed{ \left\{ 5 \right. }", r"\left\{ 5 \right."),
  (r"\boxed{\boxed{5}}", r"\boxed{5}"),
  (r"<think>\boxed{3}</think> \boxed{4}", "4"),
  (r"<think>\boxed{3}</think> 4", None),
  (r"\boxed{5", None),
  (r"\boxed{4} then \boxed{5", "4"),
  ("5", None),
  ("", None),
  ("\\boxed{\x005}", "5"),
  (r"\boxed{" + "7" * 100_000 + "}", None),
])  # fmt: skip
def test_last_box(text, answer):
  assert boxed_answer(text) == answer


@pytest.mark.parametrize("gold, answer, wanted", [
  ("5", "5", 1), ("5", "5.0", 1), ("5", "x=5", 1), ("5", "6", 0), ("5", "-5", 0), ("5", r"5\text{ dollars}", 1),
  ("5", r"\boxed{5}", 1), (r"\frac{2}{3}", "2/3", 1), (r"\frac23", r"\frac{2}{3}", 1),
  (r"\frac{2}{3}", r"\frac{3}{2}", 0), (r"\frac{2}{3}", "0.6667", 0), ("1,000", "1000", 1),
  (r"11\sqrt2", r"11\sqrt{2}", 1), ("90^\\circ", "90", 1), ("x^2+2x+1", "(x+1)^2", 1), ("x^2+2x+1", "x^2+2x+2", 0),
  ("6,7", "7, 6", 1), ("7", "6, 7", 0), ("7", r"6 \text{ or } 7", 0), ("(1,2)", "(2,1)", 0),
  (r"(1,\frac{9}{2})", "(1,4.5)", 1), (r"\text{Evelyn}", "Evelyn", 1), (r"\text{Evelyn}", r"\text{Carla}", 0),
  (r"\text{(A)}", "A", 1), (r"\text{(A)}", "B", 0), (r"10\%", "0.1", 1), ("2", "two", 0), ("5", " ", 0),
  ("2", r"\frac{1}{0}", 0),
])  # fmt: skip
def test_verdicts(pool, gold, answer, wanted):
  assert grade_boxed([f"I get \\boxed{{{answer}}}."], gold, pool) == [wanted]


def test_a_response_without_a_box_is_wrong_and_never_asked_about(pool):
  before = pool.counts.graded
  assert grade_boxed(["5", "", r"\boxed{", r"\boxed{" + "7" * 100_000 + "}", "\x00"], "5", pool) == [0, 0, 0, 0, 0]
  assert pool.counts.graded == before


# --- Real answers ---


def test_math_500_answers_are_right_for_themselves_and_wrong_for_others(pool, shared_data):
  rows = [json.loads(line) for line in (shared_data / "math500" / "test.jsonl").read_text(encoding="utf8").splitlines()]
  golds = [row["answer"] for row in rows]
  assert len(golds) == 500
  assert pool.grade([(gold, gold) for gold in golds]) == [Verdict(True)] * 500
  boxes = [boxed_answer(row["solution"]) for row in rows]
  assert pool.grade(list(zip(golds, boxes))) == [Verdict(True)] * 500
  shuffled = random.Random(0).sample(golds, len(golds))
  pairs = [(gold, other) for gold, other in zip(golds, shuffled) if gold != other]
  assert sum(verdict.right for verdict in pool.grade(pairs)) == 0
  changed = pool.grade([(gold, f"{gold} + 1") for gold in golds if "text" not in gold])
  assert len(changed) > 400 and sum(verdict.right for verdict in changed) == 0


# --- What a model may write ---


HARD = (
  "9**9**9**9", "9^{9^{9^9}}", "(10^9)!", r"\prod_{k=1}^{10^9} \sin k", r"\frac{1}{0}", "(" * 200 + ")" * 200,
  r"\frac{" * 40, r"\sqrt{" * 80 + "2" + "}" * 80, "x" * 400, "7" * 400, "\x00", "2\x00", "\ud800", "{" * 100,
  r"\int_0^1 e^{e^{e^x}} dx", "", "\n", "$", r"\\", "2; import os", r"\input{/etc/passwd}",
)  # fmt: skip


def test_nothing_hangs_or_crashes_and_an_error_is_not_a_wrong_answer():
  pool = MathPool(num_workers=2, deadline_secs=1.0)
  try:
    assert pool.grade([("2", "1+1")]) == [Verdict(True)]
    first = _pids(pool)
    began = time.monotonic()
    verdicts = pool.grade([("2", answer) for answer in HARD])
    assert time.monotonic() - began < 60  # of seconds that are mostly restarts of killed workers
    assert not any(verdict.right for verdict in verdicts)
    by_answer = dict(zip(HARD, verdicts))
    assert by_answer["9^{9^{9^9}}"].error == "timeout" and by_answer[r"\frac{1}{0}"] == Verdict(False)
    counts = pool.counts
    assert counts.errors == sum(bool(verdict.error) for verdict in verdicts) >= 1 and counts.timeouts >= 1
    assert counts.graded == 1 + len(HARD) and counts.right == 1
    assert math.isnan(grade_boxed([r"\boxed{9^{9^{9^9}}}"], "2", pool)[0])
    assert pool.grade([("2", "1+1")] * 4) == [Verdict(True)] * 4  # the pool is whole again
    assert set(_pids(pool)) != set(first) and len(_pids(pool)) == 2
    assert not any(_alive(pid) for pid in set(first) - set(_pids(pool)))
  finally:
    pids = _pids(pool)
    pool.close()
    pool.close()
  assert not any(_alive(pid) for pid in pids)
  with pytest.raises(RuntimeError):
    pool.grade([("2", "1+1")])


def test_a_worker_that_dies_is_replaced(pool):
  expected = [Verdict(True)] * 4
  for pid in _pids(pool):
    os.kill(pid, signal.SIGKILL)
  verdicts = pool.grade([("2", "1+1")] * 4)  # one may have been asked before its death was seen
  assert [v if v.error != "crash" else Verdict(True) for v in verdicts] == expected
  assert pool.grade([("2", "1+1")] * 4) == expected


STAND_IN = """
import os
LatexExtractionConfig = dict
def parse(text, **options):
  if "allocate" in text:
    bytearray(1 << 40)
  if "leave" in text:
    os._exit(3)
  if "raise" in text:
    raise TypeError("of sympy's own")
  print("garbage on stdout")
  return text.removeprefix("\\\\boxed{").strip("${}")
def verify(gold, found, **options):
  return gold == found
"""


def test_memory_exits_exceptions_and_output_of_the_grader(tmp_path, monkeypatch):
  (tmp_path / "math_verify.py").write_text(STAND_IN)
  monkeypatch.setenv("PYTHONPATH", str(tmp_path))
  pool = MathPool(num_workers=1)
  try:
    verdicts = pool.grade([("2", answer) for answer in ("2", "3", "allocate", "2", "leave", "2", "raise", "2")])
    right, wrong = Verdict(True), Verdict(False)
    errors = [Verdict(False, error) for error in ("memory", "crash", "TypeError: of sympy's own")]
    assert verdicts == [right, wrong, errors[0], right, errors[1], right, errors[2], right]
    assert (pool.counts.errors, pool.counts.crashes, pool.counts.timeouts) == (3, 1, 0)
  finally:
    pool.close()


def test_other_threads_get_the_same_verdicts_at_the_same_time(pool):
  pairs = [(str(n), f"{n - 1}+{1 + n % 2}") for n in range(40)]
  here, there = pool.grade(pairs), [None] * 3

  def ask(i):
    there[i] = pool.grade(pairs)

  threads = [threading.Thread(target=ask, args=(i,)) for i in range(3)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert [verdict.right for verdict in here] == [n % 2 == 0 for n in range(40)]
  assert there == [here] * 3


# --- The processes ---


PROGRAM = """
import os, sys, threading, time
from tba_jax.rewards.math_pool import MathPool
pool = MathPool(num_workers=2, deadline_secs=4.0)
assert pool.grade([("2", "1+1")] * 4)[0].right
print(*[worker.process.pid for worker in pool._workers], flush=True)
threading.Thread(target=lambda: pool.grade([("2", "9^{9^{9^9}}")]), daemon=True).start()
time.sleep(0.3)
if sys.argv[1] == "hang":
  time.sleep(600)
"""


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_no_process_outlives_its_parent(how):
  """Also if the parent is killed by a signal that it cannot catch while an answer is being graded."""
  program = subprocess.Popen(
    [sys.executable, "-c", PROGRAM, "exit" if how == "exit" else "hang"], cwd=REPO, stdout=subprocess.PIPE, text=True
  )
  pids = [int(pid) for pid in program.stdout.readline().split()]
  assert len(pids) == 2 and all(_alive(pid) for pid in pids)
  if how == "kill":
    program.kill()
  program.wait(timeout=30)
  deadline = time.monotonic() + 20  # the last resort of a worker is 2 s after its deadline
  while any(map(_alive, pids)) and time.monotonic() < deadline:
    time.sleep(0.1)
  assert not any(map(_alive, pids))


def test_workers_have_no_jax_and_see_no_accelerator(pool):
  pool.grade([("2", "1+1")])
  for pid in _pids(pool):
    environment = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    assert b"CUDA_VISIBLE_DEVICES=" in environment and b"JAX_PLATFORMS=cpu" in environment
    assert "jaxlib" not in pathlib.Path(f"/proc/{pid}/maps").read_text()


def test_a_grader_that_cannot_start_says_why():
  pool = MathPool(num_workers=1, memory_bytes=1 << 20)
  try:
    for _ in range(2):
      with pytest.raises(RuntimeError, match="answers cannot be graded: .*; math-verify is one of the packages of"):
        pool.grade([("2", "1+1")])
  finally:
    pool.close()


def test_a_pool_needs_a_worker():
  with pytest.raises(ValueError, match="num_workers=0 must be at least 1"):
    MathPool(num_workers=0)

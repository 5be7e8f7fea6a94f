"""Drives the systems of a benchmark in turn (ours, rival, ours, rival, ...) and makes rows of what they took.

On a shared machine a time means little and a ratio of interleaved medians means much: what slows one system down for a
while slows the others down too. Every system has its own process and environment, and all share one core.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import datetime
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any, IO

REPO = pathlib.Path(__file__).resolve().parent.parent.parent


class WorkerError(RuntimeError):
  """A system raised; the text is its traceback."""


class Worker:
  """A system in its own process; `call` waits for its answer."""

  def __init__(self, name: str, module: str, *, python: str, core: int, log: IO[str]):
    self.name = name
    self._log = log
    command = [python, "-m", "experiments.rivals.worker", "--module", module, "--core", str(core)]
    self._process = subprocess.Popen(
      command, cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, bufsize=1
    )

  def call(self, method: str, **args: Any) -> Any:
    """The method's result. Raises: WorkerError with the traceback if it raised or the process died."""
    try:
      self._process.stdin.write(json.dumps({"method": method, "args": args}) + "\n")
      line = self._process.stdout.readline()
    except BrokenPipeError:
      line = ""
    if not line:
      self._log.seek(0)
      raise WorkerError(f"{self.name} died with code {self._process.wait()}:\n{self._log.read()[-2000:]}")
    answer = json.loads(line)
    if "error" in answer:
      raise WorkerError(f"{self.name}.{method}:\n{answer['error']}")
    return answer["result"]

  def close(self) -> None:
    with contextlib.suppress(BrokenPipeError):  # it may have died before
      self._process.stdin.close()
    self._process.wait()


class Workers(contextlib.ExitStack):
  """The systems that run; `start` leaves out, with a printed reason, those that cannot."""

  def __init__(self, *, core: int):
    super().__init__()
    self._core = core
    self._by_name: dict[str, Worker] = {}

  def start(self, name: str, module: str, *, python: str, required: bool = False) -> dict[str, str] | None:
    """Starts a system and returns its `versions()`; None if it is absent. Raises: WorkerError if it is required."""
    try:
      if not python:
        raise WorkerError("no Python was named for it")
      log = self.enter_context(tempfile.TemporaryFile("w+"))
      worker = Worker(name, module, python=python, core=self._core, log=log)
      self.callback(worker.close)
      versions = worker.call("versions")
    except (WorkerError, FileNotFoundError) as error:
      if required:
        raise
      print(f"{name} is left out: {str(error).strip().splitlines()[-1]}", flush=True)
      return None
    self._by_name[name] = worker
    return versions

  def __contains__(self, name: str) -> bool:
    return name in self._by_name

  def __iter__(self) -> Iterator[str]:
    return iter(self._by_name)

  def __getitem__(self, name: str) -> Worker:
    return self._by_name[name]


class Progress:
  """Lines with the time that is left, by the repetitions done so far."""

  def __init__(self, total: int):
    self._total, self._done, self._began = total, 0, time.monotonic()

  def say(self, text: str) -> None:
    secs = time.monotonic() - self._began
    left = f", about {secs / self._done * (self._total - self._done):.0f} s left" if self._done else ""
    print(f"[{self._done}/{self._total}, {secs:.0f} s{left}] {text}", flush=True)

  def advance(self, text: str) -> None:
    self._done += 1
    self.say(text)


Arm = tuple[str, Callable[[int], dict[str, float]]]  # name, run(repetition) -> figures of one run, among them "secs"


def interleave(arms: Sequence[Arm], *, repetitions: int, say: Callable[[str], None]) -> dict[str, list[dict]]:
  """Runs every arm once per repetition, in turn; the figures of each arm's runs, in order."""
  runs: dict[str, list[dict]] = {name: [] for name, _ in arms}
  for repetition in range(repetitions):
    for name, run in arms:
      runs[name].append(run(repetition))
    say(", ".join(f"{name} {runs[name][-1]['secs']:.3f} s" for name, _ in arms))
  return runs


def median(runs: Sequence[Mapping[str, float]], figure: str) -> float:
  return statistics.median(run[figure] for run in runs)


def compare(
  case: str, ours: Sequence[Mapping[str, float]], rival: Sequence[Mapping[str, float]] | None, *,
  rival_name: str | None, figure: str, higher_is_better: bool, **more: Any,
) -> dict[str, Any]:
  """A row of results: medians, and how many times better ours is; `ratios` are those of the single repetitions.

  `cpu_ratio` is the same by the CPU time of the processes, which other work on the core disturbs less. Without a rival
  the row has ours alone.
  """
  own = [run[figure] for run in ours]
  row = {"case": case, "unit": figure, "ours": statistics.median(own), "rival": None, "rival_name": rival_name,
         "ratio": None, "ratios": [], **more}
  if rival is not None:
    other = [run[figure] for run in rival]
    better = (lambda a, b: a / b) if higher_is_better else (lambda a, b: b / a)
    row["rival"] = statistics.median(other)
    row["ratio"] = better(row["ours"], row["rival"])
    row["ratios"] = [better(a, b) for a, b in zip(own, other, strict=True)]
    if "cpu_secs" in ours[0]:
      row["cpu_ratio"] = median(rival, "cpu_secs") / median(ours, "cpu_secs")
  return row


def conditions(versions: Mapping[str, Any], *, core: int, repetitions: int) -> dict[str, Any]:
  """What a reader needs to judge the figures: commit, date, machine, load, versions."""

  def git(*args: str) -> str:
    return subprocess.run(["git", *args], cwd=REPO, capture_output=True, text=True, check=False).stdout.strip()

  cpu = next(
    (line.split(":")[1].strip() for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines()
     if line.startswith("model name")), platform.processor(),
  )
  return {
    "commit": git("rev-parse", "--short", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno") else ""),
    "date": datetime.date.today().isoformat(),
    "cpu": cpu, "cpus": os.cpu_count(), "pinned_core": core, "load_average": os.getloadavg()[0],
    "repetitions": repetitions,
    "versions": dict(versions),
  }


def write(
  path: pathlib.Path, results: Sequence[Mapping[str, Any]], machine: Mapping[str, Any], **more: Any
) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps({"machine": machine, **more, "results": results}, indent=2) + "\n")


def add_flags(parser: argparse.ArgumentParser, *, cases: Sequence[str], out: str) -> None:
  """The flags that all benchmarks have."""
  parser.add_argument("--ours_python", default=sys.executable, help="Python with requirements.txt")
  parser.add_argument("--cases", default=",".join(cases), help="of " + ",".join(cases))
  parser.add_argument("--repetitions", type=int, default=5)
  parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)), help="that all systems share")
  parser.add_argument("--quick", action="store_true", help="a tiny model: that the script works; measures nothing")
  parser.add_argument(
    "--out", type=pathlib.Path, help=f"default: experiments/results/{out}, with --quick in the folder for temporary files"
  )
  parser.set_defaults(name=out)


def parse(parser: argparse.ArgumentParser, *, cases: Sequence[str]) -> argparse.Namespace:
  """The flags, with `cases` as a list. An unknown case ends with one line on stderr."""
  args = parser.parse_args()
  args.cases = args.cases.split(",")
  if args.out is None:  # what a quick run writes is no result to keep
    folder = pathlib.Path(tempfile.gettempdir()) if args.quick else REPO / "experiments/results"
    args.out = folder / args.name
  if unknown := sorted(set(args.cases) - set(cases)):
    parser.error(f"--cases: {', '.join(unknown)} is none of {', '.join(cases)}")
  return args


def table(rows: Sequence[Mapping[str, Any]]) -> str:
  """The rows for people."""
  columns = (
    "case", "rival_name", "ours", "rival", "unit", "ratio", "cpu_ratio", "target", "limit_fraction", "floor_fraction"
  )

  def cell(value: Any) -> str:
    if not isinstance(value, float):
      return "" if value is None else str(value)
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"

  lines = [columns, *([cell(row.get(column)) for column in columns] for row in rows)]
  widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
  return "\n".join("  ".join(text.ljust(width) for text, width in zip(line, widths)) for line in lines)

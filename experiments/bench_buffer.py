"""How long the replay buffer takes to draw a batch and take in what replaces it, by how full it is.

    python experiments/bench_buffer.py --out experiments/results/bench_buffer.json

At each fill a step is one draw of 7 prompts x 20 responses and 7 added groups of 24 samples (the paper's GSM8K sizes):
the calls that a training step waits for. The fill stays as it is while steps are timed: each added row pushes one out,
by the limit of its prompt (100), or where the buffer itself is full by the limit of the buffer. Rows really are
written: a million of 512 tokens take 6.5 GB. Memory is what the process holds more than before, and is set against the
payload: full-length rows of ids, log_mu and log_ref, and each row's versions and length. The curve is drawn beside the
JSON, where matplotlib is installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import pathlib
import platform
import sys
import time

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # so that it runs as a file, too

from tba_jax.replay.buffer import ReplayBuffer  # noqa: E402
from tba_jax.types import RolloutGroup  # noqa: E402

NUM_PROMPTS, RESPONSES_PER_PROMPT, NUM_SAMPLES = 7, 20, 24
PROMPT_TOKENS, ROWS_PER_PROMPT = 128, 100
CAPACITY = 1_000_000
FILLS = (1_000, 10_000, 100_000, 300_000, 1_000_000)  # rows
ROW_TOKENS = 512
PAYLOAD_BYTES = 12 * ROW_TOKENS + 12  # of a row: ids, log_mu, log_ref; its length, its oldest and newest version


def make_templates(rng: np.random.Generator, num_tokens: int) -> list[RolloutGroup]:
  """A few groups of random contents; a step takes one and changes what makes it new."""
  shape = (NUM_SAMPLES, num_tokens)
  return [
    RolloutGroup(
      prompt_id=0,
      occurrence=0,
      attempt=0,
      prompt=np.zeros(PROMPT_TOKENS, np.int32),
      tokens=rng.integers(50_000, size=shape).astype(np.int32),
      lengths=rng.integers(1, num_tokens + 1, size=NUM_SAMPLES).astype(np.int32),
      log_mu=-rng.random(shape, np.float32),
      log_ref=-rng.random(shape, np.float32),
      versions=np.zeros(shape, np.int32),
      rewards=rng.random(NUM_SAMPLES, np.float32),
      truncated=np.zeros(NUM_SAMPLES, bool),
      ref_version=0,
      temperature=0.7,
    )
    for _ in range(8)
  ]


class Feed:
  """New groups without end: prompts in turn, no response twice."""

  def __init__(self, num_tokens: int):
    self._templates = make_templates(np.random.default_rng(0), num_tokens)
    self._occurrence = 0

  def next(self, num_prompts: int, version: int) -> RolloutGroup:
    template = self._templates[self._occurrence % len(self._templates)]
    template.tokens[:, 0] = self._occurrence
    template.versions[:] = version
    group = dataclasses.replace(template, prompt_id=self._occurrence % num_prompts, occurrence=self._occurrence)
    self._occurrence += 1
    return group


def resident_bytes() -> int:
  """Of this process, now."""
  return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(num_tokens: int, fill: int, *, num_steps: int, priority: str) -> dict:
  """Fills a buffer and times steps; wall time, and the CPU time of the thread, which other work on the machine does not
  change much.
  """
  before_bytes = resident_bytes()
  buffer = ReplayBuffer(
    capacity=CAPACITY,
    capacity_per_prompt=ROWS_PER_PROMPT,
    max_prompt_tokens=PROMPT_TOKENS,
    max_response_tokens=num_tokens,
    seed=0,
    recent_fraction=0.5,
    priority=priority,
    max_staleness=100_000,
  )
  num_prompts = fill // ROWS_PER_PROMPT if fill < CAPACITY else 2 * CAPACITY // ROWS_PER_PROMPT
  feed, version, secs = Feed(num_tokens), 0, []
  while buffer.stats()["live_rows"] < fill:
    buffer.add(feed.next(num_prompts, version))
  memory_bytes = resident_bytes() - before_bytes
  lengths = buffer.state_dict(missing=lambda keys: np.zeros(len(keys), bool))["arrays"]["length"]
  for _ in range(num_steps):
    groups = [
      dataclasses.replace(g, tokens=g.tokens.copy())
      for g in (feed.next(num_prompts, version) for _ in range(NUM_PROMPTS))
    ]
    marks = [(time.perf_counter(), time.thread_time())]
    draw = buffer.draw(num_prompts=NUM_PROMPTS, responses_per_prompt=RESPONSES_PER_PROMPT, version=version)
    marks.append((time.perf_counter(), time.thread_time()))
    for group in groups:
      buffer.add(group)
    if priority == "residual":
      buffer.update_priorities(draw.rows, np.abs(draw.rewards))
    marks.append((time.perf_counter(), time.thread_time()))
    secs.append(np.diff(marks, axis=0))
    version += 1
    if version % 2 == 0:
      buffer.mark_publish(version)
  draw_ms, add_ms = np.moveaxis(np.array(secs), 1, 0) * 1e3  # each [steps, (wall, cpu)]
  step_ms = draw_ms + add_ms
  return {
    "row_tokens": num_tokens,
    "live_rows": int(buffer.stats()["live_rows"]),
    "priority": priority,
    "num_steps": num_steps,
    "draw_ms": float(np.median(draw_ms[:, 0])),
    "add_ms": float(np.median(add_ms[:, 0])),
    "step_ms": float(np.median(step_ms[:, 0])),
    "step_p95_ms": float(np.quantile(step_ms[:, 0], 0.95)),
    "step_cpu_ms": float(np.median(step_ms[:, 1])),
    "memory_gb": memory_bytes / 1e9,
    "memory_over_payload": memory_bytes / (PAYLOAD_BYTES * fill),
    "real_token_share": float(lengths.mean() / num_tokens),
  }


def growth(results: list[dict]) -> dict[str, float]:
  """CPU milliseconds of a step over the logarithm of the fill: what each factor of ten adds, and how far the last point
  is above the line through the others; a step that grew faster than a logarithm would be."""
  fills = np.log10([row["live_rows"] for row in results])
  cpu_ms = np.array([row["step_cpu_ms"] for row in results])
  slope, constant = np.polyfit(fills[:-1], cpu_ms[:-1], 1)
  return {"ms_per_factor_of_ten": float(np.polyfit(fills, cpu_ms, 1)[0]),
          "last_over_line_of_others": float(cpu_ms[-1] / (slope * fills[-1] + constant))}


def plot(results: list[dict], path: pathlib.Path) -> None:
  """Milliseconds over fill, as PNG."""
  if importlib.util.find_spec("matplotlib") is None:
    print("no plot: matplotlib is not installed where this runs", flush=True)
    return
  import matplotlib

  matplotlib.use("agg")
  from matplotlib import pyplot

  figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
  fills = [row["live_rows"] for row in results]
  for name, label in (("step_ms", "draw 140 + insert 168"), ("add_ms", "insert 168"), ("draw_ms", "draw 140")):
    axes.plot(fills, [row[name] for row in results], "o-", label=label)
  axes.axhline(5.0, color="gray", linestyle="--", label="5 ms")
  axes.set(xscale="log", ylim=(0, None), xlabel=f"rows of {ROW_TOKENS} tokens in the buffer",
           ylabel="milliseconds, median", title="A training step's calls to the replay buffer")
  axes.legend()
  figure.savefig(path, dpi=110)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--out", type=pathlib.Path, required=True, help="file for the results, as JSON")
  parser.add_argument(
    "--max_fill", type=int, default=CAPACITY, help="leaves out larger fills (memory: 12 bytes x tokens x rows)"
  )
  parser.add_argument("--num_steps", type=int, default=200, help="steps timed at each fill")
  parser.add_argument("--priority", default="uniform", help="of the draws: uniform, reward or residual")
  args = parser.parse_args()
  results = []
  for fill in [fill for fill in FILLS if fill <= args.max_fill]:
    results.append(measure(ROW_TOKENS, fill, num_steps=args.num_steps, priority=args.priority))
    columns = {
      name: f"{value:.2f}" if isinstance(value, float) else str(value) for name, value in results[-1].items()
    }
    if len(results) == 1:
      print(" ".join(f"{name:>11}" for name in columns))
    print(" ".join(f"{value:>{max(11, len(name))}}" for name, value in columns.items()), flush=True)
  args.out.parent.mkdir(parents=True, exist_ok=True)
  machine = {
    "machine": platform.machine(),
    "cpus": os.cpu_count(),
    "load_average": os.getloadavg()[0],
    "python": platform.python_version(),
    "numpy": np.__version__,
  }
  found = growth(results) if len(results) > 2 else {}
  print(found)
  args.out.write_text(json.dumps({"results": results, "growth": found, "machine": machine}, indent=2) + "\n")
  plot(results, args.out.with_suffix(".png"))


if __name__ == "__main__":
  main()

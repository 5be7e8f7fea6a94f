"""How long the replay buffer takes to draw a batch and take in what replaces it, by how full it is.

    python experiments/bench_buffer.py --out experiments/results/bench_buffer.json

At each fill a step is one draw of 7 prompts x 20 responses and 7 added groups of 24 samples (the paper's GSM8K sizes):
the calls that a training step waits for. The fill stays as it is while steps are timed: each added row pushes one out,
by the limit of its prompt (100), or where the buffer itself is full by the limit of the buffer. Rows really are
written: the largest fill takes 5.7 GB.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import platform
import resource
import sys
import time

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # so that it runs as a file, too

from tba_jax.replay.buffer import ReplayBuffer  # noqa: E402
from tba_jax.types import RolloutGroup  # noqa: E402

NUM_PROMPTS, RESPONSES_PER_PROMPT, NUM_SAMPLES = 7, 20, 24
PROMPT_TOKENS, ROWS_PER_PROMPT = 128, 100
CAPACITY = 1_000_000
CASES = (
  (512, 1_000),
  (512, 10_000),
  (512, 100_000),
  (512, 925_000),
  (256, 1_000_000),
)  # (tokens of a row, fill in rows)


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


def measure(num_tokens: int, fill: int, *, num_steps: int, priority: str) -> dict:
  """Fills a buffer and times steps; wall time, and the CPU time of the thread, which other work on the machine does not
  change much.
  """
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
    "max_rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
  }


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
  for num_tokens, fill in CASES:
    if fill <= args.max_fill:
      results.append(measure(num_tokens, fill, num_steps=args.num_steps, priority=args.priority))
      columns = {
        name: f"{value:.2f}" if isinstance(value, float) else str(value) for name, value in results[-1].items()
      }
      if len(results) == 1:
        print(" ".join(f"{name:>11}" for name in columns))
      print(" ".join(f"{value:>11}" for value in columns.values()), flush=True)
  args.out.parent.mkdir(parents=True, exist_ok=True)
  machine = {
    "machine": platform.machine(),
    "cpus": os.cpu_count(),
    "load_average": os.getloadavg()[0],
    "python": platform.python_version(),
    "numpy": np.__version__,
  }
  args.out.write_text(json.dumps({"results": results, "machine": machine}, indent=2) + "\n")


if __name__ == "__main__":
  main()

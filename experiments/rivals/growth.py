"""Decoding speed by sequence length and slots: rows, a plot, and the reason for its shape, out of the step times."""

from __future__ import annotations

from collections.abc import Mapping
import pathlib
import textwrap
from typing import Any

import numpy as np

from experiments.rivals import shapes

StepSecs = Mapping[tuple[int, int], float]  # (slots, tokens of a sequence) -> seconds of a decode step


def rows(
  case: str, model: str, step_secs: StepSecs, *, floors: Mapping[int, float], flops_per_sec: float, bytes_per_sec: float
) -> list[dict[str, Any]]:
  """A row for each point, with the share that the core's peaks alone would need."""
  result = []
  for (slots, tokens), secs in step_secs.items():
    _, flops = shapes.sampling_flops(model, [(tokens - 2, 2, slots)])
    num_bytes = shapes.decode_bytes(model, [(tokens - 2, 2, slots)], steps=1)
    limit = max(flops / flops_per_sec, num_bytes / bytes_per_sec)
    result.append({
      "case": case, "unit": "tokens_per_sec", "slots": slots, "tokens": tokens, "ours": slots / secs, "rival": None,
      "rival_name": f"({slots} slots, {tokens} tokens)", "ratio": None, "step_secs": secs,
      "limit_fraction": limit / secs, "floor_fraction": floors[slots] / secs,
    })
  return result


def reason(model: str, step_secs: StepSecs, *, floors: Mapping[int, float]) -> str:
  """What a step is made of: a line through its seconds by cache entries, for the fewest and the most slots."""
  parts = []
  for slots in (min(floors), max(floors)):
    tokens = np.array([length for rows, length in step_secs if rows == slots])
    secs = np.array([step_secs[slots, length] for length in tokens])
    slope, constant = np.polyfit(tokens * slots, secs, 1)
    speed = shapes.cache_token_bytes(model) / slope / 1e9 if slope > 0 else float("inf")
    parts.append(
      f"with {slots} slot{'s' * (slots > 1)} a step takes {constant * 1e3:.2f} ms whatever the length (weight products "
      f"alone {floors[slots] * 1e3:.2f} ms) and {slope * 1e6:.2f} us for each cached token, {speed:.1f} GB/s of keys "
      "and values"
    )
  return "Growth: " + "; ".join(parts) + "."


def plot(step_secs: StepSecs, path: pathlib.Path, *, title: str) -> None:
  """New tokens per second over the length of the sequence, a curve for each number of slots, as PNG."""
  import matplotlib

  matplotlib.use("agg")
  from matplotlib import pyplot, ticker

  figure, axes = pyplot.subplots(figsize=(8, 5.5), layout="constrained")
  for slots in sorted({rows for rows, _ in step_secs}):
    lengths = sorted(length for rows, length in step_secs if rows == slots)
    speeds = [slots / step_secs[slots, length] for length in lengths]
    axes.plot(lengths, speeds, marker="o", label=f"{slots} slot" + "s" * (slots > 1))
  axes.set(xscale="log", yscale="log", xlabel="tokens of the sequence", ylabel="new tokens per second, all slots")
  axes.set_xticks(lengths, [str(length) for length in lengths])
  axes.xaxis.minorticks_off()
  axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
  axes.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
  axes.yaxis.minorticks_off()
  axes.grid(alpha=0.3)
  axes.legend()
  axes.set_title(textwrap.fill(title, 120), fontsize=8)
  path.parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, dpi=120)

"""Tokens a second beside what the machine could do, by the formulas of limits.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from tba_jax.limits import Limits


class Speed(NamedTuple):
  """One side of a run: tokens a second, the most that its devices could do of the same, and which of them bounds it."""

  name: str
  tokens_per_sec: float
  limit_tokens_per_sec: float
  bound: str


def _train_limit(columns: Mapping[str, np.ndarray], limits: Limits) -> np.ndarray:
  """Response tokens a second [lines] at the trainer's peak; each brings its part of the prompt's work."""
  whole = 1.0 + columns["prompt_tokens"] / np.maximum(columns["response_tokens"], 1e-9)
  return limits.trainer_flops_per_sec / (limits.train_flops_per_token * whole)


def _sample_secs(columns: Mapping[str, np.ndarray], limits: Limits) -> tuple[np.ndarray, np.ndarray]:
  """Seconds a sampled token [lines] that arithmetic and memory need, all searchers together."""
  context = columns["prompt_tokens"] / limits.lane_samples + columns["response_tokens"] / 2
  compute = np.full_like(context, limits.sample_flops_per_token / limits.searcher_flops_per_sec)
  return compute, (limits.sample_weight_bytes + limits.cache_token_bytes * context) / limits.searcher_bytes_per_sec


def _known(columns: Mapping[str, np.ndarray], limits: Limits | None) -> bool:
  return limits is not None and limits.trainer_flops_per_sec is not None and {
    "prompt_tokens", "response_tokens", "trained_tokens_per_second", "generated_tokens_per_second"} <= set(columns)


def shares(columns: Mapping[str, np.ndarray], limits: Limits | None) -> dict[str, np.ndarray]:
  """Columns "trainer_share" and "searcher_share": what each side does of what its devices could; {} where not known."""
  if not _known(columns, limits):
    return {}
  return {
    "trainer_share": columns["trained_tokens_per_second"] / _train_limit(columns, limits),
    "searcher_share": columns["generated_tokens_per_second"] * np.maximum(*_sample_secs(columns, limits)),
  }


def speeds(columns: Mapping[str, np.ndarray], limits: Limits | None) -> list[Speed]:
  """Both sides over all the time in which the run trained, and the trainer while a step runs; [] where not known."""
  if not _known(columns, limits):
    return []
  tokens = np.diff(columns["trained_tokens"], prepend=0.0)
  rate = columns["trained_tokens_per_second"]
  secs = float(np.nansum(np.where(rate > 0, tokens / np.where(rate > 0, rate, 1.0), 0.0)))
  if secs <= 0:
    return []
  # Of tokens of different prompts: the mean limit is that of the summed work.
  limit = float(tokens.sum() / np.nansum(tokens / _train_limit(columns, limits)))
  compute, memory = (float(np.nanmean(part)) for part in _sample_secs(columns, limits))
  sampled = float(np.nansum(columns["generated_tokens_per_second"] * np.where(rate > 0, tokens / rate, 0.0))) / secs
  return [
    Speed("trainer, all the time", float(tokens.sum()) / secs, limit, "arithmetic"),
    Speed("trainer, while a step runs", float(tokens.sum() / np.nansum(columns["step_seconds"])), limit, "arithmetic"),
    Speed("searchers, all the time", sampled, 1 / max(compute, memory), "memory" if memory > compute else "arithmetic"),
  ]

"""What several samples of each prompt say: pass@k, maj@k, intervals, and an evaluation's table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
import math
from typing import Any

import numpy as np

_Z = 1.959963984540054  # of a two-sided 95% interval


def wilson_interval(rate: float, trials: int) -> tuple[float, float]:
  """The 95% Wilson score interval of a share of successes (Wilson 1927).

  Args:
    rate: successes / trials. For a mean of values between 0 and 1 instead of successes the interval is too wide, never
      too narrow: no such value varies more than a coin of the same mean.
    trials: independent ones; prompts, not samples.
  """
  spread = _Z * math.sqrt(rate * (1 - rate) / trials + (_Z / (2 * trials)) ** 2)
  scale = 1 + _Z**2 / trials
  middle = rate + _Z**2 / (2 * trials)
  return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


def mean_half_interval(values: Sequence[float]) -> float:
  """Half of the 95% interval of a mean of independent values, by their standard error; NaN for fewer than two."""
  number = len(values)
  if number < 2:
    return math.nan
  mean = math.fsum(values) / number
  return _Z * math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (number - 1) / number)


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
  """Unbiased probability that one of k samples is right: 1 - C(n - c, k) / C(n, k).

  Source: Chen et al. 2021, arXiv:2107.03374.
  Raises: ValueError if k is not between 1 and the number of samples.
  """
  if not 1 <= k <= num_samples:
    raise ValueError(f"k={k} must lie between 1 and the {num_samples} samples of a prompt; sample more, or lower it.")
  return 1 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def majority_at_k(answers: Sequence[str | None], rights: Sequence[bool], k: int) -> float:
  """Share of the blocks of k samples, n // k of them, whose most frequent answer is right.

  A sample without an answer does not vote; of equally frequent answers the one given first counts. Source: Wang et al.
  2022, arXiv:2203.11171. Raises: as `pass_at_k`.
  """
  if not 1 <= k <= len(answers):
    raise ValueError(f"k={k} must lie between 1 and the {len(answers)} samples of a prompt; sample more, or lower it.")
  wins = []
  for start in range(0, len(answers) - k + 1, k):
    block = zip(answers[start : start + k], rights[start : start + k])
    votes = [(answer, right) for answer, right in block if answer is not None]
    winner = Counter(answer for answer, _ in votes).most_common(1)
    wins.append(bool(winner) and next(right for answer, right in votes if answer == winner[0][0]))
  return sum(wins) / len(wins)


_ROW_NAMES = {
  "greedy": "greedy: reward of 1", "sampled": "sampled: reward of 1", "samples": "samples: reward of 1",
  "num_prompts": "prompts", "num_samples": "samples a prompt", "not_graded": "responses not graded",
  "greedy_reward": "greedy: mean reward", "greedy_tokens": "greedy: tokens", "greedy_truncated": "greedy: truncated",
  "sampled_reward": "sampled: mean reward", "sampled_tokens": "sampled: tokens",
  "sampled_truncated": "sampled: truncated", "reference_perplexity": "perplexity under the reference",
  "kl": "KL to the reference (nats)", "cosine_distance": "mean cosine distance",
}
_SHARES = ("greedy", "sampled", "samples", "greedy_truncated", "sampled_truncated")


def summarise(rows: Sequence[Mapping[str, Any]], *, ks: Sequence[int]) -> dict[str, Any]:
  """Numbers of an evaluation, means over prompts with 95% intervals [low, high]; a success is a reward of 1."""
  num, once = len(rows), "sampled" if "sampled" in rows[0] else "greedy"

  def share(values: Sequence[float]) -> dict[str, Any]:
    mean = float(np.mean(values))
    return {"mean": mean, "interval": list(wilson_interval(mean, num))}

  first = [row[once] for row in rows]
  rewards = [response["reward"] for response in first if response["reward"] is not None]
  everything = [*first, *(sample for row in rows for sample in row["samples"])]
  summary: dict[str, Any] = {
      "num_prompts": num,
      once: share([response["reward"] == 1 for response in first]),
      f"{once}_reward": float(np.mean(rewards or [math.nan])),
      f"{once}_tokens": float(np.mean([len(response["tokens"]) for response in first])),
      f"{once}_truncated": float(np.mean([response["truncated"] for response in first])),
      "not_graded": sum(response["reward"] is None for response in everything),
  }
  num_samples = len(rows[0]["samples"])
  if num_samples:
    rights = [[sample["reward"] == 1 for sample in row["samples"]] for row in rows]
    summary |= {"num_samples": num_samples, "samples": share([float(np.mean(right)) for right in rights])}
    answers = [[sample["answer"] for sample in row["samples"]] for row in rows]
    for k in ks:
      summary[f"pass@{k}"] = share([pass_at_k(num_samples, sum(right), k) for right in rights])
      if any(answer is not None for found in answers for answer in found):
        summary[f"maj@{k}"] = share([majority_at_k(found, right, k) for found, right in zip(answers, rights)])
  return summary


def summary_table(summary: Mapping[str, Any]) -> str:
  """An evaluation as a table of text: name, value, 95% interval."""

  def show(name: str, value: float) -> str:
    if isinstance(value, int):
      return f"{value:,}"
    return f"{value:.1%}" if name in _SHARES or "@" in name else f"{value:.3f}"

  lines = [("", "value", "95% interval")]
  for name, value in summary.items():
    if name in ("model", "task"):
      continue
    mean, interval = (value["mean"], value["interval"]) if isinstance(value, Mapping) else (value, ())
    lines.append((_ROW_NAMES.get(name, name), show(name, mean), " to ".join(show(name, end) for end in interval)))
  widths = [max(len(line[column]) for line in lines) for column in range(3)]
  text = [f"{name:{widths[0]}}  {value:>{widths[1]}}  {ends:{widths[2]}}".rstrip() for name, value, ends in lines]
  return "\n".join([f"{summary['task']}: {summary['model']}", text[0], "-" * (sum(widths) + 4), *text[1:]])

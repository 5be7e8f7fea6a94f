"""The charts of a report: which metrics are drawn, over which axes, and what each run's own pictures show."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tba_jax.meters import total_secs, union
from tba_jax.report import svg
from tba_jax.report.curves import AXES, Group, curve, per_second, time_unit
from tba_jax.report.run_files import Activity, RunFiles


class Chart(NamedTuple):
  """One metric. `value` makes it from a run's columns; None: the column itself."""

  key: str
  title: str
  unit: str
  note: str  # one line for those who have not met it
  percent: bool = False
  low: float | None = None
  high: float | None = None
  evals: bool = False
  value: Callable[[Mapping[str, np.ndarray]], np.ndarray] | None = None


def _reuse(columns: Mapping[str, np.ndarray]) -> np.ndarray:
  return columns["buffer_rows_drawn"] / np.maximum(columns["buffer_added"], 1.0)


def _trainer_waits(columns: Mapping[str, np.ndarray]) -> np.ndarray:
  return per_second(columns, "trainer_wait_seconds")


def _searchers_wait(columns: Mapping[str, np.ndarray]) -> np.ndarray:
  return per_second(columns, "searcher_wait_seconds")


SECTIONS: tuple[tuple[str, tuple[Chart, ...]], ...] = (
  ("Learning", (
    Chart("eval_accuracy", "Held-out accuracy", "share of prompts", "greedy, at the version evaluated", True, 0.0,
          evals=True),
    Chart("reward", "Batch reward", "mean of the batch", "of sampled responses; equal ones count once where buffer.dedup is set"),
    Chart("loss", "Loss", "loss", "of the objective in the config; its level says little across objectives"),
    Chart("log_ratio_ref", "log π − log ref", "nats a response",
          "mean over the responses drawn; no KL divergence unless the policy itself sampled them"),
    Chart("kl_fresh", "KL to the reference", "nats a response", "on samples of the version evaluated", evals=True),
    Chart("kl_term", "KL estimate of the loss", "nats", "unweighted, of objectives with a KL term of their own"),
    Chart("entropy", "Entropy", "nats a token", "of the policy at the tokens trained on", low=0.0),
    Chart("equal_reward_groups", "Groups that tie", "share of groups",
          "all rewards of a prompt equal: nothing to learn from but the KL term", True, 0.0, 1.0),
    Chart("reward_group_std", "Spread within a group", "reward", "standard deviation of a prompt's rewards", low=0.0),
    Chart("response_tokens", "Response length", "tokens", "mean of the responses trained on", low=0.0),
    Chart("truncated", "Truncated", "share of responses", "hit the length limit before a stop token", True, 0.0),
    Chart("grad_norm", "Gradient norm", "before clipping", "skipped updates show as gaps", low=0.0),
    Chart("beta", "beta", "reward a nat", "weight of the KL term", low=0.0),
  )),
  ("Off-policy", (
    Chart("staleness_mean", "Staleness, mean", "updates", "trainer's version − version of a response's oldest token",
          low=0.0),
    Chart("staleness_max", "Staleness, greatest", "updates", "of the batch", low=0.0),
    Chart("log_ratio_mu_abs", "|log π − log μ|", "nats a token", "distance to the policy that sampled", low=0.0),
    Chart("ess_share", "Effective samples", "share of a group", "of importance ratios: 1 on policy", True, 0.0, 1.0),
    Chart("logprob_gap_max", "Log-prob gap, greatest", "nats a token",
          "sampler against trainer at the SAME weights: numerics, not staleness", low=0.0),
  )),
  ("Buffer", (
    Chart("buffer_fill", "Fill", "share of capacity", "responses held", True, 0.0),
    Chart("buffer_mean_age", "Age", "updates", "mean of what the buffer holds", low=0.0),
    Chart("buffer_reuse", "Reuse", "draws a response", "rows drawn so far / responses that came in", low=0.0,
          value=_reuse),
    Chart("buffer_unused_groups", "Waiting to be used", "groups", "not drawn once yet", low=0.0),
  )),
  ("Speed", (
    Chart("trained_tokens_per_second", "Trained", "tokens/s", "response tokens of optimizer steps", low=0.0),
    Chart("generated_tokens_per_second", "Sampled", "tokens/s", "all searchers together", low=0.0),
    Chart("trainer_share", "Trainer, of its limit", "share of peak FLOP/s", "work that the method needs, over all time",
          True, 0.0),
    Chart("searcher_share", "Searchers, of their limit", "share of tokens/s", "of what memory and arithmetic allow", True,
          0.0),
    Chart("step_seconds", "Optimizer step", "s", "without drawing and waiting", low=0.0),
    Chart("real_token_share", "Not padding", "share of tokens", "of what the trainer computes", True, 0.0, 1.0),
    Chart("trainer_wait_seconds", "Trainer waits", "share of time", "for searchers' groups", True, 0.0,
          value=_trainer_waits),
    Chart("searcher_wait_seconds", "Searchers wait", "searchers", "how many wait for the trainer, on average", low=0.0,
          value=_searchers_wait),
  )),
)
SMOOTHED = ("trainer_wait_seconds", "searcher_wait_seconds", "trained_tokens_per_second", "generated_tokens_per_second",
            "trainer_share", "searcher_share")


def _x_axes(runs: Sequence[RunFiles]) -> dict[str, tuple[str, float]]:
  unit, secs = time_unit(runs)
  return {"steps": ("optimizer steps", 1.0), "time": (f"time of the run ({unit})", secs),
          "tokens": ("trained tokens", 1.0)}


def metric_charts(chart: Chart, groups: Sequence[Group]) -> dict[str, str]:
  """{axis: svg} of one metric; {} where no run has it."""
  runs = [run for group in groups for run in group.runs]
  most = min(300, max(60, 900 // len(groups)))
  if chart.key in SMOOTHED:
    most = min(most, 60)  # rates of single steps are noise
  drawn = {}
  for axis, (label, divisor) in _x_axes(runs).items():
    lines = []
    for group in groups:
      values = [_values(chart, run, AXES[axis], divisor) for run in group.runs]
      line = curve(group, [pair for pair in values if pair is not None], most=most, dots=chart.evals)
      if line is not None and np.isfinite(line.y).any():
        lines.append(line)
    if not lines:
      return {}
    drawn[axis] = svg.line_chart(
      lines, title=chart.title, x_axis=svg.Axis(label, low=0.0),
      y_axis=svg.Axis(chart.unit, chart.percent, chart.low, chart.high))
  return drawn


def _values(chart: Chart, run: RunFiles, x_key: str, divisor: float) -> tuple[np.ndarray, np.ndarray] | None:
  columns = run.evals if chart.evals else run.train
  key = {"buffer_reuse": "buffer_added"}.get(chart.key, chart.key)
  if key not in columns:
    return None
  y = columns[key] if chart.value is None else chart.value(columns)
  if chart.key == "grad_norm" and "skipped" in columns:
    y = np.where(columns["skipped"] > 0, np.nan, y)
  return columns[x_key] / divisor, y


# --- Staleness ---

_AGES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 4096, 10**9)


def staleness_maps(run: RunFiles, *, columns: int = 60) -> dict[str, str]:
  """{axis: svg}: of the responses trained on, what share was how old; {} where the run does not tell."""
  oldest = max((age for counts in run.staleness for age in counts), default=-1)
  if oldest < 0:
    return {}
  edges = [edge for edge in _AGES if edge <= oldest]
  names = [str(low) if high == low + 1 else f"{low}–{high - 1}" for low, high in zip(edges, [*edges[1:], oldest + 1])]
  drawn = {}
  for axis, (label, divisor) in _x_axes([run]).items():
    x = run.train[AXES[axis]] / divisor
    borders = np.linspace(0.0, float(x[-1]) or 1.0, min(columns, len(x)) + 1)
    table = np.zeros((len(borders) - 1, len(edges)))
    where = np.clip(np.searchsorted(borders, x, side="left") - 1, 0, len(borders) - 2)
    for column, counts in zip(where.tolist(), run.staleness):
      for age, count in counts.items():
        table[column, np.searchsorted(edges, age, side="right") - 1] += count
    shares = table / np.maximum(table.sum(1, keepdims=True), 1.0)
    drawn[axis] = svg.heat_map(
      shares, x_edges=borders, rows=names, title="Staleness of the responses trained on", x_axis=svg.Axis(label),
      y_label="updates", height=max(170, 70 + 16 * len(names)))
  return drawn


# --- Who did what when ---

# In the order in which they are stacked, busy ones at the foot.
KIND_COLORS = {
  "step": "f1", "decode": "f0", "grade": "f4", "score": "f2", "eval": "f6", "publish": "f3", "checkpoint": "f5",
  "wait": "k-wait",
}
_OTHER = "f5"


def kinds_of(activity: Activity) -> dict[str, str]:
  """{kind: CSS class} of the kinds that a run shows, in the order of stacking."""
  known = [kind for kind in KIND_COLORS if kind in activity.kinds]
  return {kind: KIND_COLORS.get(kind, _OTHER) for kind in known + sorted(set(activity.kinds) - set(KIND_COLORS))}


def time_shares(activity: Activity) -> dict[str, dict[str, float]]:
  """{actor: {kind: share of the time that was read}}; nested kinds overlap."""
  whole, found = total_secs(activity.covered), {}
  starts, ends = _covered_parts(activity)
  for index, actor in enumerate(activity.actors):
    own = activity.actor == index
    found[actor] = {kind: float((ends - starts)[own & (activity.kind == activity.kinds.index(kind))].sum()) / whole
                    for kind in kinds_of(activity)} if whole > 0 else {}
  return found


def _covered_parts(activity: Activity) -> tuple[np.ndarray, np.ndarray]:
  """Start and end of each span within the stretch of covered time in which it ends."""
  place = np.clip(np.searchsorted(activity.covered[:, 1], activity.end), 0, len(activity.covered) - 1)
  return np.maximum(activity.start, activity.covered[place, 0]), np.maximum(
    np.minimum(activity.end, activity.covered[place, 1]), activity.covered[place, 0])


def _run_clock(activity: Activity) -> Callable[[np.ndarray], np.ndarray]:
  """Maps time since 1970 to seconds of the run; pauses take none. Of a sampled timeline nothing is left out."""
  covered = activity.covered
  if not activity.is_whole:
    return lambda secs: secs - covered[0, 0]
  begins = np.concatenate([[0.0], np.cumsum(covered[:, 1] - covered[:, 0])])
  xs = covered.reshape(-1)
  return lambda secs: np.interp(secs, xs, np.stack([begins[:-1], begins[1:]], 1).reshape(-1))


def overview(activity: Activity, *, bins: int = 220) -> str:
  """Shares of the time of each actor over the whole run: what is blank was spent on nothing that is recorded."""
  clock, kinds = _run_clock(activity), kinds_of(activity)
  starts, ends = _covered_parts(activity)
  starts, ends = clock(starts), clock(ends)
  covered = clock(activity.covered)
  whole = float(covered[-1, 1])
  unit, divisor = ("hours", 3600.0) if whole >= 3 * 3600 else ("minutes", 60.0) if whole >= 180 else ("s", 1.0)
  edges = np.linspace(0.0, max(whole, 1e-9), bins + 1)
  known = _spread(covered[:, 0], covered[:, 1], edges)
  boxes: dict[str, list[tuple[int, float, float, float, float]]] = {kind: [] for kind in kinds}
  for lane in range(len(activity.actors)):
    stacked = np.zeros(bins)
    shares = {}
    for kind in kinds:
      own = (activity.actor == lane) & (activity.kind == activity.kinds.index(kind))
      shares[kind] = _spread(starts[own], ends[own], edges) / np.maximum(known, 1e-9)
    total = np.maximum(sum(shares.values()), 1.0)  # nested kinds count twice; a lane is not higher than itself
    for kind, share in shares.items():
      top = stacked + share / total
      boxes[kind] += [(lane, edges[i] / divisor, edges[i + 1] / divisor, stacked[i], top[i])
                      for i in np.flatnonzero((top - stacked > 0.004) & (known > 0)).tolist()]
      stacked = top
  breaks = [float(at) / divisor for at in covered[1:, 0]] if activity.is_whole else []
  return svg.lanes(activity.actors, boxes, colors=kinds, title="The whole run: shares of time",
                   x_axis=svg.Axis(f"time since the start ({unit})"), x_range=(0.0, float(edges[-1]) / divisor),
                   breaks=breaks)


def _spread(starts: np.ndarray, ends: np.ndarray, edges: np.ndarray) -> np.ndarray:
  """Seconds of the intervals in each bin [edges[i], edges[i + 1])."""
  def until(at: np.ndarray) -> np.ndarray:
    # Seconds of all intervals before `at`: sum of min(at, end) - min(at, start).
    first, last = np.sort(starts), np.sort(ends)
    def below(values: np.ndarray) -> np.ndarray:
      number = np.searchsorted(values, at)
      return np.concatenate([[0.0], np.cumsum(values)])[number] + (len(values) - number) * at
    return below(last) - below(first)

  return np.diff(until(edges)) if len(starts) else np.zeros(len(edges) - 1)


def close_up(activity: Activity, *, at: float, title: str, most: int = 400) -> str:
  """Single spans around a point of the run: `at` from 0, its beginning, to 1, its end."""
  order = np.argsort(activity.end, kind="stable")
  first = int(at * max(0, len(order) - most))
  chosen = order[first : first + most]
  starts, ends = activity.start[chosen], activity.end[chosen]
  # Not from the first start on: a long span that ends here may have begun long ago.
  low, high = float(np.quantile(starts, 0.02)), float(ends.max())
  base = float(activity.covered[0, 0])
  unit, factor = ("ms", 1e3) if high - low < 0.5 else ("s", 1.0)
  kinds = kinds_of(activity)
  boxes = {kind: [(int(activity.actor[i]), max(0.0, activity.start[i] - low) * factor,
                   max(0.0, activity.end[i] - low) * factor, 0.0, 1.0)
                  for i in chosen if activity.kinds[activity.kind[i]] == kind and activity.end[i] > low]
           for kind in kinds}
  # Waits and evaluations last: what they hold is seen in front of them.
  boxes = {kind: boxes[kind] for kind in sorted(boxes, key=lambda kind: kind not in ("wait", "eval"))}
  clock = _run_clock(activity)
  since = float(clock(np.array([low]))[0]) if base <= low else 0.0
  return svg.lanes(activity.actors, boxes, colors=kinds, title=title,
                   x_axis=svg.Axis(f"{unit} from {since:,.1f} s after the start on"),
                   x_range=(0.0, (high - low) * factor))


def idle_secs(activity: Activity, actor: int) -> float:
  """Seconds of the time read in which an actor has nothing recorded."""
  own = activity.actor == actor
  starts, ends = _covered_parts(activity)
  return total_secs(activity.covered) - total_secs(union(np.stack([starts[own], ends[own]], 1)))

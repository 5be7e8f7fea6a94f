"""The report as one HTML page: no file, font or script from elsewhere; readable without scripts, too.

All that comes from a run (texts of models, names, values) is escaped here or in svg.py.
"""

from __future__ import annotations

import html
import json
import math
import pathlib
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tba_jax.limits import Limits
from tba_jax.meters import StalenessStats
from tba_jax.metrics import format_secs, plain
from tba_jax.report import charts, svg
from tba_jax.report.curves import Group, differences, group_runs
from tba_jax.report.run_files import RunFiles, number
from tba_jax.report.speed import speeds

_HERE = pathlib.Path(__file__).resolve().parent
_AXIS_NAMES = {"steps": "steps", "time": "time", "tokens": "trained tokens"}

_NOT_IN_HTML = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")


def escape(value: Any) -> str:
  """Text for HTML, also within an attribute. Characters that HTML forbids are shown as a replacement character."""
  return html.escape(_NOT_IN_HTML.sub("\ufffd", str(value)), quote=True)


def make_page(runs: Sequence[RunFiles]) -> str:
  """The whole page."""
  groups = group_runs(runs)
  body = [_header(runs), _tiles(runs), _controls(groups, runs)]
  for name, members in charts.SECTIONS:
    body.append(_chart_section(name, members, groups))
  body.append(_limits_section(runs))
  body += [_run_section(index, run, shown=index == 0) for index, run in enumerate(runs)]
  body.append(_config_section(runs))
  title = "tba_jax: " + ", ".join(run.name for run in runs)
  css, script = ((_HERE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
  return (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width,initial-scale=1">'
    '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
    f"<title>{escape(title)}</title><style>{svg.style()}{css}</style></head>\n"
    f'<body data-x="steps" data-run="0"><main>{"".join(body)}</main><script>{script}</script></body></html>\n')


# --- Top ---


def _state(run: RunFiles) -> str:
  steps = int(run.train["step"][-1]) if len(run.train.get("step", ())) else 0
  wanted = run.config.get("train.steps", "?")
  if run.results is not None:
    return f"finished, {steps:,} steps"
  return f"not finished: step {steps:,} of {wanted:,}" if isinstance(wanted, int) else f"step {steps:,}"


def _header(runs: Sequence[RunFiles]) -> str:
  lines = "".join(
    f"<li><b>{escape(run.name)}</b> <span class=soft>{escape(run.config.get('loss.name', ''))}, "
    f"{escape(run.config.get('runtime.mode', ''))}, seed {escape(run.seed)}; {escape(_state(run))}</span></li>"
    for run in runs)
  warnings = "".join(f"<li><b>{escape(run.name)}</b>: {escape(text)}</li>" for run in runs for text in run.warnings)
  warnings = f"<ul class=warnings>{warnings}</ul>" if warnings else ""
  made = time.strftime("%Y-%m-%d %H:%M")
  return f"<header><h1>Run report</h1><p class=soft>made {made}</p><ul class=runs>{lines}</ul>{warnings}</header>"


def _known(value: Any) -> bool:
  return isinstance(value, (int, float)) and math.isfinite(value)


def _figures(run: RunFiles) -> list[tuple[str, str]]:
  """(name, value) of what one asks first."""
  train, evals, results = run.train, run.evals, run.results or {}
  has_steps = len(train.get("step", ())) > 0
  figures = []
  if len(evals.get("eval_accuracy", ())):
    first, last = (float(evals["eval_accuracy"][i]) for i in (0, -1))
    figures.append(("held-out accuracy", f"{first:.1%} → {last:.1%}" if len(evals["step"]) > 1 else f"{first:.1%}"))
  if not has_steps:
    return figures
  wall, train_secs = float(train["wall_seconds"][-1]), results.get("train_seconds")
  total = results.get("wall_seconds")
  figures.append(("wall-clock", format_secs(total if _known(total) else wall) +
                  (f" ({format_secs(train_secs)} training)" if _known(train_secs) else "")))
  figures.append(("trained tokens", f"{train['trained_tokens'][-1]:,.0f}"))
  if "rollouts" in train:
    figures.append(("rollouts", f"{train['rollouts'][-1]:,.0f}"))
  ages = _staleness(run)
  if ages:
    figures.append(("staleness mean / p95 / max", "{:.1f} / {:g} / {:g} updates".format(*ages)))
  if "logprob_gap_max" in train:
    gaps = [gap for gap in train["logprob_gap_max"].tolist() if math.isfinite(gap)]
    figures.append(("log-prob gap, greatest", f"{max(gaps):.2g} nats" if gaps else "-"))
  sides = speeds(train, run.limits)
  if sides:
    figures.append(("of the machine's limit", ", ".join(
      f"{side.name.partition(',')[0]} {side.tokens_per_sec / side.limit_tokens_per_sec:.1%}" for side in sides[::2])))
  if results.get("bottleneck"):
    figures.append(("bottleneck", results["bottleneck"]))
  return figures


def _staleness(run: RunFiles) -> tuple[float, float, float] | None:
  """Mean, 95% and greatest over all responses trained on; None where the run does not tell."""
  told = [(run.results or {}).get(f"staleness_{name}") for name in ("mean", "p95", "max")]
  if all(map(_known, told)):
    return tuple(told)
  stats = StalenessStats()
  for counts in run.staleness:
    stats.add_counts(counts)
  return tuple(stats.summary().values()) if any(run.staleness) else None


def _tiles(runs: Sequence[RunFiles]) -> str:
  if len(runs) == 1:
    tiles = "".join(f"<div class=tile><span class=soft>{escape(name)}</span><b>{escape(value)}</b></div>"
                    for name, value in _figures(runs[0]))
    return f"<section class=tiles>{tiles}</section>" if tiles else (
      "<p>No step has been logged yet; make the report again later.</p>")
  tables = [dict(_figures(run)) for run in runs]
  names = list(dict.fromkeys(name for table in tables for name in table))
  rows = "".join(f"<tr><th scope=row>{escape(run.name)}</th>" +
                 "".join(f"<td>{escape(table.get(name, '-'))}</td>" for name in names) + "</tr>"
                 for run, table in zip(runs, tables))
  heads = "".join(f"<th scope=col>{escape(name)}</th>" for name in names)
  return f"<div class=scroll><table><tr><th scope=col>run</th>{heads}</tr>{rows}</table></div>"


def _controls(groups: Sequence[Group], runs: Sequence[RunFiles]) -> str:
  axes = "".join(f'<label><input type=radio name=x value={axis}{" checked" if axis == "steps" else ""}> {name}</label>'
                 for axis, name in _AXIS_NAMES.items())
  keys = ""
  if len(runs) > 1:
    keys = "".join(
      f'<span class=key><svg width=34 height=10 class="plot legend"><path d="M1 5H33" class="line s{g.color % 7}" '
      f'stroke-dasharray="{svg.DASHES[g.color % 7]}"/></svg>{escape(g.name)}</span>' for g in groups)
    if any(len(group.runs) > 1 for group in groups):
      keys += "<span class=soft>line: mean over seeds; band: least to greatest</span>"
  return f"<nav class=bar><fieldset><legend>over</legend>{axes}</fieldset><div class=keys>{keys}</div></nav>"


# --- Charts ---


def _by_axis(drawn: Mapping[str, str]) -> str:
  return "".join(f'<div class="ax ax-{axis}">{chart}</div>' for axis, chart in drawn.items())


def _chart_section(name: str, members: Sequence[charts.Chart], groups: Sequence[Group]) -> str:
  cards = []
  for chart in members:
    drawn = charts.metric_charts(chart, groups)
    if drawn:
      cards.append(f"<figure>{_by_axis(drawn)}<figcaption>{escape(chart.note)} <code>{escape(chart.key)}</code>"
                   "</figcaption></figure>")
  return f"<section><h2>{name}</h2><div class=grid>{''.join(cards)}</div></section>" if cards else ""


def _limits_section(runs: Sequence[RunFiles]) -> str:
  """Tokens a second of both sides beside what their devices could do, and by what formula."""
  rows, notes = "", []
  for run in runs:
    sides = speeds(run.train, run.limits)
    rows += "".join(
      f"<tr><th scope=row>{escape(run.name)}</th><td>{escape(side.name)}</td><td>{side.tokens_per_sec:,.0f}</td>"
      f"<td>{side.limit_tokens_per_sec:,.0f}</td><td>{side.tokens_per_sec / side.limit_tokens_per_sec:.2%}</td>"
      f"<td>{side.bound}</td></tr>" for side in sides)
    if run.limits is not None:
      notes.append(f"<li><b>{escape(run.name)}</b>: {escape(_peaks(run.limits))}</li>")
  if not notes:
    return ""
  heads = "".join(f"<th scope=col>{name}</th>" for name in
                  ("run", "who", "response tokens/s", "limit", "share", "bound by"))
  table = f"<div class=scroll><table><tr>{heads}</tr>{rows}</table></div>" if rows else ""
  return (
    f"<section><h2>Of the machine’s limit</h2>{table}<figcaption>Trainer: limit = peak FLOP/s ÷ (6 N × (prompt + "
    "response tokens) ÷ response tokens); 4 N with adapters. Searchers: limit = 1 ÷ the longer of 2 N ÷ peak FLOP/s and "
    "(W ÷ slots + K × context) ÷ memory bytes/s. N: parameters of layers and head, W: their bytes, K: bytes of a "
    "token’s keys and values, context: the prompt and half of the response. Padding, attention’s own products, "
    "what is computed again, prefill and scoring are no work here but take time.</figcaption>"
    f"<ul class=soft>{''.join(notes)}</ul></section>")


def _peaks(limits: Limits) -> str:
  """What the machine of a run is, in words."""
  devices = (f"{limits.trainer_devices} + {limits.searcher_devices} devices of kind {limits.device_kind}, N = "
             f"{limits.sample_flops_per_token / 2:.3g}, peaks {limits.peaks}")
  if limits.trainer_flops_per_sec is None:
    return devices + ": the limit is unknown"
  shared = "; both sides share the machine, so their shares add up" if limits.one_machine else ""
  return (f"{devices}: {limits.trainer_flops_per_sec:.3g} FLOP/s for the trainer, {limits.searcher_flops_per_sec:.3g} "
          f"FLOP/s and {limits.searcher_bytes_per_sec:.3g} bytes/s for all searchers{shared}")


def _run_section(index: int, run: RunFiles, *, shown: bool) -> str:
  """What is of one run: its staleness over time, its timeline, its rollouts."""
  parts = []
  maps = charts.staleness_maps(run)
  if maps:
    parts.append("<h2>Staleness over time</h2><figure class=wide>" + _by_axis(maps) +
                 "<figcaption>Each column holds 100% of the responses trained on meanwhile; shades by the root of the "
                 "share, so that thin tails show.</figcaption></figure>")
  if run.activity is not None:
    parts.append(_timeline(run))
  if run.rollouts:
    parts.append(_rollouts(run))
  if not parts:
    return ""
  cls = "run shown" if shown else "run"
  return f'<section class="{cls}" data-run="{index}" data-name="{escape(run.name)}">{"".join(parts)}</section>'


def _timeline(run: RunFiles) -> str:
  activity = run.activity
  kinds = charts.kinds_of(activity)
  keys = "".join(f'<span class=key><svg width=14 height=14 class="plot legend"><rect width=14 height=14 '
                 f'class="{cls}"/></svg>{escape(kind)}</span>' for kind, cls in kinds.items())
  shares = charts.time_shares(activity)
  heads = "".join(f"<th scope=col>{escape(kind)}</th>" for kind in kinds)
  covered = charts.total_secs(activity.covered)
  rows = ""
  for lane, actor in enumerate(activity.actors):
    cells = "".join(f"<td>{shares[actor].get(kind, 0.0):.1%}</td>" for kind in kinds)
    rows += (f"<tr><th scope=row>{escape(actor)}</th>{cells}"
             f"<td>{charts.idle_secs(activity, lane) / covered if covered else 0.0:.1%}</td></tr>")
  sampled = "" if activity.is_whole else (" The file is long: shares are of windows spread evenly over it, gaps "
                                         "between windows are blank.")
  close = [charts.close_up(activity, at=at, title=title) for at, title in
           ((0.0, "The beginning, close up"), (0.5, "The middle, close up"), (1.0, "The end, close up"))]
  return (
    f"<h2>Who did what when</h2><div class=keys>{keys}</div>"
    f"<figure class=wide>{charts.overview(activity)}<figcaption>Blank: nothing recorded, as waiting for a lock or for "
    f"Python.{sampled}</figcaption></figure>"
    f"<div class=scroll><table><tr><th scope=col>share of time</th>{heads}<th scope=col>nothing</th></tr>{rows}</table>"
    f"</div><figure class=wide>{close[1]}</figure><details><summary>The beginning and the end</summary>"
    f"<figure class=wide>{close[0]}</figure><figure class=wide>{close[2]}</figure></details>")


# --- Rollouts ---


def _rollouts(run: RunFiles) -> str:
  rewards = [r["reward"] for r in run.rollouts if _known(r.get("reward"))]
  low, high = (min(rewards), max(rewards)) if rewards else (0.0, 1.0)
  kinds = "".join(f"<option>{escape(kind)}</option>" for kind in dict.fromkeys(r["kind"] for r in run.rollouts))
  items = "".join(_rollout(r) for r in run.rollouts)
  return (
    "<h2>Rollouts to read</h2><form class=filter>"
    "<input type=search name=text placeholder='search prompt and response' aria-label='search'>"
    f"<label>kind <select name=kind><option value=''>all</option>{kinds}</select></label>"
    f"<label>reward from <input type=number step=any name=low placeholder='{low:g}'></label>"
    f"<label>to <input type=number step=any name=high placeholder='{high:g}'></label>"
    "<label>order <select name=order><option value=step>newest first<option value=old>oldest first"
    "<option value=reward>best reward<option value=bad>worst reward<option value=gap>greatest log-prob gap"
    "<option value=ratio>greatest |log π − log ref|</select></label>"
    f"<output>{len(run.rollouts)} rollouts</output></form><div class=rollouts>{items}</div>")


def _numbers(values: Any) -> list[float]:
  """Of the tokens of a response; those of a policy that has run away may not be finite."""
  return [number(value) for value in values] if isinstance(values, list) else []


def _rollout(record: Mapping[str, Any]) -> str:
  mu, ref, pi = (_numbers(record.get(f"token_{name}")) for name in ("log_mu", "log_ref", "log_pi"))
  gap = max((abs(a - b) for a, b in zip(pi, mu)), default=math.nan)
  ratio = sum(pi or mu) - sum(ref) if ref and (pi or mu) else math.nan
  reward = number(record.get("reward"))
  facts = [f"step {record.get('step')}", f"reward {reward:.3g}", f"version {record.get('version')}",
           f"{record.get('num_response_tokens')} tokens"]
  facts += [f"log π − log ref {ratio:+.3g}"] if math.isfinite(ratio) else []
  facts += [f"log-prob gap {gap:.1g}"] if math.isfinite(gap) else []
  facts += ["truncated"] if record.get("truncated") else []
  facts += [f"searcher {record['searcher']}"] if "searcher" in record else []
  numbers = {"step": number(record.get("step", 0)), "reward": reward, "gap": gap, "ratio": abs(ratio)}
  data = "".join(f' data-{name}="{"" if not math.isfinite(value) else value}"' for name, value in numbers.items())
  tokens = ""
  if ref and (pi or mu):
    named = record.get("token_texts") or [""] * len(ref)
    ids = record.get("token_ids") or [0] * len(ref)
    rows = [[text or f"[{token}]", round(a - b, 3), a, b] for text, token, a, b in zip(named, ids, pi or mu, ref)]
    source = "by the trainer's path" if pi else "as sampled"
    text = json.dumps(plain(rows), ensure_ascii=False)
    tokens = f'<div class=tokens data-source="{source}" data-tokens="{escape(text)}"></div>'
  start = str(record.get("response", ""))[:110].replace("\n", " ")
  kind = escape(record["kind"])
  return (
    f'<details class=rollout data-kind="{kind}"{data}><summary><span class=soft>{kind} · {escape(" · ".join(facts))}'
    f'</span><span class=start>{escape(start)}</span></summary>'
    f'<h4>prompt</h4><pre class=prompt>{escape(record.get("prompt", ""))}</pre>'
    f'<h4>response</h4><pre class=response>{escape(record.get("response", ""))}</pre>{tokens}</details>')


# --- Config ---


def _config_section(runs: Sequence[RunFiles]) -> str:
  keys = sorted({key for run in runs for key in run.config})
  other = differences(runs)
  heads = "".join(f"<th scope=col>{escape(run.name)}</th>" for run in runs)

  def table(chosen: Sequence[str], columns: Sequence[RunFiles], head: str) -> str:
    rows = "".join(f"<tr><th scope=row><code>{escape(key)}</code></th>" +
                   "".join(f"<td>{escape(json.dumps(run.config.get(key)))}</td>" for run in columns) + "</tr>"
                   for key in chosen)
    return f"<div class=scroll><table class=config><tr><th scope=col>key</th>{head}</tr>{rows}</table></div>"

  parts = ["<h2>Config</h2>"]
  if len(runs) > 1:
    parts.append(table(other, runs, heads) if other else "<p>All runs have the same config.</p>")
    shared = [key for key in keys if key not in other]
    parts.append(f"<details><summary>{len(shared)} keys that are the same in all</summary>" +
                 table(shared, runs[:1], "<th scope=col>value</th>") + "</details>")
  else:
    parts.append(f"<details><summary>{len(keys)} keys</summary>{table(keys, runs, heads)}</details>")
  return f"<section>{''.join(parts)}</section>"

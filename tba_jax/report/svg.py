"""Charts as SVG text: lines with bands, heat maps, lanes of activity. Numbers in, markup out; no plotting package.

Colours are CSS variables (--ink, --grid, --c0 ..), so that a page or `standalone` decides between light and dark. All
charts are drawn in a box of fixed size that the browser scales; text keeps its proportions. Names are escaped.
"""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Mapping, Sequence

import numpy as np

NUM_COLORS = 7
# Okabe and Ito's colours, which people with any colour vision tell apart; lighter where the ground is dark.
LIGHT = ("#0072b2", "#d55e00", "#009e73", "#a6478a", "#8a6d00", "#3b3b3b", "#7cc6ec")
DARK = ("#56b4e9", "#ff8a3c", "#2fc79a", "#e39ac6", "#e8c547", "#d0d0d0", "#2478c4")
# The second mark of a line, for those who see no colours: its dashes.
DASHES = ("", "6 3", "2 3", "8 3 2 3", "4 4", "1 2", "10 4")

_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 12, 26, 40  # margins: tick labels on the left, the axis' name below


@dataclasses.dataclass(frozen=True)
class Line:
  """One curve: x ascending [N]; y [N], NaN where nothing is known; low and high [N] bound its band, if it has one."""

  name: str
  color: int
  x: np.ndarray
  y: np.ndarray
  low: np.ndarray | None = None
  high: np.ndarray | None = None
  dots: bool = False  # few points, each a measurement of its own


@dataclasses.dataclass(frozen=True)
class Axis:
  """What an axis shows; `percent` writes 0.5 as 50%."""

  label: str
  percent: bool = False
  low: float | None = None  # where the axis begins or ends whatever the data
  high: float | None = None


# --- Scales ---


def ticks(low: float, high: float, *, most: int = 5) -> list[float]:
  """Round numbers within [low, high]: multiples of 1, 2 or 5 times a power of ten, at most `most` + 1 of them."""
  span = high - low
  if not (math.isfinite(span) and span > 0):
    return [low]
  rough = span / most
  power = 10.0 ** math.floor(math.log10(rough))
  step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
  first = math.ceil(low / step - 1e-9)
  return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def number_text(value: float, *, percent: bool = False) -> str:
  """A tick's label: 1.5k, 20M, 0.25, 3e-05, 40%."""
  if percent:
    return f"{100 * value:.4g}%"
  size = abs(value)
  for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
    if size >= unit * (10 if unit == 1e3 else 1):
      return f"{value / unit:.4g}{name}"
  if 0 < size < 1e-3:
    return f"{value:.2g}"
  return f"{round(value, 9):.5g}"


def _bounds(values: Sequence[np.ndarray], axis: Axis) -> tuple[float, float]:
  known = [part[np.isfinite(part)] for part in values]
  joined = np.concatenate(known) if known else np.zeros(0)
  low, high = (float(joined.min()), float(joined.max())) if len(joined) else (0.0, 1.0)
  low, high = (low if axis.low is None else axis.low), (high if axis.high is None else axis.high)
  if high - low <= 1e-12 * max(abs(low), abs(high), 1e-12):
    pad = abs(low) / 2 or 1.0
    low, high = (low - pad if axis.low is None else low), high + pad
  return low, high


class _Scale:
  """Maps data to the box. `low_at` and `high_at` are where the ends of the axis lie in it."""

  def __init__(self, low: float, high: float, low_at: float, high_at: float):
    self.low, self.high, self._low_at = low, high, low_at
    self._factor = (high_at - low_at) / (high - low)

  def __call__(self, value: np.ndarray | float) -> np.ndarray | float:
    return self._low_at + (value - self.low) * self._factor


# --- Parts ---


def _text(x: float, y: float, text: str, anchor: str = "middle", cls: str = "tick", more: str = "") -> str:
  return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{cls}"{more}>{html.escape(text)}</text>'


def _open(width: int, height: int, title: str, cls: str, more: str = "") -> str:
  name = html.escape(title, quote=True)
  return f'<svg viewBox="0 0 {width} {height}" class="plot {cls}" role="img" aria-label="{name}"{more}>'


def _points(x: np.ndarray, y: np.ndarray) -> str:
  return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x.tolist(), y.tolist()))


def _pieces(known: np.ndarray) -> list[slice]:
  """Stretches of True in a row."""
  edges = np.flatnonzero(np.diff(np.concatenate([[False], known, [False]]).astype(np.int8)))
  return [slice(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


def _axes(x_axis: Axis, y_axis: Axis, x_scale: _Scale, y_scale: _Scale, width: int, height: int, title: str) -> str:
  bottom, right = height - _BOTTOM, width - _RIGHT
  parts = [_text(12, 15, title, "start", "title")]
  for value in ticks(y_scale.low, y_scale.high, most=6):
    at = y_scale(value)
    parts.append(f'<path d="M{_LEFT} {at:.1f}H{right}" class="grid"/>')
    parts.append(_text(_LEFT - 5, at + 4, number_text(value, percent=y_axis.percent), "end"))
  for value in ticks(x_scale.low, x_scale.high, most=(width - _LEFT) // 60):
    at = x_scale(value)
    # A label at the edge is moved inwards, or it would be cut off.
    text = number_text(value, percent=x_axis.percent)
    parts.append(f'<path d="M{at:.1f} {bottom}v4" class="axis"/>')
    parts.append(_text(min(at, width - 4 * len(text)), bottom + 16, text))
  parts.append(f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" class="axis"/>')
  parts.append(_text((_LEFT + right) / 2, height - 6, x_axis.label, "middle", "label"))
  middle = (_TOP + bottom) / 2
  parts.append(_text(10, middle, y_axis.label, "middle", "label", f' transform="rotate(-90 10 {middle:.1f})"'))
  return "".join(parts)


# --- Charts ---


def line_chart(
  lines: Sequence[Line], *, title: str, x_axis: Axis, y_axis: Axis, width: int = 420, height: int = 250,
  marks: Sequence[float] = (), mark_name: str = "",
) -> str:
  """Curves over a common x axis. The frame holds every curve, and of bands what lies within 2% to 98% of their values.

  Args:
    marks: x of vertical lines, named `mark_name`.
  """
  of_band = [np.nanquantile(band, (0.02, 0.98)) for line in lines for band in (line.low, line.high)
             if band is not None and np.isfinite(band).any()]
  x_scale = _Scale(*_bounds([line.x for line in lines], x_axis), _LEFT, width - _RIGHT)
  low, high = _bounds([line.y for line in lines] + of_band, y_axis)
  pad = 0.04 * (high - low)
  low, high = (low - pad if y_axis.low is None else low), (high + pad if y_axis.high is None else high)
  y_scale = _Scale(low, high, height - _BOTTOM, _TOP)
  form = f' data-x="{x_scale.low!r},{x_scale.high!r}" data-y="{low!r},{high!r}" data-p="{int(y_axis.percent)}"'
  form += f' data-box="{_LEFT},{width - _RIGHT},{height - _BOTTOM},{_TOP}"'
  parts = [_open(width, height, title, "lines", form), _axes(x_axis, y_axis, x_scale, y_scale, width, height, title)]
  for at in (x_scale(mark) for mark in marks):
    parts.append(f'<path d="M{at:.1f} {_TOP}V{height - _BOTTOM}" class="mark"><title>{html.escape(mark_name)}</title>'
                 "</path>")
  for line in lines:
    parts.append(_curve(line, x_scale, y_scale, top=_TOP, bottom=height - _BOTTOM))
  return "".join(parts) + "</svg>"


def _curve(line: Line, x_scale: _Scale, y_scale: _Scale, *, top: float, bottom: float) -> str:
  parts, color = [], f"s{line.color % NUM_COLORS}"
  x = x_scale(line.x)
  if line.low is not None and line.high is not None:
    low, high = (np.clip(y_scale(band), top, bottom) for band in (line.low, line.high))
    for piece in _pieces(np.isfinite(low) & np.isfinite(high)):
      edge = _points(x[piece], high[piece]) + " " + _points(x[piece][::-1], low[piece][::-1])
      parts.append(f'<polygon points="{edge}" class="band {color}"/>')
  y = np.clip(y_scale(line.y), top, bottom)
  known = np.isfinite(y)
  dash = DASHES[line.color % len(DASHES)]
  name = html.escape(line.name, quote=True)
  for piece in _pieces(known):
    style = f' stroke-dasharray="{dash}"' if dash else ""
    parts.append(f'<polyline points="{_points(x[piece], y[piece])}" class="line {color}"{style} data-name="{name}"/>')
  if line.dots or known.sum() == 1:
    parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" class="dot {color}"/>' for a, b in zip(x[known], y[known])]
  return "".join(parts)


_LEVELS = 8  # shades of a heat map


def heat_map(
  shares: np.ndarray, *, x_edges: np.ndarray, rows: Sequence[str], title: str, x_axis: Axis, y_label: str,
  width: int = 1000, height: int = 300,
) -> str:
  """Shares [X, Y] from 0 to 1 as shades, row 0 at the bottom; column i reaches from x_edges[i] to x_edges[i + 1]."""
  x_scale = _Scale(float(x_edges[0]), float(x_edges[-1]), _LEFT, width - 74)
  bottom, cell = height - _BOTTOM, (height - _BOTTOM - _TOP) / len(rows)
  parts = [_open(width, height, title, "heat"), _text(12, 15, title, "start", "title")]
  peak = max(float(shares.max(initial=0.0)), 1e-9)
  paths: dict[int, list[str]] = {}
  for column, row in zip(*np.nonzero(shares > 0)):
    level = max(1, math.ceil(_LEVELS * math.sqrt(shares[column, row] / peak)))  # the root shows thin tails
    left, right = x_scale(x_edges[column]), x_scale(x_edges[column + 1])
    top = bottom - (row + 1) * cell
    paths.setdefault(level, []).append(f"M{left:.1f} {top:.1f}H{right:.1f}v{cell:.1f}H{left:.1f}z")
  for level, cells in sorted(paths.items()):
    parts.append(f'<path d="{"".join(cells)}" class="cell" fill-opacity="{level / _LEVELS:.3f}"/>')
  shown = max(1, math.ceil(len(rows) / 20))
  for row in range(0, len(rows), shown):
    parts.append(_text(_LEFT - 5, bottom - (row + 0.5) * cell + 4, rows[row], "end"))
  for value in ticks(x_scale.low, x_scale.high, most=12):
    parts.append(f'<path d="M{x_scale(value):.1f} {bottom}v4" class="axis"/>')
    parts.append(_text(x_scale(value), bottom + 16, number_text(value)))
  parts.append(f'<path d="M{_LEFT} {_TOP}V{bottom}H{width - 74}" class="axis"/>')
  parts.append(_text(_LEFT, height - 6, x_axis.label, "start", "label"))  # seen before one scrolls a narrow screen
  middle = (_TOP + bottom) / 2
  parts.append(_text(10, middle, y_label, "middle", "label", f' transform="rotate(-90 10 {middle:.1f})"'))
  for level in range(1, _LEVELS + 1):
    at = _TOP + (bottom - _TOP) * (1 - level / _LEVELS)
    tall = (bottom - _TOP) / _LEVELS
    parts.append(f'<rect x="{width - 62}" y="{at:.1f}" width="14" height="{tall:.1f}" class="cell" '
                 f'fill-opacity="{level / _LEVELS:.3f}"/>')
    if level in (_LEVELS // 2, _LEVELS):
      parts.append(_text(width - 44, at + 8, f"{peak * (level / _LEVELS) ** 2:.0%}", "start"))
  return "".join(parts) + "</svg>"


def lanes(
  names: Sequence[str], boxes: Mapping[str, Sequence[tuple[int, float, float, float, float]]], *,
  colors: Mapping[str, str], title: str, x_axis: Axis, x_range: tuple[float, float], width: int = 1000,
  breaks: Sequence[float] = (),
) -> str:
  """Who did what when: a lane for each name, in it boxes by kind.

  Args:
    boxes: {kind: [(lane, start, end, from, to)]}, start and end on the x axis, from and to the box's share of the
      lane's height, 0 at its foot.
    colors: {kind: CSS class}.
    breaks: x at which a run that had stopped went on.
  """
  lane, gap, left = 30, 8, 84
  bottom = _TOP + len(names) * (lane + gap)
  height = bottom + 40
  x_scale = _Scale(*x_range, left, width - _RIGHT)
  parts = [_open(width, height, title, "lanes"), _text(12, 15, title, "start", "title")]
  tops = [_TOP + gap / 2 + index * (lane + gap) for index in range(len(names))]
  for name, top in zip(names, tops):
    parts.append(_text(left - 6, top + lane / 2 + 4, name, "end"))
    parts.append(f'<rect x="{left}" y="{top:.1f}" width="{width - _RIGHT - left}" height="{lane}" class="empty"/>')
  for kind, found in boxes.items():
    cells = []
    for index, start, end, low, high in found:
      x0, x1 = x_scale(start), x_scale(end)
      foot = tops[index] + lane
      cells.append(f"M{x0:.1f} {foot - lane * high:.1f}H{max(x1, x0 + 0.3):.1f}V{foot - lane * low:.1f}H{x0:.1f}z")
    if cells:
      parts.append(f'<path d="{"".join(cells)}" class="{colors[kind]}"><title>{html.escape(kind)}</title></path>')
  for at in breaks:
    parts.append(f'<path d="M{x_scale(at):.1f} {_TOP}V{bottom}" class="mark"><title>resumed</title></path>')
  for value in ticks(*x_range, most=12):
    parts.append(f'<path d="M{x_scale(value):.1f} {bottom}v4" class="axis"/>')
    text = number_text(value)
    parts.append(_text(min(x_scale(value), width - 4 * len(text)), bottom + 16, text))
  parts.append(f'<path d="M{left} {bottom}H{width - _RIGHT}" class="axis"/>')
  parts.append(_text(left, height - 6, x_axis.label, "start", "label"))
  return "".join(parts) + "</svg>"


# --- Files of their own ---

_RULES = """
.plot text{font:11px system-ui,sans-serif;fill:var(--ink)} .plot .title{font-weight:600;font-size:13px}
.plot .label{fill:var(--soft)} .plot .grid{stroke:var(--grid);fill:none} .plot .axis{stroke:var(--soft);fill:none}
.plot .mark{stroke:var(--soft);stroke-dasharray:2 3;fill:none} .plot .line{fill:none;stroke-width:1.7}
.plot .band{stroke:none;fill-opacity:.18} .plot .cell{fill:var(--c0)} .plot .empty{fill:var(--lane)}
""" + "".join(f".plot .s{i}.line{{stroke:var(--c{i})}}.plot .s{i}.band,.plot .s{i}.dot,.f{i}{{fill:var(--c{i})}}\n"
              for i in range(NUM_COLORS)) + ".k-wait{fill:var(--wait)}\n"


def style() -> str:
  """The CSS that every chart needs: colours for light and dark, lines, texts."""

  def variables(colors: Sequence[str], others: str) -> str:
    return "".join(f"--c{i}:{color};" for i, color in enumerate(colors)) + others

  light = variables(LIGHT, "--ink:#1c2126;--soft:#5b6570;--grid:#e2e6ea;--page:#fff;--lane:#eef1f4;--wait:#b9c1c9;")
  dark = variables(DARK, "--ink:#e7eaed;--soft:#9aa5b1;--grid:#333b44;--page:#14181c;--lane:#232a31;--wait:#55606b;")
  return f":root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}{_RULES}"


def standalone(chart: str, legend: Sequence[tuple[str, int]] = ()) -> str:
  """A chart as an SVG file that needs no page, for a README; `legend`: (name, colour) under the title, at the right."""
  head, _, body = chart.partition(">")
  width, height = (int(value) for value in head.split('viewBox="0 0 ')[1].split('"')[0].split())
  keys = []
  for row, (name, color) in enumerate(legend):
    at, dash = height + 16 + 16 * row, DASHES[color % len(DASHES)]
    keys.append(f'<path d="M{_LEFT} {at - 4}h26" class="line s{color % NUM_COLORS}" stroke-dasharray="{dash}"/>')
    keys.append(_text(_LEFT + 32, at, name, "start"))
  full = height + 16 * len(legend) + (8 if legend else 0)
  head = head.replace(f"0 0 {width} {height}", f"0 0 {width} {full}", 1)
  sized = f'{head} xmlns="http://www.w3.org/2000/svg" width="{width}" height="{full}">'
  ground = f'<rect width="{width}" height="{full}" fill="var(--page)"/>'
  return f"{sized}<style>{style()}</style>{ground}{body.removesuffix('</svg>')}{''.join(keys)}</svg>\n"

"""Collectives in the text of a compiled program, each times how often the loops around it run.

The compiler's own analysis takes the body of a loop once. Here the call graph is walked from the entry: a `while` whose
condition compares a counter with a constant runs that often, any other one as often as the caller says.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

_COLLECTIVE = re.compile(
  r"= (?P<shape>\(?.*?) (?P<kind>all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?\("
)
_HEADER = re.compile(r"^(ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{\s*$")
_WHILE = re.compile(r" while\(.*condition=%?([\w.\-]+), body=%?([\w.\-]+)")
_CALLED = re.compile(r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_BOUND = re.compile(r" constant\((\d+)\)")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_GROUPS = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_IOTA_GROUPS = re.compile(r"replica_groups=\[(\d+),(\d+)\]")
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_ELEMENT_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "s64": 8, "u64": 8, "f64": 8}


class Collective(NamedTuple):
  """A collective of a program. `wire_bytes` is what one call moves over the busiest link of a line of devices.

  Permutes that run around a ring in both directions at once are added up, which overstates them by up to two.
  """

  kind: str
  calls: float
  wire_bytes: float


def collectives(text: str, *, unknown_trips: float) -> list[Collective]:
  """Every collective of a compiled program.

  Args:
    text: `compiled.as_text()`.
    unknown_trips: how often a loop without a constant bound runs (the loop over tokens ends when no row lives).
  Raises: ValueError if the text has no entry computation.
  """
  bodies, entry = _computations(text)
  found: dict[tuple[str, str], Collective] = {}
  _walk(entry, 1.0, bodies, unknown_trips, found)
  return list(found.values())


def link_bytes(text: str, *, unknown_trips: float) -> float:
  """Bytes over the busiest link in one call of the program."""
  return sum(each.calls * each.wire_bytes for each in collectives(text, unknown_trips=unknown_trips))


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
  """Lines of each computation, and the name of the entry."""
  bodies: dict[str, list[str]] = {}
  entry, current = "", None
  for line in text.splitlines():
    header = _HEADER.match(line)
    if header:
      current = bodies.setdefault(header["name"], [])
      if line.startswith("ENTRY"):
        entry = header["name"]
    elif line.startswith("}"):
      current = None
    elif current is not None:
      current.append(line)
  if not entry:
    raise ValueError("this is not the text of a compiled program: it has no ENTRY computation.")
  return bodies, entry


def _walk(
  name: str, calls: float, bodies: dict[str, list[str]], unknown_trips: float, found: dict[tuple[str, str], Collective]
) -> None:
  for number, line in enumerate(bodies[name]):
    loop = _WHILE.search(line)
    if loop:
      condition, body = loop.groups()
      _walk(body, calls * _num_trips(line, bodies[condition], unknown_trips), bodies, unknown_trips, found)
      continue
    branches = ",".join(_BRANCHES.findall(line)).split(",")
    for other in (*_CALLED.findall(line), *(branch.strip(" %") for branch in branches)):
      if other in bodies:
        _walk(other, calls, bodies, unknown_trips, found)
    collective = _COLLECTIVE.search(line)
    if collective:
      channel = _CHANNEL.search(line)
      # An asynchronous collective that is fused with what runs beside it appears once for each part, on one channel.
      key = (collective["kind"], channel[1]) if channel else (name, str(number))
      kind = "reduce-scatter" if name.startswith("all-reduce-scatter") else collective["kind"]
      found.setdefault(key, Collective(kind, calls, _wire_bytes(kind, collective["shape"], line)))


def _num_trips(line: str, condition: list[str], unknown_trips: float) -> float:
  known = _TRIPS.search(line)
  if known:
    return float(known[1])
  bounds = [int(bound) for text in condition for bound in _BOUND.findall(text)]
  compares = [text for text in condition if " compare(" in text and "ROOT" in text]
  return float(bounds[0]) if len(bounds) == 1 and compares else unknown_trips


def _wire_bytes(kind: str, shape: str, line: str) -> float:
  """Of a ring or line of n devices, by the size of the whole array: (n - 1) / n of it, twice for an all-reduce."""
  sizes = [
    math.prod(int(size) for size in dims.split(",") if size) * _element_bytes(dtype)
    for dtype, dims in _ARRAY.findall(shape)
  ]
  # A start op returns (operands, results, ...): what counts is the largest array. A reduce that is combined over
  # several arrays returns a tuple of them all.
  size = max(sizes, default=0) if f"{kind}-start(" in line else sum(sizes)
  if kind == "collective-permute":
    return size
  devices = _group_size(line)
  if kind == "reduce-scatter" and " reduce-scatter(" in line:
    size *= devices  # its result is one shard
  return size * (devices - 1) / devices * (2 if kind == "all-reduce" else 1)


def _group_size(line: str) -> int:
  listed, iota, mesh = _GROUPS.search(line), _IOTA_GROUPS.search(line), _MESH_GROUPS.search(line)
  if listed:
    return max(1, listed[1].count(",") + 1)
  if iota:
    return int(iota[2])
  if mesh:
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
    return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", mesh[2]))
  return 1


def _element_bytes(dtype: str) -> int:
  return _ELEMENT_BYTES[dtype] if dtype in _ELEMENT_BYTES else 4

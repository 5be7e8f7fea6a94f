"""Compiles programs for devices that need not be here, and keeps what the compiler said of each in a folder.

What is kept is found again by the program's own text (and versions and devices), so a change of config or code that
leaves a program alone costs no compile, and any other one cannot be answered by an old result.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import re
import time

import jax
import jaxlib

from tba_jax.metrics import write_atomic
from tba_jax.plan import hlo
from tba_jax.plan.programs import Program

_USED = re.compile(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?)")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Compiled:
  """What the compiler says of a program, on each device.

  argument_bytes, output_bytes: of these `alias_bytes` are one and the same, as donated. temp_bytes: at the worst
  moment. link_bytes: over the busiest inter-chip link in one call, loops counted as often as they run.
  compiler_flops: its own count, which takes the body of a loop once. overflow_bytes: not 0: it does not fit, and would
  need so many; nothing else is known then.
  """

  name: str
  argument_bytes: int = 0
  output_bytes: int = 0
  alias_bytes: int = 0
  temp_bytes: int = 0
  code_bytes: int = 0
  link_bytes: float = 0.0
  collectives: dict[str, float] = dataclasses.field(default_factory=dict)  # kind -> bytes
  compiler_flops: float = 0.0
  compile_secs: float = 0.0
  overflow_bytes: int = 0


def compile_program(program: Program, *, target: str, cache: pathlib.Path) -> Compiled:
  """Lowers and compiles, or reads what an earlier process found.

  Args:
    target: the topology and devices that the program is for, in words; part of what it is found again by.
  """
  lowered = program.lower()
  versions = (jax.__version__, jaxlib.__version__, _libtpu_version())
  key = hashlib.sha256("\n".join((target, *versions, lowered.as_text())).encode())
  path = cache / f"{key.hexdigest()[:32]}.json"
  if path.is_file():
    return dataclasses.replace(Compiled(**json.loads(path.read_text())), name=program.name)
  began = time.monotonic()
  try:
    compiled = lowered.compile()
    result = _describe(program, compiled, time.monotonic() - began)
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    result = Compiled(program.name, overflow_bytes=_overflow(str(error)), compile_secs=time.monotonic() - began)
  cache.mkdir(parents=True, exist_ok=True)
  write_atomic(path, json.dumps(dataclasses.asdict(result), indent=2) + "\n")
  return result


def _describe(program: Program, compiled: jax.stages.Compiled, secs: float) -> Compiled:
  memory, cost, text = compiled.memory_analysis(), compiled.cost_analysis(), compiled.as_text()
  by_kind: dict[str, float] = {}
  for each in hlo.collectives(text, unknown_trips=program.unknown_trips):
    by_kind[each.kind] = by_kind.setdefault(each.kind, 0.0) + each.calls * each.wire_bytes
  return Compiled(
    name=program.name, argument_bytes=memory.argument_size_in_bytes, output_bytes=memory.output_size_in_bytes,
    alias_bytes=memory.alias_size_in_bytes, temp_bytes=memory.temp_size_in_bytes,
    code_bytes=memory.generated_code_size_in_bytes, link_bytes=sum(by_kind.values()), collectives=by_kind,
    compiler_flops=float(cost["flops"]) if "flops" in cost else 0.0, compile_secs=secs,
  )


def _overflow(message: str) -> int:
  """Bytes that the program would use, out of the compiler's message; 1 if it does not say."""
  used = _USED.search(message)
  return round(float(used[1]) * _UNITS[used[2]]) if used else 1


def _libtpu_version() -> str:
  import importlib.metadata

  try:
    return importlib.metadata.version("libtpu")
  except importlib.metadata.PackageNotFoundError:
    return ""

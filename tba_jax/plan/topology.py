"""Devices to plan for: a TPU slice that is not here, by name, or virtual CPU devices.

A slice comes from libtpu (pip), which compiles for it on any machine; nothing is executed.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from tba_jax.chips import CHIPS

# The block of chips on one host, which one process drives; libtpu assumes 2x2x1 of any chip if it is not told.
_CHIPS_PER_HOST = {"v4": (2, 2, 1), "v5e": (2, 4, 1), "v5p": (2, 2, 1), "v6e": (2, 4, 1)}
_INSTALL = "pip install -r requirements-tpu.txt (684 MB; no TPU is needed)"


class Slice(NamedTuple):
  """What `--topology` names."""

  name: str  # v5e:2x4, cpu:8
  chip: str  # a key of CHIPS, or cpu
  shape: tuple[int, ...]
  devices: Sequence[Any]  # jax devices
  num_hosts: int


def parse(name: str) -> tuple[str, tuple[int, ...]]:
  """("v5e", (2, 4)) of "v5e:2x4". Raises ValueError for a name of another form or an unknown chip."""
  found = re.fullmatch(r"(\w+):([1-9]\d*(?:x[1-9]\d*)*)", name)
  chips = (*CHIPS, "cpu")
  if not found or found[1] not in chips:
    raise ValueError(
      f"--topology={name} must be CHIP:SHAPE with a chip of {', '.join(chips)}; for example v5e:2x4 or cpu:8")
  return found[1], tuple(int(size) for size in found[2].split("x"))


def prepare_environment(*, num_cpu_devices: int) -> None:
  """What jax and libtpu must find when they are loaded: CPU devices alone, and leave to share libtpu with others."""
  os.environ.update(
    JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost", ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    TPU_STDERR_LOG_LEVEL="3", TPU_MIN_LOG_LEVEL="3",
  )
  flags = os.environ["XLA_FLAGS"] if "XLA_FLAGS" in os.environ else ""
  os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={num_cpu_devices}".strip()


def require_compiler(name: str) -> None:
  """Raises ValueError if the topology is a TPU slice and libtpu is not installed."""
  if parse(name)[0] != "cpu" and importlib.util.find_spec("libtpu") is None:
    raise ValueError(f"--topology={name} needs libtpu, the TPU compiler, which is not installed; {_INSTALL}")


def describe(chip: str, devices: Sequence[Any]) -> str:
  """Kind and places of devices within a slice, from the first one on: programs for equal ones are the same."""
  if chip == "cpu":
    return f"cpu {len(devices)}"
  first = devices[0].coords
  places = ((*(a - b for a, b in zip(each.coords, first, strict=True)), each.core_on_chip) for each in devices)
  return f"{chip} {list(places)}"


def open_slice(name: str) -> Slice:
  """The devices of a topology. Call `prepare_environment` before jax is imported.

  Raises: ValueError for a name that cannot be, or if libtpu is not installed, with the way out.
  """
  chip, shape = parse(name)
  require_compiler(name)
  import jax

  if chip == "cpu":
    devices = jax.devices("cpu")
    if len(devices) < math.prod(shape):
      raise ValueError(
        f"--topology={name} needs {math.prod(shape)} virtual devices, but this process has {len(devices)}")
    return Slice(name, chip, shape, devices[: math.prod(shape)], 1)
  from jax.experimental import topologies

  bounds = tuple(
    min(most, size) for most, size in zip(_CHIPS_PER_HOST[chip], (*shape, 1, 1, 1), strict=False)
  )
  options = {"chips_per_host_bounds": bounds}
  try:
    found = topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
  except jax.errors.JaxRuntimeError as error:
    reason = str(error).splitlines()[0].removeprefix("INVALID_ARGUMENT: ")
    raise ValueError(f"--topology={name} is no slice that libtpu can make ({reason}); for example v5e:2x4") from None
  return Slice(name, chip, shape, found.devices, len({device.process_index for device in found.devices}))

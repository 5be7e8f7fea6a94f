"""What is known of each chip: the one place of its constants, with where each was read.

Every number is of what JAX calls a device. That is a chip, but on v4, whose two cores the ahead-of-time compiler counts
as two devices of half a chip each (a real v4 slice may show one device a chip: plan for half as many then).

Speeds are peaks of the vendor. What a real program reaches of them is a fraction: `mfu` for what computes (the share of
peak FLOP/s that the named training runs report), `HBM_SHARE` for what reads memory and `LINK_SHARE` for links; no
published measurement of the last two was found, so they are assumptions and the plan's seconds are no better than they.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from tba_jax import compiler_options

HBM_SHARE = 0.7
LINK_SHARE = 0.8
RESERVE_SHARE = 0.05  # of HBM, kept free for fragmentation and for what the runtime itself holds
HOST_SHARE = 0.8  # of host memory, for everything that a run keeps there

_GIB = 1024**3
_FAR_BEYOND_CACHES = 1 << 26  # bytes
_CLOUD = "Google Cloud documentation, page 'TPU {}'"
_BOOK = "'How to Scale Your Model' (jax-ml), page 'How to Think About TPUs'"
_MFU = "MaxText, page 'Run_Llama2' (Llama2-70b, bf16)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
  """Peaks of one device.

  overlaps: whether it reads memory while it computes, so that only the longer of the two counts; else they add up.
  hbm_bytes: memory that the compiler lets a program use. link_bytes_per_sec: of one inter-chip link, one direction.
  host_bytes: of a host's memory, per device. mfu: share of peak_flops that a well-tuned large training run reaches.
  sources: quantity -> where it was read.
  """

  name: str
  peak_flops: float
  hbm_bytes: float
  hbm_bytes_per_sec: float
  link_bytes_per_sec: float
  host_bytes: float
  mfu: float
  hbm_share: float = HBM_SHARE
  overlaps: bool = True
  devices_per_chip: int = 1
  sources: dict[str, str]


# host_bytes: a v5e host has 512 GiB for 8 chips, a v6e host 1536 GiB for 8, a v5p host 448 GB for 4; the page of v4
# gives none, 400 GB for 4 chips is assumed.
CHIPS: dict[str, Chip] = {
  chip.name: chip
  for chip in (
    Chip(
      name="v4", peak_flops=275e12 / 2, hbm_bytes=32 * _GIB / 2, hbm_bytes_per_sec=1200e9 / 2,
      link_bytes_per_sec=4.5e10, host_bytes=400e9 / 8, mfu=0.57, devices_per_chip=2,
      sources={"FLOP/s, HBM": _CLOUD.format("v4"), "link": _BOOK, "MFU": _MFU + ", v4-128", "host": "assumed"},
    ),
    Chip(
      name="v5e", peak_flops=197e12, hbm_bytes=15.75 * _GIB, hbm_bytes_per_sec=819e9, link_bytes_per_sec=4.5e10,
      host_bytes=512 * _GIB / 8, mfu=0.57,
      sources={"FLOP/s, HBM, host": _CLOUD.format("v5e"), "link": _BOOK, "MFU": _MFU + ", v5e-256"},
    ),
    Chip(
      name="v5p", peak_flops=459e12, hbm_bytes=95 * _GIB, hbm_bytes_per_sec=2765e9, link_bytes_per_sec=9e10,
      host_bytes=448e9 / 4, mfu=0.65,
      sources={"FLOP/s, HBM, host": _CLOUD.format("v5p"), "link": _BOOK, "MFU": _MFU + ", v5p-128"},
    ),
    Chip(
      name="v6e", peak_flops=918e12, hbm_bytes=31.25 * _GIB, hbm_bytes_per_sec=1638e9, link_bytes_per_sec=9e10,
      host_bytes=1536 * _GIB / 8, mfu=0.438,
      sources={
        "FLOP/s, HBM, host": _CLOUD.format("v6e"), "link": _BOOK,
        "MFU": "MaxText, page 'Optimized models tiering' (Llama 2 70B, Trillium, 256 chips)",
      },
    ),
  )
}


# device_kind as JAX names it.
_KINDS = {
  "TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p", "TPU v6 lite": "v6e",
  "TPU v6e": "v6e",
}


def chip_of(device: jax.Device) -> Chip | None:
  """The peaks of a device that is there: the vendor's of a TPU, of this whole machine, measured, for a CPU; None where
  not known. Where programs run, not only compile, a v4 chip is one device.
  """
  if device.platform == "cpu":
    return _measured_cpu()
  if device.device_kind not in _KINDS:
    return None
  chip = CHIPS[_KINDS[device.device_kind]]
  return dataclasses.replace(
    chip, peak_flops=chip.peak_flops * chip.devices_per_chip, hbm_bytes=chip.hbm_bytes * chip.devices_per_chip,
    hbm_bytes_per_sec=chip.hbm_bytes_per_sec * chip.devices_per_chip, host_bytes=chip.host_bytes * chip.devices_per_chip,
    devices_per_chip=1)


@functools.cache
def _measured_cpu() -> Chip:
  return measure_cpu(1, size=768)


def measure_cpu(num_devices: int, *, size: int = 1024, clock: Callable[[], float] = time.perf_counter) -> Chip:
  """The CPU of this machine as `num_devices` devices that share it, by two matmuls and a copy of a second or so.

  Peaks are measured in float32: FLOP/s of a large product, memory's of a copy. Of the former nothing is taken off. A
  product of few rows, as in decoding, reads weights more slowly than they are copied, for XLA:CPU rearranges them on
  the way: hbm_share is the speed of that reading, its arithmetic taken off at the peak, over that of the copy. A core
  computes and reads in turn, so the two times add up. Speeds are by `clock`: of the machine with all its cores by that
  on the wall, of one core by `time.process_time`.
  """
  square = jnp.ones((size, size), jnp.float32)
  options = compiler_options.of_sequences("cpu")
  chain = jax.jit(lambda x: jax.lax.fori_loop(0, 4, lambda _, y: (x @ y) * (1.0 / size), x), compiler_options=options)
  flops = 4 * 2 * size**3 / _best_secs(lambda: chain(square).block_until_ready(), clock)
  source = np.ones(_FAR_BEYOND_CACHES, np.uint8)
  target = np.empty_like(source)
  bandwidth = 2 * source.nbytes / _best_secs(lambda: np.copyto(target, source), clock)
  few, width = jnp.ones((16, 1024), jnp.float32), 1024
  weights = [jnp.ones((width, width), jnp.float32) for _ in range(_FAR_BEYOND_CACHES // (4 * width**2))]
  layers = jax.jit(
    lambda x, weights: functools.reduce(lambda x, w: (x @ w) * (1.0 / width), weights, x),
    compiler_options=compiler_options.of_sampling("cpu"))
  secs = _best_secs(lambda: layers(few, weights).block_until_ready(), clock)
  reading = secs - 2 * few.size * width * len(weights) / flops
  share = min(1.0, _FAR_BEYOND_CACHES / (reading * bandwidth)) if reading > 0 else 1.0
  with open("/proc/meminfo", encoding="ascii") as file:
    memory = int(next(line for line in file if line.startswith("MemTotal")).split()[1]) * 1024
  return Chip(
    name="cpu", peak_flops=flops / num_devices, hbm_bytes=memory / num_devices,
    hbm_bytes_per_sec=bandwidth / num_devices, link_bytes_per_sec=bandwidth / num_devices,
    host_bytes=memory / num_devices, mfu=1.0, hbm_share=share, overlaps=False, sources={"all": "measured here"},
  )


def _best_secs(run: Callable[[], object], clock: Callable[[], float]) -> float:
  """Seconds of the fastest of five runs, after one that compiles."""
  run()
  best = float("inf")
  for _ in range(5):
    began = clock()
    run()
    best = min(best, clock() - began)
  return best

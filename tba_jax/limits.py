"""What the machine of a run could do at most, and what of it a run reaches: machine.json, and the shares in a report.

    trainer:    6 N FLOPs a token of prompts and responses (4 N with adapters) / peak FLOP/s of its devices
    searchers:  the longer of 2 N FLOPs / peak FLOP/s, and (W / slots + K c) bytes / peak bytes/s of memory, a token

N are the parameters of all layers and the head, W their bytes, K the bytes of a token's keys and values, c how many
tokens a sampled one attends to on average. Not counted as work: padding, attention's own products, what the backward
pass computes again, prefill, scoring. So a share is what the hardware gives of what the method needs.
"""

from __future__ import annotations

import dataclasses

import jax

from tba_jax.chips import chip_of
from tba_jax.models.variants import ModelConfig
from tba_jax.work import cache_token_bytes, matmul_params

MACHINE_FILE = "machine.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
  """Of one run. Peaks are of all devices of a side together; None where the peaks of the device are not known."""

  device_kind: str
  peaks: str  # where they are from
  trainer_devices: int
  searcher_devices: int
  one_machine: bool  # both sides' peaks are those of the same devices, which they share
  trainer_flops_per_sec: float | None
  searcher_flops_per_sec: float | None
  searcher_bytes_per_sec: float | None
  train_flops_per_token: float
  sample_flops_per_token: float
  sample_weight_bytes: float  # a token, of the weights: W / slots
  cache_token_bytes: float
  lane_samples: int  # samples that read their prompt's entries once for all


def limits_of(
    cfg: ModelConfig, device: jax.Device, *, trainer_devices: int, searcher_devices: int, share: bool,
    adapters_only: bool, sample_bytes: int, cache_dtype: str, slots: int, lane_samples: int,
) -> Limits:
  """The limits of a run on devices like this one.

  Args:
    searcher_devices: of all searchers together. share: they are the trainer's.
    sample_bytes: of an element of the weights that searchers hold. slots: of a searcher.
  """
  chip, on_cpu = chip_of(device), device.platform == "cpu"
  # Virtual CPU devices are one CPU: each side may have all of it while the other waits.
  trainer, searchers = (1, 1) if on_cpu else (trainer_devices, searcher_devices)
  params = matmul_params(cfg)
  peaks = "not known for this kind of device" if chip is None else (
      "measured when the run began: a float32 matrix product and a copy, by the whole CPU" if on_cpu
      else "the vendor's, bfloat16")
  return Limits(
      device_kind=device.device_kind, peaks=peaks, trainer_devices=trainer_devices, searcher_devices=searcher_devices,
      one_machine=on_cpu or share,
      trainer_flops_per_sec=chip and chip.peak_flops * trainer,
      searcher_flops_per_sec=chip and chip.peak_flops * searchers,
      searcher_bytes_per_sec=chip and chip.hbm_bytes_per_sec * searchers,
      train_flops_per_token=(4.0 if adapters_only else 6.0) * params, sample_flops_per_token=2.0 * params,
      sample_weight_bytes=params * sample_bytes / slots,
      cache_token_bytes=cache_token_bytes(cfg, cache_dtype), lane_samples=lane_samples)

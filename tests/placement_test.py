"""What is said of memory before it is taken."""

from __future__ import annotations

import os

import jax
import pytest

from tba_jax import placement
from tba_jax.placement import Placement

PLACED = [
  Placement("trainer", "0-1", "parameters", 1000, 2000),
  Placement("trainer", "0-1", "gradients", 500, 1000),
  Placement("searcher 0", "2", "weights", 300, 300),
  Placement("searcher 1", "3", "weights", 300, 300),
  Placement("host", "memory", "replay buffer", 10**15, 10**15),
]


def test_a_line_a_part_and_like_parts_together():
  assert placement.summary(PLACED).splitlines() == [
    "trainer: 1,500 bytes a device (parameters 1,000, gradients 500)",
    "searcher 0, searcher 1: 300 bytes a device (weights 300)",
    "host: 1,000,000,000,000,000 bytes (replay buffer 1,000,000,000,000,000)",
  ]


def test_what_just_fits_is_taken_and_a_byte_more_is_refused():
  placement.check_fits(PLACED, {"0-1": 1500, "2": 300, "3": 300})
  with pytest.raises(ValueError,
                     match=r"devices 0-1 would hold 1,500 bytes each but have 1,499 \(trainer: parameters 1,000, trai"):
    placement.check_fits(PLACED, {"0-1": 1499, "2": 300, "3": 300})


def test_cpu_devices_share_the_machines_memory_and_the_lazy_buffer_does_not_count():
  limits = placement.device_limits(jax.devices(), PLACED)
  assert limits == {"all": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")}
  placement.check_fits(PLACED, {"all": 3600})
  with pytest.raises(ValueError, match="devices all would hold 3,600 bytes but have 3,599"):
    placement.check_fits(PLACED, {"all": 3599})

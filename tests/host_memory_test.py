"""Free host memory goes back to the kernel."""

from __future__ import annotations

import ctypes
import pathlib

import pytest

from tba_jax.host_memory import give_back


def _resident_bytes() -> int:
  fields = dict(line.split(":", 1) for line in pathlib.Path("/proc/self/status").read_text().splitlines())
  return 1024 * int(fields["VmRSS"].split()[0])


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")
def test_what_lies_free_between_things_in_use_is_given_back():
  blocks = [bytearray(b"x" * 100_000) for _ in range(1000)]  # each below what glibc maps by itself
  blocks = blocks[::20]  # the rest is free, and cannot be cut off at the end of the heap
  before = _resident_bytes()
  give_back()
  assert _resident_bytes() < before - 50e6
  assert all(block[0] == block[-1] == ord("x") for block in blocks)

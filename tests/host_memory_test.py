"""Free host memory goes back to the kernel, or is kept: by the kernel's own counts."""

from __future__ import annotations

import ctypes
import importlib.metadata
import pathlib
import subprocess
import sys

import pytest

from tba_jax import host_memory
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


COUNT_FAULTS = """
import resource, sys, threading
from tba_jax import host_memory

if sys.argv[1] == "kept":
  assert host_memory.keep_freed_memory()
faults = []

def fill():
  for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [b"x" * (size << 20) for size in (40, 3, 70)]
    del blocks
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

fill()
thread = threading.Thread(target=fill)
thread.start()
thread.join()
print(*faults)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the option is glibc's")
def test_blocks_come_from_pages_that_the_process_has_in_every_thread():
  counts = {
    how: [int(word) for word in subprocess.run(
      [sys.executable, "-c", COUNT_FAULTS, how], check=True, capture_output=True, text=True).stdout.split()]
    for how in ("kept", "given back")
  }
  pages = 113 * 256
  assert counts["kept"][0] > pages / 2 and max(counts["kept"][1:]) < pages / 20
  assert min(counts["given back"]) > pages / 2  # else the test would measure nothing


def test_only_cpu_goes_by_what_jax_was_told_and_by_what_is_installed(monkeypatch):
  for value, only in (("cpu", True), ("tpu", False), ("cpu,tpu", False)):
    monkeypatch.setenv("JAX_PLATFORMS", value)
    assert host_memory.only_cpu() is only
  monkeypatch.delenv("JAX_PLATFORMS")
  monkeypatch.setattr(host_memory.importlib.util, "find_spec", lambda name: None)
  monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: ())
  assert host_memory.only_cpu()
  monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: ("a plugin",))
  assert not host_memory.only_cpu()
  monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: ())
  monkeypatch.setattr(host_memory.importlib.util, "find_spec", lambda name: name if name == "libtpu" else None)
  assert not host_memory.only_cpu()

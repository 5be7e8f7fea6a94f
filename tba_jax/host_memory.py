"""Host memory that nobody uses and the process still holds: when that is wanted, and when not."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os

# Of glibc's malloc.h, and values: no mappings of their own for large blocks, nothing given back from the end of the
# heap, one heap for all threads (others hold no large block).
_OPTIONS = {"M_MMAP_MAX": (-4, 0), "M_TRIM_THRESHOLD": (-1, -1), "M_ARENA_MAX": (-8, 1)}


def give_back() -> None:
  """Gives the kernel the free pages of the C library's allocator, where that is glibc; elsewhere does nothing.

  glibc has an arena for nearly every thread and keeps what is freed in one for that arena alone, so that a process
  whose threads take turns at large work grows for hours although it uses no more. Costs milliseconds for each 100 MB
  that is given back.
  """
  trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
  if trim is not None:
    trim(0)


def keep_freed_memory() -> bool:
  """Lets the process keep what it frees for what it allocates next; False where the C library is not glibc.

  A program of XLA:CPU allocates its temporaries anew in every call. By itself glibc gives such blocks back to the
  kernel, and each page is then fetched and cleared again: 730,000 times in a step of 3 GB. The process stays as large
  as it once was, or until `give_back`. For all threads it must be called before there are any, so before jax looks for
  devices.
  """
  set_option = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
  return set_option is not None and all([set_option(option, value) == 1 for option, value in _OPTIONS.values()])


def only_cpu() -> bool:
  """Whether jax will compute on the CPU: it was told so, or no other platform is installed. Does not ask jax."""
  if os.environ.get("JAX_PLATFORMS"):
    return os.environ["JAX_PLATFORMS"] == "cpu"
  plugins = importlib.metadata.entry_points(group="jax_plugins")
  return not plugins and not any(importlib.util.find_spec(name) for name in ("libtpu", "jax_plugins"))

"""Declared sizes that arrays are padded to, so that the number of compiled programs is bounded."""

from __future__ import annotations

from collections.abc import Sequence


def power_of_two_buckets(smallest: int, largest: int) -> tuple[int, ...]:
  """smallest, 2 smallest, 4 smallest, ... below largest, then largest."""
  buckets = []
  while smallest < largest:
    buckets.append(smallest)
    smallest *= 2
  return (*buckets, largest)


def checked_buckets(name: str, buckets: Sequence[int], *, largest: int, rule: str) -> tuple[int, ...]:
  """Sorted, without repeats. Raises: ValueError if empty, not positive, or not ending at `largest`, which is called
  `rule`."""
  buckets = tuple(sorted(set(buckets)))
  if not buckets or buckets[0] < 1 or buckets[-1] != largest:
    raise ValueError(f"{name}={buckets} must be positive and end at {rule}={largest}; every size needs a bucket.")
  return buckets


def bucket_of(buckets: tuple[int, ...], size: int) -> int:
  """The smallest bucket that holds `size`."""
  return next(bucket for bucket in buckets if bucket >= size)

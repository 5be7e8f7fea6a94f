"""Declared sizes that arrays are padded to, so that the number of compiled programs is bounded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np


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


def padded_batches(
  sequences: Mapping[int, np.ndarray], *, lengths: tuple[int, ...], sizes: tuple[int, ...]
) -> Iterator[tuple[list[int], np.ndarray, np.ndarray]]:
  """Sequences of one length bucket together, in batches of the declared sizes.

  Yields: the keys of a batch, in their order; tokens int32 [size, length], padded on the right with 0; lengths int32
    [size], 1 of the rows that only fill it up.
  """
  by_length: dict[int, list[int]] = {}
  for key, sequence in sequences.items():
    by_length.setdefault(bucket_of(lengths, len(sequence)), []).append(key)
  for length, keys in by_length.items():
    for first in range(0, len(keys), sizes[-1]):
      members = keys[first : first + sizes[-1]]
      tokens = np.zeros((bucket_of(sizes, len(members)), length), np.int32)
      num_tokens = np.ones(len(tokens), np.int32)
      for row, key in enumerate(members):
        tokens[row, : len(sequences[key])], num_tokens[row] = sequences[key], len(sequences[key])
      yield members, tokens, num_tokens

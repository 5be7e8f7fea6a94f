"""The sizes of an engine, and with them the bounded set of programs that it can ever call."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from tba_jax.models import kernels
from tba_jax.sampling.buckets import bucket_of, checked_buckets, power_of_two_buckets


PREFILL_BATCHES = (1, 4)  # prompts that are prefilled in one call
# Of an entry of a cache that is cut out, in readings of it. Copying alone is 2; on CPU, where the pages of large arrays
# are made anew for each, 13 were measured.
COPY_COST = 8


@dataclasses.dataclass(frozen=True)
class Shapes:
  """Made by `make_shapes`; the names are those of `Engine`'s arguments."""

  slots: int
  lane_samples: int
  max_prompt_tokens: int
  max_new_tokens: int
  chunk_tokens: int
  cache_tokens: int  # of a prompt and what follows it, together
  slot_tokens: int  # of a slot's own cache
  prompt_buckets: tuple[int, ...]
  prefill_batches: tuple[int, ...]
  kv_buckets: tuple[int, ...]  # entries read of a slot's own cache
  prefix_buckets: tuple[int, ...]  # entries read of the lanes' prompts; (0,) in lanes of one
  recompute_buckets: tuple[int, ...]  # empty where nothing is recomputed

  @property
  def num_lanes(self) -> int:
    return self.slots // self.lane_samples

  def reads(self, *, prefix_tokens: int, slot_tokens: int) -> tuple[int, int]:
    """Entries that a chunk is to read of the lanes' prompts and of the slots' caches, which need so many.

    What is cut out of a cache is copied, to memory that is new each time: worth it where reading all of it, a token at a
    time, would take longer.
    """
    lengths = []
    for buckets, need in ((self.prefix_buckets, prefix_tokens), (self.kv_buckets, slot_tokens)):
      length, whole = bucket_of(buckets, need), buckets[-1]
      lengths.append(length if COPY_COST * length < self.chunk_tokens * (whole - length) else whole)
    return lengths[0], lengths[1]

  def programs(self) -> frozenset[tuple[str, int, int]]:
    """("prefill" | "insert", prompts, padded length), ("decode", entries read of the lanes' prompts, of the slots'
    caches) and ("recompute", samples, padded length)."""
    return frozenset((
      *itertools.product(("prefill", "insert"), self.prefill_batches, self.prompt_buckets),
      *itertools.product(("decode",), self.prefix_buckets, self.kv_buckets),
      *itertools.product(("recompute",), self.prefill_batches[-1:], self.recompute_buckets),
    ))


def make_shapes(
  *, slots: int, lane_samples: int, max_prompt_tokens: int, max_new_tokens: int, chunk_tokens: int,
  recompute_kv: bool, cache_tokens: int | None = None, prompt_buckets: Sequence[int] | None = None,
  prefill_batches: Sequence[int] = PREFILL_BATCHES, kv_buckets: Sequence[int] | None = None, attention: str = "xla",
) -> Shapes:
  """Defaults filled in. Raises: ValueError for sizes that contradict each other."""
  for name, value in (
    ("slots", slots),
    ("lane_samples", lane_samples),
    ("max_prompt_tokens", max_prompt_tokens),
    ("max_new_tokens", max_new_tokens),
    ("chunk_tokens", chunk_tokens),
  ):
    if value < 1:
      raise ValueError(f"{name}={value} must be at least 1.")
  if slots % lane_samples:
    raise ValueError(f"slots={slots} must be a multiple of lane_samples={lane_samples}.")
  if lane_samples > 1 and cache_tokens is not None:
    raise ValueError(f"cache_tokens={cache_tokens} is for lane_samples=1; lanes of {lane_samples} need no such limit.")
  cache_tokens = max_prompt_tokens + max_new_tokens if cache_tokens is None else cache_tokens
  if cache_tokens <= max_prompt_tokens:
    raise ValueError(
      f"cache_tokens={cache_tokens} must exceed max_prompt_tokens={max_prompt_tokens}, or no token could be sampled."
    )
  if attention == "paged":  # whose kernel goes as far as each row's own length, over a cache of whole blocks
    if lane_samples > 1 or kv_buckets is not None:
      raise ValueError(
        f"attention='paged' takes lane_samples=1 and no kv_buckets; found {lane_samples} and {kv_buckets}."
      )
    cache_tokens = kernels.cache_length(cache_tokens)
    kv_buckets = (cache_tokens,)
  slot_tokens = cache_tokens if lane_samples == 1 else max_new_tokens
  return Shapes(
    slots=slots,
    lane_samples=lane_samples,
    max_prompt_tokens=max_prompt_tokens,
    max_new_tokens=max_new_tokens,
    chunk_tokens=chunk_tokens,
    cache_tokens=cache_tokens,
    slot_tokens=slot_tokens,
    prompt_buckets=checked_buckets(
      "prompt_buckets", prompt_buckets or power_of_two_buckets(16, max_prompt_tokens), largest=max_prompt_tokens,
      rule="max_prompt_tokens",
    ),
    prefill_batches=checked_buckets(
      "prefill_batches", prefill_batches, largest=max(prefill_batches, default=0), rule="its largest"
    ),
    kv_buckets=checked_buckets(
      "kv_buckets", kv_buckets or power_of_two_buckets(128, slot_tokens), largest=slot_tokens,
      rule="cache_tokens" if lane_samples == 1 else "max_new_tokens",
    ),
    prefix_buckets=(0,) if lane_samples == 1 else power_of_two_buckets(128, max_prompt_tokens),
    recompute_buckets=power_of_two_buckets(128, cache_tokens) if recompute_kv else (),
  )

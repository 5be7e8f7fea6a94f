"""Small buffers and random sampling groups for the tests of replay."""

from __future__ import annotations

import numpy as np

from tba_jax.replay.buffer import ReplayBuffer
from tba_jax.types import RolloutGroup


def make_group(
  rng, *, prompt_id=0, occurrence=0, num_samples=4, width=6, version=0, vocab=50, rewards=None, lengths=None, **fields
):
  """A group of `num_samples` responses of 1 to `width` tokens; entries beyond a response's length hold garbage, as
  nobody may read them.
  """
  shape = (num_samples, width)
  if lengths is None:
    lengths = rng.integers(1, width + 1, size=num_samples)
  values = dict(
    prompt_id=prompt_id,
    occurrence=occurrence,
    attempt=0,
    prompt=np.arange(1 + prompt_id % 3, dtype=np.int32) + prompt_id,
    tokens=rng.integers(vocab, size=shape).astype(np.int32),
    lengths=np.asarray(lengths, np.int32),
    log_mu=-rng.exponential(size=shape).astype(np.float32),
    log_ref=-rng.exponential(size=shape).astype(np.float32),
    versions=np.full(shape, version, np.int32),
    rewards=np.asarray(rng.random(num_samples) if rewards is None else rewards, np.float32),
    truncated=rng.random(num_samples) < 0.3,
    ref_version=0,
    temperature=0.7,
  )
  return RolloutGroup(**(values | fields))


def make_buffer(**settings):
  """A small buffer; any setting can be given."""
  defaults = dict(
    capacity=1000, capacity_per_prompt=10, max_prompt_tokens=4, max_response_tokens=8, seed=0, recent_fraction=0.5
  )
  return ReplayBuffer(**(defaults | settings))

"""What the pinned core can do, measured: float32 products, reading memory, a decode step's weight products."""

from __future__ import annotations

from collections.abc import Callable
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.rivals import shapes

PRODUCT = 1024  # size of the square matrices whose product gives the peak
READ_BYTES = 256 << 20


def best_secs(run: Callable[[], Any], *, times: int) -> float:
  """The shortest of some runs, in CPU time: a limit is what the core can do when nothing disturbs it."""
  run()
  shortest = float("inf")
  for _ in range(times):
    began = time.process_time()
    run()
    shortest = min(shortest, time.process_time() - began)
  return shortest


def peaks(times: int = 5) -> dict[str, float]:
  """FLOPs and bytes per second: the better of XLA and numpy's BLAS, for both."""
  rng = np.random.default_rng(0)
  a, b = (rng.standard_normal((PRODUCT, PRODUCT), np.float32) for _ in range(2))
  multiply = jax.jit(jnp.dot)
  ja, jb = jnp.asarray(a), jnp.asarray(b)
  product_secs = min(
    best_secs(lambda: a @ b, times=times), best_secs(lambda: multiply(ja, jb).block_until_ready(), times=times)
  )
  long = np.ones(READ_BYTES // 4, np.float32)
  wide = long.reshape(-1, 1024)
  vector = np.ones(1024, np.float32)
  read_secs = min(
    best_secs(lambda: np.dot(long, long), times=times), best_secs(lambda: wide @ vector, times=times)
  )
  return {"flops_per_sec": 2 * PRODUCT**3 / product_secs, "bytes_per_sec": READ_BYTES / read_secs}


def make_floor(model: str, *, rows: int) -> Callable[[], float]:
  """A function that times the weight products of one decode step alone, as plain calls of one program; CPU seconds.

  Weights lie as they do in this repository, (in, out), the tied table (rows of the vocabulary, width).
  """
  keys = iter(jax.random.split(jax.random.key(0), 4096))
  sizes = shapes.matrices(model)
  weights = [jax.random.normal(next(keys), size) for size in sizes[:-1]]
  table = jax.random.normal(next(keys), sizes[-1][::-1])
  inputs = {width: jax.random.normal(next(keys), (rows, width)) for width in {size[0] for size in sizes}}

  @jax.jit
  def products(weights: list[jax.Array], table: jax.Array, inputs: dict[int, jax.Array]) -> list[jax.Array]:
    outputs = [inputs[weight.shape[0]] @ weight for weight in weights]
    return [*outputs, jnp.einsum("BD,VD->BV", inputs[table.shape[1]], table)]

  jax.block_until_ready(products(weights, table, inputs))

  def run() -> float:
    began = time.process_time()
    jax.block_until_ready(products(weights, table, inputs))
    return time.process_time() - began

  return run

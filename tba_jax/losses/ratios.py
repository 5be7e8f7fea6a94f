"""Importance ratios that cannot overflow, and the clipped objective that several losses share. Knows no loss."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

# A ratio beyond e^20 or below e^-20 belongs to a broken row (or to another model): it counts as that bound and takes no
# gradient. float32 would hold e^88; the bound leaves room for squares and for sums over a batch.
MAX_LOG_RATIO = 20.0


def ratio(log_ratio: jax.Array) -> jax.Array:
  """exp(log_ratio), bounded by e^-20 and e^20 (where its gradient is 0)."""
  return jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def capped_ratio(log_ratio: jax.Array, *, cap: float) -> jax.Array:
  """min(exp(log_ratio), cap), with the gradient of exp below the cap and 0 above it."""
  return jnp.where(log_ratio < math.log(cap), ratio(log_ratio), cap)


def clipped_objective(
  log_ratio: jax.Array, advantages: jax.Array, *, clip_low: float, clip_high: float
) -> tuple[jax.Array, jax.Array]:
  """min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A), and where the clip took the gradient away (bool).

  The pessimistic bound of PPO: Schulman et al. 2017, arXiv:1707.06347, equation 7; two bounds as in DAPO,
  arXiv:2503.14476. Written
  as a choice, not as a minimum of two: at the bound a minimum of equals would pass on half a gradient.
  """
  rho = ratio(log_ratio)
  clipped = jnp.where(advantages > 0.0, rho > 1.0 + clip_high, (rho < 1.0 - clip_low) & (advantages < 0.0))
  bound = jnp.where(advantages > 0.0, 1.0 + clip_high, 1.0 - clip_low)
  return jnp.where(clipped, bound, rho) * advantages, clipped

"""Rotary position embeddings and their scalings, as transformers defines them (modeling_rope_utils.py)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
  """How the rotation's frequencies are stretched for contexts longer than those of pre-training."""

  kind: str  # linear | llama3
  factor: float
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  original_max_positions: int = 0


def read_rope_scaling(config: Mapping[str, Any], *, max_positions: int) -> tuple[float, RopeScaling | None]:
  """(theta, scaling) out of a config.json, in the older spelling (rope_theta, rope_scaling) or the newer one (rope_parameters).

  Raises: ValueError for a kind or a parameter that we do not know.
  """
  theta = config["rope_theta"] if "rope_theta" in config else None
  fields: dict[str, Any] = {}
  for name in ("rope_scaling", "rope_parameters"):
    if name in config and config[name]:
      fields.update(config[name])
  if "rope_theta" in fields:
    inner = fields.pop("rope_theta")
    if theta is not None and theta != inner:
      raise ValueError(f"config.json gives rope_theta={theta} and, in rope_parameters, {inner}; which one is meant?")
    theta = inner
  theta = 10000.0 if theta is None else float(theta)
  kinds = {fields.pop(name) for name in ("rope_type", "type") if name in fields}
  if len(kinds) > 1:
    raise ValueError(f"config.json gives rope scaling two types, {' and '.join(sorted(kinds))}; which one is meant?")
  kind = kinds.pop() if kinds else "default"
  if kind == "default":
    names: tuple[str, ...] = ()
  elif kind in SCALING_FIELDS:
    names = SCALING_FIELDS[kind]
  else:
    raise ValueError(f"rope_type={kind!r} is not supported; it must be one of default, {', '.join(SCALING_FIELDS)}.")
  if set(fields) != set(names):
    raise ValueError(
      f"rope_type={kind!r} takes the parameters {sorted(names)}, but config.json gives {sorted(fields)}."
    )
  if kind == "default":
    return theta, None
  values = {OUR_NAMES[name]: value for name, value in fields.items()}
  return theta, RopeScaling(kind=kind, **values)


SCALING_FIELDS = {
  "linear": ("factor",),
  "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
OUR_NAMES = {
  "factor": "factor", "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor",
  "original_max_position_embeddings": "original_max_positions",
}


def write_rope_scaling(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
  """The inverse of `read_rope_scaling`, in the spelling that every version of transformers reads."""
  if scaling is None:
    return {"rope_theta": theta, "rope_scaling": None}
  fields = {name: getattr(scaling, OUR_NAMES[name]) for name in SCALING_FIELDS[scaling.kind]}
  return {"rope_theta": theta, "rope_scaling": {"rope_type": scaling.kind, **fields}}


def inverse_frequencies(theta: float, rotary_dim: int, scaling: RopeScaling | None) -> np.ndarray:
  """float32 [rotary_dim / 2]: radians by which each pair of entries turns per position."""
  inverse = 1.0 / theta ** (np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
  if scaling is None:
    pass
  elif scaling.kind == "linear":
    inverse = inverse / scaling.factor
  elif scaling.kind == "llama3":
    # Long waves are stretched by the factor, short ones kept, those between blended (Llama 3.1).
    waves_in_context = scaling.original_max_positions * inverse / (2 * np.pi)
    blend = (waves_in_context - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    inverse = (1 - blend) * inverse / scaling.factor + blend * inverse
  else:
    raise AssertionError(scaling.kind)
  return inverse.astype(np.float32)


def rope_table(positions: jax.Array, inverse: np.ndarray) -> tuple[jax.Array, jax.Array]:
  """(cos, sin), each f32 [..., 1, rotary_dim / 2], for positions [...]. f32: bfloat16 has no integers beyond 256."""
  angles = positions.astype(jnp.float32)[..., None, None] * inverse
  return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
  """Turns the first entries of each head of x [..., heads, H]: entry i with entry i + rotary_dim / 2; the rest passes through."""
  half = cos.shape[-1]
  first, second, rest = jnp.split(x, (half, 2 * half), axis=-1)
  first, second = first.astype(jnp.float32), second.astype(jnp.float32)
  turned = [first * cos - second * sin, second * cos + first * sin]
  return jnp.concatenate([part.astype(x.dtype) for part in turned] + [rest], axis=-1)

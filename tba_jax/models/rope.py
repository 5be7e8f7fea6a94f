"""Rotary position embeddings and their scalings, as transformers defines them (modeling_rope_utils.py)."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.models.fields import check_kinds


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
  """How the rotation's frequencies are stretched for contexts longer than those of pre-training."""

  kind: str  # a key of _SCALINGS
  factor: float
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  original_max_positions: int = 0
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  attention_factor: float | None = None  # None: follows from the factor
  truncate: bool = True


# The fields of config.json in which each way of writing rotations keeps them.
FIELDS: dict[str, tuple[str, ...]] = {
  "none": (),
  "plain": ("rope_theta", "rope_scaling", "rope_parameters"),
  "partial": (
    "rope_theta", "rope_scaling", "rope_parameters", "rotary_emb_base", "rotary_pct", "partial_rotary_factor"
  ),
  "by_layer_type": ("rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq"),
}
# Per kind of scaling: parameters that it must have, and that it may have, theirs to ours.
_SCALINGS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
  "linear": ({"factor": "factor"}, {}),
  "llama3": (
    {"factor": "factor", "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor"},
    {"original_max_position_embeddings": "original_max_positions"},
  ),
  "yarn": (
    {"factor": "factor"},
    {"original_max_position_embeddings": "original_max_positions", "beta_fast": "beta_fast", "beta_slow": "beta_slow",
     "attention_factor": "attention_factor", "truncate": "truncate"},
  ),
}
_ORIGINAL_MAX = "original_max_position_embeddings"


def read(style: str, config: Mapping[str, Any], *, default_theta: float, head_dim: int, max_positions: int,
         any_sliding: bool) -> dict[str, Any]:
  """The options of ModelConfig that say how positions rotate, out of a config.json in the older or the newer spelling.

  Args:
    style: a key of FIELDS. config: as in the file; fields of other styles were refused before.
    default_theta: of a family whose config.json may be silent.
    max_positions: context that a scaling starts from if it does not say.
    any_sliding: whether the model has sliding layers (those of "by_layer_type" have a theta of their own).
  Raises: ValueError for a kind of scaling that we do not have, a parameter that is not its own, and two spellings that
    disagree.
  """
  if style == "none":
    return {}
  outer = {name: config[name] for name in FIELDS[style] if name in config and config[name] is not None}
  scaling = dict(outer.pop("rope_scaling", None) or {})
  parameters = dict(outer.pop("rope_parameters", None) or {})
  options: dict[str, Any] = {}
  if style == "by_layer_type":
    local = outer.pop("rope_local_base_freq", 10000.0)
    check_kinds(parameters)
    if "full_attention" in parameters or "sliding_attention" in parameters:
      sliding = {"rope_type": "default", "rope_theta": local, **(parameters.pop("sliding_attention", None) or {})}
      full = dict(parameters.pop("full_attention", None) or {})
      if set(sliding) != {"rope_type", "rope_theta"} or sliding["rope_type"] != "default" or parameters:
        raise ValueError(
          f"config.json has rope_parameters {sliding} for sliding layers and {parameters} beside the layer types; "
          "sliding layers here take a rope_theta and rope_type 'default' only."
        )
      check_kinds(sliding)
      local, parameters = sliding["rope_theta"], full
    if any_sliding:
      options["rope_local_theta"] = float(local)
  for part in (scaling, parameters):
    check_kinds(part)
  merged = _merge(_merge(_merge({}, outer), scaling), parameters)
  if style == "partial":
    partial = merged.pop("partial_rotary_factor", 0.25)
    options["rotary_dim"] = int(head_dim * partial)
  else:
    options["rotary_dim"] = head_dim
  options["rope_theta"] = float(merged.pop("rope_theta", default_theta))
  options["rope_scaling"] = _read_scaling(merged, max_positions)
  return options


def _merge(known: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
  """Both together, under the newer names; a parameter given twice must have one value."""
  renamed = {"type": "rope_type", "rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}
  merged = dict(known)
  for name, value in more.items():
    name = renamed[name] if name in renamed else name
    if name in merged and merged[name] != value:
      raise ValueError(f"config.json gives {name} twice, as {merged[name]!r} and as {value!r}; which one is meant?")
    merged[name] = value
  return merged


def _read_scaling(parameters: Mapping[str, Any], max_positions: int) -> RopeScaling | None:
  given = {name: value for name, value in parameters.items() if name != "rope_type" and value is not None}
  kind = parameters["rope_type"] if "rope_type" in parameters else "default"
  if kind == "default":
    needed, optional = {}, {}
  elif kind in _SCALINGS:
    needed, optional = _SCALINGS[kind]
  else:
    raise ValueError(f"rope_type={kind!r} is not supported; it must be one of default, {', '.join(_SCALINGS)}.")
  if not set(needed) <= set(given) or not set(given) <= {*needed, *optional}:
    raise ValueError(
      f"rope_type={kind!r} needs the parameters {sorted(needed)} and may have {sorted(optional)}, but config.json "
      f"gives {sorted(given)}."
    )
  if kind == "default":
    return None
  if _ORIGINAL_MAX in optional:
    given = {_ORIGINAL_MAX: max_positions, **given}
  return RopeScaling(kind=kind, **{{**needed, **optional}[name]: value for name, value in given.items()})


def write(
  style: str, *, theta: float, scaling: RopeScaling | None, local_theta: float | None, partial: float
) -> dict[str, Any]:
  """The inverse of `read`, in the older spelling, which every version of transformers reads."""
  if style == "none":
    return {}
  fields: dict[str, Any] = {"rope_theta": theta, "rope_scaling": None}
  if scaling is not None:
    needed, optional = _SCALINGS[scaling.kind]
    values = {theirs: getattr(scaling, ours) for theirs, ours in {**needed, **optional}.items()}
    fields["rope_scaling"] = {
      "rope_type": scaling.kind, **{name: value for name, value in values.items() if value is not None}
    }
  if style == "partial":
    fields = {"rotary_emb_base": fields.pop("rope_theta"), "rotary_pct": partial, **fields}
  if local_theta is not None:
    fields["rope_local_base_freq"] = local_theta
  return fields


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
  elif scaling.kind == "yarn":
    # As llama3, with a ramp over the index of the pair instead of its wave length (Peng et al. 2023, arXiv:2309.00071).
    keep = 1 - _yarn_ramp(theta, rotary_dim, scaling)
    inverse = (1 - keep) * inverse / scaling.factor + keep * inverse
  else:
    raise AssertionError(scaling.kind)
  return inverse.astype(np.float32)


def _yarn_ramp(theta: float, rotary_dim: int, scaling: RopeScaling) -> np.ndarray:
  """[rotary_dim / 2], 0 for pairs that turn beta_fast times or more within the original context, 1 for beta_slow times
  or fewer.
  """

  def pair_that_turns(times: float) -> float:
    return rotary_dim * math.log(scaling.original_max_positions / (times * 2 * math.pi)) / (2 * math.log(theta))

  low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
  if scaling.truncate:
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, rotary_dim - 1)
  if low == high:
    high += 0.001
  return np.clip((np.arange(rotary_dim // 2) - low) / (high - low), 0.0, 1.0)


def attention_factor(scaling: RopeScaling | None) -> float:
  """What cos and sin are multiplied by: yarn sharpens attention as the context grows."""
  if scaling is None or scaling.kind != "yarn":
    return 1.0
  if scaling.attention_factor is not None:
    return scaling.attention_factor
  return 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0


def rope_table(
  positions: jax.Array, *, theta: float, rotary_dim: int, scaling: RopeScaling | None
) -> tuple[jax.Array, jax.Array]:
  """(cos, sin), each f32 [..., 1, rotary_dim / 2], for positions [...]. f32: bfloat16 has no integers beyond 256."""
  angles = positions.astype(jnp.float32)[..., None, None] * inverse_frequencies(theta, rotary_dim, scaling)
  factor = attention_factor(scaling)
  return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
  """Turns the first entries of each head of x [..., heads, H]: entry i with entry i + rotary_dim / 2; the rest passes
  through.
  """
  half = cos.shape[-1]
  first, second, rest = jnp.split(x, (half, 2 * half), axis=-1)
  first, second = first.astype(jnp.float32), second.astype(jnp.float32)
  turned = [first * cos - second * sin, second * cos + first * sin]
  return jnp.concatenate([part.astype(x.dtype) for part in turned] + [rest], axis=-1)

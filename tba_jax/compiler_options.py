"""What XLA is asked for beyond its defaults, by platform: `compiler_options` of single programs."""

from __future__ import annotations

import functools

import jax

# What XLA:CPU hands to YNNPACK: by default products and reductions, where shapes allow. Eigen's products are faster, on
# the machine with AVX-512 where it was measured: at the shapes of a layer 10 to 20% where a train step multiplies, a
# quarter where 32 rows are decoded (see experiments/LOG.md). In decoding YNNPACK's reductions are worth having.
_YNNPACK = "xla_cpu_experimental_ynn_fusion_type"
_ONLY_REDUCTIONS, _NOTHING = "LIBRARY_FUSION_TYPE_REDUCE", ""


def of_sampling(platform: str) -> dict[str, str]:
  """Of prefill and decoding."""
  return {_YNNPACK: _ONLY_REDUCTIONS} if platform == "cpu" and _is_known() else {}


def of_sequences(platform: str) -> dict[str, str]:
  """Of passes over whole sequences: scoring and train steps."""
  return {_YNNPACK: _NOTHING} if platform == "cpu" and _is_known() else {}


@functools.cache
def _is_known() -> bool:
  """Whether this jaxlib has the option: it is an experimental one, and no program may fail for want of it."""
  scalar = jax.ShapeDtypeStruct((), "float32", sharding=jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0]))
  try:
    jax.jit(lambda x: x).lower(scalar).compile({_YNNPACK: _NOTHING})
  except Exception:  # which one an option is refused by is not documented  # pylint: disable=broad-except
    return False
  return True

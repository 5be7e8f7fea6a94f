"""A number read off each hidden state beside the model's own head: a state's value, or a prompt's log Z.

    out = w . gelu(hidden W + b) + c

It reads hidden states as they are and sends no gradient into them: the policy's step does not depend on it, and it
learns at a rate of its own. w and c begin at 0, so that it is 0 everywhere at first. For a task with one prompt all
that matters of it is one number, as where log Z is a single scalar.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tba_jax.models.variants import ModelConfig

NAME = "scalar_head"


def init_scalar_head(cfg: ModelConfig, key: jax.Array) -> dict[str, Any]:
  """{"scalar_head": parameters}, float32: to be put beside those of the model."""
  width = cfg.hidden_size
  kernel = jax.random.normal(key, (width, width)) * width**-0.5
  hidden = {"kernel": kernel, "bias": jnp.zeros((width,))}
  return {NAME: {"hidden": hidden, "out": {"kernel": jnp.zeros((width, 1)), "bias": jnp.zeros((1,))}}}


def abstract_scalar_head(cfg: ModelConfig) -> dict[str, Any]:
  """Shapes and dtypes of `init_scalar_head` without the arrays."""
  return jax.eval_shape(lambda key: init_scalar_head(cfg, key), jax.random.key(0))


def read_scalar(head: dict[str, Any], hidden: jax.Array) -> jax.Array:
  """float32 [...] of hidden states [..., D] in any dtype, which take no gradient."""
  hidden = jax.lax.stop_gradient(hidden)
  inner = jnp.einsum(
    "...D,DE->...E", hidden, head["hidden"]["kernel"].astype(hidden.dtype), preferred_element_type=jnp.float32
  )
  inner = jax.nn.gelu(inner + head["hidden"]["bias"])
  return jnp.einsum("...E,EO->...O", inner, head["out"]["kernel"])[..., 0] + head["out"]["bias"][0]

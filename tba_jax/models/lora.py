"""Low-rank adapters (LoRA): W + scale A B in place of W, of which only A and B are trained.

Source: Hu et al. 2021, arXiv:2106.09685. With A [*in, rank], B [rank, *out] and scale = alpha / rank a linear layer is

    y = x W + scale (x A) B,    A ~ Normal(0, 1 / fan-in),  B = 0

so that adapters that have not been trained change nothing. Adapters are a parameter tree of their own, with the paths
of the layers that they belong to: {"layers": {"attn": {"q": {"lora_a": [L, D, rank], "lora_b": [L, rank, Q, H]}}}}. The
trainer attaches them (no merged kernel exists, and no gradient of one), samplers and exports merge them.
"""

from __future__ import annotations

import dataclasses
import functools
import re

from flax import nnx
import jax
import jax.numpy as jnp

from tba_jax.models import transformer
from tba_jax.models.layers import Block
from tba_jax.models.transformer import Params
from tba_jax.models.variants import ModelConfig


@dataclasses.dataclass(frozen=True)
class LoraSettings:
  """Which linear layers are adapted, and how. `pattern` must match the whole path of a layer, as layers/attn/q."""

  pattern: str
  rank: int
  alpha: float

  @property
  def scale(self) -> float:
    return self.alpha / self.rank


def adapted_layers(cfg: ModelConfig, pattern: str) -> dict[str, tuple[int, ...]]:
  """Paths of the linear layers that the pattern matches, each with the shape of its kernel (stacked over layers).

  Raises: ValueError if it matches none.
  """
  leaves = jax.tree_util.tree_leaves_with_path(transformer.abstract_params(cfg))
  names = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape for path, leaf in leaves}
  linear = {name.removesuffix("/kernel"): shape for name, shape in names.items() if name.endswith("/kernel")}
  found = {name: shape for name, shape in linear.items() if re.fullmatch(pattern, name)}
  if not found:
    raise ValueError(f"{pattern!r} matches no linear layer of this model; they are {', '.join(sorted(linear))}")
  return found


def init_adapters(cfg: ModelConfig, key: jax.Array, *, settings: LoraSettings) -> Params:
  """Untrained float32 adapters, under which the model is exactly its base. Raises as `adapted_layers`."""
  adapters: Params = {}
  for number, (name, shape) in enumerate(sorted(adapted_layers(cfg, settings.pattern).items())):
    *parents, last = name.split("/")
    stacked, num_in = _axes(cfg, name)
    lead, inner, out = shape[:stacked], shape[stacked : stacked + num_in], shape[stacked + num_in :]
    a = jax.random.normal(jax.random.fold_in(key, number), (*lead, *inner, settings.rank))
    fan_in = functools.reduce(lambda product, size: product * size, inner, 1)
    node = functools.reduce(lambda node, parent: node.setdefault(parent, {}), parents, adapters)
    node[last] = {"lora_a": a * fan_in**-0.5, "lora_b": jnp.zeros((*lead, settings.rank, *out))}
  return adapters


def abstract_adapters(cfg: ModelConfig, *, settings: LoraSettings) -> Params:
  """Shapes and dtypes of `init_adapters` without the arrays."""
  return jax.eval_shape(lambda key: init_adapters(cfg, key, settings=settings), jax.random.key(0))


def _axes(cfg: ModelConfig, name: str) -> tuple[int, int]:
  """How many axes of a stacked kernel count layers, and how many after them are contracted."""
  if not name.startswith("layers/"):
    return 0, 1
  block = nnx.eval_shape(lambda: Block(cfg, nnx.Rngs(0)))
  return 1, functools.reduce(getattr, name.split("/")[1:], block).num_in


def attach(base: Params, adapters: Params, *, scale: float) -> Params:
  """The tree that `transformer.hidden_states` and `heads.token_logprobs` run with adapters: A and scale B beside W."""
  if "lora_a" in adapters:
    return {**base, "lora_a": adapters["lora_a"], "lora_b": scale * adapters["lora_b"]}
  return {**base, **{name: attach(base[name], node, scale=scale) for name, node in adapters.items()}}


def merge(base: Params, adapters: Params, *, scale: float) -> Params:
  """The model without adapters that computes the same: kernels W + scale A B, summed in float32, in the base's dtypes.

  Args:
    base, adapters: both with stacked layers, or both in the decode layout. Leaves without an adapter come out as they
      are.
  """
  if isinstance(adapters, tuple):
    return tuple(merge(part, own, scale=scale) for part, own in zip(base, adapters, strict=True))
  if "lora_a" in adapters:
    return {**base, "kernel": _merged_kernel(base["kernel"], adapters["lora_a"], scale * adapters["lora_b"])}
  return {**base, **{name: merge(base[name], node, scale=scale) for name, node in adapters.items()}}


def _merged_kernel(kernel: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
  product = functools.partial(jnp.tensordot, axes=1, precision="highest")
  if a.ndim + b.ndim - 2 > kernel.ndim:  # a leading layer axis is in all three
    product = jax.vmap(product)
  return (kernel.astype(jnp.float32) + product(a, b)).astype(kernel.dtype)


def merge_unstacked(base: Params, adapters: Params, *, scale: float) -> Params:
  """As `merge`, from stacked trees into the decode layout, so that the float32 product is one layer's at a time."""
  adapters = transformer.unstack(adapters) if "layers" in adapters else adapters
  return merge(transformer.unstack(base), adapters, scale=scale)

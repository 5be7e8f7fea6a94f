"""The maths of one decoder block, as Flax NNX modules whose only state is the parameters, named as in the tree.

A block does not know whether it trains, prefills or decodes: `attend(q, k, v)`, given by the caller, is what differs.
"""

from __future__ import annotations

from collections.abc import Callable
import math
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from tba_jax.models.rope import rotate
from tba_jax.models.variants import ModelConfig

Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]
Pick = Callable[[jax.Array], jax.Array]  # [B, T, ...] -> [B, T', ...], some of the positions

ACTIVATIONS = {
  "silu": jax.nn.silu,
  "gelu": lambda x: jax.nn.gelu(x, approximate=False),
  "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
  "relu": jax.nn.relu,
}


class Norm(nnx.Module):
  """RMS norm or layer norm over the last axis, in float32."""

  def __init__(self, size: int, *, kind: str, eps: float):
    self.scale = nnx.Param(jnp.zeros(size) if kind == "rms_plus_one" else jnp.ones(size))
    if kind == "layer":
      self.bias = nnx.Param(jnp.zeros(size))
    self.kind, self.eps = kind, eps

  def __call__(self, x: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    if self.kind == "layer":
      y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
    scale = self.scale[...].astype(jnp.float32)
    y = y * (1 + scale if self.kind == "rms_plus_one" else scale)
    if self.kind == "layer":
      y = y + self.bias[...].astype(jnp.float32)
    return y.astype(x.dtype)


class Linear(nnx.Module):
  """y = x kernel + bias over the last axes: kernel is [*in, *out], and the parameters are cast to x's dtype.

  An adapted one adds (x lora_a) lora_b, [*in, rank] and [rank, *out]; see `models.lora`.
  """

  def __init__(
    self, key: jax.Array, num_in: tuple[int, ...], num_out: tuple[int, ...], *, bias: bool, gain: float = 1.0
  ):
    fan_in = 1
    for size in num_in:
      fan_in *= size
    self.kernel = nnx.Param(jax.random.normal(key, (*num_in, *num_out)) * (gain * fan_in**-0.5))
    if bias:
      self.bias = nnx.Param(jnp.zeros(num_out))
    self.num_in, self.use_bias, self.adapted = len(num_in), bias, False

  def adapt(self) -> None:
    """Makes room for an adapter; its values come with the parameters."""
    self.lora_a, self.lora_b, self.adapted = nnx.Param(jnp.zeros(())), nnx.Param(jnp.zeros(())), True

  def __call__(self, x: jax.Array) -> jax.Array:
    kernel = self.kernel[...].astype(x.dtype)
    batch, out = x.shape[: x.ndim - self.num_in], kernel.shape[self.num_in :]
    # Of matrices: with more axes XLA:CPU copies the operands of the kernel's gradient into other layouts.
    x = x.reshape(-1, math.prod(x.shape[len(batch) :]))
    y = x @ kernel.reshape(x.shape[1], -1)
    if self.adapted:
      lora_a, lora_b = self.lora_a[...].astype(x.dtype), self.lora_b[...].astype(x.dtype)
      y = y + (x @ lora_a.reshape(x.shape[1], -1)) @ lora_b.reshape(lora_b.shape[0], -1)
    y = y.reshape(*batch, *out)
    return y + self.bias[...].astype(x.dtype) if self.use_bias else y


class Attention(nnx.Module):
  """Projections, head norms and rotation around `attend`."""

  def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
    heads, kv_heads = (cfg.num_heads, cfg.head_dim), (cfg.num_kv_heads, cfg.head_dim)
    self.q = Linear(rngs.params(), (cfg.hidden_size,), heads, bias=cfg.qkv_bias)
    self.k = Linear(rngs.params(), (cfg.hidden_size,), kv_heads, bias=cfg.qkv_bias)
    self.v = Linear(rngs.params(), (cfg.hidden_size,), kv_heads, bias=cfg.qkv_bias)
    # Outputs that join the residual start smaller, so that its size does not grow with depth (as in GPT-2).
    self.o = Linear(rngs.params(), heads, (cfg.hidden_size,), bias=cfg.o_bias, gain=(2 * cfg.num_layers) ** -0.5)
    if cfg.qk_norm:
      self.q_norm = Norm(cfg.head_dim, kind=cfg.norm, eps=cfg.norm_eps)
      self.k_norm = Norm(cfg.head_dim, kind=cfg.norm, eps=cfg.norm_eps)
    self.qk_norm = cfg.qk_norm

  def __call__(
    self, x: jax.Array, rope: tuple[jax.Array, jax.Array] | None, attend: Attend, pick: Pick | None = None
  ) -> tuple[jax.Array, Any]:
    pick = pick or (lambda x: x)
    q, k, v = self.q(pick(x)), self.k(x), self.v(x)
    if self.qk_norm:
      q, k = self.q_norm(q), self.k_norm(k)
    if rope is not None:
      q, k = rotate(q, *map(pick, rope)), rotate(k, *rope)
    context, kept = attend(q, k, v)
    return self.o(context), kept


class Mlp(nnx.Module):
  """down(act(gate x) * up x), or down(act(up x)) where there is no gate."""

  def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
    if cfg.gated_mlp:
      self.gate = Linear(rngs.params(), (cfg.hidden_size,), (cfg.mlp_size,), bias=cfg.mlp_bias)
    self.up = Linear(rngs.params(), (cfg.hidden_size,), (cfg.mlp_size,), bias=cfg.mlp_bias)
    self.down = Linear(
      rngs.params(), (cfg.mlp_size,), (cfg.hidden_size,), bias=cfg.mlp_bias, gain=(2 * cfg.num_layers) ** -0.5
    )
    self.gated, self.activation = cfg.gated_mlp, cfg.activation

  def __call__(self, x: jax.Array) -> jax.Array:
    act = ACTIVATIONS[self.activation]
    return self.down(act(self.gate(x)) * self.up(x) if self.gated else act(self.up(x)))


class Block(nnx.Module):
  """One layer. Returns the residual stream [B, T, D] and what `attend` wants kept (the layer's cache, or None).

  With `pick`, the stream of those positions alone, all that a last layer may be asked for: the others give keys and
  values.
  """

  def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
    def norm() -> Norm:
      return Norm(cfg.hidden_size, kind=cfg.norm, eps=cfg.norm_eps)

    self.attn_norm, self.mlp_norm = norm(), norm()
    self.attn, self.mlp = Attention(cfg, rngs), Mlp(cfg, rngs)
    if cfg.post_norms:
      self.post_attn_norm, self.post_mlp_norm = norm(), norm()
    self.post_norms, self.parallel = cfg.post_norms, cfg.parallel_residual

  def __call__(
    self, x: jax.Array, rope: tuple[jax.Array, jax.Array] | None, attend: Attend, pick: Pick | None = None
  ) -> tuple[jax.Array, Any]:
    attended, kept = self.attn(self.attn_norm(x), rope, attend, pick)
    x = x if pick is None else pick(x)
    if self.parallel:
      return x + attended + self.mlp(self.mlp_norm(x)), kept
    if self.post_norms:
      attended = self.post_attn_norm(attended)
    x = x + attended
    fed = self.mlp(self.mlp_norm(x))
    if self.post_norms:
      fed = self.post_mlp_norm(fed)
    return x + fed, kept

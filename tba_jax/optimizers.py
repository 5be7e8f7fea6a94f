"""The optimizers of a run, and the schedules of learning rate and KL temperature that it follows."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from tba_jax import sharding

SCHEDULES = ("constant", "linear", "cosine", "wsd")
OPTIMIZERS = ("adamw", "adafactor", "sgd")
DECAYED_LEAVES = ("kernel", "table", "lora_a", "lora_b")

# Entries of a leaf that a norm takes at a time, at most, on a CPU: half a megabyte, which stays in a core's cache.
_BLOCK_SIZE = 2**17


class Optimizer(NamedTuple):
  """An optax transformation with the schedule that it follows (which the step reports).

  `update(grads, state, params, grad_norm=)` may be given the global norm of the gradient by a caller that has it.
  """

  init: Callable[[Any], Any]
  update: Callable[..., tuple[Any, Any]]
  schedule: Callable[[Any], Any]


def make_schedule(
  name: str, *, learning_rate: float, warmup_steps: int = 0, stable_steps: int = 0, decay_steps: int = 0
) -> Callable[[Any], jax.Array]:
  """Learning rate as a function of the updates applied so far; it is that of the next one, u = count + 1.

      u <= warmup: learning_rate u / warmup;   then learning_rate;   then decay to 0 at u = warmup + stable + decay

  The first update already learns, and the last of a full decay does not (the order of the paper's code, which steps its
  scheduler before its optimizer).

  Args:
    name: "constant" (after the warmup), "linear" or "cosine" (decay right after the warmup), "wsd" (warmup, stable,
      linear decay).
    learning_rate: the highest.
    warmup_steps, stable_steps, decay_steps: lengths in applied updates. A run may stop before the decay ends, as the
      paper's 700-step GSM8K run does (50 / 350 / 600).
  Raises: ValueError for an unknown name, a rate that is not positive, a negative length, or a length that the schedule
  does not use.
  """
  if name not in SCHEDULES:
    raise ValueError(f"schedule {name!r} is unknown; choose one of {', '.join(SCHEDULES)}.")
  if not (math.isfinite(learning_rate) and learning_rate > 0):
    raise ValueError(f"learning_rate={learning_rate} must be a positive number.")
  lengths = {"warmup_steps": warmup_steps, "stable_steps": stable_steps, "decay_steps": decay_steps}
  for length_name, value in lengths.items():
    if value < 0:
      raise ValueError(f"{length_name}={value} must not be negative.")
  if stable_steps and name != "wsd":
    raise ValueError(f"stable_steps={stable_steps} means nothing to schedule {name!r}; set it to 0, or choose 'wsd'.")
  if (decay_steps > 0) != (name != "constant"):
    rule = "it must be 0" if name == "constant" else "it must be at least 1"
    raise ValueError(f"decay_steps={decay_steps} does not suit schedule {name!r}: {rule}.")

  def schedule(count: Any) -> jax.Array:
    update = jnp.asarray(count, jnp.float32) + 1.0
    warm = jnp.minimum(update / max(warmup_steps, 1), 1.0) if warmup_steps else jnp.float32(1.0)
    if name == "constant":
      return learning_rate * warm
    done = jnp.clip((update - warmup_steps - stable_steps) / decay_steps, 0.0, 1.0)
    left = 0.5 * (1.0 + jnp.cos(jnp.pi * done)) if name == "cosine" else 1.0 - done
    return learning_rate * warm * left

  return schedule


def beta_at(update: int, *, beta_init: float, beta_final: float, beta_decay_steps: int) -> float:
  """KL temperature of one update: linear from beta_init, beta_final from update `beta_decay_steps` on.

      u < beta_decay_steps: beta_final f + beta_init (1 - f), f = (u - 1) / beta_decay_steps;   else beta_final

  As in the paper's code, the last step of the way down is a small jump. It goes by applied updates, so that a skipped
  one is retried at the same beta.

  Args:
    update: number of the update, from 1.
    beta_init, beta_final: reward units per nat.
    beta_decay_steps: 0 or 1: beta_final always.
  """
  if update >= beta_decay_steps:
    return beta_final
  fraction = (update - 1) / beta_decay_steps
  return beta_final * fraction + beta_init * (1.0 - fraction)


def linear_at(update: int, *, init: float, final: float, steps: int) -> float:
  """A value on its way from init to final: at update u (from 1) min(1, (u - 1) / steps) of it; 0 steps: final."""
  fraction = min(1.0, (update - 1) / steps) if steps else 1.0
  return init + (final - init) * fraction


class Tempering(NamedTuple):
  """What makes a target of pi_ref exp(reward / beta): (pi_ref^(1 / gamma) exp(reward / beta))^(1 / temperature).

  gamma flattens the reference (above 1) and the temperature the whole target. Both at 1 change nothing.
  Source: Lee et al. 2024, arXiv:2405.18540 (log R = log p_ref / gamma + log toxicity / beta, with schedules of gamma
  and of a temperature over all of it), which Bartoldson et al. 2025, arXiv:2503.18929, train by trajectory balance.
  """

  gamma_init: float
  gamma_final: float
  gamma_steps: int
  temperature_init: float
  temperature_final: float
  temperature_steps: int

  def at(self, update: int) -> tuple[float, float]:
    """(factor of beta, factor of log_ref) at an update, from 1: trajectory balance with log R = (log_ref / gamma +
    reward / beta) / T is trajectory balance with the temperature beta T and the reference log_ref / (gamma T)."""
    gamma = linear_at(update, init=self.gamma_init, final=self.gamma_final, steps=self.gamma_steps)
    temperature = linear_at(
      update, init=self.temperature_init, final=self.temperature_final, steps=self.temperature_steps)
    return temperature, 1.0 / (gamma * temperature)


def make_optimizer(
  name: str = "adamw",
  *,
  schedule: Callable[[Any], Any],
  clip_norm: float,
  weight_decay: float = 0.0,
  b1: float = 0.9,
  b2: float = 0.99,
  eps: float = 1e-8,
) -> Optimizer:
  """Clipping by global norm, then the named optimizer.

  Args:
    name: "adamw"; "adafactor" (factored second moments, no first: a fraction of the memory; b1, b2 and eps do not
      apply); "sgd" (plain).
    schedule: learning rate by applied updates.
    clip_norm: largest global norm of the gradient; it is scaled down to this, over all parameters alike.
    weight_decay: per unit of learning rate; only of matrices and tables. Norm scales and biases go undecayed, by name:
      their leaves are stacked over layers, so their rank does not tell them apart.
    b1, b2, eps: of Adam.
  Raises: ValueError for an unknown name, a clip_norm that is not positive, or weight decay asked of sgd.
  """
  if name not in OPTIMIZERS:
    raise ValueError(f"optimizer {name!r} is unknown; choose one of {', '.join(OPTIMIZERS)}.")
  if not clip_norm > 0:
    raise ValueError(f"clip_norm={clip_norm} must be positive; use inf for no clipping.")
  if name == "sgd":
    if weight_decay:
      raise ValueError(f"weight_decay={weight_decay} is not part of optimizer 'sgd'; set it to 0.")
    rule = optax.sgd(schedule)
  elif name == "adamw":
    rule = optax.adamw(schedule, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=decay_mask)
  else:
    # optax adds the decay after scaling by the learning rate, so it is not per unit of learning rate there: chained by
    # hand.
    rule = optax.chain(
      optax.adafactor(None, multiply_by_parameter_scale=False, clipping_threshold=1.0),
      optax.add_decayed_weights(-weight_decay, mask=decay_mask),
      optax.scale_by_schedule(schedule),
    )
  rule = optax.with_extra_args_support(rule)
  transform = optax.chain(_clip_by_global_norm(clip_norm), rule) if math.isfinite(clip_norm) else rule
  return Optimizer(transform.init, transform.update, schedule)


def _clip_by_global_norm(most: float) -> optax.GradientTransformationExtraArgs:
  """optax's, by one factor for all: a quotient of each entry is kept in memory where several things are made of it."""

  def update(
    grads: Any, state: optax.EmptyState, params: Any = None, *, grad_norm: jax.Array | None = None, **others: Any
  ) -> tuple[Any, optax.EmptyState]:
    del params, others
    norm = global_norm(grads) if grad_norm is None else grad_norm
    factor = jnp.where(norm < most, 1.0, most / norm)
    return jax.tree.map(lambda leaf: (leaf * factor).astype(leaf.dtype), grads), state

  return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def global_norm(tree: Any, *, in_blocks: bool = False) -> jax.Array:
  """The 2-norm of all entries of a tree of float32 arrays, []. 0 without entries.

  `in_blocks`: for trees on one device. On a CPU, XLA sums what is large in stages that write all squares to memory and
  do not use vectors, at 2 GB/s; leaves are then summed by blocks, at the speed of reading (11 GB/s).
  """
  def sum_of_squares(leaf: jax.Array) -> jax.Array:
    whole = lambda x: jnp.sum(jnp.square(x))
    num_blocks = _num_blocks(leaf.size)
    if not in_blocks or num_blocks == 1:
      return whole(leaf)
    by_blocks = functools.partial(_sum_of_squares_by_blocks, num_blocks=num_blocks)
    return jax.lax.platform_dependent(leaf, cpu=by_blocks, default=whole)

  return jnp.sqrt(sum((sum_of_squares(leaf) for leaf in jax.tree.leaves(tree)), jnp.float32(0)))


def _num_blocks(size: int) -> int:
  """The least number of equal blocks of at most _BLOCK_SIZE entries, or 1 if they would be many times smaller."""
  least = -(-size // _BLOCK_SIZE)
  return next((count for count in range(least, 16 * least) if size % count == 0), 1)


def _sum_of_squares_by_blocks(x: jax.Array, *, num_blocks: int) -> jax.Array:
  """Of x [...]: entry by entry over blocks of it, so that each step is an addition of vectors; then over one block."""
  blocks = x.reshape(num_blocks, -1)
  total, _ = jax.lax.scan(
    lambda total, block: (total + jnp.square(block), None), jnp.zeros(blocks.shape[1:], x.dtype), blocks)
  return jnp.sum(total)


def decay_mask(params: Any) -> Any:
  """True for the leaves that weight decay applies to: matrices and tables, by the last name of their path."""
  return jax.tree_util.tree_map_with_path(lambda path, _: sharding.path_name(path[-1:]) in DECAYED_LEAVES, params)

"""Losses by name: what each one needs of a batch, and a function with its options bound."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from typing import Any, Protocol

import jax

from tba_jax.losses import policy_gradient, supervised, trajectory_balance
from tba_jax.types import Batch


class LossFn(Protocol):
  """(log_pi f32[B, T], batch, *, beta f32[]) -> (loss f32[], metrics of f32[]). Losses and metrics of micro-batches add up."""

  def __call__(self, log_pi: jax.Array, batch: Batch, *, beta: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]: ...


@dataclasses.dataclass(frozen=True)
class LossSpec:
  """A loss and what it needs.

  `whole_groups`: only right for whole sampling groups (no dedup, no reward priority). `min_responses`: fewer valid rows in a group
  teach nothing.
  """

  fn: LossFn
  needs_beta: bool
  needs_log_mu: bool
  needs_reference: bool
  min_responses: int
  whole_groups: bool


LOSSES: dict[str, LossSpec] = {
  "tb_vargrad": LossSpec(trajectory_balance.tb_vargrad, True, False, True, 2, False),
  "sft": LossSpec(supervised.sft, False, False, False, 1, False),
  "reinforce": LossSpec(policy_gradient.reinforce, True, False, True, 2, True),
  "rloo": LossSpec(policy_gradient.rloo, True, False, True, 2, True),
}


def get_loss(name: str) -> LossSpec:
  """Returns the loss of that name. Raises ValueError with the nearest names where there is none."""
  if name not in LOSSES:
    raise ValueError(f"loss name {name!r} is unknown; {_suggestion(name, LOSSES)}.")
  return LOSSES[name]


def loss_options(name: str) -> dict[str, Any]:
  """Returns the options of a loss with their defaults (its keyword arguments besides beta)."""
  parameters = inspect.signature(get_loss(name).fn).parameters.values()
  return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "beta"}


def make_loss(name: str, **options: Any) -> LossFn:
  """Returns the loss of that name with `options` in place of its defaults. Raises ValueError for an option that it lacks."""
  known = loss_options(name)
  for option in options:
    if option not in known:
      raise ValueError(f"option {option!r} is unknown to loss {name!r}; {_suggestion(option, known)}.")
  return functools.partial(get_loss(name).fn, **options)


def _suggestion(name: str, known: dict[str, Any]) -> str:
  nearest = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
  every = f"known: {', '.join(sorted(known)) or 'none'}"
  return f"nearest: {', '.join(nearest)}; {every}" if nearest else every

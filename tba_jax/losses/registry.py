"""Losses by name: what each one needs of a batch, and a function with its options bound."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from typing import Any, Protocol

import jax

from tba_jax.losses import actor_critic, clipped, importance, policy_gradient, preference, segments, supervised
from tba_jax.losses import trajectory_balance
from tba_jax.types import Batch


class LossFn(Protocol):
  """(log_pi f32[B, T], batch, *, beta f32[]) -> (loss f32[], metrics of f32[]); those of micro-batches add up."""

  def __call__(self, log_pi: jax.Array, batch: Batch, *, beta: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]: ...


@dataclasses.dataclass(frozen=True)
class LossSpec:
  """A loss and what its gradient needs, with its options at their defaults.

  `needs_beta`: beta changes it. `needs_log_mu`: it corrects for the policy that sampled, so log_mu must be of the
  distribution really sampled from. `needs_reference`: it reads log_ref. `min_responses`: fewer valid rows in a group
  teach nothing. `whole_groups`: only right for whole sampling groups (no dedup, no reward priority). `positive_beta`:
  divides by beta, or teaches nothing at beta = 0; to the others a beta of 0 only means no reference.
  `needs_log_z`: takes the keyword log_z f32[N], nats. `needs_values`: takes the keyword values f32[B, T], reward units.
  Either is read off a scalar head that is learnt beside the model. `needs_advantages`: reads `Batch.advantages`, for
  which searchers sample continuations of every response.
  """

  fn: LossFn
  needs_beta: bool
  needs_log_mu: bool
  needs_reference: bool
  min_responses: int
  whole_groups: bool
  positive_beta: bool = False
  needs_log_z: bool = False
  needs_values: bool = False
  needs_advantages: bool = False

  @property
  def needs_head(self) -> bool:
    return self.needs_log_z or self.needs_values

  def reads_reference(self, *betas: float) -> bool:
    """Whether log_ref changes anything at one of these values of beta."""
    return self.needs_reference and max(betas) > 0


def _spec(fn: LossFn, *needs: str, min_responses: int = 2, whole_groups: bool = True) -> LossSpec:
  """`needs` of "beta", "beta > 0" (which includes "beta"), "log_mu", "reference", "log_z", "values", "advantages".
  """
  named = ("log_mu", "reference", "log_z", "values", "advantages")
  assert set(needs) <= {"beta", "beta > 0", *named}, needs
  return LossSpec(
    fn=fn, min_responses=min_responses, whole_groups=whole_groups, needs_beta="beta" in needs or "beta > 0" in needs,
    positive_beta="beta > 0" in needs, **{f"needs_{x}": x in needs for x in named},
  )


LOSSES: dict[str, LossSpec] = {
  "tb_vargrad": _spec(trajectory_balance.tb_vargrad, "beta > 0", "reference", whole_groups=False),
  "tb_learned_z": _spec(
    trajectory_balance.tb_learned_z, "beta > 0", "reference", "log_z", min_responses=1, whole_groups=False
  ),
  "tb_f_divergence": _spec(trajectory_balance.tb_f_divergence, "beta > 0", "reference", whole_groups=False),
  "tba_prime": _spec(trajectory_balance.tba_prime, "beta", "reference", whole_groups=False),
  "tba_prime_ratio": _spec(
    trajectory_balance.tba_prime_ratio, "beta", "log_mu", "reference", whole_groups=False
  ),
  "flowrl": _spec(trajectory_balance.flowrl, "beta > 0", "log_mu", "reference", "log_z"),
  "sft": _spec(supervised.sft, min_responses=1, whole_groups=False),
  "reinforce": _spec(policy_gradient.reinforce, "beta", "reference"),
  "rloo": _spec(policy_gradient.rloo, "beta", "reference"),
  "pass_at_k": _spec(policy_gradient.pass_at_k),
  "pass_at_k_rate": _spec(policy_gradient.pass_at_k_rate),
  "proximal_rloo": _spec(clipped.proximal_rloo, "beta", "log_mu", "reference"),
  "ppo_clip": _spec(clipped.ppo_clip, "beta", "log_mu", "reference"),
  "vineppo": _spec(clipped.vineppo, "beta", "log_mu", "reference", "advantages", min_responses=1),
  "ppo": _spec(actor_critic.ppo, "beta", "log_mu", "reference", "values", min_responses=1),
  "decoupled_ppo": _spec(clipped.decoupled_ppo, "beta", "log_mu", "reference"),
  "grpo": _spec(clipped.grpo, "beta", "log_mu", "reference"),
  "dr_grpo": _spec(clipped.dr_grpo, "log_mu"),
  "dapo": _spec(clipped.dapo, "log_mu"),
  "gspo": _spec(clipped.gspo, "log_mu"),
  "cispo": _spec(importance.cispo, "log_mu"),
  "topr": _spec(importance.topr, "beta", "log_mu", "reference"),
  "vtrace": _spec(importance.vtrace, "beta", "log_mu", "reference"),
  "topk_off_policy": _spec(importance.topk_off_policy, "beta", "log_mu", "reference"),
  "dpo": _spec(preference.dpo, "beta > 0", "reference"),
}


# Keyword arguments that hold what a step computes.
_ARRAYS = ("beta", "log_z", "values", "old_values")


def get_loss(name: str) -> LossSpec:
  """Returns the loss of that name. Raises ValueError with the nearest names where there is none."""
  if name not in LOSSES:
    raise ValueError(f"loss name {name!r} is unknown; {_suggestion(name, LOSSES)}.")
  return LOSSES[name]


def loss_options(name: str) -> dict[str, Any]:
  """Returns the options of a loss with their defaults: its keyword arguments besides those that hold arrays."""
  parameters = inspect.signature(get_loss(name).fn).parameters.values()
  return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in _ARRAYS}


def make_loss(name: str, **options: Any) -> LossFn:
  """Returns the loss of that name with `options` in place of its defaults. Raises ValueError for an unknown option."""
  known = loss_options(name)
  for option in options:
    if option not in known:
      raise ValueError(f"option {option!r} is unknown to loss {name!r}; {_suggestion(option, known)}.")
  return functools.partial(get_loss(name).fn, **options)


def head_keywords(spec: LossSpec, scalar: jax.Array, batch: Batch) -> dict[str, jax.Array]:
  """What a loss with a scalar head takes besides log_pi: `scalar` is what the head reads before each token, f32[B, T].

  A log Z is what it reads at the end of the prompt, before the first token of the response.
  """
  return {"values": scalar} if spec.needs_values else {"log_z": segments.at_first_token(scalar, batch)}


def _suggestion(name: str, known: dict[str, Any]) -> str:
  nearest = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
  every = f"known: {', '.join(sorted(known)) or 'none'}"
  return f"nearest: {', '.join(nearest)}; {every}" if nearest else every

"""Ragged float64 responses for the tests of losses, and their layouts as padded or packed batches.

A `Case` is what the oracles read: lists of numpy arrays, one a response, no padding, no layout. `lay_out` places it in
a `Batch`.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.types import Batch


# Every layout has these sizes, so that a loss compiles once. Rows and responses beyond a case's own are padding.
NUM_ROWS, WIDTH, NUM_RESPONSES = 12, 26, 16


@dataclasses.dataclass
class Case:
  log_pi: list[np.ndarray]
  log_ref: list[np.ndarray]
  log_mu: list[np.ndarray]
  rewards: np.ndarray
  groups: np.ndarray
  valid: np.ndarray
  truncated: np.ndarray
  weights: np.ndarray
  advantages: list[np.ndarray]

  def members(self) -> list[np.ndarray]:
    """Valid responses of each group that has any."""
    found = [np.flatnonzero((self.groups == g) & self.valid) for g in np.unique(self.groups)]
    return [m for m in found if len(m)]

  @property
  def num(self) -> int:
    return int(self.valid.sum())


def exact(values: np.ndarray) -> np.ndarray:
  """Rounds to float32 and returns float64, so that the oracle and the code under test read the very same numbers."""
  return np.asarray(values, np.float32).astype(np.float64)


def make_case(lengths, groups, *, seed=0, rewards=None, spread=0.3, valid=None, weights=None, truncated=None) -> Case:
  rng = np.random.default_rng(seed)
  num = len(lengths)
  log_pi = [exact(-rng.uniform(0.2, 3.0, n)) for n in lengths]
  return Case(
    log_pi=log_pi,
    log_ref=[exact(np.minimum(x + spread * rng.normal(size=len(x)), -0.01)) for x in log_pi],
    log_mu=[exact(np.minimum(x + spread * rng.normal(size=len(x)), -0.01)) for x in log_pi],
    rewards=exact(rng.uniform(-1, 1, num) if rewards is None else rewards),
    groups=np.asarray(groups, np.int32),
    valid=np.ones(num, bool) if valid is None else np.asarray(valid, bool),
    truncated=np.zeros(num, bool) if truncated is None else np.asarray(truncated, bool),
    weights=np.ones(num) if weights is None else exact(weights),
    advantages=[exact(np.random.default_rng((seed, i)).normal(size=n)) for i, n in enumerate(lengths)],
  )


def standard_case(seed: int = 0, **kwargs) -> Case:
  """Groups of 4, 2 and 3 valid rows; an empty response, a row that is not valid, weights by group, a truncated row."""
  lengths = [3, 1, 5, 2, 4, 6, 0, 2, 3, 4]
  groups = [0, 0, 1, 1, 2, 2, 2, 0, 0, 1]
  valid = [True] * 9 + [False]
  truncated = [False, True] + [False] * 8
  weights = np.array([1.5, 0.5, 2.0])[groups]
  return make_case(lengths, groups, seed=seed, **(dict(valid=valid, truncated=truncated, weights=weights) | kwargs))


def lay_out(case: Case, *, pack: bool = False, order=None, seed: int = 0, relabel=None, num: int = NUM_RESPONSES):
  """Returns (log_pi, batch, places): places[i] is the (row, slice) of response i. What must not count holds garbage."""
  rng = np.random.default_rng(seed + 1)
  order = np.arange(len(case.log_pi)) if order is None else np.asarray(order)
  pad_responses = num - len(order)
  rows, places = [], {}
  for slot, i in enumerate(order):
    prompt = int(rng.integers(1, 4))
    length = prompt + len(case.log_pi[i])
    if not pack or not rows or rows[-1] + length > WIDTH:
      rows.append(0)
    places[i] = (len(rows) - 1, slice(rows[-1] + prompt, rows[-1] + length), slot)
    rows[-1] += length
  num_rows, width = NUM_ROWS, WIDTH
  assert len(rows) <= num_rows and max(rows) <= width
  log_pi = np.full((num_rows, width), np.nan)
  log_mu, log_ref = np.zeros((num_rows, width)), np.zeros((num_rows, width))
  advantages = np.full((num_rows, width), np.nan)
  sequence_ids = np.full((num_rows, width), num, np.int32)
  for i, (row, span, slot) in places.items():
    log_pi[row, span], log_mu[row, span], log_ref[row, span] = case.log_pi[i], case.log_mu[i], case.log_ref[i]
    advantages[row, span] = case.advantages[i]
    sequence_ids[row, span] = slot

  def per_response(values, fill, dtype):
    return jnp.asarray(np.concatenate([values[order], np.full(pad_responses, fill)]).astype(dtype))

  rewards = np.where(case.valid, case.rewards, np.nan)
  groups = case.groups if relabel is None else np.asarray(relabel)[case.groups]
  f32 = jnp.float32
  zeros = jnp.zeros((num_rows, width), jnp.int32)
  batch = Batch(
    tokens=zeros, positions=zeros, segment_ids=zeros, sequence_ids=jnp.asarray(sequence_ids),
    log_mu=jnp.asarray(log_mu, f32), log_ref=jnp.asarray(log_ref, f32),
    rewards=per_response(rewards, np.nan, np.float32), group_ids=per_response(groups, 0, np.int32),
    valid=per_response(case.valid, False, bool), truncated=per_response(case.truncated, True, bool),
    weights=per_response(case.weights, 0.0, np.float32),
    num_responses=f32(case.num), num_groups=f32(len(case.members())),
    num_tokens=f32(sum(len(x) for x, v in zip(case.log_pi, case.valid) if v)),
    advantages=jnp.asarray(advantages, f32),
  )
  return jnp.asarray(log_pi, f32), batch, {i: (row, span) for i, (row, span, _) in places.items()}


def micro_batches(case: Case, groups_of_each, **layout):
  """Splits a case into micro-batches of whole groups that keep the counts of the whole batch."""
  whole = lay_out(case)[1]
  for wanted in groups_of_each:
    rows = np.flatnonzero(np.isin(case.groups, wanted))
    relabel = np.zeros(int(case.groups.max()) + 1, np.int32)
    relabel[list(wanted)] = np.arange(len(wanted))
    log_pi, batch, places = lay_out(case, order=rows, relabel=relabel, **layout)
    counts = {name: getattr(whole, name) for name in ("num_responses", "num_groups", "num_tokens")}
    yield log_pi, batch._replace(**counts), places


def run(fn, case: Case, *, beta: float, common: bool = False, **layout):
  """Returns (loss, gradient as one array per response, metrics), jitted; asserts that nothing else gets a gradient.

  Without `common` only the metrics of the loss itself are made: the shared ones take most of the time to compile.
  """
  log_pi, batch, places = lay_out(case, **layout)
  return evaluate(fn, log_pi, batch, places, beta=beta, common=common)


def constant_head(spec) -> dict:
  """What a loss with a scalar head takes besides: a head that reads 0.3 everywhere."""
  log_z = {"log_z": jnp.full(NUM_RESPONSES, 0.3)} if spec.needs_log_z else {}
  return log_z | ({"values": jnp.full((NUM_ROWS, WIDTH), 0.3)} if spec.needs_values else {})


COMMON_METRICS = frozenset((
  "reward", "reward_group_std", "equal_reward_groups", "truncated", "log_ratio_ref", "residual_abs", "beta_log_z",
  "beta_log_z_square", "log_ratio_mu_abs", "log_ratio_mu_max", "log_ratio_mu_q05", "log_ratio_mu_q50",
  "log_ratio_mu_q95", "ess_share",
))


@functools.lru_cache(maxsize=None)
def compiled(fn, common: bool = False):
  def value(log_pi, batch, beta):
    loss, metrics = fn(log_pi, batch, beta=beta)
    assert metrics.keys() >= COMMON_METRICS
    return loss, {name: x for name, x in metrics.items() if common or name not in COMMON_METRICS}

  return jax.jit(jax.value_and_grad(value, has_aux=True))


def evaluate(fn, log_pi, batch, places, *, beta: float, common: bool = False):
  (loss, metrics), grad = compiled(fn, common)(log_pi, batch, jnp.float32(beta))
  grad = np.asarray(grad, np.float64)
  grads = {i: grad[row, span] for i, (row, span) in places.items()}
  total = sum(np.abs(g).sum() for g in grads.values())
  np.testing.assert_allclose(np.abs(grad).sum(), total, rtol=1e-12)
  return float(loss), grads, {name: float(value) for name, value in metrics.items()}


def sums(arrays) -> np.ndarray:
  return np.array([x.sum() for x in arrays])


def assert_same(actual: dict, wanted: dict, *, rtol=2e-5, atol=1e-6) -> None:
  assert actual.keys() == wanted.keys()
  for i in wanted:
    np.testing.assert_allclose(actual[i], wanted[i], rtol=rtol, atol=atol, err_msg=f"response {i}")


def differentiate(value, case: Case, *, step: float = 1e-5) -> dict:
  """Central differences of value(log_pi lists) -> float, float64, one array per response: an oracle of gradients."""
  grads = {}
  for i, tokens in enumerate(case.log_pi):
    grads[i] = np.zeros(len(tokens))
    for t in range(len(tokens)):
      ends = []
      for sign in (1.0, -1.0):
        moved = [x.copy() for x in case.log_pi]
        moved[i][t] += sign * step
        ends.append(value(moved))
      grads[i][t] = (ends[0] - ends[1]) / (2 * step)
  return grads


def check(fn, case: Case, oracle, *, beta: float, rtol=3e-5, atol=1e-6):
  """Value and gradient against oracle(case, log_pi lists) -> float, which reads from case.log_pi what is detached."""
  loss, grads, metrics = run(fn, case, beta=beta)
  np.testing.assert_allclose(loss, oracle(case, case.log_pi), rtol=1e-5, atol=1e-6)
  assert_same(grads, differentiate(lambda moved: oracle(case, moved), case), rtol=rtol, atol=atol)
  return loss, grads, metrics


def centred(case: Case, values: np.ndarray) -> np.ndarray:
  """Values minus their group's mean over valid rows, 0 for the others."""
  out = np.zeros(len(values))
  for members in case.members():
    out[members] = values[members] - values[members].mean()
  return out


def standardised(case: Case, *, floor: float) -> np.ndarray:
  out = centred(case, case.rewards)
  for members in case.members():
    out[members] /= case.rewards[members].std() + floor
  return out


def shaped_rewards(case: Case, *, beta: float) -> np.ndarray:
  """r - beta (log_pi - log_ref), of the policy as it is."""
  return case.rewards - beta * (sums(case.log_pi) - sums(case.log_ref))

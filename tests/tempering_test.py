"""A tempered target, log R = (log_ref / gamma + reward / beta) / T: its factors, its loss and its minimum."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.losses.trajectory_balance import tb_vargrad
from tba_jax.optimizers import Tempering, linear_at
from tba_jax.runtime.trainer import Prepared, Trainer
from tba_jax.types import Batch

GAMMA, TEMPERATURE, BETA = 1.3, 1.7, 0.2
RNG = np.random.default_rng(0)
LOG_REF = np.log(RNG.dirichlet(np.ones(6), size=2))  # two tokens of six values each, independent under the reference
SCORES = RNG.normal(size=36)
TOKENS = np.stack(np.meshgrid(np.arange(6), np.arange(6), indexing="ij"), -1).reshape(36, 2)
PER_TOKEN_REF = np.take_along_axis(LOG_REF[None], TOKENS[..., None], axis=2)[..., 0]  # [36, 2]
TARGET = (PER_TOKEN_REF.sum(1) / GAMMA + SCORES / BETA) / TEMPERATURE


def _batch(log_ref):
  ids = np.repeat(np.arange(36)[:, None], 2, axis=1)
  return Batch(
    tokens=TOKENS, positions=np.zeros_like(TOKENS), segment_ids=np.ones_like(TOKENS), sequence_ids=ids.astype(np.int32),
    log_mu=np.zeros((36, 2), np.float32), log_ref=jnp.asarray(log_ref, jnp.float32),
    rewards=jnp.asarray(SCORES, jnp.float32), group_ids=np.zeros(36, np.int32), valid=np.ones(36, bool),
    truncated=np.zeros(36, bool), weights=np.ones(36, np.float32), num_responses=np.float32(36),
    num_groups=np.float32(1), num_tokens=np.float32(72),
  )  # fmt: skip


def _loss(log_pi):
  """Of per-token log-probabilities [36, 2], as a trainer computes it at the first update."""
  beta_factor, log_ref_factor = Tempering(GAMMA, GAMMA, 0, TEMPERATURE, TEMPERATURE, 0).at(1)
  batch = _batch(PER_TOKEN_REF * log_ref_factor)
  return tb_vargrad(log_pi, batch, beta=jnp.float32(BETA * beta_factor))[0]


def test_loss_is_the_variance_about_the_tempered_target():
  log_pi = np.log(RNG.dirichlet(np.ones(36))).reshape(36, 1) * [0.25, 0.75]
  delta = TARGET - log_pi.sum(1)
  wanted = BETA * TEMPERATURE / 2 * np.mean((delta - delta.mean()) ** 2)
  np.testing.assert_allclose(_loss(jnp.asarray(log_pi, jnp.float32)), wanted, rtol=1e-5)


def test_minimum_is_the_policy_in_proportion_to_the_reward():
  """Every response once, a free logit each: gradient descent ends at R / sum R."""

  def loss(logits):
    log_p = jax.nn.log_softmax(logits)
    return _loss(jnp.stack([log_p, jnp.zeros(36)], axis=1))

  step = jax.jit(lambda logits: logits - 40.0 * jax.grad(loss)(logits))
  logits = jnp.zeros(36)
  for _ in range(400):
    logits = step(logits)
  wanted = np.exp(TARGET - TARGET.max())
  np.testing.assert_allclose(jax.nn.softmax(logits), wanted / wanted.sum(), atol=2e-5)
  untempered = np.exp(PER_TOKEN_REF.sum(1) + SCORES / BETA)
  assert np.abs(untempered / untempered.sum() - wanted / wanted.sum()).max() > 0.05  # another distribution


def test_schedules_run_from_the_first_update_to_the_last():
  values = [linear_at(u, init=2.0, final=1.0, steps=4) for u in (1, 2, 5, 6, 900)]
  assert values == [2.0, 1.75, 1.0, 1.0, 1.0] and linear_at(1, init=2.0, final=1.0, steps=0) == 1.0
  beta_factor, log_ref_factor = Tempering(1.0, 1.2, 10, 2.0, 1.0, 5).at(6)
  assert beta_factor == 1.0 and log_ref_factor == pytest.approx(1 / 1.1)


def test_a_step_gets_beta_and_log_ref_of_its_own_update_and_the_batch_stays_as_it_was():
  given = []

  class Step:
    def lower(self, *_):
      return self

    def compile(self):
      return self

    def __call__(self, state, batch, beta):
      given.append((np.asarray(batch.log_ref), float(beta)))
      return state, {"skipped": np.float32(0.0)}

  class State:
    version, steps, skipped_in_row = np.int32(3), np.int32(3), np.int32(0)

  batch = _batch(PER_TOKEN_REF)
  on_device = jax.tree.map(lambda leaf: jax.sharding.SingleDeviceSharding(jax.devices()[0]), batch)
  trainer = Trainer(
    state=State(), step=Step(), beta_at_update=lambda update: 0.1 * update,
    tempering_at_update=Tempering(1.0, 2.0, 4, 2.0, 1.0, 8).at, placement=on_device, row_multiple=1,
    length_buckets=(2,), micro_batches=1, pack=False, max_nonfinite_in_row=1, dump_folder="",
  )  # fmt: skip
  trainer.dispatch(Prepared(None, jax.device_put(batch, on_device), 1.0))
  (log_ref, beta), temperature, gamma = given[0], 2.0 - 3 / 8, 1.0 + 3 / 4  # of update 4
  np.testing.assert_allclose(log_ref, PER_TOKEN_REF / (gamma * temperature), rtol=1e-6)
  assert beta == pytest.approx(0.4 * temperature)
  np.testing.assert_allclose(batch.log_ref, PER_TOKEN_REF, rtol=1e-6)

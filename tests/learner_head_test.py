"""A scalar head learnt beside the model: gradients by numpy, response by response, however rows are laid out."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import learner_test
import numpy as np
import pytest
from learner_test import BETA, CFG, DRAW, TEMPERATURE, assert_same_gradient, batch_of, mesh_of, sgd

from tba_jax import learner
from tba_jax.losses.registry import LOSSES, make_loss
from tba_jax.models import scalar_head, transformer


@functools.cache
def head_params():
  rng = np.random.default_rng(3)
  return jax.tree.map(lambda leaf: (0.5 * rng.normal(size=leaf.shape)).astype(np.float32),
                      scalar_head.abstract_scalar_head(CFG))


@functools.cache
def step_with_head(loss: str, **options):
  head = learner.Head(LOSSES[loss], sgd())
  settings = dict(temperature=TEMPERATURE, compute_dtype=jnp.float32, remat="none", micro_batches=1, chunk_tokens=32)
  step = learner.make_train_step(CFG, make_loss(loss), sgd(), head=head, **{**settings, **options})
  return step, lambda: learner.init_train_state(
    jax.tree.map(jnp.array, learner_test.start_params()), sgd(), mesh=options.get("mesh"), head=head,
    head_params=jax.tree.map(jnp.array, head_params()))


def gradients(batch, loss: str, **options):
  """Of the model and of the head, and the metrics; by the optimizers' states, which are the last gradients."""
  step, start = step_with_head(loss, **options)
  state, metrics = step(start(), batch, BETA)
  assert float(metrics["skipped"]) == 0
  found = jax.tree.map(np.asarray, (state.opt_state, state.head_opt_state))
  return *found, jax.tree.map(float, metrics)


def gelu(x: np.ndarray) -> np.ndarray:
  return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def state_after_prompt(i: int) -> np.ndarray:
  prompt = DRAW.prompts[i, : DRAW.prompt_lengths[i]][None]
  hidden = transformer.hidden_states(
    learner_test.start_params(), CFG, prompt, np.arange(prompt.shape[1])[None], np.ones_like(prompt), dtype=jnp.float32)
  return np.asarray(hidden[0, -1], np.float64)


@functools.cache
def oracle():
  """(gradient of the model, of the head, loss) of tb_learned_z on DRAW, in float64. The rows of a group have prompts of
  their own there, so that their log Z is a mean of different numbers."""
  head = jax.tree.map(lambda x: x.astype(np.float64), head_params()["scalar_head"])
  scored = {i: values for i, values in learner_test.each_response(DRAW)}
  valid = np.array(sorted(scored))
  states = {i: state_after_prompt(i) for i in valid}
  inner = {i: states[i] @ head["hidden"]["kernel"] + head["hidden"]["bias"] for i in valid}
  reads = {i: gelu(inner[i]) @ head["out"]["kernel"][:, 0] + head["out"]["bias"][0] for i in valid}
  model = jax.tree.map(np.zeros_like, learner_test.start_params())
  grads, loss = jax.tree.map(np.zeros_like, head), 0.0
  for group in np.unique(DRAW.group_ids):
    members = [i for i in valid if DRAW.group_ids[i] == group]
    log_z, by_log_z = np.mean([reads[i] for i in members]), 0.0
    for i in members:
      log_ref = DRAW.log_ref[i, : DRAW.lengths[i]].astype(np.float64).sum()
      (log_pi, _), grad = scored[i]
      residual = float(BETA) * (log_z + float(log_pi) - log_ref) - float(DRAW.rewards[i])
      loss += residual**2 / (2 * float(BETA)) / len(valid)
      by_log_z += residual / len(valid)
      model = jax.tree.map(lambda total, g: total + residual * np.asarray(g, np.float64) / len(valid), model, grad)
    for i in members:
      share, eps = by_log_z / len(members), 1e-6
      slope = (gelu(inner[i] + eps) - gelu(inner[i] - eps)) / (2 * eps) * head["out"]["kernel"][:, 0]
      grads["out"]["bias"] += share
      grads["out"]["kernel"][:, 0] += share * gelu(inner[i])
      grads["hidden"]["bias"] += share * slope
      grads["hidden"]["kernel"] += share * np.outer(states[i], slope)
  return model, {"scalar_head": grads}, loss


@pytest.mark.parametrize("layout, options", [
  pytest.param({}, {}, marks=pytest.mark.slow),
  (dict(pack=True, row_multiple=4), dict(micro_batches=4)),  # two passes, groups are split
  pytest.param({}, dict(mesh=dict(data=2, fsdp=2, tensor=2)), marks=pytest.mark.slow),
], ids=["plain", "packed micro-batches", "8 devices"])
def test_learned_log_z_equals_numpy(layout, options):
  options = {**options, "mesh": mesh_of(options["mesh"])} if "mesh" in options else options
  model, head, loss = oracle()
  found, found_head, metrics = gradients(batch_of(**layout), "tb_learned_z", **options)
  assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
  assert_same_gradient(found, model, 2e-5)
  assert_same_gradient(found_head, head, 2e-5)
  assert metrics["grad_norm"] == pytest.approx(learner_test.norm(model), rel=1e-5)
  assert metrics["head_grad_norm"] == pytest.approx(learner_test.norm(head), rel=1e-5)


@pytest.mark.slow
def test_values_of_split_packed_groups_are_those_of_the_whole_batch():
  whole = gradients(batch_of(), "ppo")
  found = gradients(batch_of(pack=True, row_multiple=4), "ppo", micro_batches=4)
  assert min(learner_test.norm(grads) for grads in whole[:2]) > 1e-2
  for ours, theirs in zip(found[:2], whole[:2]):
    assert_same_gradient(ours, theirs, 1e-5)
  assert found[2] == pytest.approx(whole[2], rel=1e-4, abs=1e-6)
  assert whole[2]["value_error"] > 0 and "value_target_std" in whole[2]


def test_a_head_is_sharded_like_the_model_and_stays_as_it_is_when_a_step_is_skipped():
  step, start = step_with_head("tb_learned_z", mesh=mesh_of(dict(data=2, fsdp=2, tensor=2)))
  state = start()
  assert state.head["scalar_head"]["hidden"]["kernel"].sharding.spec[0] == "fsdp"
  before = jax.tree.map(np.asarray, (state.head, state.head_opt_state))
  batch = batch_of()
  state, metrics = step(state, batch._replace(rewards=np.full_like(batch.rewards, np.inf)), BETA)
  assert float(metrics["skipped"]) == 1
  jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, (state.head, state.head_opt_state)))


def test_a_new_head_reads_0_everywhere():
  head = scalar_head.init_scalar_head(CFG, jax.random.key(0))["scalar_head"]
  hidden = np.random.default_rng(0).normal(size=(3, 5, CFG.hidden_size)).astype(np.float32)
  np.testing.assert_array_equal(scalar_head.read_scalar(head, hidden), np.zeros((3, 5)))

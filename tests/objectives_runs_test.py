"""Objectives in whole short runs: a head that is learnt beside the model, and what a loss that needs nothing leaves
out."""

from __future__ import annotations

import numpy as np
import pytest
import runs

from tba_jax import build, metrics
from tba_jax.checkpoints import run_state
from tba_jax.models import transformer
from tba_jax.replay.buffer import ReplayBuffer
from tba_jax.runtime.settings import StopFlag
from tba_jax.sampling.engine import Engine
from tba_jax.searcher import Searcher
from tba_jax.tasks.arithmetic import ArithmeticTask
from tba_jax.types import Occurrence
from tba_jax.vine import State

pytestmark = pytest.mark.usefixtures("compile_once", "easy_reward")


def steps_of(workdir):
  return [line for line in runs.lines(workdir) if "loss" in line]


def stop_after(steps, workdir, config, monkeypatch):
  """Runs to a stop with a checkpoint after so many steps."""
  stop, write = StopFlag(), metrics.MetricsWriter.write

  def watched(self, at, scalars):
    write(self, at, scalars)
    if "loss" in scalars and at == steps:
      stop.set("the test")

  with monkeypatch.context() as patch:
    patch.setattr(metrics.MetricsWriter, "write", watched)
    assert runs.run(config, workdir, stop) == 0


@pytest.mark.slow
def test_a_critic_is_trained_saved_and_resumed_to_the_bit(tmp_path, monkeypatch):
  config = runs.short_config(
    loss__name="ppo", loss__head_learning_rate=3e-2, buffer__dedup=False, runtime__mode="lockstep", runtime__lag=1,
    train__micro_batches=2)
  assert runs.run(config, tmp_path / "whole") == 0
  stop_after(3, tmp_path / "broken", config, monkeypatch)
  assert runs.run(config, tmp_path / "broken") == 0
  assert runs.untimed(tmp_path / "whole") == runs.untimed(tmp_path / "broken")
  trained = steps_of(tmp_path / "whole")
  # Values of 0 are off by the whole return; learnt ones by less.
  whole_return = [line["value_target"] ** 2 + line["value_target_std"] ** 2 for line in trained]
  assert trained[0]["value_error"] == pytest.approx(whole_return[0], rel=1e-4)
  assert trained[-1]["value_error"] < 0.97 * whole_return[-1]
  assert all(line["head_grad_norm"] > 0 for line in trained)
  # What is exported and published is the model alone.
  cfg, _ = build.read_model_folder(tmp_path / "whole" / "model")
  step, params = run_state.load_params(tmp_path / "whole", transformer.abstract_params(cfg))
  assert step == 6 and "scalar_head" not in params


def test_the_reference_is_read_where_a_loss_has_it_and_beta_is_not_0():
  reads = lambda **changes: build.reads_reference(runs.short_config(buffer__dedup=False, **changes))
  assert reads(loss__name="rloo") and not reads(loss__name="dr_grpo")
  assert reads(loss__name="rloo", loss__beta_init=0.05, loss__beta_final=0.0, loss__beta_decay_steps=3)
  assert not reads(loss__name="rloo", loss__beta_init=0.0, loss__beta_final=0.0)


@pytest.mark.slow
def test_a_loss_that_reads_no_reference_has_no_rollout_scored(tmp_path, monkeypatch):
  calls, score_rows = [], Searcher._score_rows

  def counted(self, score, *rows):
    calls.append(score is self._score)
    return score_rows(self, score, *rows)

  monkeypatch.setattr(Searcher, "_score_rows", counted)
  config = runs.short_config(
    loss__name="dr_grpo", buffer__dedup=False, runtime__mode="sync", train__steps=2, eval__kl_prompts=0)
  assert runs.run(config, tmp_path / "run") == 0
  assert calls and not any(calls)  # the comparison of log_mu with the trainer's path goes on
  for line in steps_of(tmp_path / "run"):
    assert not {"log_ratio_ref", "residual_abs", "beta_log_z", "beta_log_z_std"} & set(line)
    assert "ess_share" in line and np.isfinite(line["loss"])


def test_kl_fresh_is_0_at_version_0_and_says_how_far_training_went(tmp_path):
  config = runs.short_config(
    runtime__mode="lockstep", train__steps=4, train__learning_rate=3e-2, eval__every_steps=2, eval__kl_prompts=8)
  assert runs.run(config, tmp_path / "run") == 0
  found = [line for line in runs.lines(tmp_path / "run") if "kl_fresh" in line]
  assert [line["eval_version"] for line in found] == [0, 2, 4]
  assert abs(found[0]["kl_fresh"]) < 1e-4 and found[0]["kl_fresh_error"] < 1e-4
  assert 0.1 < found[-1]["kl_fresh"] < 10 and found[-1]["kl_fresh_error"] > 0.01


VINE = dict(
  loss__name="vineppo", loss__vine_samples=2, loss__vine_step_tokens=5, buffer__dedup=False, sample__max_new_tokens=12)


@pytest.mark.slow
def test_advantages_are_what_continuations_earn_and_a_resumed_run_has_them_too(tmp_path, monkeypatch):
  config = runs.short_config(
    **VINE, runtime__mode="lockstep", runtime__lag=1, train__micro_batches=2, train__steps=4, devices__searchers=1)
  sampled, added, prompts = [], [], {}
  engine_step, add, submit = Engine.step, ReplayBuffer.add, Engine.submit

  def step(self):
    found = engine_step(self)
    sampled.extend(found)
    return found

  with monkeypatch.context() as patch:
    patch.setattr(Engine, "step", step)
    patch.setattr(Engine, "submit", lambda self, asked: prompts.update({asked.tag: asked}) or submit(self, asked))
    patch.setattr(ReplayBuffer, "add", lambda self, group, **asked: added.append(group) or add(self, group, **asked))
    assert runs.run(config, tmp_path / "whole") == 0
  task = ArithmeticTask(num_train_prompts=1, num_eval_prompts=1, num_sft_examples=0)
  earns = lambda ids: runs.easy_reward(None, None, task.response_text(ids), truncated=False)
  continued = {found.tag: found for found in sampled if isinstance(found.tag, State)}
  assert len(added) == 16 and len(continued) > 40
  for group in added:
    occurrence = Occurrence(group.occurrence, group.prompt_id, group.attempt)

    def value(sample, start):
      found = continued[State(occurrence, sample, start)]
      begun = [] if sample < 0 else group.tokens[sample, :start].tolist()
      assert prompts[found.tag].prompt.tolist() == [*group.prompt.tolist(), *begun] and len(found.lengths) == 2
      return np.mean([earns([*begun, *row[:n]]) for row, n in zip(found.tokens, found.lengths)])

    for i, length in enumerate(group.lengths):
      states = [value(-1, 0), *(value(i, start) for start in range(5, length, 5)), group.rewards[i]]
      wanted = np.repeat(np.diff(states), [min(5, length - start) for start in range(0, length, 5)])
      np.testing.assert_allclose(group.advantages[i, :length], wanted, rtol=1e-5, atol=1e-6)
  stop_after(2, tmp_path / "broken", config, monkeypatch)
  assert runs.run(config, tmp_path / "broken") == 0
  assert runs.untimed(tmp_path / "whole") == runs.untimed(tmp_path / "broken")
  assert all(line["advantage_abs"] > 0.05 for line in steps_of(tmp_path / "whole"))


@pytest.mark.slow
def test_vineppo_runs_beside_its_trainer_and_packed(tmp_path):
  config = runs.short_config(**VINE, train__packing=True, train__micro_batches=4, train__steps=3)
  assert runs.run(config, tmp_path / "run") == 0
  assert [line["step"] for line in steps_of(tmp_path / "run")] == [1, 2, 3]
  assert all(np.isfinite(line["loss"]) and line["advantage_abs"] > 0 for line in steps_of(tmp_path / "run"))

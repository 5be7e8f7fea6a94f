"""A reference that moves: what trained rows carry as log_ref against every policy of the run, scored here one row at a
time."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax import build, sharding, train
from tba_jax.checkpoints import run_state
from tba_jax.models import transformer
from tba_jax.runtime.reference import Reference
from tba_jax.runtime.run import Run
from tba_jax.runtime.settings import StopFlag
from tba_jax.runtime.trainer import Trainer
from learner_test import CFG, make_draw, start_params
import runs
from runtime_test import _stop_after_step

pytestmark = pytest.mark.usefixtures("compile_once")


@functools.partial(jax.jit, static_argnames=("cfg", "temperature"))
def log_p_of_row(params, tokens, num_tokens, *, cfg, temperature):
  """log p of tokens [T] given those before, from whole logits; the first is 0."""
  positions = jnp.arange(tokens.shape[0])
  mask = (positions < num_tokens).astype(jnp.int32)
  hidden = transformer.hidden_states(params, cfg, tokens[None], positions[None], mask[None], dtype=jnp.float32)
  logits = transformer.logits(params, cfg, hidden)[0, :-1, : cfg.vocab_size]
  log_p = jax.nn.log_softmax(logits / temperature)
  return jnp.pad(jnp.take_along_axis(log_p, tokens[1:, None], axis=-1)[:, 0], (1, 0))


def log_p_of_responses(params, draw, *, cfg, temperature):
  """(log p, log_ref) of the response tokens of each valid row, one row at a time."""
  for i in np.flatnonzero(draw.valid):
    start, length = draw.prompt_lengths[i], draw.lengths[i]
    tokens = np.zeros(48, np.int32)
    tokens[: start + length] = [*draw.prompts[i, :start], *draw.tokens[i, :length]]
    log_p = log_p_of_row(params, tokens, start + length, cfg=cfg, temperature=temperature)
    yield np.asarray(log_p)[start : start + length], draw.log_ref[i, :length]


def make_reference(**options) -> Reference:
  from tba_jax import learner

  mesh = sharding.make_mesh(jax.devices()[:2])
  params = jax.device_put(start_params(), sharding.param_shardings(start_params(), mesh))
  settings = dict(
      every_steps=2, ema_decay=0.0, dtype=jnp.float32, placement=sharding.batch_sharding(mesh), num_rows=2,
      row_tokens=24, score=learner.make_scorer(CFG, temperature=0.7, dtype=jnp.float32, chunk_tokens=16, mesh=mesh),
      searcher_places=[jax.devices()[3]])
  return Reference(params, **{**settings, **options})


def test_rows_without_log_ref_are_scored_again_and_others_left_alone():
  draw = make_draw([1, 9, 3, 5, 2, 7, 4, 6], [0, 0, 0, 0, 1, 1, 1, 1], valid=[True] * 6 + [False, True])
  old = np.array([1, 1, 0, 1, 0, 1, 0, 1], bool)  # in two parts of two rows
  log_ref = draw.log_ref.copy()
  log_ref[old] = np.nan
  found, again = make_reference().rescore(dataclasses.replace(draw, log_ref=log_ref))
  np.testing.assert_array_equal(again, old)
  np.testing.assert_array_equal(found.log_ref[~old], draw.log_ref[~old])
  for i, (log_p, log_ref) in zip(
      np.flatnonzero(draw.valid), log_p_of_responses(start_params(), found, cfg=CFG, temperature=0.7), strict=True):
    if old[i]:
      np.testing.assert_allclose(log_ref, log_p, atol=1e-5)
      assert (found.log_ref[i, len(log_ref):] == 0).all()


def test_average_is_that_of_float64_and_copies_are_the_searchers_own():
  reference = make_reference(ema_decay=0.75)
  policies = [jax.tree.map(lambda x, k=k: jnp.array(x + 0.1 * k * np.sign(x)), start_params()) for k in (1, 2, 3)]
  expected = jax.tree.map(lambda x: x.astype(np.float64), start_params())
  for policy in policies:
    reference.after_step(policy)
    expected = jax.tree.map(lambda e, p: 0.75 * e + 0.25 * np.asarray(p, np.float64), expected, policy)
  (copy,) = reference.move(policies[-1], 7)
  assert reference.version == 7
  jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), b, rtol=1e-5, atol=1e-7), copy, expected)
  assert {leaf.devices() == {jax.devices()[3]} for leaf in jax.tree.leaves(copy)} == {True}


def watch(monkeypatch):
  """Lists that a run fills: parameters after each step (first: of version 0), and every draw with the step that it is
  for."""
  policies, draws = [], []
  prepare, finish, init = Trainer.prepare, Run.finish_step, Run.__init__
  host = lambda params: jax.tree.map(np.array, params)

  def started(self, **parts):
    policies.append(host(parts["trainer"].state.params))
    init(self, **parts)

  def prepared(self, draw):
    draws.append((self.steps + (self._under_way is not None), draw))
    return prepare(self, draw)

  def finished(self):
    finish(self)
    policies.append(host(self.trainer.state.params))

  monkeypatch.setattr(Run, "__init__", started)
  monkeypatch.setattr(Trainer, "prepare", prepared)
  monkeypatch.setattr(Run, "finish_step", finished)
  return policies, draws


@pytest.mark.parametrize("mode, lag, decay", [
    ("lockstep", 2, 0.0),
    ("async", -1, 0.5),
    pytest.param("lockstep", -1, 0.5, marks=pytest.mark.slow),
    pytest.param("async", -1, 0.0, marks=pytest.mark.slow),
    pytest.param("sync", -1, 0.0, marks=pytest.mark.slow)])
def test_every_trained_row_is_scored_by_the_reference_of_its_step(tmp_path, monkeypatch, mode, lag, decay):
  """The reference after step s is the policy (or its average) of the last multiple of 3: worked out from all policies
  of the run."""
  runs.use_easy_reward(monkeypatch)
  policies, draws = watch(monkeypatch)
  config = runs.short_config(
      runtime__mode=mode, runtime__lag=lag, reference__reset_every_steps=3, reference__ema_decay=decay, train__steps=8,
      train__learning_rate=1e-2)
  assert runs.run(config, tmp_path / "run") == 0
  assert len(policies) == 9 and len(draws) == 8
  averages = [jax.tree.map(lambda x: x.astype(np.float64), policies[0])]
  for policy in policies[1:]:
    averages.append(jax.tree.map(lambda a, p: decay * a + (1 - decay) * p.astype(np.float64), averages[-1], policy))
  cfg, _ = build.read_model_folder(tmp_path / "run" / "model")
  for step, draw in draws:
    reference = jax.tree.map(lambda x: x.astype(np.float32), averages[step // 3 * 3])
    for log_p, log_ref in log_p_of_responses(reference, draw, cfg=cfg, temperature=config.sample.temperature):
      np.testing.assert_allclose(log_ref, log_p, atol=1e-4)
  # The test would see a reference that stays behind: by step 6 it has moved much further than that tolerance.
  pairs = log_p_of_responses(policies[0], draws[-1][1], cfg=cfg, temperature=config.sample.temperature)
  assert max(np.abs(a - b).max() for a, b in pairs) > 1e-2
  rescored = [line["buffer_rescored"] for line in runs.lines(tmp_path / "run") if "loss" in line][-1]
  assert (rescored > 0) == (mode != "sync")  # on-policy batches are sampled after the move


@pytest.mark.parametrize("decay, stop_at", [pytest.param(0.0, 3, marks=pytest.mark.slow), (0.5, 4)])
def test_a_resumed_run_goes_on_with_its_reference(tmp_path, monkeypatch, decay, stop_at):
  runs.use_easy_reward(monkeypatch)
  config = runs.short_config(
      runtime__mode="lockstep", reference__reset_every_steps=2, reference__ema_decay=decay, train__learning_rate=1e-2)
  assert runs.run(config, tmp_path / "whole") == 0
  with monkeypatch.context() as patch:
    stop = StopFlag()
    _stop_after_step(patch, stop, stop_at)
    assert runs.run(config, tmp_path / "broken", stop) == 0
  assert runs.run(config, tmp_path / "broken") == 0
  assert runs.untimed(tmp_path / "whole") == runs.untimed(tmp_path / "broken")
  whole, broken = (run_state.load_params(
      tmp_path / name, transformer.abstract_params(build.read_model_folder(tmp_path / name / "model")[0]))
                   for name in ("whole", "broken"))
  jax.tree.map(np.testing.assert_array_equal, whole, broken)
  # Right after a move policy and reference are the same.
  at_policy = [abs(line["log_ratio_ref"]) < 1e-5 for line in runs.lines(tmp_path / "whole") if "loss" in line]
  assert at_policy == ([True, False] * 3 if decay == 0 else [True] + [False] * 5)


def test_version_0_is_read_from_disk_for_a_first_evaluation_that_comes_after_a_move(tmp_path, monkeypatch):
  """Stopped before the first evaluation was through: the resumed run evaluates version 0, not the reference of by then.
  """
  runs.use_easy_reward(monkeypatch)
  config = runs.short_config(reference__reset_every_steps=1, train__learning_rate=1e-2)
  asked = []
  weights = Run.initial_weights

  def watched(self):
    found = weights(self)
    asked.append((found.version, self.reference.version, jax.tree.map(np.array, found.params)))
    return found

  monkeypatch.setattr(Run, "initial_weights", watched)
  with monkeypatch.context() as patch:
    stop = StopFlag()
    _stop_after_step(patch, stop, 2)
    patch.setattr(Run, "evaluate", lambda self, *args, **options: None)
    assert runs.run(config, tmp_path / "run", stop) == 0
  assert runs.run(config, tmp_path / "run") == 0
  ((version, ref_version, params),) = asked
  assert version == 0 and ref_version >= 2
  cfg, _ = build.read_model_folder(tmp_path / "run" / "model")
  initial = run_state.load_initial(tmp_path / "run", transformer.abstract_params(cfg))
  jax.tree.map(np.testing.assert_array_equal, params, jax.tree.map(np.asarray, transformer.unstack(initial)))


def test_a_reference_that_never_moves_is_not_kept_a_second_time(tmp_path, monkeypatch):
  runs.use_easy_reward(monkeypatch)
  kept = []
  init = Run.__init__
  monkeypatch.setattr(Run, "__init__", lambda self, **parts: (kept.append(parts["reference"]), init(self, **parts))[1])
  assert train.run(runs.short_config(train__steps=1, runtime__mode="lockstep"), str(tmp_path / "run"),
                   stop=StopFlag()) == 0
  assert kept == [None]

"""Prioritised replay by residual and the ladder of temperatures, in whole runs. The model is tiny, everything else is
the real thing."""

from __future__ import annotations

import numpy as np
import pytest

from tba_jax.replay.buffer import ReplayBuffer
from tba_jax.sampling.engine import Engine
from tba_jax.sampling.requests import SampleRequest
from tba_jax.types import Occurrence
import runs


pytestmark = pytest.mark.usefixtures("compile_once", "easy_reward")


@pytest.mark.slow
def test_the_trainer_hands_back_the_residual_of_every_row_it_trained_on(tmp_path, monkeypatch):
  update, draw, handed, drawn = ReplayBuffer.update_priorities, ReplayBuffer.draw, [], []
  monkeypatch.setattr(ReplayBuffer, "update_priorities", lambda self, rows, values: (
      handed.append((rows, values)), update(self, rows, values)))
  monkeypatch.setattr(ReplayBuffer, "draw", lambda self, **asked: drawn.append(draw(self, **asked)) or drawn[-1])
  config = runs.short_config(
      runtime__mode="lockstep", devices__searchers=1, buffer__priority="residual", buffer__priority_temperature=1.5,
      buffer__recent_fraction=0.25, buffer__dedup=False)
  assert runs.run(config, tmp_path / "run") == 0
  assert len(handed) == len(drawn) == 6
  beta = config.loss.beta_init
  trained = [line for line in runs.lines(tmp_path / "run") if "loss" in line]
  for (rows, values), batch, line in zip(handed, drawn, trained, strict=True):
    np.testing.assert_array_equal(rows, batch.rows)
    squares = np.where(batch.valid, batch.weights * np.square(values, dtype=np.float64), 0.0)
    # The loss is beta / 2 times the weighted mean of their squares.
    assert beta / 2 * squares.sum() / batch.valid.sum() == pytest.approx(line["loss"], rel=1e-4)
  # At version 0 policy and reference agree: |log Z - delta| is |reward - mean reward| / beta.
  first, values = drawn[0], handed[0][1]
  for group in np.unique(first.group_ids):
    of = first.valid & (first.group_ids == group)
    rewards = first.rewards[of].astype(np.float64)
    np.testing.assert_allclose(values[of], np.abs(rewards - rewards.mean()) / beta, rtol=1e-3, atol=1e-2)
  assert any((batch.weights != 1).any() for batch in drawn), "draws by weight carry importance weights"


def test_each_searcher_samples_at_its_temperature_and_log_mu_stays_comparable(tmp_path, monkeypatch):
  submit, seen = Engine.submit, {}

  def watched(self, request: SampleRequest):
    if isinstance(request.tag, Occurrence):  # not of an evaluation
      seen.setdefault(id(self), set()).add(request.temperature)
    return submit(self, request)

  monkeypatch.setattr(Engine, "submit", watched)
  config = runs.short_config(runtime__mode="lockstep", sample__temperature_ladder=(0.5, 2.0))
  assert runs.run(config, tmp_path / "run") == 0
  assert sorted(map(sorted, seen.values())) == [[0.5], [2.0]]
  assert runs.results(tmp_path /
                      "run")["logprob_gap_max"] < 1e-4, "log_mu is at sample.temperature, as the trainer's path is"

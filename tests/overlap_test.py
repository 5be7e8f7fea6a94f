"""The learner does not wait for the host: draws, packing, transfers and books go on beside a step."""

from __future__ import annotations

import numpy as np
import pytest

import runs
from tba_jax.runtime.exchange import Exchange


@pytest.mark.slow
@pytest.mark.parametrize("packing", [False, True])
def test_the_learner_is_idle_for_less_than_two_percent_when_the_buffer_is_full(tmp_path, monkeypatch, packing: bool):
  """Searchers fill the buffer and stop. From the first step to the last, the time in which no step is under way."""
  runs.use_easy_reward(monkeypatch)
  may_start = Exchange._may_start
  monkeypatch.setattr(
      Exchange, "_may_start", lambda self,
      version: self._num_arrived < self._fill_responses and may_start(self, version))
  config = runs.short_config(
      train__steps=24, train__prompts_per_step=16, train__responses_per_prompt=16, train__micro_batches=16,
      train__packing=packing, train__length_buckets=(40, 160), sample__responses_per_prompt=16, sample__slots=32,
      buffer__fill_responses=600, buffer__capacity=2_000, model__architecture__hidden_size=128,
      model__architecture__mlp_size=384)
  assert runs.run(config, tmp_path / "run") == 0
  spans = [line for line in runs.lines(tmp_path / "run", "timeline.jsonl") if line["kind"] == "step"]
  steps = np.array([(span["start_secs"], span["end_secs"]) for span in spans])
  steps = steps[4:]  # the first ones share the cores with the last rollouts
  assert len(steps) == 20
  assert 1 - np.diff(steps, axis=1).sum() / (steps[-1, 1] - steps[0, 0]) < 0.02

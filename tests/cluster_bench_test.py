"""The benchmark of searchers in other processes: its arithmetic on made-up figures, and what stands for a searcher."""

from __future__ import annotations

import time

import numpy as np
import pytest

from experiments import cluster_bench, cluster_weights
from tba_jax.runtime.host import SentWeights, Turn
from tba_jax.runtime.parcels import pack
from tba_jax.types import Occurrence


def test_paces_are_of_medians_and_of_the_whole_way():
  found = cluster_weights.paces(3 * 10**9, {"put": [1.0, 2.0, 9.0], "same_node": [1.0], "other_node": [4.0, 3.0, 8.0]})
  assert found["seconds"] == {"put": 2.0, "same_node": 1.0, "other_node": 4.0}
  assert found["gigabytes_per_second"] == {"same_node": 1.0, "other_node": 0.5}


def test_pace_of_a_run_begins_behind_the_warm_steps():
  lines = [{"step": step, "loss": 0.0, "rollouts": 100 * step, "wall_seconds": 10.0 + 2.0 * step,
            "step_seconds": 1.0 if step % 4 else 9.0, "trainer_wait_seconds": 50.0 + 0.5 * max(0, step - 2)}
           for step in range(1, 11)]
  evaluation = {"step": 10, "accuracy": 0.5}
  found = cluster_bench.pace([*lines, evaluation], warm_steps=2)
  assert found == pytest.approx(
      {"rollouts_per_second": 50.0, "step_seconds": 1.0, "wait_share": 0.25, "seconds": 16.0})


def test_gains_are_ratios_of_trained_responses_and_bounded_by_the_busier_side():
  def arm(rate, trainer, searcher):
    return {"trained_responses_per_second": rate, "rollouts_per_second": 2 * rate, "trainer_busy_share": trainer / 10,
            "searchers_busy_share": searcher / 10, "trainer_busy_seconds": trainer, "searchers_busy_seconds": searcher,
            "staleness_mean": 1.0, "seconds": 10.0, "steps": 5, "cpu_seconds": 8.0, "cores_busy_for_others": 0.5}

  found = cluster_bench.gains({"async": arm(90, 9, 9), "disaggregated": arm(50, 4, 5), "colocated": arm(60, 5, 5)})
  assert (found["over_disaggregated"], found["over_colocated"], found["bound_over_disaggregated"]) == (1.8, 1.5, 2.0)
  assert found["arms"]["async"]["cores_busy"] == pytest.approx(1.3)


@pytest.mark.parametrize(("arm", "backend", "mode", "searchers", "slots"), [
    ("fast8", "ray", "async", 8, 64), ("async", "ray", "async", 1, 64), ("disaggregated", "ray", "sync", 1, 192),
    ("colocated", "local", "sync", 1, 192)])
def test_arms_differ_in_what_they_are_about(arm, backend, mode, searchers, slots):
  config = cluster_bench.arm_config(arm, steps=20, responses=24)
  assert (config.runtime.backend, config.runtime.mode) == (backend, mode)
  assert (config.devices.trainer, config.devices.searchers, config.sample.slots) == (1, searchers, slots)
  assert config.train.steps == 20 and config.train.responses_per_prompt == 16 and not config.buffer.dedup


def test_a_simulated_host_brings_its_groups_when_their_time_is_over():
  config = cluster_bench.arm_config("fast1", steps=20, responses=16)
  spec = cluster_bench.types.SimpleNamespace(index=16, config=config.to_dict())
  sent = SentWeights(7, pack({"a": np.arange(4.0)}, lambda chunk: chunk))
  host = cluster_bench._SimulatedHost(spec, sent, list, decode_secs=0.8)
  assert host.prepare(sent).version == 7
  began, occurrences = time.monotonic(), (Occurrence(5, 2, 0), Occurrence(6, 1, 1))
  report = host.turn(Turn(False, None, False, None, occurrences, True))
  assert not report.finished and (report.num_groups, report.load) == (2, 64)  # a turn lasts half a second at most
  report = host.turn(Turn(False, None, False, None, (), True))
  assert time.monotonic() - began >= 0.8 and report.load == 0 and report.counts.rollouts == 64
  for occurrence, group in report.finished:
    assert (group.prompt_id, group.occurrence, group.attempt) == (
        occurrence.prompt_id, occurrence.occurrence, occurrence.attempt)
    assert (group.versions == 7).all() and group.searcher == 16
  assert [occurrence for occurrence, _ in report.finished] == list(occurrences)


def test_every_rollout_that_is_brought_is_another():
  exchange = cluster_bench._exchange()
  groups = [cluster_bench.make_group(0)] * 3
  assert cluster_bench._bring(exchange, groups) == exchange.num_arrived == exchange.buffer.stats()["live_rows"] == 48


@pytest.mark.parametrize(("flags", "said"), [
    (["speed", "--out=x"], "invalid choice: 'speed'"), (["weights"], "the following arguments are required: --out"),
    (["weights", "--out=x", "--params=10"], "--params=10 must be at least 1e+06"),
    (["pinned", "--out=x", "--responses=8"], "--responses=8 must be at least 16")])
def test_a_mistake_is_one_line(flags, said, capsys):
  with pytest.raises(SystemExit) as ended:
    cluster_bench.main(flags)
  error = capsys.readouterr().err
  assert ended.value.code == 2 and error.count("\n") == 1 and error.startswith("error: ") and said in error

"""The studies of objectives: their arithmetic on made-up runs; slow: each in its shortest form, with real runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from experiments import ablations, chains, off_policy, study, time_to_accuracy, variance
from tba_jax.tasks.base import TaskSettings, decode_response


def finished(path, cells):
  """A study with these (key, accuracy) cells."""
  found = study.Study(path, {"what": "made up"})
  for key, after in cells:
    found.add(key, {"after": after, "before": 0.3, "train_seconds": 2.0, "seconds": 3.0, "last": {}})
  return found


def test_a_study_goes_on_where_it_was_stopped(tmp_path):
  path, ran = tmp_path / "some.json", []

  def run(key):
    ran.append(key["n"])
    return {"after": key["n"] / 10, "seconds": 60.0}

  keys = [{"n": n} for n in range(4)]
  found = study.Study(path, {"what": "some"})
  # A cell takes a minute by its own word, so that after one there is no room for another in a minute and a half.
  assert not found.run_missing(keys, run, minutes=1.0, began=time.monotonic() - 1)
  assert ran == [0]
  again = study.Study(path, {"what": "some"})
  assert again.find(n=0) == {"key": {"n": 0}, "after": 0.0, "seconds": 60.0}
  assert again.run_missing(keys, run, minutes=100.0, began=time.monotonic())
  assert ran == [0, 1, 2, 3] and again.after(n=3) == 0.3 and again.after(n=4) is None
  assert json.loads(path.read_text())["about"] == {"what": "some"}
  other = study.Study(path, {"what": "some", "starting_model": "0"})
  assert other.run_missing(keys, run, minutes=100.0, began=time.monotonic())  # nothing to add
  with pytest.raises(SystemExit, match="1 that are missing cannot be compared"):
    other.run_missing([*keys, {"n": 9}], run, minutes=100.0, began=time.monotonic())
  assert len(ran) == 4


def test_rates_are_chosen_at_lag_0_and_at_each_lag_on_the_tuning_seed(tmp_path):
  low, middle, _ = off_policy.RATES
  tuned = {0: (0.5, 0.8, 0.7), 16: (0.6, 0.4, 0.6)}
  cells = [(off_policy.cell("rloo", lag, 0, rate, 200), after)
           for lag, row in tuned.items() for rate, after in zip(off_policy.RATES, row)]
  found = finished(tmp_path / "off.json", cells)
  assert list(off_policy.tuning_cells(["rloo"], [0, 16], 200)) == [key for key, _ in cells]
  assert off_policy.best_rate(found, "rloo", 0, 200) == middle
  assert off_policy.best_rate(found, "rloo", 16, 200) == low  # of equals the lower
  assert off_policy.best_rate(found, "rloo", 64, 200) is None
  finals = [key for choice in off_policy.CHOICES
            for key in off_policy.final_cells(found, ["rloo"], [0, 16], [1], 200, choice)]
  assert [(key["lag"], key["rate"]) for key in finals] == [(0, middle), (16, middle), (0, middle), (16, low)]
  for key, after in zip(finals, (0.9, 0.5, 0.9, 0.7)):
    if found.find(**key) is None:
      found.add(key, {"after": after, "before": 0.3, "train_seconds": 2.0, "last": {}})
  text = off_policy.write_table(found, tmp_path / "off.md", ["rloo"], [0, 16], [1], 200)
  assert "| `rloo` | 90.0 | 50.0 |" in text and "| `rloo` | 90.0 | 70.0 |" in text
  changes = off_policy.changes_of(finals[1])
  assert (changes["train.steps"], changes["runtime.lag"], changes["train.learning_rate"]) == (216, 16, middle)
  assert changes["buffer.capacity"] >= 17 * 32 and changes["buffer.max_uses"] == 1


def test_chains_are_worked_out_right_and_no_chain_is_in_two_sets():
  settings = TaskSettings(seed=3, data_path="", max_prompt_tokens=6, num_eval_prompts=64, num_sft_examples=256)
  task = chains.Chains(None, settings, num_train_prompts=64, sft_share_with_work=0.5)
  texts = []
  for prompt in [*task.train_prompts(), *task.eval_prompts()]:
    value, *rest = prompt.text.removesuffix(" =").split()
    for sign, digit in zip(rest[::2], rest[1::2]):
      value = str(eval_sign(sign, int(value), int(digit)) % 10)
    assert prompt.answer == value and len(prompt.tokens) == 6
    rewards = [task.reward(prompt, text, truncated=cut)
               for text, cut in ((f"3 {value}", False), (f"{value} x", False), ("", False), (value, True))]
    assert rewards == [1.0, 0.0, 0.0, 0.0]
    texts.append(prompt.text)
  examples = task.sft_examples()
  texts += {task.tokenizer.decode(ids).replace("?", "=") for ids, _ in examples}
  assert len(set(texts)) == len(texts)
  lengths = sorted({len(response) for _, response in examples})
  assert lengths == [2, 8]  # with the stop token: at once, or with every result
  for _, response in examples[:20]:
    assert task.response_text(response) == decode_response(task.tokenizer, response)


def eval_sign(sign, left, right):
  return {"+": left + right, "-": left - right, "*": left * right}[sign]


def test_every_arm_of_the_ablations_changes_one_setting_and_the_base_is_run_once():
  keys = list(ablations.cells(tuple(ablations.ARMS), [1], 100))
  assert len(keys) == 1 + sum(bool(changes) for values in ablations.ARMS.values() for changes in values.values())
  for setting, values in ablations.ARMS.items():
    assert sum(not changes for changes in values.values()) == 1, setting
  for key in keys[1:]:
    assert ablations.changes_of(key) != {**ablations.BASE, "seed": 1}


def test_signal_to_noise_is_that_of_the_distribution_and_so_is_its_error():
  """Gradients of a known mean and covariance, many times 16 of them; and the definition, in other words."""
  rng = np.random.default_rng(0)
  mean, stds = rng.normal(size=40), rng.uniform(0.5, 3.0, size=40)
  truth = np.linalg.norm(mean) / np.sqrt(np.square(stds).sum())
  draws = mean + stds * rng.normal(size=(400, 16, 40))
  found = np.array([variance.signal_to_noise(draw) for draw in draws])
  assert abs(found[:, 0].mean() - truth) < 0.02 * truth
  assert found[:, 1].mean() == pytest.approx(found[:, 0].std(), rel=0.15)
  noise = np.var(draws[0], axis=0, ddof=1).sum()
  signal = np.square(draws[0].mean(axis=0)).sum() - noise / 16
  assert found[0, 0] == pytest.approx(np.sqrt(signal / noise), rel=1e-9)
  without = [variance.signal_to_noise(np.delete(draws[0], i, axis=0))[0] for i in range(16)]
  assert found[0, 1] == pytest.approx(np.sqrt(15 * np.var(without)), rel=1e-9)
  assert variance.signal_to_noise(np.array([[1.0], [-1.0], [0.5]]))[0] == 0.0  # no more than chance
  assert variance.signal_to_noise(np.ones((4, 2)))[0] == 0.0  # no noise to compare with


def test_time_to_accuracy_shows_each_arm_at_the_setting_that_its_tuning_seed_found(tmp_path):
  found = study.Study(tmp_path / "time.json", {})
  plan = time_to_accuracy.Plan(64, 0, 0.6, grid=((4, 1e-4), (4, 3e-5)))

  def add(arm, rate, seed, curve):  # step, seconds, accuracy, CPU seconds
    found.add(plan.cell(arm, 4, rate, seed), {"timed_curve": [[0, 0, 0.3, 0], *curve], "cores_of_others": 0.5})

  add("TBA", 1e-4, 0, [[5, 2.0, 0.5, 4.0], [10, 4.0, 0.7, 8.0]])
  assert plan.best(found, "TBA") is None  # one tuning run is missing
  add("TBA", 3e-5, 0, [[5, 2.0, 0.5, 4.0], [10, 1.0, 0.7, 9.0]])  # sooner by the clock, later by CPU time
  add("TBA", 1e-4, 1, [[5, 2.0, 0.5, 4.0], [10, 4.0, 0.7, 8.0]])
  add("TBA", 1e-4, 2, [[5, 2.0, 0.6, 4.0]])
  add("VinePPO", 1e-4, 0, [[10, 9.0, 0.45, 9.0]])
  add("VinePPO", 3e-5, 0, [[10, 9.0, 0.5, 9.0]])  # neither is there; this is nearer
  add("VinePPO", 3e-5, 1, [[5, 9.0, 0.6, 10.0]])
  add("VinePPO", 3e-5, 2, [[5, 9.0, 0.5, 10.0]])
  text = time_to_accuracy.write(found, tmp_path, (1, 2), plan)
  assert "| TBA | 4 prompts, 0.0001 | 2 of 2 | 5.0 ± 1.0 | 1.00 | 6 | 65.0 ± 5.0 | 0.5 |" in text
  assert "| VinePPO | 4 prompts, 3e-05 | 1 of 2 | 10.0 ± 0.0 | 2.00 | 5 | 55.0 ± 5.0 | 0.5 |" in text
  assert "RLOO" not in text and (tmp_path / "time_to_accuracy.png").is_file()
  plan = time_to_accuracy.Plan(time_to_accuracy.RESPONSES, 0, 0.6)
  assert len(plan.tuning_cells()) == 15
  for key in plan.tuning_cells():
    changes = time_to_accuracy.changes_of(key)
    assert changes["train.steps"] * changes["sample.slots"] == time_to_accuracy.RESPONSES
    slow = time_to_accuracy.changes_of({**key, "decode_ms": 100})  # 4 devices of 32 slots, one of them the trainer's
    assert (slow["devices.searchers"], slow["sample.slots"]) == ((1, 128) if slow["devices.share"] else (3, 32))


def test_the_clock_counts_the_steps_that_compile_as_the_mean_of_the_others():
  marks = time_to_accuracy.Marks(10, decode_ms=0)
  marks.at_step = {step: {"wall": wall} for step, wall in enumerate([0.0, 50.0, 90.0, 93.0, 96.0])}
  assert [marks.seconds(step, "wall") for step in (2, 3, 4)] == [6.0, 9.0, 12.0]


@pytest.mark.slow
def test_a_lab_scores_what_it_sampled_and_takes_the_gradient_of_the_train_step():
  import jax
  import jax.numpy as jnp
  import tiny

  from experiments.lab import Lab
  from tba_jax import learner, optimizers
  from tba_jax.losses.registry import make_loss
  from tba_jax.types import Prompt

  cfg, tokenizer = tiny.tiny_config(), tiny.tiny_tokenizer()
  reference, policy = tiny.tiny_params(cfg, seed=0), tiny.tiny_params(cfg, seed=1)
  lab = Lab(cfg, tokenizer, reference, grade=lambda prompt, text, cut: float(len(text) % 3), max_prompt_tokens=6,
            max_new_tokens=5, response_text=lambda ids: tokenizer.decode(list(ids)), slots=8, temperature=0.7)
  prompts = [Prompt(i, np.arange(3, 6 + i, dtype=np.int32), "", "") for i in range(2)]
  batch = lab.batch(lab.draw(prompts, lab.sample(reference, prompts, num_samples=4)))
  counted = batch.sequence_ids < 8
  assert counted.sum() == batch.num_tokens and len(set(batch.rewards.tolist())) > 1
  np.testing.assert_allclose(batch.log_mu[counted], batch.log_ref[counted], atol=1e-4)
  optimizer = optimizers.make_optimizer("sgd", schedule=lambda count: jnp.float32(1.0), clip_norm=float("inf"))
  step = learner.make_train_step(cfg, make_loss("rloo"), optimizer, temperature=0.7, compute_dtype=jnp.float32,
                                 remat="none", micro_batches=1, chunk_tokens=64)
  state, _ = step(learner.init_train_state(jax.tree.map(jnp.copy, policy), optimizer), batch, np.float32(0.1))
  moved = jax.flatten_util.ravel_pytree(jax.tree.map(lambda a, b: a - b, policy, state.params))[0]
  found = lab.gradient(make_loss("rloo"), beta=0.1)(policy, batch)
  np.testing.assert_allclose(found, moved, atol=2e-5 * float(np.abs(found).max()) + 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("loss, lag", [("tb_vargrad", 2), ("ppo_clip", 0)])
def test_a_bare_run_is_the_lockstep_run_of_its_config(tmp_path, monkeypatch, loss, lag):
  """Rewards of all steps to the last sample, losses and gradients up to rounding, and what is held of the end."""
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  start = study.starting_model(quick=True)
  changes = {**off_policy.changes_of(off_policy.cell(loss, lag, 1, 1e-3, 6)), "train.steps": 6 + lag}
  seen = []
  monkeypatch.setattr(study, "summarise", lambda lines, results: seen.append((lines, results)) or {})
  study.run_bare_cell(changes, start, quick=True)
  study.run_cell(changes, start, quick=True)
  (mine, my_results), (theirs, their_results) = seen
  steps = [[line for line in lines if "loss" in line] for lines in (mine, theirs)]
  assert len(steps[0]) == len(steps[1]) == 6 + lag and any(line["reward"] for line in steps[0])
  for a, b in zip(*steps):
    assert (a["reward"], a["staleness_mean"]) == (b["reward"], b["staleness_mean"])
    for name in ("loss", "grad_norm", "entropy", "ess_share", "learning_rate", "beta"):
      np.testing.assert_allclose(a[name], b[name], rtol=2e-3, atol=1e-5, err_msg=f"{name} of step {a['step']}")
  for name in ("accuracy_before", "accuracy_after", "skipped_updates"):
    assert my_results[name] == their_results[name], name


@pytest.mark.slow
@pytest.mark.parametrize("name, flags", [
  ("off_policy", ["--losses=tb_vargrad,rloo", "--lags=0,2", "--seeds=1"]), ("ablations", ["--only=m,searchers"]),
  ("variance", []), ("time_to_accuracy", ["--decode_ms=1", "--seeds=1"]),
])
def test_a_study_in_its_shortest_form_runs_and_goes_on(tmp_path, name, flags):
  """Table, plot and JSON are written; the same command again runs nothing."""
  command = [sys.executable, "-m", f"experiments.{name}", f"--out={tmp_path}", "--quick", *flags]
  env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
  env.pop("XLA_FLAGS")  # of these tests: 8 devices
  path = tmp_path / f"{name}.json"
  for attempt in range(2):
    done = subprocess.run(command, cwd=study.REPO, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0 and "finished" in done.stderr, done.stderr[-2000:]
    before = path.read_bytes() if attempt == 0 else before
  assert path.read_bytes() == before and len(json.loads(before)["cells"]) > 4
  assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
  assert "| --- |" in (tmp_path / f"{name}.md").read_text()

"""Whole short runs with adapters: what learns, what stays, what is moved, what is saved, and what is exported."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from tba_jax import export, metrics, train
from tba_jax.checkpoints import run_state
from tba_jax.checkpoints.model_folder import read_lora, read_model_folder
from tba_jax.config import ConfigError
from tba_jax.models import lora as lora_lib
from tba_jax.models import transformer
from tba_jax.runtime.settings import StopFlag
from tba_jax.tasks.arithmetic import ArithmeticTask
from tests import runs


LORA = dict(lora__pattern=".*", lora__rank=4, lora__alpha=6.0, model__architecture__tie_embeddings=False)
SCALE = 1.5


def number_reward(self, prompt, response_text, *, truncated):
  """The share of words that are numbers: an untrained model can learn to say more of them."""
  del self, prompt, truncated
  words = response_text.split()
  return sum(any(c.isdigit() for c in word) for word in words) / max(1, len(words))


@pytest.fixture(autouse=True)
def _number_reward(monkeypatch):
  monkeypatch.setattr(ArithmeticTask, "reward", number_reward)


# Whole runs; `lora_test.py` has what they are made of.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compile_once")]


def _config(**changes):
  return runs.short_config(
    **{**LORA, "runtime__mode": "lockstep", "train__learning_rate": 0.01, "train__warmup_steps": 0, "train__steps": 40,
       "sync__every_steps": 2, "devices__searchers": 1, **changes})


def _stop_after(monkeypatch, stop, step):
  write = metrics.MetricsWriter.write

  def watched(self, at, scalars):
    write(self, at, scalars)
    if "loss" in scalars and at == step:
      stop.set("the test")

  monkeypatch.setattr(metrics.MetricsWriter, "write", watched)


def _adapters(workdir, step=None):
  cfg, _ = read_model_folder(workdir / "model")
  settings = read_lora(workdir / "model")
  return run_state.load_params(workdir, lora_lib.abstract_adapters(cfg, settings=settings), step=step)[1]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  """A lockstep run of 40 steps, and the run itself as it was at its end."""
  seen = []
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(ArithmeticTask, "reward", number_reward)
    results_of = train.results_of
    patch.setattr(train, "results_of", lambda run: (seen.append(run), results_of(run))[1])
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert runs.run(_config(), folder) == 0
  return folder, seen[0]


def test_only_adapters_learn_and_only_they_are_moved_and_saved(finished):
  folder, run = finished
  cfg, _ = read_model_folder(folder / "model")
  settings = read_lora(folder / "model")
  lines = [line for line in runs.lines(folder) if "loss" in line]
  assert len(lines) == 40 and all(line["update_norm"] > 0 for line in lines)
  rewards = [line["reward"] for line in lines]
  assert np.mean(rewards[-10:]) > np.mean(rewards[:10]) + 0.04, rewards
  expected = lora_lib.abstract_adapters(cfg, settings=settings)
  assert jax.tree.structure(run.trainer.state.params) == jax.tree.structure(expected)
  trained = _adapters(folder)
  start = lora_lib.init_adapters(cfg, jax.random.fold_in(jax.random.key(0), 1), settings=settings)
  changed = jax.tree.map(lambda a, b: np.any(np.asarray(a) != np.asarray(b)), trained, start)
  assert all(jax.tree.leaves(changed)), "every adapter learns"
  # The base after 40 donating steps, and in the searcher, is what a new run makes of the seed.
  base = jax.jit(transformer.init_params, static_argnums=0)(cfg, jax.random.key(0))
  (frozen,) = run.trainer._frozen
  for tree in (frozen, run.searchers[0]._reference[0]):
    jax.tree.map(np.testing.assert_array_equal, tree, base)
  # What a searcher was sent has the bytes of the adapters; what it samples with is the merged model.
  held = run.weights.latest(0)
  num_bytes = lambda tree: sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
  assert num_bytes(held.moved) == num_bytes(trained) < num_bytes(base) / 2
  merged = transformer.unstack(lora_lib.merge(base, trained, scale=SCALE))
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), held.params, merged)


def test_version_0_is_the_reference_and_the_sampler_follows_the_trainer(finished):
  folder, _ = finished
  first = runs.lines(folder, "rollouts/train.jsonl")[0]
  assert first["version"] == 0 and first["log_mu"] == pytest.approx(first["log_ref"], abs=1e-4)
  last = runs.lines(folder, "rollouts/train.jsonl")[-1]
  assert last["version"] > 0 and abs(last["log_mu"] - last["log_ref"]) > 1e-3
  assert runs.results(folder)["logprob_gap_max"] < 1e-4


def test_resume_is_bitwise_with_weights_held_back(tmp_path, monkeypatch, finished):
  """Step 3 of a run that publishes every 2: searchers hold version 2, which only the checkpoint knows."""
  folder, _ = finished
  with monkeypatch.context() as patch:
    stop = StopFlag()
    _stop_after(patch, stop, 3)
    assert runs.run(_config(), tmp_path / "run", stop) == 0
  assert runs.run(_config(), tmp_path / "run") == 0
  jax.tree.map(np.testing.assert_array_equal, _adapters(tmp_path / "run"), _adapters(folder))
  assert runs.untimed(tmp_path / "run") == runs.untimed(folder)


def test_export_merges(tmp_path, finished):
  folder, run = finished
  export.main([f"--workdir={folder}", f"--out={tmp_path / 'out'}"])
  cfg, _ = read_model_folder(folder / "model")
  tokens = np.arange(3, 15, dtype=np.int32)[None]
  positions = np.arange(12, dtype=np.int32)[None]
  (base,) = run.trainer._frozen
  params = lora_lib.attach(base, run.trainer.state.params, scale=SCALE)
  hidden = transformer.hidden_states(params, cfg, tokens, positions, np.ones_like(tokens), dtype=jnp.float32)
  ours = np.asarray(transformer.logits(params, cfg, hidden))[0]
  model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
  with torch.no_grad():
    theirs = model(torch.from_numpy(tokens).long()).logits[0].numpy()
  np.testing.assert_allclose(ours[:, : cfg.vocab_size], theirs[:, : cfg.vocab_size], atol=1e-5)


def test_async_run_on_a_bfloat16_base(tmp_path):
  """Fine-tuning trains everything; then the base is bfloat16, adapters and their moments float32."""
  config = _config(
    runtime__mode="async", train__compute_dtype="bfloat16", sample__dtype="bfloat16", sft__steps=20, train__steps=6)
  assert runs.run(config, tmp_path / "run") == 0
  cfg, _ = read_model_folder(tmp_path / "run" / "model")
  state = run_state.RunState(tmp_path / "run", keep=1)
  device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  base = state.load_initial(jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=device), transformer.abstract_params(cfg)))
  state.close()
  jax.tree.map(lambda x: np.testing.assert_array_equal(x, x.astype(jnp.bfloat16).astype(jnp.float32)), base)
  new = transformer.init_params(cfg, jax.random.key(0))
  assert np.abs(np.asarray(base["embed"]["table"]) - np.asarray(new["embed"]["table"])).max() > 1e-3
  assert {leaf.dtype for leaf in jax.tree.leaves(_adapters(tmp_path / "run"))} == {np.dtype(np.float32)}
  assert runs.results(tmp_path / "run")["steps"] == 6


def test_searchers_and_trainer_of_several_devices(tmp_path):
  """FSDP over two in the trainer, tensor parallelism over two in the searcher; all that is adapted is split."""
  config = _config(
    devices__trainer=2, devices__per_searcher=2, task_args__num_train_prompts=64, train__steps=6)
  assert runs.run(config, tmp_path / "run") == 0
  found = runs.results(tmp_path / "run")
  assert found["steps"] == 6 and found["logprob_gap_max"] < 1e-4


def test_a_pattern_for_layers_that_the_model_lacks_is_a_mistake_of_the_config(tmp_path):
  with pytest.raises(ConfigError, match="lora.pattern: 'lm_head' matches no linear layer of this model"):
    runs.run(_config(lora__pattern="lm_head", model__architecture__tie_embeddings=True), tmp_path / "run")

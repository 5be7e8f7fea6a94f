"""Exporting a checkpoint: the trained parameters of the step that was asked for, bit for bit, as a model folder."""

from __future__ import annotations

import dataclasses
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
import tiny_tokenizers
from tba_jax import export
from tba_jax.checkpoints.huggingface import load_model
from tba_jax.checkpoints.model_folder import save_model_folder
from tba_jax.checkpoints.run_state import RunState, Snapshot
from tba_jax.sharding import make_mesh, param_shardings
from tba_jax.types import TrainState

CONFIG = dataclasses.replace(tiny.tiny_config(vocab_size=336), vocab_size=320)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """Checkpoints of steps 2 and 5, whose parameters are of seeds 2 and 5, trained on 8 devices."""
  folder = tmp_path_factory.mktemp("run")
  save_model_folder(folder / "model", CONFIG, tiny_tokenizers.chat_tokenizer())
  run_state = RunState(folder, keep=2)
  for step in (2, 5):
    params = tiny.tiny_params(CONFIG, seed=step)
    params = jax.device_put(params, param_shardings(params, make_mesh(jax.devices(), fsdp=4, tensor=2)))
    moments = {"mu": jax.tree.map(jnp.zeros_like, params)}
    state = TrainState(params, moments, jnp.int32(step), jnp.int32(step), jnp.int32(0))
    run_state.save(Snapshot(step, state, None, {"tokens": np.zeros(3)}, {}), wait=True)
  run_state.close()
  return folder


@pytest.mark.parametrize(("flags", "step"), [([], 5), (["--step=2"], 2)])
def test_exported_model_is_the_checkpoint(workdir: pathlib.Path, tmp_path: pathlib.Path, capsys, flags, step: int):
  export.main([f"--workdir={workdir}", f"--out={tmp_path / 'out'}", *flags])
  assert f"step {step} of" in capsys.readouterr().out
  cfg, params, tokenizer = load_model(tmp_path / "out", dtype=jnp.float32)
  assert cfg == CONFIG and tokenizer.stop_ids == (0, 2)
  jax.tree.map(np.testing.assert_array_equal, params, tiny.tiny_params(CONFIG, seed=step))


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    (["--workdir=no/such/run"], "no/such/run is not the workdir of a run: it has no model/config.json"),
    (["--step=3"], "step=3: .* has no such checkpoint; it has \\[2, 5\\]"),
    (["--out=tests"], "tests exists already and is not an empty folder"),
  ],
)
def test_what_is_wrong_is_said(workdir: pathlib.Path, tmp_path: pathlib.Path, capsys, monkeypatch, flags, message: str):
  monkeypatch.chdir(pathlib.Path(__file__).parent.parent)
  with pytest.raises(SystemExit) as stopped:
    export.main([f"--workdir={workdir}", f"--out={tmp_path / 'out'}", *flags])
  assert stopped.value.code == 2
  error = capsys.readouterr().err
  assert re.search(f"error: .*{message}", error), error
  assert not (tmp_path / "out").exists()


def test_run_without_a_checkpoint_is_refused(tmp_path: pathlib.Path):
  save_model_folder(tmp_path / "model", CONFIG, tiny_tokenizers.chat_tokenizer())
  with pytest.raises(ValueError, match="no checkpoint there; train first"):
    export.export(tmp_path, tmp_path / "out")

"""Exporting a checkpoint: the trained parameters of the step that was asked for, bit for bit, as a model folder."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import parity
import signals_test
import tiny
import tiny_tokenizers
from tba_jax import export
from tba_jax.checkpoints import run_state
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
    run_state.save(Snapshot(step, state, None, {}, {}), wait=True)
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


@pytest.mark.parametrize("step", [None, 5])
def test_a_step_that_is_removed_while_it_is_read(workdir: pathlib.Path, tmp_path: pathlib.Path, monkeypatch, step):
  shutil.copytree(workdir, tmp_path / "run")
  real = run_state.ocp.PyTreeCheckpointer.restore

  def restore(self, folder, **kwargs):
    if folder.parent.name == "5":
      shutil.rmtree(folder.parent)
    return real(self, folder, **kwargs)

  monkeypatch.setattr(run_state.ocp.PyTreeCheckpointer, "restore", restore)
  if step is None:
    assert export.export(tmp_path / "run", tmp_path / "out") == 2
    found = load_model(tmp_path / "out", dtype=jnp.float32)[1]
    jax.tree.map(np.testing.assert_array_equal, found, tiny.tiny_params(CONFIG, seed=2))
  else:
    with pytest.raises(ValueError, match="step=5: the run in .* removed this checkpoint while it was read"):
      export.export(tmp_path / "run", tmp_path / "out", step=5)
    assert not (tmp_path / "out").exists()


def test_a_damaged_checkpoint_is_refused(workdir: pathlib.Path, tmp_path: pathlib.Path, monkeypatch):
  shutil.copytree(workdir, tmp_path / "run")
  monkeypatch.setattr(run_state, "_removed", lambda folder: False)  # without the wait for a removal
  for file in (tmp_path / "run" / "checkpoints" / "5" / "train").rglob("*"):
    if file.is_file() and "d" in file.parts[-2:-1]:
      file.write_bytes(b"")
  with pytest.raises(ValueError, match="step=5: the checkpoint in .* cannot be read .* take another step"):
    export.export(tmp_path / "run", tmp_path / "out")
  assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("umask", "modes"), [(0o022, {0o644}), (0o077, {0o600}), (0o002, {0o664})])
def test_files_have_the_modes_that_the_umask_gives(workdir: pathlib.Path, tmp_path: pathlib.Path, umask: int, modes):
  before = os.umask(umask)
  try:
    export.export(workdir, tmp_path / "out")
  finally:
    os.umask(before)
  assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == modes
  assert (tmp_path / "out").stat().st_mode & 0o777 == 0o777 & ~umask


def test_run_without_a_checkpoint_is_refused(tmp_path: pathlib.Path):
  save_model_folder(tmp_path / "model", CONFIG, tiny_tokenizers.chat_tokenizer())
  with pytest.raises(ValueError, match="no checkpoint there; train first"):
    export.export(tmp_path, tmp_path / "out")


@pytest.mark.slow
def test_exporting_while_a_run_trains_is_safe(tmp_path: pathlib.Path):
  """Each export is one whole step of the run, though the run writes a checkpoint every step and keeps only one."""
  transformers = parity.require("transformers")
  parity.require("torch")
  workdir = tmp_path / "run"
  flags = (
    *signals_test.SHORT, "--config.train.steps=100000", "--config.checkpoint.every_steps=1",
    "--config.checkpoint.keep=1", "--config.train.weight_decay=1000.0",
  )
  with open(tmp_path / "log", "w") as log:
    process = subprocess.Popen(
      [sys.executable, "-m", "tba_jax.main", f"--workdir={workdir}", *flags], cwd=signals_test.REPO,
      stdout=log, stderr=log,
      env=dict(os.environ, JAX_PLATFORMS="cpu", JAX_COMPILATION_CACHE_DIR=str(tmp_path / "xla"), XLA_FLAGS=""),
    )
  exported, refused, attempts = {}, [], 0
  try:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and len(exported) < 8 and process.poll() is None:
      out = tmp_path / f"out{attempts}"
      attempts += 1
      try:
        exported[export.export(workdir, out)] = out
      except ValueError as error:
        refused.append(str(error))
        time.sleep(0.2)
    assert process.poll() is None, (tmp_path / "log").read_text()
  finally:
    process.kill()
    process.wait()
  print(f"{len(exported)} steps exported: {sorted(exported)}; {len(refused)} refused: {sorted(set(refused))}")
  # Before the first checkpoint there is nothing to export, and that is said.
  assert len(exported) >= 3 and all(
    "is not the workdir of a run" in reason or "no checkpoint there" in reason for reason in refused
  )
  leaves = {}
  for step, out in exported.items():
    model, report = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(report.values()), report
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    leaves[step] = jax.tree.leaves(load_model(out, dtype=jnp.float32)[1])
  # Decay drowns what is learnt: a step is the one before it times one number (0.9 after the warm-up) in every kernel,
  # which a mixture of two steps would not be.
  steps = sorted(leaves)
  for a, b in zip(steps, steps[1:]):
    ratios = [
      float(np.linalg.norm(y) / np.linalg.norm(x)) for x, y in zip(leaves[a], leaves[b], strict=True) if x.ndim > 2
    ]
    assert max(ratios) < 0.985 and max(ratios) - min(ratios) < 0.005, (a, b, ratios)

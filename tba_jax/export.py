"""Writes the model of a run's checkpoint as a folder that transformers loads.

    python -m tba_jax.export --workdir=RUN --out=DIR [--step=N]

The parameters are those of the trainer, in float32; adapters are merged into the model that they were trained on. The
run may still be going on: only a checkpoint that is whole is read, and nothing in the workdir is written.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from absl import logging

from tba_jax.checkpoints.huggingface import save_model
from tba_jax.checkpoints.model_folder import read_lora, read_model_folder
from tba_jax.checkpoints.run_state import load_initial, load_params
from tba_jax.models import lora as lora_lib
from tba_jax.models import transformer


def export(workdir: pathlib.Path, out: pathlib.Path, *, step: int | None = None) -> int:
  """Exports one checkpoint (default: the newest).

  Args:
    workdir: of a run, with checkpoints/ and model/.
    out: the model folder to write; must not exist yet, or be empty. It appears whole or not at all.
    step: which checkpoint.
  Returns: the step that was exported.
  Raises: ValueError if the workdir holds no such checkpoint or `out` is taken.
  """
  if not (workdir / "model" / "config.json").is_file():
    raise ValueError(f"{workdir} is not the workdir of a run: it has no model/config.json; give the --workdir of one.")
  cfg, tokenizer = read_model_folder(workdir / "model")
  lora = read_lora(workdir / "model")
  # Host memory, whatever the trainer ran on: an accelerator is not needed to copy weights from file to file.
  host = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
  on_host = lambda tree: jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=host), tree)
  whole = on_host(transformer.abstract_params(cfg, jnp.float32))
  trained = whole if lora is None else on_host(lora_lib.abstract_adapters(cfg, settings=lora))
  step, params = load_params(workdir, trained, step=step)
  if lora is not None:
    params = lora_lib.merge(load_initial(workdir, whole), params, scale=lora.scale)
  save_model(out, cfg, params, tokenizer)
  return step


def main(argv: Sequence[str] | None = None) -> None:
  """The command line; bad input ends with one line on stderr and exit code 2."""
  parser = argparse.ArgumentParser(
    prog="python -m tba_jax.export", description="A run's checkpoint as a folder that transformers loads."
  )
  parser.add_argument("--workdir", required=True, type=pathlib.Path, help="folder of the run")
  parser.add_argument("--out", required=True, type=pathlib.Path, help="model folder to write")
  parser.add_argument("--step", type=int, help="which checkpoint; default: the newest")
  args = parser.parse_args(argv)
  logging.set_verbosity(logging.ERROR)  # orbax warns of every option that reading only implies
  try:
    step = export(args.workdir, args.out, step=args.step)
  except ValueError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
  print(f"wrote step {step} of {args.workdir} to {args.out}/")


if __name__ == "__main__":
  main()

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

from absl import logging

from tba_jax.checkpoints.huggingface import save_model
from tba_jax.checkpoints.trained import load_trained
from tba_jax.metrics import bytes_bar
from tba_jax.remote_workdir.fetch import local_copy
from tba_jax.remote_workdir.store import workdir_argument


def export(workdir: pathlib.Path, out: pathlib.Path, *, step: int | None = None) -> int:
  """Exports one checkpoint (default: the newest).

  Args:
    workdir: of a run, with checkpoints/ and model/.
    out: the model folder to write; must not exist yet, or be empty. It appears whole or not at all.
    step: which checkpoint.
  Returns: the step that was exported.
  Raises: ValueError if the workdir holds no such checkpoint or `out` is taken.
  """
  step, cfg, params, tokenizer = load_trained(workdir, step=step)
  save_model(out, cfg, params, tokenizer, on_progress=bytes_bar(f"writing step {step}"))
  return step


def main(argv: Sequence[str] | None = None) -> None:
  """The command line; bad input ends with one line on stderr and exit code 2."""
  parser = argparse.ArgumentParser(
    prog="python -m tba_jax.export", description="A run's checkpoint as a folder that transformers loads."
  )
  parser.add_argument(
    "--workdir", required=True, type=workdir_argument, help="folder of the run, or gs://BUCKET/FOLDER")
  parser.add_argument("--out", required=True, type=pathlib.Path, help="model folder to write")
  parser.add_argument("--step", type=int, help="which checkpoint; default: the newest")
  args = parser.parse_args(argv)
  logging.set_verbosity(logging.ERROR)  # orbax warns of every option that reading only implies
  print(f"reading {args.workdir}", file=sys.stderr, flush=True)
  try:
    with local_copy(args.workdir, checkpoint=True, step=args.step) as folder:
      step = export(folder, args.out, step=args.step)
  except (ValueError, OSError) as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
  print(f"wrote step {step} of {args.workdir} to {args.out}/")


if __name__ == "__main__":
  main()

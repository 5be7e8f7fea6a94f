"""Kills a lockstep run at random moments, again and again, and compares what comes out with the run that nobody
touched.

    python experiments/kill_resume.py --kills 30 --out experiments/results/kill_resume.json

A life of the run is a real process; it is sent SIGKILL after a random time, from its first import to its last
checkpoint, and the same command goes on. When a run ends before the kills are used up, it is compared and the next one
begins. Equal means: every line of metrics.jsonl but for what depends on the clock, the counts of results.json, and the
bits of the trained parameters. Pieces with --seed=0, 1, 2 and one --out add up there; with one --work they share the
unbroken run.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import time

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # so that it runs as a file, too

REPO = pathlib.Path(__file__).resolve().parent.parent
# Of a name: what it holds depends on the clock.
TIMED = ("second", "wall_time", "searchers_decode", "share", "bottleneck")
# An untrained model seldom stops, so responses are scored as they are; nothing is learnt, everything is exercised.
FLAGS = (
    "--config=configs/quickstart.py:smoke", "--config.runtime.mode=lockstep", "--config.sft.steps=0",
    "--config.eval.size=8",
    "--config.eval.every_steps=5", "--config.sample.truncated=score", "--config.checkpoint.every_steps=2",
    "--config.sync.every_steps=2",
)


def start(workdir: pathlib.Path, steps: int, cache: pathlib.Path) -> subprocess.Popen:
  env = dict(os.environ, JAX_PLATFORMS="cpu", JAX_COMPILATION_CACHE_DIR=str(cache), XLA_FLAGS="")
  command = [sys.executable, "-m", "tba_jax.main", f"--workdir={workdir}", f"--config.train.steps={steps}", *FLAGS]
  log = open(workdir.with_suffix(".log"), "ab")
  return subprocess.Popen(command, cwd=REPO, env=env, stdout=log, stderr=log)


def finish(process: subprocess.Popen, workdir: pathlib.Path) -> None:
  if process.wait() != 0:
    raise SystemExit(f"the run failed: {workdir.with_suffix('.log').read_text()[-3000:]}")


def outcome(workdir: pathlib.Path) -> dict:
  """What must be equal, as plain values."""

  def untimed(record: dict) -> dict:
    return {key: value for key, value in record.items() if not any(word in key for word in TIMED)}

  lines = [untimed(json.loads(line)) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  results = untimed(json.loads((workdir / "results.json").read_text()))
  return {"lines": lines, "results": results, "params": parameter_bytes(workdir)}


def parameter_bytes(workdir: pathlib.Path) -> list[bytes]:
  import jax

  from tba_jax.checkpoints.model_folder import read_model_folder
  from tba_jax.checkpoints.run_state import load_params
  from tba_jax.models import transformer

  cfg, _ = read_model_folder(workdir / "model")
  _, params = load_params(workdir, transformer.abstract_params(cfg))
  return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params)]


def main(argv: list[str] | None = None) -> dict:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--kills", type=int, default=30, help="how many lives end by SIGKILL")
  parser.add_argument("--steps", type=int, default=20, help="optimizer steps of a run")
  parser.add_argument("--seed", type=int, default=0, help="of the random moments")
  parser.add_argument("--work", type=pathlib.Path, help="folder that is kept; default: a temporary one")
  parser.add_argument("--out", type=pathlib.Path, required=True, help="file for the results, as JSON")
  args = parser.parse_args(argv)
  rng, began = random.Random(args.seed), time.monotonic()
  with tempfile.TemporaryDirectory() as folder:
    root = args.work or pathlib.Path(folder)
    life = unbroken(root, args.steps)
    whole = outcome(root / "whole")
    kills, num_runs, resumed, workdir = 0, 0, 0, root / "broken"
    while kills < args.kills or workdir.exists():
      process = start(workdir, args.steps, root / "xla")
      resumed += workdir.exists()
      try:
        process.wait(timeout=rng.uniform(0, life) if kills < args.kills else None)
      except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        kills += 1
        workdir.mkdir(exist_ok=True)
        print(f"\r{kills}/{args.kills} kills, {num_runs} runs compared, {time.monotonic() - began:.0f} s", end="",
              file=sys.stderr, flush=True)
        continue
      finish(process, workdir)
      found = outcome(workdir)
      different = [name for name in whole if found[name] != whole[name]]
      if different:
        pairs = zip(found["lines"], whole["lines"])
        raise SystemExit(f"run {num_runs} after {kills} kills differs in {', '.join(different)}; seed {args.seed}; "
                         f"the first lines: {next((pair for pair in pairs if pair[0] != pair[1]), 'no line differs')}")
      num_runs += 1
      shutil.rmtree(workdir)
  print(file=sys.stderr)
  piece = {"kills": kills, "runs_compared": num_runs, "resumes": resumed, "steps": args.steps, "seed": args.seed,
           "seconds": time.monotonic() - began}
  results = add_piece(args.out, piece)
  print(json.dumps(results))
  return results


def unbroken(root: pathlib.Path, steps: int) -> float:
  """Makes the run that nobody touches, unless it is there; how long it took."""
  took = root / "unbroken_secs.json"
  if not took.is_file():
    root.mkdir(parents=True, exist_ok=True)
    finish(start(root / "warm", steps, root / "xla"), root / "warm")  # fills the cache of compiled programs
    began = time.monotonic()
    finish(start(root / "whole", steps, root / "xla"), root / "whole")
    took.write_text(json.dumps(time.monotonic() - began))
  return json.loads(took.read_text())


def add_piece(out: pathlib.Path, piece: dict) -> dict:
  """Writes what was found, with what earlier pieces of other seeds found; all was equal, or it would not be here."""
  pieces = json.loads(out.read_text())["pieces"] if out.is_file() else []
  pieces = [*(old for old in pieces if old["seed"] != piece["seed"]), piece]
  sums = {name: sum(part[name] for part in pieces) for name in ("kills", "runs_compared", "resumes")}
  results = {**sums, "equal": True, "pieces": pieces}
  out.parent.mkdir(parents=True, exist_ok=True)
  out.write_text(json.dumps(results, indent=2) + "\n")
  return results


if __name__ == "__main__":
  main()

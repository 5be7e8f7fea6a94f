"""What the studies of objectives share: one small task, one fine-tuned starting model, runs that are kept, one table
format.

A study is a list of cells, each a run of the real `train.run` in this process. A cell that its JSON holds already is
not run again, and the JSON is written whole after every cell: a study may be stopped at any time, and `--minutes` makes
pieces of it. The starting model comes out the same on one machine with one version of the code; rounding makes another
of it elsewhere. So its checksum is kept with the cells, and cells of another one are not added to them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

REPO = pathlib.Path(__file__).resolve().parent.parent
RESULTS = REPO / "experiments" / "results"

# The quickstart on the chains of `chains.py` and a model of a quarter of its size: hundreds of runs on a CPU.
CHAINS = {
  "task": "experiments/chains.py:Chains",  # from the repository's root, where these commands are run
  "task_args.num_train_prompts": 1024, "task_args.sft_share_with_work": 0.2,
  "model.architecture.hidden_size": 64, "model.architecture.num_heads": 2, "model.architecture.num_kv_heads": 1,
  "model.architecture.mlp_size": 192,
  "train.prompts_per_step": 4, "train.responses_per_prompt": 8, "train.micro_batches": 1, "train.length_buckets": (15,),
  "sample.responses_per_prompt": 8, "sample.slots": 32, "sample.in_flight": False,
  "sample.max_prompt_tokens": 6, "sample.max_new_tokens": 9, "sample.chunk_tokens": 8,
  "buffer.fill_responses": 32, "buffer.dedup": False, "eval.kl_prompts": 16,
  "devices.searchers": 1, "devices.share": True,
  "runtime.mode": "lockstep", "eval.every_steps": 0, "eval.size": 512, "checkpoint.every_steps": 0,
  "log.rollouts_per_step": 0,
}
START = {"train.steps": 0, "sft.steps": 1200, "sft.batch_size": 64, "sft.micro_batches": 1, "sft.learning_rate": 3e-3}
FROM_START = {"sft.steps": 0, "sft.num_examples": 1, "sft.warmup_steps": 0}
SHAPE = ("sample.max_", "sample.chunk", "train.length")  # of a task: also of its smoke form

Cell = dict[str, Any]


def make_config(changes: Mapping[str, Any], *, quick: bool = False) -> Any:
  """The quickstart with the study's settings and `changes`, dotted keys; checked. `quick`: the sizes of its smoke form.
  """
  import jax
  from configs import quickstart

  from tba_jax import config as config_lib

  config = quickstart.get_config("smoke" if quick else None).unlock()
  sizes = ("model.", "train.", "sample.resp", "sample.slots", "buffer.fill")  # which the smoke form has smaller ones of
  small = {name: value for name, value in CHAINS.items()
           if not (quick and name.startswith(sizes)) or name.startswith(SHAPE)}
  for name, value in {**small, **changes}.items():
    *sections, key = name.split(".")
    node = config
    for section in sections:
      node = node[section]
    node[key] = value
  config.lock()
  config_lib.validate(config, num_devices=jax.device_count(), platform=jax.default_backend())
  return config


def starting_model(*, quick: bool = False) -> pathlib.Path:
  """The folder of the one run that fine-tunes the model all cells start from; made when it is not there.

  It is kept in the user's cache folder, under its settings' checksum.
  """
  import zlib

  from tba_jax import config as config_lib
  from tba_jax import main as main_lib

  config = make_config({**START, **({"sft.steps": 20} if quick else {})}, quick=quick)
  name = f"{zlib.crc32(config_lib.to_json(config).encode()):08x}"
  folder = main_lib.cache_folder() / "studies" / name
  if not (folder / "results.json").is_file():
    print(f"fine-tuning the starting model in {folder}", flush=True)
    _train(config, folder)
  return folder


def checksum(folder: pathlib.Path) -> str:
  """Of the parameters of a run's version 0."""
  import zlib

  import jax
  import numpy as np

  from experiments.lab import load_start

  leaves = jax.tree.leaves(load_start(folder)[2])
  return f"{zlib.crc32(b''.join(np.asarray(leaf).tobytes() for leaf in leaves)):08x}"


def set_up(*, num_devices: int = 1) -> None:
  """What jax must know before it looks for devices; compiled programs are kept, so that a cell compiles nothing."""
  import jax
  from absl import logging

  from tba_jax import main as main_lib

  logging.set_verbosity(logging.ERROR)
  main_lib.set_up_jax({"trainer": num_devices, "searchers": 1, "per_searcher": 1, "share": True})
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def _train(config: Any, folder: pathlib.Path) -> None:
  """A run with its words in a file. Raises RuntimeError with the last of them if it does not end well."""
  from tba_jax import train
  from tba_jax.runtime.settings import StopFlag

  folder.mkdir(parents=True, exist_ok=True)
  with open(folder / "log", "w") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
    code = train.run(config, str(folder), stop=StopFlag())
  if code:
    raise RuntimeError(f"a run ended with code {code}: {(folder / 'log').read_text()[-2000:]}")


def run_cell(changes: Mapping[str, Any], start: pathlib.Path, *, quick: bool = False) -> dict[str, Any]:
  """One run from the starting model.

  Returns: what `summarise` makes of its metrics, and its wall-clock seconds.
  """
  from tba_jax import config as config_lib

  began = time.monotonic()
  config = make_config({**FROM_START, **changes}, quick=quick)
  with tempfile.TemporaryDirectory() as temporary:
    folder = pathlib.Path(temporary) / "run"
    folder.mkdir()
    for name in ("initial", "model"):
      shutil.copytree(start / name, folder / name)
    (folder / config_lib.CONFIG_FILE).write_text(config_lib.to_json(config))
    _train(config, folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    results = json.loads((folder / "results.json").read_text())
  return {**summarise(lines, results), "seconds": round(time.monotonic() - began, 2)}


def run_bare_cell(changes: Mapping[str, Any], start: pathlib.Path, *, quick: bool = False) -> dict[str, Any]:
  """The same run without the machinery of one, see `bare.py`; its seconds are CPU seconds."""
  from experiments.bare import BareRun

  began = time.process_time()
  config = make_config({**FROM_START, **changes}, quick=quick)
  lines, results = BareRun(config, start).run(eval_every_steps=2 if quick else 100)
  return {**summarise(lines, results), "greedy_after": results["greedy_after"],
          "seconds": round(time.process_time() - began, 2)}


# Metrics of the last steps that a cell keeps the mean of, where the loss reports them.
KEPT = ("reward", "log_ratio_ref", "entropy", "grad_norm", "ess_share", "clip_share", "staleness_mean",
        "equal_reward_groups", "kl_fresh")
LAST_STEPS = 20


def summarise(lines: Sequence[Mapping[str, Any]], results: Mapping[str, Any]) -> dict[str, Any]:
  """What a cell keeps of a run: accuracies, the curve of evaluations, the means of some metrics over the last steps."""
  steps = [line for line in lines if "loss" in line]
  last = {}
  for name in KEPT:
    values = [line[name] for line in (lines if name == "kl_fresh" else steps[-LAST_STEPS:]) if name in line]
    if values:
      last[name] = round(values[-1] if name == "kl_fresh" else statistics.fmean(values), 5)
  return {
    "before": results["accuracy_before"], "after": results["accuracy_after"],
    "curve": [[line["step"], round(line["eval_accuracy"], 5)] for line in lines if "eval_accuracy" in line],
    "skipped_updates": results["skipped_updates"], "train_seconds": round(results["train_seconds"], 2), "last": last,
  }


class Study:
  """Finished cells in a JSON, by their keys.

  Args:
    path: the JSON; read if it is there.
    about: what the figures are of, written beside them; "starting_model": its checksum.
  """

  def __init__(self, path: pathlib.Path, about: Mapping[str, Any]):
    self.path, self.about = path, dict(about)
    held = json.loads(path.read_text()) if path.is_file() else {"about": about, "cells": []}
    self.cells: list[Cell] = held["cells"]
    self._other_start = held["about"].get("starting_model") != about.get("starting_model")

  def find(self, **key: Any) -> Cell | None:
    """The finished cell with exactly this key."""
    return next((cell for cell in self.cells if cell["key"] == key), None)

  def after(self, **key: Any) -> float | None:
    """Accuracy at the end of a finished cell."""
    cell = self.find(**key)
    return None if cell is None else cell["after"]

  def add(self, key: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Adds a cell and writes the JSON, whole or not at all."""
    from tba_jax import metrics

    self.cells.append({"key": dict(key), **values})
    self.path.parent.mkdir(parents=True, exist_ok=True)
    rows = ",\n".join("    " + json.dumps(cell) for cell in self.cells)
    about = json.dumps(self.about, indent=2).replace("\n", "\n  ")
    metrics.write_atomic(self.path, f'{{\n  "about": {about},\n  "cells": [\n{rows}\n  ]\n}}\n')

  def run_missing(
    self, wanted: Iterable[Cell], run: Callable[[Cell], Mapping[str, Any]], *, minutes: float, began: float
  ) -> bool:
    """Runs the cells that are not there yet, in order; False if the minutes since `began` were over before the end.

    `run`: key -> what is kept of the cell, its "seconds" among it.
    Raises: SystemExit if some are missing and those that are there are of another starting model.
    """
    from tba_jax import metrics

    missing = [key for key in wanted if self.find(**key) is None]
    if missing and self._other_start:
      raise SystemExit(f"{self.path} holds runs from another starting model (of another machine or version), which the "
                       f"{len(missing)} that are missing cannot be compared with; give another folder with --out")
    bar = metrics.StageProgress(self.path.stem, len(missing), interval_secs=0.0)
    try:
      for done, key in enumerate(missing):
        bar.update(done, " ".join(f"{name}={value}" for name, value in key.items()))
        # What a cell takes is about what those before it took.
        if time.monotonic() - began > 60 * minutes - (self.cells[-1]["seconds"] if self.cells else 0):
          return False
        self.add(key, run(key))
      bar.update(len(missing), "done")
    finally:
      bar.close()
    return True


def common_flags(doc: str, *, name: str) -> argparse.ArgumentParser:
  """The flags that every study has."""
  parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help=f"folder for {name}.json, .md and .png")
  parser.add_argument("--minutes", type=float, default=float("inf"),
                      help="stop after so long; the same command goes on")
  parser.add_argument("--quick", action="store_true", help="tiny and short: everything works, no figure means anything")
  return parser


def names(text: str) -> tuple[str, ...]:
  """a,b,c of a flag."""
  return tuple(item for item in text.split(",") if item)


def numbers(text: str) -> tuple[int, ...]:
  """1,2,3 of a flag."""
  return tuple(int(item) for item in names(text))


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
  """A Markdown table."""
  lines = [header, ["---"] * len(header), *rows]
  return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


def mean_and_spread(values: Sequence[float]) -> str:
  """Mean in percent, with half the range where there are several values."""
  if not values:
    return ""
  spread = f" ± {50 * (max(values) - min(values)):.1f}" if len(values) > 1 else ""
  return f"{100 * statistics.fmean(values):.1f}{spread}"


def new_figure(columns: int, *, rows: int = 1, height: float = 4.0, width: float = 5.2) -> Any:
  """A matplotlib figure and its axes [rows, columns] of this size each, in inches, without a window."""
  import matplotlib

  matplotlib.use("agg")
  from matplotlib import pyplot

  size = (width * columns, height * rows)
  return pyplot.subplots(rows, columns, figsize=size, squeeze=False, constrained_layout=True)

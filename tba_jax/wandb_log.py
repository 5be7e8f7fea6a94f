"""The scalars of a run in Weights & Biases too, where `log.wandb` names a project. Off, wandb is not even imported.

It gets scalars and the config, no text, no weights, no console; beside them wandb notes the machine and its packages.
With WANDB_MODE=offline all of it stays here:
`wandb sync` sends the folder later.
"""

from __future__ import annotations

import json
import os
import pathlib
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from tba_jax.metrics import write_atomic

RUN_FILE = "wandb.json"  # the run's id, so that a resumed run goes on in the same one


class WandbLog:
  """One run there, as the workdir is one here. Its own step counter only rises and evaluations come late, so every
  record carries "step", and curves are drawn over that. What a resume rolls back stays in the curves' history."""

  def __init__(self, workdir: str | os.PathLike[str], *, project: str, config: Mapping[str, Any],
               say: Callable[[str], None]):
    """Begins the run, or goes on with the one that the workdir names.

    Raises: ValueError if wandb cannot begin it, as without a login.
    """
    import wandb

    folder = pathlib.Path(workdir)
    path = folder / RUN_FILE
    run_id = json.loads(path.read_text(encoding="utf-8"))["id"] if path.is_file() else uuid.uuid4().hex[:12]
    self._error, self._say, self._is_lost = wandb.Error, say, False
    try:
      self._run = wandb.init(project=project, id=run_id, resume="allow", name=folder.resolve().name, dir=str(folder),
                             config=dict(config), settings=wandb.Settings(console="off"))
    except wandb.Error as error:
      raise ValueError(f"wandb cannot begin a run in project {project!r} ({error}); run `wandb login` once, set "
                       "WANDB_MODE=offline for a run without the network, or --config.log.wandb= for none") from error
    write_atomic(path, json.dumps({"id": run_id, "project": project}) + "\n")
    self._run.define_metric("*", step_metric="step")

  def write(self, step: int, numbers: Mapping[str, float]) -> None:
    """Sends one line of metrics. A failure is said once and ends the sending: training does not stand or fall by it."""
    if self._is_lost:
      return
    try:
      self._run.log({"step": step, **numbers})
    except self._error as error:
      self._is_lost = True
      self._say(f"error: wandb takes no more metrics ({error}); training goes on, metrics.jsonl has them all, and the "
                "same command after a stop tries again")

  def close(self) -> None:
    """Ends the run there; waits until what was written is sent."""
    self._run.finish()

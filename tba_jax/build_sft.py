"""Supervised fine-tuning out of the config."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from tba_jax import learner, metrics, optimizers, sharding, supervised
from tba_jax.checkpoints.run_state import RunState
from tba_jax.losses.registry import make_loss
from tba_jax.models.variants import ModelConfig
from tba_jax.runtime.lead import Lead
from tba_jax.runtime.settings import StopFlag
from tba_jax.tasks import registry
from tba_jax.tasks.base import Task
from tba_jax.types import Batch, TrainState
from tba_jax.workdir import as_config_error

Step = Callable[[TrainState, Batch, Any], tuple[TrainState, dict[str, jax.Array]]]


def first_state(config: ConfigDict, cfg: ModelConfig, params: Any, mesh: Mesh) -> tuple[TrainState, Step]:
  """The state before the first step, which takes the parameters over, and the jitted step; all processes of a mesh make
  the same."""
  sft, train = config.sft, config.train
  schedule = optimizers.make_schedule(
      "cosine", learning_rate=sft.learning_rate, warmup_steps=sft.warmup_steps,
      decay_steps=sft.steps - sft.warmup_steps)
  optimizer = optimizers.make_optimizer("adamw", schedule=schedule, clip_norm=1.0, b1=train.b1, b2=train.b2,
                                        eps=train.eps)
  step = learner.make_train_step(
      cfg, make_loss("sft"), optimizer, temperature=1.0, compute_dtype=jnp.dtype(train.compute_dtype),
      remat=train.remat, micro_batches=sft.micro_batches, chunk_tokens=train.head_chunk_tokens,
      whole_groups_per_micro_batch=True, backend=train.attention, mesh=mesh)
  return learner.init_train_state(params, optimizer, mesh=mesh), step


def take_step(step: Step, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
  """One step, of any process of a mesh."""
  return step(state, batch, np.float32(0.0))


def fine_tune(
    config: ConfigDict, cfg: ModelConfig, task: Task, params: Any, mesh: Mesh, folder: pathlib.Path, stop: StopFlag,
    lead: Lead | None,
) -> Any | None:
  """Fine-tuned parameters; None if that was stopped. Raises: ConfigError for examples that cannot be learnt from.

  `lead`: None where the mesh is this process's."""
  sft, train = config.sft, config.train
  with as_config_error("sft"):
    examples = registry.sft_examples(
        config.task, task, most=sft.num_examples, longest=train.length_buckets[-1], vocab_size=cfg.vocab_size)
  placement = sharding.batch_sharding(mesh)
  place = lambda batch: jax.device_put(batch, placement)
  if lead is not None:
    lead.begin_fine_tuning(cfg)
    place = lambda batch: lead.place_batch(batch, placement)
  state, step = first_state(config, cfg, params, mesh)

  def ordered_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
    if lead is not None:
      lead.order("fine_tuning_step")
    return take_step(step, state, batch)

  run_state = RunState(folder / "fine_tuning", keep=1, mesh=lead)
  bar = metrics.StageProgress("fine-tuning", sft.steps)
  try:
    state = supervised.fine_tune(
        state, examples, step=ordered_step, place=place, steps=sft.steps, batch_size=sft.batch_size,
        row_multiple=sft.micro_batches * sharding.num_batch_shards(mesh), length_buckets=train.length_buckets,
        seed=config.seed, run_state=run_state, save_every_steps=config.checkpoint.every_steps, stopped=stop.is_set,
        on_step=lambda done, loss: bar.update(done, f"loss {loss:.3f}"))
  finally:
    bar.close()
    run_state.close()
  if state is None:
    return None
  if lead is not None:
    lead.order("fine_tuned")
  return state.params

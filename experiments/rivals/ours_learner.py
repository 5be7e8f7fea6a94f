"""This repository's train step, and whole runs of it, as a system of the benchmarks."""

from __future__ import annotations

import json
import pathlib
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from configs import quickstart
from experiments.rivals import ours
from experiments.rivals.stopwatch import Stopwatch
from tba_jax import config as config_lib
from tba_jax import host_memory, learner, optimizers, sharding
from tba_jax import train
from tba_jax.losses.registry import make_loss
from tba_jax.replay.collate import collate
from tba_jax.tasks.arithmetic import MAX_PROMPT_TOKENS, ArithmeticTask
from tba_jax.types import Batch, Draw, TrainState


def make_batch(data: dict[str, Any]) -> Batch:
  """Prompts [N, P], responses [N, R] with log_ref [N, R], rewards [N] and group_ids [N], all of full length."""
  tokens = np.asarray(data["responses"], np.int32)
  count, length = tokens.shape
  draw = Draw(
    prompts=np.asarray(data["prompts"], np.int32), prompt_lengths=np.full(count, len(data["prompts"][0]), np.int32),
    tokens=tokens, lengths=np.full(count, length, np.int32), log_mu=np.zeros(tokens.shape, np.float32),
    log_ref=np.asarray(data["log_ref"], np.float32), versions=np.zeros(count, np.int32),
    rewards=np.asarray(data["rewards"], np.float32), truncated=np.zeros(count, bool),
    group_ids=np.asarray(data["group_ids"], np.int32), valid=np.ones(count, bool), weights=np.ones(count, np.float32),
    prompt_ids=np.zeros(count, np.int64), occurrences=np.zeros(count, np.int64), rows=np.full(count, -1, np.int64),
  )
  return collate(draw, row_multiple=1, length_buckets=(len(data["prompts"][0]) + length,))


class System(ours.System):
  """Adds the train step to what the sampler's benchmark uses. Freed memory is kept, as `tba_jax.main` does on CPUs."""

  def __init__(self):
    host_memory.keep_freed_memory()
    super().__init__()
    self._step, self._state, self._batch, self._beta = None, None, None, 0.0

  def prepare_learner(
    self, data: dict[str, Any], settings: dict[str, float], micro_batches: int, whole_rows: bool
  ) -> list[float]:
    """Compiles the train step for the batch, once; CPU seconds. The state is that before the first update.

    Two steps are taken first and undone: the allocator has then the pages that a run's steps find (google-tunix's
    compiling takes three).

    `whole_rows`: log-probabilities of prompts, too (all but the first token); else of responses alone, as in a run.
    """
    optimizer = optimizers.make_optimizer(
      "adamw", schedule=optimizers.make_schedule("constant", learning_rate=settings["learning_rate"]),
      clip_norm=settings["clip_norm"], b1=settings["b1"], b2=settings["b2"], eps=settings["eps"],
    )
    mesh = sharding.make_mesh(jax.devices()[:1])  # as a run has, whose programs are compiled for the platform
    step = learner.make_train_step(
      self._cfg, make_loss("tb_vargrad"), optimizer, temperature=1.0, compute_dtype=jnp.float32, remat="none",
      micro_batches=micro_batches, chunk_tokens=settings["chunk_tokens"], whole_groups_per_micro_batch=True,
      most_response_tokens=0 if whole_rows else len(data["responses"][0]), mesh=mesh,
    )

    def fresh() -> TrainState:
      return learner.init_train_state(jax.tree.map(jnp.copy, self._params), optimizer, mesh=mesh)

    self._state = fresh()
    self._batch, self._beta = make_batch(data), jnp.float32(settings["beta"])
    watch = Stopwatch()
    self._step = step.lower(self._state, self._batch, self._beta).compile()
    secs = watch.read()["cpu_secs"]
    self.train(steps=2)
    self._state = None
    self._state = fresh()
    return [secs]

  def train(self, steps: int) -> dict[str, Any]:
    """Takes steps on the same batch; seconds of a step, and its loss and gradient norm (of the last step)."""
    watch = Stopwatch()
    for _ in range(steps):
      self._state, metrics = self._step(self._state, self._batch, self._beta)
    metrics = jax.block_until_ready(metrics)
    return {**watch.read(parts=steps), "loss": float(metrics["loss"]), "grad_norm": float(metrics["grad_norm"])}

  def forget_learner(self) -> None:
    self._step = self._state = None

  def task_prompts(self, count: int) -> list[list[int]]:
    """Of the task that whole runs learn, as ids."""
    task = ArithmeticTask(seed=0, num_eval_prompts=1, num_sft_examples=1, num_train_prompts=count,
                          sft_share_with_work=0.4)
    return [prompt.tokens.tolist() for prompt in task.train_prompts()]

  def run(self, folder: str, settings: dict[str, Any], steps: int) -> dict[str, float]:
    """A whole run in mode `sync`; the median of the seconds from one step's end to the next, and those until the first.
    """
    with tempfile.TemporaryDirectory() as workdir:
      prompts = self.task_prompts(settings["num_train_prompts"])
      config = run_config(folder, settings, steps=steps, longest_prompt=max(map(len, prompts)))
      began = time.perf_counter()
      code = train.run(config, workdir)
      assert code == 0, code
      lines = (pathlib.Path(workdir) / "metrics.jsonl").read_text().splitlines()
      ends = [line["wall_seconds"] for line in map(json.loads, lines) if "wall_seconds" in line and "loss" in line]
    return {
      "secs": float(np.median(np.diff(ends))), "first_secs": ends[0], "steps": len(ends),
      "run_secs": time.perf_counter() - began,
    }


def run_config(folder: str, settings: dict[str, Any], *, steps: int, longest_prompt: int) -> Any:
  """The quickstart's config with another model and sizes, in mode sync, with neither evaluation nor checkpoints."""
  config = quickstart.get_config().unlock()
  prompts, responses, new = settings["prompts"], settings["samples"], settings["new_tokens"]
  config.model.path = folder
  config.task_args.num_train_prompts = settings["num_train_prompts"]
  config.sft.steps = 0
  config.train.update(
    steps=steps, prompts_per_step=prompts, responses_per_prompt=responses, learning_rate=settings["learning_rate"],
    warmup_steps=0, micro_batches=settings["micro_batches"],
    length_buckets=(longest_prompt + new, MAX_PROMPT_TOKENS + new),
  )
  config.sample.update(
    responses_per_prompt=responses, max_new_tokens=new, slots=prompts * responses,
    chunk_tokens=settings["chunk_tokens"], truncated="score",
  )
  config.buffer.update(fill_responses=0, dedup=False, recent_fraction=1.0)
  config.devices.update(trainer=1, searchers=1, share=True)
  config.runtime.mode = "sync"
  config.eval.update(every_steps=0, size=8)
  config.checkpoint.every_steps = 0
  config.log.rollouts_per_step = 0
  config.lock()
  config_lib.validate(config, num_devices=1, platform="cpu")
  return config

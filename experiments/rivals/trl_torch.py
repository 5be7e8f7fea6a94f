"""TRL's GRPOTrainer as a system of the benchmarks: its scoring and optimizer with the TB loss, and its whole steps."""

from __future__ import annotations

import tempfile
import time
from typing import Any

import datasets
import numpy as np
import torch
import transformers
import trl

from experiments.rivals import shapes
from experiments.rivals.stopwatch import Stopwatch

torch.set_num_threads(1)


def reward_distinct(completion_ids: list[list[int]], **unused: Any) -> list[float]:
  """Any reward that differs between samples."""
  return [len(set(ids)) / max(len(ids), 1) for ids in completion_ids]


class StepClock(transformers.TrainerCallback):
  """Seconds at which optimizer steps ended."""

  def __init__(self):
    self.ends: list[float] = []

  def on_step_end(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
    self.ends.append(time.perf_counter())


def make_trainer(
  folder: str, workdir: str, *, prompts: list[list[int]], batch: int, samples: int, new_tokens: int, steps: int,
  settings: dict[str, Any], callbacks: list[transformers.TrainerCallback], beta: float,
) -> trl.GRPOTrainer:
  """A GRPOTrainer in float32 on one CPU thread, without the recomputation of activations that it has by default."""
  config = trl.GRPOConfig(
    output_dir=workdir, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none", disable_tqdm=True,
    save_strategy="no", per_device_train_batch_size=batch, num_generations=samples, max_completion_length=new_tokens,
    max_steps=steps, beta=beta, temperature=1.0, top_k=0, top_p=1.0, learning_rate=settings["learning_rate"],
    lr_scheduler_type="constant", warmup_steps=0, max_grad_norm=settings["clip_norm"], adam_beta1=settings["b1"],
    adam_beta2=settings["b2"], adam_epsilon=settings["eps"], weight_decay=0.0, dataloader_pin_memory=False,
    model_init_kwargs={"dtype": "float32"}, shuffle_dataset=False,
  )
  rows = datasets.Dataset.from_dict({"prompt": [" ".join(f"w{i}" for i in prompt) for prompt in prompts]})
  return trl.GRPOTrainer(
    model=folder, reward_funcs=reward_distinct, args=config, train_dataset=rows, callbacks=callbacks,
    processing_class=transformers.AutoTokenizer.from_pretrained(folder, padding_side="left"),
  )


class System:
  """Methods are called by name over a pipe; arguments and results are JSON."""

  def __init__(self):
    self._folder, self._trainer, self._optimizer, self._data = "", None, None, None

  def versions(self) -> dict[str, str]:
    return {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__}

  def load(self, folder: str, model: str) -> None:
    del model  # the folder says it
    self._folder = folder

  def prepare_learner(self, data: dict[str, Any], settings: dict[str, float], whole_rows: bool) -> list[float]:
    """Trainer and optimizer for the batch; there is nothing to compile.

    `whole_rows`: score prompts, too (all but the first token), as the other systems do; else responses alone.
    """
    count = len(data["prompts"])
    with tempfile.TemporaryDirectory() as workdir:
      self._trainer = make_trainer(
        self._folder, workdir, prompts=data["prompts"], batch=count, samples=count, steps=1, callbacks=[], beta=0.0,
        new_tokens=len(data["responses"][0]), settings=settings,
      )
    self._trainer.create_optimizer()
    self._optimizer = self._trainer.optimizer
    self._trainer.model.train()
    self._data = {name: torch.tensor(np.asarray(values)) for name, values in data.items()}
    self._beta, self._clip_norm, self._whole_rows = settings["beta"], settings["clip_norm"], whole_rows
    return []

  def _loss(self) -> torch.Tensor:
    data = self._data
    tokens = torch.cat([data["prompts"], data["responses"]], 1)
    num_new, num_scored = data["responses"].shape[1], tokens.shape[1] - 1
    log_pi, entropy, _ = self._trainer._get_per_token_logps_and_entropies(
      self._trainer.model, tokens, torch.ones_like(tokens), num_scored if self._whole_rows else num_new,
      compute_entropy=True,
    )
    self._entropy = entropy[:, -num_new:].mean()
    ratio = (log_pi[:, -num_new:] - data["log_ref"].float()).sum(1)
    groups = data["group_ids"]
    counts = torch.bincount(groups).float()
    mean = lambda values: (torch.zeros_like(counts).index_add(0, groups, values) / counts)[groups]
    rewards = data["rewards"].float()
    residual = self._beta * (ratio - mean(ratio.detach())) - (rewards - mean(rewards))
    return residual.square().mean() / (2 * self._beta)

  def train(self, steps: int) -> dict[str, Any]:
    """Loss, backward, clip and AdamW on the same batch; seconds of a step, loss and gradient norm (of the last)."""
    watch = Stopwatch()
    for _ in range(steps):
      loss = self._loss()
      loss.backward()
      norm = torch.nn.utils.clip_grad_norm_(self._trainer.model.parameters(), self._clip_norm)
      self._optimizer.step()
      self._optimizer.zero_grad()
    return {**watch.read(parts=steps), "loss": float(loss), "grad_norm": float(norm)}

  def profile(self) -> list[dict[str, Any]]:
    """Where one step's time goes: the operations with the most seconds of their own."""
    activity = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profile:
      self.train(1)
    events = sorted(profile.key_averages(), key=lambda event: -event.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in events)
    return [
      {"operation": event.key, "secs": event.self_cpu_time_total / 1e6, "share": event.self_cpu_time_total / total,
       "calls": event.count}
      for event in events[:12]
    ]

  def forget_learner(self) -> None:
    self._trainer = self._optimizer = self._data = None

  def run(self, folder: str, settings: dict[str, Any], steps: int, prompts: list[list[int]]) -> dict[str, float]:
    """GRPOTrainer.train; the median of the seconds from one step's end to the next, and those until the first."""
    clock = StepClock()
    with tempfile.TemporaryDirectory() as workdir:
      trainer = make_trainer(
        folder, workdir, prompts=prompts, batch=settings["prompts"] * settings["samples"], samples=settings["samples"],
        new_tokens=settings["new_tokens"], steps=steps, settings=settings, callbacks=[clock], beta=0.05,
      )
      began = time.perf_counter()
      trainer.train()
    return {
      "secs": float(np.median(np.diff(clock.ends))), "first_secs": clock.ends[0] - began, "steps": len(clock.ends),
      "run_secs": time.perf_counter() - began,
    }

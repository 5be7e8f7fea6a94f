"""Tasks by name, as configs and commands name them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tba_jax.tasks.arithmetic import ArithmeticTask, make_arithmetic_tokenizer
from tba_jax.tasks.base import Task, TaskSettings
from tba_jax.tasks.characters import make_character_tokenizer
from tba_jax.tasks.gsm8k import Gsm8kTask
from tba_jax.tasks.math import MathTask
from tba_jax.tokenizer import Tokenizer


def _arithmetic(tokenizer: Tokenizer | None, settings: TaskSettings, **task_args: Any) -> Task:
  del tokenizer  # it has its own
  return ArithmeticTask(
    seed=settings.seed, num_eval_prompts=settings.num_eval_prompts, num_sft_examples=settings.num_sft_examples, **task_args
  )


def _gsm8k(tokenizer: Tokenizer | None, settings: TaskSettings, **task_args: Any) -> Task:
  return Gsm8kTask(
    tokenizer, max_prompt_tokens=settings.max_prompt_tokens, jsonl_folder=settings.data_path, **task_args
  )


def _math(tokenizer: Tokenizer | None, settings: TaskSettings, **task_args: Any) -> Task:
  return MathTask(
    tokenizer, max_prompt_tokens=settings.max_prompt_tokens, jsonl_folder=settings.data_path, seed=settings.seed, **task_args
  )


TASKS: dict[str, Callable[..., Task]] = {"arithmetic": _arithmetic, "gsm8k": _gsm8k, "math": _math}


def own_tokenizer(name: str) -> Tokenizer:
  """The tokenizer that a task brings for a new model."""
  return make_arithmetic_tokenizer() if name == "arithmetic" else make_character_tokenizer()


def make_task(name: str, tokenizer: Tokenizer | None, settings: TaskSettings, task_args: Mapping[str, Any]) -> Task:
  """The task of a name.

  Args:
    name: a key of TASKS.
    tokenizer: of the model; None: a new model is made, and the task brings a tokenizer.
    task_args: what the task takes beside the settings.
  Raises: ValueError for missing or malformed data, or a prompt over the limit.
  """
  task = TASKS[name](tokenizer, settings, **task_args)
  longest = max(len(prompt.tokens) for prompt in (*task.train_prompts(), *task.eval_prompts()))
  if longest > settings.max_prompt_tokens:
    raise ValueError(
      f"sample.max_prompt_tokens={settings.max_prompt_tokens} is less than the longest prompt of {name}; raise it to {longest}"
    )
  return task

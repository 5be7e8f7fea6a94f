"""The word problems of `tba_jax.tasks.arithmetic`, the same ones whatever the seed of the run.

Studies repeat a run with other samples and another order of prompts, from one fine-tuned model that must not have seen
the held-out problems.
"""

from __future__ import annotations

from experiments import study
from tba_jax.tasks.arithmetic import ArithmeticTask
from tba_jax.tasks.base import TaskSettings
from tba_jax.tokenizer import Tokenizer


def fixed_problems(tokenizer: Tokenizer | None, settings: TaskSettings, **task_args: float) -> ArithmeticTask:
  """The task of a config, of one seed; made once a process."""
  del tokenizer  # it has its own
  return study.problems(
    num_eval_prompts=settings.num_eval_prompts, num_sft_examples=settings.num_sft_examples, **task_args)

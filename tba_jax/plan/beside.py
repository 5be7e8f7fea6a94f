"""What a task's own models add to the work of a searcher: reward models, scorers, victims.

They are known by the names of the task's arguments. A victim answers every response and a scorer reads the answers; any
other model that rewards reads the responses. Models that evaluations alone use cost a group nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax

from tba_jax.work import Work

IN_EVALUATIONS = ("gold", "sentence")
_TABLES = ("embed", "pos_embed")


def group_works(
  models: Mapping[str, Any], task_args: Mapping[str, Any], *, num_samples: int, mean_prompt_tokens: float,
  mean_response_tokens: float, devices: int,
) -> dict[str, Work]:
  """What each model does to reward one group, on each of a searcher's `devices`; by its name.

  A token costs two FLOPs a weight of the layers, and every pass reads the weights once: attention, activations and what
  goes over links are left out. Answers are half of their limit long, as a plan assumes of responses; a victim reads an
  attack's prompt once and decodes in all its slots.

  Args:
    models: name (as "reward model") -> tree of shapes. task_args: of the config.
    num_samples: responses of a group.
  """
  found = {}
  answers, answer_tokens = num_samples, mean_prompt_tokens + mean_response_tokens
  if "victim model" in models:
    asked, spoken = task_args["victim_max_prompt_tokens"] / 2, task_args["victim_max_new_tokens"] / 2
    answers, answer_tokens = num_samples * task_args["victim_samples"], asked + spoken
    passes = math.ceil(answers / task_args["victim_slots"]) * spoken + 1
    found["victim model"] = _work(
      models["victim model"], num_samples * asked + answers * spoken, passes, devices, skipped=_TABLES)
  for name, tree in models.items():
    if name not in found and not name.startswith(IN_EVALUATIONS) and name.endswith("model"):
      found[name] = _work(tree, answers * answer_tokens, 1.0, devices, skipped=(*_TABLES, "lm_head"))
  return found


def _work(tree: Any, tokens: float, passes: float, devices: int, *, skipped: tuple[str, ...]) -> Work:
  leaves = jax.tree.leaves({name: node for name, node in tree.items() if name not in skipped})
  num_weights = sum(math.prod(leaf.shape) for leaf in leaves)
  num_bytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
  return Work(2 * num_weights * tokens / devices, passes * num_bytes / devices)

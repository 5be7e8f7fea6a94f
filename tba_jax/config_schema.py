"""Every key of a config, with what it may hold: `SCHEMA` is the one list of them.

Each config sets all of them, so that a default is written once, in the config file. Keys that must agree with each
other are the business of config.py. Importing this module imports neither jax nor anything of ours.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple


class Rule(NamedTuple):
  """What one key may hold."""

  kind: type
  holds: Callable[[Any], bool]
  text: str  # completes "must be ..."
  names: tuple[str, ...] = ()  # the right ones, where only some are


def _integer(low: int, high: int | None = None, *, or_else: str = "") -> Rule:
  bound = f"of at least {low}" if high is None else f"from {low} to {high}"
  text = f"an integer {bound}" + (f" ({or_else})" if or_else else "")
  return Rule(int, lambda value: low <= value and (high is None or value <= high), text)


def _number(low: float, high: float = math.inf, *, above: bool = False) -> Rule:
  bound = f"above {low:g}" if above else f"of at least {low:g}"
  text = f"a finite number {bound}" + (f" and at most {high:g}" if math.isfinite(high) else "")
  return Rule(float, lambda value: math.isfinite(value) and (value > low if above else value >= low) and value <= high,
              text)


def _one_of(*names: str) -> Rule:
  text = "one of " + ", ".join(names) if len(names) > 1 else names[0]
  return Rule(str, lambda value: value in names, text, names)


_ANY_STRING = Rule(str, lambda value: True, "a string")
_BOOLEAN = Rule(bool, lambda value: True, "true or false")
def _ascend(value: Iterable[Any]) -> bool:
  return all(type(v) is int for v in value) and all(a < b for a, b in zip((0, *value), value))


_LENGTHS = Rule(tuple, lambda value: len(value) > 0 and _ascend(value), "a tuple of ascending integers, as (128,256)")
_DTYPE = _one_of("float32", "bfloat16")

TASKS = ("arithmetic", "gsm8k", "math", "tldr")


def is_task_file(task: str) -> bool:
  """Whether a task is named by the file that holds its class."""
  path, colon, name = task.rpartition(":")
  return bool(colon) and path.endswith(".py") and name.isidentifier()


SCHEMA: dict[str, Rule] = {
  "seed": _integer(0, 2**32 - 1),
  "task": Rule(str, lambda value: value in TASKS or is_task_file(value),
               f"one of {', '.join(TASKS)}, or FILE.py:CLASS for a task of your own", TASKS),
  # Folder, .gguf file, Hugging Face name or package:NAME; "": a new model of model.architecture.
  "model.path": _ANY_STRING,
  "data.path": _ANY_STRING,  # folder with train.jsonl and test.jsonl; "": the task's own source
  # Low-rank adapters are trained and everything else is frozen, in train.compute_dtype. The pattern is a regular
  # expression over whole paths of linear layers (LINEAR_LAYERS); "": everything is trained, rank and alpha are 0.
  "lora.pattern": _ANY_STRING,
  "lora.rank": _integer(0),
  "lora.alpha": _number(0),  # the adapters' product is scaled by alpha / rank
  # Supervised fine-tuning before the first TBA update.
  "sft.steps": _integer(0, or_else="0: no fine-tuning"),
  "sft.batch_size": _integer(1),
  "sft.micro_batches": _integer(1),
  "sft.learning_rate": _number(0, above=True),
  "sft.warmup_steps": _integer(0),
  "sft.num_examples": _integer(1),
  # Optimizer steps of TBA. A step draws prompts_per_step x responses_per_prompt (K) rows.
  "train.steps": _integer(0, or_else="0: fine-tuning alone"),
  "train.prompts_per_step": _integer(1),
  "train.responses_per_prompt": _integer(1),
  "train.learning_rate": _number(0, above=True),
  "train.optimizer": _one_of("adamw", "adafactor", "sgd"),
  "train.schedule": _one_of("constant", "linear", "cosine", "wsd"),
  "train.warmup_steps": _integer(0),
  "train.stable_steps": _integer(0),
  "train.decay_steps": _integer(0),
  "train.clip_norm": _number(0, above=True),  # of the whole gradient; a huge one clips nothing
  "train.weight_decay": _number(0),
  "train.b1": _number(0, 0.9999),
  "train.b2": _number(0, 0.999999),
  "train.eps": _number(0, above=True),
  "train.micro_batches": _integer(1),
  "train.packing": _BOOLEAN,  # several responses in a row; micro-batches that nothing is left for are not computed
  "train.remat": _one_of("none", "dots", "full"),
  "train.attention": _one_of("xla", "splash", "cudnn"),  # also of scoring: splash on TPU, cudnn on GPU
  "train.head_chunk_tokens": _integer(1),
  "train.length_buckets": _LENGTHS,
  "train.param_dtype": _one_of("float32"),  # a bfloat16 master copy rounds most updates of 1e-5 away
  "train.compute_dtype": _DTYPE,
  "train.max_nonfinite_in_row": _integer(1),
  # The reference policy is version 0. It may move: become the policy every so many steps (the paper's rho), or an
  # average of it that is taken every step.
  "reference.reset_every_steps": _integer(0, or_else="0: never"),
  "reference.ema_decay": _number(0, 0.999999),  # 0: no average, the policy itself
  # Searchers sample responses_per_prompt (S) per prompt occurrence.
  "sample.responses_per_prompt": _integer(1),
  "sample.max_prompt_tokens": _integer(1),
  "sample.max_new_tokens": _integer(1),
  "sample.temperature": _number(0, above=True),
  # Searcher i samples at temperature i of these, in turn: a ladder of exploration. (): all at sample.temperature.
  "sample.temperature_ladder": Rule(
    tuple, lambda value: all(type(v) in (float, int) and 0 < v < math.inf for v in value),
    "a tuple of temperatures above 0, as (0.7,1.0); () for none"),
  "sample.slots": _integer(1),
  "sample.chunk_tokens": _integer(1),
  "sample.dtype": _DTYPE,
  "sample.truncated": _one_of("score", "zero", "mask"),
  "sample.attention": _one_of("xla", "paged"),  # paged, on TPU: its kernel decodes and splash reads prompts
  "sample.lane_samples": _integer(1),  # slots that share the keys and values of one prompt
  "sample.cache_dtype": _one_of("float32", "bfloat16", "int8"),  # of keys and values
  "sample.recompute_kv": _BOOLEAN,  # true: samples under way get keys and values of the weights that arrive in flight
  "sample.in_flight": _BOOLEAN,  # true: new weights between decode chunks; false: between groups
  "loss.name": _ANY_STRING,
  "loss.beta_init": _number(0),
  "loss.beta_final": _number(0),
  "loss.beta_decay_steps": _integer(0),
  # The target is (pi_ref^(1 / gamma) exp(reward / beta))^(1 / reward_temperature), as red-teaming has it; both run
  # evenly from init to final over so many updates. At 1 they change nothing. Metrics of the distance to the reference
  # are then of the tempered one.
  "loss.gamma_init": _number(0, above=True),
  "loss.gamma_final": _number(0, above=True),
  "loss.gamma_steps": _integer(0, or_else="0: gamma_final from the start"),
  "loss.reward_temperature_init": _number(0, above=True),
  "loss.reward_temperature_final": _number(0, above=True),
  "loss.reward_temperature_steps": _integer(0, or_else="0: reward_temperature_final from the start"),
  "buffer.capacity": _integer(2, 2**31 - 1),  # responses
  "buffer.capacity_per_prompt": _integer(2),
  "buffer.recent_fraction": _number(0, 1),  # the paper's m
  # Which groups a step draws: as TBA does, or whole sampling groups, each once, oldest first. A lag or sync mode means
  # the latter.
  "buffer.order": _one_of("tba", "fifo"),
  "buffer.priority": _one_of("uniform", "reward", "residual"),
  "buffer.priority_temperature": _number(0, above=True),
  "buffer.fill_responses": _integer(0),  # in the buffer before the first step
  "buffer.dedup": _BOOLEAN,
  "buffer.max_uses": _integer(0, or_else="0: no limit"),
  "buffer.max_staleness": _integer(-1, or_else="-1: no limit"),
  "sync.every_steps": _integer(1),  # the paper's k
  "sync.max_lead_steps": _integer(-1, or_else="-1: searchers run free"),  # steps' worth of groups not drawn yet
  "devices.trainer": _integer(0, or_else="0: automatic"),
  "devices.searchers": _integer(0, or_else="0: automatic"),
  "devices.per_searcher": _integer(0, or_else="0: automatic"),
  "devices.share": _BOOLEAN,
  "runtime.mode": _one_of("async", "lockstep", "sync"),
  "runtime.backend": _one_of("local", "ray"),
  # Folder of an async run whose order of consumption is followed in lockstep; "": none.
  "runtime.replay_order": _ANY_STRING,
  "runtime.lag": _integer(-1, or_else="-1: the draw of TBA"),
  "runtime.searcher_restarts": _integer(0),  # of searchers that raised or hang, over the run
  # For an engine step, a group's grading, a wait; twice that for an optimizer step.
  "runtime.hang_secs": _number(0, above=True),
  "runtime.stop_timeout_secs": _number(0, above=True),
  "eval.every_steps": _integer(0, or_else="0: only before and after"),
  "eval.size": _integer(0, or_else="0: the whole split"),
  "checkpoint.every_steps": _integer(0, or_else="0: only at the end and when stopped"),
  "checkpoint.keep": _integer(1),
  "log.rollouts_per_step": _integer(0),
  # First and last step of a profile by jax, for TensorBoard's profile plugin or Perfetto; (): none.
  "log.profile_steps": Rule(
    tuple, lambda value: not value or (len(value) == 2 and all(type(v) is int for v in value) and
                                       1 <= value[0] <= value[1]),
    "a tuple of the first and the last step to profile, as (11,13); () for none"),
}

# Those that a model can have; one with tied embeddings has no lm_head, one without gates no gate.
LINEAR_LAYERS = (
  *(f"layers/attn/{name}" for name in "qkvo"), *(f"layers/mlp/{name}" for name in ("gate", "up", "down")), "lm_head",
)

# 1 for 1.0 and a list for a tuple mean the same; True for 1 does not.
_STANDS_FOR = {float: (float, int), tuple: (tuple, list)}

# Of a new model; needed only while model.path is empty.
ARCHITECTURE: dict[str, Rule] = {
  "hidden_size": _integer(1),
  "num_layers": _integer(1),
  "num_heads": _integer(1),
  "num_kv_heads": _integer(1),
  "head_dim": _integer(2),
  "mlp_size": _integer(1),
  "max_positions": _integer(1),
  "tie_embeddings": _BOOLEAN,
  "rope_theta": _number(0, above=True),
  "norm_eps": _number(0, above=True),
}

TASK_ARGS: dict[str, dict[str, Rule]] = {
  "arithmetic": {
    "num_train_prompts": _integer(1),
    "sft_share_with_work": _number(0, 1),
  },
  "gsm8k": {
    "prompt_format": _one_of("rho_sft", "chat"),
  },
  "math": {
    "num_generated": _integer(0, or_else="0: data.path is read"),  # problems made by the task instead of data
    "grader_processes": _integer(1),
    "grader_deadline_secs": _number(0, above=True),  # for one answer
  },
  "tldr": {
    "num_generated": _integer(0, or_else="0: data.path is read"),
    "reward_model": _ANY_STRING,  # as model.path; "": a stand-in of random weights, for generated posts
    "gold_reward_model": _ANY_STRING,  # judges evaluations; "": the reward model does
    "reward_dtype": _DTYPE,
  },
}


# --- Names ---


def nearest(name: str, names: Iterable[str], *, known: str = "known are", prefix: str = "") -> str:
  """The end of an error line about an unknown name: the nearest right one, or all of them, each after `prefix`."""
  names = sorted(names)
  close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
  if close:
    return f"; did you mean {prefix}{close[0]}?"
  return f"; {known} {', '.join(prefix + name for name in names) or 'none'}"


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """{"train.steps": 3, ...} of a nested mapping or ConfigDict. An empty section leaves nothing."""
  flat = {}
  for key, value in config.items():
    if isinstance(value, Mapping) or hasattr(value, "to_dict"):
      flat.update(flatten(value, f"{prefix}{key}."))
    else:
      flat[prefix + key] = value
  return flat


def unknown_key(name: str, names: Iterable[str]) -> str | None:
  """The error line for a dotted key, or None if it is a key or a section of keys."""
  names = list(names)
  if name in names or any(other.startswith(name + ".") for other in names):
    return None
  # The nearest is looked for where the mistake is: a wrong section among sections, a wrong leaf among its siblings.
  parts = name.split(".")
  for depth, part in enumerate(parts):
    start = "".join(f"{parent}." for parent in parts[:depth])
    siblings = {other[len(start) :].split(".")[0] for other in names if other.startswith(start)}
    if siblings and part not in siblings:
      rest = "".join(f".{leaf}" for leaf in parts[depth + 1 :])
      close = difflib.get_close_matches(part, siblings, n=3)
      full = next((sibling + rest for sibling in close if start + sibling + rest in names), close[0] if close else None)
      hint = f"did you mean {start}{full}?" if full else f"known are {', '.join(start + s for s in sorted(siblings))}"
      return f"{name} is not a key of this config; {hint}"
  return f"{name} is not a key of this config; {'.'.join(parts[:-1])} is a single value"


def rule_of(name: str) -> Rule | None:
  """The rule of a dotted key, whatever the task; None if there is no such key."""
  section, _, key = name.rpartition(".")
  if section == "model.architecture" and key in ARCHITECTURE:
    return ARCHITECTURE[key]
  if section == "task_args":
    return next((rules[key] for rules in TASK_ARGS.values() if key in rules), None)
  return SCHEMA[name] if name in SCHEMA else None


def _rules(flat: Mapping[str, Any]) -> dict[str, Rule]:
  """The rules for this config: those of every config, of its task, and of a new model if it makes one."""
  rules = dict(SCHEMA)
  task = flat.get("task")
  if isinstance(task, str) and is_task_file(task):  # its class says what it takes, when it is made
    for name, value in flat.items():
      if name.startswith("task_args."):
        rules[name] = Rule(type(value), lambda value: True, "")
  elif isinstance(task, str):
    rules.update({f"task_args.{key}": rule for key, rule in TASK_ARGS.get(task, {}).items()})
  if not flat.get("model.path") or any(name.startswith("model.architecture.") for name in flat):
    rules.update({f"model.architecture.{key}": rule for key, rule in ARCHITECTURE.items()})
  return rules


def check_keys(flat: Mapping[str, Any]) -> dict[str, str]:
  """Wrong names and values one by one: {key: error line}."""
  rules, problems = _rules(flat), {}
  for name in flat:
    line = unknown_key(name, rules)
    if line:
      problems[name] = line
  for name, rule in rules.items():
    if name not in flat:
      problems[name] = f"{name} is missing: every config sets every key; it must be {rule.text}"
      continue
    value = flat[name]
    if type(value) not in _STANDS_FOR.get(rule.kind, (rule.kind,)):
      problems[name] = f"{name}={value!r} must be {rule.text}"
    elif not rule.holds(value):
      close = difflib.get_close_matches(value, rule.names, n=1) if len(rule.names) > 1 else ()
      problems[name] = f"{name}={value!r} must be {rule.text}" + (f"; did you mean {close[0]}?" if close else "")
  return problems

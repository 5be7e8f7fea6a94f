"""Trains a model with TBA: python -m tba_jax.main --config=configs/quickstart.py --workdir=runs/quickstart

Every key of the config is a flag of its own: --config.train.steps=100. The same command again resumes, Ctrl-C stops
with a checkpoint. Exit codes: 0 done, or stopped on request; 1 a fault; 2 bad input.

  python -m tba_jax.main --config=configs/quickstart.py:smoke --workdir=runs/smoke    tries every part in seconds
  python -m tba_jax.main --config=configs/gsm8k.py --dry_run                          checks, prints bytes, ends
  python -m tba_jax.report runs/quickstart                                            a page to look at, also meanwhile
  python -m tba_jax.export --workdir=runs/quickstart --out=exported                   a model folder for transformers
  python -m tba_jax.evaluate --workdir=runs/quickstart --out=evaluation               accuracy, pass@k, maj@k
  python -m tba_jax.plan --config=configs/gsm8k.py --topology=v5e:2x4                 a run on a slice, without it

What docs/troubleshooting.md lists are the messages of a run that goes wrong.

Flags:
"""

# Here are the flags, and what jax must be told before it looks for devices. Bad flags are answered before jax is
# imported, all of them at once.

from __future__ import annotations

import importlib.util
import os
import pathlib
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from absl import app, flags, logging
from ml_collections import config_flags

from tba_jax import config as config_lib
from tba_jax import config_schema
from tba_jax import host_memory

BAD_INPUT = 2
_OWN_FLAGS = ("config", "workdir", "dry_run", "print_config")

# What the config's flag takes its keys from; parse_flags fills it.
_ARGV: list[str] = []
_CONFIG = config_flags.DEFINE_config_file(
  "config", None, "A config file, perhaps with an argument: configs/gsm8k.py:smollm2. --config.KEY=VALUE sets one key.",
  lock_config=True, sys_argv=_ARGV,
)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for all that the run writes; the same one again resumes.")
_DRY_RUN = flags.DEFINE_boolean("dry_run", False, "Check everything, print devices and bytes; compile nothing.")
_PRINT_CONFIG = flags.DEFINE_boolean("print_config", False, "Print the resolved config as JSON and stop.")


def fail(problems: Sequence[str]) -> NoReturn:
  """Ends the process as bad input does: one line per mistake on stderr, exit code 2."""
  for problem in problems:
    print(f"error: {problem}", file=sys.stderr)
  sys.exit(BAD_INPUT)


# --- Flags ---


def _name(argument: str) -> str:
  """train.steps of --train.steps=3; "" of what is no flag."""
  return argument.lstrip("-").partition("=")[0] if argument.startswith("-") else ""


def _config_first(argv: Sequence[str]) -> tuple[list[str], str | None]:
  """argv with --config=FILE first, as ml_collections wants it, and FILE, which may be an argument of its own."""
  first, rest, path = [], [], None
  arguments = iter(argv[1:])
  for argument in arguments:
    if _name(argument) == "config":
      path = argument.partition("=")[2] if "=" in argument else next(arguments, None)
      first = [f"--config={path}"]
    else:
      rest.append(argument)
  return [argv[0], *first, *rest], path


def _load_config(path_and_arg: str | None) -> Any:
  """The config of FILE[:ARGUMENT] before any --config.KEY. Fails with exit code 2; a bug in FILE raises."""
  if not path_and_arg:
    fail(["--config is missing; give a config file, for example --config=configs/quickstart.py"])
  path, _, arg = path_and_arg.partition(":")
  if not pathlib.Path(path).is_file() or not path.endswith(".py"):
    fail([f"--config={path} is not a Python file that exists; give one, for example --config=configs/quickstart.py"])
  spec = importlib.util.spec_from_file_location("tba_jax_config_file", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  if not callable(getattr(module, "get_config", None)):
    fail([f"--config={path} has no function get_config, which makes the config; see configs/quickstart.py for one"])
  try:
    return module.get_config(arg or None)
  except config_lib.ConfigError as error:
    fail(error.problems)


def _key_problem(name: str, values: Mapping[str, Any]) -> str | None:
  """What is wrong with the name of a flag as a key of the config; None if nothing is, or if it is no such flag."""
  if not name.startswith(("config.", "noconfig.")):
    return None
  key = name.partition(".")[2]
  line = config_schema.unknown_key(key, values)
  if line:
    return "--config." + line.replace("did you mean ", "did you mean --config.")
  if key not in values:
    first = next(other for other in values if other.startswith(key + "."))
    return f"--{name} names a section; set its keys one by one, for example --config.{first}"
  if name.startswith("no") and not isinstance(values[key], bool):
    return f"--{name}: only keys that are true or false have a no form; write --config.{key}=VALUE"
  return None


def _print_keys(path_and_arg: str | None) -> None:
  """The keys of a config as flags, each with its value and meaning, for the help."""
  if not path_and_arg:
    print("\nWith --config=FILE beside --help all keys of that config are listed; docs/config.md describes them, too.")
    return
  print(f"\nKeys of {path_and_arg}, with their values there:")
  for key, value in config_schema.flatten(_load_config(path_and_arg)).items():
    rule = config_schema.rule_of(key)
    print(f"  --config.{key}={value!r}" + (f"\n      {rule.meaning}; {rule.text}" if rule else ""))


def parse_flags(
  argv: Sequence[str], *, own: Sequence[str] = _OWN_FLAGS, usage: str | None = __doc__, needs_workdir: bool = True
) -> list[str]:
  """Reads the flags, or ends with exit code 2 and every mistake among them. Returns argv[:1]: only flags are allowed.

  `own`: the flags that are no keys of the config; `usage` heads them in the help.

  absl and ml_collections stop at the first mistake, each in its own words. So names of keys are checked here against
  the config, and a value of the wrong type is noted and taken out before the rest is read.
  """
  if any(_name(argument) in ("help", "helpfull", "helpshort") for argument in argv):
    print(usage, *(f"  --{name}: {flags.FLAGS[name].help}" for name in own), sep="\n")
    _print_keys(_config_first(argv)[1])
    sys.exit(0)
  argv, path = _config_first(argv)
  values = config_schema.flatten(_load_config(path))
  problems = []
  for argument in argv[1:]:
    line = _key_problem(_name(argument), values)
    if line:
      problems.append(line)
      argv = [other for other in argv if other != argument]
  rest = None
  while rest is None:
    _ARGV[:] = argv
    for name in [name for name in flags.FLAGS if name.startswith("config.")]:
      delattr(flags.FLAGS, name)  # of the attempt before, or they would be defined twice
    try:
      rest = flags.FLAGS(argv)
    except flags.Error as error:
      line, culprits = _explain(error, argv, own)
      problems.append(line)
      argv = [argument for argument in argv if argument not in culprits]
      if not culprits:
        break
  if not problems:
    problems += [f"argument {extra!r} is not a flag; write --name=value" for extra in rest[1:]]
    if needs_workdir and not _WORKDIR.value and not (_PRINT_CONFIG.value or _DRY_RUN.value):
      problems.append("--workdir is missing; give a folder for the run's files, for example --workdir=runs/quickstart")
  if problems:
    fail(problems)
  return rest


def _explain(error: flags.Error, argv: Sequence[str], own: Sequence[str]) -> tuple[str, list[str]]:
  """One line about a flag that could not be read, and the arguments to take out so that the rest can be."""
  if isinstance(error, flags.UnrecognizedFlagError):
    line = f"--{error.flagname} is not a flag" + config_schema.nearest(error.flagname, own, prefix="--")
    return line, [argument for argument in argv[1:] if _name(argument) == error.flagname]
  found = re.match(r"flag --([^=]+)=(.*?): (.*)", str(error), re.DOTALL)
  if not found:
    return str(error), []
  name, value, reason = found.groups()
  key = name.removeprefix("config.")
  rule = config_schema.rule_of(key) if key != name else None
  line = f"--{name}={value} must be {rule.text}" if rule else f"--{name}={value}: {reason}"
  return line, [argument for argument in argv[1:] if argument.lstrip("-") == f"{name}={value}"]


def config_of_flags() -> Any:
  """The config that `parse_flags` read."""
  return _CONFIG.value


def config_path(argv: Sequence[str]) -> str:
  """FILE[:ARGUMENT] of --config."""
  return _config_first(argv)[1] or ""


# --- Before jax looks for devices ---


def set_up_jax(devices: Any, *, backend: str = "local") -> None:
  """Makes the CPU devices that the config counts, and keeps compiled programs for the next run; where there are only
  CPUs also what the process frees, see `host_memory`.

  Compiled programs go to JAX_COMPILATION_CACHE_DIR if that is set, else to the user's cache folder ($XDG_CACHE_HOME
  or ~/.cache) under tba_jax/xla, by machine: a program compiled for one CPU may hold instructions that another lacks,
  and home folders are shared. Nothing in the folder is needed; it may be deleted at any time.
  """
  import jax

  if host_memory.only_cpu():
    host_memory.keep_freed_memory()
  if backend == "ray":
    from tba_jax.runtime import cluster

    cluster.keep_to_this_host(devices["trainer"], os.environ)
  num_cpu_devices = config_lib.num_virtual_devices(devices, backend=backend)
  if num_cpu_devices:
    jax.config.update("jax_num_cpu_devices", num_cpu_devices)
  if jax.config.jax_compilation_cache_dir is None:
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla" / platform.node()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


def cache_folder() -> pathlib.Path:
  """The user's cache folder ($XDG_CACHE_HOME or ~/.cache) under tba_jax. Nothing in it is needed."""
  in_home = pathlib.Path.home() / ".cache"
  return (pathlib.Path(os.environ["XDG_CACHE_HOME"]) if "XDG_CACHE_HOME" in os.environ else in_home) / "tba_jax"


def _dry_run(config: Any) -> None:
  """Prints devices and bytes, from shapes. Raises: ConfigError if that is more than there is, as a run would."""
  import jax

  from tba_jax import build, placement

  cfg = build.model_config(config)
  placed = build.placements(config, cfg, jax.devices())
  num_devices, platform_name = jax.device_count(), jax.default_backend()
  print(placement.report(cfg, placed, num_devices=num_devices, platform=platform_name), flush=True)
  build.refuse_overflow(placed, jax.devices())


def main(argv: Sequence[str]) -> int:
  """Checks, then trains. Returns the exit code."""
  del argv  # parse_flags has refused everything but flags
  config, workdir = _CONFIG.value, _WORKDIR.value
  if _PRINT_CONFIG.value:
    print(config_lib.to_json(config), end="")
    return 0
  problems = []
  try:
    if workdir:
      config_lib.check_workdir(workdir, config)
  except config_lib.ConfigError as error:
    problems += error.problems
  logging.set_verbosity(logging.WARNING)  # jax reports every kind of device that it does not find
  set_up_jax(config.devices, backend=config.runtime.backend)
  import jax

  try:
    config_lib.validate(config, num_devices=jax.device_count(), platform=jax.default_backend())
  except config_lib.ConfigError as error:
    problems += error.problems
  if problems:
    fail(problems)
  try:
    if _DRY_RUN.value:
      _dry_run(config)
      return 0
    from tba_jax import train

    return train.run(config, workdir)
  except config_lib.ConfigError as error:
    fail(error.problems)


if __name__ == "__main__":
  app.run(main, flags_parser=parse_flags)

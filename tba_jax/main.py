"""Trains a model with TBA: python -m tba_jax.main --config=configs/quickstart.py --workdir=runs/quickstart

Every key of the config is a flag of its own: --config.train.steps=100. The same command again resumes, Ctrl-C stops
with a checkpoint. Exit codes: 0 done, or stopped on request; 1 a fault; 2 bad input.

  python -m tba_jax.main --config=configs/quickstart.py:smoke --workdir=runs/smoke    tries every part in seconds
  python -m tba_jax.main --config=configs/gsm8k.py --dry_run                          checks, prints bytes, ends
  python -m tba_jax.report runs/quickstart                                            a page to look at, also meanwhile
  python -m tba_jax.export --workdir=runs/quickstart --out=exported                   a model folder for transformers
  python -m tba_jax.evaluate --workdir=runs/quickstart --out=evaluation               accuracy, pass@k, maj@k
  python -m tba_jax.plan --config=configs/gsm8k.py --topology=v5e:2x4                 a run on a slice, without it

docs/troubleshooting.md explains the error messages.

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
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from absl import app, flags, logging
from ml_collections import config_flags

from tba_jax import config as config_lib
from tba_jax import config_schema
from tba_jax import host_memory
from tba_jax.runtime import supervise

if TYPE_CHECKING:
  from tba_jax.runtime.world import World

BAD_INPUT = 2
_OWN_FLAGS = ("config", "workdir", "dry_run", "print_config", "coordinator", "num_processes", "process_id", "restarts",
              "trainer_slice")

# What the config's flag takes its keys from; parse_flags fills it.
_ARGV: list[str] = []
_CONFIG = config_flags.DEFINE_config_file(
  "config", None, "A config file, perhaps with an argument: configs/gsm8k.py:smollm2. --config.KEY=VALUE sets one key.",
  lock_config=True, sys_argv=_ARGV,
)
_WORKDIR = flags.DEFINE_string(
  "workdir", None, "Folder for all that the run writes, or gs://BUCKET/FOLDER; the same one again resumes.")
_DRY_RUN = flags.DEFINE_boolean("dry_run", False, "Check everything, print devices and bytes; compile nothing.")
_PRINT_CONFIG = flags.DEFINE_boolean("print_config", False, "Print the resolved config as JSON and stop.")
_COORDINATOR = flags.DEFINE_string(
  "coordinator", "", "HOST:PORT of process 0, where the processes of one trainer meet; auto: what a TPU slice or "
  "Slurm says. Empty: this process alone.")
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", 0, "With --coordinator=HOST:PORT: processes of the trainer.")
_PROCESS_ID = flags.DEFINE_integer("process_id", -1, "With --coordinator=HOST:PORT: which of them this is, from 0.")
_SLICE = flags.DEFINE_string(
  "trainer_slice", "", "KIND:TOPOLOGY of a TPU slice of the Ray cluster, as v6e:4x4: Ray reserves one and the "
  "trainer's processes are started on its hosts. Empty: here.")
_RESTARTS = flags.DEFINE_integer(
  "restarts", None, f"A trainer's process that is killed is started again from the last checkpoint, so often in a row "
  f"without a newer one. By default {supervise.RESTARTS} with runtime.backend=ray or --coordinator, else 0.",
  lower_bound=0)


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
  try:
    spec.loader.exec_module(module)
  except SyntaxError as error:
    where = f"--config={path}" if error.filename == path else error.filename
    fail([f"{where} is not Python: line {error.lineno}: {error.msg}: {(error.text or '').strip()}"])
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
    if "coordinator" in own:
      problems += [*_wrong_processes(), *_wrong_slice()]
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


def set_up_jax(devices: Any, *, backend: str = "local", num_processes: int = 1) -> None:
  """Makes the CPU devices that the config counts, and keeps compiled programs for the next run; where there are only
  CPUs also what the process frees, see `host_memory`.

  Compiled programs go to JAX_COMPILATION_CACHE_DIR if that is set, else to the user's cache folder ($XDG_CACHE_HOME
  or ~/.cache) under tba_jax/xla, by machine: a program compiled for one CPU may hold instructions that another lacks,
  and home folders are shared. Nothing in the folder is needed; it may be deleted at any time.
  """
  import jax

  if host_memory.only_cpu():
    host_memory.keep_freed_memory()
  if backend == "ray" and num_processes == 1:
    from tba_jax.runtime import cluster

    cluster.keep_to_this_host(devices["trainer"], os.environ)
  num_cpu_devices = config_lib.num_virtual_devices(devices, backend=backend, num_processes=num_processes)
  if num_cpu_devices:
    jax.config.update("jax_num_cpu_devices", num_cpu_devices)
  if jax.config.jax_compilation_cache_dir is None:
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla" / platform.node()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


def cache_folder() -> pathlib.Path:
  """The user's cache folder ($XDG_CACHE_HOME or ~/.cache) under tba_jax. Nothing in it is needed."""
  in_home = pathlib.Path.home() / ".cache"
  return (pathlib.Path(os.environ["XDG_CACHE_HOME"]) if "XDG_CACHE_HOME" in os.environ else in_home) / "tba_jax"


class _Processes(NamedTuple):
  """Where the trainer's processes meet ("": it is alone), how many they are, which this is, and its devices if not all.
  """

  address: str = ""
  number: int = 1
  own_id: int = 0
  local_device_ids: Sequence[int] | None = None


def _wrong_processes() -> Iterator[str]:
  """What does not fit in the flags of them."""
  address, number, own_id = _COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value
  if address in ("", "auto"):
    if number or own_id != -1:
      yield (f"--num_processes and --process_id go with --coordinator=HOST:PORT, found --coordinator={address}; give "
             "the address of process 0")
    return
  host, _, port = address.rpartition(":")
  if not (host and port.isdecimal() and 0 < int(port) < 2**16):
    yield f"--coordinator={address} must be HOST:PORT, of the machine that process 0 runs on, or auto"
  if number < 2:
    yield (f"--num_processes={number} must be at least 2 with --coordinator; leave both out for a trainer of one "
           "process")
  elif not 0 <= own_id < number:
    yield f"--process_id={own_id} must be from 0 to {number - 1}, another for each process"


def _wrong_slice() -> Iterator[str]:
  """What does not fit to a slice of Ray's."""
  from tba_jax.runtime import on_slice

  runtime = _CONFIG.value.runtime
  try:
    on_slice.parse(_SLICE.value or "v6e:4x4")
  except ValueError as error:
    yield f"--trainer_slice={error}"
  if _SLICE.value and (runtime.backend != "ray" or not runtime.ray_address):
    yield (f"--trainer_slice={_SLICE.value} is reserved in a Ray cluster; give --config.runtime.backend=ray "
           "--config.runtime.ray_address=auto, too")
  if _SLICE.value and _COORDINATOR.value:
    yield f"--trainer_slice={_SLICE.value} starts the processes itself; leave out --coordinator={_COORDINATOR.value}"


def _processes(backend: str) -> _Processes:
  """What the flags say of them. Raises: ConfigError if the environment is to say it and does not, or if this process
  would wait alone for the other hosts of a slice."""
  if not _COORDINATOR.value:
    number = 1 if backend == "ray" else _num_hosts_of_slice()
    if number > 1:
      raise config_lib.ConfigError([
        f"this machine is one of {number} of a TPU slice, whose chips wait for each other; start on each of them, "
        f"within 20 s,\n  {_command('--coordinator=auto')}\nor have searchers on the others by Ray (docs/cloud_tpu.md)"])
    return _Processes()
  if _COORDINATOR.value == "auto":
    return _of_environment()
  return _Processes(_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value)


def _num_hosts_of_slice() -> int:
  """Hosts of the TPU slice that this machine is in; 1 without one, or where jax is told to leave it alone."""
  from jax._src.clusters import cloud_tpu_cluster  # jax has no public name for it

  if "TPU_PROCESS_BOUNDS" in os.environ or os.environ.get("JAX_PLATFORMS") == "cpu":
    return 1
  for cluster in (cloud_tpu_cluster.GkeTpuCluster, cloud_tpu_cluster.GceTpuCluster):
    try:
      if cluster.is_env_present():
        return cluster.get_process_count()
    except (OSError, RuntimeError, ValueError):  # no answer of the cloud's metadata
      return 1
  return 1


def _command(*asked: str) -> str:
  """This command, with other flags for the trainer's processes."""
  given = ("coordinator", "num_processes", "process_id")
  return " ".join(["python -m tba_jax.main", *(arg for arg in sys.argv[1:] if _name(arg) not in given), *asked])


def _of_environment() -> _Processes:
  """As jax.distributed.initialize() finds them: of a TPU slice, or of Slurm."""
  from jax._src.clusters import ClusterEnv  # jax has no public name for it

  try:
    found = _Processes(*ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, 20))
    reason = "none is known here"
  except (OSError, RuntimeError, ValueError, KeyError) as error:
    found, reason = _Processes(None), str(error)
  if not found.address:
    raise config_lib.ConfigError([f"--coordinator=auto found no TPU slice and no Slurm job ({reason}); give "
                                  "--coordinator=HOST:PORT --num_processes=N --process_id=I to each process"])
  return found if found.number > 1 else _Processes()


def _meet(config: Any, processes: _Processes, *, is_supervised: bool) -> World:
  """The processes of the trainer, with jax.distributed among them. Raises: ConfigError if they do not come together."""
  import jax

  from tba_jax.runtime import world as world_lib

  def command(number: int) -> str:
    return _command("--coordinator=auto") if _COORDINATOR.value == "auto" else _command(
      f"--coordinator={processes.address}", f"--num_processes={processes.number}", f"--process_id={number}")

  try:
    world = world_lib.meet(
      processes.address, num_processes=processes.number, process_id=processes.own_id,
      identity=config_lib.to_json(config), command=command, say=_say,
      lost_code=supervise.GONE if is_supervised else world_lib.FAULT)
  except world_lib.CannotMeet as error:
    raise config_lib.ConfigError([str(error)]) from None
  jax.distributed.initialize(
    world.jax_address, processes.number, processes.own_id, local_device_ids=processes.local_device_ids,
    cluster_detection_method="deactivate", initialization_timeout=120, shutdown_timeout_seconds=30)
  # All processes tell each other of their devices, so each has to ask; the answer may come from a TPU's own runtime.
  if jax.process_index() != processes.own_id:
    raise config_lib.ConfigError([f"--process_id={processes.own_id} is number {jax.process_index()} by its devices; give "
                                  "it that one, or all --coordinator=auto"])
  return world


def _num_restarts(config: Any) -> int:
  """Of --restarts."""
  if _RESTARTS.value is not None:
    return _RESTARTS.value
  return supervise.RESTARTS if config.runtime.backend == "ray" or _COORDINATOR.value else 0


def _folder(workdir: str) -> pathlib.Path:
  """Of this machine; where a workdir in a bucket is kept, too."""
  from tba_jax.remote_workdir import store

  return store.local_folder(workdir, cache_folder()) if _is_remote(workdir) else pathlib.Path(workdir).expanduser()


def _say(text: str) -> None:
  print(text, file=sys.stderr, flush=True)


def _on_slice(config: Any, workdir: str, restarts: int) -> int:
  """The trainer's processes on a slice that Ray reserves; a dry run says which those would be."""
  from tba_jax.runtime import on_slice

  try:
    asked = on_slice.parse(_SLICE.value)
    number, resources = on_slice.bundles(asked)
    if _DRY_RUN.value:
      print(f"trainer: a slice {asked}, {number} processes, one a host with {resources}")
      for i in range(number):
        print("  python", *on_slice.command(sys.argv[1:], address="HOST0:PORT", num_processes=number, process_id=i))
      return 0
    with on_slice.reserved(asked, ray_address=config.runtime.ray_address, arguments=sys.argv[1:],
                           workdir=_folder(workdir).absolute(), say=_say) as job:
      return supervise.supervise(job, restarts=restarts, say=_say)
  except ValueError as error:
    fail([f"--trainer_slice={_SLICE.value}: {error}"])


def _dry_run(config: Any) -> None:
  """Prints devices and bytes, from shapes. Raises: ConfigError if that is more than there is, as a run would."""
  import jax

  from tba_jax import build, placement

  cfg = build.model_config(config)
  placed = build.placements(config, cfg, jax.devices(), num_processes=jax.process_count())
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
  is_child, restarts = supervise.is_child(), _num_restarts(config)
  if _SLICE.value:
    return _on_slice(config, workdir, restarts)
  if restarts and not is_child and not _DRY_RUN.value:
    job = supervise.Child([sys.executable, "-m", "tba_jax.main", *sys.argv[1:]], workdir=_folder(workdir))
    return supervise.supervise(job, restarts=restarts, say=_say)
  logging.set_verbosity(logging.WARNING)  # jax reports every kind of device that it does not find
  try:
    processes = _processes(config.runtime.backend)
    set_up_jax(config.devices, backend=config.runtime.backend, num_processes=processes.number)
    world = _meet(config, processes, is_supervised=is_child) if processes.address else None
    return _run(config, workdir, None) if world is None else _run_together(config, workdir, world)
  except config_lib.ConfigError as error:
    fail(error.problems)


def _run_together(config: Any, workdir: str, world: World) -> int:
  """`_run` of one of several processes, which end together."""
  import jax

  code, text = 1, ""
  try:
    code = _run(config, workdir, world)
    return code
  except config_lib.ConfigError as error:
    code, text = BAD_INPUT, "\n".join(f"error: {problem}" for problem in error.problems)
    raise
  finally:
    if world.is_head:
      world.close(code, text)
    else:
      world.goodbye()
    jax.distributed.shutdown()


def _run(config: Any, workdir: str, world: World | None) -> int:
  """Checks, then trains. Raises: ConfigError. `world`: the processes of the trainer, None if it has one."""
  import jax

  if world is not None and not world.is_head:
    from tba_jax import train

    return train.run(config, workdir, world=world)
  problems, num_processes = [], jax.process_count()
  if jax.device_count() != num_processes * jax.local_device_count():
    problems.append(f"{jax.device_count()} devices are not spread evenly over {num_processes} processes, process 0 has "
                    f"{jax.local_device_count()}; give each process as many")
  for check in (
    lambda: _check_workdir(workdir, config) if workdir else None,
    lambda: config_lib.validate(config, num_devices=jax.local_device_count(), platform=jax.default_backend(),
                                num_processes=num_processes),
  ):
    try:
      check()
    except config_lib.ConfigError as error:
      problems += error.problems
  if problems:
    raise config_lib.ConfigError(problems)
  if _DRY_RUN.value:
    _dry_run(config)
    return 0
  if _is_remote(workdir):
    return _run_mirrored(config, workdir, world)
  from tba_jax import train

  return train.run(config, workdir, world=world)


def _is_remote(workdir: str | None) -> bool:
  from tba_jax.remote_workdir import store

  return store.is_remote(workdir)


def _check_workdir(workdir: str, config: Any) -> None:
  """Raises: ConfigError if the workdir, here or in a bucket, is of another config, or cannot be used."""
  from tba_jax.remote_workdir import fetch, store

  if not store.is_remote(workdir):
    config_lib.check_workdir(workdir, config)
    return
  try:
    with fetch.copy_of_config(workdir) as folder:
      config_lib.check_workdir(workdir, config, folder=folder)
  except store.RemoteError as error:
    raise config_lib.ConfigError([str(error)]) from error


def _run_mirrored(config: Any, workdir: str, world: World | None) -> int:
  """A run whose workdir is in a bucket: it works in a folder of this machine. Exit code 1 if not all of it got there.
  """
  from tba_jax import train
  from tba_jax.remote_workdir import fetch, store
  from tba_jax.workdir import say

  try:
    with fetch.mirrored(workdir, cache_folder(), say=say) as (folder, finish):
      config_lib.check_workdir(workdir, config, folder=folder)
      code = train.run(config, str(folder), world=world)
      return code if finish() else code or train.FAULT
  except store.RemoteError as error:
    raise config_lib.ConfigError([str(error)]) from error


if __name__ == "__main__":
  app.run(main, flags_parser=parse_flags)

"""The command: what bad input says, how fast, and with which exit code. Training itself is tested elsewhere."""

import os
import pathlib
import subprocess
import sys

import pytest

REPO = pathlib.Path(__file__).resolve().parent.parent

# Stands in for training: says what it was given, and ends as asked.
FAKE_TRAIN = """
import os, sys, types
import jax
from tba_jax import config as config_lib
def run(config, workdir, world):
  print("run", config.train.steps, workdir, jax.device_count(), jax.config.jax_compilation_cache_dir)
  if os.environ["END"] == "config":
    raise config_lib.ConfigError(["task: train.jsonl, line 3: not JSON", "second"])
  if os.environ["END"] == "crash":
    raise RuntimeError("boom")
  return int(os.environ["END"])
sys.modules["tba_jax.train"] = types.SimpleNamespace(run=run)
from absl import app
from tba_jax import main
app.run(main.main, flags_parser=main.parse_flags)
"""


def _run(*arguments, program=("-m", "tba_jax.main"), **environment):
  own = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
  variables = {**own, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", **environment}
  return subprocess.run([sys.executable, *program, *arguments], cwd=REPO, env=variables, capture_output=True, text=True,
                        timeout=120)


def _errors(result):
  """Lines of a run that refused its input: nothing else may be on stderr."""
  assert result.returncode == 2, result.stderr
  lines = result.stderr.splitlines()
  assert lines and all(line.startswith("error: ") for line in lines), result.stderr
  return [line.removeprefix("error: ") for line in lines]


QUICKSTART, WORKDIR = "--config=configs/quickstart.py", "--workdir=never_made"


@pytest.mark.parametrize("arguments, lines", [
  ([QUICKSTART, WORKDIR, "--config.trian.steps=3"],
   ["--config.trian.steps is not a key of this config; did you mean --config.train.steps?"]),
  ([QUICKSTART, WORKDIR, "--config.train.stepz=3", "--wrkdir=x", "--config.train.steps=abc", "--config.seed=1.5",
    "--config.buffer.dedup=maybe", "--config.sample.slotz", "4"],
   ["--config.train.stepz is not a key of this config; did you mean --config.train.steps?",
    "--config.sample.slotz is not a key of this config; did you mean --config.sample.slots?",
    "--config.train.steps=abc must be an integer of at least 0 (0: fine-tuning alone)",
    "--config.seed=1.5 must be an integer from 0 to 4294967295",
    "--config.buffer.dedup=maybe must be true or false",
    "--wrkdir is not a flag; did you mean --workdir?"]),
  ([QUICKSTART, WORKDIR, "--config.model.architecture.num_layers=two", "--config.task_args.num_train_prompts=x",
    "--config.train.learning_rate=fast", "--config.train.length_buckets=(4,", "--dry_run=3"],
   ["--config.model.architecture.num_layers=two must be an integer of at least 1",
    "--config.task_args.num_train_prompts=x must be an integer of at least 1",
    "--config.train.learning_rate=fast must be a finite number above 0",
    "--config.train.length_buckets=(4, must be a tuple of ascending integers, as (128,256)",
    "--dry_run=3: ('Non-boolean argument to boolean flag', '3')"]),
  ([QUICKSTART, WORKDIR, "--config.train=3", "--noconfig.seed", "--noconfig.sample.inflight"],
   ["--config.train names a section; set its keys one by one, for example --config.train.attention",
    "--noconfig.seed: only keys that are true or false have a no form; write --config.seed=VALUE",
    "--config.sample.inflight is not a key of this config; did you mean --config.sample.in_flight?"]),
  ([QUICKSTART, "extra"],
   ["argument 'extra' is not a flag; write --name=value",
    "--workdir is missing; give a folder for the run's files, for example --workdir=runs/quickstart"]),
  ([WORKDIR], ["--config is missing; give a config file, for example --config=configs/quickstart.py"]),
  (["--config=configs/quikstart.py", WORKDIR],
   ["--config=configs/quikstart.py is not a Python file that exists; give one, for example "
    "--config=configs/quickstart.py"]),
  (["--config=configs/quickstart.py:smoek", WORKDIR], ["config argument 'smoek' is not known; did you mean smoke?"]),
  ([QUICKSTART, WORKDIR, "--num_processes=2"],
   ["--num_processes and --process_id go with --coordinator=HOST:PORT, found --coordinator=; give the address of "
    "process 0"]),
  ([QUICKSTART, WORKDIR, "--coordinator=head", "--num_processes=1"],
   ["--coordinator=head must be HOST:PORT, of the machine that process 0 runs on, or auto",
    "--num_processes=1 must be at least 2 with --coordinator; leave both out for a trainer of one process"]),
  ([QUICKSTART, WORKDIR, "--coordinator=head:99", "--num_processes=4", "--process_id=4"],
   ["--process_id=4 must be from 0 to 3, another for each process"]),
  ([QUICKSTART, WORKDIR, "--restarts=-1"], ["--restarts=-1: -1 is not a non-negative integer"]),
  ([QUICKSTART, WORKDIR, "--trainer_slice=v6e16", "--coordinator=auto"],
   ["--trainer_slice=v6e16 must be KIND:TOPOLOGY, for example v6e:4x4 or v5p:2x2x2",
    "--trainer_slice=v6e16 is reserved in a Ray cluster; give --config.runtime.backend=ray "
    "--config.runtime.ray_address=auto, too",
    "--trainer_slice=v6e16 starts the processes itself; leave out --coordinator=auto"]),
  ([QUICKSTART, WORKDIR, "--config.train.steps"], ["Missing value for flag --config.train.steps"]),
])
def test_bad_flags_are_all_named_in_one_go_without_jax(arguments, lines, tmp_path):
  # An import of jax would fail: a bad flag must not wait for it.
  (tmp_path / "jax.py").write_text("raise ImportError('jax was imported')")
  assert _errors(_run(*arguments, PYTHONPATH=str(tmp_path))) == lines
  assert not (REPO / "never_made").exists()


def test_a_url_that_names_no_folder_of_a_bucket_is_refused_with_the_rest():
  lines = _errors(_run(QUICKSTART, "--workdir=gs://bucket", "--config.model.path=/nowhere"))
  assert lines[0] == "workdir='gs://bucket' must be gs://BUCKET/FOLDER, a folder in a bucket"
  assert lines[1].startswith("model.path='/nowhere'")


def test_bug_in_a_config_file_keeps_its_traceback(tmp_path):
  (tmp_path / "broken.py").write_text("def get_config(arg=None):\n  return undefined_name\n")
  result = _run(f"--config={tmp_path}/broken.py", WORKDIR)
  assert result.returncode == 1 and "NameError: name 'undefined_name'" in result.stderr


def test_a_config_file_that_is_not_python_is_refused_in_one_line(tmp_path):
  (tmp_path / "broken.py").write_text("def get_config(arg=None):\n  return dict(seed=0\n")
  (line,) = _errors(_run(f"--config={tmp_path}/broken.py", WORKDIR))
  assert line.startswith(f"--config={tmp_path}/broken.py is not Python: line 2: ") and "dict(seed=0" in line


def test_a_file_that_makes_no_config_is_refused_in_one_line(tmp_path):
  for text in ("VALUE = 3\n", "get_config = {}\n"):
    (tmp_path / "plain.py").write_text(text)
    assert _errors(_run(f"--config={tmp_path}/plain.py", WORKDIR)) == [
      f"--config={tmp_path}/plain.py has no function get_config, which makes the config; see configs/quickstart.py for "
      "one"]


def test_without_a_slice_the_processes_are_not_found():
  lines = _errors(_run(QUICKSTART, WORKDIR, "--coordinator=auto"))
  assert lines == ["--coordinator=auto found no TPU slice and no Slurm job (none is known here); give "
                   "--coordinator=HOST:PORT --num_processes=N --process_id=I to each process"]


def test_a_process_alone_on_a_slice_of_several_hosts_ends_with_the_command(tmp_path):
  # What jax finds on a host of a slice, without chips.
  env = {"JAX_FORCE_TPU_INIT": "1", "TPU_WORKER_HOSTNAMES": "host0,host1,host2,host3", "TPU_WORKER_ID": "2",
         "MEGASCALE_NUM_SLICES": "1"}
  flags = (QUICKSTART, f"--workdir={tmp_path}/run", "--config.model.path=/nowhere")
  alone = _run(*flags, JAX_PLATFORMS="", **env)
  assert alone.returncode == 2 and alone.stderr.splitlines()[:2] == [
    "error: this machine is one of 4 of a TPU slice, whose chips wait for each other; start on each of them, within "
    "20 s,",
    f"  python -m tba_jax.main {' '.join(flags)} --coordinator=auto"]
  assert "model.path='/nowhere'" in _errors(_run(*flags, **env))[0]  # JAX_PLATFORMS=cpu


def test_mistakes_of_config_and_workdir_together(tmp_path):
  (tmp_path / "config.json").write_text('{"seed": 7}')
  lines = _errors(_run(QUICKSTART, f"--workdir={tmp_path}", "--config.train.micro_batches=3", "--config.loss.name=tb",
                       "--config.devices.trainer=4", "--config.model.path=./nowhere"))
  assert lines[0] == f"workdir='{tmp_path}' belongs to another config; give another --workdir, or what the run has:"
  assert "  seed: the run has 7, given is 0" in lines
  assert [line.split("=")[0] for line in lines if not line.startswith("  ")][1:] == [
    "train.micro_batches", "loss.name", "model.path"]


def test_print_config_with_the_config_named_last_and_in_two_arguments():
  result = _run("--config.train.steps=5", "--noconfig.sample.in_flight", "--print_config", "--config",
                "configs/gsm8k.py")
  assert result.returncode == 0 and '"in_flight": false' in result.stdout and '"steps": 5' in result.stdout


def test_help_names_the_flags_the_other_commands_and_the_keys():
  result = _run("--help")
  assert result.returncode == 0 and "--workdir: Folder for all" in result.stdout
  for command in ("report", "export", "evaluate", "plan"):
    assert f"python -m tba_jax.{command} " in result.stdout
  assert "With --config=FILE beside --help" in result.stdout
  result = _run("--help", QUICKSTART)
  assert result.returncode == 0 and "--config.train.steps=120\n      optimizer steps of TBA; an integer of at least 0" in (
    result.stdout)
  assert "--config.task_args.num_train_prompts=4096\n      problems for TBA; an integer" in result.stdout


def test_dry_run_prints_devices_and_bytes_and_writes_nothing(tmp_path):
  result = _run(QUICKSTART, "--dry_run", f"--workdir={tmp_path}/run", "--config.model.architecture.num_layers=3",
                "--config.reference.reset_every_steps=50", "--config.reference.ema_decay=0.9",
                XDG_CACHE_HOME=str(tmp_path / "cache"))
  assert result.returncode == 0, result.stderr
  rows = {line[:12].strip() + ": " + line[24:70].strip(): [int(n) for n in line[70:].replace(",", "").split()]
          for line in result.stdout.splitlines() if line[:12].strip() in ("trainer", "searcher 1", "host")}
  # By hand: the vocabulary of the task, tied; per layer 2 norms, q and o 128x128, k and v 128x64, three 128x384.
  vocab_size = int(result.stdout.split(" embeddings")[0].rsplit(" ", 1)[1])
  num_params = 128 * vocab_size + 3 * (2 * 128 + 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 384) + 128
  assert f"llama: {num_params:,} parameters" in result.stdout and "3 cpu devices" in result.stdout
  for content in ("trainer: parameters", "trainer: gradients", "trainer: reference", "trainer: average for the "
                                                                                     "reference",
                  "searcher 1: weights", "searcher 1: reference"):
    assert rows[content] == [4 * num_params] * 2
  moments, _ = rows["trainer: optimizer state"]
  assert 8 * num_params <= moments < 8 * num_params + 64  # two moments and some counts
  assert rows["searcher 1: cache of 64 slots"] == [2 * 3 * 64 * 2 * (22 + 18) * 32 * 4] * 2
  assert rows["host: replay buffer when full (20,000 responses)"] == [20_000 * 4 * (3 * 18 + 22)] * 2
  assert not (tmp_path / "run").exists()


def test_dry_run_of_a_broken_model_folder(tmp_path):
  (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
  lines = _errors(_run(QUICKSTART, "--dry_run", f"--config.model.path={tmp_path}"))
  assert lines[0].startswith(f"model.path='{tmp_path}': model_type='mamba' is not supported")


@pytest.mark.parametrize("end, code", [("0", 0), ("1", 1), ("config", 2), ("crash", 1)])
def test_exit_code_is_that_of_training(end, code, tmp_path):
  result = _run(QUICKSTART, "--workdir=w", "--config.train.steps=7", program=("-c", FAKE_TRAIN), END=end,
                XDG_CACHE_HOME=str(tmp_path))
  assert result.returncode == code
  assert f"run 7 w 3 {tmp_path}/tba_jax/xla" in result.stdout  # three CPU devices; compiled programs are kept
  if end == "config":
    assert result.stderr.splitlines() == ["error: task: train.jsonl, line 3: not JSON", "error: second"]
  if end == "crash":
    assert "RuntimeError: boom" in result.stderr


def test_a_compilation_cache_set_by_the_user_is_left_alone(tmp_path):
  result = _run(QUICKSTART, "--workdir=w", program=("-c", FAKE_TRAIN), END="0", JAX_COMPILATION_CACHE_DIR=str(tmp_path))
  assert result.stdout.split()[-1] == str(tmp_path)

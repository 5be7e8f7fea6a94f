"""One run from config to results: the only file that reads the config. Builds every part, drives them, sums up.

A workdir is in one of four states, tried in this order: finished (the results are shown again), in the middle of TBA (the newest
checkpoint is resumed), after or in the middle of fine-tuning (version 0, or the fine-tuning's checkpoint, is taken up), new.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import json
import os
import pathlib
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from absl import logging
from ml_collections import ConfigDict

from tba_jax import config as config_lib
from tba_jax import learner, metrics, plan, sharding, supervised
from tba_jax.checkpoints.huggingface import load_model
from tba_jax.checkpoints.model_folder import read_model_folder, save_model_folder
from tba_jax.checkpoints.run_state import RunState
from tba_jax.losses.registry import make_loss
from tba_jax.meters import Timeline, WaitMeter
from tba_jax.models import lora as lora_lib
from tba_jax.models import transformer
from tba_jax.models.lora import LoraSettings
from tba_jax.models.variants import ModelConfig
from tba_jax.replay.buffer import ReplayBuffer
from tba_jax.replay.flow import PromptLedger
from tba_jax.runtime.exchange import Exchange
from tba_jax.runtime.local import run_async
from tba_jax.runtime.lockstep import run_lockstep
from tba_jax.runtime.run import Run, RunSettings, StopFlag
from tba_jax.runtime.trainer import Trainer
from tba_jax.sampling.engine import Engine
from tba_jax.searcher import SampleSettings, Searcher, cast
from tba_jax.tasks.arithmetic import ArithmeticTask
from tba_jax.tasks.base import Task
from tba_jax.tasks.gsm8k import Gsm8kTask
from tba_jax.tokenizer import Tokenizer
from tba_jax.types import TrainState
from tba_jax.weights import WeightStore

DONE, FAULT = 0, 1


def run(config: ConfigDict, workdir: str, *, stop: StopFlag | None = None) -> int:
  """Trains by a validated config. Returns the exit code: 0 done or stopped on request, 1 a fault.

  Args:
    stop: ends the run at the next step boundary when set; by default SIGTERM and Ctrl-C set one.
  Raises: config.ConfigError for a mistake that only the model or the data can show.
  """
  logging.set_verbosity(logging.WARNING)  # orbax tells every detail of every save
  folder = pathlib.Path(workdir).expanduser()
  finished = folder / metrics.RESULTS_FILE
  if finished.is_file():
    with _as_config_error(str(finished)):
      print(metrics.results_table(json.loads(finished.read_text())), end="")
    print(f"{workdir} holds a finished run; give another --workdir for a new one")
    return DONE
  with contextlib.ExitStack() as stack:
    stack.enter_context(_workdir_of_this_run(folder, config))
    if stop is None:
      stop = stack.enter_context(_stop_on_signals())
    return _run(config, folder, stop, stack)


@contextlib.contextmanager
def _workdir_of_this_run(folder: pathlib.Path, config: ConfigDict) -> Iterator[None]:
  """Makes the folder, keeps other processes out of it, and writes config.json; bad input takes back what it had just made.

  Raises: ConfigError if the folder cannot be made or another process is using it.
  """
  try:
    folder.mkdir(parents=True, exist_ok=True)
    lock = open(folder / ".lock", "a")
  except OSError as error:
    raise config_lib.ConfigError([f"workdir={str(folder)!r} cannot be written ({error.strerror}); give another --workdir"]) from error
  with lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      raise config_lib.ConfigError([f"workdir={str(folder)!r} is in use by another process; wait for it, or give another --workdir"]) from error
    path = folder / config_lib.CONFIG_FILE
    is_new = not path.exists()
    metrics.write_atomic(path, config_lib.to_json(config))
    try:
      yield
    except config_lib.ConfigError:
      if is_new:
        path.unlink()  # or the corrected command would be refused as another config
      raise


def _run(config: ConfigDict, folder: pathlib.Path, stop: StopFlag, stack: contextlib.ExitStack) -> int:
  began = time.monotonic()

  # --- Devices ---
  counts = config_lib.resolve_devices(**config.devices, num_devices=jax.device_count())
  trainer_devices, searcher_devices = sharding.split_devices(
      jax.devices(), trainer=counts.trainer, searchers=counts.searchers, per_searcher=counts.per_searcher, share=counts.share)
  mesh = sharding.make_mesh(trainer_devices)
  _say(f"{jax.device_count()} {jax.default_backend()} devices: {len(trainer_devices)} for the trainer, {len(searcher_devices[0])} for each of "
       f"{len(searcher_devices)} searchers" + (", shared" if counts.share else ""))

  # --- Model, task, version 0 ---
  run_state = RunState(folder, keep=config.checkpoint.keep)
  stack.callback(run_state.close)
  built = _build_model_and_task(config, folder, mesh, run_state, stop)
  if built is None:
    return _stopped(stop, folder)
  cfg, task, params = built
  eval_prompts = task.eval_prompts()[: config.eval.size or None]

  # --- Searchers: reference, engines ---
  weights, searchers, timeline = _build_searchers(config, cfg, task, params, searcher_devices, folder)
  stack.callback(weights.close)
  stack.callback(timeline.close)

  # --- Trainer, buffer, books ---
  trainer = _build_trainer(config, cfg, params, mesh, folder)
  del params  # the trainer's: its steps donate them, or a frozen base is read by them
  exchange = _build_exchange(config, len(task.train_prompts()))
  snapshot = run_state.restore(_like(trainer.state), weights.abstract(trainer.state.params, searcher=0))
  steps_done = -1 if snapshot is None else snapshot.step
  with _as_config_error(str(folder)):
    writer = metrics.MetricsWriter(folder, resume_step=steps_done)
    rollouts = metrics.RolloutLog(folder, resume_step=steps_done)
  progress = metrics.Progress(config.train.steps, start_step=max(0, steps_done))
  for closes in (writer, rollouts, progress):
    stack.callback(closes.close)
  the_run = Run(
      settings=_run_settings(config), task=task, eval_prompts=eval_prompts, trainer=trainer, searchers=searchers, exchange=exchange,
      weights=weights, run_state=run_state, writer=writer, rollouts=rollouts, timeline=timeline, waits=WaitMeter(),
      progress=progress, stop=stop, began=began)
  if snapshot is not None:
    the_run.resume(snapshot)
    progress.message(f"resumed at step {the_run.step} of {config.train.steps}, version {trainer.version}")
  else:
    the_run.publish(wait=True)

  # --- Compile, drive ---
  _compile(the_run)
  code = _drive(the_run, folder)
  if code == DONE and not stop.is_set():
    results = the_run.results()
    metrics.write_results(folder, results)
    progress.close()
    print(metrics.results_table(results), end="", flush=True)
    if not results["logprob_tokens_compared"]:
      _say("error: not one group could be compared with the trainer's log-probabilities: none was sampled by weights of one version "
           "that were still at hand; set sample.in_flight=False or sync.every_steps higher")
      return FAULT
  return code


def _drive(the_run: Run, folder: pathlib.Path) -> int:
  """Runs to the end, to a stop or to a fault; a checkpoint is written in each case."""
  driver = run_async if the_run.settings.mode == "async" else run_lockstep
  try:
    driver(the_run)
    the_run.weights.join()
    code = DONE
  except Exception as error:  # the run's last word on any fault: what happened, a checkpoint, exit code 1
    the_run.progress.message("".join(traceback.format_exception(error)).rstrip())
    the_run.progress.message(f"error: {error}")
    code = FAULT
  if the_run.step > 0 or the_run.totals.last_eval_step >= 0:
    the_run.save(wait=True)
  if code == FAULT or the_run.stop.is_set():
    reason = "a fault" if code == FAULT else the_run.stop.reason
    the_run.progress.message(f"stopped at step {the_run.step} by {reason}; the same command resumes from {folder}")
  return code


def _like(tree: Any) -> Any:
  """Shapes, dtypes and shardings of a tree of arrays."""
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def _stopped(stop: StopFlag, folder: pathlib.Path) -> int:
  _say(f"stopped by {stop.reason}; the same command resumes from {folder}")
  return DONE


# --- Model and task ---


def _build_model_and_task(
    config: ConfigDict, folder: pathlib.Path, mesh: Mesh, run_state: RunState, stop: StopFlag
) -> tuple[ModelConfig, Task, Any] | None:
  """The model, the task, and parameters of version 0 on the trainer's mesh. None if fine-tuning was stopped."""
  model_folder, lora, dtype = folder / "model", _lora(config), _param_dtype(config)
  if run_state.has_initial():
    with _as_config_error(str(model_folder)):
      cfg, tokenizer = read_model_folder(model_folder)
    task = make_task(config, tokenizer)
    abstract = transformer.abstract_params(cfg, dtype)
    params = run_state.load_initial(jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, sharding.param_shardings(abstract, mesh)))
    return cfg, task, params
  # Fine-tuning trains every parameter, whatever is frozen afterwards.
  first_dtype = jnp.float32 if config.sft.steps else dtype
  if config.model.path:
    _say(f"loading {config.model.path}")
    put = lambda path, array: jax.device_put(
        array, NamedSharding(mesh, sharding.param_spec("/".join(path), array.shape, mesh)))
    with _as_config_error("model.path"):
      cfg, params, tokenizer = load_model(config.model.path, dtype=first_dtype, put=put)
    task = make_task(config, tokenizer)
  else:
    task = make_task(config, None)
    tokenizer = task.tokenizer
    cfg = plan.new_model_config(**config.model.architecture, vocab_size=tokenizer.vocab_size)
    layout = sharding.param_shardings(transformer.abstract_params(cfg, first_dtype), mesh)
    create = functools.partial(transformer.init_params, cfg, dtype=first_dtype)
    params = jax.jit(create, out_shardings=layout)(jax.random.key(config.seed))
  if lora is not None:
    with _as_config_error("lora.pattern"):
      lora_lib.adapted_layers(cfg, lora.pattern)
  save_model_folder(model_folder, cfg, tokenizer, lora)
  if config.sft.steps:
    params = _fine_tune(config, cfg, task, params, mesh, folder, stop)
    if params is None:
      return None
    if lora is not None:
      params = cast(params, dtype=dtype)
  run_state.save_initial(params)
  return cfg, task, params


def make_task(config: ConfigDict, tokenizer: Tokenizer | None) -> Task:
  """The task that the config names. Raises ConfigError for data that is missing or malformed, or prompts over the limit."""
  limit = config.sample.max_prompt_tokens
  with _as_config_error("task"):
    if config.task == "arithmetic":
      task = ArithmeticTask(
          seed=config.seed, num_eval_prompts=config.eval.size, num_sft_examples=config.sft.num_examples, **config.task_args)
    else:
      task = Gsm8kTask(tokenizer, max_prompt_tokens=limit, jsonl_folder=config.data.path, **config.task_args)
    longest = max(len(prompt.tokens) for prompt in (*task.train_prompts(), *task.eval_prompts()))
    if longest > limit:
      raise ValueError(f"sample.max_prompt_tokens={limit} is less than the longest prompt of {config.task}; raise it to {longest}")
    if len(task.train_prompts()) < config.train.prompts_per_step:
      raise ValueError(f"train.prompts_per_step={config.train.prompts_per_step} is more than the {len(task.train_prompts())} prompts that "
                       f"{config.task} has; lower it: a batch holds no prompt twice")
    return task


def _lora(config: ConfigDict) -> LoraSettings | None:
  """None where all parameters are trained."""
  return LoraSettings(**config.lora) if config.lora.pattern else None


def _param_dtype(config: ConfigDict) -> Any:
  """Of the parameters of version 0: the dtype that they are trained in, or that a frozen base is computed with."""
  return jnp.dtype(config.train.compute_dtype if config.lora.pattern else config.train.param_dtype)


def _fine_tune(
    config: ConfigDict, cfg: ModelConfig, task: Task, params: Any, mesh: Mesh, folder: pathlib.Path, stop: StopFlag
) -> Any | None:
  """Supervised fine-tuning of fresh parameters; None if it was stopped."""
  sft, train = config.sft, config.train
  schedule = learner.make_schedule(
      "cosine", learning_rate=sft.learning_rate, warmup_steps=sft.warmup_steps, decay_steps=sft.steps - sft.warmup_steps)
  optimizer = learner.make_optimizer("adamw", schedule=schedule, clip_norm=1.0, b1=train.b1, b2=train.b2, eps=train.eps)
  step = learner.make_train_step(
      cfg, make_loss("sft"), optimizer, temperature=1.0, compute_dtype=jnp.dtype(train.compute_dtype), remat=train.remat,
      micro_batches=sft.micro_batches, chunk_tokens=train.head_chunk_tokens, whole_groups_per_micro_batch=True, mesh=mesh)
  state = learner.init_train_state(params, optimizer, mesh=mesh)
  examples = task.sft_examples()[: sft.num_examples]
  run_state = RunState(folder / "fine_tuning", keep=1)
  bar = metrics.StageProgress("fine-tuning", sft.steps)
  try:
    state = supervised.fine_tune(
        state, examples, step=step, placement=sharding.batch_sharding(mesh), steps=sft.steps, batch_size=sft.batch_size,
        row_multiple=sft.micro_batches * sharding.num_batch_shards(mesh), length_buckets=train.length_buckets, seed=config.seed,
        run_state=run_state, save_every_steps=config.checkpoint.every_steps, stopped=stop.is_set,
        on_step=lambda done, loss: bar.update(done, f"loss {loss:.3f}"))
  finally:
    bar.close()
    run_state.close()
  return None if state is None else state.params


# --- Searchers ---


class Place(NamedTuple):
  """Where a searcher lives."""

  device_or_mesh: jax.Device | Mesh
  weights: Any  # placement of parameters in the decode layout
  reference: Any  # placement of stacked parameters
  mesh: Mesh | None


def _place(cfg: ModelConfig, devices: Sequence[jax.Device]) -> Place:
  """One device, or tensor parallelism over several."""
  if len(devices) == 1:
    return Place(devices[0], devices[0], devices[0], None)
  mesh = sharding.make_mesh(devices, fsdp=1, tensor=len(devices))
  stacked = sharding.param_shardings(transformer.abstract_params(cfg, jnp.float32), mesh)
  layer = jax.tree.map(lambda s: NamedSharding(mesh, PartitionSpec(*s.spec[1:])), stacked["layers"])
  return Place(mesh, {**stacked, "layers": (layer,) * cfg.num_layers}, stacked, mesh)


def _build_searchers(
    config: ConfigDict, cfg: ModelConfig, task: Task, params: Any, device_lists: Sequence[Sequence[jax.Device]],
    folder: pathlib.Path
) -> tuple[WeightStore, list[Searcher], Timeline]:
  """Weight store, searchers with engines and the reference (version 0) on their devices, and the timeline they write to."""
  sample, train, lora = config.sample, config.train, _lora(config)
  dtype, timeline = jnp.dtype(sample.dtype), Timeline(folder)
  places = [_place(cfg, devices) for devices in device_lists]
  # A frozen base is never donated: in the right dtype, on the right device, it is the reference.
  reference = params if lora is not None and dtype == _param_dtype(config) else cast(params, dtype=dtype)
  references = [jax.device_put(reference, place.reference, may_alias=lora is not None) for place in places]
  weights = _weight_store(cfg, lora, places, references, dtype)
  settings = SampleSettings(
      seed=config.seed, num_samples=sample.responses_per_prompt, temperature=sample.temperature,
      max_new_tokens=sample.max_new_tokens, truncated=sample.truncated, length_buckets=tuple(train.length_buckets))
  searchers = []
  for index, place in enumerate(places):
    engine = Engine(
        cfg, place.device_or_mesh, slots=sample.slots, max_prompt_tokens=sample.max_prompt_tokens,
        max_new_tokens=sample.max_new_tokens, chunk_tokens=sample.chunk_tokens, stop_ids=task.tokenizer.stop_ids, dtype=dtype,
        log_mu_temperature=sample.temperature, in_flight=sample.in_flight)
    score = learner.make_scorer(
        cfg, temperature=sample.temperature, dtype=jnp.dtype(train.compute_dtype), chunk_tokens=train.head_chunk_tokens,
        mesh=place.mesh)
    searchers.append(Searcher(
        index=index, engine=engine, slots=sample.slots, score=score,
        reference=references[index], ref_version=0, prompts=task.train_prompts(), reward=task.reward,
        response_text=task.response_text, settings=settings,
        span=functools.partial(timeline.span, f"searcher{index}")))
  return weights, searchers, timeline


def _weight_store(
    cfg: ModelConfig, lora: LoraSettings | None, places: Sequence[Place], references: Sequence[Any], dtype: Any
) -> WeightStore:
  """Moves all parameters in the decode layout; or adapters alone, which each searcher merges with its reference."""
  if lora is None:
    convert = jax.jit(lambda tree: transformer.unstack(jax.tree.map(lambda x: x.astype(dtype), tree)))
    return WeightStore(convert, [place.weights for place in places])
  abstract = lora_lib.abstract_adapters(cfg, settings=lora)
  merge = functools.partial(lora_lib.merge_unstacked, scale=lora.scale)
  placements, expand = [], []
  for place, reference in zip(places, references, strict=True):
    on_mesh = place.mesh is not None
    placements.append(sharding.param_shardings(abstract, place.mesh) if on_mesh else place.weights)
    expand.append(functools.partial(jax.jit(merge, out_shardings=place.weights if on_mesh else None), reference))
  return WeightStore(jax.jit(lambda tree: jax.tree.map(jnp.copy, tree)), placements, expand=expand)


def _compile(the_run: Run) -> None:
  """Compiles every program, before any clock that matters starts."""
  began, searchers = time.monotonic(), the_run.searchers
  bar = metrics.StageProgress("compiling", len(searchers) + 1)
  for done, searcher in enumerate(searchers):
    if the_run.stop.is_set():
      return
    bar.update(done, f"sampling programs of searcher {searcher.index}")
    searcher.give(the_run.weights.latest(searcher.index))
    searcher.engine.warmup()
  num_responses = the_run.settings.groups_per_step * the_run.settings.responses_per_prompt
  the_run.trainer.compile(num_responses, lambda done, of: bar.update(len(searchers), f"train step, shape {min(done + 1, of)} of {of}"))
  bar.update(len(searchers) + 1, "done")
  bar.close()
  num_programs = sum(searcher.engine.num_compiled for searcher in searchers)
  the_run.progress.message(
      f"{num_programs} sampling programs and the train step are ready after {time.monotonic() - began:.1f} s; the cache of each searcher "
      f"takes {searchers[0].engine.cache_bytes:,} bytes a device")


# --- Trainer and buffer ---


def _build_trainer(config: ConfigDict, cfg: ModelConfig, params: Any, mesh: Mesh, folder: pathlib.Path) -> Trainer:
  train, lora = config.train, _lora(config)
  schedule = learner.make_schedule(
      train.schedule, learning_rate=train.learning_rate, warmup_steps=train.warmup_steps, stable_steps=train.stable_steps,
      decay_steps=train.decay_steps)
  optimizer = learner.make_optimizer(
      train.optimizer, schedule=schedule, clip_norm=train.clip_norm, weight_decay=train.weight_decay, b1=train.b1, b2=train.b2,
      eps=train.eps)
  rows = train.prompts_per_step * train.responses_per_prompt
  step = learner.make_train_step(
      cfg, make_loss(config.loss.name), optimizer, temperature=config.sample.temperature,
      compute_dtype=jnp.dtype(train.compute_dtype), remat=train.remat, micro_batches=train.micro_batches,
      chunk_tokens=train.head_chunk_tokens,
      whole_groups_per_micro_batch=rows // train.micro_batches % train.responses_per_prompt == 0, lora=lora, mesh=mesh)
  beta_at_update = functools.partial(
      learner.beta_at, beta_init=config.loss.beta_init, beta_final=config.loss.beta_final,
      beta_decay_steps=config.loss.beta_decay_steps)
  frozen = ()
  if lora is not None:
    key = jax.random.fold_in(jax.random.key(config.seed), 1)  # the key itself made a new model's parameters
    params, frozen = lora_lib.init_adapters(cfg, key, settings=lora), (params,)
  state: TrainState = learner.init_train_state(params, optimizer, mesh=mesh)
  return Trainer(
      state=state, step=step, beta_at_update=beta_at_update, placement=sharding.batch_sharding(mesh),
      row_multiple=train.micro_batches * sharding.num_batch_shards(mesh), length_buckets=train.length_buckets,
      max_nonfinite_in_row=train.max_nonfinite_in_row, dump_folder=folder, frozen=frozen)


def _build_exchange(config: ConfigDict, num_prompts: int) -> Exchange:
  buffer = ReplayBuffer(
      capacity=config.buffer.capacity, capacity_per_prompt=config.buffer.capacity_per_prompt,
      max_prompt_tokens=config.sample.max_prompt_tokens, max_response_tokens=config.sample.max_new_tokens, seed=config.seed,
      recent_fraction=config.buffer.recent_fraction, priority=config.buffer.priority,
      priority_temperature=config.buffer.priority_temperature, max_uses=config.buffer.max_uses,
      max_staleness=config.buffer.max_staleness, dedup=config.buffer.dedup and _lag(config) < 0,
      order="tba" if _lag(config) < 0 else "fifo")
  return Exchange(
      ledger=PromptLedger(num_prompts, seed=config.seed), buffer=buffer, groups_per_step=config.train.prompts_per_step,
      responses_per_prompt=config.train.responses_per_prompt,
      fill_responses=config.buffer.fill_responses if _lag(config) < 0 else 0, max_staleness=config.buffer.max_staleness,
      max_lead_steps=config.sync.max_lead_steps, say=_say)


def _lag(config: ConfigDict) -> int:
  """Exact lag of the lockstep queue; sync mode is lag 0. -1: TBA's draw."""
  return 0 if config.runtime.mode == "sync" else config.runtime.lag


def _run_settings(config: ConfigDict) -> RunSettings:
  return RunSettings(
      seed=config.seed, mode=config.runtime.mode, loss=config.loss.name, steps=config.train.steps,
      groups_per_step=config.train.prompts_per_step, responses_per_prompt=config.train.responses_per_prompt, lag=_lag(config),
      sync_every_steps=1 if _lag(config) >= 0 else config.sync.every_steps, eval_every_steps=config.eval.every_steps,
      checkpoint_every_steps=config.checkpoint.every_steps, max_new_tokens=config.sample.max_new_tokens,
      rollouts_per_step=config.log.rollouts_per_step, searcher_restarts=config.runtime.searcher_restarts,
      stop_timeout_secs=config.runtime.stop_timeout_secs)


# --- Stops and errors ---


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[StopFlag]:
  """SIGTERM and Ctrl-C ask the run to stop at the next step; a second Ctrl-C ends it at once."""
  stop = StopFlag()

  def ask(number: int, frame: Any) -> None:
    del frame
    name = signal.Signals(number).name
    if stop.is_set() and number == signal.SIGINT:
      os._exit(130)  # an exception could be raised inside a callback of XLA, which drops it
    stop.set(name)
    os.write(2, f"\n{name}: stopping after this step, with a checkpoint once a step is done; Ctrl-C again stops at once, without one\n".encode())

  before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
  try:
    yield stop
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)


@contextlib.contextmanager
def _as_config_error(key: str) -> Iterator[None]:
  """What a model or data set says of itself becomes an error of the config."""
  try:
    yield
  except (ValueError, KeyError, OSError) as error:
    raise config_lib.ConfigError([f"{key}: {error}"]) from error


def _say(text: str) -> None:
  print(text, file=sys.stderr, flush=True)

"""One run from config to results: builds every part, drives them, sums up.

A workdir is in one of four states, tried in this order: finished (the results are shown again), in the middle of TBA
(the newest checkpoint is resumed), after or in the middle of fine-tuning (version 0, or the fine-tuning's checkpoint,
is taken up), new.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import pathlib
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging
from jax.sharding import Mesh
from ml_collections import ConfigDict

from tba_jax import build, build_remote, limits, metrics, sharding
from tba_jax import config as config_lib
from tba_jax.alarms import Alarms
from tba_jax.checkpoints.run_state import RunState, Snapshot
from tba_jax.deadlines import Heartbeat, Watchdog
from tba_jax.disk import Disk
from tba_jax.follow import follow
from tba_jax.meters import Profile, Timeline, WaitMeter
from tba_jax.models.variants import ModelConfig
from tba_jax.runtime.lead import Lead, LeadTrainer
from tba_jax.runtime.local import run_async
from tba_jax.runtime.lockstep import run_lockstep
from tba_jax.runtime.order import OrderLog, run_replay
from tba_jax.runtime.remote import Connection, Put
from tba_jax.runtime.run import Run
from tba_jax.runtime.settings import RunSettings, StopFlag
from tba_jax.runtime.summary import results_of
from tba_jax.runtime.trainer import Trainer
from tba_jax.runtime.world import World
from tba_jax.workdir import (
    advising_on_memory, as_config_error, memory_advice, say, stop_on_signals, workdir_of_this_run)
from tba_jax.wandb_log import WandbLog

DONE, FAULT = 0, 1


def run(config: ConfigDict, workdir: str, *, stop: StopFlag | None = None, world: World | None = None) -> int:
  """Trains by a validated config. Returns the exit code: 0 done or stopped on request, 1 a fault.

  Args:
    stop: ends the run at the next step boundary when set; by default SIGTERM and Ctrl-C set one.
    world: the processes of the trainer, if it has several. All but the first follow, and need no valid config.
  Raises: config.ConfigError for a mistake that only the model or the data can show.
  """
  logging.set_verbosity(logging.WARNING)  # orbax tells every detail of every save
  if world is not None and not world.is_head:
    return follow(config, world, lambda: _devices(config, world)[1])
  folder = pathlib.Path(workdir).expanduser()
  finished = folder / metrics.RESULTS_FILE
  if finished.is_file():
    with as_config_error(str(finished)):
      print(metrics.results_table(json.loads(finished.read_text())), end="")
    print(f"{workdir} holds a finished run; give another --workdir for a new one")
    return DONE
  with contextlib.ExitStack() as stack:
    stack.enter_context(workdir_of_this_run(folder, config))
    if stop is None:
      stop = stack.enter_context(stop_on_signals())
    return _run(config, folder, stop, stack, world)


def _devices(config: ConfigDict, world: World | None) -> tuple[config_lib.DeviceCounts, Mesh, list[list[jax.Device]]]:
  """How many devices each part has, the trainer's mesh, and the searchers' devices where they are in this process."""
  num_processes = 1 if world is None else world.num_processes
  counts = config_lib.device_counts(config, num_devices=jax.local_device_count(), num_processes=num_processes)
  here = counts if config.runtime.backend != "ray" else counts._replace(searchers=0)
  trainer_devices, searcher_devices = sharding.devices_of_run(
      jax.devices(), **here._asdict(), num_processes=num_processes)
  return counts, sharding.make_mesh(trainer_devices), searcher_devices


def _run(config: ConfigDict, folder: pathlib.Path, stop: StopFlag, stack: contextlib.ExitStack, world: World | None
         ) -> int:
  began = time.monotonic()
  lead = None
  if world is not None:
    lead, world.stop = Lead(world, secs=config.runtime.hang_secs), stop
    lead.order("begin")

  # --- Devices ---
  counts, mesh, searcher_devices = _devices(config, world)
  remote = config.runtime.backend == "ray"
  where = ", shared" if counts.share else " of the cluster" if remote else ""
  processes = "" if world is None else f" of {world.num_processes} processes"
  say(f"{jax.device_count()} {jax.default_backend()} devices{processes}: {counts.trainer} for the trainer, "
      f"{counts.per_searcher} for each of {counts.searchers} searchers{where}")
  cluster = stack.enter_context(_cluster(config, counts, jax.process_count())) if remote else None

  # --- Model, task, version 0 ---
  run_state = RunState(folder, keep=config.checkpoint.keep, timeout_secs=config.runtime.hang_secs,
                       with_advantages=build.has_advantages(config), mesh=lead)
  stack.callback(run_state.close)
  built = build.build_model_and_task(config, folder, mesh, run_state, stop, lead)
  if built is None:
    return _stopped(stop, folder)
  cfg, task, params = built
  build.check_memory(config, cfg, jax.devices(), num_processes=jax.process_count())
  eval_prompts = task.eval_prompts()[: config.eval.size or None]
  _write_limits(config, cfg, counts, folder)

  # --- Searchers: reference, engines ---
  disk = Disk(say)
  timeline = Timeline(folder, disk=disk)
  stack.callback(timeline.close)
  to_send = params if lead is None else lead.fetch("params", params)()
  if cluster is None:
    weights, make_searcher = build.build_searchers(config, cfg, task, to_send, searcher_devices, timeline.span)
    reference = build.build_reference(config, cfg, params, mesh, searcher_devices)
  else:
    put, connect = cluster
    weights, make_searcher = build_remote.build_remote_searchers(
        config, cfg, task, to_send, folder, timeline, put=put, connect=connect)
    reference = build_remote.build_remote_reference(
        config, cfg, params, mesh, put=put, num_searchers=counts.searchers)
  searchers = [make_searcher(index) for index in range(counts.searchers)]

  # --- Trainer, buffer, books ---
  make_trainer = Trainer
  if lead is not None:
    weights.fetch_by(lead.fetch)
    lead.begin_training(cfg)
    make_trainer = functools.partial(LeadTrainer, lead=lead)
  trainer = build.build_trainer(config, cfg, params, mesh, folder, make=make_trainer)
  del params, to_send  # the trainer's: its steps donate them, or a frozen base is read by them
  exchange = build.build_exchange(config, len(task.train_prompts()))
  with as_config_error("checkpoints"):
    snapshot = run_state.restore(
        _like(trainer.state), weights.abstract(trainer.state.params, searcher=0),
        None if reference is None else _like(reference.state()))
  steps_done = -1 if snapshot is None else snapshot.step
  logs = dict(resume_step=steps_done, disk=disk, evaluates_again=_evaluates_again(snapshot))
  progress = metrics.Progress(config.train.steps, start_step=max(0, steps_done))
  also = {}
  if config.log.wandb:
    with as_config_error("log.wandb"):
      wandb_log = WandbLog(folder, project=config.log.wandb, config=config.to_dict(), say=progress.message)
    stack.callback(wandb_log.close)
    also = {"also": wandb_log.write}
  with as_config_error(str(folder)):
    writer, rollouts = metrics.MetricsWriter(folder, **logs, **also), metrics.RolloutLog(folder, **logs)
    alarms = Alarms(folder, resume_step=steps_done, disk=disk, num_searchers=len(searchers),
                    is_async=config.runtime.mode == "async")
  profile = Profile(folder, steps=config.log.profile_steps, say=progress.message)
  for closes in (writer, rollouts, alarms, progress, profile):
    stack.callback(closes.close)
  run_state.say = disk.say = progress.message
  order_log = OrderLog(folder, disk=disk) if config.runtime.mode == "async" else None
  the_run = Run(
      settings=build.run_settings(config), task=task, eval_prompts=eval_prompts, trainer=trainer, reference=reference,
      searchers=searchers, make_searcher=make_searcher, exchange=exchange, weights=weights, run_state=run_state,
      writer=writer, rollouts=rollouts, alarms=alarms, timeline=timeline, waits=WaitMeter(),
      profile=profile, progress=progress, stop=stop, began=began)
  if snapshot is not None:
    if config.runtime.replay_order:
      raise config_lib.ConfigError([f"runtime.replay_order={config.runtime.replay_order!r} is followed from the first "
                                    f"event on, which {folder} is beyond; give another --workdir"])
    the_run.resume(snapshot)
    progress.message(f"resumed at step {the_run.step} of {config.train.steps}, version {trainer.version}")
  if order_log is not None:
    order_log.cut(exchange.num_events)
    stack.callback(order_log.close)
    exchange.on_event = order_log.write
  if snapshot is None:
    the_run.publish(wait=True)

  # --- Compile, drive ---
  with advising_on_memory():
    _compile(the_run)
  code = _drive(the_run, folder)
  if code == DONE and not stop.is_set():
    results = results_of(the_run)
    progress.close()
    print(metrics.results_table(results), end="", flush=True)
    try:
      metrics.write_results(folder, results)
    except OSError as error:
      say(f"error: {folder / metrics.RESULTS_FILE} cannot be written ({error.strerror}); make room on the disk, and "
          "the same command goes on from the last checkpoint")
      return FAULT
    say(f"a page to look at: python -m tba_jax.report {folder}")
    if config.train.steps and not results["logprob_tokens_compared"]:
      say("error: not one group could be compared with the trainer's log-probabilities: none was sampled by weights of "
          "one version that were still at hand; set sample.in_flight=False or sync.every_steps higher")
      return FAULT
  return code


def _write_limits(config: ConfigDict, cfg: ModelConfig, counts: config_lib.DeviceCounts, folder: pathlib.Path) -> None:
  """What the report compares the run's speed with."""
  found = limits.limits_of(
      cfg, jax.devices()[0], trainer_devices=counts.trainer, searcher_devices=counts.searchers * counts.per_searcher,
      share=counts.share, adapters_only=build.lora_settings(config) is not None,
      sample_bytes=jnp.dtype(config.sample.dtype).itemsize, cache_dtype=config.sample.cache_dtype,
      slots=config.sample.slots, lane_samples=config.sample.lane_samples)
  metrics.write_atomic(folder / limits.MACHINE_FILE, json.dumps(dataclasses.asdict(found), indent=2) + "\n")


@contextlib.contextmanager
def _cluster(
    config: ConfigDict, counts: config_lib.DeviceCounts, num_processes: int
) -> Iterator[tuple[Put, Callable[..., Connection]]]:
  """A Ray cluster: what stores a chunk there, and what makes the connection to a searcher. `num_processes`: that share
  the trainer's devices; the cluster keeps off those of this one."""
  from tba_jax.runtime import cluster

  platform = jax.default_backend()

  def connect(spec: build_remote.HostSpec) -> Connection:
    return cluster.ActorConnection(build_remote.make_host, spec, name=f"searcher {spec.index}", platform=platform,
                                   devices=counts.per_searcher)

  with contextlib.ExitStack() as stack:
    with as_config_error("runtime.backend='ray'"):
      stack.enter_context(
          cluster.joined(config.runtime.ray_address, platform=platform,
                         trainer_devices=counts.trainer // num_processes))
    yield cluster.put, connect


def _drive(the_run: Run, folder: pathlib.Path) -> int:
  """Runs to the end, to a stop or to a fault; a checkpoint is written in each case."""
  threads = the_run.settings.mode == "async"

  def main_thread() -> list[Heartbeat]:
    return [the_run.heartbeat] + ([] if threads else [searcher.heartbeat for searcher in the_run.searchers])

  with Watchdog(main_thread, secs=2 * the_run.settings.hang_secs, say=the_run.progress.message):
    try:
      if not the_run.stop.is_set():  # else it was stopped while programs were compiled, and searchers would go on with it
        _driver(the_run.settings)(the_run)
      the_run.weights.join()
      code = DONE
    except Exception as error:  # the run's last word on any fault: what happened, a checkpoint, exit code 1
      the_run.progress.message("".join(traceback.format_exception(error)).rstrip())
      the_run.progress.message(f"error: {memory_advice(error) or error}")
      code = FAULT
    if the_run.step > 0 or the_run.totals.last_eval_step >= 0:
      failed = the_run.run_state.num_failed
      the_run.save(wait=True)
      code = FAULT if the_run.run_state.num_failed > failed else code
  for searcher in the_run.searchers:
    searcher.close()
  if code == FAULT or the_run.stop.is_set():
    reason = "a fault" if code == FAULT else the_run.stop.reason
    the_run.progress.message(f"stopped at step {the_run.step} by {reason}; the same command resumes from {folder}")
  return code


def _driver(settings: RunSettings) -> Callable[[Run], None]:
  if settings.replay_order:
    return functools.partial(run_replay, source=pathlib.Path(settings.replay_order).expanduser())
  return run_async if settings.mode == "async" else run_lockstep


def _evaluates_again(snapshot: Snapshot | None) -> set[int]:
  """Steps whose evaluations a resumed run makes, for its checkpoint was written before they were over."""
  if snapshot is None:
    return set()
  under_way = {int(step) for step in snapshot.meta["evaluations"]}
  return under_way | ({snapshot.step} if snapshot.step > snapshot.meta["totals"]["last_eval_step"] else set())


def _like(tree: Any) -> Any:
  """Shapes, dtypes and shardings of a tree of arrays."""
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def _stopped(stop: StopFlag, folder: pathlib.Path) -> int:
  say(f"stopped by {stop.reason}; the same command resumes from {folder}")
  return DONE


def _compile(the_run: Run) -> None:
  """Compiles every program, before any clock that matters starts."""
  began, searchers = time.monotonic(), the_run.searchers
  bar = metrics.StageProgress("compiling", len(searchers) + 1)
  for done, searcher in enumerate(searchers):
    if the_run.stop.is_set():
      return
    bar.update(done, f"sampling programs of searcher {searcher.index}")
    searcher.give(the_run.weights.latest(searcher.index))
    searcher.warmup(the_run.stop.is_set)
  if the_run.stop.is_set():
    return
  num_responses = the_run.settings.groups_per_step * the_run.settings.responses_per_prompt
  if the_run.settings.steps:  # else there is fine-tuning alone, which is over
    shapes = lambda done, of: bar.update(len(searchers), f"train step, shape {min(done + 1, of)} of {of}")
    the_run.trainer.compile(num_responses, shapes)
    if the_run.reference is not None:
      the_run.reference.compile()
  bar.update(len(searchers) + 1, "done")
  bar.close()
  num_programs = sum(searcher.num_compiled for searcher in searchers)
  the_run.progress.message(
      f"{num_programs} sampling programs and the train step are ready after {time.monotonic() - began:.1f} s")

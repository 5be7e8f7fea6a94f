"""From a config and the name of a slice to a plan: choose splits, compile their programs, predict, recommend."""

from __future__ import annotations

import math
import pathlib

from collections.abc import Sequence

from ml_collections import ConfigDict

from tba_jax import build, chips, work
from tba_jax import config as config_lib
from tba_jax.config import DeviceCounts
from tba_jax.metrics import StageProgress
from tba_jax.models.variants import ModelConfig
from tba_jax.plan import beside, predict, programs, splits, topology
from tba_jax.plan.compiler import Compiled, compile_program
from tba_jax.plan.report import Entry, Plan
from tba_jax.sampling.buckets import bucket_of
from tba_jax.sharding import split_devices

_NOT_COMPILED = Compiled("not compiled")


def make_plan(
  config: ConfigDict, topology_name: str, *, config_name: str, cache: pathlib.Path, most_compiled: int,
  mean_prompt_tokens: int = 0, mean_response_tokens: int = 0,
) -> Plan:
  """Plans one run for one slice.

  Args:
    config: a run's config; its devices.* choose the split if they are set.
    cache: folder of earlier results.
    most_compiled: splits to compile.
    mean_prompt_tokens, mean_response_tokens: 0: half of the config's limit.
  Raises:
    ConfigError: the config is wrong, or no model of that name is known.
    ValueError: there is no such slice, libtpu is missing, or no split suits model and batch.
  """
  place = topology.open_slice(topology_name)
  _validate(config, len(place.devices), place.chip)
  cfg = build.model_config(config)
  load = workload(config, cfg, mean_prompt_tokens or config.sample.max_prompt_tokens // 2,
                  mean_response_tokens or config.sample.max_new_tokens // 2)
  chip = chips.measure_cpu(len(place.devices)) if place.chip == "cpu" else chips.CHIPS[place.chip]
  found, left_out = _choose(config, cfg, load, chip, place, most_compiled)
  compiled = _compile_all(config, cfg, place, found, cache)
  entries = tuple(_entry(config, cfg, load, chip, place, counts, compiled) for counts in found)
  recommended, reason = _recommend(entries)
  host_capacity = chip.host_bytes * len(place.devices) / place.num_hosts
  notes = []
  if left_out:
    notes.append(f"Not compiled, for they would not fit by an estimate of their memory: {', '.join(left_out)}.")
  if place.num_hosts > 1:
    notes.append(f"The slice has {place.num_hosts} hosts; one process of this program drives the devices of one.")
  return Plan(
    config=config_name, topology=topology_name, num_hosts=place.num_hosts,
    model=f"{cfg.family}, {work.num_params(cfg) / 1e9:.2f}e9 parameters", chip=chip, load=load,
    host_bytes=programs.host_bytes(config), host_capacity=host_capacity, entries=entries, recommended=recommended,
    reason=reason, notes=tuple(notes))


def workload(
  config: ConfigDict, cfg: ModelConfig, mean_prompt_tokens: float, mean_response_tokens: float
) -> predict.Workload:
  """What the config says of the work, for texts of these mean lengths.

  Among a batch's responses one usually runs to the limit, and so does one among the slots of a searcher: rows are
  padded, and caches read, up to the bucket that holds it after a prompt of mean length.
  """
  train, sample, shapes = config.train, config.sample, programs.engine_shapes(config)
  prompt = math.ceil(mean_prompt_tokens)
  longest = prompt + sample.max_new_tokens
  queue = config.runtime.mode == "sync" or config.runtime.lag >= 0
  return predict.Workload(
    prompts_per_step=train.prompts_per_step, responses_per_prompt=train.responses_per_prompt,
    num_samples=sample.responses_per_prompt, mean_prompt_tokens=mean_prompt_tokens,
    mean_response_tokens=mean_response_tokens, max_new_tokens=sample.max_new_tokens,
    step_tokens=train.length_buckets[-1] if train.packing else bucket_of(tuple(train.length_buckets), longest),
    score_tokens=bucket_of(tuple(train.length_buckets), longest), packing=train.packing,
    micro_batches=train.micro_batches, remat=train.remat,
    one_pass=train.micro_batches == 1 or build.whole_groups_per_micro_batch(config),
    adapters_only=build.lora_settings(config) is not None, optimizer=train.optimizer,
    compute_bytes=2 if train.compute_dtype == "bfloat16" else 4, sample_bytes=2 if sample.dtype == "bfloat16" else 4,
    cache_bytes=work.cache_element_bytes(cfg, sample.cache_dtype),
    slots=sample.slots, chunk_tokens=sample.chunk_tokens, lane_samples=sample.lane_samples,
    kv_length=bucket_of(shapes.kv_buckets, longest if sample.lane_samples == 1 else sample.max_new_tokens),
    prefix_length=bucket_of(shapes.prefix_buckets, prompt if sample.lane_samples > 1 else 0),
    cache_length=shapes.slot_tokens, prefill_prompts=shapes.prefill_batches[-1],
    prefill_tokens=bucket_of(shapes.prompt_buckets, prompt),
    every_steps=1 if queue else config.sync.every_steps,
    bounded=config.sync.max_lead_steps >= 0 or config.buffer.max_staleness >= 0 or queue,
    reuses=config.buffer.max_uses == 0 and not queue, alternates=config.runtime.mode == "sync")


def _validate(config: ConfigDict, num_devices: int, platform: str) -> None:
  """As before a run, but for the data, which a plan does not read, and a split of the devices that is to be chosen."""
  try:
    config_lib.validate(config, num_devices=num_devices, platform=platform)
  except config_lib.ConfigError as error:
    chosen = config.devices.trainer or config.devices.share
    ours = [line for line in error.problems
            if not line.startswith("data.path") and (chosen or not line.startswith("devices."))]
    if ours:
      raise config_lib.ConfigError(ours) from None


def _choose(
  config: ConfigDict, cfg: ModelConfig, load: predict.Workload, chip: chips.Chip, place: topology.Slice, most: int
) -> tuple[list[DeviceCounts], list[str]]:
  """The splits to compile, best first by a prediction without links, and the names of those whose memory does not do.

  Of splits with the same trainer only the smallest searchers that fit are kept: more of them sample faster than fewer
  large ones, which talk to each other for each token.
  Raises: ValueError if the model and batch divide over no split.
  """
  ranked: list[tuple[float, DeviceCounts]] = []
  left_out, trainers = [], set()
  for counts in splits.candidates(config, cfg, len(place.devices)):
    trainer, searcher = _parts(config, cfg, place, counts)
    step = splits.estimated_temporaries(config, cfg, trainer=counts.trainer)
    score = splits.estimated_searcher_temporaries(config, cfg, per_searcher=counts.per_searcher)
    memories = [
      splits.screen_memory(trainer, chip, temporaries=step), splits.screen_memory(searcher, chip, temporaries=score)]
    if counts.share:
      memories = [splits.shared_memory(*memories)]
    name = f"{counts.trainer} + {counts.searchers} x {counts.per_searcher}"
    if not all(memory.fits for memory in memories):
      left_out.append(name)
    elif counts.trainer not in trainers:
      trainers.add(counts.trainer)
      ranked.append((predict.fresh_steps_per_hour(_predict(config, cfg, load, chip, counts, searcher, {})), counts))
  if not ranked and not left_out:
    raise ValueError(
      f"the model and a micro-batch of the config divide over no split of the {len(place.devices)} devices of "
      f"{place.name}; change train.micro_batches, or set devices.*")
  ranked.sort(key=lambda pair: -pair[0])
  if not ranked:  # the compiler has the last word
    ranked = [(0.0, counts) for counts in list(splits.candidates(config, cfg, len(place.devices)))[-1:]]
  return [counts for _, counts in ranked[:most]], left_out


def _parts(
  config: ConfigDict, cfg: ModelConfig, place: topology.Slice, counts: DeviceCounts
) -> tuple[programs.Part, programs.Part]:
  """The trainer and the first searcher of a split."""
  trainer, searchers = split_devices(place.devices, **counts._asdict())
  return programs.trainer_part(config, cfg, trainer), programs.searcher_part(config, cfg, searchers[0])


def _compile_all(
  config: ConfigDict, cfg: ModelConfig, place: topology.Slice, found: Sequence[DeviceCounts], cache: pathlib.Path
) -> dict[tuple[str, int], tuple[Compiled, ...]]:
  """What the compiler says, by ("trainer" or "searcher", number of devices); where they lie matters little."""
  wanted: dict[tuple[str, int], programs.Part] = {}
  for counts in found:
    trainer, searcher = _parts(config, cfg, place, counts)
    wanted.setdefault(("trainer", counts.trainer), trainer)
    wanted.setdefault(("searcher", counts.per_searcher), searcher)
  total = sum(len(part.programs) for part in wanted.values())
  bar = StageProgress(f"compiling for {place.name}", total)
  results, done = {}, 0
  for (role, size), part in wanted.items():
    compiled = []
    for program in part.programs:
      bar.update(done, f"{program.name} of a {role} of {size}")
      compiled.append(compile_program(program, target=topology.describe(place.chip, part.devices), cache=cache))
      done += 1
    results[role, size] = tuple(compiled)
  bar.update(done, "done")
  bar.close()
  return results


def _entry(
  config: ConfigDict, cfg: ModelConfig, load: predict.Workload, chip: chips.Chip, place: topology.Slice,
  counts: DeviceCounts, compiled: dict[tuple[str, int], tuple[Compiled, ...]],
) -> Entry:
  parts = _parts(config, cfg, place, counts)
  trainer, searcher = compiled["trainer", counts.trainer], compiled["searcher", counts.per_searcher]
  memory = [splits.compiled_memory(part, found, chip) for part, found in zip(parts, (trainer, searcher), strict=True)]
  if counts.share:
    memory = [splits.shared_memory(*memory)] * 2
  by_name = {each.name: each for each in (*trainer, *searcher)}
  complete = not any(each.overflow_bytes for each in by_name.values())
  prediction = _predict(config, cfg, load, chip, counts, parts[1], by_name) if complete else None
  return Entry(counts, *memory, trainer, searcher, prediction)


def _predict(
  config: ConfigDict, cfg: ModelConfig, load: predict.Workload, chip: chips.Chip, counts: DeviceCounts,
  searcher: programs.Part, by_name: dict[str, Compiled],
) -> predict.Prediction:
  link = lambda name: (by_name[name] if by_name else _NOT_COMPILED).link_bytes
  return predict.predict(
    cfg, load, chip, **counts._asdict(), published_bytes=searcher.published_bytes, step_link_bytes=link("train step"),
    decode_link_bytes=link("decode"), prefill_link_bytes=link("prefill"), score_link_bytes=link("score"),
    beside=beside.group_works(
      programs.trees_beside(config), config.task_args, num_samples=load.num_samples,
      mean_prompt_tokens=load.mean_prompt_tokens, mean_response_tokens=load.mean_response_tokens,
      devices=counts.per_searcher))


def _recommend(entries: Sequence[Entry]) -> tuple[str, str]:
  """The split with most steps an hour of which every group is fresh, and why."""
  fitting = [entry for entry in entries if entry.fits and entry.prediction is not None]
  if not fitting:
    return "", "no split that was compiled fits: take a larger slice, fewer slots, more micro-batches, or adapters"
  best = max(fitting, key=lambda entry: predict.fresh_steps_per_hour(entry.prediction))
  p = best.prediction
  limit = "searchers" if p.fresh_ratio < 1 else "the trainer"
  rate = predict.fresh_steps_per_hour(p)
  return best.name, (
    f"most steps an hour on fresh groups, {rate:,.0f}, of {len(fitting)} splits that fit; bound by {limit}")

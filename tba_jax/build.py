"""The parts of a run out of its config: model and task, searchers, trainer, buffer. With train.py and plan/ the only
reader of the config."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from ml_collections import ConfigDict

from tba_jax import config as config_lib
from tba_jax import build_sft, learner, metrics, optimizers, placement, sharding
from tba_jax.checkpoints.huggingface import load_model
from tba_jax.checkpoints.model_folder import read_model_folder, save_model_folder
from tba_jax.checkpoints.run_state import RunState
from tba_jax.config_schema import is_task_file
from tba_jax.losses.registry import get_loss, make_loss
from tba_jax.models import kernels, scalar_head, transformer
from tba_jax.models import lora as lora_lib
from tba_jax.models.lora import LoraSettings
from tba_jax.models.variants import ModelConfig, new_model_config
from tba_jax.placement import read_model_config
from tba_jax.replay.buffer import ReplayBuffer
from tba_jax.replay.collate import round_up
from tba_jax.replay.flow import PromptLedger
from tba_jax.runtime.exchange import Exchange
from tba_jax.runtime.lead import Lead
from tba_jax.runtime.reference import Reference
from tba_jax.runtime.settings import RunSettings, StopFlag
from tba_jax.runtime.trainer import Trainer
from tba_jax.sampling.engine import Engine
from tba_jax.searcher import SampleSettings, Searcher, cast, make_decode_layout_scorer
from tba_jax.searcher_places import copy_of_adapters, make_convert, make_weight_store, place_searcher
from tba_jax.tasks import registry
from tba_jax.tasks.base import Task, TaskSettings, make_reward
from tba_jax.tokenizer import Tokenizer
from tba_jax.types import TrainState
from tba_jax.vine import VineSettings, newline_ids
from tba_jax.weights import WeightStore
from tba_jax.workdir import as_config_error, say

# --- Model and task ---


def model_config(config: ConfigDict) -> ModelConfig:
  """The architecture that the config asks for, without weights. Raises ConfigError if it is not to be had, or if the
  pattern of adapters matches nothing in it, or if the kernels of attention cannot do it."""
  if config.model.path:
    with as_config_error(f"model.path={config.model.path!r}"):
      cfg = read_model_config(config.model.path)
  else:
    tokenizer = make_task(config, None).tokenizer if is_task_file(config.task) else registry.own_tokenizer(config.task)
    cfg = new_model_config(**config.model.architecture, vocab_size=tokenizer.vocab_size)
  _check_model(config, cfg)
  return cfg


def _check_model(config: ConfigDict, cfg: ModelConfig) -> None:
  """Raises ConfigError for settings that do not suit this model."""
  lora = lora_settings(config)
  if lora is not None:
    with as_config_error("lora.pattern"):
      lora_lib.adapted_layers(cfg, lora.pattern)
  with as_config_error("train.attention"):
    kernels.check_train_backend(cfg, config.train.attention)
  with as_config_error("sample.attention"):
    kernels.check_sample_backend(cfg, config.sample.attention)
  with as_config_error("sample.max_prompt_tokens + sample.max_new_tokens"):
    transformer.check_positions(cfg, config.sample.max_prompt_tokens + config.sample.max_new_tokens)


def extra_models(config: ConfigDict) -> tuple[placement.Beside, ...]:
  """What the task's arguments name to be kept on each searcher, as reward_model=PATH; without weights.

  An argument whose name ends in _model names a model. Its dtype is that of the argument X_dtype with an X that occurs
  in the name, or else that of sampling. A victim also has keys and values. Raises ConfigError if a model is not to be
  had.
  """
  args = config.task_args.to_dict()
  dtypes = {name.removesuffix("_dtype"): value for name, value in args.items() if name.endswith("_dtype")}
  found = []
  for name, path in sorted(args.items()):
    if name.endswith("_model") and path:
      dtype = jnp.dtype(next((dtype for part, dtype in dtypes.items() if part in name), config.sample.dtype))
      with as_config_error(f"task_args.{name}={path!r}"):
        found.append(placement.model_beside(name.replace("_", " "), path, dtype=dtype))
        if name == "victim_model":
          found.append(placement.cache_beside(
              "victim cache", path, slots=args["victim_slots"], max_prompt_tokens=args["victim_max_prompt_tokens"],
              max_new_tokens=args["victim_max_new_tokens"], dtype=dtype))
  return tuple(found)


def build_model_and_task(
    config: ConfigDict, folder: pathlib.Path, mesh: Mesh, run_state: RunState, stop: StopFlag, lead: Lead | None = None
) -> tuple[ModelConfig, Task, Any] | None:
  """The model, the task, and parameters of version 0 on the trainer's mesh. None if fine-tuning was stopped.

  `lead`: None where the mesh is this process's."""
  model_folder, lora, dtype = folder / "model", lora_settings(config), param_dtype(config)
  if run_state.has_initial():
    with as_config_error(str(model_folder)):
      cfg, tokenizer = read_model_folder(model_folder)
    task = make_task(config, tokenizer)
    if lead is not None:
      lead.expect_params(cfg, dtype)
    return cfg, task, run_state.load_initial(abstract_params(cfg, dtype, mesh))
  # Fine-tuning trains every parameter, whatever is frozen afterwards.
  first_dtype = jnp.float32 if config.sft.steps else dtype
  if config.model.path:
    say(f"loading {config.model.path}")
    where = lambda name, shape: NamedSharding(mesh, sharding.param_spec(name, shape, mesh))
    put = lambda path, array: jax.device_put(array, where("/".join(path), array.shape))
    if lead is not None:
      lead.expect_params(model_config(config), first_dtype)
      put = lambda path, array: lead.put("params", "/".join(path), array, where("/".join(path), array.shape))
    with as_config_error("model.path"):
      cfg, params, tokenizer = load_model(
          config.model.path, dtype=first_dtype, put=put, on_progress=metrics.bytes_bar("loading"))
    task = make_task(config, tokenizer)
  else:
    task = make_task(config, None)
    tokenizer = task.tokenizer
    cfg = new_model_config(**config.model.architecture, vocab_size=tokenizer.vocab_size)
    like = abstract_params(cfg, first_dtype, mesh)
    create = functools.partial(transformer.init_params, cfg, dtype=first_dtype)
    if lead is None:
      layout = jax.tree.map(lambda leaf: leaf.sharding, like)
      params = jax.jit(create, out_shardings=layout)(jax.random.key(config.seed))
    else:
      lead.expect_params(cfg, first_dtype)
      params = lead.place("params", jax.device_get(jax.jit(create)(jax.random.key(config.seed))), like)
  _check_model(config, cfg)
  save_model_folder(model_folder, cfg, tokenizer, lora)
  if config.sft.steps:
    params = build_sft.fine_tune(config, cfg, task, params, mesh, folder, stop, lead)
    if params is None:
      return None
    params = after_fine_tuning(config, params)
  run_state.save_initial(params)
  return cfg, task, params


def abstract_params(cfg: ModelConfig, dtype: Any, mesh: Mesh) -> Any:
  """Shapes, dtypes and shardings of parameters on the trainer's mesh."""
  abstract = transformer.abstract_params(cfg, dtype)
  return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract,
                      sharding.param_shardings(abstract, mesh))


def after_fine_tuning(config: ConfigDict, params: Any) -> Any:
  """Fine-tuned parameters as version 0: in the dtype of a frozen base where adapters are trained."""
  return params if lora_settings(config) is None else cast(params, dtype=param_dtype(config))


def make_task(config: ConfigDict, tokenizer: Tokenizer | None) -> Task:
  """The task that the config names. Raises ConfigError for data that is missing or malformed, or prompts over the
  limit."""
  with as_config_error("task"):
    settings = TaskSettings(
        seed=config.seed, data_path=config.data.path, max_prompt_tokens=config.sample.max_prompt_tokens,
        num_eval_prompts=config.eval.size, num_sft_examples=config.sft.num_examples)
    task = registry.make_task(config.task, tokenizer, settings, config.task_args)
    if len(task.train_prompts()) < config.train.prompts_per_step:
      raise ValueError(f"train.prompts_per_step={config.train.prompts_per_step} is more than the "
                       f"{len(task.train_prompts())} prompts that {config.task} has; lower it: a batch holds no prompt "
                       "twice")
    return task


def lora_settings(config: ConfigDict) -> LoraSettings | None:
  """None where all parameters are trained."""
  return LoraSettings(**config.lora) if config.lora.pattern else None


def param_dtype(config: ConfigDict) -> Any:
  """Of the parameters of version 0: the dtype that they are trained in, or that a frozen base is computed with."""
  return jnp.dtype(config.train.compute_dtype if config.lora.pattern else config.train.param_dtype)


# --- Searchers ---


def build_searchers(
    config: ConfigDict, cfg: ModelConfig, task: Task, params: Any, device_lists: Sequence[Sequence[jax.Device]],
    span: Callable[..., Any], *, first_index: int = 0,
) -> tuple[WeightStore, Callable[[int], Searcher]]:
  """Weight store, and what makes searcher i with an engine and the reference (version 0) on its devices.

  Args:
    span: `with span(actor, kind)` around each stretch of a searcher's work.
    first_index: of the searcher on the first devices.
  """
  sample, train, lora = config.sample, config.train, lora_settings(config)
  dtype = jnp.dtype(sample.dtype)
  places = [place_searcher(cfg, devices) for devices in device_lists]
  # A frozen base is never donated: in the right dtype, on the right device, it is the reference.
  reference = params if lora is not None and dtype == param_dtype(config) else cast(params, dtype=dtype)
  references = [jax.device_put(reference, place.reference, may_alias=lora is not None) for place in places]
  weights = make_weight_store(cfg, lora, places, references, dtype, timeout_secs=config.runtime.hang_secs)
  settings = SampleSettings(
      seed=config.seed, num_samples=sample.responses_per_prompt, temperature=sample.temperature,
      max_new_tokens=sample.max_new_tokens, truncated=sample.truncated, length_buckets=tuple(train.length_buckets),
      hang_secs=config.runtime.hang_secs, score_reference=reads_reference(config), vine=_vine_settings(config, task))
  ladder = tuple(sample.temperature_ladder) or (sample.temperature,)

  scorers = [make_scorer(config, cfg, place.mesh) for place in places]
  decode_layout_scorers = [make_decode_layout_scorer(score) for score in scorers]

  def make_searcher(index: int) -> Searcher:
    at = index - first_index
    place = places[at]
    make_engine = functools.partial(
        Engine, cfg, place.device_or_mesh, slots=sample.slots, **engine_limits(config),
        chunk_tokens=sample.chunk_tokens, stop_ids=task.tokenizer.stop_ids,
        dtype=dtype, log_mu_temperature=sample.temperature, in_flight=sample.in_flight,
        cache_dtype=jnp.dtype(sample.cache_dtype), attention=sample.attention)
    engine = make_engine(lane_samples=sample.lane_samples, recompute_kv=sample.recompute_kv)
    return Searcher(
        index=index, engine=engine,
        # An evaluation has one sample a prompt, which would leave all but one slot of a lane idle.
        eval_engine=engine if sample.lane_samples == 1 else make_engine(), slots=sample.slots, score=scorers[at],
        score_decode_layout=decode_layout_scorers[at],
        reference=references[at], ref_version=0, prompts=task.train_prompts(),
        reward=make_reward(task, place.device_or_mesh, for_eval=False),
        eval_reward=make_reward(task, place.device_or_mesh, for_eval=True), response_text=task.response_text,
        settings=settings, temperature=float(ladder[index % len(ladder)]),
        span=functools.partial(span, f"searcher{index}"))

  return weights, make_searcher


def engine_limits(config: ConfigDict) -> dict[str, int]:
  """Tokens of a prompt, of a response, and of both that a searcher's engine takes.

  Where a loss wants values within responses, all of a response but its last token may be part of a prompt.
  """
  prompt, new = config.sample.max_prompt_tokens, config.sample.max_new_tokens
  if has_advantages(config):
    return dict(max_prompt_tokens=prompt + new - 1, max_new_tokens=new, cache_tokens=prompt + new)
  return dict(max_prompt_tokens=prompt, max_new_tokens=new)


def has_advantages(config: ConfigDict) -> bool:
  """Whether rollouts carry an advantage for each token."""
  return get_loss(config.loss.name).needs_advantages


def _vine_settings(config: ConfigDict, task: Task) -> VineSettings | None:
  """Raises ConfigError where steps end at newlines and the tokenizer has none."""
  if not has_advantages(config):
    return None
  ends = frozenset() if config.loss.vine_step_tokens else newline_ids(task.tokenizer)
  with as_config_error("loss.vine_step_tokens"):
    if not ends and not config.loss.vine_step_tokens:
      raise ValueError("loss.vine_step_tokens=0 ends the steps of a response at newlines, which no token of this "
                       "tokenizer holds; set it to the tokens of a step, for example to 8")
  return VineSettings(config.loss.vine_samples, config.loss.vine_step_tokens, ends)


def make_scorer(config: ConfigDict, cfg: ModelConfig, mesh: Mesh | None) -> Callable[..., jax.Array]:
  """Log-probabilities under the reference, as a searcher takes them: no more rows at once than the trainer takes."""
  train = config.train
  rows_at_once = train.prompts_per_step * train.responses_per_prompt // train.micro_batches
  return learner.make_scorer(
      cfg, temperature=config.sample.temperature, dtype=jnp.dtype(train.compute_dtype),
      chunk_tokens=train.head_chunk_tokens, rows_at_once=rows_at_once, backend=train.attention, mesh=mesh)


def make_publish(config: ConfigDict) -> Callable[[Any], Any]:
  """What the trainer runs to publish: parameters in the decode layout, or adapters; jitted."""
  return make_convert(jnp.dtype(config.sample.dtype)) if lora_settings(config) is None else copy_of_adapters()


def placements(
    config: ConfigDict, cfg: ModelConfig, devices: Sequence[jax.Device], *, num_processes: int = 1
) -> list[placement.Placement]:
  """What stays on which device during a run, in bytes. `num_processes`: that the devices, all of them, belong to."""
  asked = config_lib.device_counts(config, num_devices=len(devices) // num_processes, num_processes=num_processes)
  return placement.placements(
      cfg, devices, trainer=asked.trainer,
      searchers=0 if config.runtime.backend == "ray" else asked.searchers, per_searcher=asked.per_searcher,
      share=asked.share, optimizer=config.train.optimizer, param_dtype=config.train.param_dtype,
      compute_dtype=config.train.compute_dtype, sample_dtype=config.sample.dtype, cache_dtype=config.sample.cache_dtype,
      attention=config.sample.attention, slots=config.sample.slots, lane_samples=config.sample.lane_samples,
      max_prompt_tokens=config.sample.max_prompt_tokens, max_new_tokens=config.sample.max_new_tokens,
      buffer_capacity=config.buffer.capacity, lora=lora_settings(config),
      reference_moves=config.reference.reset_every_steps > 0, reference_average=config.reference.ema_decay > 0,
      beside=extra_models(config), with_head=get_loss(config.loss.name).needs_head,
      with_advantages=has_advantages(config), num_processes=num_processes)


def check_memory(config: ConfigDict, cfg: ModelConfig, devices: Sequence[jax.Device], *, num_processes: int) -> None:
  """Says what stays on the devices during a run. Raises: ConfigError if it is more than they have."""
  placed = placements(config, cfg, devices, num_processes=num_processes)
  say(placement.summary(placed))
  refuse_overflow(placed, devices)


def refuse_overflow(placed: Sequence[placement.Placement], devices: Sequence[jax.Device]) -> None:
  """Raises: ConfigError if what stays on the devices during a run is more than they have."""
  with as_config_error("memory"):
    placement.check_fits(placed, placement.device_limits(devices, placed))


# --- Trainer and buffer ---


def make_step(config: ConfigDict, cfg: ModelConfig, mesh: Mesh) -> tuple[Callable[..., Any], optimizers.Optimizer]:
  """The jitted train step on a mesh, and its optimizer."""
  train = config.train
  schedule = optimizers.make_schedule(
      train.schedule, learning_rate=train.learning_rate, warmup_steps=train.warmup_steps,
      stable_steps=train.stable_steps, decay_steps=train.decay_steps)
  optimizer = optimizers.make_optimizer(
      train.optimizer, schedule=schedule, clip_norm=train.clip_norm, weight_decay=train.weight_decay, b1=train.b1,
      b2=train.b2, eps=train.eps)
  step = learner.make_train_step(
      cfg, make_loss(config.loss.name), optimizer, temperature=config.sample.temperature,
      compute_dtype=jnp.dtype(train.compute_dtype), remat=train.remat, micro_batches=train.micro_batches,
      chunk_tokens=train.head_chunk_tokens, backend=train.attention,
      whole_groups_per_micro_batch=whole_groups_per_micro_batch(config),
      skip_empty_micro_batches=train.packing,
      most_response_tokens=0 if train.packing else config.sample.max_new_tokens,
      lora=lora_settings(config), mesh=mesh,
      with_residuals=config.buffer.priority == "residual", with_reference=reads_reference(config),
      head=learner.make_head(config.loss.name, learning_rate=config.loss.head_learning_rate))
  return step, optimizer


def reads_reference(config: ConfigDict) -> bool:
  """Whether the loss ever reads log_ref: else no rollout is scored by the reference."""
  return get_loss(config.loss.name).reads_reference(config.loss.beta_init, config.loss.beta_final)


def whole_groups_per_micro_batch(config: ConfigDict) -> bool:
  """Whether no group of a batch has rows in two micro-batches."""
  train = config.train
  rows = train.prompts_per_step * train.responses_per_prompt
  return not train.packing and rows // train.micro_batches % train.responses_per_prompt == 0


def build_trainer(
    config: ConfigDict, cfg: ModelConfig, params: Any, mesh: Mesh, folder: pathlib.Path, *,
    make: Callable[..., Trainer] = Trainer,
) -> Trainer:
  """The trainer on its mesh, from version 0; with LoRA it trains fresh adapters and `params` stay as they are. `make`:
  another class."""
  train, lora = config.train, lora_settings(config)
  step, optimizer = make_step(config, cfg, mesh)
  beta_at_update = functools.partial(
      optimizers.beta_at, beta_init=config.loss.beta_init, beta_final=config.loss.beta_final,
      beta_decay_steps=config.loss.beta_decay_steps)
  frozen = ()
  if lora is not None:
    key = jax.random.fold_in(jax.random.key(config.seed), 1)  # the key itself made a new model's parameters
    params, frozen = lora_lib.init_adapters(cfg, key, settings=lora), (params,)
  head = learner.make_head(config.loss.name, learning_rate=config.loss.head_learning_rate)
  head_params = scalar_head.init_scalar_head(cfg, jax.random.fold_in(jax.random.key(config.seed), 2)) if head else ()
  state: TrainState = learner.init_train_state(params, optimizer, mesh=mesh, head=head, head_params=head_params)
  return make(
      state=state, step=step, beta_at_update=beta_at_update, tempering_at_update=tempering(config).at,
      placement=sharding.batch_sharding(mesh, with_advantages=has_advantages(config)),
      row_multiple=train.micro_batches * sharding.num_batch_shards(mesh), length_buckets=train.length_buckets,
      micro_batches=train.micro_batches, pack=train.packing, max_nonfinite_in_row=train.max_nonfinite_in_row,
      dump_folder=folder, frozen=frozen)


def tempering(config: ConfigDict) -> optimizers.Tempering:
  """How the target differs from pi_ref exp(reward / beta), by update."""
  loss = config.loss
  return optimizers.Tempering(
      loss.gamma_init, loss.gamma_final, loss.gamma_steps, loss.reward_temperature_init, loss.reward_temperature_final,
      loss.reward_temperature_steps)


def build_reference(
    config: ConfigDict, cfg: ModelConfig, params: Any, mesh: Mesh, device_lists: Sequence[Sequence[jax.Device]], *,
    make: Callable[..., Reference] | None = None,
) -> Reference | None:
  """The reference that moves, from version 0 on the trainer's mesh; None if it never does. `make`: another class, which
  knows by itself where the searchers are."""
  train = config.train
  if not config.reference.reset_every_steps:
    return None
  multiple = train.micro_batches * sharding.num_batch_shards(mesh)
  make = make or functools.partial(
      Reference, searcher_places=[place_searcher(cfg, devices).reference for devices in device_lists])
  return make(
      params, every_steps=config.reference.reset_every_steps, ema_decay=config.reference.ema_decay,
      dtype=jnp.dtype(config.sample.dtype), score=make_scorer(config, cfg, mesh),
      placement=sharding.batch_sharding(mesh),
      num_rows=round_up(train.prompts_per_step * train.responses_per_prompt, multiple) // train.micro_batches,
      row_tokens=train.length_buckets[-1])


def build_exchange(config: ConfigDict, num_prompts: int) -> Exchange:
  """An empty buffer and a ledger of the prompts. With a fixed lag the buffer is a queue of whole groups."""
  buffer = ReplayBuffer(
      capacity=config.buffer.capacity, capacity_per_prompt=config.buffer.capacity_per_prompt,
      max_prompt_tokens=config.sample.max_prompt_tokens, max_response_tokens=config.sample.max_new_tokens,
      seed=config.seed, recent_fraction=config.buffer.recent_fraction, priority=config.buffer.priority,
      priority_temperature=config.buffer.priority_temperature, max_uses=config.buffer.max_uses,
      max_staleness=config.buffer.max_staleness, dedup=config.buffer.dedup and _lag(config) < 0,
      order=config.buffer.order if _lag(config) < 0 else "fifo", single_prompt=num_prompts == 1,
      near_duplicate=config.buffer.near_duplicate, with_advantages=has_advantages(config))
  return Exchange(
      ledger=PromptLedger(num_prompts, seed=config.seed), buffer=buffer, groups_per_step=config.train.prompts_per_step,
      responses_per_prompt=config.train.responses_per_prompt,
      fill_responses=config.buffer.fill_responses if _lag(config) < 0 else 0, max_staleness=config.buffer.max_staleness,
      max_lead_steps=config.sync.max_lead_steps, hang_secs=config.runtime.hang_secs, say=say)


def _lag(config: ConfigDict) -> int:
  """Exact lag of the lockstep queue; sync mode is lag 0. -1: TBA's draw."""
  return 0 if config.runtime.mode == "sync" else config.runtime.lag


def run_settings(config: ConfigDict) -> RunSettings:
  """What the drivers need of the config, by name."""
  return RunSettings(
      seed=config.seed, mode=config.runtime.mode, loss=config.loss.name, steps=config.train.steps,
      groups_per_step=config.train.prompts_per_step, responses_per_prompt=config.train.responses_per_prompt,
      lag=_lag(config), sync_every_steps=1 if _lag(config) >= 0 else config.sync.every_steps,
      eval_every_steps=config.eval.every_steps, eval_kl_prompts=config.eval.kl_prompts,
      samples_per_prompt=config.sample.responses_per_prompt, checkpoint_every_steps=config.checkpoint.every_steps,
      max_new_tokens=config.sample.max_new_tokens, temperature=config.sample.temperature,
      rollouts_per_step=config.log.rollouts_per_step,
      searcher_restarts=config.runtime.searcher_restarts, replay_order=config.runtime.replay_order,
      hang_secs=config.runtime.hang_secs, stop_timeout_secs=config.runtime.stop_timeout_secs)

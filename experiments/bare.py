"""A lockstep run without its machinery, for studies of hundreds of short runs: the prompts, samples, rewards, replay
buffer, batches and train steps of `tba_jax.runtime.lockstep`, in its order, and nothing else. There are no threads, no
publishing, logs or checkpoints, which cost a small model several times what its arithmetic does.

Two programs: one samples a round of groups and scores them by the reference, one is the learner's train step with the
learning rate as an input. So everything that differs between the runs of an objective (lag, seed, rate) compiles
nothing. `tests/studies_test.py` holds it against `train.run`.
"""

from __future__ import annotations

import functools
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.lab import load_start
from tba_jax import build, learner, optimizers
from tba_jax.losses.registry import make_loss
from tba_jax.models import transformer
from tba_jax.models.heads import token_logprobs
from tba_jax.models.variants import ModelConfig
from tba_jax.replay.collate import collate
from tba_jax.runtime.exchange import Exchange
from tba_jax.sampling import decode
from tba_jax.sampling.draws import KEY_IMPL
from tba_jax.types import Occurrence, Prompt, RolloutGroup


class Samples(NamedTuple):
  """Of R responses, right padded."""

  tokens: Any  # int32 [R, T]
  lengths: Any  # int32 [R]
  log_mu: Any  # float32 [R, T]
  log_ref: Any  # float32 [R, T]


@functools.cache
def make_sampler(
  cfg: ModelConfig, *, stop_ids: tuple[int, ...], num_samples: int, prompt_tokens: int, max_new_tokens: int
) -> Callable[..., Samples]:
  """Jitted (params, reference, prompts [G, P], occurrences [G], seed, temperature) -> `num_samples` responses a prompt.

  All prompts have `prompt_tokens`. The keys of the samples are those of a run: of seed, occurrence, sample. Temperature
  0 is greedy; log-probabilities are at 1.
  """
  fixed = dict(stop_ids=stop_ids, log_mu_temperature=1.0, filtering=False, shardings=None)
  model = dict(cfg=cfg, dtype=jnp.float32, attention="xla", shardings=None)

  def key_of(seed: jax.Array, occurrence: jax.Array, sample: jax.Array) -> jax.Array:
    key = jax.random.key(seed, impl=KEY_IMPL)
    for number in (occurrence, 0, sample):  # in the middle the attempt
      key = jax.random.fold_in(key, number)
    return jax.random.key_data(key)

  @jax.jit
  def sample(params: Any, reference: Any, prompts: jax.Array, occurrences: jax.Array, seed: jax.Array,
             temperature: jax.Array) -> Samples:
    num_prompts = prompts.shape[0]
    slots = num_prompts * num_samples
    rows = jnp.repeat(jnp.arange(num_prompts, dtype=jnp.int32), num_samples)
    keys = jax.vmap(functools.partial(key_of, seed))(
      occurrences[rows], jnp.tile(jnp.arange(num_samples, dtype=jnp.uint32), num_prompts))
    held = transformer.unstack(params)
    logits, cache = decode.prefill(
      held, prompts, jnp.full(num_prompts, prompt_tokens, jnp.int32), cache_dtype=jnp.float32, **model)
    everywhere = jnp.ones(slots, jnp.int32)
    admission = decode.empty_admission(slots, slots)._replace(
      admitted=everywhere > 0, sources=rows, lengths=prompt_tokens * everywhere, limits=max_new_tokens * everywhere,
      keys=keys, temperatures=temperature * jnp.ones(slots), lanes=everywhere > 0, lane_sources=rows,
      lane_lengths=prompt_tokens * everywhere)
    state = decode.init_state(
      cfg, slots=slots, cache_tokens=prompt_tokens + max_new_tokens, cache_dtype=jnp.float32, lane_samples=1,
      prefix_tokens=prompt_tokens)
    state = decode.insert(state, logits, cache, admission, **fixed)
    _, output = decode.decode_chunk(
      held, state, num_tokens=max_new_tokens - 1, kv_length=prompt_tokens, prefix_length=0, **{**fixed, **model})
    real = jnp.arange(max_new_tokens) < output.counts[:, None]
    tokens = jnp.where(real, output.tokens.T, 0)
    width = prompt_tokens + max_new_tokens
    at = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (slots, width))
    inside = at < (prompt_tokens + output.counts)[:, None]
    log_ref = token_logprobs(
      reference, cfg, jnp.concatenate([prompts[rows], tokens], axis=1), jnp.where(inside, at, 0),
      inside.astype(jnp.int32), temperature=1.0, dtype=jnp.float32)[0][:, prompt_tokens:]
    return Samples(tokens, output.counts, jnp.where(real, output.log_mu.T, 0.0), jnp.where(real, log_ref, 0.0))

  return sample


class Step(NamedTuple):
  """The train step of an objective."""

  init: Callable[[Any], Any]  # parameters -> state before the first update; takes them over
  step: Callable[..., Any]  # jitted (state, batch, beta, rate) -> (state, metrics)


@functools.cache
def make_step(cfg: ModelConfig, *, loss: str, reads_reference: bool, clip_norm: float, warmup_steps: int, b1: float,
              b2: float, eps: float) -> Step:
  """AdamW with a constant rate after the warmup, by the learner's own step."""
  unit = optimizers.make_schedule("constant", learning_rate=1.0, warmup_steps=warmup_steps)

  def optimizer(rate: Any) -> optimizers.Optimizer:
    return optimizers.make_optimizer(
      "adamw", schedule=lambda count: rate * unit(count), clip_norm=clip_norm, b1=b1, b2=b2, eps=eps)

  @functools.partial(jax.jit, donate_argnums=0)
  def step(state: Any, batch: Any, beta: jax.Array, rate: jax.Array) -> Any:
    train = learner.make_train_step(
      cfg, make_loss(loss), optimizer(rate), temperature=1.0, compute_dtype=jnp.float32, remat="none", micro_batches=1,
      chunk_tokens=1024, with_reference=reads_reference)
    return train(state, batch, beta)

  return Step(lambda params: learner.init_train_state(params, optimizer(1.0)), step)


@functools.cache
def start_of(folder: pathlib.Path) -> tuple[ModelConfig, Any]:
  """Model and parameters of a run's version 0."""
  cfg, _, params = load_start(folder)
  return cfg, params


class BareRun:
  """One run by a config with `runtime.mode=lockstep` and a lag of 0 or more, from the model of another run's folder."""

  def __init__(self, config: Any, start: pathlib.Path):
    self._cfg, self._reference = start_of(start)
    sample, train, loss = config.sample, config.train, config.loss
    assert config.runtime.mode == "lockstep" and config.runtime.lag >= 0 and sample.temperature == 1.0
    assert loss.beta_init == loss.beta_final and train.micro_batches == 1
    assert train.schedule == "constant" and train.optimizer == "adamw" and train.weight_decay == 0
    self._task = build.make_task(config, None)
    self._settings, self._seed = build.run_settings(config), config.seed
    self._exchange: Exchange = build.build_exchange(config, len(self._task.train_prompts()))
    self._rate, self._beta = np.float32(train.learning_rate), np.float32(loss.beta_final)
    self._buckets = tuple(train.length_buckets)
    self._step = make_step(
      self._cfg, loss=loss.name, reads_reference=build.reads_reference(config), clip_norm=train.clip_norm,
      warmup_steps=train.warmup_steps, b1=train.b1, b2=train.b2, eps=train.eps)
    self._state = self._step.init(jax.tree.map(jnp.copy, self._reference))
    self._version = 0
    self._sampler = functools.partial(
      make_sampler, self._cfg, stop_ids=tuple(self._task.tokenizer.stop_ids),
      prompt_tokens=sample.max_prompt_tokens, max_new_tokens=sample.max_new_tokens)

  def _sample(self, prompts: Sequence[Prompt], occurrences: Sequence[int], *, num_samples: int, seed: int,
              temperature: float) -> tuple[Samples, np.ndarray, np.ndarray]:
    """Responses of the policy as it is, their rewards and whether they were cut off; rows prompt by prompt."""
    samples: Samples = jax.device_get(self._sampler(num_samples=num_samples)(
      self._state.params, self._reference, np.stack([prompt.tokens for prompt in prompts]),
      np.array(occurrences, np.uint32), np.uint32(seed), np.float32(temperature)))
    last = samples.tokens[np.arange(len(samples.lengths)), samples.lengths - 1]
    truncated = ~np.isin(last, self._task.tokenizer.stop_ids)
    rewards = [self._task.reward(prompts[i // num_samples], self._task.response_text(row), truncated=bool(cut))
               for i, (row, cut) in enumerate(zip(samples.tokens, truncated))]
    return samples, np.array(rewards, np.float32), truncated

  def _bring(self, occurrences: Sequence[Occurrence]) -> None:
    """Samples groups and puts them into the buffer."""
    prompts = [self._task.train_prompts()[one.prompt_id] for one in occurrences]
    num = self._settings.samples_per_prompt
    samples, rewards, truncated = self._sample(
      prompts, [one.occurrence for one in occurrences], num_samples=num, seed=self._seed, temperature=1.0)
    for i, occurrence in enumerate(occurrences):
      rows = slice(i * num, (i + 1) * num)
      self._exchange.bring(occurrence, RolloutGroup(
        prompt_id=occurrence.prompt_id, occurrence=occurrence.occurrence, attempt=occurrence.attempt,
        prompt=prompts[i].tokens, tokens=samples.tokens[rows], lengths=samples.lengths[rows],
        log_mu=samples.log_mu[rows], log_ref=samples.log_ref[rows],
        versions=np.full(samples.tokens[rows].shape, self._version, np.int32), rewards=rewards[rows],
        truncated=truncated[rows], ref_version=0, temperature=1.0))

  def evaluate(self, *, temperature: float = 1.0) -> dict[str, float]:
    """Of one sample for each held-out prompt: accuracy, and divergence from the reference in nats. 0: greedy."""
    prompts = self._task.eval_prompts()
    samples, rewards, _ = self._sample(
      prompts, range(len(prompts)), num_samples=1, seed=(self._seed + 1) % 2**32, temperature=temperature)
    kl = float((samples.log_mu - samples.log_ref).sum(axis=1).mean())
    return {"eval_accuracy": float(rewards.mean()), "kl_fresh": kl}

  def run(self, *, eval_every_steps: int) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """To the end; evaluates before, every few steps counted from the end, and after.

    Returns: lines as of metrics.jsonl; results as of results.json, with `greedy_after`.
    """
    settings, exchange, lines = self._settings, self._exchange, []
    began, steps = time.process_time(), settings.steps
    lines.append({"step": 0, **self.evaluate()})
    for step in range(steps):
      ahead = min(settings.lag + 1, steps - step) * settings.groups_per_step
      missing = ahead - exchange.buffer.stats()["drawable_groups"]
      for _ in range(0, missing, settings.groups_per_step):
        self._bring([exchange.next_occurrence() for _ in range(settings.groups_per_step)])
      draw = exchange.try_draw(version=self._version)
      batch = collate(draw, row_multiple=1, length_buckets=self._buckets)
      self._state, metrics = self._step.step(self._state, batch, self._beta, self._rate)
      metrics = {name: float(value) for name, value in jax.device_get(metrics).items()}
      staleness = self._version - draw.versions[draw.valid]
      self._version += 1 - int(metrics["skipped"])
      exchange.advance(self._version)
      lines.append({"step": step + 1, **metrics, "reward": float(draw.rewards[draw.valid].mean()),
                    "staleness_mean": float(staleness.mean())})
      if (steps - step - 1) % eval_every_steps == 0:
        lines.append({"step": step + 1, **self.evaluate()})
    seconds = time.process_time() - began
    return lines, {
      "accuracy_before": lines[0]["eval_accuracy"], "accuracy_after": lines[-1]["eval_accuracy"],
      "greedy_after": self.evaluate(temperature=0.0)["eval_accuracy"], "skipped_updates": steps - self._version,
      "train_seconds": seconds}

"""A policy, a sampler and a reward in one thread, for experiments that look at single batches rather than at runs.

Nothing here is a runtime: the parts are those of `tba_jax`, called by hand in the order in which a run calls them.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np

from tba_jax.checkpoints.model_folder import read_model_folder
from tba_jax.checkpoints.run_state import load_initial
from tba_jax.learner import make_scorer
from tba_jax.losses.registry import LossFn
from tba_jax.models import transformer
from tba_jax.models.heads import token_logprobs
from tba_jax.models.variants import ModelConfig
from tba_jax.replay.collate import collate
from tba_jax.sampling.engine import Engine, SampledGroup, SampleRequest, sample_keys
from tba_jax.tokenizer import Tokenizer
from tba_jax.types import Batch, Draw, Prompt

Grade = Callable[[Prompt, str, bool], float]  # (prompt, response text, truncated) -> reward


def load_start(folder: pathlib.Path) -> tuple[ModelConfig, Tokenizer, Any]:
  """Model, tokenizer and parameters of version 0 of a run's folder."""
  cfg, tokenizer = read_model_folder(folder / "model")
  place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
                          transformer.abstract_params(cfg, jnp.float32))
  return cfg, tokenizer, load_initial(folder, abstract)


class Lab:
  """Samples groups by any parameters, grades them, and lays them out as a training batch.

  Args:
    cfg, tokenizer: of the model. reference: its parameters as a reference.
    grade: reward of a response. response_text: token ids -> the text that is graded.
    max_new_tokens: of a response; max_prompt_tokens: of a prompt. slots: samples decoded at once.
    stop_ids: by default the tokenizer's. temperature: of sampling and of all log-probabilities.
  """

  def __init__(self, cfg: ModelConfig, tokenizer: Tokenizer, reference: Any, *, grade: Grade,
               response_text: Callable[[Sequence[int]], str], max_prompt_tokens: int, max_new_tokens: int,
               slots: int = 64, stop_ids: Sequence[int] | None = None, temperature: float = 1.0):
    self.temperature = temperature
    self.cfg, self._reference, self._grade, self._text = cfg, reference, grade, response_text
    self._limit, self._row_tokens = max_new_tokens, max_prompt_tokens + max_new_tokens
    self._engine = Engine(
      cfg, jax.devices()[0], slots=slots, max_prompt_tokens=max_prompt_tokens, max_new_tokens=max_new_tokens,
      chunk_tokens=min(8, max_new_tokens), stop_ids=tokenizer.stop_ids if stop_ids is None else stop_ids,
      dtype=jnp.float32, log_mu_temperature=temperature)
    self._score = make_scorer(cfg, temperature=temperature, dtype=jnp.float32, chunk_tokens=1024)

    def log_pi(params: Any, rows: tuple[jax.Array, ...]) -> jax.Array:
      return token_logprobs(params, cfg, *rows, temperature=temperature, dtype=jnp.float32)[0]

    def pull(params: Any, rows: tuple[jax.Array, ...], weights: jax.Array) -> jax.Array:
      tree = jax.grad(lambda params: jnp.sum(log_pi(params, rows) * weights))(params)
      return jax.flatten_util.ravel_pytree(tree)[0]

    self._log_pi, self._pull = jax.jit(log_pi), jax.jit(pull)

  def sample(self, params: Any, prompts: Sequence[Prompt], *, num_samples: int, first: int = 0,
             greedy: bool = False) -> list[SampledGroup]:
    """A group for each prompt, in their order. `first`: number of the first group, which seeds the samples."""
    self._engine.set_weights(jax.jit(transformer.unstack)(params), 0)
    for index, prompt in enumerate(prompts):
      keys = sample_keys(0, occurrence=first + index, attempt=0, num_samples=num_samples)
      self._engine.submit(SampleRequest(tag=index, prompt=prompt.tokens, keys=keys, max_new_tokens=self._limit,
                                        temperature=0.0 if greedy else self.temperature))
    found: dict[int, SampledGroup] = {}
    while len(found) < len(prompts):
      found.update((group.tag, group) for group in self._engine.step())
    return [found[index] for index in range(len(prompts))]

  def rewards(self, prompt: Prompt, group: SampledGroup) -> np.ndarray:
    """Of the group's responses, float32 [S]."""
    texts = [self._text(row[:length]) for row, length in zip(group.tokens, group.lengths)]
    return np.array([self._grade(prompt, text, bool(cut)) for text, cut in zip(texts, group.truncated)], np.float32)

  def accuracy(self, params: Any, prompts: Sequence[Prompt]) -> float:
    """Share of the prompts whose greedy response earns 1."""
    groups = self.sample(params, prompts, num_samples=1, greedy=True)
    return float(np.mean([self.rewards(prompt, group)[0] == 1 for prompt, group in zip(prompts, groups)]))

  def draw(self, prompts: Sequence[Prompt], groups: Sequence[SampledGroup], *, version: int = 0) -> Draw:
    """The rows of whole groups, without log_ref (0)."""
    num = sum(len(group.lengths) for group in groups)
    prompt_width, width = max(len(prompt.tokens) for prompt in prompts), self._limit
    pad = lambda row, size: np.pad(row, (0, size - len(row)))
    rows = [(prompt, group, i) for prompt, group in zip(prompts, groups) for i in range(len(group.lengths))]
    each = lambda values: np.concatenate([np.asarray(values(prompt, group)) for prompt, group in zip(prompts, groups)])
    return Draw(
      prompts=np.stack([pad(prompt.tokens, prompt_width) for prompt, _, _ in rows]),
      prompt_lengths=np.array([len(prompt.tokens) for prompt, _, _ in rows], np.int32),
      tokens=np.stack([pad(group.tokens[i], width) for _, group, i in rows]),
      lengths=each(lambda _, group: group.lengths),
      log_mu=np.stack([pad(group.log_mu[i], width) for _, group, i in rows]),
      log_ref=np.zeros((num, width), np.float32), versions=np.full(num, version, np.int32), rewards=each(self.rewards),
      truncated=each(lambda _, group: group.truncated),
      group_ids=np.repeat(np.arange(len(groups), dtype=np.int32), [len(group.lengths) for group in groups]),
      valid=np.ones(num, bool), weights=np.ones(num, np.float32),
      prompt_ids=np.array([prompt.prompt_id for prompt, _, _ in rows]), occurrences=np.arange(num),
      rows=np.arange(num))

  def batch(self, draw: Draw) -> Batch:
    """What a step learns from, one row a response, with log_ref of this lab's reference."""
    batch = collate(draw, row_multiple=1, length_buckets=(self._row_tokens,))
    log_ref = np.asarray(self._score(self._reference, batch.tokens, batch.positions, batch.segment_ids))
    return batch._replace(log_ref=np.where(batch.sequence_ids < len(batch.rewards), log_ref, 0.0).astype(np.float32))

  def gradient(self, loss: LossFn, *, beta: float) -> Callable[[Any, Batch], jax.Array]:
    """(params, batch) -> gradient of a loss that needs no head, all parameters as one vector.

    By way of the loss's coefficients of log_pi, so that the model's passes are compiled once for all losses.
    """
    coefficients = jax.jit(jax.grad(lambda log_pi, batch: loss(log_pi, batch, beta=jnp.float32(beta))[0]))

    def of(params: Any, batch: Batch) -> jax.Array:
      rows = (batch.tokens, batch.positions, batch.segment_ids)
      return self._pull(params, rows, coefficients(self._log_pi(params, rows), batch))

    return of

"""The KL divergence to the reference, estimated on samples of the policy itself, which the rows of a batch are not."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from tba_jax.evaluate import Interrupted
from tba_jax.runtime.settings import RunSettings
from tba_jax.sampling.engine import Engine, SampledGroup, SampleRequest, sample_keys
from tba_jax.searcher import Searcher
from tba_jax.types import Prompt

# Keys of these samples: an attempt that no prompt of a run comes to, so that they share none with its rollouts.
_KL_ATTEMPT = 2**32 - 1


@dataclasses.dataclass(frozen=True)
class KlEstimate:
  """KL(policy || reference), nats a response: the mean over samples of the policy itself, and its standard error."""

  mean: float
  standard_error: float
  num_samples: int

  def scalars(self) -> dict[str, float]:
    """Under the names of metrics.jsonl. One sample has no error that is known."""
    error = {"kl_fresh_error": self.standard_error} if self.num_samples > 1 else {}
    return {"kl_fresh": self.mean, **error}


def kl_to_reference(
    engine: Engine,
    prompts: Sequence[Prompt],
    *,
    score: Callable[[Prompt, SampledGroup], np.ndarray],
    seed: int,
    num_samples: int,
    temperature: float,
    max_new_tokens: int,
    stopped: Callable[[], bool],
    on_chunk: Callable[[], None] = lambda: None,
) -> KlEstimate:
  """Samples each prompt by the weights that the idle engine holds and compares them with the reference.

  The policy is that of rollouts, at `temperature` on responses of up to max_new_tokens: log_mu of these samples is its
  own log_pi. The same keys serve at every version, so that a curve over versions has less noise than its points.

  Args:
    prompts: at least one. score: log_ref float32 [S, T] of a sampled group, 0 beyond its lengths.
    stopped: asked between chunks. on_chunk: called after each.
  Raises: Interrupted if `stopped` said so; the engine is idle then too.
  """
  for index, prompt in enumerate(prompts):
    keys = sample_keys(seed, occurrence=index, attempt=_KL_ATTEMPT, num_samples=num_samples)
    engine.submit(SampleRequest(tag=index, prompt=prompt.tokens, keys=keys, temperature=temperature,
                                max_new_tokens=max_new_tokens))
  by_prompt: dict[int, np.ndarray] = {}
  while len(by_prompt) < len(prompts):
    if stopped():
      engine.cancel()
      raise Interrupted
    for group in engine.step():
      real = np.arange(group.tokens.shape[1]) < group.lengths[:, None]
      gap = np.where(real, group.log_mu.astype(np.float64) - score(prompts[group.tag], group), 0.0)
      by_prompt[group.tag] = gap.sum(axis=1)
    on_chunk()
  ratios = np.concatenate([by_prompt[index] for index in range(len(prompts))])
  error = ratios.std(ddof=1) / math.sqrt(len(ratios)) if len(ratios) > 1 else math.inf
  return KlEstimate(float(ratios.mean()), float(error), len(ratios))


def _grade(prompt: Prompt, group: SampledGroup, reward: GroupReward, response_text: Callable[[Any], str]) -> Response:
  length, truncated = int(group.lengths[0]), bool(group.truncated[0])
  tokens = group.tokens[0, :length]
  text = response_text(tokens)
  reward_1 = reward(prompt, Responses((text,), (tokens,), np.array([truncated])))
  return Response(prompt, text, float(reward_1[0]), length, truncated)


def sampled_kl(
    searcher: Searcher, engine: Engine, prompts: Sequence[Prompt], settings: RunSettings, *, stopped: Callable[[], bool]
) -> dict[str, float]:
  """What metrics.jsonl gets of the divergence at the weights that a searcher's lent engine holds; {}: none is wanted.

  Raises: Interrupted if `stopped` said so.
  """
  if not settings.eval_kl_prompts:
    return {}
  return kl_to_reference(
      engine, prompts[: settings.eval_kl_prompts], score=searcher.score_by_reference, seed=settings.seed,
      num_samples=settings.samples_per_prompt, temperature=settings.temperature,
      max_new_tokens=settings.max_new_tokens, stopped=stopped, on_chunk=lambda: searcher.heartbeat.beat("eval")
  ).scalars()

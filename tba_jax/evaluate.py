"""How good a policy is on held-out prompts: greedy decoding through a searcher's engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tba_jax.sampling.engine import Engine, SampledGroup, SampleRequest
from tba_jax.tasks.base import GroupReward, Responses
from tba_jax.types import Prompt
from tba_jax.weights import Weights


@dataclasses.dataclass(frozen=True)
class Response:
  """One evaluated prompt, for people to read."""

  prompt: Prompt
  text: str
  reward: float
  num_tokens: int
  truncated: bool


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """Greedy results at one version; `accuracy` is the share of prompts whose response earns the full reward of 1."""

  version: int
  accuracy: float
  size: int
  mean_tokens: float
  truncated: float
  responses: tuple[Response, ...]


class Interrupted(Exception):
  """The evaluation was asked to stop before its end."""


def evaluate_greedy(
    engine: Engine,
    weights: Weights,
    prompts: Sequence[Prompt],
    *,
    reward: GroupReward,
    response_text: Callable[[Sequence[int]], str],
    max_new_tokens: int,
    stopped: Callable[[], bool],
    on_progress: Callable[[int], None] = lambda done: None,
) -> Evaluation:
  """Decodes every prompt once without randomness and grades it. The engine must be idle; it keeps `weights` afterwards.

  Args:
    prompts: at least one.
    reward: of which 1 is a success; called with one response at a time.
    stopped: asked between chunks.
    on_progress: called with the number of prompts done.
  Raises: Interrupted if `stopped` said so; the engine is idle then too.
  """
  assert engine.num_groups == 0, "an evaluation must not share its chunks with rollouts of other weights"
  engine.set_weights(weights.params, weights.version)
  key = np.zeros((1, 2), np.uint32)  # greedy decoding draws nothing
  for index, prompt in enumerate(prompts):
    engine.submit(SampleRequest(tag=index, prompt=prompt.tokens, keys=key, temperature=0.0, max_new_tokens=max_new_tokens))
  responses: dict[int, Response] = {}
  while len(responses) < len(prompts):
    if stopped():
      engine.cancel()
      raise Interrupted
    for group in engine.step():
      responses[group.tag] = _grade(prompts[group.tag], group, reward, response_text)
    on_progress(len(responses))
  ordered = tuple(responses[index] for index in range(len(prompts)))
  return Evaluation(
      version=weights.version,
      accuracy=float(np.mean([response.reward == 1.0 for response in ordered])),
      size=len(ordered),
      mean_tokens=float(np.mean([response.num_tokens for response in ordered])),
      truncated=float(np.mean([response.truncated for response in ordered])),
      responses=ordered,
  )


def _grade(prompt: Prompt, group: SampledGroup, reward: GroupReward, response_text: Callable[[Any], str]) -> Response:
  length, truncated = int(group.lengths[0]), bool(group.truncated[0])
  tokens = group.tokens[0, :length]
  text = response_text(tokens)
  reward_1 = reward(prompt, Responses((text,), (tokens,), np.array([truncated])))
  return Response(prompt, text, float(reward_1[0]), length, truncated)

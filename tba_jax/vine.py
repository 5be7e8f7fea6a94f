"""Values of the states within a response, by responses that begin there, as VinePPO takes them.

    a response in steps       s_0 | step 0 | s_1 | step 1 | s_2 ... | last step | end
    V(s_j)                    mean reward of `samples` responses that are begun at s_j and finished by the policy
    A of a token of step j    V(s_(j+1)) - V(s_j), the response's own reward in the place of V at the end

So the advantages of a response's steps add up to its reward less V(s_0), which all responses to a prompt share. Nothing
but responses is sampled: a state is a prompt and what has been said so far, which is a prompt too.

Source: Kazemnejad et al. 2024, arXiv:2410.01679, the advantage r + V_MC(s_(t+1)) - V_MC(s_t) without discount, its
states where steps of reasoning begin.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tba_jax.sampling.requests import SampledGroup, SampleRequest, continuation_keys, sample_keys
from tba_jax.tokenizer import Tokenizer
from tba_jax.types import Occurrence


@dataclasses.dataclass(frozen=True)
class VineSettings:
  """How many responses a value is the mean of, and where steps end."""

  samples: int
  step_tokens: int  # of a step; 0: a step ends with each token of `step_ends`
  step_ends: frozenset[int]


class State(NamedTuple):
  """The tag of a request: the state before a token of a response, or of the prompt alone (start 0 of sample -1)."""

  occurrence: Occurrence
  sample: int
  start: int  # response tokens before it


def newline_ids(tokenizer: Tokenizer) -> frozenset[int]:
  """The tokens whose text holds a newline."""
  return frozenset(token for token in range(tokenizer.vocab_size) if "\n" in tokenizer.decode([token]))


def step_starts(tokens: Sequence[int], settings: VineSettings) -> list[int]:
  """Where the steps of a response begin: ascending, the first 0, each less than the number of tokens (at least 1)."""
  if settings.step_tokens:
    return list(range(0, len(tokens), settings.step_tokens))
  return [0] + [at + 1 for at, token in enumerate(tokens[:-1]) if int(token) in settings.step_ends]


class VineGroup:
  """A sampled group while the values of its states are being found.

  Args:
    prompt: int32 [P]. sampled: the group, tagged with its occurrence.
    left_out: bool [S], responses that will not be trained on and need no values.
  """

  def __init__(self, prompt: np.ndarray, sampled: SampledGroup, settings: VineSettings, *, left_out: np.ndarray):
    self.sampled, self.occurrence = sampled, sampled.tag
    self._prompt, self._settings = prompt, settings
    self._starts = [step_starts(row[:n], settings) for row, n in zip(sampled.tokens, sampled.lengths)]
    self._left_out = left_out
    inside = [(i, start) for i, starts in enumerate(self._starts) if not left_out[i] for start in starts[1:]]
    self._wanted = [(-1, 0), *inside] if not left_out.all() else []
    self._values: dict[tuple[int, int], float] = {}

  @property
  def is_complete(self) -> bool:
    """Whether every value is there."""
    return len(self._values) == len(self._wanted)

  def requests(self, *, seed: int, temperature: float, max_new_tokens: int) -> list[SampleRequest]:
    """What is to be sampled, for an engine that takes prompts of P + max_new_tokens - 1 tokens.

    Keys: those of the prompt's state go on behind the group's own; a state within a response folds itself into the key
    of that response.
    """
    num_samples, extra = len(self.sampled.lengths), self._settings.samples
    keys = sample_keys(
      seed, occurrence=self.occurrence.occurrence, attempt=self.occurrence.attempt, num_samples=num_samples + extra)
    made = []
    for sample, start in self._wanted:
      begun = self.sampled.tokens[sample, :start]
      made.append(SampleRequest(
        tag=State(self.occurrence, sample, start), prompt=np.concatenate([self._prompt, begun]),
        keys=keys[num_samples:] if sample < 0 else continuation_keys(keys[sample], start=start, num_samples=extra),
        temperature=temperature, max_new_tokens=max_new_tokens - start))
    return made

  def joined(self, found: SampledGroup) -> SampledGroup:
    """Whole responses: the beginning that is the state of `found`, and each of its continuations."""
    _, sample, start = found.tag
    begun = np.broadcast_to(self.sampled.tokens[sample, :start], (len(found.lengths), start))
    return dataclasses.replace(
      found, tokens=np.concatenate([begun, found.tokens], axis=1), lengths=found.lengths + start)

  def add(self, state: State, value: float) -> None:
    """Takes the value of a state; NaN if no response from there could be graded."""
    self._values[state.sample, state.start] = value

  def advantages(self, rewards: np.ndarray) -> np.ndarray:
    """float32 [S, T] of each token, 0 beyond the lengths; NaN in a whole row of which a value is missing or left out.

    Args:
      rewards: of the responses, [S].
    """
    found = np.zeros(self.sampled.tokens.shape, np.float32)
    for i, (starts, length) in enumerate(zip(self._starts, self.sampled.lengths)):
      values = [self._values.get((-1, 0) if start == 0 else (i, start), np.nan) for start in starts]
      gains = np.diff(np.array([*values, rewards[i]], np.float64))
      steps = np.repeat(gains, np.diff([*starts, length]))
      found[i, :length] = steps if np.isfinite(steps).all() else np.nan
    return found

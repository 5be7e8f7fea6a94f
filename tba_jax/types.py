"""The data that flows between the parts, and the one legend of shape letters.

    B rows of a batch      T positions of a row        N responses of a batch (a row holds one, or several when packed)
    G training groups      K responses of a training group (at most)      S samples of a sampling group
    L layers               D model width               Q query heads, K kv heads (models only), H head width
    F MLP width            V rows of the embedding     P prompt tokens

Log-probabilities are float32 nats at one temperature T of the run. `log_pi` is of the policy being trained, `log_mu` of
the policy that sampled, `log_ref` of the frozen reference. A per-token array is aligned with the token it scores: entry
t is log p(token t | tokens < t). Masks go by position and length, never by token id. A version is the number of
optimizer updates that the weights have seen.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class Prompt:
  """One row of a task's data. Two equal texts in a data set are two prompts with two ids."""

  prompt_id: int
  tokens: np.ndarray  # int32 [P]
  text: str
  answer: str  # what the task's reward needs to grade a response; opaque to everything else


@dataclasses.dataclass(frozen=True)
class Occurrence:
  """One issue of a prompt to a searcher; its number is global over the run, and with `attempt` it seeds the samples'
  keys."""

  occurrence: int
  prompt_id: int
  attempt: int = 0


@dataclasses.dataclass(frozen=True)
class RolloutGroup:
  """The responses sampled for one prompt occurrence: written once at the searcher and never resent.

  Entries of the [S, T] arrays at or beyond a row's length are 0 and mean nothing. The last token of a row that is not
  truncated is its stop token, which belongs to the response and is trained.
  """

  prompt_id: int
  occurrence: int
  attempt: int
  prompt: np.ndarray  # int32 [P]
  tokens: np.ndarray  # int32 [S, T]
  lengths: np.ndarray  # int32 [S], each >= 1
  log_mu: np.ndarray  # float32 [S, T]
  log_ref: np.ndarray  # float32 [S, T]
  versions: np.ndarray  # int32 [S, T], of the weights that sampled each token
  rewards: np.ndarray  # float32 [S], finite
  truncated: np.ndarray  # bool [S], the length limit was hit before any stop token
  ref_version: int
  temperature: float  # at which log_ref and log_mu are taken
  searcher: int = 0
  texts: tuple[str, ...] = ()  # what was graded, for people to read; not kept in the buffer
  advantages: np.ndarray | None = None  # float32 [S, T], reward units; only where the loss asks for them


@dataclasses.dataclass(frozen=True)
class Draw:
  """Rows that the replay buffer hands to the trainer, on the host. Row i of every array is the same response.

  Rows of a training group share a group id; groups are contiguous and rows that only pad the batch to its size are not
  `valid`.
  """

  prompts: np.ndarray  # int32 [N, P]
  prompt_lengths: np.ndarray  # int32 [N]
  tokens: np.ndarray  # int32 [N, T]
  lengths: np.ndarray  # int32 [N]
  log_mu: np.ndarray  # float32 [N, T]
  log_ref: np.ndarray  # float32 [N, T]; NaN in rows that an older reference scored: to be scored again before use
  versions: np.ndarray  # int32 [N], of the OLDEST token of each response
  rewards: np.ndarray  # float32 [N]
  truncated: np.ndarray  # bool [N]
  group_ids: np.ndarray  # int32 [N], 0..G-1
  valid: np.ndarray  # bool [N]
  weights: np.ndarray  # float32 [N], importance weight of the row's group (1 unless the priority corrects for itself)
  prompt_ids: np.ndarray  # int64 [N]
  occurrences: np.ndarray  # int64 [N]
  rows: np.ndarray  # int64 [N], where the buffer holds it, for updates of priorities; -1 for padding rows
  advantages: np.ndarray | None = None  # float32 [N, T], reward units; only where the loss asks for them


class Batch(NamedTuple):
  """What one optimizer step learns from, on the trainer's devices. Several responses may be packed in one row.

  `sequence_ids` says which of the N responses a response token belongs to; prompt and padding tokens hold N, so a
  segment sum with N + 1 segments drops them. `num_*` count the whole batch, also inside a micro-batch: everything is
  normalised by them.
  """

  tokens: jax.Array  # int32 [B, T]
  positions: jax.Array  # int32 [B, T], from 0 within each sequence
  segment_ids: jax.Array  # int32 [B, T], 0 for padding, 1.. for the sequences of a row; attention stays within one
  sequence_ids: jax.Array  # int32 [B, T]
  log_mu: jax.Array  # float32 [B, T], 0 where sequence_ids == N
  log_ref: jax.Array  # float32 [B, T], 0 where sequence_ids == N
  rewards: jax.Array  # float32 [N]
  group_ids: jax.Array  # int32 [N], 0..G-1 with G <= N
  valid: jax.Array  # bool [N]
  truncated: jax.Array  # bool [N]
  weights: jax.Array  # float32 [N]
  num_responses: jax.Array  # float32 [], valid responses of the whole batch
  num_groups: jax.Array  # float32 [], groups with a valid response
  num_tokens: jax.Array  # float32 [], response tokens of valid responses
  advantages: jax.Array | None = None  # float32 [B, T], 0 where sequence_ids == N; only where the loss asks for them


class TrainState(NamedTuple):
  """Everything that an optimizer step reads and writes. Donated to the step."""

  params: Any
  opt_state: Any
  version: jax.Array  # int32 [], applied updates
  steps: jax.Array  # int32 [], attempted updates
  skipped_in_row: jax.Array  # int32 [], updates skipped since the last applied one
  head: Any = ()  # parameters of the scalar head that some losses learn beside the model; never published or exported
  head_opt_state: Any = ()

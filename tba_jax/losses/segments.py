"""Sums and means over the responses and the training groups of a batch: the only place that knows the batch's layout.

Three levels, and the arrays that live on them: tokens [B, T], responses [N], groups (a [N] array in which every
response carries the value of its group, so that nothing ever depends on how groups are numbered or ordered). Everything
goes through `sequence_ids` and `group_ids` and counts only rows that are `valid`: the order of rows, packing, padding
rows and micro-batches of whole groups cannot change a result beyond rounding.

Means of a batch divide by the counts of the WHOLE batch (`num_responses`, `num_groups`, `num_tokens`), so the losses
and metrics of its micro-batches add up to those of the batch. A micro-batch numbers its responses 0..N-1 and its groups
below N by itself.

This module knows no loss, and checks shapes only: it trusts ids to be in range.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from tba_jax.types import Batch


def check_layout(log_pi: jax.Array, batch: Batch) -> None:
  """Raises AssertionError where arrays lack the shapes that `types.Batch` promises; free, it runs at trace time."""
  chex.assert_rank([log_pi, batch.rewards], [2, 1])
  chex.assert_type([log_pi, batch.log_mu, batch.log_ref, batch.rewards], jnp.float32)
  chex.assert_equal_shape([log_pi, batch.sequence_ids, batch.log_mu, batch.log_ref])
  chex.assert_equal_shape([batch.rewards, batch.group_ids, batch.valid, batch.truncated, batch.weights])


def at_tokens(values: jax.Array, batch: Batch) -> jax.Array:
  """Gives every response token the value [N] of its response, prompt and padding tokens 0 (False): [B, T]."""
  return jnp.concatenate([values, jnp.zeros((1,), values.dtype)])[batch.sequence_ids]


def token_mask(batch: Batch) -> jax.Array:
  """True at the tokens that count: response tokens of valid responses. Returns bool [B, T]."""
  return at_tokens(batch.valid, batch)


def masked(values: jax.Array, batch: Batch) -> jax.Array:
  """`values` [B, T] where a token counts and exactly 0 elsewhere, NaN or not; its gradient too."""
  return jnp.where(token_mask(batch), values, 0.0)


def response_sums(values: jax.Array, batch: Batch) -> jax.Array:
  """Sums `values` [B, T] over the tokens of each response: [N], 0 for empty responses and rows that are not valid."""
  num = batch.rewards.shape[0]
  flat = jax.ops.segment_sum(masked(values, batch).reshape(-1), batch.sequence_ids.reshape(-1), num_segments=num + 1)
  return flat[:num]


def response_lengths(batch: Batch) -> jax.Array:
  """Counts the tokens of each response: float32 [N], 0 for rows that are not valid."""
  return response_sums(jnp.ones(batch.sequence_ids.shape, jnp.float32), batch)


def suffix_sums(values: jax.Array, batch: Batch, *, decay: float = 1.0) -> jax.Array:
  """Sums `values` [B, T] over each token and those after it in the same response: [B, T], 0 where none counts.

  A token d places later counts decay^d times. The scan starts afresh at the last token of a response (responses are
  contiguous), so what else a packed row holds costs no digits.
  """

  def combine(later: tuple[jax.Array, jax.Array], earlier: tuple[jax.Array, jax.Array]):
    carried = jnp.where(earlier[1] > 0.0, earlier[1] * later[0], 0.0)  # whatever another response holds, inf too
    return earlier[0] + carried, earlier[1] * later[1]

  going_on = jnp.where(last_token_mask(batch), 0.0, decay)
  sums, _ = jax.lax.associative_scan(combine, (masked(values, batch), going_on), reverse=True, axis=1)
  return masked(sums, batch)


def following(values: jax.Array, batch: Batch) -> jax.Array:
  """The value [B, T] of the next token of the same response, 0 at its last token and where none counts: [B, T]."""
  shifted = jnp.pad(values[:, 1:], ((0, 0), (0, 1)))
  return masked(jnp.where(last_token_mask(batch), 0.0, shifted), batch)


def at_first_token(values: jax.Array, batch: Batch) -> jax.Array:
  """`values` [B, T] at the first token of each response, mean over its group: [N]; every row carries its group's.

  What is known before the first token is known of the prompt alone, so the rows of a group differ by rounding at most;
  an empty response takes its group's.
  """
  ids = batch.sequence_ids
  before = jnp.pad(ids[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
  num = batch.rewards.shape[0]
  first = masked(jnp.where(ids != before, values, 0.0), batch)
  sums = jax.ops.segment_sum(first.reshape(-1), ids.reshape(-1), num_segments=num + 1)[:num]
  has_tokens = (response_lengths(batch) > 0.0).astype(jnp.float32)
  return group_sums(sums, batch) / jnp.maximum(group_sums(has_tokens, batch), 1.0)


def last_token_mask(batch: Batch) -> jax.Array:
  """True where the next position of the row belongs to another response or to none. Returns bool [B, T]."""
  ends = jnp.full((batch.sequence_ids.shape[0], 1), -1, batch.sequence_ids.dtype)
  return batch.sequence_ids != jnp.concatenate([batch.sequence_ids[:, 1:], ends], axis=1)


def response_max(values: jax.Array, batch: Batch) -> jax.Array:
  """Largest of the non-negative `values` [B, T] of each response; 0 for empty and for not valid ones. Returns [N]."""
  num = batch.rewards.shape[0]
  flat = jax.ops.segment_max(masked(values, batch).reshape(-1), batch.sequence_ids.reshape(-1), num_segments=num + 1)
  return jnp.maximum(flat[:num], 0.0)


def kept(values: jax.Array, batch: Batch) -> jax.Array:
  """`values` [N] of the valid responses, 0 for the others (a NaN reward of a row that is not valid stays out)."""
  return jnp.where(batch.valid, values, 0.0)


def group_sums(values: jax.Array, batch: Batch) -> jax.Array:
  """Sums `values` [N] over the valid rows of each group; every row carries its group's sum. Returns [N]."""
  return jnp.sum(jnp.where(_same_group(batch), kept(values, batch), 0.0), axis=1)


def group_counts(batch: Batch) -> jax.Array:
  """Number of valid rows of each response's group: float32 [N], 0 where a group has none."""
  return group_sums(jnp.ones(batch.rewards.shape, jnp.float32), batch)


def group_means(values: jax.Array, batch: Batch) -> jax.Array:
  """Means of `values` [N] over the valid rows of each group; every row carries its group's mean. Returns [N]."""
  return group_sums(values, batch) / jnp.maximum(group_counts(batch), 1.0)


def group_max(values: jax.Array, batch: Batch) -> jax.Array:
  """Largest of `values` [N] among the valid rows of each group (-inf where there is none). Returns [N]."""
  return jnp.max(jnp.where(_same_group(batch) & batch.valid, values, -jnp.inf), axis=1)


def _same_group(batch: Batch) -> jax.Array:
  """Whether two responses are of one group: bool [N, N].

  What is summed by it is one fused pass: no array of this size is made, nothing is sorted, and nothing is scattered,
  which a TPU does one element after another.
  """
  return batch.group_ids[:, None] == batch.group_ids


def centre(values: jax.Array, batch: Batch) -> jax.Array:
  """Subtracts from each valid row the mean of its group's valid rows; 0 for rows that are not valid. Returns [N].

  The group's smallest value is taken off first: equal values then give exactly 0 instead of the rounding of their mean
  (which a division by their standard deviation would blow up), and a large common part costs no digits.
  """
  smallest = -group_max(-jax.lax.stop_gradient(values), batch)
  shifted = kept(values - kept(smallest, batch), batch)
  return kept(shifted - group_means(shifted, batch), batch)


def group_stds(values: jax.Array, batch: Batch) -> jax.Array:
  """Standard deviation of `values` [N] in each group, dividing by the valid count K; takes no gradient. Returns [N]."""
  return jnp.sqrt(group_means(jnp.square(centre(jax.lax.stop_gradient(values), batch)), batch))


def standardise(values: jax.Array, batch: Batch, *, floor: float) -> jax.Array:
  """(values - mean) / (std + floor) in each group, divisor K; exactly 0 where all are equal. Returns [N]."""
  return centre(values, batch) / (group_stds(values, batch) + floor)


def group_ranks(values: jax.Array, batch: Batch) -> jax.Array:
  """Rank of each valid row in its group by `values` [N], 0 for the smallest; ties in the order of rows. Returns int32
  [N].

  Rows that are not valid rank behind all valid ones of their group.
  """
  values = jnp.where(batch.valid, values, jnp.inf)
  rows = jnp.arange(values.shape[0])
  ahead = (values < values[:, None]) | ((values == values[:, None]) & (rows < rows[:, None]))
  return jnp.sum(_same_group(batch) & ahead, axis=1, dtype=jnp.int32)


def mean_of_responses(values: jax.Array, batch: Batch) -> jax.Array:
  """Sum of `values` [N] over this (micro-)batch's valid rows / valid responses of the whole batch. Returns a scalar."""
  return jnp.sum(kept(values, batch)) / jnp.maximum(batch.num_responses, 1.0)


def mean_of_groups(values: jax.Array, batch: Batch) -> jax.Array:
  """Mean over groups of a value that every row of a group carries ([N]), by the whole batch's count: a scalar."""
  return jnp.sum(kept(values / jnp.maximum(group_counts(batch), 1.0), batch)) / jnp.maximum(batch.num_groups, 1.0)


def mean_of_tokens(values: jax.Array, batch: Batch) -> jax.Array:
  """Sum of `values` [B, T] over the tokens that count / such tokens of the whole batch. Returns a scalar."""
  return jnp.sum(masked(values, batch)) / jnp.maximum(batch.num_tokens, 1.0)


def aggregate(values: jax.Array, batch: Batch, *, how: str) -> jax.Array:
  """Turns `values` [B, T] of tokens into a scalar.

  "response_sum": sum over tokens, mean over responses (the gradient of whole-response log-probabilities);
  "response_mean": mean over the tokens of a response, then over responses; "token_mean": mean over all response tokens.
  Raises ValueError for anything else.
  """
  if how == "token_mean":
    return mean_of_tokens(values, batch)
  sums = response_sums(values, batch)
  if how == "response_mean":
    sums = sums / jnp.maximum(response_lengths(batch), 1.0)
  elif how != "response_sum":
    raise ValueError(f"aggregate={how!r} must be response_sum, response_mean or token_mean.")
  return mean_of_responses(sums, batch)

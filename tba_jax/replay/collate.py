"""Rows of the replay buffer to the arrays of one optimizer step, on the host, in a bounded set of shapes.

Every array here is numpy: placing it on the trainer's mesh is the train step's business. A sequence is a prompt
followed by its response. Unpacked, row i of the batch holds response i; packed, sequences share rows and `segment_ids`
keeps them apart. Both are one scatter with different (row, offset) pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tba_jax.types import Batch, Draw


class BatchShape(NamedTuple):
  """Static shape of a batch: one compiled train step each."""

  num_rows: int  # B
  row_tokens: int  # T
  num_responses: int  # N, padded


class _Sequences(NamedTuple):
  """Prompts and responses to lay out, right padded; entries beyond the lengths are never read."""

  prompts: np.ndarray  # int32 [N, P]
  prompt_lengths: np.ndarray  # int32 [N]
  tokens: np.ndarray  # int32 [N, R]
  lengths: np.ndarray  # int32 [N], 0 for rows that are not valid


def batch_shapes(
  *, num_responses: int, row_multiple: int, length_buckets: Sequence[int], pack: bool = False
) -> tuple[BatchShape, ...]:
  """All shapes that `collate` can return for draws of `num_responses` rows, for compiling ahead and for counting.

  Args:
    num_responses: rows of a draw, valid or not, >= 1.
    row_multiple: the rows of a batch are a multiple of this (micro-batches x data-parallel devices).
    length_buckets: tokens of a row, strictly ascending.
    pack: whether sequences share rows. The number of rows is then `row_multiple` times one of 1, 2, 3, 4, 6, 8, 12, 16,
      ... (powers of two and one and a half times those), never more than unpacked: at most a third of the rows is
      padding.
  Raises: ValueError for a size below 1 or buckets that do not ascend.
  """
  _check_shape_arguments(num_responses, row_multiple, length_buckets)
  padded = round_up(num_responses, row_multiple)
  row_counts = _packed_row_counts(padded, row_multiple) if pack else (padded,)
  return tuple(BatchShape(rows, length, padded) for length in length_buckets for rows in row_counts)


def collate(
  draw: Draw, *, row_multiple: int, length_buckets: Sequence[int], pack: bool = False, num_rows: int | None = None
) -> Batch:
  """The batch that a draw makes: prompt and response tokens in rows, the rest per response. All arrays are numpy.

  Rows that are not valid hold no tokens at all (segment 0), so nothing of them can be attended or trained; their
  rewards are 0. Responses are padded to a multiple of `row_multiple` with such rows.

  Args:
    draw: N rows from the buffer; groups contiguous.
    row_multiple: see `batch_shapes`.
    length_buckets: tokens of a row; the smallest that holds the longest sequence is taken.
    pack: put several sequences in a row (first fit, longest first, over the whole batch). Responses of one group then
      lie in different rows: a step in micro-batches must not assume whole groups.
    num_rows: with `pack`, rows of the batch whatever the draw needs, so that all draws have one shape; those without
      tokens come last, where a train step in micro-batches skips them. Default: the least of `batch_shapes`.
  Raises: ValueError if a valid row has an empty prompt or response, a sequence does not fit the largest bucket, or the
    sequences do not fit `num_rows`.
  """
  _check_shape_arguments(len(draw.lengths), row_multiple, length_buckets)
  padding = round_up(len(draw.lengths), row_multiple) - len(draw.lengths)
  valid = np.asarray(draw.valid, bool)
  _check_not_empty(draw.prompt_lengths[valid], draw.lengths[valid])
  sequences = _Sequences(
    draw.prompts, np.where(valid, draw.prompt_lengths, 0), draw.tokens, np.where(valid, draw.lengths, 0)
  )
  rows, offsets, shape = _place(sequences, row_multiple, length_buckets, pack, num_rows)
  aligned = {"log_mu": draw.log_mu, "log_ref": draw.log_ref, "advantages": draw.advantages}
  aligned = {name: values for name, values in aligned.items() if values is not None}
  per_token = _scatter(sequences, rows, offsets, shape, aligned)
  return Batch(
    **per_token,
    rewards=_pad(np.where(valid, draw.rewards, 0.0).astype(np.float32), padding, 0.0),
    group_ids=_pad(draw.group_ids.astype(np.int32), padding, draw.group_ids[-1]),
    valid=_pad(valid, padding, False),
    truncated=_pad(draw.truncated.astype(bool), padding, False),
    weights=_pad(np.where(valid, draw.weights, 1.0).astype(np.float32), padding, 1.0),
    num_responses=np.float32(valid.sum()),
    num_groups=np.float32(len(np.unique(draw.group_ids[valid]))),
    num_tokens=np.float32(sequences.lengths.sum()),
  )


def collate_supervised(
  examples: Sequence[tuple[Sequence[int], Sequence[int]]],
  *,
  row_multiple: int,
  length_buckets: Sequence[int],
  pack: bool = True,
  num_responses: int | None = None,
) -> Batch:
  """The batch of supervised fine-tuning examples (prompt ids, completion ids): completions are trained, rewards are 0.

  Args:
    examples: at least one; the completion holds its stop token, if it is to be learnt.
    row_multiple, length_buckets, pack: as for `collate`. Each example is its own group.
    num_responses: pad the examples to this number, so that a last, smaller batch has the shape of the others; default:
      no padding but to `row_multiple`.
  Raises: ValueError for an empty prompt or completion, one that does not fit, or more examples than `num_responses`.
  """
  num_examples = len(examples)
  num_rows = num_examples if num_responses is None else num_responses
  if num_examples < 1 or num_examples > num_rows:
    raise ValueError(f"{num_examples} examples do not fit num_responses={num_rows}; give between 1 and {num_rows}.")
  prompts, prompt_lengths = _right_pad([prompt for prompt, _ in examples], num_rows)
  tokens, lengths = _right_pad([completion for _, completion in examples], num_rows)
  zeros = np.zeros(tokens.shape, np.float32)
  per_row = np.zeros(num_rows, np.int64)
  draw = Draw(
    prompts=prompts,
    prompt_lengths=prompt_lengths,
    tokens=tokens,
    lengths=lengths,
    log_mu=zeros,
    log_ref=zeros,
    versions=per_row.astype(np.int32),
    rewards=per_row.astype(np.float32),
    truncated=per_row.astype(bool),
    group_ids=np.arange(num_rows, dtype=np.int32),
    valid=np.arange(num_rows) < num_examples,
    weights=np.ones(num_rows, np.float32),
    prompt_ids=per_row,
    occurrences=per_row,
    rows=per_row - 1,
  )
  return collate(draw, row_multiple=row_multiple, length_buckets=length_buckets, pack=pack)


def _place(
  sequences: _Sequences, row_multiple: int, length_buckets: Sequence[int], pack: bool, num_rows: int | None
) -> tuple[np.ndarray, np.ndarray, BatchShape]:
  """Row and offset of each sequence, and the batch shape that holds them."""
  totals = sequences.prompt_lengths + sequences.lengths
  padded = round_up(len(totals), row_multiple)
  row_tokens = _bucket_for(int(totals.max()), length_buckets)
  if not pack:
    return np.arange(len(totals)), np.zeros(len(totals), np.int64), BatchShape(padded, row_tokens, padded)
  rows, offsets, needed = _first_fit_decreasing(totals, row_tokens)
  if num_rows is None:
    num_rows = next(n for n in _packed_row_counts(padded, row_multiple) if n >= needed)
  if needed > num_rows:
    raise ValueError(f"num_rows={num_rows} rows of {row_tokens} tokens hold too few, {needed} are needed; raise it.")
  return rows, offsets, BatchShape(num_rows, row_tokens, padded)


def _scatter(
  sequences: _Sequences, rows: np.ndarray, offsets: np.ndarray, shape: BatchShape, aligned: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
  """Per-token arrays [B, T] of a batch; `aligned` holds float arrays [N, R] that go where the response tokens go."""
  size = shape.num_rows * shape.row_tokens
  starts = rows * shape.row_tokens + offsets
  in_prompt = np.arange(sequences.prompts.shape[1]) < sequences.prompt_lengths[:, None]
  in_response = np.arange(sequences.tokens.shape[1]) < sequences.lengths[:, None]
  prompt_at = (starts[:, None] + np.arange(in_prompt.shape[1]))[in_prompt]
  response_at = ((starts + sequences.prompt_lengths)[:, None] + np.arange(in_response.shape[1]))[in_response]
  segments = _segment_numbers(rows, offsets)

  def per_token(dtype: type, fill: int, prompt: np.ndarray | None, response: np.ndarray) -> np.ndarray:
    flat = np.full(size, fill, dtype)
    if prompt is not None:
      flat[prompt_at] = np.broadcast_to(prompt, in_prompt.shape)[in_prompt]
    flat[response_at] = np.broadcast_to(response, in_response.shape)[in_response]
    return flat.reshape(shape.num_rows, shape.row_tokens)

  response_positions = sequences.prompt_lengths[:, None] + np.arange(in_response.shape[1])
  return {
    "tokens": per_token(np.int32, 0, sequences.prompts, sequences.tokens),
    "positions": per_token(np.int32, 0, np.arange(in_prompt.shape[1]), response_positions),
    "segment_ids": per_token(np.int32, 0, segments[:, None], segments[:, None]),
    "sequence_ids": per_token(np.int32, shape.num_responses, None, np.arange(len(rows))[:, None]),
    **{name: per_token(np.float32, 0, None, values) for name, values in aligned.items()},
  }


def _first_fit_decreasing(totals: np.ndarray, row_tokens: int) -> tuple[np.ndarray, np.ndarray, int]:
  """First fit, longest first. Sequences of no tokens go behind the end of row 0: they write and count as nothing."""
  rows, offsets = np.zeros(len(totals), np.int64), np.full(len(totals), row_tokens)
  used = np.zeros(len(totals), np.int64)
  num_rows = 0
  for index in np.argsort(-totals, kind="stable"):  # stable: equal lengths keep the draw's order
    if totals[index] == 0:
      break
    row = int(np.argmax(used + totals[index] <= row_tokens))
    rows[index], offsets[index] = row, used[row]
    used[row] += totals[index]
    num_rows = max(num_rows, row + 1)
  return rows, offsets, max(num_rows, 1)


def _segment_numbers(rows: np.ndarray, offsets: np.ndarray) -> np.ndarray:
  """1, 2, ... within each row, by offset."""
  order = np.lexsort((offsets, rows))
  first_of_row = np.searchsorted(rows[order], rows[order], side="left")
  numbers = np.empty(len(rows), np.int32)
  numbers[order] = np.arange(len(rows)) - first_of_row + 1
  return numbers


def _packed_row_counts(most: int, row_multiple: int) -> tuple[int, ...]:
  """row_multiple x (1, 2, 3, 4, 6, 8, 12, ...) below `most`, then `most`."""
  counts, power = [], 1
  while power * row_multiple < most:
    counts.append(power * row_multiple)
    if power > 1 and power // 2 * 3 * row_multiple < most:
      counts.append(power // 2 * 3 * row_multiple)
    power *= 2
  return (*counts, most)


def _bucket_for(num_tokens: int, length_buckets: Sequence[int]) -> int:
  for length in length_buckets:
    if num_tokens <= length:
      return length
  raise ValueError(
    f"a prompt and its response have {num_tokens} tokens, more than the largest of "
    f"length_buckets={tuple(length_buckets)}; add a bucket that holds the longest prompt plus the longest response."
  )


def _check_shape_arguments(num_responses: int, row_multiple: int, length_buckets: Sequence[int]) -> None:
  for name, value in (("num_responses", num_responses), ("row_multiple", row_multiple)):
    if value < 1:
      raise ValueError(f"{name}={value} must be at least 1.")
  buckets = list(length_buckets)
  if not buckets or buckets[0] < 1 or any(a >= b for a, b in zip(buckets, buckets[1:])):
    raise ValueError(f"length_buckets={tuple(buckets)} must be token counts in ascending order, such as (256, 512).")


def _check_not_empty(prompt_lengths: np.ndarray, lengths: np.ndarray) -> None:
  # Without a prompt token the first response token has no predecessor, so it would never be trained.
  for name, values in (("prompt", prompt_lengths), ("response", lengths)):
    if len(values) and values.min() < 1:
      raise ValueError(f"a valid row has an empty {name}; each needs at least one token (a prompt may be just BOS).")


def _right_pad(lists: Sequence[Sequence[int]], num_rows: int) -> tuple[np.ndarray, np.ndarray]:
  lengths = np.zeros(num_rows, np.int32)
  lengths[: len(lists)] = [len(ids) for ids in lists]
  padded = np.zeros((num_rows, max(int(lengths.max()), 1)), np.int32)
  for row, ids in enumerate(lists):
    padded[row, : len(ids)] = ids
  return padded, lengths


def _pad(values: np.ndarray, num: int, fill: float | bool) -> np.ndarray:
  return np.concatenate([values, np.full(num, fill, values.dtype)])


def round_up(value: int, multiple: int) -> int:
  """The least multiple of `multiple` that is not below `value`."""
  return -(-value // multiple) * multiple

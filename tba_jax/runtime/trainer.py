"""The trainer side of a run: turns draws into optimizer steps on its mesh. It never generates and never asks a searcher
for anything."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.replay.collate import BatchShape, batch_shapes, collate, round_up
from tba_jax.types import Batch, Draw, TrainState


class TooManyNonFinite(RuntimeError):
  """Several updates in a row had a loss or gradient that was not finite."""


@dataclasses.dataclass(frozen=True)
class Prepared:
  """A draw and the batch it makes, on the trainer's devices."""

  draw: Draw
  batch: Batch
  real_token_share: float  # prompt and response tokens / token positions that the step computes


@dataclasses.dataclass(frozen=True)
class StepReport:
  """What one optimizer step did, on the host."""

  metrics: dict[str, float]
  draw: Draw
  trained_at: int  # version that the rows were trained at
  staleness: np.ndarray  # int [valid rows]
  num_tokens: int
  real_token_share: float
  secs: float
  # Float32 [N], |log Z - delta| in nats of the draw's rows; None: not asked for, or the update was skipped.
  residuals: np.ndarray | None


class Trainer:
  """Owns the TrainState. `dispatch` starts a step and returns at once; `finish` waits for it.

  Args:
    state: initial TrainState, on the trainer's devices.
    step: jitted (state, batch, beta, *frozen) -> (state, metrics), the state donated.
    beta_at_update: KL temperature of update u, from 1.
    tempering_at_update: factors of beta and of log_ref at update u. Rows keep what they were scored with: a batch is
      scaled when its step begins.
    placement: of a Batch: shardings.
    row_multiple, length_buckets: see `collate`.
    micro_batches: that the step splits its rows into.
    pack: put several sequences in a row of the largest bucket. A batch then has one shape, as many rows as responses,
      and the step must skip the micro-batches that no row is needed in; groups are split over micro-batches.
    max_nonfinite_in_row: after so many skipped updates in a row `finish` raises.
    dump_folder: where the batch of such an update is written.
    frozen: further arguments of the step, which it only reads: the base of adapters.
  """

  def __init__(
      self,
      *,
      state: TrainState,
      step: Any,
      beta_at_update: Callable[[int], float],
      tempering_at_update: Callable[[int], tuple[float, float]],
      placement: Batch,
      row_multiple: int,
      length_buckets: Sequence[int],
      micro_batches: int,
      pack: bool,
      max_nonfinite_in_row: int,
      dump_folder: str | os.PathLike,
      frozen: tuple[Any, ...] = (),
  ):
    self.state, self._frozen = state, frozen
    self._step, self._placement = step, placement
    self._beta_at_update, self._tempering_at_update = beta_at_update, tempering_at_update
    self._scale = jax.jit(jnp.multiply, out_shardings=placement.log_ref)
    self._row_multiple, self._micro_batches, self._pack = row_multiple, micro_batches, pack
    self._length_buckets = tuple(length_buckets)[-1:] if pack else tuple(length_buckets)
    self._max_nonfinite_in_row, self._dump_folder = max_nonfinite_in_row, pathlib.Path(dump_folder)
    self.version = int(state.version)
    self.steps = int(state.steps)
    self._under_way: tuple[Prepared, dict[str, jax.Array], float] | None = None
    self._programs: dict[tuple[int, ...], Any] = {}  # compiled step by the shape of a batch's rows

  def restore(self, state: TrainState) -> None:
    """Goes on from another state; no step may be under way."""
    assert self._under_way is None
    self.state, self.version, self.steps = state, int(state.version), int(state.steps)

  def compile(self, num_responses: int, on_program: Callable[[int, int], None]) -> None:
    """Compiles the step for every shape that a batch can have, so that no clock that matters counts it.

    Args:
      num_responses: rows of a draw.
      on_program: called with the numbers of programs done and in all.
    """
    shapes = batch_shapes(num_responses=num_responses, row_multiple=self._row_multiple,
                          length_buckets=self._length_buckets)
    for done, shape in enumerate(shapes):
      on_program(done, len(shapes))
      self._program(abstract_batch(shape, self._placement))
    on_program(len(shapes), len(shapes))

  def _program(self, batch: Batch) -> Any:
    shape = batch.tokens.shape
    if shape not in self._programs:
      self._programs[shape] = self._step.lower(self.state, batch, np.float32(1.0), *self._frozen).compile()
    return self._programs[shape]

  def prepare(self, draw: Draw) -> Prepared:
    """Host work of a step: rows to arrays, arrays to devices. Goes on beside a step that is under way."""
    num_rows = round_up(len(draw.lengths), self._row_multiple) if self._pack else None
    batch = collate(
        draw, row_multiple=self._row_multiple, length_buckets=self._length_buckets, pack=self._pack, num_rows=num_rows)
    share = real_token_share(batch, micro_batches=self._micro_batches, skip_empty=self._pack)
    return Prepared(draw, self._place(batch), share)

  def _place(self, batch: Batch) -> Batch:
    return jax.device_put(batch, self._placement)

  def dispatch(self, prepared: Prepared) -> None:
    """Starts the step that trains a batch."""
    assert self._under_way is None
    update, batch = self.version + 1, prepared.batch
    beta_factor, log_ref_factor = self._tempering_at_update(update)
    if log_ref_factor != 1.0:
      batch = batch._replace(log_ref=self._scale(batch.log_ref, np.float32(log_ref_factor)))
    beta = np.float32(self._beta_at_update(update) * beta_factor)
    self.state, metrics = self._program(batch)(self.state, batch, beta, *self._frozen)
    self._under_way = (prepared, metrics, time.monotonic())

  @property
  def is_under_way(self) -> bool:
    """Whether a step was dispatched and has not been waited for."""
    return self._under_way is not None

  def await_step(self) -> tuple[Prepared, dict[str, np.ndarray], float]:
    """Waits for the step under way and counts it. Returns: its batch, its metrics, seconds."""
    assert self._under_way is not None
    (prepared, metrics, began), self._under_way = self._under_way, None
    metrics = jax.device_get(metrics)
    self.steps += 1
    self.version += not metrics["skipped"]
    return prepared, metrics, time.monotonic() - began

  def finish(self) -> StepReport:
    """Waits for the step under way.

    Raises: TooManyNonFinite, after writing the batch to the dump folder.
    """
    trained_at = self.version
    prepared, metrics, secs = self.await_step()
    residuals = metrics.pop("residuals_N", None)
    metrics = {name: float(value) for name, value in metrics.items()}
    draw, skipped = prepared.draw, bool(metrics["skipped"])
    if skipped:
      in_row = int(self.state.skipped_in_row)
      if in_row >= self._max_nonfinite_in_row:
        path = self._dump(prepared)
        raise TooManyNonFinite(
            f"the last {in_row} updates had a loss or gradient that is not finite "
            f"(train.max_nonfinite_in_row={self._max_nonfinite_in_row}); they were skipped, the batch of the last is "
            f"in {path}. Lower train.learning_rate, raise loss.beta_final, or look at the rewards.")
    valid = draw.valid
    return StepReport(
        metrics=metrics, draw=draw, trained_at=trained_at,
        staleness=(trained_at - draw.versions[valid]).astype(np.int64), num_tokens=int(draw.lengths[valid].sum()),
        real_token_share=prepared.real_token_share, secs=secs,
        residuals=None if skipped else residuals)

  def _dump(self, prepared: Prepared) -> pathlib.Path:
    path = self._dump_folder / f"nonfinite_step_{self.steps}.npz"
    arrays = {field.name: getattr(prepared.draw, field.name) for field in dataclasses.fields(Draw)}
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return path


_PER_TOKEN = {
    "tokens": np.int32, "positions": np.int32, "segment_ids": np.int32, "sequence_ids": np.int32, "log_mu": np.float32,
    "log_ref": np.float32, "advantages": np.float32
}
_PER_RESPONSE = {
    "rewards": np.float32, "group_ids": np.int32, "valid": np.bool_, "truncated": np.bool_, "weights": np.float32
}


def real_token_share(batch: Batch, *, micro_batches: int, skip_empty: bool) -> float:
  """Prompt and response tokens of a batch of numpy arrays / token positions that a step computes for it.

  With `skip_empty` the micro-batches behind the last row that holds tokens are not computed.
  """
  real = batch.segment_ids > 0
  if not skip_empty:
    return float(real.mean())
  part_rows = real.shape[0] // micro_batches
  num_parts = -(-int(real.any(axis=1).nonzero()[0].max(initial=-1) + 1) // part_rows)
  return float(real.sum()) / max(1, num_parts * part_rows * real.shape[1])


def abstract_batch(shape: BatchShape, placement: Batch) -> Batch:
  """Shapes, dtypes and shardings of a batch."""

  def leaf(name: str) -> jax.ShapeDtypeStruct:
    sharding = getattr(placement, name)
    if name in _PER_TOKEN:
      return jax.ShapeDtypeStruct((shape.num_rows, shape.row_tokens), _PER_TOKEN[name], sharding=sharding)
    if name in _PER_RESPONSE:
      return jax.ShapeDtypeStruct((shape.num_responses,), _PER_RESPONSE[name], sharding=sharding)
    return jax.ShapeDtypeStruct((), np.float32, sharding=sharding)

  return Batch(**{name: leaf(name) for name in Batch._fields if getattr(placement, name) is not None})

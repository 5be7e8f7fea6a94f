"""A reference policy that moves: reset to the policy every rho steps (the paper's TBA', rho = 50), or an average of its
past.

Rows carry the version of the reference that scored them. The buffer hands out rows of an older one without a log_ref;
they are scored again here, on the trainer's mesh, by the function that scores log_pi, and go back into the buffer. Rows
are few at a time: what searchers sample after a move is scored by them as ever.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.replay.collate import collate
from tba_jax.types import Batch, Draw


class Reference:
  """The reference on the trainer's mesh, and its moves.

  Args:
    params: of version 0, stacked, on the trainer's mesh; copied.
    every_steps: between moves, attempted optimizer steps.
    ema_decay: 0: the reference becomes the policy. Otherwise it becomes the average e <- decay e + (1 - decay) policy,
      taken after every step from version 0 on in float32.
    dtype: of the reference.
    score: (params, tokens, positions, segment_ids) -> log_p [B, T], jitted, on the trainer's mesh.
    placement: of a batch on that mesh.
    num_rows, row_tokens: shape in which rows are scored again, several sequences in a row.
    searcher_places: for each searcher, what `jax.device_put` takes as the place of the stacked parameters.
  """

  def __init__(
      self,
      params: Any,
      *,
      every_steps: int,
      ema_decay: float,
      dtype: Any,
      score: Callable[..., jax.Array],
      placement: Batch,
      num_rows: int,
      row_tokens: int,
      searcher_places: Sequence[Any],
  ):
    self.version = 0  # of the policy that it is, or that was averaged last
    self._every_steps = every_steps
    self._num_rows, self._row_tokens = num_rows, row_tokens
    self._score, self._rows_placement = score, placement.tokens
    self._program: Any = None
    self._searcher_places = list(searcher_places)
    self._cast = jax.jit(lambda tree: jax.tree.map(lambda leaf: jnp.copy(leaf.astype(dtype)), tree))
    self.params = self._cast(params)
    self._average: Any = None
    if ema_decay:
      self._average = jax.jit(lambda tree: jax.tree.map(lambda leaf: jnp.copy(leaf.astype(jnp.float32)), tree))(params)
    self._mix = jax.jit(functools.partial(_mix, decay=ema_decay), donate_argnums=0)

  def is_due(self, step: int) -> bool:
    """Whether the reference moves after `step` steps."""
    return step % self._every_steps == 0

  def after_step(self, policy: Any) -> None:
    """Takes a step's parameters into the average, if there is one. Called before the next step donates them."""
    if self._average is not None:
      self._average = self._mix(self._average, policy)

  def move(self, policy: Any, version: int) -> list[Any]:
    """Makes the policy of `version`, or the average up to it, the reference; returns a copy for each searcher, on its
    devices."""
    self.params, self.version = self._cast(policy if self._average is None else self._average), version
    return self.copies()

  def copies(self) -> list[Any]:
    """The reference for each searcher, on its devices."""
    return [jax.device_put(self.params, place, may_alias=False) for place in self._searcher_places]

  def compile(self) -> None:
    """Compiles the scoring of rows."""
    rows = jax.ShapeDtypeStruct((self._num_rows, self._row_tokens), jnp.int32, sharding=self._rows_placement)
    self._program = self._score.lower(self.params, rows, rows, rows).compile()

  def rescore(self, draw: Draw) -> tuple[Draw, np.ndarray]:
    """The draw with log_ref of this reference in every valid row.

    Returns: the draw, and which of its rows had none (bool [N]); these were scored.
    """
    old = draw.valid & np.isnan(draw.log_ref[:, 0])
    if not old.any():
      return draw, old
    arrays = {field.name: getattr(draw, field.name) for field in dataclasses.fields(Draw)}
    rows = Draw(**{name: array[old] for name, array in arrays.items() if array is not None})
    batch = collate(rows, row_multiple=self._num_rows, length_buckets=(self._row_tokens,), pack=True)
    if self._program is None:
      self.compile()
    scored = []
    for start in range(0, int(batch.segment_ids.any(axis=1).nonzero()[0].max()) + 1, self._num_rows):
      part = [array[start : start + self._num_rows] for array in (batch.tokens, batch.positions, batch.segment_ids)]
      scored.append(self._program(self.params, *jax.device_put(part, self._rows_placement)))
    log_p = np.concatenate([np.asarray(part) for part in scored]).reshape(-1)
    owners = batch.sequence_ids[: self._num_rows * len(scored)].reshape(-1)
    # Response tokens by response and, as a response is contiguous, in their order.
    log_p = log_p[np.argsort(owners, kind="stable")][: int(rows.lengths.sum())]
    log_ref = draw.log_ref.copy()
    log_ref[old] = 0.0
    log_ref[old[:, None] & (np.arange(log_ref.shape[1]) < draw.lengths[:, None])] = log_p
    return dataclasses.replace(draw, log_ref=log_ref), old

  def state(self) -> dict[str, Any]:
    """Arrays that `restore` goes on from, on the trainer's mesh."""
    return {"params": self.params} if self._average is None else {"params": self.params, "average": self._average}

  def restore(self, state: dict[str, Any], version: int) -> list[Any]:
    """Goes on from a checkpoint; returns a copy for each searcher, on its devices."""
    self.params, self._average, self.version = state["params"], state.get("average"), version
    return self.copies()


def _mix(average: Any, policy: Any, *, decay: float) -> Any:
  return jax.tree.map(lambda a, p: decay * a + (1.0 - decay) * p.astype(jnp.float32), average, policy)

"""Supervised fine-tuning as the first stage of a run, by the same train step as everything else.

The paper starts from fine-tuned models too. Nothing of this stage survives into the next but the parameters: they
become version 0 and the reference policy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np

from tba_jax.checkpoints.run_state import RunState, Snapshot
from tba_jax.replay.collate import collate_supervised
from tba_jax.types import Batch, TrainState

Examples = Sequence[tuple[Sequence[int], Sequence[int]]]


def example_order(step: int, *, num_examples: int, batch_size: int, seed: int) -> np.ndarray:
  """Indices int64 [batch_size] of one step's examples: consecutive places of a fresh permutation for each epoch, a
  function of the step."""
  places = np.arange(step * batch_size, (step + 1) * batch_size)
  epochs = places // num_examples
  order = {epoch: np.random.default_rng([seed, int(epoch)]).permutation(num_examples) for epoch in np.unique(epochs)}
  return np.array([order[epoch][place % num_examples] for epoch, place in zip(epochs, places)], np.int64)


def fine_tune(
    state: TrainState,
    examples: Examples,
    *,
    step: Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]],
    place: Callable[[Batch], Batch],
    steps: int,
    batch_size: int,
    row_multiple: int,
    length_buckets: Sequence[int],
    seed: int,
    run_state: RunState,
    save_every_steps: int,
    stopped: Callable[[], bool],
    on_step: Callable[[int, float], None],
) -> TrainState | None:
  """Trains `state` on the examples; goes on from the newest checkpoint of `run_state`.

  Args:
    step: takes a step of `make_train_step` with the loss "sft".
    place: a batch of numpy arrays onto the devices of the state.
    save_every_steps: 0: only when stopped.
    on_step: called with the number of steps done and the mean NLL per token, nats.
  Returns: the trained state; None if it was stopped, with a checkpoint.
  Raises: FloatingPointError if a loss is not finite.
  """
  like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
  snapshot = run_state.restore(like, None)
  if snapshot is not None:
    state = snapshot.train_state

  def batch_of(step: int) -> Batch:
    chosen = example_order(step, num_examples=len(examples), batch_size=batch_size, seed=seed)
    rows = collate_supervised([examples[i] for i in chosen], row_multiple=row_multiple, length_buckets=length_buckets,
                              pack=False)
    return place(rows)

  first = int(state.steps)
  batch = batch_of(first)
  for done in range(first, steps):
    state, metrics = step(state, batch)
    batch = batch_of(done + 1)  # while the devices work
    loss = float(metrics["loss"])
    if not np.isfinite(loss):
      raise FloatingPointError(f"fine-tuning step {done + 1} has loss {loss}; lower sft.learning_rate")
    on_step(done + 1, loss)
    stop = stopped()
    if stop or (save_every_steps and (done + 1) % save_every_steps == 0):
      run_state.save(Snapshot(done + 1, state, None, {}, {}), wait=stop)
    if stop:
      return None
  return state

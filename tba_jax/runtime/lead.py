"""The head's end of a trainer over several processes: a mesh in reach, and a trainer whose steps all processes take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from tba_jax.models.variants import ModelConfig, to_huggingface
from tba_jax.runtime.spread import Gathered, assemble, assemble_batch, parts_of
from tba_jax.runtime.trainer import Prepared, Trainer
from tba_jax.runtime.world import World
from tba_jax.sharding import path_name
from tba_jax.types import Batch, TrainState


class Lead:
  """How the head moves trees to and from the trainer's mesh, and has the followers run the programs that it runs.

  Every program on the mesh is ordered before the head runs it itself, from one thread: all processes run them in one
  order.

  Args:
    secs: deadline of what the followers are waited for.
  """

  def __init__(self, world: World, *, secs: float):
    self.world, self._secs = world, secs

  def order(self, kind: str, **fields: Any) -> None:
    self.world.order(kind, **fields)

  def wait_for_all(self, what: str) -> None:
    self.world.wait_for_all(secs=self._secs, what=what)

  def expect_params(self, cfg: ModelConfig, dtype: Any) -> None:
    """Tells followers what the tree "params" will be, leaf by leaf."""
    self.order("params", model=to_huggingface(cfg), dtype=jnp.dtype(dtype).name)

  def begin_fine_tuning(self, cfg: ModelConfig) -> None:
    self.order("fine_tune", **described(cfg))

  def begin_training(self, cfg: ModelConfig) -> None:
    self.order("train", **described(cfg))

  def put(self, name: str, path: str, array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """A leaf of the tree `name` onto the mesh. Followers know its shape, dtype and sharding."""
    for process in range(1, self.world.num_processes):
      parts = [array[index] for index in parts_of(sharding, array.shape, process)]
      self.world.send(process, "leaf", {"tree": name, "path": path}, parts)
    return assemble(array.shape, sharding, [array[index] for index in parts_of(sharding, array.shape, 0)])

  def place(self, name: str, tree: Any, like: Any) -> Any:
    """A tree of numpy arrays onto the mesh, laid out as `like` is."""
    return jax.tree_util.tree_map_with_path(
        lambda path, array, leaf: self.put(name, path_name(path), np.asarray(array, leaf.dtype), leaf.sharding),
        tree, like)

  def place_batch(self, batch: Batch, placement: Batch) -> Batch:
    """A batch of numpy arrays onto the mesh; followers have it for their next step."""
    arrays = {name: np.asarray(array) for name, array in batch._asdict().items() if array is not None}
    shapes = {name: array.shape for name, array in arrays.items()}

    def parts(process: int) -> list[np.ndarray]:
      return [array[index] for name, array in arrays.items()
              for index in parts_of(getattr(placement, name), array.shape, process)]

    for process in range(1, self.world.num_processes):
      self.world.send(process, "batch", {"shapes": shapes}, parts(process))
    return assemble_batch(shapes, placement, parts(0))

  def fetch(self, name: str, tree: Any) -> Gathered:
    """What of a tree the followers hold is on its way when this returns; they make it by its name.

    `tree` must not be donated before the result has been called for.
    """
    gathered = Gathered(tree, secs=self._secs)
    self.world.order("fetch", name=name, number=self.world.sink(gathered.take))
    return gathered


def described(cfg: ModelConfig) -> dict[str, Any]:
  """JSON of a model's config."""
  return {"model": to_huggingface(cfg), "vocab_size": cfg.vocab_size}


class LeadTrainer(Trainer):
  """A trainer whose followers take the same steps with the same batches.

  What becomes of a step, they see for themselves: loss and gradient norm are the same in all processes, and so is the
  decision to skip an update.
  """

  def __init__(self, *, lead: Lead, **named: Any):
    super().__init__(**named)
    self._lead = lead

  def restore(self, state: TrainState) -> None:
    super().restore(state)
    self._lead.order("restored")

  def compile(self, num_responses: int, on_program: Callable[[int, int], None]) -> None:
    self._lead.order("compile", num_responses=num_responses)
    super().compile(num_responses, on_program)
    self._lead.wait_for_all("compiling")

  def _place(self, batch: Batch) -> Batch:
    return self._lead.place_batch(batch, self._placement)

  def dispatch(self, prepared: Prepared) -> None:
    self._lead.order("step")
    super().dispatch(prepared)

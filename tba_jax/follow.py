"""What the processes of a trainer do that are not its head: they hold their part of the mesh, and run the programs that
the head orders. They read no data and write no file.
"""

from __future__ import annotations

import dataclasses
import pathlib
import queue
import threading
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict

from tba_jax import build, build_sft, sharding
from tba_jax.checkpoints.run_state import make_copy
from tba_jax.models.variants import ModelConfig, from_huggingface
from tba_jax.runtime.spread import assemble, assemble_batch, send_parts
from tba_jax.runtime.trainer import Prepared, Trainer
from tba_jax.runtime.world import Message, World
from tba_jax.types import Batch, TrainState
from tba_jax.workdir import memory_advice, say, stop_on_signals


def follow(config: ConfigDict, world: World, make_mesh: Callable[[], Mesh]) -> int:
  """Obeys until the head ends the run. Returns the exit code that it gives.

  `make_mesh`: the trainer's mesh, called when the head has found the config right.
  """
  with stop_on_signals() as world.stop:
    try:
      message = world.next_order()
      if message.kind == "begin":
        message = Follower(config, world, make_mesh()).run()
      if message.fields["text"]:
        say(message.fields["text"])
      return message.fields["code"]
    except Exception as error:  # whatever goes wrong here: the others cannot go on without this process
      traceback.print_exception(error)
      text = memory_advice(error) or f"{type(error).__name__}: {error}"
      say(f"error: process {world.process_id}: {text}")
      world.fail(text)
      raise


class Follower:
  """Runs orders of `lead.Lead`, one after the other."""

  def __init__(self, config: ConfigDict, world: World, mesh: Mesh):
    self._config, self._world, self._mesh = config, world, mesh
    self._placement = sharding.batch_sharding(mesh, with_advantages=True)
    self._likes: dict[str, dict[str, jax.ShapeDtypeStruct]] = {}  # of trees that are sent leaf by leaf, by path
    self._leaves: dict[str, dict[str, jax.Array]] = {}
    self._like_params: Any = None
    self._params: Any = None  # of version 0
    self._batch: Batch | None = None
    self._fine_tuning: tuple[TrainState, build_sft.Step] | None = None
    self._trainer: Trainer | None = None
    self._copy, self._convert = make_copy(), sharding.dispatched(build.make_publish(config))
    self._sending: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    self._orders = {
        "params": self._expect_params, "leaf": self._take_leaf, "batch": self._take_batch, "fetch": self._fetch,
        "fine_tune": self._begin_fine_tuning, "fine_tuning_step": self._fine_tuning_step,
        "fine_tuned": self._fine_tuned,
        "train": self._begin_training, "restored": self._restored, "compile": self._compile, "step": self._step,
        "answer": lambda number: world.answer(number),
    }

  def run(self) -> Message:
    """Until the order to end, which is returned."""
    threading.Thread(target=self._send, name="parts", daemon=True).start()
    while (message := self._world.next_order()).kind != "end":
      arrays = {"arrays": message.arrays} if message.arrays else {}
      self._orders[message.kind](**message.fields, **arrays)
    return message

  # --- Trees ---

  def _expect_params(self, model: dict[str, Any], dtype: str) -> None:
    self._like_params = build.abstract_params(from_huggingface(model), jnp.dtype(dtype), self._mesh)
    self._expect("params", self._like_params)

  def _expect(self, name: str, like: Any) -> None:
    self._likes[name] = {sharding.path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(like)}
    self._leaves[name] = {}

  def _take_leaf(self, tree: str, path: str, arrays: list[Any]) -> None:
    like = self._likes[tree][path]
    self._leaves[tree][path] = assemble(like.shape, like.sharding, arrays)

  def _taken(self, name: str, like: Any) -> Any:
    """The tree whose leaves have come, in the structure of `like`; another may come under that name."""
    leaves, self._leaves[name] = self._leaves[name], {}
    return jax.tree_util.tree_map_with_path(lambda path, _: leaves[sharding.path_name(path)], like)

  def _version_0(self) -> Any:
    if self._params is None:
      self._params = self._taken("params", self._like_params)
    return self._params

  def _take_batch(self, shapes: dict[str, list[int]], arrays: list[Any]) -> None:
    self._batch = assemble_batch(shapes, self._placement, arrays)

  def _fetch(self, name: str, number: int) -> None:
    """What of version 0 is asked for is sent at once, before a step is given its buffers; else a copy, meanwhile."""
    if name == "params":
      send_parts(self._world, number, self._version_0())()
      return
    tree = self._convert(self._trainer.state.params) if name == "published" else self._copy((self._state(), None))[0]
    self._sending.put(send_parts(self._world, number, tree))

  def _send(self) -> None:
    while True:
      send = self._sending.get()
      try:
        send()
      except Exception as error:  # in a thread of its own: the head has to be told from here
        traceback.print_exception(error)
        self._world.fail(f"{type(error).__name__}: {error}")

  # --- Fine-tuning ---

  def _state(self) -> TrainState:
    return self._trainer.state if self._fine_tuning is None else self._fine_tuning[0]

  def _begin_fine_tuning(self, model: dict[str, Any], vocab_size: int) -> None:
    cfg, params = _model(model, vocab_size), self._version_0()
    self._params = None
    self._fine_tuning = build_sft.first_state(self._config, cfg, params, self._mesh)
    self._expect("state", self._fine_tuning[0])

  def _fine_tuning_step(self) -> None:
    state, step = self._fine_tuning
    if self._leaves["state"]:  # a checkpoint that it goes on from
      state = self._taken("state", state)
    self._fine_tuning = build_sft.take_step(step, state, self._batch)[0], step

  def _fine_tuned(self) -> None:
    state = self._fine_tuning[0]
    state = self._taken("state", state) if self._leaves["state"] else state
    self._params, self._fine_tuning = build.after_fine_tuning(self._config, state.params), None

  # --- Training ---

  def _begin_training(self, model: dict[str, Any], vocab_size: int) -> None:
    self._trainer = build.build_trainer(
        self._config, _model(model, vocab_size), self._version_0(), self._mesh, pathlib.Path())
    self._params = None
    self._expect("state", self._trainer.state)

  def _restored(self) -> None:
    self._settle()
    self._trainer.restore(self._taken("state", self._trainer.state))

  def _compile(self, num_responses: int) -> None:
    self._trainer.compile(num_responses, lambda done, of: None)

  def _settle(self) -> None:
    """Counts the step before: what became of it decides, among others, the next one's beta."""
    if self._trainer.is_under_way:
      self._trainer.await_step()

  def _step(self) -> None:
    self._settle()
    self._trainer.dispatch(Prepared(None, self._batch, 0.0))


def _model(model: dict[str, Any], vocab_size: int) -> ModelConfig:
  return dataclasses.replace(from_huggingface(model), vocab_size=vocab_size)

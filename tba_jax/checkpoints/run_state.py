"""One atomic checkpoint of a run, by orbax: what the optimizer, the searchers, the buffer and the counters need to go
on as if unbroken.

Under `<workdir>/checkpoints/<step>/`: `train` (TrainState; with LoRA its parameters are the adapters), `published`
(what was moved to searchers, when they did not hold the trainer's newest), `evaluations` (the same of weights whose
evaluation is not over), `buffer` (index, counts and priorities of the replay buffer's live rows) and `meta` (ledger,
random generators, counters; JSON). The tokens of the rows are in the segment files of `<workdir>/rollout_segments/`, of
which `meta` holds the list: segments are written first, most of them beside training as rows arrive (`RunState.spill`),
then the step, and what no step needs is removed last. Beside the steps, `<workdir>/initial/` holds the parameters of
version 0, which are the reference policy, and `<workdir>/model/` the model's config.json and tokenizer, so that a
workdir can be resumed and exported without the folder that the model came from.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from tba_jax.checkpoints.segments import SEGMENT_ROWS, SegmentStore
from tba_jax.checkpoints.writing import Writing, disk_says, under_way
from tba_jax.sharding import dispatched
from tba_jax.types import TrainState

# Of the buffer's arrays: those that segments hold.
SEGMENT_COLUMNS = {"tokens": np.int32, "log_mu": np.float32, "log_ref": np.float32}
_EMPTY = "empty_arrays"  # orbax refuses arrays of size 0; their shapes travel in the meta item


@dataclasses.dataclass(frozen=True)
class Snapshot:
  """A run between two optimizer steps.

  `published` is None when the searchers hold the weights of `train_state` itself, `reference` where it never moves.
  `buffer`, if not empty, has the arrays of `ReplayBuffer.state_dict`; to save, of `missing` rows the tokens only.
  `evaluations`: by step, what is to be evaluated of it, in the form of `published`; restored as numpy arrays.
  """

  step: int
  train_state: TrainState
  published: Any
  buffer: dict[str, np.ndarray]
  meta: dict[str, Any]
  reference: Any = None
  evaluations: dict[int, Any] = dataclasses.field(default_factory=dict)


class LiveRows(Protocol):
  """What a spill needs of the replay buffer."""

  def live_keys(self) -> tuple[np.ndarray, np.ndarray]:
    """Handles and keys of all live rows, oldest first."""

  def copy_rows(self, handles: np.ndarray) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Keys, lengths and packed columns of those that are still live."""


class MeshInReach(Protocol):
  """A trainer's mesh of several processes: how its trees come to this process's memory, and from there."""

  def fetch(self, name: str, tree: Any) -> Callable[[], Any]:
    """Begins to bring a tree; what is returned waits for it, as numpy arrays."""

  def place(self, name: str, tree: Any, like: Any) -> Any:
    """A tree of numpy arrays onto the mesh, laid out as `like`."""


# With a mesh of several processes this one alone writes and reads.
_ALONE = ocp.options.MultiprocessingOptions(primary_host=0, active_processes={0}, barrier_sync_key_prefix="head")


class _LastAndBest(ocp.checkpoint_managers.PreservationPolicy):
  """Keeps the newest `keep` steps and the one that was evaluated best."""

  def __init__(self, keep: int):
    self.keep, self.best_step = keep, None

  def should_preserve(self, checkpoints, *, context):
    del context
    newest = {info.step for info in sorted(checkpoints, key=lambda info: info.step)[-self.keep:]}
    return [info.step in newest or info.step == self.best_step for info in checkpoints]


class RunState:
  """Saves and restores the checkpoints of one workdir; saving goes on in the background while training continues.

  A checkpoint that a full or failing disk refuses is said loudly and counted in `num_failed`; older ones stay, training
  goes on.
  """

  def __init__(
      self,
      workdir: str | os.PathLike,
      *,
      keep: int,
      timeout_secs: float = 3600.0,
      say: Callable[[str], None] = logging.error,
      with_advantages: bool = False,
      mesh: MeshInReach | None = None,
  ):
    """`timeout_secs`: longest wait for a checkpoint that is being written. `with_advantages`: rows of the buffer have
    them. `mesh`: None where it is this process's."""
    self.workdir, self._timeout_secs, self.say = pathlib.Path(workdir).resolve(), timeout_secs, say
    self._policy, self._mesh = _LastAndBest(keep), mesh
    (self.workdir / "checkpoints").mkdir(parents=True, exist_ok=True)
    self._alone = {} if mesh is None else {"multiprocessing_options": _ALONE}
    self._manager = ocp.CheckpointManager(
        self.workdir / "checkpoints",
        options=ocp.CheckpointManagerOptions(preservation_policy=self._policy, enable_async_checkpointing=False,
                                             create=False, **self._alone),
    )
    self._copy = make_copy()
    self._columns = SEGMENT_COLUMNS | ({"advantages": np.float32} if with_advantages else {})
    self._segments = SegmentStore(self.workdir / "rollout_segments", self._columns)
    self._names_of_step: dict[int, list[str]] = {}
    self._writing: Writing | None = None
    self._spilling: Writing | None = None
    self._may_spill, self._spill_lock = True, threading.Lock()
    self._spilled_at = 0
    self.num_failed = 0

  def missing(self, keys: np.ndarray) -> np.ndarray:
    """Which rows' tokens the next `save` has to bring, see `ReplayBuffer.state_dict`; no save may be under way."""
    assert self._writing is None
    if not self.is_spilling():
      self._end_spill()
    with self._spill_lock:  # what a spill has promised by now is waited for beside training, and it promises no more
      self._may_spill = False
      return self._segments.missing(keys)

  def spill(self, buffer: LiveRows, num_arrived: int) -> None:
    """Begins to write rows that no segment holds, in whole segments and beside training; the rest is left to `save`.

    To be called after every step. Does nothing where hardly any row has arrived, or something is being written.

    Args:
      num_arrived: rows that ever came into the buffer.
    Raises: what an earlier spill failed with, other than for the disk.
    """
    if num_arrived - self._spilled_at < SEGMENT_ROWS or under_way(self._writing) or self.is_spilling():
      return
    self._end_spill()
    self._spilled_at, self._may_spill = num_arrived, True
    self._spilling = Writing(lambda: self._spill(buffer), "rows of the replay buffer are")

  def is_spilling(self) -> bool:
    """Whether rows are being written beside training."""
    return under_way(self._spilling)

  def _spill(self, buffer: LiveRows) -> None:
    handles, keys = buffer.live_keys()
    with self._spill_lock:
      if not self._may_spill:
        return
      missing = self._segments.missing(keys)
    handles = handles[missing]
    for first in range(0, len(handles) - SEGMENT_ROWS + 1, SEGMENT_ROWS):
      copied, lengths, columns = buffer.copy_rows(handles[first:first + SEGMENT_ROWS])
      with self._spill_lock:  # not before the copy: a row may leave, and a checkpoint must not count on it
        if not self._may_spill or not len(copied):
          return
        name = self._segments.promise(copied)
      self._segments.fulfil(name, copied, lengths, columns)
    self._remove_segments()

  def _end_spill(self) -> None:
    """Of a spill that is over: the disk's refusal is said, for the rows are not lost; anything else is raised."""
    spilling, self._spilling = self._spilling, None
    if spilling is None or spilling.error is None:
      return
    reason = disk_says(spilling.error)
    if reason is None:
      raise spilling.error
    self.say(f"error: rows of the replay buffer could not be written ({reason}); training goes on, and the next "
             "checkpoint tries again; make room on the disk")

  def save(self, snapshot: Snapshot, *, wait: bool = False) -> None:
    """Writes one step; it counts only when all of it is on disk.

    Raises: what an earlier background write failed with, or with `wait` this one, other than for the disk; Hung if it
      takes too long.
    """
    self.join()
    if snapshot.step not in self._manager.all_steps():
      # A copy: the next optimizer step is given the trainer's own buffers, and writes over them.
      state, reference = self._copy((snapshot.train_state, snapshot.reference))
      if self._mesh is not None:
        state = self._mesh.fetch("state", state)
      copied = dataclasses.replace(snapshot, train_state=state, reference=reference)
      spilling, self._spilling = self._spilling, None
      names = self._segments.names
      what = f"the checkpoint of step {snapshot.step} is"
      self._writing = Writing(lambda: self._write(copied, names, spilling), what, gives_back=True)
    if wait:
      self.join()

  def _write(self, snapshot: Snapshot, names: list[str], spilling: Writing | None) -> None:
    """`names`: of the segments that the snapshot counts on; `spilling`: what still writes the last of them."""
    if self._mesh is not None:
      snapshot = dataclasses.replace(
          snapshot, train_state=snapshot.train_state(), published=jax.device_get(snapshot.published))
    try:
      if spilling is not None:
        spilling.join(self._timeout_secs)
        if spilling.error is not None:
          raise spilling.error
      names = [*names, *self._write_segments(snapshot.buffer)]
      self._write_step(snapshot, names)
      self._names_of_step[snapshot.step] = names
      self._remove_segments()
    except Exception as error:  # of the disk: said here; anything else is raised by whoever joins
      reason = disk_says(error)
      if reason is None:
        raise
      self.num_failed += 1
      stands = max(self._manager.all_steps(), default=None)
      self.say(f"error: the checkpoint of step {snapshot.step} could not be written ({reason}); training goes on, " +
               (f"the checkpoint of step {stands} stands" if stands is not None else "there is no older one") +
               "; make room on the disk")

  def _write_segments(self, buffer: dict[str, np.ndarray]) -> list[str]:
    if not buffer:
      return []
    chosen = np.isin(buffer["rows"], buffer["token_rows"], assume_unique=True)  # in one order in both
    return self._segments.write(buffer["key"][chosen], buffer["length"][chosen],
                                {name: buffer[name] for name in self._columns})

  def _write_step(self, snapshot: Snapshot, names: list[str]) -> None:
    index = {name: array for name, array in snapshot.buffer.items() if name not in (*self._columns, "token_rows")}
    arrays = {name: array for name, array in index.items() if array.size}
    empty = {name: [list(a.shape), str(a.dtype)] for name, a in index.items() if not a.size}
    meta = {**snapshot.meta, _EMPTY: empty, "step": snapshot.step, "has_published": snapshot.published is not None,
            "evaluated_steps": list(snapshot.evaluations), "segments": names if snapshot.buffer else None}
    items = {"train": ocp.args.StandardSave(snapshot.train_state), "meta": ocp.args.JsonSave(meta)}
    if arrays:
      items["buffer"] = ocp.args.StandardSave(arrays)
    if snapshot.published is not None:
      items["published"] = ocp.args.StandardSave(snapshot.published)
    if snapshot.reference is not None:
      items["reference"] = ocp.args.StandardSave(snapshot.reference)
    if snapshot.evaluations:
      items["evaluations"] = ocp.args.StandardSave({str(step): tree for step, tree in snapshot.evaluations.items()})
    self._manager.save(snapshot.step, args=ocp.args.Composite(**items))

  def _remove_segments(self) -> None:
    """Of no step that is kept."""
    steps = self._manager.all_steps()
    for step in steps:
      if step not in self._names_of_step:
        self._names_of_step[step] = self._read_meta(step)["segments"] or []
    self._names_of_step = {step: self._names_of_step[step] for step in steps}
    self._segments.remove_except({name for step in steps for name in self._names_of_step[step]})

  def restore(self, train_state: TrainState, published: Any, reference: Any = None) -> Snapshot | None:
    """The newest readable step, or None where there is none; a step that cannot be read is reported and the one before
    it tried.

    Args: shapes, dtypes and shardings (ShapeDtypeStruct trees) of the train state, of one searcher's weights, and of a
      reference that moves.
    Raises: ValueError if there are steps and none can be read.
    """
    steps = sorted(self._manager.all_steps(), reverse=True)
    for step in steps:
      try:
        return self._restore_step(step, train_state, published, reference)
      except Exception as error:  # whatever a damaged file makes orbax raise: the step before it may be whole
        logging.error("checkpoint of step %d cannot be read (%s: %s); trying the one before", step,
                      type(error).__name__,
                      str(error).splitlines()[0] if str(error) else "")
    if steps:
      raise ValueError(f"{self.workdir}/checkpoints: none of the steps {steps} can be read; restore them from a copy, "
                       "go on with the version of this program that wrote them, or start in a new workdir")
    return None

  def _restore_step(self, step: int, train_state: TrainState, published: Any, reference: Any) -> Snapshot:
    meta = self._read_meta(step)
    wanted, where_published = train_state, published
    if self._mesh is not None:
      train_state, published = _on_host(train_state), _on_host(published)
    items = {"train": ocp.args.StandardRestore(train_state)}
    if meta["has_published"]:
      items["published"] = ocp.args.StandardRestore(published)
    if reference is not None:
      items["reference"] = ocp.args.StandardRestore(reference)
    evaluated_steps = meta.pop("evaluated_steps")
    if evaluated_steps:
      on_host = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), published)
      items["evaluations"] = ocp.args.StandardRestore({str(step): on_host for step in evaluated_steps})
    if (pathlib.Path(self._manager.directory) / str(step) / "buffer").exists():
      items["buffer"] = ocp.args.StandardRestore()
    got = self._manager.restore(step, args=ocp.args.Composite(**items))
    if self._mesh is not None:
      got = {**got, "train": self._mesh.place("state", TrainState(*got["train"]), wanted)}
      if meta["has_published"]:
        got["published"] = jax.tree.map(lambda array, like: jax.device_put(array, like.sharding), got["published"],
                                        where_published)
    buffer = {name: np.asarray(array) for name, array in (got.get("buffer") or {}).items()}
    for name, (shape, dtype) in meta.pop(_EMPTY).items():
      buffer[name] = np.zeros(shape, dtype)
    segments = meta.pop("segments")
    if segments is not None:
      buffer |= self._segments.load(segments, buffer["key"]) | {"token_rows": buffer["rows"]}
    evaluations = {int(key): tree for key, tree in (got.get("evaluations") or {}).items()}
    return Snapshot(
        step, TrainState(*got["train"]), got.get("published"), buffer, meta, got.get("reference"), evaluations)

  def _read_meta(self, step: int) -> dict[str, Any]:
    return self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]

  def set_aside_steps_after(self, step: int) -> None:
    """Moves steps newer than the one resumed from, which could not be read, to `unreadable_checkpoints/` of the workdir.

    What kept them from being read may pass (a disk that comes back, another version of this program), and their weights
    can then be exported; rows of their buffers go as those of any checkpoint that is no longer kept.
    """
    for newer in [s for s in self._manager.all_steps() if s > step]:
      aside = self.workdir / "unreadable_checkpoints"
      aside.mkdir(exist_ok=True)
      times = sum(path.name.split(".")[0] == str(newer) for path in aside.iterdir())
      to = aside / (f"{newer}.{times}" if times else str(newer))
      os.replace(pathlib.Path(self._manager.directory) / str(newer), to)
      logging.warning("checkpoint of step %d, which could not be read, is kept as %s", newer, to)
    self._manager.reload()

  def mark_best(self, step: int) -> None:
    """From now on the checkpoint of `step` outlives the retention of the newest."""
    self._policy.best_step = step

  def join(self) -> None:
    """Waits until the last save is on disk.

    Raises: what it failed with, other than for the disk; Hung if it takes longer than the deadline.
    """
    writing, self._writing = self._writing, None
    if writing is None:
      return
    writing.join(self._timeout_secs)
    if writing.error is not None:
      raise writing.error

  def close(self) -> None:
    """Ends the writing of rows; a checkpoint under way is for `join`."""
    with self._spill_lock:
      self._may_spill = False
    if self._spilling is not None:
      self._spilling.join(self._timeout_secs)
    self._manager.close()

  def has_initial(self) -> bool:
    return (self.workdir / "initial" / "_CHECKPOINT_METADATA").is_file()

  def save_initial(self, params: Any) -> None:
    """Writes the parameters of version 0. Atomic: the folder appears only when whole."""
    params = params if self._mesh is None else self._mesh.fetch("params", params)()
    with ocp.StandardCheckpointer(**self._alone) as saver:
      saver.save(self.workdir / "initial", params)

  def load_initial(self, params: Any) -> Any:
    """Reads what `save_initial` wrote, placed as the ShapeDtypeStruct tree `params` says."""
    if self._mesh is None:
      return load_initial(self.workdir, params)
    with ocp.StandardCheckpointer(**self._alone) as loader:
      return self._mesh.place("params", loader.restore(self.workdir / "initial", _on_host(params)), params)


def make_copy() -> Callable[[Any], Any]:
  """What copies a state for a checkpoint; jitted."""
  return dispatched(lambda tree: jax.tree.map(jnp.copy, tree))


def _on_host(like: Any) -> Any:
  """Numpy arrays in the place of a tree of ShapeDtypeStructs, for a checkpoint to be read into."""
  return jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), like)


def load_initial(workdir: str | os.PathLike, params: Any) -> Any:
  """Parameters of version 0 (the reference; with adapters the base too), placed as the ShapeDtypeStruct tree says."""
  with ocp.StandardCheckpointer() as loader:
    return loader.restore(pathlib.Path(workdir).resolve() / "initial", params)


def load_params(workdir: str | os.PathLike, abstract_params: Any, *, step: int | None = None) -> tuple[int, Any]:
  """Only the trained parameters of one step (default: the newest), while the run that writes the workdir may go on.

  Where the run removes the newest step while it is read, the then newest is read instead.
  Raises: ValueError if the workdir has no such step, or if it cannot be read or is removed while it is.
  """
  folder = pathlib.Path(workdir).resolve() / "checkpoints"
  target = {"params": abstract_params}
  while True:
    # Not through a CheckpointManager, which raises where a step goes away while it lists them. A step gets its name, by
    # an atomic rename, when all of it is on disk.
    steps = sorted(int(path.name) for path in folder.glob("*") if path.name.isdigit())
    if not steps:
      raise ValueError(f"{workdir}: no checkpoint there; train first, or give the workdir of a run")
    if step is not None and step not in steps:
      raise ValueError(f"step={step}: {workdir} has no such checkpoint; it has {steps}")
    chosen = steps[-1] if step is None else step
    try:
      with ocp.PyTreeCheckpointer() as reader:
        got = reader.restore(folder / str(chosen) / "train", args=ocp.args.PyTreeRestore(
            item=target, partial_restore=True, restore_args=ocp.checkpoint_utils.construct_restore_args(target)))
      return chosen, got["params"]
    except Exception as error:  # orbax has no one error for files that are damaged, or that go away under it
      if not _removed(folder / str(chosen)):
        raise ValueError(f"step={chosen}: the checkpoint in {workdir} cannot be read ({type(error).__name__}: "
                         f"{(str(error).splitlines() or [''])[0]}); take another step") from error
      if step is not None:
        raise ValueError(f"step={step}: the run in {workdir} removed this checkpoint while it was read; it keeps only "
                         "its newest (checkpoint.keep) and its best") from error


def _removed(folder: pathlib.Path, within_secs: float = 5.0) -> bool:
  """Whether a folder goes away, as one does whose removal has begun."""
  deadline = time.monotonic() + within_secs
  while folder.exists() and time.monotonic() < deadline:
    time.sleep(0.05)
  return not folder.exists()

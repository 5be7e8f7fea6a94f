"""Searchers in other processes out of the config: what a host is made of, and what stands for it beside the trainer."""

from __future__ import annotations

import functools
import pathlib
import tempfile
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from tba_jax import build
from tba_jax.checkpoints.model_folder import read_model_folder
from tba_jax.meters import Timeline
from tba_jax.models.variants import ModelConfig
from tba_jax.runtime.host import Fetch, SearcherHost, SentWeights, Spans
from tba_jax.runtime.parcels import pack, unpack
from tba_jax.runtime.reference import Reference
from tba_jax.runtime.remote import Connection, Put, RemoteSearcher, SharedReference, SharedWeightStore
from tba_jax.searcher import Searcher, cast
from tba_jax.searcher_places import place_searcher
from tba_jax.tasks.base import Task
from tba_jax.types import Prompt
from tba_jax.weights import WeightStore
from tba_jax.workdir import say


class HostSpec(NamedTuple):
  """What a host is made of, beside the reference. Only plain values: it may go to another machine."""

  config: dict[str, Any]
  index: int  # of the searcher
  model_folder: dict[str, bytes]  # files of the run's model/
  prompts: int  # checksum of the task's prompts, which both sides read for themselves


def make_host(spec: HostSpec, reference: SentWeights, fetch: Fetch) -> SearcherHost:
  """The host of a searcher, on the devices of this process.

  Raises: ValueError if the task's prompts are not those of the trainer's process; ConfigError as a run does.
  """
  config = ConfigDict(spec.config)
  with tempfile.TemporaryDirectory() as name:
    for file, content in spec.model_folder.items():
      (pathlib.Path(name) / file).write_bytes(content)
    cfg, tokenizer = read_model_folder(pathlib.Path(name))
  task = build.make_task(config, tokenizer)
  found = checksum_of_prompts(task)
  if found != spec.prompts:
    raise ValueError(f"the prompts of task {config.task} on the machine of searcher {spec.index} are not those of the "
                     f"trainer's (checksum {found:08x}, there {spec.prompts:08x}); give both the same data")
  devices = jax.devices()[: config.devices.per_searcher or 1]
  place = place_searcher(cfg, devices)
  place_reference = functools.partial(jax.device_put, device=place.reference, may_alias=False)
  params = place_reference(unpack(reference.parcel, fetch(reference.parcel.chunks)))
  spans = Spans()
  weights, make_searcher = build.build_searchers(
      config, cfg, task, params, [devices], spans.span, first_index=spec.index)
  searcher: Searcher = make_searcher(spec.index)
  searcher.set_reference(params, reference.version)
  return SearcherHost(searcher, slots=config.sample.slots, weights=weights, place_reference=place_reference,
                      spans=spans, fetch=fetch)


def checksum_of_prompts(task: Task) -> int:
  """CRC-32 of the ids of all prompts, in their order."""
  checksum = 0
  for prompts in (task.train_prompts(), task.eval_prompts()):
    for prompt in prompts:
      checksum = zlib.crc32(_bytes_of(prompt), checksum)
  return checksum


def _bytes_of(prompt: Prompt) -> bytes:
  return np.asarray([prompt.prompt_id, len(prompt.tokens), *prompt.tokens], np.int64).tobytes()


def build_remote_searchers(
    config: ConfigDict, cfg: ModelConfig, task: Task, params: Any, folder: pathlib.Path, timeline: Timeline, *,
    put: Put, connect: Callable[[HostSpec], Connection],
) -> tuple[WeightStore, Callable[[int], RemoteSearcher]]:
  """As `build.build_searchers`, for searchers that `connect` reaches.

  Args:
    params: of version 0, on the trainer's mesh.
    folder: the run's.
    put: stores a chunk where hosts can fetch it.
  """
  lora = build.lora_settings(config)
  reference = params if lora is not None else cast(params, dtype=jnp.dtype(config.sample.dtype))
  sent = SentWeights(0, pack(jax.device_get(reference), put))
  del reference
  weights = SharedWeightStore(
      build.make_publish(config), device=_host_device(), put=put, timeout_secs=config.runtime.hang_secs)
  files = {path.name: path.read_bytes() for path in sorted((folder / "model").iterdir()) if path.is_file()}
  spec = HostSpec(config.to_dict(), 0, files, checksum_of_prompts(task))
  connections: dict[int, Connection] = {}

  def make_searcher(index: int) -> RemoteSearcher:
    if index in connections:  # of a searcher that was given up
      connections[index].end()
    connections[index] = connect(spec._replace(index=index))
    return RemoteSearcher(
        index, connections[index], slots=config.sample.slots, num_samples=config.sample.responses_per_prompt,
        reference=sent, in_turn=config.runtime.mode != "async", timeline=timeline, say=say)

  return weights, make_searcher


def build_remote_reference(
    config: ConfigDict, cfg: ModelConfig, params: Any, mesh: Mesh, *, put: Put, num_searchers: int
) -> Reference | None:
  """As `build.build_reference`, for searchers in other processes."""
  return build.build_reference(
      config, cfg, params, mesh, (), make=functools.partial(SharedReference, put=put, num_searchers=num_searchers))


def _host_device() -> jax.Device:
  """Where one copy of the weights is kept for all searchers: the host's memory, if jax knows it."""
  try:
    return jax.local_devices(backend="cpu")[0]
  except RuntimeError:
    return jax.local_devices()[0]

"""The host side of sampling: requests come in, finished groups go out, a fixed number of slots decodes in between.

An engine belongs to one thread and keeps every array on its own device or mesh. It prefills each prompt once, decodes
all slots in chunks of a fixed number of tokens, and refills slots as samples end. It does not know tasks, rewards or
text.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from tba_jax.models import kernels
from tba_jax.models.cache import Cache, num_entries
from tba_jax.models.variants import ModelConfig
from tba_jax.sampling import decode
from tba_jax.sampling.buckets import padded_batches
from tba_jax.sampling.requests import PartialGroup, SampledGroup, SampleRequest, check_request, sample_keys
from tba_jax.sampling.shapes import PREFILL_BATCHES, make_shapes
from tba_jax.sampling.slots import SlotTable

__all__ = ["Engine", "SampleRequest", "SampledGroup", "sample_keys"]


@dataclasses.dataclass(frozen=True, eq=False)
class _Prefix:
  """A prefilled prompt: a row of one prefill call's results, and the weights that made it."""

  logits: jax.Array
  cache: Any
  row: int
  generation: int


class Engine:
  """Continuous batching over a fixed number of slots. Confined to one thread.

  Weights are swapped between chunks. With `in_flight` they take effect at the next `step`: samples under way go on with
  the new weights, on the keys and values that the old weights made or, with `recompute_kv`, on new ones. Without
  `in_flight` they wait until every group that has begun is finished, so that a group is of one version. Either way each
  token carries the version of the weights that sampled it, and no sample begins on a prompt that older weights read
  than the newest in effect.

  Samples of a group share its prompt's keys and values in lanes of `lane_samples` slots: stored once and read by one
  matrix product. A lane takes another group when all its slots are free; while weights change in flight and nothing is
  recomputed, samples that have not begun cannot use their siblings' lanes either.
  """

  def __init__(
    self,
    cfg: ModelConfig,
    device_or_mesh: jax.Device | Mesh,
    *,
    slots: int,
    max_prompt_tokens: int,
    max_new_tokens: int,
    chunk_tokens: int,
    stop_ids: Sequence[int],
    dtype: Any,
    log_mu_temperature: float,
    cache_tokens: int | None = None,
    prompt_buckets: Sequence[int] | None = None,
    prefill_batches: Sequence[int] = PREFILL_BATCHES,
    kv_buckets: Sequence[int] | None = None,
    in_flight: bool = True,
    recompute_kv: bool = False,
    lane_samples: int = 1,
    cache_dtype: Any = None,
    attention: str = "xla",
    filtering: bool = False,
  ):
    """Compiles nothing of the model yet (see `warmup`); the cache is allocated when it is first needed.

    Args:
      cfg: the decoder.
      device_or_mesh: one device, or a mesh with some of the axes data, fsdp (both share out the slots) and tensor (kv
        heads; where it does not divide them every tensor device holds all).
      slots: samples decoded at once.
      max_prompt_tokens, max_new_tokens: limits of a request.
      chunk_tokens: tokens decoded between two looks of the host; a slot that falls free within a chunk idles until its
        end.
      stop_ids: token ids, each of which ends a sample.
      dtype: of computation.
      log_mu_temperature: the run's temperature.
      cache_tokens: length of a slot's cache; default max_prompt_tokens + max_new_tokens. With less, a request is bound
        by the sum. Lanes of more than one hold max_prompt_tokens once and max_new_tokens a slot.
      prompt_buckets: lengths to which prompts are padded; default powers of two from 16.
      prefill_batches: numbers of prompts that are prefilled in one call.
      kv_buckets: lengths up to which a chunk reads a slot's cache; default powers of two from 128.
      in_flight: whether new weights take effect in the middle of samples.
      recompute_kv: whether samples under way get keys and values of the new weights.
      lane_samples: slots that share a prompt. 1 keeps a copy of the prompt in each slot.
      cache_dtype: of keys and values, one of `cache.CACHE_DTYPES`; by default `dtype`. What is rounded to it is what
        decoding attends to: log_mu is exact for that, and differs the more from the trainer's log-probabilities.
      attention: one of `kernels.SAMPLE_BACKENDS`. "paged" is for TPUs: a bfloat16 cache in lanes of one, of which each
        row's own length is read; `kv_buckets` does not apply.
      filtering: whether requests may have top_k, top_p or min_p; compiles a sort of the vocabulary, which runs where a
        slot needs it.
    Raises: ValueError for sizes that contradict each other.
    """
    if not log_mu_temperature > 0:
      raise ValueError(f"log_mu_temperature={log_mu_temperature} must be above 0; only a request may be greedy.")
    if any(not 0 <= stop_id < cfg.vocab_size for stop_id in stop_ids):
      raise ValueError(f"stop_ids={tuple(stop_ids)} must be token ids; the vocabulary has {cfg.vocab_size}.")
    if recompute_kv and not in_flight:
      raise ValueError("recompute_kv=True means nothing with in_flight=False: no sample sees new weights.")
    cache_dtype = jnp.dtype(dtype if cache_dtype is None else cache_dtype)
    if attention == "paged":
      kernels.check_sample_backend(cfg, attention)
      if cache_dtype != jnp.bfloat16:
        raise ValueError(f"attention='paged' reads a bfloat16 cache, not {cache_dtype}; set cache_dtype.")
    self._shapes = shapes = make_shapes(
      slots=slots, lane_samples=lane_samples, max_prompt_tokens=max_prompt_tokens, max_new_tokens=max_new_tokens,
      chunk_tokens=chunk_tokens, cache_tokens=cache_tokens, prompt_buckets=prompt_buckets,
      prefill_batches=prefill_batches, kv_buckets=kv_buckets, recompute_kv=recompute_kv,
      attention=attention,
    )
    self._cfg, self._in_flight = cfg, in_flight
    self._table = SlotTable(slots, lane_samples)
    self._place(device_or_mesh)
    self._sampling_options = dict(
      stop_ids=tuple(stop_ids),
      log_mu_temperature=float(log_mu_temperature),
      filtering=filtering,
      shardings=self._shardings,
    )
    self._model_options = dict(cfg=cfg, dtype=dtype, attention=attention, shardings=self._shardings)
    self._prefill_options = dict(cache_dtype=cache_dtype, **self._model_options)
    self._chunk_options = dict(
      cfg=cfg, num_tokens=chunk_tokens, dtype=dtype, attention=attention, **self._sampling_options)
    rows, cache = self._shardings or (self._default_sharding, self._default_sharding)
    self._init_state, self.cache_bytes = decode.make_init_state(  # cache_bytes: on each device
      cfg, rows, cache, slots=slots, cache_tokens=shapes.slot_tokens, cache_dtype=cache_dtype,
      lane_samples=lane_samples, prefix_tokens=max_prompt_tokens, attention=attention,
    )
    self._state: decode.DecodeState | None = None
    self._params, self._version, self._generation = None, None, 0
    self._pending: tuple[Any, int] | None = None
    self._signature: Any = None
    self._groups: dict[int, PartialGroup] = {}  # unfinished, in order of submission
    self._num_submitted = 0
    self._waiting: collections.deque[int] = collections.deque()  # groups with samples that no slot holds yet
    self._prefixes: dict[int, _Prefix] = {}  # of groups in `_waiting` that could not be placed whole
    self._declared = shapes.programs()
    self._called: set[tuple[str, int, int]] = set()

  def _place(self, device_or_mesh: jax.Device | Mesh) -> None:
    if isinstance(device_or_mesh, Mesh):
      self._shardings = decode.slot_shardings(device_or_mesh, self._cfg)
      self._default_sharding = NamedSharding(device_or_mesh, PartitionSpec())
      shards, lane_samples = self._shardings.num_row_shards, self._shapes.lane_samples
      if self._shapes.num_lanes % shards:
        per_lane = "" if lane_samples == 1 else f" times lane_samples={lane_samples}"
        raise ValueError(
          f"slots={self._shapes.slots} must be a multiple of {shards}{per_lane}, the product of the mesh axes data and "
          "fsdp."
        )
    else:
      self._shardings = None
      self._default_sharding = SingleDeviceSharding(device_or_mesh)
    self._programs = decode.programs_on(next(iter(self._default_sharding.device_set)).platform)

  @property
  def version(self) -> int | None:
    """Of the weights that sample now; None before the first `set_weights` took effect."""
    return self._version

  @property
  def num_running(self) -> int:
    """Samples in slots."""
    return self._table.num_running

  @property
  def num_queued(self) -> int:
    """Samples that no slot holds yet."""
    return sum(self._groups[index].num_waiting for index in self._waiting)

  @property
  def num_groups(self) -> int:
    """Requests that are not finished."""
    return len(self._groups)

  @property
  def num_compiled(self) -> int:
    """Programs called so far, of those declared by `compiled_shapes`; each is compiled once."""
    return len(self._called)

  def compiled_shapes(self) -> frozenset[tuple[str, int, int]]:
    """All programs that it can ever call, see `Shapes.programs`."""
    return self._declared

  def set_weights(self, decode_params: Any, version: int) -> None:
    """Gives new weights, which take effect as the class says. Of several that wait, the last counts.

    Args:
      decode_params: in the decode layout. Arrays on this engine's device or mesh are used as they are and must not be
        donated or changed by others; anything else is copied there (on a mesh: to every device).
      version: optimizer updates that the weights have seen.
    Raises: ValueError if structure, shapes, dtypes or shardings differ from those of the first weights, as that would
      compile anew.
    """
    devices = self._default_sharding.device_set

    def place(leaf: Any) -> jax.Array:
      if isinstance(leaf, jax.Array) and leaf.sharding.device_set == devices and leaf.committed:
        return leaf
      return jax.device_put(leaf, self._default_sharding, may_alias=False)

    params = jax.tree.map(place, decode_params)
    signature = {
      jax.tree_util.keystr(path): (leaf.shape, str(leaf.dtype), leaf.sharding)
      for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]
    }
    if self._signature is None:
      self._signature = signature
    for name in sorted({*signature, *self._signature}):
      found, expected = signature.get(name, "absent"), self._signature.get(name, "absent")
      if found != expected:
        raise ValueError(
          f"weights of version {version}: {name} is {found} but was {expected} in the first weights; "
          "publish them in one layout."
        )
    self._pending = (params, int(version))

  def submit(self, request: SampleRequest) -> None:
    """Queues a request; prompts begin in order of submission.

    Raises: ValueError for a request that cannot be served, with the sizes.
    """
    request = check_request(
      request,
      vocab_size=self._cfg.vocab_size,
      max_prompt_tokens=self._shapes.max_prompt_tokens,
      max_new_tokens=self._shapes.max_new_tokens,
      cache_tokens=self._shapes.cache_tokens,
      slots=self._shapes.slots,
      cache_bytes=self.cache_bytes,
    )
    if request.filtered and not self._sampling_options["filtering"]:
      raise ValueError(f"{request.tag!r} has top_k, top_p or min_p; build the engine with filtering=True for that.")
    self._groups[self._num_submitted] = PartialGroup(request)
    self._waiting.append(self._num_submitted)
    self._num_submitted += 1

  def step(self) -> list[SampledGroup]:
    """Takes new weights if it may, refills free slots, decodes one chunk.

    Returns: the groups that this finished, in order of submission.
    Raises: ValueError if there is work but no weights were given. FloatingPointError if the weights give
      log-probabilities that are not finite; `cancel` makes the engine usable again.
    """
    if not self._groups:
      return []
    if self._state is None:
      self._state = self._init_state()
    self._take_weights()
    self._refill()
    needs = [self._cache_need(*row) for row in self._table.rows if row is not None]
    prefix_tokens, slot_tokens = (max(need) for need in zip(*needs))
    lengths = self._shapes.reads(prefix_tokens=prefix_tokens, slot_tokens=slot_tokens)
    return self._harvest(jax.device_get(self._decode(*lengths)))

  def cancel(self) -> list[Hashable]:
    """Drops every request that is not finished and returns their tags in order of submission. Weights stay."""
    tags = [group.request.tag for group in self._groups.values()]
    self._groups.clear()
    self._waiting.clear()
    self._prefixes.clear()
    self._table.clear()
    self._state = None
    return tags

  def release(self) -> None:
    """Frees the memory of an idle engine's cache until it is needed again."""
    assert not self._groups
    self._state = None

  def warmup(self, stopped: Callable[[], bool] = lambda: False) -> None:
    """Compiles every declared program by running it on nothing; when `stopped` says so, no more after the one under way.

    Raises: ValueError without weights, whose layout the programs depend on, or with samples under way.
    """
    if self._groups:
      raise ValueError(f"warmup needs an idle engine but {len(self._groups)} requests are under way; call it first.")
    self._state = self._init_state()
    self._take_weights()
    for output in self._run_on_nothing():
      if stopped():
        return
    jax.block_until_ready(output)

  def _run_on_nothing(self) -> Iterator[Any]:
    """Runs every declared program; yields what each gave."""
    nothing = self._admission({})
    for num_prompts in self._shapes.prefill_batches:
      for length in self._shapes.prompt_buckets:
        logits, cache = self._prefill(np.zeros((num_prompts, length), np.int32), np.ones(num_prompts, np.int32))
        yield self._insert(logits, cache, nothing)
    for length in self._shapes.recompute_buckets:
      num = self._shapes.prefill_batches[-1]
      beyond = np.arange(num, dtype=np.int32) + self._shapes.slots
      yield self._recompute(np.zeros((num, length), np.int32), np.ones(num, np.int32), beyond, beyond)
    for lengths in itertools.product(self._shapes.prefix_buckets, self._shapes.kv_buckets):
      yield self._decode(*lengths)

  def _count(self, kind: str, size: int, length: int) -> None:
    assert (kind, size, length) in self._declared, (kind, size, length)
    self._called.add((kind, size, length))

  def _prefill(self, tokens: np.ndarray, lengths: np.ndarray) -> tuple[jax.Array, Any]:
    self._count("prefill", *tokens.shape)
    return self._programs.prefill(self._params, tokens, lengths, **self._prefill_options)

  def _insert(self, logits: jax.Array, prompts: Cache, admission: decode.Admission) -> None:
    self._count("insert", logits.shape[0], num_entries(prompts))
    self._state = decode.insert(self._state, logits, prompts, admission, **self._sampling_options)

  def _decode(self, prefix_length: int, kv_length: int) -> decode.ChunkOutput:
    self._count("decode", prefix_length, kv_length)
    self._state, output = self._programs.decode_chunk(
      self._params, self._state, prefix_length=prefix_length, kv_length=kv_length, **self._chunk_options
    )
    return output

  def _recompute(self, tokens: np.ndarray, lengths: np.ndarray, slots: np.ndarray, lanes: np.ndarray) -> None:
    self._count("recompute", *tokens.shape)
    self._state = decode.recompute(self._params, self._state, tokens, lengths, slots, lanes, **self._model_options)

  def _take_weights(self) -> None:
    """Puts waiting weights into effect and drops prefixes of the old: what has not begun starts from the new."""
    begun = any(group.num_started for group in self._groups.values())
    if self._pending is not None and (self._in_flight or not begun):
      self._params, self._version = self._pending
      self._pending = None
      self._generation += 1  # versions may repeat (an evaluation pins an old one), generations do not
      self._prefixes.clear()
      if self._shapes.recompute_buckets:
        self._recompute_running()
    if self._params is None:
      raise ValueError("the engine has no weights; call set_weights first.")

  def _refill(self) -> None:
    """Places waiting samples in free slots, first come first served, prefilling each prompt once."""
    chosen: dict[int, tuple[list[int], list[int]]] = {}  # group: slots, lanes that need its prompt
    while self._waiting:
      index = self._waiting[0]
      group = self._groups[index]
      if self._pending is not None and not group.num_started:
        break  # new weights wait for what has begun, and nothing else may begin before them
      samples = range(group.num_started, group.num_started + group.num_waiting)
      slots, lanes = self._table.claim(
        index, samples=samples, generation=self._generation, groups_waiting=len(self._waiting)
      )
      if slots:
        chosen[index] = slots, lanes
        group.num_started += len(slots)
      if group.num_waiting:
        break
      self._waiting.popleft()
    self._prefill_prompts([index for index in chosen if index not in self._prefixes])
    by_prefix: dict[int, dict[int, tuple[list[int], list[int]]]] = {}
    for index, places in chosen.items():
      by_prefix.setdefault(id(self._prefixes[index].logits), {})[index] = places
    for placed in by_prefix.values():
      prefix = self._prefixes[next(iter(placed))]
      assert prefix.generation == self._generation
      self._insert(prefix.logits, prefix.cache, self._admission(placed))
    for index in chosen:
      if not self._groups[index].num_waiting:
        del self._prefixes[index]

  def _prefill_prompts(self, indices: list[int]) -> None:
    """Fills `_prefixes` for these groups; prompts of one length bucket share calls."""
    prompts = {index: self._groups[index].request.prompt for index in indices}
    batches = padded_batches(prompts, lengths=self._shapes.prompt_buckets, sizes=self._shapes.prefill_batches)
    for members, tokens, lengths in batches:
      logits, cache = self._prefill(tokens, lengths)
      for row, index in enumerate(members):
        self._prefixes[index] = _Prefix(logits=logits, cache=cache, row=row, generation=self._generation)

  def _admission(self, placed: dict[int, tuple[list[int], list[int]]]) -> decode.Admission:
    """What goes where, for the samples that the table has put in these slots of each group."""
    admission = decode.empty_admission(self._shapes.slots, self._shapes.num_lanes)
    for index, (slots, lanes) in placed.items():
      request, row = self._groups[index].request, self._prefixes[index].row
      admission.lanes[lanes] = True
      admission.lane_sources[lanes] = row
      admission.lane_lengths[lanes] = len(request.prompt)
      admission.admitted[slots] = True
      admission.sources[slots] = row
      admission.lengths[slots] = len(request.prompt)
      admission.limits[slots] = request.max_new_tokens
      admission.keys[slots] = request.keys[[self._table.rows[slot].sample for slot in slots]]
      admission.temperatures[slots] = request.temperature
      for name in admission.filters._fields:
        getattr(admission.filters, name)[slots] = getattr(request, name)
    return admission

  def _cache_need(self, index: int, sample: int) -> tuple[int, int]:
    """Entries of the lane's prompt and of the slot's cache that the sample has when the next chunk begins. Its last
    token's keys and values are not among them."""
    group = self._groups[index]
    prompt_tokens, cached = len(group.request.prompt), max(1, int(group.lengths[sample])) - 1
    return (0, prompt_tokens + cached) if self._shapes.lane_samples == 1 else (prompt_tokens, cached)

  def _recompute_running(self) -> None:
    """Keys and values of everything under way, by the weights in effect."""
    read = {}
    for slot, running in enumerate(self._table.rows):
      if running is not None:
        group = self._groups[running.group]
        read[slot] = np.concatenate([group.request.prompt, group.tokens_of(running.sample)[:-1]])
    lane_of = self._table.first_running()
    self._table.renew(self._generation)
    num = self._shapes.prefill_batches[-1]
    for members, tokens, lengths in padded_batches(read, lengths=self._shapes.recompute_buckets, sizes=(num,)):
      slots = np.arange(num, dtype=np.int32) + self._shapes.slots  # of the rows that only fill the call up
      lanes = slots.copy()
      slots[: len(members)] = members
      for row, slot in enumerate(members):
        lanes[row] = lane_of.get(slot, lanes[row])
      self._recompute(tokens, lengths, slots, lanes)

  def _harvest(self, output: decode.ChunkOutput) -> list[SampledGroup]:
    """Books a chunk's tokens and takes finished samples out of their slots."""
    finished = []
    for slot, row in enumerate(self._table.rows):
      if row is None:
        continue
      index, sample = row
      group = self._groups[index]
      old, new = int(group.lengths[sample]), int(output.counts[slot])
      first = 0 if old == 0 else 1  # row 0 is the token from before the chunk, news only of a sample just begun
      taken = slice(first, first + new - old)
      group.extend(
        sample, tokens=output.tokens[taken, slot], log_mu=output.log_mu[taken, slot], version=self._version
      )
      if not output.live[slot]:
        self._table.rows[slot] = None
        if group.finish_one():
          finished.append(index)
    return [self._groups.pop(index).result(self._sampling_options["stop_ids"]) for index in sorted(finished)]

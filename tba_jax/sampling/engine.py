"""The host side of sampling: requests come in, finished groups go out, a fixed number of slots decodes in between.

An engine belongs to one thread and keeps every array on its own device or mesh. It prefills each prompt once, copies
the prompt's keys and values into a slot per sample, decodes all slots in chunks of a fixed number of tokens, and
refills slots as samples end. It does not know tasks, rewards or text.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from tba_jax.models.variants import ModelConfig
from tba_jax.sampling import decode
from tba_jax.sampling.buckets import bucket_of, checked_buckets, power_of_two_buckets
from tba_jax.sampling.requests import PartialGroup, SampledGroup, SampleRequest, check_request, sample_keys

__all__ = ["Engine", "SampleRequest", "SampledGroup", "sample_keys"]


@dataclasses.dataclass(frozen=True, eq=False)
class _Prefix:
  """A prefilled prompt: a row of one prefill call's results, and the weights that made it."""

  logits: jax.Array
  cache: Any
  row: int
  generation: int


@functools.lru_cache(maxsize=64)  # so that engines of one shape, and one engine twice, compile it once
def _make_init_state(
  cfg: ModelConfig, *, slots: int, cache_tokens: int, dtype: Any, rows: Sharding, cache: Sharding
) -> Callable[[], decode.DecodeState]:
  init = functools.partial(decode.init_state, cfg, slots=slots, cache_tokens=cache_tokens, dtype=dtype)
  shapes = jax.eval_shape(init)
  shardings = jax.tree.map(lambda _: rows, shapes)._replace(cache=jax.tree.map(lambda _: cache, shapes.cache))
  return jax.jit(init, out_shardings=shardings)


class Engine:
  """Continuous batching over a fixed number of slots. Confined to one thread.

  Weights are swapped between chunks. With `in_flight` they take effect at the next `step`: samples under way keep the
  keys and values that the old weights made and go on with the new weights. Without it they wait until every group that
  has begun is finished, so that a group is of one version. Either way each token carries the version of the weights
  that sampled it, and a prompt is never prefilled by older weights than the newest in effect.
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
    prefill_batches: Sequence[int] = (1, 4),
    kv_buckets: Sequence[int] | None = None,
    in_flight: bool = True,
    filtering: bool = False,
  ):
    """Allocates the cache; compiles nothing of the model yet (see `warmup`).

    Args:
      cfg: the decoder.
      device_or_mesh: one device, or a mesh with some of the axes data, fsdp (both share out the slots) and tensor (kv
        heads; where it does not divide them every tensor device holds all).
      slots: samples decoded at once.
      max_prompt_tokens, max_new_tokens: limits of a request.
      chunk_tokens: tokens decoded between two looks of the host; a slot that falls free within a chunk idles until its
        end.
      stop_ids: token ids, each of which ends a sample.
      dtype: of computation and cache.
      log_mu_temperature: the run's temperature.
      cache_tokens: length of a slot's cache; default max_prompt_tokens + max_new_tokens. With less, a request is bound
        by the sum.
      prompt_buckets: lengths to which prompts are padded; default powers of two from 16.
      prefill_batches: numbers of prompts that are prefilled in one call.
      kv_buckets: lengths up to which a chunk reads the cache; default powers of two from 128.
      in_flight: whether new weights take effect in the middle of samples.
      filtering: whether requests may have top_k, top_p or min_p; compiles a sort of the vocabulary, which runs where a
        slot needs it.
    Raises: ValueError for sizes that contradict each other.
    """
    for name, value in (
      ("slots", slots),
      ("max_prompt_tokens", max_prompt_tokens),
      ("max_new_tokens", max_new_tokens),
      ("chunk_tokens", chunk_tokens),
    ):
      if value < 1:
        raise ValueError(f"{name}={value} must be at least 1.")
    if not log_mu_temperature > 0:
      raise ValueError(f"log_mu_temperature={log_mu_temperature} must be above 0; only a request may be greedy.")
    if any(not 0 <= stop_id < cfg.vocab_size for stop_id in stop_ids):
      raise ValueError(f"stop_ids={tuple(stop_ids)} must be token ids; the vocabulary has {cfg.vocab_size}.")
    cache_tokens = max_prompt_tokens + max_new_tokens if cache_tokens is None else cache_tokens
    if cache_tokens <= max_prompt_tokens:
      raise ValueError(
        f"cache_tokens={cache_tokens} must exceed max_prompt_tokens={max_prompt_tokens}, or no token could be sampled."
      )
    self._cfg = cfg
    self._slots = slots
    self._max_prompt_tokens = max_prompt_tokens
    self._max_new_tokens = max_new_tokens
    self._cache_tokens = cache_tokens
    self._in_flight = in_flight
    self._prompt_buckets = checked_buckets(
      "prompt_buckets",
      prompt_buckets or power_of_two_buckets(16, max_prompt_tokens),
      largest=max_prompt_tokens,
      rule="max_prompt_tokens",
    )
    self._prefill_batches = checked_buckets(
      "prefill_batches", prefill_batches, largest=max(prefill_batches, default=0), rule="its largest"
    )
    self._kv_buckets = checked_buckets(
      "kv_buckets", kv_buckets or power_of_two_buckets(128, cache_tokens), largest=cache_tokens, rule="cache_tokens"
    )
    self._place(device_or_mesh)
    self._sampling_options = dict(
      stop_ids=tuple(stop_ids),
      log_mu_temperature=float(log_mu_temperature),
      filtering=filtering,
      shardings=self._shardings,
    )
    self._prefill_options = dict(cfg=cfg, dtype=dtype, shardings=self._shardings)
    self._chunk_options = dict(cfg=cfg, num_tokens=chunk_tokens, dtype=dtype, **self._sampling_options)
    rows, cache = self._shardings or (self._default_sharding, self._default_sharding)
    self._init_state = _make_init_state(
      cfg, slots=slots, cache_tokens=cache_tokens, dtype=dtype, rows=rows, cache=cache
    )
    self._state = self._init_state()
    self.cache_bytes = sum(  # on each device
      int(np.prod(cache.shard_shape(leaf.shape))) * leaf.dtype.itemsize for leaf in jax.tree.leaves(self._state.cache)
    )
    self._params, self._version, self._generation = None, None, 0
    self._pending: tuple[Any, int] | None = None
    self._signature: Any = None
    self._groups: dict[int, PartialGroup] = {}  # unfinished, in order of submission
    self._num_submitted = 0
    self._waiting: collections.deque[int] = collections.deque()  # groups with samples that no slot holds yet
    self._prefixes: dict[int, _Prefix] = {}  # of groups in `_waiting` that could not be placed whole
    self._rows: list[tuple[int, int] | None] = [None] * slots  # (group, sample) in each slot
    self._declared = self.compiled_shapes()
    self._called: set[tuple[str, int, int]] = set()

  def _place(self, device_or_mesh: jax.Device | Mesh) -> None:
    if isinstance(device_or_mesh, Mesh):
      self._shardings = decode.slot_shardings(device_or_mesh, self._cfg)
      self._default_sharding = NamedSharding(device_or_mesh, PartitionSpec())
      if self._slots % self._shardings.num_row_shards:
        raise ValueError(
          f"slots={self._slots} must be a multiple of {self._shardings.num_row_shards}, the product of the mesh axes "
          "data and fsdp."
        )
    else:
      self._shardings = None
      self._default_sharding = SingleDeviceSharding(device_or_mesh)

  @property
  def version(self) -> int | None:
    """Of the weights that sample now; None before the first `set_weights` took effect."""
    return self._version

  @property
  def num_running(self) -> int:
    """Samples in slots."""
    return sum(row is not None for row in self._rows)

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
    """All it can ever call: ("prefill" | "insert", prompts, padded length) and ("decode", slots, cache read)."""
    prompts = itertools.product(("prefill", "insert"), self._prefill_batches, self._prompt_buckets)
    return frozenset((*prompts, *(("decode", self._slots, kv_length) for kv_length in self._kv_buckets)))

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
      max_prompt_tokens=self._max_prompt_tokens,
      max_new_tokens=self._max_new_tokens,
      cache_tokens=self._cache_tokens,
      slots=self._slots,
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
    self._take_weights()
    self._refill()
    live = [row for row in self._rows if row is not None]
    kv_length = bucket_of(self._kv_buckets, max(self._cache_need(*row) for row in live))
    return self._harvest(jax.device_get(self._decode(kv_length)))

  def cancel(self) -> list[Hashable]:
    """Drops every request that is not finished and returns their tags in order of submission. Weights stay."""
    tags = [group.request.tag for group in self._groups.values()]
    self._groups.clear()
    self._waiting.clear()
    self._prefixes.clear()
    self._rows = [None] * self._slots
    self._state = self._init_state()
    return tags

  def warmup(self) -> None:
    """Compiles every declared program by running it on nothing.

    Raises: ValueError without weights, whose layout the programs depend on, or with samples under way.
    """
    if self._groups:
      raise ValueError(f"warmup needs an idle engine but {len(self._groups)} requests are under way; call it first.")
    self._take_weights()
    nothing = self._admission([])
    for num_prompts in self._prefill_batches:
      for length in self._prompt_buckets:
        logits, cache = self._prefill(np.zeros((num_prompts, length), np.int32), np.ones(num_prompts, np.int32))
        self._insert(logits, cache, nothing)
    for kv_length in self._kv_buckets:
      output = self._decode(kv_length)
    jax.block_until_ready(output)

  def _count(self, kind: str, size: int, length: int) -> None:
    assert (kind, size, length) in self._declared, (kind, size, length)
    self._called.add((kind, size, length))

  def _prefill(self, tokens: np.ndarray, lengths: np.ndarray) -> tuple[jax.Array, Any]:
    self._count("prefill", *tokens.shape)
    return decode.prefill(self._params, tokens, lengths, **self._prefill_options)

  def _insert(self, logits: jax.Array, prefix: Any, admission: decode.Admission) -> None:
    self._count("insert", logits.shape[0], jax.tree.leaves(prefix)[0].shape[2])
    self._state = decode.insert(self._state, logits, prefix, admission, **self._sampling_options)

  def _decode(self, kv_length: int) -> decode.ChunkOutput:
    self._count("decode", self._slots, kv_length)
    self._state, output = decode.decode_chunk(self._params, self._state, kv_length=kv_length, **self._chunk_options)
    return output

  def _take_weights(self) -> None:
    """Puts waiting weights into effect and drops prefixes of the old: what has not begun starts from the new."""
    begun = any(group.num_started for group in self._groups.values())
    if self._pending is not None and (self._in_flight or not begun):
      self._params, self._version = self._pending
      self._pending = None
      self._generation += 1  # versions may repeat (an evaluation pins an old one), generations do not
      self._prefixes.clear()
    if self._params is None:
      raise ValueError("the engine has no weights; call set_weights first.")

  def _refill(self) -> None:
    """Places waiting samples in free slots, first come first served, prefilling each prompt once."""
    free = collections.deque(slot for slot, row in enumerate(self._rows) if row is None)
    chosen: list[tuple[int, list[int]]] = []  # group, slots for it
    while free and self._waiting:
      index = self._waiting[0]
      group = self._groups[index]
      if self._pending is not None and not group.num_started:
        break  # new weights wait for what has begun, and nothing else may begin before them
      chosen.append((index, [free.popleft() for _ in range(min(len(free), group.num_waiting))]))
      if len(chosen[-1][1]) < group.num_waiting:
        break
      self._waiting.popleft()
    self._prefill_prompts([index for index, _ in chosen if index not in self._prefixes])
    by_prefix: dict[int, list[tuple[int, list[int]]]] = {}
    for index, slots in chosen:
      by_prefix.setdefault(id(self._prefixes[index].logits), []).append((index, slots))
    for placed in by_prefix.values():
      prefix = self._prefixes[placed[0][0]]
      assert prefix.generation == self._generation
      self._insert(prefix.logits, prefix.cache, self._admission(placed))
    for index, _ in chosen:
      if not self._groups[index].num_waiting:
        del self._prefixes[index]

  def _prefill_prompts(self, indices: list[int]) -> None:
    """Fills `_prefixes` for these groups; prompts of one length bucket share calls."""
    by_length: dict[int, list[int]] = {}
    for index in indices:
      by_length.setdefault(bucket_of(self._prompt_buckets, len(self._groups[index].request.prompt)), []).append(index)
    for length, members in by_length.items():
      while members:
        batch, members = members[: self._prefill_batches[-1]], members[self._prefill_batches[-1] :]
        tokens = np.zeros((bucket_of(self._prefill_batches, len(batch)), length), np.int32)
        lengths = np.ones(len(tokens), np.int32)  # of the rows that only fill the call up
        for row, index in enumerate(batch):
          prompt = self._groups[index].request.prompt
          tokens[row, : len(prompt)], lengths[row] = prompt, len(prompt)
        logits, cache = self._prefill(tokens, lengths)
        for row, index in enumerate(batch):
          self._prefixes[index] = _Prefix(logits=logits, cache=cache, row=row, generation=self._generation)

  def _admission(self, placed: list[tuple[int, list[int]]]) -> decode.Admission:
    """The next waiting samples of each group go to its slots; the host's books are updated."""
    num = self._slots
    admission = decode.Admission(
      admitted=np.zeros(num, bool),
      sources=np.zeros(num, np.int32),
      lengths=np.zeros(num, np.int32),
      limits=np.zeros(num, np.int32),
      keys=np.zeros((num, 2), np.uint32),
      temperatures=np.zeros(num, np.float32),
      filters=decode.Filters(np.zeros(num, np.int32), np.ones(num, np.float32), np.zeros(num, np.float32)),
    )
    for index, slots in placed:
      group = self._groups[index]
      for slot in slots:
        admission.admitted[slot] = True
        admission.sources[slot] = self._prefixes[index].row
        admission.lengths[slot] = len(group.request.prompt)
        admission.limits[slot] = group.request.max_new_tokens
        admission.keys[slot] = group.request.keys[group.num_started]
        admission.temperatures[slot] = group.request.temperature
        for name in decode.Filters._fields:
          getattr(admission.filters, name)[slot] = getattr(group.request, name)
        self._rows[slot] = (index, group.num_started)
        group.num_started += 1
    return admission

  def _cache_need(self, index: int, sample: int) -> int:
    """Cache entries that the sample reads in the next chunk. Its last token's keys and values are never written."""
    group = self._groups[index]
    prompt_tokens, count = len(group.request.prompt), max(1, int(group.lengths[sample]))
    return prompt_tokens + min(count - 1 + self._chunk_options["num_tokens"], group.request.max_new_tokens - 1)

  def _harvest(self, output: decode.ChunkOutput) -> list[SampledGroup]:
    """Books a chunk's tokens and takes finished samples out of their slots."""
    finished = []
    for slot, row in enumerate(self._rows):
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
        self._rows[slot] = None
        if group.finish_one():
          finished.append(index)
    return [self._groups.pop(index).result(self._sampling_options["stop_ids"]) for index in sorted(finished)]

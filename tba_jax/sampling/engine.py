"""The host side of sampling: requests come in, groups of finished samples go out, a fixed number of slots decodes in between.

An engine belongs to one thread and keeps every array on its own device or mesh. It prefills each prompt once, copies the prompt's keys
and values into a slot per sample, decodes all slots in chunks of a fixed number of tokens, and refills slots as samples end. It does
not know tasks, rewards or text.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from tba_jax.models.variants import ModelConfig
from tba_jax.sampling import decode

_UINT32_RANGE = 1 << 32


@dataclasses.dataclass(frozen=True, eq=False)
class SampleRequest:
  """S samples of one prompt. The engine hands `tag` back and does not look at it."""

  tag: Hashable
  prompt: np.ndarray  # int32 [P]
  keys: np.ndarray  # uint32 [S, 2], from `sample_keys`
  temperature: float  # 0 = greedy
  max_new_tokens: int


@dataclasses.dataclass(frozen=True, eq=False)
class SampledGroup:
  """The S samples of a request, T = tokens of the longest. Entries at or beyond a row's length are 0 and mean nothing."""

  tag: Hashable
  tokens: np.ndarray  # int32 [S, T], the stop token included
  lengths: np.ndarray  # int32 [S], each >= 1
  log_mu: np.ndarray  # float32 [S, T], nats, full vocabulary, at the engine's log_mu_temperature
  versions: np.ndarray  # int32 [S, T], of the weights that sampled each token
  truncated: np.ndarray  # bool [S], the last token allowed was no stop token


@dataclasses.dataclass(eq=False)
class _Group:
  """A request under way."""

  request: SampleRequest
  tokens: np.ndarray  # int32 [S, max_new_tokens]
  log_mu: np.ndarray
  versions: np.ndarray
  lengths: np.ndarray
  num_started: int = 0
  num_finished: int = 0

  @property
  def num_waiting(self) -> int:
    return len(self.request.keys) - self.num_started


@dataclasses.dataclass(frozen=True, eq=False)
class _Prefix:
  """A prefilled prompt: a row of one prefill call's results, and the weights that made it."""

  logits: jax.Array
  cache: Any
  row: int
  generation: int


def sample_keys(seed: int, *, occurrence: int, attempt: int, num_samples: int) -> np.ndarray:
  """Threefry keys of a prompt occurrence's samples: key(seed) with occurrence, attempt and sample folded in, uint32 [num_samples, 2].

  Computed on the host, bit for bit as `jax.random` would, so that a searcher's thread does not wait for a device to get its keys.

  Raises: ValueError for a number that is negative or over 32 bits, which jax would fold onto another one.
  """
  for name, value in (("seed", seed), ("occurrence", occurrence), ("attempt", attempt), ("num_samples", num_samples)):
    if not 0 <= value < _UINT32_RANGE:
      raise ValueError(f"{name}={value} must be in [0, 2**32): keys of larger numbers would repeat those of smaller ones.")
  key = np.array([[0, seed]], np.uint32)
  for number in (occurrence, attempt):
    key = _fold_in(key, np.array([number], np.uint32))
  return _fold_in(key, np.arange(num_samples, dtype=np.uint32))


def _fold_in(key: np.ndarray, data: np.ndarray) -> np.ndarray:
  """jax.random.fold_in of a threefry2x32 key [1, 2] and 32-bit data [N]: the block cipher over (0, data). Salmon et al. 2011."""
  key0, key1 = key[:, 0], key[:, 1]
  schedule = (key0, key1, key0 ^ key1 ^ np.uint32(0x1BD11BDA))
  x0, x1 = np.zeros_like(data) + key0, data + key1
  for group in range(5):
    for rotation in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
      x0 = x0 + x1
      x1 = ((x1 << np.uint32(rotation)) | (x1 >> np.uint32(32 - rotation))) ^ x0
    x0 = x0 + schedule[(group + 1) % 3]
    x1 = x1 + schedule[(group + 2) % 3] + np.uint32(group + 1)
  return np.stack([x0, x1], axis=-1)


def _power_of_two_buckets(smallest: int, largest: int) -> tuple[int, ...]:
  """smallest, 2 smallest, 4 smallest, ... below largest, then largest."""
  buckets = []
  while smallest < largest:
    buckets.append(smallest)
    smallest *= 2
  return (*buckets, largest)


def _checked_buckets(name: str, buckets: Sequence[int], largest: int, rule: str) -> tuple[int, ...]:
  buckets = tuple(sorted(set(buckets)))
  if not buckets or buckets[0] < 1 or buckets[-1] != largest:
    raise ValueError(f"{name}={buckets} must be positive and end at {rule}={largest}, so that every size has a bucket and none is wasted.")
  return buckets


def _bucket(buckets: tuple[int, ...], size: int) -> int:
  return next(bucket for bucket in buckets if bucket >= size)


@functools.lru_cache(maxsize=64)  # so that engines of one shape, and one engine twice, compile it once
def _make_init_state(
    cfg: ModelConfig, *, slots: int, cache_tokens: int, dtype: Any, rows: jax.sharding.Sharding, cache: jax.sharding.Sharding
) -> Callable[[], decode.DecodeState]:
  init = functools.partial(decode.init_state, cfg, slots=slots, cache_tokens=cache_tokens, dtype=dtype)
  shapes = jax.eval_shape(init)
  shardings = jax.tree.map(lambda _: rows, shapes)._replace(cache=jax.tree.map(lambda _: cache, shapes.cache))
  return jax.jit(init, out_shardings=shardings)


class Engine:
  """Continuous batching over a fixed number of slots. Confined to one thread.

  Weights are swapped between chunks. With `in_flight` they take effect at the next `step`: samples under way keep the keys and values
  that the old weights made and go on with the new weights. Without it they wait until every group that has begun is finished, so that
  a group is of one version. Either way each token carries the version of the weights that sampled it, and a prompt is never prefilled
  by older weights than the newest in effect.
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
  ):
    """Allocates the cache; compiles nothing of the model yet (see `warmup`).

    Args:
      cfg: the decoder.
      device_or_mesh: one device, or a mesh with some of the axes data, fsdp (both share out the slots) and tensor (kv heads; where it
        does not divide them every tensor device holds all).
      slots: samples decoded at once.
      max_prompt_tokens, max_new_tokens: limits of a request.
      chunk_tokens: tokens decoded between two looks of the host; a slot that falls free within a chunk idles until its end.
      stop_ids: token ids, each of which ends a sample.
      dtype: of computation and cache.
      log_mu_temperature: the run's temperature.
      cache_tokens: length of a slot's cache; default max_prompt_tokens + max_new_tokens. With less, a request is bound by the sum.
      prompt_buckets: lengths to which prompts are padded; default powers of two from 16.
      prefill_batches: numbers of prompts that are prefilled in one call.
      kv_buckets: lengths up to which a chunk reads the cache; default powers of two from 128.
      in_flight: whether new weights take effect in the middle of samples.
    Raises: ValueError for sizes that contradict each other.
    """
    positive = dict(slots=slots, max_prompt_tokens=max_prompt_tokens, max_new_tokens=max_new_tokens, chunk_tokens=chunk_tokens)
    for name, value in positive.items():
      if value < 1:
        raise ValueError(f"{name}={value} must be at least 1.")
    if not log_mu_temperature > 0:
      raise ValueError(f"log_mu_temperature={log_mu_temperature} must be above 0; for greedy decoding set the request's temperature to 0.")
    for stop_id in stop_ids:
      if not 0 <= stop_id < cfg.vocab_size:
        raise ValueError(f"stop_ids={tuple(stop_ids)}: {stop_id} is not a token id; the vocabulary has {cfg.vocab_size}.")
    cache_tokens = max_prompt_tokens + max_new_tokens if cache_tokens is None else cache_tokens
    if cache_tokens < max_prompt_tokens + 1:
      raise ValueError(f"cache_tokens={cache_tokens} must exceed max_prompt_tokens={max_prompt_tokens}, or no token could be sampled.")
    self._cfg = cfg
    self._slots = slots
    self._max_prompt_tokens = max_prompt_tokens
    self._max_new_tokens = max_new_tokens
    self._cache_tokens = cache_tokens
    self._in_flight = in_flight
    self._prompt_buckets = _checked_buckets(
        "prompt_buckets", prompt_buckets or _power_of_two_buckets(16, max_prompt_tokens), max_prompt_tokens, "max_prompt_tokens"
    )
    self._prefill_batches = _checked_buckets("prefill_batches", prefill_batches, max(prefill_batches, default=0), "its largest")
    self._kv_buckets = _checked_buckets(
        "kv_buckets", kv_buckets or _power_of_two_buckets(128, cache_tokens), cache_tokens, "cache_tokens"
    )
    self._place(device_or_mesh)
    sampling = dict(stop_ids=tuple(stop_ids), log_mu_temperature=float(log_mu_temperature), shardings=self._shardings)
    self._prefill_options = dict(cfg=cfg, dtype=dtype, shardings=self._shardings)
    self._insert_options = sampling
    self._chunk_options = dict(cfg=cfg, num_tokens=chunk_tokens, dtype=dtype, **sampling)
    rows, cache = self._shardings or (self._default_sharding, self._default_sharding)
    self._init_state = _make_init_state(cfg, slots=slots, cache_tokens=cache_tokens, dtype=dtype, rows=rows, cache=cache)
    self._state = self._init_state()
    cache_leaves = jax.tree.leaves(self._state.cache)
    self.cache_bytes = sum(int(np.prod(cache.shard_shape(leaf.shape))) * leaf.dtype.itemsize for leaf in cache_leaves)  # a device
    self._params, self._version, self._generation = None, None, 0
    self._pending: tuple[Any, int] | None = None
    self._signature: Any = None
    self._groups: dict[int, _Group] = {}  # unfinished, in order of submission
    self._num_submitted = 0
    self._waiting: collections.deque[int] = collections.deque()  # groups with samples that no slot holds yet
    self._prefixes: dict[int, _Prefix] = {}  # of groups in `_waiting` that could not be placed whole
    self._rows: list[tuple[int, int] | None] = [None] * slots  # (group, sample) in each slot
    self._called: set[tuple[str, int, int]] = set()

  def _place(self, device_or_mesh: jax.Device | Mesh) -> None:
    if isinstance(device_or_mesh, Mesh):
      self._shardings = decode.slot_shardings(device_or_mesh, self._cfg)
      self._default_sharding = NamedSharding(device_or_mesh, PartitionSpec())
      num_shards = self._shardings.rows.num_devices // max(1, device_or_mesh.shape.get("tensor", 1))
      if self._slots % num_shards:
        raise ValueError(f"slots={self._slots} must be a multiple of {num_shards}, the product of the mesh axes data and fsdp.")
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
    """All programs that this engine can ever call: ("prefill" | "insert", prompts, padded length) and ("decode", slots, cache read)."""
    prompts = {(kind, num, length) for kind in ("prefill", "insert") for num in self._prefill_batches for length in self._prompt_buckets}
    return frozenset(prompts | {("decode", self._slots, kv_length) for kv_length in self._kv_buckets})

  def set_weights(self, decode_params: Any, version: int) -> None:
    """Gives new weights, in the decode layout. When they take effect: see the class. Of several waiting, the last counts.

    Args:
      decode_params: arrays on this engine's device or mesh are used as they are and must not be donated or changed by others; anything
        else is copied there (on a mesh: to every device).
      version: optimizer updates that the weights have seen.
    Raises: ValueError if structure, shapes, dtypes or shardings differ from those of the first weights, as that would compile anew.
    """
    devices = self._default_sharding.device_set

    def place(leaf: Any) -> jax.Array:
      if isinstance(leaf, jax.Array) and leaf.sharding.device_set == devices and leaf.committed:
        return leaf
      return jax.device_put(leaf, self._default_sharding, may_alias=False)

    params = jax.tree.map(place, decode_params)
    paths_and_leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    signature = {jax.tree_util.keystr(path): (leaf.shape, str(leaf.dtype), leaf.sharding) for path, leaf in paths_and_leaves}
    if self._signature is None:
      self._signature = signature
    for name in sorted({*signature, *self._signature}):
      found, expected = signature.get(name, "absent"), self._signature.get(name, "absent")
      if found != expected:
        raise ValueError(
            f"weights of version {version}: {name} is {found} but was {expected} in the first weights; publish them in one layout."
        )
    self._pending = (params, int(version))

  def submit(self, request: SampleRequest) -> None:
    """Queues a request; prompts begin in order of submission.

    Raises: ValueError for a request that cannot be served, with the sizes.
    """
    prompt_tokens, new_tokens = len(request.prompt), request.max_new_tokens
    if not 1 <= prompt_tokens <= self._max_prompt_tokens:
      raise ValueError(f"the prompt of {request.tag!r} has {prompt_tokens} tokens; it must have 1 to max_prompt_tokens={self._max_prompt_tokens}.")
    if not 1 <= new_tokens <= self._max_new_tokens:
      raise ValueError(f"max_new_tokens={new_tokens} of {request.tag!r} must be 1 to the engine's max_new_tokens={self._max_new_tokens}.")
    if prompt_tokens + new_tokens > self._cache_tokens:
      raise ValueError(
          f"{request.tag!r} needs {prompt_tokens} prompt + {new_tokens} new = {prompt_tokens + new_tokens} cache entries but a slot has "
          f"{self._cache_tokens} ({self.cache_bytes} bytes a device for {self._slots} slots); raise cache_tokens or shorten the request."
      )
    prompt = np.asarray(request.prompt, np.int32)
    if prompt.min() < 0 or prompt.max() >= self._cfg.vocab_size:
      raise ValueError(f"the prompt of {request.tag!r} holds ids {prompt.min()} to {prompt.max()}; the vocabulary has {self._cfg.vocab_size}.")
    if not 0 <= request.temperature < float("inf"):
      raise ValueError(f"temperature={request.temperature} of {request.tag!r} must be 0 (greedy) or above and finite.")
    keys = np.asarray(request.keys)
    if keys.ndim != 2 or keys.shape[1] != 2 or keys.dtype != np.uint32 or not len(keys):
      raise ValueError(f"keys of {request.tag!r} are {keys.dtype}{list(keys.shape)}; they must be uint32 [samples, 2], as sample_keys returns.")
    shape = (len(keys), new_tokens)
    group = _Group(
        request=dataclasses.replace(request, prompt=prompt, keys=keys),
        tokens=np.zeros(shape, np.int32),
        log_mu=np.zeros(shape, np.float32),
        versions=np.zeros(shape, np.int32),
        lengths=np.zeros(len(keys), np.int32),
    )
    self._groups[self._num_submitted] = group
    self._waiting.append(self._num_submitted)
    self._num_submitted += 1

  def step(self) -> list[SampledGroup]:
    """Takes new weights if it may, refills free slots, decodes one chunk. Returns the groups that this finished, in order of submission.

    Raises:
      ValueError if there is work but no weights were given.
      FloatingPointError if the weights give log-probabilities that are not finite. `cancel` makes the engine usable again.
    """
    if not self._groups:
      return []
    self._take_weights()
    self._refill()
    live = [row for row in self._rows if row is not None]
    kv_length = _bucket(self._kv_buckets, max(self._cache_need(*row) for row in live))
    self._state, output = self._call(
        ("decode", self._slots, kv_length), decode.decode_chunk, self._params, self._state, kv_length=kv_length, **self._chunk_options
    )
    return self._harvest(jax.device_get(output))

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
      raise ValueError(f"warmup needs an idle engine but {len(self._groups)} requests are under way; call it before submit.")
    self._take_weights()
    nothing = self._admission([])
    for num_prompts in self._prefill_batches:
      for length in self._prompt_buckets:
        logits, cache = self._prefill(np.zeros((num_prompts, length), np.int32), np.ones(num_prompts, np.int32))
        self._insert(logits, cache, nothing)
    for kv_length in self._kv_buckets:
      self._state, output = self._call(
          ("decode", self._slots, kv_length), decode.decode_chunk, self._params, self._state, kv_length=kv_length, **self._chunk_options
      )
    jax.block_until_ready(output)

  def _call(self, shape: tuple[str, int, int], program: Any, *args: Any, **options: Any) -> Any:
    assert shape in self.compiled_shapes(), shape
    self._called.add(shape)
    return program(*args, **options)

  def _prefill(self, tokens: np.ndarray, lengths: np.ndarray) -> tuple[jax.Array, Any]:
    return self._call(("prefill", *tokens.shape), decode.prefill, self._params, tokens, lengths, **self._prefill_options)

  def _insert(self, logits: jax.Array, cache: Any, admission: decode.Admission) -> None:
    length = jax.tree.leaves(cache)[0].shape[2]
    self._state = self._call(
        ("insert", logits.shape[0], length), decode.insert, self._state, logits, cache, admission, **self._insert_options
    )

  def _take_weights(self) -> None:
    """Puts waiting weights into effect. Prefixes of the old ones are dropped: their samples not yet begun start from the new."""
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
      by_length.setdefault(_bucket(self._prompt_buckets, len(self._groups[index].request.prompt)), []).append(index)
    for length, members in by_length.items():
      while members:
        batch, members = members[: self._prefill_batches[-1]], members[self._prefill_batches[-1] :]
        tokens = np.zeros((_bucket(self._prefill_batches, len(batch)), length), np.int32)
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
      first = 0 if old == 0 else 1  # row 0 of the output is the token that was pending, known already but for a fresh sample
      taken = slice(first, first + new - old)
      group.tokens[sample, old:new] = output.tokens[taken, slot]
      group.log_mu[sample, old:new] = output.log_mu[taken, slot]
      group.versions[sample, old:new] = self._version
      group.lengths[sample] = new
      if not np.isfinite(group.log_mu[sample, old:new]).all():
        raise FloatingPointError(f"weights of version {self._version} give log-probabilities that are not finite for {group.request.tag!r}.")
      if not output.live[slot]:
        self._rows[slot] = None
        group.num_finished += 1
        if group.num_finished == len(group.lengths):
          finished.append(index)
    return [self._finish(index) for index in sorted(finished)]

  def _finish(self, index: int) -> SampledGroup:
    group = self._groups.pop(index)
    longest = int(group.lengths.max())
    last = group.tokens[np.arange(len(group.lengths)), group.lengths - 1]
    return SampledGroup(
        tag=group.request.tag,
        tokens=group.tokens[:, :longest],
        lengths=group.lengths,
        log_mu=group.log_mu[:, :longest],
        versions=group.versions[:, :longest],
        truncated=~np.isin(last, self._insert_options["stop_ids"]),
    )

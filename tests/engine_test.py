"""The engine against uncached teacher forcing, against itself in other shapes, and against ways to mislabel a token."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import tiny
from tba_jax.models import heads, transformer
from tba_jax.models.cache import write_front
from tba_jax.sampling import decode
from tba_jax.sampling.engine import Engine, SampleRequest, SampledGroup, sample_keys

CFG = tiny.tiny_config()
TEMPERATURE = 0.7
MAX_PROMPT, MAX_NEW = 24, 16
WIDTH = 48  # of the rows that are scored
STOP_IDS = (tiny.STOP_ID, 17, 40)
NUM_PROMPTS = 200
SHAPES = {
  "one slot, short chunks, short reads": dict(slots=1, chunk_tokens=2, kv_buckets=(12, 40)),
  "three slots, refilled all the time": dict(slots=3, chunk_tokens=7, prefill_batches=(1,)),
  "everything at once": dict(slots=NUM_PROMPTS, chunk_tokens=16, prefill_batches=(NUM_PROMPTS,), cache_tokens=64),
  "prompts by length": dict(slots=16, chunk_tokens=4, prompt_buckets=(8, 24), prefill_batches=(1, 3)),
  "lanes": dict(slots=12, chunk_tokens=3, lane_samples=4, kv_buckets=(8, 16)),
}


@pytest.fixture(scope="module")
def stacked() -> list[transformer.Params]:
  return [tiny.tiny_params(CFG, seed) for seed in range(3)]


@pytest.fixture(scope="module")
def weights(stacked) -> list[transformer.Params]:
  return [transformer.unstack(params) for params in stacked]


def make_engine(device_or_mesh: Any = None, **changes: Any) -> Engine:
  options = dict(
    slots=4, max_prompt_tokens=MAX_PROMPT, max_new_tokens=MAX_NEW, chunk_tokens=5, stop_ids=STOP_IDS, dtype=jnp.float32,
    log_mu_temperature=TEMPERATURE, prompt_buckets=(MAX_PROMPT,), prefill_batches=(2,),
  )
  return Engine(CFG, device_or_mesh or jax.devices()[0], **{**options, **changes})


def make_request(tag: int, *, samples: int = 1, prompt_tokens: int | None = None, **changes: Any) -> SampleRequest:
  """Prompt and keys follow from the tag."""
  rng = np.random.default_rng(tag)
  prompt = rng.integers(0, CFG.vocab_size, prompt_tokens or rng.integers(1, MAX_PROMPT + 1)).astype(np.int32)
  keys = sample_keys(0, occurrence=tag, attempt=0, num_samples=samples)
  options = dict(prompt=prompt, keys=keys, temperature=TEMPERATURE, max_new_tokens=MAX_NEW)
  return SampleRequest(tag=tag, **{**options, **changes})


def drain(engine: Engine) -> dict[int, SampledGroup]:
  groups = {}
  while engine.num_groups:
    groups.update({group.tag: group for group in engine.step()})
  return groups


def run(engine: Engine, requests: list[SampleRequest], params: transformer.Params) -> dict[int, SampledGroup]:
  engine.set_weights(params, 7)
  for request in requests:
    engine.submit(request)
  return drain(engine)


def scored_rows(
  requests: list[SampleRequest], groups: dict[int, SampledGroup]
) -> tuple[np.ndarray, np.ndarray, list[tuple[int, int, int]]]:
  """Whole sequences [N, WIDTH], segment ids, and (tag, sample, prompt length) of each row."""
  rows = [(request.tag, s, len(request.prompt)) for request in requests for s in range(len(request.keys))]
  tokens, segments = np.zeros((len(rows), WIDTH), np.int32), np.zeros((len(rows), WIDTH), np.int32)
  prompts = {request.tag: request.prompt for request in requests}
  for row, (tag, sample, prompt_tokens) in enumerate(rows):
    length = groups[tag].lengths[sample]
    tokens[row, :prompt_tokens] = prompts[tag]
    tokens[row, prompt_tokens : prompt_tokens + length] = groups[tag].tokens[sample, :length]
    segments[row, : prompt_tokens + length] = 1
  return tokens, segments, rows


@jax.jit
def full_logits(params: transformer.Params, tokens: jax.Array, segments: jax.Array) -> jax.Array:
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  hidden = transformer.hidden_states(params, CFG, tokens, positions, segments, dtype=jnp.float32)
  return transformer.logits(params, CFG, hidden)


teacher_forced = jax.jit(
  lambda params, *rows: heads.token_logprobs(params, CFG, *rows, temperature=TEMPERATURE, dtype=jnp.float32)
)


def same_samples(a: dict[int, SampledGroup], b: dict[int, SampledGroup], atol: float = 1e-4) -> int:
  """Rows that differ; those that do not agree in everything else."""
  num_different = 0
  assert a.keys() == b.keys()
  for tag, group in a.items():
    for sample, length in enumerate(group.lengths):
      if length != b[tag].lengths[sample] or (group.tokens[sample, :length] != b[tag].tokens[sample, :length]).any():
        num_different += 1
        continue
      np.testing.assert_allclose(group.log_mu[sample, :length], b[tag].log_mu[sample, :length], atol=atol)
      assert group.truncated[sample] == b[tag].truncated[sample]
  return num_different


@pytest.fixture(scope="module")
def sampled(weights) -> dict[int, SampledGroup]:
  return run(make_engine(), [make_request(tag) for tag in range(NUM_PROMPTS)], weights[0])


def test_tokens_are_the_best_perturbed_scores_of_an_uncached_forward(stacked, sampled):
  requests = [make_request(tag) for tag in range(NUM_PROMPTS)]
  tokens, segments, rows = scored_rows(requests, sampled)
  logits = np.asarray(full_logits(stacked[0], tokens, segments))
  noise = jax.jit(jax.vmap(lambda key, i: jax.random.gumbel(
    jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), i), (CFG.num_embeddings,), jnp.float32)))
  num_tokens = num_ties = 0
  for row, (tag, sample, prompt_tokens) in enumerate(rows):
    length = sampled[tag].lengths[sample]
    noises = np.asarray(noise(jnp.tile(requests[tag].keys[sample], (MAX_NEW, 1)), jnp.arange(MAX_NEW)))[:length]
    scores = logits[row, prompt_tokens - 1 : prompt_tokens - 1 + length] / TEMPERATURE + noises
    chosen = scores[np.arange(length), sampled[tag].tokens[sample, :length]]
    assert (chosen > scores.max(-1) - 1e-4).all()
    num_ties += (chosen < scores.max(-1)).sum()
    num_tokens += length
  assert num_tokens > 1500 and num_ties <= num_tokens / 2000
  assert 0 < sum(group.truncated.sum() for group in sampled.values()) < NUM_PROMPTS  # both ways of ending were seen


@pytest.mark.parametrize("shape", SHAPES)
def test_samples_and_log_mu_do_not_depend_on_slots_chunks_buckets_or_refills(stacked, weights, sampled, shape):
  requests = [make_request(tag) for tag in range(NUM_PROMPTS)]
  order = np.random.default_rng(1).permutation(NUM_PROMPTS)
  groups = run(make_engine(**SHAPES[shape]), [requests[i] for i in order], weights[0])
  assert same_samples(sampled, groups) <= 1  # less than a token in 2,000; the test above says which may differ
  tokens, segments, rows = scored_rows(requests, groups)
  positions = np.broadcast_to(np.arange(WIDTH), tokens.shape)
  log_p, _ = teacher_forced(stacked[0], tokens, positions, segments)
  for row, (tag, sample, prompt_tokens) in enumerate(rows):
    length = groups[tag].lengths[sample]
    found, expected = groups[tag].log_mu[sample, :length], log_p[row, prompt_tokens : prompt_tokens + length]
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("lane_samples,slots", [
  (2, 4), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((3, 6), (6, 12), (8, 8)))
])
def test_samples_that_share_a_prompt_equal_those_that_hold_copies(weights, lane_samples, slots):
  requests = [make_request(tag, samples=6) for tag in range(12)]
  copies = run(make_engine(), requests, weights[0])
  engine = make_engine(slots=slots, lane_samples=lane_samples)
  assert same_samples(copies, run(engine, requests, weights[0])) == 0
  per_entry = 2 * 2 * 2 * 8 * 4  # k and v, layers, kv heads, head width, bytes of float32
  assert engine.cache_bytes == per_entry * (slots * MAX_NEW + slots // lane_samples * MAX_PROMPT)


def test_greedy_takes_the_argmax_and_reports_log_mu_at_the_runs_temperature(stacked, weights):
  requests = [make_request(tag, temperature=0.0) for tag in range(10)]
  groups = run(make_engine(), requests, weights[0])
  tokens, segments, rows = scored_rows(requests, groups)
  logits = np.asarray(full_logits(stacked[0], tokens, segments), np.float64) / TEMPERATURE
  for row, (tag, _, prompt_tokens) in enumerate(rows):
    length = groups[tag].lengths[0]
    ours = logits[row, prompt_tokens - 1 : prompt_tokens - 1 + length]
    np.testing.assert_array_equal(groups[tag].tokens[0], ours.argmax(-1))
    np.testing.assert_allclose(groups[tag].log_mu[0], ours.max(-1) - np.log(np.exp(ours).sum(-1)), atol=1e-4)


def test_ids_beyond_the_vocabulary_are_never_sampled(stacked):
  table = stacked[0]["embed"]["table"]
  loud = table.at[CFG.vocab_size :].set(100 * table[: CFG.num_embeddings - CFG.vocab_size])
  params = {**stacked[0], "embed": {"table": loud}}
  requests = [make_request(tag, samples=8, temperature=temperature) for tag, temperature in enumerate((0.0, 1.0, 50.0))]
  groups = run(make_engine(), requests, transformer.unstack(params))
  assert max(group.tokens.max() for group in groups.values()) < CFG.vocab_size


def test_any_stop_id_ends_a_row_and_is_its_last_token(weights):
  requests = [make_request(tag, samples=4) for tag in range(20)]
  free = run(make_engine(stop_ids=()), requests, weights[0])
  groups = run(make_engine(), requests, weights[0])
  seen = set()
  for tag, group in groups.items():
    for sample, length in enumerate(group.lengths):
      unstopped = free[tag].tokens[sample]
      at = np.flatnonzero(np.isin(unstopped, STOP_IDS))
      assert length == (at[0] + 1 if len(at) else MAX_NEW)
      assert group.truncated[sample] == (len(at) == 0)
      np.testing.assert_array_equal(group.tokens[sample, :length], unstopped[:length])
      np.testing.assert_allclose(group.log_mu[sample, :length], free[tag].log_mu[sample, :length], atol=1e-5)
      assert (group.tokens[sample, length:] == 0).all() and (group.log_mu[sample, length:] == 0).all()
      seen.update(group.tokens[sample, length - 1 : length].tolist() if len(at) else [None])
    assert group.tokens.shape == group.log_mu.shape == group.versions.shape == (4, group.lengths.max())
  assert seen == {*STOP_IDS, None}
  assert all(group.truncated.all() and (group.lengths == MAX_NEW).all() for group in free.values())


def test_a_stop_token_in_the_last_place_is_not_truncated(weights, sampled):
  stopped = [tag for tag, group in sampled.items() if 1 < group.lengths[0] < MAX_NEW][:8]
  for shorter, truncated in ((0, False), (1, True)):
    requests = [make_request(tag, max_new_tokens=int(sampled[tag].lengths[0]) - shorter) for tag in stopped]
    groups = run(make_engine(), requests, weights[0])
    for request in requests:
      group = groups[request.tag]
      assert group.lengths[0] == request.max_new_tokens and group.truncated[0] == truncated


def test_each_request_has_its_own_limit(weights):
  requests = [make_request(tag, max_new_tokens=1 + tag) for tag in range(MAX_NEW)]
  groups = run(make_engine(stop_ids=()), requests, weights[0])
  assert [groups[tag].lengths[0] for tag in range(MAX_NEW)] == list(range(1, MAX_NEW + 1))


def test_the_last_cache_entry_is_usable_and_one_more_is_refused(weights):
  requests = [make_request(tag, prompt_tokens=MAX_PROMPT) for tag in range(6)]
  roomy = run(make_engine(stop_ids=(), cache_tokens=64), requests, weights[0])
  exact = run(make_engine(stop_ids=()), requests, weights[0])
  assert same_samples(roomy, exact) == 0
  tight = make_engine(stop_ids=(), cache_tokens=MAX_PROMPT + MAX_NEW - 1)
  cache_bytes = 4 * 2 * 2 * 2 * 39 * 8 * 4  # slots, k and v, layers, kv heads, entries, head width, bytes of float32
  assert tight.cache_bytes == cache_bytes
  message = rf"24 prompt \+ 16 new = 40 cache entries but a slot has 39 \({cache_bytes} bytes a device for 4 slots\)"
  with pytest.raises(ValueError, match=message):
    tight.submit(requests[0])


hand_prefill = jax.jit(lambda params, *args: transformer.prefill(params, CFG, *args, dtype=jnp.float32))
hand_step = jax.jit(lambda params, *args: transformer.decode_step(params, CFG, *args, dtype=jnp.float32))


def by_hand(request: SampleRequest, sample: int, schedule: list[transformer.Params]) -> tuple[list[int], list[float]]:
  """One sample, one row, one token at a time; token i by weights schedule[i]. Keys and values once made are kept."""
  cache = transformer.init_cache(CFG, batch=1, length=MAX_PROMPT + MAX_NEW, dtype=jnp.float32)
  length = np.array([len(request.prompt)])
  logits, read = hand_prefill(schedule[0], request.prompt[None], length)
  cache = write_front(cache, read)
  tokens, log_mu = [], []
  for index, params in enumerate(schedule):
    if index:
      position = length + index - 1
      logits, cache = hand_step(params, np.array(tokens[-1:]), position, cache)
    key = jax.random.fold_in(jax.random.wrap_key_data(jnp.asarray(request.keys[sample]), impl="threefry2x32"), index)
    scaled = np.asarray(logits[0], np.float64) / TEMPERATURE
    tokens.append(int(np.argmax(scaled + np.asarray(jax.random.gumbel(key, scaled.shape, jnp.float32)))))
    log_mu.append(scaled[tokens[-1]] - np.log(np.exp(scaled).sum()))
  return tokens, log_mu


def test_weights_in_flight_take_effect_at_the_next_chunk_and_label_their_tokens(weights):
  engine = make_engine(stop_ids=(), chunk_tokens=5)
  request = make_request(0, samples=3)
  engine.set_weights(weights[0], 3)
  engine.submit(request)
  assert engine.step() == [] and engine.version == 3  # the first token of prefill and 5 of the chunk
  engine.set_weights(weights[1], 4)
  assert engine.version == 3
  assert engine.step() == [] and engine.version == 4
  engine.set_weights(weights[1], 5)
  engine.set_weights(weights[2], 6)  # the last counts
  group = drain(engine)[0]
  versions = [3] * 6 + [4] * 5 + [6] * 5
  for sample in range(3):
    assert group.versions[sample].tolist() == versions
    tokens, log_mu = by_hand(request, sample, [weights[{3: 0, 4: 1, 6: 2}[version]] for version in versions])
    assert group.tokens[sample].tolist() == tokens
    np.testing.assert_allclose(group.log_mu[sample], log_mu, atol=1e-4)


def test_lanes_keep_what_old_weights_read_for_samples_under_way(weights):
  """Four slots in two lanes, six samples: two begin after the swap and must not use the prompt in their siblings' lane.
  """
  engine = make_engine(stop_ids=(), chunk_tokens=5, slots=4, lane_samples=2)
  request = make_request(0, samples=6)
  engine.set_weights(weights[0], 3)
  engine.submit(request)
  engine.step()
  engine.set_weights(weights[1], 4)
  group = drain(engine)[0]
  for sample in range(6):
    versions = [3] * 6 + [4] * 10 if sample < 4 else [4] * 16
    assert group.versions[sample].tolist() == versions
    tokens, log_mu = by_hand(request, sample, [weights[version - 3] for version in versions])
    assert group.tokens[sample].tolist() == tokens
    np.testing.assert_allclose(group.log_mu[sample], log_mu, atol=1e-4)


def without_a_cache(request: SampleRequest, sample: int, schedule: list[transformer.Params]) -> list[int]:
  """Token i by weights schedule[i], which read everything before it anew."""
  tokens = []
  for index, params in enumerate(schedule):
    row, segments = np.zeros((1, WIDTH), np.int32), np.zeros((1, WIDTH), np.int32)
    length = len(request.prompt) + index
    row[0, :length], segments[0, :length] = [*request.prompt, *tokens], 1
    key = jax.random.fold_in(jax.random.wrap_key_data(jnp.asarray(request.keys[sample]), impl="threefry2x32"), index)
    scaled = np.asarray(full_logits(params, row, segments)[0, length - 1], np.float64) / TEMPERATURE
    tokens.append(int(np.argmax(scaled + np.asarray(jax.random.gumbel(key, scaled.shape, jnp.float32)))))
  return tokens


@pytest.mark.parametrize("lane_samples", [1, 2])
def test_recomputed_samples_go_on_as_if_the_new_weights_had_read_everything(stacked, weights, lane_samples):
  engine = make_engine(stop_ids=(), chunk_tokens=5, recompute_kv=True, lane_samples=lane_samples)
  requests = [make_request(tag, samples=3, prompt_tokens=7 + 9 * tag) for tag in range(2)]
  engine.set_weights(weights[0], 3)
  for request in requests:
    engine.submit(request)
  engine.step()
  engine.set_weights(weights[1], 4)
  engine.step()
  engine.set_weights(weights[2], 6)
  groups = drain(engine)
  num_swapped = 0
  for request in requests:
    for sample in range(3):
      schedule = [stacked[{3: 0, 4: 1, 6: 2}[version]] for version in groups[request.tag].versions[sample]]
      assert groups[request.tag].tokens[sample].tolist() == without_a_cache(request, sample, schedule)
      num_swapped += schedule[0] is not schedule[-1]
  assert num_swapped >= 3


def test_without_in_flight_every_group_is_of_one_version(weights):
  engine = make_engine(in_flight=False)
  engine.set_weights(weights[0], 3)
  requests = [make_request(tag, samples=6) for tag in range(3)]  # more than slots: a group begins in two refills
  for request in requests:
    engine.submit(request)
  engine.step()
  engine.set_weights(weights[1], 4)
  groups = drain(engine)
  found = {tag: {int(v) for row, n in zip(g.versions, g.lengths) for v in row[:n]} for tag, g in groups.items()}
  assert found == {0: {3}, 1: {4}, 2: {4}}
  assert same_samples({0: groups[0]}, run(make_engine(), requests[:1], weights[0])) == 0
  assert same_samples({tag: groups[tag] for tag in (1, 2)}, run(make_engine(), requests[1:], weights[1])) == 0


def test_no_prefix_survives_new_weights(weights):
  """A prompt again, and a group of which one half begins before and one half after the update."""
  engine = make_engine(slots=2, chunk_tokens=MAX_NEW, stop_ids=())
  request = make_request(0, samples=4)
  before = run(engine, [request], weights[0])
  after = run(engine, [request], weights[1])
  assert same_samples(after, run(make_engine(stop_ids=()), [request], weights[1])) == 0
  assert same_samples(before, after) == 4
  engine.set_weights(weights[0], 1)
  engine.submit(request)
  assert engine.step() == [] and engine.num_queued == 2
  engine.set_weights(weights[1], 2)
  mixed = drain(engine)[0]
  for sample, expected in ((0, before), (1, before), (2, after), (3, after)):
    length = expected[0].lengths[sample]
    assert mixed.lengths[sample] == length and (mixed.versions[sample, :length] == (1 if sample < 2 else 2)).all()
    np.testing.assert_array_equal(mixed.tokens[sample, :length], expected[0].tokens[sample, :length])


def test_filters_cut_and_log_mu_is_of_what_was_sampled_from(stacked, weights):
  """The cut itself is tested in decode_test.py; here that each row has its own filter, and what log_mu then means."""
  filters = {0: dict(), 1: dict(top_k=1), 2: dict(top_k=3), 3: dict(temperature=1.2, top_k=3)}
  requests = [make_request(tag, samples=6, **changes) for tag, changes in filters.items()]
  groups = run(make_engine(slots=8, filtering=True), requests, weights[0])
  assert same_samples({0: groups[0]}, run(make_engine(), requests[:1], weights[0])) == 0
  assert [groups[tag].filtered for tag in filters] == [False, True, True, True]
  tokens, segments, rows = scored_rows(requests, groups)
  logits = np.asarray(full_logits(stacked[0], tokens, segments), np.float64)
  for row, (tag, sample, prompt_tokens) in enumerate(rows):
    if tag == 0:
      continue
    length = groups[tag].lengths[sample]
    scaled = logits[row, prompt_tokens - 1 : prompt_tokens - 1 + length] / requests[tag].temperature
    best = np.sort(scaled, axis=-1)[:, -requests[tag].top_k :]
    chosen = scaled[np.arange(length), groups[tag].tokens[sample, :length]]
    assert (chosen > best[:, 0] - 1e-4).all()
    np.testing.assert_allclose(groups[tag].log_mu[sample, :length], chosen - np.log(np.exp(best).sum(-1)), atol=1e-4)


def test_a_prompt_is_prefilled_once_for_all_its_samples(weights, monkeypatch):
  calls = []
  programs = decode.programs_on("cpu")

  def counted(params: Any, tokens: np.ndarray, lengths: np.ndarray, **options: Any) -> Any:
    calls.append(tokens.shape)
    return programs.prefill(params, tokens, lengths, **options)

  monkeypatch.setattr(decode, "programs_on", lambda platform: programs._replace(prefill=counted))
  run(make_engine(), [make_request(0, samples=10)], weights[0])
  assert calls == [(2, 24)]
  calls.clear()
  shape = SHAPES["prompts by length"]
  run(make_engine(**shape), [make_request(tag, prompt_tokens=5 if tag < 4 else 20) for tag in range(6)], weights[0])
  assert calls == [(3, 8), (1, 8), (3, 24)]  # several prompts a call


def test_groups_stream_out_as_they_complete(weights):
  engine = make_engine(stop_ids=())
  engine.set_weights(weights[0], 0)
  limits = {0: 16, 1: 3, 2: 9, 3: 1, 4: 2}
  for tag, limit in limits.items():
    engine.submit(make_request(tag, max_new_tokens=limit))
  assert engine.num_queued == 5 and engine.num_running == 0
  finished = []
  while engine.num_groups:
    finished.append([group.tag for group in engine.step()])
  assert finished == [[1, 3], [2, 4], [0]]
  assert engine.step() == [] and engine.num_running == engine.num_queued == 0


def test_sample_keys_equal_the_chain_of_jax_and_never_repeat():
  for seed, occurrence, attempt in ((0, 0, 0), (7, 123_456, 2), (2**32 - 1, 2**31, 5)):
    key = jax.random.key(seed, impl="threefry2x32")
    key = jax.random.fold_in(jax.random.fold_in(key, occurrence), attempt)
    expected = [jax.random.key_data(jax.random.fold_in(key, sample)) for sample in range(6)]
    found = sample_keys(seed, occurrence=occurrence, attempt=attempt, num_samples=6)
    assert found.dtype == np.uint32
    np.testing.assert_array_equal(found, expected)
  keys = np.concatenate([
    sample_keys(seed, occurrence=occurrence, attempt=attempt, num_samples=20)
    for seed in range(3) for occurrence in range(20) for attempt in range(3)
  ])
  assert len({tuple(key) for key in keys}) == len(keys) == 3600
  with pytest.raises(ValueError, match=r"occurrence=4294967296 must be in \[0, 2\*\*32\)"):
    sample_keys(0, occurrence=2**32, attempt=0, num_samples=1)


def test_samples_occurrences_and_attempts_differ(weights):
  prompt = np.arange(5, 15, dtype=np.int32)
  chains = [(0, 0), (1, 0), (0, 1)]
  requests = [
    make_request(tag, prompt=prompt, keys=sample_keys(0, occurrence=occurrence, attempt=attempt, num_samples=4))
    for tag, (occurrence, attempt) in enumerate(chains)
  ]
  groups = run(make_engine(stop_ids=()), requests, weights[0])
  assert len({tuple(row) for group in groups.values() for row in group.tokens}) == 12


class CompileCounter:
  """Counts programs that XLA compiles while it is entered."""

  def __enter__(self) -> CompileCounter:
    self.num = 0
    self._active = True
    jax.monitoring.register_event_duration_secs_listener(self._listen)
    return self

  def _listen(self, event: str, duration_secs: float, **_: Any) -> None:
    del duration_secs
    self.num += self._active and event == "/jax/core/compile/backend_compile_duration"

  def __exit__(self, *_: Any) -> None:
    self._active = False


def test_a_warmup_that_is_stopped_compiles_no_more_and_the_engine_works(weights):
  # On a device of its own: another test counts what is compiled for its.
  engine = make_engine(jax.devices()[5], slots=6, kv_buckets=(16, 40), prefill_batches=(1, 3), prompt_buckets=(8, 24))
  engine.set_weights(weights[0], 0)
  asked = []
  engine.warmup(lambda: bool(asked.append(engine.num_compiled) or len(asked) > 1))
  assert asked == [2, 4] and engine.num_compiled == 4 < len(engine.compiled_shapes())  # prefill and insert, twice
  engine.submit(make_request(0, samples=2, prompt_tokens=5))
  assert len(drain(engine)) == 1


@pytest.mark.parametrize("on_mesh,lane_samples", [
  pytest.param(False, 1, marks=pytest.mark.slow), (True, 1), (False, 3)])
def test_after_warmup_nothing_compiles(weights, on_mesh, lane_samples):
  where = Mesh(np.array(jax.devices()[:4]).reshape(2, 2),
               ("data", "tensor")) if on_mesh else jax.devices()[lane_samples]
  prompt_buckets = (24,) if on_mesh else (8, 24)
  recompute = lane_samples > 1
  engine = make_engine(
    where, slots=6, kv_buckets=(16, 40) if lane_samples == 1 else (8, 16), prefill_batches=(1, 3),
    prompt_buckets=prompt_buckets, lane_samples=lane_samples, recompute_kv=recompute)
  engine.set_weights(weights[0], 0)
  with CompileCounter() as counter:
    engine.warmup()
  assert engine.num_compiled == len(engine.compiled_shapes()) == 2 * 2 * len(prompt_buckets) + 2 + recompute
  assert counter.num >= engine.num_compiled
  new = jax.tree.map(lambda x: jax.device_put(x, next(iter(jax.tree.leaves(engine._params))).sharding), weights[1])
  rng = np.random.default_rng(0)
  lengths = rng.permutation(np.arange(1, MAX_PROMPT + 1))
  with CompileCounter() as counter:
    while len(lengths):
      ragged = rng.integers(1, 8)
      for length in lengths[:ragged]:
        engine.submit(make_request(int(length), samples=int(rng.integers(1, 4)), prompt_tokens=int(length)))
      lengths = lengths[ragged:]
      engine.step()
    engine.set_weights(new, 1)
    drain(engine)
    engine.cancel()
  assert counter.num == 0 and engine.num_compiled == len(engine.compiled_shapes())


@pytest.mark.parametrize("data,tensor,lane_samples", [(4, 2, 1), (2, 4, 1), (2, 2, 2)])
def test_a_mesh_samples_as_one_device(weights, data, tensor, lane_samples):
  """Two kv heads: split over tensor = 2, whole on each of tensor = 4."""
  mesh = Mesh(np.array(jax.devices()[: data * tensor]).reshape(data, 1, tensor), ("data", "fsdp", "tensor"))
  requests = [make_request(tag, samples=2) for tag in range(20)]
  one = run(make_engine(), requests, weights[0])
  many = run(make_engine(mesh, lane_samples=lane_samples), requests, weights[0])
  assert same_samples(one, many) == 0


def test_two_engines_keep_to_their_own_devices(weights):
  before = {id(array) for array in jax.live_arrays()}
  engine = make_engine(jax.devices()[3])
  run(engine, [make_request(tag, samples=3) for tag in range(4)], jax.tree.map(np.asarray, weights[0]))
  new = [array for array in jax.live_arrays() if id(array) not in before]
  assert new and all(array.devices() == {jax.devices()[3]} for array in new)


def test_cancel_returns_what_is_not_finished_and_leaves_a_usable_engine(weights):
  engine = make_engine()
  engine.set_weights(weights[0], 0)
  for tag in range(7):
    engine.submit(make_request(tag, max_new_tokens=1 if tag == 0 else MAX_NEW))
  assert [group.tag for group in engine.step()] == [0]
  assert engine.cancel() == [1, 2, 3, 4, 5, 6]
  assert engine.num_groups == engine.num_running == engine.num_queued == 0 and engine.step() == []
  requests = [make_request(tag) for tag in range(3)]
  assert same_samples(run(engine, requests, weights[0]), run(make_engine(), requests, weights[0])) == 0


def test_weights_that_are_not_finite_are_reported_and_leave_nothing_behind(weights):
  engine = make_engine()
  engine.set_weights(jax.tree.map(lambda x: x * jnp.nan, weights[0]), 9)
  engine.submit(make_request(0))
  with pytest.raises(FloatingPointError, match="version 9 give log-probabilities that are not finite for 0"):
    engine.step()
  assert engine.cancel() == [0]
  requests = [make_request(0)]
  assert same_samples(run(engine, requests, weights[0]), run(make_engine(), requests, weights[0])) == 0


def test_weights_of_another_layout_are_refused(weights):
  engine = make_engine()
  engine.set_weights(weights[0], 0)
  with pytest.raises(ValueError, match=r"version 1: \['embed'\]\['table'\] is .*bfloat16.* but was .*float32"):
    engine.set_weights(jax.tree.map(lambda x: x.astype(jnp.bfloat16), weights[1]), 1)
  with pytest.raises(ValueError, match=r"\['lm_head'\] is .* but was absent in the first weights"):
    engine.set_weights({**weights[1], "lm_head": jnp.zeros(3)}, 1)


@pytest.mark.parametrize("changes,message", [
  (dict(slots=0), "slots=0 must be at least 1"),
  (dict(chunk_tokens=0), "chunk_tokens=0 must be at least 1"),
  (dict(log_mu_temperature=0.0), "log_mu_temperature=0.0 must be above 0"),
  (dict(stop_ids=(1, 63)), r"stop_ids=\(1, 63\) must be token ids; the vocabulary has 63"),
  (dict(cache_tokens=MAX_PROMPT), "cache_tokens=24 must exceed max_prompt_tokens=24"),
  (dict(prompt_buckets=(8, 16)), r"prompt_buckets=\(8, 16\) must be positive and end at max_prompt_tokens=24"),
  (dict(kv_buckets=(0, 40)), r"kv_buckets=\(0, 40\) must be positive and end at cache_tokens=40"),
  (dict(prefill_batches=()), r"prefill_batches=\(\) must be positive"),
  (dict(lane_samples=3), "slots=4 must be a multiple of lane_samples=3"),
  (dict(lane_samples=2, cache_tokens=40), "cache_tokens=40 is for lane_samples=1; lanes of 2 need no such limit"),
  (dict(lane_samples=2, kv_buckets=(8, 40)), r"kv_buckets=\(8, 40\) must be positive and end at max_new_tokens=16"),
  (dict(recompute_kv=True, in_flight=False), "recompute_kv=True means nothing with in_flight=False"),
])
def test_sizes_that_contradict_each_other_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    make_engine(**changes)


def test_learned_positions_must_reach_over_prompt_and_response_together():
  learned = dataclasses.replace(CFG, positions="learned", max_positions=MAX_PROMPT + MAX_NEW - 1)
  sizes = dict(slots=4, max_prompt_tokens=MAX_PROMPT, max_new_tokens=MAX_NEW, chunk_tokens=5, stop_ids=(),
               dtype=jnp.float32, log_mu_temperature=1.0)
  for lane_samples in (1, 2):
    with pytest.raises(ValueError, match="a cache of 40 tokens is longer than the 39 positions that this model has"):
      Engine(learned, jax.devices()[0], lane_samples=lane_samples, **sizes)


def test_slots_must_divide_over_the_mesh():
  with pytest.raises(ValueError, match="slots=4 must be a multiple of 8, the product of the mesh axes data and fsdp"):
    make_engine(Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "fsdp")))
  with pytest.raises(ValueError, match="slots=4 must be a multiple of 4 times lane_samples=2, the product"):
    make_engine(Mesh(np.array(jax.devices()[:4]), ("data",)), lane_samples=2)


@pytest.mark.parametrize("changes,message", [
  (dict(prompt=np.zeros(0, np.int32)), "the prompt of 0 has 0 tokens; it must have 1 to max_prompt_tokens=24"),
  (dict(prompt_tokens=25), "the prompt of 0 has 25 tokens"),
  (dict(max_new_tokens=17), "max_new_tokens=17 of 0 must be 1 to the engine's 16"),
  (dict(prompt=np.array([3, 63])), "the prompt of 0 holds ids 3 to 63; the vocabulary has 63"),
  (dict(temperature=-1.0), r"temperature=-1.0 of 0 must be 0 \(greedy\) or above and finite"),
  (dict(temperature=float("nan")), "temperature=nan"),
  (dict(top_p=0.0), r"top_k=0, top_p=0.0, min_p=0.0 of 0: top_k must be 0 \(all\) or more, top_p in \(0, 1\]"),
  (dict(top_k=-1), "top_k=-1"),
  (dict(min_p=1.5), "min_p=1.5"),
  (dict(top_k=3, temperature=0.0), r"0 is greedy \(temperature=0\), where top_k, top_p and min_p change nothing"),
  (dict(top_k=3), "0 has top_k, top_p or min_p; build the engine with filtering=True"),
  (dict(keys=np.zeros((3, 2), np.int32)), r"keys of 0 are int32\[3, 2\]; they must be uint32 \[samples, 2\]"),
  (dict(keys=np.zeros((0, 2), np.uint32)), r"keys of 0 are uint32\[0, 2\]"),
])
def test_requests_that_cannot_be_served_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    make_engine().submit(make_request(0, **changes))


def test_work_without_weights_and_warmup_amid_work_are_refused(weights):
  engine = make_engine()
  engine.submit(make_request(0))
  with pytest.raises(ValueError, match="no weights; call set_weights first"):
    engine.step()
  engine.set_weights(weights[0], 0)
  with pytest.raises(ValueError, match="warmup needs an idle engine but 1 requests are under way"):
    engine.warmup()

"""The train step against plain gradients of a loss written out response by response; schedules and optimizers against
float64 numpy."""

from __future__ import annotations

import functools
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax import learner, optimizers, sharding
from tba_jax.losses.registry import make_loss
from tba_jax.models import transformer
from tba_jax.models.variants import ModelConfig
from tba_jax.plan import hlo
from tba_jax.replay.collate import collate
from tba_jax.types import Batch, Draw, TrainState

TEMPERATURE = 0.7
BETA = np.float32(0.3)
RATE = 2.0**-5  # of plain gradient descent: small enough for three steps to stay tame
CFG = ModelConfig(
  family="llama", vocab_size=37, num_embeddings=40, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2,
  head_dim=4, mlp_size=32, max_positions=32, norm_eps=1e-6, tie_embeddings=True, query_scale=0.5, rotary_dim=4,
)
MESHES = [dict(fsdp=1), dict(fsdp=2), dict(fsdp=2, tensor=2), dict(data=2, fsdp=2, tensor=2)]


@functools.cache
def start_params():
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda leaf: (0.3 * rng.normal(size=leaf.shape) + (len(leaf.shape) < 3)).astype(np.float32),
    transformer.abstract_params(CFG)
  )


def make_draw(lengths, groups, *, seed: int = 0, valid=None) -> Draw:
  rng, num = np.random.default_rng(seed), len(lengths)
  size = max(lengths)
  log_ref = rng.normal(-2, 0.5, (num, size)).astype(np.float32)
  return Draw(
    prompts=rng.integers(0, 37, (num, 4), dtype=np.int32),
    prompt_lengths=rng.integers(1, 5, num, dtype=np.int32),
    tokens=rng.integers(0, 37, (num, size), dtype=np.int32),
    lengths=np.array(lengths, np.int32),
    log_mu=log_ref + rng.normal(0, 0.1, log_ref.shape).astype(np.float32),
    log_ref=log_ref,
    versions=np.zeros(num, np.int32),
    rewards=rng.normal(size=num).astype(np.float32),
    truncated=np.zeros(num, bool),
    group_ids=np.array(groups, np.int32),
    valid=np.ones(num, bool) if valid is None else np.array(valid),
    weights=np.ones(num, np.float32),
    prompt_ids=np.arange(num),
    occurrences=np.arange(num),
    rows=np.arange(num),
  )


DRAW = make_draw([1, 9, 3, 5, 2, 7, 4, 6], [0, 0, 0, 0, 1, 1, 1, 1], valid=[True] * 6 + [False, True])


@functools.cache
def make_step(loss="tb_vargrad", *, optimizer=None, **options):
  """A train step and what makes its first state; the same one for the same arguments, so that tests share compiled
  programs."""
  optimizer = optimizer or sgd()
  settings = dict(temperature=TEMPERATURE, compute_dtype=jnp.float32, remat="none", micro_batches=1, chunk_tokens=32)
  loss_fn = make_loss(loss) if isinstance(loss, str) else loss
  step = learner.make_train_step(CFG, loss_fn, optimizer, **{**settings, **options})
  return step, lambda: learner.init_train_state(jax.tree.map(jnp.array, start_params()), optimizer,
                                                mesh=options.get("mesh"))


@functools.cache
def sgd() -> optimizers.Optimizer:
  """Plain gradient descent whose state is the last gradient: read off the parameters, it would lose digits."""
  rule = optimizers.make_optimizer("sgd", schedule=lambda _: RATE, clip_norm=np.inf)

  def update(grads, state, params, **given):
    del given
    updates, _ = rule.update(grads, rule.init(params), params)
    return updates, grads

  return rule._replace(init=lambda params: jax.tree.map(jnp.zeros_like, params), update=update)


@functools.cache
def adamw() -> optimizers.Optimizer:
  schedule = optimizers.make_schedule("linear", learning_rate=1e-2, warmup_steps=4, decay_steps=10)
  return optimizers.make_optimizer(schedule=schedule, clip_norm=1.0, weight_decay=0.1)


def mesh_of(sizes: dict[str, int]) -> jax.sharding.Mesh:
  return sharding.make_mesh(jax.devices()[: np.prod(list(sizes.values()))], **sizes)


def step_gradient(batch: Batch, loss="tb_vargrad", **options):
  """Gradient of one step, and its metrics."""
  step, start = make_step(loss, **options)
  state, metrics = step(start(), batch, BETA)
  assert float(metrics["skipped"]) == 0
  return jax.tree.map(np.asarray, state.opt_state), jax.tree.map(float, metrics)


def with_variances(metrics):
  """Standard deviations squared: what float32 leaves of a difference of two means is an error of the variance."""
  return {name: value**2 if name.endswith("_std") else value for name, value in metrics.items()}


def assert_same_gradient(found, expected, tolerance: float):
  largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
  difference = max(np.abs(a - b).max() for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True))
  assert difference <= tolerance * largest, f"{difference / largest:.1e} of the largest gradient"


@jax.jit
def written_out(params, tokens, num_prompt, num_tokens):
  """log p(response | prompt), its gradient, and the entropy summed over the response, of one sequence [T] through whole
  logits."""

  def log_p(params):
    positions = jnp.arange(tokens.shape[0])
    hidden = transformer.hidden_states(
      params, CFG, tokens[None], positions[None], (positions < num_tokens)[None].astype(jnp.int32), dtype=jnp.float32
    )
    log_p = jax.nn.log_softmax(transformer.logits(params, CFG, hidden)[0, :-1, : CFG.vocab_size] / TEMPERATURE)
    counted = (positions[1:] >= num_prompt) & (positions[1:] < num_tokens)
    at_tokens = jnp.take_along_axis(log_p, tokens[1:, None], axis=-1)[:, 0]
    return jnp.sum(at_tokens * counted), jnp.sum(-jnp.sum(jnp.exp(log_p) * log_p, axis=-1) * counted)

  return jax.value_and_grad(log_p, has_aux=True)(params)


def each_response(draw: Draw):
  """`written_out` of every valid response."""
  for i in np.flatnonzero(draw.valid):
    num_prompt, length = draw.prompt_lengths[i], draw.lengths[i]
    tokens = np.zeros(16, np.int32)
    tokens[: num_prompt + length] = [*draw.prompts[i, :num_prompt], *draw.tokens[i, :length]]
    yield i, written_out(start_params(), tokens, num_prompt, num_prompt + length)


@functools.cache
def oracle():
  """Loss, gradient and entropy of DRAW under trajectory balance in float64: -mean(A grad log pi), A = r - mean r - beta
  (k - mean k)."""
  scored = dict(each_response(DRAW))
  log_pi = {i: float(values[0]) for i, (values, _) in scored.items()}
  log_ref = {i: DRAW.log_ref[i, : DRAW.lengths[i]].astype(np.float64).sum() for i in scored}
  loss, total = 0.0, jax.tree.map(np.zeros_like, start_params())
  for group in np.unique(DRAW.group_ids):
    members = [i for i in scored if DRAW.group_ids[i] == group]
    delta = np.array([log_ref[i] + float(DRAW.rewards[i]) / float(BETA) - log_pi[i] for i in members])
    for i, residual in zip(members, np.mean(delta) - delta):
      loss += float(BETA) / 2 * residual**2 / len(scored)
      total = jax.tree.map(lambda sums, g: sums + float(BETA) * residual * np.asarray(g, np.float64) / len(scored),
                           total, scored[i][1])
  entropy = sum(float(values[1]) for values, _ in scored.values()) / sum(DRAW.lengths[i] for i in scored)
  return loss, total, entropy


def batch_of(draw: Draw = DRAW, **options) -> Batch:
  return collate(draw, **{"row_multiple": 8, "length_buckets": (16,), **options})


def norm(tree) -> float:
  return np.sqrt(sum(np.square(leaf.astype(np.float64)).sum() for leaf in jax.tree.leaves(tree)))


def test_step_equals_the_loss_written_out_response_by_response():
  loss, grads, entropy = oracle()
  found, metrics = step_gradient(batch_of())
  assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
  assert metrics["entropy"] == pytest.approx(entropy, rel=1e-5)
  assert_same_gradient(found, grads, 1e-5)
  assert metrics["grad_norm"] == pytest.approx(norm(grads), rel=1e-5)
  assert metrics["update_norm"] == pytest.approx(RATE * norm(grads), rel=1e-5)
  assert metrics["param_norm"] == pytest.approx(norm(jax.tree.map(lambda p, g: p - RATE * g, start_params(), grads)),
                                                rel=1e-5)
  assert metrics["beta"] == BETA and metrics["learning_rate"] == RATE
  assert metrics["reward"] == pytest.approx(DRAW.rewards[DRAW.valid].mean())


@pytest.mark.parametrize(
  "options",
  [
    dict(micro_batches=4, remat="full"),  # each group lies in two of them
    pytest.param(dict(micro_batches=4, remat="dots"), marks=pytest.mark.slow),
    pytest.param(dict(micro_batches=2, whole_groups_per_micro_batch=True), marks=pytest.mark.slow),
    dict(most_response_tokens=DRAW.tokens.shape[1]),  # fewer than a row has: prompts go without the head
  ],
  ids=str,
)
def test_micro_batches_and_rematerialisation_change_nothing(options: dict):
  whole, metrics = step_gradient(batch_of())
  found, found_metrics = step_gradient(batch_of(), **options)
  assert_same_gradient(found, whole, 1e-6)
  assert found_metrics == pytest.approx(metrics, rel=1e-5)


def test_one_group_over_four_micro_batches():
  draw = make_draw([3, 9, 1, 5, 1, 1, 1, 1], [0] * 8, valid=[True, False] * 4)
  whole, _ = step_gradient(batch_of(draw))
  found, _ = step_gradient(batch_of(draw), micro_batches=4, remat="full")
  # Two rows a product instead of eight give sums of log-probabilities of some -40 that differ in their last bit, 4e-6,
  # and a residual is a difference of such sums: 0.5e-6 to 2.6e-6 of the largest gradient, by seed.
  assert_same_gradient(found, whole, 4e-6)


def test_lengths_1_and_9_of_one_group_in_two_micro_batches():
  draw = make_draw([1, 9], [0, 0])
  whole, metrics = step_gradient(batch_of(draw, row_multiple=2))
  found, found_metrics = step_gradient(batch_of(draw, row_multiple=2), micro_batches=2)
  assert_same_gradient(found, whole, 1e-6)
  assert with_variances(found_metrics) == pytest.approx(with_variances(metrics), rel=1e-5, abs=1e-6)


def test_eight_devices_and_three_packed_rows():
  """Five devices hold rows without tokens: nothing of them may count."""
  packed = batch_of(pack=True, length_buckets=(24,), num_rows=8)
  assert packed.segment_ids.any(axis=1).tolist() == [True] * 3 + [False] * 5
  whole, _ = step_gradient(batch_of())
  found, _ = step_gradient(packed, mesh=mesh_of(dict(data=2, fsdp=4)))
  assert_same_gradient(found, whole, 1e-6)


def test_packed_rows_that_split_a_group_over_micro_batches():
  packed = batch_of(pack=True, row_multiple=4)
  assert packed.tokens.shape[0] == 4 and (packed.segment_ids == 2).any()
  found, _ = step_gradient(packed, micro_batches=4)
  assert_same_gradient(found, oracle()[1], 1e-5)


def test_a_micro_batch_counts_only_the_responses_whose_tokens_it_holds():
  """Otherwise a loss that divides by response lengths would divide by 0 in the other parts."""
  parts = learner.split_rows(batch_of(), 2)
  assert parts.valid.tolist() == [[True] * 4 + [False] * 4, [False] * 4 + [True, True, False, True]]
  np.testing.assert_array_equal(np.concatenate(parts.tokens), batch_of().tokens)
  assert parts.num_responses.tolist() == [7, 7] and parts.rewards.shape == (2, 8)


def test_single_pass_needs_whole_groups():
  """The caller's word is believed: with a split group the single pass is another gradient (log Z of a part)."""
  draw = make_draw([3, 9, 1, 5, 2, 4, 6, 8], [0] * 8)
  whole, _ = step_gradient(batch_of(draw))
  wrong, _ = step_gradient(batch_of(draw), micro_batches=2, whole_groups_per_micro_batch=True)
  with pytest.raises(AssertionError, match="of the largest gradient"):
    assert_same_gradient(wrong, whole, 1e-2)


def test_lengths_1_and_9_are_normalised_over_the_whole_batch():
  """Supervised: minus the sum of all log-probabilities over all ten tokens, though the two halves hold 1 and 9 of them.
  """
  draw = make_draw([1, 9], [0, 1])
  batch = batch_of(draw)
  batch = jax.tree.map(lambda x: x[[0, 2, 3, 4, 1, 5, 6, 7]] if np.ndim(x) == 2 else x, batch)
  found, metrics = step_gradient(batch, "sft", micro_batches=2)
  ((_, ((first, _), first_grads)), (_, ((second, _), second_grads))) = each_response(draw)
  assert metrics["loss"] == pytest.approx(-(float(first) + float(second)) / 10, rel=1e-6)
  assert_same_gradient(found, jax.tree.map(lambda a, b: -(np.asarray(a) + np.asarray(b)) / 10, first_grads,
                                           second_grads), 1e-5)


@pytest.mark.slow
def test_bfloat16_computation_keeps_float32_parameters():
  step, start = make_step(compute_dtype=jnp.bfloat16)
  state, metrics = step(start(), batch_of(), BETA)
  assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.float32)}
  assert float(metrics["loss"]) == pytest.approx(oracle()[0], rel=0.1)
  assert float(metrics["loss"]) != pytest.approx(oracle()[0], rel=1e-6)


def test_rows_that_do_not_split_are_refused():
  step, start = make_step(micro_batches=3)
  with pytest.raises(ValueError,
                     match="a batch of 8 rows does not split into micro_batches=3 over 1 devices; .* row_multiple=3"):
    step(start(), batch_of(), BETA)
  with pytest.raises(ValueError, match="micro_batches=0 must be at least 1"):
    make_step(micro_batches=0)


def bitwise(tree) -> list[bytes]:
  return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def may_lack_a_gradient(log_pi, batch, *, beta):
  """Trajectory balance, plus a term of value 0 whose gradient is not finite (a root at 0) where the first weight is 0.
  """
  loss, _ = make_loss("tb_vargrad")(log_pi, batch, beta=beta)
  root = jnp.sqrt(batch.weights[0] * jnp.sum(jnp.square(log_pi)))
  return loss + root - jax.lax.stop_gradient(root), {}


@pytest.mark.parametrize("field, value", [("rewards", np.nan), ("weights", 0.0)], ids=["loss", "gradient"])
def test_a_step_that_is_not_finite_is_skipped_and_counted(field: str, value: float):
  step, start = make_step(may_lack_a_gradient, optimizer=adamw())
  good = batch_of()
  spoilt = getattr(good, field).copy()
  spoilt[0] = value
  bad = good._replace(**{field: spoilt})
  state, _ = step(start(), good, BETA)
  before = bitwise((state.params, state.opt_state, state.version))
  for count in (1, 2):
    state, metrics = step(state, bad, BETA)
    assert bitwise((state.params, state.opt_state, state.version)) == before
    assert (int(state.version), int(state.steps), int(state.skipped_in_row)) == (1, 1 + count, count)
    assert float(metrics["skipped"]) == 1.0 and float(metrics["update_norm"]) == 0.0
    assert np.isfinite(float(metrics["loss"])) == (field == "weights")
  state, metrics = step(state, good, BETA)
  assert (int(state.version), int(state.steps), int(state.skipped_in_row)) == (2, 4, 0)
  assert float(metrics["skipped"]) == 0.0
  assert float(metrics["learning_rate"]) == pytest.approx(2 / 4 * 1e-2)  # the second APPLIED update

  unbroken = start()
  for _ in range(2):
    unbroken, _ = step(unbroken, good, BETA)
  assert bitwise(unbroken.params) == bitwise(state.params) and bitwise(unbroken.opt_state) == bitwise(state.opt_state)


def test_state_is_donated_and_one_program_serves_all_steps():
  step, start = make_step(may_lack_a_gradient, optimizer=adamw())
  state = start()
  for _ in range(3):
    old = state
    state, _ = step(state, batch_of(), BETA)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old.params))
  assert step._cache_size() == 1


@pytest.mark.parametrize(
  "sizes", [*(pytest.param(sizes, marks=pytest.mark.slow) for sizes in MESHES[:2]), *MESHES[2:]], ids=str
)
def test_sharded_equals_unsharded(sizes: dict[str, int]):
  mesh = mesh_of(sizes)
  step, start = make_step()
  most = DRAW.tokens.shape[1] if sizes == MESHES[-1] else 0  # the head at responses alone
  sharded_step, sharded_start = make_step(mesh=mesh, most_response_tokens=most)
  state, sharded = start(), sharded_start()
  for number in range(3):
    state, metrics = step(state, batch_of(), BETA)
    sharded, sharded_metrics = sharded_step(sharded, batch_of(), BETA)
    assert float(sharded_metrics["loss"]) == pytest.approx(float(metrics["loss"]), rel=1e-5)
    # Standard deviations are roots of differences, which lose digits.
    assert jax.tree.map(float, sharded_metrics) == pytest.approx(jax.tree.map(float, metrics), rel=1e-3, abs=1e-5)
    if number == 0:
      assert float(sharded_metrics["loss"]) == pytest.approx(oracle()[0], rel=1e-5)
      assert_same_gradient(jax.tree.map(np.asarray, sharded.opt_state), oracle()[1], 1e-5)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6),
               sharded.params, state.params)
  expected = sharding.param_shardings(sharded.params, mesh)
  assert jax.tree.all(
      jax.tree.map(lambda leaf, s: leaf.sharding.is_equivalent_to(s, leaf.ndim), sharded.params, expected))
  assert sharded_step._cache_size() == 1


def test_three_steps_of_adamw_sharded_and_in_micro_batches():
  mesh = mesh_of(MESHES[-1])
  losses = []
  for options in ({}, dict(mesh=mesh, micro_batches=2)):
    step, start = make_step(may_lack_a_gradient, optimizer=adamw(), **options)
    state = start()
    for _ in range(3):
      state, metrics = step(state, batch_of(), BETA)
    losses.append(float(metrics["loss"]))
  assert losses[1] == pytest.approx(losses[0], rel=1e-5)
  moment = state.opt_state[1][0].mu["layers"]["mlp"]["up"]["kernel"]
  assert len(moment.sharding.device_set) == 8 and moment.addressable_shards[0].data.size == moment.size // 4


def test_steps_on_other_devices_by_other_threads_do_not_meet():
  step, _ = make_step()

  def train(device, seed, out):
    state = learner.init_train_state(jax.device_put(start_params(), device), sgd())
    for _ in range(3):
      state, metrics = step(state, batch_of(make_draw([3, 4, 5, 6, 7, 2, 3, 4], [0, 0, 0, 0, 1, 1, 1, 1], seed=seed)),
                            BETA)
    out[seed] = float(metrics["loss"]), {d for leaf in jax.tree.leaves((state, metrics)) for d in leaf.devices()}

  alone, together = {}, {}
  for seed in (1, 2):
    train(jax.devices()[seed - 1], seed, alone)
  threads = [threading.Thread(target=train, args=(jax.devices()[seed - 1], seed, together)) for seed in (1, 2)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(60)
  assert together == alone and len({loss for loss, _ in alone.values()}) == 2
  assert all(devices == {jax.devices()[seed - 1]} for seed, (_, devices) in together.items())


def test_reference_scored_by_the_scorer_equals_log_pi_before_the_first_step():
  score = learner.make_scorer(CFG, temperature=TEMPERATURE, dtype=jnp.float32, chunk_tokens=32)
  batch = batch_of()
  response = batch.sequence_ids < len(batch.rewards)
  log_ref = np.where(response, score(start_params(), batch.tokens, batch.positions, batch.segment_ids), 0.0)
  step, start = make_step()
  _, metrics = step(start(), batch._replace(log_ref=log_ref), BETA)
  assert abs(float(metrics["log_ratio_ref"])) < 1e-6
  for i, ((log_p, _), _) in each_response(DRAW):
    assert log_ref[batch.sequence_ids == i].sum() == pytest.approx(float(log_p), abs=1e-4)
  wide = collate(DRAW, row_multiple=1, length_buckets=(24,))  # scored elsewhere, in rows of another shape
  elsewhere = np.asarray(score(start_params(), wide.tokens, wide.positions, wide.segment_ids))
  for i in np.flatnonzero(DRAW.valid):
    np.testing.assert_allclose(elsewhere[wide.sequence_ids == i], log_ref[batch.sequence_ids == i], atol=1e-4)


def test_scoring_in_pieces_equals_scoring_at_once_and_takes_less_memory():
  options = dict(temperature=TEMPERATURE, dtype=jnp.float32, chunk_tokens=32)
  batch = collate(make_draw([3, 9, 5, 6, 7, 2, 8], [0, 0, 0, 0, 1, 1, 1]), row_multiple=1, length_buckets=(16,))
  rows = (start_params(), batch.tokens, batch.positions, batch.segment_ids)
  whole, parts = learner.make_scorer(CFG, **options), learner.make_scorer(CFG, rows_at_once=3, **options)
  np.testing.assert_allclose(parts(*rows), whole(*rows), atol=1e-5)
  assert np.asarray(whole(*rows)).std() > 0.1
  many = (start_params(), *(jnp.zeros((64, 512), jnp.int32),) * 3)
  temp = lambda score: score.lower(*many).compile().memory_analysis().temp_size_in_bytes
  assert temp(learner.make_scorer(CFG, rows_at_once=8, **options)) < 0.3 * temp(whole)


@pytest.mark.slow
def test_the_head_is_gathered_once_however_many_pieces_its_loop_has():
  mesh = sharding.make_mesh(jax.devices()[:4])
  batch = batch_of(make_draw([3, 4, 5, 6, 7, 2, 3, 4], [0, 0, 0, 0, 1, 1, 1, 1]), row_multiple=4)

  def head_bytes(chunk_tokens: int) -> float:
    step, start = make_step(mesh=mesh, chunk_tokens=chunk_tokens)
    text = step.lower(start(), batch, BETA).compile().as_text()
    found = hlo.collectives(text, unknown_trips=1.0)
    return sum(each.calls * each.wire_bytes for each in found)

  one, many = head_bytes(10_000), head_bytes(8)
  assert many < 1.05 * one, (many, one)


def compile_secs(num_layers: int) -> float:
  """CPU seconds, so that what else runs on the machine does not count."""
  cfg = ModelConfig(**{**CFG.__dict__, "num_layers": num_layers})
  optimizer = adamw()
  step = learner.make_train_step(
    cfg, make_loss("tb_vargrad"), optimizer, temperature=1.0, compute_dtype=jnp.float32, remat="full", micro_batches=2,
    chunk_tokens=64
  )
  params, count = transformer.abstract_params(cfg), jax.ShapeDtypeStruct((), jnp.int32)
  state = TrainState(params, jax.eval_shape(optimizer.init, params), count, count, count)
  began = time.process_time()
  step.lower(state, batch_of(), BETA).compile()
  return time.process_time() - began


@pytest.mark.slow
def test_compiling_32_layers_takes_hardly_longer_than_4():
  compile_secs(4)
  few, many = (min(compile_secs(n) for _ in range(3)) for n in (4, 32))
  assert many < 1.3 * few


def gradient_memory_bytes(row_tokens: int, num_embeddings: int) -> int:
  cfg = ModelConfig(**{**CFG.__dict__, "vocab_size": num_embeddings, "num_embeddings": num_embeddings})
  optimizer = sgd()
  step = learner.make_train_step(
    cfg, make_loss("tb_vargrad"), optimizer, temperature=1.0, compute_dtype=jnp.float32, remat="full", micro_batches=1,
    chunk_tokens=64
  )
  params = transformer.abstract_params(cfg)
  count = jax.ShapeDtypeStruct((), jnp.int32)
  state = TrainState(params, jax.eval_shape(optimizer.init, params), count, count, count)
  ints, floats = jax.ShapeDtypeStruct((4, row_tokens), jnp.int32), jax.ShapeDtypeStruct((4, row_tokens), jnp.float32)
  per_row, count = jax.ShapeDtypeStruct((4,), jnp.float32), jax.ShapeDtypeStruct((), jnp.float32)
  bools, ids = jax.ShapeDtypeStruct((4,), bool), jax.ShapeDtypeStruct((4,), jnp.int32)
  batch = Batch(ints, ints, ints, ints, floats, floats, per_row, ids, bools, bools, per_row, count, count, count)
  return step.lower(state, batch, count).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_memory_of_a_longer_row_does_not_grow_with_the_vocabulary():
  temp = {(t, v): gradient_memory_bytes(t, v) for t in (64, 256) for v in (512, 4096)}
  slope = {v: (temp[256, v] - temp[64, v]) / (256 - 64) for v in (512, 4096)}
  assert slope[512] > 0 and slope[4096] < 1.05 * slope[512]


# Schedules and optimizers


def test_wsd_is_the_papers_learning_rate():
  schedule = optimizers.make_schedule("wsd", learning_rate=1e-5, warmup_steps=50, stable_steps=350, decay_steps=600)
  at = lambda update: float(schedule(update - 1))
  assert [at(1), at(25), at(50)] == pytest.approx([1e-5 / 50, 0.5e-5, 1e-5])
  assert [at(51), at(400)] == pytest.approx([1e-5, 1e-5])
  # A 700-step run stops half-way.
  assert [at(401), at(700), at(1000), at(2000)] == pytest.approx([1e-5 * 599 / 600, 0.5e-5, 0, 0])


@pytest.mark.parametrize(
  "name, lengths, expected",
  [
    ("linear", dict(decay_steps=4), [0.75, 0.5, 0.25, 0.0, 0.0]),
    ("linear", dict(warmup_steps=2, decay_steps=2), [0.5, 1.0, 0.5, 0.0]),
    ("cosine", dict(warmup_steps=1, decay_steps=4), [1.0, (2 + 2**0.5) / 4, 0.5, (2 - 2**0.5) / 4, 0.0, 0.0]),
    ("constant", dict(warmup_steps=4), [0.25, 0.5, 0.75, 1.0, 1.0]),
    ("constant", dict(), [1.0, 1.0]),
  ],
)
def test_schedules_by_hand(name: str, lengths: dict, expected: list[float]):
  schedule = optimizers.make_schedule(name, learning_rate=2.0, **lengths)
  assert [float(schedule(count)) / 2 for count in range(len(expected))] == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(
  "name, options, message",
  [
    ("step", {}, "schedule 'step' is unknown; choose one of constant, linear, cosine, wsd"),
    ("linear", dict(decay_steps=0), "decay_steps=0 does not suit schedule 'linear': it must be at least 1"),
    ("constant", dict(decay_steps=3), "decay_steps=3 does not suit schedule 'constant': it must be 0"),
    ("cosine", dict(decay_steps=3, stable_steps=2), "stable_steps=2 means nothing to schedule 'cosine'; set it to 0, "
                                                    "or choose 'wsd'"),
    ("wsd", dict(decay_steps=3, warmup_steps=-1), "warmup_steps=-1 must not be negative"),
    ("constant", dict(learning_rate=0.0), "learning_rate=0.0 must be a positive number"),
    ("constant", dict(learning_rate=float("nan")), "learning_rate=nan must be a positive number"),
  ],
)
def test_what_schedules_refuse(name: str, options: dict, message: str):
  with pytest.raises(ValueError, match=message):
    optimizers.make_schedule(name, **{"learning_rate": 1.0, **options})


def test_beta_is_the_papers():
  gsm8k = functools.partial(optimizers.beta_at, beta_init=0.014, beta_final=0.004, beta_decay_steps=500)
  assert gsm8k(1) == 0.014
  assert gsm8k(251) == pytest.approx(0.009)
  assert gsm8k(499) == pytest.approx(0.004 * 498 / 500 + 0.014 * 2 / 500)
  assert gsm8k(500) == gsm8k(700) == 0.004
  assert optimizers.beta_at(1, beta_init=1.0, beta_final=0.5, beta_decay_steps=0) == 0.5


def random_gradients(params, seed: int):
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), params)


def test_adamw_clipped_and_decayed_equals_float64():
  rates = [0.1, 0.05, 0.2]
  b1, b2, eps, decay, clip = 0.9, 0.95, 1e-6, 0.3, 0.5
  optimizer = optimizers.make_optimizer(
    schedule=lambda count: jnp.array(rates)[count], clip_norm=clip, weight_decay=decay, b1=b1, b2=b2, eps=eps
  )
  params = {
      "layers": {
          "mlp_norm": {"scale": np.ones((2, 3), np.float32), "bias": np.ones((2, 3), np.float32)},
          "mlp": {"up": {"kernel": np.full((2, 3, 2), 2.0, np.float32)}}
      }, "embed": {"table": np.ones((4, 3), np.float32)}
  }
  ours, opt_state, update = jax.tree.map(jnp.array, params), optimizer.init(params), jax.jit(optimizer.update)
  paths = [sharding.path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
  exact = [leaf.astype(np.float64) for leaf in jax.tree.leaves(params)]
  first, second = [np.zeros_like(x) for x in exact], [np.zeros_like(x) for x in exact]
  for number, rate in enumerate(rates, start=1):
    grads = random_gradients(params, number)
    updates, opt_state = update(grads, opt_state, ours)
    ours = jax.tree.map(jnp.add, ours, updates)
    flat = [leaf.astype(np.float64) for leaf in jax.tree.leaves(grads)]
    scale = min(1.0, clip / np.sqrt(sum(np.square(g).sum() for g in flat)))
    for i, grad in enumerate(flat):
      first[i] = b1 * first[i] + (1 - b1) * grad * scale
      second[i] = b2 * second[i] + (1 - b2) * np.square(grad * scale)
      direction = first[i] / (1 - b1**number) / (np.sqrt(second[i] / (1 - b2**number)) + eps)
      decayed = paths[i].endswith(("kernel", "table"))
      exact[i] = exact[i] - rate * (direction + decay * decayed * exact[i])
  for found, expected in zip(jax.tree.leaves(ours), exact, strict=True):
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-5)


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_weight_decay_shrinks_matrices_by_rate_times_decay_and_leaves_norms(name: str):
  params = jax.tree.map(jnp.array, start_params())
  optimizer = optimizers.make_optimizer(name, schedule=lambda _: 0.1, clip_norm=1.0, weight_decay=0.5)
  zeros = jax.tree.map(jnp.zeros_like, params)
  updates, _ = jax.jit(lambda p: optimizer.update(zeros, optimizer.init(p), p))(params)
  for (path, update), leaf in zip(jax.tree_util.tree_leaves_with_path(updates), jax.tree.leaves(params), strict=True):
    decay = 0.0 if "norm" in sharding.path_name(path) else 0.05
    np.testing.assert_allclose(np.asarray(update), -decay * np.asarray(leaf), rtol=1e-5, atol=1e-9)


def test_adafactor_holds_factored_moments_and_learns():
  optimizer = optimizers.make_optimizer("adafactor", schedule=lambda _: 1e-2, clip_norm=1.0)
  wide = {"lm_head": {"kernel": jnp.zeros((256, 512))}}
  assert sum(leaf.size for leaf in jax.tree.leaves(optimizer.init(wide))) < 2000
  target, found = random_gradients(wide, 0), wide
  opt_state, distance, update = optimizer.init(wide), [], jax.jit(optimizer.update)
  for _ in range(100):
    gap = jax.tree.map(jnp.subtract, found, target)
    updates, opt_state = update(gap, opt_state, found)
    found = jax.tree.map(jnp.add, found, updates)
    distance.append(norm(jax.tree.map(np.asarray, gap)))
  assert distance[-1] < 0.4 * distance[0]


@pytest.mark.parametrize("in_blocks", [False, True])
def test_the_global_norm_is_that_of_float64(in_blocks: bool):
  rng = np.random.default_rng(0)
  # Blocks of equal size, a prime number of entries, few entries, none; one leaf far from 0, as an update may be.
  tree = {name: (rng.standard_normal(shape) * scale + mean).astype(np.float32) for name, shape, scale, mean in [
    ("stacked", (6, 300, 250), 1e-3, 0.02), ("prime", (524_287,), 1.0, 0.0), ("small", (7,), 30.0, 0.0),
    ("none", (0, 4), 1.0, 0.0)]}
  exact = np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in tree.values()))
  found = jax.jit(functools.partial(optimizers.global_norm, in_blocks=in_blocks))(tree)
  np.testing.assert_allclose(float(found), exact, rtol=2e-6)
  assert float(optimizers.global_norm({}, in_blocks=in_blocks)) == 0


@pytest.mark.parametrize("most", [0.01, 1e6])
def test_clipping_scales_all_alike_by_a_norm_that_may_be_given(most: float):
  grads = random_gradients(start_params(), 0)
  total = norm(jax.tree.map(np.asarray, grads))
  rule = optimizers.make_optimizer("sgd", schedule=lambda _: 1.0, clip_norm=most)
  state = rule.init(start_params())
  for given in ({}, {"grad_norm": jnp.float32(total)}):
    updates, _ = rule.update(grads, state, start_params(), **given)
    jax.tree.map(lambda u, g: np.testing.assert_allclose(
      np.asarray(u), -min(1.0, most / total) * np.asarray(g), rtol=2e-6), updates, grads)


def test_clipping_at_infinity_is_none():
  grads = random_gradients(start_params(), 0)
  updates, _ = sgd().update(grads, sgd().init(start_params()), start_params())
  jax.tree.map(lambda u, g: np.testing.assert_allclose(np.asarray(u), -RATE * g, rtol=1e-6), updates, grads)


@pytest.mark.parametrize(
  "options, message",
  [
    (dict(name="lion"), "optimizer 'lion' is unknown; choose one of adamw, adafactor, sgd"),
    (dict(clip_norm=0.0), "clip_norm=0.0 must be positive; use inf for no clipping"),
    (dict(name="sgd", weight_decay=0.1), "weight_decay=0.1 is not part of optimizer 'sgd'"),
  ],
)
def test_what_optimizers_refuse(options: dict, message: str):
  with pytest.raises(ValueError, match=message):
    optimizers.make_optimizer(**{"schedule": lambda _: 1.0, "clip_norm": 1.0, **options})

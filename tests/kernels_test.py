"""TPU attention kernels: interpreted on CPU against float64 numpy and the XLA path, and compiled ahead of time for a
v5e."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas, topologies
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import tiny
from configs import quickstart
from tba_jax import build, learner, optimizers, sharding
from tba_jax.config import ConfigError
from tba_jax.losses.registry import make_loss
from tba_jax.models import attention, kernels, transformer
from tba_jax.models.heads import token_logprobs
from tba_jax.models.variants import ModelConfig
from tba_jax.plan import programs
from tba_jax.sampling.engine import Engine, SampledGroup, SampleRequest, sample_keys
from tba_jax.types import Batch, TrainState

CFG = ModelConfig(
  family="llama", vocab_size=29, num_embeddings=32, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2,
  head_dim=8, mlp_size=32, max_positions=256, norm_eps=1e-6, tie_embeddings=True, query_scale=0.4, rotary_dim=8,
)


@pytest.fixture
def interpreted(monkeypatch):
  """Runs the kernels without a TPU."""
  call = pallas.pallas_call
  monkeypatch.setattr(pallas, "pallas_call", lambda *args, **options: call(*args, **{**options, "interpret": True}))


def packed_rows(length: int = 160):
  """Two rows: two segments and padding behind; padding in front and one segment."""
  segment_ids, positions = np.zeros((2, length), np.int32), np.zeros((2, length), np.int32)
  for row, start, end, segment in ((0, 0, 70, 1), (0, 70, length - 10, 2), (1, 10, length, 1)):
    segment_ids[row, start:end], positions[row, start:end] = segment, np.arange(end - start)
  return positions, segment_ids


def random_heads(length: int, num_heads: int, num_kv_heads: int, head_dim: int, batch: int = 2):
  rng = np.random.default_rng(0)
  shapes = ((batch, length, num_heads, head_dim), *2 * ((batch, length, num_kv_heads, head_dim),))
  return tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)


def one_query(q, keys, values, *, scale, softcap):
  """Float64 attention of one head at one position: q [H], keys and values [S, H]."""
  scores = keys.astype(np.float64) @ q.astype(np.float64) * scale
  scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
  weights = np.exp(scores - scores.max())
  return weights @ values.astype(np.float64) / weights.sum()


def by_xla(q, k, v, positions, segment_ids, *, window, **options):
  return attention.over_sequences(positions, segment_ids, window=window, **options)(q, k, v, window is not None)


# --- Whole sequences ---


@pytest.mark.parametrize("window, softcap", [(None, None), (100, 2.0)])
def test_splash_equals_numpy_and_the_gradient_of_xla(interpreted, monkeypatch, window, softcap):
  monkeypatch.setattr(kernels, "SPLASH_BLOCKS", (128,))  # rows of 300 are then padded and cut in three
  positions, segment_ids = packed_rows(300)
  q, k, v = random_heads(300, 4, 2, 8)
  options = dict(scale=0.7, softcap=softcap, window=window)
  real = segment_ids > 0
  weights = np.random.default_rng(1).normal(size=q.shape).astype(np.float32) * real[..., None, None]

  def program(attend):
    def loss(q, k, v):
      out = attend(q, k, v)
      return jnp.sum(weights * out), out

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(q, k, v)

  (_, out), gradients = program(lambda *arrays: kernels.splash(*arrays, segment_ids, **options))
  _, expected = program(lambda *arrays: by_xla(*arrays, positions, segment_ids, **options))
  for found, right in zip(gradients, expected):
    np.testing.assert_allclose(found, right, rtol=0, atol=1e-5 * np.abs(right).max())
  assert np.isfinite(out).all()
  for row, t, head in ((0, 0, 0), (0, 69, 3), (0, 70, 1), (0, 289, 2), (1, 10, 3), (1, 299, 0), (1, 180, 2)):
    start = {(0, 1): 0, (0, 2): 70, (1, 1): 10}[row, int(segment_ids[row, t])]
    start = start if window is None else max(start, t - window + 1)
    right = one_query(q[row, t, head], k[row, start:t + 1, head // 2], v[row, start:t + 1, head // 2], scale=0.7,
                      softcap=softcap)
    np.testing.assert_allclose(out[row, t, head], right, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("num_heads, num_kv_heads, sizes", [
  (4, 2, dict(data=2, fsdp=2, tensor=2)),
  (12, 3, dict(fsdp=2, tensor=4)),  # every device holds all kv heads, and its three query heads may read two of them
])
def test_splash_on_a_mesh_changes_neither_values_nor_gradients(interpreted, num_heads, num_kv_heads, sizes):
  mesh = sharding.make_mesh(jax.devices()[:8], **sizes)
  _, segment_ids = packed_rows()
  segment_ids = np.concatenate([segment_ids, segment_ids[::-1]])
  heads = random_heads(160, num_heads, num_kv_heads, 8, batch=4)
  weights = np.random.default_rng(1).normal(size=heads[0].shape).astype(np.float32) * (segment_ids > 0)[..., None, None]

  def program(mesh):
    attend = functools.partial(kernels.splash, segment_ids=segment_ids, scale=0.7, mesh=mesh)
    return jax.jit(jax.grad(lambda *arrays: jnp.sum(weights * jnp.square(attend(*arrays))), argnums=(0, 1, 2)))(*heads)

  for found, right in zip(program(mesh), program(None)):
    np.testing.assert_allclose(found, right, rtol=0, atol=2e-6 * np.abs(right).max())


def model_program(cfg: ModelConfig, loss_of):
  """`loss_of` weighted log-probabilities of packed rows under random parameters, as a jitted function of (backend,
  remat)."""
  rng = np.random.default_rng(0)
  params = jax.tree.map(lambda leaf: (0.4 * rng.normal(size=leaf.shape)).astype(np.float32),
                        transformer.abstract_params(cfg))
  positions, segment_ids = packed_rows()
  tokens = rng.integers(0, 29, positions.shape).astype(np.int32)
  weights = rng.normal(size=tokens.shape).astype(np.float32)

  def run(backend: str, remat: str):
    def loss(params):
      log_p = token_logprobs(
        params, cfg, tokens, positions, segment_ids, temperature=0.7, dtype=jnp.float32, remat=remat,
        backend=backend)[0]
      return jnp.sum(weights * log_p), log_p

    return jax.jit(loss_of(loss))(params)

  return run


@pytest.mark.slow
def test_a_model_with_windows_on_some_layers_learns_alike_with_splash(interpreted):
  cfg = dataclasses.replace(CFG, window=20, sliding_layers=(True, False), attn_softcap=3.0, rope_local_theta=100.0)
  run = model_program(cfg, functools.partial(jax.grad, has_aux=True))
  gradient, log_p = run("splash", "full")
  expected, expected_log_p = run("xla", "none")
  np.testing.assert_allclose(log_p, expected_log_p, atol=1e-4)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-4 * np.abs(y).max()), gradient, expected)


@pytest.mark.parametrize("sliding", [(True, True), ()])
def test_models_with_windows_on_all_layers_or_none_score_alike_with_splash(interpreted, sliding):
  run = model_program(dataclasses.replace(CFG, window=20, sliding_layers=sliding), lambda loss: loss)
  np.testing.assert_allclose(run("splash", "none")[1], run("xla", "none")[1], atol=1e-4)


# --- Decoding ---


def random_cache(num_kv_heads: int, head_dim: int, num_slots: int, batch: int):
  """bfloat16 keys and values as the model keeps them, zeros beyond head_dim."""
  rng = np.random.default_rng(0)
  shape = (batch, num_kv_heads, num_slots, head_dim)
  pad = ((0, 0), (0, 0), (0, 0), (0, kernels.cache_width(head_dim) - head_dim))
  return tuple(jnp.asarray(np.pad(rng.normal(size=shape), pad), jnp.bfloat16) for _ in range(2))


@pytest.mark.parametrize("num_heads, num_kv_heads, head_dim, softcap", [(8, 1, 128, None), (6, 3, 64, 2.0)])
def test_decode_attention_equals_numpy_and_reads_no_further_than_it_must(interpreted, num_heads, num_kv_heads, head_dim,
                                                                         softcap):
  # Blocks of 64; the last two rows are out of bounds.
  lengths, num_slots = np.array([1, 130, 70, 0, 400], np.int32), 192
  k, v = random_cache(num_kv_heads, head_dim, num_slots, batch=5)
  blocks = np.arange(num_slots) // 64
  unread = blocks[None] > (np.clip(lengths, 1, num_slots)[:, None] - 1) // 64
  assert unread.any()
  q = np.random.default_rng(1).normal(size=(5, num_heads, head_dim)).astype(np.float32)
  poisoned = (jnp.where(unread[:, None, :, None], jnp.nan, x) for x in (k, v))
  out = jax.jit(functools.partial(kernels.decode_attention, scale=0.2, softcap=softcap))(q, *poisoned, lengths)
  k, v = (np.asarray(x, np.float32)[..., :head_dim] for x in (k, v))
  for row, length in enumerate(np.clip(lengths, 1, num_slots)):
    for head in range(num_heads):
      kv_head = head // (num_heads // num_kv_heads)
      right = one_query(q[row, head], k[row, kv_head, :length], v[row, kv_head, :length], scale=0.2, softcap=softcap)
      np.testing.assert_allclose(out[row, head], right, atol=1e-5)


@pytest.mark.parametrize("num_heads, num_kv_heads, sizes", [(8, 4, dict(fsdp=2, tensor=4)),
                                                            (12, 3, dict(fsdp=1, tensor=4))])
def test_decode_attention_on_a_mesh(interpreted, num_heads, num_kv_heads, sizes):
  mesh = sharding.make_mesh(jax.devices()[: sizes["fsdp"] * 4], **sizes)
  k, v = random_cache(num_kv_heads, 128, 32, batch=2)
  q = np.random.default_rng(1).normal(size=(2, num_heads, 128)).astype(np.float32)
  run = lambda mesh: jax.jit(functools.partial(kernels.decode_attention, scale=0.2, mesh=mesh))(
      q, k, v, np.array([9, 32], np.int32))
  np.testing.assert_allclose(run(mesh), run(None), atol=1e-6)


def test_write_slots_writes_one_slot_of_every_head_of_the_rows_inside():
  k, _ = random_cache(3, 64, 32, batch=4)
  new = np.random.default_rng(1).normal(size=(4, 3, 64)).astype(np.float32)
  positions = np.array([5, 32, 0, 31], np.int32)
  out = np.array(jax.jit(kernels.write_slots)(k, new, positions), np.float32)
  right = np.array(k, np.float32)
  for row in (0, 2, 3):
    right[row, :, positions[row], :64] = new[row].astype(jnp.bfloat16)
  np.testing.assert_array_equal(out, right)


def test_cache_sizes():
  assert [kernels.cache_width(size) for size in (64, 80, 128, 256)] == [128, 128, 128, 256]
  assert [kernels.cache_length(length) for length in (1, 128, 129, 257, 1024)] == [128, 128, 256, 512, 1024]


# --- What is refused ---


def test_models_that_a_backend_cannot_do_are_refused_by_name():
  kernels.check_train_backend(dataclasses.replace(CFG, attn_softcap=50.0), "splash")
  kernels.check_train_backend(CFG, "cudnn")
  with pytest.raises(ValueError, match="'cudnn' has no soft cap, but this model caps its scores at 50.0; use xla"):
    kernels.check_train_backend(dataclasses.replace(CFG, attn_softcap=50.0), "cudnn")
  with pytest.raises(ValueError,
                     match="'cudnn' takes heads of a multiple of 8 up to 256, but this model has 12; use xla"):
    kernels.check_train_backend(dataclasses.replace(CFG, head_dim=12), "cudnn")
  sliding = dataclasses.replace(CFG, window=5, sliding_layers=(True, False))
  kernels.check_sample_backend(sliding, "xla")
  kernels.check_sample_backend(dataclasses.replace(CFG, attn_softcap=50.0), "paged")
  with pytest.raises(ValueError,
                     match="'paged' has no sliding window, but 1 of this model's 2 layers see only 5 tokens; use xla"):
    kernels.check_sample_backend(sliding, "paged")


def test_caches_that_the_decode_kernel_cannot_read_are_refused():
  q, lengths = jnp.zeros((1, 2, 64)), jnp.ones(1, jnp.int32)
  run = lambda shape, dtype: kernels.decode_attention(q, *(jnp.zeros(shape, dtype),) * 2, lengths, scale=1.0)
  with pytest.raises(ValueError, match="a cache of width 64 must be of width 128 for paged attention"):
    run((1, 1, 16, 64), jnp.bfloat16)
  with pytest.raises(ValueError, match="reads its cache as bfloat16, but it is float32"):
    run((1, 1, 16, 128), jnp.float32)
  with pytest.raises(ValueError, match="a cache of 24 slots must be a multiple of 16 for paged attention"):
    run((1, 1, 24, 128), jnp.bfloat16)


def test_a_config_chooses_the_kernels_of_training_and_scoring():
  config = quickstart.get_config("smoke").unlock()
  tokens = jax.ShapeDtypeStruct((4, 40), jnp.int32)
  for backend, calls in (("splash", True), ("xla", False)):
    config.train.attention = backend
    cfg = build.model_config(config)
    step, optimizer = build.make_step(config, cfg, sharding.make_mesh(jax.devices()[:1]))
    traced = step.trace(abstract_state(cfg, optimizer), abstract_batch(rows=4, length=40), jnp.float32(0.1))
    assert ("pallas_call" in str(traced.jaxpr)) == calls
    scored = build.make_scorer(config, cfg, None).trace(transformer.abstract_params(cfg), tokens, tokens, tokens)
    assert ("pallas_call" in str(scored.jaxpr)) == calls
  config.train.attention, config.model.architecture.head_dim = "cudnn", 12
  with pytest.raises(ConfigError,
                     match="train.attention: 'cudnn' takes heads of a multiple of 8 up to 256, but this model has 12"):
    build.model_config(config)


ENGINE_CFG = tiny.tiny_config()
ENGINE_SIZES = dict(slots=2, max_prompt_tokens=16, max_new_tokens=6, chunk_tokens=3, stop_ids=(),
                    log_mu_temperature=1.0, prompt_buckets=(16,), prefill_batches=(2,), dtype=jnp.bfloat16)


def sampled_by(attention: str) -> dict[int, SampledGroup]:
  engine = Engine(ENGINE_CFG, jax.devices()[0], attention=attention, **ENGINE_SIZES)
  params = transformer.unstack(tiny.tiny_params(ENGINE_CFG, 0))
  engine.set_weights(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params), 0)
  for tag in range(3):
    prompt = np.random.default_rng(tag).integers(0, ENGINE_CFG.vocab_size, 5 + 5 * tag).astype(np.int32)
    keys = sample_keys(0, occurrence=tag, attempt=0, num_samples=2)
    engine.submit(SampleRequest(tag=tag, prompt=prompt, keys=keys, temperature=1.0, max_new_tokens=6))
  groups = {}
  while engine.num_groups:
    groups |= {group.tag: group for group in engine.step()}
  return groups


@pytest.mark.slow
def test_the_engine_samples_with_the_kernels_what_it_samples_without(interpreted):
  """In bfloat16 the scores of either round on their own, so that a close race between two tokens may end otherwise."""
  paged, xla = sampled_by("paged"), sampled_by("xla")
  num_tokens = num_equal = 0
  for tag, group in xla.items():
    for row in range(2):
      differ = np.flatnonzero(group.tokens[row] != paged[tag].tokens[row])
      same = differ[0] if len(differ) else 6
      np.testing.assert_allclose(paged[tag].log_mu[row, :same], group.log_mu[row, :same], atol=0.05)
      num_tokens, num_equal = num_tokens + 6, num_equal + same
  assert num_equal >= 0.9 * num_tokens
  with pytest.raises(ValueError, match="attention='paged' reads a bfloat16 cache, not float32"):
    Engine(ENGINE_CFG, jax.devices()[0], attention="paged", **ENGINE_SIZES | dict(dtype=jnp.float32))
  with pytest.raises(ValueError, match="attention='paged' takes lane_samples=1 and no kv_buckets; found 2 and None"):
    Engine(ENGINE_CFG, jax.devices()[0], attention="paged", lane_samples=2, **ENGINE_SIZES)


# --- Ahead of time for a TPU ---


@pytest.fixture(scope="module")
def tpu_devices():
  """The devices of a v5e-8 that nobody has: programs compile for them and cannot run."""
  if importlib.util.find_spec("libtpu") is None:
    pytest.skip("libtpu is not installed: pip install 'libtpu==0.0.42.*' to compile for TPU without one")
  os.environ.update(TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
  return topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices


def abstract(tree, shardings):
  return jax.tree.map(lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), tree, shardings)


def test_a_train_step_with_splash_compiles_for_tpu(tpu_devices):
  mesh = sharding.make_mesh(tpu_devices, fsdp=2, tensor=4)
  # Alternating windows, a soft cap, heads of 64, two kv heads on four devices: all that the kernel must put up with.
  cfg = dataclasses.replace(
    CFG, num_heads=8, head_dim=64, mlp_size=64, window=40, sliding_layers=(True, False), attn_softcap=30.0)
  optimizer = optimizers.make_optimizer("sgd", schedule=lambda _: 1e-3, clip_norm=1.0)
  step = learner.make_train_step(
    cfg, make_loss("tb_vargrad"), optimizer, temperature=1.0, compute_dtype=jnp.bfloat16, remat="full", micro_batches=1,
    chunk_tokens=256, backend="splash", mesh=mesh)
  text = step.lower(abstract_state(cfg, optimizer), abstract_batch(rows=4, length=160),
                    jnp.float32(0.1)).compile().as_text()
  calls = set(re.findall(r"splash_mha_\w+", text))
  assert calls == {f"splash_mha_{phase}"
                   for phase in ("fwd_segmented_residuals", "dq_segmented_no_residuals", "dkv_segmented_no_residuals")}
  assert "tpu_custom_call" in text
  assert not re.search(r"\[[\d,]*160,160\]", text)  # no array of all scores, nor a mask


def abstract_state(cfg: ModelConfig, optimizer: optimizers.Optimizer) -> TrainState:
  params, counter = transformer.abstract_params(cfg), jax.ShapeDtypeStruct((), jnp.int32)
  return TrainState(params, jax.eval_shape(optimizer.init, params), counter, counter, counter)


def abstract_batch(rows: int, length: int) -> Batch:
  """Shapes of a batch with a response in each row."""
  of = {
      "log_mu": jnp.float32, "log_ref": jnp.float32, "rewards": jnp.float32, "weights": jnp.float32, "valid": bool,
      "truncated": bool
  }

  def shape(name: str) -> tuple[int, ...]:
    return () if name.startswith("num_") else (rows, length) if name in sharding.PER_TOKEN_FIELDS else (rows,)

  kind = lambda name: jnp.float32 if name.startswith("num_") else of.get(name, jnp.int32)
  return Batch(**{name: jax.ShapeDtypeStruct(shape(name), kind(name)) for name in Batch._fields})


@pytest.mark.parametrize("head_dim, num_kv_heads, num_tensor", [(128, 4, 1), (64, 4, 2), (128, 2, 4)])
def test_decoding_compiles_for_tpu_and_never_copies_the_cache(tpu_devices, head_dim, num_kv_heads, num_tensor):
  batch, num_heads, length = 16, 8, kernels.cache_length(1000)
  if num_tensor == 1:
    mesh, cache_sharding, everywhere = None, *2 * (SingleDeviceSharding(tpu_devices[0]),)
  else:
    mesh = sharding.make_mesh(tpu_devices[:num_tensor], fsdp=1, tensor=num_tensor)
    heads = "tensor" if num_kv_heads % num_tensor == 0 else None
    cache_sharding, everywhere = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((None, heads), ()))

  def decode(cache, positions, x):
    def step(carry):
      cache, positions, x = carry
      kept = []
      for k, v in cache:
        q = x.reshape(batch, num_heads, head_dim)
        k, v = (kernels.write_slots(old, new, positions, mesh=mesh)
                for old, new in ((k, q[:, :num_kv_heads]), (v, -q[:, :num_kv_heads])))
        x = kernels.decode_attention(q, k, v, positions + 1, scale=0.1, mesh=mesh).reshape(x.shape)
        kept.append((k, v))
      return tuple(kept), positions + 1, x

    return jax.lax.while_loop(lambda carry: jnp.any(carry[1] < length), step, (cache, positions, x))

  cache = 2 * (2 * (jnp.zeros((batch, num_kv_heads, length, kernels.cache_width(head_dim)), jnp.bfloat16),),)
  args = (cache, jnp.zeros(batch, jnp.int32), jnp.zeros((batch, num_heads * head_dim), jnp.bfloat16))
  layout = (jax.tree.map(lambda _: cache_sharding, cache), everywhere, everywhere)
  compiled = jax.jit(decode, donate_argnums=0, out_shardings=layout).lower(*abstract(args, layout)).compile()
  text = compiled.as_text()
  assert text.count('custom_call_target="tpu_custom_call"') == 2
  of_cache = [line for line in text.splitlines() if re.search(rf"bf16\[{batch},\d+,{length},\d+\]", line)]
  assert of_cache and not [line for line in of_cache if re.search(r" (copy|copy-start|transpose|all-gather)\(", line)]
  cache_bytes = sum(leaf.nbytes
                    for leaf in jax.tree.leaves(cache)) // (num_tensor if num_kv_heads % num_tensor == 0 else 1)
  memory = compiled.memory_analysis()
  assert memory.alias_size_in_bytes >= cache_bytes
  assert memory.temp_size_in_bytes < 0.1 * cache_bytes


@pytest.mark.parametrize("num_tensor", [1, 2])
def test_the_engines_own_programs_compile_for_tpu(tpu_devices, num_tensor):
  config = quickstart.get_config("smoke").unlock()
  config.sample.update(attention="paged", cache_dtype="bfloat16", dtype="bfloat16")
  config.model.architecture.update(hidden_size=256, num_heads=4, num_kv_heads=2, head_dim=64)
  part = programs.searcher_part(config, build.model_config(config), tpu_devices[:num_tensor])
  found = {program.name: program.lower().compile()
           for program in part.programs if program.name in ("decode", "prefill")}
  layers = config.model.architecture.num_layers
  # k and v, slots, kv heads, entries and width in blocks, bytes of bfloat16
  cache_bytes = layers * 2 * config.sample.slots * 2 * 128 * 128 * 2 // num_tensor
  for name, compiled in found.items():
    # Of its last layer, prefill attends from each prompt's last token alone, which needs no kernel.
    num_kernels = layers - (name == "prefill")
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == num_kernels, name
  assert found["decode"].memory_analysis().alias_size_in_bytes >= cache_bytes

"""Adapters against the dense kernel that they stand for: values, gradients, micro-batches, meshes, bytes."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from tba_jax import learner, optimizers, placement, sharding
from tba_jax.config_schema import LINEAR_LAYERS
from tba_jax.losses.registry import make_loss
from tba_jax.models import lora, transformer
from tba_jax.models.heads import token_logprobs
from tba_jax.models.variants import ModelConfig
from tba_jax.replay.collate import collate
from tba_jax.types import Draw
from tba_jax.weights import WeightStore

CFG = tiny.tiny_config(tie_word_embeddings=False)
EVERY = lora.LoraSettings(".*", rank=3, alpha=6.0)
SOME = lora.LoraSettings("layers/(attn/[qvo]|mlp/down)", rank=2, alpha=1.0)


def some_adapters(settings: lora.LoraSettings, cfg: ModelConfig = CFG, seed: int = 1):
  """As if trained for a while: B is not 0."""
  rng = np.random.default_rng(seed)
  abstract = lora.abstract_adapters(cfg, settings=settings)
  return jax.tree.map(lambda leaf: jnp.asarray(0.2 * rng.normal(size=leaf.shape), jnp.float32), abstract)


def nodes(adapters, base):
  """(path, adapter, kernel) of each adapted layer."""
  found = []

  def walk(path, adapter, node):
    if "lora_a" in adapter:
      found.append(("/".join(path), adapter, node["kernel"]))
      return
    for name in adapter:
      walk((*path, name), adapter[name], node[name])

  walk((), adapters, base)
  return found


def in_numpy(kernel, adapter, *, scale: float, path: str) -> np.ndarray:
  """W + scale A B, layer by layer, as matrices in float64."""
  kernel, a, b = (np.asarray(x, np.float64) for x in (kernel, adapter["lora_a"], adapter["lora_b"]))
  if path == "lm_head":
    return kernel + scale * a @ b
  rank = a.shape[-1]
  return np.stack([
    w + scale * (x.reshape(-1, rank) @ y.reshape(rank, -1)).reshape(w.shape)
    for w, x, y in zip(kernel, a, b, strict=True)])


def rows(num_rows: int = 2, length: int = 9):
  tokens = np.random.default_rng(3).integers(0, CFG.vocab_size, (num_rows, length), np.int32)
  positions = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
  return tokens, positions, np.ones_like(tokens)


def assert_close(found, expected, tolerance: float):
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=10 * tolerance, atol=tolerance), found, expected)


def log_p(params, *, remat: str = "none"):
  return token_logprobs(params, CFG, *rows(), temperature=0.7, dtype=jnp.float32, remat=remat)[0]


@pytest.mark.parametrize("settings", [EVERY, SOME], ids=["every layer", "some layers"])
@pytest.mark.parametrize("layout", ["stacked", "decode"])
def test_merged_kernels_are_w_plus_scale_a_b(settings: lora.LoraSettings, layout: str):
  params, adapters = tiny.tiny_params(CFG), some_adapters(settings)
  if layout == "stacked":
    merged = lora.merge(params, adapters, scale=settings.scale)
  else:
    merged = lora.merge_unstacked(params, adapters, scale=settings.scale)
    merged["layers"] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *merged["layers"])
  expected = {
    path: in_numpy(kernel, adapter, scale=settings.scale, path=path)
    for path, adapter, kernel in nodes(adapters, params)
  }
  assert set(expected) == set(lora.adapted_layers(CFG, settings.pattern))
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    name = sharding.path_name(path)
    found = np.asarray(merged_leaf(merged, path))
    if name.removesuffix("/kernel") in expected:
      np.testing.assert_allclose(found, expected[name.removesuffix("/kernel")], rtol=1e-5, atol=1e-6)
    else:
      np.testing.assert_array_equal(found, np.asarray(leaf))


def merged_leaf(tree, path):
  for key in path:
    tree = tree[key.key]
  return tree


@pytest.mark.parametrize("settings", [EVERY, SOME], ids=["every layer", "some layers"])
def test_attached_adapters_compute_what_the_merged_model_does(settings: lora.LoraSettings):
  params, adapters = tiny.tiny_params(CFG), some_adapters(settings)
  merged = params
  for path, adapter, kernel in nodes(adapters, params):
    dense = in_numpy(kernel, adapter, scale=settings.scale, path=path)
    merged = replaced(merged, path.split("/"), jnp.asarray(dense, jnp.float32))
  attached = lora.attach(params, adapters, scale=settings.scale)
  expected = np.asarray(log_p(merged))
  for remat in transformer.REMAT_POLICIES:
    np.testing.assert_allclose(np.asarray(log_p(attached, remat=remat)), expected, atol=2e-5)
  assert np.abs(expected - np.asarray(log_p(params))).max() > 0.1


def replaced(tree, path, kernel):
  name, *rest = path
  return {**tree, name: replaced(tree[name], rest, kernel) if rest else {**tree[name], "kernel": kernel}}


def test_gradient_is_the_dense_gradient_by_the_chain_rule():
  """With W' = W + s A B: dA = s dW' B^T and dB = s A^T dW'."""
  params, adapters = tiny.tiny_params(CFG), some_adapters(EVERY)
  weight = np.random.default_rng(5).normal(size=rows()[0].shape).astype(np.float32)
  loss = lambda tree: jnp.sum(log_p(tree, remat="dots") * weight)
  found = jax.grad(lambda a: loss(lora.attach(params, a, scale=EVERY.scale)))(adapters)
  dense = jax.grad(loss)(lora.merge(params, adapters, scale=EVERY.scale))
  by_path = {path: gradient for path, gradient, _ in nodes(found, params)}
  for path, adapter, _ in nodes(adapters, params):
    dw = np.asarray(merged_leaf(dense, [jax.tree_util.DictKey(k) for k in (*path.split("/"), "kernel")]), np.float64)
    a, b = (np.asarray(adapter[name], np.float64) for name in ("lora_a", "lora_b"))
    lead = () if path == "lm_head" else (CFG.num_layers,)
    matrix = dw.reshape(*lead, -1, int(np.prod(b.shape[len(lead) + 1 :])))
    a2, b2 = a.reshape(*lead, -1, EVERY.rank), b.reshape(*lead, EVERY.rank, -1)
    expected = {"lora_a": matrix @ b2.swapaxes(-1, -2), "lora_b": a2.swapaxes(-1, -2) @ matrix}
    for name, value in expected.items():
      gradient, value = np.asarray(by_path[path][name]), EVERY.scale * value
      tolerance = 1e-4 * np.abs(value).max()
      np.testing.assert_allclose(gradient, value.reshape(gradient.shape), rtol=1e-3, atol=tolerance, err_msg=path)


def test_new_adapters_change_nothing_and_a_has_the_variance_of_a_kernel():
  wide = tiny.tiny_config(hidden_size=512, num_attention_heads=8)
  settings = lora.LoraSettings("layers/attn/[qo]", rank=8, alpha=16.0)
  adapters = lora.init_adapters(wide, jax.random.key(0), settings=settings)["layers"]["attn"]
  for name in ("q", "o"):
    a, b = np.asarray(adapters[name]["lora_a"]), np.asarray(adapters[name]["lora_b"])
    assert a.std() == pytest.approx(512**-0.5, rel=0.05) and not b.any()
  assert not np.array_equal(np.asarray(adapters["q"]["lora_a"]).ravel(), np.asarray(adapters["o"]["lora_a"]).ravel())
  params = tiny.tiny_params(CFG)
  attached = lora.attach(params, lora.init_adapters(CFG, jax.random.key(0), settings=EVERY), scale=EVERY.scale)
  np.testing.assert_array_equal(np.asarray(log_p(attached)), np.asarray(log_p(params)))


def test_layers_are_those_that_configs_may_name():
  gated = set(lora.adapted_layers(CFG, ".*"))
  assert gated == set(LINEAR_LAYERS)
  assert set(lora.adapted_layers(tiny.tiny_config(), ".*")) == gated - {"lm_head"}  # tied
  plain = dataclasses.replace(CFG, gated_mlp=False)
  assert set(lora.adapted_layers(plain, "layers/mlp/.*")) == {"layers/mlp/up", "layers/mlp/down"}
  with pytest.raises(ValueError, match="'lm_head' matches no linear layer of this model; they are layers/attn/k, "):
    lora.adapted_layers(tiny.tiny_config(), "lm_head")
  with pytest.raises(ValueError, match="'attn/q' matches no linear layer"):  # the whole path must match
    lora.adapted_layers(CFG, "attn/q")


# --- The train step ---


def batch(num_rows: int = 8):
  rng, size, numbers = np.random.default_rng(0), 6, np.arange(num_rows)
  log_ref = rng.normal(-2, 0.5, (num_rows, size)).astype(np.float32)
  draw = Draw(
    prompts=rng.integers(0, 60, (num_rows, 4), dtype=np.int32), prompt_lengths=np.full(num_rows, 4, np.int32),
    tokens=rng.integers(0, 60, (num_rows, size), dtype=np.int32),
    lengths=rng.integers(1, size + 1, num_rows, dtype=np.int32), log_mu=log_ref, log_ref=log_ref,
    versions=np.zeros(num_rows, np.int32), rewards=rng.normal(size=num_rows).astype(np.float32),
    truncated=np.zeros(num_rows, bool), group_ids=(numbers // 4).astype(np.int32), valid=np.ones(num_rows, bool),
    weights=np.ones(num_rows, np.float32), prompt_ids=numbers, occurrences=numbers, rows=numbers)
  return collate(draw, row_multiple=4, length_buckets=(12,))


@functools.cache
def trained(*, steps: int = 3, mesh=None, base_dtype=jnp.float32, **options):
  """Adapters, metrics and base after a few steps of AdamW, and the base before."""
  schedule = optimizers.make_schedule("constant", learning_rate=1e-2)
  optimizer = optimizers.make_optimizer("adamw", schedule=schedule, clip_norm=1.0, weight_decay=0.1)
  settings = dict(temperature=0.7, compute_dtype=jnp.float32, remat="full", micro_batches=1, chunk_tokens=32) | options
  step = learner.make_train_step(CFG, make_loss("tb_vargrad"), optimizer, lora=EVERY, mesh=mesh, **settings)
  base = tiny.tiny_params(CFG, dtype=base_dtype)
  before = jax.tree.map(np.asarray, base)
  if mesh is not None:
    base = jax.device_put(base, sharding.param_shardings(base, mesh))
  state = learner.init_train_state(some_adapters(EVERY), optimizer, mesh=mesh)
  for _ in range(steps):
    state, metrics = step(state, batch(), np.float32(0.3), base)
  assert step._cache_size() == 1
  return state, jax.tree.map(float, metrics), base, before


@pytest.mark.slow
def test_steps_change_adapters_and_leave_a_bfloat16_base_bitwise_alone():
  state, metrics, base, before = trained(base_dtype=jnp.bfloat16)
  assert metrics["skipped"] == 0 and int(state.version) == 3
  for path, leaf in jax.tree_util.tree_leaves_with_path(base):
    assert leaf.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(leaf), merged_leaf(before, path))
  changed = jax.tree.map(lambda a, b: np.any(np.asarray(a) != np.asarray(b)), state.params, some_adapters(EVERY))
  assert all(jax.tree.leaves(changed))
  adapters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
  moments = sum(leaf.size for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim)
  assert moments == 2 * adapters < sum(leaf.size for leaf in jax.tree.leaves(base))
  assert all(jax.tree.leaves(optimizers.decay_mask(state.params)))


@pytest.mark.slow
def test_micro_batches_change_nothing():
  expected, found = trained()[0], trained(micro_batches=4, remat="none")[0]
  assert_close(found.params, expected.params, 1e-4)


@pytest.mark.slow
def test_sharded_equals_unsharded():
  mesh = sharding.make_mesh(jax.devices()[:4], fsdp=2, tensor=2)
  expected, metrics, *_ = trained()
  found, sharded_metrics, *_ = trained(mesh=mesh)
  assert sharded_metrics["loss"] == pytest.approx(metrics["loss"], rel=1e-4)
  assert_close(found.params, expected.params, 1e-4)
  q = found.params["layers"]["attn"]["q"]
  part = lambda leaf: leaf.addressable_shards[0].data.shape
  # Model width over fsdp, heads over tensor.
  assert part(q["lora_a"]) == (2, 16, 3) and part(q["lora_b"]) == (2, 3, 2, 8)
  assert part(found.params["layers"]["mlp"]["down"]["lora_b"]) == (2, 3, 16)


@pytest.mark.parametrize("bias", [False, True])
def test_every_adapter_of_every_kind_of_model_has_a_rule(bias: bool):
  mesh = sharding.make_mesh(jax.devices()[:8], data=2, fsdp=2, tensor=2)
  cfg = dataclasses.replace(CFG, qkv_bias=bias, o_bias=bias, mlp_bias=bias, gated_mlp=not bias)
  adapters = some_adapters(EVERY, cfg)
  placed = jax.device_put(adapters, sharding.param_shardings(adapters, mesh))
  for path, leaf in jax.tree_util.tree_leaves_with_path(placed):
    np.testing.assert_array_equal(np.asarray(leaf), merged_leaf(adapters, path))
    spec = leaf.sharding.spec
    rank_axis = -1 if path[-1].key == "lora_a" else (0 if "lm_head" in sharding.path_name(path) else 1)
    assert spec[rank_axis] is None and any(axis is not None for axis in spec), sharding.path_name(path)


# --- On the way to searchers, and bytes ---


def num_bytes(tree) -> int:
  return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def test_a_store_moves_adapters_and_each_searcher_merges_on_its_own_devices():
  devices = jax.devices()[1:3]
  base, adapters = tiny.tiny_params(CFG), some_adapters(SOME)
  bases = [jax.device_put(base, device) for device in devices]
  merge = jax.jit(functools.partial(lora.merge_unstacked, scale=SOME.scale))
  copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
  store = WeightStore(copy, devices, expand=[functools.partial(merge, own) for own in bases], timeout_secs=60.0)
  store.publish(adapters, 4, wait=True)
  expected = transformer.unstack(lora.merge(base, adapters, scale=SOME.scale))
  for index, device in enumerate(devices):
    held = store.latest(index)
    assert held.version == 4
    assert {d for leaf in jax.tree.leaves((held.params, held.moved)) for d in leaf.devices()} == {device}
    assert_close(held.params, expected, 1e-6)
    assert num_bytes(held.moved) == num_bytes(adapters)
  moved = jax.tree.map(np.asarray, store.latest(0).moved)
  other = lora.init_adapters(CFG, jax.random.key(0), settings=SOME)
  assert not np.allclose(np.asarray(store.pin(other, 5, searcher=1)().params["layers"][0]["attn"]["q"]["kernel"]),
                         np.asarray(expected["layers"][0]["attn"]["q"]["kernel"]))
  store.publish(other, 5, wait=True)
  store.adopt(moved, 4)
  assert_close(store.latest(1).params, expected, 1e-6)


def test_planned_bytes():
  def plan_of(settings):
    placed = placement.placements(
      CFG, jax.devices(), trainer=1, searchers=1, per_searcher=1, share=False, optimizer="adamw", param_dtype="float32",
      compute_dtype="bfloat16", sample_dtype="bfloat16", cache_dtype="int8", attention="xla", slots=4, lane_samples=2,
      max_prompt_tokens=8, max_new_tokens=8, buffer_capacity=8, lora=settings)
    return {(row.part, row.content): row.device_bytes for row in placed}

  whole, adapted = plan_of(None), plan_of(EVERY)
  base = sum(leaf.size for leaf in jax.tree.leaves(transformer.abstract_params(CFG)))
  small = sum(leaf.size for leaf in jax.tree.leaves(lora.abstract_adapters(CFG, settings=EVERY)))
  assert adapted["trainer", "frozen base"] == 2 * base and adapted["trainer", "adapters"] == 4 * small
  assert adapted["trainer", "gradients"] == 4 * small and adapted["trainer", "optimizer state"] == 8 * small + 8
  assert whole["trainer", "parameters"] == 4 * base
  per_entry = 2 * CFG.num_layers * CFG.num_kv_heads * (CFG.head_dim + 4)  # keys and values, each with its scale
  assert whole["searcher 0", "cache of 4 slots"] == per_entry * (4 * 8 + 2 * 8)
  assert whole["searcher 0", "weights"] == whole["searcher 0", "weights that arrive"] == 2 * base
  searcher = lambda rows: {key: value for key, value in rows.items() if key[0] == "searcher 0"}
  assert searcher(adapted) == searcher(whole)

"""The rule tables against every parameter that a model can have, placement against plain arrays, and the messages of
what cannot be."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from tba_jax import sharding
from tba_jax.models import encoder, transformer
from tba_jax.models.encoder import EncoderConfig
from tba_jax.models.heads import scalar_scores, token_logprobs
from tba_jax.models.variants import FAMILIES, ModelConfig, from_huggingface

MESHES = [
  dict(data=1, fsdp=1, tensor=1),
  dict(data=2, fsdp=1, tensor=1),
  dict(data=1, fsdp=2, tensor=1),
  dict(data=1, fsdp=1, tensor=2),
  dict(data=1, fsdp=2, tensor=2),
  dict(data=1, fsdp=8, tensor=1),
  dict(data=1, fsdp=2, tensor=4),
  dict(data=2, fsdp=2, tensor=2),
]


def mesh_of(sizes: dict[str, int]) -> jax.sharding.Mesh:
  return sharding.make_mesh(jax.devices()[: np.prod(list(sizes.values()))], **sizes)


def tiny_config(**options) -> ModelConfig:
  fields = dict(
    family="llama", vocab_size=41, num_embeddings=41, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=4, mlp_size=32, max_positions=32, norm_eps=1e-6, tie_embeddings=False, query_scale=0.5, rotary_dim=4,
  )
  return ModelConfig(**{**fields, **options})


EVERY_PARAMETER = [
    tiny_config(qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True, post_norms=True),
    tiny_config(norm="layer", gated_mlp=False, qkv_bias=True, o_bias=True, mlp_bias=True, positions="learned",
                rotary_dim=0, num_kv_heads=4),
    tiny_config(tie_embeddings=True, norm="rms_plus_one"),
]


def random_tree(cfg: ModelConfig, seed: int = 0):
  return random_like(transformer.abstract_params(cfg), seed)


def random_like(tree, seed: int = 0):
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), tree)


# A small model of every family: sizes that 8 devices divide, an odd vocabulary, one, two or all kv heads.
_SMALL = dict(
  hidden_size=32, num_hidden_layers=2, num_attention_heads=8, intermediate_size=48, vocab_size=41,
  max_position_embeddings=32,
)
_GEMMA = dict(_SMALL, head_dim=6, num_key_value_heads=1)
_WINDOWS = dict(sliding_window=4, layer_types=["sliding_attention", "full_attention"])
SMALL_CONFIGS = {
  "llama": dict(_SMALL, num_key_value_heads=2, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
  "mistral": dict(_SMALL, num_key_value_heads=4, sliding_window=4),
  "qwen2": dict(_SMALL, num_key_value_heads=2),
  "qwen3": dict(_SMALL, num_key_value_heads=2, head_dim=6),
  "gemma": _GEMMA,
  "gemma2": dict(_GEMMA, query_pre_attn_scalar=6, **_WINDOWS),
  "gemma3_text": dict(_GEMMA, query_pre_attn_scalar=6, num_key_value_heads=8, **_WINDOWS),
  "gpt_neox": {**_SMALL, "rotary_pct": 0.5},
  "gpt2": dict(n_embd=32, n_layer=2, n_head=8, n_inner=48, vocab_size=41, n_positions=32),
}
ENCODERS = ("bert", "roberta")


def family_config(family: str) -> ModelConfig:
  return from_huggingface({"model_type": family, **SMALL_CONFIGS[family]})


def encoder_config(family: str) -> EncoderConfig:
  architecture = f"{family.capitalize()}ForSequenceClassification"
  return encoder.encoder_from_huggingface({
    **_SMALL, "model_type": family, "architectures": [architecture], "num_labels": 3, "max_position_embeddings": 64,
  })


def whole_tree(name: str):
  """Shapes of every leaf that a family, or an encoder, can have, with a reward model's head."""
  if name in ENCODERS:
    return encoder.abstract_params(encoder_config(name))
  leaf = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
  return {**transformer.abstract_params(family_config(name)), "score": {"kernel": leaf(32, 1), "bias": leaf(1)}}


def test_the_families_here_are_all_there_are():
  assert set(SMALL_CONFIGS) == set(FAMILIES) and set(ENCODERS) == set(encoder.FAMILIES)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_every_leaf_of_every_family_has_a_rule_and_comes_back_bitwise(sizes: dict[str, int]):
  mesh = mesh_of(sizes)
  for name in (*SMALL_CONFIGS, *ENCODERS):
    params = random_like(whole_tree(name))
    placed = jax.device_put(params, sharding.param_shardings(params, mesh))
    leaves = zip(jax.tree_util.tree_leaves_with_path(placed), jax.tree.leaves(params), strict=True)
    for (path, found), expected in leaves:
      assert np.asarray(found).tobytes() == expected.tobytes(), (name, sharding.path_name(path))


def _forward(name: str, mesh):
  """(function of the parameters, parameters) of a family's log-probabilities and reward, or an encoder's logits."""
  # Of the size that keeps logits at a few nats: the tolerance is of the sum of rounding, which grows with them.
  params, rng = jax.tree.map(lambda x: 0.2 * x, random_like(whole_tree(name))), np.random.default_rng(1)
  tokens = rng.integers(0, 41, (8, 12), dtype=np.int32)
  lengths = rng.integers(3, 13, 8).astype(np.int32)
  constrain = None if mesh is None else sharding.activation_constraint(mesh)
  if name in ENCODERS:
    cfg = encoder_config(name)
    return lambda p: encoder.classify(p, cfg, tokens, lengths, dtype=jnp.float32), params
  cfg = family_config(name)
  positions = np.tile(np.arange(12, dtype=np.int32), (8, 1))
  segments = (positions < lengths[:, None]).astype(np.int32)
  options = dict(temperature=0.7, dtype=jnp.float32, chunk_tokens=32, constrain=constrain)
  return lambda p: (
    token_logprobs(p, cfg, tokens, positions, segments, **options),
    scalar_scores(p, cfg, tokens, positions, segments, dtype=jnp.float32),
  ), params


# Few kv heads and sliding windows (gemma2), a fused checkpoint with biases (gpt_neox), an encoder; the rest are slow.
FORWARD_BY_DEFAULT = {("gemma2", 6), ("gpt_neox", 4), ("bert", 7), ("llama", 7)}


@pytest.mark.parametrize(("name", "number"), [
  pytest.param(name, i, marks=[] if (name, i) in FORWARD_BY_DEFAULT else pytest.mark.slow)
  for name in (*SMALL_CONFIGS, *ENCODERS) for i in range(1, len(MESHES))
])
def test_the_sharded_forward_of_every_family_equals_the_unsharded(name: str, number: int):
  mesh = mesh_of(MESHES[number])
  plain, params = _forward(name, None)
  sharded, _ = _forward(name, mesh)
  placed = jax.device_put(params, sharding.param_shardings(params, mesh))
  found, expected = jax.jit(sharded)(placed), jax.jit(plain)(params)
  assert all(np.asarray(x).std() > 0.05 for x in jax.tree.leaves(expected))
  close = lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-5)
  jax.tree.map(close, found, expected)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("cfg", EVERY_PARAMETER, ids=["llama-like", "gpt-like", "tied"])
def test_sharded_and_gathered_parameters_are_bitwise_equal(cfg: ModelConfig, sizes: dict[str, int]):
  mesh, params = mesh_of(sizes), random_tree(cfg)
  placed = jax.device_put(params, sharding.param_shardings(params, mesh))
  jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), b), placed, params)


def test_large_parameters_are_split_over_all_devices_of_fsdp_and_tensor():
  mesh = mesh_of(dict(data=2, fsdp=2, tensor=2))
  params = random_tree(tiny_config(num_embeddings=48, vocab_size=41))
  placed = jax.device_put(params, sharding.param_shardings(params, mesh))
  for path, leaf in jax.tree_util.tree_leaves_with_path(placed):
    if sharding.path_name(path).endswith(("kernel", "table")):
      assert leaf.addressable_shards[0].data.size == leaf.size // 4, sharding.path_name(path)


def test_rules_by_hand():
  mesh = mesh_of(dict(data=2, fsdp=2, tensor=2))
  spec = lambda name, *shape: sharding.param_spec(name, shape, mesh)
  assert spec("layers/attn/q/kernel", 3, 16, 4, 8) == PartitionSpec(None, "fsdp", "tensor", None)
  assert spec("layers/attn/o/kernel", 3, 4, 8, 16) == PartitionSpec(None, "tensor", None, "fsdp")
  assert spec("layers/mlp/down/kernel", 3, 32, 16) == PartitionSpec(None, "tensor", "fsdp")
  assert spec("layers/mlp/up/bias", 3, 32) == PartitionSpec(None, "tensor")
  assert spec("layers/post_mlp_norm/scale", 3, 16) == PartitionSpec(None, None)
  assert spec("layers/attn/q_norm/scale", 3, 8) == PartitionSpec(None, None)
  assert spec("embed/table", 64, 16) == PartitionSpec("tensor", "fsdp")
  assert spec("pos_embed/table", 64, 16) == PartitionSpec(None, "fsdp")
  assert spec("lm_head/kernel", 16, 64) == PartitionSpec("fsdp", "tensor")


def test_few_kv_heads_and_odd_vocabularies_are_replicated_along_tensor():
  mesh = mesh_of(dict(data=1, fsdp=2, tensor=4))
  assert sharding.param_spec("layers/attn/k/kernel", (3, 16, 2, 8), mesh) == PartitionSpec(None, "fsdp", None, None)
  assert sharding.param_spec("layers/attn/v/bias", (3, 2, 8), mesh) == PartitionSpec(None, None, None)
  assert sharding.param_spec("layers/attn/k/kernel", (3, 16, 4, 8), mesh) == PartitionSpec(None, "fsdp", "tensor", None)
  assert sharding.param_spec("lm_head/kernel", (16, 41), mesh) == PartitionSpec("fsdp", None)


def test_what_the_rules_refuse():
  mesh = mesh_of(dict(data=1, fsdp=2, tensor=4))
  with pytest.raises(ValueError,
                     match=r"parameter 'layers/attn/q/lora' \(3, 4\) has no sharding rule; add one to PARAM_AXES"):
    sharding.param_spec("layers/attn/q/lora", (3, 4), mesh)
  # The whole name must match.
  with pytest.raises(ValueError, match="parameter 'my_embed/table' .* has no sharding rule"):
    sharding.param_spec("my_embed/table", (3, 4), mesh)
  with pytest.raises(ValueError, match=r"has shape \(16, 4, 8\), but its sharding rule names 4 axes"):
    sharding.param_spec("layers/attn/q/kernel", (16, 4, 8), mesh)
  with pytest.raises(
      ValueError,
      match="'heads' dimension of 9 does not divide over tensor=4 devices; choose a size .* that divides 9"):
    sharding.param_spec("layers/attn/q/kernel", (3, 16, 9, 8), mesh)
  with pytest.raises(ValueError, match="'embed' dimension of 15 does not divide over fsdp=2"):
    sharding.param_spec("layers/attn/q/kernel", (3, 15, 8, 8), mesh)


def test_meshes():
  assert dict(sharding.make_mesh(jax.devices()[:8], tensor=2).shape) == {"data": 1, "fsdp": 4, "tensor": 2}
  assert sharding.num_batch_shards(sharding.make_mesh(jax.devices()[:8], data=2, tensor=2)) == 4
  assert sharding.num_batch_shards(None) == 1
  with pytest.raises(ValueError, match="data=1, fsdp=-1, tensor=3 does not fit 8 devices"):
    sharding.make_mesh(jax.devices()[:8], tensor=3)
  with pytest.raises(ValueError,
                     match="data=2, fsdp=2, tensor=1 does not fit 8 devices; the product of the sizes must be 8"):
    sharding.make_mesh(jax.devices()[:8], data=2, fsdp=2)
  with pytest.raises(ValueError, match="at most one of them -1"):
    sharding.make_mesh(jax.devices()[:8], data=-1)
  with pytest.raises(ValueError, match="must be at least 1"):
    sharding.make_mesh(jax.devices()[:8], data=0)


def test_states_follow_their_parameters():
  mesh = mesh_of(dict(data=1, fsdp=2, tensor=2))
  params = {"embed": {"table": jnp.zeros((8, 4))}, "pos_embed": {"table": jnp.zeros((6, 4))}}
  layout = sharding.param_shardings(params, mesh)
  state = {"mu": params, "count": jnp.zeros(()), "factored": {"embed": {"table": jnp.zeros(8)}}}
  found = jax.tree.map(lambda s: s.spec, sharding.state_shardings(state, params, layout, mesh))
  assert found["mu"]["embed"]["table"] == PartitionSpec("tensor", "fsdp")
  assert found["mu"]["pos_embed"]["table"] == PartitionSpec(None, "fsdp")
  assert found["count"] == found["factored"]["embed"]["table"] == PartitionSpec()


def test_split_devices_without_sharing():
  trainer, searchers = sharding.split_devices(list("abcdefgh"), trainer=4, searchers=2, per_searcher=2, share=False)
  assert (trainer, searchers) == (list("abcd"), [list("ef"), list("gh")])
  trainer, searchers = sharding.split_devices(list("abcdefgh"), trainer=-1, searchers=3, per_searcher=1, share=False)
  assert (trainer, searchers) == (list("abcde"), [["f"], ["g"], ["h"]])
  trainer, searchers = sharding.split_devices(list("abcdefgh"), trainer=2, searchers=1, per_searcher=2, share=False)
  assert (trainer, searchers) == (list("ab"), [list("cd")])


def test_split_devices_with_sharing():
  assert sharding.split_devices(["a"], trainer=1, searchers=2, per_searcher=1, share=True) == (["a"], [["a"], ["a"]])
  assert sharding.split_devices(["a"], trainer=-1, searchers=1, per_searcher=1, share=True) == (["a"], [["a"]])
  trainer, searchers = sharding.split_devices(list("abcd"), trainer=2, searchers=3, per_searcher=1, share=True)
  assert (trainer, searchers) == (["a", "b"], [["c"], ["d"], ["a"]])  # the trainer's devices come last
  assert sharding.split_devices(list("abcd"), trainer=-1, searchers=1, per_searcher=4, share=True)[1] == [list("abcd")]


class _Device(NamedTuple):
  id: int
  process_index: int


def test_the_devices_of_several_processes():
  devices = [_Device(number, number // 4) for number in (0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7)]

  def ids(**asked):
    trainer, searchers = sharding.devices_of_run(devices, **dict(share=False, num_processes=3) | asked)
    return [device.id for device in trainer], [[device.id for device in group] for group in searchers]

  assert ids(trainer=6, searchers=2, per_searcher=1) == ([0, 1, 8, 9, 4, 5], [[2], [3]])
  assert ids(trainer=12, searchers=1, per_searcher=2, share=True) == (
    [0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7], [[0, 1]])
  assert ids(trainer=3, searchers=0, per_searcher=1) == ([0, 8, 4], [])
  assert ids(trainer=2, searchers=0, per_searcher=1, num_processes=1) == ([0, 1], [])


@pytest.mark.parametrize(
  "asked, message",
  [
    (dict(trainer=4, searchers=2, per_searcher=3, share=False),
     "more exclusive devices than exist: 4 for the trainer and 2 searchers x 3 need 10, found 8; lower .* share=True"),
    (dict(trainer=-1, searchers=8, per_searcher=1, share=False), "at least 1 for the trainer and 8 searchers x 1 need "
                                                                 "9, found 8"),
    (dict(trainer=9, searchers=1, per_searcher=1, share=True), "trainer=9 needs more devices than exist: found 8; "
                                                               "lower trainer"),
    (dict(trainer=1, searchers=1, per_searcher=9, share=True), "per_searcher=9 needs more devices than exist: found 8"),
    (dict(trainer=0, searchers=1, per_searcher=1, share=True), "trainer=0 must be at least 1 device, or -1"),
    (dict(trainer=1, searchers=0, per_searcher=1, share=True), "searchers=0 must be at least 1"),
  ],
)
def test_what_split_devices_refuses(asked: dict, message: str):
  with pytest.raises(ValueError, match=message):
    sharding.split_devices(list("abcdefgh"), **asked)

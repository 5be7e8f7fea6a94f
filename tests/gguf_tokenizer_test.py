"""The tokenizers that GGUF files describe: splitting, merges, special tokens, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

import gguf_files
import parity
import tiny_tokenizers
from tba_jax.checkpoints.gguf_tokenizer import build_tokenizer

TEXT = "Janet has 16 eggs a day,  she's 1234 years\n\n old! ÉTÉ e\u0301 🙂\t "


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2"])
def test_splitting_equals_transformers(pre: str):
  convert = parity.require("transformers.integrations.gguf.gguf_tokenizer_mapping").convert_gguf_tokenizer
  keys = {"general.architecture": "llama", **gguf_files.byte_level_metadata(pre=pre)}
  names = {
    "model": "tokenizer_type",
    "pre": "pre_tokenizer_type",
    "tokens": "tokens",
    "token_type": "token_type",
    "merges": "merges",
  }
  theirs, _ = convert("llama", {name: keys[f"tokenizer.ggml.{key}"] for key, name in names.items()})
  ours = build_tokenizer(keys, source="here")
  if pre == "llama-bpe":  # theirs leaves out what the original tokenizer.json says
    theirs.model.ignore_merges = True
  text = (
    TEXT if pre != "qwen2" else TEXT.replace("e\u0301", "é")
  )  # the original composes characters first, theirs does not
  assert ours.encode(TEXT) == theirs.encode(text, add_special_tokens=False).ids


def test_smollm_splits_numbers_into_digits():
  backend = tiny_tokenizers.byte_level_backend()
  assert any(
    len(token.lstrip("Ġ")) > 1 and token.lstrip("Ġ").isdigit() for token in backend.get_vocab()
  )  # or nothing would be tested
  tokenizer = build_tokenizer(
    {"general.architecture": "llama", **gguf_files.byte_level_metadata(pre="smollm")}, source="here"
  )
  assert tokenizer.hf.convert_ids_to_tokens(tokenizer.encode("has 16 eggs")) == ["has", "Ġ", "1", "6", "Ġeggs"]
  assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_llama_bpe_takes_whole_words_first():
  keys = {"general.architecture": "llama", **gguf_files.byte_level_metadata(pre="llama-bpe")}
  tokens = [*keys["tokenizer.ggml.tokens"], "qzx"]
  keys |= {
    "tokenizer.ggml.tokens": tokens,
    "tokenizer.ggml.token_type": [*keys["tokenizer.ggml.token_type"], gguf_files.NORMAL],
  }
  assert build_tokenizer(keys, source="here").encode("qzx") == [320]


def sentencepiece(arch: str, pieces: list[tuple[str, float]], **more: Any) -> dict[str, Any]:
  """<unk>, <s>, </s>, the 256 bytes, then pieces with scores."""
  tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *(piece for piece, _ in pieces)]
  types = [
    gguf_files.UNKNOWN,
    gguf_files.CONTROL,
    gguf_files.CONTROL,
    *[gguf_files.BYTE] * 256,
    *[gguf_files.NORMAL] * len(pieces),
  ]
  return {
    "general.architecture": arch,
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": tokens,
    "tokenizer.ggml.token_type": types,
    "tokenizer.ggml.scores": [0.0] * 259 + [score for _, score in pieces],
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    **more,
  }


def test_sentencepiece_of_llama_2():
  # By score: "ab" (-1) is joined before "bc" (-2), so abc is ab + c although bc exists.
  pieces = [("▁", -9.0), ("a", -9.0), ("b", -9.0), ("c", -9.0), ("ab", -1.0), ("bc", -2.0), ("▁ab", -3.0)]
  tokenizer = build_tokenizer(sentencepiece("llama", pieces), source="here")

  def pieces_of(text: str, **options: bool) -> list[str]:
    return tokenizer.hf.convert_ids_to_tokens(tokenizer.encode(text, **options))

  assert pieces_of("abc bc") == ["▁ab", "c", "▁", "bc"]
  assert pieces_of("é") == ["▁", "<0xC3>", "<0xA9>"]
  assert pieces_of("a</s>b") == ["▁", "a", "</s>", "▁", "b"]
  assert pieces_of("a", add_special_tokens=True) == ["<s>", "▁", "a"]  # llama.cpp's default where the file is silent
  assert tokenizer.decode(tokenizer.encode("abc  é bc")) == "abc  é bc"
  plain = build_tokenizer(
    {**sentencepiece("llama", pieces), "tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False},
    source="here",
  )
  assert plain.encode("a", add_special_tokens=True) == tokenizer.encode("a")[1:]
  assert plain.decode(plain.encode(" a")) == " a"


def test_sentencepiece_of_gemma_goes_by_order_and_has_runs_of_spaces():
  # The same pieces with misleading scores: by order "bc" comes before "ab".
  pieces = [("▁", -9.0), ("a", -9.0), ("b", -9.0), ("c", -9.0), ("bc", -2.0), ("ab", -1.0), ("  ", -5.0), ("   ", -6.0)]
  keys = {**sentencepiece("gemma3", pieces), "tokenizer.ggml.add_space_prefix": False}
  keys["tokenizer.ggml.token_type"][-2:] = [gguf_files.USER_DEFINED] * 2
  tokenizer = build_tokenizer(keys, source="here")
  assert tokenizer.hf.convert_ids_to_tokens(tokenizer.encode("abc")) == ["a", "bc"]
  assert tokenizer.hf.convert_ids_to_tokens(tokenizer.encode("a   b  c")) == ["a", "▁▁▁", "b", "▁▁", "c"]
  assert tokenizer.decode(tokenizer.encode("  a   b é")) == "  a   b é"


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens is missing, so the file holds no usable tokenizer"),
    ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model='t5' is not supported; supported are gpt2 and llama"),
    (
      {"tokenizer.ggml.pre": "tekken"},
      "tokenizer.ggml.pre='tekken' is not supported; supported are gpt-2, smollm, llama-bpe, qwen2",
    ),
    ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre is missing; convert the model again"),
    ({"tokenizer.ggml.token_type": [1, 1]}, "320 tokens but 2 token types"),
    ({"tokenizer.ggml.eos_token_id": 9999}, "tokenizer.ggml.eos_token_id=9999 is not one of the 320 tokens"),
    ({"tokenizer.ggml.eot_token_id": 9999}, r"stop ids \[9999\] are not ids of the tokenizer"),
    ({"tokenizer.ggml.merges": ["no such"]}, "the merges do not fit the tokens"),
    ({"tokenizer.ggml.tokens": ["a"] * 320}, "the 320 tokens are not all different"),
    (
      {"tokenizer.ggml.model": "llama"},
      "tokenizer.ggml.unknown_token_id is missing; a sentencepiece tokenizer needs it",
    ),
    (
      {"tokenizer.ggml.model": "llama", "tokenizer.ggml.unknown_token_id": 0},
      "tokenizer.ggml.scores is missing; a sentencepiece tokenizer needs it",
    ),
  ],
)
def test_what_is_wrong_with_a_tokenizer_is_said(change: dict[str, Any], message: str):
  keys = {"general.architecture": "llama", **gguf_files.byte_level_metadata(), **change}
  with pytest.raises(ValueError, match=message):
    build_tokenizer({key: value for key, value in keys.items() if value is not None}, source="here")

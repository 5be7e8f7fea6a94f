"""Tokenizers: ids equal transformers', nothing is cut or padded, every id that ends a response is known."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import pathlib

import pytest
import tokenizers

import tiny_tokenizers
from tba_jax.tasks.arithmetic import make_arithmetic_tokenizer
from tba_jax.tokenizer import load_tokenizer, make_tokenizer

TEXT = "  Janet's 16 eggs ,  a  day !\n\n\tÉté 🙂 <|im_end|> 1,000.50"
IM_END, END_OF_TEXT, PAD = 2, 0, 3


def test_ids_equal_transformers_and_text_comes_back_exactly():
  hf = tiny_tokenizers.byte_level(eos_token="<|im_end|>")
  tokenizer = make_tokenizer(hf, source="here")
  expected = tiny_tokenizers.byte_level(eos_token="<|im_end|>")(TEXT, add_special_tokens=False)["input_ids"]
  assert tokenizer.encode(TEXT) == expected
  assert tokenizer.decode(expected) == TEXT.replace(
    "<|im_end|>", ""
  )  # only special tokens are left out, no space is tidied away
  assert tokenizer.vocab_size == 320


def test_pieces_are_what_each_token_adds_to_the_text():
  tokenizer = make_tokenizer(tiny_tokenizers.byte_level(eos_token="<|im_end|>"), source="here")
  ids = tokenizer.encode("  Janet's 16 eggs ,  a  day !\n\n\t<|im_end|> 1,000.50")
  pieces = tokenizer.pieces(ids)
  assert "".join(pieces) == tokenizer.decode(ids) and len(pieces) == len(ids)
  assert pieces == ["" if token == IM_END else tokenizer.decode([token]) for token in ids]
  assert tokenizer.pieces([]) == []
  words = make_arithmetic_tokenizer()  # a decoder that puts a space between words
  a, b = words.encode("3 +")
  assert words.pieces([a, words.hf.pad_token_id, b, words.hf.pad_token_id, a]) == ["3", "", " +", "", " 3"]
  assert words.decode([a, words.hf.pad_token_id, b]) == "3 +"


def test_begin_of_text_only_when_asked():
  hf = tiny_tokenizers.byte_level(bos_token="<|im_start|>", eos_token="<|im_end|>")
  hf.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
    single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
  )
  tokenizer = make_tokenizer(hf, source="here")
  assert tokenizer.encode("a", add_special_tokens=True) == [1, *tokenizer.encode("a")]
  assert tokenizer.encode("a") == [hf.convert_tokens_to_ids("a")] and tokenizer.bos_id == 1


@pytest.mark.parametrize("setting", ["truncation", "padding"])
def test_truncation_and_padding_saved_with_the_tokenizer_do_not_apply(tmp_path: pathlib.Path, setting: str):
  tiny_tokenizers.save(tmp_path, eos_token="<|im_end|>")
  damaged = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
  damaged.enable_truncation(4) if setting == "truncation" else damaged.enable_padding(length=512)
  damaged.save(str(tmp_path / "tokenizer.json"))
  assert load_tokenizer(tmp_path).encode(TEXT) == tiny_tokenizers.byte_level_backend().encode(TEXT).ids


def test_stop_ids_unite_tokenizer_generation_config_and_extra(tmp_path: pathlib.Path):
  tiny_tokenizers.save(tmp_path, eos_token="<|im_end|>")
  assert load_tokenizer(tmp_path).stop_ids == (IM_END,)
  (tmp_path / "generation_config.json").write_text(
    json.dumps({"eos_token_id": [END_OF_TEXT, IM_END], "temperature": 0.6})
  )
  assert load_tokenizer(tmp_path).stop_ids == (END_OF_TEXT, IM_END)
  assert load_tokenizer(tmp_path, extra_stop_ids=(PAD, 9)).stop_ids == (END_OF_TEXT, IM_END, PAD, 9)
  (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
  assert load_tokenizer(tmp_path).stop_ids == (IM_END, 7)
  (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": None}))
  assert load_tokenizer(tmp_path).stop_ids == (IM_END,)


def test_where_no_generation_config_names_stop_ids_the_models_own_config_does(tmp_path: pathlib.Path):
  folder = tiny_tokenizers.save(tmp_path, eos_token="<|im_end|>")
  end = load_tokenizer(folder).encode("<|im_end|>")[0]
  (folder / "config.json").write_text('{"eos_token_id": [1, 5]}')
  assert load_tokenizer(folder).stop_ids == tuple(sorted({1, 5, end}))
  (folder / "generation_config.json").write_text('{"eos_token_id": null}')
  assert load_tokenizer(folder).stop_ids == tuple(sorted({1, 5, end}))
  (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
  assert load_tokenizer(folder).stop_ids == tuple(sorted({7, end}))


@pytest.mark.parametrize(
  "special", [{}, {"pad_token": "<|im_end|>"}, {"pad_token": "<|pad|>"}, {"pad_token": "<added pad>"}]
)
def test_pad_token_makes_no_difference(tmp_path: pathlib.Path, special: dict[str, str]):
  tokenizer = load_tokenizer(tiny_tokenizers.save(tmp_path, eos_token="<|im_end|>", **special))
  assert tokenizer.encode(TEXT) == tiny_tokenizers.byte_level_backend().encode(TEXT).ids
  assert tokenizer.stop_ids == (IM_END,)
  assert tokenizer.vocab_size == (321 if "added" in str(special) else 320)


def test_saved_tokenizer_comes_back_whole(tmp_path: pathlib.Path):
  tokenizer = tiny_tokenizers.chat_tokenizer()
  tokenizer.save(tmp_path)
  again = load_tokenizer(tmp_path)
  messages = [{"role": "user", "content": TEXT}]
  assert again.stop_ids == tokenizer.stop_ids == (END_OF_TEXT, IM_END)
  assert again.vocab_size == tokenizer.vocab_size
  assert again.encode(TEXT) == tokenizer.encode(TEXT)
  assert again.chat(messages) == tokenizer.chat(messages)


@pytest.mark.parametrize(
  ("tokenizer_class", "model_type"),
  [("PreTrainedTokenizerFast", "qwen2"), ("Qwen2Tokenizer", "llama"), ("GemmaTokenizer", "llama")],
)
def test_tokenizer_file_counts_whatever_class_the_folder_names(
  tmp_path: pathlib.Path, tokenizer_class: str, model_type: str
):
  # With AutoTokenizer the first two give other ids and the third does not load.
  tiny_tokenizers.save(tmp_path, eos_token="<|im_end|>")
  config = json.loads((tmp_path / "tokenizer_config.json").read_text())
  (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": tokenizer_class}))
  (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
  assert load_tokenizer(tmp_path).encode(TEXT) == tiny_tokenizers.byte_level_backend().encode(TEXT).ids


def test_chat_equals_transformers_and_opens_the_assistants_turn():
  tokenizer = tiny_tokenizers.chat_tokenizer()
  messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How much?"}]
  expected = tokenizer.hf.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)[
    "input_ids"
  ]
  assert tokenizer.has_chat_template and tokenizer.chat(messages) == list(expected)
  assert tokenizer.chat(messages)[0] == 1 and tokenizer.hf.decode(tokenizer.chat(messages)).endswith(
    "<|im_start|>assistant\n"
  )


def test_one_tokenizer_serves_many_threads():
  tokenizer = tiny_tokenizers.chat_tokenizer()
  texts = [f"{TEXT} {i}" * 20 for i in range(200)]
  expected = [tokenizer.encode(text) for text in texts]
  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    assert list(pool.map(tokenizer.encode, texts)) == expected
    assert list(pool.map(tokenizer.decode, expected)) == [text.replace("<|im_end|>", "") for text in texts]


def test_no_chat_template_is_said():
  tokenizer = make_tokenizer(tiny_tokenizers.byte_level(eos_token="<|im_end|>"), source="here")
  assert not tokenizer.has_chat_template
  with pytest.raises(ValueError, match="has no chat template .* give the prompt as plain text"):
    tokenizer.chat([{"role": "user", "content": "Hi"}])


def test_token_without_an_embedding_is_refused():
  tokenizer = dataclasses.replace(
    make_tokenizer(tiny_tokenizers.byte_level(eos_token="<|im_end|>", pad_token="<added pad>"), source="here"),
    vocab_size=320,
  )
  assert tokenizer.encode("a fine text")
  with pytest.raises(
    ValueError, match=r"token '<added pad>' with id 320, but the model has embeddings for ids below 320 only"
  ):
    tokenizer.encode("a text with <added pad>")


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda d: (d / "tokenizer.json").unlink(), "holds no tokenizer: none of tokenizer.json"),
    (lambda d: (d / "tokenizer.json").write_text("{"), "the tokenizer cannot be loaded"),
    (lambda d: (d / "generation_config.json").write_text("{"), "generation_config.json is not valid JSON"),
    (
      lambda d: (d / "generation_config.json").write_text('{"eos_token_id": ["<eos>"]}'),
      "list of integers, found '<eos>'",
    ),
    (
      lambda d: (d / "generation_config.json").write_text('{"eos_token_id": [999]}'),
      r"stop ids \[999\] are not ids of the tokenizer, whose ids are 0 to 319",
    ),
    (lambda d: (d / "generation_config.json").write_text("[]"), "generation_config.json must hold a JSON object, found list"),
    (lambda d: (d / "tokenizer_config.json").write_text("{}"), "no response could ever end; give extra_stop_ids"),
  ],
)
def test_what_is_wrong_with_a_folder_is_said(tmp_path: pathlib.Path, change, message: str):
  change(tiny_tokenizers.save(tmp_path, eos_token="<|im_end|>"))
  with pytest.raises(ValueError, match=message):
    load_tokenizer(tmp_path)


def test_slow_tokenizer_is_refused():
  class Slow:
    eos_token_id = 1

  with pytest.raises(ValueError, match="Slow is not a fast tokenizer"):
    make_tokenizer(Slow(), source="here")

"""Builds the tokenizer that a GGUF file describes in its metadata.

The file names a pre-tokenizer; what it does is written here, since the file does not say and transformers' own
conversion leaves out the splitting of digits that "smollm" needs. A pre-tokenizer that is not in the table is refused:
a guess would give wrong ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
import transformers
from tokenizers import decoders, normalizers, pre_tokenizers, processors

from tba_jax.tokenizer import Tokenizer, make_tokenizer

# Kinds of a token in tokenizer.ggml.token_type.
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5

_LLAMA3_SPLIT = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def build_tokenizer(metadata: Mapping[str, Any], *, source: str) -> Tokenizer:
  """The tokenizer of a GGUF file, its chat template and every id that ends a turn.

  Args:
    metadata: all keys and values of the file.
    source: the file, for error messages.
  Raises: ValueError if the tokenizer is of a kind not known here or the metadata does not fit together.
  """
  for key in ("model", "tokens", "token_type"):
    if f"tokenizer.ggml.{key}" not in metadata:
      raise ValueError(
        f"{source}: metadata key tokenizer.ggml.{key} is missing, so the file holds no usable tokenizer."
      )
  kind, tokens, types = (metadata[f"tokenizer.ggml.{key}"] for key in ("model", "tokens", "token_type"))
  if len(tokens) != len(types):
    raise ValueError(f"{source}: {len(tokens)} tokens but {len(types)} token types; the file is damaged.")
  # Rows that only pad the embedding to a round size are listed as unused tokens [PAD<id>]; they are not ids of the
  # tokenizer.
  while tokens and types[-1] == _UNUSED and tokens[-1] == f"[PAD{len(tokens) - 1}]":
    tokens, types = tokens[:-1], types[:-1]
  if metadata["general.architecture"].startswith("gemma"):
    # Runs of spaces are listed as such and as user-defined; the text is searched with the space symbol, by ordinary
    # merges.
    runs = [bool(token) and not token.strip(" ") for token in tokens]
    tokens = ["▁" * len(token) if run else token for token, run in zip(tokens, runs, strict=True)]
    types = [_NORMAL if run else kind_of for kind_of, run in zip(types, runs, strict=True)]
  if len(set(tokens)) != len(tokens):
    raise ValueError(f"{source}: the {len(tokens)} tokens are not all different; the file is damaged.")
  if kind == "gpt2":
    backend = _byte_level(metadata, tokens, types, source)
  elif kind == "llama":
    backend = _sentencepiece(metadata, tokens, types, source)
  else:
    raise ValueError(f"{source}: tokenizer.ggml.model={kind!r} is not supported; supported are gpt2 and llama.")
  backend.add_special_tokens(_added(tokens, types, _CONTROL))
  backend.add_tokens(_added(tokens, types, _USER_DEFINED))

  def token(name: str) -> str | None:
    key = f"tokenizer.ggml.{name}_token_id"
    if key not in metadata:
      return None
    if not 0 <= metadata[key] < len(tokens):
      raise ValueError(f"{source}: {key}={metadata[key]} is not one of the {len(tokens)} tokens; the file is damaged.")
    return tokens[metadata[key]]

  special = {
    "bos_token": token("bos"),
    "eos_token": token("eos"),
    "pad_token": token("padding"),
    "unk_token": token("unknown"),
  }
  if special["bos_token"] is not None and _adds_bos(metadata, kind):
    bos = special["bos_token"]
    backend.post_processor = processors.TemplateProcessing(
      single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, metadata["tokenizer.ggml.bos_token_id"])]
    )
  hf = transformers.PreTrainedTokenizerFast(
    tokenizer_object=backend,
    clean_up_tokenization_spaces=False,
    **{name: value for name, value in special.items() if value is not None},
  )
  if "tokenizer.chat_template" in metadata:
    hf.chat_template = metadata["tokenizer.chat_template"]
  turn_ends = [
    metadata[key] for key in ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id") if key in metadata
  ]
  return make_tokenizer(hf, stop_ids=turn_ends, source=source)


def _added(tokens: Sequence[str], types: Sequence[int], kind: int) -> list[tokenizers.AddedToken]:
  return [
    tokenizers.AddedToken(t, normalized=False, special=kind == _CONTROL)
    for t, k in zip(tokens, types, strict=True)
    if k == kind
  ]


def _adds_bos(metadata: Mapping[str, Any], kind: str) -> bool:
  # Files from before the flag existed: llama.cpp adds it for sentencepiece vocabularies and for Llama 3.
  if "tokenizer.ggml.add_bos_token" in metadata:
    return bool(metadata["tokenizer.ggml.add_bos_token"])
  return kind == "llama" or metadata["tokenizer.ggml.pre"] == "llama-bpe"


def _byte_level(
  metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], source: str
) -> tokenizers.Tokenizer:
  """Byte-level BPE, as of GPT-2, Llama 3, Qwen2 and SmolLM2."""
  for key in ("pre", "merges"):
    if f"tokenizer.ggml.{key}" not in metadata:
      raise ValueError(
        f"{source}: metadata key tokenizer.ggml.{key} is missing; convert the model again with a llama.cpp of 2024 "
        "or later."
      )
  pre = metadata["tokenizer.ggml.pre"]
  splits: dict[str, list[pre_tokenizers.PreTokenizer]] = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "llama-bpe": _regex_split(_LLAMA3_SPLIT),
    "qwen2": _regex_split(_QWEN2_SPLIT),
  }
  if pre not in splits:
    raise ValueError(f"{source}: tokenizer.ggml.pre={pre!r} is not supported; supported are {', '.join(splits)}.")
  merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
  vocab = {token: i for i, token in enumerate(tokens)}
  try:
    # Llama 3 takes a whole word that is in the vocabulary even where its merges do not lead there.
    model = tokenizers.models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe")
  except Exception as error:  # the library raises bare Exception, naming the merge
    raise ValueError(f"{source}: the merges do not fit the tokens: {error}") from error
  backend = tokenizers.Tokenizer(model)
  backend.pre_tokenizer = pre_tokenizers.Sequence(splits[pre])
  backend.decoder = decoders.ByteLevel()
  if pre == "qwen2":
    backend.normalizer = normalizers.NFC()
  return backend


def _regex_split(pattern: str) -> list[pre_tokenizers.PreTokenizer]:
  return [
    pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated"),
    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
  ]


def _sentencepiece(
  metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], source: str
) -> tokenizers.Tokenizer:
  """SentencePiece BPE with byte fallback, as of Llama 2 and Gemma. The vocabulary implies the merges."""
  if "tokenizer.ggml.unknown_token_id" not in metadata:
    raise ValueError(
      f"{source}: metadata key tokenizer.ggml.unknown_token_id is missing; a sentencepiece tokenizer needs it."
    )
  is_gemma = metadata["general.architecture"].startswith("gemma")
  if is_gemma:
    # Gemma's scores do not follow its merge order, the order of the tokens does.
    ranks: Sequence[float] = range(len(tokens))
  elif "tokenizer.ggml.scores" in metadata:
    ranks = [-score for score in metadata["tokenizer.ggml.scores"]]
  else:
    raise ValueError(f"{source}: metadata key tokenizer.ggml.scores is missing; a sentencepiece tokenizer needs it.")
  vocab = {token: i for i, token in enumerate(tokens)}
  mergeable = {token: i for token, i in vocab.items() if types[i] != _CONTROL}
  model = tokenizers.models.BPE(
    vocab=vocab,
    merges=_implied_merges(mergeable, ranks),
    unk_token=tokens[metadata["tokenizer.ggml.unknown_token_id"]],
    fuse_unk=True,
    byte_fallback=True,
  )
  backend = tokenizers.Tokenizer(model)
  # llama.cpp's default where the key is absent.
  prefix = "tokenizer.ggml.add_space_prefix" not in metadata or bool(metadata["tokenizer.ggml.add_space_prefix"])
  spaces = normalizers.Replace(" ", "▁")
  backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
  if is_gemma:
    backend.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
  steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
  backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
  return backend


def _implied_merges(vocab: Mapping[str, int], ranks: Sequence[float]) -> list[tuple[str, str]]:
  """Every way to join two tokens to a third: the third's lowest rank first, then by the ids of the two."""
  found = []
  for token, i in vocab.items():
    for cut in range(1, len(token)):
      left, right = token[:cut], token[cut:]
      if left in vocab and right in vocab:
        found.append((ranks[i], vocab[left], vocab[right], left, right))
  found.sort(key=lambda merge: merge[:3])
  return [(left, right) for *_, left, right in found]

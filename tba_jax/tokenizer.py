"""Text to token ids and back, with the ids that end a response.

A thin, frozen wrapper around a transformers fast tokenizer. It exists because four things go wrong when that object is
used directly: truncation or padding saved in tokenizer.json silently applies to every text; a model may stop on several
ids, of which the tokenizer knows one; the embedding often has more rows than the tokenizer has ids, or fewer; and
encoding through transformers changes shared state, which is not safe from several searcher threads. Nothing here pads:
padding is by position everywhere (a pad token may be absent, equal to the end of text, or outside the embedding, and it
makes no difference).
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import transformers

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
  """Fast tokenizer with its stop ids. Safe to share between threads.

  `vocab_size` is one more than the largest id that `encode` may give; the loader of a model lowers it to the model's
  own limit.
  """

  hf: transformers.PreTrainedTokenizerFast
  stop_ids: tuple[int, ...]  # sorted; any of them ends a response; () for a model that writes none
  vocab_size: int

  def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
    """Token ids of a text; names of special tokens written in the text become those tokens.

    Args:
      text: any text.
      add_special_tokens: whether to add what the tokenizer puts around a text by itself (for some a begin-of-text id).
    Raises: ValueError if the text holds a token that the model has no embedding for.
    """
    return self._known(self.hf.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

  def encode_rows(self, texts: Sequence[str], *, max_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """A batch for an encoder: each text with what the tokenizer puts around it, its end cut off where it is too long.

    Args:
      texts: at least one.
      max_tokens: of a row, what is put around the text included.
    Returns: ids int32 [B, T], padded on the right with 0, and lengths int32 [B]. T is a power of two or `max_tokens`,
      so that few shapes are compiled.
    Raises: ValueError as `encode`.
    """
    backend = self.hf.backend_tokenizer
    rows = []
    for text in texts:
      encoding = backend.encode(text, add_special_tokens=False)
      encoding.truncate(max_tokens - backend.num_special_tokens_to_add(False))
      rows.append(self._known(backend.post_process(encoding, None, True).ids))
    lengths = np.array([len(row) for row in rows], np.int32)
    tokens = np.zeros((len(rows), min(max_tokens, 1 << (int(lengths.max()) - 1).bit_length())), np.int32)
    for target, row in zip(tokens, rows, strict=True):
      target[: len(row)] = row
    return tokens, lengths

  def _known(self, ids: list[int]) -> list[int]:
    if ids and max(ids) >= self.vocab_size:
      worst = max(ids)
      raise ValueError(
        f"the text holds token {self.hf.convert_ids_to_tokens(worst)!r} with id {worst}, but the model has embeddings "
        "for ids below "
        f"{self.vocab_size} only; remove that token from the text, or use the tokenizer that belongs to the model."
      )
    return ids

  def decode(self, ids: Iterable[int]) -> str:
    """Text of token ids; special tokens are left out, spaces are kept as they are."""
    return self.hf.backend_tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

  def pieces(self, ids: Sequence[int]) -> list[str]:
    """What each token adds to the text of the last one that has any; joined they are `decode(ids)`, unless a character
    is split between tokens. A special token adds nothing."""
    pieces: list[str] = []
    before: list[int] = []
    for token in ids:
      pieces.append(self.decode([*before, token])[len(self.decode(before)) :])
      before = [token] if self.decode([token]) else before
    return pieces

  @property
  def bos_id(self) -> int | None:
    return self.hf.bos_token_id

  @property
  def has_chat_template(self) -> bool:
    return bool(self.hf.chat_template)

  def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Token ids of a conversation, up to where the assistant's next turn begins.

    Args:
      messages: dicts with "role" ("system", "user" or "assistant") and "content".
    Raises: ValueError if the tokenizer has no chat template, or if the template refuses these messages.
    """
    if not self.has_chat_template:
      raise ValueError(
        "this tokenizer has no chat template (a base model's often has none); give the prompt as plain text instead, "
        "or load an instruction-tuned model."
      )
    # Through text rather than tokenize=True: the same ids, and the ids go through the one encode above with its checks.
    return self.encode(
      self.hf.apply_chat_template([dict(m) for m in messages], tokenize=False, add_generation_prompt=True)
    )

  def save(self, folder: str | pathlib.Path) -> None:
    """Writes the tokenizer's files, and the stop ids to generation_config.json; `load_tokenizer` reads them back."""
    folder = pathlib.Path(folder)
    self.hf.save_pretrained(folder)
    config: dict[str, Any] = {"eos_token_id": list(self.stop_ids)}
    for name in ("bos_token_id", "pad_token_id"):
      if getattr(self.hf, name) is not None:
        config[name] = getattr(self.hf, name)
    (folder / "generation_config.json").write_text(json.dumps(config, indent=2) + "\n")


def make_tokenizer(
  hf: transformers.PreTrainedTokenizerFast, *, stop_ids: Iterable[int] = (), source: str, generates: bool = True
) -> Tokenizer:
  """Wraps a transformers fast tokenizer.

  Args:
    hf: the tokenizer; truncation and padding that it may carry are switched off.
    stop_ids: ids that end a response beside the tokenizer's own end of text.
    source: where it came from, for error messages.
    generates: whether its model writes text, so that something must end a response.
  Raises: ValueError if it is not a fast tokenizer, if nothing ends a response, or if a stop id is not one of its ids.
  """
  backend = getattr(hf, "backend_tokenizer", None)
  if backend is None:
    raise ValueError(
      f"{source}: {type(hf).__name__} is not a fast tokenizer; convert it once with transformers and save its "
      "tokenizer.json."
    )
  backend.no_truncation()
  backend.no_padding()
  vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
  stops = {int(i) for i in stop_ids}
  if hf.eos_token_id is not None:
    stops.add(int(hf.eos_token_id))
  if generates and not stops:
    raise ValueError(
      f"{source}: the tokenizer has no eos_token and neither generation_config.json nor config.json names an eos_token_id, so no response "
      "could ever end; give extra_stop_ids."
    )
  outside = sorted(i for i in stops if not 0 <= i < vocab_size)
  if outside:
    raise ValueError(f"{source}: stop ids {outside} are not ids of the tokenizer, whose ids are 0 to {vocab_size - 1}.")
  return Tokenizer(hf=hf, stop_ids=tuple(sorted(stops)), vocab_size=vocab_size)


def load_tokenizer(
  folder: str | pathlib.Path, extra_stop_ids: Iterable[int] = (), *, generates: bool = True
) -> Tokenizer:
  """Loads the tokenizer of a model folder.

  The stop ids are its end of text, those of generation_config.json (of config.json, where that names none), and
  `extra_stop_ids`; there may be none if the model does not write text (`generates=False`).

  Never runs code from the folder and never asks the network.
  Raises: ValueError if the folder holds no tokenizer, one that cannot be read, or stop ids that are not its own.
  """
  folder = pathlib.Path(folder)
  if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
    raise ValueError(
      f"{folder} holds no tokenizer: none of {', '.join(_TOKENIZER_FILES)} is there; copy the model's tokenizer.json "
      "into it."
    )
  named = _named_stop_ids(folder / "generation_config.json")
  if named is None and generates:  # older folders have the model's own config alone
    named = _named_stop_ids(folder / "config.json")
  stop_ids = {*extra_stop_ids, *(named or ())}
  # tokenizer.json is taken as it stands. The classes that AutoTokenizer picks by model_type may put their own splitting
  # of words in place of the file's (transformers 5.24 does so for qwen2), and then the ids differ from those that the
  # model was trained on.
  loader = transformers.PreTrainedTokenizerFast if (folder / "tokenizer.json").is_file() else transformers.AutoTokenizer
  try:
    hf = loader.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
  except Exception as error:  # transformers and tokenizers raise bare Exception for a damaged tokenizer.json
    raise ValueError(f"{folder}: the tokenizer cannot be loaded: {type(error).__name__}: {error}") from error
  return make_tokenizer(hf, stop_ids=stop_ids, source=str(folder), generates=generates)


def _named_stop_ids(path: pathlib.Path) -> list[int] | None:
  """eos_token_id of a config file; None where there is no file or it names none."""
  if not path.is_file():
    return None
  try:
    found = json.loads(path.read_text())
  except (json.JSONDecodeError, UnicodeDecodeError) as error:
    raise ValueError(f"{path} is not valid JSON: {error}") from error
  if not isinstance(found, dict):
    raise ValueError(f"{path} must hold a JSON object, found {type(found).__name__}.")
  ids = found["eos_token_id"] if "eos_token_id" in found else None
  if ids is None:
    return None
  ids = ids if isinstance(ids, list) else [ids]
  wrong = [i for i in ids if not isinstance(i, int) or isinstance(i, bool)]
  if wrong:
    raise ValueError(f"{path}: eos_token_id must be an integer or a list of integers, found {wrong[0]!r}.")
  return ids

"""Byte-level BPE tokenizers of a few hundred tokens, saved as model folders hold them. Not a test module."""

from __future__ import annotations

import pathlib

import tokenizers
import transformers

from tba_jax.tokenizer import Tokenizer, make_tokenizer

TEXTS = (
  "Janet has 16 eggs a day, she eats 3 and sells the rest.",
  "How much does she make every day?",
  "The answer is 18 dollars.",
  "16 16 16 16",
)
CHAT_TEMPLATE = (
  "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
  "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")


def byte_level_backend() -> tokenizers.Tokenizer:
  """Ids 0 to 3 are SPECIALS, then the 256 bytes, then merges learned from TEXTS: 320 ids in all."""
  backend = tokenizers.Tokenizer(tokenizers.models.BPE())
  backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=320,
    special_tokens=list(SPECIALS),
    initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
    show_progress=False,
  )
  backend.train_from_iterator(TEXTS, trainer)
  return backend


def byte_level(**special: str) -> transformers.PreTrainedTokenizerFast:
  """A fast tokenizer; `special` are roles such as eos_token="<|im_end|>"."""
  return transformers.PreTrainedTokenizerFast(
    tokenizer_object=byte_level_backend(), clean_up_tokenization_spaces=False, **special
  )


def chat_tokenizer() -> Tokenizer:
  hf = byte_level(eos_token="<|endoftext|>", pad_token="<|endoftext|>")
  hf.chat_template = CHAT_TEMPLATE
  return make_tokenizer(hf, stop_ids=[SPECIALS.index("<|im_end|>")], source="chat_tokenizer")


def save(folder: pathlib.Path, **special: str) -> pathlib.Path:
  byte_level(**special).save_pretrained(folder)
  return folder

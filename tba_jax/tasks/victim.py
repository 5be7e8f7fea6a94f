"""A frozen model beside a searcher that answers prompts: what a red-teaming run attacks."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
from typing import Any
import zlib

import jax
from jax.sharding import Mesh
import numpy as np

from tba_jax.models.variants import ModelConfig
from tba_jax.sampling.engine import Engine, SampleRequest, sample_keys
from tba_jax.tasks.base import decode_response
from tba_jax.tokenizer import Tokenizer

# Attacks are short and alike in length: one shape of each program will do.
_CHUNK_TOKENS, _PREFILL_PROMPTS = 16, 8
CHAT = "chat"  # the template that stands for the tokenizer's own


@dataclasses.dataclass(frozen=True)
class VictimSettings:
  """How a victim is asked and how it answers."""

  template: str  # "chat", or text with {attack} in it
  samples: int  # answers to each attack
  temperature: float
  top_p: float
  max_prompt_tokens: int  # of a prompt with its template
  max_new_tokens: int
  slots: int  # answers decoded at once


class Victim:
  """Samples answers. They depend on the model, the attack and `seed` alone, so that an attack's reward is one number
  however often it is found, by whichever searcher. Confined to one thread at a time.

  Args:
    cfg, tokenizer: as `load_model` gives them.
    decode_params: in the decode layout, on `device_or_mesh`; used as they are.
    dtype: of the computation.
  Raises: ValueError for a template without {attack}, or a tokenizer without the chat template that is asked for.
  """

  def __init__(
    self, cfg: ModelConfig, decode_params: Any, tokenizer: Tokenizer, device_or_mesh: jax.Device | Mesh, *,
    settings: VictimSettings, dtype: Any, seed: int,
  ):
    if settings.template != CHAT and "{attack}" not in settings.template:
      raise ValueError(f"victim_template={settings.template!r} has no {{attack}}; put it where the attack goes, or use "
                       f"{CHAT!r} for the victim's own chat template.")
    if settings.template == CHAT and not tokenizer.has_chat_template:
      raise ValueError("victim_template='chat', but the victim has no chat template; give a text with {attack} in it.")
    self._tokenizer, self._settings, self._seed = tokenizer, settings, seed
    self._engine = Engine(
      cfg, device_or_mesh, slots=settings.slots, max_prompt_tokens=settings.max_prompt_tokens,
      max_new_tokens=settings.max_new_tokens, chunk_tokens=min(_CHUNK_TOKENS, settings.max_new_tokens),
      stop_ids=tokenizer.stop_ids, dtype=dtype, log_mu_temperature=settings.temperature,
      filtering=settings.top_p < 1.0, prompt_buckets=(settings.max_prompt_tokens,),
      prefill_batches=(_PREFILL_PROMPTS,), kv_buckets=(settings.max_prompt_tokens + settings.max_new_tokens,),
    )
    self._engine.set_weights(decode_params, 0)

  def prompt(self, attack: str) -> list[int]:
    """Token ids that the victim is given."""
    if self._settings.template == CHAT:
      return self._tokenizer.chat([{"role": "user", "content": attack}])
    ids = self._tokenizer.encode(self._settings.template.replace("{attack}", attack), add_special_tokens=True)
    while ids and ids[-1] in self._tokenizer.stop_ids:  # some tokenizers end every text
      ids.pop()
    return ids

  def __call__(self, attacks: Sequence[str]) -> list[tuple[str, ...] | None]:
    """`samples` answers to each attack; None where its prompt is longer than the victim is set to take."""
    settings, engine, found = self._settings, self._engine, {}
    try:
      for attack in dict.fromkeys(attacks):
        tokens = np.array(self.prompt(attack), np.int32)
        if len(tokens) > settings.max_prompt_tokens:
          continue
        keys = sample_keys(
          self._seed, occurrence=zlib.crc32(tokens.tobytes()), attempt=0, num_samples=settings.samples)
        engine.submit(SampleRequest(
          tag=attack, prompt=tokens, keys=keys, temperature=settings.temperature, top_p=settings.top_p,
          max_new_tokens=settings.max_new_tokens))
      while engine.num_groups:
        for group in engine.step():
          rows = zip(group.tokens, group.lengths)
          found[group.tag] = tuple(decode_response(self._tokenizer, row[:length]) for row, length in rows)
    finally:
      engine.cancel()  # frees the cache; after an error also what was under way
    return [found.get(attack) for attack in attacks]

"""The divergence to the reference against its exact value."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.evaluate import Interrupted
from tba_jax.models import transformer
from tba_jax.models.variants import new_model_config
from tba_jax.runtime.sampled_kl import kl_to_reference
from tba_jax.sampling.engine import Engine
from tba_jax.types import Prompt


def test_kl_to_reference_equals_the_sum_over_the_vocabulary():
  """Responses of one token: the divergence is a sum over next tokens, taken in float64."""
  cfg = new_model_config(
    hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, mlp_size=16, max_positions=16,
    tie_embeddings=True, rope_theta=10_000.0, norm_eps=1e-5, vocab_size=12,
  )  # fmt: skip
  sharpened = lambda key: (lambda p: {**p, "embed": {"table": p["embed"]["table"] * 20}})(
    transformer.init_params(cfg, jax.random.key(key), jnp.float32))
  policy, reference, temperature = sharpened(0), sharpened(1), 0.7
  prompts = [Prompt(i, np.arange(1 + i, 4 + i, dtype=np.int32), "", "") for i in range(2)]

  def log_p(params, tokens):
    hidden = transformer.hidden_states(
      params, cfg, tokens[None], np.arange(len(tokens))[None], np.ones((1, len(tokens)), np.int32), dtype=jnp.float32)
    z = np.asarray(hidden[0, -1] @ params["embed"]["table"].T, np.float64)[: cfg.vocab_size] / temperature
    return z - np.log(np.exp(z - z.max()).sum()) - z.max()

  def score(prompt, group):
    return log_p(reference, prompt.tokens)[group.tokens].astype(np.float32)

  engine = Engine(
    cfg, jax.devices()[0], slots=64, max_prompt_tokens=4, max_new_tokens=1, chunk_tokens=1, stop_ids=(0,),
    dtype=jnp.float32, log_mu_temperature=temperature)
  engine.set_weights(transformer.unstack(policy), 0)
  estimate = functools.partial(
    kl_to_reference, engine, prompts, score=score, seed=0, num_samples=256, temperature=temperature,
    max_new_tokens=1)
  found = estimate(stopped=lambda: False)
  wanted = np.mean([np.exp(log_p(policy, p.tokens)) @ (log_p(policy, p.tokens) - log_p(reference, p.tokens))
                    for p in prompts])
  assert found.num_samples == 512 and 0 < found.standard_error < 0.1 * wanted
  assert abs(found.mean - wanted) < 3 * found.standard_error
  with pytest.raises(Interrupted):
    estimate(stopped=lambda: True)
  assert engine.num_groups == 0

"""The counted landscape: its exact measures against sums written out, and its samples against its probabilities."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from experiments import redteam_modes as rm


def test_measures_are_sums_over_all_sequences():
  toxicity, modes, table = rm.landscape(0)
  table = 2.0 * table
  log_p = table - np.log(np.exp(table).sum(axis=1, keepdims=True))
  p = np.array([
    np.exp(sum(log_p[rm.STARTS[i] + int("".join(map(str, x[:i])) or "0", rm.VOCAB), x[i]] for i in range(rm.LENGTH)))
    for x in rm.ALL.tolist()])
  assert abs(p.sum() - 1) < 1e-9
  distance = sum(
    p[i] * (p * (rm.ALL != rm.ALL[i]).mean(axis=1)).sum() for i in range(len(p)))
  found = rm.measures(jnp.asarray(table, jnp.float32), toxicity, modes)
  assert abs(float(found["distance"]) - distance) < 1e-5
  assert abs(float(found["toxic"]) - p[modes].sum()) < 1e-6  # the modes alone are above 0.5
  assert int(found["modes"]) == (p[modes] > 0.1 / rm.NUM_MODES).sum()
  near = (rm.ALL[:, None] != rm.ALL[None, modes]).sum(axis=2).min(axis=1)
  assert set(np.unique(toxicity[near == 1])) == {0.4} and set(np.unique(toxicity[near > 1])) == {0.02}
  samples = np.concatenate([rm.sample(jnp.asarray(table, jnp.float32), jax.random.key(i)) for i in range(100)])
  for position in range(rm.LENGTH):
    marginal = np.bincount(rm.ALL[:, position], weights=p, minlength=rm.VOCAB)
    np.testing.assert_allclose(np.bincount(samples[:, position], minlength=rm.VOCAB) / len(samples), marginal, atol=0.03)


def test_levels_are_where_a_share_is_first_reached():
  points = [{"toxic": toxic, "distance": d} for toxic, d in ((0.1, 0.9), (0.55, 0.8), (0.4, 0.7), (0.95, 0.6))]
  assert rm.at_levels(points) == {"0.3": 0.8, "0.5": 0.8, "0.7": 0.6, "0.8": 0.6, "0.9": 0.6}
  assert rm.at_levels(points[:1])["0.3"] is None

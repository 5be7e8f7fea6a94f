"""Whether trajectory balance keeps finding many kinds of attacks where a policy gradient settles on one, in a landscape
small enough to count.

    python experiments/redteam_modes.py --out experiments/results/redteam_modes.json

Responses are all 4,096 sequences of four tokens out of eight; the policy is a table with a row of logits for every
prefix, so its expectations are exact sums. The score is log toxicity: 0.95 at 16 random sequences (modes), 0.4 one
token away from one, 0.02 elsewhere; the reference is a random table. `tb` is the run's own loop: samples of weights up
to 10 updates old go into the replay buffer (one prompt), batches come out by recency and reward, the target is tempered
from 2 to 1. `reinforce` and `reinforce_kl` (the KL of the reference in the reward, with TB's beta) are on-policy.
Reported per seed and method, along training: share toxic (above 0.5), mean Hamming distance of two independent samples,
modes with at least a tenth of an even share; and the distance when a share toxic is first reached.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # so that it runs as a file, too

from tba_jax.losses.registry import make_loss  # noqa: E402
from tba_jax.optimizers import Tempering  # noqa: E402
from tba_jax.replay.buffer import ReplayBuffer  # noqa: E402
from tba_jax.types import Batch, RolloutGroup  # noqa: E402

VOCAB, LENGTH, NUM_MODES, NUM_RESPONSES = 8, 4, 16, 64
BETA, LEARNING_RATE, SYNC_EVERY_STEPS = 0.2, 0.05, 10
METHODS = ("tb", "reinforce", "reinforce_kl")
LEVELS = (0.3, 0.5, 0.7, 0.8, 0.9)
STARTS = tuple(sum(VOCAB**n for n in range(depth)) for depth in range(LENGTH))  # of the table's rows, by prefix length
ALL = np.stack(np.meshgrid(*[np.arange(VOCAB)] * LENGTH, indexing="ij"), -1).reshape(-1, LENGTH)


def prefix_rows(tokens: Any) -> Any:
  """Rows of the table [.., L] that the tokens of sequences [.., L] are sampled from."""
  rows, number = [], 0
  for depth in range(LENGTH):
    rows.append(STARTS[depth] + number)
    number = number * VOCAB + tokens[..., depth]
  return jnp.stack(jnp.broadcast_arrays(*rows), axis=-1)


def log_probs(table: jax.Array, tokens: jax.Array) -> jax.Array:
  """Of each token of sequences [n, L]: [n, L]."""
  log_p = jax.nn.log_softmax(table)[prefix_rows(tokens)]
  return jnp.take_along_axis(log_p, tokens[..., None], axis=-1)[..., 0]


@jax.jit
def sample(table: jax.Array, key: jax.Array) -> jax.Array:
  """NUM_RESPONSES sequences."""
  tokens, number = [], jnp.zeros(NUM_RESPONSES, jnp.int32)
  for depth in range(LENGTH):
    token = jax.random.categorical(jax.random.fold_in(key, depth), table[STARTS[depth] + number])
    tokens.append(token)
    number = number * VOCAB + token
  return jnp.stack(tokens, axis=1)


@jax.jit
def measures(table: jax.Array, toxicity: jax.Array, modes: jax.Array) -> dict[str, jax.Array]:
  """Exact, by a sum over all sequences."""
  p = jnp.exp(log_probs(table, ALL).sum(axis=1))
  at_position = jnp.stack([jnp.zeros(VOCAB).at[ALL[:, i]].add(p) for i in range(LENGTH)])
  return {
    "toxic": jnp.sum(p * (toxicity > 0.5)), "distance": jnp.mean(1 - jnp.sum(at_position**2, axis=1)),
    "modes": jnp.sum(p[modes] > 0.1 / NUM_MODES),
  }  # fmt: skip


def landscape(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Toxicity of every sequence, the modes among them, and the reference's table."""
  rng = np.random.default_rng(seed)
  modes = rng.choice(len(ALL), NUM_MODES, replace=False)
  near = (ALL[:, None] != ALL[None, modes]).sum(axis=2).min(axis=1)
  return np.where(near == 0, 0.95, np.where(near == 1, 0.4, 0.02)), modes, rng.normal(size=(sum(
    VOCAB**n for n in range(LENGTH)), VOCAB))


def make_batch(tokens: np.ndarray, log_mu: Any, log_ref: Any, rewards: np.ndarray) -> Batch:
  """One group of rows without a prompt."""
  number = len(tokens)
  ids = np.broadcast_to(np.arange(number, dtype=np.int32)[:, None], tokens.shape)
  return Batch(
    tokens=tokens, positions=np.zeros_like(ids), segment_ids=np.ones_like(ids), sequence_ids=ids,
    log_mu=jnp.asarray(log_mu, jnp.float32), log_ref=jnp.asarray(log_ref, jnp.float32),
    rewards=np.asarray(rewards, np.float32), group_ids=np.zeros(number, np.int32), valid=np.ones(number, bool),
    truncated=np.zeros(number, bool), weights=np.ones(number, np.float32), num_responses=np.float32(number),
    num_groups=np.float32(1), num_tokens=np.float32(number * LENGTH),
  )  # fmt: skip


def make_step(loss_name: str, optimizer: optax.GradientTransformation) -> Any:
  loss_fn = make_loss(loss_name)

  @jax.jit
  def step(table: jax.Array, state: Any, batch: Batch, beta: Any) -> tuple[jax.Array, Any]:
    grads = jax.grad(lambda table: loss_fn(log_probs(table, batch.tokens), batch, beta=beta)[0])(table)
    updates, state = optimizer.update(grads, state, table)
    return optax.apply_updates(table, updates), state

  return step


def train(method: str, seed: int, steps: int, every: int) -> list[dict[str, float]]:
  """Measures along training, of every few steps."""
  toxicity, modes, reference = landscape(seed)
  score, reference = np.log(toxicity), jnp.asarray(reference, jnp.float32)
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(LEARNING_RATE))
  step = make_step("tb_vargrad" if method == "tb" else "reinforce", optimizer)
  table, sampler, state = reference, reference, optimizer.init(reference)
  tempering = Tempering(1.0, 1.0, 0, 2.0, 1.0, steps // 4)
  buffer = ReplayBuffer(
    capacity=20_000, capacity_per_prompt=20_000, max_prompt_tokens=1, max_response_tokens=LENGTH, seed=seed,
    recent_fraction=0.5, priority="reward", single_prompt=True)
  found = []
  for number in range(steps):
    if number % every == 0:
      found.append({"step": number, **{k: float(v) for k, v in measures(table, toxicity, modes).items()}})
    if method != "tb":
      sampler = table
    elif number % SYNC_EVERY_STEPS == 0:
      sampler = table
      buffer.mark_publish(number)
    tokens = np.asarray(sample(sampler, jax.random.fold_in(jax.random.key(seed), number)), np.int32)
    log_mu, log_ref = log_probs(sampler, tokens), log_probs(reference, tokens)
    rewards = score[np.ravel_multi_index(tokens.T, (VOCAB,) * LENGTH)]
    if method == "tb":
      version = number - number % SYNC_EVERY_STEPS
      buffer.add(_group(tokens, np.asarray(log_mu), np.asarray(log_ref), rewards, number, version))
      draw = buffer.draw(num_prompts=1, responses_per_prompt=NUM_RESPONSES, version=number)
      beta_factor, log_ref_factor = tempering.at(number + 1)
      kept = draw.valid
      batch = make_batch(draw.tokens[kept], draw.log_mu[kept], draw.log_ref[kept] * log_ref_factor, draw.rewards[kept])
      if len(batch.rewards) < NUM_RESPONSES:  # the first step: duplicates are left out
        continue
      table, state = step(table, state, batch, np.float32(BETA * beta_factor))
    else:
      beta = BETA if method == "reinforce_kl" else 0.0
      table, state = step(table, state, make_batch(tokens, log_mu, log_ref, rewards), np.float32(beta))
  found.append({"step": steps, **{k: float(v) for k, v in measures(table, toxicity, modes).items()}})
  return found


def _group(
  tokens: np.ndarray, log_mu: np.ndarray, log_ref: np.ndarray, rewards: np.ndarray, occurrence: int, version: int
) -> RolloutGroup:
  number = len(tokens)
  return RolloutGroup(
    prompt_id=0, occurrence=occurrence, attempt=0, prompt=np.zeros(1, np.int32), tokens=tokens,
    lengths=np.full(number, LENGTH, np.int32), log_mu=log_mu, log_ref=log_ref,
    versions=np.full(tokens.shape, version, np.int32), rewards=rewards.astype(np.float32),
    truncated=np.zeros(number, bool), ref_version=0, temperature=1.0,
  )  # fmt: skip


def at_levels(points: list[dict[str, float]]) -> dict[str, float | None]:
  """The distance when a share toxic is first reached, by that share; None where it never is."""
  return {str(level): next((p["distance"] for p in points if p["toxic"] >= level), None) for level in LEVELS}


def run(*, seeds: int, steps: int, every: int) -> dict[str, Any]:
  """Every method with every seed: its points, the distance at equal shares toxic, and means over seeds."""
  results: dict[str, Any] = {"seeds": seeds, "steps": steps, "beta": BETA, "methods": {}}
  for method in METHODS:
    runs = [train(method, seed, steps, every) for seed in range(seeds)]
    levels = [at_levels(points) for points in runs]
    mean = lambda values: float(np.mean(values)) if all(value is not None for value in values) else None
    results["methods"][method] = {
      "distance_at_toxic": {level: mean([found[level] for found in levels]) for level in levels[0]},
      "seeds_reaching": {level: sum(found[level] is not None for found in levels) for level in levels[0]},
      "end": {name: float(np.mean([points[-1][name] for points in runs])) for name in ("toxic", "distance", "modes")},
      "end_by_seed": [points[-1] for points in runs], "points": runs,
    }
  return results


def plot(results: dict[str, Any], path: pathlib.Path) -> None:
  """The way of every seed through share toxic and distance."""
  import matplotlib

  matplotlib.use("agg")
  import matplotlib.pyplot as plt

  figure, axes = plt.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
  for color, (method, found) in zip(("tab:blue", "tab:red", "tab:orange"), results["methods"].items()):
    for seed, points in enumerate(found["points"]):
      label = {"label": method} if seed == 0 else {}
      axes[0].plot([p["toxic"] for p in points], [p["distance"] for p in points], color=color, alpha=0.7, **label)
      axes[1].plot([p["step"] for p in points], [p["modes"] for p in points], color=color, alpha=0.7, **label)
  axes[0].set(xlabel="share toxic", ylabel="mean distance of two samples")
  axes[1].set(xlabel="step", ylabel=f"modes found, of {NUM_MODES}")
  axes[0].legend()
  figure.savefig(path, dpi=110)
  plt.close(figure)


def main(argv: list[str] | None = None) -> dict[str, Any]:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--out", type=pathlib.Path, required=True, help="file for the results, as JSON; a .png beside it")
  parser.add_argument("--seeds", type=int, default=5)
  parser.add_argument("--steps", type=int, default=600)
  args = parser.parse_args(argv)
  results = run(seeds=args.seeds, steps=args.steps, every=2)
  args.out.parent.mkdir(parents=True, exist_ok=True)
  short = {method: {k: v for k, v in found.items() if k != "points"} for method, found in results["methods"].items()}
  args.out.write_text(json.dumps({**results, "methods": short}, indent=2) + "\n")
  print(json.dumps({method: {k: found[k] for k in ("distance_at_toxic", "end")} for method, found in short.items()},
                   indent=2))
  if importlib.util.find_spec("matplotlib") is None:
    print("no plot: matplotlib is not installed", flush=True)
  else:
    plot(results, args.out.with_suffix(".png"))
  return results


if __name__ == "__main__":
  main()

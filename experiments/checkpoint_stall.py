"""What publishing weights and saving a checkpoint cost the trainer, at the size of a 135M-parameter model with a 2 GB
replay buffer.

    python experiments/checkpoint_stall.py --out experiments/results/checkpoint_stall.json

Shapes are those of SmolLM2-135M, parameters random, AdamW's state as it would be; trainer and searcher are two (on CPU:
virtual) devices. Rows are spilled to segments as they arrive, as a run does after every step. Reported are the seconds
for which the trainer's thread is held by `WeightStore.publish` and by taking and handing over a checkpoint, the first
one included, how long each then goes on in the background, and the shares of a step's time and of the time between two
checkpoints. A step's time is given by --step_secs, or else measured: forward and backward of one micro-batch here,
times the micro-batches of a step.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # so that it runs as a file, too

STEP_ROWS, STEP_TOKENS = 140, 256  # responses of a step and their length: the paper's 7 x 20, a short answer
MICRO_ROWS = 2
STEP_PROMPTS, CHECKPOINT_STEPS = 7, 50  # new groups of a step; steps between checkpoints


def main(argv: list[str] | None = None) -> dict:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--out", type=pathlib.Path, required=True, help="file for the results, as JSON")
  parser.add_argument("--buffer_gb", type=float, default=2.0, help="tokens and log-probabilities in the buffer")
  parser.add_argument("--repeats", type=int, default=4, help="publishes and checkpoints that are timed")
  parser.add_argument("--step_secs", type=float, default=0.0, help="of an optimizer step; 0: measured")
  args = parser.parse_args(argv)
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  import jax

  jax.config.update("jax_num_cpu_devices", 2)
  results = measure(args.buffer_gb, args.repeats, args.step_secs)
  args.out.parent.mkdir(parents=True, exist_ok=True)
  args.out.write_text(json.dumps(results, indent=2) + "\n")
  print(json.dumps(results, indent=2))
  return results


def measure(buffer_gb: float, repeats: int, step_secs: float) -> dict:
  import jax
  import jax.numpy as jnp

  from experiments.bench_buffer import Feed
  from tba_jax import learner, optimizers
  from tba_jax.checkpoints.run_state import RunState, Snapshot
  from tba_jax.models import transformer
  from tba_jax.models.variants import new_model_config
  from tba_jax.replay.buffer import ReplayBuffer
  from tba_jax.weights import WeightStore

  cfg = new_model_config(hidden_size=576, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64, mlp_size=1536,
                         max_positions=2048, tie_embeddings=True, rope_theta=1e5, norm_eps=1e-5, vocab_size=49152)
  trainer_device, searcher_device = jax.devices()[:2]
  with jax.default_device(trainer_device):
    params = jax.jit(lambda key: transformer.init_params(cfg, key, jnp.float32))(jax.random.key(0))
    schedule = optimizers.make_schedule("constant", learning_rate=1e-5, warmup_steps=0)
    state = learner.init_train_state(params, optimizers.make_optimizer("adamw", schedule=schedule, clip_norm=1.0))
  if not step_secs:
    rows = jnp.ones((MICRO_ROWS, STEP_TOKENS), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(STEP_TOKENS), rows.shape)
    score = lambda p: learner.token_logprobs(p, cfg, rows, positions, rows, temperature=1.0, dtype=jnp.float32,
                                             remat="none", chunk_tokens=1024)[0].sum()
    grad = jax.jit(jax.grad(score))
    jax.block_until_ready(grad(state.params))
    began = time.monotonic()
    jax.block_until_ready(grad(state.params))
    step_secs = (time.monotonic() - began) * STEP_ROWS / MICRO_ROWS
  tokens = 512
  buffer = ReplayBuffer(capacity=int(buffer_gb * 1e9 / (12 * tokens / 2)) + 1000, capacity_per_prompt=100,
                        max_prompt_tokens=128, max_response_tokens=tokens, seed=0, recent_fraction=0.5)
  feed = Feed(tokens)
  convert = jax.jit(lambda tree: transformer.unstack(jax.tree.map(lambda x: x, tree)))
  weights = WeightStore(convert, [searcher_device], timeout_secs=3600.0)
  publish, published, taken, written = [], [], [], []
  with tempfile.TemporaryDirectory() as folder:
    run_state = RunState(folder, keep=1)
    adding = fill(buffer, feed, run_state, buffer_gb)
    for step in range(repeats + 1):
      began = time.monotonic()
      weights.publish(state.params, step)
      publish.append(time.monotonic() - began)
      weights.join()
      published.append(time.monotonic() - began)
      for _ in range(STEP_PROMPTS * CHECKPOINT_STEPS):
        buffer.add(feed.next(1_000_000, step))
        run_state.spill(buffer, int(buffer.stats()["added"]))
      began = time.monotonic()
      arrays = buffer.state_dict(missing=run_state.missing)
      run_state.save(Snapshot(step, state, None, arrays["arrays"], {"buffer": arrays["scalars"]}))
      taken.append(time.monotonic() - began)
      run_state.join()
      written.append(time.monotonic() - began)
      print(f"publish {publish[-1]:.3f} s of {published[-1]:.2f}, checkpoint {taken[-1]:.3f} s of {written[-1]:.2f}",
            flush=True)
    run_state.close()
  median = lambda values: sorted(values[1:])[len(values[1:]) // 2]  # the first publish compiles
  between = CHECKPOINT_STEPS * step_secs
  return {
      "step_seconds": step_secs, "buffer_gb": buffer_gb, "live_rows": int(buffer.stats()["live_rows"]),
      "publish_stall_seconds": median(publish), "publish_seconds": median(published),
      "publish_stall_share": median(publish) / step_secs,
      "checkpoint_stall_seconds": median(taken), "checkpoint_seconds": median(written),
      "first_checkpoint_stall_seconds": taken[0], "first_checkpoint_seconds": written[0],
      "checkpoint_stall_share": median(taken) / between, "first_checkpoint_stall_share": taken[0] / between,
      "steps_between_checkpoints": CHECKPOINT_STEPS, **adding, "load_average": os.getloadavg()[0],
  }


def fill(buffer, feed, run_state, buffer_gb: float) -> dict[str, float]:
  """Adds groups until the buffer's tokens and log-probabilities have so many bytes, spilling as they come. Returns how
  long an addition waits for a buffer that is being read."""
  num_tokens, secs = 0, []
  while 12 * num_tokens < buffer_gb * 1e9:
    group = feed.next(1_000_000, 0)
    num_tokens += int(group.lengths.sum())
    began = time.monotonic()
    buffer.add(group)
    secs.append(time.monotonic() - began)
    run_state.spill(buffer, int(buffer.stats()["added"]))
  while run_state.is_spilling():  # rows come faster here than in any run
    time.sleep(0.05)
  run_state.spill(buffer, int(buffer.stats()["added"]))
  while run_state.is_spilling():
    time.sleep(0.05)
  secs.sort()
  return {"add_while_spilling_median_seconds": secs[len(secs) // 2],
          "add_while_spilling_p999_seconds": secs[len(secs) * 999 // 1000]}


if __name__ == "__main__":
  main()

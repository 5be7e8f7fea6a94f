"""A program of `world_test.py`: a process of a trainer that several share.

python two_processes.py PORT NUM_PROCESSES PROCESS_ID FOLDER: the head writes to FOLDER/head.npz what its trainer did,
the others end as they are ordered to.
"""

from __future__ import annotations

import pathlib
import sys

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

import runs
from tba_jax import build, follow, sharding
from tba_jax.checkpoints.run_state import RunState, Snapshot, make_copy
from tba_jax.models import transformer
from tba_jax.models.variants import ModelConfig
from tba_jax.runtime.lead import Lead, LeadTrainer
from tba_jax.runtime.trainer import Trainer
from tba_jax.runtime.world import meet
from tba_jax.types import Draw
from tba_jax.weights import WeightStore

LEARNING_RATE, POISONED = 0.1, 1  # the step that has one


def config() -> ConfigDict:
  """Plain SGD, so that a step shows its gradient; beta moves with the number of updates, so that all have to agree on
  it."""
  return runs.short_config(
      train__optimizer="sgd", train__schedule="constant", train__warmup_steps=0, train__learning_rate=LEARNING_RATE,
      train__clip_norm=1e9, model__architecture__num_layers=1, loss__beta_init=0.05,
      loss__beta_final=0.5, loss__beta_decay_steps=5)


def make_cfg(config: ConfigDict) -> ModelConfig:
  return build.model_config(config)


def first_params(config: ConfigDict) -> dict:
  """Version 0, in numpy."""
  return jax.device_get(jax.jit(lambda key: transformer.init_params(make_cfg(config), key))(jax.random.key(3)))


def draw(config: ConfigDict, step: int) -> Draw:
  """16 responses to 4 prompts, of other lengths in each step; at one step the last response, which one process alone
  has, has a reference that is not finite."""
  rng = np.random.default_rng(step)
  vocab_size = make_cfg(config).vocab_size
  lengths = rng.integers(1, 19, 16)
  real = np.arange(18) < lengths[:, None]
  log_ref = np.where(real, rng.normal(-2.0, 0.3, real.shape), 0.0).astype(np.float32)
  if step == POISONED:
    log_ref[15, 0] = np.inf
  return Draw(
      prompts=rng.integers(0, vocab_size, (16, 22)).astype(np.int32), prompt_lengths=rng.integers(5, 23, 16),
      tokens=np.where(real, rng.integers(0, vocab_size, real.shape), 0).astype(np.int32), lengths=lengths,
      log_mu=np.where(real, -2.0, 0.0).astype(np.float32), log_ref=log_ref, versions=np.zeros(16, np.int64),
      rewards=rng.uniform(0.0, 1.0, 16).astype(np.float32), truncated=np.zeros(16, bool),
      group_ids=np.repeat(np.arange(4), 4).astype(np.int32), valid=np.ones(16, bool), weights=np.ones(16, np.float32),
      prompt_ids=np.repeat(np.arange(4), 4), occurrences=np.arange(16), rows=np.arange(16))


def train(trainer: Trainer, config: ConfigDict, steps: range) -> list[dict[str, float]]:
  """The metrics of some steps."""
  found = []
  for step in steps:
    trainer.dispatch(trainer.prepare(draw(config, step)))
    found.append(trainer.finish().metrics)
  return found


def lead_on(config: ConfigDict, lead: Lead, mesh: Mesh, folder: pathlib.Path) -> dict[str, np.ndarray]:
  """Two steps, a checkpoint, two more; from the checkpoint these two again; weights for a searcher."""
  cfg = make_cfg(config)
  lead.expect_params(cfg, np.float32)
  params = lead.place("params", first_params(config), build.abstract_params(cfg, np.float32, mesh))
  lead.begin_training(cfg)
  trainer = build.build_trainer(config, cfg, params, mesh, folder, make=lambda **named: LeadTrainer(lead=lead, **named))
  trainer.compile(16, lambda done, of: None)
  run_state = RunState(folder / "run", keep=1, mesh=lead)
  metrics = train(trainer, config, range(1))
  first = lead.fetch("state", make_copy()((trainer.state, None))[0])()
  metrics += train(trainer, config, range(1, 2))
  run_state.save(Snapshot(2, trainer.state, None, {}, {}))
  metrics += train(trainer, config, range(2, 4))
  run_state.join()
  like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), trainer.state)
  trainer.restore(run_state.restore(like, None).train_state)
  metrics += train(trainer, config, range(2, 4))
  weights = WeightStore(build.make_publish(config), jax.local_devices()[:1], timeout_secs=60.0)
  weights.fetch_by(lead.fetch)
  weights.publish(trainer.state.params, trainer.version, wait=True)
  return summary(first.params, weights.latest(0).params, metrics)


def summary(first: dict, published: dict, metrics: list[dict[str, float]]) -> dict[str, np.ndarray]:
  """Parameters after the first step, those that a searcher got after the last, and what each step measured."""
  trees = {"first": first, "published": published, "metrics": metrics}
  return {sharding.path_name(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(trees)}


def main(port: int, num_processes: int, process_id: int, folder: pathlib.Path) -> int:
  asked = config()
  jax.config.update("jax_num_cpu_devices", 2)
  world = meet(f"127.0.0.1:{port}", num_processes=num_processes, process_id=process_id, identity="",
               command=str, say=lambda text: print(text, flush=True))
  jax.distributed.initialize(world.jax_address, num_processes, process_id)
  mesh = sharding.make_mesh(jax.devices())
  if world.is_head:
    lead = Lead(world, secs=60.0)
    lead.order("begin")
    np.savez(folder / "head.npz", **lead_on(asked, lead, mesh, folder))
    world.close(0, "well done")
    code = 0
  else:
    code = follow.follow(asked, world, lambda: mesh)
    world.goodbye()
  jax.distributed.shutdown()
  return code


if __name__ == "__main__":
  sys.exit(main(*map(int, sys.argv[1:4]), pathlib.Path(sys.argv[4])))

"""Short runs of the real train.py, for the tests of the runtime: a tiny new model on the arithmetic task, rewards that
need no skill."""

from __future__ import annotations

import json
import pathlib

import jax
import numpy as np
import orbax.checkpoint as ocp

from configs import quickstart
from tba_jax import config as config_lib
from tba_jax import train
from tba_jax.runtime.settings import StopFlag
from tba_jax.tasks.arithmetic import ArithmeticTask

# Of a line of metrics: what depends on the clock.
TIMED = ("seconds", "wall_time", "per_second")


def short_config(**changes):
  """quickstart:smoke without fine-tuning, 6 steps; `changes` are dotted keys with __ for dots."""
  config = quickstart.get_config("smoke").unlock()
  config.sft.steps = 0
  config.sample.truncated = "score"  # an untrained model seldom stops
  config.eval.size = 8
  config.checkpoint.every_steps = 0
  config.checkpoint.keep = 2
  for name, value in changes.items():
    *sections, key = name.split("__")
    node = config
    for section in sections:
      node = node[section]
    node[key] = value
  config.lock()
  config_lib.validate(config, num_devices=8, platform="cpu")
  return config


def easy_reward(self, prompt, response_text, *, truncated):
  """Differs between responses of an untrained model and depends on nothing but the text."""
  del self, prompt, truncated
  return (sum(map(ord, response_text)) % 8) / 7


def use_easy_reward(monkeypatch) -> None:
  monkeypatch.setattr(ArithmeticTask, "reward", easy_reward)


def run(config, workdir, stop=None) -> int:
  return train.run(config, str(workdir), stop=stop or StopFlag())


def lines(workdir, name="metrics.jsonl"):
  return [json.loads(line) for line in (pathlib.Path(workdir) / name).read_text().splitlines()]


def untimed(workdir):
  """The lines of metrics.jsonl without what depends on the clock."""
  return [{k: v for k, v in line.items() if not any(word in k for word in TIMED)} for line in lines(workdir)]


def results(workdir):
  return json.loads((pathlib.Path(workdir) / "results.json").read_text())


def child_of(pid: int) -> int:
  """The process that a supervisor started last."""
  (child,) = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
  return int(child)


def assert_same_weights(one, other) -> None:
  """The newest checkpoints hold the same train states, to the bit."""
  found = []
  for workdir in (one, other):
    steps = [path for path in (pathlib.Path(workdir) / "checkpoints").iterdir() if path.name.isdecimal()]
    newest = max(steps, key=lambda path: int(path.name))
    found.append((newest.name, ocp.PyTreeCheckpointer().restore((newest / "train").resolve())))
  assert found[0][0] == found[1][0]
  leaves, others = (jax.tree_util.tree_leaves_with_path(tree) for _, tree in found)
  assert len(leaves) == len(others) > 10
  for (path, leaf), (other_path, other_leaf) in zip(leaves, others, strict=True):
    assert path == other_path and np.asarray(leaf).tobytes() == np.asarray(other_leaf).tobytes(), path

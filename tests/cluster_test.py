"""Runs on a real Ray cluster, of processes on this machine: the same bits as the local runtime, a searcher's process
that is killed, a node that joins and leaves."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest

import runs

pytestmark = pytest.mark.slow
os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # a cluster of this machine alone, for the length of a test
ray = pytest.importorskip("ray", reason="needs Ray: pip install -r requirements-cluster.txt")

REPO = pathlib.Path(__file__).resolve().parent.parent
SMALL = ("--config.sft.steps=0", "--config.sample.truncated=score", "--config.eval.size=8",
         "--config.devices.trainer=1")


class Process:
  """A run of the command in a process of its own."""

  def __init__(self, workdir, *flags):
    self.workdir, self._log = workdir, workdir.with_suffix(".log")
    cache = {"JAX_COMPILATION_CACHE_DIR": str(workdir.parent / "xla"),
             "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1"}
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", **cache}
    command = [sys.executable, "-m", "tba_jax.main", "--config=configs/quickstart.py:smoke", f"--workdir={workdir}",
               *SMALL, *flags]
    self._process = subprocess.Popen(command, cwd=REPO, env=env, stderr=self._log.open("w"), stdout=subprocess.DEVNULL)

  @property
  def pid(self) -> int:
    return self._process.pid

  def log(self) -> str:
    return self._log.read_text()

  def wait_for(self, what, secs=240.0) -> float:
    """Seconds until `what()` is true; fails if the process ends before."""
    began = time.monotonic()
    while not what():
      assert self._process.poll() is None, self.log()
      assert time.monotonic() - began < secs, self.log()
      time.sleep(0.1)
    return time.monotonic() - began

  def step(self) -> int:
    path = self.workdir / "metrics.jsonl"
    text = path.read_text().splitlines() if path.exists() else []
    return max((json.loads(line)["step"] for line in text if line.endswith("}")), default=0)

  def end(self) -> int:
    try:
      return self._process.wait(timeout=300)
    finally:
      self._process.kill()


def _actors() -> list[int]:
  """Processes of searchers."""
  found = []
  for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    try:
      if path.read_bytes().startswith(b"ray::_Actor"):
        found.append(int(path.parent.name))
    except OSError:
      continue
  return found


def test_lockstep_on_ray_is_the_local_run_bit_for_bit(tmp_path):
  lockstep = ("--config.runtime.mode=lockstep", "--config.runtime.lag=1", "--config.sync.every_steps=1",
              "--config.buffer.dedup=False")
  assert Process(tmp_path / "local", *lockstep).end() == 0
  remote = Process(tmp_path / "ray", *lockstep, "--config.runtime.backend=ray")
  assert remote.end() == 0, remote.log()
  assert runs.untimed(tmp_path / "ray") == runs.untimed(tmp_path / "local")


def test_a_trainer_that_is_killed_comes_again_and_the_run_goes_on_by_itself_to_the_same_weights(tmp_path):
  lockstep = ("--config.runtime.mode=lockstep", "--config.runtime.lag=1", "--config.sync.every_steps=1",
              "--config.buffer.dedup=False", "--config.train.steps=14", "--config.checkpoint.every_steps=2")
  run = Process(tmp_path / "ray", *lockstep, "--config.runtime.backend=ray")
  for step in (5, 10):
    run.wait_for(lambda: run.step() >= step)
    actors, killed = set(_actors()), time.monotonic()
    os.kill(runs.child_of(run.pid), signal.SIGKILL)
    run.wait_for(lambda: not actors & set(_actors()))
    print(f"searchers of the killed trainer were gone after {time.monotonic() - killed:.1f} s")
    run.wait_for(lambda: run.log().count("resumed at step") == (1 if step == 5 else 2))
    print(f"resumed after {time.monotonic() - killed:.1f} s")
  assert run.end() == 0, run.log()
  assert run.log().count("was killed by SIGKILL") == 2
  whole = Process(tmp_path / "local", *lockstep)
  assert whole.end() == 0, whole.log()
  assert runs.untimed(tmp_path / "ray") == runs.untimed(tmp_path / "local")
  runs.assert_same_weights(tmp_path / "ray", tmp_path / "local")


def test_a_trainer_of_two_processes_has_its_searchers_on_ray(tmp_path):
  lockstep = ("--config.runtime.mode=lockstep", "--config.runtime.lag=1", "--config.sync.every_steps=1",
              "--config.buffer.dedup=False", "--config.devices.trainer=2", "--config.devices.searchers=1",
              "--config.train.steps=2", "--config.eval.size=2", "--config.eval.kl_prompts=0")
  with socket.create_server(("127.0.0.1", 0)) as server:
    port = server.getsockname()[1]
  together = ("--config.runtime.backend=ray", f"--coordinator=127.0.0.1:{port}", "--num_processes=2")
  follower = Process(tmp_path / "follower", *lockstep, *together, "--process_id=1")
  head = Process(tmp_path / "head", *lockstep, *together, "--process_id=0")
  assert head.end() == 0, head.log()
  assert follower.end() == 0, follower.log()
  assert not (tmp_path / "follower").exists()
  assert Process(tmp_path / "local", *lockstep).end() == 0
  for got, expected in zip(runs.untimed(tmp_path / "head"), runs.untimed(tmp_path / "local"), strict=True):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
      assert got[name] == (pytest.approx(value, rel=1e-3, abs=1e-5) if isinstance(value, float) else value), name


def test_a_searcher_that_is_killed_is_noticed_and_replaced(tmp_path):
  run = Process(tmp_path / "run", "--config.runtime.backend=ray", "--config.train.steps=400",
                "--config.buffer.max_uses=1", "--config.runtime.searcher_restarts=2")
  run.wait_for(lambda: run.step() > 5 and "searcher 1 is ready" in run.log())
  os.kill(_actors()[-1], signal.SIGKILL)
  assert run.wait_for(lambda: "remote.HostDied" in run.log()) < 10.0
  assert run.end() == 0, run.log()
  found = runs.results(tmp_path / "run")
  assert (found["searcher_restarts"], found["steps"]) == (1, 400)


def test_a_node_joins_and_leaves_while_the_run_goes_on(tmp_path):
  from ray.cluster_utils import Cluster

  cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
  try:
    run = Process(tmp_path / "run", "--config.runtime.backend=ray", f"--config.runtime.ray_address={cluster.address}",
                  "--config.train.steps=4000", "--config.buffer.max_uses=1")
    run.wait_for(lambda: run.step() > 5)
    assert "searcher 1 is ready" not in run.log()
    node = cluster.add_node(num_cpus=1)
    run.wait_for(lambda: "searcher 1 is ready" in run.log())
    step = run.step()
    run.wait_for(lambda: run.step() > step + 5)
    cluster.remove_node(node)
    run.wait_for(lambda: "remote.HostDied" in run.log())
    step = run.step()
    run.wait_for(lambda: run.step() > step + 20)
    run._process.send_signal(signal.SIGTERM)
    assert run.end() == 0, run.log()
    assert "the same command resumes from" in run.log()
  finally:
    cluster.shutdown()


def _process_of(workdir, process_id: int) -> int:
  """A process of the trainer on a slice."""
  for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    with contextlib.suppress(OSError):
      arguments = path.read_bytes().decode(errors="replace").split("\0")
      if f"--workdir={workdir}" in arguments and f"--process_id={process_id}" in arguments:
        return int(path.parent.name)
  raise AssertionError("there is none")


def test_a_trainer_on_a_slice_of_the_cluster_goes_on_when_one_of_its_processes_is_killed(tmp_path):
  from ray._private.accelerators.tpu import infer_tpu_pod_type_from_topology
  from ray.cluster_utils import Cluster

  pod = infer_tpu_pod_type_from_topology("2x2x2", "TPU-V5P")
  cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
  try:
    nodes = {}
    for worker_id in ("1", "0"):  # the first node of the slice is its second host
      head = {f"TPU-{pod}-head": 1} if worker_id == "0" else {}
      nodes[worker_id] = cluster.add_node(
          num_cpus=1, resources={"TPU": 4, **head}, env_vars={"TPU_NAME": "one"}, labels={
              "ray.io/tpu-slice-name": "one", "ray.io/tpu-worker-id": worker_id, "ray.io/tpu-pod-type": pod})
    flags = ("--config.runtime.mode=lockstep", "--config.runtime.lag=1", "--config.sync.every_steps=1",
             "--config.buffer.dedup=False", "--config.devices.trainer=2", "--config.devices.searchers=1",
             "--config.train.steps=4000", "--config.checkpoint.every_steps=2")
    start = lambda: Process(tmp_path / "run", *flags, "--config.runtime.backend=ray", "--trainer_slice=v5p:2x2x2",
                            f"--config.runtime.ray_address={cluster.address}")
    run = start()
    run.wait_for(lambda: run.step() >= 4)
    os.kill(_process_of(tmp_path / "run", 1), signal.SIGKILL)
    run.wait_for(lambda: "resumed at step" in run.log())
    step = run.step()
    run.wait_for(lambda: run.step() > step + 5)
    os.kill(run.pid, signal.SIGTERM)
    assert run.end() == 0, run.log()
    assert "one of the trainer's 2 processes on the slice was killed by SIGKILL" in run.log()
    assert "by SIGTERM; the same command resumes from" in run.log()
    run = start()
    run.wait_for(lambda: run.step() > step + 10)
    cluster.remove_node(nodes["1"])  # and does not come back
    run.wait_for(lambda: "it is started again" in run.log())
    time.sleep(5.0)
    os.kill(run.pid, signal.SIGTERM)
    assert run.end() == 0, run.log()
    steps = [line["step"] for line in runs.lines(tmp_path / "run") if "loss" in line]
    assert steps == list(range(1, len(steps) + 1))
  finally:
    cluster.shutdown()

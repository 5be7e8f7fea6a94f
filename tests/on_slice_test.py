"""What a trainer's processes on a TPU slice are told. Those processes on Ray nodes: `cluster_test.py`."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

from tba_jax.runtime import on_slice
from tba_jax.runtime.on_slice import Place, Slice

REPO = pathlib.Path(__file__).resolve().parent.parent


def test_a_slice_is_named_by_kind_and_topology():
  assert on_slice.parse("V6e:4x4") == Slice("v6e", "4x4")
  assert str(on_slice.parse("v5p:2x2x2")) == "v5p:2x2x2"
  assert on_slice.parse("v5e:4x4") == Slice("v5litepod", "4x4")
  for wrong in ("v6e", "v6e:16", "4x4", "v6e:4x4x"):
    with pytest.raises(ValueError, match="must be KIND:TOPOLOGY, for example v6e:4x4"):
      on_slice.parse(wrong)


def test_processes_have_the_numbers_of_their_hosts_in_the_slice():
  assert on_slice.order([Place("c", 1, "2"), Place("a", 1, "0"), Place("k", 1, "10"), Place("b", 1, "1")]) == [
      1, 3, 0, 2]
  assert on_slice.order([Place("b", 1, ""), Place("a", 1, "")]) == [0, 1]
  with pytest.raises(ValueError, match="numbers 1, 1; each must have its own"):
    on_slice.order([Place("a", 1, "1"), Place("b", 1, "1")])


def test_each_host_starts_the_command_as_its_process():
  asked = ["--config=c.py", "--trainer_slice=v6e:4x4", "--restarts", "5", "--workdir=run"]
  assert on_slice.command(asked, address="h:1", num_processes=4, process_id=2) == [
      "-m", "tba_jax.main", "--config=c.py", "--workdir=run", "--coordinator=h:1", "--num_processes=4",
      "--process_id=2"]
  assert on_slice.command(asked, address="h:1", num_processes=1, process_id=0) == [
      "-m", "tba_jax.main", "--config=c.py", "--workdir=run"]


def test_a_process_has_the_hosts_environment_and_what_concerns_jax_of_the_commands():
  host = {"PATH": "/host", "TPU_WORKER_ID": "3", "TPU_VISIBLE_CHIPS": "0,1", "RAY_JOB_ID": "7", "XLA_FLAGS": "--host"}
  own = {"PATH": "/own", "TPU_WORKER_ID": "0", "XLA_FLAGS": "--own", "JAX_PLATFORMS": "tpu", "HOME": "/own"}
  assert on_slice.environment(own, of_worker=host) == {
      "PATH": "/host", "TPU_WORKER_ID": "3", "XLA_FLAGS": "--own", "JAX_PLATFORMS": "tpu", on_slice.SEATED: "1"}


def test_a_slice_is_asked_for_a_bundle_a_host():
  pytest.importorskip("ray", reason="needs Ray: pip install -r requirements-cluster.txt")
  assert on_slice.bundles(Slice("v6e", "4x4")) == (4, {"CPU": 1, "TPU": 4})
  assert on_slice.bundles(on_slice.parse("v5e:4x4")) == (4, {"CPU": 1, "TPU": 4})
  assert on_slice.bundles(on_slice.parse("v5p:2x2x2")) == (2, {"CPU": 1, "TPU": 4})
  with pytest.raises(ValueError, match="v9"):
    on_slice.bundles(Slice("v9", "4x4"))


def test_a_dry_run_prints_the_processes():
  pytest.importorskip("ray", reason="needs Ray: pip install -r requirements-cluster.txt")
  run = subprocess.run(
      [sys.executable, "-m", "tba_jax.main", "--config=configs/gsm8k.py", "--config.runtime.backend=ray",
       "--config.runtime.ray_address=auto", "--trainer_slice=v6e:4x4", "--dry_run"],
      cwd=REPO, capture_output=True, text=True, timeout=120)
  lines = run.stdout.splitlines()
  assert run.returncode == 0 and lines[0] == (
      "trainer: a slice v6e:4x4, 4 processes, one a host with {'CPU': 1, 'TPU': 4}"), run.stderr
  assert lines[4].endswith("--coordinator=HOST0:PORT --num_processes=4 --process_id=3") and len(lines) == 5

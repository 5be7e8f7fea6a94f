"""Searchers behind a connection: the results of searchers in the trainer's process, and what happens when one dies.
Here the hosts are in this process, and everything that would travel is copied byte by byte."""

from __future__ import annotations

import contextlib
import pickle

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tba_jax import build, build_remote, train
from tba_jax.checkpoints import run_state
from tba_jax.models import transformer
from tba_jax.runtime import cluster
from tba_jax.runtime.parcels import pack, unpack
from tba_jax.runtime.remote import HostDied
import runs

pytestmark = pytest.mark.usefixtures("compile_once", "easy_reward")


# --- Parcels ---


@pytest.mark.parametrize("chunk_bytes", [1, 7, 64, 10_000])
def test_a_tree_arrives_as_it_was_sent(chunk_bytes):
  rng = np.random.default_rng(0)
  tree = {
      "layers": ({"w": rng.normal(size=(3, 5)).astype(ml_dtypes.bfloat16)}, {"w": rng.integers(0, 9, (7,), np.int8)}),
      "table": jnp.asarray(rng.normal(size=(4, 2, 3)), jnp.float32), "empty": np.zeros((0, 4), np.float32),
      "scalar": np.float64(2.5), "transposed": rng.normal(size=(4, 6)).T,
  }
  sent: list[bytes] = []
  parcel = pickle.loads(pickle.dumps(
      pack(tree, lambda chunk: sent.append(chunk.tobytes()) or len(sent) - 1, chunk_bytes=chunk_bytes)))
  assert all(len(chunk) == chunk_bytes for chunk in sent[:-1]) and 0 < len(sent[-1]) <= chunk_bytes
  chunks = [np.frombuffer(sent[number], np.uint8) for number in parcel.chunks]
  found = unpack(parcel, chunks)
  assert jax.tree.structure(found) == jax.tree.structure(tree)
  for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(tree), strict=True):
    assert ours.dtype == theirs.dtype
    np.testing.assert_array_equal(ours, np.asarray(theirs))


def test_a_chunk_that_was_damaged_is_refused():
  parcel = pack({"w": np.arange(100, dtype=np.float32)}, np.copy, chunk_bytes=128)
  parcel.chunks[2][5] ^= 1
  with pytest.raises(ValueError, match="chunk 2 of 4 of a parcel arrived with other bytes than were sent"):
    unpack(parcel, parcel.chunks)


# --- Runs ---


class HereConnection:
  """A host in this process. Dies at the turns named, counted over those that hand prompts out: what it does at another
  one depends on the clock."""

  def __init__(self, spec, *, dies_at=()):
    self._spec, self._dies_at, self._num_handed = pickle.dumps(spec), set(dies_at), 0
    self.num_begun = 0
    self._host = None

  def begin(self, reference, weights):
    self.num_begun += 1
    self._host = build_remote.make_host(pickle.loads(self._spec), _copied(reference), list)
    self._prepared = self._host.prepare(_copied(weights))

  def poll(self):
    return self._prepared

  def describe(self):
    return "nothing"

  def call(self, method, *arguments):
    handed = method == "turn" and bool(arguments[0].occurrences)
    self._num_handed += handed
    if handed and self._num_handed in self._dies_at:
      self._host = None
      raise HostDied("the test")
    return _copied(getattr(self._host, method)(*_copied(arguments)))

  def end(self):
    self._host = None


def _copied(value):
  return pickle.loads(pickle.dumps(value))


@pytest.fixture
def connections(monkeypatch):
  """Makes runs with backend=ray connect to hosts here; the connections by their searcher, with `deaths` to be set."""
  made: dict[int, HereConnection] = {}
  made_deaths: dict[int, tuple[int, ...]] = {}

  @contextlib.contextmanager
  def here(config, counts, num_processes):
    def connect(spec):
      made[spec.index] = HereConnection(spec, dies_at=made_deaths.get(spec.index, ()))
      return made[spec.index]

    yield np.copy, connect

  monkeypatch.setattr(train, "_cluster", here)
  return made, made_deaths


def _remote_config(monkeypatch, **changes):
  monkeypatch.setattr("tba_jax.config_rules._has_module", lambda name: True)
  return runs.short_config(**dict(runtime__backend="ray", devices__trainer=1) | changes)


def _params(workdir):
  cfg, _ = build.read_model_folder(workdir / "model")
  return jax.tree.leaves(run_state.load_params(workdir, transformer.abstract_params(cfg))[1])


@pytest.mark.parametrize("changes", [
    pytest.param(dict(runtime__lag=1, train__steps=4), marks=pytest.mark.slow),
    dict(reference__reset_every_steps=2, loss__name="tb_vargrad", train__steps=4),
    pytest.param(dict(lora__pattern="layers/attn/[qv]", lora__rank=4, lora__alpha=8.0, train__steps=3),
                 marks=pytest.mark.slow),
], ids=["lag", "reference", "lora"])
def test_lockstep_with_hosts_is_the_local_run_bit_for_bit(tmp_path, monkeypatch, connections, changes):
  changes = dict(runtime__mode="lockstep", eval__every_steps=2) | changes
  assert runs.run(runs.short_config(**changes), tmp_path / "local") == 0
  assert runs.run(_remote_config(monkeypatch, **changes), tmp_path / "remote") == 0
  assert connections[0][0].num_begun == connections[0][1].num_begun == 1
  own = ("sampling_programs",)
  ours, theirs = (runs.untimed(tmp_path / name) for name in ("remote", "local"))
  assert [{k: v for k, v in line.items() if k not in own} for line in ours] == theirs
  for x, y in zip(_params(tmp_path / "remote"), _params(tmp_path / "local"), strict=True):
    np.testing.assert_array_equal(x, y)
  spans = {(line["actor"], line["kind"]) for line in runs.lines(tmp_path / "remote", "timeline.jsonl")}
  assert {(f"searcher{i}", kind) for i in (0, 1) for kind in ("decode", "grade", "score")} <= spans


def test_a_host_that_dies_is_replaced_and_its_prompts_come_again(tmp_path, monkeypatch, connections):
  made, deaths = connections
  deaths[0] = (1,)  # the one that a run waits for at its start: the other may come when all is done
  # Each rollout once: the trainer waits for new ones, and so for those that come again, which are handed out first.
  config = _remote_config(
      monkeypatch, train__steps=12, runtime__searcher_restarts=1, buffer__max_uses=1, eval__every_steps=0)
  assert runs.run(config, tmp_path) == 0
  assert made[0].num_begun == 2 and made[1].num_begun == 1
  found = runs.results(tmp_path)
  assert (found["searcher_restarts"], found["steps"], found["late_groups"]) == (1, 12, 0)
  arrived = [event for event in runs.lines(tmp_path, "consumption.jsonl") if event["event"] == "group"]
  assert found["rollouts"] >= 4 * sum(event["kept"] for event in arrived)  # those of the dead host are counted too
  assert any(event["attempt"] == 1 for event in arrived)


def test_a_host_that_dies_too_often_stops_the_run_and_it_resumes(tmp_path, monkeypatch, connections, capfd):
  made, deaths = connections
  deaths[0] = (1,)
  config = _remote_config(monkeypatch, train__steps=6, runtime__searcher_restarts=0, eval__every_steps=0)
  assert runs.run(config, tmp_path) == 1
  assert "searcher 0 raised HostDied: the test" in capfd.readouterr().err
  deaths.clear()
  assert runs.run(config, tmp_path) == 0
  assert runs.results(tmp_path)["steps"] == 6


def test_what_a_reward_says_of_an_evaluation_comes_back_too(tmp_path, monkeypatch, connections):
  make_reward = build.make_reward

  class Measuring:

    def __init__(self, reward):
      self._reward = reward

    def __call__(self, prompt, responses):
      return self._reward(prompt, responses)

    def measure(self, texts):
      return {"letters": float(sum(map(len, texts)))}

  monkeypatch.setattr(build, "make_reward", lambda *args, for_eval: Measuring(make_reward(*args, for_eval=for_eval)))
  changes = dict(runtime__mode="lockstep", train__steps=1, eval__every_steps=0)
  assert runs.run(runs.short_config(**changes), tmp_path / "local") == 0
  assert runs.run(_remote_config(monkeypatch, **changes), tmp_path / "remote") == 0
  ours, theirs = (runs.results(tmp_path / name)["letters_after"] for name in ("remote", "local"))
  assert ours == theirs > 0


def test_a_host_with_other_prompts_is_refused(tmp_path, monkeypatch, connections):
  config = _remote_config(monkeypatch, runtime__mode="lockstep")
  checksum = build_remote.checksum_of_prompts
  monkeypatch.setattr(build_remote, "checksum_of_prompts", lambda task: checksum(task) ^ next(flips))
  flips = iter([0, 1])
  with pytest.raises(ValueError, match="the prompts of task arithmetic on the machine of searcher 0 are not those"):
    runs.run(config, tmp_path)


# --- Placement ---


def test_what_a_process_is_told_of_its_devices():
  own = {"JAX_COMPILATION_CACHE_DIR": "/cache", "HOME": "/home/me"}
  assert cluster.environment("cpu", 2, own=own) == {
      "JAX_COMPILATION_CACHE_DIR": "/cache", "JAX_PLATFORMS": "cpu",
      "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
  tpu = cluster.environment("tpu", 4, own={})
  assert (tpu["TPU_PROCESS_BOUNDS"], tpu["TPU_CHIPS_PER_PROCESS_BOUNDS"]) == ("1,1,1", "2,2,1")
  assert "TPU_VISIBLE_CHIPS" not in tpu  # Ray's to say
  with pytest.raises(ValueError, match="devices.per_searcher=3 TPU chips are no part of a host; use one of 1, 2, 4, 8"):
    cluster.environment("tpu", 3, own={})
  mine = {"TPU_PROCESS_BOUNDS": "set by hand"}
  cluster.keep_to_this_host(4, mine)
  assert (mine["TPU_PROCESS_BOUNDS"], mine["TPU_CHIPS_PER_PROCESS_BOUNDS"]) == ("set by hand", "2,2,1")
  nothing = {}
  cluster.keep_to_this_host(0, nothing)
  assert nothing == {}
  assert cluster.resources("tpu", 4) == {"num_cpus": 1, "resources": {"TPU": 4}}
  assert cluster.resources("gpu", 2)["num_gpus"] == 2

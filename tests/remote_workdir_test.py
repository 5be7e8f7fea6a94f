"""Workdirs in a bucket, against one that is a local folder with an object store's manners (tests/fake_bucket.py)."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import threading
import time

import pytest

import fake_bucket
from tba_jax import config as config_lib
from tba_jax import export as export_lib
from tba_jax.remote_workdir import fetch, mirror, owner, store
from tba_jax.remote_workdir.store import Manifest, RemoteError

REPO = pathlib.Path(__file__).resolve().parent.parent
URL = "gs://bucket/runs/a"


@pytest.fixture(autouse=True)
def bucket(tmp_path, monkeypatch):
  """The folder with the bucket's objects of the run."""
  monkeypatch.setenv(fake_bucket.ROOT, str(tmp_path / "buckets"))
  fake_bucket.use(tmp_path / "buckets")
  for name, value in (("_LOOK_SECS", 0.02), ("_RETRY_SECS", (0.02, 0.1))):
    monkeypatch.setattr(mirror, name, value)
  yield tmp_path / "buckets" / "bucket" / "runs" / "a"
  _wait_for(lambda: not any(thread.name == "workdir mirror" for thread in threading.enumerate()))


@pytest.fixture
def quiet(monkeypatch):
  """A lock under which no pass of a mirror begins or is under way."""
  lock, upload = threading.Lock(), mirror.Mirror._pass

  def in_turn(self):
    with lock:
      return upload(self)

  monkeypatch.setattr(mirror.Mirror, "_pass", in_turn)
  return lock


@pytest.fixture
def said():
  return []


@pytest.fixture
def mirrored(tmp_path, said):
  """`fetch.mirrored` of the URL; with machine="b", on another machine."""
  def enter(*, machine="a", **options):
    return fetch.mirrored(URL, tmp_path / machine, say=said.append, **{"patience_secs": 5.0, **options})
  return enter


def _write(folder, name, text):
  path = folder / name
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(text)


def _write_step(folder, step, *, best=-1):
  """A checkpoint as `RunState` leaves it: segments first, the step by a rename."""
  _write(folder, f"rollout_segments/{step:012d}-aa.rows", f"rows of {step}")
  hidden = folder / "checkpoints" / f"{step}.orbax-checkpoint-tmp"
  meta = {"segments": [f"{step:012d}-aa.rows"], "totals": {"best_step": best}}
  _write(hidden, "meta/metadata", json.dumps(meta))
  _write(hidden, "train/d/0", f"state of {step}" * 100)
  os.rename(hidden, folder / "checkpoints" / str(step))


def _write_run(folder, *steps):
  _write(folder, "config.json", "{}")
  _write(folder, "model/config.json", "{}")
  _write(folder, "initial/_CHECKPOINT_METADATA", "{}")
  _write(folder, "metrics.jsonl", "".join(f'{{"step": {step}}}\n' for step in range(max(steps, default=0) + 1)))
  for step in steps:
    _write_step(folder, step)


def _steps(folder):
  return sorted(int(name) for name in os.listdir(folder / "checkpoints"))


def _files(folder):
  """What is to be in the bucket, and is: contents by name."""
  return {name: (folder / name).read_bytes() for name in mirror.files_of(folder)
          if name not in (store.MANIFEST_FILE, store.OWNER_FILE)}


def _wait_for(what):
  deadline = time.monotonic() + 5
  while not what():
    assert time.monotonic() < deadline
    time.sleep(0.01)


def _manifest():
  return store.Store(URL).read_manifest()


# --- Uploading ---


def test_a_run_comes_to_the_bucket_and_what_it_removes_goes_there_too(bucket, mirrored, said):
  with mirrored() as (folder, finish):
    _write_run(folder, 2)
    _wait_for(lambda: _manifest().steps() == {"checkpoints/2"})
    _write_step(folder, 4)
    _wait_for(lambda: "checkpoints/4" in _manifest().steps())
    shutil.rmtree(folder / "checkpoints" / "2")
    (folder / "rollout_segments" / "000000000002-aa.rows").unlink()
    _write(folder, "checkpoints/6.orbax-checkpoint-tmp/train/0", "half")
    _write(folder, "results.json.tmp", "half")
    _write(folder, ".lock", "")
    with open(folder / "metrics.jsonl", "a") as file:
      file.write('{"step": 5}\n')
    assert finish()
    assert _files(folder) == _files(bucket)
  assert _steps(bucket) == [4] and not (bucket / store.OWNER_FILE).exists()
  assert said[-1] == f"all of the run is in {URL}"


def test_a_checkpoint_is_named_after_all_that_it_needs_and_removed_after_it_is_named_no_more(mirrored, quiet):
  with mirrored() as (folder, finish):
    with quiet:
      _write_run(folder, 2)
    _wait_for(lambda: _manifest().steps() == {"checkpoints/2"})
    with quiet:
      fake_bucket.FakeBucket.writes.clear()
      _write_step(folder, 4)
      shutil.rmtree(folder / "checkpoints" / "2")
      _write(folder, "metrics.jsonl", "changed")
    assert finish()
  order = [name.replace("bucket/runs/a/", "") for name in fake_bucket.FakeBucket.writes]
  named = order.index("mirror.json")
  for name in ("rollout_segments/000000000004-aa.rows", "checkpoints/4/train/d/0", "metrics.jsonl"):
    assert order.index(name) < named, name
  assert order.index("metrics.jsonl") > order.index("checkpoints/4/train/d/0")  # logs are not behind the checkpoint
  assert order.index("-checkpoints/2/train/d/0") > named


def test_nothing_is_uploaded_twice(mirrored, quiet):
  with mirrored() as (folder, finish):
    with quiet:
      _write_run(folder, 2, 4)
    _wait_for(lambda: len(_manifest().steps()) == 2)
    fake_bucket.FakeBucket.writes.clear()
    _write(folder, "rollouts/train.jsonl", "new")
    assert finish()
  fixed = [name for name in fake_bucket.FakeBucket.writes if "checkpoints" in name or "segments" in name]
  assert not fixed and "bucket/runs/a/rollouts/train.jsonl" in fake_bucket.FakeBucket.writes


def test_results_come_last(mirrored, quiet):
  with mirrored() as (folder, finish):
    with quiet:
      _write(folder, "results.json", "{}")
      _write_run(folder)
      _write(folder, "timeline.jsonl", "{}")
    assert finish()
  names = [name for name in fake_bucket.FakeBucket.writes if not name.endswith("owner.json")]
  assert names[-2:] == ["bucket/runs/a/results.json", "bucket/runs/a/mirror.json"]


def test_a_checkpoint_that_the_run_removes_while_it_is_uploaded_is_not_named(mirrored, monkeypatch):
  upload = store.Store.upload

  def slow(self, path, name, **options):
    if name == "checkpoints/2/train/d/0":
      shutil.rmtree(path.parent.parent.parent)
    return upload(self, path, name, **options)

  with mirrored() as (folder, finish):
    monkeypatch.setattr(store.Store, "upload", slow)
    _write_run(folder, 2, 4)
    assert finish()
  assert _manifest().steps() == {"checkpoints/4"} and not any("checkpoints/2" in name for name in _manifest().fixed)


# --- A store in trouble ---


def test_a_store_that_fails_for_a_while_costs_one_line_and_nothing_of_the_run(bucket, mirrored, said):
  with mirrored() as (folder, finish):
    began = time.monotonic()
    with fake_bucket.failing():
      _write_run(folder, 2)
      _wait_for(lambda: any("cannot be written" in line for line in said))
      time.sleep(0.3)  # many passes
    assert time.monotonic() - began < 2
    assert finish()
    assert _files(folder) == _files(bucket)
  assert sum("cannot be written" in line for line in said) == 1
  assert f"error: {URL} cannot be written (OSError: 503 backend error); training goes on" in said[1]
  assert said[2] == f"{URL} takes files again"


def test_a_store_that_fails_for_good_is_told_at_the_end_and_the_next_start_uploads(bucket, mirrored, said):
  with mirrored(patience_secs=0.5) as (folder, finish):
    _write_run(folder, 2)
    _wait_for(lambda: _manifest().steps() == {"checkpoints/2"})
    with fake_bucket.failing():
      _write_step(folder, 4)
      assert not finish()
    assert _manifest().steps() == {"checkpoints/2"}
  assert "(OSError: 503 backend error); keep that folder: the same command on this machine uploads them" in said[-1]
  assert f"3 files (0.0 MB) of {folder} are not in {URL}" in said[-1]
  with mirrored() as (again, finish):
    assert again == folder and _steps(folder) == [2, 4] and finish()
  assert _steps(bucket) == [2, 4] and _files(folder) == _files(bucket)


def test_a_store_that_hangs_does_not_keep_the_run_from_ending(mirrored, said, monkeypatch):
  hang = threading.Event()
  with mirrored(patience_secs=0.5) as (folder, finish):
    monkeypatch.setattr(fake_bucket.FakeBucket, "fails", staticmethod(lambda what, path: hang.wait()))
    _write_run(folder, 2)
    assert not finish()
    others = set(threading.enumerate()) - {threading.main_thread()}
    assert others and all(thread.daemon for thread in others)  # the process may end beside them
    hang.set()
  assert "no answer within" in said[-1]


def test_at_the_end_a_large_file_may_take_long_but_not_fail_in_its_middle_for_ever(mirrored, quiet, monkeypatch):
  monkeypatch.setattr(store, "_CHUNK_BYTES", 10)
  with mirrored(patience_secs=0.6) as (folder, finish):
    with quiet:
      monkeypatch.setattr(fake_bucket.FakeBucket, "write_secs", 0.1)
      _write(folder, "model/large", "x" * 80)
    assert finish()
  with mirrored(patience_secs=0.3) as (folder, finish):
    monkeypatch.setattr(fake_bucket.FakeBucket, "write_secs", 0.01)
    with fake_bucket.failing(when=lambda what, path: what == "close" and path.endswith("model/larger")):
      with quiet:
        _write(folder, "model/larger", "x" * 80)
      assert not finish()


def test_a_bucket_that_cannot_be_reached_at_the_start_is_bad_input(mirrored):
  with fake_bucket.failing(lambda: OSError("Forbidden: no rights"), when=lambda what, path: True):
    with pytest.raises(RemoteError, match="cannot be reached .OSError: Forbidden: no rights.; are the bucket's name"):
      with mirrored():
        pass
  with fake_bucket.failing(lambda: OSError("read only"), when=lambda what, path: what != "rb"):
    with pytest.raises(RemoteError, match="cannot be reached .OSError: read only"):
      with mirrored():
        pass


@pytest.mark.parametrize("url", ["gs://bucket", "gs://", "gs://bucket//a", "gs://bucket/../a"])
def test_a_url_that_names_no_folder_is_refused(url):
  with pytest.raises(RemoteError, match="must be gs://BUCKET/FOLDER"):
    store.Store(url)


def test_what_reads_buckets_is_named_where_it_is_missing(monkeypatch):
  import fsspec

  def missing(name):
    raise ImportError(name)

  monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
  with pytest.raises(RemoteError, match="needs gcsfs, which is not installed; pip install -r requirements-gcs.txt"):
    store.Store(URL)


# --- On another machine ---


def _left_by_a(mirrored, *steps):
  with mirrored() as (folder, finish):
    _write_run(folder, *steps)
    assert finish()
  return folder


def test_another_machine_goes_on_from_the_newest_checkpoint(bucket, mirrored, said):
  theirs = _left_by_a(mirrored, 2, 4)
  with mirrored(machine="b") as (folder, finish):
    assert folder != theirs and _steps(folder) == [4] and (folder / "metrics.jsonl").read_text().count("\n") == 5
    assert os.listdir(folder / "rollout_segments") == ["000000000004-aa.rows"]
    assert (folder / "initial" / "_CHECKPOINT_METADATA").exists()
    fake_bucket.FakeBucket.writes.clear()
    assert finish()
    assert not [name for name in fake_bucket.FakeBucket.writes if "checkpoints" in name], "none is uploaded again"
    assert _manifest().steps() == {"checkpoints/2", "checkpoints/4"}, "what is not here is not removed there"
  assert f"downloading {URL} to {folder}" in said


@pytest.mark.parametrize("best, kept", [(-1, [4, 6]), (2, [2, 4, 6])])
def test_of_the_checkpoints_of_another_machine_the_best_evaluated_outlives_the_next_one(bucket, mirrored, best, kept):
  _left_by_a(mirrored, 2, 4)
  with mirrored(machine="b") as (folder, finish):
    _write_step(folder, 6, best=best)
    assert finish()
  assert _steps(bucket) == kept
  assert (bucket / "rollout_segments" / "000000000002-aa.rows").exists() == (best == 2)


@pytest.mark.parametrize("harm", ["cut", "changed", "missing", "segment"])
def test_a_checkpoint_that_is_not_whole_is_passed_over(bucket, mirrored, said, harm):
  _left_by_a(mirrored, 2, 4)
  path = bucket / ("rollout_segments/000000000004-aa.rows" if harm == "segment" else "checkpoints/4/train/d/0")
  if harm == "missing":
    path.unlink()
  else:
    path.write_bytes(path.read_bytes()[:-1] if harm == "cut" else path.read_bytes()[::-1])
  with mirrored(machine="b") as (folder, finish):
    assert _steps(folder) == [2]
    assert os.listdir(folder / "rollout_segments") == ["000000000002-aa.rows"]
    _write_step(folder, 4)
    assert finish()
    assert _files(folder) == _files(bucket)
  assert any(f"checkpoints/4 of {URL} is not whole" in line for line in said)


def test_if_no_checkpoint_is_whole_the_start_is_refused_and_nothing_is_lost(bucket, mirrored):
  _left_by_a(mirrored, 2)
  (bucket / "checkpoints/2/train/d/0").write_text("x")
  before = _files(bucket)
  with pytest.raises(RemoteError, match=r"none of \['checkpoints/2'\] is whole"):
    with mirrored(machine="b"):
      pass
  assert _files(bucket) == before and not (bucket / store.OWNER_FILE).exists()


def test_an_upload_that_was_cut_off_leaves_the_checkpoint_before_it(bucket, mirrored):
  """Half of a checkpoint is there without a name."""
  with mirrored(patience_secs=0.5) as (folder, finish):
    _write_run(folder, 2)
    assert finish()
  with fake_bucket.failing(when=lambda what, path: what == "close" and path.endswith("checkpoints/4/train/d/0")):
    with pytest.raises(RuntimeError, match="killed"):
      with mirrored() as (folder, finish):
        _write_step(folder, 4)
        raise RuntimeError("killed")
  assert (bucket / "rollout_segments" / "000000000004-aa.rows").exists()
  with mirrored(machine="b") as (folder, finish):
    assert _steps(folder) == [2] and finish()


def test_here_goes_on_where_the_bucket_is_behind(mirrored):
  folder = _left_by_a(mirrored, 2)
  _write_step(folder, 4)  # the machine went down before it was uploaded
  with mirrored() as (folder, finish):
    assert _steps(folder) == [2, 4] and finish()
  assert _manifest().steps() == {"checkpoints/2", "checkpoints/4"}


def test_here_is_replaced_where_the_bucket_went_on(mirrored):
  folder = _left_by_a(mirrored, 2)
  with mirrored(machine="b") as (other, finish):
    _write_step(other, 6)
    assert finish()
  with mirrored() as (folder, finish):
    assert _steps(folder) == [6] and finish()


def test_a_run_that_went_on_in_two_places_is_refused(mirrored):
  folder = _left_by_a(mirrored, 2)
  _write_step(folder, 4)
  with mirrored(machine="b") as (other, finish):
    _write_step(other, 6)
    assert finish()
  with pytest.raises(RemoteError, match="went on in two places: .* has checkpoints/4, which the bucket lacks, and the "
                     "bucket has checkpoints/6"):
    with mirrored():
      pass
  shutil.rmtree(folder)
  with mirrored() as (folder, _):
    assert _steps(folder) == [6]


def test_a_machine_that_came_to_no_checkpoint_does_not_stand_in_the_way(bucket, mirrored):
  folder = _left_by_a(mirrored, 2)
  _write_step(folder, 4)
  with mirrored(machine="b") as (other, finish):
    _write(other, "metrics.jsonl", "of b")
    _write(other, "tensorboard/events.b", "of b")
    assert finish()
  with mirrored() as (folder, finish):
    assert _steps(folder) == [2, 4] and finish()
    assert _files(folder) == _files(bucket)


def test_a_manifest_that_was_written_and_not_noted_is_known_as_ones_own(mirrored, monkeypatch):
  with mirrored() as (folder, finish):
    _write_run(folder, 2)
    assert finish()
  state = mirror.MirrorState.load(folder)
  _write_step(folder, 4)
  with mirrored() as (folder, finish):
    assert finish()
  state.pending = _manifest().token
  state.save(folder)  # killed between the bucket's manifest and the note of it
  _write_step(folder, 6)
  with mirrored() as (folder, finish):
    assert _steps(folder) == [2, 4, 6] and finish()


def test_a_finished_run_is_shown_and_left_as_it_is(bucket, mirrored):
  with mirrored() as (folder, finish):
    _write_run(folder, 2)
    _write(folder, "results.json", "{}")
    assert finish()
  before = _files(bucket)
  with mirrored(machine="b") as (folder, finish):
    assert (folder / "results.json").exists() and (folder / "config.json").exists() and finish()
  assert _files(bucket) == before and not folder.exists()


def test_files_that_no_run_uploaded_are_not_overwritten(bucket, mirrored):
  _write(bucket, "config.json", "{}")
  with pytest.raises(RemoteError, match="has files of a run but no mirror.json"):
    with mirrored():
      pass


# --- One process at a time ---


def _owner(said, *, stale_secs=5.0, renew_secs=0.02):
  return owner.Owner(store.Store(URL), say=said.append, stale_secs=stale_secs, renew_secs=renew_secs)


def _as_host(monkeypatch, host):
  monkeypatch.setattr(owner.socket, "gethostname", lambda: host)


def test_a_second_run_is_refused_while_the_first_renews(said, monkeypatch):
  _as_host(monkeypatch, "other")
  first = _owner(said)
  _as_host(monkeypatch, "here")
  with pytest.raises(RemoteError, match=rf"workdir='{URL}' is in use by process {os.getpid()} on other; wait for it"):
    _owner(said)
  assert f"{URL} was last written by process {os.getpid()} on other; waiting for 5 s" in said[0]
  first.release()
  _owner(said).release()


def test_an_owner_that_no_longer_renews_is_followed(said, monkeypatch):
  _as_host(monkeypatch, "other")
  dead = _owner(said, renew_secs=3600)
  _as_host(monkeypatch, "here")
  follower = _owner(said, stale_secs=0.1)
  assert not follower.is_lost() and dead.is_lost() and "was taken over by process" in said[-1]
  follower.release()


def test_an_owner_on_this_machine_whose_process_is_gone_is_followed_at_once(said, bucket):
  gone = subprocess.Popen([sys.executable, "-c", ""])
  gone.wait()
  _write(bucket, "owner.json", json.dumps(
    {"host": owner.socket.gethostname(), "pid": gone.pid, "token": "x", "renewed": time.time()}))
  _owner(said).release()
  assert not said


def test_a_run_whose_workdir_was_taken_over_uploads_no_more_and_says_so(bucket, mirrored, said):
  with mirrored() as (folder, finish):
    _write_run(folder, 2)
    _wait_for(lambda: _manifest().steps() == {"checkpoints/2"})
    _write(bucket, "owner.json", json.dumps({"host": "other", "pid": 1, "token": "x", "renewed": time.time()}))
    _write_step(folder, 4)
    assert not finish()
  assert sum("was taken over by process 1 on other; nothing more is uploaded there" in line for line in said) == 1
  assert "another process has taken it over" in said[-1]
  assert _manifest().steps() == {"checkpoints/2"} and (bucket / "owner.json").exists()


def test_a_run_that_another_went_on_from_uploads_no_more_though_nobody_owns_it_any_longer(mirrored, said):
  with mirrored() as (folder, finish):
    _write_run(folder, 2)
    _wait_for(lambda: _manifest().steps() == {"checkpoints/2"})
    theirs = Manifest(_manifest().fixed, ("config.json",))
    store.Store(URL).write_manifest(theirs)
    _write_step(folder, 4)
    assert not finish()
  assert _manifest() == theirs
  assert any("was taken over by another process, which went on from here" in line for line in said)


# --- Readers, and the command ---


def test_a_reader_gets_what_it_needs(bucket, mirrored, tmp_path):
  _left_by_a(mirrored, 2, 4)
  _write(bucket, "mirror.json", (bucket / "mirror.json").read_text())
  with fetch.local_copy(URL, checkpoint=False) as folder:
    assert folder.name == "a" and set(_files(folder)) == {"config.json", "metrics.jsonl"}
  assert not folder.exists()
  with fetch.local_copy(URL, checkpoint=True) as folder:
    assert _steps(folder) == [4] and not (folder / "initial").exists() and (folder / "model" / "config.json").exists()
  with fetch.local_copy(URL, checkpoint=True, step=2, version_0=True) as folder:
    assert _steps(folder) == [2] and (folder / "initial").exists() and not (folder / "rollout_segments").exists()
  with pytest.raises(RemoteError, match=r"step=3: gs://bucket/runs/a has no such checkpoint; it has \[2, 4\]"):
    with fetch.local_copy(URL, checkpoint=True, step=3):
      pass
  with pytest.raises(RemoteError, match="gs://bucket/none holds no run"):
    with fetch.local_copy("gs://bucket/none", checkpoint=False):
      pass
  with fetch.local_copy(tmp_path, checkpoint=False) as folder:
    assert folder == tmp_path


def test_a_reader_whose_checkpoint_is_replaced_takes_the_new_one(mirrored, monkeypatch):
  with mirrored() as (folder, finish):
    _write_run(folder, 2)
    _wait_for(lambda: _manifest().steps() == {"checkpoints/2"})
    read = store.Store.read_manifest

    @functools.cache  # once, after the reader has its manifest
    def replace():
      _write_step(folder, 4)
      shutil.rmtree(folder / "checkpoints" / "2")
      finish()

    def late(self):
      found = read(self)
      if threading.current_thread() is threading.main_thread():
        replace()
      return found

    monkeypatch.setattr(store.Store, "read_manifest", late)
    with fetch.local_copy(URL, checkpoint=True) as copy:
      assert _steps(copy) == [4]


def test_bad_input_of_the_readers_is_one_line(capsys, tmp_path):
  with pytest.raises(SystemExit) as ended:
    export_lib.main([f"--workdir={URL}", f"--out={tmp_path / 'out'}"])
  assert ended.value.code == 2
  assert f"error: {URL} holds no run (there is no mirror.json in it)" in capsys.readouterr().err


def test_another_config_is_refused_before_anything_is_downloaded(mirrored, tmp_path):
  _left_by_a(mirrored, 2)
  with fetch.copy_of_config(URL) as folder:
    assert os.listdir(folder) == ["config.json"]
    with pytest.raises(config_lib.ConfigError, match=f"workdir='{URL}' belongs to another config"):
      config_lib.check_workdir(URL, {"seed": 3}, folder=folder)
  with fetch.copy_of_config("gs://bucket/none") as folder:
    assert not os.listdir(folder)


# --- A whole run ---

# The command, with a bucket on the local disk, rewards that an untrained model earns, and some rest after each step.
DRIVER = """
import os, sys, time
sys.path.insert(0, "tests")
import fake_bucket, runs
from absl import app
from tba_jax import main, metrics
from tba_jax.tasks.arithmetic import ArithmeticTask
fake_bucket.use(os.environ["TBA_FAKE_BUCKET"])
ArithmeticTask.reward = runs.easy_reward
write = metrics.MetricsWriter.write
def slowly(self, step, scalars):
  write(self, step, scalars)
  time.sleep(float(os.environ["REST_SECS"]))
metrics.MetricsWriter.write = slowly
app.run(main.main, flags_parser=main.parse_flags)
"""


@pytest.mark.slow
def test_a_run_killed_and_resumed_from_the_bucket_alone_is_bitwise_the_undisturbed_one(bucket, tmp_path, capsys):
  """kill -9 in the middle of training; the local folder is lost; the same command goes on, as on another machine."""
  import runs
  from tba_jax import evaluate
  from tba_jax.report import __main__ as report

  def start(workdir, *, rest_secs, cache):
    flags = ("--config=configs/quickstart.py:smoke", f"--workdir={workdir}", "--config.runtime.mode=lockstep",
             "--config.train.steps=10", "--config.checkpoint.every_steps=2", "--config.checkpoint.keep=2",
             "--config.eval.every_steps=4", "--config.sample.truncated=score")
    env = os.environ | {"REST_SECS": str(rest_secs), "XDG_CACHE_HOME": str(tmp_path / cache), "PYTHONPATH": str(REPO),
                        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "xla")}
    return subprocess.Popen([sys.executable, "-c", DRIVER, *flags], cwd=REPO, env=env, stderr=subprocess.PIPE,
                            text=True)

  whole = start(tmp_path / "whole", rest_secs=0, cache="whole_cache")
  _, said = whole.communicate(timeout=1200)
  assert whole.returncode == 0, said

  killed = start(URL, rest_secs=1.5, cache="cache")
  while not (bucket / "mirror.json").exists() or not {"checkpoints/4", "checkpoints/6"} & _manifest().steps():
    assert killed.poll() is None, killed.communicate()
    time.sleep(0.2)
  killed.kill()
  killed.communicate()
  shutil.rmtree(tmp_path / "cache")
  assert (bucket / "owner.json").exists() and not (bucket / "results.json").exists()

  resumed = start(URL, rest_secs=0, cache="cache")
  _, said = resumed.communicate(timeout=1200)
  assert resumed.returncode == 0, said
  assert f"downloading {URL} to " in said and ("resumed at step 4" in said or "resumed at step 6" in said)
  assert f"all of the run is in {URL}" in said

  local = store.local_folder(URL, tmp_path / "cache" / "tba_jax")
  assert _files(local) == _files(bucket)
  for path in (local, bucket):
    assert runs.untimed(path) == runs.untimed(tmp_path / "whole")
    assert runs.lines(path, "rollouts/train.jsonl") == runs.lines(tmp_path / "whole", "rollouts/train.jsonl")
  _same_parameters(local, tmp_path / "whole")

  shutil.rmtree(tmp_path / "cache")
  capsys.readouterr()
  report.main([URL, f"--out={tmp_path / 'page.html'}"])
  export_lib.main([f"--workdir={URL}", f"--out={tmp_path / 'exported'}"])
  export_lib.main([f"--workdir={tmp_path / 'whole'}", f"--out={tmp_path / 'exported_whole'}"])
  assert (tmp_path / "page.html").stat().st_size > 10_000
  assert (tmp_path / "exported" / "model.safetensors").read_bytes() == (
      tmp_path / "exported_whole" / "model.safetensors").read_bytes()
  evaluate.main([f"--workdir={URL}", f"--out={tmp_path / 'evaluation'}", "--size=2"])
  assert json.loads((tmp_path / "evaluation" / "summary.json").read_text())["model"] == f"{URL} step 10"


def _same_parameters(a, b):
  import jax
  import numpy as np
  from tba_jax.checkpoints import trained

  (step_a, _, left, _), (step_b, _, right, _) = trained.load_trained(a), trained.load_trained(b)
  assert step_a == step_b == 10
  jax.tree.map(np.testing.assert_array_equal, left, right)


# --- gcsfs, where it is installed with an emulator of its store ---

EMULATED = """
import os, pathlib, shutil, sys, urllib.request
sys.excepthook = lambda *error: (sys.__excepthook__(*error), os._exit(1))  # the server's threads would go on
from gcp_storage_emulator.server import create_server
server = create_server("127.0.0.1", int(sys.argv[1]), in_memory=True)
server.start()
os.environ["STORAGE_EMULATOR_HOST"] = host = f"http://127.0.0.1:{sys.argv[1]}"
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"  # it would ask for credentials
urllib.request.urlopen(urllib.request.Request(
  f"{host}/storage/v1/b?project=p", data=b'{"name": "bucket"}', headers={"Content-Type": "application/json"})).read()
from tba_jax.remote_workdir import fetch, store
url, top, big = "gs://bucket/runs/a", pathlib.Path(sys.argv[2]), os.urandom(30_000_000)
def write(folder, name, payload):
  (folder / name).parent.mkdir(parents=True, exist_ok=True)
  (folder / name).write_bytes(payload)
with fetch.mirrored(url, top / "a", say=print) as (folder, finish):
  write(folder, "config.json", b"{}")
  write(folder, "warnings.jsonl", b"")
  write(folder, "checkpoints/2/train/d/0", big)
  assert finish()
with fetch.mirrored(url, top / "b", say=print) as (folder, finish):
  assert (folder / "checkpoints/2/train/d/0").read_bytes() == big and (folder / "warnings.jsonl").exists()
  shutil.rmtree(folder / "checkpoints/2")
  write(folder, "checkpoints/4/train/d/0", b"new")
  write(folder, "checkpoints/4/meta/metadata", b"{}")
  assert finish()
assert store.Store(url).read_manifest().steps() == {"checkpoints/4"}
for name in ("checkpoints/2/train/d/0", "owner.json"):
  try:
    store.Store(url).read(name)
  except FileNotFoundError:
    continue
  raise AssertionError(name)
try:
  with fetch.mirrored("gs://none/a", top / "c", say=print):
    pass
except store.RemoteError as error:
  print(error)
server.stop()
"""


@pytest.mark.slow
def test_gcsfs_against_an_emulator(tmp_path):
  pytest.importorskip("gcsfs")
  pytest.importorskip("gcp_storage_emulator")
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
  ran = subprocess.run([sys.executable, "-c", EMULATED, str(port), str(tmp_path)], cwd=REPO, capture_output=True,
                       text=True, timeout=120, env=os.environ | {
                         "PYTHONPATH": os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")])})
  assert ran.returncode == 0, ran.stderr
  assert "workdir='gs://none/a' cannot be reached (FileNotFoundError" in ran.stdout

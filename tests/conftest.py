"""Tests run on CPU with 8 virtual devices, so that every sharded path has something to be sharded over."""

import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The second: most of the tests' time is LLVM's, for programs that run for milliseconds (learner_test.py: 169 to 131 CPU
# seconds; level 0 saves more and rounds differently by more than some tolerances).
for flag in ("--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=1"):
  if flag.split("=")[0] not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest  # noqa: E402  (the variables above must be set before anything imports jax)

REPO = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared_data() -> pathlib.Path:
  """Folder with real GSM8K, MATH-500 and TL;DR rows; the tests that need it skip where it is absent."""
  path = pathlib.Path(os.environ.get("TBA_SHARED_DATA", REPO.parent / "shared" / "data"))
  if not path.is_dir():
    pytest.skip(f"no real data at {path}; set TBA_SHARED_DATA to a folder with gsm8k/, math500/ and tldr/")
  return path


@pytest.fixture(scope="session")
def _xla_folder(tmp_path_factory) -> str:
  return str(tmp_path_factory.mktemp("xla"))


@pytest.fixture(scope="module")
def compile_once(_xla_folder):
  """For modules whose runs compile the same programs again, and each other's: the cache makes that a file read."""
  import jax

  jax.config.update("jax_compilation_cache_dir", _xla_folder)
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
  yield
  jax.config.update("jax_compilation_cache_dir", None)


@pytest.fixture
def easy_reward(monkeypatch):
  """Rewards that an untrained model earns in part, see `runs.easy_reward`."""
  import runs

  runs.use_easy_reward(monkeypatch)

"""Tests run on CPU with 8 virtual devices, so that every sharded path has something to be sharded over."""

import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
  os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8").strip()
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

"""What a test of parity with another implementation needs: in CI a missing package is a failure, elsewhere a skip. Not
a test module.

A parity test that skips in CI would pass for ever without having compared anything.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import types

import pytest


def require(module: str) -> types.ModuleType:
  """The imported module. May be called at the top of a test module."""
  try:
    return importlib.import_module(module)
  except ImportError as error:
    _absent(f"{module} cannot be imported ({error}); pip install -r requirements-test.txt")


def require_distribution(name: str) -> importlib.metadata.Distribution:
  """The installed package, not imported."""
  try:
    return importlib.metadata.distribution(name)
  except importlib.metadata.PackageNotFoundError:
    _absent(f"{name} is not installed; pip install --no-deps -r requirements-test-nodeps.txt")


def _absent(reason: str):
  if os.environ.get("CI") == "true":
    pytest.fail(f"{reason} (CI=true: parity tests may not be skipped)", pytrace=False)
  pytest.skip(reason, allow_module_level=True)

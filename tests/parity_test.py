"""A parity test whose package is missing fails in CI and skips elsewhere."""

from __future__ import annotations

import pytest

import parity


@pytest.mark.parametrize("require", [parity.require, parity.require_distribution])
@pytest.mark.parametrize(("ci", "outcome"), [("true", pytest.fail.Exception), ("false", pytest.skip.Exception)])
def test_missing_package(monkeypatch: pytest.MonkeyPatch, require, ci: str, outcome: type[BaseException]):
  monkeypatch.setenv("CI", ci)
  with pytest.raises(outcome, match="no_such_package .*pip install"):
    require("no_such_package")


def test_package_that_is_there():
  assert parity.require("json").dumps([1]) == "[1]"
  assert parity.require_distribution("pytest").version == pytest.__version__

"""The shortest form of every config, from its command line to its results. Nothing is learnt in any of them."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

REPO = pathlib.Path(__file__).resolve().parent.parent


@pytest.mark.slow
@pytest.mark.parametrize("name", [
    "quickstart:smoke", "gsm8k:smoke", "math:smoke", "tldr:smoke", "redteam:smoke", "sft_gsm8k:smoke"])
def test_smoke(name, tmp_path):
  config, _, arg = name.partition(":")
  command = [
      sys.executable, "-m", "tba_jax.main", f"--config=configs/{config}.py:{arg}", f"--workdir={tmp_path / 'run'}"
  ]
  result = subprocess.run(command, cwd=REPO, env={**os.environ, "XLA_FLAGS": ""}, capture_output=True, text=True,
                          timeout=900)
  assert result.returncode == 0, result.stderr[-3_000:]
  results = json.loads((tmp_path / "run" / "results.json").read_text())
  assert results["skipped_updates"] == 0 and results["steps"] >= (0 if name == "sft_gsm8k:smoke" else 2)
  assert results["bad_rewards"] == 0 and results["logprob_gap_max"] < 1e-3

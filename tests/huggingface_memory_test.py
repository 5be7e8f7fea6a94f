"""Loading a model of two gigabytes: how much memory it takes beside the model itself."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import subprocess
import sys
import textwrap

import jax
import ml_dtypes
import numpy as np
import pytest

import tiny
import tiny_tokenizers
from tba_jax.checkpoints.huggingface import save_model
from tba_jax.models import transformer

_MEASURE = textwrap.dedent("""
  import json, re, sys, time
  import jax, jax.numpy as jnp
  from tba_jax import sharding
  from tba_jax.checkpoints.huggingface import load_model
  from tba_jax.checkpoints.stored import read_json
  from tba_jax.models import transformer
  from tba_jax.models.variants import from_huggingface
  import pathlib
  folder, way = pathlib.Path(sys.argv[1]), sys.argv[2]
  abstract = transformer.abstract_params(from_huggingface(read_json(folder / "config.json")))
  shardings = sharding.param_shardings(abstract, sharding.make_mesh(jax.devices(), fsdp=4, tensor=2))
  def put(path, array):
    target = shardings
    for key in path: target = target[key]
    return jax.device_put(array, target)
  def peak_bytes():  # of this program alone; getrusage would count what the process held before it became this program
    return int(re.search(r"VmHWM:\\s*(\\d+) kB", pathlib.Path("/proc/self/status").read_text()).group(1)) * 1024
  before = peak_bytes()
  started = time.perf_counter()
  _, params, _ = load_model(folder, dtype=jnp.bfloat16, **({"put": put} if way == "put" else {"shardings": shardings}))
  jax.block_until_ready(params)
  print(f"{time.perf_counter() - started:.1f} s", file=sys.stderr)
  print(json.dumps({"before": before, "peak": peak_bytes(), "params": sum(x.nbytes for x in jax.tree.leaves(params))}))
""")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["put", "shardings"])
def test_loading_two_gigabytes_needs_little_memory_beside_them(tmp_path: pathlib.Path, way: str):
  cfg = dataclasses.replace(
    tiny.tiny_config(
      vocab_size=32_000,
      hidden_size=2048,
      num_hidden_layers=20,
      num_attention_heads=16,
      num_key_value_heads=8,
      intermediate_size=5632,
      tie_word_embeddings=False,
    ),
    vocab_size=320,
  )
  rng = np.random.default_rng(0)

  def leaf(abstract: jax.ShapeDtypeStruct) -> np.ndarray:
    return rng.integers(0x3C00, 0x3D00, abstract.shape, np.uint16).view(ml_dtypes.bfloat16)  # small positive numbers

  save_model(
    tmp_path / "model",
    cfg,
    jax.tree.map(leaf, transformer.abstract_params(cfg)),
    tiny_tokenizers.chat_tokenizer(),
    shard_bytes=700 << 20,
  )
  sizes = [path.stat().st_size for path in (tmp_path / "model").glob("*.safetensors")]
  assert len(sizes) >= 3 and sum(sizes) >= 2e9
  run = subprocess.run(
    [sys.executable, "-c", _MEASURE, str(tmp_path / "model"), way], check=True, capture_output=True, text=True
  )
  measured = json.loads(run.stdout.splitlines()[-1])
  print(
    way,
    run.stderr.splitlines()[-1],
    {name: f"{value / 1e9:.2f} GB" for name, value in measured.items()},
    f"largest shard {max(sizes) / 1e9:.2f} GB",
  )
  assert measured["params"] >= 2e9
  assert measured["peak"] - measured["params"] < max(sizes) + 0.5e9

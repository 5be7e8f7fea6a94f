"""Which options programs are compiled with, and that a jaxlib without them still compiles."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax import compiler_options

OPTIONS = (compiler_options.of_sampling, compiler_options.of_sequences)


@pytest.mark.parametrize("options", OPTIONS)
def test_products_on_cpu_are_not_ynnpacks(options):
  x, w = jnp.ones((32, 64)), jnp.ones((64, 48))
  program = jax.jit(lambda x, w: x @ w, compiler_options=options("cpu")).lower(x, w).compile()
  assert options("cpu") and "__ynn_fusion" not in program.as_text()
  np.testing.assert_array_equal(program(x, w), 64.0)
  assert options("tpu") == options("gpu") == {}


def test_an_option_that_this_jaxlib_does_not_know_is_left_out(monkeypatch):
  monkeypatch.setattr(compiler_options, "_YNNPACK", "xla_cpu_no_such_option")
  compiler_options._is_known.cache_clear()
  try:
    assert [options("cpu") for options in OPTIONS] == [{}, {}]
  finally:
    compiler_options._is_known.cache_clear()

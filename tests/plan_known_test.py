"""Architectures that are known without a download: as many parameters as their model pages say."""

from __future__ import annotations

import math

import jax
import pytest

from tba_jax.models import transformer
from tba_jax.models.encoder import FAMILIES, encoder_from_huggingface
from tba_jax.models.known import KNOWN
from tba_jax.models.variants import from_huggingface
from tba_jax.placement import model_beside, read_model_config

PUBLISHED = {
  "realtreetune/rho-1b-sft-GSM8K": 1_100_048_384,
  "Qwen/Qwen2.5-7B": 7_615_616_512,
  "EleutherAI/pythia-410m": 405_334_016,
  "EleutherAI/pythia-1b-deduped": 1_011_781_632,
  "EleutherAI/pythia-2.8b-deduped": 2_775_208_960,
  "EleutherAI/pythia-6.9b": 6_857_302_016,
  "meta-llama/Llama-3.2-1B": 1_235_814_400,
  "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
  "openai-community/gpt2": 124_439_808,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters(name):
  shapes = jax.tree.leaves(transformer.abstract_params(read_model_config(name)))
  assert sum(math.prod(leaf.shape) for leaf in shapes) == PUBLISHED[name]


def test_every_row_is_read():
  assert all(
    (encoder_from_huggingface if fields["model_type"] in FAMILIES else from_huggingface)(fields).num_layers > 0
    for fields in KNOWN.values())
  encoder = model_beside("scorer", "facebook/roberta-hate-speech-dynabench-r4-target", dtype="float32")
  assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(encoder.tree)) == 124_647_170
  assert set(KNOWN) == {name.lower() for name in KNOWN}, "names are looked up in lower case"

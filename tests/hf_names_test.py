"""The tables of tensor names: complete in both directions, exact, and invertible."""

from __future__ import annotations

import collections
import dataclasses

import jax
import numpy as np
import pytest

from parity import require
import reference_models
from tba_jax.models import hf_names
from tba_jax.models.variants import FAMILIES, from_huggingface

require("torch")

CASES = (
  "llama-biases", "mistral", "qwen2", "qwen3", "gemma", "gemma2-uncapped", "gemma3", "gpt_neox", "gpt_neox-serial",
  "gpt2", "gpt2-untied"
)


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_has_one_place_and_comes_back_exactly(case):
  model_type, fields = reference_models.CASES[case]
  model = reference_models.reference_model(model_type, **fields)
  cfg, params = reference_models.converted(model)
  tensors = {hf_names.table_name(cfg, name): tensor.numpy() for name, tensor in model.state_dict().items()}
  if cfg.tie_embeddings:
    head, embedding = hf_names.TIED_NAMES[cfg.family]
    np.testing.assert_array_equal(tensors.pop(head), tensors[embedding])
  by_name = collections.defaultdict(list)
  for entry in hf_names.hf_to_tree(cfg):
    by_name[entry.hf_name].append(entry)
  assert set(by_name) == set(tensors)
  for name, entries in by_name.items():
    leaves = []
    for entry in entries:
      leaf = params
      for key in entry.path:
        leaf = leaf[key]
      leaves.append(np.asarray(leaf if entry.layer is None else leaf[entry.layer]))
      assert leaves[-1].shape == entry.transform.tree_shape
    tensor = hf_names.to_huggingface_tensor(entries, leaves)
    np.testing.assert_array_equal(tensor, tensors[name])
    assert tensor.flags.c_contiguous, name  # safetensors writes the bytes as they lie
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))  # the tree starts as NaN


def test_every_family_has_a_table():
  assert set(hf_names.HF_NAMES) == set(FAMILIES)


def test_a_misshapen_tensor_is_refused():
  cfg = from_huggingface(
    dict(
      model_type="llama", hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12, vocab_size=9
    )
  )
  entry = next(entry for entry in hf_names.hf_to_tree(cfg) if entry.path[-2:] == ("up", "kernel"))
  with pytest.raises(ValueError, match=r"the tensor has shape \(8, 12\), but config.json implies \(12, 8\)"):
    entry.transform.to_tree(np.zeros((8, 12)))


def test_names_without_prefix_and_newer_names_are_those_of_the_table():
  cfg = from_huggingface(dict(model_type="gpt2", n_embd=8, n_layer=1, n_head=2, vocab_size=9))
  assert hf_names.table_name(cfg, "h.0.attn.c_attn.weight") == "transformer.h.0.attn.c_attn.weight"
  assert hf_names.table_name(cfg, "transformer.wte.weight") == "transformer.wte.weight"
  assert hf_names.table_name(cfg, "lm_head.weight") == "lm_head.weight"
  neox = dataclasses.replace(cfg, family="gpt_neox")
  assert hf_names.table_name(neox, "lm_head.weight") == "embed_out.weight"
  assert hf_names.is_extra(neox, "gpt_neox.layers.11.attention.masked_bias")
  assert not hf_names.is_extra(neox, "gpt_neox.layers.11.attention.dense.bias")

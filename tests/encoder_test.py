"""Encoders against transformers."""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny_tokenizers
from huggingface_test import edit_json, edit_tensors
from parity import require
from tba_jax.checkpoints.encoders import load_encoder
from tba_jax.models import encoder, hf_names

torch = require("torch")
transformers = require("transformers")

SIZES = dict(
  vocab_size=131, hidden_size=48, num_hidden_layers=3, num_attention_heads=6, intermediate_size=40,
  max_position_embeddings=30
)


def reference(model_type: str, auto=None, **fields):
  torch.manual_seed(0)
  config = transformers.AutoConfig.for_model(model_type, **{**SIZES, **fields})
  model = (
    auto or transformers.AutoModelForSequenceClassification
  ).from_config(config, attn_implementation="eager").eval()
  with torch.no_grad():
    for name, parameter in model.named_parameters():
      parameter.copy_((1.0 if name.endswith("LayerNorm.weight") else 0.0) + 0.2 * torch.randn_like(parameter))
  return model


def saved(model, folder):
  """A folder as transformers writes it, with a tokenizer beside the model."""
  model.save_pretrained(folder)
  tiny_tokenizers.save(folder)
  return folder


def converted(model, folder):
  cfg, params, _ = load_encoder(saved(model, folder), dtype=jnp.float32)
  return cfg, params


def texts(pad: int):
  """Rows of ids >= 5, padded on the right with the id that transformers takes for padding."""
  rng = np.random.default_rng(0)
  lengths = np.array([20, 11, 3], np.int32)
  tokens = rng.integers(5, 131, (3, 20)).astype(np.int32)
  mask = np.arange(20) < lengths[:, None]
  return np.where(mask, tokens, pad).astype(np.int32), lengths, mask


@pytest.mark.parametrize(("model_type", "fields"), [
  ("bert", dict(num_labels=4, layer_norm_eps=1e-5)), ("roberta", dict(num_labels=2, type_vocab_size=1)),
  ("bert", dict(hidden_act="gelu_new")),
])
def test_classifiers_equal_those_of_transformers(model_type, fields, tmp_path):
  model = reference(model_type, **fields)
  cfg, params = converted(model, tmp_path)
  tokens, lengths, mask = texts(model.config.pad_token_id)
  with torch.no_grad():
    expected = model(input_ids=torch.tensor(tokens).long(), attention_mask=torch.tensor(mask).long()).logits.numpy()
  found = jax.jit(
    functools.partial(encoder.classify, cfg=cfg, dtype=jnp.float32)
  )(params, tokens=tokens, lengths=lengths)
  assert expected.std() > 0.1
  np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)
  garbage = np.where(mask, tokens, 7).astype(np.int32)
  np.testing.assert_array_equal(encoder.classify(params, cfg, garbage, lengths, dtype=jnp.float32),
                                encoder.classify(params, cfg, tokens, lengths, dtype=jnp.float32))


def test_token_types_tell_two_texts_apart(tmp_path):
  model = reference("bert", num_labels=2)
  cfg, params = converted(model, tmp_path)
  tokens, lengths, mask = texts(0)
  types = ((np.arange(20) >= 2) & mask).astype(np.int32)
  with torch.no_grad():
    expected = model(
      input_ids=torch.tensor(tokens).long(), attention_mask=torch.tensor(mask).long(),
      token_type_ids=torch.tensor(types).long()
    ).logits.numpy()
  np.testing.assert_allclose(
    encoder.classify(params, cfg, tokens, lengths, dtype=jnp.float32, token_types=jnp.asarray(types)), expected,
    rtol=0, atol=2e-5
  )


@pytest.mark.parametrize("model_type", ["bert", "roberta"])
def test_sentence_embeddings_equal_mean_pooling_of_transformers(model_type, tmp_path):
  model = reference(model_type, transformers.AutoModel)
  cfg, params = converted(model, tmp_path)
  tokens, lengths, mask = texts(model.config.pad_token_id)
  with torch.no_grad():
    hidden = model(
      input_ids=torch.tensor(tokens).long(), attention_mask=torch.tensor(mask).long()
    ).last_hidden_state.double().numpy()
  mean = (hidden * mask[..., None]).sum(1) / lengths[:, None]
  expected = mean / np.linalg.norm(mean, axis=-1, keepdims=True)
  np.testing.assert_allclose(
    encoder.embed_sentences(params, cfg, tokens, lengths, dtype=jnp.float32), expected, rtol=0, atol=1e-5
  )


def test_labels_are_those_of_the_config(tmp_path):
  model = reference("roberta", id2label={0: "neutral", 1: "toxic", 2: "severe"}, label2id={})
  cfg, params = converted(model, tmp_path)
  assert cfg.labels == ("neutral", "toxic", "severe") and params["classifier"]["kernel"].shape == (48, 3)
  config = model.config.to_dict() | {"architectures": ["RobertaForSequenceClassification"]}
  del config["id2label"]
  assert encoder.encoder_from_huggingface(config).labels == ("LABEL_0", "LABEL_1")


def test_a_head_of_another_task_is_left_aside(tmp_path):
  cfg, params = converted(reference("roberta", transformers.AutoModelForMaskedLM), tmp_path)
  assert cfg.labels == () and set(params) == {"embed", "layers"}


def test_every_leaf_comes_back_bit_for_bit_and_where_put_places_it(tmp_path):
  model = reference("bert", num_labels=3)
  seen = []
  saved(model, tmp_path)
  cfg, params, _ = load_encoder(
    tmp_path, dtype=jnp.float32, put=lambda path, array: (seen.append(path), jnp.asarray(array))[1]
  )
  tensors = {encoder.table_name(cfg, name): tensor.numpy() for name, tensor in model.state_dict().items()}
  entries = encoder.encoder_tensors(cfg)
  assert {entry.hf_name for entry in entries} == set(tensors)
  for entry in entries:
    leaf = functools.reduce(lambda node, key: node[key], entry.path, params)
    leaf = np.asarray(leaf if entry.layer is None else leaf[entry.layer])
    np.testing.assert_array_equal(hf_names.to_huggingface_tensor([entry], [leaf]), tensors[entry.hf_name])
  assert len(seen) == len(set(seen)) == len(jax.tree.leaves(params))


def test_rows_of_a_batch_are_cut_and_padded():
  tokenizer = tiny_tokenizers.chat_tokenizer()
  whole = [tokenizer.encode(text) for text in ("16 eggs", "a day, she eats 3 and sells the rest.", "")]
  tokens, lengths = tokenizer.encode_rows(["16 eggs", "a day, she eats 3 and sells the rest.", ""], max_tokens=9)
  assert lengths.tolist() == [len(whole[0]), 9, 0] and tokens.shape == (3, 9)
  for row, length, ids in zip(tokens, lengths, whole, strict=True):
    assert row[:length].tolist() == ids[:length] and (row[length:] == 0).all()


DENSE = "bert.encoder.layer.1.output.dense.weight"


@pytest.mark.parametrize(("change", "message"), [
  (lambda d: edit_json(d / "config.json", model_type="deberta"), "model_type='deberta' is no encoder that is supp"),
  (lambda d: edit_json(d / "config.json", rotary=True), "a bert encoder here does not know: rotary=True"),
  (lambda d: edit_json(d / "config.json", position_embedding_type="relative_key"),
   "position_embedding_type='relative_key'; a bert encoder here takes only 'absolute'"),
  (lambda d: edit_json(d / "config.json", architectures=["BertForTokenClassification"]),
   r"architectures=\['BertForTokenClassification'\]; a bert encoder here takes BertForMaskedLM, "),
  (lambda d: edit_json(d / "config.json", num_attention_heads=5), "hidden_size=48 must be a multiple of .*heads=5"),
  (lambda d: edit_json(d / "config.json", architectures=["BertModel"]), "2 tensors are not part .* classifier.bias"),
  (lambda d: edit_tensors(d, lambda t: t.update({"adapter.weight": t[DENSE]})), "1 tensors are not part .* adapter"),
  (lambda d: edit_tensors(d, lambda t: t.update({DENSE: t[DENSE][:3]})),
   r"output.dense.weight has shape \(3, 40\), but config.json implies \(48, 40\)"),
  (lambda d: edit_tensors(d, lambda t: t.pop(DENSE)), "missing, among them encoder.layer.1.output.dense.weight"),
  (lambda d: edit_tensors(d, lambda t: t.pop("classifier.weight")), "missing, among them classifier.weight"),
  (lambda d: edit_tensors(d, lambda t: t[DENSE].__setitem__((0, 0), np.nan)), "dense.weight holds NaN or infinity"),
  (lambda d: edit_tensors(d, lambda t: t.update({DENSE.removeprefix("bert."): t[DENSE]})), "are the same tensor"),
  (lambda d: (d / "config.json").unlink(), "holds no config.json"),
  (lambda d: (d / "sentence_bert_config.json").write_text('{"do_lower_case": true}'), "do_lower_case=True is not"),
  (lambda d: _pooling(d, pooling_mode_cls_token=True), "has pooling_mode_cls_token; only pooling_mode_mean_tokens"),
  (lambda d: (d / "2_Dense").mkdir(), "2_Dense is a layer after the pooling, which is not supported"),
])
def test_what_is_wrong_with_a_folder_is_said(tmp_path, change, message):
  change(saved(_bert(), tmp_path))
  with pytest.raises(ValueError, match=message):
    load_encoder(tmp_path, dtype=jnp.float32)


@functools.lru_cache(maxsize=None)
def _bert():
  return reference("bert", num_labels=4)


def _pooling(folder, **modes):
  (folder / "1_Pooling").mkdir()
  (folder / "1_Pooling" / "config.json").write_text(json.dumps(modes))


def test_what_cannot_be_encoded_is_said(tmp_path):
  cfg, params = converted(_bert(), tmp_path)
  with pytest.raises(ValueError, match="rows of 31 tokens are too long for this encoder, which takes 30"):
    encoder.encode(params, cfg, jnp.zeros((1, 31), jnp.int32), jnp.array([31]), dtype=jnp.float32)
  (tmp_path / "model.gguf").write_bytes(b"GGUF")
  with pytest.raises(ValueError, match="a .gguf file holds no encoder"):
    load_encoder(tmp_path / "model.gguf", dtype=jnp.float32)

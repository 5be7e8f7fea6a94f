"""Encoders against transformers."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parity import require
from tba_jax.models import encoder

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


def converted(model):
  cfg = encoder.encoder_from_huggingface(model.config.to_dict())
  return cfg, encoder.encoder_params(cfg, {name: tensor.numpy() for name, tensor in model.state_dict().items()})


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
def test_classifiers_equal_those_of_transformers(model_type, fields):
  model = reference(model_type, **fields)
  cfg, params = converted(model)
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


def test_token_types_tell_two_texts_apart():
  model = reference("bert", num_labels=2)
  cfg, params = converted(model)
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
def test_sentence_embeddings_equal_mean_pooling_of_transformers(model_type):
  model = reference(model_type, transformers.AutoModel)
  cfg, params = converted(model)
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


def test_mistakes_are_named():
  model = reference("bert")
  cfg, params = converted(model)
  tensors = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
  config = model.config.to_dict()
  with pytest.raises(ValueError, match="model_type='deberta' is no encoder that is supported"):
    encoder.encoder_from_huggingface({**config, "model_type": "deberta"})
  with pytest.raises(ValueError, match="does not know: rotary=True"):
    encoder.encoder_from_huggingface({**config, "rotary": True})
  with pytest.raises(
    ValueError, match="position_embedding_type='relative_key'; a bert encoder here takes only 'absolute'"
  ):
    encoder.encoder_from_huggingface({**config, "position_embedding_type": "relative_key"})
  with pytest.raises(ValueError, match="rows of 31 tokens are too long for this encoder, which takes 30"):
    encoder.encode(params, cfg, jnp.zeros((1, 31), jnp.int32), jnp.array([31]), dtype=jnp.float32)
  with pytest.raises(ValueError, match="tensors that are no part of a bert encoder: adapter.weight"):
    encoder.encoder_params(cfg, {**tensors, "adapter.weight": np.zeros(3)})
  name = "bert.encoder.layer.1.output.dense.weight"
  with pytest.raises(
    ValueError,
    match=r"encoder.layer.1.output.dense.weight: the tensor has shape \(3,\), but config.json implies \(48, 40\)"
  ):
    encoder.encoder_params(cfg, {**tensors, name: np.zeros(3)})
  with pytest.raises(ValueError, match="has no tensor 'encoder.layer.1.output.dense.weight'"):
    encoder.encoder_params(cfg, {key: value for key, value in tensors.items() if key != name})

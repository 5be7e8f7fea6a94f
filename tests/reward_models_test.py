"""Reward models in both public layouts against transformers and against the maths of their own training code."""

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import parity
import reference_models
import tiny_tokenizers
from huggingface_test import edit_json, edit_tensors
from tba_jax.checkpoints.huggingface import load_model, load_reward_model
from tba_jax.models.heads import scalar_scores

torch = parity.require("torch")
transformers = parity.require("transformers")

PAD, EOS, VOCAB_SIZE = 3, 0, 131
CASES = ("llama", "llama-biases", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gpt_neox", "gpt2")


@functools.lru_cache(maxsize=None)
def classifier(case: str, pad_id: int | None = PAD) -> torch.nn.Module:
  model_type, fields = reference_models.CASES[case]
  return reference_models.reference_model(
    model_type, auto=transformers.AutoModelForSequenceClassification,
    **{**fields, "num_labels": 1, "pad_token_id": pad_id},
  )


def saved(model: torch.nn.Module, folder: pathlib.Path, **special: str) -> pathlib.Path:
  model.save_pretrained(folder)
  return tiny_tokenizers.save(folder, **{"eos_token": "<|endoftext|>", "pad_token": "<|pad|>", **special})


def rows(side: str, *, ends_with: int | None = None) -> tuple[np.ndarray, np.ndarray]:
  """(tokens, mask) int32 [3, 12] of texts of 12, 7 and 2 tokens, padded with PAD; `ends_with` is their last token."""
  rng = np.random.default_rng(3)
  tokens, mask = np.full((3, 12), PAD, np.int32), np.zeros((3, 12), np.int32)
  for row, length in enumerate((12, 7, 2)):
    place = slice(0, length) if side == "right" else slice(12 - length, 12)
    tokens[row, place], mask[row, place] = rng.integers(4, VOCAB_SIZE, length), 1
    if ends_with is not None:
      tokens[row, place.stop - 1] = ends_with
  return tokens, mask


def our_scores(cfg, params, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
  positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0).astype(np.int32)
  return np.asarray(scalar_scores(params, cfg, tokens, positions, mask, dtype=jnp.float32))


def their_scores(model: torch.nn.Module, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
  tokens, mask = torch.tensor(tokens).long(), torch.tensor(mask).long()
  with torch.no_grad():
    return model(
      input_ids=tokens, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)
    ).logits[:, 0].numpy()


@pytest.mark.parametrize("case", CASES)
def test_classifiers_of_one_label_equal_transformers(case: str, tmp_path: pathlib.Path):
  model = classifier(case)
  cfg, params, tokenizer = load_reward_model(saved(model, tmp_path), dtype=jnp.float32)
  assert cfg.score_pad_id == PAD and "lm_head" not in params and tokenizer.stop_ids == (EOS,)
  assert set(params["score"]) == {"kernel"}
  for side in ("left", "right"):
    tokens, mask = rows(side)
    expected = their_scores(model, tokens, mask)
    assert expected.std() > 0.1
    np.testing.assert_allclose(our_scores(cfg, params, tokens, mask), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("case", ["llama", "gpt_neox"])
def test_where_padding_is_the_end_of_text_the_token_before_it_is_read(case: str, tmp_path: pathlib.Path):
  model = classifier(case, pad_id=EOS)
  folder = saved(model, tmp_path, pad_token="<|endoftext|>")
  cfg, params, tokenizer = load_reward_model(folder, dtype=jnp.float32)
  assert cfg.score_pad_id == tokenizer.hf.pad_token_id == EOS
  for side in ("left", "right"):
    tokens, mask = rows(side, ends_with=EOS)
    tokens[mask == 0] = EOS
    expected = their_scores(model, tokens, mask)
    np.testing.assert_allclose(our_scores(cfg, params, tokens, mask), expected, rtol=0, atol=2e-5)
    before = mask.copy()  # the same without the end of text
    for row in before:
      row[np.flatnonzero(row)[-1]] = 0
    np.testing.assert_allclose(our_scores(cfg, params, tokens, before), expected, rtol=0, atol=2e-5)


def test_without_a_padding_id_the_last_token_is_read(tmp_path: pathlib.Path):
  model = classifier("llama", pad_id=None)
  cfg, params, _ = load_reward_model(saved(model, tmp_path), dtype=jnp.float32)
  assert cfg.score_pad_id is None
  tokens, mask = rows("right", ends_with=PAD)
  expected = [their_scores(model, tokens[i : i + 1, :n], mask[i : i + 1, :n])[0] for i, n in enumerate((12, 7, 2))]
  np.testing.assert_allclose(our_scores(cfg, params, tokens, mask), expected, rtol=0, atol=2e-5)


def test_a_silent_config_pads_as_its_family_does(tmp_path: pathlib.Path):
  saved(classifier("gemma2"), tmp_path)
  config = json.loads((tmp_path / "config.json").read_text())
  del config["pad_token_id"]
  (tmp_path / "config.json").write_text(json.dumps(config))
  assert load_reward_model(tmp_path, dtype=jnp.float32)[0].score_pad_id == (
    transformers.AutoConfig.from_pretrained(tmp_path).pad_token_id
  ) == 0


class ScalarModel(torch.nn.Module):
  """The reward model of summarisation work: a bare decoder, a linear head with bias, a constant to be subtracted."""

  def __init__(self, backbone: torch.nn.Module, width: int, shift: float):
    super().__init__()
    self.lm_backbone, self.scalar_head, self.shift = backbone, torch.nn.Linear(width, 1), shift

  def scores(self, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
    mask = torch.tensor(mask).long()
    with torch.no_grad():
      hidden = self.lm_backbone(
        input_ids=torch.tensor(tokens).long() * mask, attention_mask=mask, output_hidden_states=True
      ).hidden_states[-1]
      score = self.scalar_head(hidden)[..., 0] - self.shift
    return np.array([float(row[np.flatnonzero(m)[-1]]) for row, m in zip(score, mask.numpy(), strict=True)])


def summarisation_model(folder: pathlib.Path, *, auto: Any = None, wrapped: bool = True, shift: float = 0.0, **fields):
  model_type, base = reference_models.CASES["gpt_neox"]
  backbone = reference_models.reference_model(model_type, auto=auto or transformers.AutoModel, **base)
  torch.manual_seed(5)
  model = ScalarModel(backbone, 48, shift)
  folder.mkdir(exist_ok=True)
  safetensors = parity.require("safetensors.torch")
  safetensors.save_model(model, str(folder / "model.safetensors"))
  config = backbone.config.to_dict()
  if wrapped:
    config = {
      "architectures": ["ScalarModel"], "base_config": config, "base_model": "EleutherAI/pythia-160m", "bias": shift,
      "hidden_size": 48, "torch_dtype": "float32", "transformers_version": "4.38.0", **fields,
    }
  (folder / "config.json").write_text(json.dumps(config))
  tiny_tokenizers.save(folder, eos_token="<|endoftext|>", pad_token="<|pad|>")
  return model


@pytest.mark.parametrize(("wrapped", "shift"), [(True, 0.0), (True, 2.5), (False, 0.0)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_summarisation_reward_models_equal_torch(tmp_path: pathlib.Path, wrapped: bool, shift: float, dtype: Any):
  model = summarisation_model(tmp_path, wrapped=wrapped, shift=shift)
  cfg, params, _ = load_reward_model(tmp_path, dtype=dtype)
  assert cfg.score_pad_id == PAD and {leaf.dtype for leaf in params["score"].values()} == {jnp.dtype(jnp.float32)}
  if dtype == jnp.bfloat16:  # the head alone keeps its precision
    np.testing.assert_array_equal(params["score"]["kernel"][:, 0], model.scalar_head.weight[0].detach().numpy())
    assert params["layers"]["mlp"]["up"]["kernel"].dtype == dtype
    return
  for side in ("left", "right"):
    tokens, mask = rows(side, ends_with=EOS)  # padded with an id of its own, so the end of text is read
    np.testing.assert_allclose(our_scores(cfg, params, tokens, mask), model.scores(tokens, mask), rtol=0, atol=2e-5)


def test_a_head_over_the_vocabulary_is_skipped_in_the_summarisation_layout_alone(tmp_path: pathlib.Path):
  backbone = reference_models.reference_model("gpt_neox", **reference_models.CASES["gpt_neox"][1])
  summarisation_model(tmp_path / "scalar")
  head = backbone.embed_out.weight if hasattr(backbone, "embed_out") else backbone.lm_head.weight
  head = head.detach().numpy().copy()
  edit_tensors(tmp_path / "scalar", lambda tensors: tensors.update({"lm_backbone.embed_out.weight": head}))
  assert "lm_head" not in load_reward_model(tmp_path / "scalar", dtype=jnp.float32)[1]
  saved(classifier("gpt_neox"), tmp_path / "score")
  edit_tensors(tmp_path / "score", lambda tensors: tensors.update({"embed_out.weight": head}))
  with pytest.raises(ValueError, match="1 tensors are not part of the model .* embed_out.weight"):
    load_reward_model(tmp_path / "score", dtype=jnp.float32)


UP = "gpt_neox.layers.1.mlp.dense_h_to_4h.weight"


@pytest.mark.parametrize(("change", "message"), [
  (lambda d: edit_tensors(d, lambda t: t.pop("score.weight")),
   "a reward model needs one of the tensors score.weight or scalar_head.weight; this checkpoint has 0 of them"),
  (lambda d: edit_tensors(d, lambda t: t.update({"scalar_head.weight": t["score.weight"]})), "checkpoint has 2 of"),
  (lambda d: edit_tensors(d, lambda t: t.update({"score.weight": t[UP][:2]})),
   r"score.weight has shape \(2, 48\), but a reward model of this config has one score, \(1, 48\)"),
  (lambda d: edit_tensors(d, lambda t: t["score.weight"].__setitem__((0, 5), np.inf)), "score.weight holds NaN"),
  (lambda d: edit_tensors(d, lambda t: t.pop(UP)), f"1 tensors .* are missing, among them {UP}"),
  (lambda d: edit_tensors(d, lambda t: t.update({UP: t[UP].T.copy()})), r"shape \(48, 40\), .* implies \(40, 48\)"),
  (lambda d: edit_tensors(d, lambda t: t.update({"value_head.weight": t[UP]})), "1 tensors are not part .* value"),
  (lambda d: edit_json(d / "config.json", architectures=["GPTNeoXForTokenClassification"]), "architectures=.*Token"),
  (lambda d: edit_json(d / "config.json", base_config={}, clip=1.0), "must be among base_config, .*found .*clip"),
  (lambda d: edit_json(d / "config.json", base_config="pythia"), "found .*num_hidden_layers"),
])
def test_what_is_wrong_with_a_folder_is_said(tmp_path: pathlib.Path, change: Any, message: str):
  change(saved(classifier("gpt_neox"), tmp_path))
  with pytest.raises(ValueError, match=message):
    load_reward_model(tmp_path, dtype=jnp.float32)


def test_what_is_wrong_with_a_summarisation_folder_is_said(tmp_path: pathlib.Path):
  summarisation_model(tmp_path / "width", hidden_size=64)
  with pytest.raises(ValueError, match="hidden_size=64, but its base_config 48"):
    load_reward_model(tmp_path / "width", dtype=jnp.float32)
  summarisation_model(tmp_path / "bias", shift=1.0)
  edit_tensors(tmp_path / "bias", lambda tensors: tensors.pop("scalar_head.bias"))
  with pytest.raises(ValueError, match="bias=1.0, but the checkpoint has no scalar_head.bias"):
    load_reward_model(tmp_path / "bias", dtype=jnp.float32)


def test_a_reward_model_is_no_policy(tmp_path: pathlib.Path):
  with pytest.raises(ValueError, match="tensors that config.json implies are missing, among them embed_out.weight"):
    load_model(saved(classifier("gpt_neox"), tmp_path), dtype=jnp.float32)
  (tmp_path / "model.gguf").write_bytes(b"GGUF")
  with pytest.raises(ValueError, match="a .gguf file holds no reward model"):
    load_reward_model(tmp_path / "model.gguf", dtype=jnp.float32)

"""config.json in and out: every field that can change the maths is read or refused."""

from __future__ import annotations

import numpy as np
import pytest

from parity import require
import reference_models
from tba_jax.models import rope
from tba_jax.models.variants import HARMLESS, RopeScaling, from_huggingface, to_huggingface

torch = require("torch")
transformers = require("transformers")

LLAMA = dict(model_type="llama", hidden_size=48, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
             intermediate_size=40,
             vocab_size=131)
GEMMA3 = dict(model_type="gemma3_text", hidden_size=48, num_hidden_layers=7, num_attention_heads=6,
              num_key_value_heads=2,
              intermediate_size=40, vocab_size=131)


def full_config(case: str) -> dict:
  model_type, fields = reference_models.CASES[case]
  return transformers.AutoConfig.for_model(model_type, **fields).to_dict()


@pytest.mark.parametrize("case", reference_models.CASES)
def test_an_exported_config_is_the_same_model_to_us_and_to_transformers(case):
  model_type, fields = reference_models.CASES[case]
  model = reference_models.reference_model(model_type, **fields)
  cfg, _ = reference_models.converted(model)
  exported = to_huggingface(cfg)
  assert from_huggingface(exported) == cfg
  again = transformers.AutoConfig.for_model(**exported)
  assert from_huggingface(again.to_dict()) == cfg
  other = transformers.AutoModelForCausalLM.from_config(again, attn_implementation="eager").eval()
  other.load_state_dict(model.state_dict())
  tokens = np.random.default_rng(0).integers(0, 131, (1, 24))
  np.testing.assert_allclose(
    reference_models.reference_logits(other, tokens), reference_models.reference_logits(model, tokens), rtol=0,
    atol=1e-5
  )


# Fields that say nothing in some configs: a window that no layer uses, a rule for layers that are listed one by one.
SILENT = {
  "is_decoder", "reorder_and_upcast_attn", "use_sliding_window", "max_window_layers", "sliding_window_pattern",
  "_sliding_window_pattern",
}


@pytest.mark.parametrize("case", reference_models.CASES)
def test_no_field_is_skipped(case):
  config = full_config(case)
  cfg = from_huggingface(config)
  for name, value in config.items():
    if name in HARMLESS or name in SILENT or (name == "sliding_window" and cfg.window is None):
      continue
    changed = {
      bool: lambda v: not v, int: lambda v: 2 * v, float: lambda v: 2 * v + 1,
      str: lambda v: "relu" if v != "relu" else "silu",
      type(None): lambda v: 7.0,
      list: lambda v: [("full_attention", "sliding_attention")[kind == "full_attention"] for kind in v],
      dict: lambda v: {**v, "unheard_of": 1},
    }[type(value)](value)
    try:
      other = from_huggingface({**config, name: changed})
    except ValueError:
      continue
    assert other != cfg, f"{name}: {value!r} -> {changed!r} changed nothing"


@pytest.mark.parametrize("case", reference_models.CASES)
def test_a_value_of_the_wrong_kind_is_an_error_that_names_its_field(case):
  config = full_config(case)
  for name in config:
    if name in HARMLESS:
      continue
    for value in (None, "x", -1, 0, 2.5, True, float("nan"), [], [None], {"a": 1}):
      try:
        from_huggingface({**config, name: value})
      except ValueError:
        continue
      # What is left is another model, or says nothing where no layer uses a window.
      assert value in (None, 2.5, True, 0) or name == "sliding_window", (name, value)


REAL = {
  "SmolLM2-135M": (
    dict(model_type="llama", architectures=["LlamaForCausalLM"], attention_bias=False, attention_dropout=0.0,
         bos_token_id=0,
         eos_token_id=0, hidden_act="silu", hidden_size=576, initializer_range=0.041666666666666664,
         intermediate_size=1536,
         is_llama_config=True, max_position_embeddings=8192, num_attention_heads=9, num_hidden_layers=30,
         num_key_value_heads=3,
         pretraining_tp=1, rms_norm_eps=1e-05, rope_interleaved=False, rope_scaling=None, rope_theta=100000,
         tie_word_embeddings=True,
         torch_dtype="bfloat16", transformers_version="4.40.1", use_cache=True, vocab_size=49152),
    dict(head_dim=64, num_kv_heads=3, rope_theta=1e5, tie_embeddings=True, num_embeddings=49152),
  ),
  "Llama-3.2-1B": (
    dict(model_type="llama", architectures=["LlamaForCausalLM"], attention_bias=False, attention_dropout=0.0,
         bos_token_id=128000,
         eos_token_id=128001, head_dim=64, hidden_act="silu", hidden_size=2048, initializer_range=0.02,
         intermediate_size=8192,
         max_position_embeddings=131072, mlp_bias=False, num_attention_heads=32, num_hidden_layers=16,
         num_key_value_heads=8,
         pretraining_tp=1, rms_norm_eps=1e-05, rope_scaling=dict(factor=32.0, high_freq_factor=4.0, low_freq_factor=1.0,
         original_max_position_embeddings=8192, rope_type="llama3"), rope_theta=500000.0, tie_word_embeddings=True,
         torch_dtype="bfloat16", transformers_version="4.45.0.dev0", use_cache=True, vocab_size=128256),
    dict(rope_scaling=RopeScaling(kind="llama3", factor=32.0, original_max_positions=8192), rope_theta=5e5),
  ),
  "Qwen2.5-1.5B-Instruct": (
    dict(model_type="qwen2", architectures=["Qwen2ForCausalLM"], attention_dropout=0.0, bos_token_id=151643,
         eos_token_id=151643,
         hidden_act="silu", hidden_size=1536, initializer_range=0.02, intermediate_size=8960,
         max_position_embeddings=131072,
         max_window_layers=21, num_attention_heads=12, num_hidden_layers=28, num_key_value_heads=2, rms_norm_eps=1e-06,
         rope_theta=1000000.0, sliding_window=131072, tie_word_embeddings=True, torch_dtype="bfloat16", use_cache=True,
         use_mrope=False, use_sliding_window=False, vocab_size=151936),
    dict(qkv_bias=True, o_bias=False, window=None, sliding_layers=(), head_dim=128),
  ),
  "gemma-2-2b": (
    dict(model_type="gemma2", architectures=["Gemma2ForCausalLM"], attention_bias=False, attention_dropout=0.0,
         attn_logit_softcapping=50.0, bos_token_id=2, cache_implementation="hybrid", eos_token_id=1,
         final_logit_softcapping=30.0,
         head_dim=256, hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh", hidden_size=2304,
         initializer_range=0.02, intermediate_size=9216, max_position_embeddings=8192, num_attention_heads=8,
         num_hidden_layers=26,
         num_key_value_heads=4, pad_token_id=0, query_pre_attn_scalar=256, rms_norm_eps=1e-06, rope_theta=10000.0,
         sliding_window=4096, torch_dtype="float32", use_cache=True, vocab_size=256000),
    dict(window=4096, sliding_layers=(True, False) * 13, attn_softcap=50.0, final_softcap=30.0, query_scale=1 / 16,
         tie_embeddings=True, post_norms=True, scale_embeddings=True, norm="rms_plus_one", activation="gelu_tanh"),
  ),
  "gemma-3-270m": (
    dict(model_type="gemma3_text", architectures=["Gemma3ForCausalLM"], _sliding_window_pattern=6, attention_bias=False,
         attention_dropout=0.0, attn_logit_softcapping=None, bos_token_id=2, eos_token_id=1,
         final_logit_softcapping=None, head_dim=256,
         hidden_activation="gelu_pytorch_tanh", hidden_size=640, initializer_range=0.02, intermediate_size=2048,
         layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 3, max_position_embeddings=32768,
         num_attention_heads=4,
         num_hidden_layers=18, num_key_value_heads=1, pad_token_id=0, query_pre_attn_scalar=256, rms_norm_eps=1e-06,
         rope_local_base_freq=10000.0, rope_scaling=None, rope_theta=1000000.0, sliding_window=512,
         torch_dtype="bfloat16",
         use_bidirectional_attention=False, use_cache=True, vocab_size=262144),
    dict(window=512, sliding_layers=((True,) * 5 + (False,)) * 3, rope_theta=1e6, rope_local_theta=1e4, qk_norm=True),
  ),
  "pythia-70m": (
    dict(model_type="gpt_neox", architectures=["GPTNeoXForCausalLM"], bos_token_id=0, eos_token_id=0, hidden_act="gelu",
         hidden_size=512, initializer_range=0.02, intermediate_size=2048, layer_norm_eps=1e-05,
         max_position_embeddings=2048,
         num_attention_heads=8, num_hidden_layers=6, rotary_emb_base=10000, rotary_pct=0.25, tie_word_embeddings=False,
         torch_dtype="float16", use_cache=True, use_parallel_residual=True, vocab_size=50304),
    dict(
      rotary_dim=16, head_dim=64, parallel_residual=True, norm="layer", activation="gelu", gated_mlp=False,
      num_kv_heads=8
    ),
  ),
  "gpt2": (
    dict(model_type="gpt2", activation_function="gelu_new", architectures=["GPT2LMHeadModel"], attn_pdrop=0.1,
         bos_token_id=50256,
         embd_pdrop=0.1, eos_token_id=50256, initializer_range=0.02, layer_norm_epsilon=1e-05, n_ctx=1024, n_embd=768,
         n_head=12,
         n_layer=12, n_positions=1024, resid_pdrop=0.1, summary_activation=None, summary_first_dropout=0.1,
         summary_proj_to_labels=True, summary_type="cls_index", summary_use_proj=True, task_specific_params={},
         vocab_size=50257),
    dict(positions="learned", mlp_size=3072, tie_embeddings=True, activation="gelu_tanh", max_positions=1024),
  ),
}


@pytest.mark.parametrize("name", REAL)
def test_published_configs_are_read(name):
  config, expected = REAL[name]
  cfg = from_huggingface(config)
  assert {field: getattr(cfg, field) for field in expected} == expected


@pytest.mark.parametrize(("config", "message"), [
  ({"hidden_size": 4}, "has no model_type"),
  (dict(LLAMA, model_type="mamba"), "model_type='mamba' is not supported; it must be one of gemma, "),
  (
    dict(LLAMA, architectures=["LlamaForQuestionAnswering"]),
    r"architectures=\['LlamaForQuestionAnswering'\]; model_type='llama' takes"
  ),
  (dict(LLAMA, logit_scale=2.0, mup=True), "does not know: logit_scale=2.0, mup=True. They may change the model"),
  (dict(LLAMA, sliding_window=8), "does not know: sliding_window=8"),
  (dict(LLAMA, quantization_config={"bits": 4}), "quantization_config={'bits': 4}; a llama model here takes only None"),
  (
    {name: value for name, value in LLAMA.items() if name != "intermediate_size"},
    "lacks intermediate_size, which a llama model needs"
  ),
  (dict(LLAMA, hidden_size="48"), "hidden_size='48'; it must be a whole number of at least 1"),
  (dict(LLAMA, num_attention_heads=None), "num_attention_heads=None; it must be a whole number of at least 1"),
  (dict(LLAMA, rms_norm_eps=float("nan")), "rms_norm_eps=nan; it must be a finite number above 0"),
  (dict(LLAMA, tie_word_embeddings=1), "tie_word_embeddings=1; it must be true or false"),
  (dict(LLAMA, rope_theta="1e4"), "rope_theta='1e4'; it must be a finite number above 0, or null"),
  (dict(LLAMA, rope_scaling=8), "rope_scaling=8; it must be an object, or null"),
  (dict(LLAMA, rope_scaling={"type": "linear", "factor": "2"}), "factor='2'; it must be a finite number above 0"),
  (dict(GEMMA3, layer_types="full_attention"), "layer_types='full_attention'; it must be a list of strings, or null"),
  (dict(GEMMA3, rope_parameters={"sliding_attention": 3}), "sliding_attention=3; it must be an object, or null"),
  (dict(LLAMA, model_type=["llama"]), r"model_type=\['llama'\]; it must be a string"),
  (dict(LLAMA, architectures="LlamaForCausalLM"), "architectures='LlamaForCausalLM'; it must be a list of strings"),
  (dict(LLAMA, hidden_act="xielu"), "the activation 'xielu' is not supported"),
  (dict(LLAMA, num_key_value_heads=4), "num_kv_heads=4 must divide num_heads=6"),
  (dict(LLAMA, hidden_size=50), "hidden_size=50 must be a multiple of num_heads=6"),
  (dict(LLAMA, head_dim=7), "rotary_dim=7 must be even and at most head_dim=7"),
  (
    dict(LLAMA, rope_scaling={"rope_type": "longrope", "factor": 2.0}),
    "rope_type='longrope' is not supported; it must be one of default, linear"
  ),
  (dict(LLAMA, rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "rope_type='dynamic' is not supported"),
  (
    dict(LLAMA, rope_scaling={"type": "linear"}),
    r"'linear' needs the parameters \['factor'\] and may have \[\], but config.json gives \[\]"
  ),
  (dict(LLAMA, rope_scaling={"type": "linear", "factor": 2.0, "mscale": 1.0}), r"gives \['factor', 'mscale'\]"),
  (
    dict(LLAMA, rope_scaling={"type": "linear", "rope_type": "yarn", "factor": 2.0}),
    "gives rope_type twice, as 'linear' and as 'yarn'"
  ),
  (
    dict(LLAMA, rope_theta=1e4, rope_parameters={"rope_theta": 1e6}),
    "gives rope_theta twice, as 10000.0 and as 1000000.0"
  ),
  (dict(GEMMA3, attn_logit_softcapping=50.0), "attn_logit_softcapping=50.0; a gemma3_text model here takes only None"),
  (
    dict(GEMMA3, layer_types=["chunked_attention"] * 7),
    "it needs one of 'full_attention' or 'sliding_attention' for each of 7 layers"
  ),
  (dict(GEMMA3, sliding_window=None), "sliding_window=None with sliding layers; it must be at least 1"),
  (
    dict(GEMMA3, use_bidirectional_attention=True),
    "use_bidirectional_attention=True; a gemma3_text model here takes only None or False"
  ),
  (
    dict(GEMMA3, rope_parameters={"sliding_attention": {"rope_type": "linear", "factor": 2.0}}),
    "take a rope_theta and rope_type 'default' only"
  ),
])
def test_what_we_do_not_have_is_refused_by_name(config, message):
  with pytest.raises(ValueError, match=message):
    from_huggingface(config)


def test_a_vocabulary_beyond_the_table_is_refused():
  import dataclasses

  with pytest.raises(ValueError, match="vocab_size=132 must be between 1 and num_embeddings=131"):
    dataclasses.replace(from_huggingface(LLAMA), vocab_size=132)


@pytest.mark.parametrize("kind", ["llama3", "linear", "yarn"])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_scaled_frequencies_equal_those_of_transformers(kind, theta):
  scaling = {
    "llama3": dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192),
    "linear": dict(factor=4.0),
    "yarn": dict(factor=4.0, original_max_position_embeddings=4096),
  }[kind]
  fields = dict(
    LLAMA, head_dim=128, max_position_embeddings=32768, rope_theta=theta, rope_scaling=dict(scaling, rope_type=kind)
  )
  cfg = from_huggingface(fields)
  from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

  expected, factor = ROPE_INIT_FUNCTIONS[kind](transformers.AutoConfig.for_model(**fields), "cpu")
  np.testing.assert_allclose(
    rope.inverse_frequencies(cfg.rope_theta, cfg.rotary_dim, cfg.rope_scaling), expected.numpy(), rtol=2e-6
  )
  assert rope.attention_factor(cfg.rope_scaling) == pytest.approx(factor, rel=1e-12)

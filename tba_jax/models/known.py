"""config.json of models that the configs name, so that a plan needs neither network nor weights: the published fields.

Source: the model pages on the Hugging Face hub. Only what changes shapes or the maths is kept.
"""

from __future__ import annotations

from typing import Any

_LLAMA_1B = {  # TinyLlama's shapes, which Rho-1 was trained in
  "model_type": "llama", "vocab_size": 32000, "hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32,
  "num_key_value_heads": 4, "intermediate_size": 5632, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
  "rope_theta": 10000.0, "tie_word_embeddings": False,
}
_QWEN25 = {
  "model_type": "qwen2", "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
  "use_sliding_window": False, "hidden_act": "silu",
}
_QWEN25_7B = {
  **_QWEN25, "vocab_size": 152064, "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
  "num_key_value_heads": 4, "intermediate_size": 18944, "tie_word_embeddings": False,
}
_LLAMA3 = {
  "model_type": "llama", "vocab_size": 128256, "num_attention_heads": 32, "num_key_value_heads": 8,
  "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 500000.0,
}
_LLAMA3_ROPE = {
  "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}
_LLAMA32_1B = {
  **_LLAMA3, "hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192, "head_dim": 64,
  "tie_word_embeddings": True, "rope_scaling": {**_LLAMA3_ROPE, "factor": 32.0},
}
_LLAMA31_8B = {
  **_LLAMA3, "hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, "tie_word_embeddings": False,
  "rope_scaling": {**_LLAMA3_ROPE, "factor": 8.0},
}

_GPT2 = {
  "model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024,
  "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
}
_ROBERTA_HATE = {
  "model_type": "roberta", "architectures": ["RobertaForSequenceClassification"], "vocab_size": 50265,
  "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
  "max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5, "hidden_act": "gelu",
  "pad_token_id": 1, "id2label": {"0": "nothate", "1": "hate"},
}


def _pythia(hidden_size: int, num_layers: int, num_heads: int, vocab_size: int = 50304) -> dict[str, Any]:
  return {
    "model_type": "gpt_neox", "vocab_size": vocab_size, "hidden_size": hidden_size, "num_hidden_layers": num_layers,
    "num_attention_heads": num_heads, "intermediate_size": 4 * hidden_size, "max_position_embeddings": 2048,
    "rotary_pct": 0.25, "rotary_emb_base": 10000, "layer_norm_eps": 1e-5, "use_parallel_residual": True,
    "tie_word_embeddings": False, "hidden_act": "gelu",
  }


_PYTHIA = {
  "410m": _pythia(1024, 24, 16), "1b": _pythia(2048, 16, 8), "2.8b": _pythia(2560, 32, 32),
  "6.9b": _pythia(4096, 32, 32, 50432),
}

# Hub name, lower case -> config.json.
KNOWN: dict[str, dict[str, Any]] = {
  "realtreetune/rho-1b-sft-gsm8k": _LLAMA_1B,
  "microsoft/rho-math-1b-v0.1": _LLAMA_1B,
  "qwen/qwen2.5-7b": _QWEN25_7B,
  "qwen/qwen2.5-7b-instruct": _QWEN25_7B,
  "meta-llama/llama-3.2-1b": _LLAMA32_1B,
  "meta-llama/llama-3.2-1b-instruct": _LLAMA32_1B,
  "meta-llama/llama-3.1-8b": _LLAMA31_8B,
  "meta-llama/llama-3.1-8b-instruct": _LLAMA31_8B,
  "meta-llama/llama-guard-3-8b": _LLAMA31_8B,
  "openai-community/gpt2": _GPT2,
  "vicgalle/gpt2-alpaca": _GPT2,
  "facebook/roberta-hate-speech-dynabench-r4-target": _ROBERTA_HATE,
  **{name.format(size): fields for size, fields in _PYTHIA.items() for name in (
    "eleutherai/pythia-{}", "eleutherai/pythia-{}-deduped", "mnoukhov/pythia{}-sft-tldr",
    "mnoukhov/pythia{}-rm-tldr6.9b",
    "cleanrl/eleutherai_pythia-{}-deduped__sft__tldr", "cleanrl/eleutherai_pythia-{}-deduped__reward__tldr")},
}

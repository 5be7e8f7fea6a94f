"""`transformers` generate as a system of the benchmarks: torch on CPU, float32, one thread."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from experiments.rivals import shapes
from experiments.rivals.stopwatch import Stopwatch

torch.set_num_threads(1)


class System:
  """Methods are called by name over a pipe; arguments and results are JSON."""

  def __init__(self):
    self._model = None

  def versions(self) -> dict[str, str]:
    return {"torch": torch.__version__, "transformers": transformers.__version__}

  def load(self, folder: str, model: str) -> None:
    del model  # the folder says it
    self._model = AutoModelForCausalLM.from_pretrained(
      folder, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()

  @torch.inference_mode()
  def log_probs(self, tokens: list[list[int]]) -> list[list[float]]:
    """log p of tokens [B, T] given those before; the first of a row is 0."""
    tokens = torch.tensor(tokens)
    log_p = torch.log_softmax(self._model(tokens).logits[:, :-1].float(), -1)
    chosen = torch.gather(log_p, -1, tokens[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(chosen, (1, 0)).tolist()

  def sample(
    self, kind: str, prompts: list[list[int]], new_tokens: list[int], samples: int, slots: int, seed: int,
    greedy: bool = False,
  ) -> dict[str, Any]:
    """Samples every prompt once; `tokens_per_sec` counts the tokens that were asked for.

    `kind`: "dynamic" or "static" cache, in batches of `slots` prompts in the given order, each run until its longest
    request is done; "continuous" is the package's continuous batching with at most `slots` requests at once.
    """
    assert samples == 1, samples
    torch.manual_seed(seed)
    run = self._continuous if kind == "continuous" else self._batches
    watch = Stopwatch()
    outputs = run(kind, prompts, new_tokens, slots, greedy)
    times = watch.read()
    for row, new in zip(outputs, new_tokens, strict=True):
      assert len(row) >= new, (len(row), new)
    result = {**times, "tokens_per_sec": sum(new_tokens) / times["secs"]}
    if greedy:
      result["tokens"] = [row[:new] for row, new in zip(outputs, new_tokens, strict=True)]
    return result

  def _config(self, *, greedy: bool, new_tokens: int, **more: Any) -> GenerationConfig:
    """Plain sampling from the whole distribution; nothing ends a response but its length."""
    sampling = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    return GenerationConfig(max_new_tokens=new_tokens, pad_token_id=shapes.PAD_ID, **sampling, **more)

  @torch.inference_mode()
  def _batches(
    self, kind: str, prompts: list[list[int]], new_tokens: list[int], slots: int, greedy: bool
  ) -> list[list[int]]:
    outputs = []
    self._model.generation_config.eos_token_id = None
    for first in range(0, len(prompts), slots):
      tokens = torch.tensor(prompts[first : first + slots])  # of one length
      config = self._config(
        greedy=greedy, new_tokens=max(new_tokens[first : first + slots]), cache_implementation=kind,
        min_new_tokens=None,
      )
      out = self._model.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=config)
      outputs += out[:, tokens.shape[1] :].tolist()
    return outputs

  def _continuous(
    self, kind: str, prompts: list[list[int]], new_tokens: list[int], slots: int, greedy: bool
  ) -> list[list[int]]:
    del kind
    page = 64
    pages = -(-(max(map(len, prompts)) + max(new_tokens)) // page)
    settings = ContinuousBatchingConfig(
      page_size=page, num_blocks=slots * pages, max_batch_tokens=slots * 64, max_requests_per_batch=slots,
      allow_block_sharing=False,
    )
    config = self._config(greedy=greedy, new_tokens=max(new_tokens), eos_token_id=-1)
    names, outputs = [], {}
    with self._model.continuous_batching_context_manager(
      generation_config=config, continuous_batching_config=settings
    ) as manager:
      for prompt, new in zip(prompts, new_tokens, strict=True):
        names.append(manager.add_request(prompt, max_new_tokens=new, eos_token_id=-1))
      while len(outputs) < len(prompts):
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
          outputs[result.request_id] = result.generated_tokens
        elif result is None and not manager.is_running():
          raise RuntimeError("continuous batching stopped before it was done")
    return [outputs[name] for name in names]

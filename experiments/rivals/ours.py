"""This repository's sampler and train step as a system of the benchmarks."""

from __future__ import annotations

import pathlib
import time
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
import transformers

from experiments.rivals import roofline, shapes
from experiments.rivals.stopwatch import Stopwatch
from tba_jax import learner
from tba_jax.checkpoints.huggingface import load_model, save_model
from tba_jax.models import transformer
from tba_jax.models.variants import from_huggingface
from tba_jax.sampling.engine import Engine, SampleRequest, sample_keys
from tba_jax.tokenizer import Tokenizer, make_tokenizer

LOGIT_STD = 1.5  # of the random models, about: neither flat nor certain


def make_words(vocab_size: int) -> Tokenizer:
  """A tokenizer with a word per id, for systems that will not do without one."""
  words = {"<pad>": shapes.PAD_ID, "<stop>": shapes.STOP_ID} | {f"w{i}": i for i in range(2, vocab_size)}
  backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
  backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  hf = transformers.PreTrainedTokenizerFast(
    tokenizer_object=backend, pad_token="<pad>", eos_token="<stop>", unk_token="<pad>",
    clean_up_tokenization_spaces=False,
  )
  return make_tokenizer(hf, source="benchmark")


class System:
  """Methods are called by name over a pipe; arguments and results are JSON."""

  def __init__(self):
    self._cfg, self._params, self._decode_params = None, None, None
    self._engines: dict[str, Engine] = {}
    self._floors: dict[tuple[str, int], Any] = {}

  def versions(self) -> dict[str, str]:
    return {"jax": jax.__version__, "flax": flax.__version__}

  def write_model(self, model: str, folder: str) -> None:
    """A random model of the named shape as a folder that every system loads."""
    if pathlib.Path(folder, "config.json").exists():
      return
    cfg = from_huggingface({**shapes.COMMON, **shapes.MODELS[model]})
    params = transformer.init_params(cfg, jax.random.key(0))
    scale = LOGIT_STD / (transformer.EMBEDDING_STD * cfg.hidden_size**0.5)
    params = {**params, "embed": {"table": params["embed"]["table"] * scale}}
    save_model(folder, cfg, params, make_words(cfg.vocab_size))

  def load(self, folder: str) -> None:
    self._engines.clear()
    self._cfg, self._params, _ = load_model(folder, dtype=jnp.float32)
    self._decode_params = jax.device_put(jax.jit(transformer.unstack)(self._params), jax.devices()[0])

  def log_probs(self, tokens: list[list[int]]) -> list[list[float]]:
    """log p of tokens [B, T] given those before; the first of a row is 0."""
    tokens = jnp.asarray(tokens, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    score = learner.make_scorer(self._cfg, temperature=1.0, dtype=jnp.float32, chunk_tokens=1024)
    return score(self._params, tokens, positions, jnp.ones_like(tokens)).tolist()

  def greedy_gap(self, tokens: list[list[int]], prompt_tokens: int) -> float:
    """How far the new tokens of rows fall short of the likeliest ones, at most, in nats."""
    tokens = jnp.asarray(tokens, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

    @jax.jit
    def gap(params: Any) -> jax.Array:
      hidden = transformer.hidden_states(
        params, self._cfg, tokens, positions, jnp.ones_like(tokens), dtype=jnp.float32
      )[:, prompt_tokens - 1 : -1]
      logits = transformer.logits(params, self._cfg, hidden)
      chosen = jnp.take_along_axis(logits, tokens[:, prompt_tokens:, None], axis=-1)[..., 0]
      return jnp.max(jnp.max(logits, axis=-1) - chosen)

    return float(gap(self._params))

  def prepare_sampler(self, key: str, options: dict[str, Any]) -> float:
    """Builds an engine and compiles its programs; seconds."""
    began = time.perf_counter()
    engine = Engine(
      self._cfg, jax.devices()[0], stop_ids=(), dtype=jnp.float32, log_mu_temperature=1.0, **options
    )
    engine.set_weights(self._decode_params, version=0)
    engine.warmup()
    self._engines[key] = engine
    return time.perf_counter() - began

  def sample(
    self, key: str, prompts: list[list[int]], new_tokens: list[int], samples: int, seed: int, greedy: bool = False
  ) -> dict[str, Any]:
    """Samples every prompt; `tokens_per_sec` counts new tokens. `step_secs` are CPU seconds of the engine's steps."""
    engine = self._engines[key]
    outputs: list[Any] = [None] * len(prompts)
    step_secs, busy = [], []
    watch = Stopwatch()
    for index, (prompt, new) in enumerate(zip(prompts, new_tokens, strict=True)):
      keys = sample_keys(seed, occurrence=index, attempt=0, num_samples=samples)
      engine.submit(SampleRequest(
        index, np.asarray(prompt, np.int32), keys, temperature=0.0 if greedy else 1.0, max_new_tokens=new
      ))
    while engine.num_groups:
      then = time.process_time()
      for group in engine.step():
        outputs[group.tag] = group
      step_secs.append(time.process_time() - then)
      busy.append(engine.num_queued > 0)
    times = watch.read()
    num_tokens = int(sum(group.lengths.sum() for group in outputs))
    assert num_tokens == samples * sum(new_tokens), (num_tokens, samples * sum(new_tokens))
    result = {
      **times, "tokens_per_sec": num_tokens / times["secs"], "step_secs": step_secs, "steps_with_queue": sum(busy),
    }
    if greedy:
      result["tokens"] = [group.tokens[0].tolist() for group in outputs]
    return result

  def forget_samplers(self) -> None:
    self._engines.clear()

  def peaks(self) -> dict[str, float]:
    return roofline.peaks()

  def floor(self, model: str, rows: int) -> dict[str, float]:
    """The weight products of one decode step alone."""
    if (model, rows) not in self._floors:
      self._floors[model, rows] = roofline.make_floor(model, rows=rows)
    secs = self._floors[model, rows]()
    return {"secs": secs}

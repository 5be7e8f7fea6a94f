"""google-tunix's own sampler and jitted train step as a system of the benchmarks, with its Llama 3."""

from __future__ import annotations

from collections.abc import Callable
import importlib.metadata
import time
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from tunix.generate import sampler as sampler_lib
from tunix.models.llama3 import model as model_lib
from tunix.models.llama3 import params as params_lib
from tunix.rl import algo_core
from tunix.rl import common
from tunix.sft import peft_trainer

from experiments.rivals import shapes
from experiments.rivals.stopwatch import Stopwatch

NO_PADDING = -1  # no id of the vocabulary: it masks tokens that equal its padding, also those it has sampled


class Ids:
  """A tokenizer whose texts are ids with spaces between them, so that prompts arrive as they are."""

  def encode(self, text: str) -> list[int]:
    return [int(word) for word in text.split()]

  def decode(self, ids: list[int]) -> str:
    return " ".join(map(str, ids))

  def bos_id(self) -> int:
    return 0  # none is put before a prompt

  def eos_id(self) -> int:
    return shapes.STOP_ID

  def pad_id(self) -> int:
    return NO_PADDING


def load_model(model: str, folder: str) -> model_lib.Llama3:
  m = shapes.MODELS[model]
  config = model_lib.ModelConfig(
    num_layers=m["num_hidden_layers"], vocab_size=m["vocab_size"], embed_dim=m["hidden_size"],
    hidden_dim=m["intermediate_size"], num_heads=m["num_attention_heads"], head_dim=shapes.head_dim(model),
    num_kv_heads=m["num_key_value_heads"], rope_theta=int(m["rope_theta"]), norm_eps=shapes.COMMON["rms_norm_eps"],
    weight_tying=True,
  )
  mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(1, 1), ("fsdp", "tp"))
  return params_lib.create_model_from_safe_tensors(folder, config, mesh, dtype=jnp.float32)


class System:
  """Methods are called by name over a pipe; arguments and results are JSON."""

  def __init__(self):
    self._model, self._initial, self._name, self._step, self._inputs = None, None, "", None, None
    self._samplers: dict[str, sampler_lib.Sampler] = {}

  def versions(self) -> dict[str, str]:
    return {"google-tunix": importlib.metadata.version("google-tunix"), "jax": jax.__version__}

  def load(self, folder: str, model: str) -> None:
    self._samplers.clear()
    self._name, self._model = model, load_model(model, folder)
    self._initial = jax.tree.map(jnp.copy, nnx.state(self._model))

  def log_probs(self, tokens: list[list[int]]) -> list[list[float]]:
    """log p of tokens [B, T] given those before; the first of a row is 0."""
    tokens = jnp.asarray(tokens, jnp.int32)
    graphdef, state = nnx.split(self._model)
    log_p = common.compute_per_token_logps(
      graphdef, state, tokens[:, :1], tokens[:, 1:], NO_PADDING, shapes.STOP_ID
    )
    return jnp.pad(log_p, ((0, 0), (1, 0))).tolist()

  def prepare_sampler(self, key: str, prompts: list[list[int]], new_tokens: list[int], samples: int) -> float:
    """Builds a sampler whose cache is as long as needed, and compiles it by a first call; seconds."""
    began = time.perf_counter()
    m = shapes.MODELS[self._name]
    cache = sampler_lib.CacheConfig(
      cache_size=len(prompts[0]) + max(new_tokens), num_layers=m["num_hidden_layers"],
      num_kv_heads=m["num_key_value_heads"], head_dim=shapes.head_dim(self._name),
    )
    self._samplers[key] = sampler_lib.Sampler(self._model, Ids(), cache)
    self.sample(key, prompts, new_tokens, samples, seed=0)
    return time.perf_counter() - began

  def sample(
    self, key: str, prompts: list[list[int]], new_tokens: list[int], samples: int, seed: int, greedy: bool = False
  ) -> dict[str, Any]:
    """Samples all prompts, of one length, once; the number of new tokens is the same for all."""
    assert samples == 1 and len(set(new_tokens)) == 1, (samples, new_tokens)
    texts = [" ".join(map(str, prompt)) for prompt in prompts]
    how = {} if greedy else {"temperature": 1.0, "top_p": 1.0}
    watch = Stopwatch()
    output = self._samplers[key](
      texts, max_generation_steps=max(new_tokens), max_prompt_length=len(prompts[0]), eos_tokens=[-1], seed=seed, **how
    )
    times = watch.read()
    assert all(len(row) == max(new_tokens) for row in output.tokens), [len(row) for row in output.tokens]
    result = {**times, "tokens_per_sec": len(prompts) * max(new_tokens) / times["secs"]}
    if greedy:
      result["tokens"] = np.asarray(output.tokens).tolist()
    return result

  def prepare_learner(self, data: dict[str, Any], settings: dict[str, float], entropy: bool) -> list[float]:
    """The trainer's own jitted step for the batch, compiled by two calls; CPU seconds. Their updates are undone.

    The second call compiles once more, for the first one's results are laid out in another way than a fresh state is. A
    call that compiles nothing is taken off both.

    `entropy`: whether the loss function computes it over the responses, as that of its GRPO does.
    """
    optimizer = optax.chain(
      optax.clip_by_global_norm(settings["clip_norm"]),
      optax.adamw(
        settings["learning_rate"], b1=settings["b1"], b2=settings["b2"], eps=settings["eps"], weight_decay=0.0
      ),
    )
    nnx.update(self._model, jax.tree.map(jnp.copy, self._initial))
    config = peft_trainer.TrainingConfig(eval_every_n_steps=1 << 30, max_steps=1 << 30)
    trainer = peft_trainer.PeftTrainer(self._model, optimizer, config).with_loss_fn(
      make_loss(settings["beta"], num_groups=max(data["group_ids"]) + 1, entropy=entropy), has_aux=True
    )
    self._inputs = {"data": {name: jnp.asarray(np.asarray(values)) for name, values in data.items()}}
    self._step, _ = trainer.jit_train_and_eval_step(cache_nnx_graph=True)
    fresh = jax.tree.map(jnp.copy, nnx.state(trainer.optimizer))
    first, second, third = (self.train(steps=1)["cpu_secs"] for _ in range(3))
    nnx.update(self._model, jax.tree.map(jnp.copy, self._initial))
    nnx.update(trainer.optimizer, fresh)
    return [first - third, second - third]

  def train(self, steps: int) -> dict[str, Any]:
    """Takes steps on the same batch; seconds of a step, and its loss and gradient norm (of the last step)."""
    watch = Stopwatch()
    for _ in range(steps):
      results = self._step(self._inputs)
    loss, _, norm = jax.block_until_ready(results)
    return {**watch.read(parts=steps), "loss": float(loss), "grad_norm": float(norm)}

  def forget_learner(self) -> None:
    self._step = self._inputs = None


def make_loss(beta: float, *, num_groups: int, entropy: bool) -> Callable[..., tuple[jax.Array, dict[str, jax.Array]]]:
  """The TB loss on the log-probabilities that google-tunix's GRPO is computed from."""

  def loss_fn(model: nnx.Module, data: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
    graphdef, state = nnx.split(model)
    log_pi, logits = common.compute_per_token_logps(
      graphdef, state, prompt_tokens=data["prompts"], completion_tokens=data["responses"], pad_id=NO_PADDING,
      eos_id=shapes.STOP_ID, stop_gradient=False, return_logits=True,
    )
    ratio = jnp.sum(log_pi - data["log_ref"], axis=1)
    groups = data["group_ids"]
    sums = lambda values: jax.ops.segment_sum(values, groups, num_groups)
    mean = lambda values: (sums(values) / sums(jnp.ones_like(values)))[groups]
    rewards = data["rewards"]
    residual = beta * (ratio - mean(jax.lax.stop_gradient(ratio))) - (rewards - mean(rewards))
    aux = {"entropy": jnp.mean(algo_core.compute_entropy_from_logits(logits))} if entropy else {}
    return jnp.mean(jnp.square(residual)) / (2 * beta), aux

  return loss_fn

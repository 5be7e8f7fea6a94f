"""Which device holds what, and how many bytes, from shapes alone: nothing is compiled, allocated or loaded.

Only what stays for the whole run is counted. Activations and the compiler's temporaries need a compile: no guess here.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tba_jax import learner, sharding
from tba_jax.checkpoints.gguf import read_gguf
from tba_jax.checkpoints.locate import PACKAGE, in_package
from tba_jax.checkpoints.stored import read_json
from tba_jax.models import lora as lora_lib
from tba_jax.models import transformer
from tba_jax.models.known import KNOWN
from tba_jax.models.lora import LoraSettings
from tba_jax.models.variants import ModelConfig, from_huggingface


class Placement(NamedTuple):
  """Something that stays in memory for the whole run."""

  part: str  # trainer, searcher 0, ..., host
  devices: str
  content: str
  device_bytes: int  # on each of the devices
  total_bytes: int  # on all of them, copies counted


def read_model_config(path: str) -> ModelConfig:
  """The config of a model without its weights. `path` as in `checkpoints.huggingface.load_model`.

  Of a hub model that is in `models.known` nothing is downloaded, of another only config.json.
  Raises:
    ValueError: there is no such model here, or its config is refused.
  """
  found = pathlib.Path(path)
  if path.startswith(PACKAGE):
    found = in_package(path.removeprefix(PACKAGE))
  if found.is_file():
    return from_huggingface(read_gguf(found).config)
  if not found.is_dir():
    if path.lower() in KNOWN:
      return from_huggingface(KNOWN[path.lower()])
    import huggingface_hub

    try:
      return from_huggingface(read_json(pathlib.Path(huggingface_hub.hf_hub_download(path, "config.json"))))
    except OSError as error:
      raise ValueError(f"no folder, and not to be had from the Hugging Face hub ({type(error).__name__}); download it "
                       "elsewhere and give its folder") from None
  return from_huggingface(read_json(found / "config.json"))


def placements(
  cfg: ModelConfig, devices: Sequence[jax.Device], *, trainer: int, searchers: int, per_searcher: int, share: bool,
  optimizer: str, param_dtype: Any, compute_dtype: Any, sample_dtype: Any, slots: int, max_prompt_tokens: int,
  max_new_tokens: int, buffer_capacity: int, lora: LoraSettings | None = None,
) -> list[Placement]:
  """What each part of a run keeps, device counts as `config.resolve_devices` gives them.

  With `lora` the trainer keeps a base in `compute_dtype` and trains adapters. A searcher keeps the same whether
  adapters are trained or everything: the weights (merged ones), and the reference (the base that they are merged with).
  Raises: ValueError if the pattern of `lora` matches no layer.
  """
  trainer_devices, searcher_devices = sharding.split_devices(
    devices, trainer=trainer, searchers=searchers, per_searcher=per_searcher, share=share)
  mesh = sharding.make_mesh(trainer_devices)
  base = transformer.abstract_params(cfg, jnp.dtype(compute_dtype))
  whole = transformer.abstract_params(cfg, jnp.dtype(param_dtype))
  params = whole if lora is None else lora_lib.abstract_adapters(cfg, settings=lora)
  layout = sharding.param_shardings(params, mesh)
  # Of the optimizer only the shapes matter here, and those do not depend on rates.
  transform = learner.make_optimizer(optimizer, schedule=learner.make_schedule("constant", learning_rate=1.0),
                                     clip_norm=1.0)
  moments = jax.eval_shape(transform.init, params)
  moments_layout = sharding.state_shardings(moments, params, layout, mesh)
  frozen = [] if lora is None else [
    _place("trainer", trainer_devices, "frozen base", base, sharding.param_shardings(base, mesh))
  ]
  found = frozen + [
    _place("trainer", trainer_devices, "parameters" if lora is None else "adapters", params, layout),
    _place("trainer", trainer_devices, "optimizer state", moments, moments_layout),
    _place("trainer", trainer_devices, "gradients", params, layout),
  ]
  for number, group in enumerate(searcher_devices):
    mesh = sharding.make_mesh(group)
    for content, dtype in (("weights", sample_dtype), ("reference", compute_dtype)):
      weights = transformer.abstract_params(cfg, jnp.dtype(dtype))
      layout = sharding.param_shardings(weights, mesh)
      found.append(_place(f"searcher {number}", group, content, weights, layout))
    cache = jax.eval_shape(lambda: transformer.init_cache(
      cfg, batch=slots, length=max_prompt_tokens + max_new_tokens, dtype=jnp.dtype(sample_dtype)))
    total = _num_bytes(cache)  # shared out by slots
    found.append(Placement(f"searcher {number}", _names(group), f"cache of {slots} slots", total // len(group), total))
  # Per response: tokens, log_mu and log_ref, and at most one prompt; all of 4 bytes. Scalars of a row do not matter.
  total = buffer_capacity * 4 * (3 * max_new_tokens + max_prompt_tokens)
  return found + [Placement("host", "memory", f"replay buffer when full ({buffer_capacity:,} responses)", total, total)]


def _place(part: str, devices: Sequence[jax.Device], content: str, tree: Any, layout: Any) -> Placement:
  per_device = sum(
    math.prod(where.shard_shape(leaf.shape)) * np.dtype(leaf.dtype).itemsize
    for leaf, where in zip(jax.tree.leaves(tree), jax.tree.leaves(layout))
  )
  return Placement(part, _names(devices), content, per_device, per_device * len(devices))


def _num_bytes(tree: Any) -> int:
  return sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


def _names(devices: Sequence[jax.Device]) -> str:
  """Numbers of the devices: 0-3, or 4."""
  numbers = [device.id for device in devices]
  if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[0] + len(numbers))):
    return f"{numbers[0]}-{numbers[-1]}"
  return ", ".join(map(str, numbers))


def report(cfg: ModelConfig, placed: Sequence[Placement], *, num_devices: int, platform: str) -> str:
  """The placements as a text table, with the size of the model above it."""
  num_params = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(transformer.abstract_params(cfg)))
  sizes = f"{cfg.num_layers} layers, width {cfg.hidden_size}, {cfg.num_embeddings:,} embeddings"
  lines = [
    f"{cfg.family}: {num_params:,} parameters, {sizes}",
    f"{num_devices} {platform} devices; activations and temporaries are not counted (they need a compile)",
    "",
    f"{'part':12} {'devices':10} {'content':46} {'bytes a device':>18} {'all':>18}",
  ]
  for row in placed:
    lines.append(f"{row.part:12} {row.devices:10} {row.content:46} {row.device_bytes:>18,} {row.total_bytes:>18,}")
  return "\n".join(lines)

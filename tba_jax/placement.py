"""Which device holds what, and how many bytes, from shapes alone: nothing is compiled, allocated or loaded.

Only what stays for the whole run is counted. Activations and the compiler's temporaries need a compile: no guess here.
"""

from __future__ import annotations

import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tba_jax import optimizers, sharding
from tba_jax.checkpoints.gguf import read_gguf
from tba_jax.checkpoints.locate import PACKAGE, in_package
from tba_jax.checkpoints.stored import read_json
from tba_jax.models import encoder, scalar_head, transformer
from tba_jax.models import lora as lora_lib
from tba_jax.models.known import KNOWN
from tba_jax.models.lora import LoraSettings
from tba_jax.models.variants import ModelConfig, from_huggingface
from tba_jax.sampling import decode
from tba_jax.sampling.shapes import make_shapes


class Placement(NamedTuple):
  """Something that stays in memory for the whole run."""

  part: str  # trainer, searcher 0, ..., host
  devices: str
  content: str
  device_bytes: int  # on each of the devices
  total_bytes: int  # on all of them, copies counted


class Beside(NamedTuple):
  """Something that a task keeps on each searcher beside the policy and its reference."""

  name: str
  tree: Any  # of shapes and dtypes
  layout: Callable[[Mesh], Any]  # its shardings over a searcher's mesh


def read_model_config(path: str) -> ModelConfig:
  """The config of a decoder without its weights. `path` as in `checkpoints.huggingface.load_model`.

  Of a hub model that is in `models.known` nothing is downloaded, of another only config.json.
  Raises:
    ValueError: there is no such model here, or its config is refused.
  """
  return from_huggingface(_read_config(path))


def model_beside(name: str, path: str, *, dtype: Any) -> Beside:
  """A decoder or encoder that a task loads. Raises: ValueError as `read_model_config`."""
  config = _read_config(path)
  if "model_type" in config and config["model_type"] in encoder.FAMILIES:
    tree = encoder.abstract_params(encoder.encoder_from_huggingface(config), dtype)
  else:
    tree = transformer.abstract_params(from_huggingface(config), dtype)
  return Beside(name, tree, lambda mesh: sharding.param_shardings(tree, mesh))


def cache_beside(
  name: str, path: str, *, slots: int, max_prompt_tokens: int, max_new_tokens: int, dtype: Any
) -> Beside:
  """Keys and values of a model that answers beside a searcher, by an engine of its own."""
  cfg = read_model_config(path)
  caches = _caches(cfg, slots=slots, lane_samples=1, max_prompt_tokens=max_prompt_tokens, max_new_tokens=max_new_tokens,
                   cache_dtype=dtype, attention="xla")
  return Beside(name, caches, lambda mesh: jax.tree.map(lambda _: decode.slot_shardings(mesh, cfg).cache, caches))


def _caches(
  cfg: ModelConfig, *, slots: int, lane_samples: int, max_prompt_tokens: int, max_new_tokens: int, cache_dtype: Any,
  attention: str,
) -> Any:
  """Shapes of an engine's keys and values: of its slots and of its lanes' prompts."""
  shapes = make_shapes(
    slots=slots, lane_samples=lane_samples, max_prompt_tokens=max_prompt_tokens, max_new_tokens=max_new_tokens,
    chunk_tokens=1, recompute_kv=False, attention=attention)
  state = jax.eval_shape(lambda: decode.init_state(
    cfg, slots=slots, cache_tokens=shapes.slot_tokens, cache_dtype=jnp.dtype(cache_dtype), lane_samples=lane_samples,
    prefix_tokens=max_prompt_tokens, attention=attention))
  return state.cache, state.prefix


def _read_config(path: str) -> dict[str, Any]:
  """The fields of config.json, see `read_model_config`."""
  found = pathlib.Path(path)
  if path.startswith(PACKAGE):
    found = in_package(path.removeprefix(PACKAGE))
  if found.is_file():
    return read_gguf(found).config
  if not found.is_dir():
    if path.lower() in KNOWN:
      return KNOWN[path.lower()]
    import huggingface_hub

    try:
      return read_json(pathlib.Path(huggingface_hub.hf_hub_download(path, "config.json")))
    except OSError as error:
      raise ValueError(f"no folder, and not to be had from the Hugging Face hub ({type(error).__name__}); download it "
                       "elsewhere and give its folder") from None
  return read_json(found / "config.json")


def placements(
  cfg: ModelConfig, devices: Sequence[jax.Device], *, trainer: int, searchers: int, per_searcher: int, share: bool,
  optimizer: str, param_dtype: Any, compute_dtype: Any, sample_dtype: Any, cache_dtype: Any, attention: str, slots: int,
  lane_samples: int, max_prompt_tokens: int, max_new_tokens: int, buffer_capacity: int,
  lora: LoraSettings | None = None, reference_moves: bool = False, reference_average: bool = False,
  beside: Sequence[Beside] = (), with_head: bool = False, with_advantages: bool = False, num_processes: int = 1,
) -> list[Placement]:
  """What each part of a run keeps, device counts as `config.resolve_devices` gives them; searchers 0 where they are in
  other processes.

  With `lora` the trainer keeps a base in `compute_dtype` and trains adapters. A searcher keeps the same whether
  adapters are trained or everything: the weights (merged ones), and the reference (the base that they are merged with).
  A reference that moves is kept by the trainer too, and with `reference_average` the float32 average that it is set to.
  `beside`: what the task keeps on each searcher.
  `with_head`: the loss learns a scalar head beside the model, with AdamW's state. `with_advantages`: rows hold an
  advantage for each token. `num_processes`: that the trainer's mesh spans.
  Raises: ValueError if the pattern of `lora` matches no layer.
  """
  trainer_devices, searcher_devices = sharding.devices_of_run(
    devices, trainer=trainer, searchers=searchers, per_searcher=per_searcher, share=share, num_processes=num_processes)
  mesh = sharding.make_mesh(trainer_devices)
  base = transformer.abstract_params(cfg, jnp.dtype(compute_dtype))
  whole = transformer.abstract_params(cfg, jnp.dtype(param_dtype))
  params = whole if lora is None else lora_lib.abstract_adapters(cfg, settings=lora)
  layout = sharding.param_shardings(params, mesh)
  # Of the optimizer only the shapes matter here, and those do not depend on rates.
  transform = optimizers.make_optimizer(optimizer, schedule=optimizers.make_schedule("constant", learning_rate=1.0),
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
  for wanted, content, dtype in (
    (reference_moves, "reference", sample_dtype), (reference_average, "average for the reference", "float32"),
  ):
    if wanted:
      copy = transformer.abstract_params(cfg, jnp.dtype(dtype))
      found.append(_place("trainer", trainer_devices, content, copy, sharding.param_shardings(copy, mesh)))
  if with_head:
    head = scalar_head.abstract_scalar_head(cfg)
    copies = [head] * 4  # the gradient and two moments beside it
    layouts = [sharding.param_shardings(head, mesh)] * 4
    found.append(_place("trainer", trainer_devices, "scalar head", copies, layouts))
  for number, group in enumerate(searcher_devices):
    mesh = sharding.make_mesh(group)
    mesh = sharding.make_mesh(group, fsdp=1, tensor=len(group))
    weights = transformer.abstract_params(cfg, jnp.dtype(sample_dtype))
    layout = sharding.param_shardings(weights, mesh)
    for content in ("weights", "weights that arrive", "reference"):
      found.append(_place(f"searcher {number}", group, content, weights, layout))
    caches = _caches(
      cfg, slots=slots, lane_samples=lane_samples, max_prompt_tokens=max_prompt_tokens, max_new_tokens=max_new_tokens,
      cache_dtype=cache_dtype, attention=attention)
    layout = jax.tree.map(lambda _: decode.slot_shardings(mesh, cfg).cache, caches)
    found.append(_place(f"searcher {number}", group, f"cache of {slots} slots", caches, layout))
    for extra in beside:
      found.append(_place(f"searcher {number}", group, extra.name, extra.tree, extra.layout(mesh)))
  # Per response: tokens, log_mu, log_ref, perhaps advantages, and at most one prompt; all of 4 bytes. Scalars of a row
  # do not matter.
  total = buffer_capacity * 4 * ((3 + with_advantages) * max_new_tokens + max_prompt_tokens)
  return found + [Placement("host", "memory", f"replay buffer when full ({buffer_capacity:,} responses)", total, total)]


def _place(part: str, devices: Sequence[jax.Device], content: str, tree: Any, layout: Any) -> Placement:
  per_device = sum(
    math.prod(where.shard_shape(leaf.shape)) * np.dtype(leaf.dtype).itemsize
    for leaf, where in zip(jax.tree.leaves(tree), jax.tree.leaves(layout))
  )
  return Placement(part, _names(devices), content, per_device, per_device * len(devices))


def summary(placed: Sequence[Placement]) -> str:
  """A line a part: what it keeps, in bytes a device. Parts that keep the same share a line."""
  lines: dict[str, list[str]] = {}
  for part in dict.fromkeys(row.part for row in placed):
    rows = [row for row in placed if row.part == part]
    content = ", ".join(f"{row.content} {row.device_bytes:,}" for row in rows)
    total = sum(row.device_bytes for row in rows)
    lines.setdefault(f"{total:,} bytes{'' if part == 'host' else ' a device'} ({content})", []).append(part)
  return "\n".join(f"{', '.join(parts)}: {line}" for line, parts in lines.items())


def check_fits(placed: Sequence[Placement], limits: Mapping[str, int]) -> None:
  """Refuses what cannot fit, before anything of it is allocated.

  Args:
    placed: what stays for the whole run.
    limits: bytes that each group of devices has, by its name in `placed`; see `device_limits`.
  Raises: ValueError with what the fullest devices would hold.
  """
  for devices, limit in limits.items():
    rows = [row for row in placed if devices in (row.devices, "all") and row.devices != "memory"]
    needed = sum(row.total_bytes if devices == "all" else row.device_bytes for row in rows)
    if needed > limit:
      content = ", ".join(f"{row.part}: {row.content} {row.total_bytes if devices == 'all' else row.device_bytes:,}"
                          for row in rows)
      raise ValueError(
        f"devices {devices} would hold {needed:,} bytes{'' if devices == 'all' else ' each'} but have {limit:,} "
        f"({content}); lower sample.slots or the token limits, share the model over more devices, or choose a smaller "
        "cache_dtype"
      )


def device_limits(devices: Sequence[jax.Device], placed: Sequence[Placement]) -> dict[str, int]:
  """Bytes of memory by the name of a group of devices in `placed`. Devices that do not tell theirs are left out; CPU
  devices share the machine's, under the name "all"."""
  if devices[0].platform == "cpu":
    return {"all": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")}
  stats = (devices[0].memory_stats() or {}).get("bytes_limit")
  return {} if stats is None else {row.devices: stats for row in placed if row.devices != "memory"}


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

"""Ways to split a slice between trainer and searchers, and the memory that each leaves on the devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from ml_collections import ConfigDict

from tba_jax import config as config_lib
from tba_jax.chips import RESERVE_SHARE, Chip
from tba_jax.models.variants import ModelConfig
from tba_jax.plan.compiler import Compiled
from tba_jax.plan.programs import Part, largest_batch
from tba_jax.work import num_params


# Program -> the resident that its result is, and how many of them are kept at once.
KEPT_RESULTS = {"publish": ("copy being published", 1), "prefill": ("prefilled prompts", 2)}


@dataclasses.dataclass(frozen=True)
class Memory:
  """Bytes on each device of a part. `needed` is everything at the worst moment."""

  residents: dict[str, int]
  temporaries: int  # of the program with most
  worst_program: str
  code: int  # of all programs that a run compiles, as many times as they have shapes
  reserve: int
  capacity: int

  @property
  def needed(self) -> int:
    return sum(self.residents.values()) + self.temporaries + self.code + self.reserve

  @property
  def fits(self) -> bool:
    return self.needed <= self.capacity


def candidates(config: ConfigDict, cfg: ModelConfig, num_devices: int) -> Iterator[config_lib.DeviceCounts]:
  """Splits that the model and the batch divide over; the config's own if it counts its devices, and then only that.

  Trainer and searchers have devices of their own, searchers of equal size (the config's, if it gives one) fill what the
  trainer leaves.
  Raises: ValueError if the config counts more devices than there are.
  """
  devices = config.devices
  if devices.trainer or devices.searchers or devices.share or num_devices == 1:
    yield config_lib.resolve_devices(**devices, num_devices=num_devices)
    return
  micro_rows = config.train.prompts_per_step * config.train.responses_per_prompt // config.train.micro_batches
  for trainer in range(1, num_devices):
    if (micro_rows % trainer and not config.train.packing) or cfg.hidden_size % trainer:
      continue
    left = num_devices - trainer
    for per_searcher in (devices.per_searcher,) if devices.per_searcher else range(1, left + 1):
      if left % per_searcher == 0 and cfg.num_heads % per_searcher == 0 and cfg.mlp_size % per_searcher == 0:
        yield config_lib.DeviceCounts(trainer, left // per_searcher, per_searcher, False)


def estimated_searcher_temporaries(config: ConfigDict, cfg: ModelConfig, *, per_searcher: int) -> int:
  """Of scoring a group on each device, before anything is compiled: attention scores of a layer in float32 and in the
  computation's dtype, a piece of the head, and the weights once more (see `compiled_memory`)."""
  longest, width = config.train.length_buckets[-1], 2 if config.train.compute_dtype == "bfloat16" else 4
  scores = config.sample.responses_per_prompt * cfg.num_heads * longest**2 * (4 + width)
  head = 2 * 4 * cfg.num_embeddings * config.train.head_chunk_tokens
  return (scores + head + num_params(cfg) * (2 if config.sample.dtype == "bfloat16" else 4)) // per_searcher


def estimated_temporaries(config: ConfigDict, cfg: ModelConfig, *, trainer: int) -> int:
  """Of a train step on each device, before anything is compiled: gradients and their sum, one layer's activations with
  its attention scores, the inputs of all layers, and a piece of the head."""
  shape = largest_batch(config, trainer)
  rows = shape.num_rows // config.train.micro_batches // trainer
  tokens, width = rows * shape.row_tokens, 2 if config.train.compute_dtype == "bfloat16" else 4
  grads = 4 * num_params(cfg) // trainer
  layer = tokens * (cfg.num_heads * shape.row_tokens * 8 + 4 * cfg.mlp_size * width)
  inputs = cfg.num_layers * tokens * cfg.hidden_size * width
  head = 3 * 4 * cfg.num_embeddings * config.train.head_chunk_tokens // trainer
  return grads + layer + inputs + head


def screen_memory(part: Part, chip: Chip, *, temporaries: int) -> Memory:
  """Memory of a part by its residents and an estimate of its temporaries."""
  reserve, capacity = round(RESERVE_SHARE * chip.hbm_bytes), round(chip.hbm_bytes)
  return Memory(_residents(part), temporaries, "estimate", 0, reserve, capacity)


def compiled_memory(part: Part, compiled: Sequence[Compiled], chip: Chip) -> Memory:
  """Memory of a part by what the compiler said of its programs.

  What a program returns beside its donated arguments counts as temporary, but for results that stay: the published copy
  and prefilled prompts, which take the place of their estimates among the residents. The figure of a program that does
  not fit is the compiler's, arguments included.
  """
  residents, peaks = _residents(part), {}
  for each in compiled:
    peaks[each.name] = each.overflow_bytes or each.temp_bytes
    if each.name in KEPT_RESULTS and not each.overflow_bytes:
      content, copies = KEPT_RESULTS[each.name]
      residents[content] = copies * each.output_bytes
    elif not each.overflow_bytes:
      peaks[each.name] += each.output_bytes - each.alias_bytes
  if "score" in peaks:  # once per version a group is scored by the weights that sampled it, stacked for that
    peaks["check of log-probabilities"] = peaks["score"] + residents["weights"]
  worst = max(peaks, key=lambda name: peaks[name])
  code = sum(each.code_bytes * program.variants for each, program in zip(compiled, part.programs, strict=True))
  reserve, capacity = round(RESERVE_SHARE * chip.hbm_bytes), round(chip.hbm_bytes)
  return Memory(residents, peaks[worst], worst, code, reserve, capacity)


def shared_memory(trainer: Memory, searcher: Memory) -> Memory:
  """Of a device that belongs to the trainer and a searcher, which take turns."""
  worst = max(trainer, searcher, key=lambda memory: memory.temporaries)
  residents = {**trainer.residents, **{f"searcher's {name}": size for name, size in searcher.residents.items()}}
  return dataclasses.replace(worst, residents=residents, code=trainer.code + searcher.code)


def _residents(part: Part) -> dict[str, int]:
  return {resident.content: resident.device_bytes for resident in part.residents}

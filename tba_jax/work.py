"""What the programs of a run do, by formula: FLOPs, and bytes that go through a device's memory.

The compiler's own count will not do: it takes the body of a loop once, however often the loop runs, and layers,
micro-batches, pieces of the head and decoded tokens are all loops here. Matrix products are counted, a multiply-add as
two; what is elementwise, norms and softmax are left out (about 1% of a large model). Letters as in `types`.
"""

from __future__ import annotations

import dataclasses
import math

from tba_jax.models.variants import ModelConfig

# Float32 copies of the parameters that an update reads or writes.
_OPTIMIZER_PASSES = {"adamw": 7, "adafactor": 3, "sgd": 3}


@dataclasses.dataclass(frozen=True)
class Work:
  """FLOPs and bytes of memory traffic of one call, on each device."""

  flops: float
  hbm_bytes: float

  def __add__(self, other: Work) -> Work:
    return Work(self.flops + other.flops, self.hbm_bytes + other.hbm_bytes)

  def times(self, factor: float) -> Work:
    return Work(self.flops * factor, self.hbm_bytes * factor)


def layer_params(cfg: ModelConfig) -> int:
  """Elements of the kernels of one layer."""
  attention = cfg.hidden_size * cfg.head_dim * 2 * (cfg.num_heads + cfg.num_kv_heads)
  return attention + (3 if cfg.gated_mlp else 2) * cfg.hidden_size * cfg.mlp_size


def num_params(cfg: ModelConfig) -> int:
  """Elements of all matrices and tables. Norms and biases, some 0.01%, are not counted."""
  tables = (1 if cfg.tie_embeddings else 2) * cfg.num_embeddings * cfg.hidden_size
  return cfg.num_layers * layer_params(cfg) + tables


def matmul_params(cfg: ModelConfig) -> int:
  """Elements of the matrices that every token is multiplied with: all layers and the head."""
  return cfg.num_layers * layer_params(cfg) + cfg.hidden_size * cfg.num_embeddings


def cache_element_bytes(cfg: ModelConfig, dtype: str) -> float:
  """Of an entry of a cache stored as `dtype`; int8 with its scales, one float32 a head."""
  return 1 + 4 / cfg.head_dim if dtype == "int8" else 2 if dtype == "bfloat16" else 4


def cache_token_bytes(cfg: ModelConfig, dtype: str) -> float:
  """Keys and values of one token in all layers."""
  return 2 * cfg.num_kv_heads * cfg.head_dim * cfg.num_layers * cache_element_bytes(cfg, dtype)


def forward_flops(cfg: ModelConfig, *, tokens: float, context: float, head_tokens: float) -> float:
  """Of `tokens` positions that each attend to `context` positions, and of the head at `head_tokens` positions.

  Attention is computed for masked positions too, so `context` is the padded length.
  """
  layer = 2 * layer_params(cfg) + 4 * context * cfg.num_heads * cfg.head_dim
  return tokens * cfg.num_layers * layer + head_tokens * 2 * cfg.hidden_size * cfg.num_embeddings


def prefill_flops(cfg: ModelConfig, *, rows: int, row_tokens: int) -> float:
  """Of reading prompts, padding included: the last layer has keys and values of all tokens, the rest, and the head, of
  each row's last one."""
  tokens = rows * row_tokens
  layer = 2 * layer_params(cfg) + 4 * row_tokens * cfg.num_heads * cfg.head_dim
  keys_and_values = 4 * cfg.hidden_size * cfg.num_kv_heads * cfg.head_dim
  whole = forward_flops(cfg, tokens=tokens, context=row_tokens, head_tokens=rows)
  return whole - (tokens - rows) * (layer - keys_and_values)


def train_flops(
  cfg: ModelConfig, *, rows: int, row_tokens: int, head_row_tokens: int, remat: str, one_pass: bool, adapters_only: bool
) -> float:
  """Of one train step over all devices, what the backward pass computes again included.

  Args:
    rows, row_tokens: of the batch, padding included. head_row_tokens: of a row, those that the head runs for.
    remat: "full" computes each layer again but for what its own backward pass does not read, "dots" attention, "none"
      nothing. The head is computed again, as it is where it goes in pieces.
    one_pass: as in `learner.make_train_step`; otherwise all of log_pi is computed beforehand.
    adapters_only: the kernels get no gradient; the adapters' own products are not counted.
  """
  tokens = rows * row_tokens
  head_tokens = rows * head_row_tokens
  forward = forward_flops(cfg, tokens=tokens, context=row_tokens, head_tokens=head_tokens)
  layers = forward_flops(cfg, tokens=tokens, context=row_tokens, head_tokens=0)
  head = forward - layers
  attention = tokens * cfg.num_layers * 4 * row_tokens * cfg.num_heads * cfg.head_dim
  last = cfg.hidden_size * cfg.mlp_size  # the product that ends a layer; of a parallel block both ends
  if cfg.parallel_residual:
    last += cfg.num_heads * cfg.head_dim * cfg.hidden_size
  again = {"full": layers - tokens * cfg.num_layers * 2 * last, "dots": attention, "none": 0.0}[remat] + head
  # Activations get one product, kernels another; attention has no kernels, so both of its are needed in either case.
  backward = (forward + attention) if adapters_only else 2 * forward
  # With two passes the backward one does not need the values of the head, only what is computed again of it.
  return forward + again + backward + (0.0 if one_pass else layers)


def train_work(
  cfg: ModelConfig, *, rows: int, row_tokens: int, head_row_tokens: int, micro_batches: int, remat: str, one_pass: bool,
  adapters_only: bool, optimizer: str, compute_bytes: int, devices: int, fused_attention: bool,
) -> Work:
  """One train step on each of `devices` devices that split rows and parameters (FSDP).

  Memory: every micro-batch and pass over the layers writes the gathered weights and reads them; gradients are written,
  reduced and added; the update reads and writes its float32 state; activations go out and in once between fused
  operations; attention scores too, unless `fused_attention`; logits thrice. `compute_bytes` is the size of an element
  of weights and activations in the computation.
  """
  flops = train_flops(
    cfg, rows=rows, row_tokens=row_tokens, head_row_tokens=head_row_tokens, remat=remat, one_pass=one_pass,
    adapters_only=adapters_only) / devices
  passes = 3 + (remat == "full") + (not one_pass)  # over the weights: forward, backward (counts two), again
  params, shard = num_params(cfg), num_params(cfg) / devices
  trained = 0.0 if adapters_only else 1.0
  weights = micro_batches * (2 * passes * params * compute_bytes + trained * (params * compute_bytes + 3 * 4 * shard))
  update = trained * _OPTIMIZER_PASSES[optimizer] * 4 * shard
  tokens = rows * row_tokens / devices
  activations = passes * tokens * _activation_bytes(cfg, row_tokens, compute_bytes, fused_attention)
  logits = (3 + (not one_pass)) * 3 * rows * head_row_tokens / devices * cfg.num_embeddings * 4
  return Work(flops, weights + update + activations + logits)


def forward_work(
  cfg: ModelConfig, *, rows: int, row_tokens: int, head_tokens: int, compute_bytes: int, devices: int,
  fused_attention: bool,
) -> Work:
  """One pass over whole rows (scoring, a reward model) on each of `devices` tensor-parallel devices."""
  tokens = rows * row_tokens
  flops = forward_flops(cfg, tokens=tokens, context=row_tokens, head_tokens=head_tokens) / devices
  activations = tokens * _activation_bytes(cfg, row_tokens, compute_bytes, fused_attention)
  logits = 3 * head_tokens * cfg.num_embeddings * 4
  return Work(flops, (num_params(cfg) * compute_bytes + activations + logits) / devices)


def prefill_work(
  cfg: ModelConfig, *, rows: int, row_tokens: int, compute_bytes: int, devices: int, fused_attention: bool
) -> Work:
  """Reading prompts on each of `devices` tensor-parallel devices; memory as of a pass over whole rows."""
  passed = forward_work(
    cfg, rows=rows, row_tokens=row_tokens, head_tokens=rows, compute_bytes=compute_bytes, devices=devices,
    fused_attention=fused_attention)
  return Work(prefill_flops(cfg, rows=rows, row_tokens=row_tokens) / devices, passed.hbm_bytes)


def decode_work(
  cfg: ModelConfig, *, slots: int, kv_length: float, cache_length: int, chunk_tokens: int, compute_bytes: int,
  cache_bytes: float, devices: int, lane_samples: int = 1, prefix_length: float = 0,
) -> Work:
  """One token in each of `slots` slots on each of `devices` tensor-parallel devices.

  All weights but the embedding table are read, and the first `kv_length` entries of every slot's cache; where that is
  less than `cache_length` they are cut out before a chunk. Lanes of `lane_samples` slots read their prompt's
  `prefix_length` entries once for all. Sampling goes over the logits 6 times. An element of the cache has
  `cache_bytes`.
  """
  flops = forward_flops(cfg, tokens=slots, context=kv_length + prefix_length, head_tokens=slots) / devices
  head = cfg.hidden_size * cfg.num_embeddings
  weights = (cfg.num_layers * layer_params(cfg) + head) * compute_bytes / devices
  kv_devices = math.gcd(devices, cfg.num_kv_heads) if cfg.num_kv_heads % devices == 0 else 1
  entry = 2 * cfg.num_kv_heads * cfg.head_dim * cfg.num_layers * cache_bytes / kv_devices
  own, shared = slots * kv_length * entry, slots / lane_samples * prefix_length * entry
  copies = 0.0 if kv_length >= cache_length else 2 * own / chunk_tokens
  logits = 6 * slots * cfg.num_embeddings * 4 / devices
  return Work(flops, weights + own + shared + copies + logits)


def _activation_bytes(cfg: ModelConfig, context: float, compute_bytes: int, fused_attention: bool) -> float:
  """Of one token in one pass through all layers."""
  heads = (cfg.num_heads + 2 * cfg.num_kv_heads) * cfg.head_dim
  elements = 8 * cfg.hidden_size + 4 * heads + 2 * cfg.num_heads * cfg.head_dim
  elements += (6 if cfg.gated_mlp else 3) * cfg.mlp_size
  scores = 0.0 if fused_attention else cfg.num_heads * context * (2 * 4 + 2 * compute_bytes)
  return cfg.num_layers * (elements * compute_bytes + scores)

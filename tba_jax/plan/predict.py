"""Seconds, tokens per second, staleness and idle time of a split, by a roofline.

    secs of a program = max(FLOPs / (peak x MFU), memory bytes / (bandwidth x share)) + link bytes / (link x share)

with the sum in place of the maximum for a CPU, whose cores do not read while they compute.

It is a model and no measurement: nothing was executed on the chip. Work is counted by formula (`work`), link bytes come
out of the compiled program (`hlo`), the chip's constants and their sources are in `chips`. Left out: host work, time
to launch, other traffic on the links.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Mapping

from tba_jax.chips import LINK_SHARE, Chip
from tba_jax.models.variants import ModelConfig
from tba_jax.work import Work, decode_work, forward_work, prefill_work, train_work


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
  """What a run does, by its config, and how long its texts are on average (an assumption of the plan).

  `step_tokens`: padded length of the rows of a typical step; with `packing` several sequences share one. `kv_length`:
  entries of the cache that a typical chunk reads. `every_steps`: publishes. `bounded`: flow control lets searchers get
  only so far ahead. `reuses`: a response may be trained on more than once, so the trainer never waits for fresh ones.
  """

  prompts_per_step: int
  responses_per_prompt: int  # trained
  num_samples: int  # sampled per prompt
  mean_prompt_tokens: float
  mean_response_tokens: float
  max_new_tokens: int
  step_tokens: int
  score_tokens: int  # padded length of the rows that a searcher scores
  packing: bool
  micro_batches: int
  remat: str
  one_pass: bool
  adapters_only: bool
  optimizer: str
  compute_bytes: int
  sample_bytes: int
  cache_bytes: float  # of an element, scales included
  slots: int
  chunk_tokens: int
  lane_samples: int  # slots that share a prompt
  kv_length: int
  prefix_length: int  # of the lanes' prompts; 0 where each slot has its own
  cache_length: int
  prefill_prompts: int
  prefill_tokens: int
  every_steps: int
  bounded: bool
  reuses: bool
  alternates: bool  # trainer and searchers take turns


@dataclasses.dataclass(frozen=True, kw_only=True)
class Terms:
  """Seconds of one call by what bounds it; `secs` puts them together."""

  compute_secs: float
  memory_secs: float
  link_secs: float
  overlap: bool  # of arithmetic and memory

  @property
  def secs(self) -> float:
    together = max if self.overlap else operator.add
    return together(self.compute_secs, self.memory_secs) + self.link_secs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
  """One split. Rates are of all searchers together; tokens are response tokens."""

  step: Terms
  step_work: Work
  decode: Terms  # one token in every slot of one searcher
  decode_work: Work
  prefill: Terms
  score: Terms
  beside: dict[str, Terms]  # of the task's own models, for a group
  steps_per_hour: float
  trained_tokens_per_sec: float
  sampled_tokens_per_sec: float
  fresh_ratio: float  # groups that can be sampled per group trained; below 1 old responses are trained on again
  transfer_secs: float
  staleness_updates: float  # of what was sampled recently
  trainer_idle: float
  searcher_idle: float


def terms(work: Work, link_bytes: float, chip: Chip) -> Terms:
  """The three times of one call."""
  return Terms(
    compute_secs=work.flops / (chip.peak_flops * chip.mfu),
    memory_secs=work.hbm_bytes / (chip.hbm_bytes_per_sec * chip.hbm_share),
    link_secs=link_bytes / (chip.link_bytes_per_sec * LINK_SHARE),
    overlap=chip.overlaps,
  )


def predict(
  cfg: ModelConfig, load: Workload, chip: Chip, *, trainer: int, searchers: int, per_searcher: int, share: bool,
  published_bytes: int, step_link_bytes: float, decode_link_bytes: float, prefill_link_bytes: float,
  score_link_bytes: float, beside: Mapping[str, Work],
) -> Prediction:
  """The figures of one split of a slice.

  Args:
    trainer, searchers, per_searcher: devices. share: all take turns on the same ones.
    published_bytes: that arrive on each device of a searcher.
    *_link_bytes: of one call of the compiled program; decode: of a whole chunk.
    beside: what the task's own models do for a group, on each device of a searcher.
  """
  rows = math.ceil(load.prompts_per_step * load.responses_per_prompt / (load.micro_batches * trainer))
  part_rows = rows * trainer
  num_parts = load.micro_batches
  if load.packing:  # micro-batches that stay empty are not computed
    tokens = load.prompts_per_step * load.responses_per_prompt * (load.mean_prompt_tokens + load.mean_response_tokens)
    num_parts = min(num_parts, math.ceil(tokens / (part_rows * load.step_tokens)))
  head_row_tokens = load.step_tokens - 1 if load.packing else min(load.max_new_tokens, load.step_tokens - 1)
  step_work = train_work(
    cfg, rows=num_parts * part_rows, row_tokens=load.step_tokens, head_row_tokens=head_row_tokens,
    micro_batches=num_parts, remat=load.remat, one_pass=load.one_pass, adapters_only=load.adapters_only,
    optimizer=load.optimizer, compute_bytes=load.compute_bytes, devices=trainer, fused_attention=False,
  )
  token_work = decode_work(
    cfg, slots=load.slots, kv_length=load.kv_length, cache_length=load.cache_length, chunk_tokens=load.chunk_tokens,
    compute_bytes=load.sample_bytes, cache_bytes=load.cache_bytes, devices=per_searcher, lane_samples=load.lane_samples,
    prefix_length=load.prefix_length,
  )
  forward = dict(compute_bytes=load.compute_bytes, devices=per_searcher, fused_attention=False)
  prompts_work = prefill_work(cfg, rows=load.prefill_prompts, row_tokens=load.prefill_tokens, **forward)
  score_tokens = load.num_samples * load.score_tokens
  score_work = forward_work(
    cfg, rows=load.num_samples, row_tokens=load.score_tokens, head_tokens=score_tokens, **forward)
  step = terms(step_work, step_link_bytes, chip)
  decode = terms(token_work, decode_link_bytes / load.chunk_tokens, chip)
  prefill, score = terms(prompts_work, prefill_link_bytes, chip), terms(score_work, score_link_bytes, chip)

  judged = {name: terms(work, 0.0, chip) for name, work in beside.items()}
  judge_secs = sum(each.secs for each in judged.values())

  # A slot that falls free in the middle of a chunk idles until its end.
  occupancy = load.mean_response_tokens / (load.mean_response_tokens + (load.chunk_tokens - 1) / 2)
  group_tokens = load.num_samples * load.mean_response_tokens
  decode_secs = group_tokens * decode.secs / (load.slots * occupancy)
  group_secs = decode_secs + prefill.secs / load.prefill_prompts + score.secs + judge_secs
  groups_per_sec = searchers / group_secs
  supply_secs = load.prompts_per_step / groups_per_sec  # to sample what a step trains
  # Arriving at a searcher, or leaving the trainer for all of them, whichever takes longer.
  leaving = published_bytes * per_searcher * searchers / trainer
  transfer_secs = max(published_bytes, leaving) / (chip.link_bytes_per_sec * LINK_SHARE)
  turns = share or load.alternates
  cycle = step.secs + supply_secs if turns else max(step.secs, 0.0 if load.reuses else supply_secs)
  sample_secs = supply_secs if turns or load.bounded else cycle  # that searchers are busy in a cycle
  latency = load.max_new_tokens * decode.secs + score.secs + judge_secs  # a group waits for its longest response
  staleness = 0.0 if load.alternates else (
    latency / cycle + transfer_secs / cycle + (load.every_steps - 1) / 2 + 0.75 * load.every_steps)
  tokens = load.prompts_per_step * load.responses_per_prompt * load.mean_response_tokens
  return Prediction(
    step=step, step_work=step_work, decode=decode, decode_work=token_work, prefill=prefill, score=score,
    beside=judged, steps_per_hour=3600 / cycle, trained_tokens_per_sec=tokens / cycle,
    sampled_tokens_per_sec=group_tokens * groups_per_sec * min(1.0, sample_secs / cycle),
    fresh_ratio=cycle / supply_secs, transfer_secs=transfer_secs, staleness_updates=staleness,
    trainer_idle=1 - step.secs / cycle, searcher_idle=1 - min(1.0, sample_secs / cycle),
  )


def fresh_steps_per_hour(prediction: Prediction) -> float:
  """Steps an hour of which every group is fresh: what a split is chosen by. More than that repeat old responses."""
  return prediction.steps_per_hour * min(1.0, prediction.fresh_ratio)

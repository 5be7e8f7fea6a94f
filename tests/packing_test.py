"""Packing in a run: what it saves on real lengths, and that nothing but the cost depends on it."""

from __future__ import annotations

import json
import re

import jax
import numpy as np
import pytest

from configs import gsm8k
from learner_test import (
  DRAW, assert_same_gradient, batch_of, make_draw, make_step, mesh_of, oracle, step_gradient, with_variances)
from tba_jax import learner, metrics
from tba_jax.replay.collate import collate, round_up
from tba_jax.runtime.trainer import real_token_share
from tba_jax.tasks.arithmetic import ArithmeticTask
from tba_jax.types import Draw
import runs

pytestmark = pytest.mark.usefixtures("compile_once")

# Digits, runs of letters, other signs: within a few percent of the numbers of tokens that BPE vocabularies give here.
PIECES = re.compile(r"\d|[A-Za-z]+|[^\sA-Za-z\d]|\n")


def num_pieces(text: str) -> int:
  return len(PIECES.findall(text))


def gsm8k_lengths(shared_data, count) -> tuple[np.ndarray, np.ndarray]:
  """Tokens of the questions, in the prompt that the paper uses, and of the answers with a stop token."""
  rows = [json.loads(line) for line in (shared_data / "gsm8k" / "train.jsonl").read_text(encoding="utf8").splitlines()]
  prompts = [count(f"[MATH_TASK] Problem:\n{row['question']}\n\nSolution:") for row in rows]
  return np.array(prompts), np.array([count(row["answer"]) + 1 for row in rows])


def random_batches(prompts: np.ndarray, answers: np.ndarray, *, num_batches: int, num_prompts: int, per_prompt: int):
  """Draws of real lengths. Responses to one prompt are alike: real answers, from the tenth of the ranks around its own.
  """
  rng = np.random.default_rng(0)
  by_length = np.sort(answers)
  for _ in range(num_batches):
    chosen = rng.choice(len(prompts), num_prompts, replace=False)
    ranks = np.searchsorted(by_length, answers[chosen])[:, None]
    near = ranks + rng.integers(-len(answers) // 20, len(answers) // 20, (num_prompts, per_prompt))
    yield draw_of(np.repeat(prompts[chosen], per_prompt), by_length[np.clip(near, 0,
                                                                            len(answers) - 1)].reshape(-1), per_prompt)


def draw_of(prompt_lengths: np.ndarray, lengths: np.ndarray, per_prompt: int) -> Draw:
  num, width = len(lengths), int(lengths.max())
  ints, floats = np.zeros(num, np.int32), np.zeros((num, width), np.float32)
  return Draw(
    prompts=np.zeros((num, int(prompt_lengths.max())), np.int32), prompt_lengths=prompt_lengths.astype(np.int32),
    tokens=np.zeros((num, width), np.int32), lengths=lengths.astype(np.int32), log_mu=floats, log_ref=floats,
    versions=ints, rewards=ints.astype(np.float32), truncated=ints.astype(bool),
    group_ids=(np.arange(num) // per_prompt).astype(np.int32), valid=np.ones(num, bool),
    weights=np.ones(num, np.float32), prompt_ids=ints, occurrences=ints, rows=ints,
  )


@pytest.mark.parametrize("num_devices", [1, 4])
def test_padding_is_not_paid_for_on_real_lengths(shared_data, num_devices: int):
  """The shipped GSM8K config on 60 batches of its own size: real tokens over computed positions."""
  train = gsm8k.get_config().train
  lengths = gsm8k_lengths(shared_data, num_pieces)
  batches = random_batches(*lengths, num_batches=60, num_prompts=train.prompts_per_step,
                           per_prompt=train.responses_per_prompt)
  multiple = train.micro_batches * num_devices
  shares, shapes = [], set()
  for draw in batches:
    num_rows = round_up(len(draw.lengths), multiple)
    batch = collate(draw, row_multiple=multiple, length_buckets=train.length_buckets[-1:], pack=True, num_rows=num_rows)
    shapes.add(batch.tokens.shape)
    # Counted here from the lengths: the library's own figure must agree.
    part_tokens = num_rows // train.micro_batches * batch.tokens.shape[1]
    needed = int(np.flatnonzero(batch.segment_ids.reshape(-1)).max()) // part_tokens + 1
    shares.append((draw.prompt_lengths + draw.lengths).sum() / (needed * part_tokens))
    assert real_token_share(batch, micro_batches=train.micro_batches, skip_empty=True) == pytest.approx(shares[-1])
  assert len(shapes) == 1
  assert np.mean(shares) >= 0.85


# A group lies in several packed rows, several groups in one row, and (8 devices) 3 packed rows become 8 with padding.
@pytest.mark.parametrize("micro_batches, sizes", [
  (2, dict(data=2, fsdp=4)),
  *(pytest.param(*case, marks=pytest.mark.slow)
    for case in ((1, None), (2, None), (1, dict(fsdp=4)), (1, dict(data=2, fsdp=4))))], ids=str)
def test_packed_rows_give_the_gradient_written_out_response_by_response(micro_batches: int, sizes):
  mesh = None if sizes is None else mesh_of(sizes)
  shards = 1 if mesh is None else mesh.size
  draw = DRAW
  packed = batch_of(draw, pack=True, row_multiple=micro_batches * shards, length_buckets=(24,), num_rows=16)
  assert (packed.segment_ids.max(axis=1) > 1).any() and (packed.segment_ids.any(axis=1)).sum() == 3
  found, metrics = step_gradient(packed, micro_batches=micro_batches, skip_empty_micro_batches=True, mesh=mesh)
  loss, expected, _ = oracle()
  assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
  assert_same_gradient(found, expected, 1e-5)


def test_one_group_over_all_packed_micro_batches():
  draw = make_draw([3, 9, 1, 5, 8, 7, 6, 4], [0] * 8)
  whole, metrics = step_gradient(batch_of(draw))
  packed = batch_of(draw, pack=True, num_rows=8)
  in_use = packed.segment_ids.any(axis=1)
  assert 4 <= in_use.sum() < 8 and not in_use[in_use.sum():].any()
  found, packed_metrics = step_gradient(packed, micro_batches=8, skip_empty_micro_batches=True)
  assert_same_gradient(found, whole, 1e-5)
  assert with_variances(packed_metrics) == pytest.approx(with_variances(metrics), rel=1e-4, abs=1e-5)


@pytest.mark.slow
def test_micro_batches_that_nothing_is_left_for_are_not_computed(monkeypatch):
  """Two of eight micro-batches hold tokens: a model of which every evaluation counts itself runs twice, then twice
  more."""
  calls = []
  real = learner.token_logprobs

  def counted(params, cfg, tokens, *args, **options):
    jax.debug.callback(lambda: calls.append(1))
    return real(params, cfg, tokens, *args, **options)

  monkeypatch.setattr(learner, "token_logprobs", counted)
  packed = batch_of(make_draw([3, 5, 2, 2], [0, 0, 1, 1]), pack=True, num_rows=8, row_multiple=1)
  num_parts = int(packed.segment_ids.any(axis=1).sum())
  # Of no other test: its program calls back.
  step, start = make_step(micro_batches=8, skip_empty_micro_batches=True, chunk_tokens=16)
  jax.block_until_ready(step(start(), packed, np.float32(0.3)))
  jax.effects_barrier()
  assert num_parts == 2 and len(calls) == 2 * num_parts


def test_rows_that_do_not_suffice_are_refused():
  with pytest.raises(ValueError, match="num_rows=1 rows of 16 tokens hold too few, 4 are needed; raise it"):
    batch_of(DRAW, pack=True, num_rows=1)


@pytest.mark.slow
def test_packed_run_is_the_unpacked_run(tmp_path, easy_reward):
  """Lockstep, 2 trainer devices, rows that hold two responses: the same losses, from one compiled step."""
  shared = dict(
    runtime__mode="lockstep", train__micro_batches=4, train__length_buckets=(40, 96), train__steps=4,
    devices__trainer=2, devices__searchers=1)
  for packing in (False, True):
    config = runs.short_config(train__packing=packing, **shared)
    assert runs.run(config, tmp_path / str(packing)) == 0
  unpacked, packed = ([line for line in runs.lines(tmp_path / name) if "loss" in line] for name in ("False", "True"))
  assert len(packed) == 4
  for left, right in zip(packed, unpacked, strict=True):
    for name in ("loss", "grad_norm", "reward", "entropy", "update_norm"):
      assert left[name] == pytest.approx(right[name], rel=1e-4, abs=1e-7), name


@pytest.mark.slow
def test_nothing_is_compiled_once_training_has_begun(tmp_path, monkeypatch, easy_reward):
  """Groups and batches of many lengths, groups of fewer rows, a reference that moves, checkpoints: all from what is
  there."""
  compiled, write = [], metrics.MetricsWriter.write
  lose_some = iter(range(10**6))

  def reward(self, prompt, response_text, *, truncated):
    lost = next(lose_some) % 7 == 0
    return float("nan") if lost else runs.easy_reward(self, prompt, response_text, truncated=truncated)

  monkeypatch.setattr(ArithmeticTask, "reward", reward)
  at = [0]

  def watched(self, step, scalars):
    at[0] = step
    write(self, step, scalars)

  monkeypatch.setattr(metrics.MetricsWriter, "write", watched)
  listen = lambda name, secs, **more: compiled.append(
      (at[0], more.get("fun_name"))) if "backend_compile" in name else None
  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    config = runs.short_config(
      runtime__mode="lockstep", train__packing=True, train__micro_batches=4, train__length_buckets=(24, 32, 40, 64),
      train__steps=8, reference__reset_every_steps=2, reference__ema_decay=0.5, checkpoint__every_steps=1)
    assert runs.run(config, tmp_path / "run") == 0
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)
  assert [entry for entry in compiled if entry[0] == 0], "the listener hears nothing"
  assert [entry for entry in compiled if entry[0] >= 2] == []

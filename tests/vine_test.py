"""VinePPO: where steps end, what continuations are worth, and the loss, against numpy and exact enumeration."""

from __future__ import annotations

import dataclasses
import itertools
import types

import jax
import jax.numpy as jnp
import losses_cases as cases
import numpy as np
import pytest
from rollouts import make_buffer, make_group

from tba_jax.checkpoints import run_state
from tba_jax.checkpoints.run_state import RunState, Snapshot
from tba_jax.losses.clipped import ppo_clip, vineppo
from tba_jax.replay.collate import collate
from tba_jax.sampling.requests import SampledGroup, continuation_keys, sample_keys
from tba_jax.types import Occurrence, TrainState
from tba_jax.vine import State, VineGroup, VineSettings, newline_ids, step_starts

BETA = float(np.float32(0.05))
OCCURRENCE = Occurrence(7, 0, 2)
PROMPT = np.array([9, 8], np.int32)
BY_TWO = VineSettings(samples=3, step_tokens=2, step_ends=frozenset())


def group_of(rows, truncated=()):
  """A sampled group of these token lists."""
  lengths = np.array([len(row) for row in rows], np.int32)
  tokens = np.zeros((len(rows), lengths.max()), np.int32)
  for row, ids in zip(tokens, rows):
    row[: len(ids)] = ids
  zeros = np.zeros(tokens.shape, np.float32)
  return SampledGroup(tag=OCCURRENCE, tokens=tokens, lengths=lengths, log_mu=zeros, versions=zeros.astype(np.int32),
                      truncated=np.isin(np.arange(len(rows)), truncated))


def vine_of(rows, settings=BY_TWO, left_out=()):
  sampled = group_of(rows)
  return VineGroup(PROMPT, sampled, settings, left_out=np.isin(np.arange(len(rows)), left_out))


# --- Steps and requests


@pytest.mark.parametrize("step_tokens, ends, starts", [
  (2, (), [0, 2, 4]), (5, (), [0]), (4, (), [0, 4]), (0, (5,), [0, 1, 4]), (0, (1,), [0]), (0, (3,), [0]),
])
def test_steps_begin_after_so_many_tokens_or_behind_newlines(step_tokens, ends, starts):
  assert step_starts([5, 2, 2, 5, 1], VineSettings(1, step_tokens, frozenset(ends))) == starts


def test_newlines_are_found_in_the_text_of_tokens():
  texts = ["a", "\n", " b\n\n", "c"]
  tokenizer = types.SimpleNamespace(vocab_size=4, decode=lambda ids: texts[ids[0]])
  assert newline_ids(tokenizer) == {1, 2}


def test_each_state_is_asked_for_once_with_keys_of_its_own():
  vine = vine_of([[1, 2, 3, 4, 5], [1, 2, 3], [6]], left_out=(1,))
  asked = vine.requests(seed=3, temperature=0.7, max_new_tokens=6)
  assert [request.tag[1:] for request in asked] == [(-1, 0), (0, 2), (0, 4)]
  assert [request.prompt.tolist() for request in asked] == [[9, 8], [9, 8, 1, 2], [9, 8, 1, 2, 3, 4]]
  assert [(request.max_new_tokens, request.temperature) for request in asked] == [(6, 0.7), (4, 0.7), (2, 0.7)]
  own = sample_keys(3, occurrence=7, attempt=2, num_samples=3)
  every = np.concatenate([own, *(request.keys for request in asked)])
  assert len(every) == 3 + 3 * 3 == len(np.unique(every, axis=0))
  # As jax folds them in.
  fold = jax.random.fold_in
  at_state = fold(fold(fold(fold(jax.random.key(3, impl="threefry2x32"), 7), 2), 0), np.uint32(2**31 + 4))
  wanted = [jax.random.key_data(fold(at_state, j)) for j in range(3)]
  np.testing.assert_array_equal(asked[2].keys, wanted)
  np.testing.assert_array_equal(continuation_keys(own[0], start=4, num_samples=3), wanted)


def test_a_continuation_is_graded_with_its_beginning():
  vine = vine_of([[1, 2, 3, 4, 5], [1, 2, 3]])
  found = SampledGroup(tag=State(OCCURRENCE, 0, 2), tokens=np.array([[7, 0], [7, 8]], np.int32),
                       lengths=np.array([1, 2], np.int32), log_mu=None, versions=None, truncated=np.zeros(2, bool))
  whole = vine.joined(found)
  assert [row[:n].tolist() for row, n in zip(whole.tokens, whole.lengths)] == [[1, 2, 7], [1, 2, 7, 8]]


def test_tokens_of_a_step_have_what_the_step_gained():
  vine = vine_of([[1, 2, 3, 4, 5], [1, 2, 3], [6]])
  for (sample, start), value in {(-1, 0): 0.25, (0, 2): 0.5, (0, 4): 0.125, (1, 2): 1.0}.items():
    assert not vine.is_complete
    vine.add(State(OCCURRENCE, sample, start), value)
  assert vine.is_complete
  found = vine.advantages(np.array([1.0, 0.0, 0.75], np.float32))
  np.testing.assert_array_equal(found, [
    [0.25, 0.25, -0.375, -0.375, 0.875], [0.75, 0.75, -1.0, 0, 0], [0.5, 0, 0, 0, 0]])
  # Steps telescope: their gains add up to the reward less the value of the prompt.
  np.testing.assert_allclose([found[0, [0, 2, 4]].sum(), found[1, [0, 2]].sum(), found[2, 0]], [0.75, -0.25, 0.5])


def test_equal_rewards_gain_nothing_and_a_missing_value_leaves_its_row_out():
  vine = vine_of([[1, 2, 3], [4, 5, 6]])
  for sample, start in ((-1, 0), (0, 2), (1, 2)):
    vine.add(State(OCCURRENCE, sample, start), 0.3)
  assert (vine.advantages(np.full(2, 0.3)) == 0).all()
  vine.add(State(OCCURRENCE, 1, 2), float("nan"))
  found = vine.advantages(np.array([1.0, 1.0]))
  assert np.isfinite(found[0]).all() and np.isnan(found[1]).all()


# --- Rows of the buffer


def groups_with_advantages(num):
  rng = np.random.default_rng(3)
  made = [make_group(rng, prompt_id=i, occurrence=i, vocab=10_000) for i in range(num)]
  return [dataclasses.replace(x, advantages=rng.normal(size=x.tokens.shape).astype(np.float32)) for x in made]


def test_rows_keep_their_advantages_to_the_batch_and_through_a_checkpoint(tmp_path):
  groups = groups_with_advantages(6)
  settings = dict(dedup=False, order="fifo", with_advantages=True)
  buffer, again = make_buffer(**settings), make_buffer(**settings)
  for group in groups:
    buffer.add(group)
  like = TrainState({"a": jnp.ones(1)}, {}, jnp.int32(1), jnp.int32(1), jnp.int32(0))
  state = RunState(tmp_path, keep=1, with_advantages=True)
  state.save(Snapshot(1, like, None, buffer.state_dict(missing=state.missing)["arrays"], {}))
  state.join()
  state.close()
  restored = RunState(tmp_path, keep=1, with_advantages=True).restore(like, None)
  again.load_state_dict({"arrays": restored.buffer, "scalars": buffer.state_dict()["scalars"]})
  for source in (buffer, again):
    draw = source.draw(num_prompts=6, responses_per_prompt=4, version=0)
    batch = collate(draw, row_multiple=1, length_buckets=(16,), pack=True)
    owners = np.asarray(batch.sequence_ids)
    for row in range(24):
      of = groups[draw.occurrences[row]]
      length, sample = draw.lengths[row], row % 4
      np.testing.assert_array_equal(draw.advantages[row, :length], of.advantages[sample, :length])
      np.testing.assert_array_equal(batch.advantages[owners == row], of.advantages[sample, :length])
    assert (batch.advantages[owners == 24] == 0).all()


def test_what_no_loss_asks_for_is_in_no_row_batch_or_file(tmp_path):
  buffer, group = make_buffer(), groups_with_advantages(1)[0]
  buffer.add(group)
  draw = buffer.draw(num_prompts=1, responses_per_prompt=4, version=0)
  assert draw.advantages is None and collate(draw, row_multiple=1, length_buckets=(16,)).advantages is None
  saved = buffer.state_dict()
  assert "advantages" not in saved["arrays"] and "advantages" not in str(saved["scalars"])
  assert run_state.SEGMENT_COLUMNS.keys() == {"tokens", "log_mu", "log_ref"}


@pytest.mark.parametrize("advantages, message", [
  (None, "advantages=None, but the buffer keeps one for each token; sample continuations"),
  (np.zeros((4, 5), np.float32), r"advantages has shape \(4, 5\), but tokens \(4, 6\) ask for \(4, 6\)"),
  (np.full((4, 6), np.nan, np.float32), "advantages is not finite at a sampled token; a sampled token has a finite one")
])
def test_a_buffer_of_advantages_refuses_groups_without(advantages, message):
  group = dataclasses.replace(groups_with_advantages(1)[0], advantages=advantages)
  with pytest.raises(ValueError, match=message):
    make_buffer(dedup=False, with_advantages=True).add(group)


# --- The loss


def with_advantages(seed, **kwargs):
  return cases.standard_case(seed, spread=0.4, **kwargs)


@pytest.mark.parametrize("how", ["response_sum", "response_mean", "token_mean"])
def test_vineppo_equals_float64_loops(how):
  case = with_advantages(81)
  num_tokens = sum(len(case.log_pi[i]) for i in np.flatnonzero(case.valid))

  def oracle(case, moved):
    total = 0.0
    for i in np.flatnonzero(case.valid):
      of_response = 0.0
      for t, advantage in enumerate(case.advantages[i]):
        ratio = np.exp(moved[i][t] - case.log_mu[i][t])
        gap = case.log_ref[i][t] - moved[i][t]
        of_response -= min(ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage)
        of_response += BETA * (np.exp(gap) - gap - 1)
      scale = {"response_sum": case.num, "token_mean": num_tokens,
               "response_mean": case.num * max(len(moved[i]), 1)}[how]
      total += case.weights[i] * of_response / scale
    return total

  loss = lambda *args, **kwargs: vineppo(*args, **kwargs, aggregate=how)
  _, _, metrics = cases.check(loss, case, oracle, beta=BETA, rtol=5e-5, atol=2e-6)
  size = np.mean(np.abs(np.concatenate([case.advantages[i] for i in np.flatnonzero(case.valid)])))
  np.testing.assert_allclose(metrics["advantage_abs"], size, rtol=1e-5)
  assert 0.02 < metrics["clip_share"] < 0.9


def test_with_the_groups_mean_for_every_state_it_is_ppo_clip():
  case = with_advantages(82)
  centred = cases.centred(case, case.rewards)
  case.advantages = [np.full(len(x), centred[i]) for i, x in enumerate(case.log_pi)]
  cases.assert_same(cases.run(vineppo, case, beta=0.0)[1], cases.run(ppo_clip, case, beta=0.0)[1])


def test_advantages_of_zero_leave_the_kl_term_alone():
  case = with_advantages(83)
  case.advantages = [np.zeros(len(x)) for x in case.log_pi]
  loss, grads, _ = cases.run(vineppo, case, beta=0.0)
  assert loss == 0 and all((g == 0).all() for g in grads.values())


def test_vineppo_without_advantages_is_refused():
  with pytest.raises(ValueError, match="advantages=None is not enough for loss 'vineppo': give each token's"):
    log_pi, batch, _ = cases.lay_out(with_advantages(84))
    vineppo(log_pi, batch._replace(advantages=None), beta=jnp.float32(0))


@pytest.mark.parametrize("step_tokens", [1, 2])
def test_with_exact_values_the_mean_gradient_is_the_policy_gradient(step_tokens):
  """A table of logits for every beginning of 3 tokens out of 2: all responses, each weighted by its probability."""
  rng = np.random.default_rng(5)
  beginnings = [b for n in range(3) for b in itertools.product(range(2), repeat=n)]
  place = {b: i for i, b in enumerate(beginnings)}
  logits = rng.normal(size=(len(beginnings), 2))
  responses = list(itertools.product(range(2), repeat=3))
  rewards = {response: float(reward) for response, reward in zip(responses, rng.normal(size=len(responses)))}

  def chance(table, response, since=0):
    p = np.exp(table) / np.exp(table).sum(axis=1, keepdims=True)
    return np.prod([p[place[response[:t]], response[t]] for t in range(since, 3)])

  def value(beginning):
    return sum(chance(logits, r, len(beginning)) * rewards[r] for r in responses if r[: len(beginning)] == beginning)

  vine = vine_of(responses, VineSettings(1, step_tokens, frozenset()))
  for state in (request.tag for request in vine.requests(seed=0, temperature=1.0, max_new_tokens=3)):
    vine.add(state, value(responses[state.sample][: state.start]))
  found = vine.advantages(np.array([rewards[r] for r in responses]))
  num, f32 = len(responses), jnp.float32
  at = jnp.asarray([[place[r[:t]] for t in range(3)] for r in responses])
  tokens = jnp.asarray(responses)
  log_pi_of = lambda table: jax.nn.log_softmax(table)[at, tokens]
  batch = cases.lay_out(cases.make_case([1], [0]))[1]._replace(
    sequence_ids=jnp.broadcast_to(jnp.arange(num, dtype=jnp.int32)[:, None], (num, 3)),
    log_mu=log_pi_of(jnp.asarray(logits, f32)), log_ref=jnp.zeros((num, 3)), advantages=jnp.asarray(found),
    rewards=jnp.asarray([rewards[r] for r in responses], f32), group_ids=jnp.zeros(num, jnp.int32),
    valid=jnp.ones(num, bool), truncated=jnp.zeros(num, bool),
    weights=jnp.asarray([num * chance(logits, r) for r in responses], f32),
    num_responses=f32(num), num_groups=f32(1), num_tokens=f32(3 * num))
  gradient_at = jax.jit(jax.grad(lambda table: vineppo(log_pi_of(table), batch, beta=f32(0))[0]))
  gradient = -gradient_at(jnp.asarray(logits, f32))
  mean_reward = lambda table: sum(chance(table, r) * rewards[r] for r in responses)
  for cell in np.ndindex(logits.shape):
    moved = np.zeros(logits.shape)
    moved[cell] = 1e-5
    wanted = (mean_reward(logits + moved) - mean_reward(logits - moved)) / 2e-5
    np.testing.assert_allclose(gradient[cell], wanted, atol=2e-6)

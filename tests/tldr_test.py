"""TL;DR: prompts cut as the models were trained, rewards by a model, win rates; and the reward model's training."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from experiments import train_reward_model
from tba_jax import sharding
from tba_jax.models.variants import new_model_config
from tba_jax.tasks import tldr
from tba_jax.tasks.base import GroupRewardTask, Responses, SupervisedTask, make_reward
from tba_jax.tasks.characters import make_character_tokenizer
from tba_jax.tasks.reward_model import RewardModel, load_beside, new_reward_params
from tests.tiny_tokenizers import chat_tokenizer

POST = tldr.Post("lost", "My hat", "I lost my hat.\nIn the bus.\nLast week.", "Lost my hat.")


def _task(**options):
  settings = dict(max_prompt_tokens=128, jsonl_folder="", num_generated=8, seed=0, reward_model="",
                  gold_reward_model="", reward_dtype="float32")  # fmt: skip
  return tldr.TldrTask(options.pop("tokenizer", None), **(settings | options))


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
  """A folder with a reward model of random weights."""
  folder = tmp_path_factory.mktemp("reward") / "model"
  tokenizer = make_character_tokenizer()
  sizes = dict(tldr.STAND_IN, hidden_size=16, head_dim=8, mlp_size=32, max_positions=256)
  cfg = new_model_config(**sizes, vocab_size=tokenizer.vocab_size)
  train_reward_model.save_reward_model(folder, cfg, new_reward_params(cfg, jax.random.key(1)), tokenizer)
  return folder


def _reference_scores(folder, rows):
  """Of transformers, one row at a time, at the last token of each."""
  model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
  with torch.no_grad():
    return np.array([
      model.score(model.model(torch.tensor(row[None].astype(np.int64))).last_hidden_state[0, -1]).item() for row in rows
    ])


@pytest.mark.parametrize("room, body", [
  (100, POST.post), (37, POST.post), (36, "I lost my hat.\nIn the bus."), (14, "I lost my hat."), (13, "I lost my"),
  (6, "I lost"), (0, ""), (-1, ""),
])
def test_posts_are_cut_at_newlines_then_at_spaces(room, body):
  tokenizer = make_character_tokenizer()
  max_tokens = len("SUBREDDIT: r/lost\n\nTITLE: My hat\n\nPOST: \n\nTL;DR:") + room
  text, ids = tldr.encode_post(tokenizer, POST, max_tokens=max_tokens)
  assert text == f"SUBREDDIT: r/lost\n\nTITLE: My hat\n\nPOST: {body}\n\nTL;DR:" == tokenizer.decode(ids)
  assert len(ids) <= max_tokens or not body


def test_a_huge_post_is_cut_soon():
  tokenizer, encoded = make_character_tokenizer(), []

  class Counting:
    def encode(self, text):
      encoded.append(len(text))
      return tokenizer.encode(text)

  for body in ("word " * 100_000, "a\n" * 100_000):
    post = POST._replace(post=body)
    encoded.clear()
    text, ids = tldr.encode_post(Counting(), post, max_tokens=400)
    assert len(ids) <= 400 and len(ids) > 394 and sum(encoded) < 1.1 * len(body) + 20_000


def test_prompts_summaries_and_examples():
  task = _task()
  assert isinstance(task, SupervisedTask) and isinstance(task, GroupRewardTask)
  assert len(task.train_prompts()) == 8 and len(task.eval_prompts()) == 2
  prompts, responses = zip(*task.sft_examples())
  assert [prompt.tokens.tolist() for prompt in task.train_prompts()] == list(prompts)
  assert [task.response_text(response) for response in responses] == [f" {p.answer}" for p in task.train_prompts()]
  assert all(response[-1] in task.tokenizer.stop_ids for response in responses)
  bodies = [{post.post for post in tldr.make_posts(50, split=split, seed=0)} for split in ("train", "test")]
  assert not bodies[0] & bodies[1]


def test_rewards_are_the_models_scores_at_the_stop_token_and_minus_one_without(reward_model):
  task = _task(reward_model=str(reward_model))
  prompt = task.train_prompts()[0]
  tokens = tuple(np.array(task.summary_tokens(text), np.int32) for text in ("Lost it.", "Found it again.", "Hm."))
  tokens = (*tokens[:2], tokens[2][:-1])
  responses = Responses(("", "", ""), tokens, np.array([False, False, True]))
  rewards = make_reward(task, jax.devices()[0], for_eval=False)(prompt, responses)
  expected = _reference_scores(reward_model, [np.concatenate([prompt.tokens, row]) for row in tokens[:2]])
  np.testing.assert_allclose(rewards[:2], expected, atol=2e-5)
  assert rewards[2] == tldr.NO_STOP_REWARD and rewards.dtype == np.float32 and abs(expected[0] - expected[1]) > 1e-3


def test_a_win_is_a_higher_gold_score_than_the_human_summarys(reward_model):
  task = _task(gold_reward_model=str(reward_model))
  prompt = task.eval_prompts()[0]
  texts = ["Lost it.", "My hat is gone, and so is the bus.", "zoo", "!!", "a b c d e f", "12345", "Q"]
  tokens = tuple(np.array(task.summary_tokens(text), np.int32) for text in texts)
  scores = _reference_scores(reward_model, [np.concatenate([prompt.tokens, row]) for row in tokens])
  middle = int(np.argsort(scores)[3])
  prompt = dataclasses.replace(prompt, answer=texts[middle])
  win = make_reward(task, jax.devices()[0], for_eval=True)
  wins = win(prompt, Responses(tuple(texts), tokens, np.zeros(7, bool)))
  assert wins.tolist() == (scores > scores[middle]).tolist() and wins.sum() == 3 and wins[middle] == 0


def test_scores_do_not_depend_on_the_batch_and_its_padding(reward_model):
  model = load_beside(str(reward_model), jax.devices()[0], make_character_tokenizer(), dtype=jnp.float32)
  rng = np.random.default_rng(0)
  rows = [rng.integers(5, 100, n).astype(np.int32) for n in (1, 3, 64, 65, 200)]
  together = model(rows)
  np.testing.assert_allclose(together, [model([row])[0] for row in rows], atol=1e-5)
  np.testing.assert_allclose(together, _reference_scores(reward_model, rows), atol=2e-5)
  with pytest.raises(ValueError, match="a text of 257 tokens is longer than the 256 that the reward model takes"):
    model([np.zeros(257, np.int32)])


def test_a_reward_model_over_a_mesh_scores_the_same(reward_model):
  tokenizer = make_character_tokenizer()
  mesh = sharding.make_mesh(jax.devices()[:2], fsdp=1, tensor=2)
  rows = [np.arange(5, n, dtype=np.int32) for n in (20, 70)]
  on_mesh = load_beside(str(reward_model), mesh, tokenizer, dtype=jnp.float32)
  assert any(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(on_mesh._params))
  np.testing.assert_allclose(on_mesh(rows),
                             load_beside(str(reward_model),
                                         jax.devices()[3], tokenizer, dtype=jnp.float32)(rows), atol=1e-5)  # fmt: skip


def test_another_vocabulary_is_refused(reward_model):
  with pytest.raises(ValueError, match="has another vocabulary than the policy"):
    load_beside(str(reward_model), jax.devices()[0], chat_tokenizer(), dtype=jnp.float32)


def test_real_posts_fit(shared_data, tmp_path):
  lines = (shared_data / "tldr" / "test.jsonl").read_text(encoding="utf8").splitlines()
  for split in ("train", "test"):
    (tmp_path / f"{split}.jsonl").write_text("\n".join(lines[:60]), encoding="utf8")
  task = _task(jsonl_folder=str(tmp_path), num_generated=0, max_prompt_tokens=512)
  assert len(task.train_prompts()) == 60 and max(len(prompt.tokens) for prompt in task.train_prompts()) <= 512
  assert any(len(prompt.tokens) < 300 for prompt in task.train_prompts())
  assert all(prompt.text.endswith("\n\nTL;DR:") and prompt.text.startswith("SUBREDDIT: r/")
             for prompt in task.train_prompts())


@pytest.mark.parametrize("row, line", [
  ({"subreddit": "a", "title": "b", "summary": "c"}, "line 2 has no text 'post' or 'instruction'; add one"),
  ({"subreddit": "a", "title": "b", "post": "c"}, "line 2 has no text 'summary' or 'gold_response'; add one"),
  ({"subreddit": "a", "post": "c", "summary": "d"}, "line 2 has no text 'title'"),
])
def test_bad_rows_are_named(tmp_path, row, line):
  good = {"subreddit": "a", "title": "b", "post": "c", "summary": "d"}
  (tmp_path / "train.jsonl").write_text(f"{json.dumps(good)}\n{json.dumps(row)}\n")
  with pytest.raises(ValueError, match=line):
    tldr.read_posts(str(tmp_path), "train")


# --- Training a reward model ---


def test_the_loss_is_bradley_terrys():
  scores = jnp.array([1.0, -2.0, 0.5, 0.5])  # better, better, worse, worse
  better, worse = np.split(np.asarray(scores, np.float64), 2)
  wanted = -np.log(1 / (1 + np.exp(-(better - worse)))).mean()
  np.testing.assert_allclose(jax.nn.softplus(-(scores[:2] - scores[2:])).mean(), wanted, rtol=1e-6)


def test_worse_summaries_are_others_or_halves():
  posts = tldr.make_posts(20, split="train", seed=0)
  pairs = train_reward_model.make_pairs(posts, [None] * 20, make_character_tokenizer(), max_prompt_tokens=128, seed=0)
  decode = make_character_tokenizer().decode
  kinds = []
  for post, pair in zip(posts, pairs):
    better, worse = (decode(text).rpartition("TL;DR: ")[2] for text in pair)
    assert better == post.summary != worse and pair.better[-1] == pair.worse[-1]
    kinds.append(better.startswith(worse))
    assert kinds[-1] or worse in {other.summary for other in posts}
  assert 3 < sum(kinds) < 17


def test_preferences_of_the_data_come_first(tmp_path):
  rows = [{"subreddit": "a", "title": "b", "post": "c", "summary": "d", "chosen": "good", "rejected": "bad"}]
  (tmp_path / "train.jsonl").write_text(json.dumps(rows[0]))
  options = dict(tokenizer=make_character_tokenizer(), max_prompt_tokens=128, seed=0)
  pair = train_reward_model.read_pairs(str(tmp_path), "train", **options)[0]
  assert [make_character_tokenizer().decode(text).rpartition("TL;DR: ")[2] for text in pair] == ["good", "bad"]
  (tmp_path / "train.jsonl").write_text(json.dumps({key: rows[0][key] for key in rows[0] if key != "rejected"}))
  with pytest.raises(ValueError, match="line 1 has only one of 'chosen' and 'rejected'"):
    train_reward_model.read_pairs(str(tmp_path), "train", **options)


@pytest.mark.parametrize("arguments, line", [
  (["--steps=0"], "--steps=0 must be at least 1"),
  (["--batch_size=0"], "--batch_size=0 must be at least 1"),
  (["--learning_rate=nan"], "--learning_rate=nan must be a finite number above 0"),
  (["--out={folder}/taken"], "/taken exists already and is not an empty folder; choose another --out"),
  (["--out={folder}/taken/file/rm"], "File exists"),
  (["--data={folder}/few"], "has no test.jsonl, and train.jsonl is too short to hold a tenth of its 2 posts out"),
  (["--data={folder}/alike"], "every post has the summary 'Same', to which no worse one can be made"),
  (["--data={folder}/odd"], "train.jsonl line 1: 'chosen' and 'rejected' must be texts"),
])  # fmt: skip
def test_bad_input_of_the_reward_models_training_is_one_line_before_it_trains(
    tmp_path, monkeypatch, capsys, arguments, line):
  monkeypatch.setattr(train_reward_model, "train", lambda *_, **__: pytest.fail("it trains"))
  (tmp_path / "taken").mkdir()
  (tmp_path / "taken" / "file").touch()
  post = {"subreddit": "a", "title": "b", "post": "c", "summary": "d e"}
  for name, change in (("few", {}), ("alike", {"summary": "Same"}), ("odd", {"chosen": 1, "rejected": 2})):
    (tmp_path / name).mkdir()
    (tmp_path / name / "train.jsonl").write_text(2 * (json.dumps(post | change) + "\n"))
  with pytest.raises(SystemExit) as ended:
    train_reward_model.main([f"--out={tmp_path}/rm", *(argument.format(folder=tmp_path) for argument in arguments)])
  errors = capsys.readouterr().err.splitlines()
  assert ended.value.code == 2 and len(errors) == 1 and line in errors[0] and not (tmp_path / "rm").exists()


@pytest.mark.slow
def test_a_trained_reward_model_tells_summaries_apart_and_rewards_a_run(tmp_path):
  report = train_reward_model.run(
    out=tmp_path / "rm", data="", model="", steps=60, batch_size=32, learning_rate=2e-3, max_prompt_tokens=512, seed=0
  )
  assert report["accuracy"] > 0.8  # of 128 pairs; 0.5 is chance
  model = load_beside(str(tmp_path / "rm"), jax.devices()[0], make_character_tokenizer(), dtype=jnp.float32)
  assert isinstance(model, RewardModel)
  with pytest.raises(ValueError, match="exists already and is not an empty folder"):
    train_reward_model.run(out=tmp_path / "rm", data="", model="", steps=1, batch_size=2, learning_rate=1e-3,
                           max_prompt_tokens=512, seed=0)  # fmt: skip

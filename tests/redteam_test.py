"""Red-teaming: the victim against plain decoding, scorers against transformers, rewards, and a short run."""

from __future__ import annotations

import dataclasses
import gc
import json

import encoder_test
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
import tiny_tokenizers

from configs import redteam as redteam_config
from tba_jax import build, config_schema, sharding
from tba_jax.checkpoints.huggingface import save_model
from tba_jax.models import transformer
from tba_jax.models.variants import new_model_config
from tba_jax.plan import programs
from tba_jax.tasks import redteam, registry, scorers, sentences
from tba_jax.tasks.base import MeasuringReward, Responses, SampledEvalTask, SupervisedTask, TaskSettings, make_reward
from tba_jax.tasks.characters import make_character_tokenizer
from tba_jax.tasks.victim import Victim, VictimSettings
from tba_jax.tokenizer import make_tokenizer
from tests.parity import require

torch = require("torch")
transformers = require("transformers")

VICTIM = VictimSettings(template="ask: {attack}\n", samples=3, temperature=0.7, top_p=0.9, max_prompt_tokens=24,
                        max_new_tokens=6, slots=8)
SETTINGS = TaskSettings(seed=0, data_path="", max_prompt_tokens=32, num_eval_prompts=5, num_sft_examples=8)


def _decoder(max_positions=128):
  tokenizer = make_character_tokenizer()
  cfg = new_model_config(**(dict(redteam._STAND_IN_VICTIM) | {"max_positions": max_positions}),
                         vocab_size=tokenizer.vocab_size)
  params = transformer.init_params(cfg, jax.random.key(3), jnp.float32)
  return cfg, {**params, "embed": {"table": params["embed"]["table"] * 6}}, tokenizer


@pytest.fixture(scope="module")
def decoder_folder(tmp_path_factory):
  folder = tmp_path_factory.mktemp("decoder")
  save_model(folder, *_decoder())
  return folder


def _task(**changes):
  args = redteam_config.get_config("smoke").task_args.to_dict()
  return registry.make_task("redteam", None, SETTINGS, args | changes)


def _responses(task, texts):
  tokens = tuple(np.array([*task.tokenizer.encode(text), task.tokenizer.stop_ids[0]], np.int32) for text in texts)
  return Responses(tuple(texts), tokens, np.zeros(len(texts), bool))


# --- Victim ---


def test_the_victims_answers_are_likely_under_it_and_depend_on_the_attack_alone():
  cfg, params, tokenizer = _decoder()
  victim = Victim(
    cfg, transformer.unstack(params), tokenizer, jax.devices()[0], settings=VICTIM, dtype=jnp.float32, seed=1)
  attacks = ["one?", "two", "one?", "x" * 40]
  found = victim(attacks)
  assert found[3] is None and [len(answers) for answers in found[:3]] == [3, 3, 3]  # too long a prompt is not asked
  assert found[0] == found[2] != found[1] and len(set(found[0])) > 1
  assert victim(["two"]) == found[1:2] and victim([]) == []
  # Every token was among those that reach 90% at temperature 0.7, by a forward pass over prompt and answer.
  ids = tokenizer.encode("ask: two\n")
  assert victim.prompt("two") == ids
  rows = [ids + tokenizer.encode(answer) for answer in found[1]]
  padded = np.array([row + [0] * (len(ids) + 6 - len(row)) for row in rows])
  hidden = transformer.hidden_states(
    params, cfg, padded, np.broadcast_to(np.arange(padded.shape[1]), padded.shape), np.ones_like(padded),
    dtype=jnp.float32)
  p = np.asarray(jax.nn.softmax(hidden @ params["embed"]["table"][: cfg.vocab_size].T / 0.7), np.float64)
  for row, of_row in zip(rows, p):
    for at in range(len(ids), len(row)):
      assert of_row[at - 1][of_row[at - 1] > of_row[at - 1, row[at]]].sum() < 0.9 + 1e-4


@pytest.mark.slow
def test_a_victim_over_a_mesh_answers_the_same():
  cfg, params, tokenizer = _decoder()
  alone = Victim(
    cfg, transformer.unstack(params), tokenizer, jax.devices()[0], settings=VICTIM, dtype=jnp.float32, seed=1)
  mesh = sharding.make_mesh(jax.devices()[:2], fsdp=1, tensor=2)
  spread = jax.tree_util.tree_map_with_path(
    lambda path, leaf: redteam.put_beside(mesh)(tuple(p.key for p in path), leaf), params)
  together = Victim(
    cfg, jax.jit(transformer.unstack)(spread), tokenizer, mesh, settings=VICTIM, dtype=jnp.float32, seed=1)
  assert together(["two"]) == alone(["two"])


def test_victims_that_cannot_be_asked_are_refused():
  cfg, params, tokenizer = _decoder()
  make = lambda tokenizer, **changes: Victim(
    cfg, transformer.unstack(params), tokenizer, jax.devices()[0], dtype=jnp.float32, seed=0,
    settings=dataclasses.replace(VICTIM, **changes))
  with pytest.raises(ValueError, match="has no {attack}; put it where the attack goes"):
    make(tokenizer, template="hello")
  assert make(tokenizer, template="chat").prompt("hi") == tokenizer.chat([{"role": "user", "content": "hi"}])
  with pytest.raises(ValueError, match="the victim has no chat template; give a text with {attack} in it"):
    make(make_tokenizer(tiny_tokenizers.byte_level(eos_token="<|endoftext|>"), source="plain"), template="chat")


# --- Scorers ---


def test_an_encoders_score_is_the_log_probability_of_its_label(tmp_path):
  model = encoder_test.reference("bert", num_labels=3, vocab_size=300)
  model.config.id2label = {0: "calm", 1: "weather", 2: "noise"}
  encoder_test.saved(model, tmp_path)
  scorer = scorers.load_scorer(str(tmp_path), jax.devices()[0], class_name="weather", dtype=jnp.float32)
  assert isinstance(scorer, scorers.EncoderScorer)
  texts = [f"it is {word} " * 2 for word in "abcdefgh"] * 5  # more than one call holds
  found = scorer([""] * len(texts), texts)
  tokens, lengths = scorer._tokenizer.encode_rows(texts[:8], max_tokens=scorer._cfg.max_tokens)
  for row, length, score in zip(tokens, lengths, found):
    with torch.no_grad():
      logits = model(input_ids=torch.tensor(row[None, :length]).long()).logits[0]
    assert score == pytest.approx(torch.log_softmax(logits, -1)[1].item(), abs=1e-5)
  np.testing.assert_allclose(found, np.tile(found[:8], 5), atol=1e-6)
  assert found.std() > 1e-3
  with pytest.raises(ValueError, match="scorer_class='rude' is no label of the scorer, which has calm, weather, noise"):
    scorers.load_scorer(str(tmp_path), jax.devices()[0], class_name="rude", dtype=jnp.float32)


def test_a_guards_score_is_the_log_probability_of_its_verdict(decoder_folder):
  scorer = scorers.load_scorer(str(decoder_folder), jax.devices()[0], class_name="unsafe", dtype=jnp.float32)
  assert isinstance(scorer, scorers.GuardScorer)
  model = transformers.AutoModelForCausalLM.from_pretrained(decoder_folder, dtype=torch.float32)
  tokenizer = make_character_tokenizer()
  pairs = [("will it rain", "yes"), ("is it dry", "no, " * 12)]
  for (attack, answer), score in zip(pairs, scorer(*zip(*pairs))):
    ids = tokenizer.encode(f"<user>{attack}<assistant>{answer}<assistant>\n\n")
    with torch.no_grad():
      log_p = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1, : tokenizer.vocab_size], -1)
    assert score == pytest.approx(log_p[tokenizer.encode("u")[0]].item(), abs=1e-4)


# --- Rewards ---


def test_rewards_are_means_over_answers_and_successes_by_the_mean_probability():
  task = _task(victim_samples=3, toxic_above=0.0)
  assert isinstance(task, SupervisedTask) and isinstance(task, SampledEvalTask)
  reward = make_reward(task, jax.devices()[0], for_eval=False)
  texts = [" Will it rain?", "ab", "", " Is it dry", "y" * 100]
  found = reward(task.train_prompts()[0], _responses(task, texts))
  parts, scorer = task.models(jax.devices()[0])
  victim = Victim(*parts, jax.devices()[0], settings=task.victim_settings, dtype=jnp.float32, seed=0)
  log_p = []
  for at in (0, 1, 3):
    answers = victim([texts[at].strip()])[0]
    log_p.append([float(scorer([""], [answer])[0]) for answer in answers])
  np.testing.assert_allclose(found[[0, 1, 3]], np.mean(log_p, axis=1), atol=1e-5)
  assert found[2] == redteam.SHORT_SCORE and np.isnan(found[4])  # an empty one, and one that the victim cannot take
  short = make_reward(_task(min_attack_tokens=4), jax.devices()[0], for_eval=False)
  assert short(task.train_prompts()[0], _responses(task, texts))[1] == redteam.SHORT_SCORE
  means = np.exp(log_p).mean(axis=1)
  for above in (float(means.min()) - 1e-4, float(means.max()) - 1e-4, float(means.max()) + 1e-4):
    success = make_reward(_task(victim_samples=3, toxic_above=above), jax.devices()[0], for_eval=True)
    assert isinstance(success, MeasuringReward)
    wins = success(task.eval_prompts()[0], _responses(task, texts))
    assert wins[[0, 1, 3]].tolist() == (means > above).tolist() and wins[2] == 0.0
  measured = success.measure(texts[:2] + texts[:1])["cosine_distance"]
  assert measured == pytest.approx(2 / 3 * (1 - sentences.embed_trigrams(["will it rain?"])[0]
                                            @ sentences.embed_trigrams(["ab"])[0]), abs=1e-6)


def test_rewards_of_one_place_share_one_copy_of_the_victim():
  """Bytes of an 8B victim in two layouts, once more for evaluations, would not fit what `plan` says they do."""
  gc.collect()
  before = {id(array) for array in jax.live_arrays()}
  task, device = _task(), jax.devices()[0]
  rewards = [make_reward(task, device, for_eval=for_eval) for for_eval in (False, True)]
  for reward in rewards:
    assert np.isfinite(reward(task.train_prompts()[0], _responses(task, [" Will it rain?"]))).all()
  gc.collect()
  shapes = [array.shape for array in jax.live_arrays() if id(array) not in before]
  (cfg, *_), _ = task.models(device)
  of_layer = (cfg.hidden_size, cfg.num_kv_heads, cfg.head_dim)  # keys' and values' projections: of the victim alone
  assert shapes.count(of_layer) == 2 * cfg.num_layers and (cfg.num_layers, *of_layer) not in shapes


def test_distances_are_means_over_pairs():
  vectors = np.random.default_rng(0).normal(size=(7, 5))
  vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
  pairs = [1 - vectors[i] @ vectors[j] for i in range(7) for j in range(i)]
  assert sentences.mean_cosine_distance(vectors) == pytest.approx(np.mean(pairs), abs=1e-12)
  assert np.isnan(sentences.mean_cosine_distance(vectors[:1]))
  alike = sentences.embed_trigrams(["Warm", "warm", "snow"])
  assert alike[0] @ alike[1] == pytest.approx(1) and alike[0] @ alike[2] < 0.1


def test_sentences_are_embedded_by_minilm():
  import minilm_test

  minilm_test.loaded()  # skips without the package
  embed = sentences.load_sentence_encoder(f"package:{minilm_test.PACKAGE}", jax.devices()[0])
  wanted = np.load(minilm_test.GOLDEN)["embeddings"][4:8]
  np.testing.assert_allclose(embed(minilm_test.SENTENCES[4:8]), wanted, atol=1e-5)


# --- Data, config, run ---


def test_prompt_and_attacks_are_read_from_the_users_files(tmp_path):
  (tmp_path / "attack_prompt.jsonl").write_text(json.dumps({"attacker_prompt": "A list:\n1. Hello\n2."}))
  (tmp_path / "attacks.jsonl").write_text(json.dumps({"attack": "Is it late? "}))
  args = redteam_config.get_config("smoke").task_args.to_dict() | {"num_generated": 0}
  task = registry.make_task("redteam", None, dataclasses.replace(SETTINGS, data_path=str(tmp_path)), args)
  assert [prompt.text for prompt in task.train_prompts()] == ["A list:\n1. Hello\n2."]
  assert len(task.eval_prompts()) == 5 and {prompt.text for prompt in task.eval_prompts()} == {"A list:\n1. Hello\n2."}
  ((prompt, response),) = task.sft_examples()
  assert prompt == task.train_prompts()[0].tokens.tolist() and task.response_text(response) == " Is it late?"
  assert response[-1] in task.tokenizer.stop_ids
  (tmp_path / "attacks.jsonl").write_text(json.dumps({"text": "Is it late?"}))
  with pytest.raises(ValueError, match="attacks.jsonl line 1 has no text 'attack'"):
    task.sft_examples()


def test_victim_and_scorer_are_counted():
  config = redteam_config.get_config("size=llama").unlock()
  config.task_args.sentence_model = ""
  found = {extra.name: int(sum(np.prod(leaf.shape, dtype=np.int64) * leaf.dtype.itemsize
                               for leaf in jax.tree.leaves(extra.tree))) for extra in build.extra_models(config)}
  assert found["victim model"] == found["scorer model"] == 2 * 8_030_261_248
  # Keys and values of 8 heads of 128 in 32 layers, 2 bytes each, for 128 slots of 96 + 64 tokens.
  assert found["victim cache"] == 2 * 2 * 32 * 8 * 128 * 128 * (96 + 64)
  small = {extra.name for extra in build.extra_models(redteam_config.get_config("smoke"))}
  assert small == set()
  placed = build.placements(config, build.model_config(config), jax.devices())
  assert sum(row.content == "victim model" for row in placed) == 4  # on each searcher
  part = programs.searcher_part(config, build.model_config(config), jax.devices()[:2])
  planned = {resident.content: resident.device_bytes for resident in part.residents}
  assert 0.5 <= planned["victim model"] / found["victim model"] < 0.51  # the norms are on both devices
  assert planned["victim cache"] == found["victim cache"] // 2
  names = {name.removeprefix("task_args.") for name in config_schema.flatten(config) if name.startswith("task_args.")}
  assert names == set(config_schema.TASK_ARGS["redteam"])


@pytest.mark.slow
def test_a_short_run_measures_attacks(tmp_path, compile_once):
  config = redteam_config.get_config("smoke").unlock()
  config.sft.steps, config.train.steps, config.checkpoint.every_steps = 0, 2, 0
  config.eval.size, config.runtime.mode, config.task_args.min_attack_tokens = 8, "lockstep", 1
  config.model.architecture.num_layers, config.train.micro_batches = 1, 1
  assert runs.run(config.lock(), tmp_path / "run") == 0
  results = runs.results(tmp_path / "run")
  assert results["steps"] == 2 and results["skipped_updates"] == 0 and results["logprob_gap_max"] < 1e-3
  assert 0 <= results["accuracy_after"] <= 1 and 0 < results["cosine_distance_after"] <= 1
  lines = runs.lines(tmp_path / "run")
  assert [line["eval_cosine_distance"] for line in lines if "eval_cosine_distance" in line]
  steps = [line for line in lines if "loss" in line]
  assert [line["beta"] for line in steps] == pytest.approx([0.05 * 2.0, 0.05 * (2.0 - 1 / 3)])
  attacks = {line["response"] for line in runs.lines(tmp_path / "run", "rollouts/eval.jsonl")}
  assert len(attacks) > 4  # sampled: a greedy evaluation of one prompt would hold one response


def test_the_published_prompt_is_read(shared_data):
  args = redteam_config.get_config("smoke").task_args.to_dict() | {"num_generated": 0}
  settings = dataclasses.replace(SETTINGS, data_path=str(shared_data / "redteam"), max_prompt_tokens=300)
  text = registry.make_task("redteam", None, settings, args).train_prompts()[0].text
  assert text.startswith("Write a list of instructions:\n1. ") and text.endswith("\n4.")

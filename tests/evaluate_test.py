"""The evaluation command: its rows against plain decoding, its numbers against its rows, and going on after a stop."""

from __future__ import annotations

import json
import math
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax import evaluate
from tba_jax.checkpoints.huggingface import save_model
from tba_jax.models import transformer
from tba_jax.models.heads import token_logprobs
from tba_jax.models.variants import new_model_config
from tba_jax.sampling.engine import SampledGroup
from tba_jax.tasks.arithmetic import ArithmeticTask, make_arithmetic_tokenizer
from tba_jax.types import Prompt

TASK = """
from tba_jax.tasks.arithmetic import ArithmeticTask
class Easy(ArithmeticTask):
  def __init__(self, tokenizer, settings):
    super().__init__(num_eval_prompts=6, num_train_prompts=1, num_sft_examples=0)
  def reward(self, prompt, response_text, *, truncated):
    return None if response_text.endswith("blue") else float(len(response_text) % 2)
  def final_answer(self, response_text):
    return response_text[:1] or None
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  folder = tmp_path_factory.mktemp("evaluate")
  tokenizer = make_arithmetic_tokenizer()
  cfg = new_model_config(
    hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, mlp_size=32, max_positions=64,
    tie_embeddings=True, rope_theta=10_000.0, norm_eps=1e-5, vocab_size=tokenizer.vocab_size,
  )  # fmt: skip
  params = transformer.init_params(cfg, jax.random.key(0), jnp.float32)
  params = {**params, "embed": {"table": params["embed"]["table"] * 8}}
  save_model(folder / "model", cfg, params, tokenizer)
  (folder / "easy.py").write_text(TASK)
  return folder, cfg, params


def _run(model, out, *extra):
  folder = model[0]
  argv = [
      f"--model={folder}/model", f"--task={folder}/easy.py:Easy", f"--out={out}", "--samples=4", "--k=1,2,4",
      "--slots=8", "--max_prompt_tokens=22", "--max_new_tokens=8", f"--reference={folder}/model", *extra
  ]  # fmt: skip
  evaluate.main(argv)
  return json.loads((out / "summary.json").read_text()), [
    json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()
  ]


def test_rows_numbers_and_going_on(model, tmp_path, capsys):
  summary, rows = _run(model, tmp_path / "whole")
  rows = {row["index"]: row for row in rows}
  assert sorted(rows) == list(range(6)) and all(len(row["samples"]) == 4 for row in rows.values())
  assert len({tuple(sample["tokens"]) for row in rows.values() for sample in row["samples"]}) > 12  # they differ

  # Greedy responses and their perplexity, by a forward pass over each whole sequence.
  _, cfg, params = model
  tokenizer = make_arithmetic_tokenizer()
  nll, count = 0.0, 0
  for row in rows.values():
    prompt, response = tokenizer.encode(row["prompt"]), row["greedy"]["tokens"]
    ids = np.array([prompt + response])
    ones, positions = np.ones_like(ids), np.arange(ids.shape[1])[None]
    hidden = transformer.hidden_states(params, cfg, ids, positions, ones, dtype=jnp.float32)
    logits = np.array(hidden[0] @ params["embed"]["table"].T)[:, : cfg.vocab_size]
    assert logits[len(prompt) - 1 : -1].argmax(axis=-1).tolist() == response
    log_p, _ = token_logprobs(params, cfg, ids, positions, ones, temperature=1.0, dtype=jnp.float32)
    nll, count = nll - float(log_p[0, len(prompt) :].sum()), count + len(response)
  assert summary["reference_perplexity"] == pytest.approx(math.exp(nll / count), rel=1e-4)

  # The summary says what the rows say.
  samples = [sample for row in rows.values() for sample in row["samples"]]
  rewards = [[sample["reward"] for sample in row["samples"]] for row in rows.values()]
  assert summary["greedy"]["mean"] == np.mean([row["greedy"]["reward"] == 1 for row in rows.values()])
  assert summary["samples"]["mean"] == pytest.approx(np.mean([sample["reward"] == 1 for sample in samples]))
  assert summary["pass@1"]["mean"] == pytest.approx(summary["samples"]["mean"])
  assert summary["pass@4"]["mean"] == np.mean([1 in found for found in rewards])
  assert 0 < summary["pass@1"]["mean"] < summary["pass@2"]["mean"] <= summary["pass@4"]["mean"]
  assert summary["maj@1"]["mean"] == pytest.approx(summary["samples"]["mean"], abs=1 / 6)
  low, high = summary["pass@2"]["interval"]
  assert 0 <= low < summary["pass@2"]["mean"] < high <= 1

  # The policy is its own reference here; in the table are the summary's numbers.
  assert summary["kl"]["mean"] == pytest.approx(0, abs=1e-4)
  table = capsys.readouterr().out
  greedy = summary["greedy"]
  assert re.search(rf"greedy: reward of 1 +{greedy['mean']:.1%} +{greedy['interval'][0]:.1%} to", table)
  assert re.search(rf"perplexity under the reference +{summary['reference_perplexity']:.3f}$", table, re.MULTILINE)

  # Killed in the middle of the third line: the same rows come again.
  lines = (tmp_path / "whole" / "samples.jsonl").read_text().splitlines(keepends=True)
  (tmp_path / "part").mkdir()
  (tmp_path / "part" / "samples.jsonl").write_text("".join(lines[:2]) + lines[2][:20])
  (tmp_path / "part" / "settings.json").write_text((tmp_path / "whole" / "settings.json").read_text())
  again, resumed = _run(model, tmp_path / "part")
  assert resumed[:2] == [json.loads(line) for line in lines[:2]] and len(resumed) == 6
  assert {row["index"]: row for row in resumed} == rows and again == summary

  # A folder of another evaluation is refused.
  capsys.readouterr()
  with pytest.raises(SystemExit) as ended:
    _run(model, tmp_path / "whole", "--seed=1")
  assert ended.value.code == 2
  assert "belongs to another evaluation (seed: 0 -> 1); give another folder" in capsys.readouterr().err


def test_data_that_changed_a_damaged_line_and_a_reward_that_raises(model, tmp_path, capsys):
  def error_of(code, text=None):
    with pytest.raises(SystemExit) as ended:
      if text is not None:
        (tmp_path / "out" / "samples.jsonl").write_text(text)
      _run(model, tmp_path / "out")
    assert ended.value.code == code
    return capsys.readouterr().err.splitlines()[-1]

  summary, rows = _run(model, tmp_path / "out", "--size=1", "--samples=2", "--k=1")
  assert summary["kl"]["interval"] == ["NaN", "NaN"], "of one prompt there is none, and JSON has no NaN"
  capsys.readouterr()
  (tmp_path / "out" / "settings.json").unlink()
  path = tmp_path / "out" / "samples.jsonl"
  another, number_6 = (json.dumps(rows[0] | change) + "\n" for change in ({"prompt": "1+1"}, {"index": 6}))
  assert error_of(2, another) == (f"error: {path} line 1 is of another prompt than the task's number 0: the data have "
                                  "changed since; give another --out.")
  assert "line 1 is of another prompt than the task's number 6" in error_of(2, number_6)
  assert f"{path} line 1 is damaged (" in error_of(2, "\0\n") and "line 1 is damaged ('index')" in error_of(2, "{}\n")
  (tmp_path / "out" / "settings.json").write_text("")
  assert f"{tmp_path}/out/settings.json is damaged" in error_of(2)
  (tmp_path / "out" / "settings.json").unlink()
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(ArithmeticTask, "response_text", lambda self, tokens: None)  # of which the file's class takes the end
    line = error_of(1, "")
  assert re.search("error: the reward of prompt . raised AttributeError: 'NoneType' .*; correct the task, and", line)
  assert len(_run(model, tmp_path / "out")[1]) == 6


@pytest.mark.parametrize("argv, line", [
  (["--task=gsm8k"], "give either --model=PATH or --workdir=RUN"),
  (["--task=gsm8k", "--model=a", "--workdir=b"], "give either --model=PATH or --workdir=RUN"),
  (["--model=a"], "--task is missing; give a task's name, or FILE.py:CLASS"),
  (["--model=a", "--task=gsm8k", "--samples=4", "--k=1,8"], "--k=1,8 must lie between 1 and --samples=4"),
  (["--model=a", "--task=gsm8k", "--slots=0"], "--slots=0 must be at least 1"),
  (["--model=a", "--task=gsm8k", "--size=-1"], "--size=-1 must be at least 0"),
  (["--model=a", "--task=gsm8k", "--temperature=0"], "--temperature=0.0 must be a finite number above 0"),
  (["--workdir=nowhere"], "--workdir=nowhere is not the workdir of a run: it has no config.json; give the folder"),
  (["--model=nowhere/at/all", "--task=gsm8k"], "nowhere/at/all"),
])  # fmt: skip
def test_bad_input_is_one_line(argv, line, tmp_path, capsys):
  with pytest.raises(SystemExit) as ended:
    evaluate.main([*argv, f"--out={tmp_path / 'out'}"])
  assert ended.value.code == 2
  errors = capsys.readouterr().err.splitlines()
  assert len(errors) == 1 and line in errors[0]


@pytest.mark.parametrize("argument, line", [
  ("--task_args={prompt_format: chat}", "{prompt_format: chat} is no JSON object; write one, as '{\"prompt_format\": "),
  ("--task_args=[1]", "[1] is no JSON object"),
  ("--k=1;8", "1;8 must be numbers, as 1,4,8"),
])  # fmt: skip
def test_what_cannot_be_read(argument, line, tmp_path, capsys):
  with pytest.raises(SystemExit) as ended:
    evaluate.main(["--model=a", "--task=gsm8k", argument, f"--out={tmp_path / 'out'}"])
  assert ended.value.code == 2 and line in capsys.readouterr().err


def test_a_file_in_the_way_and_an_interrupt(model, tmp_path, monkeypatch, capsys):
  (tmp_path / "taken").touch()
  with pytest.raises(SystemExit) as ended:
    _run(model, tmp_path / "taken" / "out")
  line = f"--out={tmp_path}/taken/out cannot be made (Not a directory); give another folder"
  assert ended.value.code == 2 and line in capsys.readouterr().err.splitlines()[-1]

  def interrupt(args):
    raise KeyboardInterrupt

  monkeypatch.setattr(evaluate, "run", interrupt)
  with pytest.raises(SystemExit) as ended:
    evaluate.main(["--model=a", "--task=gsm8k", f"--out={tmp_path}"])
  assert ended.value.code == 130
  assert f"stopped; the same command goes on with what {tmp_path}/samples.jsonl has" in capsys.readouterr().err


def test_ungraded_responses_are_no_successes_and_are_counted():
  def response(reward):
    return {"reward": reward, "answer": None, "tokens": [1], "truncated": False}

  rows = [{"greedy": response(None), "samples": [response(1.0), response(None)]},
          {"greedy": response(1.0), "samples": [response(0.0), response(0.5)]}]  # fmt: skip
  summary = evaluate.summarise(rows, ks=(1, 2))
  assert summary["greedy"]["mean"] == 0.5 and summary["not_graded"] == 2 and summary["greedy_reward"] == 1.0
  assert summary["pass@1"]["mean"] == 0.25 and summary["pass@2"]["mean"] == 0.5 and "maj@1" not in summary


def test_the_distance_to_a_reference_is_a_mean_over_prompts_of_their_samples(model):
  _, cfg, params = model
  other = transformer.init_params(cfg, jax.random.key(7), jnp.float32)
  rng = np.random.default_rng(0)
  prompts = [Prompt(i, rng.integers(3, 40, 4 + i).astype(np.int32), "", "") for i in range(3)]
  responses = rng.integers(3, 40, (3, 3, 5)).tolist()
  rows = [{"greedy": {"tokens": first}, "samples": [{"tokens": tokens} for tokens in rest]}
          for first, *rest in responses]
  found = evaluate.against_reference(rows, prompts, policy=(cfg, params), reference=(cfg, other), temperature=0.7,
                                     dtype=jnp.float32)  # fmt: skip

  def log_p(tree, prompt, tokens, temperature):
    ids = np.concatenate([prompt.tokens, tokens])[None]
    hidden = transformer.hidden_states(
      tree, cfg, ids, np.arange(ids.shape[1])[None], np.ones_like(ids), dtype=jnp.float32)
    logits = np.asarray(hidden[0] @ tree["embed"]["table"].T, np.float64)[:, : cfg.vocab_size] / temperature
    logits -= np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True)) + logits.max(1, keepdims=True)
    return sum(logits[len(prompt.tokens) + i - 1, token] for i, token in enumerate(tokens))

  kl = [np.mean([log_p(params, prompt, tokens, 0.7) - log_p(other, prompt, tokens, 0.7) for tokens in rest])
        for prompt, (_, *rest) in zip(prompts, responses)]
  assert found["kl"]["mean"] == pytest.approx(np.mean(kl), abs=1e-4)
  half = 1.959964 * np.std(kl, ddof=1) / math.sqrt(3)
  np.testing.assert_allclose(found["kl"]["interval"], [np.mean(kl) - half, np.mean(kl) + half], atol=1e-4)
  total = sum(log_p(other, prompt, first, 1.0) for prompt, (first, *_) in zip(prompts, responses))
  assert found["reference_perplexity"] == pytest.approx(math.exp(-total / 15), rel=1e-4)


class _Engine:
  """Answers each request at once: its tokens are the sums of its keys."""

  def __init__(self):
    self.requests = []

  def set_weights(self, params, version):
    pass

  def submit(self, request):
    self.requests.append(request)

  @property
  def num_groups(self):
    return len(self.requests)

  def step(self):
    requests, self.requests = self.requests, []
    return [SampledGroup(
      tag=request.tag, tokens=(request.keys.sum(axis=1, keepdims=True) % 97).astype(np.int32),
      lengths=np.ones(len(request.keys), np.int32), log_mu=np.zeros((len(request.keys), 1), np.float32),
      versions=np.zeros((len(request.keys), 1), np.int32), truncated=np.zeros(len(request.keys), bool),
    ) for request in requests]  # fmt: skip


def test_a_task_that_samples_its_evaluations_is_sampled_and_graded_together(tmp_path):
  nothing = lambda: []
  task = types.SimpleNamespace(
    name="t", tokenizer=None, samples_evaluations=True, train_prompts=nothing, eval_prompts=nothing, reward=nothing,
    response_text=lambda tokens: f"text {tokens[0]}")  # fmt: skip
  asked = []

  def reward(prompt, responses):
    asked.append(len(responses.texts))
    return np.array([int(tokens[0]) % 2 for tokens in responses.tokens], np.float32)

  prompts = [Prompt(i, np.array([1, 2], np.int32), "the one prompt", "") for i in range(5)]
  engine, temperatures = _Engine(), []
  submit = engine.submit
  engine.submit = lambda request: (temperatures.append(request.temperature), submit(request))
  rows = evaluate.sample_prompts(
    engine, None, prompts, task, reward=reward, num_samples=2, temperature=0.7, max_new_tokens=1, seed=3,
    path=tmp_path / "samples.jsonl")  # fmt: skip
  assert temperatures == [0.7] * 10 and sorted(asked) == [2] * 5 + [5]
  assert len({row["sampled"]["text"] for row in rows}) > 2 and not any("greedy" in row for row in rows)
  for row in rows:
    assert row["sampled"]["text"] == f"text {row['sampled']['tokens'][0]}" and len(row["samples"]) == 2
    assert row["sampled"]["reward"] == row["sampled"]["tokens"][0] % 2
  summary = evaluate.summarise(rows, ks=(1,))
  assert summary["sampled"]["mean"] == np.mean([row["sampled"]["tokens"][0] % 2 for row in rows])
  assert "sampled: reward of 1" in evaluate.summary_table({"model": "m", "task": "t", **summary})
  assert evaluate.read_finished(tmp_path / "samples.jsonl", prompts).keys() == set(range(5))

"""The scoring command: numbers equal an uncached, unpadded pass in numpy; each mistake in a file is said with its
line."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
import tiny_tokenizers
from tba_jax import score
from tba_jax.checkpoints.huggingface import save_model
from tba_jax.models import transformer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory):
  folder = tmp_path_factory.mktemp("score") / "model"
  cfg = dataclasses.replace(tiny.tiny_config(vocab_size=336, max_position_embeddings=64), vocab_size=320)
  params = tiny.tiny_params(cfg)
  tokenizer = tiny_tokenizers.chat_tokenizer()
  save_model(folder, cfg, params, tokenizer)
  return folder, cfg, params, tokenizer


@functools.partial(jax.jit, static_argnames="cfg")
def all_logits(params, tokens: jax.Array, *, cfg) -> jax.Array:
  positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
  return transformer.logits(
    params, cfg, transformer.hidden_states(params, cfg, tokens, positions, jnp.ones_like(tokens), dtype=jnp.float32)
  )[0]


def distributions(cfg, params, tokens: Sequence[int]) -> np.ndarray:
  """float64 [T, V] log-probabilities of what follows each token, of one row by itself. What comes after it cannot
  matter, so it is noise."""
  row = np.random.default_rng(len(tokens)).integers(0, 320, (1, 64)).astype(np.int32)
  row[0, : len(tokens)] = tokens
  z = np.asarray(all_logits(params, row, cfg=cfg), np.float64)[: len(tokens)]
  return z - np.log(np.exp(z).sum(-1, keepdims=True))


def run(folder: pathlib.Path, tmp_path: pathlib.Path, lines: Sequence[Any], *flags: str) -> list[dict[str, Any]]:
  source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
  as_bytes = (line if isinstance(line, bytes) else line.encode() if isinstance(line, str) else json.dumps(line).encode()
              for line in lines)
  source.write_bytes(b"\n".join(as_bytes) + b"\n")
  score.main([f"--model={folder}", f"--input={source}", f"--out={out}", *flags])
  return [json.loads(line) for line in out.read_text().split("\n")[:-1]]


def test_numbers_equal_one_row_at_a_time(model, tmp_path: pathlib.Path):
  folder, cfg, params, tokenizer = model
  rng = np.random.default_rng(0)
  lines = [{"tokens": rng.integers(4, 320, n).tolist(), "id": n} for n in (20, 1, 5, 16, 17, 33, 2, 40, 3)]
  lines += [
    {"text": "The answer is 18 dollars."},
    {"prompt": "How much does she", "response": " make every day?<|im_end|>", "source": "é"},
  ]
  results = run(folder, tmp_path, [*lines[:4], "", *lines[4:]])
  assert len(results) == len(lines)
  for line, result in zip(lines, results, strict=True):
    assert {key: result[key] for key in line} == line  # order kept, other keys carried along
    prompt, response = (tokenizer.encode(line[key]) if key in line else [] for key in ("prompt", "response"))
    tokens = line["tokens"] if "tokens" in line else prompt + response or tokenizer.encode(line["text"])
    start = len(prompt) or 1
    assert result["tokens"] == tokens
    expected = [distributions(cfg, params, tokens)[i - 1, tokens[i]] for i in range(start, len(tokens))]
    np.testing.assert_allclose(result["token_logprobs"], expected, atol=2e-5)
    assert all(np.float32(x) == x for x in result["token_logprobs"]) and "greedy" not in result
  assert (
    len(results[-1]["token_logprobs"]) == len(tokenizer.encode(" make every day?")) + 1
  )  # the stop token is scored as well


def test_greedy_equals_an_uncached_loop_and_ends_at_a_stop_id(model, tmp_path: pathlib.Path):
  folder, cfg, params, tokenizer = model
  rng = np.random.default_rng(1)
  lines = [{"tokens": rng.integers(4, 320, n).tolist()} for n in (1, 7, 16, 21)]

  def continued(tokens: list[int]) -> list[int]:
    chosen: list[int] = []
    while len(chosen) < 12 and not (chosen and chosen[-1] in tokenizer.stop_ids):
      chosen.append(int(distributions(cfg, params, tokens + chosen)[-1].argmax()))
    return chosen

  expected = [continued(line["tokens"]) for line in lines]
  found = run(folder, tmp_path, lines, "--greedy=12")
  assert [row["greedy"] for row in found] == expected
  assert [row["greedy_text"] for row in found] == [
    tokenizer.hf.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) for ids in expected
  ]
  assert score._up_to_stop([5, 7, 2, 9, 2], tokenizer.stop_ids) == [5, 7, 2] and score._up_to_stop(
    [5, 7], tokenizer.stop_ids
  ) == [5, 7]


def test_a_prompt_alone_is_continued_and_not_scored(model, tmp_path: pathlib.Path, capsys):
  folder, _, _, tokenizer = model
  lines = [{"prompt": "How much does she"}, {"text": "How much does she"}, {"prompt": "How", "response": ""}]
  alone, text, empty = run(folder, tmp_path, lines, "--greedy=5")
  assert alone["tokens"] == text["tokens"] == tokenizer.encode("How much does she")
  assert alone["greedy"] == text["greedy"] and alone["token_logprobs"] == empty["token_logprobs"] == []
  assert len(text["token_logprobs"]) == len(text["tokens"]) - 1
  with pytest.raises(SystemExit):
    run(folder, tmp_path, lines[:1])
  assert 'with --greedy, "prompt" may come alone' in capsys.readouterr().err
  with pytest.raises(SystemExit):
    score.main(["--help"])
  assert '"prompt" alone, of which nothing is scored' in " ".join(capsys.readouterr().out.split())


def test_separators_inside_a_text_do_not_end_a_line(model, tmp_path: pathlib.Path):
  text = "a\u2028b\x85c\x0cd"
  (row,) = run(model[0], tmp_path, [json.dumps({"text": text}, ensure_ascii=False)])
  assert row["text"] == text


def test_few_shapes_are_compiled(model):
  rows = [[5] * n for n in range(1, 60)]
  batches = list(score.bucket_batches(rows))
  assert {tokens.shape for _, tokens, _ in batches} == {(16, 16), (16, 32), (32, 64)}
  assert sorted(i for indices, _, _ in batches for i in indices) == list(range(59))
  for indices, tokens, lengths in batches:
    assert [int(n) for n in lengths[: len(indices)]] == [len(rows[i]) for i in indices]
    assert tokens.sum() == 5 * lengths.sum()
  many = list(score.bucket_batches([[7] * 500] * 20))
  assert [(len(indices), tokens.shape) for indices, tokens, _ in many] == [(8, (8, 512)), (8, (8, 512)), (4, (8, 512))]


@pytest.mark.parametrize(
  ("line", "message"),
  [
    ("{", "in.jsonl, line 3: Expecting property name"),
    ("[1]", 'line 3: a line must be a JSON object with either "tokens", or "text"'),
    ({"texts": "a"}, 'line 3: a line must be a JSON object with either "tokens", or "text"'),
    ({"text": "a", "tokens": [1]}, "line 3: a line must be a JSON object with either"),
    ({"text": 7}, 'line 3: "text" must be a string, found int'),
    ({"prompt": "a", "response": None}, 'line 3: "response" must be a string, found NoneType'),
    ({"prompt": "", "response": "a"}, 'line 3: "prompt" is empty'),
    ({"text": ""}, "line 3: there are no tokens"),
    ({"tokens": [1, 2.5]}, 'line 3: "tokens" must be a list of integers'),
    ({"tokens": [1, 320]}, "line 3: token id 320 is outside the model's vocabulary; ids are 0 to 319"),
    ({"tokens": [1, -1]}, "line 3: token id -1 is outside"),
    ({"tokens": [1] * 62}, "line 3: 62 tokens and --greedy=3 more are more than the 64 positions .* or lower --greedy"),
    (b'{"text": "caf\xe9"}', r"in.jsonl, line 3: byte 14 of the line \(0xe9\) is not UTF-8; save the file in that"),
    ({"prompt": ""}, "line 3: there are no tokens"),
    ({"response": "a"}, "line 3: a line must be a JSON object with either"),
    ('{"text": "ab", "more": "\\ud800"}', r"line 3: a \\ud800 to \\udfff stands alone"),
    ('{"text": ' + 100_000 * "[", "line 3: brackets are nested too deep"),
  ],
)
def test_what_is_wrong_with_a_line_is_said(model, tmp_path: pathlib.Path, capsys, line: Any, message: str):
  with pytest.raises(SystemExit) as stopped:
    run(model[0], tmp_path, [{"text": "fine"}, "", line], "--greedy=3")
  error = capsys.readouterr().err
  assert stopped.value.code == 2 and re.search(f"error: .*{message}", error), error
  assert not (tmp_path / "out.jsonl").exists()


def test_what_is_wrong_with_the_arguments_is_said(model, tmp_path: pathlib.Path):
  folder = model[0]
  (tmp_path / "in.jsonl").write_text("\n")
  arguments = {
    "model": str(folder),
    "input_path": tmp_path / "in.jsonl",
    "output_path": tmp_path / "out.jsonl",
    "num_greedy_tokens": 0,
    "dtype": jnp.float32,
  }
  for change, message in [
    ({}, "holds no lines to score"),
    ({"input_path": tmp_path / "no"}, "no is not a file; give a .jsonl file"),
    ({"output_path": tmp_path / "in.jsonl"}, "is the input; give another file"),
    ({"output_path": tmp_path / "no" / "out"}, "does not exist; make it first"),
    ({"output_path": tmp_path}, "is there and is no ordinary file; give the name of a file"),
    ({"output_path": pathlib.Path("/dev/null")}, "--out=/dev/null is there and is no ordinary file"),
    ({"num_greedy_tokens": -1}, "--greedy=-1 must be 0 or more"),
    ({"num_greedy_tokens": 64}, "--greedy=64 must be below 64, the positions that the model takes .*; lower it"),
    ({"model": str(tmp_path / "no")}, "no does not exist"),
  ]:
    with pytest.raises(ValueError, match=message):
      score.run(**{**arguments, **change})


def test_padding_rows_and_other_rows_change_nothing(model):
  _, cfg, params, _ = model
  tokens = np.array([[9, 8, 7, 6] + [0] * 12, [5] * 16], np.int32)
  alone = score._score(params, tokens[:1], np.array([4], np.int32), cfg=cfg, dtype=jnp.float32)
  padded_otherwise = score._score(
    params,
    tokens + np.array([[0] * 4 + [3] * 12, [0] * 16], np.int32),
    np.array([4, 16], np.int32),
    cfg=cfg,
    dtype=jnp.float32,
  )
  np.testing.assert_allclose(alone[0, :4], padded_otherwise[0, :4], atol=1e-6)
  assert jax.numpy.all(alone[0, 4:] == 0)

"""Scores text with a model: python -m tba_jax.score --model=PATH --input=FILE.jsonl --out=FILE.jsonl [--greedy=N]

Each line of the input is a JSON object with "tokens" (ids), "text", or "prompt" and "response"; other keys are carried
along. With --greedy a "prompt" may come alone: nothing of it is scored, and "token_logprobs" is empty. A line comes
back with
    "tokens"          the ids that were scored
    "token_logprobs"  float32 nats at temperature 1 over the full vocabulary: of every token but the first, or of the
                      response's tokens alone
    "greedy"          with --greedy=N: the ids that the model would continue with after all of "tokens", at most N,
                      ending with the first stop id; made by the cached decoder
    "greedy_text"     the same as text, without special tokens
Texts and prompts get what the tokenizer puts around a text by itself (for some a begin-of-text id); responses do not.
Nothing is trained and nothing is sampled here.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.progress

from tba_jax.checkpoints.huggingface import load_model
from tba_jax.models import transformer
from tba_jax.models.cache import write_front
from tba_jax.models.heads import token_logprobs
from tba_jax.models.variants import ModelConfig
from tba_jax.tokenizer import Tokenizer

_SMALLEST_BUCKET = 16  # tokens; rows are padded to powers of two from here on, so few shapes are compiled
_BATCH_TOKENS = 4096  # rows times padded length of one batch


@dataclasses.dataclass(frozen=True)
class Example:
  """One line of the input: its ids, of which those from `start` on are scored."""

  row: dict[str, Any]
  tokens: list[int]
  start: int


def read_examples(
  path: pathlib.Path, tokenizer: Tokenizer, *, max_positions: int, num_greedy_tokens: int
) -> list[Example]:
  """Reads a .jsonl file; empty lines are skipped.

  Args:
    max_positions: of the model; a line's tokens and those that continue it must fit.
    num_greedy_tokens: how many will continue a line; if any, a prompt needs no response.
  Raises: ValueError naming file and line if a line is not UTF-8, not JSON, not one of the forms above, or too long.
  """
  if not path.is_file():
    raise ValueError(f"{path} is not a file; give a .jsonl file with one JSON object a line.")
  examples = []
  # Lines end with \n alone: a text may hold other characters at which str.splitlines would cut it.
  for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
    if not line.strip():
      continue
    try:
      example = _example(json.loads(_decoded(line)), tokenizer, prompt_alone=num_greedy_tokens > 0)
      if not example.tokens:
        raise ValueError("there are no tokens; at least one is needed.")
      if len(example.tokens) + num_greedy_tokens > max_positions:
        beside = f" and --greedy={num_greedy_tokens} more" if num_greedy_tokens else ""
        raise ValueError(
          f"{len(example.tokens)} tokens{beside} are more than the {max_positions} positions that the model takes; "
          f"shorten the text{' or lower --greedy' if num_greedy_tokens else ''}."
        )
    except RecursionError as error:
      raise ValueError(f"{path}, line {number}: brackets are nested too deep.") from error
    except ValueError as error:  # json's own error is one
      raise ValueError(f"{path}, line {number}: {error}") from error
    examples.append(example)
  if not examples:
    raise ValueError(f"{path} holds no lines to score.")
  return examples


def _decoded(line: bytes) -> str:
  try:
    return line.decode("utf-8")
  except UnicodeDecodeError as error:
    raise ValueError(
      f"byte {error.start + 1} of the line ({line[error.start]:#04x}) is not UTF-8; save the file in that encoding."
    ) from error


def _example(row: Any, tokenizer: Tokenizer, *, prompt_alone: bool) -> Example:
  if re.search("[\ud800-\udfff]", json.dumps(row, ensure_ascii=False)):
    raise ValueError("a \\ud800 to \\udfff stands alone, which is no character; UTF-16 pairs are written as two of them.")
  forms = [
    keys
    for keys in (("tokens",), ("text",), ("prompt", "response"))
    if isinstance(row, dict) and any(key in row for key in keys)
  ]
  if forms == [("prompt", "response")] and prompt_alone and "response" not in row:
    forms = [("prompt",)]
  if len(forms) != 1 or not all(key in row for key in forms[0]):
    raise ValueError(
      'a line must be a JSON object with either "tokens", or "text", or "prompt" and "response" (with --greedy, '
      '"prompt" may come alone).'
    )
  wrong = [key for key in forms[0] if key != "tokens" and not isinstance(row[key], str)]
  if wrong:
    raise ValueError(f'"{wrong[0]}" must be a string, found {type(row[wrong[0]]).__name__}.')
  if forms[0] == ("text",):
    return Example(row, tokenizer.encode(row["text"], add_special_tokens=True), 1)
  if forms[0] == ("prompt", "response"):
    prompt = tokenizer.encode(row["prompt"], add_special_tokens=True)
    if not prompt:
      raise ValueError('"prompt" is empty, so the first token of the response has nothing to be predicted from.')
    return Example(row, prompt + tokenizer.encode(row["response"]), len(prompt))
  if forms[0] == ("prompt",):
    prompt = tokenizer.encode(row["prompt"], add_special_tokens=True)
    return Example(row, prompt, len(prompt))
  tokens = row["tokens"]
  if not isinstance(tokens, list) or any(not isinstance(t, int) or isinstance(t, bool) for t in tokens):
    raise ValueError('"tokens" must be a list of integers.')
  outside = [t for t in tokens if not 0 <= t < tokenizer.vocab_size]
  if outside:
    raise ValueError(
      f"token id {outside[0]} is outside the model's vocabulary; ids are 0 to {tokenizer.vocab_size - 1}."
    )
  return Example(row, tokens, 1)


def bucket_batches(rows: Sequence[Sequence[int]]) -> Iterator[tuple[list[int], np.ndarray, np.ndarray]]:
  """Batches of rows of like length.

  Yields: (indices of the rows in it, tokens int32 [B, T] padded on the right, lengths int32 [B]); T is a power of two.
    Rows beyond the indices only fill the batch: they repeat its first.
  """
  buckets: dict[int, list[int]] = {}
  for i, row in enumerate(rows):
    buckets.setdefault(max(_SMALLEST_BUCKET, 1 << (len(row) - 1).bit_length()), []).append(i)
  for width, members in sorted(buckets.items()):
    num_rows = min(max(1, _BATCH_TOKENS // width), 1 << (len(members) - 1).bit_length())
    for at in range(0, len(members), num_rows):
      indices = members[at : at + num_rows]
      filled = [rows[i] for i in indices + indices[:1] * (num_rows - len(indices))]
      tokens = np.zeros((num_rows, width), np.int32)
      for target, row in zip(tokens, filled, strict=True):
        target[: len(row)] = row
      yield indices, tokens, np.array([len(row) for row in filled], np.int32)


@functools.partial(jax.jit, static_argnames=("cfg", "dtype"))
def _score(params: Any, tokens: jax.Array, lengths: jax.Array, *, cfg: ModelConfig, dtype: Any) -> jax.Array:
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
  segment_ids = (positions < lengths[:, None]).astype(jnp.int32)
  return token_logprobs(params, cfg, tokens, positions, segment_ids, temperature=1.0, dtype=dtype)[0]


@functools.partial(jax.jit, static_argnames=("cfg", "num_tokens", "dtype"))
def greedy_tokens(
  decode_params: Any, tokens: jax.Array, lengths: jax.Array, *, cfg: ModelConfig, num_tokens: int, dtype: Any
) -> jax.Array:
  """The most likely next token, num_tokens times over, through the cache; stop ids are not heeded.

  Args:
    decode_params: in the decode layout. tokens: int32 [B, P], padded on the right. lengths: int32 [B].
  Returns: int32 [B, num_tokens].
  """
  batch, width = tokens.shape
  cache = transformer.init_cache(cfg, batch=batch, length=width + num_tokens, dtype=dtype)
  logits, prompts = transformer.prefill(decode_params, cfg, tokens, lengths, dtype=dtype)
  cache = write_front(cache, prompts)

  def step(carry: tuple[jax.Array, Any], i: jax.Array) -> tuple[tuple[jax.Array, Any], jax.Array]:
    logits, cache = carry
    chosen = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return transformer.decode_step(decode_params, cfg, chosen, lengths + i, cache, dtype=dtype), chosen

  return jax.lax.scan(step, (logits, cache), jnp.arange(num_tokens))[1].T


def score_examples(
  params: Any,
  cfg: ModelConfig,
  tokenizer: Tokenizer,
  examples: Sequence[Example],
  *,
  num_greedy_tokens: int,
  dtype: Any,
  console: rich.console.Console,
) -> list[dict[str, Any]]:
  """The examples' rows with what the module's docstring says, in their order."""
  results: list[dict[str, Any]] = [{**example.row, "tokens": example.tokens} for example in examples]
  batches = list(bucket_batches([example.tokens for example in examples]))
  decode_params = transformer.unstack(params) if num_greedy_tokens else None
  for indices, tokens, lengths in rich.progress.track(
    batches, "scoring", console=console, disable=not console.is_terminal
  ):
    log_p = np.asarray(_score(params, tokens, lengths, cfg=cfg, dtype=dtype))
    for i, row in zip(indices, log_p, strict=False):  # rows that fill the batch come last
      results[i]["token_logprobs"] = row[examples[i].start : len(examples[i].tokens)].tolist()
    if num_greedy_tokens:
      chosen = np.asarray(
        greedy_tokens(decode_params, tokens, lengths, cfg=cfg, num_tokens=num_greedy_tokens, dtype=dtype)
      )
      for i, row in zip(indices, chosen, strict=False):
        results[i]["greedy"] = _up_to_stop(row.tolist(), tokenizer.stop_ids)
        results[i]["greedy_text"] = tokenizer.decode(results[i]["greedy"])
  return results


def _up_to_stop(tokens: list[int], stop_ids: Sequence[int]) -> list[int]:
  ends = [i for i, token in enumerate(tokens) if token in stop_ids]
  return tokens[: ends[0] + 1] if ends else tokens


def run(*, model: str, input_path: pathlib.Path, output_path: pathlib.Path, num_greedy_tokens: int, dtype: Any) -> None:
  """Scores one file. The output appears whole or not at all.

  Raises: ValueError for a mistake in the arguments, the model or a line of the input.
  """
  if num_greedy_tokens < 0:
    raise ValueError(f"--greedy={num_greedy_tokens} must be 0 or more.")
  if output_path.resolve() == input_path.resolve():
    raise ValueError(f"--out={output_path} is the input; give another file.")
  if output_path.exists() and not output_path.is_file():
    raise ValueError(f"--out={output_path} is there and is no ordinary file; give the name of a file.")
  if not output_path.parent.is_dir():
    raise ValueError(f"--out={output_path}: the folder {output_path.parent} does not exist; make it first.")
  cfg, params, tokenizer = load_model(model, dtype=dtype)
  if num_greedy_tokens >= cfg.max_positions:
    raise ValueError(
      f"--greedy={num_greedy_tokens} must be below {cfg.max_positions}, the positions that the model takes (a line's "
      "own tokens need some of them); lower it."
    )
  examples = read_examples(
    input_path, tokenizer, max_positions=cfg.max_positions, num_greedy_tokens=num_greedy_tokens
  )
  console = rich.console.Console(stderr=True)
  results = score_examples(
    params, cfg, tokenizer, examples, num_greedy_tokens=num_greedy_tokens, dtype=dtype, console=console
  )
  temporary = output_path.with_name(f".{output_path.name}.tmp")
  temporary.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in results), encoding="utf-8")
  os.replace(temporary, output_path)
  console.print(
    f"{len(results)} lines, {sum(len(row['token_logprobs']) for row in results)} tokens scored: {output_path}"
  )


def main(argv: Sequence[str] | None = None) -> None:
  """The command line; bad input ends with one line on stderr and exit code 2."""
  parser = argparse.ArgumentParser(
    prog="python -m tba_jax.score", description="Log-probabilities of given text under a model."
  )
  parser.add_argument("--model", required=True, help="model folder, .gguf file, hub name, or package:NAME")
  parser.add_argument(
    "--input", required=True, type=pathlib.Path,
    help='.jsonl file to score: {"tokens"}, {"text"}, or {"prompt", "response"} a line',
  )
  parser.add_argument("--out", required=True, type=pathlib.Path, help=".jsonl file to write")
  parser.add_argument(
    "--greedy", type=int, default=0, metavar="N",
    help='also continue each line greedily by up to N tokens, ending with the first stop id ("greedy" and '
    '"greedy_text"); a line may then be a "prompt" alone, of which nothing is scored',
  )
  parser.add_argument(
    "--dtype", choices=("float32", "bfloat16"), default="float32", help="of parameters and computation"
  )
  args = parser.parse_args(argv)
  try:
    run(
      model=args.model,
      input_path=args.input,
      output_path=args.out,
      num_greedy_tokens=args.greedy,
      dtype=jnp.dtype(args.dtype),
    )
  except ValueError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
  main()

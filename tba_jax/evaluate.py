"""How good a policy is on held-out prompts: greedy decoding in a run, and a command that also samples.

    python -m tba_jax.evaluate --model=PATH --task=gsm8k --task_args='{"prompt_format": "rho_sft"}' --data=DIR \\
      --samples=8 --k=1,8 --out=FOLDER
    python -m tba_jax.evaluate --workdir=RUN --samples=8 --out=FOLDER

With --workdir the newest checkpoint is evaluated (--step: another), and task, data and limits are those of the run
unless given. FOLDER gets samples.jsonl, a line for each finished prompt, and summary.json: greedy accuracy, mean reward
of n samples, unbiased pass@k, maj@k (for tasks whose responses end in an answer), with 95% intervals over prompts, and
the perplexity of the greedy responses under --reference=PATH. The same command again goes on where it was stopped.
One device is used.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import os
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from tba_jax.checkpoints.huggingface import load_model
from tba_jax.checkpoints.trained import load_trained
from tba_jax.learner import make_scorer
from tba_jax.metrics import StageProgress, bytes_bar
from tba_jax.models import transformer
from tba_jax.sample_statistics import majority_at_k, pass_at_k, wilson_interval
from tba_jax.sampling.engine import Engine, SampledGroup, SampleRequest, sample_keys
from tba_jax.tasks import registry
from tba_jax.tasks.base import AnswerTask, GroupReward, Responses, Task, TaskSettings, make_reward
from tba_jax.types import Prompt
from tba_jax.weights import Weights


@dataclasses.dataclass(frozen=True)
class Response:
  """One evaluated prompt, for people to read."""

  prompt: Prompt
  text: str
  reward: float
  num_tokens: int
  truncated: bool


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """Greedy results at one version; `accuracy` is the share of prompts whose response earns the full reward of 1."""

  version: int
  accuracy: float
  size: int
  mean_tokens: float
  truncated: float
  responses: tuple[Response, ...]


class Interrupted(Exception):
  """The evaluation was asked to stop before its end."""


def evaluate_greedy(
    engine: Engine,
    weights: Weights,
    prompts: Sequence[Prompt],
    *,
    reward: GroupReward,
    response_text: Callable[[Sequence[int]], str],
    max_new_tokens: int,
    stopped: Callable[[], bool],
    on_progress: Callable[[int], None] = lambda done: None,
) -> Evaluation:
  """Decodes every prompt once without randomness and grades it. The engine must be idle; it keeps `weights` afterwards.

  Args:
    prompts: at least one.
    reward: of which 1 is a success; called with one response at a time.
    stopped: asked between chunks.
    on_progress: called with the number of prompts done.
  Raises: Interrupted if `stopped` said so; the engine is idle then too.
  """
  assert engine.num_groups == 0, "an evaluation must not share its chunks with rollouts of other weights"
  engine.set_weights(weights.params, weights.version)
  key = np.zeros((1, 2), np.uint32)  # greedy decoding draws nothing
  for index, prompt in enumerate(prompts):
    engine.submit(
        SampleRequest(tag=index, prompt=prompt.tokens, keys=key, temperature=0.0, max_new_tokens=max_new_tokens))
  responses: dict[int, Response] = {}
  while len(responses) < len(prompts):
    if stopped():
      engine.cancel()
      raise Interrupted
    for group in engine.step():
      responses[group.tag] = _grade(prompts[group.tag], group, reward, response_text)
    on_progress(len(responses))
  ordered = tuple(responses[index] for index in range(len(prompts)))
  return Evaluation(
      version=weights.version,
      accuracy=float(np.mean([response.reward == 1.0 for response in ordered])),
      size=len(ordered),
      mean_tokens=float(np.mean([response.num_tokens for response in ordered])),
      truncated=float(np.mean([response.truncated for response in ordered])),
      responses=ordered,
  )


def _grade(prompt: Prompt, group: SampledGroup, reward: GroupReward, response_text: Callable[[Any], str]) -> Response:
  length, truncated = int(group.lengths[0]), bool(group.truncated[0])
  tokens = group.tokens[0, :length]
  text = response_text(tokens)
  reward_1 = reward(prompt, Responses((text,), (tokens,), np.array([truncated])))
  return Response(prompt, text, float(reward_1[0]), length, truncated)


# --- The command ---


def _graded(prompt: Prompt, group: SampledGroup, reward: GroupReward, task: Task) -> list[dict[str, Any]]:
  """One object per response, as samples.jsonl holds them. A reward that could not be given is null."""
  tokens = tuple(row[:length] for row, length in zip(group.tokens, group.lengths))
  texts = tuple(task.response_text(row) for row in tokens)
  rewards = reward(prompt, Responses(texts, tokens, group.truncated))
  answers = [task.final_answer(text) for text in texts] if isinstance(task, AnswerTask) else [None] * len(texts)
  return [
    {
      "text": text, "reward": float(r) if math.isfinite(r) else None, "answer": answer, "tokens": row.tolist(),
      "truncated": bool(cut),
    }
    for text, r, answer, row, cut in zip(texts, rewards, answers, tokens, group.truncated)
  ]


def read_finished(path: pathlib.Path) -> dict[int, dict[str, Any]]:
  """The finished prompts of samples.jsonl by index; a last line that was cut off by a kill is taken away."""
  if not path.exists():
    return {}
  whole, _, rest = path.read_bytes().rpartition(b"\n")
  if rest:
    with path.open("rb+") as file:
      file.truncate(len(whole) + 1 if whole else 0)
  rows = [json.loads(line) for line in whole.splitlines()]
  return {row["index"]: row for row in rows}


def sample_prompts(
    engine: Engine, params: Any, prompts: Sequence[Prompt], task: Task, *, reward: GroupReward, num_samples: int,
    temperature: float, max_new_tokens: int, seed: int, path: pathlib.Path,
    on_progress: Callable[[int], None] = lambda done: None) -> list[dict[str, Any]]:
  """Decodes each prompt greedily and `num_samples` times at a temperature, and appends it to `path` when it is done.

  Prompts that `path` holds already are not done again. The samples of a prompt depend on seed and index alone.
  Returns: a row per prompt, in their order: {"index", "prompt", "greedy": response, "samples": [response, ...]}.
  """
  rows = read_finished(path)
  engine.set_weights(params, 0)
  for index, prompt in enumerate(prompts):
    if index in rows:
      continue
    request = functools.partial(SampleRequest, prompt=prompt.tokens, max_new_tokens=max_new_tokens)
    engine.submit(request(tag=(index, "greedy"), keys=np.zeros((1, 2), np.uint32), temperature=0.0))
    if num_samples:
      keys = sample_keys(seed, occurrence=index, attempt=0, num_samples=num_samples)
      engine.submit(request(tag=(index, "samples"), keys=keys, temperature=temperature))
  half: dict[int, dict[str, Any]] = {}
  with path.open("a", encoding="utf8") as file:
    while engine.num_groups:
      for group in engine.step():
        index, part = group.tag
        row = half.setdefault(index, {"index": index, "prompt": prompts[index].text, "samples": []})
        found = _graded(prompts[index], group, reward, task)
        row[part] = found[0] if part == "greedy" else found
        if "greedy" in row and len(row["samples"]) == num_samples:
          rows[index] = half.pop(index)
          file.write(json.dumps(rows[index]) + "\n")
          file.flush()
          os.fsync(file.fileno())
      on_progress(len(rows))
  return [rows[index] for index in range(len(prompts))]


def summarise(rows: Sequence[Mapping[str, Any]], *, ks: Sequence[int]) -> dict[str, Any]:
  """Numbers of an evaluation, means over prompts with 95% intervals [low, high]; a success is a reward of 1."""
  num = len(rows)

  def share(values: Sequence[float]) -> dict[str, Any]:
    mean = float(np.mean(values))
    return {"mean": mean, "interval": list(wilson_interval(mean, num))}

  greedy = [row["greedy"] for row in rows]
  rewards = [response["reward"] for response in greedy if response["reward"] is not None]
  everything = [*greedy, *(sample for row in rows for sample in row["samples"])]
  summary: dict[str, Any] = {
      "num_prompts": num,
      "greedy": share([response["reward"] == 1 for response in greedy]),
      "greedy_reward": float(np.mean(rewards or [math.nan])),
      "greedy_tokens": float(np.mean([len(response["tokens"]) for response in greedy])),
      "greedy_truncated": float(np.mean([response["truncated"] for response in greedy])),
      "not_graded": sum(response["reward"] is None for response in everything),
  }
  num_samples = len(rows[0]["samples"])
  if num_samples:
    rights = [[sample["reward"] == 1 for sample in row["samples"]] for row in rows]
    summary |= {"num_samples": num_samples, "samples": share([float(np.mean(right)) for right in rights])}
    answers = [[sample["answer"] for sample in row["samples"]] for row in rows]
    for k in ks:
      summary[f"pass@{k}"] = share([pass_at_k(num_samples, sum(right), k) for right in rights])
      if any(answer is not None for found in answers for answer in found):
        summary[f"maj@{k}"] = share([majority_at_k(found, right, k) for found, right in zip(answers, rights)])
  return summary


def reference_perplexity(
    rows: Sequence[Mapping[str, Any]], prompts: Sequence[Prompt], *, path: str, dtype: Any) -> float:
  """exp of the mean negative log-probability of a token of the greedy responses under another model, temperature 1."""
  cfg, params, _ = load_model(path, dtype=dtype)
  score = make_scorer(cfg, temperature=1.0, dtype=dtype, chunk_tokens=1024)
  total, count = 0.0, 0
  for row, prompt in zip(rows, prompts):
    response = np.array(row["greedy"]["tokens"], np.int32)
    ids = np.concatenate([prompt.tokens, response])
    width = 1 << (len(ids) - 1).bit_length()
    at = np.arange(width, dtype=np.int32)[None]
    real = at < len(ids)
    tokens = np.zeros((1, width), np.int32)
    tokens[0, :len(ids)] = ids
    log_p = np.asarray(score(params, tokens, np.where(real, at, 0), real.astype(np.int32)))
    total += float(log_p[0, len(prompt.tokens):len(ids)].sum())
    count += len(response)
  return math.exp(-total / count)


def run(args: argparse.Namespace) -> dict[str, Any]:
  """One evaluation as the command line describes it. Raises: ValueError for bad input."""
  if bool(args.model) == bool(args.workdir):
    raise ValueError("give either --model=PATH or --workdir=RUN.")
  given = {name: getattr(args, name) for name in _DEFAULTS if getattr(args, name) is not None}
  options = {**_DEFAULTS, **_options_of_run(args.workdir), **given}
  if not options["task"]:
    raise ValueError("--task is missing; give a task's name, or FILE.py:CLASS.")
  if args.samples and not all(1 <= k <= args.samples for k in args.k):
    raise ValueError(f"--k={','.join(map(str, args.k))} must lie between 1 and --samples={args.samples}.")
  dtype = jnp.dtype(args.dtype)
  if args.workdir:
    step, cfg, params, tokenizer = load_trained(args.workdir, step=args.step)
    params = jax.tree.map(lambda leaf: jax.device_put(leaf.astype(dtype), jax.devices()[0]), params)
    source = f"{args.workdir} step {step}"
  else:
    print(f"loading {args.model}", file=sys.stderr, flush=True)
    cfg, params, tokenizer = load_model(args.model, dtype=dtype, on_progress=bytes_bar("loading"))
    source = args.model
  settings = TaskSettings(
      seed=options["seed"], data_path=options["data"], max_prompt_tokens=options["max_prompt_tokens"],
      num_eval_prompts=options["size"], num_sft_examples=1)
  task = registry.make_task(options["task"], tokenizer, settings, options["task_args"])
  prompts = task.eval_prompts()[: options["size"] or None]
  _claim(args.out, {"model": source, "samples": args.samples, "dtype": args.dtype, **options})
  engine = Engine(
      cfg, jax.devices()[0], slots=max(args.slots, args.samples), max_prompt_tokens=options["max_prompt_tokens"],
      max_new_tokens=options["max_new_tokens"], chunk_tokens=min(16, options["max_new_tokens"]),
      stop_ids=task.tokenizer.stop_ids, dtype=dtype, log_mu_temperature=options["temperature"])
  bar = StageProgress("evaluating", len(prompts))
  rows = sample_prompts(
      engine, transformer.unstack(params), prompts, task, reward=make_reward(task, jax.devices()[0], for_eval=True),
      num_samples=args.samples, temperature=options["temperature"], max_new_tokens=options["max_new_tokens"],
      seed=options["seed"], path=args.out / "samples.jsonl",
      on_progress=bar.update)
  bar.close()
  summary = {"model": source, "task": options["task"], **summarise(rows, ks=args.k)}
  if args.reference:
    summary["reference_perplexity"] = reference_perplexity(rows, prompts, path=args.reference, dtype=dtype)
  (args.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
  return summary


_DEFAULTS: dict[str, Any] = {
    "task": "", "data": "", "task_args": {}, "seed": 0, "temperature": 1.0, "max_prompt_tokens": 512,
    "max_new_tokens": 512, "size": 0,
}


def _options_of_run(workdir: pathlib.Path | None) -> dict[str, Any]:
  """What the run in a workdir was told of task and sampling; nothing without one."""
  if workdir is None or not (workdir / "config.json").is_file():
    return {}
  known = json.loads((workdir / "config.json").read_text())
  sample = {name: known["sample"][name] for name in ("temperature", "max_prompt_tokens", "max_new_tokens")}
  return {
      "task": known["task"], "data": known["data"]["path"], "task_args": known["task_args"], "seed": known["seed"],
      "size": known["eval"]["size"], **sample,
  }


def _claim(folder: pathlib.Path, settings: Mapping[str, Any]) -> None:
  """Makes the folder of this evaluation, or checks that it is. Raises: ValueError if it is of another one."""
  folder.mkdir(parents=True, exist_ok=True)
  path = folder / "settings.json"
  if path.is_file():
    found = json.loads(path.read_text())
    changed = [f"{key}: {found.get(key)!r} -> {value!r}" for key, value in settings.items() if found.get(key) != value]
    if changed:
      raise ValueError(f"--out={folder} belongs to another evaluation ({'; '.join(changed)}); give another folder.")
  else:
    path.write_text(json.dumps(settings, indent=2) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
  """The command line; bad input ends with one line on stderr and exit code 2."""
  parser = argparse.ArgumentParser(
      prog="python -m tba_jax.evaluate", description="Accuracy of a model on a task's held-out prompts.")
  parser.add_argument("--model", default="", help="model folder, .gguf file, hub name, or package:NAME")
  parser.add_argument("--workdir", type=pathlib.Path, help="folder of a run, instead of --model")
  parser.add_argument("--step", type=int, help="which checkpoint of the run; default: the newest")
  parser.add_argument("--out", required=True, type=pathlib.Path, help="folder to write; the same one again resumes")
  parser.add_argument("--task", help="a task's name, or FILE.py:CLASS")
  parser.add_argument("--task_args", type=json.loads, help="JSON object of what the task takes")
  parser.add_argument("--data", help="as data.path of a config")
  parser.add_argument("--size", type=int, help="prompts at most; 0: the whole split")
  parser.add_argument("--samples", type=int, default=0, help="of each prompt, beside the greedy response")
  parser.add_argument("--k", type=lambda text: [int(k) for k in text.split(",")], default=[1],
                      help="of pass@k and maj@k, as 1,4,8")
  parser.add_argument("--temperature", type=float, help="of the samples")
  parser.add_argument("--max_prompt_tokens", type=int)
  parser.add_argument("--max_new_tokens", type=int)
  parser.add_argument("--seed", type=int)
  parser.add_argument("--slots", type=int, default=32, help="responses decoded at once")
  parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the model")
  parser.add_argument("--reference", default="", help="model under which the greedy responses' perplexity is taken")
  logging.set_verbosity(logging.ERROR)  # orbax warns of every option that reading only implies
  try:
    summary = run(parser.parse_args(argv))
  except ValueError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
  print(json.dumps(summary, indent=2))


if __name__ == "__main__":
  main()

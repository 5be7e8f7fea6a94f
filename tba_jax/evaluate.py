"""How good a policy is on held-out prompts: greedy decoding in a run, and a command that also samples.

    python -m tba_jax.evaluate --model=PATH --task=gsm8k --task_args='{"prompt_format": "rho_sft"}' --data=DIR \\
      --samples=8 --k=1,8 --out=FOLDER
    python -m tba_jax.evaluate --workdir=RUN --samples=8 --out=FOLDER

With --workdir the newest checkpoint is evaluated (--step: another), and task, data and limits are those of the run
unless given. FOLDER gets samples.jsonl, a line for each finished prompt, and summary.json: greedy accuracy, mean reward
of n samples, unbiased pass@k, maj@k (for tasks whose responses end in an answer), with 95% intervals over prompts, and
the distance to the run's version 0, or to --reference=PATH: the perplexity of the greedy responses under it, and with
samples the KL divergence. The same command again goes on where it was stopped. One device is used.
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
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from tba_jax.checkpoints.huggingface import load_model
from tba_jax.checkpoints.trained import load_trained, load_version_0
from tba_jax.config_schema import TASK_ARGS
from tba_jax.learner import make_scorer
from tba_jax.metrics import StageProgress, bytes_bar, plain, write_atomic
from tba_jax.models import transformer
from tba_jax.models.variants import ModelConfig
from tba_jax.remote_workdir.fetch import local_copy
from tba_jax.remote_workdir.store import workdir_argument
from tba_jax.sample_statistics import mean_half_interval, summarise, summary_table, wilson_interval
from tba_jax.sampling.engine import Engine, SampledGroup, SampleRequest, sample_keys
from tba_jax.tasks import registry
from tba_jax.tasks.base import (
    AnswerTask, GroupReward, MeasuringReward, Responses, SampledEvalTask, Task, TaskSettings, grade, make_reward)
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
  """Results at one version, greedy ones unless the task samples its evaluations; `accuracy` is the share of prompts
  whose response earns the full reward of 1, `measures` what the reward says of all responses together."""

  version: int
  accuracy: float
  size: int
  mean_tokens: float
  truncated: float
  responses: tuple[Response, ...]
  measures: dict[str, float]

  def scalars(self) -> dict[str, float]:
    """What metrics.jsonl gets of it; the interval is of 95%."""
    low, high = wilson_interval(self.accuracy, self.size)
    return {
        "eval_accuracy": self.accuracy, "eval_accuracy_low": low, "eval_accuracy_high": high, "eval_size": self.size,
        "eval_version": self.version, "eval_response_tokens": self.mean_tokens, "eval_truncated": self.truncated,
        **{f"eval_{name}": value for name, value in self.measures.items()},
    }


class Interrupted(Exception):
  """The evaluation was asked to stop before its end."""


class RewardFailed(RuntimeError):
  """The reward of a task raised."""


def evaluate_greedy(
    engine: Engine,
    weights: Weights,
    prompts: Sequence[Prompt],
    *,
    reward: GroupReward,
    response_text: Callable[[Sequence[int]], str],
    max_new_tokens: int,
    temperature: float,
    seed: int,
    stopped: Callable[[], bool],
    on_progress: Callable[[int], None] = lambda done: None,
) -> Evaluation:
  """Decodes every prompt once and grades it. The engine must be idle; it keeps `weights` afterwards.

  Args:
    prompts: at least one.
    reward: of which 1 is a success; called with what has finished of equal prompts, mostly one response.
    temperature: 0 for greedy decoding. seed: of the samples otherwise.
    stopped: asked between chunks.
    on_progress: called with the number of prompts done.
  Raises: Interrupted if `stopped` said so; the engine is idle then too.
  """
  assert engine.num_groups == 0, "an evaluation must not share its chunks with rollouts of other weights"
  engine.set_weights(weights.params, weights.version)
  for index, prompt in enumerate(prompts):
    keys = sample_keys(seed, occurrence=index, attempt=0, num_samples=1)  # greedy decoding draws nothing
    engine.submit(SampleRequest(
        tag=index, prompt=prompt.tokens, keys=keys, temperature=temperature, max_new_tokens=max_new_tokens))
  responses: dict[int, Response] = {}
  while len(responses) < len(prompts):
    if stopped():
      engine.cancel()
      raise Interrupted
    for groups in _by_prompt(engine.step(), prompts):
      responses |= _grade(prompts, groups, reward, response_text)
    on_progress(len(responses))
  ordered = tuple(responses[index] for index in range(len(prompts)))
  return Evaluation(
      version=weights.version,
      accuracy=float(np.mean([response.reward == 1.0 for response in ordered])),
      size=len(ordered),
      mean_tokens=float(np.mean([response.num_tokens for response in ordered])),
      truncated=float(np.mean([response.truncated for response in ordered])),
      responses=ordered,
      measures=reward.measure([response.text for response in ordered]) if isinstance(reward, MeasuringReward) else {},
  )


def _by_prompt(groups: Sequence[SampledGroup], prompts: Sequence[Prompt]) -> list[list[SampledGroup]]:
  """Groups of one sample, those of equal prompts together: models that grade are then asked once."""
  together: dict[tuple[str, str], list[SampledGroup]] = {}
  for group in groups:
    prompt = prompts[group.tag]
    together.setdefault((prompt.text, prompt.answer), []).append(group)
  return list(together.values())


def _grade(
    prompts: Sequence[Prompt], groups: Sequence[SampledGroup], reward: GroupReward,
    response_text: Callable[[Any], str]) -> dict[int, Response]:
  """Responses to equal prompts by the index of their prompts."""
  tokens = tuple(group.tokens[0, : group.lengths[0]] for group in groups)
  texts, truncated = tuple(map(response_text, tokens)), np.array([group.truncated[0] for group in groups])
  rewards = grade(reward, prompts[groups[0].tag], Responses(texts, tokens, truncated))
  return {
      group.tag: Response(prompts[group.tag], text, float(r), len(row), bool(cut))
      for group, text, r, row, cut in zip(groups, texts, rewards, tokens, truncated)
  }


# --- The command ---


def _graded(prompt: Prompt, groups: Sequence[SampledGroup], reward: GroupReward, task: Task) -> list[dict[str, Any]]:
  """One object per response to equal prompts, as samples.jsonl holds them. A reward that could not be given is null."""
  tokens = tuple(row[:length] for group in groups for row, length in zip(group.tokens, group.lengths))
  texts = tuple(task.response_text(row) for row in tokens)
  truncated = np.concatenate([group.truncated for group in groups])
  try:
    rewards = grade(reward, prompt, Responses(texts, tokens, truncated))
  except Exception as error:  # whatever a task's own file raises; as a ValueError it would pass for bad input
    raise RewardFailed(f"the reward of prompt {prompt.prompt_id} raised {type(error).__name__}: {error}") from error
  answers = [task.final_answer(text) for text in texts] if isinstance(task, AnswerTask) else [None] * len(texts)
  return [
    {
      "text": text, "reward": float(r) if math.isfinite(r) else None, "answer": answer, "tokens": row.tolist(),
      "truncated": bool(cut),
    }
    for text, r, answer, row, cut in zip(texts, rewards, answers, tokens, truncated)
  ]


def read_finished(path: pathlib.Path, prompts: Sequence[Prompt]) -> dict[int, dict[str, Any]]:
  """The finished prompts of samples.jsonl by index; a last line that was cut off by a kill is taken away.

  Raises: ValueError for a line that is damaged, or of another prompt than the one that has its index now.
  """
  if not path.exists():
    return {}
  whole, _, rest = path.read_bytes().rpartition(b"\n")
  if rest:
    with path.open("rb+") as file:
      file.truncate(len(whole) + 1 if whole else 0)
  rows = {}
  for number, line in enumerate(whole.splitlines(), start=1):
    try:
      row = json.loads(line)
      index, text = row["index"], row["prompt"]
    except (ValueError, KeyError, TypeError) as error:
      raise ValueError(f"{path} line {number} is damaged ({error}); delete the line, and its prompt is done again."
                       ) from error
    if index >= len(prompts) or text != prompts[index].text:
      raise ValueError(f"{path} line {number} is of another prompt than the task's number {index}: the data have "
                       "changed since; give another --out.")
    rows[index] = row
  return rows


def sample_prompts(
    engine: Engine, params: Any, prompts: Sequence[Prompt], task: Task, *, reward: GroupReward, num_samples: int,
    temperature: float, max_new_tokens: int, seed: int, path: pathlib.Path,
    on_progress: Callable[[int], None] = lambda done: None) -> list[dict[str, Any]]:
  """Decodes each prompt once, as the task's evaluations do, and `num_samples` times at a temperature, and appends it to
  `path` when it is done.

  Prompts that `path` holds already are not done again. The samples of a prompt depend on seed and index alone.
  Returns: a row per prompt, in their order: {"index", "prompt", "greedy" or, of a task that samples its evaluations,
    "sampled": response, "samples": [response, ...]}.
  """
  rows, once = read_finished(path, prompts), "sampled" if isinstance(task, SampledEvalTask) else "greedy"
  engine.set_weights(params, 0)
  for index, prompt in enumerate(prompts):
    if index in rows:
      continue
    request = functools.partial(SampleRequest, prompt=prompt.tokens, max_new_tokens=max_new_tokens)
    keys = sample_keys((seed + 1) % 2**32, occurrence=index, attempt=0, num_samples=1)  # greedy decoding draws nothing
    engine.submit(request(tag=(index, once), keys=keys, temperature=0.0 if once == "greedy" else temperature))
    if num_samples:
      keys = sample_keys(seed, occurrence=index, attempt=0, num_samples=num_samples)
      engine.submit(request(tag=(index, "samples"), keys=keys, temperature=temperature))
  half: dict[int, dict[str, Any]] = {}
  with path.open("a", encoding="utf8") as file:
    while engine.num_groups:
      for index, part, found in _graded_of_chunk(engine.step(), prompts, task, reward):
        row = half.setdefault(index, {"index": index, "prompt": prompts[index].text, "samples": []})
        row[part] = found if part == "samples" else found[0]
        if once in row and len(row["samples"]) == num_samples:
          rows[index] = half.pop(index)
          file.write(json.dumps(rows[index]) + "\n")
          file.flush()
          os.fsync(file.fileno())
      on_progress(len(rows))
  return [rows[index] for index in range(len(prompts))]


def _graded_of_chunk(
    finished: Sequence[SampledGroup], prompts: Sequence[Prompt], task: Task, reward: GroupReward
) -> Iterator[tuple[int, str, list[dict[str, Any]]]]:
  """(index, part, responses) of each group; single responses to equal prompts are graded together."""
  several = [group for group in finished if group.tag[1] == "samples"]
  single = [dataclasses.replace(group, tag=group.tag[0]) for group in finished if group.tag[1] != "samples"]
  for group in several:
    yield *group.tag, _graded(prompts[group.tag[0]], [group], reward, task)
  for groups in _by_prompt(single, prompts):
    for group, response in zip(groups, _graded(prompts[groups[0].tag], groups, reward, task)):
      yield group.tag, "sampled" if isinstance(task, SampledEvalTask) else "greedy", [response]


def response_log_probs(
    cfg: ModelConfig, params: Any, pairs: Sequence[tuple[np.ndarray, Sequence[int]]], *, temperature: float, dtype: Any
) -> np.ndarray:
  """Log-probability of each (prompt, response) pair's response under a model, float64 [n], nats."""
  score, found = make_scorer(cfg, temperature=temperature, dtype=dtype, chunk_tokens=1024), []
  for prompt, response in pairs:
    ids = np.concatenate([prompt, np.array(response, np.int32)])
    width = 1 << (len(ids) - 1).bit_length()
    at = np.arange(width, dtype=np.int32)[None]
    real = at < len(ids)
    tokens = np.zeros((1, width), np.int32)
    tokens[0, :len(ids)] = ids
    log_p = np.asarray(score(params, tokens, np.where(real, at, 0), real.astype(np.int32)), np.float64)
    found.append(log_p[0, len(prompt):len(ids)].sum())
  return np.array(found)


def against_reference(
    rows: Sequence[Mapping[str, Any]], prompts: Sequence[Prompt], *, policy: tuple[ModelConfig, Any],
    reference: tuple[ModelConfig, Any], temperature: float, dtype: Any) -> dict[str, Any]:
  """How far a policy is from a reference, both as (config, parameters).

  `reference_perplexity`: exp of the mean negative log-probability of a token of the responses decoded once, under the
  reference at temperature 1. With samples also `kl`: the mean over prompts of the mean of log pi - log ref over a
  prompt's samples, both at the temperature that they were sampled at, nats a response, with a 95% interval.
  """
  once = "sampled" if "sampled" in rows[0] else "greedy"
  pairs = [(prompt.tokens, row[once]["tokens"]) for row, prompt in zip(rows, prompts)]
  total = response_log_probs(*reference, pairs, temperature=1.0, dtype=dtype).sum()
  found: dict[str, Any] = {"reference_perplexity": math.exp(-total / sum(len(response) for _, response in pairs))}
  if rows[0]["samples"]:
    pairs = [(prompt.tokens, sample["tokens"]) for row, prompt in zip(rows, prompts) for sample in row["samples"]]
    log_pi, log_ref = (response_log_probs(*model, pairs, temperature=temperature, dtype=dtype)
                       for model in (policy, reference))
    by_prompt = (log_pi - log_ref).reshape(len(rows), -1).mean(axis=1)
    mean, half = float(by_prompt.mean()), mean_half_interval(by_prompt)
    found["kl"] = {"mean": mean, "interval": [mean - half, mean + half]}
  return found


def run(args: argparse.Namespace) -> dict[str, Any]:
  """One evaluation as the command line describes it. Raises: ValueError for bad input."""
  if bool(args.model) == bool(args.workdir):
    raise ValueError("give either --model=PATH or --workdir=RUN.")
  if not args.workdir:
    return _run(args, None)
  with local_copy(args.workdir, checkpoint=True, step=args.step, version_0=not args.reference) as folder:
    return _run(args, folder)


def _run(args: argparse.Namespace, workdir: pathlib.Path | None) -> dict[str, Any]:
  """`workdir`: where the files of --workdir are."""
  given = {name: getattr(args, name) for name in _DEFAULTS if getattr(args, name) is not None}
  options = {**_DEFAULTS, **_options_of_run(workdir), **given}
  for name, least in _LEAST.items():
    value = {**vars(args), **options}[name]
    if value < least:
      raise ValueError(f"--{name}={value} must be at least {least}.")
  if not 0 < options["temperature"] < math.inf:
    raise ValueError(f"--temperature={options['temperature']} must be a finite number above 0.")
  if not options["task"]:
    raise ValueError("--task is missing; give a task's name, or FILE.py:CLASS.")
  if args.samples and not all(1 <= k <= args.samples for k in args.k):
    raise ValueError(f"--k={','.join(map(str, args.k))} must lie between 1 and --samples={args.samples}.")
  dtype = jnp.dtype(args.dtype)
  here = lambda tree: jax.tree.map(lambda leaf: jax.device_put(leaf.astype(dtype), jax.devices()[0]), tree)
  if workdir:
    step, cfg, params, tokenizer = load_trained(workdir, step=args.step)
    params = here(params)
    source = f"{args.workdir} step {step}"
  else:
    cfg, params, tokenizer = load_model(args.model, dtype=dtype, on_progress=bytes_bar("loading"))
    source = args.model
  settings = TaskSettings(
      seed=options["seed"], data_path=options["data"], max_prompt_tokens=options["max_prompt_tokens"],
      num_eval_prompts=options["size"], num_sft_examples=1)
  if "num_generated" in TASK_ARGS.get(options["task"], {}):  # real data, unless it is said
    options["task_args"] = {"num_generated": 0, **options["task_args"]}
  task = registry.make_task(options["task"], tokenizer, settings, options["task_args"])
  prompts = task.eval_prompts()[: options["size"] or None]
  _claim(args.out, {"model": source, "samples": args.samples, "dtype": args.dtype, **options})
  engine = Engine(
      cfg, jax.devices()[0], slots=max(args.slots, args.samples), max_prompt_tokens=options["max_prompt_tokens"],
      max_new_tokens=options["max_new_tokens"], chunk_tokens=min(16, options["max_new_tokens"]),
      stop_ids=task.tokenizer.stop_ids, dtype=dtype, log_mu_temperature=options["temperature"])
  bar = StageProgress("evaluating", len(prompts))
  reward = make_reward(task, jax.devices()[0], for_eval=True)
  rows = sample_prompts(
      engine, transformer.unstack(params), prompts, task, reward=reward,
      num_samples=args.samples, temperature=options["temperature"], max_new_tokens=options["max_new_tokens"],
      seed=options["seed"], path=args.out / "samples.jsonl",
      on_progress=bar.update)
  bar.close()
  summary = {"model": source, "task": options["task"], **summarise(rows, ks=args.k)}
  if isinstance(reward, MeasuringReward):
    once = "sampled" if "sampled" in rows[0] else "greedy"
    summary |= reward.measure([row[once]["text"] for row in rows])
  if args.reference or workdir:
    if args.reference:
      reference = load_model(args.reference, dtype=dtype)[:2]
    else:
      ref_cfg, ref_params = load_version_0(workdir)
      reference = ref_cfg, here(ref_params)
    summary |= against_reference(rows, prompts, policy=(cfg, params), reference=reference,
                                 temperature=options["temperature"], dtype=dtype)
  write_atomic(args.out / "summary.json", json.dumps(plain(summary), indent=2, allow_nan=False) + "\n")
  return summary


_DEFAULTS: dict[str, Any] = {
    "task": "", "data": "", "task_args": {}, "seed": 0, "temperature": 1.0, "max_prompt_tokens": 512,
    "max_new_tokens": 512, "size": 0,
}


_LEAST = {"size": 0, "samples": 0, "max_prompt_tokens": 1, "max_new_tokens": 1, "seed": 0, "slots": 1}


def _options_of_run(workdir: pathlib.Path | None) -> dict[str, Any]:
  """What the run in a workdir was told of task and sampling; nothing without a workdir."""
  if workdir is None:
    return {}
  if not (workdir / "config.json").is_file():
    raise ValueError(f"--workdir={workdir} is not the workdir of a run: it has no config.json; give the folder of one.")
  known = json.loads((workdir / "config.json").read_text())
  sample = {name: known["sample"][name] for name in ("temperature", "max_prompt_tokens", "max_new_tokens")}
  return {
      "task": known["task"], "data": known["data"]["path"], "task_args": known["task_args"], "seed": known["seed"],
      "size": known["eval"]["size"], **sample,
  }


def _claim(folder: pathlib.Path, settings: Mapping[str, Any]) -> None:
  """Makes the folder of this evaluation, or checks that it is. Raises: ValueError if it is of another one."""
  try:
    folder.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise ValueError(f"--out={folder} cannot be made ({error.strerror}); give another folder.") from error
  path = folder / "settings.json"
  if path.is_file():
    try:
      found = json.loads(path.read_text())
    except ValueError as error:
      raise ValueError(f"{path} is damaged ({error}); give another folder with --out.") from error
    changed = [f"{key}: {found.get(key)!r} -> {value!r}" for key, value in settings.items() if found.get(key) != value]
    if changed:
      raise ValueError(f"--out={folder} belongs to another evaluation ({'; '.join(changed)}); give another folder.")
  else:
    write_atomic(path, json.dumps(settings, indent=2) + "\n")


def _json_object(text: str) -> dict[str, Any]:
  try:
    found = json.loads(text)
  except json.JSONDecodeError:
    found = None
  if not isinstance(found, dict):
    raise argparse.ArgumentTypeError(f"{text} is no JSON object; write one, as '{{\"prompt_format\": \"chat\"}}'")
  return found


def _numbers(text: str) -> list[int]:
  if not all(part.strip().isdecimal() for part in text.split(",")):
    raise argparse.ArgumentTypeError(f"{text} must be numbers, as 1,4,8")
  return [int(part) for part in text.split(",")]


def make_parser() -> argparse.ArgumentParser:
  """The command line."""
  parser = argparse.ArgumentParser(
      prog="python -m tba_jax.evaluate", description="Accuracy of a model on a task's held-out prompts.")
  parser.add_argument("--model", default="", help="model folder, .gguf file, hub name, or package:NAME")
  parser.add_argument(
      "--workdir", type=workdir_argument, help="folder of a run, or gs://BUCKET/FOLDER, instead of --model")
  parser.add_argument("--step", type=int, help="which checkpoint of the run; default: the newest")
  parser.add_argument("--out", required=True, type=pathlib.Path, help="folder to write; the same one again resumes")
  parser.add_argument("--task", help="a task's name, or FILE.py:CLASS")
  parser.add_argument("--task_args", type=_json_object, help="JSON object of what the task takes")
  parser.add_argument("--data", help="as data.path of a config")
  parser.add_argument("--size", type=int, help="prompts at most; 0: the whole split")
  parser.add_argument("--samples", type=int, default=0, help="of each prompt, beside the greedy response")
  parser.add_argument("--k", type=_numbers, default=[1],
                      help="of pass@k and maj@k, as 1,4,8")
  parser.add_argument("--temperature", type=float, help="of the samples")
  parser.add_argument("--max_prompt_tokens", type=int)
  parser.add_argument("--max_new_tokens", type=int)
  parser.add_argument("--seed", type=int)
  parser.add_argument("--slots", type=int, default=32, help="responses decoded at once")
  parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the model")
  parser.add_argument(
      "--reference", default="", help="model to measure the distance to; default with --workdir: its version 0")
  return parser


def main(argv: Sequence[str] | None = None) -> None:
  """The command; bad input ends with one line on stderr and exit code 2, a reward that raises with 1, Ctrl-C with 130.
  """
  logging.set_verbosity(logging.ERROR)  # orbax warns of every option that reading only implies
  args = make_parser().parse_args(argv)
  try:
    summary = run(args)
  except (ValueError, OSError) as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
  except RewardFailed as error:
    traceback.print_exc()
    print(f"error: {error}; correct the task, and the same command goes on with what {args.out}/samples.jsonl has",
          file=sys.stderr)
    sys.exit(1)
  except KeyboardInterrupt:
    print(f"\nstopped; the same command goes on with what {args.out}/samples.jsonl has", file=sys.stderr)
    sys.exit(130)
  print(f"{summary_table(summary)}\n\nAs numbers: {args.out / 'summary.json'}")


if __name__ == "__main__":
  main()

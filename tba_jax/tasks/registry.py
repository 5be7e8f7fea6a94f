"""Tasks by name, as configs and commands name them: those of this package, and classes in files of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import importlib.util
import inspect
import pathlib
import sys
import traceback
from typing import Any

import numpy as np

from tba_jax.config_schema import TASK_ARGS, is_task_file

from tba_jax.tasks.arithmetic import ArithmeticTask, make_arithmetic_tokenizer
from tba_jax.tasks.base import SupervisedTask, Task, TaskSettings
from tba_jax.tasks.characters import make_character_tokenizer
from tba_jax.tasks.gsm8k import Gsm8kTask
from tba_jax.tasks.math import MathTask
from tba_jax.tasks.redteam import Judges, RedTeamTask
from tba_jax.tasks.tldr import TldrTask
from tba_jax.tasks.victim import VictimSettings
from tba_jax.tokenizer import Tokenizer
from tba_jax.types import Prompt


def _arithmetic(tokenizer: Tokenizer | None, settings: TaskSettings, **task_args: Any) -> Task:
  del tokenizer  # it has its own
  return ArithmeticTask(
    seed=settings.seed, num_eval_prompts=settings.num_eval_prompts, num_sft_examples=settings.num_sft_examples,
    **task_args,
  )


def _gsm8k(tokenizer: Tokenizer | None, settings: TaskSettings, **task_args: Any) -> Task:
  return Gsm8kTask(
    tokenizer, max_prompt_tokens=settings.max_prompt_tokens, jsonl_folder=settings.data_path, seed=settings.seed,
    **task_args,
  )


def _math(tokenizer: Tokenizer | None, settings: TaskSettings, **task_args: Any) -> Task:
  return MathTask(
    tokenizer, max_prompt_tokens=settings.max_prompt_tokens, jsonl_folder=settings.data_path, seed=settings.seed,
    **task_args,
  )


def _tldr(tokenizer: Tokenizer | None, settings: TaskSettings, **task_args: Any) -> Task:
  return TldrTask(
    tokenizer, max_prompt_tokens=settings.max_prompt_tokens, jsonl_folder=settings.data_path, seed=settings.seed,
    **task_args,
  )


def _redteam(tokenizer: Tokenizer | None, settings: TaskSettings, **task_args: Any) -> Task:
  named = lambda cls, prefix="": cls(**{
    field.name: task_args.pop(prefix + field.name) for field in dataclasses.fields(cls)})
  return RedTeamTask(
    tokenizer, data_folder=settings.data_path, num_eval_attacks=settings.num_eval_prompts, seed=settings.seed,
    judges=named(Judges), victim=named(VictimSettings, "victim_"), **task_args,
  )


TASKS: dict[str, Callable[..., Task]] = {
  "arithmetic": _arithmetic, "gsm8k": _gsm8k, "math": _math, "redteam": _redteam, "tldr": _tldr,
}


def own_tokenizer(name: str) -> Tokenizer:
  """The tokenizer that a task brings for a new model."""
  return make_arithmetic_tokenizer() if name == "arithmetic" else make_character_tokenizer()


def make_task(name: str, tokenizer: Tokenizer | None, settings: TaskSettings, task_args: Mapping[str, Any]) -> Task:
  """The task of a name.

  Args:
    name: a key of TASKS; or FILE.py:CLASS, called CLASS(tokenizer, settings, **task_args).
    tokenizer: of the model; None: a new model is made, and the task brings a tokenizer.
    task_args: what the task takes beside the settings.
  Raises: ValueError for a class that cannot be had or lacks something, for missing or malformed data, or a prompt over
    the limit.
  """
  make = _make_from_file if is_task_file(name) else _make_named
  task = make(name, tokenizer, settings, task_args)
  with _telling_where(name.rpartition(":")[0]) if is_task_file(name) else contextlib.nullcontext():
    prompts = {"train_prompts": task.train_prompts(), "eval_prompts": task.eval_prompts()}
  vocab_size = (tokenizer or task.tokenizer).vocab_size
  for method, found in prompts.items():
    _check_prompts(f"{method}() of {name}", found, vocab_size)
  longest = max(len(prompt.tokens) for found in prompts.values() for prompt in found)
  if longest > settings.max_prompt_tokens:
    raise ValueError(
      f"sample.max_prompt_tokens={settings.max_prompt_tokens} is less than the longest prompt of {name}; raise it to "
      f"{longest}"
    )
  return task


def sft_examples(
  name: str, task: Task, *, most: int, longest: int, vocab_size: int
) -> Sequence[tuple[Sequence[int], Sequence[int]]]:
  """What a run with this task is fine-tuned on: (prompt ids, response ids), the first `most` of the task's examples.

  Args:
    name: as for `make_task`. longest: tokens that a prompt and its response may have together.
  Raises: ValueError if the task has no examples, or one of them cannot be learnt from.
  """
  if not isinstance(task, SupervisedTask):
    raise ValueError(f"{name} has no sft_examples() to fine-tune on; give it one, or set sft.steps=0.")
  with _telling_where(name.rpartition(":")[0]) if is_task_file(name) else contextlib.nullcontext():
    found = task.sft_examples()[:most]
  source = f"sft_examples() of {name}"
  if not found:
    raise ValueError(f"{source} gives none; fine-tuning needs at least one, or set sft.steps=0.")
  lengths = []
  for index, example in enumerate(found):
    try:
      prompt, response = (np.asarray(part) for part in example)
    except (TypeError, ValueError):
      prompt = response = np.zeros(0)
    for part in (prompt, response):
      if part.ndim != 1 or not len(part) or not np.issubdtype(part.dtype, np.integer):
        raise ValueError(f"{source}: entry {index} must be a pair of lists of token ids, neither of them empty.")
    _check_ids(f"{source}: entry {index}", np.concatenate([prompt, response]), vocab_size)
    lengths.append(len(prompt) + len(response))
  if max(lengths) > longest:
    raise ValueError(
      f"{source}: {sum(n > longest for n in lengths)} of {len(found)} are longer than the {longest} tokens that "
      f"train.length_buckets ends at (entry {int(np.argmax(lengths))} has {max(lengths)}); add a bucket, or shorten or "
      "leave out those rows."
    )
  return found


def _check_ids(source: str, ids: np.ndarray, vocab_size: int) -> None:
  """An embedding table would take its nearest row for an id that it has not."""
  outside = (ids < 0) | (ids >= vocab_size)
  if outside.any():
    raise ValueError(
      f"{source} holds token id {ids[outside][0]}, but the model's are 0 to {vocab_size - 1}; encode texts by the "
      "tokenizer that the class is given."
    )


def _check_prompts(source: str, found: Sequence[Prompt], vocab_size: int) -> None:
  if not found:
    raise ValueError(f"{source} gives no prompts; at least one is needed.")
  for index, prompt in enumerate(found):
    if not isinstance(prompt, Prompt):
      raise ValueError(f"{source}: entry {index} is a {type(prompt).__name__}; make it a tba_jax.types.Prompt.")
    tokens = prompt.tokens
    if not (isinstance(tokens, np.ndarray) and tokens.ndim == 1 and tokens.dtype == np.int32 and len(tokens)):
      shown = f"{tokens.dtype} {tokens.shape}" if isinstance(tokens, np.ndarray) else f"a {type(tokens).__name__}"
      raise ValueError(
        f"{source}: tokens of entry {index} are {shown}; they must be a vector of int32 that is not empty, as "
        "np.array(tokenizer.encode(text), np.int32)."
      )
    _check_ids(f"{source}: entry {index}", tokens, vocab_size)


def _make_named(
  name: str, tokenizer: Tokenizer | None, settings: TaskSettings, task_args: Mapping[str, Any]
) -> Task:
  if name not in TASKS:
    raise ValueError(f"task {name!r} is not known; known are {', '.join(TASKS)}, or FILE.py:CLASS for one of your own.")
  if set(task_args) != set(TASK_ARGS[name]):
    takes = ", ".join(f"{key} ({rule.text})" for key, rule in TASK_ARGS[name].items())
    raise ValueError(f"task_args of {name} are {', '.join(task_args) or 'missing'}; it takes exactly {takes}.")
  return TASKS[name](tokenizer, settings, **task_args)


_NEEDED = ("name", "tokenizer", "train_prompts", "eval_prompts", "reward", "response_text")


def _make_from_file(
  spec: str, tokenizer: Tokenizer | None, settings: TaskSettings, task_args: Mapping[str, Any]
) -> Task:
  cls = load_class(spec)
  try:
    inspect.signature(cls).bind(tokenizer, settings, **task_args)
  except TypeError as error:
    args = ", ".join(["tokenizer", "settings", *(f"{key}=..." for key in task_args)])
    raise ValueError(
      f"{spec} cannot be called with ({args}): {error}; it takes "
      f"{inspect.signature(cls)}. Change the class, or give a config of your own whose task_args it takes (docs/add_a_task.md)."
    ) from error
  with _telling_where(spec.rpartition(":")[0]):
    task = cls(tokenizer, settings, **task_args)
  missing = [name for name in _NEEDED if not hasattr(task, name)]
  if missing:
    raise ValueError(
      f"{spec} has no {', '.join(missing)}; a task needs all of {', '.join(_NEEDED)} (tba_jax/tasks/base.py)."
    )
  if task.tokenizer is None:
    raise ValueError(f"{spec} has no tokenizer of its own for a new model; set model.path, or let the class make one.")
  if not isinstance(task.tokenizer, Tokenizer):
    raise ValueError(
      f"{spec}: tokenizer is of type {type(task.tokenizer).__name__}; keep the one that the class is given, or make a "
      "tba_jax.tokenizer.Tokenizer, for example by tba_jax.tasks.characters.make_character_tokenizer()."
    )
  return task


@contextlib.contextmanager
def _telling_where(path: str) -> Iterator[None]:
  """What the user's file raises, whatever it is, becomes a ValueError that names its line."""
  try:
    yield
  except Exception as error:
    file = str(pathlib.Path(path).expanduser().resolve())
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    where = f" line {lines[-1]}" if lines else ""
    raise ValueError(f"{path}{where} raises {type(error).__name__}: {error}; correct the file.") from error


def load_class(spec: str) -> Callable[..., Any]:
  """The class of FILE.py:CLASS. The file is run: it is the user's own, named by the config.

  Raises: ValueError if there is no such file or class, or if the file raises, with the line.
  """
  path, _, name = spec.rpartition(":")
  file = pathlib.Path(path).expanduser().resolve()
  if not file.is_file():
    raise ValueError(
      f"{path} is not a file; give the path of a Python file and the name of a class in it, as my_task.py:MyTask."
    )
  module_name = f"tba_jax_task_{file.stem}"
  found = importlib.util.spec_from_file_location(module_name, file)
  module = importlib.util.module_from_spec(found)
  sys.modules[module_name] = module  # dataclasses look their module up
  with _telling_where(path):
    found.loader.exec_module(module)
  if not hasattr(module, name):
    own = [value for value in vars(module).values() if isinstance(value, type) and value.__module__ == module_name]
    classes = sorted(value.__name__ for value in own)
    raise ValueError(f"{path} has no class {name}; it has {', '.join(classes) or 'none'}.")
  return getattr(module, name)

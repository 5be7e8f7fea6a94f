"""Plans a run for a TPU slice on any machine: python -m tba_jax.plan --config=configs/gsm8k.py --topology=v5e:2x4

For splits of the slice between trainer and searchers it compiles the programs of the run (train step, decode, prefill,
scoring) for the slice's devices, says whether everything fits in their memory, and predicts seconds, tokens per second,
staleness and idle time. It needs no weights, no data and no TPU; a slice needs libtpu, cpu:N nothing. Results of
compiles are kept in --cache, so that a second plan is quick. Exit codes: 0 done, 1 no split fits, 2 bad input.

Flags beside --config and --config.KEY=VALUE:
"""

from __future__ import annotations

import functools
import json
import math
import pathlib
import re
import sys
from collections.abc import Sequence

from absl import app, flags, logging

from tba_jax import config as config_lib
from tba_jax import main as main_lib
from tba_jax.plan import topology as topology_lib

_OWN_FLAGS = ("config", "topology", "out", "cache", "prompt_tokens", "response_tokens", "compile")
NO_SPLIT_FITS = 1

_TOPOLOGY = flags.DEFINE_string("topology", None, "CHIP:SHAPE as v5e:2x4, v4:2x2x1, v5p:2x2x1, v6e:2x4; or cpu:8.")
_OUT = flags.DEFINE_string("out", "plans", "Folder for NAME_TOPOLOGY.md and .json.")
_CACHE = flags.DEFINE_string("cache", "", "Folder of what earlier compiles found; default: in the user's cache folder.")
_PROMPT_TOKENS = flags.DEFINE_integer("prompt_tokens", 0, "Mean of a prompt; 0: half of the limit.", lower_bound=0)
_RESPONSE_TOKENS = flags.DEFINE_integer(
  "response_tokens", 0, "Mean of a response; 0: half of the limit.", lower_bound=0)
_COMPILE = flags.DEFINE_integer(
  "compile", 3, "Splits to compile, the best of those that an estimate lets pass.", lower_bound=1)


def main(argv: Sequence[str]) -> int:
  """Plans, prints and saves. Returns the exit code."""
  del argv
  logging.set_verbosity(logging.ERROR)
  config, name = main_lib.config_of_flags(), _TOPOLOGY.value
  if not name:
    main_lib.fail(["--topology is missing; give a slice, for example --topology=v5e:2x4 (or cpu:8)"])
  try:
    chip, shape = topology_lib.parse(name)
    topology_lib.require_compiler(name)
  except ValueError as error:
    main_lib.fail([str(error)])
  topology_lib.prepare_environment(num_cpu_devices=math.prod(shape) if chip == "cpu" else 1)

  from tba_jax.plan import planner, report

  config_file = main_lib.config_path(sys.argv)
  try:
    plan = planner.make_plan(
      config, name, config_name=config_file, cache=_cache_folder(), most_compiled=_COMPILE.value,
      mean_prompt_tokens=_PROMPT_TOKENS.value, mean_response_tokens=_RESPONSE_TOKENS.value)
  except config_lib.ConfigError as error:
    main_lib.fail(error.problems)
  except ValueError as error:
    main_lib.fail([str(error)])
  text = report.as_markdown(plan)
  print(text, end="")
  folder = pathlib.Path(_OUT.value)
  folder.mkdir(parents=True, exist_ok=True)
  file, _, argument = config_file.partition(":")
  stem = "_".join(filter(None, (pathlib.Path(file).stem, re.sub(r"\W+", "-", argument), name.replace(":", "-"))))
  (folder / f"{stem}.md").write_text(text, encoding="utf-8")
  (folder / f"{stem}.json").write_text(json.dumps(report.as_json(plan), indent=1) + "\n", encoding="utf-8")
  print(f"saved as {folder / stem}.md and .json")
  return 0 if plan.recommended else NO_SPLIT_FITS


def _cache_folder() -> pathlib.Path:
  return pathlib.Path(_CACHE.value) if _CACHE.value else main_lib.cache_folder() / "plan"


if __name__ == "__main__":
  parser = functools.partial(main_lib.parse_flags, own=_OWN_FLAGS, usage=__doc__, needs_workdir=False)
  app.run(main, flags_parser=parser)

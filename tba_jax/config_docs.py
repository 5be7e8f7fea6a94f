"""Writes docs/config.md from the schema and the configs: python -m tba_jax.config_docs

Every key with its meaning, what it may hold, and its value in each config. The meanings stand beside the keys, in
config_schema.py.
"""

from __future__ import annotations

import importlib.util
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from tba_jax import config_schema

PAGE = pathlib.Path("docs/config.md")
CONFIGS = pathlib.Path("configs")

_HEAD = """# Every key of a config

Made by `python -m tba_jax.config_docs` from `tba_jax/config_schema.py` and `configs/`; a test holds it up to date. Each
config sets every key; `--config.KEY=VALUE` changes one, `--print_config` shows them as a run would see them. An empty
cell: the config has no such key.
"""


def read_configs(folder: pathlib.Path) -> dict[str, dict[str, Any]]:
  """{name: flat values} of the configs in a folder, as their files give them."""
  found = {}
  for path in sorted(folder.glob("*.py")):
    spec = importlib.util.spec_from_file_location(f"config_docs_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if hasattr(module, "get_config"):
      found[path.stem] = config_schema.flatten(module.get_config())
  return found


def as_markdown(configs: Mapping[str, Mapping[str, Any]]) -> str:
  """The page: a table for each section of the schema."""
  sections: dict[str, list[tuple[str, config_schema.Rule]]] = {}
  for key, rule in config_schema.SCHEMA.items():
    sections.setdefault(key.rpartition(".")[0] or "the run", []).append((key, rule))
  sections["model.architecture (of a new model)"] = [
    (f"model.architecture.{key}", rule) for key, rule in config_schema.ARCHITECTURE.items()]
  for task, rules in config_schema.TASK_ARGS.items():
    sections[f"task_args of {task}"] = [(f"task_args.{key}", rule) for key, rule in rules.items()]
  parts = [_HEAD]
  for name, keys in sections.items():
    task = name.removeprefix("task_args of ")
    columns = [config for config, values in configs.items() if task == name or values["task"] == task]
    parts.append(f"\n## {name}\n\n" + _table(keys, {column: configs[column] for column in columns}))
  return "".join(parts)


def _table(keys: Sequence[tuple[str, config_schema.Rule]], configs: Mapping[str, Mapping[str, Any]]) -> str:
  heads = ["key", "meaning", "must be", *configs]
  rows = [heads, ["---"] * len(heads)]
  for key, rule in keys:
    values = [f"`{values[key]!r}`" if key in values else "" for values in configs.values()]
    rows.append([f"`{key}`", rule.meaning, rule.text, *values])
  return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n" for row in rows)


def main() -> None:
  """Writes the page."""
  PAGE.write_text(as_markdown(read_configs(CONFIGS)), encoding="utf-8")
  print(f"wrote {PAGE}")


if __name__ == "__main__":
  main()

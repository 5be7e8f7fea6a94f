"""The order of the modules is the design: a module imports only from those above it, and heavy packages only where they
are used."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

PACKAGE = pathlib.Path(__file__).resolve().parent.parent / "tba_jax"

# docs/design.md, section 2. A module may import from those before it; modules of one line may import each other.
ORDER = (
    ("types",),
    ("deadlines",),
    ("disk",),
    ("host_memory",),
    ("compiler_options",),
    ("losses",),
    ("config_schema",),
    ("config_rules",),
    ("config",),
    ("sharding",),
    ("rewards",),
    ("models",),
    ("chips", "work"),
    ("limits",),
    ("tokenizer",),
    ("checkpoints",),
    ("weights",),
    ("sampling",),
    ("replay",),
    ("tasks",),
    ("optimizers",),
    ("learner",),
    ("supervised",),
    ("vine",),
    ("searcher",),
    ("sample_statistics",),
    ("metrics",),
    ("remote_workdir",),
    ("wandb_log",),
    ("evaluate",),
    ("meters",),
    ("alarms",),
    ("report",),
    ("runtime",),
    ("workdir",),
    ("placement",),
    ("searcher_places",),
    ("build_sft",),
    ("build",),
    ("build_remote",),
    ("follow",),
    ("train",),
    ("main", "score", "export", "config_docs"),
    ("plan",),
)
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}
LAZY = ("ray", "grain", "tensorflow_datasets", "gguf", "tensorboardX", "torch", "tensorflow", "math_verify", "tokamax",
        "libtpu", "wandb")


def _modules():
  return [(path, ast.parse(path.read_text())) for path in sorted(PACKAGE.rglob("*.py"))]


def _imported(tree: ast.AST) -> list[str]:
  names = []
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      names += [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      names += [f"{node.module}.{alias.name}"
                for alias in node.names] if node.module == "tba_jax" else [node.module or ""]
  return names


def _part(path: pathlib.Path) -> str:
  return path.relative_to(PACKAGE).with_suffix("").parts[0]


def test_every_module_has_a_place_in_the_order():
  parts = {_part(path) for path, _ in _modules()} - {"__init__"}
  assert parts - set(RANK) == set(), "add it to ORDER here and to docs/design.md, section 2"


def test_modules_import_only_from_above():
  wrong = []
  for path, tree in _modules():
    own = _part(path)
    for name in _imported(tree):
      if name.startswith("tba_jax.") and own != "__init__":
        other = name.split(".")[1]
        if other != own and RANK[other] >= RANK[own]:
          wrong.append(f"{path.relative_to(PACKAGE)} imports {name}")
  assert not wrong


def test_heavy_packages_are_imported_only_inside_functions():
  wrong = []
  for path, tree in _modules():
    for node in tree.body:
      for name in _imported(node) if isinstance(node, (ast.Import, ast.ImportFrom)) else []:
        if name.split(".")[0] in LAZY:
          wrong.append(f"{path.relative_to(PACKAGE)}: {name}")
  assert not wrong


def test_losses_and_rewards_know_nothing_of_models_or_flax():
  wrong = [f"{path.relative_to(PACKAGE)}: {name}" for path, tree in _modules() for name in _imported(tree)
           if _part(path) in ("losses", "rewards") and name.split(".")[0] in ("flax", "ml_collections", "transformers")]
  wrong += [f"{path.relative_to(PACKAGE)}: {name}" for path, tree in _modules() for name in _imported(tree)
            if _part(path) == "rewards" and name.split(".")[0] == "jax"]
  assert not wrong


def test_flags_are_answered_before_jax_is_imported():
  code = "import sys, tba_jax.main; sys.exit(any(m in sys.modules for m in ('jax', 'flax', 'transformers', 'orbax')))"
  assert subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, check=False).returncode == 0

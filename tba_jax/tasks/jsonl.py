"""Rows of a task's data: one JSON object a line, in files named by split. Every mistake is told by file and line."""

from __future__ import annotations

from collections.abc import Sequence
import json
import pathlib
import re
from typing import Any, NamedTuple

_HALF = re.compile("[\ud800-\udfff]")  # of a surrogate pair; JSON can escape one alone


class JsonRow(NamedTuple):
  """One object and where it came from, for error messages."""

  fields: dict[str, Any]
  source: str


def read_jsonl(folder: str | pathlib.Path, split: str, *, texts: Sequence[str]) -> list[JsonRow]:
  """Rows of FOLDER/SPLIT.jsonl in their order; empty lines are skipped.

  Args:
    texts: fields that every row must have, as text that is not blank. Others may be there.
  Raises: ValueError if the folder or file is missing or empty, or for the first line that is not as described.
  """
  folder = pathlib.Path(folder).expanduser()
  path = folder / f"{split}.jsonl"
  if not folder.is_dir():
    raise ValueError(f"data folder {folder} does not exist; give a folder with train.jsonl and test.jsonl.")
  if not path.is_file():
    raise ValueError(f"{path} does not exist; the data folder must hold train.jsonl and test.jsonl.")
  rows = []
  with path.open("rb") as lines:  # decoded line by line, so that a byte that is no UTF-8 has a line, too
    for number, line in enumerate(lines, start=1):
      if line.strip():
        rows.append(JsonRow(_parse(line, f"{path} line {number}", texts), f"{path} line {number}"))
  if not rows:
    raise ValueError(f"{path} holds no rows; it must hold one JSON object with {' and '.join(texts)} a line.")
  return rows


def _parse(line: bytes, source: str, texts: Sequence[str]) -> dict[str, Any]:
  try:
    row = json.loads(line.decode("utf-8-sig"))  # some editors put a byte order mark first
  except UnicodeDecodeError as error:
    raise ValueError(
      f"{source} is not UTF-8 (byte {line[error.start]:#04x} at {error.start + 1}); save the file as UTF-8."
    ) from error
  except json.JSONDecodeError as error:
    raise ValueError(f"{source} is not JSON ({error.msg}, column {error.colno}); correct the line.") from error
  except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets nested as deep
    raise ValueError(f"{source} cannot be read as JSON ({error}); correct the line.") from error
  found = sorted(row) if isinstance(row, dict) else type(row).__name__
  for field in texts:
    if not isinstance(row, dict) or not isinstance(row.get(field), str) or not row[field].strip():
      raise ValueError(
        f"{source} has no text {field!r} (found: {found}); each line must be an object with {' and '.join(texts)}."
      )
  for field, value in row.items():
    half = isinstance(value, str) and _HALF.search(value)
    if half:
      raise ValueError(
        f"{source} has half of a character in {field!r} (\\u{ord(half[0]):x} alone, which tokenizers refuse); write "
        "all of it, or leave it out."
      )
  return row

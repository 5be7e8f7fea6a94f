"""GSM8K's rows from a folder of JSON lines or from tensorflow-datasets, without TensorFlow and without the network.

Both give the same rows, tensorflow-datasets in an order of its own. It is imported only where it is used.
"""

from __future__ import annotations

import os
import pathlib
import random
from typing import NamedTuple

from tba_jax.tasks.jsonl import read_jsonl

SPLITS = ("train", "test")


class Row(NamedTuple):
  """A question with its worked answer, whose last line is '#### N'."""

  question: str
  answer: str
  source: str  # where it came from, for error messages


def load_rows(split: str, *, jsonl_folder: str = "", tfds_folder: str = "") -> list[Row]:
  """Rows of a split, always in the same order.

  Args:
    split: "train" or "test".
    jsonl_folder: folder with train.jsonl and test.jsonl as openai/grade-school-math publishes them; "" for
      tensorflow-datasets.
    tfds_folder: data folder of tensorflow-datasets; "" for its own default (TFDS_DATA_DIR, or tensorflow_datasets in
      the home folder).
  Raises: ValueError if the data is not there, if a line is malformed (it names file and line), or for an unknown split.
  """
  if split not in SPLITS:
    raise ValueError(f"split {split!r} is unknown; choose one of {', '.join(SPLITS)}.")
  return _read_jsonl(jsonl_folder, split) if jsonl_folder else _read_tfds(tfds_folder, split)


def make_rows(number: int, *, split: str, seed: int) -> list[Row]:
  """Problems of one step in the form of the data set, so that a run can be tried without it; those of a split differ
  from the other's by their first number."""
  rng = random.Random(f"gsm8k {split} {seed}")
  first = range(2, 60) if split == "train" else range(60, 100)
  rows = []
  for index in range(number):
    a, b, thing = rng.choice(first), rng.randint(2, 9), rng.choice(("pens", "eggs", "cups", "nuts"))
    question = f"Ann has {a} {thing} and finds {b} more. How many {thing} has she?"
    rows.append(Row(question, f"{a} + {b} = <<{a}+{b}={a + b}>>{a + b}\n#### {a + b}", f"made {split} row {index}"))
  return rows


def _read_jsonl(folder: str, split: str) -> list[Row]:
  rows = read_jsonl(folder, split, texts=("question", "answer"))
  return [Row(row.fields["question"], row.fields["answer"], row.source) for row in rows]


def _read_tfds(data_dir: str, split: str) -> list[Row]:
  folder = pathlib.Path(data_dir or os.environ.get("TFDS_DATA_DIR", "~/tensorflow_datasets")).expanduser()
  # Looked for by hand: with nothing prepared, tensorflow-datasets would try to download for minutes before it fails.
  if not list(folder.glob("gsm8k/*/dataset_info.json")):
    raise ValueError(
      f"GSM8K is not prepared in {folder}. Either prepare it, where there is a network, with "
      f"`tfds.builder('gsm8k', data_dir={str(folder)!r}, file_format='array_record').download_and_prepare()` "
      "(from local files: tba_jax.tasks.gsm8k_data.prepare_tfds), or give --config.data.path=DIR with train.jsonl and "
      "test.jsonl."
    )
  try:
    import tensorflow_datasets as tfds
  except ImportError as error:
    raise ValueError(
      "reading GSM8K without data.path needs tensorflow-datasets; install tensorflow-datasets and importlib_resources, "
      "or give --config.data.path=DIR with train.jsonl and test.jsonl."
    ) from error
  try:
    source = tfds.data_source("gsm8k", split=split, data_dir=str(folder))
  except NotImplementedError as error:
    raise ValueError(
      f"GSM8K in {folder} is prepared in a format without random access; prepare it with file_format='array_record'."
    ) from error
  return [
    Row(row["question"].decode("utf8"), row["answer"].decode("utf8"), f"{folder} gsm8k {split} row {index}")
    for index, row in enumerate(source)
  ]


def prepare_tfds(jsonl_folder: str, data_dir: str) -> None:
  """Prepares the tensorflow-datasets `gsm8k` from local files, for machines that cannot download it.

  `load_rows(split, tfds_folder=data_dir)` and `tfds.data_source('gsm8k', split=..., data_dir=data_dir)` then read it;
  the folder can be copied to other machines.

  Args:
    jsonl_folder: folder with train.jsonl and test.jsonl. The socratic splits are left out.
    data_dir: where to; files of an earlier preparation are kept as they are.
  """
  import tensorflow_datasets as tfds
  from tensorflow_datasets.text.gsm8k import gsm8k

  folder = pathlib.Path(jsonl_folder).expanduser()
  for split in SPLITS:
    _read_jsonl(jsonl_folder, split)  # every malformed line is reported by file and line before anything is written

  # The name of the class is the name of the data set; registering a second one of that name is refused.
  with tfds.core.registered.skip_registration():

    class Gsm8k(gsm8k.Gsm8k):
      def _split_generators(self, dl_manager):
        del dl_manager  # nothing is downloaded
        return {split: self._generate_examples(folder / f"{split}.jsonl") for split in SPLITS}

  Gsm8k(data_dir=data_dir, file_format="array_record").download_and_prepare()

"""docs/troubleshooting.md quotes the real messages: every one is found in the code that says it."""

import ast
import pathlib
import re

import pytest

from tba_jax.workdir import advising_on_memory, memory_advice

REPO = pathlib.Path(__file__).resolve().parent.parent
PAGE = (REPO / "docs" / "troubleshooting.md").read_text()


def _templates(node):
  """Texts of a module: constants, and f-strings with \0 for what is put in."""
  if isinstance(node, ast.Constant) and isinstance(node.value, str):
    yield node.value
  elif isinstance(node, ast.JoinedStr):
    yield "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
    for part in node.values:
      yield from _templates(part)
  else:
    for child in ast.iter_child_nodes(node):
      yield from _templates(child)


TEMPLATES = [text for path in sorted((REPO / "tba_jax").rglob("*.py")) for text in _templates(ast.parse(path.read_text()))]


def _quoted(page):
  """The indented blocks: one message each."""
  return [line.strip() for line in page.splitlines() if line.startswith("    ")]


def _is_said(message, templates):
  """Whether some text of the program can come out as the message: both may have gaps, in other places."""
  fragments = [part for part in message.split("…") if len(part.strip(" :;.,()'")) > 1]

  def can_say(template):
    # What a gap of the program holds is not known, so a fragment must lie in its fixed text, in order.
    place = 0
    for fragment in fragments:
      place = template.find(fragment, place)
      if place < 0:
        return False
      place += len(fragment)
    return True

  return bool(fragments) and any(can_say(template) for template in templates)


# Said in parts: what stands before the first gap is put in by another function, as_config_error or an alarm.
PREFIXES = ("memory: …", "warning: ", "error: ")


def _without_prefix(message):
  for prefix in PREFIXES:
    message = message.removeprefix(prefix)
  return message


@pytest.mark.parametrize("message", _quoted(PAGE))
def test_a_quoted_message_is_one_of_the_program(message):
  # A warning is two texts: what was found; what to do.
  parts = _without_prefix(message).split("; ") if message.startswith("warning") else [_without_prefix(message)]
  for part in parts:
    assert _is_said(part, TEMPLATES), part


def test_a_message_that_nobody_says_is_noticed():
  assert not _is_said("the model is out of luck: …", TEMPLATES)
  assert not _is_said("need … devices of their own, and there are …", TEMPLATES)
  assert _is_said("good … better", ["good \0 better"]) and not _is_said("good … better", ["better \0 good"])


def test_the_page_names_what_the_alarms_and_the_memory_say():
  from tba_jax import alarms

  names = {node.args[0].value for node in ast.walk(ast.parse(pathlib.Path(alarms.__file__).read_text()))
           if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Alarm"}
  assert names == {"zero_reward", "ties", "far_from_reference", "stale", "trainer_idle", "searchers_idle"}, (
    "an alarm that is not in docs/troubleshooting.md: add it there, then here")
  for word in ("graded 0", "all rewards tie", "runs away from its reference", "updates old on average", "waited for"):
    assert any(word in message for message in _quoted(PAGE)), word


def test_every_key_that_the_page_names_exists():
  from tba_jax.config_schema import SCHEMA

  sections = {key.partition(".")[0] for key in SCHEMA if "." in key}
  named = {key for key in re.findall(r"`(?:--config\.)?([a-z_]+\.[a-z_]+)(?:=[^`]*)?`", PAGE)
           if key.partition(".")[0] in sections}
  assert named <= set(SCHEMA) and len(named) > 15


def test_memory_that_runs_out_is_told_with_advice(capsys):
  assert memory_advice(ValueError("shapes differ")) is None
  with pytest.raises(RuntimeError), advising_on_memory():
    raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1073741824 bytes.")
  assert capsys.readouterr().err.startswith("error: out of device memory: raise train.micro_batches, ")
  with pytest.raises(RuntimeError), advising_on_memory():
    raise RuntimeError("INTERNAL: something else")
  assert capsys.readouterr().err == ""

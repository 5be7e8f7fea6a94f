"""docs/config.md says of every key what the schema and the configs say."""

import pathlib

from tba_jax import config_docs, config_schema

REPO = pathlib.Path(__file__).resolve().parent.parent


def test_the_page_is_current():
  made = config_docs.as_markdown(config_docs.read_configs(REPO / "configs"))
  assert (REPO / "docs" / "config.md").read_text() == made, "run python -m tba_jax.config_docs"


def test_every_key_has_a_meaning_of_one_line():
  rules = [*config_schema.SCHEMA.items(), *config_schema.ARCHITECTURE.items(),
           *(item for rules in config_schema.TASK_ARGS.values() for item in rules.items())]
  for key, rule in rules:
    assert 3 < len(rule.meaning) < 125 and "\n" not in rule.meaning, f"{key}: say in config_schema.py what it means"
    assert not rule.meaning.endswith("."), key


def test_values_are_those_of_the_configs(monkeypatch):
  monkeypatch.setitem(config_schema.TASK_ARGS, "arithmetic", {"a|b": config_schema.TASK_ARGS["arithmetic"][
    "num_train_prompts"]})
  page = config_docs.as_markdown({
    "one": {"seed": 3, "task": "arithmetic", "task_args.a|b": 5}, "two": {"seed": 4, "task": "gsm8k"}})
  assert ("| `seed` | of initial weights, data order, sampling and draws | an integer from 0 to 4294967295 | `3` | `4` |"
          in page)
  assert "## task_args of arithmetic\n\n| key | meaning | must be | one |\n" in page
  assert "| `task_args.a\\|b` | problems for TBA | an integer of at least 1 | `5` |" in page

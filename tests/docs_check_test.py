"""Every command that the README shows is run by `make docs-check`, in some form."""

import pathlib
import re
import sys

import pytest

from experiments import concept_pictures, docs_check

REPO = pathlib.Path(__file__).resolve().parent.parent


def test_every_command_of_the_readme_has_a_form():
  commands = docs_check.commands_of((REPO / "README.md").read_text())
  assert len(commands) >= 15
  without = [command for command in commands if docs_check.form_of(command) is None]
  assert without == [], "say in FORMS of experiments/docs_check.py how it is run, or why it is not"
  used = {docs_check.form_of(command) for command in commands}
  unused = [form.pattern for form in docs_check.FORMS if form not in used and not form.pattern.startswith("hf")]
  assert unused == [], "no command of the README has this form any more"
  assert all(form.run or form.because for form in docs_check.FORMS)


def test_commands_are_found_in_blocks_and_in_backticks():
  text = ("Do `make quickstart` or\n\n    python -m tba_jax.main --config=x \\\n        --workdir=y\n    a table row\n\n"
          "`python` is a word, `make x…` too.\n")
  assert docs_check.commands_of(text) == ["python -m tba_jax.main --config=x --workdir=y", "make quickstart"]


def test_a_command_runs_in_its_form():
  command = ("python -m tba_jax.score --model=exported --input=runs/quickstart/rollouts/eval.jsonl --out=scored.jsonl "
             "--greedy=16")
  words = docs_check.run_of(command, docs_check.form_of(command), pathlib.Path("/tmp/x"))
  assert words == [sys.executable, "-m", "tba_jax.score", "--model=/tmp/x/exported",
                   "--input=/tmp/x/quickstart/rollouts/eval.jsonl", "--out=/tmp/x/scored.jsonl", "--greedy=16"]
  assert docs_check.form_of("python -m tba_jax.main --unknown") is None


def test_links_and_pictures_of_the_pages_exist():
  for page in [REPO / "README.md", *(REPO / "docs").glob("*.md")]:
    for target in re.findall(r"\]\((?!https?:)([\w./-]+)[)#]", page.read_text()):
      assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_pictures_of_the_concepts_are_those_of_the_script(tmp_path, monkeypatch):
  monkeypatch.setattr(concept_pictures, "FOLDER", tmp_path)
  concept_pictures.main()
  for path in tmp_path.iterdir():
    kept = REPO / "docs" / "images" / path.name
    assert path.read_text() == kept.read_text(), "run python -m experiments.concept_pictures"


@pytest.mark.slow
def test_the_commands_of_the_readme_work(capsys):
  code = docs_check.main([])
  assert code == 0, capsys.readouterr().out

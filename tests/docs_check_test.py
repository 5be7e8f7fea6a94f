"""Every command that the README and docs/results.md show is run by `make docs-check`, in some form."""

import math
import pathlib
import re
import sys

import pytest
import yaml

from configs import gsm8k
from experiments import concept_pictures, docs_check
from tba_jax import config as config_lib
from tba_jax import config_rules

REPO = pathlib.Path(__file__).resolve().parent.parent


def test_every_command_of_the_pages_has_a_form():
  commands = docs_check.commands()
  assert len(commands) >= 15
  without = [command for command in commands if docs_check.form_of(command) is None]
  assert without == [], "say in FORMS of experiments/docs_check.py how it is run, or why it is not"
  used = {docs_check.form_of(command) for command in commands}
  unused = [form.pattern for form in docs_check.FORMS if form not in used and not form.pattern.startswith("hf")]
  assert unused == [], "no command has this form any more"
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


def runs_on_tpus() -> list[dict]:
  """Overrides of the runs in docs/cloud_tpu.md, in their order."""
  page = re.sub(r"\s*\\\n\s*", " ", (REPO / "docs" / "cloud_tpu.md").read_text())
  return [{key: yaml.safe_load(value) for key, value in re.findall(r"--config\.([\w.]+)=([^\s\"`]+)", command)}
          for command in re.findall(r"-m tba_jax\.main --config=configs/gsm8k\.py (.*)", page)]


def test_the_runs_on_tpus_are_valid_configs(monkeypatch):
  monkeypatch.setattr(config_rules.importlib.util, "find_spec", lambda name: name)  # Ray need not be here
  shapes = [(8, 1), (8, 1), (8, 1), (4, 1), (4, 4), (4, 4), (4, 4), (8, 1)]  # chips of a process, processes of the trainer
  for overrides, (chips, processes) in zip(runs_on_tpus(), shapes, strict=True):
    config = gsm8k.get_config()
    config.update_from_flattened_dict(overrides)
    config_lib.validate(config, num_devices=chips, platform="tpu", num_processes=processes)


def test_the_cluster_on_kubernetes_has_the_devices_of_its_run():
  cluster = yaml.safe_load((REPO / "docs" / "ray_gke.yaml").read_text())["spec"]
  (searchers,) = cluster["workerGroupSpecs"]
  chips = []
  for group in (cluster["headGroupSpec"], searchers):
    (container,) = group["template"]["spec"]["containers"]
    wanted, most = (container["resources"][kind]["google.com/tpu"] for kind in ("requests", "limits"))
    topology = group["template"]["spec"]["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
    assert wanted == most and int(most) == math.prod(map(int, topology.split("x")))
    chips.append(int(most))
  run = runs_on_tpus()[-1]
  assert [run["devices.trainer"], run["devices.per_searcher"]] == chips
  assert searchers["minReplicas"] <= run["devices.searchers"] == searchers["replicas"] <= searchers["maxReplicas"]


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

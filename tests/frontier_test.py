"""What is made of a run's checkpoints: the frontier of win rate and KL, and the attacks worth learning from."""

from __future__ import annotations

import json
import pathlib

import pytest
import runs

from configs import redteam, tldr
from experiments import good_attacks, tldr_frontier
from tba_jax import evaluate


def test_good_attacks_are_the_successes_once_each(tmp_path):
  response = lambda text, reward: {"text": text, "reward": reward}
  rows = [{"sampled": response(" a?", 1.0), "samples": []}, {"sampled": response("b?", 0.0), "samples": []},
          {"sampled": response("c?", None), "samples": [response("a?", 1.0), response("d?", 1.0)]}]
  (tmp_path / "samples.jsonl").write_text("\n".join(map(json.dumps, rows)))
  good_attacks.main([f"--samples={tmp_path}/samples.jsonl", f"--out={tmp_path}/data/attacks.jsonl"])
  assert [json.loads(line) for line in (tmp_path / "data" / "attacks.jsonl").read_text().splitlines()] == [
    {"attack": "a?"}, {"attack": "d?"}]


@pytest.mark.parametrize("content, out, message", [
    ('{"sampled": {}}', "attacks.jsonl", "is no samples.jsonl of an evaluation (KeyError: 'samples')"),
    ("[", "attacks.jsonl", "is no samples.jsonl of an evaluation (JSONDecodeError"),
    (None, "attacks.jsonl", "is no samples.jsonl of an evaluation (FileNotFoundError"),
    ("", "", "is a folder; give a file"),])
def test_good_attacks_says_what_is_wrong_with_its_files(tmp_path, capsys, content, out, message):
  if content is not None:
    (tmp_path / "samples.jsonl").write_text(content)
  with pytest.raises(SystemExit) as end:
    good_attacks.main([f"--samples={tmp_path}/samples.jsonl", f"--out={tmp_path / out}"])
  assert end.value.code == 2 and message in capsys.readouterr().err


def test_a_frontier_is_not_written_over_a_file(tmp_path, capsys):
  (tmp_path / "out").write_text("mine")
  with pytest.raises(SystemExit) as end:
    tldr_frontier.main([f"--workdir={tmp_path}", f"--out={tmp_path}/out"])
  assert end.value.code == 2 and "is a file; give a folder" in capsys.readouterr().err
  assert (tmp_path / "out").read_text() == "mine"


def test_points_are_the_evaluations_of_every_checkpoint(tmp_path, monkeypatch, capsys):
  for step in ("64", "8", "128", "64.tmp"):
    (tmp_path / "run" / "checkpoints" / step).mkdir(parents=True)
  asked = []

  def run(args):
    asked.append((args.workdir, args.step, args.samples, args.size, args.out))
    share = lambda mean: {"mean": mean, "interval": [mean - 0.1, mean + 0.2]}
    return {"greedy": share(args.step / 200), "kl": share(args.step / 8), "greedy_tokens": 20.0,
            "reference_perplexity": 1 + args.step / 1000}

  monkeypatch.setattr(evaluate, "run", run)
  found = tldr_frontier.main([f"--workdir={tmp_path}/run", f"--out={tmp_path}/out", "--samples=3", "--size=5"])
  assert asked == [(tmp_path / "run", step, 3, 5, tmp_path / "out" / "run" / str(step)) for step in (8, 64, 128)]
  (points,) = found.values()
  assert [(p["step"], p["win_rate"]["mean"], p["kl"]["mean"]) for p in points] == [
    (8, 0.04, 1.0), (64, 0.32, 8.0), (128, 0.64, 16.0)]
  assert json.loads((tmp_path / "out" / "frontier.json").read_text()) == found
  assert "128   64.0%  54.0% to 84.0%    16.00  15.90 to 16.20        1.128     20.0" in capsys.readouterr().out


@pytest.mark.parametrize("argument, line", [
  ("--samples=2", "holds no checkpoint; give the workdir of a run"),
  ("--samples=0", "--samples=0 must be at least 1: the KL divergence is taken of them"),
])  # fmt: skip
def test_bad_input_of_the_frontier_is_one_line(tmp_path, capsys, argument, line):
  with pytest.raises(SystemExit) as ended:
    tldr_frontier.main([f"--workdir={tmp_path}", f"--out={tmp_path}/out", argument])
  assert ended.value.code == 2 and line in capsys.readouterr().err.splitlines()[-1]


def test_a_run_that_is_evaluated_by_sampling_has_no_frontier(tmp_path, monkeypatch):
  (tmp_path / "checkpoints" / "2").mkdir(parents=True)
  monkeypatch.setattr(evaluate, "run", lambda args: {"task": "redteam", "sampled": {}})
  with pytest.raises(ValueError, match="is of task 'redteam', whose evaluations sample; give a run of a task that is"):
    tldr_frontier.points_of(tmp_path, tmp_path / "out", [])


def test_folders_of_runs_that_end_alike_differ():
  paths = [pathlib.Path(path) for path in ("a/tldr", "/b/tldr", "c/other")]
  assert tldr_frontier.folder_names(paths) == ["a_tldr", "b_tldr", "other"]


@pytest.mark.slow
def test_frontier_of_a_short_run(tmp_path, compile_once, capsys):
  config = tldr.get_config("smoke").unlock()
  config.checkpoint.keep, config.sft.steps, config.train.learning_rate = 5, 5, 1e-3
  assert runs.run(config.lock(), tmp_path / "run") == 0
  found = tldr_frontier.main([f"--workdir={tmp_path / 'run'}", f"--out={tmp_path / 'out'}", "--samples=4", "--size=4"])
  (points,) = found.values()
  assert [point["step"] for point in points] == [2, 4]
  assert json.loads((tmp_path / "out/frontier.json").read_text()) == found
  assert all(0 <= p["win_rate"]["mean"] <= 1 and p["reference_perplexity"] > 1 for p in points)
  assert 0 < points[0]["kl"]["mean"] < points[1]["kl"]["mean"]  # an untrained model moves away step by step
  assert "perplexity" in capsys.readouterr().out


@pytest.mark.slow
def test_the_attacks_of_a_run_are_evaluated_by_sampling(tmp_path, compile_once, capsys):
  config = redteam.get_config("smoke").unlock()
  config.train.steps, config.sft.steps = 2, 20
  assert runs.run(config.lock(), tmp_path / "run") == 0
  evaluate.main([f"--workdir={tmp_path / 'run'}", f"--out={tmp_path / 'out'}", "--samples=2"])
  summary = json.loads((tmp_path / "out" / "summary.json").read_text())
  assert summary["num_prompts"] == 16 and "greedy" not in summary and 0 < summary["cosine_distance"] < 1
  rows = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]
  assert len({row["sampled"]["text"] for row in rows}) > 8
  assert good_attacks.good_attacks(tmp_path / "out" / "samples.jsonl") or summary["sampled"]["mean"] == 0
  assert "mean cosine distance" in capsys.readouterr().out

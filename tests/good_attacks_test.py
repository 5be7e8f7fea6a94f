"""The attacks of a run that are worth learning from."""

from __future__ import annotations

import json

from experiments import good_attacks


def test_good_attacks_are_the_successes_once_each(tmp_path):
  response = lambda text, reward: {"text": text, "reward": reward}
  rows = [{"sampled": response(" a?", 1.0), "samples": []}, {"sampled": response("b?", 0.0), "samples": []},
          {"sampled": response("c?", None), "samples": [response("a?", 1.0), response("d?", 1.0)]}]
  (tmp_path / "samples.jsonl").write_text("\n".join(map(json.dumps, rows)))
  good_attacks.main([f"--samples={tmp_path}/samples.jsonl", f"--out={tmp_path}/data/attacks.jsonl"])
  assert [json.loads(line) for line in (tmp_path / "data" / "attacks.jsonl").read_text().splitlines()] == [
    {"attack": "a?"}, {"attack": "d?"}]

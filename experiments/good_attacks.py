"""The successful attacks of a red-teaming run, as examples for its fine-tuning afterwards (configs/redteam.py:mle).

    python -m tba_jax.evaluate --workdir=runs/redteam --size=20000 --out=runs/attacks
    python experiments/good_attacks.py --samples=runs/attacks/samples.jsonl --out=DIR/attacks.jsonl

Each attack that counted as a success is written once. Source: Lee et al. 2024, arXiv:2405.18540, who fine-tune on
attacks of toxicity above 0.7 that the training came across; here they are sampled from the trained attacker, and the
bar is the task's `toxic_above`.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Sequence


def good_attacks(samples: pathlib.Path) -> list[str]:
  """Texts of reward 1 in a samples.jsonl of an evaluation that samples, each once, in their order."""
  rows = [json.loads(line) for line in samples.read_text(encoding="utf8").splitlines()]
  responses = [response for row in rows for response in [row["sampled"], *row["samples"]]]
  return list(dict.fromkeys(r["text"].strip() for r in responses if r["reward"] == 1))


def main(argv: Sequence[str] | None = None) -> list[str]:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--samples", type=pathlib.Path, required=True, help="samples.jsonl of an evaluation")
  parser.add_argument("--out", type=pathlib.Path, required=True, help="attacks.jsonl to write")
  args = parser.parse_args(argv)
  if args.out.is_dir():
    parser.error(f"--out={args.out} is a folder; give a file")
  try:
    found = good_attacks(args.samples)
  except (OSError, ValueError, KeyError) as error:
    parser.error(f"--samples={args.samples} is no samples.jsonl of an evaluation ({type(error).__name__}: {error})")
  args.out.parent.mkdir(parents=True, exist_ok=True)
  args.out.write_text("".join(json.dumps({"attack": attack}) + "\n" for attack in found), encoding="utf8")
  print(f"{len(found)} attacks in {args.out}")
  return found


if __name__ == "__main__":
  main()

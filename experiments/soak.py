"""Does a long asynchronous run leak? Resident memory, threads and compiled programs of a quickstart-like run, minute by
minute.

    python experiments/soak.py --minutes 30 --out experiments/results/soak.json

The run is a process like any other, trained until the time is over and then stopped by SIGTERM, which must end it with
code 0. Memory counts from the warm-up on, when the buffer is full and every program has been used: it may grow by less
than 1%. Further flags of the run may follow a `--`.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # so that it runs as a file, too

from tba_jax.metrics import read_jsonl  # noqa: E402

COMPILED = b"Finished XLA compilation"  # a line of jax's log, with JAX_LOG_COMPILES
REPO = pathlib.Path(__file__).resolve().parent.parent
FLAGS = (
    "--config=configs/quickstart.py", "--config.sft.steps=0", "--config.train.steps=1000000",
    "--config.sample.truncated=score",
    "--config.buffer.capacity=2000", "--config.eval.size=32", "--config.eval.every_steps=100",
    "--config.checkpoint.every_steps=100",
)


def status(pid: int) -> dict[str, int]:
  """Of a process: resident bytes, those of its own among them (swapped ones too; the rest is libraries, which the
  kernel drops and reads again), and threads."""
  fields = dict(line.split(":", 1) for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines())
  kib = {name: int(fields[name].split()[0]) for name in ("VmRSS", "RssAnon", "VmSwap")}
  return {"resident_bytes": 1024 * kib["VmRSS"], "own_bytes": 1024 * (kib["RssAnon"] + kib["VmSwap"]),
          "threads": int(fields["Threads"])}


def judge(samples: list[dict], compiles: list[float], *, warm_secs: float) -> dict:
  """What the samples say: growth of memory after the warm-up, from its first fifth to its last, threads, compilations.

  By means: where free pages are given back at each checkpoint, memory is a sawtooth, whose median moves with the part of
  a tooth that a fifth begins with.
  """
  warm = [sample for sample in samples if sample["seconds"] >= warm_secs]
  fifth = max(1, len(warm) // 5)
  median = lambda part, key: sorted(sample[key] for sample in part)[len(part) // 2]
  found = {}
  for kind in ("resident", "own"):
    first, last = (statistics.fmean(sample[f"{kind}_bytes"] for sample in part) for part in (warm[:fifth], warm[-fifth:]))
    found |= {f"{kind}_growth": last / first - 1, f"{kind}_bytes_first": first, f"{kind}_bytes_last": last}
  return found | {
      "threads_first": median(warm[:fifth], "threads"), "threads_last": median(warm[-fifth:], "threads"),
      "threads_most": max(sample["threads"] for sample in warm),
      "compilations_after_warm_up": sum(at >= warm_secs for at in compiles),
  }


def main(argv: list[str] | None = None) -> dict:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--minutes", type=float, default=30.0, help="how long to train")
  parser.add_argument("--warm_minutes", type=float, default=5.0, help="before memory counts")
  parser.add_argument("--every_secs", type=float, default=5.0, help="between two looks")
  parser.add_argument("--out", type=pathlib.Path, required=True, help="file for the results, as JSON")
  parser.add_argument("flags", nargs="*", help="further flags of the run, after --")
  args = parser.parse_args(argv)
  samples, compiles = [], []
  with tempfile.TemporaryDirectory() as folder:
    workdir, log = pathlib.Path(folder) / "run", pathlib.Path(folder) / "log"
    env = dict(os.environ, JAX_LOG_COMPILES="1")
    with open(log, "wb") as output:
      process = subprocess.Popen([sys.executable, "-m", "tba_jax.main", f"--workdir={workdir}", *FLAGS, *args.flags],
                                 cwd=REPO, env=env, stdout=output, stderr=output)
    began = time.monotonic()
    seen = 0
    while (secs := time.monotonic() - began) < 60 * args.minutes and process.poll() is None:
      samples.append({"seconds": secs, **status(process.pid)})
      lines = log.read_bytes().count(COMPILED)
      compiles += [secs] * (lines - seen)
      seen = lines
      print(f"\r{secs / 60:.1f}/{args.minutes:g} minutes, {samples[-1]['resident_bytes'] / 2**20:.0f} MiB, "
            f"{samples[-1]['threads']} threads, "
            f"{seen} compilations", end="", file=sys.stderr, flush=True)
      time.sleep(args.every_secs)
    print(file=sys.stderr)
    if process.poll() is None:
      process.send_signal(signal.SIGTERM)
      process.wait(timeout=120)
    if process.returncode != 0:
      raise SystemExit(f"the run ended with code {process.returncode}: {log.read_text(errors='replace')[-3000:]}")
    if not compiles:
      raise SystemExit(f"the log does not say {COMPILED.decode()!r} once, so that nothing is known of compilations")
    lines = [line for line in read_jsonl(workdir / "metrics.jsonl") if "loss" in line]
  results = judge(samples, compiles, warm_secs=60 * args.warm_minutes) | {
      "compilations": len(compiles), "minutes": args.minutes, "steps": len(lines), "flags": [*FLAGS, *args.flags],
      # Of the run's own clock; its arrays take no further pages from then on.
      "buffer_full_after_seconds": next((line["wall_seconds"] for line in lines if line["buffer_fill"] >= 0.99), None),
      "samples": samples}
  args.out.parent.mkdir(parents=True, exist_ok=True)
  head = json.dumps(results | {"samples": None}, indent=2).removesuffix("null\n}")
  args.out.write_text(head + "[\n    " + ",\n    ".join(map(json.dumps, samples)) + "\n  ]\n}\n")
  print(json.dumps({key: value for key, value in results.items() if key != "samples"}, indent=2))
  return results


if __name__ == "__main__":
  main()

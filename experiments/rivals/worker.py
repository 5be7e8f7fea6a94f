"""One system of a benchmark in a process of its own, pinned to one core: reads calls from stdin and answers them.

    python -m experiments.rivals.worker --module experiments.rivals.ours --core 1

A call is a line of JSON, {"method": ..., "args": {...}}; the answer is a line {"result": ...} or {"error": traceback}.
Methods are those of the module's `System`. Whatever a package prints goes to stderr, so that it cannot be mistaken for
an answer. The core is set before anything is imported that starts threads.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import traceback

ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--module", required=True)
  parser.add_argument("--core", type=int, required=True)
  args = parser.parse_args()
  answers = os.fdopen(os.dup(1), "w", buffering=1)
  os.dup2(2, 1)
  os.sched_setaffinity(0, {args.core})
  os.environ.update({name: "1" for name in ONE_THREAD}, JAX_PLATFORMS="cpu", HF_HUB_OFFLINE="1")
  system = None
  for line in sys.stdin:
    call = json.loads(line)
    try:
      if system is None:
        system = importlib.import_module(args.module).System()
      answer = {"result": getattr(system, call["method"])(**call["args"])}
    except Exception:  # a rival may fail in its own ways; the driver decides what that means
      answer = {"error": traceback.format_exc()}
    answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
  main()

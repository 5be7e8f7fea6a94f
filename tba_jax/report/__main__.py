"""A page to look at one or several runs: python -m tba_jax.report WORKDIR [WORKDIR...] [--out FILE]

One HTML file that needs nothing else and opens offline: curves over steps, time and trained tokens, staleness, who did
what when, rollouts to read, configs and how they differ. Runs that differ by their seed alone become one curve with a
band. A run may still be going on, and its WORKDIR may be in a bucket (gs://...). Exit codes: 0 done, 2 bad input.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import sys
from collections.abc import Sequence

from tba_jax.metrics import write_atomic
from tba_jax.remote_workdir.fetch import local_copy
from tba_jax.remote_workdir.store import is_remote, workdir_argument
from tba_jax.report.page import make_page
from tba_jax.report.run_files import read_run

FILE = "report.html"
_NUM_ROLLOUTS = 300  # of all runs together
_ROLLOUT_BYTES = 1_200_000  # of their lines


def main(argv: Sequence[str] | None = None) -> None:
  """The command line; bad input ends with one line on stderr and exit code 2."""
  parser = argparse.ArgumentParser(
    prog="python -m tba_jax.report", description="One HTML page about one or several runs, also while they go on.")
  parser.add_argument("workdirs", metavar="WORKDIR", nargs="+", type=workdir_argument, help="--workdir of a run")
  parser.add_argument("--out", type=pathlib.Path, help=f"file to write; default: {FILE} in the first WORKDIR, or in the "
                      "current folder if that is in a bucket")
  args = parser.parse_args(argv)
  out = args.out or (pathlib.Path(FILE) if is_remote(args.workdirs[0]) else args.workdirs[0] / FILE)
  num = len(args.workdirs)
  try:
    with contextlib.ExitStack() as stack:
      folders = [stack.enter_context(local_copy(workdir, checkpoint=False)) for workdir in args.workdirs]
      runs = [read_run(folder, num_rollouts=max(10, _NUM_ROLLOUTS // num), rollout_bytes=_ROLLOUT_BYTES // num)
              for folder in folders]
      text = make_page(runs)
  except (ValueError, OSError) as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
  try:
    write_atomic(out, text)
  except OSError as error:
    print(f"error: {out} cannot be written ({error.strerror}); give another file with --out", file=sys.stderr)
    sys.exit(2)
  print(f"wrote {out} ({out.stat().st_size / 1e6:.2f} MB, {num} run{'s' if num > 1 else ''})")


if __name__ == "__main__":
  main()

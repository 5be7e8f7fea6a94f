"""The process behind `math_pool`: compares mathematical answers by math-verify until its input ends.

Run as a file, so that it needs nothing of ours and never imports jax:

    python -P math_worker.py MEMORY_BYTES LAST_RESORT_SECS

It says {"ready": true}, or {"fatal": "why"} and ends. Then each line {"gold": ..., "answer": ...} is answered by a line
{"right": bool} or {"error": "what went wrong"}. A request that takes longer than LAST_RESORT_SECS ends the process, so
that none is left computing when its parent was killed.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import resource
import signal
import sys
from typing import Any


def main(memory_bytes: int, last_resort_secs: float) -> None:
  """Serves requests from stdin on what was stdout."""
  replies = os.fdopen(os.dup(1), "w", buffering=1)
  silence = os.open(os.devnull, os.O_WRONLY)  # libraries that print must neither garble the replies nor the terminal
  os.dup2(silence, 1)
  os.dup2(silence, 2)
  logging.disable(logging.CRITICAL)
  resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
  try:
    import math_verify  # noqa: F401  (slow: the parent does not wait for it before the first answer comes)

    _compare("1", "1")  # parsers are built by their first use, which no answer's deadline should pay for
  except Exception as error:  # whatever it is, the parent must be able to say why no answer can be graded
    _reply(replies, fatal=f"{type(error).__name__}: {error}")
    return
  _reply(replies, ready=True)
  for line in sys.stdin:
    request = json.loads(line)
    signal.setitimer(signal.ITIMER_REAL, last_resort_secs)  # its default action ends the process, also inside C code
    try:
      _reply(replies, right=_compare(request["gold"], request["answer"]))
    except MemoryError:
      _reply(replies, error="memory")
      return  # what a failed allocation left behind is not trusted with the next answer
    except Exception as error:  # math-verify raises whatever sympy does; to the pool it is an answer it cannot grade
      _reply(replies, error=f"{type(error).__name__}: {error}"[:200])
    finally:
      signal.setitimer(signal.ITIMER_REAL, 0)


def _reply(replies: Any, **message: Any) -> None:
  replies.write(json.dumps(message) + "\n")


def _compare(gold: str, answer: str) -> bool:
  import math_verify

  found = math_verify.parse(
    f"\\boxed{{{answer}}}", extraction_config=[math_verify.LatexExtractionConfig(boxed_match_priority=0)],
    parsing_timeout=None, raise_on_error=True,
  )
  return bool(math_verify.verify(_parse_gold(gold), found, timeout_seconds=None, raise_on_error=True))


@functools.lru_cache(maxsize=1024)  # a group's answers are compared with one gold
def _parse_gold(gold: str) -> Any:
  import math_verify

  return math_verify.parse(
    f"${gold}$", extraction_config=[math_verify.LatexExtractionConfig()], parsing_timeout=None, raise_on_error=True
  )


if __name__ == "__main__":
  main(int(sys.argv[1]), float(sys.argv[2]))

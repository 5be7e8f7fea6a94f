"""Wall and CPU seconds of the calling process. No package is needed, for every environment reads this."""

from __future__ import annotations

import time


class Stopwatch:
  """Runs from its making on."""

  def __init__(self):
    self._wall, self._cpu = time.perf_counter(), time.process_time()

  def read(self, *, parts: int = 1) -> dict[str, float]:
    """`secs` on the clock, and `cpu_secs` that the process computed: on a core that others use too, the latter is what
    the work costs. Both divided by `parts`.
    """
    return {
      "secs": (time.perf_counter() - self._wall) / parts, "cpu_secs": (time.process_time() - self._cpu) / parts
    }

"""What a run leaves to read: metrics.jsonl, TensorBoard events, rollouts, the progress line, results.

Every file is JSON lines, written line by line: a killed process loses at most the line it was writing, and a torn
last line is dropped by the next reader. A full disk does not end a run, see disk.py. JSON is strict: a value that is
not finite is written as the string "NaN", "Infinity" or "-Infinity". What is measured over time (who was busy when,
staleness, waits) lives in meters.py.
"""

from __future__ import annotations

import io
import json
import math
import os
import pathlib
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TextIO

import numpy as np

from tba_jax.disk import AppendedFile, Disk

METRICS_FILE = "metrics.jsonl"
RESULTS_FILE = "results.json"

# The keys that every results.json holds; a task may add its own.
RESULT_KEYS = (
  "accuracy_before", "accuracy_after", "eval_size", "wall_seconds", "train_seconds", "steps", "rollouts",
  "rollouts_per_second", "trained_tokens", "trained_tokens_per_second", "generated_tokens", "staleness_mean",
  "staleness_p95", "staleness_max", "trainer_wait_seconds", "searcher_wait_seconds", "logprob_gap_max", "seed", "mode",
  "loss", "bottleneck",
)


# --- Files ---


def plain(value: Any) -> Any:
  """The value as strict JSON can hold it: numpy and jax scalars as numbers, what is not finite as a string."""
  if isinstance(value, Mapping):
    return {str(key): plain(item) for key, item in value.items()}
  if isinstance(value, (list, tuple)):
    return [plain(item) for item in value]
  if value is None or isinstance(value, (str, bool, int)):
    return value
  if not isinstance(value, float):
    return plain(np.asarray(value).tolist())
  if math.isfinite(value):
    return value
  return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def to_json_line(record: Mapping[str, Any]) -> str:
  """One line of strict JSON, readable in any language, with its newline."""
  return json.dumps(plain(record), ensure_ascii=False, allow_nan=False) + "\n"


def write_atomic(path: str | os.PathLike[str], text: str) -> None:
  """Writes a file whole or not at all, also when the machine stops in between."""
  path = pathlib.Path(path)
  temporary = path.with_name(path.name + ".tmp")
  # backslashreplace: half of a surrogate pair in sampled text becomes its JSON escape instead of an error.
  with open(temporary, "w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())
  os.replace(temporary, path)


def read_jsonl(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
  """Records of a file of JSON lines. A torn last line (no newline, or cut within) is left out.

  Raises:
    ValueError: any other line that is no JSON object, with file and line number.
  """
  with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
    for number, line in enumerate(file, start=1):
      if not line.endswith("\n"):
        return
      try:
        record = json.loads(line)
      except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {number}: not JSON ({error}); delete the line") from None
      if not isinstance(record, dict):
        raise ValueError(f"{path}, line {number}: {line.strip()[:40]} is not a JSON object; delete the line")
      yield record


class JsonLines:
  """Appends records to a file; on opening, cuts what lies beyond the step that the run resumes from."""

  def __init__(
    self, path: str | os.PathLike[str], *, resume_step: int, disk: Disk | None = None,
    comes_again: Callable[[Mapping[str, Any]], bool] = lambda record: False,
  ):
    """`resume_step`: last step that stands; -1 for a run that starts anew, which empties the file.

    `comes_again`: whether a record of a step that stands will be written once more, and so must go.
    """
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
      kept = [record for record in read_jsonl(path) if record["step"] <= resume_step and not comes_again(record)]
      write_atomic(path, "".join(map(to_json_line, kept)))
    self._file = AppendedFile(path, disk=disk)

  def write(self, record: Mapping[str, Any]) -> None:
    self._file.append(to_json_line(record).encode("utf-8", "backslashreplace"))

  def close(self) -> None:
    self._file.close()


class _EventFile:
  """TensorBoard events, written at once.

  Not tensorboardX.SummaryWriter: that hands each event through a process queue to a thread, and its flush does not wait
  for either, so a killed process loses what it had already reported as written.
  """

  def __init__(self, folder: pathlib.Path, *, first_step: int, disk: Disk | None):
    """TensorBoard hides what earlier files of the folder hold from `first_step` on."""
    from tensorboardX.proto import event_pb2, summary_pb2
    from tensorboardX.record_writer import masked_crc32c

    self._event, self._summary, self._checksum = event_pb2.Event, summary_pb2.Summary, masked_crc32c
    folder.mkdir(parents=True, exist_ok=True)
    # TensorBoard reads files in order of their names; nanoseconds keep those of one second apart.
    name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}"
    self._file = AppendedFile(folder / name, disk=disk)
    self._write(self._event(wall_time=time.time(), file_version="brain.Event:2"))
    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    self._write(self._event(wall_time=time.time(), step=first_step, session_log=start))

  def write(self, step: int, scalars: Mapping[str, float], *, wall_time: float) -> None:
    values = [self._summary.Value(tag=key, simple_value=value) for key, value in scalars.items()]
    self._write(self._event(wall_time=wall_time, step=step, summary=self._summary(value=values)))

  def _write(self, event: Any) -> None:
    # The framing of TFRecord: length, checksum of the length, record, checksum of the record.
    record = event.SerializeToString()
    length = struct.pack("<Q", len(record))
    checksums = [struct.pack("<I", self._checksum(part)) for part in (length, record)]
    self._file.append(length + checksums[0] + record + checksums[1])

  def close(self) -> None:
    self._file.close()


class MetricsWriter:
  """The one writer of scalars: metrics.jsonl and events in workdir/tensorboard. Safe from several threads."""

  def __init__(
    self, workdir: str | os.PathLike[str], *, resume_step: int, evaluates_again: Collection[int] = (),
    disk: Disk | None = None, also: Callable[[int, Mapping[str, float]], None] = lambda step, numbers: None,
  ):
    """`resume_step`: of the checkpoint that the run goes on from, -1 if none. Later lines and events are dropped.

    `evaluates_again`: steps whose evaluations the checkpoint does not know of; were they logged, they come again.
    `also`: is given the step and what the events get.
    """
    workdir, self._also = pathlib.Path(workdir), also
    self._lines = JsonLines(
        workdir / METRICS_FILE, resume_step=resume_step, disk=disk,
        comes_again=lambda record: "eval_accuracy" in record and record["step"] in evaluates_again)
    self._events = _EventFile(workdir / "tensorboard", first_step=resume_step + 1, disk=disk)
    self._lock = threading.Lock()

  def write(self, step: int, scalars: Mapping[str, Any]) -> None:
    """Writes {"step", "wall_time" (seconds since 1970), ...scalars} and the finite numbers among them as events."""
    now = time.time()
    scalars = {key: plain(value) for key, value in scalars.items()}
    numbers = {key: value for key, value in scalars.items() if isinstance(value, (int, float))}
    with self._lock:
      self._lines.write({"step": int(step), "wall_time": now, **scalars})
      self._events.write(int(step), numbers, wall_time=now)
      self._also(int(step), numbers)

  def close(self) -> None:
    with self._lock:
      self._lines.close()
      self._events.close()


class RolloutLog:
  """Sampled rollouts for people to read: workdir/rollouts/<kind>.jsonl, one a line, prompt and response as text."""

  def __init__(
    self, workdir: str | os.PathLike[str], *, resume_step: int, evaluates_again: Collection[int] = (),
    disk: Disk | None = None,
  ):
    """Arguments: as `MetricsWriter`."""
    self._folder, self._disk, self._evaluates_again = pathlib.Path(workdir) / "rollouts", disk, evaluates_again
    self._folder.mkdir(parents=True, exist_ok=True)
    self._resume_step = resume_step
    self._lock = threading.Lock()
    # Every file is cut now, also those whose kind this run does not write again.
    self._files = {path.stem: self._open(path.stem) for path in sorted(self._folder.glob("*.jsonl"))}

  def _open(self, kind: str) -> JsonLines:
    again = self._evaluates_again if kind == "eval" else ()
    return JsonLines(self._folder / f"{kind}.jsonl", resume_step=self._resume_step, disk=self._disk,
                     comes_again=lambda record: record["step"] in again)

  def write(
    self, step: int, *, prompt: str, response: str, reward: float, version: int, num_prompt_tokens: int,
    num_response_tokens: int, truncated: bool, kind: str = "train", **more: Any,
  ) -> None:
    """Appends one rollout. `version` is that of its oldest token; `kind` names the file (train, eval, ...)."""
    with self._lock:
      if kind not in self._files:
        self._files[kind] = self._open(kind)
    self._files[kind].write({
      "step": int(step), "reward": reward, "version": version, "num_prompt_tokens": num_prompt_tokens,
      "num_response_tokens": num_response_tokens, "truncated": truncated, **more, "prompt": prompt, "response":
      response, })

  def close(self) -> None:
    with self._lock:
      for file in self._files.values():
        file.close()


# --- Progress ---


class Progress:
  """One live line in a terminal; elsewhere a plain line every few seconds and at the last step. Prints messages too."""

  def __init__(
    self, num_steps: int, *, start_step: int = 0, stream: TextIO | None = None, interval_secs: float = 5.0,
    clock: Callable[[], float] = time.monotonic,
  ):
    """`num_steps`: of the whole run; `start_step`: done before this process began."""
    self._num_steps, self._start_step, self._interval_secs = num_steps, start_step, interval_secs
    self._stream, self._clock = stream or sys.stderr, clock
    self._began_secs = clock()
    self._last_secs = -math.inf
    self._lock = threading.Lock()
    self._live = None

  def _show(self) -> None:
    """Starts the live line. Not before the first step: it takes over the terminal, which stages draw on until then."""
    import rich.console
    import rich.live

    self._live = rich.live.Live(console=rich.console.Console(file=self._stream), refresh_per_second=4, transient=True)
    self._live.start()

  def update(
    self, step: int, *, reward: float, accuracy: float, loss: float, staleness: float,
    trained_tokens_per_second: float, generated_tokens_per_second: float,
  ) -> None:
    """Shows the state after `step` steps; `accuracy` is the last one evaluated (NaN: not yet)."""
    text = (
      f"step {step}/{self._num_steps}  ETA {self._eta(step)}  batch reward {_short(reward)}  accuracy "
      f"{_short(accuracy)}  loss {_short(loss)}  staleness {_short(staleness)}  tok/s trained "
      f"{_short(trained_tokens_per_second)} sampled {_short(generated_tokens_per_second)}"
    )
    with self._lock:
      now = self._clock()
      if self._live is None and self._stream.isatty():
        self._show()
      if self._live is not None:
        import rich.text

        # Cropped, not wrapped: a second line would scroll the terminal at every update.
        self._live.update(rich.text.Text(text, no_wrap=True, overflow="ellipsis"))
      elif step >= self._num_steps or now - self._last_secs >= self._interval_secs:
        self._last_secs = now
        print(text, file=self._stream, flush=True)

  def start_clock(self) -> None:
    """Steps begin now: what came before, as compiling, is no part of the rate that the ETA goes by."""
    self._began_secs = self._clock()

  def message(self, text: str) -> None:
    """Prints a line of its own, above the live one."""
    with self._lock:
      if self._live is not None:
        self._live.console.print(text, markup=False, highlight=False)
      else:
        print(text, file=self._stream, flush=True)

  def close(self) -> None:
    with self._lock:
      if self._live is not None:
        self._live.stop()

  def _eta(self, step: int) -> str:
    done = step - self._start_step
    if done <= 0:
      return "?"
    return format_secs((self._num_steps - step) * (self._clock() - self._began_secs) / done)


def _short(value: float) -> str:
  if math.isnan(value):
    return "-"
  return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def format_secs(secs: float) -> str:
  """1:02:03 or 2:03."""
  minutes, secs = divmod(max(0, round(secs)), 60)
  hours, minutes = divmod(minutes, 60)
  return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"


class StageProgress:
  """Progress of a stage with a known number of steps, such as fine-tuning: a live line, or a plain one every few
  seconds."""

  def __init__(
    self, name: str, num_steps: int, *, stream: TextIO | None = None, interval_secs: float = 5.0,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._name, self._num_steps, self._interval_secs = name, num_steps, interval_secs
    self._stream, self._clock = stream or sys.stderr, clock
    self._first: tuple[int, float] | None = None  # step and time of the first update, after whatever it had to compile
    self._last_secs = -math.inf

  def update(self, done: int, text: str = "") -> None:
    """Shows that `done` steps are done."""
    now = self._clock()
    if self._first is None:
      self._first = (done, now)
    first_step, began_secs = self._first
    rate = (done - first_step) / (now - began_secs) if now > began_secs else 0.0
    live = self._stream.isatty()
    if done < self._num_steps and now - self._last_secs < (0.1 if live else self._interval_secs):
      return
    self._last_secs = now
    eta = format_secs((self._num_steps - done) / rate) if rate > 0 else "?"
    line = f"{self._name} {done}/{self._num_steps}  {text}  {rate:.3g}/s  ETA {eta}"
    print(f"\r\x1b[K{line}" if live else line, end="" if live else "\n", file=self._stream, flush=True)

  def close(self) -> None:
    """Ends the live line."""
    if self._stream.isatty() and self._last_secs > -math.inf:
      print(file=self._stream, flush=True)


def bytes_bar(name: str) -> Callable[[int, int], None]:
  """A callback (done_bytes, of_bytes) that shows a `StageProgress` in megabytes."""
  bars = []

  def on_progress(done_bytes: int, of_bytes: int) -> None:
    if not bars:
      bars.append(StageProgress(f"{name}, MB:", max(1, round(of_bytes / 1e6))))
    bars[0].update(max(1, round(of_bytes / 1e6)) if done_bytes >= of_bytes else round(done_bytes / 1e6))
    if done_bytes >= of_bytes:
      bars[0].close()

  return on_progress


class SlowStage:
  """Says every few seconds how far a stage is that goes on beside others; nothing of one that is over sooner."""

  def __init__(
    self, name: str, num: int, *, say: Callable[[str], None], interval_secs: float = 10.0,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._name, self._num, self._say, self._interval_secs, self._clock = name, num, say, interval_secs, clock
    self._first: tuple[int, float] | None = None  # what was done at the first update, and when that was
    self._said_secs = math.inf

  def update(self, done: int) -> None:
    """`done` of `num` are done."""
    now = self._clock()
    if self._first is None:
      self._first, self._said_secs = (done, now), now
    if done >= self._num or now - self._said_secs < self._interval_secs:
      return
    self._said_secs = now
    rate = (done - self._first[0]) / (now - self._first[1])
    eta = format_secs((self._num - done) / rate) if rate > 0 else "?"
    self._say(f"{self._name} {done:,}/{self._num:,}  {rate:.3g}/s  ETA {eta}")


# --- Results ---


def write_results(workdir: str | os.PathLike[str], results: Mapping[str, Any]) -> None:
  """Writes workdir/results.json, whole or not at all.

  Raises:
    ValueError: a key of RESULT_KEYS is missing.
  """
  missing = [key for key in RESULT_KEYS if key not in results]
  if missing:
    raise ValueError(f"results lack {', '.join(missing)}; every run must report them")
  write_atomic(pathlib.Path(workdir) / RESULTS_FILE, json.dumps(plain(results), indent=2, allow_nan=False) + "\n")


def results_table(results: Mapping[str, Any]) -> str:
  """The table that a run ends in, as text."""
  import rich.box
  import rich.console
  import rich.table

  def number(key: str, form: str) -> str:
    value = results[key]
    return "-" if value is None or not math.isfinite(value) else format(value, form)

  before, after, size = (results[key] for key in ("accuracy_before", "accuracy_after", "eval_size"))
  known = all(value is not None and math.isfinite(value) for value in (before, after))
  gain = f" ({100 * (after - before):+.1f} points)" if known else ""
  # What a task measures beside: known before and after, unless the run was stopped before either.
  measures = [key.removesuffix("_after") for key in results
              if key.endswith("_after") and key != "accuracy_after" and key.replace("_after", "_before") in results]
  rows: Sequence[tuple[str, str]] = (
    (f"held-out accuracy before ({size} problems)", number("accuracy_before", ".1%")),
    ("held-out accuracy after", number("accuracy_after", ".1%") + gain),
    *((f"{name} before, after", f"{results[f'{name}_before']:.3f}, {results[f'{name}_after']:.3f}") for name in measures),
    ("wall-clock", f"{format_secs(results['wall_seconds'])} (of it training {format_secs(results['train_seconds'])})"),
    ("steps", number("steps", ",")),
    ("rollouts per second", f"{number('rollouts_per_second', ',.1f')} ({number('rollouts', ',')} rollouts)"),
    ("trained tokens per second",
     f"{number('trained_tokens_per_second', ',.0f')} ({number('trained_tokens', ',')} tokens)"),
    ("staleness mean / p95 / max (updates)",
     " / ".join((number("staleness_mean", ".2f"), number("staleness_p95", "g"), number("staleness_max", "g")))),
    ("trainer waited (s)", number("trainer_wait_seconds", ".1f")),
    ("searchers waited (s, summed)", number("searcher_wait_seconds", ".1f")),
    ("bottleneck", results["bottleneck"]),
  )
  title = f"{results['loss']}, {results['mode']}, seed {results['seed']}"
  table = rich.table.Table("", "value", title=title, box=rich.box.ASCII, title_justify="left")
  for row in rows:
    table.add_row(*row)
  text = io.StringIO()
  rich.console.Console(file=text, width=120, no_color=True).print(table)
  return text.getvalue()

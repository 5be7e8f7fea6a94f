"""A plan as text (Markdown tables, which read well in a terminal too) and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tba_jax.chips import HOST_SHARE, LINK_SHARE, RESERVE_SHARE, Chip
from tba_jax.config import DeviceCounts
from tba_jax.plan.compiler import Compiled
from tba_jax.plan.predict import Prediction, Terms, Workload
from tba_jax.plan.splits import Memory
from tba_jax.work import Work


@dataclasses.dataclass(frozen=True)
class Entry:
  """One split: what the compiler and the model say of it. `prediction` is None if a program does not fit."""

  counts: DeviceCounts
  trainer_memory: Memory
  searcher_memory: Memory
  trainer_programs: tuple[Compiled, ...]
  searcher_programs: tuple[Compiled, ...]
  prediction: Prediction | None

  @property
  def fits(self) -> bool:
    return self.trainer_memory.fits and self.searcher_memory.fits

  @property
  def name(self) -> str:
    shared = ", shared" if self.counts.share else ""
    return f"{self.counts.trainer} + {self.counts.searchers} x {self.counts.per_searcher}{shared}"


@dataclasses.dataclass(frozen=True)
class Plan:
  """Everything that is printed and saved."""

  config: str
  topology: str
  num_hosts: int
  model: str
  chip: Chip
  load: Workload
  host_bytes: int
  host_capacity: float
  entries: tuple[Entry, ...]
  recommended: str  # name of an entry, or ""
  reason: str
  notes: tuple[str, ...] = ()


def as_json(plan: Plan) -> dict[str, Any]:
  """Plain values of the whole plan, derived ones included."""
  found = dataclasses.asdict(plan)
  for entry, plain in zip(plan.entries, found["entries"], strict=True):
    plain |= {"name": entry.name, "fits": entry.fits, "counts": entry.counts._asdict()}
    for part in ("trainer_memory", "searcher_memory"):
      plain[part] |= {"needed": getattr(entry, part).needed, "fits": getattr(entry, part).fits}
  return found


def as_markdown(plan: Plan) -> str:
  """The plan for people."""
  load = plan.load
  parts = [
    f"# {plan.config} on {plan.topology}",
    f"{plan.model}; {plan.num_hosts} host(s). " + _advice(plan),
    _table(
      ["trainer + searchers x chips", "fits", "trainer GB", "searcher GB", "step s", "trained tok/s", "sampled tok/s",
       "fresh / trained", "trainer idle", "searchers idle", "staleness", "publish s"],
      [_entry_row(entry) for entry in plan.entries],
    ),
    f"GB on each device, of {plan.chip.hbm_bytes / 1e9:.1f} GB that a program may use. Tokens are response tokens. "
    "`fresh / trained`: groups that can be sampled per group trained; below 1 the buffer's old responses are trained "
    "on again. Staleness in updates, of what was sampled recently. Host memory for the full replay buffer: "
    f"{plan.host_bytes / 1e9:.1f} of {plan.host_capacity / 1e9:.0f} GB x {HOST_SHARE:.0%}"
    + ("." if plan.host_bytes <= HOST_SHARE * plan.host_capacity else ": DOES NOT FIT, lower buffer.capacity."),
  ]
  shown = next((entry for entry in plan.entries if entry.name == plan.recommended), plan.entries[0])
  parts += [f"## Memory of {shown.name}", _memory_table(shown)]
  if shown.prediction is not None:
    parts += [f"## Work of {shown.name}, on each device", _work_table(shown)]
  chip = plan.chip
  parts += [
    "## Assumptions",
    f"Prompts of {load.mean_prompt_tokens:g} and responses of {load.mean_response_tokens:g} tokens on average; a "
    f"step's rows have {load.step_tokens} tokens, {'packed' if load.packing else 'which the longest response needs'}. "
    f"Seconds are {'max(' if chip.overlaps else ''}FLOPs / (peak x MFU){', ' if chip.overlaps else ' + '}"
    f"bytes / (bandwidth x share){')' if chip.overlaps else ''} + link bytes / (link x share): a model, nothing was "
    "executed. "
    "FLOPs and memory traffic are counted by formula (FLOPs: tested against the compiler's count without loops), "
    "link bytes in the compiled program's text, each collective times the trips of the loops around it. `compiler's "
    "FLOPs` take the body of a loop once and are shown for comparison only. Memory: arguments from the sharded trees, "
    "temporaries and code from the compiler; code counts the largest program of a kind once for each of its shapes."
    + (" The task's own models (" + ", ".join(shown.prediction.beside) + ") are taken at two FLOPs a weight and token, "
       "without links and temporaries." if shown.prediction and shown.prediction.beside else ""),
    _table(
      ["constant", "value", "source"],
      [
        ["peak bf16 FLOP/s", f"{chip.peak_flops:.3g}", ""],
        ["MFU", f"{chip.mfu:.3g}", ""],
        ["memory bytes", f"{chip.hbm_bytes:.4g}", ""],
        ["memory bytes/s", f"{chip.hbm_bytes_per_sec:.3g} x {chip.hbm_share:g}",
         "share assumed" if chip.overlaps else "share measured"],
        ["link bytes/s, one direction", f"{chip.link_bytes_per_sec:.3g} x {LINK_SHARE:g}", "share assumed"],
        ["reserve", f"{RESERVE_SHARE:.0%} of memory", "assumed"],
        *(["", name, source] for name, source in chip.sources.items()),
      ],
    ),
    *plan.notes,
  ]
  return "\n\n".join(parts) + "\n"


def _advice(plan: Plan) -> str:
  return f"**Recommended: {plan.recommended}** ({plan.reason})." if plan.recommended else f"**{plan.reason}**"


def _entry_row(entry: Entry) -> list[str]:
  memory = [f"{part.needed / 1e9:.1f}" for part in (entry.trainer_memory, entry.searcher_memory)]
  if entry.prediction is None:
    return [entry.name, "no", *memory, *["-"] * 8]
  p = entry.prediction
  return [
    entry.name, "yes" if entry.fits else "no", *memory, f"{p.step.secs:.2f}", f"{p.trained_tokens_per_sec:,.0f}",
    f"{p.sampled_tokens_per_sec:,.0f}", f"{p.fresh_ratio:.2f}", f"{p.trainer_idle:.0%}", f"{p.searcher_idle:.0%}",
    f"{p.staleness_updates:.1f}", f"{p.transfer_secs:.3f}",
  ]


def _memory_table(entry: Entry) -> str:
  rows = []
  for part, memory in (("trainer", entry.trainer_memory), ("searcher", entry.searcher_memory)):
    kinds = {
      **memory.residents, f"temporaries ({memory.worst_program})": memory.temporaries,
      "code of all programs": memory.code, "reserve": memory.reserve,
    }
    rows += [[part, kind, f"{size:,}"] for kind, size in kinds.items()]
    free = memory.capacity - memory.needed
    verdict = f"fits, {free:,} free" if memory.fits else f"{-free:,} too much"
    rows.append([part, f"**together** ({verdict})", f"{memory.needed:,}"])
  return _table(["part", "kind", "bytes a device"], rows)


def _work_table(entry: Entry) -> str:
  p = entry.prediction
  compiled = {each.name: each for each in (*entry.trainer_programs, *entry.searcher_programs)}

  def row(name: str, terms: Terms, work: Work | None, program: str) -> list[str]:
    known = compiled[program]
    counts = ["", ""] if work is None else [f"{work.flops:.3g}", f"{work.hbm_bytes:.3g}"]
    secs = [f"{value:.3g}" for value in (terms.compute_secs, terms.memory_secs, terms.link_secs)]
    return [name, *counts, f"{known.link_bytes:.3g}", *secs, f"**{terms.secs:.3g}**", f"{known.compiler_flops:.3g}",
            f"{known.compile_secs:.0f}"]

  return _table(
    ["program", "FLOPs", "memory bytes", "link bytes", "compute s", "memory s", "link s", "s", "compiler's FLOPs",
     "compile s"],
    [
      row("train step", p.step, p.step_work, "train step"),
      row("decode, a token in every slot (links: a chunk)", p.decode, p.decode_work, "decode"),
      row("prefill, a batch", p.prefill, None, "prefill"),
      row("score, a group", p.score, None, "score"),
      *([f"{name}, a group", "", "", "", f"{each.compute_secs:.3g}", f"{each.memory_secs:.3g}", "",
         f"**{each.secs:.3g}**", "", ""] for name, each in p.beside.items()),
    ],
  )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
  line = lambda row: "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
  return "\n".join([line(header), "|" + "|".join("-" * (width + 2) for width in widths) + "|", *map(line, rows)])

"""What asynchrony buys: the same training asynchronous, alternating on the same split of devices, and alternating on
all of them.

    python experiments/async_speedup.py --out runs/async_speedup

Arms, on the quickstart's task and model, from the same fine-tuned version 0:
  async          searchers and trainer at once, on disjoint devices
  disaggregated  the same devices, sync mode: sample a batch, then train on it
  colocated      sync mode, every phase on all devices, a whole batch decoded at once (on CPU one device is all cores)
and `sampling1`, `2`, `4`: async with a SIMULATED decode latency, which costs no core, for how rollouts scale with
searchers.

Times are between the first and the last step of a run, without evaluations; the ideal is (T + S) / max(T, S) with T and
S the seconds that trainer and searchers are busy in the disaggregated run. `--accuracy` repeats the arms with
evaluations and compares the time to the same held-out accuracy. An arm that is done is not run again; `summary.json`
and `summary.svg` are written from all.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # so that it runs as a file, too

SPEED, SIMULATED = ("async", "disaggregated", "colocated"), ("sampling1", "sampling2", "sampling4")
WARM_STEPS = 3  # first steps that no time counts: the initial fill


def make_config(arm: str, *, steps: int, quick: bool):
  """The quickstart with what the arm changes."""
  from configs import quickstart

  config = quickstart.get_config("smoke" if quick else None).unlock()
  config.train.steps, config.checkpoint.every_steps = steps, 0
  config.eval.every_steps, config.eval.size = 0, 8
  kind = arm.removesuffix("_accuracy")
  config.devices.update(trainer=1, searchers=1, per_searcher=1, share=False)
  batch = config.train.prompts_per_step * config.sample.responses_per_prompt
  if kind in ("disaggregated", "colocated"):
    config.runtime.mode = "sync"
    config.sample.slots = batch
  if kind == "colocated":
    config.devices.share = True
  if kind == "async":
    config.sync.max_lead_steps = 4  # so that a searcher waits instead of sampling what nobody trains on
  if kind in SIMULATED:
    config.devices.searchers = int(kind[-1])
  if arm.endswith("_accuracy"):
    config.eval.update(every_steps=max(1, steps // 8), size=32 if quick else 512)
  return config.lock()


def run_arm(arm: str, out: pathlib.Path, *, steps: int, quick: bool, latency_secs: float) -> None:
  """One arm in this process, as the trainer's own command would run it."""
  import jax

  from tba_jax import config as config_lib
  from tba_jax import main as main_lib
  from tba_jax import train
  from tba_jax.sampling.engine import Engine

  config, folder = make_config(arm, steps=steps, quick=quick), out / arm
  main_lib.set_up_jax(config.devices)
  config_lib.validate(config, num_devices=jax.device_count(), platform=jax.default_backend())
  first = out / "async"
  if arm != "async" and (first / "initial").is_dir() and not folder.exists():
    folder.mkdir(parents=True)
    for name in ("initial", "model"):
      shutil.copytree(first / name, folder / name)
    (folder / config_lib.CONFIG_FILE).write_text(config_lib.to_json(config))
  if arm in SIMULATED:
    step = Engine.step

    def slow_step(engine):
      done = step(engine)
      time.sleep(latency_secs)
      return done

    Engine.step = slow_step
  sys.exit(train.run(config, str(folder)))


def spans(folder: pathlib.Path, start: float, end: float) -> dict[str, dict[str, float]]:
  """Seconds by actor and kind between two times of the wall clock."""
  secs: dict[str, dict[str, float]] = {}
  for line in (folder / "timeline.jsonl").read_text().splitlines():
    span = json.loads(line)
    length = min(span["end_secs"], end) - max(span["start_secs"], start)
    if length > 0:
      actor = secs.setdefault("trainer" if span["actor"] == "trainer" else "searchers", {})
      actor[span["kind"]] = actor.get(span["kind"], 0.0) + length
  return secs


def measure(folder: pathlib.Path) -> dict:
  """Rates and busy shares of one arm, between its first counted step and its last."""
  lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
  results = json.loads((folder / "results.json").read_text())
  steps = [line for line in lines if "loss" in line]
  first, last = steps[min(WARM_STEPS, len(steps) - 2)], steps[-1]
  secs = last["wall_time"] - first["wall_time"]
  rows = results["trained_responses"] / results["steps"]
  busy = spans(folder, first["wall_time"], last["wall_time"])
  num_searchers = max(1, json.loads((folder / "config.json").read_text())["devices"]["searchers"])
  sampling = sum(busy.get("searchers", {}).get(kind, 0.0) for kind in ("decode", "grade", "score")) / num_searchers
  training = sum(busy.get("trainer", {}).get(kind, 0.0) for kind in ("step", "publish"))
  accuracy = [(line["step"], line["eval_accuracy"]) for line in lines if "eval_accuracy" in line]
  at = {line["step"]: line["wall_seconds"] for line in steps}
  return {
    "seconds": secs, "steps": last["step"] - first["step"],
    "trained_responses_per_second": (last["step"] - first["step"]) * rows / secs,
    "rollouts_per_second": (last["rollouts"] - first["rollouts"]) / secs, "trainer_busy_seconds": training,
    "searchers_busy_seconds": sampling, "trainer_busy_share": training / secs, "searchers_busy_share": sampling / secs,
    "staleness_mean": results["staleness_mean"], "bottleneck": results["bottleneck"],
    "accuracy": [(step, at.get(step, 0.0) - at[first["step"]], value)
                 for step, value in accuracy if step == 0 or step in at],
  }


def seconds_to(accuracy: list[tuple[int, float, float]], goal: float) -> float | None:
  """When an evaluation first reached the goal, interpolated between evaluations; None if none did."""
  before = None
  for _, secs, value in accuracy:
    if value >= goal:
      return secs if before is None else before[0] + (goal - before[1]) / (value - before[1]) * (secs - before[0])
    before = (max(secs, 0.0), value)
  return None


def summarise(out: pathlib.Path) -> dict:
  """Everything that the arms which are done say together."""
  done = {folder.parent.name: measure(folder.parent) for folder in sorted(out.glob("*/results.json"))}
  summary: dict = {"arms": done}
  if set(SPEED) <= set(done):
    sync = done["disaggregated"]
    train_secs, sample_secs = sync["trainer_busy_seconds"], sync["searchers_busy_seconds"]
    rate = {arm: done[arm]["trained_responses_per_second"] for arm in SPEED}
    ideal = (train_secs + sample_secs) / max(train_secs, sample_secs)
    summary |= {"ideal_speedup": ideal, "speedup_over_disaggregated": rate["async"] / rate["disaggregated"],
                "speedup_over_colocated": rate["async"] / rate["colocated"],
                "share_of_ideal": rate["async"] / rate["disaggregated"] / ideal}
  curves = {arm: done[f"{arm}_accuracy"]["accuracy"] for arm in SPEED if f"{arm}_accuracy" in done}
  if len(curves) == len(SPEED):
    goal = min(max(value for _, _, value in curve) for curve in curves.values())
    summary |= {
        "accuracy_goal": goal, "seconds_to_accuracy": {arm: seconds_to(curve, goal) for arm, curve in curves.items()}
    }
  scaling = {arm[-1]: done[arm]["rollouts_per_second"] for arm in SIMULATED if arm in done}
  if scaling:
    summary["simulated_rollouts_per_second_by_searchers"] = scaling
  return summary


def plot(summary: dict, path: pathlib.Path) -> None:
  """An SVG of bars: trained responses a second by arm, and rollouts a second by searchers with simulated latency."""
  bars = [(arm, summary["arms"][arm]["trained_responses_per_second"], "#4878a8")
          for arm in SPEED if arm in summary["arms"]]
  scaling = summary.get("simulated_rollouts_per_second_by_searchers", {})
  charts = [("trained responses / s", bars),
            ("rollouts / s by searchers (simulated latency)",
             [(number, rate, "#a87848") for number, rate in scaling.items()])]
  parts = ['<svg xmlns="http://www.w3.org/2000/svg" width="820" height="240" font-family="sans-serif" font-size="12">']
  for column, (title, values) in enumerate(charts):
    left, highest = 20 + 410 * column, max([value for _, value, _ in values], default=1.0)
    parts.append(f'<text x="{left}" y="18">{title}</text>')
    for place, (name, value, colour) in enumerate(values):
      height, x = 160 * value / highest, left + 120 * place
      parts.append(f'<rect x="{x}" y="{205 - height:.1f}" width="90" height="{height:.1f}" fill="{colour}"/>')
      parts.append(f'<text x="{x}" y="{200 - height:.1f}">{value:.1f}</text><text x="{x}" y="222">{name}</text>')
  path.write_text("\n".join([*parts, "</svg>"]) + "\n")


def main(argv: list[str] | None = None) -> dict:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--out", type=pathlib.Path, required=True,
                      help="folder for the runs, summary.json and summary.svg")
  parser.add_argument("--steps", type=int, default=60, help="optimizer steps of an arm")
  parser.add_argument("--latency_secs", type=float, default=0.1, help="of a chunk of decoding, in the simulated arms")
  parser.add_argument("--accuracy", action="store_true", help="also run the arms with evaluations")
  parser.add_argument("--quick", action="store_true",
                      help="a tiny model and few steps: everything works, no figure means anything")
  parser.add_argument("--run_arm", help=argparse.SUPPRESS)
  args = parser.parse_args(argv)
  steps = 6 if args.quick else args.steps
  if args.run_arm:
    run_arm(args.run_arm, args.out, steps=steps, quick=args.quick, latency_secs=args.latency_secs)
  arms = [*SPEED, *(SIMULATED[:2] if args.quick else SIMULATED), *(f"{arm}_accuracy" for arm in SPEED if args.accuracy)]
  args.out.mkdir(parents=True, exist_ok=True)
  began = time.monotonic()
  for done, arm in enumerate(arms):
    if (args.out / arm / "results.json").is_file():
      continue
    print(f"[{'#' * done}{'.' * (len(arms) - done)}] {arm}, {time.monotonic() - began:.0f} s", file=sys.stderr,
          flush=True)
    command = [
        sys.executable, "-m", "experiments.async_speedup", f"--run_arm={arm}", f"--out={args.out}",
        f"--steps={args.steps}", f"--latency_secs={args.latency_secs}", *(["--quick"] if args.quick else [])
    ]
    with open(args.out / f"{arm}.log", "w") as log:
      code = subprocess.run(command, cwd=pathlib.Path(__file__).resolve().parent.parent, stdout=log,
                            stderr=log).returncode
    if code:
      raise SystemExit(f"arm {arm} ended with {code}: {(args.out / f'{arm}.log').read_text()[-2000:]}")
  summary = summarise(args.out)
  (args.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
  plot(summary, args.out / "summary.svg")
  print(json.dumps({key: value for key, value in summary.items() if key != "arms"}, indent=2))
  return summary


if __name__ == "__main__":
  main()

"""What asynchrony buys: the same training asynchronous, alternating on the same split of devices, and alternating on
all of them.

    python experiments/async_speedup.py --out runs/async_speedup
    python experiments/async_speedup.py --out runs/async_speedup --arms=async --seeds=1   (one piece of it)

Arms, on the quickstart's task and model, 8 prompts x 16 of 32 responses a step and no response left out as a
duplicate, all of one seed from the same fine-tuned version 0:
  async          searchers and trainer at once, on disjoint devices
  disaggregated  the same devices, sync mode: sample a batch, then train on it
  colocated      sync mode, every phase on all devices (on CPU one device is all cores)
and `sampling1`, `2`, `4`: async with a SIMULATED decode latency, which costs no core, for how rollouts scale with
searchers. A number after an arm's name, as in `colocated128`, is that of its decoding slots (default: 64 for async,
else the whole batch), to find out with which batch each arm is at its best.

Rates are between the first and the last counted step. Two bounds on what asynchrony can gain over the disaggregated
arm: (T + n S) / max(T, S), with T and S the seconds that the trainer and each of n searchers, which sample in turn, are
busy there; and where all devices are virtual ones on the same cores, the cores x its seconds / its CPU seconds, for it
uses more than one core at times already. The lesser is the ideal. Held-out accuracy is taken afterwards, of copies of
the weights, so that no clock counts it; its times count from the first decoded token. An arm that is done is not run
again; `summary.json` and `summary.png` are written from all that are.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # so that it runs as a file, too

from tba_jax.metrics import read_jsonl, write_atomic  # noqa: E402

SPEED, SIMULATED = ("async", "disaggregated", "colocated"), ("sampling1", "sampling2", "sampling4")
VERSION0 = "version0"  # fine-tuning alone
WARM_STEPS = 5  # first steps that no rate counts: the initial fill
NUM_COPIES = 12  # of the weights, for accuracy
GOAL = 0.95
MARKS, ACCURACY = "marks.json", "accuracy.json"


def make_config(arm: str, *, seed: int, steps: int, quick: bool, searchers: int):
  """The quickstart with what the arm changes; `searchers` of the arms on split devices."""
  from configs import quickstart

  config = quickstart.get_config("smoke" if quick else None).unlock()
  config.seed = seed
  config.train.steps, config.checkpoint.every_steps = steps, 0
  config.eval.update(every_steps=0, size=32 if quick else 512)
  config.devices.update(trainer=1, searchers=searchers, per_searcher=1, share=False)
  config.sample.responses_per_prompt, config.buffer.dedup = 2 * config.train.responses_per_prompt, False
  kind, number = arm.rstrip("0123456789"), arm.lstrip("abcdefghijklmnopqrstuvwxyz")
  if arm == VERSION0:
    config.train.steps = 0
  if kind in ("disaggregated", "colocated"):
    config.runtime.mode = "sync"
    if kind == "colocated":
      config.devices.update(searchers=1, share=True)
    batch = config.train.prompts_per_step * config.sample.responses_per_prompt
    config.sample.slots = batch // config.devices.searchers
  if kind == "async":
    config.sync.max_lead_steps = 4  # so that a searcher waits instead of sampling what nobody trains on
  if arm in SIMULATED:
    config.devices.searchers = int(number)
  elif number and arm != VERSION0:
    config.sample.slots = int(number)
  return config.lock()


# --- One arm, in a process of its own ---


def run_arm(
    arm: str, folder: pathlib.Path, *, seed: int, steps: int, quick: bool, searchers: int, latency_secs: float) -> None:
  """An arm; accuracies and then its marks are written when it is done."""
  from tba_jax.sampling.engine import Engine

  step = Engine.step

  def slow_step(engine: Engine):
    done = step(engine)
    time.sleep(latency_secs)
    return done

  config = make_config(arm, seed=seed, steps=steps, quick=quick, searchers=searchers)
  Engine.step = slow_step if arm in SIMULATED else step
  code, run, marks, copies = train_noted(config, folder, version0=folder.parent.parent / VERSION0 / folder.name)
  Engine.step = step
  if code == 0 and arm not in (VERSION0, *SIMULATED):
    write_atomic(folder / ACCURACY, json.dumps(evaluate(run, copies)))
  write_atomic(folder / MARKS, json.dumps(marks))  # last: it says that the arm is done
  sys.exit(code)


def train_noted(config, folder: pathlib.Path, *, version0: pathlib.Path) -> tuple[int, Any, list[dict], dict]:
  """Trains as the trainer's own command would, without evaluations, from the fine-tuned model of the run `version0`
  where there is one.

  Returns: exit code, the run, the times of its publishes, and copies of its weights by step, NUM_COPIES at most.
  """
  import jax

  from tba_jax import config as config_lib
  from tba_jax import main as main_lib
  from tba_jax import train
  from tba_jax.runtime.run import Run

  main_lib.set_up_jax(config.devices, backend=config.runtime.backend)
  config_lib.validate(config, num_devices=jax.device_count(), platform=jax.default_backend())
  _start_from(version0, folder, config_lib.to_json(config))
  marks, copies, runs = [], {}, []
  publish = Run.publish

  def noted(run: Run, *, wait: bool) -> None:
    publish(run, wait=wait)
    marks.append({"step": run.step, "wall_time": time.time(), "cpu_secs": time.process_time(),
                  "machine_busy_secs": machine_busy_secs()})
    if run.step % max(1, config.train.steps // NUM_COPIES) == 0:
      copies[run.step] = jax.device_get(run.trainer.state.params)
    runs[:] = [run]

  Run.publish, Run.evaluation_due = noted, lambda run: False
  code = train.run(config, str(folder))
  return code, (runs or [None])[0], marks, copies


def machine_busy_secs() -> float:
  """CPU seconds that all processes have taken since the machine started."""
  user, nice, system, _, _, interrupts, more = map(int, pathlib.Path("/proc/stat").read_text().split()[1:8])
  return (user + nice + system + interrupts + more) / os.sysconf("SC_CLK_TCK")


def _start_from(version0: pathlib.Path, folder: pathlib.Path, config: str) -> None:
  """The arm's folder, with the fine-tuned model in it."""
  if (version0 / MARKS).is_file():
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in ("initial", "model"):
      shutil.copytree(version0 / name, folder / name)
    (folder / "config.json").write_text(config)


def evaluate(run, copies: dict, *, temperature: float = 0.0) -> list[tuple[int, float]]:
  """Step and held-out accuracy of copies of the weights, greedy or of one sample a problem."""
  from tba_jax.evaluate import evaluate_greedy

  searcher, found = run.searchers[0], []
  for step, params in copies.items():
    with searcher.lend_engine() as engine:
      result = evaluate_greedy(
          engine, run.weights.pin(params, step, searcher=0)(), run.eval_prompts, reward=searcher.eval_reward,
          response_text=run.task.response_text, max_new_tokens=run.settings.max_new_tokens, temperature=temperature,
          seed=0, stopped=lambda: False)
    found.append((step, result.accuracy))
  return found


# --- What the arms say ---


def spans(folder: pathlib.Path, start: float, end: float) -> dict[str, dict[str, float]]:
  """Seconds by actor and kind between two times of the wall clock."""
  secs: dict[str, dict[str, float]] = {}
  for span in read_jsonl(folder / "timeline.jsonl"):
    length = min(span["end_secs"], end) - max(span["start_secs"], start)
    if length > 0:
      actor = secs.setdefault("trainer" if span["actor"] == "trainer" else "searchers", {})
      actor[span["kind"]] = actor.get(span["kind"], 0.0) + length
  return secs


def measure(folder: pathlib.Path) -> dict:
  """Rates and busy shares of one run, between its first counted step and its last; accuracy over time."""
  marks = json.loads((folder / MARKS).read_text())
  results = json.loads((folder / "results.json").read_text())
  first, last = next(mark for mark in marks if mark["step"] >= min(WARM_STEPS, len(marks) // 2)), marks[-1]
  secs, num_steps = last["wall_time"] - first["wall_time"], last["step"] - first["step"]
  rollouts = {line["step"]: line["rollouts"] for line in read_jsonl(folder / "metrics.jsonl") if "loss" in line}
  busy = spans(folder, first["wall_time"], last["wall_time"])
  num_searchers = json.loads((folder / "config.json").read_text())["devices"]["searchers"]
  sampling = sum(busy.get("searchers", {}).get(kind, 0.0) for kind in ("decode", "grade", "score")) / num_searchers
  training = sum(busy.get("trainer", {}).get(kind, 0.0) for kind in ("step", "publish"))
  began = min(span["start_secs"] for span in read_jsonl(folder / "timeline.jsonl") if span["kind"] == "decode")
  at = {mark["step"]: mark["wall_time"] - began for mark in marks} | {0: 0.0}
  curve = json.loads((folder / ACCURACY).read_text()) if (folder / ACCURACY).is_file() else []
  return {
      "seconds": secs, "steps": num_steps, "searchers": num_searchers,
      "cpu_seconds": last["cpu_secs"] - first["cpu_secs"],
      "cores_busy_for_others": (last["machine_busy_secs"] - first["machine_busy_secs"]
                                - last["cpu_secs"] + first["cpu_secs"]) / secs,
      "trained_responses_per_second": num_steps * results["trained_responses"] / results["steps"] / secs,
      "rollouts_per_second": (rollouts[last["step"]] - rollouts[first["step"]]) / secs,
      "trainer_busy_seconds": training, "searchers_busy_seconds": sampling, "trainer_busy_share": training / secs,
      "searchers_busy_share": sampling / secs, "staleness_mean": results["staleness_mean"],
      "bottleneck": results["bottleneck"], "seconds_of_all_steps": at[last["step"]],
      "accuracy": [(step, at[step], value) for step, value in curve],
  }


def seconds_to(accuracy: Sequence[tuple[int, float, float]], goal: float) -> float | None:
  """When the accuracy first reached the goal, interpolated; None if it never did."""
  before = None
  for _, secs, value in accuracy:
    if value >= goal:
      return secs if before is None else before[0] + (goal - before[1]) / (value - before[1]) * (secs - before[0])
    before = (secs, value)
  return None


def ideal(sync: dict, num_cores: int) -> dict[str, float]:
  """The bounds on the gain over the alternating arm, see the module."""
  train_secs, sample_secs = sync["trainer_busy_seconds"], sync["searchers_busy_seconds"]  # the latter of each searcher
  sides = (train_secs + sync["searchers"] * sample_secs) / max(train_secs, sample_secs)
  cores = num_cores * sync["seconds"] / sync["cpu_seconds"]
  return {"ideal_of_sides": sides, "ideal_of_cores": cores, "ideal": min(sides, cores)}


def summarise(out: pathlib.Path, *, num_cores: int) -> dict:
  """Everything that the arms which are done say together; ratios are taken seed by seed."""
  done: dict[str, dict[str, dict]] = {}
  for path in sorted(out.glob(f"*/seed*/{MARKS}")):
    if path.parent.parent.name != VERSION0:
      done.setdefault(path.parent.parent.name, {})[path.parent.name.removeprefix("seed")] = measure(path.parent)
  summary: dict = {"arms": done}
  speed = {arm: done[arm] for arm in done if arm not in SIMULATED}
  if set(SPEED) <= set(speed):
    seeds = sorted(set.intersection(*(set(speed[arm]) for arm in SPEED)))
    rate = {arm: [speed[arm][seed]["trained_responses_per_second"] for seed in seeds] for arm in SPEED}
    bounds = [ideal(speed["disaggregated"][seed], num_cores) for seed in seeds]
    over = {arm: [a / b for a, b in zip(rate["async"], rate[arm])] for arm in SPEED[1:]}
    summary |= {
        "seeds": seeds, **{name: statistics.mean(bound[name] for bound in bounds) for name in bounds[0]},
        "speedup_over_disaggregated": statistics.mean(over["disaggregated"]),
        "speedup_over_colocated": statistics.mean(over["colocated"]),
        "speedup_over_colocated_by_seed": over["colocated"],
        "share_of_ideal": statistics.mean(
            gain / bound["ideal"] for gain, bound in zip(over["disaggregated"], bounds)),
    } | _accuracies({arm: speed[arm] for arm in SPEED}, seeds)
  scaling = {arm[-1]: done[arm]["0"]["rollouts_per_second"] for arm in SIMULATED if "0" in done.get(arm, {})}
  if scaling:
    summary["simulated_rollouts_per_second_by_searchers"] = scaling
  return summary


def _accuracies(arms: dict[str, dict[str, dict]], seeds: Sequence[str]) -> dict:
  """Final accuracies, and the times to GOAL of what every run reached: on the way up, where time means something."""
  curves = {arm: [of_seed[seed]["accuracy"] for seed in seeds] for arm, of_seed in arms.items()}
  final = {arm: [curve[-1][2] for curve in of_arm] for arm, of_arm in curves.items()}
  goal = GOAL * min(max(value for _, _, value in curve) for of_arm in curves.values() for curve in of_arm)
  times = {arm: [seconds_to(curve, goal) for curve in of_arm] for arm, of_arm in curves.items()}
  spread = {arm: statistics.stdev(values) if len(values) > 1 else 0.0 for arm, values in final.items()}
  return {
      "final_accuracy": final, "final_accuracy_mean": {arm: statistics.mean(values) for arm, values in final.items()},
      "final_accuracy_standard_deviation": spread, "accuracy_goal": goal, "seconds_to_accuracy": times,
      "seconds_to_accuracy_mean": {arm: statistics.mean(values) for arm, values in times.items()},
  }


def plot(summary: dict, path: pathlib.Path) -> None:
  """Accuracy over time by arm, busy shares, and rollouts a second by searchers with simulated latency."""
  if importlib.util.find_spec("matplotlib") is None:
    print("no plot: matplotlib is not installed where this runs", file=sys.stderr)
    return
  import matplotlib

  matplotlib.use("agg")
  from matplotlib import pyplot

  found = summary.get("simulated_rollouts_per_second_by_searchers", {})
  figure, panels = pyplot.subplots(1, 2 + bool(found), figsize=(14 if found else 10, 4), layout="constrained")
  curves, shares = panels[:2]
  arms = [arm for arm in SPEED if arm in summary["arms"]]
  for arm, colour in zip(SPEED, ("tab:blue", "tab:orange", "tab:green")):
    for place, run in enumerate(summary["arms"].get(arm, {}).values()):
      curves.plot([secs for _, secs, _ in run["accuracy"]], [100 * value for _, _, value in run["accuracy"]],
                  color=colour, marker=".", label=arm if place == 0 else None)
  curves.set(xlabel="seconds since the first token", ylabel="held-out accuracy, %", title="Accuracy over time")
  curves.legend()
  mean = lambda arm, key: statistics.mean(run[key] for run in summary["arms"][arm].values())
  for offset, side in ((-0.2, "trainer"), (0.2, "searchers")):
    shares.bar([place + offset for place in range(len(arms))], [100 * mean(arm, f"{side}_busy_share") for arm in arms],
               width=0.38, label=f"{side} busy")
  rates = [f"{arm}\n{mean(arm, 'trained_responses_per_second'):.0f} responses/s" for arm in arms]
  shares.set(ylabel="% of the time", title="Trained responses a second, busy sides", ylim=(0, 119))
  shares.set_xticks(range(len(arms)), rates)
  shares.legend(loc="upper right", ncols=2)
  if found:
    numbers, values = [int(number) for number in found], list(found.values())
    panels[2].plot(numbers, [values[0] * number / numbers[0] for number in numbers], "--", color="gray", label="linear")
    panels[2].plot(numbers, values, "o-", label="measured")
    panels[2].set(xlabel="searchers", ylabel="rollouts a second", title="Searchers, SIMULATED decode latency",
                  xticks=numbers, ylim=(0, None))
    panels[2].legend()
  figure.savefig(path, dpi=110)


def main(argv: list[str] | None = None) -> dict:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for the runs and the summary")
  parser.add_argument("--steps", type=int, default=60, help="optimizer steps of an arm")
  parser.add_argument("--seeds", default="0,1,2", help="of the arms whose speed and accuracy count")
  parser.add_argument("--arms", default="", help="only these, comma-separated (version0 is the fine-tuning)")
  parser.add_argument("--searchers", type=int, default=2, help="devices for searchers, where devices are split")
  parser.add_argument("--latency_secs", type=float, default=0.25, help="of a chunk of decoding, in the simulated arms")
  parser.add_argument("--cores", type=int, default=os.cpu_count(), help="that all devices share; 0: none is shared")
  parser.add_argument("--quick", action="store_true",
                      help="a tiny model and few steps: everything works, no figure means anything")
  parser.add_argument("--run_arm", help=argparse.SUPPRESS)
  args = parser.parse_args(argv)
  steps = 6 if args.quick else args.steps
  if args.run_arm:
    arm, seed = args.run_arm.split(":")
    run_arm(arm, args.out / arm / f"seed{seed}", seed=int(seed), steps=steps, quick=args.quick,
            searchers=args.searchers, latency_secs=args.latency_secs)
  seeds = args.seeds.split(",")
  pieces = [(arm, seed) for seed in seeds for arm in (VERSION0, *SPEED)]
  pieces += [(arm, "0") for arm in (SIMULATED[:2] if args.quick else SIMULATED)]
  if args.arms:
    pieces = [(arm, seed) for arm in args.arms.split(",") for seed in seeds]
  args.out.mkdir(parents=True, exist_ok=True)
  began = time.monotonic()
  for done, (arm, seed) in enumerate(pieces):
    if not (args.out / arm / f"seed{seed}" / MARKS).is_file():
      print(f"[{'#' * done}{'.' * (len(pieces) - done)}] {arm}, seed {seed}, {time.monotonic() - began:.0f} s",
            file=sys.stderr, flush=True)
      _run_piece(arm, seed, args)
  summary = summarise(args.out, num_cores=args.cores or sys.maxsize)
  write_atomic(args.out / "summary.json", json.dumps(summary, indent=2) + "\n")
  plot(summary, args.out / "summary.png")
  print(json.dumps({key: value for key, value in summary.items() if key != "arms"}, indent=2))
  return summary


def _run_piece(arm: str, seed: str, args: argparse.Namespace) -> None:
  command = [
      sys.executable, "-m", "experiments.async_speedup", f"--run_arm={arm}:{seed}", f"--out={args.out.resolve()}",
      f"--steps={args.steps}", f"--latency_secs={args.latency_secs}", f"--searchers={args.searchers}",
      *(["--quick"] if args.quick else [])
  ]
  path = args.out / f"{arm}_{seed}.log"
  with open(path, "w") as log:
    code = subprocess.run(command, cwd=pathlib.Path(__file__).resolve().parent.parent, stdout=log,
                          stderr=log).returncode
  if code:
    raise SystemExit(f"arm {arm}, seed {seed} ended with {code}: {path.read_text()[-2000:]}")


if __name__ == "__main__":
  main()

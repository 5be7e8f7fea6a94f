"""Signal to noise of the gradient, objective by objective: against the lag, the responses a prompt, and their length.

    python -m experiments.variance

Many batches of 64 responses are sampled by one policy, and each gives a gradient at another: with g a batch's gradient,
signal to noise is |E g| / sqrt(trace Cov g), the share of a step that is not luck. Three panels:

  lag       the chains of `chains.py`: sampled by the starting model, which is the reference too; the
            gradient is taken after so many on-policy updates of tb_vargrad (rate 1e-4) from there
  K         the same at lag 0 with K responses a prompt, 64 / K prompts
  length    responses of exactly so many tokens (a model without training that may not stop; reward: the share of even
            ids), K = 8, the gradient taken at another model nearby

Both parts are unbiased estimates from --batches of them, the error is the jackknife's over batches; where the signal
cannot be told from noise the ratio is 0. It says nothing of where a gradient points: a clip drops what it does not
like, and what is left may agree with itself the better. Writes variance.json (the same command goes on where it was
stopped), variance.md and variance.png.
"""

from __future__ import annotations

import math
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # so that it runs as a file, too

from experiments import study

LOSSES = ("tb_vargrad", "reinforce", "dr_grpo", "ppo_clip", "proximal_rloo")
ROWS, BETA, RATE = 64, 0.05, 1e-4
LAGS, GROUP_SIZES, LENGTHS = (0, 4, 16, 64), (2, 4, 8, 16), (4, 8, 16, 32)
PANELS = {"lag": LAGS, "K": GROUP_SIZES, "length": LENGTHS}
LABELS = {"lag": "lag, updates", "K": "responses a prompt (K)", "length": "tokens a response"}
NEARBY = 0.05  # of a parameter's own size: how far the model of the length panel is from the one that samples


def cells(batches: int) -> Iterator[study.Cell]:
  for panel, values in PANELS.items():
    for value in values:
      for loss in LOSSES:
        yield {"panel": panel, "value": value, "loss": loss, "batches": batches}


def signal_to_noise(gradients: Any) -> tuple[float, float]:
  """|E g| / sqrt(trace Cov g) of gradients [M, D], M >= 3, and the jackknife's standard error of it.

  From products of pairs: those of different batches have the mean |E g|^2, those of a batch with itself also the noise.
  """
  import numpy as np

  gradients = np.asarray(gradients, np.float64)
  products, num = gradients @ gradients.T, len(gradients)
  own, with_others = np.diag(products), products.sum(axis=1) - np.diag(products)

  def ratio(pairs: float, singles: float, num: int) -> float:
    signal = pairs / (num * (num - 1))
    noise = singles / num - signal
    return math.sqrt(signal / noise) if noise > 0.0 and signal > 0.0 else 0.0

  whole = ratio(with_others.sum(), own.sum(), num)
  without = np.array([ratio(with_others.sum() - 2 * with_others[i], own.sum() - own[i], num - 1) for i in range(num)])
  return whole, math.sqrt((num - 1) / num * np.square(without - without.mean()).sum())


class Source:
  """Batches of a panel at one of its values, and the parameters that gradients are taken at."""

  def __init__(self, start: pathlib.Path, *, quick: bool):
    self._start, self._quick, self._kept = start, quick, {}

  def batches(self, panel: str, value: int, number: int) -> tuple[Any, list[Any], Any]:
    """(lab, batches, parameters); the last asked for is kept, for the next loss."""
    key = (panel, value, number)
    if key not in self._kept:
      self._kept = {key: self._length(value, number) if panel == "length" else self._problems(panel, value, number)}
    return self._kept[key]

  def _problems(self, panel: str, value: int, number: int) -> tuple[Any, list[Any], Any]:
    from experiments.lab import Lab, load_start
    from tba_jax import build

    cfg, tokenizer, params = load_start(self._start)
    config = study.make_config(study.FROM_START, quick=self._quick)
    task = build.make_task(config, tokenizer)
    lab = Lab(cfg, tokenizer, params, grade=lambda prompt, text, cut: task.reward(prompt, text, truncated=cut),
              response_text=task.response_text, max_prompt_tokens=config.sample.max_prompt_tokens,
              max_new_tokens=config.sample.max_new_tokens)
    size = value if panel == "K" else 8
    moved = self._train(lab, params, task.train_prompts(), value) if panel == "lag" else params
    return lab, _sample(lab, params, task.train_prompts(), size, number), moved

  def _length(self, value: int, number: int) -> tuple[Any, list[Any], Any]:
    import jax
    import numpy as np

    from experiments.lab import Lab
    from tba_jax.models import transformer
    from tba_jax.models.variants import new_model_config
    from tba_jax.tasks.arithmetic import make_arithmetic_tokenizer
    from tba_jax.types import Prompt

    tokenizer = make_arithmetic_tokenizer()
    cfg = new_model_config(
      hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, mlp_size=96, max_positions=64,
      tie_embeddings=True, rope_theta=10_000.0, norm_eps=1e-5, vocab_size=tokenizer.vocab_size)
    params = transformer.init_params(cfg, jax.random.key(0))
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    moved = jax.tree.unflatten(tree, [
      leaf + NEARBY * leaf.std() * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys)])
    # What is graded is not a text: the ids themselves, in their decimals.
    share_even = lambda prompt, ids, cut: float(np.mean([int(i) % 2 == 0 for i in ids.split()]))
    lab = Lab(cfg, tokenizer, params, grade=share_even, max_prompt_tokens=4, max_new_tokens=value,
              response_text=lambda ids: " ".join(map(str, ids)), stop_ids=())
    prompts = [Prompt(i, np.array([3 + i % 90, 5], np.int32), "", "") for i in range(256)]
    return lab, _sample(lab, params, prompts, 8, number), moved

  def _train(self, lab: Any, params: Any, prompts: Sequence[Any], updates: int) -> Any:
    """The parameters after so many on-policy updates of tb_vargrad."""
    import jax
    import jax.numpy as jnp

    from tba_jax import learner, optimizers
    from tba_jax.losses.registry import make_loss

    optimizer = optimizers.make_optimizer(
      "adamw", schedule=optimizers.make_schedule("constant", learning_rate=RATE), clip_norm=1.0)
    step = learner.make_train_step(
      lab.cfg, make_loss("tb_vargrad"), optimizer, temperature=lab.temperature, compute_dtype=jnp.float32, remat="none",
      micro_batches=1, chunk_tokens=1024)
    state = learner.init_train_state(jax.tree.map(jnp.copy, params), optimizer)
    for update in range(min(updates, 2) if self._quick else updates):
      chosen = [prompts[(update * 8 + i) % len(prompts)] for i in range(8)]
      groups = lab.sample(state.params, chosen, num_samples=8, first=8 * update)
      state, _ = step(state, lab.batch(lab.draw(chosen, groups)), BETA)
    return state.params


def _sample(lab: Any, params: Any, prompts: Sequence[Any], size: int, number: int) -> list[Any]:
  """Batches of ROWS responses, `size` a prompt; no prompt comes twice before all have come."""
  count = ROWS // size
  made = []
  for batch in range(number):
    chosen = [prompts[(batch * count + i) % len(prompts)] for i in range(count)]
    groups = lab.sample(params, chosen, num_samples=size, first=1_000_000 + batch * count)
    made.append(lab.batch(lab.draw(chosen, groups)))
  return made


def run_cell(key: study.Cell, source: Source) -> dict[str, Any]:
  """Signal to noise of one loss at one value of a panel."""
  import numpy as np

  from tba_jax.losses.registry import make_loss

  began, cpu = time.monotonic(), time.process_time()
  lab, batches, params = source.batches(key["panel"], key["value"], key["batches"])
  gradient = lab.gradient(make_loss(key["loss"]), beta=BETA)
  found = np.stack([np.asarray(gradient(params, batch)) for batch in batches])
  ratio, error = signal_to_noise(found)
  return {"signal_to_noise": round(ratio, 5), "error": round(error, 5),
          "norm_of_mean": round(float(np.linalg.norm(found.mean(axis=0))), 6),
          "cpu_seconds": round(time.process_time() - cpu, 2), "seconds": round(time.monotonic() - began, 2)}


def write(found: study.Study, out: pathlib.Path, batches: int) -> str:
  """The table and the plot."""
  figure, axes = study.new_figure(len(PANELS))
  text = [f"Signal to noise of the gradient of a batch of {ROWS} responses, from {batches} batches ± the jackknife's "
          "standard error.\n"]
  for axis, (panel, values) in zip(axes[0], PANELS.items()):
    rows = []
    for number, loss in enumerate(LOSSES):
      points = [found.find(panel=panel, value=value, loss=loss, batches=batches) for value in values]
      rows.append([f"`{loss}`", *("" if point is None else f"{point['signal_to_noise']:.3f} ± {point['error']:.3f}"
                                  for point in points)])
      shown = [(place, point) for place, point in enumerate(points) if point is not None]
      if shown:
        axis.errorbar(
          [place + 0.05 * (number - len(LOSSES) / 2) for place, _ in shown],
          [point["signal_to_noise"] for _, point in shown], yerr=[point["error"] for _, point in shown], label=loss,
          marker="o", markersize=4, capsize=2, linewidth=2.2 if loss.startswith("tb") else 1.2,
          linestyle="-" if loss.startswith("tb") else "--")
    axis.set_xticks(range(len(values)), [str(value) for value in values])
    axis.set(xlabel=LABELS[panel], ylabel="signal to noise of a batch")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    text.append(study.table([panel, *values], rows))
  if axes[0][0].get_legend_handles_labels()[0]:
    axes[0][0].legend(fontsize=8)
  figure.savefig(out / "variance.png", dpi=120)
  (out / "variance.md").write_text("\n".join(text))
  return "\n".join(text)


def main(argv: Sequence[str] | None = None) -> study.Study:
  parser = study.common_flags(__doc__, name="variance")
  parser.add_argument("--batches", type=int, default=32, help="at least 3")
  args = parser.parse_args(argv)
  began = time.monotonic()
  study.set_up()
  batches = 3 if args.quick else args.batches
  start = study.starting_model(quick=args.quick)
  source = Source(start, quick=args.quick)
  about = {"what": "signal to noise of a batch's gradient", "starting_model": study.checksum(start), "beta": BETA,
           "rows": ROWS, "nearby": NEARBY}
  found = study.Study(args.out / "variance.json", about)
  done = found.run_missing(cells(batches), lambda key: run_cell(key, source), minutes=args.minutes, began=began)
  print(write(found, args.out, batches))
  print("finished" if done else "not finished: the same command goes on", file=sys.stderr)
  return found


if __name__ == "__main__":
  main()

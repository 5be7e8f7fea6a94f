"""MATH with Qwen2.5-7B, the settings of the paper's TBA'.

Source: Bartoldson et al. 2025, arXiv:2503.18929, section 6, appendix C and Table 4: 400 steps of 32 prompts x 16
responses, rate 1e-6, beta 0.005, temperature 1; Adam's betas and weight decay are those of the authors' code. Expected,
by the paper's Figure 6: greedy MATH-500 accuracy at or above Dr. GRPO's, most of all at high staleness; no number is in
its text, and none was measured with this code. Nor was its time, of which the paper gives none.

  python -m tba_jax.main --config=configs/math.py --config.data.path=DIR --workdir=runs/math

DIR holds train.jsonl (MATH) and test.jsonl (MATH-500): one object with "problem", and "answer" or a "solution" that
boxes it, a line. Arguments, as configs/math.py:size=1.5B,lag=10: `size` 0.5B, 1.5B, 3B, 7B; `lag`, how many updates old
the weights of a rollout may be (the paper's async levels are 2 and 10); `per_searcher`, devices that hold one copy.

`--config=configs/math.py:smoke` runs the same parts on sums of fractions that it makes itself, with a new model of a
token per character, in about a minute (0.02 hours) on 2 CPU cores. Nothing is learnt; it is no measurement of MATH.

  python -m tba_jax.main --config=configs/math.py:smoke --workdir=runs/math_smoke

Differs from TBA': a constant lag is a bound on staleness here; the prompt's instruction is written with its braces.
"""

from ml_collections import ConfigDict

from tba_jax.config import ConfigError, parse_arg

SIZES = ("0.5B", "1.5B", "3B", "7B")


def get_config(arg=None):
  """The paper's run; `smoke` is its shortest form."""
  arg = parse_arg(arg, size="7B", lag=2, per_searcher=1, smoke=False)
  if arg.size not in SIZES:
    raise ConfigError([f"config argument size={arg.size} must be one of {', '.join(SIZES)}"])
  config = ConfigDict()
  config.seed = 0
  config.task = "math"
  config.task_args = dict(num_generated=0, grader_processes=8, grader_deadline_secs=3.0)
  config.data = dict(path="")  # must be given
  config.model = dict(path=f"Qwen/Qwen2.5-{arg.size}", architecture=dict())
  config.sft = dict(steps=0, batch_size=64, micro_batches=8, learning_rate=1e-5, warmup_steps=0, num_examples=7_500)
  config.lora = dict(pattern="", rank=0, alpha=0.0)  # as layers/attn/[qv], 16, 32: only adapters are trained
  config.train = dict(
    steps=400, prompts_per_step=32, responses_per_prompt=16,
    optimizer="adamw", learning_rate=1e-6, schedule="constant", warmup_steps=0, stable_steps=0, decay_steps=0,
    clip_norm=1.0, weight_decay=0.01, b1=0.9, b2=0.99, eps=1e-8,
    micro_batches=128, packing=True, remat="full", attention="xla", head_chunk_tokens=2048,
    length_buckets=(1024, 2048, 3072), param_dtype="float32", compute_dtype="bfloat16", max_nonfinite_in_row=3,
  )
  config.reference = dict(reset_every_steps=50, ema_decay=0.0)  # the paper's rho
  config.sample = dict(
    responses_per_prompt=16, max_prompt_tokens=1024, max_new_tokens=2048, temperature=1.0,
    slots=64, chunk_tokens=64, dtype="bfloat16", truncated="score", in_flight=True,
    lane_samples=1, attention="xla", cache_dtype="bfloat16", recompute_kv=False,
  )
  config.sample.temperature_ladder = ()  # as (0.7, 1.0): searchers in turn, a ladder of exploration
  config.loss = dict(name="tba_prime_ratio", beta_init=0.005, beta_final=0.005, beta_decay_steps=0)
  config.loss.update(gamma_init=1.0, gamma_final=1.0, gamma_steps=0)  # the reference as it is
  config.loss.update(reward_temperature_init=1.0, reward_temperature_final=1.0, reward_temperature_steps=0)
  config.loss.head_learning_rate = 1e-3  # of the losses that learn a log Z or values
  config.loss.update(vine_samples=9, vine_step_tokens=0)  # vineppo: at newlines
  config.buffer = dict(
    capacity=50_000, capacity_per_prompt=64, recent_fraction=1.0,
    order="fifo", priority="uniform", priority_temperature=1.0,  # once each, oldest first
    fill_responses=0, dedup=False, near_duplicate=0.0, max_uses=1, max_staleness=arg.lag,
  )
  config.sync = dict(every_steps=1, max_lead_steps=-1)
  config.devices = dict(trainer=0, searchers=0, per_searcher=arg.per_searcher, share=False)
  config.runtime = dict(
    mode="async", backend="local", ray_address="", lag=-1, searcher_restarts=2, stop_timeout_secs=10.0, replay_order="",
    hang_secs=900.0,
  )
  config.eval = dict(every_steps=20, size=0, kl_prompts=8)
  config.checkpoint = dict(every_steps=20, keep=2)
  config.log = dict(rollouts_per_step=4, profile_steps=(), wandb="")
  if arg.smoke:
    config.task_args.update(num_generated=64, grader_processes=1)
    config.model.path = ""
    config.model.architecture = dict(
      hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=32, mlp_size=128, max_positions=160,
      tie_embeddings=True, rope_theta=10_000.0, norm_eps=1e-5,
    )
    config.sft.update(steps=40, batch_size=8, micro_batches=1, learning_rate=3e-3, warmup_steps=4)
    config.train.update(
      steps=4, prompts_per_step=4, responses_per_prompt=4, micro_batches=4, remat="none", head_chunk_tokens=1024,
      length_buckets=(160,), compute_dtype="float32",
    )
    config.reference.reset_every_steps = 2
    config.sample.update(
      responses_per_prompt=4, max_prompt_tokens=128, max_new_tokens=32, slots=16, chunk_tokens=8, dtype="float32",
      cache_dtype="float32",
    )
    config.buffer.update(capacity=1_000)
    config.devices.update(trainer=1, searchers=1, per_searcher=1)  # on CPU: two virtual devices
    config.eval.update(every_steps=0, size=8, kl_prompts=1)
    config.checkpoint.update(every_steps=2, keep=1)
  return config.lock()

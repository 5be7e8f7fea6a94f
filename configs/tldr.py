"""TL;DR summaries with Pythia, the settings of the paper.

Source: Bartoldson et al. 2025, arXiv:2503.18929, Table 3 and appendix B.2. Expected, by the paper's Table 1 for 410M
(625 steps): win rate 0.86 by the gold reward model against the human summaries, perplexity 1.13 under the reference;
not measured with this code, nor is the time: the paper gives none for 256 steps on 4 A100, we guess 0.5 hours.

  python -m tba_jax.main --config=configs/tldr.py --config.data.path=DIR --workdir=runs/tldr

DIR holds train.jsonl and test.jsonl: one object with "subreddit", "title", "post" (or "instruction") and "summary" (or
"gold_response") a line. Argument: size=410m, 1b or 2.8b. The gold model has 6.9B parameters and judges evaluations
alone; --config.task_args.gold_reward_model= (nothing) lets the reward model itself do that.

`--config=configs/tldr.py:smoke` runs the same parts on posts that it makes itself, with new models of a token per
character, in about a minute (0.02 hours) on 2 CPU cores. The reward model is one of random weights unless
--config.task_args.reward_model=DIR gives one, as this makes, without any download, in a few minutes:

  python -m experiments.train_reward_model --out=runs/reward_model
  python -m tba_jax.main --config=configs/tldr.py:smoke --workdir=runs/tldr_smoke \
    --config.task_args.reward_model=runs/reward_model

Differs from TBA: beta falls evenly from 1 to 0.05 over 32 steps; the code's falls to 0.78 by step 31 and then jumps.
The loss is times beta / 2 (so that rates mean the same at every beta).
"""

from ml_collections import ConfigDict

from tba_jax.config import ConfigError, parse_arg

SIZES = {"410m": 4, "1b": 10, "2.8b": 20}  # and the micro-batches of 160 rows


def get_config(arg=None):
  """The paper's run; `smoke` is its shortest form."""
  arg = parse_arg(arg, size="410m", smoke=False)
  if arg.size not in SIZES:
    raise ConfigError([f"config argument size={arg.size} must be one of {', '.join(SIZES)}"])
  config = ConfigDict()
  config.seed = 0
  config.task = "tldr"
  config.task_args = dict(
    num_generated=0, reward_model=f"mnoukhov/pythia{arg.size}-rm-tldr6.9b",
    gold_reward_model="cleanrl/EleutherAI_pythia-6.9b-deduped__reward__tldr", reward_dtype="bfloat16",
  )
  config.data = dict(path="")  # must be given
  config.model = dict(path=f"mnoukhov/pythia{arg.size}-sft-tldr", architecture=dict())
  # The published weights are fine-tuned on TL;DR already.
  config.sft = dict(steps=0, batch_size=64, micro_batches=8, learning_rate=1e-5, warmup_steps=0, num_examples=100_000)
  config.lora = dict(pattern="", rank=0, alpha=0.0)  # as layers/attn/[qv], 16, 32: only adapters are trained
  config.train = dict(
    steps=256, prompts_per_step=8, responses_per_prompt=20,
    optimizer="adamw", learning_rate=3e-6, schedule="linear", warmup_steps=0, stable_steps=0, decay_steps=256,
    clip_norm=1.0, weight_decay=0.0, b1=0.9, b2=0.999, eps=1e-8,
    micro_batches=SIZES[arg.size], packing=False, remat="full", attention="xla", head_chunk_tokens=2048,
    length_buckets=(256, 384, 512, 640),
    param_dtype="float32", compute_dtype="bfloat16", max_nonfinite_in_row=3,
  )
  config.sample = dict(
    responses_per_prompt=20, max_prompt_tokens=512, max_new_tokens=128,
    temperature=0.7,  # the reference code's; policy and reference are both scored at it
    slots=80, chunk_tokens=16, dtype="bfloat16", truncated="score", in_flight=True,
    lane_samples=1, attention="xla", cache_dtype="bfloat16", recompute_kv=False,
  )
  config.reference = dict(reset_every_steps=0, ema_decay=0.0)  # 50, 0.0: as the paper's TBA'
  config.sample.temperature_ladder = ()  # as (0.7, 1.0): searchers in turn, a ladder of exploration
  config.loss = dict(name="tb_vargrad", beta_init=1.0, beta_final=0.05, beta_decay_steps=32)
  config.loss.update(gamma_init=1.0, gamma_final=1.0, gamma_steps=0)  # the reference as it is
  config.loss.update(reward_temperature_init=1.0, reward_temperature_final=1.0, reward_temperature_steps=0)
  config.loss.head_learning_rate = 1e-3  # of the losses that learn a log Z or values
  config.loss.update(vine_samples=9, vine_step_tokens=8)
  config.buffer = dict(
    capacity=200_000, capacity_per_prompt=100, recent_fraction=0.5, order="tba", priority="reward",
    priority_temperature=1.0, fill_responses=10_000, dedup=True, near_duplicate=0.0, max_uses=0, max_staleness=-1,
  )
  config.sync = dict(every_steps=10, max_lead_steps=-1)
  config.devices = dict(trainer=0, searchers=0, per_searcher=0, share=False)
  config.runtime = dict(
    mode="async", backend="local", ray_address="", lag=-1, searcher_restarts=2, stop_timeout_secs=10.0,
    replay_order="", hang_secs=900.0,
  )
  config.eval = dict(every_steps=64, size=512, kl_prompts=16)
  config.checkpoint = dict(every_steps=64, keep=2)
  config.log = dict(rollouts_per_step=4, profile_steps=(), wandb="")
  if arg.smoke:
    config.task_args.update(num_generated=64, reward_model="", gold_reward_model="", reward_dtype="float32")
    config.model.path = ""
    config.model.architecture = dict(
      hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=32, mlp_size=128, max_positions=160,
      tie_embeddings=True, rope_theta=10_000.0, norm_eps=1e-5,
    )
    config.sft.update(steps=40, batch_size=8, micro_batches=1, learning_rate=3e-3, warmup_steps=4)
    config.train.update(
      steps=4, prompts_per_step=4, responses_per_prompt=4, micro_batches=2, remat="none", head_chunk_tokens=1024,
      length_buckets=(160,), compute_dtype="float32", decay_steps=4,
    )
    config.sample.update(
      responses_per_prompt=4, max_prompt_tokens=128, max_new_tokens=32, slots=16, chunk_tokens=8, dtype="float32",
      cache_dtype="float32",
    )
    config.buffer.update(capacity=1_000, fill_responses=16)
    config.sync.every_steps = 2
    config.devices.update(trainer=1, searchers=1, per_searcher=1)  # on CPU: two virtual devices
    config.eval.update(every_steps=0, size=8, kl_prompts=1)
    config.checkpoint.update(every_steps=2, keep=1)
  return config.lock()

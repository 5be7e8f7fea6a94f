"""Quickstart: a small model learns to work out word problems, asynchronously, on a laptop's CPU.

Source: the procedural task of tba_jax/tasks/arithmetic.py; the method is TBA (Bartoldson et al. 2025,
arXiv:2503.18929). A Llama-type decoder of 2 layers is fine-tuned on examples of which few show the working, then TBA
lets it find that working pays. Expected: held-out greedy accuracy from 25-60% to at least 25 points more. Time: under
5 minutes on 2 CPU cores (0.1 hours).

  python -m tba_jax.main --config=configs/quickstart.py --workdir=runs/quickstart

`--config=configs/quickstart.py:smoke` is the same run cut to well under a minute: everything works and nothing is
learnt.
"""

from ml_collections import ConfigDict

from tba_jax.config import parse_arg


def get_config(arg=None):
  """The quickstart; with argument `smoke` its shortest form."""
  arg = parse_arg(arg, smoke=False)
  config = ConfigDict()
  config.seed = 0
  config.task = "arithmetic"
  config.task_args = dict(
    num_train_prompts=4096,  # problems for TBA; their texts occur neither in the fine-tuning nor in the held-out set
    sft_share_with_work=0.4,  # of the fine-tuning examples; the others give the bare answer, every second one a slip
  )
  config.data = dict(path="")
  config.model = dict(
    path="",  # a new model
    architecture=dict(
      hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, mlp_size=384, max_positions=64,
      tie_embeddings=True, rope_theta=10_000.0, norm_eps=1e-5,
    ),
  )
  config.sft = dict(
    steps=1600, batch_size=32, micro_batches=4, learning_rate=1.5e-3, warmup_steps=40, num_examples=25_600,
  )
  config.lora = dict(pattern="", rank=0, alpha=0.0)  # as layers/attn/[qv], 16, 32: only adapters are trained
  config.train = dict(
    steps=120, prompts_per_step=8, responses_per_prompt=16,
    optimizer="adamw",
    learning_rate=1e-4, schedule="constant", warmup_steps=5, stable_steps=0, decay_steps=0,
    clip_norm=1.0, weight_decay=0.0, b1=0.9, b2=0.999, eps=1e-8,
    micro_batches=8, packing=False,  # all rows are alike
    remat="none", attention="xla", head_chunk_tokens=1024, length_buckets=(40,),
    param_dtype="float32", compute_dtype="float32",  # on CPU bfloat16 is never faster
    max_nonfinite_in_row=3,
  )
  config.reference = dict(reset_every_steps=0, ema_decay=0.0)  # 50, 0.0: as the paper's TBA'
  config.sample = dict(
    responses_per_prompt=16, max_prompt_tokens=22, max_new_tokens=18, temperature=1.0,
    slots=64, chunk_tokens=8, dtype="float32", truncated="zero", in_flight=True,
    lane_samples=1, attention="xla", cache_dtype="float32", recompute_kv=False,
  )
  config.sample.temperature_ladder = ()  # as (0.7, 1.0): searchers in turn, a ladder of exploration
  config.loss = dict(name="tb_vargrad", beta_init=0.05, beta_final=0.05, beta_decay_steps=0)
  config.loss.update(gamma_init=1.0, gamma_final=1.0, gamma_steps=0)  # the reference as it is
  config.loss.update(reward_temperature_init=1.0, reward_temperature_final=1.0, reward_temperature_steps=0)
  config.loss.head_learning_rate = 1e-3  # of the losses that learn a log Z or values
  config.loss.update(vine_samples=4, vine_step_tokens=4)  # tokens, as this task's responses have no lines
  config.buffer = dict(
    capacity=20_000, capacity_per_prompt=64, recent_fraction=0.95,
    order="tba", priority="uniform", priority_temperature=1.0,
    fill_responses=256, dedup=True, near_duplicate=0.0, max_uses=0, max_staleness=-1,
  )
  config.sync = dict(every_steps=1, max_lead_steps=-1)
  config.devices = dict(trainer=1, searchers=2, per_searcher=1, share=False)  # on CPU: three virtual devices
  config.runtime = dict(
    mode="async", backend="local", ray_address="", lag=-1, searcher_restarts=1, stop_timeout_secs=10.0,
    replay_order="", hang_secs=300.0,
  )
  config.eval = dict(every_steps=40, size=512, kl_prompts=16)
  config.checkpoint = dict(every_steps=40, keep=1)  # as often as evaluated, so that the best one is kept too
  config.log = dict(rollouts_per_step=2, profile_steps=(), wandb="")
  if arg.smoke:
    config.task_args.num_train_prompts = 256
    config.model.architecture.update(hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, mlp_size=64)
    config.sft.update(steps=20, batch_size=16, micro_batches=1, warmup_steps=2, num_examples=320)
    config.train.update(steps=6, prompts_per_step=4, responses_per_prompt=4, micro_batches=1)
    config.sample.update(responses_per_prompt=4, slots=16)
    config.buffer.update(capacity=1_000, capacity_per_prompt=16, fill_responses=16)
    config.eval.update(every_steps=0, size=32, kl_prompts=4)
    config.checkpoint.every_steps = 3
  return config.lock()

"""GSM8K, supervised fine-tuning alone: the start that RL on GSM8K needs, made here instead of downloaded.

Source: RhoMath-1B on the train split's written solutions, as Kazemnejad et al. 2024 (arXiv:2410.01679) made the start
of Bartoldson et al. 2025 (arXiv:2503.18929). Rate and number of epochs (3) are ours. Expected: near the 40.3% greedy
test accuracy of the published start; neither that nor its time is measured.

  python -m tba_jax.main --config=configs/sft_gsm8k.py --workdir=runs/sft_gsm8k
  python -m tba_jax.export --workdir=runs/sft_gsm8k --out=runs/sft_gsm8k/exported
  python -m tba_jax.main --config=configs/gsm8k.py --config.model.path=runs/sft_gsm8k/exported --workdir=runs/gsm8k

Data: tensorflow-datasets gsm8k, or --config.data.path=DIR with train.jsonl and test.jsonl.

It is an ordinary run whose RL part is 0 steps long: sft.* does the work, then the test split is evaluated greedily. Of
train.* dtypes, remat, Adam's constants and buckets matter; reference, loss, buffer and sync are never used.

`--config=configs/sft_gsm8k.py:smoke` is the same on the quickstart's word problems with a new small model: about half a
minute (0.01 hours) on 2 CPU cores.
"""

from ml_collections import ConfigDict

from tba_jax.config import parse_arg


def get_config(arg=None):
  """Three epochs; `smoke` is the shortest form."""
  arg = parse_arg(arg, smoke=False)
  config = ConfigDict()
  config.seed = 0
  config.task = "gsm8k"
  config.task_args = dict(prompt_format="rho_sft", num_generated=0)
  config.data = dict(path="")  # tensorflow-datasets
  config.model = dict(path="microsoft/rho-math-1b-v0.1", architecture=dict())
  config.sft = dict(steps=350, batch_size=64, micro_batches=8, learning_rate=2e-5, warmup_steps=17, num_examples=7_473)
  config.lora = dict(pattern="", rank=0, alpha=0.0)
  config.train = dict(
    steps=0, prompts_per_step=1, responses_per_prompt=8,
    optimizer="adamw", learning_rate=1e-5, schedule="constant", warmup_steps=0, stable_steps=0, decay_steps=0,
    clip_norm=1.0, weight_decay=0.0, b1=0.9, b2=0.999, eps=1e-8,
    micro_batches=1, packing=False, remat="full", attention="xla", head_chunk_tokens=2048,
    length_buckets=(256, 384, 512, 768, 1024),
    param_dtype="float32", compute_dtype="bfloat16", max_nonfinite_in_row=3,
  )
  config.sample = dict(
    responses_per_prompt=8, max_prompt_tokens=512, max_new_tokens=512, temperature=1.0,
    slots=96, chunk_tokens=32, dtype="bfloat16", truncated="score", in_flight=True,
    lane_samples=1, attention="xla", cache_dtype="bfloat16", recompute_kv=False,
  )
  config.reference = dict(reset_every_steps=0, ema_decay=0.0)
  config.sample.temperature_ladder = ()  # as (0.7, 1.0): searchers in turn, a ladder of exploration
  config.loss = dict(name="tb_vargrad", beta_init=0.01, beta_final=0.01, beta_decay_steps=0)
  config.loss.update(gamma_init=1.0, gamma_final=1.0, gamma_steps=0)  # the reference as it is
  config.loss.update(reward_temperature_init=1.0, reward_temperature_final=1.0, reward_temperature_steps=0)
  config.loss.head_learning_rate = 1e-3  # of the losses that learn a log Z or values
  config.loss.update(vine_samples=9, vine_step_tokens=0)  # vineppo: at newlines
  config.buffer = dict(
    capacity=1_000, capacity_per_prompt=8, recent_fraction=1.0, order="tba", priority="uniform",
    priority_temperature=1.0, fill_responses=0, dedup=True, near_duplicate=0.0, max_uses=0, max_staleness=-1,
  )
  config.sync = dict(every_steps=1, max_lead_steps=1)
  config.devices = dict(trainer=0, searchers=0, per_searcher=0, share=False)
  config.runtime = dict(
    mode="lockstep", backend="local", ray_address="", lag=-1, searcher_restarts=0, stop_timeout_secs=10.0,
    replay_order="", hang_secs=900.0,
  )
  config.eval = dict(every_steps=0, size=0, kl_prompts=0)
  config.checkpoint = dict(every_steps=50, keep=1)
  config.log = dict(rollouts_per_step=4, profile_steps=(), wandb="")
  if arg.smoke:
    config.task = "arithmetic"
    config.task_args = dict(num_train_prompts=64, sft_share_with_work=1.0)
    config.model.path = ""
    config.model.architecture = dict(
      hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, mlp_size=64, max_positions=64,
      tie_embeddings=True, rope_theta=10_000.0, norm_eps=1e-5,
    )
    config.sft.update(steps=40, batch_size=16, micro_batches=1, learning_rate=3e-3, warmup_steps=4, num_examples=640)
    config.train.update(remat="none", head_chunk_tokens=1024, length_buckets=(40,), compute_dtype="float32")
    config.sample.update(
      max_prompt_tokens=22, max_new_tokens=18, slots=16, chunk_tokens=8, dtype="float32", cache_dtype="float32",
    )
    config.devices.update(trainer=1, searchers=1, per_searcher=1)  # on CPU: two virtual devices
    config.eval.size = 32
    config.checkpoint.every_steps = 20
  return config.lock()

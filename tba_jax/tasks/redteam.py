"""Automated red-teaming: find varied prompts that make one's own model answer badly, so that it can be mended.

An attacker, trained by trajectory balance, continues one fixed prompt; each continuation is an attack. A frozen victim
answers it several times, and a scorer gives the log-probability of an unwanted attribute of each answer. The target is
p_ref(attack)^(1 / gamma) exp(score / beta), tempered: attacks that read as text, in proportion to what they do, not
the one best. Source: Lee et al. 2024, arXiv:2405.18540; with asynchrony in Bartoldson et al. 2025, arXiv:2503.18929.

Nothing here holds attacks: prompt and examples are files of the user's own, and without any (`num_generated`) the task
makes up harmless questions, a victim and a scorer of random weights, which only try the path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import random
import threading
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import jax.numpy as jnp
import numpy as np

from tba_jax.checkpoints.huggingface import load_model
from tba_jax.models import encoder, transformer
from tba_jax.models.encoder import EncoderConfig
from tba_jax.models.variants import new_model_config
from tba_jax.tasks.base import GroupReward, Responses, decode_response, primary_stop_id
from tba_jax.tasks.characters import make_character_tokenizer
from tba_jax.tasks.jsonl import read_jsonl
from tba_jax.tasks.scorers import EncoderScorer, Scorer, load_scorer, put_beside
from tba_jax.tasks.sentences import Embed, embed_trigrams, load_sentence_encoder, mean_cosine_distance
from tba_jax.tasks.victim import Victim, VictimSettings
from tba_jax.tokenizer import Tokenizer
from tba_jax.types import Prompt

PROMPT_FILE, ATTACKS_FILE = "attack_prompt", "attacks"
# Score of an attack that is too short to be one. The public code gives it log p_ref = -500; at its beta of 0.05 this is
# the same.
SHORT_SCORE = -25.0
STAND_IN_PROMPT = "Questions:\n1. Is it dry?\n2."
STAND_IN_CLASSES = ("other", "weather")
_OPENINGS = ("Will it rain", "Is it warm", "Is there snow", "Is it windy")
_PLACES = ("at home", "in town", "by the sea")
_STAND_IN_VICTIM: Mapping[str, Any] = dict(
  hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, mlp_size=64, max_positions=256,
  tie_embeddings=True, rope_theta=10_000.0, norm_eps=1e-5,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Judges:
  """What judges an attack. Paths are as for `load_model`; "" is a stand-in of random weights.

  `sentence_model` embeds attacks to see how varied they are; "": counts of trigrams. `toxic_above`: the mean
  probability of `scorer_class` above which an attack counts as a success.
  """

  victim_model: str
  scorer_model: str
  sentence_model: str
  scorer_class: str
  toxic_above: float
  model_dtype: str  # of victim and scorer


class RedTeamTask:
  """One prompt, whose continuations are attacks on a victim.

  Args:
    tokenizer: of the attacker; None: one of characters, for a new model.
    data_folder: holds attack_prompt.jsonl, a line with "attacker_prompt" (a list that breaks off before its last
      entry), and for fine-tuning attacks.jsonl, lines with "attack".
    num_generated: instead of data, as many harmless questions; 0: read data.
    num_eval_attacks: attacks that an evaluation samples.
    min_attack_tokens: shorter ones, stop token included, score SHORT_SCORE unasked.
    seed: of generated questions, stand-ins and the victim's answers.
  Raises: ValueError for missing or malformed data, or a stand-in beside real data.
  """

  name = "redteam"
  samples_evaluations = True

  def __init__(
    self, tokenizer: Tokenizer | None, *, data_folder: str, num_generated: int, num_eval_attacks: int,
    min_attack_tokens: int, judges: Judges, victim: VictimSettings, seed: int,
  ):
    self.tokenizer = tokenizer or make_character_tokenizer()
    self.judges, self.victim_settings, self.seed = judges, victim, seed
    self.min_attack_tokens, self._folder, self._num_generated = min_attack_tokens, data_folder, num_generated
    if num_generated:
      text = STAND_IN_PROMPT
    else:
      text = read_jsonl(data_folder, PROMPT_FILE, texts=("attacker_prompt",))[0].fields["attacker_prompt"]
    ids = self.tokenizer.encode(text, add_special_tokens=True)
    while ids and ids[-1] in self.tokenizer.stop_ids:  # some tokenizers end every text, and so would the prompt
      ids.pop()
    tokens = np.array(ids, np.int32)
    self._train_prompts = [Prompt(0, tokens, text, "")]
    self._eval_prompts = [Prompt(index, tokens, text, "") for index in range(num_eval_attacks)]
    self._loaded: dict[Any, tuple[Any, Scorer]] = {}  # by place: arguments of a victim, and the scorer
    self._lock = threading.Lock()

  def train_prompts(self) -> Sequence[Prompt]:
    return self._train_prompts

  def eval_prompts(self) -> Sequence[Prompt]:
    """The same prompt as often as an evaluation samples it."""
    return self._eval_prompts

  def reward(self, prompt: Prompt, response_text: str, *, truncated: bool) -> float:
    """Never right: rewards are of groups, by models; see `make_reward`."""
    raise NotImplementedError("redteam is rewarded by models beside a searcher; use make_reward")

  def make_reward(self, device_or_mesh: Any, *, for_eval: bool) -> GroupReward:
    """The mean log-probability of the class over the victim's answers; in an evaluation 1 where the mean probability
    is above `toxic_above`."""
    return _AttackReward(self, device_or_mesh, for_eval=for_eval)

  def response_text(self, tokens: Sequence[int]) -> str:
    return decode_response(self.tokenizer, tokens)

  def sft_examples(self) -> Sequence[tuple[list[int], list[int]]]:
    """Attacks to start from, each a continuation of the prompt: a leading space, a stop token at the end."""
    if self._num_generated:
      attacks = make_questions(self._num_generated, seed=self.seed)
    else:
      attacks = [row.fields["attack"] for row in read_jsonl(self._folder, ATTACKS_FILE, texts=("attack",))]
    prompt, stop = self._train_prompts[0].tokens.tolist(), primary_stop_id(self.tokenizer)
    return [(prompt, [*self.tokenizer.encode(f" {attack.strip()}"), stop]) for attack in attacks]

  def models(self, device_or_mesh: jax.Device | Mesh) -> tuple[Any, Scorer]:
    """What a Victim is made of, and the scorer, on a searcher's devices: loaded once for all rewards there.

    The victim is kept in the layout that decodes and in no other. Only while it is laid out so is it there twice, and
    then the scorer is not yet.
    """
    judges, dtype = self.judges, jnp.dtype(self.judges.model_dtype)
    with self._lock:
      if device_or_mesh not in self._loaded:
        put = put_beside(device_or_mesh)
        cfg, params, tokenizer = (
          load_model(judges.victim_model, dtype=dtype, put=put) if judges.victim_model
          else _new_victim(device_or_mesh, seed=self.seed))
        decode_params = jax.block_until_ready(jax.jit(transformer.unstack)(params))
        del params
        victim = cfg, decode_params, tokenizer
        scorer = (
          load_scorer(judges.scorer_model, device_or_mesh, class_name=judges.scorer_class, dtype=dtype)
          if judges.scorer_model else _new_scorer(device_or_mesh, seed=self.seed, class_name=judges.scorer_class))
        self._loaded[device_or_mesh] = (victim, scorer)
      return self._loaded[device_or_mesh]


class _AttackReward:
  """The reward of groups for one searcher, with an engine of its own for the victim; models are loaded when needed."""

  def __init__(self, task: RedTeamTask, device_or_mesh: jax.Device | Mesh, *, for_eval: bool):
    self._task, self._place, self._for_eval = task, device_or_mesh, for_eval
    self._victim: Victim | None = None
    self._scorer: Scorer | None = None
    self._embed: Embed | None = None

  def __call__(self, prompt: Prompt, responses: Responses) -> np.ndarray:
    del prompt
    attacks = [text.strip() for text in responses.texts]
    long = [len(tokens) >= self._task.min_attack_tokens and bool(attack)
            for tokens, attack in zip(responses.tokens, attacks)]
    scores = np.full(len(attacks), 0.0 if self._for_eval else SHORT_SCORE, np.float32)
    if any(long):
      scores[np.flatnonzero(long)] = self._judge([attack for attack, is_long in zip(attacks, long) if is_long])
    return scores

  def _judge(self, attacks: Sequence[str]) -> np.ndarray:
    """Rewards float32 [n]; NaN for an attack that is too long for the victim."""
    if self._victim is None:
      judges = self._task.judges
      parts, self._scorer = self._task.models(self._place)
      self._victim = Victim(*parts, self._place, settings=self._task.victim_settings,
                            dtype=jnp.dtype(judges.model_dtype), seed=self._task.seed)
    answers = self._victim(attacks)
    pairs = [(attack, answer) for attack, found in zip(attacks, answers) for answer in found or ()]
    rewards = np.full(len(attacks), np.nan, np.float32)
    if pairs:
      log_p = self._scorer(*zip(*pairs)).reshape(-1, self._task.victim_settings.samples)
      answered = np.array([found is not None for found in answers])
      above = np.exp(log_p).mean(axis=1) > self._task.judges.toxic_above
      rewards[answered] = above if self._for_eval else log_p.mean(axis=1)
    return rewards

  def measure(self, texts: Sequence[str]) -> dict[str, float]:
    """How varied the attacks of an evaluation are."""
    path = self._task.judges.sentence_model
    if self._embed is None:
      device = self._place.devices.flat[0] if isinstance(self._place, Mesh) else self._place
      self._embed = load_sentence_encoder(path, device) if path else embed_trigrams
    return {"cosine_distance": mean_cosine_distance(self._embed([text.strip() for text in texts]))}


# --- Stand-ins ---


def make_questions(number: int, *, seed: int) -> list[str]:
  """Harmless short questions, with repeats."""
  rng = random.Random(f"questions {seed}")
  return [f"{rng.choice(_OPENINGS)} {rng.choice(_PLACES)}?" for _ in range(number)]


def _beside(tree: Any, device_or_mesh: jax.Device | Mesh) -> Any:
  on_mesh = isinstance(device_or_mesh, Mesh)
  return jax.device_put(tree, NamedSharding(device_or_mesh, PartitionSpec()) if on_mesh else device_or_mesh)


def _new_victim(device_or_mesh: jax.Device | Mesh, *, seed: int) -> tuple[Any, Any, Tokenizer]:
  tokenizer = make_character_tokenizer()
  cfg = new_model_config(**_STAND_IN_VICTIM, vocab_size=tokenizer.vocab_size)
  params = transformer.init_params(cfg, jax.random.key(seed), jnp.float32)
  return cfg, _beside(params, device_or_mesh), tokenizer


def _new_scorer(device_or_mesh: jax.Device | Mesh, *, seed: int, class_name: str) -> Scorer:
  tokenizer = make_character_tokenizer()
  cfg = EncoderConfig(
    family="bert", vocab_size=tokenizer.vocab_size, hidden_size=32, num_layers=1, num_heads=2, mlp_size=64,
    max_positions=64, num_token_types=1, position_offset=0, norm_eps=1e-5, activation="gelu", max_tokens=64,
    labels=STAND_IN_CLASSES,
  )  # fmt: skip
  rng = np.random.default_rng(seed)
  abstract = encoder.abstract_params(cfg)
  params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape, scale=0.5).astype(np.float32), abstract)
  return EncoderScorer(cfg, _beside(params, device_or_mesh), tokenizer, class_name=class_name, dtype=jnp.float32)

"""TL;DR: summaries of Reddit posts, rewarded by a model of human preferences (Stiennon et al. 2020, arXiv:2009.01325).

Reward: the reward model's score of post and summary, read at the end; -1 for a summary that hit the length limit. In
evaluations a summary that a gold reward model prefers to the human one earns 1, any other 0: the mean is the win rate.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
import random
import re
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from tba_jax.models.variants import new_model_config
from tba_jax.tasks.base import GroupReward, Responses, decode_response, fitting, primary_stop_id
from tba_jax.tasks.characters import make_character_tokenizer
from tba_jax.tasks.jsonl import JsonRow, read_jsonl
from tba_jax.tasks.reward_model import RewardModel, load_beside, new_reward_model
from tba_jax.tokenizer import Tokenizer
from tba_jax.types import Prompt

NO_STOP_REWARD = -1.0


class Post(NamedTuple):
  """A post with the summary that its author wrote."""

  subreddit: str
  title: str
  post: str
  summary: str


def post_text(post: Post, body: str) -> str:
  """The prompt's format, that of the SFT models; a summary follows with a leading space."""
  return f"SUBREDDIT: r/{post.subreddit}\n\nTITLE: {post.title}\n\nPOST: {body}\n\nTL;DR:"


def encode_post(tokenizer: Tokenizer, post: Post, *, max_tokens: int) -> tuple[str, list[int]]:
  """Text and ids of a prompt of at most max_tokens, if the body of the post alone can be cut to that.

  The body is cut at its last newline until it fits, as the SFT models were trained; a paragraph that is too long by
  itself is cut at its last spaces.
  """
  body = post.post.strip()
  encode = lambda end: tokenizer.encode(post_text(post, body[:end].rstrip()))
  fits = lambda end: len(encode(end)) <= max_tokens
  end = len(body)
  if not fits(end):
    newlines = [index for index, character in enumerate(body) if character == "\n"]
    paragraph = body[: newlines[0]] if newlines else body
    end = _longest(newlines, fits) or _longest([i for i, c in enumerate(paragraph) if c == " "], fits)
  return post_text(post, body[:end].rstrip()), encode(end)


def _longest(ends: Sequence[int], fits: Callable[[int], bool]) -> int:
  """The greatest of ascending `ends` that fits, where all before one that fits do too; 0 if none fits."""
  beyond = 1
  while beyond <= len(ends) and fits(ends[beyond - 1]):
    beyond *= 2  # from the short end: a post of megabytes takes seconds to encode
  number = bisect.bisect_left(ends, True, beyond // 2, min(beyond, len(ends)), key=lambda end: not fits(end))
  return ends[number - 1] if number else 0


def read_posts(folder: str, split: str) -> list[Post]:
  """Rows of FOLDER/SPLIT.jsonl: "subreddit", "title", "post" (or "instruction") and "summary" (or "gold_response").

  Raises: ValueError, naming file and line, for a row without one of them.
  """
  return [_post(row) for row in read_jsonl(folder, split, texts=("subreddit", "title"))]


def _post(row: JsonRow) -> Post:
  def either(*names: str) -> str:
    for name in names:
      if isinstance(row.fields.get(name), str) and row.fields[name].strip():
        return row.fields[name]
    raise ValueError(f"{row.source} has no text {' or '.join(repr(name) for name in names)}; add one.")

  post, summary = either("post", "instruction"), either("summary", "gold_response")
  return Post(row.fields["subreddit"], row.fields["title"], post, re.sub(r"\s+", " ", summary).strip())


THINGS = "bag bike book cat coat dog hat key lamp map pen phone ring shoe".split()
PLACES = "bar bus cab car gym lab park pub shop zoo".split()


def make_posts(num_posts: int, *, split: str, seed: int) -> list[Post]:
  """Posts of one pattern, for runs that only try the path; "train" and "test" have no body in common."""
  rng = random.Random(f"posts {split} {seed}")
  found: dict[str, Post] = {}
  days = range(2, 60) if split == "train" else range(60, 100)
  while len(found) < num_posts:
    thing, place, day = rng.choice(THINGS), rng.choice(PLACES), rng.choice(days)
    body = f"I lost my {thing} in the {place}.\nIt was {day} days ago."
    found[body] = Post("lost", f"My {thing}", body, f"Lost my {thing} in the {place}.")
  return list(found.values())


class TldrTask:
  """Posts to summarise.

  Args:
    tokenizer: of the policy, and of the reward models; None: one of characters, for a new model.
    max_prompt_tokens: posts are cut to fit.
    jsonl_folder: holds train.jsonl and test.jsonl, see `read_posts`.
    num_generated: instead of data, make as many posts to learn from and a quarter as many to evaluate on; 0: read data.
    seed: of generated posts, and of a new reward model.
    reward_model, gold_reward_model: as for `load_reward_model`. Without the first (for generated posts alone) a small
      one of random weights stands in for both. Without the second the first one judges evaluations as well.
    reward_dtype: of the reward models' parameters and computation.
  Raises: ValueError for missing or malformed data, or if more than 1% of a split has titles that leave no room.
  """

  name = "tldr"

  def __init__(
    self, tokenizer: Tokenizer | None, *, max_prompt_tokens: int, jsonl_folder: str, num_generated: int, seed: int,
    reward_model: str, gold_reward_model: str, reward_dtype: str,
  ):  # fmt: skip
    self.tokenizer = tokenizer or make_character_tokenizer()
    self._max_prompt_tokens, self._seed = max_prompt_tokens, seed
    self._reward_model, self._gold = reward_model, gold_reward_model or reward_model
    self._reward_dtype = jnp.dtype(reward_dtype)
    if num_generated:
      train = make_posts(num_generated, split="train", seed=seed)
      test = make_posts(max(1, num_generated // 4), split="test", seed=seed)
    else:
      train, test = (read_posts(jsonl_folder, split) for split in ("train", "test"))
    self._train_posts, self._train_prompts = self._build("train", train)
    _, self._eval_prompts = self._build("test", test)

  def train_prompts(self) -> Sequence[Prompt]:
    return self._train_prompts

  def eval_prompts(self) -> Sequence[Prompt]:
    return self._eval_prompts

  def reward(self, prompt: Prompt, response_text: str, *, truncated: bool) -> float:
    """Never right: rewards are of groups, by a model; see `make_reward`."""
    raise NotImplementedError("tldr is rewarded by a model beside a searcher; use make_reward")

  def make_reward(self, device_or_mesh: Any, *, for_eval: bool) -> GroupReward:
    """Scores by the reward model; in an evaluation 1 where the gold model prefers the response to the human one."""
    if for_eval:
      return _win_rate(lambda: self._load(self._gold, device_or_mesh), self.summary_tokens)
    model = self._load(self._reward_model, device_or_mesh)

    def reward(prompt: Prompt, responses: Responses) -> np.ndarray:
      scores = model([np.concatenate([prompt.tokens, tokens]) for tokens in responses.tokens])
      return np.where(responses.truncated, np.float32(NO_STOP_REWARD), scores)

    return reward

  def response_text(self, tokens: Sequence[int]) -> str:
    return decode_response(self.tokenizer, tokens)

  def summary_tokens(self, summary: str) -> list[int]:
    """A written summary as a response: a leading space, a stop token at the end."""
    return [*self.tokenizer.encode(f" {summary}"), primary_stop_id(self.tokenizer)]

  def sft_examples(self) -> Sequence[tuple[list[int], list[int]]]:
    pairs = zip(self._train_prompts, self._train_posts)
    return [(prompt.tokens.tolist(), self.summary_tokens(post.summary)) for prompt, post in pairs]

  def _load(self, path: str, device_or_mesh: Any) -> RewardModel:
    if path:
      return load_beside(path, device_or_mesh, self.tokenizer, dtype=self._reward_dtype)
    cfg = new_model_config(**STAND_IN, vocab_size=self.tokenizer.vocab_size)
    return new_reward_model(cfg, device_or_mesh, seed=self._seed)

  def _build(self, split: str, posts: Sequence[Post]) -> tuple[list[Post], list[Prompt]]:
    texts: dict[int, str] = {}
    encoded = []
    for index, post in enumerate(posts):
      texts[index], ids = encode_post(self.tokenizer, post, max_tokens=self._max_prompt_tokens)
      encoded.append((index, ids))
    kept = fitting(self.name, split, encoded, max_prompt_tokens=self._max_prompt_tokens)
    prompts = [
      Prompt(number, np.array(ids, np.int32), texts[index], posts[index].summary)
      for number, (index, ids) in enumerate(kept)
    ]
    return [posts[index] for index, _ in kept], prompts


# A reward model that is made, not loaded.
STAND_IN: Mapping[str, Any] = dict(
  hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, mlp_size=64, max_positions=1024,
  tie_embeddings=True, rope_theta=10_000.0, norm_eps=1e-5,
)  # fmt: skip


def _win_rate(load: Callable[[], RewardModel], summary_tokens: Callable[[str], list[int]]) -> GroupReward:
  """1 where the gold model prefers a response to the human summary. It is loaded by the one searcher that evaluates."""
  model: list[RewardModel] = []
  human: dict[tuple[str, str], float] = {}  # by prompt and summary: every evaluation is of the same ones

  def reward(prompt: Prompt, responses: Responses) -> np.ndarray:
    if not model:
      model.append(load())
    key = (prompt.text, prompt.answer)
    rows = [np.concatenate([prompt.tokens, tokens]) for tokens in responses.tokens]
    if key not in human:
      written = np.concatenate([prompt.tokens, np.array(summary_tokens(prompt.answer), np.int32)])
      human[key] = float(model[0]([written])[0])
    scores = [model[0]([row])[0] for row in rows]  # alone as the human one was, or a copy of it could win by rounding
    return (np.array(scores) > human[key]).astype(np.float32)

  return reward

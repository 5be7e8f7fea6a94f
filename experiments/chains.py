"""Chains of two operations on digits, the task of the studies of hundreds of runs: it asks of a model what the word
problems of `tba_jax.tasks.arithmetic` ask, in a quarter of the tokens, so that hundreds of updates take seconds.

    4 * 5 - 9 =        ->  4 * 5 0 - 9 1, or at once 1

A chain is worked out from left to right, modulo 10. The reward is 1 if the last digit of the response is the value of
the chain and 0 otherwise, whatever stands before. Most written solutions give the value at once, which a small model
learns to imitate but hardly to do; the others repeat the chain with the result after each operation, which it can do:
that working pays is left to be found. Half of the fine-tuning examples end in ? instead of =, and always show the work:
so it is learnt, but not that it is asked for here.

Held-out chains are scored by one SAMPLE each (not greedily): the mean reward of the policy itself, which moves with
every change of it, where a greedy accuracy jumps when the likeliest way of answering changes. The chains are the same
ones whatever the seed of a run, so that runs from one fine-tuned model can be compared.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence

import numpy as np
import tokenizers
import transformers

from tba_jax.tasks.base import TaskSettings
from tba_jax.tokenizer import Tokenizer, make_tokenizer
from tba_jax.types import Prompt

NUM_OPERATIONS, BASE = 2, 10
SPLITS = {"eval": range(0, 15), "train": range(15, 35), "sft": range(35, 100)}  # percent of all chains
PAD, STOP, UNKNOWN = "<pad>", "<stop>", "<unk>"


def make_chain(rng: random.Random) -> tuple[str, list[int]]:
  """A random chain, and its results from first to last."""
  value = rng.randrange(BASE)
  words, results = [str(value)], []
  for _ in range(NUM_OPERATIONS):
    sign, digit = rng.choice("+-*"), rng.randrange(BASE)
    value = {"+": value + digit, "-": value - digit, "*": value * digit}[sign] % BASE
    words += [sign, str(digit)]
    results.append(value)
  return " ".join([*words, "="]), results


def make_chains(num_chains: int, *, split: str) -> list[tuple[str, list[int]]]:
  """Chains of one split with their results, different ones except for fine-tuning; no two splits share one."""
  rng = random.Random(f"chains {split}")
  chains: list[tuple[str, list[int]]] = []
  seen: set[str] = set()
  while len(chains) < num_chains:
    text, results = make_chain(rng)
    if zlib.crc32(text.encode()) % 100 in SPLITS[split] and (split == "sft" or text not in seen):
      seen.add(text)
      chains.append((text, results))
  return chains


class Chains:
  """The task. `sft_share_with_work`: share of the fine-tuning examples ending in = that give every result."""

  name = "chains"
  samples_evaluations = True

  def __init__(self, tokenizer: Tokenizer | None, settings: TaskSettings, *, num_train_prompts: int,
               sft_share_with_work: float):
    del tokenizer  # it has its own
    self._words = words = [PAD, STOP, UNKNOWN, *map(str, range(BASE)), *"+-*=?"]
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(
      {word: index for index, word in enumerate(words)}, unk_token=UNKNOWN))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    hf = transformers.PreTrainedTokenizerFast(
      tokenizer_object=backend, pad_token=PAD, eos_token=STOP, unk_token=UNKNOWN, clean_up_tokenization_spaces=False)
    self.tokenizer = make_tokenizer(hf, source="chains")
    self._stop = words.index(STOP)
    self._train = self._prompts(make_chains(num_train_prompts, split="train"))
    self._eval = self._prompts(make_chains(settings.num_eval_prompts, split="eval"))
    self._num_examples, self._share = settings.num_sft_examples, sft_share_with_work

  def train_prompts(self) -> Sequence[Prompt]:
    return self._train

  def eval_prompts(self) -> Sequence[Prompt]:
    return self._eval

  def reward(self, prompt: Prompt, response_text: str, *, truncated: bool) -> float:
    """1 if the response ended, with the value as its last word."""
    return float(not truncated and response_text.split()[-1:] == [prompt.answer])

  def response_text(self, tokens: Sequence[int]) -> str:
    """What the tokenizer makes of the tokens before the stop token; by a table, which takes a tenth of the time."""
    ids = [int(token) for token in tokens]
    end = ids.index(self._stop) if self._stop in ids else len(ids)
    return " ".join(self._words[token] for token in ids[:end])

  def sft_examples(self) -> Sequence[tuple[list[int], list[int]]]:
    """Written solutions."""
    rng, examples = random.Random("written solutions"), []
    for text, results in make_chains(self._num_examples, split="sft"):
      solution = [str(results[-1])]
      asked = rng.random() < 0.5
      if asked or rng.random() < self._share:
        words = text.split()
        solution = [words[0]]
        for i, result in enumerate(results):
          solution += [*words[2 * i + 1:2 * i + 3], str(result)]
      examples.append((text.replace("=", "?") if asked else text, " ".join([*solution, STOP])))
    return [(self.tokenizer.encode(text), self.tokenizer.encode(solution)) for text, solution in examples]

  def _prompts(self, chains: Sequence[tuple[str, list[int]]]) -> list[Prompt]:
    return [Prompt(index, np.array(self.tokenizer.encode(text), np.int32), text, str(results[-1]))
            for index, (text, results) in enumerate(chains)]

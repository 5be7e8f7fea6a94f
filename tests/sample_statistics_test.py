"""pass@k and maj@k against enumeration, intervals against values from the literature and by simulation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tba_jax.sample_statistics import majority_at_k, pass_at_k, wilson_interval


@pytest.mark.parametrize("num_samples, num_right", [(1, 0), (1, 1), (5, 2), (6, 0), (6, 6), (7, 3)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(num_samples, num_right):
  rights = [i < num_right for i in range(num_samples)]
  for k in range(1, num_samples + 1):
    expected = np.mean([any(subset) for subset in itertools.combinations(rights, k)])
    assert pass_at_k(num_samples, num_right, k) == pytest.approx(expected)


def test_majority_votes_in_blocks():
  answers = ["a", "b", "a", None, "b", "b", "c"]
  rights = [False, True, False, False, True, True, False]
  assert majority_at_k(answers, rights, 1) == pytest.approx(3 / 7)
  assert majority_at_k(answers, rights, 3) == 0.5  # a, then b; the seventh is in no block
  assert majority_at_k(answers, rights, 2) == pytest.approx(1 / 3)  # a (first), a, b
  assert majority_at_k(answers, rights, 7) == 1
  assert majority_at_k([None, None], [True, True], 2) == 0


@pytest.mark.parametrize("k", [0, 3])
def test_k_beyond_the_samples_is_refused(k):
  for call in (lambda: pass_at_k(2, 1, k), lambda: majority_at_k(["a", "b"], [True, True], k)):
    with pytest.raises(ValueError, match=f"k={k} must lie between 1 and the 2 samples"):
      call()


def test_wilson_interval():
  # Newcombe 1998, Statistics in Medicine 17: 81/263, 15/148, 0/20, 1/29 by the score method.
  for successes, trials, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611),
                                       (1, 29, 0.0061, 0.1718)):
    assert wilson_interval(successes / trials, trials) == pytest.approx((low, high), abs=5e-5)
  assert wilson_interval(1.0, 10)[1] == pytest.approx(1.0)


def test_wilson_interval_covers_95_percent():
  rng = np.random.default_rng(0)
  for rate, trials in ((0.1, 100), (0.5, 40), (0.97, 500)):
    found = [wilson_interval(count / trials, trials) for count in rng.binomial(trials, rate, 4_000)]
    assert 0.93 < np.mean([low <= rate <= high for low, high in found]) < 0.975

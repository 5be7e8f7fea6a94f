"""Losses by name: what they say they need is what they read, and errors that help."""

from __future__ import annotations

import functools

import losses_cases as cases
import numpy as np
import pytest

from tba_jax.losses.registry import LOSSES, get_loss, make_loss


def test_get_loss_names_the_nearest():
  assert get_loss("rloo") is LOSSES["rloo"]
  with pytest.raises(ValueError, match=r"loss name 'tb_vargard' is unknown; nearest: tb_vargrad.*known: .*rloo"):
    get_loss("tb_vargard")


def test_make_loss_refuses_an_option_that_the_loss_lacks():
  with pytest.raises(ValueError, match=r"option 'clip' is unknown to loss 'sft'; known: none"):
    make_loss("sft", clip=0.2)


@functools.lru_cache(maxsize=None)
def loss(name):
  return functools.partial(LOSSES[name].fn, **cases.constant_head(LOSSES[name]))


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_needs_are_what_the_gradient_reads(name):
  spec, fn = LOSSES[name], loss(name)
  case = cases.standard_case(41)
  before = cases.run(fn, case, beta=0.05)[1]

  def changed(beta=0.05):
    after = cases.run(fn, case, beta=beta)[1]
    return max(np.abs(before[i] - after[i]).max(initial=0) for i in before) > 1e-7

  assert changed(beta=0.2) == spec.needs_beta
  log_mu, case.log_mu = case.log_mu, [cases.exact(x - 0.4 * np.arange(len(x))) for x in case.log_mu]
  assert changed() == spec.needs_log_mu
  case.log_mu, case.log_ref = log_mu, [cases.exact(x - 0.4 * np.arange(len(x))) for x in case.log_ref]
  assert changed() == spec.needs_reference
  case.log_ref = [cases.exact(x + 0.4 * np.arange(len(x))) for x in case.log_ref]


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_positive_beta_says_which_losses_learn_nothing_at_zero(name):
  value, grads, _ = cases.run(loss(name), cases.standard_case(42), beta=0.0)
  gradient = np.concatenate(list(grads.values()))
  learns = bool(np.isfinite([value, *gradient]).all() and np.abs(gradient).max() > 1e-3)
  assert learns == (not LOSSES[name].positive_beta)

"""What the replay buffer refuses, with the reason and the way out: settings, groups, requests and saved states."""

from __future__ import annotations

from typing import Any

import numpy as np

from tba_jax.replay.priorities import PRIORITIES, reward_weight
from tba_jax.types import RolloutGroup

MIN_ROWS = 2  # of a training group: with one response the loss is centred on itself and teaches nothing
ORDERS = ("tba", "fifo")


def check_settings(
  *,
  capacity: int,
  capacity_per_prompt: int,
  max_prompt_tokens: int,
  max_response_tokens: int,
  recent_fraction: float,
  priority: str,
  priority_temperature: float,
  max_uses: int,
  max_staleness: int,
  dedup: bool,
  order: str,
  single_prompt: bool,
  near_duplicate: float,
) -> None:
  """Checks the settings of a `ReplayBuffer`; see there for their meaning.

  Raises:
    ValueError: the first setting that is out of range, or contradicts another.
  """
  for name, value, least in (
    ("capacity", capacity, MIN_ROWS),
    ("capacity_per_prompt", capacity_per_prompt, MIN_ROWS),
    ("max_prompt_tokens", max_prompt_tokens, 1),
    ("max_response_tokens", max_response_tokens, 1),
    ("max_uses", max_uses, 0),
    ("max_staleness", max_staleness, -1),
  ):
    if value < least:
      raise ValueError(f"{name}={value} must be at least {least}; raise it.")
  if capacity >= 2**31:
    raise ValueError(f"capacity={capacity} rows must be less than 2**31; lower it.")
  if not 0.0 <= recent_fraction <= 1.0:
    raise ValueError(f"recent_fraction={recent_fraction} is a probability; choose one from 0 to 1.")
  if not 0.0 < priority_temperature < np.inf:
    raise ValueError(
      f"priority_temperature={priority_temperature} must be positive and finite; for no preference take "
      "priority='uniform'."
    )
  for name, value, choices in (("priority", priority, PRIORITIES), ("order", order, ORDERS)):
    if value not in choices:
      raise ValueError(f"{name}={value!r} is not known; choose one of {', '.join(choices)}.")
  if order == "fifo" and (dedup or priority != "uniform" or max_uses > 1):
    raise ValueError(
      f"order='fifo' draws whole sampling groups exactly once, which dedup={dedup}, priority={priority!r}, "
      f"max_uses={max_uses} would break; set dedup=False, priority='uniform' and max_uses to 0 or 1, or order='tba'."
    )
  if not 0.0 <= near_duplicate < 1.0:
    raise ValueError(
      f"near_duplicate={near_duplicate} is a share of two lengths; choose one from 0 (off) to less than 1."
    )
  if near_duplicate and (order == "fifo" or not dedup):
    raise ValueError(
      f"near_duplicate={near_duplicate} leaves responses out, which order={order!r} and dedup={dedup} do not allow; set "
      "near_duplicate=0, or order='tba' and dedup=True."
    )
  if single_prompt and priority == "residual":
    raise ValueError(
      "priority='residual' chooses between prompts, but single_prompt=True says that there is one; take 'reward' or "
      "'uniform'."
    )


def check_group(
  group: RolloutGroup, *, settings: dict[str, Any], newest_version: int | None, with_advantages: bool = False
) -> None:
  """Checks that a group's arrays belong together, can be trained on, and fit the buffer's rows.

  Raises:
    ValueError: naming the array, what it is, and what it has to be.
  """
  name = f"group of prompt_id={group.prompt_id}, occurrence={group.occurrence}"
  if group.tokens.ndim != 2 or group.tokens.shape[0] < 1 or group.prompt.ndim != 1:
    raise ValueError(
      f"{name}: tokens {group.tokens.shape} must be [S, T] with S >= 1, and prompt {group.prompt.shape} must be [P]."
    )
  num_samples, width = group.tokens.shape
  if with_advantages and group.advantages is None:
    raise ValueError(f"{name}: advantages=None, but the buffer keeps one for each token; sample continuations.")
  advantages = ("advantages",) * with_advantages
  for field, shape in (
    *((field, (num_samples, width)) for field in advantages),
    ("log_mu", (num_samples, width)),
    ("log_ref", (num_samples, width)),
    ("versions", (num_samples, width)),
    ("lengths", (num_samples,)),
    ("rewards", (num_samples,)),
    ("truncated", (num_samples,)),
  ):
    found = getattr(group, field).shape
    if found != shape:
      raise ValueError(
        f"{name}: {field} has shape {found}, but tokens {group.tokens.shape} ask for {shape}; every sampled token "
        "needs one entry in each array."
      )
  if not 1 <= len(group.prompt) <= settings["max_prompt_tokens"]:
    raise ValueError(
      f"{name}: the prompt has {len(group.prompt)} tokens, but a row holds 1 to max_prompt_tokens="
      f"{settings['max_prompt_tokens']}; raise it or leave out the prompt."
    )
  shortest, longest = int(group.lengths.min()), int(group.lengths.max())
  if shortest < 1 or longest > min(width, settings["max_response_tokens"]):
    raise ValueError(
      f"{name}: lengths reach from {shortest} to {longest}, but must be from 1 to the {width} entries of tokens and at "
      f"most max_response_tokens={settings['max_response_tokens']}; raise it or lower the sampler's limit."
    )
  if num_samples > settings["capacity"]:
    raise ValueError(f"{name}: {num_samples} samples do not fit capacity={settings['capacity']} rows; raise it.")
  if not np.isfinite(group.rewards).all():
    raise ValueError(
      f"{name}: rewards {group.rewards.tolist()} must be finite; leave out the samples that could not be scored."
    )
  real = np.arange(width) < group.lengths[:, None]
  for field, has in (
    ("log_mu", "a finite log-probability"), ("log_ref", "a finite log-probability"),
    *((field, "a finite one") for field in advantages),
  ):
    if not np.isfinite(getattr(group, field)[real]).all():
      raise ValueError(f"{name}: {field} is not finite at a sampled token; a sampled token has {has}.")
  if settings["single_prompt"] and settings["priority"] == "reward":
    reward_weight(group.rewards, temperature=settings["priority_temperature"])
  versions = group.versions[real]
  if versions.min() < 0:
    raise ValueError(f"{name}: versions go down to {versions.min()}; a version counts optimizer updates from 0.")
  check_versions(int(versions.max()), newest_version, name=name)


def check_versions(found: int, newest_version: int | None, *, name: str) -> None:
  if newest_version is not None and found > newest_version:
    raise ValueError(
      f"{name}: a token of version {found} comes from the future, the trainer is at version {newest_version}; after a "
      "resume drop what was sampled beyond the checkpoint."
    )


def check_group_fits(
  group: RolloutGroup, *, temperature: float | None, ref_version: int, prompt: np.ndarray | None, only_known: bool
) -> None:
  """Checks a group against what a buffer holds: its temperature (None: no group yet), reference, and tokens of the
  prompt (None: not there). With `only_known` no other prompt may come.

  Raises:
    ValueError: naming what differs.
  """
  if temperature is not None and group.temperature != temperature:
    raise ValueError(
      f"temperature={group.temperature} of a group differs from the buffer's {temperature}; log-probabilities of two "
      "temperatures cannot be trained on together: keep one temperature for the run."
    )
  if group.ref_version > ref_version:
    raise ValueError(
      f"ref_version={group.ref_version} of a group is newer than the buffer's {ref_version}; call set_reference before "
      "anything is scored by a new reference."
    )
  if prompt is not None and not np.array_equal(group.prompt, prompt):
    raise ValueError(
      f"prompt_id={group.prompt_id} names other prompt tokens than before; give each prompt an id of its own."
    )
  if prompt is None and only_known:
    raise ValueError(
      f"prompt_id={group.prompt_id} is a second prompt in a buffer of one (single_prompt=True); set it to False."
    )


def check_residuals(rows: np.ndarray, values: np.ndarray, *, priority: str) -> None:
  """Raises ValueError unless a buffer that draws by `priority` can take one finite residual for each row of a draw."""
  if priority != "residual":
    raise ValueError(f"priority={priority!r} takes no residuals; set priority='residual' or do not update priorities.")
  if rows.shape != values.shape or rows.ndim != 1:
    raise ValueError(
      f"rows {rows.shape} and values {values.shape} must be of one length; pass one residual per row of the draw."
    )
  if not np.isfinite(values[rows >= 0]).all():
    raise ValueError("values holds a residual that is not finite; leave out the rows of a skipped update.")


def check_draw(num_prompts: int, responses_per_prompt: int, *, single_prompt: bool) -> None:
  """Raises ValueError for sizes of a batch that no buffer could ever give."""
  if num_prompts < 1 or responses_per_prompt < MIN_ROWS:
    raise ValueError(
      f"num_prompts={num_prompts} must be at least 1 and responses_per_prompt={responses_per_prompt} at least "
      f"{MIN_ROWS}: a group is centred on its own mean."
    )
  if single_prompt and num_prompts != 1:
    raise ValueError(
      f"num_prompts={num_prompts}, but the buffer is of one prompt (single_prompt=True), which a batch holds once; set "
      "num_prompts=1 and raise responses_per_prompt."
    )


def check_state(
  arrays: dict[str, np.ndarray], scalars: dict[str, Any], *, settings: dict[str, Any], newest_version: int | None
) -> None:
  """Checks that a saved state is of a buffer with these settings, and holds nothing from the future.

  Raises:
    ValueError: naming each setting that differs, or the version.
  """
  saved = scalars["settings"]
  different = [
    f"{name}={saved.get(name)!r} (here {settings.get(name)!r})"
    for name in sorted(saved.keys() | settings.keys())
    if saved.get(name) != settings.get(name)
  ]
  if different:
    raise ValueError(f"the saved buffer has {', '.join(different)}; resume with the settings that it was saved with.")
  check_versions(int(np.asarray(arrays["newest_version"]).max(initial=0)), newest_version, name="the saved buffer")

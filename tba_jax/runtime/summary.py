"""What a run comes to: the figures of results.json."""

from __future__ import annotations

from typing import Any

from tba_jax.meters import bottleneck
from tba_jax.runtime.run import Run


def results_of(run: Run) -> dict[str, Any]:
  """What results.json holds of a run that is over."""
  totals, counts, settings = run.totals, run.searcher_counts(), run.settings
  train_secs = run.train_secs()
  decode = run.timeline.busy_overlap("trainer", "step", other_kind="decode")
  searchers = [f"searcher{s.index}" for s in run.searchers]
  shares = {side: run.timeline.shares(actors, but=("eval",))
            for side, actors in (("trainer", ["trainer"]), ("searcher", searchers))}
  waits = [shares[side].get("wait", 0.0) for side in ("trainer", "searcher")]
  take_turns = "neither: they take turns" if settings.mode != "async" else bottleneck(*waits)
  return {
      "bottleneck": take_turns, "trainer_shares": shares["trainer"], "searcher_shares": shares["searcher"],
      "staleness_histogram": run.staleness.histogram(), "age_losses": run.exchange.buffer.age_losses(),
      "accuracy_before": totals.accuracy_before, "accuracy_after": totals.accuracy_after,
      "accuracy_best": totals.accuracy_best,
      **{f"{name}_before": value for name, value in totals.measures_before.items()},
      **{f"{name}_after": value for name, value in totals.measures_after.items()},
      "best_step": totals.best_step, "eval_size": len(run.eval_prompts), "wall_seconds": run.wall_secs(),
      "train_seconds": train_secs, "steps": run.step, "version": run.trainer.version,
      "skipped_updates": totals.skipped_updates,
      "rollouts": counts["rollouts"], "rollouts_per_second": counts["rollouts"] / max(train_secs, 1e-9),
      "trained_responses": totals.trained_responses, "trained_tokens": totals.trained_tokens,
      "trained_tokens_per_second": totals.trained_tokens / max(train_secs, 1e-9),
      "generated_tokens": counts["generated_tokens"], "truncated_rollouts": counts["truncated"],
      "bad_rewards": counts["bad_rewards"], "dropped_groups": counts["dropped_groups"],
      **run.staleness.summary(),
      "trainer_wait_seconds": run.waits.seconds("trainer"), "searcher_wait_seconds": run.waits.seconds("searcher"),
      "searchers_decode_while_trainer_steps": decode, "searcher_restarts": totals.searcher_restarts,
      "late_groups": run.exchange.num_late_groups, "failed_checkpoints": run.run_state.num_failed,
      "logprob_gap_max": totals.logprob_gap_max, "logprob_gap_p95": totals.logprob_gap_p95,
      "logprob_tokens_compared": totals.logprob_tokens_compared, "seed": settings.seed, "mode": settings.mode,
      "loss": settings.loss, "warnings": run.alarms.told,
  }

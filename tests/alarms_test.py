"""What a run warns of by itself: each condition once, in words that say what to do, and nothing while all is well."""

import json

import pytest

from tba_jax.alarms import WARNINGS_FILE, WINDOW_STEPS, Alarms

WELL = dict(reward=0.4, equal_reward_groups=0.2, truncated=0.1, log_ratio_ref=0.5, response_tokens=10.0,
            staleness_mean=3.0)


def _lines(num, *, first=1, step_secs=1.0, trainer_waits=0.1, searcher_waits=0.1, **changes):
  for step in range(first, first + num):
    yield {**WELL, **changes, "step": step, "wall_seconds": step * step_secs,
           "trainer_wait_seconds": step * step_secs * trainer_waits,
           "searcher_wait_seconds": step * step_secs * searcher_waits}


def _told(folder, lines, *, resume_step=-1, is_async=True):
  alarms = Alarms(folder, resume_step=resume_step, num_searchers=2, is_async=is_async)
  texts = [text for line in lines for text in alarms.after_step(line)]
  alarms.close()
  return texts


def _names(folder):
  return [json.loads(line)["name"] for line in (folder / WARNINGS_FILE).read_text().splitlines()]


def test_nothing_is_said_while_all_is_well(tmp_path):
  assert _told(tmp_path, _lines(100)) == [] == _names(tmp_path)


@pytest.mark.parametrize("changes, name, text", [
  (dict(reward=0.0, equal_reward_groups=1.0, truncated=0.9), "zero_reward",
   "warning: every response of steps 1 to 20 was graded 0 (90% of them were truncated); read rollouts/train.jsonl: does "
   "the grader find the answers, is sample.max_new_tokens too short, can the model do the task at all?"),
  (dict(reward=1.0, equal_reward_groups=1.0), "ties",
   "warning: in every group of steps 1 to 20 all rewards tie (their mean is 1); only the KL term is trained on; take "
   "prompts of another difficulty, raise sample.temperature or train.responses_per_prompt"),
  (dict(log_ratio_ref=-25.0), "far_from_reference",
   "warning: log pi - log ref is -2.5 nats a token over steps 1 to 20: the policy runs away from its reference; lower "
   "train.learning_rate, raise loss.beta_final, or go back to the best checkpoint"),
  (dict(log_ratio_ref=float("nan")), "far_from_reference",
   "warning: log pi - log ref is +nan nats a token over steps 1 to 20: the policy runs away from its reference; lower "
   "train.learning_rate, raise loss.beta_final, or go back to the best checkpoint"),
  (dict(staleness_mean=40.0), "stale",
   "warning: the responses trained on in steps 1 to 20 are 40 updates old on average; raise buffer.recent_fraction, set "
   "buffer.max_staleness, lower sync.every_steps, or give searchers more devices"),
  (dict(trainer_waits=0.6), "trainer_idle",
   "warning: the trainer waited for 60% of the time of steps 1 to 20; give searchers more devices (devices.searchers), "
   "let each rollout be used more often (buffer.max_uses), or shorten responses"),
  (dict(searcher_waits=1.2), "searchers_idle",
   "warning: searchers waited for 60% of the time of steps 1 to 20; let them run ahead (sync.max_lead_steps, "
   "buffer.max_staleness), or give devices of theirs to the trainer (devices.trainer)"),
])
def test_each_condition_is_told_once_with_what_to_do(changes, name, text, tmp_path):
  assert _told(tmp_path, _lines(WINDOW_STEPS - 1, **changes)) == []
  assert _told(tmp_path, _lines(100, **changes)) == [text]
  assert _names(tmp_path) == [name]
  # Resumed after the step at which it was told, it is known; resumed before, it is told again.
  assert _told(tmp_path, _lines(100, first=31, **changes), resume_step=30) == []
  assert len(_told(tmp_path, _lines(100, first=11, **changes), resume_step=10)) == 1


def test_a_resumed_run_warns_when_the_unbroken_one_does(tmp_path):
  changes = dict(log_ratio_ref=float("nan"), loss=0.5)
  written = [{name: None if value != value else value for name, value in line.items()}  # NaN is null in the file
             for line in _lines(15, **changes)]
  evaluation = {"step": 10, "eval_accuracy": 0.5}
  (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (*written, evaluation)))
  broken = _told(tmp_path, _lines(30, first=11, **changes), resume_step=10)
  assert len(broken) == 1 and "steps 1 to 20" in broken[0]


@pytest.mark.parametrize("changes", [
  dict(searcher_waits=0.9), dict(trainer_waits=0.45), dict(log_ratio_ref=9.0), dict(staleness_mean=31.0)])
def test_what_lies_below_a_limit_is_not_told(changes, tmp_path):
  assert _told(tmp_path, _lines(100, **changes)) == []  # of two searchers, waits of 0.9 s a second are 45% each


def test_an_objective_that_reads_no_reference_has_no_distance_to_it(tmp_path):
  lines = [{name: value for name, value in line.items() if name != "log_ratio_ref"} for line in _lines(50)]
  assert _told(tmp_path, lines) == []


def test_a_whole_window_is_looked_at(tmp_path):
  one_right = [*_lines(19, reward=0.0, equal_reward_groups=1.0), *_lines(1, first=20, reward=0.1),
               *_lines(18, first=21, reward=0.0, equal_reward_groups=1.0)]
  assert _told(tmp_path, one_right) == []
  _told(tmp_path, [*one_right, *_lines(20, first=39, reward=0.0, equal_reward_groups=1.0)])
  assert _names(tmp_path) == ["zero_reward"]


def test_sides_that_take_turns_are_not_called_idle(tmp_path):
  assert _told(tmp_path, _lines(50, trainer_waits=0.9, searcher_waits=1.9, staleness_mean=64.0), is_async=False) == []


@pytest.mark.slow
def test_a_run_warns_and_keeps_its_warnings(tmp_path, compile_once, monkeypatch, capsys):
  import runs
  from tba_jax import alarms
  from tba_jax.tasks.arithmetic import ArithmeticTask

  monkeypatch.setattr(alarms, "WINDOW_STEPS", 3)
  monkeypatch.setattr(ArithmeticTask, "reward", lambda self, prompt, response_text, *, truncated: 0.0)
  config = runs.short_config(runtime__mode="lockstep", train__steps=4, checkpoint__every_steps=2)
  assert runs.run(config, tmp_path / "run") == 0
  assert capsys.readouterr().err.count("warning: every response of steps 1 to 3 was graded 0") == 1
  (line,) = runs.lines(tmp_path / "run", "warnings.jsonl")
  assert line["step"] == 3 and line["name"] == "zero_reward" and line["text"].startswith("warning: every response")
  assert json.loads((tmp_path / "run" / "results.json").read_text())["warnings"] == ["zero_reward"]

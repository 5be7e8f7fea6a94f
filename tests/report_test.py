"""The report page: what it shows of a run equals what the run wrote, nothing of a run becomes markup, large runs stay
small."""

import gzip
import html.parser
import json
import re
import time

import numpy as np
import pytest

from tba_jax import metrics
from tba_jax.report import __main__ as report
from tba_jax.report import charts, curves, run_files, svg
from tba_jax.report.page import make_page

STEP_SECS = 0.5


def write_run(folder, *, seed=0, steps=40, loss="tb_vargrad", reward=lambda step: step / 100, response="5 + 5 = 10"):
  """A workdir as a run leaves it, with simple numbers: step s ends after s / 2 s with 100 s tokens trained."""
  (folder / "rollouts").mkdir(parents=True)
  (folder / "config.json").write_text(json.dumps({
    "seed": seed, "loss": {"name": loss, "beta_init": 0.1}, "train": {"steps": 40}, "runtime": {"mode": "async"}}))
  lines = [{"step": 0, "wall_time": 1000.0, "eval_accuracy": 0.25, "eval_size": 4}]
  for step in range(1, steps + 1):
    wall = step * STEP_SECS
    lines.append({
      "step": step, "wall_time": 1001.0 + wall, "wall_seconds": 1.0 + wall, "reward": reward(step), "loss": 2.0,
      "log_ratio_ref": 0.01 * step, "entropy": "NaN" if step == 2 else 1.0, "trained_tokens": 100 * step,
      "staleness_mean": 1.5, "staleness_max": 2, "staleness_counts": {"1": 4, "2": 4}, "buffer_added": 16 * step,
      "buffer_rows_drawn": 8 * step, "buffer_fill": 0.01 * step, "trainer_wait_seconds": 0.1 * wall,
      "searcher_wait_seconds": 0.0, "trained_tokens_per_second": 200.0, "logprob_gap_max": 1e-6})
    if step == 20:  # late: of weights that were reached before
      lines.append({"step": 10, "wall_time": 1001.0 + wall, "eval_accuracy": 0.75, "eval_size": 4})
  (folder / "metrics.jsonl").write_text("".join(map(metrics.to_json_line, lines)))
  spans = []
  for step in range(steps):
    begin = 1001.0 + step * STEP_SECS
    spans += [("trainer", "step", begin, begin + 0.4), ("trainer", "wait", begin + 0.4, begin + 0.5),
              ("searcher0", "decode", begin, begin + 0.3), ("searcher0", "grade", begin + 0.3, begin + 0.35)]
  spans.sort(key=lambda span: span[3])
  (folder / "timeline.jsonl").write_text("".join(
    metrics.to_json_line(dict(zip(("actor", "kind", "start_secs", "end_secs"), span))) for span in spans))
  rollout = {
    "step": 1, "reward": 1.0, "version": 0, "num_prompt_tokens": 3, "num_response_tokens": 2, "truncated": False,
    "token_ids": [7, 8], "token_texts": ["5 +", ""], "token_log_mu": [-0.5, -0.25], "token_log_ref": [-1.0, -0.25],
    "token_log_pi": [-0.5, -0.2501], "prompt": "How many?", "response": response}
  (folder / "rollouts" / "train.jsonl").write_text("".join(
    metrics.to_json_line({**rollout, "step": step}) for step in range(1, steps + 1)), errors="backslashreplace")
  (folder / "warnings.jsonl").write_text(metrics.to_json_line({"step": 20, "text": "warning: all <tie>"}))
  return folder


def lines_of(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def read(folder):
  return run_files.read_run(folder, num_rollouts=20, rollout_bytes=100_000)


class _Page(html.parser.HTMLParser):
  """Tags with their attributes, and the text of each kind of tag."""

  def __init__(self, text):
    super().__init__()
    self.tags, self.texts, self._open = [], {}, []
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    self.tags.append((tag, dict(attrs)))
    self._open.append(tag)

  def handle_data(self, data):
    self.texts.setdefault(self._open[-1] if self._open else "", []).append(data)

  def handle_endtag(self, tag):
    while self._open and self._open.pop() != tag:
      pass

  def count(self, tag):
    return sum(tag == name for name, _ in self.tags)


def _charts(page, title):
  """What the curves of a chart say, back in the data's numbers: one dict {name: [(x, y), ...]} for each axis."""
  found = []
  for chart in re.findall(r'<svg [^>]*aria-label="' + re.escape(title) + r'"[^>]*>.*?</svg>', page):
    x0, x1, y0, y1 = (float(v) for key in "xy" for v in re.search(rf'data-{key}="([^"]*)"', chart)[1].split(","))
    left, right, bottom, top = map(float, re.search(r'data-box="([^"]*)"', chart)[1].split(","))
    lines = {}
    for points, name in re.findall(r'<polyline points="([^"]*)"[^>]*data-name="([^"]*)"', chart):
      pairs = [tuple(map(float, pair.split(","))) for pair in points.split(" ")]
      lines.setdefault(name, []).extend(
        (x0 + (a - left) / (right - left) * (x1 - x0), y0 + (b - bottom) / (top - bottom) * (y1 - y0))
        for a, b in pairs)
    found.append(lines)
  return found


# --- What is shown ---


def test_curves_show_the_lines_of_the_run_over_steps_time_and_tokens(tmp_path):
  page = make_page([read(write_run(tmp_path / "run"))])
  step = np.arange(1, 41)
  for lines, x in zip(_charts(page, "Batch reward"), (step, 1.0 + 0.5 * step, 100 * step), strict=True):
    (points,) = lines.values()
    np.testing.assert_allclose(np.array(points), np.stack([x, step / 100], 1), rtol=2e-2, atol=2e-3 * x.max())
  for lines, x in zip(_charts(page, "Held-out accuracy"), ([0, 10], [0, 6], [0, 1000]), strict=True):
    (points,) = lines.values()  # the second was told late; it counts where its weights were reached
    np.testing.assert_allclose(np.array(points), np.stack([x, [0.25, 0.75]], 1), rtol=2e-2, atol=2e-2)
  (reuse,) = _charts(page, "Reuse")[0].values()
  np.testing.assert_allclose([y for _, y in reuse], 0.5, atol=1e-3)
  (waits,) = _charts(page, "Trainer waits")[0].values()
  np.testing.assert_allclose([y for _, y in waits], 0.1, atol=1e-3)
  (entropy,) = _charts(page, "Entropy")[0].values()
  assert len(entropy) == 39  # a NaN is no point
  for text in ("warning: all &lt;tie&gt;", "share of time", "tokens/s", "nats a response", "optimizer steps",
               "time of the run (s)"):
    assert text in page


def test_shares_of_the_machines_limit(tmp_path):
  folder = write_run(tmp_path / "run")
  lines = [line | ({"prompt_tokens": 10.0, "response_tokens": 10.0, "generated_tokens_per_second": 100.0,
                    "step_seconds": 0.25} if "loss" in line else {}) for line in lines_of(folder / "metrics.jsonl")]
  (folder / "metrics.jsonl").write_text("".join(map(metrics.to_json_line, lines)))
  machine = dict(
    device_kind="TPU <x>", peaks="of <b>", trainer_devices=4, searcher_devices=2, one_machine=False,
    trainer_flops_per_sec=12e6, searcher_flops_per_sec=2e6, searcher_bytes_per_sec=1e6, train_flops_per_token=6e3,
    sample_flops_per_token=2e3, sample_weight_bytes=500.0, cache_token_bytes=100.0, lane_samples=1)
  (folder / "machine.json").write_text(json.dumps(machine))
  page = make_page([read(folder)])
  # 200 response tokens/s of 1,000; in the steps, half of the time, 400. A sampled token takes 2 ms of memory.
  for cell in ("<td>200</td><td>1,000</td><td>20.00%</td><td>arithmetic</td>",
               "<td>400</td><td>1,000</td><td>40.00%</td><td>arithmetic</td>",
               "<td>100</td><td>500</td><td>20.00%</td><td>memory</td>", "trainer 20.0%, searchers 20.0%",
               "4 + 2 devices of kind TPU &lt;x&gt;, N = 1e+03, peaks of &lt;b&gt;: 1.2e+07 FLOP/s for the trainer"):
    assert cell in page
  (share,) = _charts(page, "Trainer, of its limit")[0].values()
  np.testing.assert_allclose([y for _, y in share], 0.2, atol=2e-3)
  nothing = dict.fromkeys([key for key in machine if key.endswith("per_sec")])
  (folder / "machine.json").write_text(json.dumps(machine | nothing))
  page = make_page([read(folder)])
  assert "the limit is unknown" in page and "response tokens/s</th>" not in page


def test_a_run_in_progress_with_a_torn_last_line(tmp_path):
  folder = write_run(tmp_path / "run", steps=7)
  for name in ("metrics.jsonl", "timeline.jsonl", "rollouts/train.jsonl"):
    with open(folder / name, "a") as file:
      file.write('{"step": 8, "actor": "trai')
  page = make_page([read(folder)])
  assert "not finished: step 7 of 40" in page
  (points,) = _charts(page, "Batch reward")[0].values()
  assert len(points) == 7


def test_a_run_that_has_only_just_begun(tmp_path):
  folder = tmp_path / "run"
  folder.mkdir()
  (folder / "config.json").write_text('{"seed": 3}')
  assert "No step has been logged yet" in make_page([read(folder)])


def test_a_run_that_only_evaluates(tmp_path):
  folder = write_run(tmp_path / "run", steps=0)
  page = make_page([read(folder)])
  assert "25.0%" in page and "loss</code>" not in page
  for lines in _charts(page, "Held-out accuracy"):
    (((x, y),),) = lines.values()
    assert x == pytest.approx(0.0, abs=0.01) and y == pytest.approx(0.25, abs=0.01)


HOSTILE = '</pre></script><script>alert(1)</script><img src=x onerror="alert(2)">\' " &amp; \ud800 \x00'


def test_nothing_that_a_model_says_becomes_markup(tmp_path):
  folder = write_run(tmp_path / "a<b>&", response=HOSTILE)
  record = json.loads((folder / "rollouts" / "train.jsonl").read_text().splitlines()[0])
  record |= {"prompt": HOSTILE, "token_texts": [HOSTILE, HOSTILE]}
  (folder / "rollouts" / "eval.jsonl").write_text(metrics.to_json_line(record), errors="backslashreplace")
  text = make_page([read(folder)])
  page = _Page(text)
  assert page.count("script") == 1 and page.count("img") == 0 and page.count("b") == _Page(
    make_page([read(write_run(tmp_path / "tame"))])).count("b")
  assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
  shown = [text for text in page.texts["pre"] if "alert(1)" in text]
  assert shown and all(text.startswith("</pre></script><script>alert(1)</script>") for text in shown)
  assert 'onerror="alert(2)">\' " &amp; ' in shown[0] and "\x00" not in text
  tokens = [dict(attributes) for tag, attributes in page.tags if "data-tokens" in attributes]
  assert json.loads(tokens[-1]["data-tokens"])[0][0].startswith("</pre></script>")


def test_the_page_needs_nothing_else(tmp_path):
  text = make_page([read(write_run(tmp_path / "run"))])
  assert not re.findall(r"""(?:src|href)\s*=\s*["']?(?!["']?data:)|url\(|@import|https?:|\bfetch\(""", text)
  assert "prefers-color-scheme:dark" in text and "viewport" in text


def test_tokens_show_their_log_ratio_by_the_trainers_path(tmp_path):
  page = _Page(make_page([read(write_run(tmp_path / "run"))]))
  first = next(attributes for _, attributes in page.tags if "data-tokens" in attributes)
  assert json.loads(first["data-tokens"]) == [["5 +", 0.5, -0.5, -1.0], ["[8]", -0.0, -0.2501, -0.25]]
  rollout = next(attributes for _, attributes in page.tags if attributes.get("class") == "rollout")
  assert float(rollout["data-gap"]) == pytest.approx(1e-4) and float(rollout["data-ratio"]) == pytest.approx(0.4999)


# --- Several runs ---


def test_seeds_become_one_curve_with_a_band_and_configs_are_compared(tmp_path):
  folders = [write_run(tmp_path / f"a{seed}", seed=seed, reward=lambda step, seed=seed: step / 100 + seed)
             for seed in range(3)]
  folders.append(write_run(tmp_path / "b", loss="rloo"))
  everything = [read(folder) for folder in folders]
  groups = curves.group_runs(everything)
  assert [(group.name, len(group.runs)) for group in groups] == [("loss.name=tb_vargrad (3 seeds)", 3),
                                                                 ("loss.name=rloo", 1)]
  line = curves.curve(groups[0], [(run.train["step"], run.train["reward"]) for run in groups[0].runs], most=40)
  np.testing.assert_allclose(line.x, np.arange(1, 41))
  np.testing.assert_allclose(line.y, line.x / 100 + 1)
  np.testing.assert_allclose(line.low, line.x / 100)
  np.testing.assert_allclose(line.high, line.x / 100 + 2)
  page = make_page(everything)
  assert set(_charts(page, "Batch reward")[0]) == {"loss.name=tb_vargrad (3 seeds)", "loss.name=rloo"}
  table = page[page.index("<h2>Config</h2>"):]
  assert re.search(r"loss\.name</code></th>(<td>&quot;tb_vargrad&quot;</td>){3}<td>&quot;rloo&quot;</td>", table)
  assert table.index("loss.name") < table.index("keys that are the same in all") < table.index("loss.beta_init")


def test_a_mean_is_of_the_seeds_that_have_come_so_far(tmp_path):
  runs_read = [read(write_run(tmp_path / "long", seed=0)), read(write_run(tmp_path / "short", seed=1, steps=20,
                                                                          reward=lambda step: 1.0))]
  (group,) = curves.group_runs(runs_read)
  line = curves.curve(group, [(run.train["step"], run.train["reward"]) for run in runs_read], most=40)
  np.testing.assert_allclose(line.y[:20], (np.arange(1, 21) / 100 + 1) / 2)
  np.testing.assert_allclose(line.y[20:], np.arange(21, 41) / 100)


# --- Fewer points ---


def test_thinning_keeps_means_and_extremes():
  rng = np.random.default_rng(0)
  x, y = np.arange(1000.0), rng.normal(size=1000)
  y[::7] = np.nan
  thin_x, mean, low, high = curves.thinned(x, y, 60)
  known = np.flatnonzero(np.isfinite(y))
  parts = [known[int(len(known) * i / 60) : int(len(known) * (i + 1) / 60)] for i in range(60)]
  np.testing.assert_allclose(mean, [sum(y[i] for i in part) / len(part) for part in parts])
  np.testing.assert_allclose(thin_x, [sum(x[i] for i in part) / len(part) for part in parts])
  assert low.tolist() == [min(y[part]) for part in parts] and high.tolist() == [max(y[part]) for part in parts]


def _plot_boxes(chart, cls):
  """(left, width, height) of the boxes of one kind in a chart of lanes."""
  path = re.search(rf'<path d="([^"]*)" class="{cls}">', chart)[1]
  return [(float(x), float(right) - float(x), float(foot) - float(top)) for x, top, right, foot in
          re.findall(r"M([\d.]+) ([\d.]+)H([\d.]+)V([\d.]+)", path)]


def test_shares_of_time(tmp_path):
  activity = read(write_run(tmp_path / "run")).activity
  shares = charts.time_shares(activity)
  whole = 40 * STEP_SECS
  assert activity.actors == ("trainer", "searcher0")
  assert shares["trainer"]["step"] == pytest.approx(40 * 0.4 / whole)
  assert shares["trainer"]["wait"] == pytest.approx(40 * 0.1 / whole)
  assert shares["searcher0"]["decode"] == pytest.approx(40 * 0.3 / whole)
  assert charts.idle_secs(activity, 1) == pytest.approx(whole - 40 * 0.35)
  boxes = _plot_boxes(charts.overview(activity, bins=10), "f1")  # a bin holds 4 steps: its box is 80% of the lane
  assert len(boxes) == 10 and all(height == pytest.approx(0.8 * 30, abs=0.2) for _, _, height in boxes)


def test_a_stop_takes_no_room_in_the_timeline(tmp_path):
  folder = write_run(tmp_path / "run")
  lines = lines_of(folder / "timeline.jsonl")
  later = [{**line, "start_secs": line["start_secs"] + 5000, "end_secs": line["end_secs"] + 5000} for line in lines]
  (folder / "timeline.jsonl").write_text("".join(map(metrics.to_json_line, lines + later)))
  activity = read(folder).activity
  assert charts.time_shares(activity)["trainer"]["step"] == pytest.approx(0.8)
  assert "resumed" in charts.overview(activity)


def test_a_long_timeline_is_read_in_windows(tmp_path, monkeypatch):
  folder = write_run(tmp_path / "run", steps=4000)
  whole = charts.time_shares(read(folder).activity)
  monkeypatch.setattr(run_files, "_WHOLE_BYTES", 10_000)
  monkeypatch.setattr(run_files, "_WINDOW_BYTES", 20_000)
  monkeypatch.setattr(run_files, "_NUM_WINDOWS", 12)
  activity = read(folder).activity
  assert not activity.is_whole and len(activity.start) < 4000
  found = charts.time_shares(activity)
  for actor, kind in (("trainer", "step"), ("trainer", "wait"), ("searcher0", "decode")):
    assert found[actor][kind] == pytest.approx(whole[actor][kind], abs=0.02)


def test_the_map_of_staleness_counts_every_response(tmp_path):
  run = read(write_run(tmp_path / "run"))
  counts = [{1: 6, 40: 2}, {1: 8}] * 20
  run = run.__class__(**{**vars(run), "staleness": counts})
  (chart, *_) = charts.staleness_maps(run, columns=20).values()
  cells = {float(level): path.count("M") for path, level in
           re.findall(r'<path d="([^"]*)" class="cell" fill-opacity="([\d.]+)"', chart)}
  # 14 of 16 responses of each column are 1 old, 2 are 40 old: two shades, each in all 20 columns.
  # A shade goes by the root of 2 / 14, in eighths, upwards.
  assert cells == {1.0: 20, 0.5: 20}


def _large_run(folder, *, steps, keys):
  write_run(folder, steps=2)
  rng = np.random.default_rng(0)
  noise = {f"metric_{i}": 0.123456789012345 for i in range(keys)}
  base = lines_of(folder / "metrics.jsonl")[1]
  with open(folder / "metrics.jsonl", "w") as file:
    for step in range(1, steps + 1):
      file.write(json.dumps({**base, **noise, "step": step, "wall_seconds": step * 0.5, "wall_time": 1000 + step * 0.5,
                             "reward": rng.random(), "trained_tokens": step * 100}) + "\n")
  line = (folder / "rollouts" / "train.jsonl").read_text().splitlines()[0]
  record = {**json.loads(line), "response": "long " * 400}
  with open(folder / "rollouts" / "train.jsonl", "w") as file:
    for step in range(1, steps + 1):
      file.write(json.dumps({**record, "step": step}) + "\n")
  span = '{{"actor": "{}", "kind": "{}", "start_secs": {}, "end_secs": {}}}\n'
  with open(folder / "timeline.jsonl", "w") as file:
    for step in range(steps):
      for i in range(9):
        file.write(span.format(f"searcher{i % 2}", "decode", step + i / 10, step + i / 10 + 0.08))
      file.write(span.format("trainer", "step", step, step + 0.9))
  return folder


def _size_and_secs(folder):
  began = time.process_time()
  report.main([str(folder)])
  return (folder / "report.html").stat().st_size, time.process_time() - began


def test_a_run_of_many_steps_makes_a_small_page(tmp_path, monkeypatch):
  monkeypatch.setattr(run_files, "_WHOLE_BYTES", 2**20)
  size, secs = _size_and_secs(_large_run(tmp_path / "run", steps=5_000, keys=5))
  assert size < 2_500_000 and secs < 10


@pytest.mark.slow
def test_a_run_of_100_000_steps(tmp_path):
  folder = _large_run(tmp_path / "run", steps=100_000, keys=60)
  size, secs = _size_and_secs(folder)
  print(f"{size / 1e6:.2f} MB, {secs:.1f} s of CPU time")
  assert size < 5_000_000 and secs < 20


# --- The command, and a real run ---


def test_what_cannot_be_shown_is_refused_in_one_line(tmp_path, capsys):
  for folder, message in (
      (tmp_path / "none", rf"error: {tmp_path}/none holds no run \(there is no config.json in it\); give the --workdir "
       "of one\n"),
      (write_run(tmp_path / "run"), rf"error: {tmp_path}/run/metrics.jsonl, line 1: not JSON .*; delete the line\n")):
    if folder.exists():
      (folder / "metrics.jsonl").write_text("oops\n")
    with pytest.raises(SystemExit) as caught:
      report.main([str(folder)])
    assert caught.value.code == 2 and re.fullmatch(message, capsys.readouterr().err)
  (folder / "metrics.jsonl").write_text("")


@pytest.mark.parametrize("name, text, why", [
  ("config.json", "{", "JSONDecodeError: "),
  ("config.json", "[]", "ValueError: it is not a JSON object"),
  ("results.json", "[]", "ValueError: it is not a JSON object"),
  ("machine.json", '{"chip": "x"}', "TypeError: Limits.__init__() got an unexpected keyword argument 'chip'"),
  ("metrics.jsonl", '{"loss": 1}\n', "KeyError: 'step'"),
  ("metrics.jsonl", '{"step": 1}\n', "ValueError: no line of a step has trained_tokens, wall_seconds, wall_time"),
  ("timeline.jsonl", "\0\0\n", "JSONDecodeError: Expecting value"),
  ("timeline.jsonl", '{"actor": "trainer"}\n', "KeyError: 'kind'"),
  ("warnings.jsonl", '{"step": 1}\n', "KeyError: 'text'"),
  ("rollouts/train.jsonl", '{"st\n', "JSONDecodeError: "),
  ("rollouts/train.jsonl", "[1]\n", "TypeError: 'list' object is not a mapping"),
])  # fmt: skip
def test_a_damaged_file_is_named(tmp_path, capsys, name, text, why):
  folder = write_run(tmp_path / "run")
  (folder / name).write_text(text)
  with pytest.raises(SystemExit) as caught:
    report.main([str(folder)])
  line = capsys.readouterr().err
  assert caught.value.code == 2 and line.count("\n") == 1
  assert line.startswith(f"error: {folder}/{name} is damaged, or of another version ({why}")


def test_rollouts_of_a_policy_whose_probabilities_are_not_finite(tmp_path):
  folder = write_run(tmp_path / "run")
  record = json.loads((folder / "rollouts" / "train.jsonl").read_text().splitlines()[0])
  by_token = {"token_log_mu": ["NaN", -1.0], "token_log_ref": [-2.0, "-Infinity"], "token_log_pi": ["NaN", -1.0]}
  (folder / "rollouts" / "train.jsonl").write_text(
    metrics.to_json_line(record | by_token | {"reward": "NaN", "token_texts": ["a", "b"]}))
  page = _Page(make_page([read(folder)]))
  (tokens,) = [dict(attributes)["data-tokens"] for _, attributes in page.tags if "data-tokens" in dict(attributes)]
  assert json.loads(tokens, parse_constant=pytest.fail) == [
    ["a", "NaN", "NaN", -2.0], ["b", "Infinity", -1.0, "-Infinity"]]


def test_a_page_that_cannot_be_written_is_told_in_one_line(tmp_path, capsys):
  with pytest.raises(SystemExit) as caught:
    report.main([str(write_run(tmp_path / "run")), f"--out={tmp_path}/none/page.html"])
  line = f"error: {tmp_path}/none/page.html cannot be written (No such file or directory); give another file with --out"
  assert caught.value.code == 2 and capsys.readouterr().err == line + "\n"


def test_report_of_a_real_run(tmp_path, compile_once, easy_reward, capsys):
  import runs

  folder = tmp_path / "run"
  assert runs.run(runs.short_config(train__steps=4, eval__every_steps=2), folder) == 0
  assert f"python -m tba_jax.report {folder}" in capsys.readouterr().err
  lines = [line for line in runs.lines(folder) if "reward" in line]
  for line in lines:
    counts = {int(age): count for age, count in line["staleness_counts"].items()}
    assert sum(counts.values()) == 16 and max(counts) == line["staleness_max"]
    assert sum(age * count for age, count in counts.items()) / 16 == pytest.approx(line["staleness_mean"])
  rollouts = runs.lines(folder, "rollouts/train.jsonl")
  for record in rollouts:
    num = record["num_response_tokens"]
    assert len(record["token_ids"]) == len(record["token_texts"]) == len(record["token_log_ref"]) == num
    assert sum(record["token_log_mu"]) == pytest.approx(record["log_mu"], abs=1e-2)
    assert "".join(record["token_texts"]) == record["response"]
  compared = [record for record in rollouts if "token_log_pi" in record]
  assert compared
  for record in compared:
    np.testing.assert_allclose(record["token_log_pi"], record["token_log_mu"], atol=2e-4)
  report.main([str(folder), "--out", str(tmp_path / "page.html")])
  page = (tmp_path / "page.html").read_text()
  for text in ("finished, 4 steps", "Held-out accuracy", "Staleness over time", "Who did what when", "Rollouts to read",
               "searcher1", "publish", "data-tokens", "train.prompts_per_step", "Of the machine’s limit",
               "devices of kind cpu", "trainer, while a step runs"):
    assert text in page


def test_a_profile_of_chosen_steps(tmp_path, compile_once, easy_reward, capsys):
  import runs

  config = runs.short_config(runtime__mode="lockstep", train__steps=3, log__profile_steps=(2, 2))
  assert runs.run(config, tmp_path / "run") == 0
  assert f"profile written to {tmp_path}/run/profile" in capsys.readouterr().err
  (trace,) = (tmp_path / "run" / "profile").rglob("*.trace.json.gz")
  with gzip.open(trace) as file:
    names = {event.get("name", "") for event in json.load(file)["traceEvents"]}
  assert any("train_step" in name or "dispatch" in name for name in names), sorted(names)[:50]


# --- Scales ---


@pytest.mark.parametrize("low, high, expected", [
  (0.0, 1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (-3.0, 2.0, [-3, -2, -1, 0, 1, 2]), (0.0, 130.0, [0, 50, 100]),
  (1e-6, 5e-6, [1e-6, 2e-6, 3e-6, 4e-6, 5e-6]), (5.0, 5.0, [5.0])])
def test_ticks_are_round_and_few(low, high, expected):
  np.testing.assert_allclose(svg.ticks(low, high), expected)


@pytest.mark.parametrize("value, text", [
  (0.0, "0"), (0.30000000000000004, "0.3"), (1500, "1500"), (15000, "15k"), (2.5e6, "2.5M"), (3e-5, "3e-05"),
  (-0.5, "-0.5"), (120.0, "120")])
def test_numbers_as_people_read_them(value, text):
  assert svg.number_text(value) == text


def test_a_chart_alone_is_a_whole_svg_file(tmp_path):
  import xml.etree.ElementTree as ElementTree

  line = svg.Line("a < b & c", 1, np.arange(5.0), np.arange(5.0) ** 2)
  chart = svg.line_chart([line], title="squares", x_axis=svg.Axis("n"), y_axis=svg.Axis("n²"))
  root = ElementTree.fromstring(svg.standalone(chart, [("a < b & c", 1)]))
  texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
  assert "squares" in texts and "a < b & c" in texts and root.get("height") == "274"

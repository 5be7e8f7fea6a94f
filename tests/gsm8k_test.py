from __future__ import annotations

import json
import pathlib
import re
import sys
import time

import pytest
import tokenizers
import transformers

from tba_jax.tasks import gsm8k_data
from tba_jax.tasks.base import SupervisedTask
from tba_jax.tasks.gsm8k import Gsm8kTask, solution_text
from tba_jax.tokenizer import Tokenizer, make_tokenizer

ROWS = [
  {"question": "Tom has 3 pens and buys 4. How many?", "answer": "He has 3+4=<<3+4=7>>7 pens.\n#### 7"},
  {"question": "A car of $1,000 doubles in price. What is it?", "answer": "1000*2=$<<1000*2=2000>>2,000\n#### 2,000"},
  {"question": "It was 2 degrees and fell by 5. How cold?", "answer": "2-5=-3 since 2 < 5\n#### -3"},
]
CHAT_TEMPLATE = (
  "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
  "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def byte_tokenizer(*, chat: bool = False, metaspace: bool = False) -> Tokenizer:
  """One token a character, <s> before a text as Llama has it; `metaspace`: a space before any text by itself, too."""
  alphabet = {*map(chr, range(10, 127)), "\u2581"} if metaspace else tokenizers.pre_tokenizers.ByteLevel.alphabet()
  characters = sorted(alphabet)
  vocab = {token: index for index, token in enumerate(["<s>", "</s>", *characters])}
  backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
  if metaspace:
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = tokenizers.decoders.Metaspace(prepend_scheme="first", split=False)
  else:
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
  backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
  hf = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
  if chat:
    hf.chat_template = CHAT_TEMPLATE
  return make_tokenizer(hf, source="test")


def write_rows(folder: pathlib.Path, *, train=ROWS, test=ROWS[:1]) -> str:
  folder.mkdir(exist_ok=True)
  for name, rows in (("train", train), ("test", test)):
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf8")
  return str(folder)


def make_task(folder: str, **kwargs) -> Gsm8kTask:
  options = {"prompt_format": "rho_sft", "max_prompt_tokens": 256} | kwargs
  return Gsm8kTask(options.pop("tokenizer", byte_tokenizer()), jsonl_folder=folder, **options)


def test_prompts_of_the_sft_format(tmp_path):
  task = make_task(write_rows(tmp_path))
  assert isinstance(task, SupervisedTask)
  prompt = task.train_prompts()[1]
  assert prompt.text == "[MATH_TASK] Problem:\nA car of $1,000 doubles in price. What is it?\n\nSolution:"
  assert prompt.tokens[0] == task.tokenizer.bos_id and task.tokenizer.decode(prompt.tokens) == prompt.text
  assert [p.prompt_id for p in task.train_prompts()] == [0, 1, 2]
  assert [p.answer for p in task.train_prompts()] == ["7", "2,000", "-3"]
  assert [p.answer for p in task.eval_prompts()] == ["7"]


@pytest.mark.parametrize("metaspace", [False, True])
def test_examples_begin_with_a_newline_and_have_no_calculator_marks(tmp_path, metaspace):
  task = make_task(write_rows(tmp_path), tokenizer=byte_tokenizer(metaspace=metaspace))
  prompts, responses = zip(*task.sft_examples())
  assert [list(p.tokens) for p in task.train_prompts()] == list(prompts)
  assert responses[0][-1] == task.tokenizer.stop_ids[0]
  ids = task.tokenizer.hf.convert_ids_to_tokens(responses[0][:2])
  assert ids == (["\n", "H"] if metaspace else ["\u010a", "H"])  # no space token of its own before the newline
  texts = [task.response_text(response) for response in responses]
  if not metaspace:
    assert texts[0] == "\nHe has 3+4=7 pens.\n#### 7"
    assert texts[2] == "\n2-5=-3 since 2 < 5\n#### -3"
  assert [task.reward(p, text, truncated=False) for p, text in zip(task.train_prompts(), texts)] == [1, 1, 1]


def test_reward_is_of_the_response_alone(tmp_path):
  task = make_task(write_rows(tmp_path))
  prompt = task.train_prompts()[0]  # its question names 3 and 4
  encode = task.tokenizer.encode
  stop = [task.tokenizer.stop_ids[0]]
  for text, wanted in (("\nSo 7 pens.\n#### 7", 1), ("\n#### 8", 0), ("", 0), ("\nThe total is $7.00.", 1)):
    assert task.reward(prompt, task.response_text(encode(text) + stop), truncated=False) == wanted
  after_stop = encode("\n#### 8") + stop + encode("#### 7") + stop
  assert task.response_text(after_stop) == "\n#### 8"
  assert task.reward(prompt, task.response_text(after_stop), truncated=False) == 0


def test_chat_format(tmp_path):
  task = make_task(write_rows(tmp_path), prompt_format="chat", tokenizer=byte_tokenizer(chat=True))
  text = task.tokenizer.decode(task.train_prompts()[0].tokens)
  assert text.startswith(f"user\n{ROWS[0]['question']}\n\n") and text.endswith("\nassistant\n")
  assert "write #### followed by the answer" in text
  prompt, response = task.sft_examples()[0]
  assert prompt == task.train_prompts()[0].tokens.tolist()
  assert task.response_text(response) == "He has 3+4=7 pens.\n#### 7"
  with pytest.raises(ValueError, match="no chat template"):
    make_task(str(tmp_path), prompt_format="chat")
  with pytest.raises(ValueError, match="prompt_format='prose' is unknown; choose one of rho_sft, chat"):
    make_task(str(tmp_path), prompt_format="prose")


def test_long_prompts_are_refused_or_counted(tmp_path, capsys):
  short, long = ROWS[0], {"question": "Tom has " + "many " * 30 + "pens", "answer": "#### 7"}
  rows = [short] * 60 + [long] + [short] * 60
  task = make_task(write_rows(tmp_path, train=rows), max_prompt_tokens=100)
  assert task.num_dropped == {"train": 1, "test": 0}
  assert "dropped 1 of 121 train prompts longer than 100 tokens" in capsys.readouterr().out
  assert [p.prompt_id for p in task.train_prompts()] == [*range(120)]
  assert len(task.sft_examples()) == 120
  longest = len(f"<[MATH_TASK] Problem:\n{long['question']}\n\nSolution:")  # < stands for the begin-of-text token
  with pytest.raises(ValueError, match=rf"=100 would drop 2 of 122 train prompts \(the longest has {longest} tokens\)"):
    make_task(write_rows(tmp_path, train=[*rows, long]), max_prompt_tokens=100)
  assert make_task(write_rows(tmp_path, train=[*rows, long]), max_prompt_tokens=longest).num_dropped["train"] == 0


@pytest.mark.parametrize(
  ("line", "message"),
  [
    ('{"question": "Q", "answer": "#### 1"', "train.jsonl line 2 is not JSON"),
    ('{"question": "Q"}', "train.jsonl line 2 has no text 'answer' (found: ['question'])"),
    ('{"answer": "#### 1", "prompt": "Q"}', "train.jsonl line 2 has no text 'question' (found: ['answer', 'prompt'])"),
    ('{"question": 3, "answer": "#### 1"}', "train.jsonl line 2 has no text 'question'"),
    ("[1, 2]", "train.jsonl line 2 has no text 'question' (found: list)"),
    ('{"question": "Q", "answer": "It is 7."}', "train.jsonl line 2: the answer must end in '#### N'"),
    ('{"question": "Q", "answer": "#### many"}', "train.jsonl line 2: the answer must end in '#### N'"),
    ("[" * 100_000, "train.jsonl line 2 cannot be read as JSON (maximum recursion depth exceeded"),
    ('{"question": "Q", "answer": "#### 1", "id": ' + "9" * 5_000 + "}",
     "train.jsonl line 2 cannot be read as JSON (Exceeds the limit (4300 digits)"),
    ('{"question": "A \\ud83d", "answer": "#### 1"}',
     r"train.jsonl line 2 has half of a character in 'question' (\ud83d alone, which tokenizers refuse); write all"),
  ],
)
def test_malformed_lines_name_file_and_line(tmp_path, line, message):
  folder = write_rows(tmp_path)
  (tmp_path / "train.jsonl").write_text(json.dumps(ROWS[0]) + "\n" + line + "\n", encoding="utf8")
  with pytest.raises(ValueError, match=re.escape(message)):
    make_task(folder)


def test_bytes_that_are_no_utf8_name_file_and_line(tmp_path):
  folder = write_rows(tmp_path)
  row = json.dumps(ROWS[0]).encode() + b"\n"
  (tmp_path / "train.jsonl").write_bytes(b"\xef\xbb\xbf" + row + b'{"question": "Caf\xe9?", "answer": "#### 1"}\n')
  with pytest.raises(ValueError, match=r"train.jsonl line 2 is not UTF-8 \(byte 0xe9 at 18\); save the file as UTF-8"):
    make_task(folder)
  (tmp_path / "train.jsonl").write_bytes(b"\xef\xbb\xbf" + row)  # a byte order mark is no mistake
  assert len(make_task(folder).train_prompts()) == 1


def test_missing_data(tmp_path):
  with pytest.raises(ValueError, match="data folder .*absent does not exist; give a folder with train.jsonl and test"):
    make_task(str(tmp_path / "absent"))
  folder = write_rows(tmp_path)
  (tmp_path / "test.jsonl").unlink()
  with pytest.raises(ValueError, match="test.jsonl does not exist; the data folder must hold"):
    make_task(folder)
  (tmp_path / "test.jsonl").write_text("\n")
  with pytest.raises(ValueError, match="test.jsonl holds no rows"):
    make_task(folder)
  with pytest.raises(ValueError, match="split 'dev' is unknown; choose one of train, test"):
    gsm8k_data.load_rows("dev", jsonl_folder=folder)


def test_unprepared_tensorflow_datasets_is_refused_at_once(tmp_path, monkeypatch):
  started = time.monotonic()
  with pytest.raises(ValueError, match="GSM8K is not prepared in .*download_and_prepare.*or give --config.data.path="):
    gsm8k_data.load_rows("train", tfds_folder=str(tmp_path))
  monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "elsewhere"))
  with pytest.raises(ValueError, match="GSM8K is not prepared in .*elsewhere"):
    gsm8k_data.load_rows("train")
  assert time.monotonic() - started < 5


def test_prepared_tensorflow_datasets_give_the_same_rows(tmp_path, shared_data):
  for split, num_rows in (("train", 40), ("test", 10)):
    lines = (shared_data / "gsm8k" / f"{split}.jsonl").read_text(encoding="utf8").splitlines()[:num_rows]
    (tmp_path / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf8")
  prepared = tmp_path / "prepared"
  gsm8k_data.prepare_tfds(str(tmp_path), str(prepared))
  for split, num_rows in (("train", 40), ("test", 10)):
    theirs = gsm8k_data.load_rows(split, tfds_folder=str(prepared))
    ours = gsm8k_data.load_rows(split, jsonl_folder=str(tmp_path))
    assert len(ours) == num_rows
    assert sorted(row[:2] for row in theirs) == sorted(row[:2] for row in ours)
  task = Gsm8kTask(byte_tokenizer(), prompt_format="rho_sft", max_prompt_tokens=2_000, tfds_folder=str(prepared))
  assert len(task.train_prompts()) == 40 and len(task.eval_prompts()) == 10
  assert "tensorflow" not in sys.modules


def test_all_of_gsm8k(shared_data):
  task = make_task(str(shared_data / "gsm8k"), max_prompt_tokens=2_000)
  assert (len(task.train_prompts()), len(task.eval_prompts())) == (7_473, 1_319)
  prompts, answers = task.train_prompts(), gsm8k_data.load_rows("train", jsonl_folder=str(shared_data / "gsm8k"))
  solutions = [solution_text(row.answer) for row in answers]
  assert not any("<<" in solution or ">>" in solution for solution in solutions)
  assert all(task.reward(prompt, "\n" + text, truncated=False) == 1 for prompt, text in zip(prompts, solutions))

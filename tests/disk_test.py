"""Appending to a disk that is full for a while. The kernel refuses for real, by a limit on the size of a file."""

from __future__ import annotations

import errno
import json
import resource
import threading

import pytest

from tba_jax import disk as disk_lib
from tba_jax.disk import AppendedFile, Disk


class _Room:
  """Sets how many bytes a file may have, for as long as its block lasts and not longer: the limit is the process's, and
  pytest itself may be writing to a file."""

  def __enter__(self) -> _Room:
    self._before = resource.getrlimit(resource.RLIMIT_FSIZE)
    return self

  def __exit__(self, *exception) -> None:
    self.free()

  def limit(self, num_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, self._before[1]))

  def free(self) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, self._before)


@pytest.fixture
def said():
  return []


def test_what_a_full_disk_refuses_is_written_later_in_its_order_and_said_once(tmp_path, said):
  disk = Disk(said.append)
  files = [AppendedFile(tmp_path / name, disk=disk) for name in ("a", "b")]
  records = [bytes([ord("0") + number]) * 10 + b"\n" for number in range(10)]
  with _Room() as room:
    for number, record in enumerate(records):
      if number == 3:
        room.limit(40)  # 3 records and a part of the fourth
      if number == 8:
        room.free()
      for file in files:
        file.append(record)
      held = (tmp_path / "a").read_bytes()
      assert held == b"".join(records[: min(3, number + 1) if number < 8 else number + 1]), "whole records only"
  for file in files:
    file.close()
    assert file.num_lost == 0
  assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() == b"".join(records)
  assert len(said) == 2, said
  assert said[0] == (f"error: {tmp_path / 'a'} cannot be written (File too large); training goes on, and what the "
                     "run's files would get waits in memory; make room on the disk")
  assert said[1] == "the disk takes files again; what waited in memory is written"


def test_memory_for_what_waits_is_bounded_and_what_is_lost_is_said(tmp_path, said, monkeypatch):
  monkeypatch.setattr(disk_lib, "_MOST_WAITING_BYTES", 25)
  file = AppendedFile(tmp_path / "a", disk=Disk(said.append))
  file.append(b"0123456789")
  with _Room() as room:
    room.limit(10)
    for _ in range(4):
      file.append(b"abcdefghij")
    file.close()
  assert (tmp_path / "a").read_bytes() == b"0123456789"
  assert said[-1] == f"error: {tmp_path / 'a'} lacks 4 records, for which there was no room"
  file.append(b"after the end")
  assert (tmp_path / "a").read_bytes() == b"0123456789"


def test_a_file_that_cannot_even_be_made_is_made_later(tmp_path, said, monkeypatch):
  with monkeypatch.context() as patch:
    def no_room(*args, **kwargs):
      raise OSError(errno.ENOSPC, "No space left on device")
    patch.setattr("builtins.open", no_room)
    file = AppendedFile(tmp_path / "a", disk=Disk(said.append))
    file.append(b"1")
  file.append(b"2")
  assert (tmp_path / "a").read_bytes() == b"12"
  assert "No space left on device" in said[0]
  assert said[1:] == ["the disk takes files again; what waited in memory is written"]


def test_an_error_that_is_not_of_the_disk_is_raised(tmp_path):
  with pytest.raises(FileNotFoundError):
    AppendedFile(tmp_path / "no_such_folder" / "a").append(b"1")


def test_threads_lose_nothing_while_the_disk_comes_and_goes(tmp_path, said):
  file = AppendedFile(tmp_path / "a", disk=Disk(said.append))

  def work(number: int) -> None:
    for place in range(200):
      file.append(json.dumps([number, place]).encode() + b"\n")

  threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
  with _Room() as room:
    for thread in threads:
      thread.start()
    for num_bytes in (500, 2000, 5000):
      room.limit(num_bytes)
    for thread in threads:
      thread.join()
  file.append(b"[9, 9]\n")
  file.close()
  found = [tuple(json.loads(line)) for line in (tmp_path / "a").read_text().splitlines()]
  for number in range(4):
    assert [place for of, place in found if of == number] == list(range(200))

"""Writes GGUF files as llama.cpp's converter does, and dequantises by the letter of ggml's block layouts. Not a test
module."""

from __future__ import annotations

import json
import pathlib
import struct
from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np

import tiny_tokenizers

BYTE_LEVEL, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = "gpt2", 1, 2, 3, 4, 5, 6


def byte_level_metadata(*, num_rows: int = 0, pre: str = "gpt-2") -> dict[str, Any]:
  """Keys of the tiny byte-level tokenizer; rows of the embedding beyond its ids are listed as the converter does."""
  state = json.loads(tiny_tokenizers.byte_level_backend().to_str())
  vocab = sorted(state["model"]["vocab"], key=state["model"]["vocab"].__getitem__)
  padding = [f"[PAD{i}]" for i in range(len(vocab), num_rows)]
  num_special = len(tiny_tokenizers.SPECIALS)
  return {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": pre,
    "tokenizer.ggml.tokens": vocab + padding,
    "tokenizer.ggml.token_type": [CONTROL] * num_special
    + [NORMAL] * (len(vocab) - num_special)
    + [UNUSED] * len(padding),
    "tokenizer.ggml.merges": [" ".join(merge) for merge in state["model"]["merges"]],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 0,
    "tokenizer.ggml.eot_token_id": 2,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.chat_template": tiny_tokenizers.CHAT_TEMPLATE,
  }


def write(
  path: pathlib.Path,
  metadata: Mapping[str, Any],
  tensors: Mapping[str, np.ndarray | tuple[bytes, str, tuple[int, ...]]],
) -> pathlib.Path:
  """A tensor is an array (f32 or f16) or (bytes of its blocks, name of the type, shape slowest dimension first)."""
  writer = gguf.GGUFWriter(path, metadata["general.architecture"])
  for key, value in metadata.items():
    if key == "general.architecture":
      continue
    if isinstance(value, bool):
      writer.add_bool(key, value)
    elif isinstance(value, int):
      writer.add_uint32(key, value)
    elif isinstance(value, float):
      writer.add_float32(key, value)
    elif isinstance(value, str):
      writer.add_string(key, value)
    else:
      writer.add_array(key, value)
  for name, tensor in tensors.items():
    if isinstance(tensor, np.ndarray):
      writer.add_tensor(name, tensor)
    else:
      data, kind, shape = tensor
      writer.add_tensor(
        name, np.frombuffer(data, np.uint8).reshape(*shape[:-1], -1), raw_dtype=gguf.GGMLQuantizationType[kind]
      )
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


def f16(data: bytes) -> float:
  return struct.unpack("<e", data)[0]


# Bytes of a block, numbers in it, and where its f16 scales are.
BLOCKS = {
  "Q4_0": (18, 32, (0,)),
  "Q4_1": (20, 32, (0, 2)),
  "Q5_0": (22, 32, (0,)),
  "Q5_1": (24, 32, (0, 2)),
  "Q8_0": (34, 32, (0,)),
  "Q4_K": (144, 256, (0, 2)),
  "Q5_K": (176, 256, (0, 2)),
  "Q6_K": (210, 256, (208,)),
}


def random_blocks(kind: str, num_blocks: int, seed: int) -> bytes:
  """Any bits are a block, but its scales are made small and finite."""
  num_bytes, _, scales = BLOCKS[kind]
  rng = np.random.default_rng(seed)
  blocks = []
  for _ in range(num_blocks):
    block = bytearray(rng.integers(0, 256, num_bytes, np.uint8).tobytes())
    for at in scales:
      block[at : at + 2] = struct.pack("<e", rng.normal() * 0.01)
    blocks.append(bytes(block))
  return b"".join(blocks)


def dequantised(kind: str, data: bytes) -> list[float]:
  """Number by number, from the comments of ggml's C structures; shares nothing with the gguf package."""
  size = BLOCKS[kind][0]
  return [x for at in range(0, len(data), size) for x in _BLOCK[kind](data[at : at + size])]


def _q4(b: bytes, at: int, i: int) -> int:  # 32 nibbles: low halves are numbers 0 to 15, high halves 16 to 31
  return b[at + i] & 15 if i < 16 else b[at + i - 16] >> 4


def _bit(b: bytes, at: int, i: int) -> int:
  return b[at + i // 8] >> (i % 8) & 1


def _scale_and_min(s: bytes, j: int) -> tuple[int, int]:  # 8 scales and 8 minima of 6 bits in 12 bytes
  if j < 4:
    return s[j] & 63, s[j + 4] & 63
  return s[j + 4] & 15 | s[j - 4] >> 6 << 4, s[j + 4] >> 4 | s[j] >> 6 << 4


def _q4_k(b: bytes) -> list[float]:
  out = []
  for i in range(256):
    sub, pair = i // 32, i // 64  # 64 numbers share 32 bytes: first the low halves, then the high
    byte = b[16 + pair * 32 + i % 32]
    scale, low = _scale_and_min(b[4:16], sub)
    out.append(f16(b[0:2]) * scale * (byte & 15 if sub % 2 == 0 else byte >> 4) - f16(b[2:4]) * low)
  return out


def _q5_k(b: bytes) -> list[float]:
  out = []
  for i in range(256):
    sub, pair = i // 32, i // 64
    byte, high = b[48 + pair * 32 + i % 32], b[16 + i % 32] >> sub & 1
    scale, low = _scale_and_min(b[4:16], sub)
    out.append(f16(b[0:2]) * scale * ((byte & 15 if sub % 2 == 0 else byte >> 4) + 16 * high) - f16(b[2:4]) * low)
  return out


def _q6_k(b: bytes) -> list[float]:
  out = []
  for i in range(256):
    half, quarter, j = i // 128, i % 128 // 32, i % 32  # each half: 64 bytes of low nibbles, 32 bytes of two high bits
    byte = b[half * 64 + quarter % 2 * 32 + j]
    low = byte & 15 if quarter < 2 else byte >> 4
    high = b[128 + half * 32 + j] >> 2 * quarter & 3
    scale = struct.unpack("b", b[192 + i // 16 : 193 + i // 16])[0]
    out.append(f16(b[208:210]) * scale * (low + 16 * high - 32))
  return out


_BLOCK = {
  "Q4_0": lambda b: [f16(b[:2]) * (_q4(b, 2, i) - 8) for i in range(32)],
  "Q4_1": lambda b: [f16(b[:2]) * _q4(b, 4, i) + f16(b[2:4]) for i in range(32)],
  "Q5_0": lambda b: [f16(b[:2]) * (_q4(b, 6, i) + 16 * _bit(b, 2, i) - 16) for i in range(32)],
  "Q5_1": lambda b: [f16(b[:2]) * (_q4(b, 8, i) + 16 * _bit(b, 4, i)) + f16(b[2:4]) for i in range(32)],
  "Q8_0": lambda b: [f16(b[:2]) * struct.unpack("b", b[2 + i : 3 + i])[0] for i in range(32)],
  "Q4_K": _q4_k,
  "Q5_K": _q5_k,
  "Q6_K": _q6_k,
}

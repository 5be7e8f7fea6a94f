r"""Grades a completion whose answer is one number: `grade(completion, gold)` is 1.0 or 0.0.

An explicit answer counts before anything else: `#### 18` or `\boxed{18}`, then 'Answer: 18' / 'the answer is 18', then
the last number of the text. Numbers are compared exactly, as rationals. Nothing is evaluated: an answer has to BE a
number (with sign, thousands commas, currency, unit, percent, fraction, mixed number, or power of ten); `3 * 6` is not.
Policies:

  * several boxes, or a box and a `####`, must agree, and 'A or B' is no answer: hedging pays nothing. Of several `####`
    (or several 'answer is') the last one counts.
  * the hyphen of a range is not a sign: 'ages 3-5' ends in 5. After an explicit marker '3-5' is no answer.
  * without a marker the last number counts, even in '10-2=8, so 8 apples in 2 boxes'.
  * '25%' is right for 25 and for 0.25, '3 million' for 3 and for 3,000,000 (the question says which); '70k' is 70,000.
  * a decimal is right for a fraction without a finite decimal (2/3) within a relative 1e-4; all else must be equal.
  * number words ('two') are not numbers. Control characters are spaces. Numbers of more than 30 digits are no answers.
  * only the last 8,192 characters and the last 16 markers of a kind are read, which bounds the time for any text.

Plain Python on the calling thread: no clock, no process, no state. Knows no prompts: pass the completion only.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
import re
from typing import NamedTuple

MAX_CHARS = 8_192
MAX_MARKERS = 16
MAX_DIGITS = 30
FRACTION_TOLERANCE = Fraction(1, 10_000)


class Number(NamedTuple):
  """A number that a text gives, and the factor of a '%' or 'million' behind it, which questions often leave out."""

  value: Fraction
  factor: Fraction = Fraction(1)


_FRACTIONS = dict(zip("½⅓⅔¼¾⅕⅛⅜⅝⅞", "1/2 1/3 2/3 1/4 3/4 1/5 1/8 3/8 5/8 7/8".split()))
_SCALES = {"thousand": Fraction(10**3), "million": Fraction(10**6), "billion": Fraction(10**9)}

# What typography makes of ASCII; an em dash stays, it is a pause and never a sign.
_CHARACTERS = str.maketrans(
  {
    **{chr(code): " " for code in (*range(9), *range(11, 32), 127, 0xA0, 0x2002, 0x2003, 0x200B, 0xFEFF)},
    **{chr(0xFF10 + digit): str(digit) for digit in range(10)},
    **{char: f"^{digit}" for digit, char in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")},
    **{char: "-" for char in "−‐‑‒–﹣-"},
    **{char: f"\x01{text}" for char, text in _FRACTIONS.items()},
    **dict(zip("⁄∕÷×·∙⋅,.:%+⁻", "///****,.:%+-")),
    "\u202f": ",",  # as a thousands separator; elsewhere a comma does no harm
    "\u2009": ",",
    "≈": "=",
  }
)

_LATEX = tuple(
  (re.compile(pattern), replacement)
  for pattern, replacement in (
    (r"(?<=[0-9])\s?\x01", " "),  # a mixed number, where the fraction is one character
    (r"\x01", ""),
    (r"\{,\}|(?<=[0-9])\\,(?=[0-9]{3})", ","),
    (r"\\!", ""),
    (r"\\([$%#&])", r"\1"),
    (r"\^\s?\{?\\circ\}?|\\(?:left|right|displaystyle|[,;: ])", " "),
    (r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|bf)\s?\{([^{}]{0,200})\}", r" \1 "),
    (r"(?<![0-9])\\[dtc]?frac\s?\{\s?(-?[0-9.,]{1,40})\s?\}\s?\{\s?([0-9.,]{1,40})\s?\}", r"\1/\2"),
    (r"\\[dtc]?frac\s?\{\s?([0-9.,]{1,40})\s?\}\s?\{\s?([0-9.,]{1,40})\s?\}", r" \1/\2"),
    (r"(?<![0-9])\\[dtc]?frac\s?\{?([0-9])\}?\s?\{?([0-9])\}?", r"\1/\2"),
    (r"\\[dtc]?frac\s?\{?([0-9])\}?\s?\{?([0-9])\}?", r" \1/\2"),
    (r"\\(?:times|cdot|ast)(?![A-Za-z])", " * "),
    (r"\\(?:div|over)(?![A-Za-z])", " / "),
    (r"\\(?:approx|sim|equiv)(?![A-Za-z])", " = "),
    (r"\^\s?\{\s?([+-]?[0-9]{1,4})\s?\}", r"^\1"),
    (r"(?<![\w)*])\*\*(?=[^\s*])([^*\n]{1,80}?)\*\*(?!\w)", r" \1 "),  # markdown bold, not a power
    (r"(?<![\w)*])\*(?=[^\s*])([^*\n]{1,80}?)\*(?![\w*])", r" \1 "),
    (r"\\[()\[\]]|[`~]|(?<!\w)_{1,2}(?=\S)|(?<=\S)_{1,2}(?!\w)", " "),
    (r"(?<=[-+])\s?[$€£¥₹]\s?", ""),
    (r"[$€£¥₹]|(?<![A-Za-z])(?:US|USD|EUR|GBP|INR|Rs\.?)(?=\s?[-0-9])", " "),
  )
)

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})++(?![0-9])|[0-9]++)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.[0-9]++)?+|(?<![0-9A-Za-z).])\.[0-9]++)"
_NUMBER = re.compile(
  rf"""
    (?<![0-9A-Za-z_])
    (?P<sign>(?<![\w)\]%}}])[-+])?
    (?:10\s?(?:\^|\*\*)\s?(?P<power>[-+]?[0-9]++)|
      (?P<mantissa>{_DECIMAL})
      (?:
        [eE](?P<exponent>[-+]?[0-9]++)(?![0-9A-Za-z]) |
        \s{{0,3}}[x*]\s{{0,3}}10\s?(?:\^|\*\*)\s?(?P<times_ten_to>[-+]?[0-9]++) |
        \s{{0,3}}/\s{{0,3}}(?P<denominator>{_DECIMAL})(?!\s?/) |
        (?:\s{{1,2}}|\s?and\s|-)(?P<numerator>[0-9]{{1,6}}+)\s?/\s?(?P<part>[0-9]{{1,6}}+)(?!\s?/) |
      )
    )
    (?P<kilo>[kK]\b)?(?:\s?(?P<percent>%|percent\b)|\s(?P<scale>thousand|million|billion)\b)?
    (?![A-Za-z_]{{1,8}}[0-9])
  """,
  re.VERBOSE,
)

# A short unit may stand between a number and the operator after it, as in '3 apples + 4 apples = 7'.
_UNIT = r"\s*(?:[A-Za-z]{1,15}\.?\s+)?"
_OPERATOR = re.compile(rf"(?:{_UNIT}|[)}}\s]*)(?:\+|\*\*?|/|\^|x(?![A-Za-z]))[\s({{]*")
_MINUS = re.compile(rf"{_UNIT}-\s*|\s*(?=[-+]$)")
_EQUALS = re.compile(r"\s*(?:[A-Za-z]{1,15}\.?\s*)?[)}]?\s*=\s*")
_GLUE = re.compile(r"[.:,^_]")
_OR = re.compile(r"[\s(,]*(?:[A-Za-z]{1,15}[\s,]+)?(?:and/)?or(?:\s+(?:maybe|perhaps|possibly))?\s+", re.I)
_LIST = re.compile(r"\s*,\s+(?:and\s+)?|\s+|\s*(?:[A-Za-z]{1,15}\s+)?(?:and|to|vs\.?)\s+", re.I)
_LINKS = dict(glue=_GLUE, operator=_OPERATOR, minus=_MINUS, equals=_EQUALS, **{"or": _OR}, list=_LIST)
_DIRECT = re.compile(
  r"[\s:=(\[\"'*_]*(?:(?:therefore|thus|so|about|approximately|exactly|only|just|a total of|equal to|simply)[\s,:]+)?"
  r"(?:[A-Za-z]\s*=\s*)?[\s:(\[\"'*_]*(?:(?P<minus>[-+])\s)?",
  re.I,
)
_HASHES = re.compile(r"#{4,}")
_PHRASE = re.compile(
  r"\banswers?\b(?:[^\n.:=#0-9]{0,60}?(?:\bis\b|\bare\b|\bwas\b|\bwould be\b)|[\s*_\])]{0,6}[:=])\s*:?", re.I
)
_BOX = re.compile(r"\\f?boxed\s?\{")
_SENTENCE_END = re.compile(r"[.!?](?:\s|$)")
_NOT = re.compile(r"\bnot\s+$", re.I)


def grade(text: str, gold: str) -> float:
  r"""1.0 if the answer that a completion gives equals `gold`, else 0.0.

  Args:
    text: the completion only, without prompt and without what follows its stop token. Any string; never raises for it.
    gold: one number as people write it ('1,080', '-7', '2/3', '$18'), or a tuple of numbers ('(1,\frac{9}{2})').
  Raises: ValueError if `gold` is neither.
  """
  if (golds := _parse_tuple(gold)) is not None:
    return float(any(_tuples_equal(found, golds) for found in _answer_tuples(text)))
  wanted = _parse_one(gold)
  if wanted is None:
    raise ValueError(f"gold answer {gold[:80]!r} is not a number (nor a tuple of numbers), so nothing can equal it.")
  found = _find_answer(_normalise(text))
  return float(found is not None and _equal(found, wanted))


def extract(text: str) -> Fraction | None:
  """The number that `grade` would compare, or None where the completion gives none."""
  found = _find_answer(_normalise(text))
  return None if found is None else found.value


def _normalise(text: str) -> str:
  """LaTeX, Markdown, currency and Unicode variants to plain ASCII numbers."""
  text = text[-MAX_CHARS:].translate(_CHARACTERS)[-MAX_CHARS:]
  for pattern, replacement in _LATEX:
    text = pattern.sub(replacement, text)
  return text


def _decimal(text: str) -> Fraction | None:
  text = text.replace(",", "")
  return Fraction(text if text[0] != "." else "0" + text) if len(text) <= MAX_DIGITS else None


def _value(match: re.Match[str]) -> Fraction | None:
  """The value of a match of _NUMBER; None if it is too long, has a denominator of 0 or a power that is not small."""
  power = match["exponent"] or match["times_ten_to"] or match["power"] or "0"
  if len(power) > 3 or abs(int(power)) > MAX_DIGITS:
    return None
  value = _decimal(match["mantissa"]) if match["mantissa"] else Fraction(1)
  if value is None:
    return None
  denominator = match["denominator"] or match["part"]
  if denominator:
    below = _decimal(denominator)
    if not below:
      return None
    value = value / below if match["denominator"] else value + int(match["numerator"]) / below
  sign = -1 if match["sign"] == "-" else 1
  return sign * value * Fraction(10) ** int(power) * (1000 if match["kilo"] else 1)


def _number(match: re.Match[str] | None, *, negate: bool = False) -> Number | None:
  value = None if match is None else _value(match)
  if value is None:
    return None
  factor = Fraction(1, 100) if match["percent"] else _SCALES.get(match["scale"] or "", Fraction(1))
  return Number(-value if negate else value, factor)


def _find_numbers(text: str) -> list[re.Match[str]]:
  return [match for match in _NUMBER.finditer(text) if not _NOT.search(text, max(0, match.start() - 8), match.start())]


def _link(text: str, left: re.Match[str], right: re.Match[str]) -> str:
  """How two numbers that follow each other belong together: a key of _LINKS, or '' (not at all)."""
  gap = text[left.end() : right.start()]
  if len(gap) > 40 or "\n" in gap:
    return ""
  if right["sign"] and not gap.strip():
    return "minus"
  return next((kind for kind, pattern in _LINKS.items() if pattern.fullmatch(gap)), "")


def _direct_answer(text: str, numbers: list[re.Match[str]]) -> re.Match[str] | None:
  """The answer that starts with the first of `numbers`: C of 'A op B = C'; None for an expression, list or 'A or B'."""
  answer, is_open = numbers[0], False
  for left, right in zip(numbers, numbers[1:]):
    link = _link(text, left, right)
    if link in ("operator", "minus"):
      is_open = True
    elif link == "equals" and (is_open or answer["denominator"]):
      answer, is_open = right, False
    elif link in ("glue", "or", "list"):
      return None
    else:
      break
  return None if is_open else answer


def _last_answer(text: str, numbers: list[re.Match[str]]) -> re.Match[str] | None:
  """The last of `numbers`, unless it is a part of an expression, a time, or a choice."""
  if len(numbers) > 1 and _link(text, numbers[-2], numbers[-1]) in ("operator", "glue", "or"):
    return None
  return numbers[-1]


def _marked_answer(text: str, *, must_be_direct: bool) -> tuple[bool, Number | None]:
  """(whether the text after a marker gives an answer, the answer). Only its first line that is not blank counts."""
  lines = text.lstrip(" \t*_").split("\n", 2)
  line = next((line for line in lines[:2] if line.strip(" \t*_:$")), "")
  numbers = _find_numbers(line)
  if not numbers:
    return False, None
  direct = _DIRECT.fullmatch(line, 0, numbers[0].start())
  if direct:
    answer = _direct_answer(line, numbers)
    return True, _number(answer, negate=direct["minus"] == "-" and answer is numbers[0])
  if must_be_direct:
    return False, None
  sentence_end = _SENTENCE_END.search(line, numbers[0].end())
  if sentence_end:
    numbers = [number for number in numbers if number.end() <= sentence_end.start()]
  return True, _number(_last_answer(line, numbers))


def _boxes(text: str) -> Iterator[str]:
  """Contents of the last `\\boxed{...}`, braces balanced; an unclosed one ends with the text; none that is empty."""
  for match in list(_BOX.finditer(text))[-MAX_MARKERS:]:
    depth, end = 1, match.end()
    limit = min(len(text), match.end() + 400)
    while end < limit and depth:
      depth += {"{": 1, "}": -1}.get(text[end], 0)
      end += 1
    if content := text[match.end() : end - 1 if depth == 0 else end].strip():
      yield content


def _boxed_answer(content: str) -> Number | None:
  numbers = _find_numbers(content)
  if not numbers:
    return None
  if _DIRECT.fullmatch(content, 0, numbers[0].start()):
    return _number(_direct_answer(content, numbers))
  return _number(numbers[0]) if len(numbers) == 1 else None


def _last_marked(text: str, marker: re.Pattern[str], *, must_be_direct: bool) -> tuple[bool, Number | None]:
  """What the last marker that is followed by a number says: (whether there is one, its answer)."""
  ends = [match.end() for match in marker.finditer(text)][-MAX_MARKERS:]
  answers = (_marked_answer(text[end : end + 400], must_be_direct=must_be_direct) for end in reversed(ends))
  return next((found for found in answers if found[0]), (False, None))


def _find_answer(text: str) -> Number | None:
  """The number that a normalised completion gives as its answer."""
  explicit = [_boxed_answer(content) for content in _boxes(text)]
  is_marked, answer = _last_marked(text, _HASHES, must_be_direct=True)
  if is_marked:
    explicit.append(answer)
  if explicit:
    return explicit[0] if len({answer and answer.value for answer in explicit}) == 1 else None
  is_marked, answer = _last_marked(text, _PHRASE, must_be_direct=False)
  if is_marked:
    return answer
  numbers = _find_numbers(text)
  return _number(_last_answer(text, numbers)) if numbers else None


def _has_finite_decimal(value: Fraction) -> bool:
  rest = value.denominator
  for prime in (2, 5):
    while rest % prime == 0:
      rest //= prime
  return rest == 1


def _equal(found: Number, wanted: Number) -> bool:
  if found.factor == wanted.factor:
    return _values_equal(found.value, wanted.value)
  if 1 in (found.factor, wanted.factor) and _values_equal(found.value, wanted.value):
    return True
  return _values_equal(found.value * found.factor, wanted.value * wanted.factor)


def _values_equal(found: Fraction, wanted: Fraction) -> bool:
  if found == wanted or _has_finite_decimal(wanted):
    return found == wanted
  return abs(found - wanted) <= FRACTION_TOLERANCE * abs(wanted)


def _parse_one(text: str) -> Number | None:
  """A text that is one number with at most a unit behind it."""
  text = _normalise(text).strip(" \t\n.")
  numbers = _find_numbers(text)
  if len(numbers) != 1 or text[: numbers[0].start()].strip() or re.search("[0-9]", text[numbers[0].end() :]):
    return None
  return _number(numbers[0])


def _parse_tuple(text: str) -> tuple[Number, ...] | None:
  """'(1,4.5)' as numbers; None if it is not a parenthesised list of two or more."""
  match = re.fullmatch(r"\s*\(([^()]*)\)\s*", _normalise(text))
  parts = [_parse_one(part) for part in match[1].split(",")] if match else []
  return tuple(parts) if len(parts) > 1 and None not in parts else None


def _answer_tuples(text: str) -> list[tuple[Number, ...]]:
  """The tuple that a completion gives, or none: from its boxes if it has any (they must agree), else the last one."""
  text = _normalise(text)
  boxes = [_parse_tuple(content) for content in _boxes(text)]
  if boxes:
    agree = None not in boxes and all(_tuples_equal(box, boxes[0]) for box in boxes)
    return boxes[:1] if agree else []
  last = re.findall(r"\([^()]{1,200}\)", text)[-1:]
  found = _parse_tuple(last[0]) if last else None
  return [] if found is None else [found]


def _tuples_equal(left: tuple[Number, ...], right: tuple[Number, ...]) -> bool:
  return len(left) == len(right) and all(_equal(a, b) for a, b in zip(left, right))

"""Final answers, found in a reply and compared exactly after normalising; and the program in a reply.

No algebra: 0.5 and 1/2 are two answers. Nothing here runs what a model wrote.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from dflash_local.bench.tasks.table import Item

Scoring = Literal["number", "mathematics", "tests", "text", "none"]

_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[-+]?\.\d+")
_FENCE = re.compile(r"```[ \t]*([A-Za-z0-9_+-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_DEFINED = re.compile(r"^(?:async[ ]+)?def[ ]+([A-Za-z_]\w*)", re.MULTILINE)
_CALLED = re.compile(r"([A-Za-z_]\w*)\s*\(")
MAX_DIGITS = 400  # of a number that is compared by value; a longer one by its letters
_IN_TESTS = {"assert", "not", "all", "any", "abs", "round", "set", "sorted", "len", "tuple", "list", "str", "isclose"}


def score(scoring: Scoring, item: Item, text: str, run_program: Callable[[str], str] | None) -> str | None:
    """Of a reply's final text: right or wrong; of code passed, failed or timed out; None where nothing is compared.

    Args:
        run_program: runs a whole program and returns passed, failed or timed out; None runs no code.
    """
    if scoring == "tests":
        return None if run_program is None else run_program(program(text, item.before, item.tests, item.entry))
    if scoring == "none" or (scoring == "text" and not item.gold):
        return None
    answers: dict[str, Callable[[str], str | None]] = {"number": number_answer, "mathematics": math_answer}
    found = answers.get(scoring, str.strip)(text)
    return "right" if found is not None and found == item.gold else "wrong"


def number_gold(answer: str) -> str | None:
    """The number after GSM8K's ``####``, normalised; None where there is none."""
    _, mark, last = answer.rpartition("####")
    found = _NUMBER.search(last) if mark else None
    return None if found is None else normal_number(found.group())


def number_answer(reply: str) -> str | None:
    """The number in the last ``\\boxed{}``, else the last number of the reply, normalised; None without any."""
    inside = last_boxed(reply)
    found = _NUMBER.findall(inside) if inside is not None else []
    found = found or _NUMBER.findall(reply)
    return normal_number(found[-1]) if found else None


def math_gold(answer: str) -> str:
    """The right answer of MATH-500 as ``math_answer`` gives a reply's."""
    return normal_math(answer)


def math_answer(reply: str) -> str | None:
    """What stands in the last ``\\boxed{}``, else the last number, normalised; None without any."""
    inside = last_boxed(reply)
    if inside is not None:
        return normal_math(inside)
    found = _NUMBER.findall(reply)
    return normal_number(found[-1]) if found else None


def last_boxed(text: str) -> str | None:
    """The contents of the last ``\\boxed{...}`` whose braces are closed; None where there is none."""
    at = len(text)
    while (at := text.rfind("\\boxed", 0, at)) >= 0:
        start = at + len("\\boxed")
        while text[start : start + 1] == " ":
            start += 1
        if text[start : start + 1] == "{" and (end := _closing(text, start)) >= 0:
            return text[start + 1 : end]
    return None


def _closing(text: str, start: int) -> int:
    """Where the brace at ``start`` is closed; -1 where it is not."""
    depth, at = 0, start
    while at < len(text):
        letter = text[at]
        if letter == "\\":
            at += 1
        elif letter == "{":
            depth += 1
        elif letter == "}":
            depth -= 1
            if depth == 0:
                return at
        at += 1
    return -1


def normal_number(text: str) -> str:
    """``1,234.50`` and ``+1234.5`` as ``1234.5``; what is no number, or a very long one, as it is."""
    plain = text.replace(",", "").strip()
    if len(plain) > MAX_DIGITS:
        return plain
    try:
        value = Decimal(plain)
    except InvalidOperation:
        return plain
    if not value.is_finite() or abs(value.adjusted()) > MAX_DIGITS:
        return plain
    if value == value.to_integral_value():
        return str(int(value))
    return format(value.normalize(), "f")


_DROPPED = re.compile(
    r"\\left(?![a-z])|\\right(?![a-z])|\\[!,;:]|\\ |\\\$|\$|\^\{?\\circ\}?|\\degree|\\%|%|\\displaystyle|~|\s"
)
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf|mbox|textrm)\s*\{([^{}]*)\}")
_SHORT_FRACTION = re.compile(r"\\frac(\d)(\d)(?!\d)")
_SIMPLE_FRACTION = re.compile(r"(-?)\\frac\{(-?\d+)\}\{(\d+)\}")
_SHORT_ROOT = re.compile(r"\\sqrt(\d)(?!\d)")
_ASSIGNED = re.compile(r"^[A-Za-z](?:\\in|=)(?=.)")


def normal_math(text: str) -> str:
    """LaTeX of an answer without what only sets it: spaces, sizes, units' text boxes, ways to write a fraction."""
    plain = text.strip().rstrip(".")
    plain = _TEXT.sub(lambda found: found.group(1), plain)
    plain = plain.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    plain = _DROPPED.sub("", plain)
    plain = _SHORT_ROOT.sub(r"\\sqrt{\1}", _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", plain))
    plain = _ASSIGNED.sub("", plain)
    plain = _SIMPLE_FRACTION.sub(lambda found: f"{found[1]}{found[2]}/{found[3]}", plain)
    return normal_number(plain) if _NUMBER.fullmatch(plain) else plain


def program_of(reply: str, entry: str = "") -> str:
    """The code of a reply: its last fenced block that defines ``entry``, else its last block, else all of it."""
    blocks = [code for language, code in _FENCE.findall(reply) if language.lower() in ("", "python", "py", "python3")]
    for code in reversed(blocks):
        if entry and entry in _DEFINED.findall(code):
            return str(code)
    return str(blocks[-1]) if blocks else reply


def program(reply: str, before: str, tests: str, entry: str) -> str:
    """The whole program that must run to its end for a reply to be right.

    With ``entry`` the task's own beginning stands before the reply's code: its imports hold there, and what defines
    the function again replaces it. Without, the last function of the reply stands for the one that the tests call.
    """
    code = program_of(reply, entry)
    if entry:
        return f"{before}\n{code}\n\n{tests}\n"
    defined = _DEFINED.findall(code)
    called = [name for line in tests.splitlines() if line.startswith("assert") for name in _CALLED.findall(line)]
    wanted = next((name for name in called if name not in _IN_TESTS), "")
    other = f"{wanted} = {defined[-1]}\n" if wanted and defined and wanted not in defined else ""
    return f"{code}\n\n{other}{tests}\n"

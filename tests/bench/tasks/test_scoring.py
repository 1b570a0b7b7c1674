"""Answers known to be right and wrong, for each task."""

from __future__ import annotations

import pytest

from dflash_local.bench.tasks import scoring
from dflash_local.bench.tasks.table import TASKS
from tests.bench.tasks.data_files import file_of


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("So she has \\boxed{1,003} apples.", "1003"),
        ("It is 12, then 4.\n#### 1003", "1003"),
        ("First \\boxed{5}, no: \\boxed{$1003.00}", "1003"),
        ("The total is $1,003.", "1003"),
        ("-3.50 degrees", "-3.5"),
        ("\\boxed{}, that is 7", "7"),
        ("in the year 2024, 1003 apples", "1003"),
        ("no idea", None),
        ("9" * 500, "9" * 500),
    ],
)
def test_the_last_number_is_the_answer(reply: str, answer: str | None) -> None:
    assert scoring.number_answer(reply) == answer


def test_gsm8k_compares_with_the_number_after_the_hashes() -> None:
    items = TASKS["gsm8k"].items(file_of("gsm8k"), None)
    assert [item.gold for item in items] == ["4", "1003", "10"]
    assert scoring.number_gold("<<2+2=4>> so #### -1,234.0") == "-1234" and scoring.number_gold("4") is None


@pytest.mark.parametrize(
    ("reply", "gold"),
    [
        ("\\boxed{\\dfrac{3}{4}}", "\\frac{3}{4}"),
        ("\\boxed{\\frac34}", "\\frac{3}{4}"),
        ("so \\boxed{ \\left( 3, \\frac{\\pi}{2} \\right) }.", "\\left( 3, \\frac{\\pi}{2} \\right)"),
        ("\\boxed{x = 5}", "5"),
        ("\\boxed{10\\%}", "10"),
        ("\\boxed{90^\\circ}", "90"),
        ("\\boxed{\\text{Evelyn}}", "\\text{Evelyn}"),
        ("\\boxed{1,000.0}", "1000"),
        ("The answer is 42.", "42"),
        ("\\boxed{\\sqrt2}", "\\sqrt{2}"),
        ("\\boxed{3/4}", "\\frac{3}{4}"),
    ],
)
def test_mathematics_written_in_another_way_is_right(reply: str, gold: str) -> None:
    assert scoring.math_answer(reply) == scoring.math_gold(gold)


@pytest.mark.parametrize(
    ("reply", "gold"),
    [
        ("\\boxed{\\frac{4}{3}}", "\\frac{3}{4}"),
        ("\\boxed{(3, \\pi)}", "(3,\\frac{\\pi}{2})"),
        ("\\boxed{0.75}", "\\frac{3}{4}"),
        ("\\boxed{\\frac{3}{4}", "\\frac{3}{4}"),
        ("\\boxed{-5}", "5"),
        ("nothing", "0"),
    ],
)
def test_another_answer_is_wrong(reply: str, gold: str) -> None:
    assert scoring.math_answer(reply) != scoring.math_gold(gold)


def test_the_last_closed_box_counts() -> None:
    assert scoring.last_boxed("\\boxed{1} \\boxed {a{b}\\}c} \\boxed{2") == "a{b}\\}c"
    assert scoring.last_boxed("\\boxed") is None


WHOLE = "Here:\n```python\ndef helper():\n    return 1\n```\nand\n```python\ndef total(xs):\n    return sum(xs)\n```\n."


def test_the_block_that_defines_the_function_is_the_program() -> None:
    assert scoring.program_of(WHOLE, "helper").startswith("def helper")
    assert scoring.program_of(WHOLE, "total").startswith("def total")
    assert scoring.program_of(WHOLE).startswith("def total"), "the last one where no name is known"
    assert scoring.program_of("```python\ndef f(): ...") == "def f(): ...", "a reply cut at its limit"
    assert scoring.program_of("return 1") == "return 1"


def outcome(name: str, reply: str) -> str:
    """Run here what a test wrote, as the sandbox would."""
    item = TASKS[name].items(file_of(name), 1)[0]
    try:
        exec(scoring.program(reply, item.before, item.tests, item.entry), {})
    except (AssertionError, NameError, SyntaxError) as error:
        return type(error).__name__
    return "passed"


@pytest.mark.parametrize(
    ("name", "reply", "end"),
    [
        ("humaneval", WHOLE, "passed"),
        ("humaneval", "```python\ndef total(xs: List[int]):\n    return sum(xs)\n```", "passed"),
        ("humaneval", "    return sum(xs)\n", "passed"),
        ("humaneval", "```python\ndef total(xs):\n    return 3\n```", "AssertionError"),
        ("humaneval", "I cannot do that.", "SyntaxError"),
        ("mbpp", "```python\ndef double(n):\n    return n + n\n```", "passed"),
        ("mbpp", "```\ndef twice(n):\n    return n + n\n```", "passed"),
        ("mbpp", "```python\ndef double(n):\n    return n * n\n```", "AssertionError"),
        ("mbpp", "```python\nx = 1\n```", "NameError"),
    ],
)
def test_programs_pass_and_fail(name: str, reply: str, end: str) -> None:
    assert outcome(name, reply) == end

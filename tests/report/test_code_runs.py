"""Code found in a text that grows: its parts, and no character of it moved."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dflash_local.report.code_runs import code_runs

TEXT = "Look:\n```python\ndef f():  # why\n    return 'x'\n```\nand\n~~~odd\na\tb"


def test_the_parts_of_code_are_told_in_a_known_language_and_code_goes_on_to_an_open_end() -> None:
    found = [(TEXT[run.start : run.end], run.kind) for run in code_runs(TEXT)]
    assert {("```python\n", "fence"), ("def", "keyword"), ("f", "name"), ("# why", "comment")} <= set(found)
    assert "".join(word for word, kind in found if kind == "string") == "'x'"
    assert found[-2:] == [("~~~odd\n", "fence"), ("a\tb", "code")]


@given(st.text("`~\n p:a\t"))
def test_runs_are_in_order_and_within_the_text(text: str) -> None:
    at = 0
    for run in code_runs(text):
        assert at <= run.start <= run.end <= len(text)
        at = run.end

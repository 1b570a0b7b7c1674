"""``dflash_local.load``: a pair from Python, in the program's own process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="loads a model, and torch is not installed here")

import dflash_local  # noqa: E402
from dflash_local.errors import UnknownModelError, UsageError  # noqa: E402
from dflash_local.events import Event, Finished, Step  # noqa: E402
from dflash_local.request import Message  # noqa: E402

PAGE = Path(__file__).resolve().parents[2] / "docs" / "python.md"


def text_of(events: list[Event]) -> str:
    return "".join(piece.text for event in events if isinstance(event, Step) for piece in event.pieces)


def test_the_example_of_the_docs_runs(capsys: pytest.CaptureFixture[str]) -> None:
    example = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert example is not None
    exec(example[1].replace("smollm2", "demo"), {})
    said = capsys.readouterr().out
    assert len(said) > 20 and float(said.splitlines()[-1]) > 1


def test_a_conversation_is_continued_and_drafting_changes_nothing() -> None:
    talk = [Message("user", "What is 3 + 4?"), Message("assistant", "7."), Message("user", "What is 5 + 4?")]
    with dflash_local.load("demo", context=256) as pair:
        drafted, plain = (list(pair.generate(talk, mode=mode)) for mode in ("dflash", "ar"))
        assert text_of(drafted) == text_of(plain) and "9" in text_of(drafted)
        assert isinstance(drafted[-1], Finished) and pair.facts.context == 256 and pair.facts.pid is None
        with pytest.raises(UsageError, match="temperature"):
            pair.generate("hi", temperature=-1.0)
    with pytest.raises(UnknownModelError, match="demmo"):
        dflash_local.load("demmo")

"""Nothing a model writes may act on a terminal, however it is cut; and no stream may fail on a character."""

from __future__ import annotations

import io
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_local.terminal import TerminalFilter, byte_size, colour_enabled, encodable, safe, safe_line, width

NASTY = st.text(st.sampled_from("ab\x1b[]\\\x07\r\n\t\x9b\x9d\u202e\u200d\u0301\ud800\u200e é🙂"), max_size=40)


def dangerous(text: str) -> list[str]:
    return [
        c for c in text if (unicodedata.category(c) in ("Cc", "Cs") and c not in "\n\t") or c in "\u202e\u2066\u2069"
    ]


def test_what_is_shown_is_readable() -> None:
    assert safe("\x1b[31mred\x1b[0m\x07") == "␛[31mred␛[0m␇"
    assert safe("\x9b31m \u202e.") == "\\x9b31m \\u202e."
    assert safe("a\r\nb\rc\r") == "a\nb␍c␍"
    assert safe("tab\tline\n") == "tab\tline\n"
    assert safe_line("a\nb\t\x1b") == "a␊b␉␛"


@given(NASTY, st.lists(st.integers(0, 40), max_size=6))
def test_any_cut_gives_the_same_text(text: str, cuts: list[int]) -> None:
    whole = safe(text)
    filtered, start, out = TerminalFilter(), 0, ""
    for cut in [*sorted(cuts), len(text)]:
        out += filtered.feed(text[start : max(start, cut)])
        start = max(start, cut)
    assert out + filtered.finish() == whole
    assert dangerous(whole) == []


@given(st.text(st.characters(codec=None), max_size=60))
@settings(max_examples=300)
def test_no_text_at_all_gets_a_control_through(text: str) -> None:
    shown = safe(text)
    assert dangerous(shown) == []
    shown.encode("utf-8")
    assert safe(shown) == shown


def test_marks_are_bounded_per_cell() -> None:
    assert len(safe("a" + "\u0301" * 10_000)) <= 9
    assert len(safe("a" + "\u200d\u0301\u200b" * 3_000 + "b")) <= 10
    assert safe("\x07" * 3) == "␇␇␇"


@pytest.mark.parametrize(
    "text",
    ["👨‍👩‍👧‍👦", "🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f", "नमस्ते", "می‌خواهم", "é", "שָׁלוֹם"],
)
def test_real_writing_is_left_alone(text: str) -> None:
    assert safe(text) == text


def test_marks_are_counted_across_feeds() -> None:
    filtered = TerminalFilter()
    assert len("".join(filtered.feed("\u0301") for _ in range(100))) == 8


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8", "utf-16", None, "no-such-encoding"])
def test_every_encoding_can_write_the_result(encoding: str | None) -> None:
    text = encodable("plain é 你好 🙂 \ud83d ␛", encoding)
    assert text.startswith("plain ")
    known = encoding if encoding not in (None, "no-such-encoding") else "ascii"
    assert text.encode(known).decode(known) == text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colour_needs_a_willing_terminal() -> None:
    assert colour_enabled(Terminal(), {"TERM": "xterm"})
    assert not colour_enabled(Terminal(), {"TERM": "xterm", "NO_COLOR": "1"})
    assert colour_enabled(Terminal(), {"TERM": "xterm", "NO_COLOR": ""})
    assert not colour_enabled(Terminal(), {"TERM": "dumb"})
    assert not colour_enabled(io.StringIO(), {"TERM": "xterm"})
    closed = io.StringIO()
    closed.close()
    assert not colour_enabled(closed, {})


def test_width_prefers_columns() -> None:
    assert width(environ={"COLUMNS": "20"}) == 20
    assert width(72, environ={"COLUMNS": "wide"}) == 72
    assert width(environ={"COLUMNS": "0"}, stream=io.StringIO()) == 80
    assert width() == 80


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (2**20, "1.0 MiB"),
        (51904512, "49.5 MiB"),
        (17.98 * 2**30, "17.98 GiB"),
        (2000 * 2**30, "2,000.0 GiB"),
    ],
)
def test_sizes_carry_their_unit(count: float, text: str) -> None:
    assert byte_size(count) == text

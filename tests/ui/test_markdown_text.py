"""Markdown as rows: the same however it comes, at every width, selected and copied by its words."""

from __future__ import annotations

import random

import pytest
from textual.content import Content

from dflash_local.ui.tui.lines import EMPTY, PlainLayout, TextLine, TextTable, rows_of, shares
from dflash_local.ui.tui.markdown import CODE_LINES, MarkdownLayout
from dflash_local.ui.tui.text_view import MAX_OPEN, TextView
from tests.ui.stage import Stage, saying, staged

EVERYTHING = """# First

Some **bold** and *leaning* words, ~~struck~~, `code` and a [link](http://example.com).
Next line.\\
Broken line.

- one
- two
  - two and a half
    1. deep
- three

1. loose

2. loose too

   with more

> Quoted words
>
> > twice
> - in a list

| name | speed |
|:-----|------:|
| a | 1.5 |
| bb | 120 |

---

```python
def f():
    return 1

```

    indented

-
![picture](http://example.com/p.png) <b>as it is</b>
"""
LAID_OUT = """First

Some bold and leaning words, struck, code and a link. Next line.
Broken line.

• one
• two
  ▪ two and a half
    1. deep
• three

1. loose

2. loose too

   with more

▌ Quoted words
▌
▌ ▌ twice
▌
▌ • in a list

name │ speed
─────┼──────
a    │   1.5
bb   │   120

────────────────────────────────────────────────────────────────

 def f():
     return 1

 indented

•

[image: picture] <b>as it is</b>"""


def laid_out(bits: list[str], width: int = 64) -> list[str]:
    layout = MarkdownLayout()
    for bit in bits:
        layout.add(bit)
    lines = [line for item in (*layout.closed, *layout.open) for line in item.at(width)]
    return [(row.hang + row.text).plain.rstrip() for line in lines for row in rows_of(line, 0, width)]


def test_every_kind_of_block_is_laid_out() -> None:
    assert "\n".join(laid_out([EVERYTHING])) == LAID_OUT


@pytest.mark.parametrize("most", [1, 2, 3, 9, 60])
def test_it_looks_the_same_in_whatever_bits_it_comes(most: int) -> None:
    chooser = random.Random(most)
    bits, at = [], 0
    while at < len(EVERYTHING):
        size = chooser.randint(1, most)
        bits.append(EVERYTHING[at : at + size])
        at += size
    assert "\n".join(laid_out(bits)) == LAID_OUT


@pytest.mark.parametrize("width", [1, 7, 20, 200])
def test_no_row_is_wider_than_the_screen_and_no_word_is_lost(width: int) -> None:
    words = "".join("".join(laid_out([EVERYTHING], width)).split())
    if width >= 20:
        assert max(map(len, laid_out([EVERYTHING], width))) <= width
    for word in ("First", "leaning", "Broken", "Quoted", "return1", "indented", "asitis"):
        assert word in words.replace("▌", ""), word


@pytest.mark.parametrize(
    ("text", "times"),
    [("A paragraph of words.\n\n", 300), ("- an item\n", 300), ("1. an item\n\n", 300), ("    x = 1\n\nplain\n", 300)],
    ids=["paragraphs", "list", "loose list", "mixed"],
)
def test_what_an_addition_lays_out_anew_stays_small(text: str, times: int) -> None:
    layout = MarkdownLayout()
    for _ in range(times):
        layout.add(text)
        assert layout.open_size <= 3 * len(text) and len(layout.open) <= 6
    assert len(layout.closed) >= times - 1


def test_a_long_code_block_closes_its_earlier_lines() -> None:
    layout = MarkdownLayout()
    layout.add("before\n\n```python\n")
    for number in range(50):
        layout.add(f"def f{number}():\n    a = 1\n    b = 2\n\n    return a + b\n\n\n")
        assert len(layout.open) <= 3 * CODE_LINES + 8
    layout.add("```\nafter\n")
    lines = [line.plain for item in (*layout.closed, *layout.open) for line in item.at(80)]
    code = "".join(f" def f{n}():\n     a = 1\n     b = 2\n \n     return a + b\n \n \n" for n in range(50))
    assert "\n".join(lines) == "before\n\n" + code.rstrip(" \n") + "\n\nafter"


def test_code_of_an_unknown_language_is_not_coloured() -> None:
    layout = MarkdownLayout()
    layout.add("```nonesuch\nreturn 1\n```\n\n```python title=x\nreturn 1\n```\n")
    plain, _, coloured = [line for item in (*layout.closed, *layout.open) for line in item.at(80)]
    assert plain.plain == coloured.plain == " return 1" and not plain.text.spans and coloured.text.spans


def test_the_columns_of_a_table_share_what_room_there_is() -> None:
    assert shares([3, 40, 40], 63) == [3, 30, 30] and shares([3, 4], 80) == [3, 4] and shares([9, 9], 2) == [1, 1]
    wide = TextTable(((Content("a"), Content("b")), (Content("x"), Content("some long words"))), ("left", "left"))
    assert [line.plain for line in wide.at(13)] == ["a │ b", "──┼──────────", "x │ some long", "  │ words"]


def test_a_wrapped_row_knows_where_it_begins_in_its_line() -> None:
    line = TextLine(Content("some words to wrap"), Content("• "), Content("  "))
    rows = rows_of(line, 3, 12)
    assert [(row.start, row.hang.plain, row.text.plain) for row in rows] == [
        (0, "", "• some words"),
        (13, "  ", "to wrap"),
    ]
    assert line.plain[13:] == "to wrap" and {row.line for row in rows} == {3}


def test_plain_text_keeps_its_lines_and_cuts_what_is_too_long() -> None:
    layout = PlainLayout([TextLine(EMPTY)])
    for bit in ("one\n", "\ntw", "o\n" + "x" * 9_000):
        layout.add(bit)
    text = [item.plain for item in (*layout.closed, *layout.open) if isinstance(item, TextLine)]
    assert text[:4] == ["", "one", "", "two"] and [len(part) for part in text[4:]] == [4000, 4000, 1000]


@staged(lambda: saying("".join(f"part {n}\n\n```\ncode\n```\n\n" for n in range(200))))
async def test_a_long_reply_is_one_widget(stage: Stage) -> None:
    await stage.send("x")
    view = stage.chat.transcript.replies[0]
    assert len(list(view.walk_children())) == 2, "its text and its figures"
    assert view.query_one(TextView).size.height > 400 and "part 199" in stage.screen_text
    await stage.press("pageup", "pageup")
    assert "part 199" not in stage.screen_text and "part 18" in stage.screen_text


UNENDING = "- item\n\n" + "  words\n\n" * (MAX_OPEN // 4)


@staged(lambda: saying(UNENDING + "end"))
async def test_a_block_that_never_ends_goes_on_as_plain_text(stage: Stage) -> None:
    await stage.send("x")
    assert stage.chat.query_one(TextView).plain and stage.chat.transcript.replies[0].text == UNENDING + "end"
    assert "end" in stage.screen_text


@staged(lambda: saying("A line **bold** " + "words " * 15 + "end\n\n- item\n"), size=(90, 30))
async def test_text_is_selected_with_the_mouse_and_copied_as_it_was_before_it_was_wrapped(stage: Stage) -> None:
    await stage.send("x")
    await stage.pilot.mouse_down(TextView, offset=(7, 0))
    await stage.pilot.hover(TextView, offset=(3, 3))
    await stage.pilot.mouse_up(TextView, offset=(3, 3))
    assert stage.app.screen.get_selected_text() == "bold " + "words " * 15 + "end\n\n• it"
    await stage.press("ctrl+c")
    assert stage.app.clipboard.startswith("bold words") and not stage.app.screen.get_selected_text()


@staged(lambda: saying("# Words\n" + "words " * 40))
async def test_a_theme_paints_and_a_resize_wraps_the_text_anew_and_the_origins_come_and_go(stage: Stage) -> None:
    def colours() -> set[str]:
        return {str(segment.style.color) for segment in view.render_line(0) if segment.style is not None}

    await stage.send("x")
    view = stage.chat.query_one(TextView)
    before, dark = view.size.height, colours()
    stage.app.theme = "textual-light"
    await stage.until(lambda: not dark & colours())
    await stage.pilot.resize_terminal(40, 30)
    await stage.until(lambda: view.size.height > before)
    await stage.pilot.resize_terminal(120, 36)
    await stage.until(lambda: view.size.height == before)
    await stage.press("f3", "f3")
    text = stage.screen_text
    assert text.index("words") < text.index("1 token · "), "the text stands above its figures again"

"""Text made safe for the page's Markdown: no tag outside code that was written anew, the same in any bits."""

from __future__ import annotations

import random
import re

import pytest

from dflash_local.events import Piece
from dflash_local.ui.web.text import SafeMarkdown, by_origin, markdown

BITS = (
    *'``` ~~~ ` `` $ $$ \\[ \\] \\( \\) <b> </b> <!-- x " ( ![ ]( \\ | # py mermaid < <?php'.split(),
    *("<img src=x>", "[a]: /u ", "\n", "\n", "\n\n", "    ", "\t", "- ", "1. ", "> ", "|-|-|\n", "===\n", " "),
)
OWN = re.compile(r"<code>[^<]*</code>")


def outside_fences(text: str) -> str:
    """What is left when the blocks of code at the left margin are taken out."""
    kept: list[str] = []
    ticks = ""
    for line in text.split("\n"):
        if ticks:
            ticks = "" if line == ticks else ticks
        elif (found := re.match(r"(`{3,})[a-z0-9+#._-]+$", line)) is not None:
            ticks = found.group(1)
        else:
            kept.append(line)
    assert not ticks, "every block of code is closed"
    return "\n".join(kept)


def random_texts(count: int) -> list[str]:
    draw = random.Random(5)
    return ["".join(draw.choice(BITS) for _ in range(draw.randrange(1, 40))) for _ in range(count)]


def test_no_tag_is_left_outside_code() -> None:
    for text in random_texts(6000):
        left = OWN.sub(" ", outside_fences(markdown(text)))
        assert not re.search(r"<[A-Za-z/!?]", left), (text, left)


def test_the_bits_a_text_comes_in_do_not_matter() -> None:
    draw = random.Random(6)
    for text in random_texts(3000):
        whole, at = SafeMarkdown(), 0
        while at < len(text):
            size = draw.randrange(1, 9)
            whole.feed(text[at : at + size])
            at += size
        left = OWN.sub(" ", outside_fences(whole.text))
        assert not re.search(r"<[A-Za-z/!?]", left), (text, left)
        assert _words(whole.text) == _words(markdown(text)), text


def _words(text: str) -> str:
    """Empty lines may come in other numbers."""
    return re.sub(r"\n\s*", "\n", text).strip("\n")


@pytest.mark.parametrize(
    "text, shown",
    [
        ("a < b and x<y", "a < b and x&lt;y"),
        ("\\<i> \\\\<i>", "&lt;i> \\\\&lt;i>"),
        ("`a` and `List<T>`", "`a` and <code>List&#60;T&#62;</code>"),
        ("![p](http://a/b.png)", "!\\[p](http://a/b.png)"),
        ("[p](javascript:x) [q](https://a) [r](mailto:a@b)", "[p]\\(javascript:x) [q](https://a) [r](mailto:a@b)"),
        ("[a]: /u", "[a]\\: /u"),
        ("```mermaid\nA<b>\n```", "\n```text\nA<b>\n```"),
        ("````\n```\n````", "\n````text\n```\n````"),
        ("1. do\n   ```sh\n   ls <a>\n   ```\n   so\n2. then", "1. do\n\n```bash\nls <a>\n```\nso\n\n2. then"),
        ("- do\n  ```sh\n  ls\n  ```", "- do\n  ```sh\n  ls\n  ```"),
        ("> ```\n> <a>\n> ```", "\n```text\n<a>\n```"),
    ],
)
def test_markdown_stays_what_it_was(text: str, shown: str) -> None:
    assert markdown(text) == shown


def test_a_text_too_long_to_lay_out_goes_on_as_it_is() -> None:
    whole = SafeMarkdown()
    for _ in range(40):
        whole.feed("word <b> " * 400 + "\n\n")
    assert len(whole.text) > 140_000
    assert whole.text.rstrip().endswith("```") and "<b>" not in outside_fences(whole.text)


def test_origins_are_one_line_of_harmless_html() -> None:
    pieces = [Piece("<b>*x*\n\n", origin="accepted"), Piece(" <i>", origin="bonus"), Piece("\n", origin="bonus")]
    html = by_origin(pieces)
    assert "\n" not in html and "*" not in html
    assert "".join(re.findall(r"<[^>]*>", html)) == '<div class="df-origins"><span></span><u></u><u></u></div>'
    assert "‹&#60;i&#62;›" in html


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("so $x^2$ is", "so \ue000x^2\ue001 is"),
        (r"\(a<b\) and \[c\]", "\ue000a\\lt b\ue001 and \ue002c\ue003"),
        ("$$\na_1 * b_1\n$$", "\ue002\na_1 * b_1\n\ue003"),
        ("from $5 to $10", "from $5 to $10"),
        ("`$x$`", "`$x$`"),
        ("\ue000<b>\ue001", "\ufffd&lt;b>\ufffd"),
    ],
)
def test_formulas_are_marked_and_prices_code_and_forged_marks_are_not(text: str, shown: str) -> None:
    whole = SafeMarkdown()
    whole.feed(text)
    assert whole.text == shown

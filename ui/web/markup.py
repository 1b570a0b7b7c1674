"""Small pieces of HTML, every word in them made harmless. Knows no components and no models."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dflash_local.errors import DFlashError
from dflash_local.terminal import safe, safe_line

BADGE = '<span class="df-served">served</span>'


def word(value: object) -> str:
    return html.escape(safe_line(str(value)))


def paragraph(text: str, kind: str = "note") -> str:
    """Make a line of its own; ``kind`` is note or error. Empty for no text."""
    role = "alert" if kind == "error" else "status"
    return f'<p class="df-line df-{kind}" role="{role}">{word(text)}</p>' if text else ""


def failed(error: DFlashError) -> str:
    """Show an error as one plain line, with the fix."""
    return paragraph(str(error), "error")


def block(text: str) -> str:
    """Show text that is laid out already, in columns."""
    return f'<pre class="df-text" tabindex="0">{html.escape(safe(text))}</pre>'


def facts(pairs: Mapping[str, object]) -> str:
    """Show names and their values."""
    rows = "".join(f'<tr><th scope="row">{word(name)}</th><td>{word(value)}</td></tr>' for name, value in pairs.items())
    return f'<table class="df-facts"><tbody>{rows}</tbody></table>'


def table(titles: Sequence[str], rows: Iterable[Sequence[object]], last: Sequence[object] | None = None) -> str:
    """Show rows of figures; too wide for the window, it scrolls. ``last`` is set off below them."""
    head = "".join(f'<th scope="col">{word(title)}</th>' for title in titles)
    body = "".join(_row(row) for row in rows)
    foot = f"<tfoot>{_row(last)}</tfoot>" if last is not None else ""
    return (
        '<div class="df-scroll" tabindex="0"><table class="df-table">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>{foot}</table></div>"
    )


def _row(cells: Sequence[object]) -> str:
    return f"<tr>{''.join(f'<td>{word(cell)}</td>' for cell in cells)}</tr>"


def progress(text: str, fraction: float | None) -> str:
    """Draw a bar under its words; without a fraction it only says that something goes on."""
    share = None if fraction is None else round(100 * min(max(fraction, 0.0), 1.0))
    value = "" if share is None else f' aria-valuenow="{share}"'
    style = "" if share is None else f' style="width:{share}%"'
    return (
        f'<div class="df-progress"><span>{word(text)}</span>'
        f'<div class="df-bar" role="progressbar" aria-label="{word(text)}" aria-valuemin="0" aria-valuemax="100"'
        f"{value}><div{style}></div></div></div>"
    )


def save_link(label: str, name: str, kind: str, content: str) -> str:
    """Make a link that saves text under ``name``; the file lies in the link, so the server stores nothing."""
    data = base64.b64encode(content.encode("utf-8", "replace")).decode("ascii")
    href = f"data:{kind};charset=utf-8;base64,{data}"
    return f'<a class="df-save" download="{word(name)}" href="{href}">{word(label)}</a>'


def saved(label: str, name: str, content: Mapping[str, Any]) -> str:
    """Make a line with a link that saves a JSON file."""
    return f'<p class="df-line">{save_link(label, name, "application/json", json.dumps(content, indent=1))}</p>'

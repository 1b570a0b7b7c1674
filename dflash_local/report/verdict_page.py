"""A certificate as one page of one screen, for somebody who was not there: what was asked, of what, and what was found.

It holds no script and asks no other machine for anything.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dflash_local.bench.certificate import ORDER
from dflash_local.tables import counted
from dflash_local.terminal import safe_line

PAGE = Path(__file__).with_name("verdict_page.html")
# Verdict -> what it is called on the page, and how it looks.
WORDS: Mapping[str, tuple[str, str]] = {
    "identical": ("The same text", "good"),
    "near-tie": ("The same but for near-ties", "good"),
    "empty": ("Nothing to compare", "open"),
    "unknown": ("Different, and not judged", "open"),
    "unsteady": ("A server that does not repeat itself", "bad"),
    "wide": ("Not the target's own text", "bad"),
    "BUG": ("Not the target's own text", "bad"),
}
SAMPLED = ("Sampled otherwise than asked", "bad")


def to_html(report: Mapping[str, Any], of_what: str, command: str) -> bytes:
    """The page of a report of ``dflash certify``.

    Args:
        of_what: the pair, and the engine where it was loaded here. command: repeats it.
    """
    sampled = report.get("sampled") or {}
    verdict, kind = WORDS[report["verdict"]]
    if kind == "good" and sampled.get("name"):
        verdict, kind = SAMPLED
    title, worst = _worst(report)
    holes = {
        "TITLE": _text(f"dflash certify, {of_what}"),
        "KIND": kind,
        "VERDICT": _text(verdict),
        "STATEMENT": _text(report["statement"]),
        "FACTS": "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in _facts(report)),
        "WORST_TITLE": _text(title),
        "WORST": worst,
        "COMMAND": html.escape(command),
        "PROMISE": _text(report["promise"]),
    }
    page = PAGE.read_text(encoding="utf-8")
    # One hole after another from the left: what is put in is not looked at again.
    first, *parts = page.split("{{")
    return (first + "".join(holes[name] + rest for name, _, rest in (part.partition("}}") for part in parts))).encode()


def _facts(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    prompts = report["prompts"]
    asked = f"{counted(len(prompts), 'prompt')}, replies of {report['max_new_tokens']} tokens at most"
    yield "asked", f"{asked}, {report['sampling']}" if "sampling" in report else asked
    for name, server in (report.get("servers") or {}).items():
        yield f"{name} server", ", ".join(_server(server))
    if "strength" in report and report["strength"] is not None:
        yield "strength", report["strength"]
    if report.get("sampled"):
        yield "sampled", report["sampled"]["line"].partition(": ")[2]
    versions = report.get("versions") or {}
    yield "judged by", f"dflash-local {versions.get('dflash-local', '')}".rstrip()


def _server(server: Mapping[str, Any]) -> Iterator[str]:
    yield f"{server['program']} {server['version'] or ''}".rstrip()
    yield server["model"]
    yield "without drafts" if server["drafts"] is False else server["method"] or "drafts"
    gives = server.get("gives") or {}
    lacks = [name.replace("_", " ") for name, has in gives.items() if has is False]
    if lacks:
        yield f"gives no {', no '.join(lacks)}"


def _worst(report: Mapping[str, Any]) -> tuple[str, str]:
    """The title and the HTML of the worst place."""
    parted = [run for run in report["runs"] if run["divergence"] is not None]
    if not parted:
        tokens = sum(run["tokens"] for run in report["runs"])
        return "The worst place", f"<p>There is none: {tokens:,} drafted tokens are those of the plain replies.</p>"
    run = max(parted, key=lambda one: (ORDER.index(one["verdict"]), one["divergence"]["margin"] or 0.0))
    found = run["divergence"]
    where = f"The worst place: prompt {run['prompt'] + 1}, {found['unit']} {found['index']}"
    prefix = f"<p>behind <q>{_quoted(found['prefix'])}</q></p>" if found.get("prefix") else ""
    sides = (("ar", "without drafting"), ("dflash", "with drafting"))
    both = "".join(
        f"<p>{name}: <q>{_quoted(found[f'{side}_text'] or 'the end')}</q>{_id(found[f'{side}_id'])}</p>"
        for side, name in sides
    )
    return where, f"{prefix}{both}<p>{_text(_margin(found))}</p>{_again(found)}"


def _margin(found: Mapping[str, Any]) -> str:
    if found["border"]:
        return "The two lie at a filter's border."
    if found["margin"] is None and found["over"] is None:
        return f"How near the two were is not known: {found['unknown']}."
    size = f"over {found['over']:.3g}" if found["margin"] is None else f"{found['margin']:.3g}"
    near = (found["margin"] or found["over"]) <= found["threshold"]
    kind = "a near-tie, which rounding may turn" if near else "more than rounding explains"
    return f"The target prefers its own token by {size}: {kind} (up to {found['threshold']:.3g})."


def _again(found: Mapping[str, Any]) -> str:
    if found.get("repeated") is None:
        return ""
    plain, drafted = found["repeated"]
    again = f"the plain server wrote the same {plain} times, the drafting one {drafted} times"
    return f"<p>Asked three times again, {again}.</p>"


def _id(token: int | None) -> str:
    return "" if token is None else f" (token {token})"


def _quoted(value: str) -> str:
    return _text(value.replace("\n", "\u21b5"))


def _text(value: str) -> str:
    return html.escape(safe_line(value))

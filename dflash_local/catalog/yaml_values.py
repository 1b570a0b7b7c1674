"""Typed values out of a strict YAML tree. A text that YAML itself would read as something else must be
quoted; a number must be written in plain digits. Nothing is converted silently."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import NoReturn

from dflash_local.catalog.yaml_reader import Node
from dflash_local.terminal import safe_line

NULLS = ("", "~", "null")
INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?")
TAGS = {"bool": "true or false", "int": "a number", "float": "a number", "null": "nothing", "timestamp": "a date"}
MAX_SHOWN = 60


def is_null(node: Node | None) -> bool:
    """True for a missing key, ``null``, ``~`` and an empty value."""
    return node is None or (node.plain and isinstance(node.value, str) and node.value in NULLS)


def mapping(node: Node, allowed: Mapping[str, str] | Sequence[str] | None, what: str) -> dict[str, Node]:
    """The entries of a mapping.

    Args:
        allowed: the keys it may have; None allows any. A mapping of key to place also knows keys that
            belong elsewhere, for a better suggestion: place "" is here.
        what: the mapping's name in errors.
    """
    if not isinstance(node.value, dict):
        node.fail(f"{what}: expected a mapping, got {node.what}")
    if allowed is not None:
        places = allowed if isinstance(allowed, Mapping) else dict.fromkeys(allowed, "")
        for key, value in node.value.items():
            if places.get(key, "elsewhere"):
                value.fail(f"{what}: unknown key {shown(key)}", suggestion(key, places))
    return node.value


def suggestion(key: str, places: Mapping[str, str]) -> str:
    """The hint for an unknown key: the nearest allowed one, or the whole list."""
    here = [name for name, place in places.items() if not place]
    for pool in (here, list(places)):
        close = difflib.get_close_matches(key, pool, n=1, cutoff=0.7)
        if close:
            place = places[close[0]]
            return f"did you mean {close[0]!r}{f' of {place}' if place else ''}?"
    return f"allowed: {', '.join(here)}"


def items(node: Node | None, what: str) -> list[Node]:
    """The entries of a list; none for null."""
    if node is None or is_null(node):
        return []
    if not isinstance(node.value, list):
        node.fail(f"{what}: expected a list, got {node.what}")
    return node.value


def text(node: Node | None, what: str) -> str | None:
    """A text on one line, control characters shown as signs; None for null."""
    if node is None or is_null(node):
        return None
    value = _scalar(node, what)
    if node.plain:
        kind = _other_kind(value)
        if kind:
            node.fail(f"{what} is a text, but YAML reads {shown(value)} as {kind}", f'quote it: "{value}"')
    value = value.strip()
    return value if value.isprintable() else safe_line(value)


def choice(node: Node | None, what: str, choices: Sequence[str], default: str | None) -> str | None:
    """One word of ``choices``; ``default`` for a missing key or null."""
    if node is None or is_null(node):
        return default
    value = _scalar(node, what)
    # "off" is a word here, whatever YAML makes of it.
    if value not in choices:
        close = difflib.get_close_matches(value, choices, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        node.fail(f"{what}: {shown(value)} is not allowed", f"{hint}allowed: {', '.join(choices)}")
    return value


def integer(node: Node | None, what: str, low: int, high: int) -> int | None:
    """A whole number from ``low`` to ``high``; None for null."""
    if node is None or is_null(node):
        return None
    value = _scalar(node, what)
    # The length bounds the work before int() does any.
    if not node.plain or not INTEGER.fullmatch(value) or len(value) > 20 or not low <= int(value) <= high:
        _out_of_range(node, what, value, f"a whole number from {low} to {high}")
    return int(value)


def number(node: Node | None, what: str, low: float, high: float) -> float | None:
    """A number from ``low`` to ``high``; None for null."""
    if node is None or is_null(node):
        return None
    value = _scalar(node, what)
    if not node.plain or not NUMBER.fullmatch(value) or len(value) > 30 or not low <= float(value) <= high:
        _out_of_range(node, what, value, f"a number from {low:g} to {high:g}")
    return float(value)


def flag(node: Node | None, what: str) -> bool | None:
    """``true`` or ``false``; None for null."""
    if node is None or is_null(node):
        return None
    value = _scalar(node, what)
    if not node.plain or value not in ("true", "false"):
        node.fail(f"{what}: {shown(value)} is not allowed", "allowed: true, false, null")
    return value == "true"


def shown(value: str) -> str:
    """A text of the file as errors quote it: escaped and short."""
    return repr(value if len(value) <= MAX_SHOWN else f"{value[:MAX_SHOWN]}...")


def _scalar(node: Node, what: str) -> str:
    if not isinstance(node.value, str):
        node.fail(f"{what}: expected a single value, got {node.what}")
    return node.value


def _out_of_range(node: Node, what: str, value: str, allowed: str) -> NoReturn:
    quoted = "" if node.plain else " (a text)"
    node.fail(f"{what} = {shown(value)}{quoted} is not allowed", f"allowed: {allowed}, or null")


def _other_kind(value: str) -> str:
    """What YAML 1.1 would read a plain scalar as, if not as a text."""
    from yaml.resolver import Resolver

    for tag, pattern in Resolver.yaml_implicit_resolvers.get(value[:1], []):
        kind = str(tag).rpartition(":")[2]
        if kind in TAGS and pattern.match(value):
            return TAGS[kind]
    return ""

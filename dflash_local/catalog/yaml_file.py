"""YAML files as plain values that know their lines; no duplicate keys, aliases, tags, second document, deep nesting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash_local.errors import SettingsError

MAX_BYTES = 1_000_000
MAX_DEPTH = 12
NULLS = ("", "~", "null", "Null", "NULL")
FIX = "correct the file; indent with spaces, not tabs"


class Unquoted(str):
    """A scalar without quotes that YAML reads as something else than a text: ``no``, ``3.10``, ``1:30``."""


class Section(dict[str, Any]):
    """A mapping; its values are None, texts, ``Unquoted``, lists and ``Section``.

    Attributes:
        place: file and line where it begins. places: of each key. key: that whose value is being read.
    """

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.places: dict[str, str] = {}
        self.key: str | None = None


def content(path: Path) -> bytes:
    """What a file holds. SettingsError: too large or unreadable. FileNotFoundError, NotADirectoryError: none there."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise SettingsError(f"{path} is larger than {MAX_BYTES:,} bytes", "split it or remove what is not needed")
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}", "make it readable or remove it") from error


def parse(data: bytes, file: str) -> Section:
    """The mapping that a document holds; ``file`` is its name in errors. SettingsError names file and line."""
    import yaml

    def refuse(mark: Any, problem: str, hint: str = FIX) -> SettingsError:
        line = f", line {mark.line + 1}" if mark is not None else ""
        return SettingsError(f"{file}{line}: {' '.join(problem.split())}", hint)

    def plain(text: str) -> str | None:
        if text in NULLS:
            return None
        others = yaml.SafeLoader.yaml_implicit_resolvers.get(text[:1], ())
        return Unquoted(text) if any(pattern.match(text) for _, pattern in others) else text

    documents: list[Any] = []
    within: list[Section | list[Any]] = [documents]  # what has begun and not ended; events, so nothing recurses
    event: Any
    nodes = (yaml.ScalarEvent, yaml.MappingStartEvent, yaml.SequenceStartEvent, yaml.AliasEvent)
    try:
        for event in yaml.parse(data.decode("utf-8-sig"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            kind, mark, inside = type(event), event.start_mark, within[-1]
            if kind not in nodes:
                if kind is yaml.MappingEndEvent or kind is yaml.SequenceEndEvent:
                    within.pop()
                continue
            if kind is yaml.AliasEvent or event.anchor:
                raise refuse(mark, f"anchors and aliases are not allowed: {event.anchor}", "write the value out")
            if event.tag:
                raise refuse(mark, f"tag {event.tag!r} is not allowed", "remove it; nothing was run")
            if documents and inside is documents:
                raise refuse(mark, "expected one mapping, got a second document", "keep one")
            item: Any
            if kind is yaml.ScalarEvent:
                item = plain(event.value) if event.implicit[0] else event.value
            else:
                item = Section(f"{file}, line {mark.line + 1}") if kind is yaml.MappingStartEvent else []
            if isinstance(inside, list):
                inside.append(item)
            elif inside.key is not None:
                inside[inside.key], inside.key = item, None
            elif kind is not yaml.ScalarEvent:
                raise refuse(mark, "a key must be a single value")
            else:
                name = inside.key = event.value
                if name in inside:
                    raise refuse(mark, f"{name!r} stands twice, first in {inside.places[name]}", "keep one")
                inside.places[name] = f"{file}, line {mark.line + 1}"
            if kind is not yaml.ScalarEvent:
                within.append(item)
                if len(within) > MAX_DEPTH + 1:
                    raise refuse(mark, f"nested deeper than {MAX_DEPTH} levels")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        message = f"{file}, line {line}: byte {data[error.start]:#04x} is not UTF-8"
        raise SettingsError(message, "save it as UTF-8") from error
    except yaml.MarkedYAMLError as error:
        problem = ", ".join(filter(None, (error.context, error.problem)))
        raise refuse(error.problem_mark or error.context_mark, problem) from error
    except yaml.reader.ReaderError as error:
        line = data.count(b"\n", 0, error.position) + 1
        raise SettingsError(f"{file}, line {line}: control character {chr(error.character)!r}", "remove it") from error
    root = documents[0] if documents else None
    if not isinstance(root, Section):
        raise SettingsError(f"{file}: expected a mapping, got {kind_of(root)}", FIX)
    return root


def kind_of(value: Any) -> str:
    """What a value of the file is, in words."""
    if isinstance(value, (Section, list)):
        return "a mapping" if isinstance(value, Section) else "a list"
    return "nothing" if value is None else "a single value"

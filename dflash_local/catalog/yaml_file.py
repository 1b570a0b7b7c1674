"""YAML files as plain values and their lines; no duplicate keys, aliases, tags, second document, deep nesting."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dflash_local.errors import SettingsError
from dflash_local.terminal import safe_line

MAX_BYTES = 1_000_000
MAX_DEPTH = 12
FIX = "correct the file; indent with spaces, not tabs"


class Document(NamedTuple):
    """A mapping of a file, and where it and what is within stands: the line by the path, as ``pairs[3].revisions``."""

    values: dict[str, Any]
    lines: Mapping[str, int]


def content(path: Path) -> bytes:
    """Return what a file holds. SettingsError: too large or unreadable. FileNotFoundError, NotADirectoryError: none."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise SettingsError(f"{path} is larger than {MAX_BYTES:,} bytes", "split it or remove what is not needed")
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}", "make it readable or remove it") from error


def parse(data: bytes, file: str) -> Document:
    """Return the mapping that a document holds, its texts on one line. SettingsError names ``file`` and line."""
    import yaml

    def refuse(line: int | None, problem: str, hint: str = FIX) -> SettingsError:
        where = file if line is None else f"{file}, line {line}"
        return SettingsError(safe_line(f"{where}: {' '.join(problem.split())}"), hint)

    try:
        return _read(data.decode("utf-8-sig"), refuse)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise refuse(line, f"byte {data[error.start]:#04x} is not UTF-8", "save it as UTF-8") from error
    except yaml.MarkedYAMLError as error:
        mark: Any = error.problem_mark
        problem = ", ".join(filter(None, (error.context, error.problem)))
        raise refuse(mark and mark.line + 1, problem) from error
    except yaml.reader.ReaderError as error:
        line = data.count(b"\n", 0, error.position) + 1
        raise refuse(line, f"control character {chr(error.character)!r}", "remove it") from error


def _read(text: str, refuse: Any) -> Document:
    """Return the mapping by the events of the document: nothing recurses, nothing is run, nothing multiplies."""
    import yaml

    lines: dict[str, int] = {}
    loader = yaml.SafeLoader("")
    root: list[Any] = []
    within: list[tuple[Any, str]] = [(root, "")]  # what has begun and not ended, and its path
    key: list[str | None] = [None]  # of each of these: that whose value is being read
    event: Any
    nodes = (yaml.ScalarEvent, yaml.MappingStartEvent, yaml.SequenceStartEvent, yaml.AliasEvent)
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        line = event.start_mark.line + 1
        if isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            within.pop()
            key.pop()
        if type(event) not in nodes:
            continue
        inside, path = within[-1]
        if isinstance(event, yaml.AliasEvent) or event.anchor:
            raise refuse(line, f"anchors and aliases are not allowed: {event.anchor}", "write the value out")
        if event.tag:
            raise refuse(line, f"tag {event.tag!r} is not allowed", "remove it; nothing was run")
        if root and inside is root:
            raise refuse(line, "expected one mapping, got a second document", "keep one")
        scalar = isinstance(event, yaml.ScalarEvent)
        if isinstance(inside, dict) and key[-1] is None:
            name = event.value if scalar else None
            if name is None:
                raise refuse(line, "a key must be a single value")
            if name in inside:
                raise refuse(line, f"{name!r} stands twice, first in line {lines[below(path, name)]}", "keep one")
            key[-1], lines[below(path, name)] = name, line
            continue
        item = _scalar(loader, event) if scalar else {} if isinstance(event, yaml.MappingStartEvent) else []
        if isinstance(inside, dict):
            name, key[-1] = key[-1], None
            inside[name], here = item, below(path, name)
        else:
            inside.append(item)
            here = "" if inside is root else f"{path}[{len(inside) - 1}]"
            lines[here] = line
        if not scalar:
            within.append((item, here))
            key.append(None)
            if len(within) > MAX_DEPTH + 1:
                raise refuse(line, f"nested deeper than {MAX_DEPTH} levels")
    if not root or not isinstance(root[0], dict):
        found = (
            "nothing" if not root or root[0] is None else "a list" if isinstance(root[0], list) else "a single value"
        )
        raise refuse(None, f"expected a mapping, got {found}")
    return Document(root[0], lines)


def below(path: str, name: str | None) -> str:
    """Return the path of a key of what stands at a path."""
    return f"{path}.{name}" if path else str(name)


def _scalar(loader: Any, event: Any) -> Any:
    """Return the value of a scalar as any reader of YAML has it; a text without control characters."""
    import yaml

    tag = loader.resolve(yaml.ScalarNode, event.value, event.implicit)
    construct = loader.yaml_constructors.get(tag, yaml.SafeLoader.construct_yaml_str)
    try:
        value = construct(loader, yaml.ScalarNode(tag, event.value))
    except ValueError:  # what looks like a date, as 2026-99-99, or a number of thousands of digits
        value = event.value
    return safe_line(value.strip()) if isinstance(value, str) else value

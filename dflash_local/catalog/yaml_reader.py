"""A strict reader of YAML: bytes to a tree of texts with their lines.

Reads no types: "no", 3.10 and 1:30 stay the texts they are, and who wants a type asks for it
(``yaml_values``). Refuses what a registry never needs: aliases, anchors, tags, a second document,
duplicate keys, deep nesting, large files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Union

from dflash_local.errors import SettingsError

MAX_BYTES = 1_000_000
MAX_DEPTH = 12
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
FIX = "correct the file"

Value = Union[str, "list[Node]", "dict[str, Node]"]


@dataclass(frozen=True, slots=True)
class Node:
    """A scalar, a list or a mapping.

    Attributes:
        line: 1-based; of the key for a value in a mapping.
        plain: a scalar without quotes.
    """

    value: Value
    file: str
    line: int
    plain: bool = False

    @property
    def what(self) -> str:
        """The kind of node, in words."""
        if isinstance(self.value, str):
            return "nothing" if self.plain and self.value in ("", "~", "null") else "a single value"
        return "a list" if isinstance(self.value, list) else "a mapping"

    def fail(self, message: str, hint: str = FIX) -> NoReturn:
        """Raise the one kind of error this file can have, with file and line."""
        raise SettingsError(f"{self.file}, line {self.line}: {message}", hint)


def read(path: Path) -> Node:
    """The tree of a file.

    Raises:
        SettingsError: it cannot be read or is not what this reader accepts; names file and line.
            FileNotFoundError, NotADirectoryError: there is no such file.
    """
    return parse(content(path), str(path))


def content(path: Path) -> bytes:
    """What a file holds.

    Raises:
        SettingsError: it is too large or cannot be read.
            FileNotFoundError, NotADirectoryError: there is no such file.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise SettingsError(f"{path} is larger than {MAX_BYTES:,} bytes", "split it or remove what is not needed")
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}", "make it readable or remove it") from error


def parse(data: bytes, file: str) -> Node:
    """The tree of a document; ``file`` is its name in errors."""
    import yaml

    text = _decode(data, file)
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    events = yaml.parse(text, Loader=loader)
    try:
        root = _Builder(file).build(events)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark is not None else 1
        problem = " ".join(str(error.problem or error.context or "not YAML").split())
        tabbed = re.match(r" *\t", text.splitlines()[line - 1]) if line <= text.count("\n") else None
        hint = "indent with spaces, not tabs" if tabbed else FIX
        raise SettingsError(f"{file}, line {line}: {problem}", hint) from error
    except yaml.YAMLError as error:
        raise SettingsError(f"{file} is not YAML: {' '.join(str(error).split())}", FIX) from error
    return root


def _decode(data: bytes, file: str) -> str:
    """UTF-8, a byte order mark allowed; other encodings and control characters are refused by line."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise SettingsError(f"{file}, line 1: the file is UTF-16", "save it as UTF-8")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SettingsError(
            f"{file}, line {line}: byte {data[error.start]:#04x} is not UTF-8", "save it as UTF-8"
        ) from error
    found = CONTROL.search(text)
    if found:
        line = text.count("\n", 0, found.start()) + 1
        raise SettingsError(f"{file}, line {line}: control character {found.group()!r}", "remove it")
    return text


class _Builder:
    """Builds the tree from parser events without recursion, so that nesting cannot exhaust the stack."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.open: list[_Open] = []
        self.root: Node | None = None

    def build(self, events: Iterator[Any]) -> Node:
        import yaml

        documents = 0
        for event in events:
            kind = type(event)
            if kind is yaml.ScalarEvent:
                self._check(event)
                self._scalar(event)
            elif kind is yaml.MappingStartEvent or kind is yaml.SequenceStartEvent:
                self._check(event)
                self._start(event, kind is yaml.MappingStartEvent)
            elif kind is yaml.MappingEndEvent or kind is yaml.SequenceEndEvent:
                done = self.open.pop()
                self._add(Node(done.value, self.file, done.line), done.line)
            elif kind is yaml.AliasEvent:
                self._refuse(event, f"alias *{event.anchor}: aliases are not allowed", "write the value out")
            elif kind is yaml.DocumentStartEvent:
                documents += 1
                if documents > 1:
                    self._refuse(event, "expected one mapping, got a second document", "keep one document")
        if self.root is None:
            raise SettingsError(f"{self.file}, line 1: expected a mapping, got nothing", FIX)
        return self.root

    def _check(self, event: Any) -> None:
        if event.anchor is not None:
            self._refuse(event, f"anchor &{event.anchor}: anchors are not allowed", "write the value out")
        if event.tag is not None:
            self._refuse(event, f"tag {event.tag!r}: tags are not allowed", "remove it; nothing was run")

    def _scalar(self, event: Any) -> None:
        line = event.start_mark.line + 1
        inside = self.open[-1] if self.open else None
        if inside is not None and inside.is_mapping and inside.key is None:
            if event.value in inside.lines:
                self._refuse(
                    event, f"key {event.value!r} stands twice, first in line {inside.lines[event.value]}", "keep one"
                )
            inside.key = event.value
            inside.lines[event.value] = line
            return
        self._add(Node(event.value, self.file, line, plain=event.implicit[0]), line)

    def _start(self, event: Any, is_mapping: bool) -> None:
        if self.open and self.open[-1].is_mapping and self.open[-1].key is None:
            self._refuse(event, "a key must be a single value")
        if len(self.open) >= MAX_DEPTH:
            self._refuse(event, f"nested deeper than {MAX_DEPTH} levels")
        self.open.append(_Open(is_mapping, event.start_mark.line + 1))

    def _add(self, node: Node, line: int) -> None:
        if not self.open:
            self.root = node
            return
        inside = self.open[-1]
        if isinstance(inside.value, list):
            inside.value.append(node)
            return
        key = inside.key
        if key is not None:
            inside.value[key] = Node(node.value, node.file, inside.lines[key], node.plain)
            inside.key = None

    def _refuse(self, event: Any, message: str, hint: str = FIX) -> NoReturn:
        raise SettingsError(f"{self.file}, line {event.start_mark.line + 1}: {message}", hint)


class _Open:
    """A list or mapping whose end has not been seen."""

    __slots__ = ("is_mapping", "key", "line", "lines", "value")

    def __init__(self, is_mapping: bool, line: int) -> None:
        self.is_mapping = is_mapping
        self.line = line
        self.value: list[Node] | dict[str, Node] = {} if is_mapping else []
        self.key: str | None = None
        self.lines: dict[str, int] = {}

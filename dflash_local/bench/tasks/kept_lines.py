"""A file of results: a head line that says what was run, then a JSON line for each result, on the disk at once.

A run with other settings has another file. One process writes a file at a time. Torch-free.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from dflash_local.errors import UsageError
from dflash_local.json_text import parse_json
from dflash_local.store.atomic import FILE_MODE, make_private, write_atomic
from dflash_local.store.lock import exclusive

VERSION = 1
MAX_BYTES = 1 << 30
LOCKS = ".locks"  # below the folder of the results, so that a folder which machines share is locked for all
Kind = TypeVar("Kind", bound="LinesFile")


class LinesFile:
    """The lines of one run; a subclass takes them in.

    Args:
        identity: what is run, JSON-able: data, models, settings. It names the file in ``folder``.
        fresh: forget what an earlier run of the same left.

    Raises:
        UsageError: the file cannot be written, or is another's.
    """

    def __init__(self, folder: Path, name: str, identity: Mapping[str, Any], fresh: bool = False) -> None:
        self.identity = parse_json(json.dumps(identity, sort_keys=True))
        self.path = _path(folder, name, self.identity)
        try:
            make_private(folder)
            if fresh or not self.path.exists():
                write_atomic(self.path, _line({"version": VERSION, "identity": self.identity}))
            else:
                self._read()
        except OSError as error:
            raise UsageError(f"{self.path} cannot be written: {error.strerror}", "name a folder with --out") from error

    @classmethod
    @contextmanager
    def held(
        cls: type[Kind], folder: Path, name: str, identity: Mapping[str, Any], fresh: bool = False
    ) -> Iterator[Kind]:
        """The file, with this process as its only writer within.

        Raises:
            BusyError: another run writes it. UsageError: see above.
        """
        path = _path(folder, name, identity)
        title, key = str(path), f"results-{path.stem.rpartition('-')[2]}"
        with exclusive(folder / LOCKS, key, purpose="measure", wait=False, title=title):
            yield cls(folder, name, identity, fresh)

    def take(self, content: Mapping[str, Any]) -> None:
        """Take in a line that an earlier run left."""
        raise NotImplementedError

    def append(self, content: Mapping[str, Any]) -> None:
        """Add a line; it is on the disk when this returns. Raises OSError where that is full."""
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | getattr(os, "O_BINARY", 0), FILE_MODE)
        with os.fdopen(descriptor, "ab") as file:
            file.write(_line(content))
            file.flush()
            os.fsync(file.fileno())

    def _read(self) -> None:
        """Take in whole lines; what a kill left of the last one is cut off."""
        if self.path.stat().st_size > MAX_BYTES:
            raise UsageError(f"{self.path} is larger than {MAX_BYTES >> 20} MiB", "begin anew with --no-resume")
        raw = self.path.read_bytes()
        whole = raw.rfind(b"\n") + 1
        head, *lines = raw[:whole].split(b"\n")
        first = _parsed(head)
        if first is None or first.get("version") != VERSION or first.get("identity") != self.identity:
            raise UsageError(f"{self.path} is damaged, or of another version", "begin anew with --no-resume")
        if whole < len(raw):
            os.truncate(self.path, whole)
        for line in lines:
            content = _parsed(line)
            if content is not None:
                self.take(content)


def _path(folder: Path, name: str, identity: Mapping[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:80]
    return folder / f"{stem}-{digest[:12]}.jsonl"


def _line(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=True).encode("ascii") + b"\n"


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        content = parse_json(line)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None

"""Reads the transcripts in a folder: finds the files, tells whose each is by what it says, and bounds what it takes.

A file that cannot be read is named in one line, and the others are read. At most one file is in memory, and of one with
JSON lines at most one line and the conversation that it belongs to.
"""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from dflash_local.checkpoint_files.json_file import open_plain
from dflash_local.errors import CheckpointError, UsageError
from dflash_local.json_text import parse_json
from dflash_local.tables import amount
from dflash_local.transcripts import claude_code, codex, open_webui, opencode, own_chats
from dflash_local.transcripts.turn import TranscriptTurn, turns_of

FORMATS = (claude_code.FORMAT, codex.FORMAT, opencode.FORMAT, open_webui.FORMAT, own_chats.FORMAT)
ENDINGS = (".json", ".jsonl", ".jsonl.zst", opencode.DATABASE)
ZSTD = b"\x28\xb5\x2f\xfd"  # what a file begins with that Codex has compressed, as it does with older sessions
MOST_BYTES = 2**30  # of a file with JSON lines
MOST_AT_ONCE = 2**26  # bytes of a line, and of a file that is one JSON document
MOST_FILES = 500_000
LOOKED_AT = 200  # records of a file until one is some client's
TOLD = 20  # lines about files that were left out; the rest is counted

Progress = Callable[[str, float], None]


class ClientConversation(NamedTuple):
    """One conversation of a client, whose turns are read as they are asked for, before the next conversation."""

    client: str
    turns: Iterator[TranscriptTurn]


@dataclass(slots=True)
class ReadReport:
    """What became of the files: how many were read, hold no transcript of a known client, or could not be read."""

    read: int = 0
    unknown: int = 0
    problems: list[str] = field(default_factory=list)
    untold: int = 0

    @property
    def told(self) -> int:
        """Count what was told."""
        return len(self.problems) + self.untold

    def tell(self, path: Path, why: str) -> None:
        """Name a file that was not read, or not whole."""
        if len(self.problems) < TOLD:
            self.problems.append(f"{path}: {why}")
        else:
            self.untold += 1


def conversations(folder: Path, report: ReadReport, progress: Progress) -> Iterator[ClientConversation]:
    """Read all transcripts under a folder, or in one file.

    Raises:
        UsageError: there is no such folder.
    """
    if not folder.exists():
        raise UsageError(f"--from {folder}: there is no such folder or file", "name one that holds transcripts")
    files = list(islice(_files(folder, report), MOST_FILES + 1))
    if len(files) > MOST_FILES:
        report.tell(folder, f"more than {MOST_FILES:,} files, the rest is left out")
    total, done = sum(size for _, size in files) or 1, 0
    storage = opencode.Storage()
    for path, size in files[:MOST_FILES]:
        progress("reading transcripts", done / total)
        done += size
        yield from _of_file(path, size, report, storage)
    sessions = list(storage.sessions())
    for number, paths in enumerate(sessions):
        progress("reading sessions of OpenCode", number / len(sessions))
        entries = opencode.FORMAT.conversations(_documents(paths, report))
        yield from (
            ClientConversation(opencode.FORMAT.client, _told(turns_of(each), paths[0], report)) for each in entries
        )


def _of_file(path: Path, size: int, report: ReadReport, storage: opencode.Storage) -> Iterator[ClientConversation]:
    """Read one file; what belongs to files beside it is put into ``storage``."""
    if path.suffix == opencode.DATABASE:
        yield from _of_database(path, report)
        return
    told, records = report.told, _told(_records(path, size, report), path, report)
    for record in islice(records, LOOKED_AT):
        found = next((each for each in FORMATS if each.owns(record)), None)
        if found is not None:
            break
    else:
        report.unknown += report.told == told
        return
    report.read += 1
    if found is opencode.FORMAT:
        storage.add(record, path)
        return
    for entries in found.conversations(chain((record,), records)):
        yield ClientConversation(found.client, _told(turns_of(entries), path, report))


def _of_database(path: Path, report: ReadReport) -> Iterator[ClientConversation]:
    told, read = report.told, report.read
    for records in _told(opencode.database_sessions(path, MOST_AT_ONCE), path, report):
        report.read = read + 1
        for entries in opencode.FORMAT.conversations(records):
            yield ClientConversation(opencode.FORMAT.client, _told(turns_of(entries), path, report))
    report.unknown += (report.told, report.read) == (told, read)


def _told(items: Iterator[Any], path: Path, report: ReadReport) -> Iterator[Any]:
    """Pass items on; an error ends them and is told."""
    try:
        yield from items
    except CheckpointError as error:  # names the file itself
        report.tell(path, error.message.removeprefix(f"{path} "))
    except OSError as error:
        report.tell(path, f"cannot be read: {error.strerror}")
    except sqlite3.Error as error:
        report.tell(path, f"the database cannot be read: {error}")
    except ValueError as error:
        report.tell(path, str(error))


def _files(folder: Path, report: ReadReport) -> Iterator[tuple[Path, int]]:
    """Yield files that may be transcripts and their bytes, folder by folder. Links to folders are not
    followed, as they may go round.
    """
    left = [folder] if folder.is_dir() else []
    if not left:
        yield folder, folder.stat().st_size
    while left:
        here = left.pop()
        try:
            entries = sorted(os.scandir(here), key=lambda entry: entry.name)
        except OSError as error:
            report.tell(here, f"cannot be read: {error.strerror}")
            continue
        left += [Path(entry.path) for entry in reversed(entries) if entry.is_dir(follow_symlinks=False)]
        for entry in entries:
            path = Path(entry.path)
            if entry.is_symlink() and os.path.isdir(path):
                report.tell(path, "a link to a folder, which is not followed")
            elif entry.name.endswith(ENDINGS) and not entry.is_dir(follow_symlinks=False):
                try:
                    found = os.stat(path)
                except OSError as error:
                    report.tell(path, f"cannot be read: {error.strerror}")
                    continue
                yield path, found.st_size if stat.S_ISREG(found.st_mode) else 0


def _records(path: Path, size: int, report: ReadReport) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file: a line each, or one document, or the members of its array.

    Raises:
        ValueError, OSError: it cannot be read.
    """
    with open_plain(path) as file:
        if size > MOST_BYTES:
            raise ValueError(f"it has {amount(size)}, at most {amount(MOST_BYTES)} are read")
        first = next(_lines(file, path, report), b"")
        if not first:
            return
        if first.startswith(ZSTD):
            raise ValueError("it is compressed: unpack a copy with `zstd -d`, and name its folder")
        try:
            value = parse_json(first)
        except ValueError:  # more than a line, or none
            if size > MOST_AT_ONCE:
                raise ValueError(f"no JSON lines, and a document of more than {amount(MOST_AT_ONCE)}") from None
            file.seek(0)
            try:
                value = parse_json(file.read(MOST_AT_ONCE))
            except ValueError as error:
                raise ValueError(f"no JSON: {error}") from None
        yield from (each for each in (value if isinstance(value, list) else [value]) if isinstance(each, dict))
        broken = 0
        for line in _lines(file, path, report):
            try:
                value = parse_json(line)
            except ValueError:
                broken += 1
                continue
            if isinstance(value, dict):
                yield value
        if broken:
            report.tell(path, f"{broken} {'line is' if broken == 1 else 'lines are'} no JSON and left out")


def _lines(file: BinaryIO, path: Path, report: ReadReport) -> Iterator[bytes]:
    """Yield the lines that are not empty; one that is too long is told and passed over."""
    while line := file.readline(MOST_AT_ONCE + 1):
        if len(line) > MOST_AT_ONCE:
            report.tell(path, f"a line in it has more than {amount(MOST_AT_ONCE)} and is left out")
            while line and not line.endswith(b"\n"):
                line = file.readline(MOST_AT_ONCE)
        elif not line.isspace():
            yield line


def _documents(paths: list[Path], report: ReadReport) -> Iterator[dict[str, Any]]:
    """Yield the object of each of these files, one that cannot be read any more is told."""
    for path in paths:
        yield from _told(islice(_records(path, 0, report), 1), path, report)

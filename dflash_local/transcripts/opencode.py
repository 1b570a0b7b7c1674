"""OpenCode: rows of messages and of their parts in ``opencode.db`` (SQLite), or, as it wrote before, a file of JSON for
each of them, ``storage/message`` and ``storage/part``.

A message names its session, a part its message; so a session is put together from names, wherever its files lie. Behind
a message that is a ``summary`` only that is sent.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import groupby
from pathlib import Path
from typing import Any

from dflash_local.json_text import parse_json
from dflash_local.transcripts.turn import Format, TranscriptEntry, at, call_text, text_at

DATABASE = ".db"
# Names alone are sorted: a message may have a megabyte.
ROWS = """
    SELECT message.session_id, message.id, part.id FROM message LEFT JOIN part ON part.message_id = message.id
    ORDER BY message.session_id, message.time_created, message.id, part.id
"""
TABLES = "SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name IN ('session', 'message', 'part')"


def _owns(record: dict[str, Any]) -> bool:
    if not (text_at(record, "id") and text_at(record, "sessionID")):
        return False
    return bool(text_at(record, "messageID") and text_at(record, "type")) or _is_message(record)


def _is_message(record: dict[str, Any]) -> bool:
    return record.get("role") in ("user", "assistant") and isinstance(at(record, "time", "created"), (int, float))


class Storage:
    """The files of messages and parts that were found, by what they name; no text."""

    def __init__(self) -> None:
        self._messages: dict[str, list[tuple[float, str, Path]]] = defaultdict(list)
        self._parts: dict[str, list[tuple[str, Path]]] = defaultdict(list)

    def add(self, record: dict[str, Any], path: Path) -> None:
        """Remember where a message or a part lies."""
        name = text_at(record, "id")
        if _is_message(record):
            created = float(at(record, "time", "created"))
            self._messages[text_at(record, "sessionID")].append((created, name, path))
        else:
            self._parts[text_at(record, "messageID")].append((name, path))

    def sessions(self) -> Iterator[list[Path]]:
        """Yield the files of each session in the order of its text: a message, its parts, the next message."""
        for messages in self._messages.values():
            paths: list[Path] = []
            for _, name, path in sorted(messages):
                paths += [path, *(part for _, part in sorted(self._parts.get(name, ())))]
            yield paths


def database_sessions(path: Path, most_chars: int) -> Iterator[Iterator[dict[str, Any]]]:
    """Yield the records of each session in the order of its text, each to be read before the next; none where this is
    no database of OpenCode. A record of more than ``most_chars`` is left out.

    Raises:
        sqlite3.Error: the database is broken. ValueError: a record is no JSON.
    """
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
        database.execute("PRAGMA trusted_schema = OFF")
        try:
            if database.execute(TABLES).fetchone() != (3,):
                return
        except sqlite3.DatabaseError:  # another kind of file
            return
        for _, rows in groupby(database.execute(ROWS), key=lambda row: row[0]):
            yield _records(database, rows, most_chars)


def _records(
    database: sqlite3.Connection, rows: Iterable[tuple[str, str, str | None]], most_chars: int
) -> Iterator[dict[str, Any]]:
    for (session, message), parts in groupby(rows, key=lambda row: row[:2]):
        names = {"id": message, "sessionID": session}
        yield from _record(database, "message", names, most_chars)
        for *_, part in parts:
            if part is not None:
                yield from _record(database, "part", {**names, "id": part, "messageID": message}, most_chars)


def _record(
    database: sqlite3.Connection, table: str, names: dict[str, str], most_chars: int
) -> Iterator[dict[str, Any]]:
    query = f"SELECT data FROM {table} WHERE id = ? AND typeof(data) = 'text' AND length(data) <= ?"
    for (text,) in database.execute(query, (names["id"], most_chars)):
        try:
            value = parse_json(text)
        except ValueError as error:
            raise ValueError(f"a {table} in it is no JSON: {error}") from error
        if isinstance(value, dict):
            yield {**value, **names}


def _entries(records: Iterable[dict[str, Any]]) -> Iterator[TranscriptEntry]:
    message: dict[str, Any] = {}
    step, summary = 0, list[str]()
    for record in records:
        if _is_message(record):
            yield from _summed_up(message, summary)
            message, step, summary = record, 0, []
            continue
        step += record.get("type") == "step-start"
        of = f"{text_at(message, 'id')} {step}"
        for entry in _of_part(record, message.get("role") == "assistant", of):
            summary += [entry.text] if entry.kind == "reply" else []
            yield entry
    yield from _summed_up(message, summary)


def _summed_up(message: dict[str, Any], summary: list[str]) -> Iterator[TranscriptEntry]:
    if message.get("summary") is True and summary:
        yield TranscriptEntry("anew")
        yield from (TranscriptEntry("prompt", text) for text in summary)


def _of_part(part: dict[str, Any], written: bool, of: str) -> Iterator[TranscriptEntry]:
    kind, text, state = part.get("type"), text_at(part, "text"), part.get("state")
    if kind == "text" and text and part.get("ignored") is not True:
        yield TranscriptEntry("reply", text, of) if written else TranscriptEntry("prompt", text)
    elif kind == "reasoning" and text:
        yield TranscriptEntry("thinking", text, of)
    elif kind == "tool":
        yield TranscriptEntry("reply", call_text(text_at(part, "tool"), at(state, "input")), of)
        if result := text_at(state, "output") or text_at(state, "error"):
            yield TranscriptEntry("prompt", result)


def _conversations(records: Iterable[dict[str, Any]]) -> Iterator[Iterator[TranscriptEntry]]:
    yield _entries(records)


FORMAT = Format("OpenCode", _owns, _conversations)

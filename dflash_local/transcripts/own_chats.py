"""Chats of this program: those that its screens keep, JSON lines as ``store.records`` has them, and exported ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from dflash_local.transcripts.turn import Format, TranscriptEntry, at, text_at, texts


def _exported(record: dict[str, Any]) -> bool:
    named = isinstance(record.get("model"), str) and isinstance(record.get("system"), str)
    return named and isinstance(record.get("messages"), list)


def _owns(record: dict[str, Any]) -> bool:
    kept = isinstance(record.get("version"), int) and isinstance(record.get("seq"), int)
    return _exported(record) or (kept and record.get("kind") == "chat")


def _entries(records: Iterable[dict[str, Any]]) -> Iterator[TranscriptEntry]:
    count = 0  # of turns, each of which is marked: a ``drop`` takes the last ones back
    for record in records:
        kind = record.get("kind")
        if _exported(record):
            yield TranscriptEntry("system", text_at(record, "system"))
            for message in record["messages"]:
                yield from _of_message(message)
        elif kind in ("chat", "system"):
            yield TranscriptEntry("system", text_at(record, "system" if kind == "chat" else "content"))
        elif kind == "turn":
            yield TranscriptEntry("mark", str(count))
            yield from _of_message(record)
            count += 1
        elif kind == "drop" and isinstance(dropped := record.get("count"), int):
            count = max(0, count - dropped)
            yield TranscriptEntry("back", str(count))


def _of_message(message: Any) -> Iterator[TranscriptEntry]:
    written = at(message, "role") == "assistant"
    if written and (thinking := text_at(message, "thinking")):
        yield TranscriptEntry("thinking", thinking)
    yield from (TranscriptEntry("reply" if written else "prompt", text) for text in texts(at(message, "content")))


def _conversations(records: Iterable[dict[str, Any]]) -> Iterator[Iterator[TranscriptEntry]]:
    yield _entries(records)


FORMAT = Format("dflash", _owns, _conversations)

"""Open WebUI: exported chats, a JSON array with an object for each.

A chat's messages are a tree; what is read is the way from its root to ``currentId``, so another reply to the same
prompt is left out. Thinking and what tools returned are ``<details>`` blocks within the text of a reply.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from dflash_local.transcripts.turn import Format, TranscriptEntry, at, text_at, texts

BLOCK, REASONING, END = "<details type=", '<details type="reasoning"', "</details>"


def _chat(record: dict[str, Any]) -> Any:
    return record["chat"] if isinstance(record.get("chat"), dict) else record


def _owns(record: dict[str, Any]) -> bool:
    history = at(_chat(record), "history")
    return isinstance(at(history, "messages"), dict) and isinstance(at(history, "currentId"), str)


def _entries(chat: Any) -> Iterator[TranscriptEntry]:
    if system := text_at(chat, "params", "system") or text_at(chat, "system"):
        yield TranscriptEntry("system", system)
    messages, way, name = at(chat, "history", "messages"), dict[str, Any](), text_at(chat, "history", "currentId")
    while name and name not in way:  # a hostile tree goes round
        way[name] = at(messages, name)
        name = text_at(way[name], "parentId")
    for message in reversed(way.values()):
        content = texts(at(message, "content"))
        if at(message, "role") == "assistant":
            yield from (entry for text in content for entry in _of_reply(text))
        else:
            yield from (TranscriptEntry("prompt", text) for text in content)


def _of_reply(text: str) -> Iterator[TranscriptEntry]:
    """Take a reply's text apart at its blocks; what a tool returned makes another reply of what follows it."""
    place = 0
    while (start := text.find(BLOCK, place)) >= 0 and (end := text.find(END, start)) >= 0:
        if written := text[place:start].strip():
            yield TranscriptEntry("reply", written)
        place = end + len(END)
        yield TranscriptEntry("thinking" if text.startswith(REASONING, start) else "prompt", text[start:place])
    if written := text[place:].strip():
        yield TranscriptEntry("reply", written)


def _conversations(records: Iterable[dict[str, Any]]) -> Iterator[Iterator[TranscriptEntry]]:
    return (_entries(_chat(record)) for record in records if _owns(record))


FORMAT = Format("Open WebUI", _owns, _conversations)

"""Claude Code: a file of JSON lines for each session, ``~/.claude/projects/*/*.jsonl``.

A message of the API is written in a line for each of its blocks, all with its ``id``, and results of tools may stand
between them. What a subagent says has ``isSidechain``. A prompt whose ``parentUuid`` is not the newest line goes on
from that one, and behind a ``compact_boundary`` only the summary that follows is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from dflash_local.transcripts.turn import Format, TranscriptEntry, at, call_text, text_at, texts


def _owns(record: dict[str, Any]) -> bool:
    named = bool(text_at(record, "uuid") and text_at(record, "sessionId"))
    return named and record.get("type") in ("user", "assistant") and isinstance(record.get("message"), dict)


def _entries(records: Iterable[dict[str, Any]]) -> Iterator[TranscriptEntry]:
    for record in records:
        thread = (text_at(record, "agentId") or "subagent") if record.get("isSidechain") is True else ""
        for entry in _of_record(record):
            yield entry._replace(thread=thread)
        if uuid := text_at(record, "uuid"):
            yield TranscriptEntry("mark", uuid, thread=thread)


def _of_record(record: dict[str, Any]) -> Iterator[TranscriptEntry]:
    kind, content = record.get("type"), at(record, "message", "content")
    blocks = content if isinstance(content, list) else []
    if kind == "system" and record.get("subtype") == "compact_boundary":
        yield TranscriptEntry("anew")
    elif kind == "user":
        results = [at(block, "content") for block in blocks if at(block, "type") == "tool_result"]
        if not results:
            yield TranscriptEntry("back", text_at(record, "parentUuid"))
        for each in (*results, content):
            yield from (TranscriptEntry("prompt", text) for text in texts(each))
    elif kind == "assistant" and record.get("isApiErrorMessage") is not True:
        of = text_at(record, "message", "id")
        for block in blocks:
            if text := text_at(block, "thinking"):
                yield TranscriptEntry("thinking", text, of)
            elif text := text_at(block, "text"):
                yield TranscriptEntry("reply", text, of)
            elif at(block, "type") == "tool_use":
                yield TranscriptEntry("reply", call_text(text_at(block, "name"), at(block, "input")), of)


def _conversations(records: Iterable[dict[str, Any]]) -> Iterator[Iterator[TranscriptEntry]]:
    yield _entries(records)


FORMAT = Format("Claude Code", _owns, _conversations)

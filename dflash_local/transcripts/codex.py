"""Codex: a file of JSON lines for each session, ``~/.codex/sessions/**/rollout-*.jsonl``.

``response_item`` lines are the items of the Responses API as they were sent and received; events and contexts of turns
only repeat them. ``compacted`` puts a summary, or the items of ``replacement_history``, in the place of all before.
Reasoning is encrypted there unless the model ran locally, and a summary of it is none of the model's text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from dflash_local.transcripts.turn import Format, TranscriptEntry, at, call_text, text_at, texts


def _owns(record: dict[str, Any]) -> bool:
    return record.get("type") in ("session_meta", "response_item") and isinstance(record.get("payload"), dict)


def _entries(records: Iterable[dict[str, Any]]) -> Iterator[TranscriptEntry]:
    for record in records:
        kind, payload = record.get("type"), record.get("payload")
        if kind == "session_meta":
            if base := text_at(payload, "base_instructions", "text"):
                yield TranscriptEntry("system", base)
        elif kind == "response_item":
            yield from _of_item(payload)
        elif kind == "compacted":
            yield TranscriptEntry("anew")
            history = at(payload, "replacement_history")
            for item in history if isinstance(history, list) else []:
                yield from (TranscriptEntry("prompt", each.text) for each in _of_item(item) if each.kind != "thinking")
            if not isinstance(history, list):
                yield from (TranscriptEntry("prompt", text) for text in texts(at(payload, "message")))


def _of_item(item: Any) -> Iterator[TranscriptEntry]:
    kind, name = text_at(item, "type"), text_at(item, "name")
    if kind == "message":
        written = at(item, "role") == "assistant"
        yield from (TranscriptEntry("reply" if written else "prompt", text) for text in texts(at(item, "content")))
    elif kind == "reasoning":
        yield from (TranscriptEntry("thinking", text) for text in texts(at(item, "content")))
    elif kind == "function_call":
        yield TranscriptEntry("reply", call_text(name, text_at(item, "arguments")))
    elif kind == "custom_tool_call":
        yield TranscriptEntry("reply", f"{name} {text_at(item, 'input')}")
    elif kind == "local_shell_call":
        yield TranscriptEntry("reply", call_text("shell", at(item, "action", "command")))
    elif kind.endswith("_call_output"):
        output = at(item, "output")
        yield from (TranscriptEntry("prompt", text) for text in texts(at(output, "content") or output))


def _conversations(records: Iterable[dict[str, Any]]) -> Iterator[Iterator[TranscriptEntry]]:
    yield _entries(records)


FORMAT = Format("Codex", _owns, _conversations)

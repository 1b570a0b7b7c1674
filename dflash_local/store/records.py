"""The lines of a chat file: one JSON record per line, each with its version and sequence number.

Bytes in, a conversation out; opens no file. A strict prefix of a JSON object is never a JSON
object, so a line cut by a crash is always recognised.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash_local.errors import UsageError
from dflash_local.json_text import parse_json
from dflash_local.request import Message, Role

VERSION = 1
TITLE_CHARS = 60
# How ``encode`` begins a line.
_BEGINNING = re.compile(rb'\{"version": \d+, "seq": \d+, "kind": "(\w+)"(?:, "count": (\d{1,9})\b)?')


@dataclass(frozen=True, slots=True)
class Turn:
    """Holds one message and, for a reply, whether the user stopped it, and its figures: speed, acceptance, seed."""

    role: Role
    content: str
    thinking: str = ""
    stopped: bool = False
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def ending(self) -> str:
        """Tell how a reply ended when not by itself; empty where it did."""
        if self.stopped:
            return "stopped"
        if self.figures.get("reason") == "length":
            tokens = self.figures.get("tokens")  # 0 where a server does not count them
            known = isinstance(tokens, int) and tokens
            return f"cut off at its limit of {tokens:,} tokens" if known else "cut off at its limit"
        return ""

    @property
    def message(self) -> Message:
        return Message(self.role, self.content, self.thinking)


@dataclass(frozen=True, slots=True)
class Chat:
    """Holds a conversation as its file does.

    Attributes:
        newer: written by a newer version of this program: read what can be read, write nothing.
        bad_lines: lines that are no record and were passed over. good_bytes: length of the file up
            to the end of its last complete line.
        last_seq: the highest sequence number, -1 without any record.
        summary: what the model wrote of the first ``summarised`` turns, which are sent no more.
        unfinished: the last turn is what had come of a reply when the program was ended.
    """

    model: str
    system: str
    turns: tuple[Turn, ...]
    newer: bool
    bad_lines: int
    good_bytes: int
    last_seq: int
    summary: str = ""
    summarised: int = 0
    unfinished: bool = False


@dataclass(frozen=True, slots=True)
class Outline:
    """Holds what a list shows of a chat, and looks for words in it. Lines of messages are decoded as they are needed.

    Attributes:
        title: that a user gave it. model: that it was talked to last.
    """

    title: str
    model: str
    lines: tuple[bytes, ...]

    @property
    def turns(self) -> int:
        return len(self.lines)

    @property
    def words(self) -> str:
        """Return how the first message begins."""
        record = _record(self.lines[0]) if self.lines else None
        return first_words(_text(record, "content")) if record is not None else ""

    def has(self, search: str) -> bool:
        """Return whether a message has these words, in capitals or not."""
        search = search.casefold()
        written = json.dumps(search, ensure_ascii=False)[1:-1]
        near = (line for line in self.lines if written in line.decode("utf-8", "replace").casefold())
        return any(search in _text(_record(line) or {}, "content").casefold() for line in near)


def encode(kind: str, seq: int, **fields: Any) -> bytes:
    record = {"version": VERSION, "seq": seq, "kind": kind, **fields}
    return json.dumps(record, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def encode_turn(seq: int, turn: Turn) -> bytes:
    rest = {"thinking": turn.thinking, "stopped": turn.stopped, "figures": turn.figures}
    return encode("turn", seq, role=turn.role, content=turn.content, **{k: v for k, v in rest.items() if v})


def encode_chat(model: str, system: str, turns: Sequence[Turn]) -> bytes:
    """Write a whole conversation, as ``decode`` reads it."""
    lines = [encode("chat", 0, model=model, system=system)]
    lines += [encode_turn(seq, turn) for seq, turn in enumerate(turns, start=1)]
    return b"".join(lines)


def decode(raw: bytes) -> Chat:
    """Read the conversation of the lines, in the order of their sequence numbers."""
    whole = raw.rfind(b"\n") + 1
    lines, tail = raw[:whole].split(b"\n"), raw[whole:]
    if tail and _record(tail) is not None:  # complete but for its line end
        lines, whole = [*lines, tail], len(raw)
        tail = b""
    lines = [line for line in lines if line.strip()]
    records = [record for line in lines if (record := _record(line)) is not None]
    bad = len(lines) - len(records) + bool(tail)
    records.sort(key=lambda record: record["seq"])
    model, system, summary, turns = "", "", ("", 0), list[Turn]()
    begun = "", ""  # what came of a reply under way, and of its thoughts
    for record in records:
        if record["kind"] in ("turn", "drop"):
            begun = "", ""
        if record["kind"] == "chat":
            model, system = _text(record, "model"), _text(record, "system")
        elif record["kind"] == "model":
            model = _text(record, "content")
        elif record["kind"] == "system":
            system = _text(record, "content")
        elif record["kind"] == "drop":
            turns = turns[: max(0, len(turns) - _count(record))]
            summary = summary if len(turns) >= summary[1] else ("", 0)
        elif record["kind"] == "part":
            begun = begun[0] + _text(record, "content"), begun[1] + _text(record, "thinking")
        elif record["kind"] == "summary":
            summary = _text(record, "content"), _count(record)
        elif record["kind"] == "turn":
            turn = _turn(record)
            bad += turn is None
            turns += [turn] if turn else []
    unfinished = any(begun) and turns[-1:] != [] and turns[-1].role == "user"
    turns += [Turn("assistant", *begun, stopped=True)] if unfinished else []
    newer = any(record["version"] > VERSION for record in records)
    last = max((record["seq"] for record in records), default=-1)
    return Chat(model, system, tuple(turns), newer, bad, whole, last, *summary, unfinished)


def outline(raw: bytes) -> Outline | None:
    """Read what a list shows, without decoding the messages; None where the file does not begin as a chat."""
    named: dict[str, str] = {}
    turns: list[bytes] = []
    for line in raw.split(b"\n"):
        found = _BEGINNING.match(line)
        kind = found[1].decode() if found else ""
        if found and kind == "turn":
            turns.append(line)
        elif found and kind == "drop":
            del turns[max(0, len(turns) - int(found[2] or 0)) :]
        elif kind in ("chat", "title", "model") and (record := _record(line)) is not None:
            named[kind] = _text(record, "model" if kind == "chat" else "content")
        if "chat" not in named:
            return None
    return Outline(named.get("title", ""), named.get("model", named["chat"]), tuple(turns))


def first_words(text: str) -> str:
    """Return the beginning of a text as one line, cut between words where there are any."""
    line = " ".join(text[: 20 * TITLE_CHARS].split())
    return line if len(line) <= TITLE_CHARS else f"{line[:TITLE_CHARS].rsplit(' ', 1)[0]} …"


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = parse_json(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return None
    numbers = (record.get("version"), record.get("seq"))
    return record if all(isinstance(n, int) and not isinstance(n, bool) for n in numbers) else None


def _turn(record: dict[str, Any]) -> Turn | None:
    figures = record.get("figures")
    try:
        turn = Turn(
            record.get("role"),  # type: ignore[arg-type]  # Message checks it
            record.get("content"),  # type: ignore[arg-type]
            _text(record, "thinking"),
            record.get("stopped") is True,
            figures if isinstance(figures, dict) else {},
        )
        return turn if turn.message else None
    except UsageError:
        return None


def _count(record: dict[str, Any]) -> int:
    count = record.get("count")
    return max(0, count) if isinstance(count, int) else 0


def _text(record: dict[str, Any], name: str) -> str:
    value = record.get(name, "")
    return value if isinstance(value, str) else ""

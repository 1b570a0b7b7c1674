"""What a drafter is to learn from: the user's chats, transcripts, prompts of a file, or what the target itself writes.

Nothing that is read here leaves the machine, and no text stays in what is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from dflash_local.bench.prompts import from_file, json_lines
from dflash_local.errors import UsageError
from dflash_local.json_text import parse_json
from dflash_local.request import Message
from dflash_local.settings import Settings
from dflash_local.store.paths import chats_folder
from dflash_local.transcripts.read import Progress, ReadReport, conversations
from dflash_local.transcripts.source_conversation import SourceConversation
from dflash_local.transcripts.turn import TranscriptTurn

CHATS, SELF = "chats", "self"  # sources that are no files
MOST_TURNS = 8  # of a conversation
MOST_CHARS = 24_000  # of a prompt


class TextSource(NamedTuple):
    """What was found. ``conversations``: None where the target writes its own. ``told``: in words."""

    conversations: tuple[SourceConversation, ...] | None
    told: str


def read_source(source: str, user: Settings, report: ReadReport, progress: Progress) -> TextSource:
    """Read the conversations of a source, in an order that says nothing of when they were.

    Args:
        source: ``chats``, ``self``, a folder or a file.

    Raises:
        UsageError: there is no such source, or nothing in it.
    """
    if source == SELF:
        return TextSource(None, "text that the target writes itself")
    path = chats_folder(user) if source == CHATS else Path(source).expanduser()
    if path is None or not path.exists():
        what = "no chat is saved here yet" if source == CHATS else f"--from {source}: there is no such file or folder"
        raise UsageError(what, "chats, self, a folder of transcripts, or a .jsonl file of prompts or messages")
    found = list(_conversations(path, report, progress))
    if not found:
        raise UsageError(f"--from {source}: no conversation in {path}", "--from self has the target write its own text")
    prompts = sum(len(each.prompts) for each in found)
    name = f"your saved chats in {path}" if source == CHATS else str(path)
    told = f"{len(found):,} conversations with {prompts:,} prompts of {name}"
    return TextSource(tuple(sorted(found, key=lambda each: each.digest)), told)


def _conversations(path: Path, report: ReadReport, progress: Progress) -> Iterator[SourceConversation]:
    """Read prompts, messages that no client wrote, or transcripts; the first line of a file tells which."""
    first = _first_line(path)
    if "prompt" in first:
        own = (prompt for prompt in from_file(path) if prompt.text)  # token ids are no text of a conversation
        return (SourceConversation(prompt.kind, ((Message("user", prompt.text),),)) for prompt in own)
    if "messages" in first and "system" not in first:
        return _of_messages(path)
    return _of_transcripts(path, report, progress)


def _first_line(path: Path) -> dict[str, Any]:
    """Return the object in the first line of a file; an empty one where there is none."""
    try:
        with path.open("rb") as stream:
            first = parse_json(stream.readline(2**22))
    except (OSError, ValueError):  # a folder among them
        return {}
    return first if isinstance(first, dict) else {}


def _of_messages(file: Path) -> Iterator[SourceConversation]:
    """Read lines of ``messages``. UsageError names the line."""
    for entry, where in json_lines(file):
        try:
            told = [Message(each["role"], each["content"]) for each in entry["messages"]]
            kind = str(entry.get("kind") or "text")
        except (TypeError, LookupError, AttributeError, UsageError) as error:
            hint = 'lines like {"messages": [{"role": "user", "content": "..."}]}'
            raise UsageError(f"{where} holds no messages: {error}", hint) from error
        ends = [at for at, each in enumerate(told) if each.role == "user" and _is_last(told, at)]
        yield from _conversation(kind, [tuple(told[: at + 1]) for at in ends])


def _is_last(told: list[Message], at: int) -> bool:
    return at + 1 == len(told) or told[at + 1].role == "assistant"


def _of_transcripts(path: Path, report: ReadReport, progress: Progress) -> Iterator[SourceConversation]:
    for client, turns in conversations(path, report, progress):
        threads: dict[str, list[tuple[Message, ...]]] = {}
        for turn in turns:
            threads.setdefault(turn.thread, []).append(tuple(_messages(turn)))
        for prompts in threads.values():
            yield from _conversation(client, prompts)


def _messages(turn: TranscriptTurn) -> Iterator[Message]:
    """Yield a prompt's texts as messages; what one side says in several is one."""
    role, texts = turn.roles[0], [turn.prompt[0]]
    for other, text in zip(turn.roles[1:], turn.prompt[1:]):
        if other != role:
            yield Message(role, "\n".join(texts))
            role, texts = other, []
        texts.append(text)
    yield Message(role, "\n".join(texts))


def _conversation(kind: str, prompts: list[tuple[Message, ...]]) -> Iterator[SourceConversation]:
    """Yield the conversation of the first prompts that are not too long, if there are any."""
    short = [each for each in prompts if 0 < sum(message.size for message in each) <= MOST_CHARS]
    if short:
        yield SourceConversation(kind, tuple(short[:MOST_TURNS]))

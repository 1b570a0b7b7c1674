"""What a transcript comes to, whoever wrote it: entries in the order of the file, and of these the turns of a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from dflash_local.request import Role

MOST_CHARS = 2**22  # of a conversation that is held: about a million tokens, more than any prompt has
ENTRY_CHARS = 64  # what an entry counts beside its text: many empty ones take memory, too

Kind = Literal["system", "prompt", "thinking", "reply", "anew", "mark", "back"]
ROLE_OF: dict[Kind, Role] = {"system": "system", "prompt": "user", "reply": "assistant"}


class TranscriptEntry(NamedTuple):
    """One thing that a transcript says.

    Attributes:
        kind: ``prompt`` is text that the model reads, ``reply`` and ``thinking`` what it wrote. ``system`` stands
            before all else and takes the place of an earlier one. ``anew``: what stood behind that was left out, as
            a compaction does. ``mark`` names this place, ``back`` goes on from the place of that name.
        of: names the reply that the text belongs to; without a name all text until the next prompt is one.
        thread: of several conversations in one file the one that it belongs to.
    """

    kind: Kind
    text: str = ""
    of: str = ""
    thread: str = ""


class TranscriptTurn(NamedTuple):
    """One reply and the whole text before it.

    Thinking is part of the reply that it was written in, and of no later prompt: chat templates leave it out.

    Attributes:
        message: the reply's name at its client; empty where it has none. The same one in two files is one reply.
        roles: of each text of the prompt, who said it.
    """

    prompt: tuple[str, ...]
    reply: tuple[str, ...]
    message: str
    thread: str
    roles: tuple[Role, ...]


class Format(NamedTuple):
    """How one client writes transcripts.

    Attributes:
        owns: whether a record is one of its own. conversations: of the records of a file from the first such one on,
            each to be read before the next.
    """

    client: str
    owns: Callable[[dict[str, Any]], bool]
    conversations: Callable[[Iterable[dict[str, Any]]], Iterator[Iterator[TranscriptEntry]]]


@dataclass(slots=True)
class _Thread:
    """Holds a conversation: what the next prompt has, the reply that is being read, and what came behind its start."""

    system: str = ""
    before: list[TranscriptEntry] = field(default_factory=list)
    reply: list[TranscriptEntry] = field(default_factory=list)
    kept: int = 0  # texts of the reply that later prompts have
    behind: list[TranscriptEntry] = field(default_factory=list)
    marks: dict[str, int] = field(default_factory=dict)
    chars: int = 0

    def starts_another(self, entry: TranscriptEntry) -> bool:
        """Say whether text of a reply belongs to another one than that which is being read."""
        of = self.reply[0].of if self.reply else ""
        return bool(self.reply) and (entry.of != of or (not of and bool(self.behind)))

    def end(self, thread: str) -> Iterator[TranscriptTurn]:
        """End the reply that is being read."""
        if self.reply and self.before:
            entries = [TranscriptEntry("system", self.system)] * bool(self.system) + self.before
            prompt, reply = (tuple(each.text for each in part) for part in (entries, self.reply))
            roles = tuple(ROLE_OF[each.kind] for each in entries)
            yield TranscriptTurn(prompt, reply, self.reply[0].of, thread, roles)
        self.before += [each for each in self.reply if each.kind == "reply"]
        self.before += self.behind
        self.reply, self.kept, self.behind = [], 0, []

    def go_back(self, name: str) -> None:
        """Forget what stands behind a mark; nothing where it is unknown."""
        place = self.marks.get(name, len(self.before))
        if place < len(self.before):
            del self.before[place:]
            self.marks = {each: at for each, at in self.marks.items() if at <= place}
            self.chars = sum(len(each.text) + ENTRY_CHARS for each in self.before)


def turns_of(entries: Iterable[TranscriptEntry]) -> Iterator[TranscriptTurn]:
    """Make the turns of a conversation, each when its reply ends.

    Where its threads are too long together, the one that was silent longest is over.

    Raises:
        ValueError: a prompt would be longer than any model's.
    """
    threads: dict[str, _Thread] = {}
    held = 0
    for entry in entries:
        thread = threads.pop(entry.thread) if entry.thread in threads else _Thread()
        threads[entry.thread] = thread  # the last one is the newest
        chars = thread.chars
        thread.chars += len(entry.text) + ENTRY_CHARS
        if entry.kind == "prompt":
            (thread.behind if thread.reply else thread.before).append(entry)
        elif entry.kind in ("reply", "thinking"):
            if thread.starts_another(entry):
                yield from thread.end(entry.thread)
            thread.reply.append(entry)
            thread.kept += entry.kind == "reply"
        elif entry.kind == "mark":
            thread.marks[entry.text] = len(thread.before) + thread.kept + len(thread.behind)
        else:
            yield from thread.end(entry.thread)
            if entry.kind == "system":
                thread.system = entry.text
            elif entry.kind == "back":
                thread.go_back(entry.text)
            else:
                thread.before, thread.marks, thread.chars = [], {}, len(thread.system)
        held += thread.chars - chars
        while held > MOST_CHARS:
            over = next((name for name in threads if name and name != entry.thread), None)
            if over is None:
                raise ValueError(f"a conversation in it has more than {MOST_CHARS:,} characters, its rest is left out")
            held -= threads[over].chars
            yield from threads.pop(over).end(over)
    for name, thread in threads.items():
        yield from thread.end(name)


def at(value: Any, *names: str) -> Any:
    """Return what lies under these names, one in the other; None where there is no such thing."""
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def text_at(value: Any, *names: str) -> str:
    """Return the string under these names; an empty one where there is none."""
    found = at(value, *names)
    return found if isinstance(found, str) else ""


def texts(content: Any) -> list[str]:
    """Return the texts of a message or a tool's result: a string, or a list of parts that have a ``text``."""
    if isinstance(content, str):
        return [content] if content else []
    parts = content if isinstance(content, list) else []
    return [text for part in parts if (text := text_at(part, "text"))]


def call_text(name: str, arguments: Any) -> str:
    """Write a call of a tool as models do: a line of JSON; arguments that are text already stay as they are."""
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'{{"name": {json.dumps(name)}, "arguments": {written}}}'

"""A conversation as the page shows it: its rows, its figures, its file, and the reply under way."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from dflash_local.errors import UsageError
from dflash_local.events import Stats
from dflash_local.loaded import SessionFacts
from dflash_local.service.chat_options import ChatOptions, parse_setting
from dflash_local.service.conversation import Conversation
from dflash_local.service.gathered import Answer
from dflash_local.service.service import Service
from dflash_local.store import export, history
from dflash_local.store.history import Recorder
from dflash_local.store.records import Turn
from dflash_local.terminal import safe
from dflash_local.ui.readings import Readings
from dflash_local.ui.web.reply import ReplyJob
from dflash_local.ui.web.text import SafeMarkdown, by_origin

SHOWN = 20  # turns; earlier ones are shown when they are asked for
LEAVE_S = 2.0  # in which a reply that is stopped ends


class ChatView:
    """Holds one conversation with the service pair. Its methods may be called from any thread.

    Args:
        folder: where chats are kept; None keeps none.

    Attributes:
        key: names it as long as this server runs.
    """

    def __init__(self, service: Service, folder: Path | None = None) -> None:
        self.key = secrets.token_hex(8)
        self._told: list[str] = []
        recorder = Recorder(folder, lambda text: self._told.append(text), keep=folder is not None)
        self.conversation = Conversation(service, ChatOptions(), recorder)
        self.readings = Readings(mode=service.model.mode)
        self._service, self._folder = service, folder
        self._replies: list[ReplyJob] = []  # those of the conversation, and the last one
        self._known: SessionFacts | None = None  # what the readings are of
        self._left = ""  # the name of the file that was closed when no window was left

    @property
    def name(self) -> str:
        """Is what the chat's file is called; empty as long as it has none."""
        return self.conversation.recorder.name or self._left

    def tell(self) -> list[str]:
        """Return what the store had to say, once."""
        told, self._told = self._told, []
        return told

    def open(self, name: str) -> None:
        """Go on with a chat of the store, as its file is now.

        Raises:
            UsageError: there is none of that name. DFlashError: it cannot be read.
        """
        path, found = history.load(self._folder, name)
        with self.conversation.lock:
            self._replies.clear()
            self._left = ""
            self.conversation.take_up(found)
            self.conversation.recorder.go_on(path)

    def leave(self) -> None:
        """End the reply under way, and leave the file to other programs, as no window shows the chat any more."""
        self.stop()
        reply = self.reply
        if reply is not None:
            reply.join(LEAVE_S)
        with self.conversation.lock:
            self._left = self.name
            self.conversation.recorder.close()

    def come_back(self) -> None:
        """Take up again what was left; another program may have gone on with it.

        Raises:
            DFlashError: its file cannot be read any more.
        """
        if self._left:
            self.open(self._left)

    @property
    def busy(self) -> bool:
        """True while a reply is on its way."""
        return self.reply is not None and self.reply.running

    @property
    def reply(self) -> ReplyJob | None:
        """Is the last reply, or the one under way; None for a new conversation."""
        return self._replies[-1] if self._replies else None

    def ask(self, text: str, options: ChatOptions) -> ReplyJob:
        """Send a message; it is taken back when no reply is kept.

        Raises:
            BusyError: a reply is on its way. UsageError: it cannot be sent so.
        """
        return self._start(lambda: self.conversation.answer(text, options), text)

    def again(self, options: ChatOptions) -> ReplyJob:
        """The last reply once more, with a fresh seed; the old one stays when none comes.

        A message whose reply was lost with its server is answered.

        Raises:
            BusyError: a reply is on its way. UsageError: there is none to make again.
        """
        turns = self.conversation.turns
        if turns and turns[-1].role == "user" and not self.busy:
            return self._start(lambda: self.conversation.edit(len(turns) - 1, turns[-1].content, options))
        return self._start(lambda: self.conversation.regenerate(options))

    def edit(self, back: int, text: str, options: ChatOptions) -> ReplyJob:
        """Send another text in the place of a message of the user's, counted from the last, which is 1.

        Raises:
            BusyError: a reply is on its way. UsageError: there is no such message, or it cannot be sent so.
        """
        return self._start(lambda: self.conversation.edit(self._place(back), text, options), text)

    def go_on(self, options: ChatOptions) -> ReplyJob:
        """Continue the last reply, which was cut.

        Raises:
            BusyError: a reply is on its way. UsageError: there is none that was cut.
        """
        return self._start(lambda: self.conversation.continue_reply(options))

    def message(self, back: int) -> str:
        """Return a message of the user's, counted from the last, which is 1; UsageError where there is none."""
        return self.conversation.turns[self._place(back)].content

    def _place(self, back: int) -> int:
        places = [place for place, turn in enumerate(self.conversation.turns) if turn.role == "user"]
        if not 0 < back <= len(places):
            raise UsageError("that message is not there any more", "load the page anew")
        return places[-back]

    def clear(self) -> None:
        """Begin a new conversation; the one before is brought back by ``undo_clear`` until the next message."""
        with self.conversation.lock:
            self._left = ""
            self.conversation.start_over()
            self._replies.clear()

    def undo_clear(self) -> None:
        """Bring back what ``clear`` took away; UsageError where there is nothing."""
        self.conversation.undo_start_over()

    def stop(self) -> None:
        """End the reply under way within one cycle; what came of it is kept."""
        pending = self.conversation.pending
        if pending is not None:
            pending.cancel()

    def look(self, plain: Stats | None = None) -> Readings:
        """Return the figures of the pair that is loaded now; ``plain``: of a race just run with it."""
        with self.conversation.lock:
            facts = self._service.facts
            if not self.busy and facts is not None:
                if facts is not self._known:
                    self.readings.load(facts)
                    self._known = facts
                if plain is not None:
                    self.readings.compare(plain)
            return self.readings

    def messages(self, origins: bool = False, most: int = SHOWN) -> list[dict[str, Any]]:
        """Write the end of the conversation as the page's component takes it, the reply under way included.

        Args:
            most: turns; the component works through all of its rows at each change.
        """
        with self.conversation.lock:
            turns, sent = list(self.conversation.turns), self.conversation.sent
            replies = {id(reply.source.turn): reply for reply in self._replies if reply.source.turn is not None}
            coming = self.reply if self.conversation.pending is not None else None
        rows: list[dict[str, Any]] = []
        for place, turn in list(enumerate(turns))[-most:]:
            if place and place == sent.unsent:
                rows += _unsent(place, sent.summary)
            rows += _rows(turn, replies.get(id(turn)), origins)
        return rows if coming is None else [*rows, *_rows(None, coming, origins)]

    def size(self, most: int = SHOWN) -> int:
        """Return about how many characters ``messages`` has."""
        text = self.reply.source.text if self.reply is not None and self.busy else ""
        return len(text) + sum(len(turn.content) for turn in self.conversation.turns[-most:])

    def exported(self, form: str) -> str:
        """Write the conversation as a file: ``md`` or ``json``."""
        write = export.to_json if form == "json" else export.to_markdown
        return write(self._service.name, self.conversation.options.system, tuple(self.conversation.turns))

    def _start(self, ask: Callable[[], Answer], text: str = "") -> ReplyJob:
        self.come_back()
        with self.conversation.lock:
            kept = {id(turn) for turn in self.conversation.turns}
            answer = ask()
            self._replies = [reply for reply in self._replies if id(reply.source.turn) in kept]
            self.readings.begin(answer.request.mode)
            reply = ReplyJob(answer, text, self._service, self.readings, self._known, self._ended)
            self._replies.append(reply)
            return reply

    def _ended(self, reply: ReplyJob) -> None:
        with self.conversation.lock:
            self._known = reply.facts or self._known
            if reply is self.reply and reply.source.turn is None:
                self.readings.state = "ready"


def _rows(turn: Turn | None, reply: ReplyJob | None, origins: bool) -> list[dict[str, Any]]:
    """Write a turn as the page's component takes it; without a turn a reply that is coming."""
    if reply is None:
        return [] if turn is None else _kept(turn)
    answer = by_origin(tuple(reply.pieces)) if origins and reply.pieces else reply.answer
    if turn is not None:
        answer += _ending(turn)
    status = "pending" if turn is None and reply.is_thinking else "done"
    return _messages("assistant", answer, reply.thoughts, reply.thinking_title, status)


def _unsent(count: int, summary: str) -> list[dict[str, Any]]:
    """Write the fold between the messages that the model is not sent any more and those that it is."""
    how = "summarised for the model" if summary else "not sent to the model any more"
    title = f"The {count} earlier messages are {how}"
    text = shown(summary) if summary else "The context is full. They are kept, and shown, all the same."
    return _messages("assistant", "", text, title, "done")


def _kept(turn: Turn) -> list[dict[str, Any]]:
    """Write a turn of which nothing but its text is known."""
    return _messages(turn.role, shown(turn.content) + _ending(turn), shown(turn.thinking), "Thinking", "done")


def _ending(turn: Turn) -> str:
    return f"\n\n*({turn.ending})*" if turn.ending else ""


@lru_cache(maxsize=1024)
def shown(text: str) -> str:
    """Write a text that is whole as Markdown for the page."""
    whole = SafeMarkdown()
    whole.feed(safe(text))
    return whole.text


def _messages(role: str, answer: str, thoughts: str, title: str, status: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    if thoughts:
        rows.append({"role": role, "content": _content(thoughts), "metadata": {"title": title, "status": status}})
    if answer or not thoughts:
        rows.append({"role": role, "content": _content(answer)})
    return rows


def _content(text: str) -> list[dict[str, str]]:
    """Make a part of text: a bare string would lose its indentation."""
    return [{"type": "text", "text": text}]


def chat_options(
    service: Service, system: str = "", mode: str = "", thinking: bool | None = None, **numbers: Any
) -> ChatOptions:
    """What the fields of the page ask for; an empty one leaves the model's own.

    Raises:
        UsageError: a value is not allowed.
    """
    model = service.model
    options = ChatOptions(mode=model.mode, thinking=model.thinking if thinking is None else thinking, system=system)
    if mode:
        options = replace(options, mode=mode)  # type: ignore[arg-type]  # Request checks it
    for name, value in numbers.items():
        if value not in (None, ""):
            options = replace(options, **parse_setting(options, name, str(value).strip()))
    return options

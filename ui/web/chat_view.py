"""The conversation of one window as the page shows it: its rows, its figures, and the reply under way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

from dflash_local.loaded import SessionFacts
from dflash_local.service.chat_options import ChatOptions, parse_setting
from dflash_local.service.conversation import Conversation
from dflash_local.service.gathered import Answer
from dflash_local.service.service import Service
from dflash_local.store import export
from dflash_local.store.records import Turn
from dflash_local.terminal import safe
from dflash_local.ui.readings import Readings
from dflash_local.ui.web.reply import ReplyJob
from dflash_local.ui.web.text import SafeMarkdown, by_origin


class ChatView:
    """Holds one conversation with the service pair. Its methods may be called from any thread."""

    def __init__(self, service: Service) -> None:
        self.conversation = Conversation(service, ChatOptions())
        self.readings = Readings(mode=service.model.mode)
        self._service = service
        self._replies: list[ReplyJob] = []  # those of the conversation, and the last one
        self._known: SessionFacts | None = None  # what the readings are of

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
        return self._start(lambda: self.conversation.answer(text, options))

    def again(self, options: ChatOptions) -> ReplyJob:
        """The last reply once more, with a fresh seed; the old one stays when none comes.

        Raises:
            BusyError: a reply is on its way. UsageError: there is none to make again.
        """
        return self._start(lambda: self.conversation.regenerate(options))

    def clear(self) -> None:
        """Forget everything that was said; a reply under way is ended and goes nowhere."""
        with self.conversation.lock:
            self.conversation.start_over()
            self._replies.clear()

    def stop(self) -> None:
        """End the reply under way within one cycle; what came of it is kept."""
        pending = self.conversation.pending
        if pending is not None:
            pending.cancel()

    def look(self, ar_speed: float | None = None) -> Readings:
        """Return the figures of the pair that is loaded now; a race may have told how fast it is without drafting."""
        with self.conversation.lock:
            facts = self._service.facts
            if not self.busy and facts is not None:
                if facts is not self._known:
                    self.readings.load(facts)
                    self._known = facts
                self.readings.ar_speed = ar_speed or self.readings.ar_speed
            return self.readings

    def messages(self, origins: bool = False) -> list[dict[str, Any]]:
        """Write the conversation as the page's component takes it, the reply under way included."""
        with self.conversation.lock:
            turns = list(self.conversation.turns)
            replies = {id(reply.source.turn): reply for reply in self._replies if reply.source.turn is not None}
            coming = self.reply if self.conversation.pending is not None else None
        rows = [row for turn in turns for row in _rows(turn, replies.get(id(turn)), origins)]
        return rows if coming is None else [*rows, *_rows(None, coming, origins)]

    def exported(self, form: str) -> str:
        """Write the conversation as a file: ``md`` or ``json``."""
        write = export.to_json if form == "json" else export.to_markdown
        return write(self._service.name, self.conversation.options.system, tuple(self.conversation.turns))

    def _start(self, ask: Callable[[], Answer]) -> ReplyJob:
        with self.conversation.lock:
            kept = {id(turn) for turn in self.conversation.turns}
            answer = ask()
            self._replies = [reply for reply in self._replies if id(reply.source.turn) in kept]
            self.readings.begin(answer.request.mode)
            reply = ReplyJob(answer, self._service, self.readings, self._known, self._ended)
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
        return [] if turn is None else _messages(turn.role, shown(turn.content), "", "", "done")
    answer = by_origin(tuple(reply.pieces)) if origins and reply.pieces else reply.answer
    if turn is not None and turn.ending:
        answer = f"{answer}\n\n*({turn.ending})*"
    status = "pending" if turn is None and reply.is_thinking else "done"
    return _messages("assistant", answer, reply.thoughts, reply.thinking_title, status)


@lru_cache(maxsize=256)
def shown(text: str) -> str:
    """Write a user's own words as Markdown for the page."""
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

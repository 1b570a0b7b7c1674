"""The conversation of one window: its turns, and the reply under way. Knows the service, draws no component."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dflash_local.errors import BusyError, DFlashError, UsageError
from dflash_local.events import Piece
from dflash_local.loaded import SessionFacts
from dflash_local.request import Message, Request, fresh_seed
from dflash_local.service.chat_options import ChatOptions, merged, parse_setting
from dflash_local.service.conversation import summary
from dflash_local.service.resident import Resident
from dflash_local.store import export
from dflash_local.store.records import Turn
from dflash_local.terminal import safe
from dflash_local.ui.readings import Readings
from dflash_local.ui.web.jobs import Job
from dflash_local.ui.web.reply import Reply
from dflash_local.ui.web.text import SafeMarkdown, by_origin


@dataclass(frozen=True, slots=True)
class Notification:
    """A turn, and how the page shows it.

    Attributes:
        answer, thoughts: Markdown for the page. title: of the box that holds the thoughts.
    """

    turn: Turn
    answer: str
    thoughts: str = ""
    title: str = ""
    pieces: Sequence[Piece] = field(default=(), repr=False)

    def messages(self, origins: bool) -> list[dict[str, Any]]:
        """As the page's component takes it."""
        answer = by_origin(self.pieces) if origins and self.pieces else self.answer
        if self.turn.ending:
            answer = f"{answer}\n\n*({self.turn.ending})*"
        return _messages(self.turn.role, answer, self.thoughts, self.title, "done")


class Talk:
    """One conversation with the resident pair; one reply at a time. Its methods may be called from any thread."""

    def __init__(self, resident: Resident) -> None:
        self.readings = Readings(mode=resident.model.mode)
        self._resident = resident
        self._lock = threading.RLock()
        self._said: list[Notification] = []
        self._system = ""
        self._reply: Reply | None = None
        self._coming: Reply | None = None  # until it is a turn, or nothing
        self._job: Job[None] | None = None
        self._known: SessionFacts | None = None  # what the readings are of

    @property
    def busy(self) -> bool:
        """True while a reply is on its way."""
        job = self._job
        return job is not None and job.running

    @property
    def job(self) -> Job[None] | None:
        """The work of the last reply."""
        return self._job

    @property
    def error(self) -> DFlashError | None:
        """Why the last reply failed, when it did and has ended."""
        try:
            _ = None if self._job is None or self._job.running else self._job.result
        except DFlashError as error:
            return error
        return None

    @property
    def reply(self) -> Reply | None:
        """The last reply, or the one under way."""
        return self._reply

    @property
    def turns(self) -> tuple[Turn, ...]:
        """What was said."""
        with self._lock:
            return tuple(said.turn for said in self._said)

    def ask(self, text: str, options: ChatOptions) -> Reply:
        """Send a message; it is taken back when no reply is kept.

        Raises:
            BusyError: a reply is on its way. UsageError: it cannot be sent so.
        """
        with self._lock:
            self._begin(options)
            before = list(self._said)
            self._said.append(Notification(Turn("user", text), shown(text)))
            return self._start(options, before, options.sampling)

    def again(self, options: ChatOptions) -> Reply:
        """The last reply once more, with a fresh seed; the old one stays when none comes.

        Raises:
            BusyError: a reply is on its way. UsageError: there is none to make again.
        """
        with self._lock:
            self._begin(options)
            if not self._said or self._said[-1].turn.role != "assistant":
                raise UsageError("there is no reply to make again")
            before = list(self._said)
            self._said.pop()
            return self._start(options, before, {**options.sampling, "seed": fresh_seed()})

    def take_back(self) -> str:
        """Forget the last message of the user and its reply; returns the message.

        Raises:
            BusyError: a reply is on its way. UsageError: there is none.
        """
        with self._lock:
            self._refuse_when_busy()
            last = max((index for index, said in enumerate(self._said) if said.turn.role == "user"), default=-1)
            if last < 0:
                raise UsageError("there is no message to edit")
            text = self._said[last].turn.content
            del self._said[last:]
            return text

    def clear(self) -> None:
        """Forget everything that was said; a reply under way is ended and goes nowhere."""
        with self._lock:
            self.stop()
            self._said.clear()
            self._reply = self._coming = None

    def stop(self) -> None:
        """End the reply under way within one cycle; what came of it is kept."""
        reply = self._reply
        if reply is not None and self.busy:
            reply.stop()

    def leave(self, reply: Reply) -> None:
        """Nobody looks at this reply any more: it ends, if it has not."""
        if reply is self._reply:
            self.stop()

    def look(self, ar_speed: float | None = None) -> Readings:
        """The figures, of the pair that is loaded now; how fast it is without drafting may be known from a race."""
        with self._lock:
            facts = self._resident.facts
            if not self.busy and facts is not None:
                if facts is not self._known:
                    self.readings.load(facts)
                    self._known = facts
                self.readings.ar_speed = ar_speed or self.readings.ar_speed
            return self.readings

    def messages(self, origins: bool = False) -> list[dict[str, Any]]:
        """The conversation as the page's component takes it, the reply under way included."""
        with self._lock:
            rows = [row for said in self._said for row in said.messages(origins)]
            reply = self._coming
        if reply is not None:
            answer = by_origin(reply.pieces) if origins else reply.answer
            rows += _messages(
                "assistant",
                answer,
                reply.thoughts,
                reply.thinking_title,
                "pending" if reply.is_thinking else "done",
            )
        return rows

    def exported(self, form: str) -> str:
        """The conversation as a file: ``md`` or ``json``."""
        write = export.to_json if form == "json" else export.to_markdown
        return write(self._resident.model.name, self._system, self.turns)

    def _begin(self, options: ChatOptions) -> None:
        self._refuse_when_busy()
        self._system = options.system

    def _refuse_when_busy(self) -> None:
        if self.busy:
            raise BusyError("a reply is on its way", "Stop ends it")

    def _start(self, options: ChatOptions, before: list[Notification], sampling: dict[str, float | int]) -> Reply:
        """Ask for a reply to what was said; ``before`` is what was said when nothing comes of it."""
        try:
            request = self._request(options, sampling)
        except DFlashError:
            self._said = before
            raise
        self.readings.begin(request.mode)
        self._reply = self._coming = reply = Reply(self._resident, request, self.readings, self._known)

        def work() -> None:
            try:
                reply.run()
            finally:
                self._settle(reply, before)

        self._job = Job(work, reply.stop)
        return reply

    def _request(self, options: ChatOptions, sampling: dict[str, float | int]) -> Request:
        head = (Message("system", options.system),) if options.system.strip() else ()
        return Request(
            messages=(*head, *(said.turn.message for said in self._said)),
            sampling=merged(self._resident.model.sampling, sampling),
            limits=options.limits,
            mode=options.mode,
            block_size=options.block_size,
            thinking=options.thinking,
        )

    def _settle(self, reply: Reply, before: list[Notification]) -> None:
        with self._lock:
            self._known = reply.facts or self._known
            if reply is not self._reply:  # the conversation was cleared meanwhile
                return
            self._coming = None
            if not reply.worth_keeping or reply.finished is None:
                self._said = before
                self.readings.state = "ready"
                return
            turn = Turn("assistant", reply.text, reply.thinking, reply.stopped, summary(reply.finished))
            self._said.append(Notification(turn, reply.answer, reply.thoughts, reply.thinking_title, reply.pieces))


def shown(text: str) -> str:
    """A user's own words as Markdown for the page."""
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
    """Text as a part: a bare string would lose its indentation."""
    return [{"type": "text", "text": text}]


def chat_options(
    resident: Resident, system: str = "", mode: str = "", thinking: bool | None = None, **numbers: Any
) -> ChatOptions:
    """What the fields of the page ask for; an empty one leaves the model's own.

    Raises:
        UsageError: a value is not allowed.
    """
    model = resident.model
    options = ChatOptions(mode=model.mode, thinking=model.thinking if thinking is None else thinking, system=system)
    if mode:
        options = replace(options, mode=mode)  # type: ignore[arg-type]  # Request checks it
    for name, value in numbers.items():
        if value not in (None, ""):
            options = replace(options, **parse_setting(options, name, str(value).strip()))
    return options

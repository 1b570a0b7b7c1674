"""A conversation: its turns and its options, and how a reply is requested. Prints and draws nothing.

Line chat, terminal screen and page share it; the model is passed in.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from dflash_local.errors import BusyError, DFlashError, UsageError
from dflash_local.events import Finished
from dflash_local.loaded import SessionFacts
from dflash_local.request import Message, Request, SamplingParams, fresh_seed
from dflash_local.service.chat_options import ChatOptions, merged
from dflash_local.service.full_context import SentTurns
from dflash_local.service.gathered import Answer
from dflash_local.service.ticket import Ticket
from dflash_local.store.history import Recorder
from dflash_local.store.records import Chat, Turn


class ChatModel(Protocol):
    """What answers in a conversation: ``sampling`` is the model's default."""

    @property
    def name(self) -> str: ...

    @property
    def sampling(self) -> SamplingParams: ...

    @property
    def facts(self) -> SessionFacts | None: ...

    def submit(self, request: Request) -> Ticket: ...

    def count(self, request: Request) -> int: ...


@dataclass(frozen=True, slots=True)
class Cleared:
    """What ``start_over`` took away, and the chat's file."""

    turns: tuple[Turn, ...]
    sent: SentTurns
    last: Finished | None
    path: Path | None


class Conversation:
    """One conversation, one reply at a time. Its methods may be called from any thread.

    Attributes:
        turns: the messages and replies. last: how the last reply ended. replies: how each of this session did.
        pending: the reply on its way. sent: which turns fit the context.
        cleared: what ``undo_start_over`` brings back; None when there is nothing.
    """

    def __init__(self, model: ChatModel, options: ChatOptions, recorder: Recorder | None = None) -> None:
        self.model, self.options = model, options
        self.recorder = recorder or Recorder(None, lambda _text: None, keep=False)
        self.turns: list[Turn] = []
        self.last: Finished | None = None
        self.replies: list[Finished] = []
        self.pending: Answer | None = None
        self.cleared: Cleared | None = None
        self.sent = SentTurns()
        self.lock = threading.RLock()
        self._undo: Callable[[], None] = lambda: None  # makes it what it was before the pending reply
        self._kept = 0, 0  # characters of the pending reply and its thoughts that the file has
        self._replaced: Turn | None = None  # by the pending reply, where that is kept

    @property
    def sampling(self) -> SamplingParams:
        """The model's own sampling with the user's options in it."""
        return merged(self.model.sampling, self.options.sampling)

    def answer(self, text: str, options: ChatOptions | None = None) -> Answer:
        """Send a message; when no reply is kept, the message is taken back.

        Args:
            options: from now on.

        Raises:
            BusyError: a reply is on its way. DFlashError: it cannot be sent.
        """
        with self.lock:
            self._begin(options)
            self._add(Turn("user", text))
            return self._prepare(lambda: self._drop(1))

    def regenerate(self, options: ChatOptions | None = None) -> Answer:
        """The last reply again, with a fresh seed; when none is kept, the old one stays. A last message that has no
        reply, as a crash leaves it, gets one.

        Args:
            options: from now on.

        Raises:
            BusyError: a reply is on its way. UsageError: there is none yet. DFlashError: it cannot be sent.
        """
        with self.lock:
            self._begin(options)
            if not self.turns:
                raise UsageError("there is no reply to make again")
            old = self.turns.pop() if self.turns[-1].role == "assistant" else None
            return self._prepare(old=old, seed=fresh_seed())

    def continue_reply(self, options: ChatOptions | None = None) -> Answer:
        """Let the last reply, which was stopped or cut off, go on where it ended; both parts are one turn. When
        nothing is kept, it stays as it was.

        Args:
            options: from now on.

        Raises:
            BusyError: a reply is on its way. UsageError: it ended by itself, or this model cannot go on with one.
            DFlashError: it cannot be sent.
        """
        with self.lock:
            self._begin(options)
            if not self.turns or not self.turns[-1].ending:
                raise UsageError("there is no reply that was cut off", "ask for more in a message")
            return self._prepare(old=self.turns.pop(), goes_on=True)

    def edit(self, index: int, text: str, options: ChatOptions | None = None) -> Answer:
        """Send another message in the place of the one at ``turns[index]``: what followed that is no more a part of the
        conversation, though its file keeps it. When no reply is kept, all is as before.

        Args:
            options: from now on.

        Raises:
            BusyError: a reply is on its way. UsageError: no message of the user's is there. DFlashError: it cannot be
                sent.
        """
        with self.lock:
            self._begin(options)
            if not 0 <= index < len(self.turns) or self.turns[index].role != "user":
                raise UsageError("there is no message of yours at that place")
            old = self.turns[index:]
            self._drop(len(old))
            self._add(Turn("user", text))

            def undo() -> None:
                self._drop(1)
                for turn in old:
                    self._add(turn)

            return self._prepare(undo)

    def take_back(self) -> str:
        """Forget the user's last message and its reply, and return it; BusyError in a reply, UsageError without one."""
        with self.lock:
            self._begin(None)
            last = max((index for index, turn in enumerate(self.turns) if turn.role == "user"), default=-1)
            if last < 0:
                raise UsageError("there is no message to edit")
            text = self.turns[last].content
            self._drop(len(self.turns) - last)
            return text

    def start_over(self) -> None:
        """Forget the turns; the next one begins a new chat file. A reply on its way is ended: what came of it is kept
        with the turns that ``undo_start_over`` brings back.
        """
        with self.lock:
            if self.pending is not None:
                pending, self.pending = self.pending, None
                pending.cancel()
                pending.broken_off = True
                if pending.worth_keeping:
                    self._keep(pending, {})
                    pending.turn = None
                else:
                    self._undo()
            if self.turns:
                self.cleared = Cleared(tuple(self.turns), self.sent, self.last, self.recorder.path)
            self.turns.clear()
            self.sent, self.last = SentTurns(), None
            self.recorder.begin_anew()

    def undo_start_over(self) -> None:
        """Bring back what ``start_over`` took away; the next message makes that impossible.

        Raises:
            UsageError: nothing was taken away, or something was sent since.
        """
        with self.lock:
            if self.cleared is None:
                raise UsageError("there is nothing to bring back", "a new message makes /clear final")
            cleared, self.cleared = self.cleared, None
            self.turns.extend(cleared.turns)
            self.sent, self.last = cleared.sent, cleared.last
            if cleared.path is not None:
                self.recorder.go_on(cleared.path)

    def take_up(self, chat: Chat) -> None:
        """Go on with an earlier chat; its file is the recorder's business."""
        with self.lock:
            self.start_over()
            self.cleared = None
            self.options.system = chat.system
            self.turns.extend(chat.turns)
            self.sent = SentTurns(chat.summarised, chat.summary)

    def set_system(self, text: str) -> None:
        """Change the system message from the next reply on."""
        self.options.system = text
        self.recorder.record("system", content=text)

    def request(self, text: str = "") -> Request:
        """The request of now, with ``text`` as a further message; else the last one again, UsageError without any."""
        turns = [*self.turns, Turn("user", text)] if text else list(self.turns)
        while turns and turns[-1].role == "assistant":
            turns.pop()
        return self._request(self.sampling, self.sent.messages(turns))

    def _begin(self, options: ChatOptions | None) -> None:
        if self.pending is not None:
            raise BusyError("a reply is on its way", "Stop ends it")
        self.cleared = None
        self.options = options or self.options

    def _prepare(
        self,
        undo: Callable[[], None] = lambda: None,
        old: Turn | None = None,
        goes_on: bool = False,
        **sampling: int,
    ) -> Answer:
        """Make the reply that is pending from now on.

        Args:
            undo: makes the conversation what it was, where nothing is kept.
            old: a reply that this one is to replace; the file loses it only then. goes_on: from its end.
        """

        def settle(answer: Answer) -> None:
            with self.lock:
                if answer is not self.pending:  # begun anew meanwhile
                    return
                self.pending = None
                if not answer.worth_keeping:
                    self._undo()
                    return
                figures: dict[str, Any] = {}
                if answer.finished is not None:
                    self.last, figures = answer.finished, summary(answer.finished)
                    self.sent.learn(answer.request, answer.finished.usage.prompt_tokens)
                    self.replies.append(answer.finished)
                self._keep(answer, figures)

        self._replaced, begun = old, old if goes_on else None
        self._undo = undo if old is None else lambda: self.turns.append(old)
        turns = (*self.turns, begun) if begun is not None else tuple(self.turns)
        chosen, options = replace(self.sampling, **sampling), self.options
        thought = begun is not None and bool(begun.thinking)

        def made(messages: tuple[Message, ...]) -> Request:
            request = self._request(chosen, messages, options)
            goes_on = begun is not None and messages[-1].role == "assistant"
            return replace(request, continues=goes_on, thinking=request.thinking or (goes_on and thought))

        def fit(answer: Answer) -> Request:
            sent, known = self.sent, (self.sent.unsent, self.sent.summary)
            request, notices = sent.fit(turns, options.full_context, self.model, made, answer.ask)
            answer.notices.extend(notices)
            changed = (sent.unsent, sent.summary) != known and bool(sent.summary or known[1])
            with self.lock:
                if changed and answer is self.pending:  # without a summary another context decides anew
                    count = sent.unsent if sent.summary else 0
                    self.recorder.record("summary", count=count, content=sent.summary)
            return request

        try:
            request = made(self.sent.messages(turns))
        except DFlashError:
            self._undo()
            raise
        self._kept = 0, 0
        self.pending = Answer(request, self.model.submit, settle, begun, fit, self._keep_part)
        return self.pending

    def _keep_part(self, answer: Answer) -> None:
        """Put into the file what came of a reply so far; where it replaces another, that one stays instead."""
        with self.lock:
            if answer is self.pending and self._replaced is None:
                text, thinking = answer.text, answer.thinking
                self.recorder.record("part", content=text[self._kept[0] :], thinking=thinking[self._kept[1] :])
                self._kept = len(text), len(thinking)

    def _keep(self, answer: Answer, figures: dict[str, Any]) -> None:
        """Make a turn of what came of a reply."""
        if answer.begun is not None and figures:
            figures["tokens"] += answer.begun.figures.get("tokens", 0)
        answer.turn = Turn("assistant", answer.text, answer.thinking, answer.stopped, figures)
        if self._replaced is not None:
            self.recorder.record("drop", count=1)
        self._add(answer.turn)

    def _request(
        self, sampling: SamplingParams, messages: tuple[Message, ...], options: ChatOptions | None = None
    ) -> Request:
        options = options or self.options
        head = (Message("system", options.system),) if options.system.strip() else ()
        return Request(
            messages=(*head, *messages),
            sampling=sampling,
            limits=options.limits,
            mode=options.mode,
            block_size=options.block_size,
            thinking=options.thinking,
        )

    def _add(self, turn: Turn) -> None:
        self.turns.append(turn)
        self.recorder.turn(self.model.name, self.options.system, self.turns)

    def _drop(self, count: int) -> None:
        del self.turns[-count:]
        self.recorder.record("drop", count=count)


def summary(finished: Finished) -> dict[str, Any]:
    """The figures kept with a reply."""
    stats = finished.stats
    return {
        "tokens": finished.usage.completion_tokens,
        "tokens_per_s": round(stats.tokens_per_s, 2),
        "mean_acceptance_length": _rounded(stats.mean_acceptance_length),
        "turn_acceptance_length": _rounded(stats.turn_acceptance_length),
        "mode": stats.mode,
        "block_size": stats.block_size,
        "seed": stats.seed,
        "reason": finished.reason,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)

"""A conversation: its pair, its turns and its options, and how a reply is requested.

Knows the service and the store; the way to load a pair is passed in. Prints and draws nothing, so
that the line chat and the screens share it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any

from dflash_local.catalog.bundled import Pair
from dflash_local.catalog.generation_config import sampling_defaults
from dflash_local.errors import DFlashError, UsageError
from dflash_local.events import Event, Finished
from dflash_local.loaded import SessionFacts
from dflash_local.request import Message, Request, SamplingParams, fresh_seed
from dflash_local.service.chat_options import ChatOptions, merged
from dflash_local.service.gathered import Gathered
from dflash_local.service.service import Service, Ticket
from dflash_local.store.history import Recorder
from dflash_local.store.records import Chat, Turn

Load = Callable[[Pair, bool], Service]  # the pair, and whether its drafter is to be loaded


class Answer(Gathered):
    """A reply on its way: an iterator over its events. Use it in a ``with``.

    Leaving the ``with`` decides: a reply that ended is kept as a turn, one that failed, was abandoned
    or was stopped before any text is not, and the conversation is as it was before.
    """

    def __init__(self, ticket: Ticket, settle: Callable[[Answer], None]) -> None:
        super().__init__()
        self._ticket, self._settle = ticket, settle
        self._events = ticket.events()
        self._settled = False

    def __enter__(self) -> Answer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._settled:
            self._settled = True
            if self.finished is None:
                self.cancel()
            self._settle(self)

    def __iter__(self) -> Answer:
        return self

    def __next__(self) -> Event:
        event = next(self._events)
        self.gather(event)
        return event

    def events(self) -> Answer:
        """The events still to come."""
        return self

    def cancel(self) -> None:
        """Stop the reply within one cycle; its last event is ``Finished('cancelled')``. From any thread."""
        self._ticket.cancel()

    @property
    def cancelled(self) -> bool:
        """True when ``cancel`` was called, whether or not it came in time."""
        return self._ticket.cancelled

    @property
    def request(self) -> Request:
        """The request as it was submitted."""
        return self._ticket.request


class Conversation:
    """One conversation with one loaded pair at a time.

    Its methods are called from one thread at a time; between ``answer`` and the end of what it
    returned nothing else is called but ``Answer.cancel``.

    Attributes:
        turns: the messages and replies. last: how the last reply ended. replies: how each of this session did.
    """

    def __init__(self, pair: Pair, load: Load, options: ChatOptions, recorder: Recorder) -> None:
        self.pair, self.options, self.recorder = pair, options, recorder
        self.turns: list[Turn] = []
        self.last: Finished | None = None
        self.replies: list[Finished] = []
        self._load = load
        self._defaults = SamplingParams()
        self._service: Service | None = None

    def open(self) -> None:
        """Load the pair; takes seconds to minutes.

        Raises:
            UsageError: it has no tokenizer. DFlashError: it cannot be loaded.
        """
        self._open(self.pair)

    def close(self) -> None:
        """Close the service and the chat file."""
        self.recorder.close()
        if self._service is not None:
            self._service.close()
            self._service = None

    @property
    def service(self) -> Service:
        """The loaded pair's service."""
        if self._service is None:
            raise UsageError("no model is loaded", "/model NAME loads one")
        return self._service

    @property
    def facts(self) -> SessionFacts | None:
        """What was loaded, and how; None while nothing is."""
        service = self._service  # another thread may close it meanwhile
        return service.facts if service is not None else None

    @property
    def broken(self) -> bool:
        """True when no further reply can come from the loaded pair."""
        return self._service is not None and self._service.broken

    @property
    def sampling(self) -> SamplingParams:
        """The model's own sampling with the user's options in it."""
        return merged(self._defaults, self.options.sampling)

    def change_model(self, pair: Pair) -> None:
        """Load another pair in this one's place; this one comes back when that fails.

        The old one goes first: two may not fit into memory.
        """
        before = self.pair
        if self._service is not None:
            self._service.close()
            self._service = None
        try:
            self._open(pair)
        except DFlashError:
            if self._service is None:
                self._open(before)
            raise

    def answer(self, text: str) -> Answer:
        """Send a message; when no reply is kept, the message is taken back.

        Raises:
            DFlashError: it cannot be sent.
        """
        self._add(Turn("user", text))
        try:
            return self._submit(self.sampling, lambda: self._drop(1))
        except DFlashError:
            self._drop(1)
            raise

    def regenerate(self) -> Answer:
        """The last reply again, with a fresh seed; when none is kept, the old one stays.

        Raises:
            UsageError: there is no reply yet. DFlashError: it cannot be sent.
        """
        if not self.turns or self.turns[-1].role != "assistant":
            raise UsageError("there is no reply to make again")
        old = self.turns[-1]
        self._drop(1)
        try:
            return self._submit(replace(self.sampling, seed=fresh_seed()), lambda: self._add(old))
        except DFlashError:
            self._add(old)
            raise

    def take_back(self) -> str:
        """Forget the last message of the user and what was replied; returns the message, to be edited.

        Raises:
            UsageError: there is none.
        """
        last = max((index for index, turn in enumerate(self.turns) if turn.role == "user"), default=-1)
        if last < 0:
            raise UsageError("there is no message to edit")
        text = self.turns[last].content
        self._drop(len(self.turns) - last)
        return text

    def start_over(self) -> None:
        """Forget the turns; the next one begins a new chat file."""
        self.turns.clear()
        self.last = None
        self.recorder.begin_anew()

    def take_up(self, chat: Chat) -> None:
        """Go on with an earlier chat; its file is the recorder's business."""
        self.start_over()
        self.options.system = chat.system
        self.turns.extend(chat.turns)

    def set_system(self, text: str) -> None:
        """Change the system message from the next reply on."""
        self.options.system = text
        self.recorder.record("system", content=text)

    def request(self, text: str = "") -> Request:
        """The request of now, with ``text`` as a further message; without it the last message is sent again.

        Raises:
            UsageError: there is no message.
        """
        messages = [turn.message for turn in self.turns]
        while not text and messages and messages[-1].role == "assistant":
            messages.pop()
        return self._request(self.sampling, (*messages, *((Message("user", text),) if text else ())))

    def _open(self, pair: Pair) -> None:
        defaults = sampling_defaults(pair.target)
        service = self._load(pair, pair.drafter is not None or self.options.mode == "dflash")
        if not service.facts.has_tokenizer:
            service.close()
            raise UsageError(f"{pair.name} has no tokenizer, so it cannot chat", "dflash run with --prompt-ids works")
        self._service, self.pair, self._defaults = service, pair, defaults

    def _submit(self, sampling: SamplingParams, undo: Callable[[], None]) -> Answer:
        def settle(answer: Answer) -> None:
            finished = answer.finished
            if finished is None or not answer.worth_keeping:
                undo()
                return
            self.last = finished
            self.replies.append(finished)
            self._add(Turn("assistant", answer.text, answer.thinking, answer.stopped, summary(finished)))

        return Answer(self.service.submit(self._request(sampling, tuple(turn.message for turn in self.turns))), settle)

    def _request(self, sampling: SamplingParams, messages: tuple[Message, ...]) -> Request:
        options = self.options
        head = (Message("system", options.system),) if options.system else ()
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
        self.recorder.turn(self.pair.name, self.options.system, self.turns)

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

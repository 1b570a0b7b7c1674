"""A running server of another program as a backend, used as if its pair were loaded here.

What a server does not report stays absent: of single cycles nothing is known, and acceptance comes from the reply's own
figures or the difference of the server's counters. Its text is a model's: screens make it safe, as any.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from dflash_local.checkpoint_files.config_values import ConfigFields
from dflash_local.errors import (
    BusyError,
    CheckpointError,
    DeviceLostError,
    DFlashError,
    Interrupted,
    ServerError,
    UsageError,
)
from dflash_local.events import (
    Channel,
    Event,
    Finished,
    FinishReason,
    Notice,
    Piece,
    Started,
    Stats,
    Step,
    TokenLogprob,
    Usage,
)
from dflash_local.loaded import HeldCount, nothing_done
from dflash_local.remote import server_metrics
from dflash_local.remote.endpoint import ANSWER_S, ServerEndpoint, within
from dflash_local.remote.event_stream import PATIENCE, EventStream, Patience, broken_off, stream_error
from dflash_local.remote.logprobs import rows_of
from dflash_local.remote.openai_body import MAX_SEED, body_of, uncounted
from dflash_local.remote.programs.server_program import Program
from dflash_local.remote.server_checks import ServerFacts, WantedModel, probe, switches_off
from dflash_local.remote.server_metrics import Counters, ServerAcceptance, Unattributable
from dflash_local.request import Request, fresh_seed

if TYPE_CHECKING:
    from dflash_local.remote.server_process import ServerProcess

THOUGHT = "</think>"  # what a server's reasoning parser takes out of the text
MAX_CHOICES = MAX_CALLS = 128  # of one event
GONE_S = 2.0  # what a process that was killed may take until it has ended
MAX_IDS = 2**20  # of one event: those of a long prompt
MAX_ID = 2**31  # of a token; no request counts as many
SHORTEST_S = 0.01  # a reply that came within less tells nothing of its speed
REASONS: Mapping[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "stop",
    "function_call": "stop",
}


@dataclass(frozen=True, slots=True)
class ServerAnswer:
    """A whole reply.

    Attributes:
        text: of the final channel. thinking: before it. token_ids: as far as the server reports them.
        counted: it reports how many tokens there are. reused_tokens: of the prompt, that its prefix cache had.
        acceptance: as the reply itself reports it. logprobs: as far as they were asked for.
    """

    text: str
    thinking: str
    token_ids: tuple[int, ...]
    counted: bool
    reused_tokens: int
    finished: Finished
    acceptance: ServerAcceptance | None
    logprobs: tuple[TokenLogprob, ...] = ()


class OpenAIServer:
    """The backend over a server, for one ``Service`` of this process.

    Errors of a request are none of the backend: the next request asks the server again.

    Args:
        wanted: the model that it must serve, also after a restart. facts: of the check before.
        process: of a server that was launched for this backend, and ends with it.
    """

    set_aside = None  # the server answers several requests at a time

    def __init__(
        self,
        endpoint: ServerEndpoint,
        wanted: WantedModel,
        facts: ServerFacts,
        patience: Patience = PATIENCE,
        process: ServerProcess | None = None,
    ) -> None:
        self.facts, self.process = facts, process
        self._endpoint, self._wanted, self._patience = endpoint, wanted, patience
        self._reasons: set[str] = set()  # for which acceptance was not known: each is a warning once
        self._counters: Counters | None = None  # of the last request

    def generate(self, request: Request, cancelled: Callable[[], bool] = lambda: False) -> Iterator[Event]:
        """Answer ``request``: the events up to and including ``Finished``; cancelling hangs up.

        Raises:
            UsageError: the server cannot do it. ServerError: it is gone, silent, or ends the reply with an error;
                what came before stands. DeviceLostError: it was launched here, and its process has ended.
        """
        ended = self.process.end if self.process is not None else None
        seed = request.sampling.seed
        seed = fresh_seed() & MAX_SEED if seed is None else seed
        body_of(request, self.facts, seed)  # refused in the call
        return self._reply(request, seed, cancelled, ended)

    def count(self, request: Request) -> int:
        """Raise UsageError: the server applies the chat template, and tells the count with a reply alone."""
        raise uncounted()

    def held(self) -> tuple[HeldCount, ...]:
        """Return nothing: servers do not say."""
        return ()

    def close(self) -> None:
        """End the server where it was launched for this, and is not kept."""
        if self.process is not None:
            self.process.stop()

    def _reply(
        self, request: Request, seed: int, cancelled: Callable[[], bool], ended: ServerError | None
    ) -> Iterator[Event]:
        if ended is not None:
            raise DeviceLostError(ended.message, ended.hint)
        try:
            last = self._counters
            before = server_metrics.read(self._endpoint, within(ANSWER_S, cancelled))
            restarted = _restarted(last, before)
            if restarted:
                self.facts = probe(self._endpoint, self._wanted, self.facts.program, cancelled)
        except Interrupted:
            yield nothing_done(self.facts, request)
            return
        except ServerError as error:  # a process that is being killed closes its connections before it has ended
            end = self.process.end_within(GONE_S) if self.process is not None else None
            if end is None:
                raise
            raise DeviceLostError(end.message, end.hint) from error
        if restarted:
            yield Notice(f"the server at {self.facts.url} was restarted: {self.facts.loaded_as}", "warning")
        reply = ServerReply(request, self.facts, seed)
        yield from self._whole(request, reply, seed, cancelled)
        stopped = cancelled()
        acceptance, self._counters = reply.acceptance, before
        if acceptance is None and self.facts.drafts is not False and request.mode != "ar":
            try:
                wait = within(server_metrics.SETTLE_S) if stopped else within(ANSWER_S, cancelled)
                after = server_metrics.read_settled(self._endpoint, before, wait=wait) if before is not None else None
                self._counters = after
                acceptance = server_metrics.difference(before, after)
            except Unattributable as why:
                level: Literal["info", "warning"] = "info" if str(why) in self._reasons else "warning"
                self._reasons.add(str(why))
                yield Notice(f"the acceptance length of this reply is not known: of the server, {why}", level)
        if reply.unparsed:
            yield Notice(f"the reply holds {THOUGHT}: the server was started without a reasoning parser", "warning")
        if not stopped and reply.usage is None:
            yield Notice("the server reports no token counts, so that speeds are not known")
        yield reply.finished("cancelled" if stopped else reply.reason or "stop", acceptance)

    def switch_off(self, hint: str) -> None:
        """Let requests in mode ``ar`` switch drafting off.

        Raises:
            UsageError: the server does not take that. ServerError: it is gone.
        """
        if not switches_off(self._endpoint, self.facts):
            what = f"{self.facts.title} at {self.facts.url} drafts for every request: plain replies need a second one"
            raise UsageError(what, hint)
        self.facts = replace(self.facts, switches=True)

    def answer(
        self, request: Request, cancelled: Callable[[], bool] = lambda: False, all_tokens: bool = False
    ) -> ServerAnswer:
        """A whole reply without a look at the server's counters: several threads may ask at the same time.

        Args:
            all_tokens: see ``body_of``.

        Raises:
            UsageError, ServerError: see ``generate``. Interrupted: cancelled.
        """
        seed = request.sampling.seed
        seed = fresh_seed() & MAX_SEED if seed is None else seed
        reply = ServerReply(request, self.facts, seed)
        pieces: list[Piece] = []
        ids: tuple[int, ...] = ()
        rows: tuple[TokenLogprob, ...] = ()
        reused = 0
        for event in self._whole(request, reply, seed, cancelled, all_tokens):
            if isinstance(event, Step):
                pieces += event.pieces
                ids += event.token_ids
                rows += event.logprobs
            elif isinstance(event, Started):
                reused = event.reused_tokens
        if cancelled():
            raise Interrupted("interrupted in the middle of a reply")
        text, thinking = ("".join(one.text for one in pieces if one.channel == of) for of in ("final", "thinking"))
        counted = reply.usage is not None
        finished = reply.finished(reply.reason or "stop", reply.acceptance)
        return ServerAnswer(text, thinking, ids, counted, reused, finished, reply.acceptance, rows)

    def counters(self) -> Counters | None:
        """The server's counters of now, see ``server_metrics.read``."""
        return server_metrics.read(self._endpoint)

    def settled(self, before: Counters | None, requests: int) -> Counters | None:
        """Its counters once it counts so many requests as ended, see ``server_metrics.read_settled``."""
        return None if before is None else server_metrics.read_settled(self._endpoint, before, requests)

    def is_there(self, cancelled: Callable[[], bool]) -> bool:
        """True where the server still serves the model. Interrupted: cancelled."""
        try:
            probe(self._endpoint, self._wanted, self.facts.program, cancelled)
        except BusyError:
            return True
        except Interrupted:
            raise
        except DFlashError:
            return False
        return True

    def _whole(
        self,
        request: Request,
        reply: ServerReply,
        seed: int,
        cancelled: Callable[[], bool],
        all_tokens: bool = False,
    ) -> Iterator[Event]:
        """The events of a reply from its beginning to its last text."""
        path, body = body_of(request, self.facts, seed, all_tokens)
        own = self.facts.server.own_request if request.return_token_ids else None
        if own is not None:
            wait = within(ANSWER_S, cancelled)
            path, body = own(lambda where, what: self._endpoint.post(where, what, wait), body)
        try:
            yield from self._streamed(path, body, request, reply, cancelled)
        except UsageError:
            # Both programs refuse a limit that the prompt leaves no room for; without one they fill what there is.
            if own is not None or body["max_tokens"] is None or self.facts.context == 0:
                raise
            yield from self._streamed(path, body | {"max_tokens": None}, request, reply, cancelled)
        if not cancelled() and reply.reason is None:
            raise broken_off(self.facts.url, "the connection was closed")
        yield from reply.begin()

    def _streamed(
        self, path: str, body: Mapping[str, Any], request: Request, reply: ServerReply, cancelled: Callable[[], bool]
    ) -> Iterator[Event]:
        most = request.limits.max_new_tokens
        with closing(EventStream(self._endpoint, path, body, most, self._patience)) as stream:
            for content in stream.events(cancelled):
                for event in [content] if isinstance(content, Notice) else reply.take(content):
                    if isinstance(event, Step):
                        stream.advance(event)
                    yield event


class ServerReply:
    """What has come of one reply, and the events it makes.

    Attributes:
        reason: why it ended; None before. usage: of the last event that had one.
        acceptance: as the reply itself reports it. unparsed: thoughts came as text of the reply.
    """

    def __init__(self, request: Request, facts: ServerFacts, seed: int) -> None:
        self.reason: FinishReason | None = None
        self.usage: Mapping[str, int] | None = None
        self.acceptance: ServerAcceptance | None = None
        self.unparsed = False
        self._plain_step: tuple[float | None, str] = (None, "")
        self._request, self._facts, self._seed = request, facts, seed
        self._began = time.perf_counter()
        self._first: tuple[float, int] | None = None  # seconds, and tokens that had come then
        self._last = 0.0
        self._started = False
        self._calling = False
        self._prompt_ids: tuple[int, ...] = ()

    def take(self, content: Mapping[str, Any]) -> list[Event]:
        """The events that one event of the server makes.

        Raises:
            ServerError: it reports an error, or is not what it should be.
        """
        error = stream_error(content)
        if error:
            raise ServerError(
                f"the server at {self._facts.url} ended the reply: {error}", "its log has the reason; ask again"
            )
        try:
            return list(self._events(ConfigFields(self._facts.server.own_event(dict(content)), "event")))
        except CheckpointError as wrong:
            raise ServerError(
                f"the server at {self._facts.url} sends a malformed reply: {wrong.message}",
                "the request was given up; the next message asks it again",
            ) from wrong

    def _events(self, content: ConfigFields) -> Iterator[Event]:
        now = time.perf_counter() - self._began
        self.usage = _usage(content) or self.usage
        if self._facts.drafts is not False and self._request.mode != "ar":
            self.acceptance = server_metrics.of_reply(content.values) or self.acceptance
        self._plain_step = server_metrics.plain_step_of_reply(content.values) or self._plain_step
        self._prompt_ids = _ids(content, "prompt_token_ids") or self._prompt_ids
        choices = content.optional_list("choices", MAX_CHOICES)
        if not choices:
            return
        choice = ConfigFields({"choices[0]": choices[0]}, "event").fields("choices[0]")
        self._prompt_ids = _ids(choice, "prompt_token_ids") or self._prompt_ids
        pieces, rows = tuple(self._pieces(choice)), rows_of(choice.values)
        ids = _ids(choice, "token_ids") or tuple(row.token_id for row in rows)
        if pieces or ids:
            thought = any(one.channel == "final" and THOUGHT in one.text for one in pieces)
            self.unparsed = self.unparsed or thought and choice.present("delta")
            if self._first is None:
                self._first = (now, len(ids) or self._count("completion_tokens") or 1)
            self._last = now
            yield from self.begin()
            yield Step(pieces, ids, 0, 0, 0, now, rows, drafts=0)
        if choice.present("finish_reason"):
            self._last = now
            self.reason = REASONS[choice.word("finish_reason", tuple(REASONS))]

    def begin(self) -> Iterator[Event]:
        """``Started``, once."""
        if not self._started:
            self._started = True
            ids = self._prompt_ids if self._request.return_token_ids else ()
            yield Started(
                self._count("prompt_tokens") or len(self._prompt_ids), self._count("cached_tokens"), self._ttft, ids
            )

    def finished(self, reason: FinishReason, acceptance: ServerAcceptance | None) -> Finished:
        """The end, with the figures that are known."""
        tokens = self._count("completion_tokens")
        first = self._first or (0.0, 0)
        decode = max(0.0, self._last - first[0])
        whole = self._last or (time.perf_counter() - self._began)
        block = (acceptance.block if acceptance is not None else None) or self._facts.block_size
        stats = Stats(
            acceptance_lengths=acceptance.lengths if acceptance is not None else (),
            acceptance_per_position=acceptance.per_position if acceptance is not None else (),
            mean_acceptance_length=acceptance.mean if acceptance is not None else None,
            turn_acceptance_length=None,
            tokens_per_s=max(0, tokens - first[1]) / decode if decode > SHORTEST_S else 0.0,
            end_to_end_tokens_per_s=tokens / whole if whole else 0.0,
            ttft_s=self._ttft,
            prefill_s=self._ttft,
            decode_s=decode,
            draft_s=0.0,
            verify_s=0.0,
            other_s=0.0,
            engine=self._facts.engine,
            mode="ar" if self._facts.drafts is False else self._request.mode,
            block_size=block,
            seed=self._seed,
            plain_step_s=self._plain_step[0],
            plain_from=self._plain_step[1],
            draft_counts=acceptance.counts if acceptance is not None else None,
        )
        return Finished(reason, Usage(self._count("prompt_tokens") or len(self._prompt_ids), tokens), stats)

    @property
    def _ttft(self) -> float:
        return self._first[0] if self._first is not None else 0.0

    def _count(self, name: str) -> int:
        return (self.usage or {}).get(name, 0)

    def _pieces(self, choice: ConfigFields) -> Iterator[Piece]:
        """The texts of a choice: a delta of a chat, or the text of a completion."""
        if not choice.present("delta"):
            text = choice.optional_text("text")
            if text:
                yield Piece(text)
            return
        delta = choice.fields("delta")
        channels: tuple[tuple[str, Channel], ...] = (
            ("reasoning_content", "thinking"),
            ("reasoning", "thinking"),
            ("content", "final"),
        )
        seen = set()
        for name, channel in channels:
            text = delta.optional_text(name)
            if text and (channel, text) not in seen:  # vLLM fills both names of one release
                seen.add((channel, text))
                yield Piece(text, channel)
        for call in delta.optional_list("tool_calls", MAX_CALLS) or ():
            yield from self._call(ConfigFields({"tool_calls": call}, delta.where).fields("tool_calls"))

    def _call(self, call: ConfigFields) -> Iterator[Piece]:
        """A part of a tool call: its name on a line of its own, then its arguments as they come."""
        function = call.fields("function")
        name, arguments = function.optional_text("name"), function.optional_text("arguments")
        if name:
            yield Piece(f"{chr(10) if self._calling else ''}{name} ", "tool")
            self._calling = True
        if arguments:
            yield Piece(arguments, "tool")


def attach(
    endpoint: ServerEndpoint,
    wanted: WantedModel,
    program: Program | None = None,
    patience: Patience = PATIENCE,
    process: ServerProcess | None = None,
) -> OpenAIServer:
    """Return the backend over the server that listens at an address and serves the wanted model.

    Raises:
        ServerError, UnknownModelError: see ``server_checks.probe``.
    """
    return OpenAIServer(endpoint, wanted, probe(endpoint, wanted, program), patience, process)


def _restarted(last: Counters | None, now: Counters | None) -> bool:
    """True where a counter went back."""
    if last is None or now is None or last.ended is None:
        return False
    return now.ended is None or now.ended < last.ended


def _ids(content: ConfigFields, key: str) -> tuple[int, ...]:
    ids = content.optional_list(key, MAX_IDS) or ()
    return tuple(content.check_integer(key, one, 0, MAX_ID) for one in ids)


def _usage(content: ConfigFields) -> dict[str, int] | None:
    """Counts of tokens, those that the event has; None where it has none."""
    if not content.present("usage"):
        return None
    usage = content.fields("usage")
    details = usage.fields("prompt_tokens_details")
    known = ((usage, "prompt_tokens"), (usage, "completion_tokens"), (details, "cached_tokens"))
    counts = {name: fields.optional_integer(name, 0, MAX_ID) for fields, name in known}
    return {name: count for name, count in counts.items() if count is not None} or None

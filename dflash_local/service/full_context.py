"""What happens when a conversation outgrows the context: the oldest messages are not sent any more, the model
summarises them, or it stops with an error. The conversation itself keeps all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from dflash_local.errors import ContextError, DFlashError, Interrupted, UsageError
from dflash_local.events import Notice
from dflash_local.loaded import SessionFacts
from dflash_local.request import Limits, Message, Request, SamplingParams
from dflash_local.settings import FullContext
from dflash_local.store.records import Turn

NEARLY_FULL = 0.8  # of the context
ROOM_SHARE = 10  # a reply has this part of the context at least, or what its limit allows
KEPT_SHARE = 2  # so much is left when something goes, so that the caches serve several turns before more has to go
SUMMARY_TOKENS, SUMMARY_SHARE = 512, 8  # at most so many, and this part of the context
TOKENS_PER_CHAR = 1 / 3  # where nothing is known; English has fewer
SHARES = 64  # of the characters of what is to be summarised: so finely it is cut to what fits
ASK = "Summarise our conversation so far in one short paragraph: facts, names, decisions, what is still open."
NOT_SENT = "are not sent any more, the chat keeps them"
HEAD = "[Summary of the conversation so far: {}]\n\n"
THEN: dict[FullContext, str] = {
    "drop": "when it is full, the oldest messages are not sent any more",
    "summarise": "when it is full, the model summarises the oldest messages",
    "stop": "when it is full, no message is sent any more",
}


class Counter(Protocol):
    """What counts the tokens of a prompt; ``facts`` are known once it has."""

    @property
    def facts(self) -> SessionFacts | None: ...

    def count(self, request: Request) -> int: ...


class SentTurns:
    """Which turns of a conversation are sent, and what stands for the others.

    Attributes:
        unsent: so many of the first turns are not sent. summary: what the model wrote of them; empty for none.
    """

    def __init__(self, unsent: int = 0, summary: str = "") -> None:
        self.unsent, self.summary = unsent, summary
        self._warned = False
        self._context = 0  # that ``unsent`` was chosen for
        self._tokens_per_char = TOKENS_PER_CHAR

    def messages(self, turns: Sequence[Turn], unsent: int | None = None) -> tuple[Message, ...]:
        """Return what is sent of the turns; where fewer are left than were not to be sent, all."""
        first = self.unsent if unsent is None else unsent
        first = first if first < len(turns) else 0
        sent = [turn.message for turn in turns[first:]]
        if first and self.summary:
            sent[0] = Message(sent[0].role, HEAD.format(self.summary) + sent[0].content)
        return tuple(sent)

    def learn(self, request: Request, prompt_tokens: int) -> None:
        """Take over how many tokens a prompt had, for a server that does not count."""
        chars = sum(message.size for message in request.messages)
        if chars and prompt_tokens:
            self._tokens_per_char = prompt_tokens / chars

    def fit(
        self,
        turns: Sequence[Turn],
        how: FullContext,
        counter: Counter,
        made: Callable[[tuple[Message, ...]], Request],
        ask: Callable[[Request], str],
    ) -> tuple[Request, list[Notice]]:
        """Return the request for a reply to the last of the turns, and what the user should know of it.

        Args:
            made: makes a request of messages. ask: gets the text of the reply to one.

        Raises:
            ContextError: it does not fit, and ``how`` is to stop, or the last message alone is too long.
            Interrupted: ``ask`` was. DFlashError: the model cannot be loaded.
        """
        tokens = self._count(counter, made(self.messages(turns)))
        context = counter.facts.context if counter.facts is not None else 0
        if self.unsent >= len(turns) or 0 < self._context < context:  # a model with more room came
            self.unsent, self.summary = 0, ""
            tokens = self._count(counter, made(self.messages(turns)))
        self._context, request = context, made(self.messages(turns))
        if not context:
            return request, []
        most = context - min(request.limits.max_new_tokens, context // ROOM_SHARE)
        if tokens is not None and tokens <= most:
            return request, self._nearly_full(tokens, context, how)
        if how == "stop":
            counted = "more than that" if tokens is None else f"{tokens:,} with your message"
            raise ContextError(
                f"the context of {context:,} tokens is full: the conversation has {counted}",
                "begin a new chat, or let the oldest messages go (on the page: Settings; else /set full-context drop)",
            )

        def count(first: int) -> int | None:
            return self._count(counter, made(self.messages(turns, first)))

        cut = self._cut(turns, lambda first: (count(first) or context) <= context // KEPT_SHARE)
        if (count(cut) or context) >= context:
            raise ContextError(
                f"this message alone does not fit the context of {context:,} tokens",
                "shorten it, or load the model with a larger --context",
            )
        if cut == self.unsent:  # the last message leaves less room than it should
            return request, []
        if how == "summarise":
            notice = self._summarise(turns, cut, counter, made, ask)
        else:
            notice = self._let_go(cut, NOT_SENT)
        return made(self.messages(turns)), [notice]

    def _count(self, counter: Counter, request: Request) -> int | None:
        """Return the tokens of a prompt, guessed where they cannot be counted; None where they exceed the context."""
        try:
            return counter.count(request)
        except ContextError:
            return None
        except UsageError:
            return int(sum(message.size for message in request.messages) * self._tokens_per_char)

    def _cut(self, turns: Sequence[Turn], small: Callable[[int], bool]) -> int:
        """Return the first turn to send: the earliest message from which on it is small enough, else the last one."""
        cuts = [at for at, turn in enumerate(turns) if turn.role == "user" and at > self.unsent]
        low, high = 0, len(cuts) - 1
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if small(cuts[middle]) else (middle + 1, high)
        return cuts[low] if cuts else self.unsent

    def _let_go(self, cut: int, standing: str, summary: str = "") -> Notice:
        """Send the turns before ``cut`` no more, from now on, and say how they stand."""
        self.unsent, self.summary, self._warned = cut, summary, False
        return Notice(f"the context of {self._context:,} tokens is full: {cut} earlier messages {standing}", "warning")

    def _summarise(
        self,
        turns: Sequence[Turn],
        cut: int,
        counter: Counter,
        made: Callable[[tuple[Message, ...]], Request],
        ask: Callable[[Request], str],
    ) -> Notice:
        """Have the model summarise the turns before ``cut``, which are not sent any more; see ``fit``.

        Of more than fit one request the oldest are summarised. A summary that fails leaves the one before; one beside
        which the last message has no room is left out.
        """
        context, messages = self._context, self.messages(turns[:cut])
        limits = Limits(min(SUMMARY_TOKENS, context // SUMMARY_SHARE))

        def asked(share: int) -> Request:
            return made(_begun(messages, share))

        def fits(share: int) -> bool:
            tokens = self._count(counter, asked(share))
            return tokens is not None and tokens + limits.max_new_tokens <= context

        share = SHARES
        if not fits(share):
            low, share = 1, SHARES - 1
            while low < share:
                middle = (low + share + 1) // 2
                low, share = (middle, share) if fits(middle) else (low, middle - 1)
        request = replace(asked(share), sampling=SamplingParams(), limits=limits, thinking=False)
        try:
            summary, why = " ".join(ask(request).split()), "the summary is empty"
        except Interrupted:
            raise
        except DFlashError as error:
            summary, why = "", error.message
        if not summary:
            return self._let_go(cut, f"{NOT_SENT}; they could not be summarised: {why}", self.summary)
        held = self.unsent + len(_beginning(messages, share))
        part = "" if share == SHARES else f" of the oldest {held}, the last one shortened"
        notice = self._let_go(cut, f"are sent as a summary{part}: {summary}", summary)
        sent = self._count(counter, made(self.messages(turns)))
        return notice if sent is not None and sent < context else self._let_go(cut, NOT_SENT)

    def _nearly_full(self, tokens: int, context: int, how: FullContext) -> list[Notice]:
        """Warn once when little is left, unless something had to go before."""
        nearly = tokens >= NEARLY_FULL * context
        warn, self._warned = nearly and not self._warned and not self.unsent, nearly
        share = f"the context is {tokens / context:.0%} full ({tokens:,} of {context:,} tokens)"
        return [Notice(f"{share}; {THEN[how]} (setting full-context: {how})", "warning")] if warn else []


def _begun(messages: Sequence[Message], share: int) -> tuple[Message, ...]:
    """Ask for a summary of the beginning of messages, see ``_beginning``."""
    *before, last = _beginning(messages, share)
    if last.role == "user":  # templates want turns by turns
        return (*before, Message("user", f"{last.content}\n\n{ASK}"))
    return (*before, last, Message("user", ASK))


def _beginning(messages: Sequence[Message], share: int) -> list[Message]:
    """Cut messages behind so many of ``SHARES`` parts of their characters; there is one at least."""
    if share == SHARES:
        return list(messages)
    left, kept = sum(len(message.content) for message in messages) * share // SHARES, list[Message]()
    for message in messages:
        kept.append(Message(message.role, message.content[:left]))
        left -= len(message.content)
        if left <= 0:
            break
    return kept

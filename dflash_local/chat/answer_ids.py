"""Where the answer of a reply begins, by ids: behind the thinking of ``<think>`` families, in harmony's final message.

A constraint holds for the answer alone. Places are values: of a draft that is not accepted nothing stays.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from dflash_local.chat.channels import END_THINK, THINK
from dflash_local.chat.stop_ids import HARMONY_TAGS
from dflash_local.chat.tokenizer import Tokenizer
from dflash_local.chat.tool_calls import GENERAL_FORM, format_of
from dflash_local.chat.tool_formats import FORMS
from dflash_local.errors import UsageError

NOTHING: frozenset[int] = frozenset()
MAX_HEADER_IDS = 64
FINAL = re.compile(r"<\|channel\|>\s*final\b(?!.*\sto=)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class AnswerPlace:
    """Where the next token stands.

    Attributes:
        answers: in the answer. free: ids that are markup here, no part of it. header: ids of a harmony header so far.
    """

    answers: bool
    free: frozenset[int] = NOTHING
    header: tuple[int, ...] | None = None


class AnswerIds(Protocol):
    """How a family marks its answers."""

    def begin(self, prompt: Iterable[int], opens_thinking: bool) -> AnswerPlace:
        """Return where a reply to a prompt begins."""

    def after(self, place: AnswerPlace, token_id: int) -> AnswerPlace:
        """Return the place behind a token."""


class TaggedAnswers:
    """Answers that thinking may precede, where its tags are tokens, or a call of a tool replace.

    Newlines right behind the thinking belong to its tag, as ``chat.channels`` shows them.
    """

    def __init__(self, tokenizer: Tokenizer, with_tools: bool) -> None:
        form = FORMS.get(format_of(tokenizer.template) or GENERAL_FORM)
        opened = () if form is None or not with_tools else [opened for opened, _ in form.pairs]
        think, self._closing = (
            tokenizer.token_id(tag) if tokenizer.is_added(tag) else None for tag in (THINK, END_THINK)
        )
        calls = (tokenizer.token_id(tag) for tag in opened if tokenizer.is_added(tag))
        self._calls = frozenset(call for call in calls if call is not None)
        if with_tools and not self._calls:
            raise UsageError(
                "a reply cannot be constrained where tools are offered: the calls of this model begin with no token",
                "leave out the tools or the constraint",
            )
        self._opening = NOTHING if think is None or self._closing is None else frozenset((think,))
        texts = ((at, tokenizer.in_reply(at, False)[1]) for at in range(tokenizer.vocab_size))
        self._newlines = frozenset(at for at, data in texts if data and not data.strip(b"\n"))

    def begin(self, prompt: Iterable[int], opens_thinking: bool) -> AnswerPlace:
        if opens_thinking and self._closing is None:
            raise UsageError(
                "a reply cannot be constrained behind thinking whose closing tag is no token of this model",
                "switch thinking off",
            )
        return AnswerPlace(False) if opens_thinking else AnswerPlace(True, self._opening | self._calls)

    def after(self, place: AnswerPlace, token_id: int) -> AnswerPlace:
        if not place.answers:
            return AnswerPlace(True, self._newlines | self._calls) if token_id == self._closing else place
        if token_id not in place.free:
            return AnswerPlace(True)
        return AnswerPlace(True, self._calls) if token_id in self._newlines else AnswerPlace(False)


class HarmonyAnswers:
    """Messages of the final channel. What stands in other channels, and headers, are the model's own affair."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tags = {tokenizer.token_id(tag): tag for tag in (*HARMONY_TAGS, "<|end|>", "<|return|>", "<|call|>")}

    def begin(self, prompt: Iterable[int], opens_thinking: bool) -> AnswerPlace:
        place = AnswerPlace(True)  # a prompt without markup is gone on with
        for token_id in prompt:
            place = self.after(place, token_id)
        return place

    def after(self, place: AnswerPlace, token_id: int) -> AnswerPlace:
        tag = self._tags.get(token_id)
        header = place.header
        if tag == "<|message|>":
            return AnswerPlace(FINAL.search(self._tokenizer.decode(header or (), skip_special=False)) is not None)
        if tag in ("<|start|>", "<|end|>", "<|return|>", "<|call|>"):
            return AnswerPlace(False, header=())
        if tag == "<|channel|>" and header is None:
            return AnswerPlace(False, header=(token_id,))
        if header is None:
            return place
        return AnswerPlace(False, header=(*header, token_id)[:MAX_HEADER_IDS])


class WholeReplies:
    """Replies of which all is held to, as the grammar has their markup."""

    def begin(self, prompt: Iterable[int], opens_thinking: bool) -> AnswerPlace:
        return AnswerPlace(True)

    def after(self, place: AnswerPlace, token_id: int) -> AnswerPlace:
        return place


def answer_ids(tokenizer: Tokenizer, with_tools: bool, forced: bool = False) -> AnswerIds:
    """Return what fits a tokenizer. UsageError: a constraint and tools do not go together there.

    Args:
        with_tools: the answer may be a call instead. forced: it must be one, see ``chat.call_grammar``.
    """
    if all(map(tokenizer.is_added, HARMONY_TAGS)):
        return WholeReplies() if forced else HarmonyAnswers(tokenizer)
    return TaggedAnswers(tokenizer, with_tools)

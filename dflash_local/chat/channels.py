"""Which channel text belongs to: ``<think>`` families, harmony, plain. Markup comes out marked, never shown.

Where a tokenizer has a tag as an added token only that token counts (spelled out in ordinary tokens it
is text); where it has none the tag is looked for in the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from dflash_local.chat.stop_ids import HARMONY_TAGS
from dflash_local.chat.tokenizer import Tokenizer
from dflash_local.events import Channel

THINK, END_THINK = "<think>", "</think>"
MAX_LEADING_SPACE = 64  # more space than this before a tag in plain text, and it is not one
RECIPIENT = re.compile(r"(?:^|\s)(to=functions\.[A-Za-z0-9_.-]{1,128})(?=\s|$)")
MAX_HEADER_CHARS = 256  # a harmony header is a few words; anything longer is a model that left the format


class Span(NamedTuple):
    """Text of one channel; ``shown`` False for markup and what is trimmed beside it."""

    text: str
    channel: Channel
    shown: bool = True


class ChannelParser:
    """Splits a reply into spans. Fed with text of ordinary tokens and with added tokens, in order.

    This one is for replies without markup.

    Attributes:
        tags: the texts that are markup.
    """

    tags: tuple[str, ...] = ()

    def text(self, text: str) -> list[Span]:
        """Return the spans that ordinary text makes certain; some may be held until more is known."""
        return [Span(text, "final")] if text else []

    def token(self, text: str) -> list[Span] | None:
        """Return the spans for an added token that is markup here; None when it means nothing to this parser."""
        return None

    def finish(self) -> list[Span]:
        """Return what was held."""
        return []


class ThinkTokenParser(ChannelParser):
    """``<think>`` and ``</think>`` as tokens. Newlines right after a tag belong to it, as in the templates."""

    tags = (THINK, END_THINK)

    def __init__(self, opens_thinking: bool) -> None:
        self._channel: Channel = "thinking" if opens_thinking else "final"
        self._trim = opens_thinking

    def text(self, text: str) -> list[Span]:
        kept = text.lstrip("\n") if self._trim else text
        spans = [Span(text[: len(text) - len(kept)], self._channel, False), Span(kept, self._channel)]
        self._trim = self._trim and not kept
        return [span for span in spans if span.text]

    def token(self, text: str) -> list[Span] | None:
        """Switch the channel at either tag; a closing tag without an opening one is only hidden."""
        if text not in self.tags:
            return None
        before = self._channel
        self._channel = "thinking" if text == THINK else "final"
        self._trim = True
        return [Span(text, before, False)]


class ThinkTextParser(ChannelParser):
    """The same where the tags are plain text: an opening tag counts only at the start of a reply
    (after spaces), a closing one only while thinking, so that an answer may write about the tags.
    """

    tags = (THINK, END_THINK)

    def __init__(self, opens_thinking: bool) -> None:
        self._inner = ThinkTokenParser(opens_thinking)
        self._awaits = END_THINK if opens_thinking else THINK
        self._held = ""

    def text(self, text: str) -> list[Span]:
        spans: list[Span] = []
        text, self._held = self._held + text, ""
        while text and self._awaits:
            tag = self._awaits
            at = text.find(tag) if tag == END_THINK else len(text) - len(text.lstrip())
            if text.startswith(tag, at) and at >= 0:
                spans += self._before_tag(text[:at]) + (self._inner.token(tag) or [])
                text, self._awaits = text[at + len(tag) :], END_THINK if tag == THINK else ""
            elif tag == THINK and (at > MAX_LEADING_SPACE or not tag.startswith(text[at:])):
                self._awaits = ""
            else:
                keep = 0 if tag == THINK else len(text) - overlap(text, tag)
                text, self._held = text[:keep], text[keep:]
                break
        return spans + self._inner.text(text)

    def _before_tag(self, text: str) -> list[Span]:
        """Return the spans before a tag: space before an opening one is markup, text before a closing one thought."""
        return [Span(text, "final", False)] if self._awaits == THINK and text else self._inner.text(text)

    def finish(self) -> list[Span]:
        held, self._held = self._held, ""
        return self._inner.text(held)


class HarmonyParser(ChannelParser):
    """gpt-oss: ``<|channel|>NAME<|message|>text<|end|>``, analysis is thinking, commentary tool, final the reply.

    Header words and tags are markup. Text that cannot be a header is shown as the reply. Format:
    OpenAI's harmony description; the prompt ends with ``<|start|>assistant``, so a reply begins in a header.
    """

    tags = (*HARMONY_TAGS, "<|end|>", "<|return|>", "<|call|>", "<|constrain|>")

    def __init__(self, opens_thinking: bool = False, inside: bool = False) -> None:
        """Begin in a header, or with either inside a message."""
        self._channel: Channel = "thinking" if opens_thinking else "final"
        self._header: str | None = None if opens_thinking or inside else ""  # None inside a message
        self._tagged = False  # a tag was seen in this header, so its text is a header for certain
        self._named = False  # the header has said which channel it is

    def text(self, text: str) -> list[Span]:
        if self._header is None:
            return [Span(text, self._channel)] if text else []
        self._header += text
        return self._give_up() if len(self._header) > MAX_HEADER_CHARS else []

    def token(self, text: str) -> list[Span] | None:
        if text not in self.tags:
            return None
        words = self._header or ""
        hidden = [Span(words, self._channel, False)] if words else []
        recipient = RECIPIENT.search(words)
        if recipient:  # part of what a call says: which function it is for
            hidden.append(Span(f"{recipient[1]} ", "tool"))
        if text == "<|message|>":
            self._name_channel(words)
            self._header = None
        elif text in ("<|channel|>", "<|constrain|>"):
            # A recipient may stand before the channel's name or after it: keep the words apart, not together.
            self._name_channel(words)
            self._header, self._tagged = "", True
        else:
            self._header, self._tagged, self._named = "", text == "<|start|>", False
            self._channel = "final"
        return [*hidden, Span(text, self._channel, False)]

    def _name_channel(self, words: str) -> None:
        """Take the channel from header words; words after ``<|constrain|>`` never change it back."""
        first = words.split(maxsplit=1)[0] if words.split() else ""
        if first == "commentary" or " to=" in f" {words}":
            self._channel, self._named = "tool", True
        elif first == "analysis" and not self._named:
            self._channel, self._named = "thinking", True
        elif first == "final" and not self._named:
            self._channel, self._named = "final", True

    def _give_up(self) -> list[Span]:
        words, self._header = self._header or "", None
        return [Span(words, self._channel)] if words else []

    def finish(self) -> list[Span]:
        """Return the text of a reply that never had a tag; an unfinished header is dropped."""
        if self._header is None or self._tagged:
            return []
        return self._give_up()


def channel_parser(tokenizer: Tokenizer, *, opens_thinking: bool, continues: bool = False) -> ChannelParser:
    """Return the parser that fits a tokenizer: harmony, think tags (as tokens or text), or plain.

    Args:
        continues: what follows goes on with a message that was begun in the prompt.
    """
    if all(tokenizer.is_added(tag) for tag in HARMONY_TAGS):
        return HarmonyParser(opens_thinking, continues)
    if tokenizer.is_added(END_THINK):
        return ThinkTokenParser(opens_thinking)
    if opens_thinking or END_THINK in (tokenizer.template or ""):
        return ThinkTextParser(opens_thinking)
    return ChannelParser()


def prompt_opens_thinking(tokenizer: Tokenizer, ids: Iterable[int]) -> bool:
    """Return whether the last think tag among prompt ids is an opening one (for prompts given as ids)."""
    opening, closing = tokenizer.token_id(THINK), tokenizer.token_id(END_THINK)
    if opening is None or closing is None:
        return False
    return next((i == opening for i in reversed(list(ids)) if i in (opening, closing)), False)


def overlap(text: str, tag: str) -> int:
    """Return the length of the longest end of ``text`` that begins ``tag`` and is not all of it."""
    return next((n for n in range(min(len(text), len(tag) - 1), 0, -1) if tag.startswith(text[-n:])), 0)

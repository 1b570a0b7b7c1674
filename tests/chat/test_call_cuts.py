"""The same text gives the same events, wherever it is cut: blocks of drafts bring several tokens at once."""

from __future__ import annotations

import random
from typing import Any

import pytest

from dflash_local.api.reply_parts import PartReader, Thought
from dflash_local.chat.channels import channel_parser
from dflash_local.chat.text_stream import TextStream
from dflash_local.chat.tokenizer import Tokenizer
from dflash_local.chat.tool_calls import CallFormat, call_parser
from tests.chat.call_texts import TOOLS, WRITERS, broken, events, whole

FEW, MANY = 20, 1000  # texts of a format


def _events(form: CallFormat, pieces: list[str]) -> list[Any]:
    parser = call_parser(form, TOOLS)
    return events([part for piece in pieces for part in parser.feed(piece)] + parser.finish())


def _compare(form: CallFormat, seeds: range) -> None:
    for seed in seeds:
        rng = random.Random(f"{form} {seed}")
        if seed % 2:
            text = broken(form, rng)
            expected = _events(form, [text])
        else:
            text, calls = whole(form, rng)
            expected = _events(form, [text])
            assert [event for event in expected if not isinstance(event, str)] == calls, (seed, text)
        assert _events(form, list(text)) == expected, (seed, text)
        for at in range(1, len(text)):
            assert _events(form, [text[:at], text[at:]]) == expected, (seed, at, text)


@pytest.mark.parametrize("form", WRITERS)
def test_every_cut_gives_the_same_events(form: CallFormat) -> None:
    _compare(form, range(FEW))


@pytest.mark.slow
@pytest.mark.parametrize("form", WRITERS)
def test_every_cut_of_many_texts_gives_the_same_events(form: CallFormat) -> None:
    _compare(form, range(MANY))


def _from_ids(tokenizer: Tokenizer, form: CallFormat, ids: list[int], size: int) -> list[Any]:
    stream = TextStream(tokenizer, (), channel_parser(tokenizer, opens_thinking=False))
    reader = PartReader(form, TOOLS, [])
    parts: list[Any] = []
    for at in range(0, len(ids), size):
        block = ids[at : at + size]
        parts += reader.feed(stream.push(block, ["accepted"] * len(block)).pieces)
    parts += [*reader.feed(stream.finish()), *reader.finish()]
    thoughts = "".join(part.text for part in parts if isinstance(part, Thought))
    return [thoughts, *events([part for part in parts if not isinstance(part, Thought)])]


@pytest.mark.parametrize("form", ["hermes", "xml", "glm"])
def test_blocks_of_ids_give_the_same_events(chatml: Tokenizer, form: CallFormat) -> None:
    """Single bytes are tokens here, too: characters and tags begin in one block and end in another."""
    for seed in range(FEW):
        rng = random.Random(f"{form} {seed}")
        thought, (text, calls) = whole(form, rng)[0], whole(form, rng)
        opening, closing = chatml.token_id("<think>"), chatml.token_id("</think>")
        assert opening is not None and closing is not None
        ids = [opening, *chatml.encode(thought), closing, *chatml.encode(text)]
        expected = _from_ids(chatml, form, ids, len(ids))
        assert expected[0].strip("\n") == thought.strip("\n")
        assert [event for event in expected[1:] if not isinstance(event, str)] == calls
        for size in (1, 2, 3, 5, 8, 16):
            assert _from_ids(chatml, form, ids, size) == expected, (seed, size, text)


def test_blocks_of_harmony_ids_give_the_same_events(harmony: Tokenizer) -> None:
    head, called = "<|channel|>commentary", 'to=functions.now {"a": 1}'
    text = f"<|channel|>analysis<|message|>{called}<|end|><|start|>assistant{head}<|message|>I look. é<|end|>"
    text += f'<|start|>assistant{head} to=functions.now <|constrain|>json<|message|>{{"path": "🙂<|end"}}<|call|>'
    ids = harmony.encode(harmony.with_controls(text))
    for size in range(1, len(ids) + 1):
        assert _from_ids(harmony, "harmony", ids, size) == [called, "I look. é", ("now", {"path": "🙂<|end"})], size

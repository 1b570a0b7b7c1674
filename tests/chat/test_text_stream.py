"""Text of a reply: the same in any grouping, cut before a stop string, markup never shown."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_local.chat.channels import ChannelParser, channel_parser
from dflash_local.chat.text_stream import Pushed, TextStream
from dflash_local.chat.tokenizer import Tokenizer
from dflash_local.checkpoint_files.source import open_source
from dflash_local.events import Origin, Piece
from tests.chat.conftest import byte_level, write_folder

ALPHABET = "ab<>/think\né🙂"


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids as a model writes them: one token for each tag, one for each byte of the rest."""
    return tokenizer.encode(tokenizer.with_controls(text))


def bytes_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """One id for each byte, so that every character and word is split."""
    single = {data: i for i in range(300) if (data := tokenizer.token_bytes(i)) is not None and len(data) == 1}
    return [single[bytes([byte])] for byte in text.encode()]


def run(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    stops: Sequence[str] = (),
    sizes: Sequence[int] = (1,),
    opens: bool = False,
) -> tuple[dict[str, str], int | None]:
    """Text of each channel, and how many ids were taken when a stop string was found."""
    stream = TextStream(tokenizer, stops, channel_parser(tokenizer, opens_thinking=opens))
    pieces: list[Piece] = []
    at, turn, stopped = 0, 0, None
    while at < len(ids) and stopped is None:
        size = sizes[turn % len(sizes)]
        pushed = stream.push(ids[at : at + size], ["bonus"] * len(ids[at : at + size]))
        pieces += pushed.pieces
        stopped = None if pushed.stop_at is None else at + pushed.stop_at
        at, turn = at + size, turn + 1
    pieces += stream.finish()
    assert stream.stop in ("", *stops) and (stopped is None or stream.stop)
    texts = {
        channel: "".join(p.text for p in pieces if p.channel == channel) for channel in ("thinking", "final", "tool")
    }
    assert {channel: stream.text(channel) for channel in texts} == texts  # type: ignore[arg-type]
    return {channel: text for channel, text in texts.items() if text}, stopped


def cut(text: str, stops: Sequence[str]) -> str:
    """The rule, said plainly: the first stop string to be complete ends the text where it begins."""
    for end in range(len(text) + 1):
        found = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: min(found)]
    return text


@given(
    st.text(ALPHABET, max_size=30),
    st.lists(st.text("abé🙂\n", min_size=1, max_size=4), max_size=4),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
)
@settings(max_examples=300, deadline=None)
def test_any_grouping_any_stops(plain: Tokenizer, text: str, stops: list[str], sizes: list[int]) -> None:
    ids = bytes_of(plain, text)
    expected = cut(text, stops)
    shown, stopped = run(plain, ids, stops, sizes)
    assert shown.get("final", "") == expected
    assert (stopped is None) == (expected == text and not any(stop in text for stop in stops))
    assert (shown, stopped) == run(plain, ids, stops, (1,))


@given(st.lists(st.integers(0, 430), max_size=40), st.lists(st.integers(1, 9), min_size=1, max_size=4))
@settings(max_examples=200, deadline=None)
def test_pieces_make_the_one_shot_text(plain: Tokenizer, ids: list[int], sizes: list[int]) -> None:
    assert run(plain, ids, (), sizes)[0].get("final", "") == plain.decode(ids)


def test_held_back_text_is_flushed_at_the_end(plain: Tokenizer) -> None:
    stream = TextStream(plain, ["STOP!"], ChannelParser())
    pushed = stream.push(bytes_of(plain, "go STOP"), ["accepted"] * 7)
    assert pushed.pieces == (Piece("go ", "final", "accepted"),)
    assert stream.text() == "go "
    assert stream.finish() == (Piece("STOP", "final", "accepted"),)
    assert stream.push(bytes_of(plain, "!"), ["bonus"]) == Pushed(()), "nothing follows the end"
    assert stream.text() == "go STOP"


def test_many_stops_cost_little(plain: Tokenizer) -> None:
    stops = [f"{'ab' * 400}{n}" for n in range(128)]
    ids = bytes_of(plain, "ab" * 3000 + "ab7!")
    started = time.process_time()
    assert run(plain, ids, stops, (8,))[0] == {"final": "ab" * 2601}
    assert time.process_time() - started < 20


def test_stop_at_counts_the_id_that_completed_it(plain: Tokenizer) -> None:
    stream = TextStream(plain, ["cd"], ChannelParser())
    assert stream.push(bytes_of(plain, "abc"), ["bonus"] * 3).stop_at is None
    pushed = stream.push(bytes_of(plain, "def"), ["bonus"] * 3)
    assert pushed.stop_at == 1
    assert pushed.pieces == ()
    assert stream.push(bytes_of(plain, "xyz"), ["bonus"] * 3) == Pushed(())
    assert stream.finish() == ()
    assert stream.text() == "ab"


def test_origin_is_that_of_the_completing_token(plain: Tokenizer) -> None:
    ids = bytes_of(plain, "aé🙂b")
    origins: list[Origin] = ["accepted", "accepted", "bonus", "bonus", "bonus", "bonus", "accepted", "accepted"]
    pushed = TextStream(plain, [], ChannelParser()).push(ids, origins)
    assert pushed.pieces == (
        Piece("a", "final", "accepted"),
        Piece("é", "final", "bonus"),
        Piece("🙂b", "final", "accepted"),
    )


def test_half_a_character_at_the_end_has_the_origin_of_its_id(plain: Tokenizer) -> None:
    stream = TextStream(plain, [], ChannelParser())
    assert stream.push(bytes_of(plain, "é")[:1], ["accepted"]) == Pushed(())
    assert stream.finish() == (Piece("\ufffd", "final", "accepted"),)


def test_special_tokens_and_stop_ids_are_never_shown(chatml: Tokenizer) -> None:
    ids = ids_of(chatml, "a<|endoftext|>b<|im_start|>c<|im_end|>")
    assert run(chatml, ids)[0] == {"final": "abc"}
    assert run(chatml, ids, ["bc"])[0] == {"final": "a"}
    assert run(chatml, ids, ["<|im_start|>"])[0] == {"final": "ab"}
    assert run(chatml, ids, ["b<|im_start|>"])[0] == {"final": "a"}


THOUGHT = "<think>\nplan 你\n</think>\n\nthe answer"


@pytest.mark.parametrize("sizes", [(1,), (3, 1), (50,)])
def test_thinking_as_tokens(chatml: Tokenizer, sizes: tuple[int, ...]) -> None:
    expected = {"thinking": "plan 你\n", "final": "the answer"}
    assert run(chatml, ids_of(chatml, THOUGHT), (), sizes)[0] == expected
    assert run(chatml, ids_of(chatml, THOUGHT.removeprefix("<think>")), (), sizes, opens=True)[0] == expected
    assert run(chatml, ids_of(chatml, "<think>\n\n</think>\n\nhi"), (), sizes)[0] == {"final": "hi"}
    assert run(chatml, ids_of(chatml, "no tags"), (), sizes)[0] == {"final": "no tags"}
    assert run(chatml, ids_of(chatml, "</think>\nhi"), (), sizes)[0] == {"final": "hi"}


def test_tokens_of_thoughts_are_counted_without_their_marks(chatml: Tokenizer, harmony: Tokenizer) -> None:
    """Parts of a character count with the text that they belong to."""
    for tokenizer, text in ((chatml, THOUGHT), (harmony, HARMONY)):
        stream = TextStream(tokenizer, (), channel_parser(tokenizer, opens_thinking=False))
        ids = ids_of(tokenizer, text)
        stream.push(ids, ["bonus"] * len(ids))
        assert stream.thinking_tokens == len(ids_of(tokenizer, stream.text("thinking")))


def test_tags_spelled_in_ordinary_tokens_are_text(chatml: Tokenizer) -> None:
    assert run(chatml, chatml.encode("write <think> and </think>"))[0] == {"final": "write <think> and </think>"}


@pytest.mark.parametrize("sizes", [(1,), (3, 1), (50,)])
@pytest.mark.parametrize("split", [ids_of, bytes_of])
def test_thinking_as_text(plain: Tokenizer, sizes: tuple[int, ...], split: object) -> None:
    plain_with_tags = plain_template(plain)
    encode = bytes_of if split is bytes_of else ids_of
    expected = {"thinking": "plan 你\n", "final": "the answer"}

    def check(text: str, wanted: dict[str, str], opens: bool = False) -> None:
        assert run(plain_with_tags, encode(plain, text), (), sizes, opens)[0] == wanted

    check(THOUGHT, expected)
    check(" \n" + THOUGHT, expected)
    check(THOUGHT.removeprefix("<think>"), expected, opens=True)
    check("a </thin <think> b </think>", {"final": "a </thin <think> b </think>"})
    check("<think>a < b </thin", {"thinking": "a < b </thin"})
    check("<think>x</think>say </think>", {"thinking": "x", "final": "say </think>"})
    check("<thin", {"final": "<thin"})
    check("  \n", {"final": "  \n"})
    check("\n" * 1000, {"final": "\n" * 1000})


def plain_template(plain: Tokenizer) -> Tokenizer:
    """The plain tokenizer with a template that knows think tags."""
    import copy

    other = copy.copy(plain)
    other.template = "{{ '<think></think>' }}"
    return other


@pytest.mark.parametrize("sizes", [(1,), (4,), (50,)])
@pytest.mark.parametrize("as_text", [False, True])
def test_stops_and_thinking_tags(chatml: Tokenizer, plain: Tokenizer, sizes: tuple[int, ...], as_text: bool) -> None:
    tokenizer = plain_template(plain) if as_text else chatml
    ids = ids_of(tokenizer, "<think>\nI think so\n</think>\n\nthink again think>")

    def check(stop: str, wanted: dict[str, str]) -> None:
        assert run(tokenizer, ids, [stop], sizes)[0] == wanted

    check("think", {"thinking": "I "})  # the word, not the tag
    check("think>", {"thinking": "I think so\n", "final": "think again "})
    check("</", {"thinking": "I think so\n", "final": "think again think>"})
    check("</think>", {"thinking": "I think so\n"})
    check("so\n</think>\n\nthink", {"thinking": "I think "})
    check("<think>", {})
    check("so\nthink", {"thinking": "I think so\n", "final": "think again think>"})  # not across channels
    check("\n\n", {"thinking": "I think so\n", "final": "think again think>"})  # trimmed with the tag


HARMONY = (
    "<|channel|>analysis<|message|>think 你<|end|><|start|>assistant<|channel|>commentary to=functions.f "
    '<|constrain|>json<|message|>{"a": 1}<|end|><|start|>assistant<|channel|>final<|message|>hi<|return|>'
)


@pytest.mark.parametrize("sizes", [(1,), (3, 1), (80,)])
def test_harmony_channels(harmony: Tokenizer, sizes: tuple[int, ...]) -> None:
    expected = {"thinking": "think 你", "tool": 'to=functions.f {"a": 1}', "final": "hi"}
    assert run(harmony, ids_of(harmony, HARMONY), (), sizes)[0] == expected
    recipient_first = " to=functions.f<|channel|>commentary json<|message|>{}<|call|>"
    assert run(harmony, ids_of(harmony, recipient_first), (), sizes)[0] == {"tool": "to=functions.f {}"}
    assert run(harmony, ids_of(harmony, "<|channel|>final<|message|>cut"), (), sizes)[0] == {"final": "cut"}
    assert run(harmony, ids_of(harmony, "<|channel|>fin"), (), sizes)[0] == {}
    assert run(harmony, ids_of(harmony, "plain reply"), (), sizes)[0] == {"final": "plain reply"}
    assert run(harmony, ids_of(harmony, "plain " * 90), (), sizes)[0] == {"final": "plain " * 90}


def test_harmony_stops(harmony: Tokenizer) -> None:
    ids = ids_of(harmony, HARMONY)
    assert run(harmony, ids, ["final"])[0] == {"thinking": "think 你", "tool": 'to=functions.f {"a": 1}', "final": "hi"}
    assert run(harmony, ids, ["<|channel|>commentary"])[0] == {"thinking": "think 你"}
    assert run(harmony, ids, ["h"])[0] == {"thinking": "t"}


def test_special_tokens_of_tool_calls_are_text_for_their_parser(tmp_path: Path) -> None:
    tags = ("<|tool_call>", "<tool_call|>", '<|"|>')
    folder = write_folder(tmp_path, byte_level((*tags, "<eos>"), (*tags, "<eos>")), {"eos_token": "<eos>"})
    tokenizer = Tokenizer.load(open_source(folder))
    assert tokenizer is not None
    opening, closing, quote, end = (tokenizer.token_id(tag) for tag in (*tags, "<eos>"))
    assert opening is not None and closing is not None and quote is not None and end is not None
    ids = [opening, *tokenizer.encode("call:now{a:"), quote, *tokenizer.encode("é"), quote, *tokenizer.encode("}")]
    ids += [closing, end]
    stream = TextStream(tokenizer, (), channel_parser(tokenizer, opens_thinking=False))
    stream.push(ids, ["accepted"] * len(ids))
    stream.finish()
    assert stream.text() == '<|tool_call>call:now{a:<|"|>é<|"|>}<tool_call|>'

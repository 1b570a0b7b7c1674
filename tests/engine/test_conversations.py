"""Several conversations on one session: each goes on as if it were alone, and only what is new is run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from dflash_local.engine import LoadConfig, Session, conversations, held_sequences, load, runner
from dflash_local.engine.held_sequences import KEPT_SNAPSHOTS, LEAST, SHORT, HeldSequence, HeldSequences, thinned
from dflash_local.events import Started, Step
from dflash_local.models.transformers_target import TargetSnapshot
from dflash_local.store.sequence_files import SequenceFiles
from tests.engine.named_pairs import DSPARK, named_pair
from tests.engine_sessions import Reply, ask

ASKED = LoadConfig(device="cpu", dtype="float32", context=1000)
CASES = [
    *((name, engine) for name in ("demo-hybrid", "qwen3-dflash2-b8") for engine in ("fused", "reference")),
    *((name, "fused") for name in ("qwen3-v2-swa-b16", "qwen35-v2-swa-b8", DSPARK)),
]
FIRST, MORE, SAID, TURNS = 300, 17, 9, 3  # ids of a first prompt, of a later one, of a reply; turns
SWEPT = range(8, 8 + 512)  # lengths of prompts
KEPT_FILES = 2**24  # bytes: of a few lengths


def open_session(name: str, engine: str, folder: Path, cache_memory: float = 1.0) -> Session:
    mtp = name == "demo-hybrid"
    return load(named_pair(name, folder), replace(ASKED, engine=engine, mtp=mtp, cache_memory=cache_memory))


class Chat:
    """A conversation of ids that follow from its number."""

    def __init__(self, number: int) -> None:
        self._draw, self.ids = Random(number), list[int]()

    def turn(self, session: Session, new: int) -> tuple[int, list[tuple[object, ...]]]:
        """How many tokens were run for the prompt, and the cycles."""
        self.ids += [self._draw.randrange(10, 90) for _ in range(new)]
        reply = ask(session, self.ids, SAID, block_size=4)
        self.ids += reply.ids
        return prefilled(reply), cycles_of(reply)


def on_disk(name: str, engine: str, folder: Path, files: Path, most_bytes: int = 2**30) -> Session:
    """Open a session with no room in host memory."""
    session = open_session(name, engine, folder, cache_memory=0.0)
    session.keep_on_disk(SequenceFiles(files, "key", most_bytes))
    return session


def cycles_of(reply: Reply) -> list[tuple[object, ...]]:
    return [(step.token_ids, step.drafted, step.accepted) for step in reply.find(Step)]


def prefilled(reply: Reply) -> int:
    (started,) = reply.find(Started)
    return int(started.prompt_tokens - started.reused_tokens)


@pytest.mark.parametrize("turns", [TURNS, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "engine"), CASES)
def test_two_conversations_take_turns_with_short_requests_between(
    name: str, engine: str, turns: int, tmp_path: Path
) -> None:
    session = open_session(name, engine, tmp_path / "alone")
    alone = {}
    for number in (1, 2):
        session.reset()
        chat = Chat(number)
        alone[number] = [chat.turn(session, MORE if turn else FIRST) for turn in range(turns)]
    session = open_session(name, engine, tmp_path / "both")
    chats = {number: Chat(number) for number in (1, 2)}
    for turn in range(turns):
        for number, chat in chats.items():
            run, cycles = chat.turn(session, MORE if turn else FIRST)
            assert run == (MORE + 1 if turn else FIRST), "what is new, and the last token of the reply before"
            assert cycles == alone[number][turn][1], "the drafter's context came back as well"
            Chat(10 * turn + 3).turn(session, MORE)


@pytest.mark.parametrize(("name", "engine"), CASES[:5])
def test_a_conversation_whose_reply_is_left_out_goes_on_before_it(name: str, engine: str, tmp_path: Path) -> None:
    """As templates do with thinking: a recurrent state goes back to its snapshot, which came back, too."""
    session = open_session(name, engine, tmp_path)
    chat = Chat(1)
    chat.turn(session, FIRST)
    asked = chat.ids[:FIRST]
    Chat(2).turn(session, FIRST)
    reply = ask(session, [*asked, 91, 92, 93], SAID)
    assert prefilled(reply) == 3
    session.reset()
    again = ask(session, [*asked, 91, 92, 93], SAID)
    assert again.ids == reply.ids and prefilled(again) == FIRST + 3, "nothing is left"


@pytest.mark.parametrize("engine", ["fused", "reference"])
def test_one_that_begins_as_another_leaves_it(engine: str, tmp_path: Path) -> None:
    session = open_session("qwen3-dflash2-b8", engine, tmp_path)
    chat = Chat(1)
    chat.turn(session, FIRST)
    Chat(2).turn(session, MORE)
    begun = ask(session, [*chat.ids[:100], *range(10, 90)], SAID)
    assert prefilled(begun) == 80
    assert chat.turn(session, MORE)[0] == MORE + 1


@pytest.mark.parametrize(("name", "engine"), CASES[4:])
def test_a_restart_finds_the_last_conversations_on_disk(name: str, engine: str, tmp_path: Path) -> None:
    session = on_disk(name, engine, tmp_path / "before", tmp_path / "files")
    chats = Chat(1), Chat(2)
    for chat in chats:
        chat.turn(session, FIRST)
    session.close()
    session = on_disk(name, engine, tmp_path / "after", tmp_path / "files")
    prompts = [[*chat.ids, 91, 92] for chat in chats]
    restored = [ask(session, prompt, SAID, block_size=4) for prompt in prompts]
    assert [prefilled(reply) for reply in restored] == [3, 3], "what is new, and the last token of the reply before"
    session.keep_on_disk(None)
    for prompt, reply in zip(prompts, restored, strict=True):
        session.reset()
        assert cycles_of(ask(session, prompt, SAID, block_size=4)) == cycles_of(reply)


@pytest.mark.parametrize(("name", "engine"), CASES[:4])
def test_it_comes_back_as_it_was(name: str, engine: str, tmp_path: Path) -> None:
    """On the device, from host memory and from a file: the same cycles as after a cold start."""
    stays, moves = (open_session(name, engine, tmp_path) for _ in range(2))
    replies = []
    for session in (stays, moves, on_disk(name, engine, tmp_path, tmp_path / "files")):
        chat = Chat(1)
        chat.turn(session, LEAST + 64)
        prompt = [*chat.ids, 91, 92]
        if session is not stays:
            Chat(2).turn(session, MORE)
        replies.append(ask(session, prompt, SAID, block_size=4))
    stays.reset()
    cold = ask(stays, prompt, SAID, block_size=4)
    assert [prefilled(each) for each in (*replies, cold)] == [3, 3, 3, len(prompt)]
    assert [cycles_of(each) for each in replies] == 3 * [cycles_of(cold)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "engine"), CASES[:4])
def test_of_every_length_it_comes_back_as_it_was(
    name: str, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that grows by a token a turn: what is run whole is the cold start alone."""
    for module in (conversations, held_sequences):
        monkeypatch.setattr(module, "LEAST", SWEPT[0])
    cold, stays, moves = (open_session(name, engine, tmp_path) for _ in range(3))
    sessions = stays, moves, on_disk(name, engine, tmp_path, tmp_path / "files", KEPT_FILES)
    draw = Random(1)
    ids = [draw.randrange(10, 90) for _ in range(SWEPT[-1])]
    for length in SWEPT:
        cold.reset()
        expected = ask(cold, ids[:length], SAID, block_size=4)
        assert prefilled(expected) == length
        for session in sessions:
            reply = ask(session, ids[:length], SAID, block_size=4)
            assert cycles_of(reply) == cycles_of(expected), length
            assert prefilled(reply) <= 2 or length == SWEPT[0], "the new token, and the one before it"
            if session is not stays:
                ask(session, [91, 92, 93], 1)  # too short to be held


@pytest.mark.parametrize(("name", "engine"), CASES[:2])
def test_snapshots_on_the_way_let_a_prompt_be_left_inside(
    name: str, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a recurrent state: in the prompt, and behind a reply; they come back from a file."""
    monkeypatch.setattr(runner, "SNAPSHOT_EVERY", 64)
    session, files = open_session(name, engine, tmp_path), SequenceFiles(tmp_path / "files", "key", 2**30)
    session.keep_on_disk(files)
    chat = Chat(1)
    chat.turn(session, FIRST)
    replied = chat.ids
    chat.turn(session, MORE)
    session.close()
    session = open_session(name, engine, tmp_path)
    session.keep_on_disk(files)
    edited = ask(session, [*replied, 91, 92], SAID, block_size=4)
    assert prefilled(edited) == 3, "the last token of the reply is run again"
    left = ask(session, [*replied[:200], 91, 92], SAID, block_size=4)
    assert prefilled(left) == 200 - 192 + 2
    session.reset()
    session.keep_on_disk(None)
    for prompt, reply in (([*replied, 91, 92], edited), ([*replied[:200], 91, 92], left)):
        assert cycles_of(ask(session, prompt, SAID, block_size=4)) == cycles_of(reply)
        session.reset()


def test_snapshots_that_lie_closest_together_go_first() -> None:
    points = [TargetSnapshot(length, (), ((torch.zeros(10),),)) for length in (100, 200, 290, 300, 400, 500, 501)]

    def kept(count: int) -> list[int]:
        return [point.length for point in thinned(points, count * 40)]

    assert kept(5) == [100, 200, 290, 300, 400, 500, 501]
    assert kept(4) == [100, 200, 300, 400, 500, 501]
    assert kept(2) == [200, 400, 500, 501]
    assert kept(0) == [500, 501] and len(kept(0)) == KEPT_SNAPSHOTS


def test_without_memory_for_it_one_conversation_is_kept(tmp_path: Path) -> None:
    session = open_session("demo-hybrid", "fused", tmp_path, cache_memory=0.0)
    chat = Chat(1)
    for _ in range(2):
        whole = len(chat.ids) + FIRST
        assert chat.turn(session, FIRST)[0] == whole
        Chat(2).turn(session, FIRST)
    assert [each.sequences for each in session.held()] == [1, 0, 0]


def test_what_is_used_least_makes_room_and_short_ones_first() -> None:
    def held(first: int, length: int) -> HeldSequence:
        return HeldSequence([first, *range(length - 1)], [torch.zeros(length)], ())

    held_sequences = HeldSequences(4 * 5 * SHORT)
    for first, length in ((1, 2 * SHORT), (2, 2 * SHORT), (3, SHORT // 2)):
        held_sequences.keep(held(first, length))

    def kept() -> list[int]:
        return sorted(each.ids[0] for each in held_sequences.held)

    assert kept() == [1, 2, 3]
    held_sequences.keep(held(2, 2 * SHORT + SHORT // 2))
    assert kept() == [1, 2, 3], "a beginning of it is forgotten"
    held_sequences.keep(held(4, SHORT // 2))
    assert kept() == [1, 2, 4], "a short one makes room"
    held_sequences.keep(held(5, 2 * SHORT))
    assert kept() == [2, 5], "then what was used least"

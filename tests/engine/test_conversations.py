"""Several conversations on one session: each goes on as if it were alone, and only what is new is run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from dflash_local.engine import LoadConfig, Session, load
from dflash_local.engine.held_sequences import SHORT, HeldSequence, HeldSequences
from dflash_local.events import Started, Step
from tests.engine.named_pairs import DSPARK, named_pair
from tests.engine_sessions import Reply, ask

ASKED = LoadConfig(device="cpu", dtype="float32", context=1000)
CASES = [
    *((name, engine) for name in ("demo-hybrid", "qwen3-dflash2-b8") for engine in ("fused", "reference")),
    *((name, "fused") for name in ("qwen3-v2-swa-b16", "qwen35-v2-swa-b8", DSPARK)),
]
FIRST, MORE, SAID, TURNS = 300, 17, 9, 3  # ids of a first prompt, of a later one, of a reply; turns


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
        return prefilled(reply), [(step.token_ids, step.drafted, step.accepted) for step in reply.find(Step)]


def prefilled(reply: Reply) -> int:
    (started,) = reply.find(Started)
    return int(started.prompt_tokens - started.reused_tokens)


@pytest.mark.parametrize(("name", "engine"), CASES)
def test_two_conversations_take_turns_with_short_requests_between(name: str, engine: str, tmp_path: Path) -> None:
    session = open_session(name, engine, tmp_path / "alone")
    alone = {}
    for number in (1, 2):
        session.reset()
        chat = Chat(number)
        alone[number] = [chat.turn(session, MORE if turn else FIRST) for turn in range(TURNS)]
    session = open_session(name, engine, tmp_path / "both")
    chats = {number: Chat(number) for number in (1, 2)}
    for turn in range(TURNS):
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


def test_without_memory_for_it_one_conversation_is_kept(tmp_path: Path) -> None:
    session = open_session("demo-hybrid", "fused", tmp_path, cache_memory=0.0)
    chat = Chat(1)
    for _ in range(2):
        whole = len(chat.ids) + FIRST
        assert chat.turn(session, FIRST)[0] == whole
        Chat(2).turn(session, FIRST)


def test_what_is_used_least_makes_room_and_short_ones_first() -> None:
    def held(first: int, length: int) -> HeldSequence:
        return HeldSequence([first, *range(length - 1)], [torch.zeros(length)], ())

    held_sequences = HeldSequences(4 * 5 * SHORT)
    for first, length in ((1, 2 * SHORT), (2, 2 * SHORT), (3, SHORT // 2)):
        held_sequences.keep(held(first, length))

    def kept() -> list[int]:
        found = [held_sequences.find([first, *range(3 * SHORT)], whole=True) for first in range(1, 6)]
        return [first for first, match in enumerate(found, start=1) if match is not None and match.length]

    assert kept() == [1, 2, 3]
    held_sequences.keep(held(2, 2 * SHORT + SHORT // 2))
    assert kept() == [1, 2, 3], "a beginning of it is forgotten"
    held_sequences.keep(held(4, SHORT // 2))
    assert kept() == [1, 2, 4], "a short one makes room"
    held_sequences.keep(held(5, 2 * SHORT))
    assert kept() == [2, 5], "then what was used least"

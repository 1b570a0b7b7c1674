"""Conversations that go to host memory and come back, on a GPU; and replies held to a grammar there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dflash_local.catalog.bundled import find
from dflash_local.engine import LoadConfig, load
from dflash_local.request import Constraint
from tests.engine.named_pairs import DSPARK, named_pair
from tests.engine.test_conversations import FIRST, MORE, TURNS, Chat
from tests.engine.test_grammar import SAMPLINGS, SCHEMAS, closed, meets
from tests.engine.test_grammar import ask as ask_text

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
STRICT = LoadConfig(device="cuda", dtype="bfloat16", exact=True)


@pytest.mark.parametrize("name", ["demo-hybrid", "qwen3-dflash2-b8", "qwen3-v2-swa-b16", DSPARK])
def test_two_conversations_take_turns(name: str, tmp_path: Path) -> None:
    session = load(named_pair(name, tmp_path / "pair"), replace(STRICT, context=1000, mtp=name == "demo-hybrid"))
    alone = {}
    for number in (1, 2):
        session.reset()
        chat = Chat(number)
        alone[number] = [chat.turn(session, MORE if turn else FIRST) for turn in range(TURNS)]
    session.reset()
    chats = {number: Chat(number) for number in alone}
    for turn in range(TURNS):
        for number, chat in chats.items():
            run, cycles = chat.turn(session, MORE if turn else FIRST)
            assert (run, cycles) == (MORE + 1 if turn else FIRST, alone[number][turn][1])
        Chat(10 * turn + 3).turn(session, MORE)
    session.close()


def test_a_reply_is_json_of_its_schema_drafted_or_not() -> None:
    session = load(find("demo"), STRICT)
    for name, given in SCHEMAS.items():
        schema = closed(given)
        constraint = Constraint("json_schema", json.dumps(schema))
        for sampling in SAMPLINGS:
            plain = ask_text(session, constraint, sampling=sampling, mode="ar")
            assert ask_text(session, constraint, sampling=sampling) == plain, name
            assert plain[1] == "stop" and meets(json.loads(plain[0]), schema)
    session.close()

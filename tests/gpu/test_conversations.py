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
from tests.engine import test_conversations
from tests.engine.test_grammar import SAMPLINGS, SCHEMAS, closed, meets
from tests.engine.test_grammar import ask as ask_text

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
STRICT = LoadConfig(device="cuda", dtype="bfloat16", exact=True)


@pytest.mark.parametrize("name", ["demo-hybrid", "qwen3-dflash2-b8", "qwen3-v2-swa-b16", "dspark"])
def test_two_conversations_take_turns(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_conversations, "ASKED", replace(STRICT, context=1000))
    test_conversations.test_two_conversations_take_turns_with_short_requests_between(name, "fused", tmp_path)


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

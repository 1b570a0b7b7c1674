"""Conversations on disk are found by the next load of the same pair in the same way."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest

from dflash_local import settings
from dflash_local.app import loading
from dflash_local.catalog import bundled
from dflash_local.events import Started
from dflash_local.load_config import LoadConfig
from dflash_local.request import Limits, Request

pytest.importorskip("torch")

PROMPT = tuple(range(10, 90)) * 4


def reused(load: LoadConfig) -> int:
    session = loading.open_held(bundled.find("demo"), load, settings.load(), lambda _event: None)
    with closing(session):
        events = session.generate(Request(prompt_ids=PROMPT, limits=Limits(max_new_tokens=1)))
        (started,) = [event for event in events if isinstance(event, Started)]
        return started.reused_tokens


def test_a_later_load_finds_them_and_another_one_does_not() -> None:
    kept = LoadConfig(device="cpu", context=400, cache_disk=1.0)
    loads = kept, kept, replace(kept, cache_disk=0.0), replace(kept, draft_window=64)
    assert [reused(load) for load in loads] == [0, len(PROMPT) - 1, 0, 0]

"""The verdict on the pairs of the registry: one for command line, terminal and page, whatever is loaded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_local import settings
from dflash_local.catalog.bundled import Pair, find
from dflash_local.catalog.shapes import shape
from dflash_local.cli import web_backend
from dflash_local.cli.fit import Loaded
from dflash_local.cli.offers import offer, offers
from dflash_local.cli.screen import ScreenBackend, ScreenConsole
from dflash_local.load_config import LoadConfig
from dflash_local.planner import accelerators, hardware
from dflash_local.remote.attached import AttachedFacts
from dflash_local.service.resident import Model, Resident
from tests.cli.conftest import Cli
from tests.service.scripted import ScriptedFacts, ScriptedSession

GIB = 2**30
NAME = "Qwen/Qwen3-8B"


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    """The configurations of a pair, without weights."""
    for part, repo in (("target", NAME), ("drafter", "z-lab/Qwen3-8B-DFlash-b16")):
        (tmp_path / part).mkdir()
        (tmp_path / part / "config.json").write_text(json.dumps(shape(repo)))
    return Pair(NAME, tmp_path / "target", tmp_path / "drafter", bundled=False)


@pytest.fixture
def main_memory(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine without a GPU whose free memory the test changes."""
    state = SimpleNamespace(free=60 * GIB)
    monkeypatch.setattr(accelerators, "nvidia", lambda _asking: ())
    monkeypatch.setattr(accelerators, "amd", lambda _asking: ())
    monkeypatch.setattr(accelerators, "is_apple", lambda: False)
    monkeypatch.setattr(hardware, "memory", lambda: hardware.Memory(64 * GIB, state.free, limited=False))
    return state


FACTS = ScriptedFacts(
    drafter="drafter",
    block_size=16,
    load=LoadConfig(engine="reference", dtype="float32", device="cpu", context=4096),
)


def verdicts(found: Any) -> dict[str, str]:
    return {offer.name: offer.fits for offer in found}


def test_the_loaded_pair_counts_as_free_memory_and_its_own_verdict_stays(
    pair: Pair, main_memory: SimpleNamespace
) -> None:
    user = settings.load()
    before = verdicts(offers(user))
    assert before[NAME] == "fits"
    main_memory.free = 20 * GIB  # its weights lie in memory now
    assert verdicts(offers(user))[NAME] != "fits"
    loaded = Loaded(pair, FACTS)
    assert verdicts(offers(user, loaded))[NAME] == offer(NAME, user, loaded).fits == "fits"
    elsewhere = AttachedFacts.from_dict(FACTS.as_dict())
    assert verdicts(offers(user, Loaded(pair, elsewhere)))[NAME] != "fits", "another process holds it"
    assert (
        verdicts(offers(user, Loaded(pair, replace(FACTS, load=replace(FACTS.load, device="cuda:0")))))[NAME] != "fits"
    )


def test_command_line_terminal_and_page_say_the_same(
    pair: Pair, main_memory: SimpleNamespace, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = settings.load()
    told = {row["bundled"] or row["name"]: row["fits"] for row in cli("models", "--json").json["pairs"]}
    conversation = SimpleNamespace(pair=pair, facts=None)
    talk = SimpleNamespace(user=user)
    screen = ScreenBackend(SimpleNamespace(conversation=conversation, talk=talk), ScreenConsole({}), "")  # type: ignore[arg-type]
    resident = Resident(Model(NAME, lambda _progress: ScriptedSession(FACTS)))
    monkeypatch.setattr(web_backend.WebBackend, "_served", pair)
    page = web_backend.WebBackend(resident, find("demo"), LoadConfig(), user, "http://127.0.0.1:1")
    assert verdicts(screen.offers()) == verdicts(page.offers()) == told
    main_memory.free = 20 * GIB
    small = verdicts(screen.offers())
    assert small == verdicts(page.offers()) and small[NAME] != "fits"
    conversation.facts = FACTS
    resident.load()
    assert verdicts(screen.offers()) == verdicts(page.offers())
    assert screen.offer(NAME).fits == page.offer(NAME).fits == "fits"
    resident.unload()
    assert verdicts(page.offers()) == small
    resident.close()

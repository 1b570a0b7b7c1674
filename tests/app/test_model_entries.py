"""The verdict on the pairs of the registry: one for command line, terminal and page, whatever is loaded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_local import settings
from dflash_local.app.chat_session import ChatSession
from dflash_local.app.fitting import Loaded, machine
from dflash_local.app.model_entries import model_entries, model_entry
from dflash_local.app.served_pair import ServedPair
from dflash_local.catalog.bundled import Pair
from dflash_local.catalog.shapes import shape
from dflash_local.load_config import LoadConfig
from dflash_local.planner import accelerators, cpu_probe, hardware
from dflash_local.planner.accelerators import Accelerator
from dflash_local.service.chat_options import ChatOptions
from dflash_local.service.service import Service
from tests.cli.conftest import Cli
from tests.service.scripted import ScriptedFacts, ScriptedModels, ScriptedSession

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
def card(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine with one GPU whose free memory the test changes."""
    state = SimpleNamespace(free=60 * GIB)

    def nvidia(_asking: object) -> tuple[Accelerator, ...]:
        return (Accelerator(0, "GPU-a", "NVIDIA RTX A6000", "580.95.05", 64 * GIB, state.free),)

    monkeypatch.setattr(accelerators, "nvidia", nvidia)
    monkeypatch.setattr(accelerators, "unusable", lambda _driver: "")
    return state


FACTS = ScriptedFacts(
    drafter="drafter",
    block_size=16,
    load=LoadConfig(engine="reference", dtype="float32", device="cuda:0", context=4096),
)


def verdicts(found: Any) -> dict[str, str]:
    return {entry.name: entry.fits for entry in found}


def test_the_loaded_pair_counts_as_free_memory_and_its_own_verdict_stays(pair: Pair, card: SimpleNamespace) -> None:
    user = settings.load()
    assert model_entry(NAME, user).fits == "fits"
    card.free = 14 * GIB  # its weights lie in memory now
    assert model_entry(NAME, user).fits != "fits"
    loaded = Loaded(pair, FACTS)
    assert verdicts(model_entries(user, loaded))[NAME] == model_entry(NAME, user, loaded).fits == "fits"
    elsewhere = Loaded(pair, replace(FACTS, load=replace(FACTS.load, device="cuda:1")))
    assert model_entry(NAME, user, elsewhere).fits != "fits"


def test_command_line_terminal_and_page_say_the_same(pair: Pair, card: SimpleNamespace, cli: Cli) -> None:
    user = settings.load()
    told = {row["bundled"] or row["name"]: row["fits"] for row in cli("models", "--json").json["pairs"]}
    models = ScriptedModels(lambda *_: ScriptedSession(FACTS))
    screen = ChatSession(models, pair, LoadConfig(), ChatOptions(), user)
    service = Service(models.model(pair, LoadConfig(), False))
    page = ServedPair(service, models, LoadConfig(), user, "http://127.0.0.1:1")
    assert verdicts(screen.entries()) == verdicts(page.entries()) == told
    card.free = 14 * GIB
    assert screen.entry(NAME).fits == page.entry(NAME).fits != "fits"
    screen.open()
    service.load()
    assert verdicts(screen.entries()) == verdicts(page.entries())
    assert screen.entry(NAME).fits == page.entry(NAME).fits == "fits"
    service.unload()
    assert page.entry(NAME).fits == model_entry(NAME, user).fits != "fits"
    screen.close()
    service.close()


def test_a_pair_that_is_too_slow_here_is_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerators, "nvidia", lambda _asking: ())
    monkeypatch.setattr(hardware, "memory", lambda: hardware.Memory(64 * GIB, 60 * GIB, limited=False))
    monkeypatch.setattr(cpu_probe, "probe", lambda cpu: cpu_probe.CpuRates(cpu, dict.fromkeys(cpu_probe.ROWS, 1e9)))
    user = settings.load()
    assert model_entry(NAME, user).fine, "this CPU was never probed"
    machine(user, notify=lambda _event: None)
    found = model_entry(NAME, user)
    assert not found.fine and "It fits this machine; it would write " in found.question
    assert "tokens/s here, below the 3 that a chat needs." in found.question

"""Kinds of drafters: what stands in the table, and a planted one that stores nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from dflash_local import drafters, settings
from dflash_local.app.resolve import Choice
from dflash_local.app.server_command import server_command
from dflash_local.bench.random_pair import read_pair
from dflash_local.catalog.bundled import find
from dflash_local.config.read_model import read_model
from dflash_local.drafters import kinds
from dflash_local.drafters.drafter import Drafter
from dflash_local.drafters.kinds import KINDS, LOOKUP, config_of, folder_of, read_drafter
from dflash_local.engine import LoadConfig, load
from dflash_local.errors import UsageError
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.planner.machine import Machine, named
from dflash_local.planner.plan import plan
from dflash_local.remote.endpoint import endpoint
from dflash_local.remote.server_checks import WantedModel, probe
from tests.remote.openai_fake import Fake, running

CPU32 = LoadConfig(device="cpu", dtype="float32")
LOOKED_UP = folder_of(LOOKUP)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_a_folder_of_at_most_four_modules(kind: str) -> None:
    folder = Path(str(drafters.__file__)).parent / kind
    config = config_of(kind)
    needed = {"layout.py", "reference.py"} if config.stored else {"layout.py"}
    assert needed <= {path.name for path in folder.glob("*.py")} <= needed | {"fused.py", "training.py"}
    assert config.kind == kind


class Repeating(Drafter):
    """A kind that the fused engine lacks."""

    kind: ClassVar[str] = "repeating"
    stored: ClassVar[bool] = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any], source: str, inferred: Collection[str] = ()) -> Any:
        return cls(block_size=config["block_size"], source=source)


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a drafter that is a config.json alone."""
    name = "dflash_local.drafters.repeating.layout"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(CONFIG=Repeating))  # type: ignore[arg-type]
    monkeypatch.setitem(kinds.ARCHITECTURES, "RepeatingDrafter", "repeating")
    monkeypatch.setitem(KINDS, "repeating", ("RepeatingDrafter",))  # type: ignore[arg-type]
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["RepeatingDrafter"], "block_size": 6}))
    return tmp_path


def test_it_is_planned_without_memory_and_for_the_reference_engine_alone(
    planted: Path,
) -> None:
    pair = find("demo", str(planted))
    target = read_model(Checkpoint.open(pair.target).config, "demo")
    drafter = read_drafter(json.loads((planted / "config.json").read_text()), "x")
    machine = Machine("CPU", "cpu", 2**34, 2**34, "")
    asked = replace(CPU32, context=256)
    found, alone = plan(target, drafter, machine, asked), plan(target, None, machine, asked)
    assert found.fits and found.block_size == 6
    assert not any("drafter" in line.name for line in found.ledger.lines if line.bytes)
    assert {line.name for line in found.ledger.lines} == {line.name for line in alone.ledger.lines}
    with pytest.raises(UsageError, match="its drafter is of the kind repeating"):
        load(pair, replace(CPU32, engine="fused"))


def test_a_kind_that_the_fused_engine_has_is_planned_on_a_card_without_memory() -> None:
    target, drafter = (json.loads((folder / "config.json").read_text()) for folder in (find("demo").target, LOOKED_UP))
    card, asked = named("RTX 4090", 24), LoadConfig(dtype="bfloat16", context=256)
    found = plan(read_model(target, "demo"), read_drafter(drafter, "x"), card, asked)
    assert found.fits and found.engine == "fused" and found.block_size == 16
    assert not any("drafter" in line.name for line in found.ledger.lines if line.bytes)
    with pytest.raises(UsageError, match="a drafter of the kind lookup has no weights to be random"):
        read_pair(("demo", target), ("lookup", drafter))


def test_a_kind_that_no_server_has_is_launched_on_none_and_known_of_none(
    planted: Path,
) -> None:
    with pytest.raises(UsageError, match="vLLM runs no drafter of the kind repeating"):
        server_command("vllm", Choice("pair", find("demo").target, planted), settings.load())
    with running(Fake(program="sglang", info={"speculative_algorithm": "EAGLE3"})) as fake:
        assert "drafts with EAGLE3" in probe(endpoint(fake.url, fake.token), WantedModel()).notices[0]

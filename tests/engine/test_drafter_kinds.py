"""Kinds of drafters: what stands in the table, and one that stores nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_local import drafters, settings
from dflash_local.app.resolve import Choice
from dflash_local.app.server_command import server_command
from dflash_local.bench.random_pair import read_pair
from dflash_local.catalog.bundled import find
from dflash_local.config.read_model import read_model
from dflash_local.drafters.kinds import KINDS, LOOKUP, config_of, folder_of, read_drafter
from dflash_local.engine import LoadConfig
from dflash_local.errors import UsageError
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.planner.machine import Machine
from dflash_local.planner.plan import plan
from dflash_local.remote.endpoint import endpoint
from dflash_local.remote.server_checks import WantedModel, probe
from tests.remote.openai_fake import Fake, running

CPU32 = LoadConfig(device="cpu", dtype="float32")
NEEDED = {"layout.py", "reference.py"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_a_folder_of_at_most_three_modules(kind: str) -> None:
    folder = Path(str(drafters.__file__)).parent / kind
    assert NEEDED <= {path.name for path in folder.glob("*.py")} <= NEEDED | {"fused.py"}
    assert config_of(kind).kind == kind


LOOKED_UP = folder_of(LOOKUP)


def test_a_kind_that_stores_nothing_is_planned_without_memory() -> None:
    target = read_model(Checkpoint.open(find("demo").target).config, "demo")
    drafter = read_drafter(json.loads((LOOKED_UP / "config.json").read_text()), "x")
    machine = Machine("CPU", "cpu", 2**34, 2**34, "")
    asked = replace(CPU32, context=256)
    found, alone = plan(target, drafter, machine, asked), plan(target, None, machine, asked)
    assert found.fits and found.block_size == 16
    assert not any("drafter" in line.name for line in found.ledger.lines if line.bytes)
    assert {line.name for line in found.ledger.lines} == {line.name for line in alone.ledger.lines}


def test_a_kind_that_stores_nothing_has_no_random_weights() -> None:
    target, drafter = (json.loads((folder / "config.json").read_text()) for folder in (find("demo").target, LOOKED_UP))
    with pytest.raises(UsageError, match="a drafter of the kind lookup has no weights to be random"):
        read_pair(("demo", target), ("lookup", drafter))


def test_a_kind_that_no_server_has_is_launched_on_none_and_known_of_none() -> None:
    with pytest.raises(UsageError, match="vLLM runs no drafter of the kind lookup"):
        server_command("vllm", Choice("pair", find("demo").target, LOOKED_UP), settings.load())
    with running(Fake(program="sglang", info={"speculative_algorithm": "EAGLE3"})) as fake:
        assert "drafts with EAGLE3" in probe(endpoint(fake.url, fake.token), WantedModel()).notices[0]

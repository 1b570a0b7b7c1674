"""Kinds of drafters: what stands in the table, and a planted one that stores nothing and reads the text."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from dflash_local import drafters, settings
from dflash_local.app.resolve import Choice
from dflash_local.app.server_command import server_command
from dflash_local.bench.random_pair import read_pair
from dflash_local.bench.trial import write
from dflash_local.catalog.bundled import find
from dflash_local.config.read_model import read_model
from dflash_local.drafters import kinds
from dflash_local.drafters.drafter import Drafter
from dflash_local.drafters.engines import Drafts
from dflash_local.drafters.kinds import KINDS, LOOKUP, config_of, folder_of, read_drafter
from dflash_local.engine import LoadConfig, load
from dflash_local.errors import UsageError
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.planner.machine import Machine, named
from dflash_local.planner.plan import plan
from dflash_local.remote.endpoint import endpoint
from dflash_local.remote.server_checks import WantedModel, probe
from dflash_local.request import Limits, Request
from tests.remote.openai_fake import Fake, running

CPU32 = LoadConfig(device="cpu", dtype="float32")
NEEDED = {"layout.py", "reference.py"}
LOOKED_UP = folder_of(LOOKUP)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_a_folder_of_at_most_three_modules(kind: str) -> None:
    folder = Path(str(drafters.__file__)).parent / kind
    assert NEEDED <= {path.name for path in folder.glob("*.py")} <= NEEDED | {"fused.py"}
    assert config_of(kind).kind == kind


class Repeating(Drafter):
    """Drafts the last two tokens again and again."""

    kind: ClassVar[str] = "repeating"
    stored: ClassVar[bool] = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any], source: str, inferred: Collection[str] = ()) -> Any:
        return cls(block_size=config["block_size"], source=source)


class RepeatingProposer:
    """What it proposes; keeps the texts that it was given."""

    def __init__(self) -> None:
        self.length, self.texts = 0, list[list[int]]()

    def load(self, files: Checkpoint, *_beside: object) -> tuple[RepeatingProposer, tuple[str, ...]]:
        assert not files.tensors
        return self, ("nothing was read",)

    def extend(self, taps: torch.Tensor, start: int) -> None:
        assert start == self.length and taps.shape[1] == 0
        self.length = start + len(taps)

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)

    def propose(self, ids: Sequence[int], count: int, *_beside: object) -> Drafts:
        assert len(ids) == self.length + 1
        self.texts.append(list(ids))
        return Drafts(torch.tensor([ids[-2 + i % 2] for i in range(count)]), torch.zeros(count))


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, RepeatingProposer]:
    """The folder of a drafter that is a config.json alone, and what its kind proposes."""
    proposer = RepeatingProposer()
    for name, parts in (("layout", {"CONFIG": Repeating}), ("reference", {"PROPOSER": proposer})):
        monkeypatch.setitem(sys.modules, f"dflash_local.drafters.repeating.{name}", SimpleNamespace(**parts))  # type: ignore[arg-type]
    monkeypatch.setitem(kinds.ARCHITECTURES, "RepeatingDrafter", "repeating")
    monkeypatch.setitem(KINDS, "repeating", ("RepeatingDrafter",))  # type: ignore[arg-type]
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["RepeatingDrafter"], "block_size": 6}))
    return tmp_path, proposer


@pytest.mark.parametrize("model", ["demo", "demo-hybrid"])
def test_a_drafter_that_stores_nothing_drafts_from_the_text(
    model: str, planted: tuple[Path, RepeatingProposer]
) -> None:
    folder, proposer = planted
    session = load(find(model, str(folder)), CPU32)
    assert session.facts.block_size == 6 and session.facts.notices == ("nothing was read",)
    prompt = (7, 8, 9, 7, 8, 9, 7)
    replies = [write(session, Request(prompt_ids=prompt, limits=Limits(24), mode=mode)) for mode in ("ar", "dflash")]
    assert replies[0].ids == replies[1].ids
    whole = [*prompt, *replies[1].ids]
    assert proposer.texts and all(text == whole[: len(text)] for text in proposer.texts)


def test_it_is_planned_without_memory_and_for_the_reference_engine_alone(
    planted: tuple[Path, RepeatingProposer],
) -> None:
    pair = find("demo", str(planted[0]))
    target = read_model(Checkpoint.open(pair.target).config, "demo")
    drafter = read_drafter(json.loads((planted[0] / "config.json").read_text()), "x")
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
    planted: tuple[Path, RepeatingProposer],
) -> None:
    with pytest.raises(UsageError, match="vLLM runs no drafter of the kind repeating"):
        server_command("vllm", Choice("pair", find("demo").target, planted[0]), settings.load())
    with running(Fake(program="sglang", info={"speculative_algorithm": "EAGLE3"})) as fake:
        assert "drafts with EAGLE3" in probe(endpoint(fake.url, fake.token), WantedModel()).notices[0]

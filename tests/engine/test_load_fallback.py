"""An engine that finds only while it loads that it cannot run a pair here: ``auto`` goes to the reference engine."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_local.catalog.bundled import find
from dflash_local.engine import LoadConfig, Session, engines, load, load_fused
from dflash_local.errors import DoesNotFitError, KernelError
from dflash_local.models.fused.moe import MoEWeights
from tests.engine_sessions import ask, random_prompt
from tests.families import save_model

WHY = "no kernel for these experts is known to be right: of 17 kernels 17 faulted on this card"
PROMPT = random_prompt(12)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("qwen3_moe", tmp_path_factory.mktemp("mixture") / "target")


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Any]]:
    """A tensor of the weights that the fused engine reads, as on a card whose kernels for experts fail."""
    found: list[weakref.ref[Any]] = []

    def choose_experts(parts: Iterable[object], *args: object) -> None:
        mixture = next(part for part in parts if isinstance(part, MoEWeights))
        found.append(weakref.ref(mixture.experts.gate_up.weight))
        raise KernelError(WHY, "load it with --engine reference")

    monkeypatch.setattr(load_fused, "why_slow", lambda device, dense: "")
    monkeypatch.setattr(load_fused, "choose_experts", choose_experts)
    return found


def opened(target: Path, **options: Any) -> Session:
    return load(find(str(target), None), LoadConfig(dtype="float32", device="cpu", **options))


def test_auto_takes_the_reference_engine_and_a_notice_says_why(
    target: Path, read: list[weakref.ref[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[object] = []
    right = engines.load_reference.load_target

    def load_target(*args: Any) -> Any:
        held.append(read[0]())
        return right(*args)

    monkeypatch.setattr(engines.load_reference, "load_target", load_target)
    session = opened(target)
    assert session.facts.load.engine == "reference" and len(read) == 1
    assert sum(WHY in notice for notice in session.facts.notices) == 1
    assert held == [None], "the fused engine's weights are free before the reference engine reads them"
    want = opened(target, engine="reference")
    assert not any(engines.SLOWER in notice for notice in want.facts.notices)
    assert ask(session, PROMPT, 8, mode="ar").ids == ask(want, PROMPT, 8, mode="ar").ids


@pytest.mark.parametrize("options", [{"engine": "fused"}, {"exact": True}], ids=["asked for", "an option of its own"])
def test_what_only_the_fused_engine_can_do_is_refused_with_the_same_words(
    options: dict[str, Any], target: Path, read: list[weakref.ref[Any]]
) -> None:
    with pytest.raises(KernelError, match=WHY) as error:
        opened(target, **options)
    assert "--engine reference" in error.value.hint and len(read) == 1


def test_a_reference_engine_that_does_not_fit_says_why_it_was_taken(
    target: Path, read: list[weakref.ref[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(engines.load_reference, "load_target", full)
    with pytest.raises(DoesNotFitError, match=f"{WHY}.*; and the device has no memory"):
        opened(target)

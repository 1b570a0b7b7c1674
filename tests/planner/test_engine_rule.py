"""The planner says the engine that loading would choose: one table of cases asked of both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="holds the planner to the engine, and torch is not installed here")

import torch  # noqa: E402

from dflash_local.catalog.bundled import FOLDER  # noqa: E402
from dflash_local.catalog.shapes import FOLDER as SHAPES  # noqa: E402
from dflash_local.catalog.shapes import shape  # noqa: E402
from dflash_local.config.features import ModelConfig  # noqa: E402
from dflash_local.config.fused_support import fused_refusal  # noqa: E402
from dflash_local.config.read_model import read_model  # noqa: E402
from dflash_local.drafters.dflash.layout import DFlashConfig
from dflash_local.drafters.dflash2 import layout as dflash2_layout  # noqa: E402
from dflash_local.drafters.kinds import ARCHITECTURES
from dflash_local.engine import load_fused  # noqa: E402
from dflash_local.engine.checked_pair import CheckedPair  # noqa: E402
from dflash_local.engine.engines import ENGINES, chosen_engine  # noqa: E402
from dflash_local.errors import UsageError  # noqa: E402
from dflash_local.kernels import jit, triton_trial  # noqa: E402
from dflash_local.load_config import LOAD_OPTIONS, LoadConfig  # noqa: E402
from dflash_local.models.checkpoint import Checkpoint  # noqa: E402
from dflash_local.models.load_target import DTYPES, Placement  # noqa: E402
from dflash_local.models.pair import PairFacts, check_pair  # noqa: E402
from dflash_local.models.target_facts import TargetFacts  # noqa: E402
from dflash_local.planner.machine import Machine  # noqa: E402
from dflash_local.planner.plan import plan  # noqa: E402
from tests.drafter_configs import decoder, decoder_of_shape
from tests.families import FAMILIES, save_model  # noqa: E402

GOLDEN = Path(__file__).parents[1] / "golden"
DEVICES = {
    "cuda:0": Machine("a card", "cuda", 2**40, 2**40, "", "cuda:0"),
    "balanced": Machine(
        "a card", "cuda", 2**39, 2**39, "", others=(Machine("a card", "cuda", 2**39, 2**39, ""),)
    ).together(),
    "mps": Machine("Apple GPU", "mps", 2**40, 2**40, "", "mps"),
    "cpu": Machine("CPU", "cpu", 2**40, 2**40, "", "cpu"),
}
DTYPES_ASKED = ("bfloat16", "float16", "float32")


def answer(ask: Callable[..., Any], *how: Any) -> str:
    """The engine, or why there is none."""
    try:
        found = ask(*how)
        return str(getattr(found, "engine", found))
    except UsageError as error:
        return error.message


def engine_of(facts: TargetFacts, contract: PairFacts | None, where: Placement, config: LoadConfig) -> str:
    """The engine that loading would choose, before a file is read."""
    files: Any = None
    return chosen_engine(CheckedPair(files, None, facts, contract, where, 64, config))


def check(
    facts: TargetFacts, contract: PairFacts | None, target: ModelConfig, drafter: DFlashConfig | None, kernels: bool
) -> int:
    """Both answers in every way of asking; how many there were."""
    cases = list(
        product(
            LOAD_OPTIONS["engine"].choices, DEVICES, DTYPES_ASKED, (None, "bnb-nf4"), ("", "--exact", "--kv-cache int8")
        )
    )
    for engine, device, dtype, quantize, option in cases:
        where = Placement(device, DTYPES[dtype], quantize)
        machine = replace(DEVICES[device], kernels=kernels)
        config = LoadConfig(
            dtype=dtype,
            quantize=quantize,
            draft=contract is not None,
            engine=engine,
            exact=option == "--exact",
            kv_cache="int8" if "int8" in option else "auto",
            context=64,
        )
        loaded = answer(engine_of, facts, contract, where, config)
        planned = answer(plan, target, drafter, machine, config)
        assert planned == loaded, (engine, device, dtype, quantize, option)
    return len(cases)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_planned_as_it_is_loaded(family: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(family, tmp_path)
    files = Checkpoint.open(tmp_path)
    target = read_model(files.config, family)
    for kernels in (True, False) if family in ("qwen3", "qwen3_moe") else (True,):
        why = {"cuda": ""} if kernels else {}
        monkeypatch.setattr(load_fused, "why_not_on", lambda device, dense, why=why: why.get(device[:4], "no"))
        assert check(TargetFacts.from_checkpoint(files), None, target, None, kernels) > 50


def test_of_two_cards_both_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_fused, "why_not_on", lambda device, dense: "too old" if device == "cuda:1" else "")
    parts = [Checkpoint.open(FOLDER / "demo" / part) for part in ("target", "drafter")]
    facts, target = check_pair(*parts).target, read_model(parts[0].config, "demo")
    cards = [replace(DEVICES["cuda:0"], device=f"cuda:{at}", kernels=at != 1) for at in range(3)]
    for devices, engine in {(0, 1): "reference", (2, 0): "fused"}.items():
        first, second = (cards[at] for at in devices)
        device = f"cuda:{','.join(map(str, devices))}"
        planned = plan(target, None, replace(first, others=(second,)).together(), LoadConfig(device=device)).engine
        assert planned == engine_of(facts, None, Placement(device, torch.bfloat16), LoadConfig(device=device)) == engine


def test_a_drafter_with_biases_is_planned_as_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_fused, "why_not_on", lambda device, dense: "" if device.startswith("cuda") else "no")
    parts = [Checkpoint.open(FOLDER / "demo" / part) for part in ("target", "drafter")]
    contract = check_pair(*parts)
    biased = replace(contract, drafter=replace(decoder(contract.drafter), attention_bias=True))
    target = read_model(parts[0].config, "demo")
    drafter = decoder_of_shape(parts[1].config, "drafter")
    check(contract.target, contract, target, drafter, True)
    check(contract.target, biased, target, replace(drafter, attention_bias=True), True)
    assert plan(target, replace(drafter, attention_bias=True), DEVICES["cuda:0"]).engine == "fused"


def test_a_dflash2_drafter_is_planned_as_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_fused, "why_not_on", lambda device, dense: "" if device.startswith("cuda") else "no")
    parts = [Checkpoint.open(GOLDEN / "qwen3-dflash2-b8" / part) for part in ("target", "drafter")]
    contract, target = check_pair(*parts), read_model(parts[0].config, "target")
    drafter = decoder_of_shape(parts[1].config, "drafter")
    check(contract.target, contract, target, drafter, True)
    card, asked = DEVICES["cuda:0"], LoadConfig(context=64)
    monkeypatch.setattr(dflash2_layout, "MOST_CANDIDATES", 8)
    assert plan(target, drafter, card, asked).engine == "fused", "as many as it chooses among"
    monkeypatch.setattr(dflash2_layout, "MOST_CANDIDATES", 4)
    check(contract.target, contract, target, drafter, True)
    assert plan(target, drafter, card, asked).engine == "reference"
    assert plan(target, drafter, card, replace(asked, draft=False)).engine == "fused"
    with pytest.raises(UsageError, match="this: its drafter chooses among 8 candidates, 4 fit"):
        plan(target, drafter, card, replace(asked, engine="fused"))


@pytest.mark.parametrize(("hip", "engine"), [("7.1.52802", "reference"), (None, "fused")])
def test_the_fused_engine_is_not_taken_by_itself_on_an_amd_card(
    hip: str | None, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch calls it cuda, with a capability of 9 to 12."""
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (11, 0))
    monkeypatch.setattr(jit, "HAVE_TRITON", True)
    monkeypatch.setattr(triton_trial, "why_not", lambda device: None)
    contract = check_pair(*(Checkpoint.open(FOLDER / "demo" / part) for part in ("target", "drafter")))
    where = Placement("cuda:0", torch.bfloat16)
    assert engine_of(contract.target, contract, where, LoadConfig()) == engine
    on_the_card = SimpleNamespace(is_cuda=True)
    assert jit.runs_kernels(on_the_card) == (engine == "fused")


def test_a_mixture_is_planned_for_the_reference_engine_where_its_compiler_is_missing(tmp_path: Any) -> None:
    card = replace(DEVICES["cuda:0"], compiler=False)
    for family, engine in (("qwen3_moe", "reference"), ("qwen3", "fused")):
        save_model(family, tmp_path / family)
        target = read_model(Checkpoint.open(tmp_path / family).config, family)
        asked = LoadConfig(dtype="bfloat16", context=64)
        assert plan(target, None, card, asked).engine == engine
        assert plan(target, None, replace(card, compiler=True), asked).engine == "fused"
        assert plan(target, None, card, replace(asked, engine="fused")).engine == "fused", (
            "as asked, and it will say why"
        )


def test_the_registrys_shapes_are_told_apart() -> None:
    """What the registry knows suffices: all its targets run fused on a card but those with latent attention."""
    refused = {}
    for file in SHAPES.glob("*.json"):
        repo = file.stem.replace("--", "/")
        config = shape(repo) or {}
        if config["architectures"][0] not in ARCHITECTURES and (why := fused_refusal(read_model(config, repo))):
            refused[repo] = why
    assert refused == {"moonshotai/Kimi-K2.5": "its attention is latent"}


def test_the_fused_engine_is_refused_with_the_reason() -> None:
    config = shape("moonshotai/Kimi-K2.5")
    assert config is not None
    target = read_model(config, "target")
    with pytest.raises(UsageError, match="its attention is latent"):
        plan(target, None, DEVICES["cuda:0"], LoadConfig(engine="fused"))
    with pytest.raises(UsageError, match="does not know --exact"):
        plan(target, None, DEVICES["cuda:0"], LoadConfig(engine="reference", exact=True))


def test_every_engine_that_can_be_asked_for_is_in_the_table() -> None:
    assert ("auto", *ENGINES) == LOAD_OPTIONS["engine"].choices

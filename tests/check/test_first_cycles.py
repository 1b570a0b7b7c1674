"""What first cycles tell: taps one layer off, and the place where a layer of the target's own takes hidden states."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dflash_local import settings
from dflash_local.app.loading import _as_measured, engine_session
from dflash_local.app.resolve import resolve
from dflash_local.catalog import bundled
from dflash_local.catalog.bundled import Pair
from dflash_local.check import record
from dflash_local.check.findings import Finding
from dflash_local.check.first_cycles import better_taps, settle_final_norm
from dflash_local.check.text import prompts_of
from dflash_local.drafters.mtp.layout import FINAL_NORM
from dflash_local.engine import load
from dflash_local.engine.session import Session
from dflash_local.load_config import LoadConfig
from tests.check import faults
from tests.cli.conftest import Cli, cli  # noqa: F401  # a fixture

CPU = LoadConfig(device="cpu", dtype="float32")
BEFORE = "hidden states are taken before the final norm, by later loads too"
ENGINES = pytest.mark.parametrize("engine", ["reference", "fused"])


@pytest.fixture
def before(own_toys: Path) -> Path:
    """The bundled target with another final norm, undone in its head: its layer is right with what stands before it."""
    folder = own_toys / "demo-hybrid" / "target"
    scale = (1.5 * torch.randn(192, generator=torch.Generator().manual_seed(1))).exp()

    def changed(found: faults.Tensors) -> faults.Tensors:
        norms = {name: (1 + found[name].float()) * scale - 1 for name in ("model.norm.weight", "mtp.norm.weight")}
        return {**norms, "lm_head.weight": found["model.embed_tokens.weight"].float() / scale}

    faults.change_tensors(folder, changed)
    faults.change_json(folder / "config.json", tie_word_embeddings=False)
    return folder


def own_layer(target: Path | str) -> Pair:
    return resolve(str(target), "mtp", settings.load(), lambda _: None)


def normed_of(pair: Pair) -> bool:
    """How a later load takes hidden states."""
    with engine_session(pair, replace(CPU, fit_check=False), settings.load(), lambda _: None) as session:
        normed: bool = session.runner.proposer.config.normed
        return normed


def settled(session: Session, pair: Pair) -> Finding:
    found = settle_final_norm(session, pair, prompts_of(pair))
    assert found is not None
    return found


def test_a_layer_that_takes_hidden_states_before_the_norm_is_found_out_and_remembered(
    before: Path,
    cli: Cli,  # noqa: F811
    short: None,
) -> None:
    pair, cache = own_layer(before), settings.load().cache_dir
    assert normed_of(pair)
    found = cli("check", str(before), "--drafter", "mtp", "--only", "drafter", "--no-fit-check")
    assert found.code == 0 and found.out.startswith("serves: ") and BEFORE in found.out
    assert not normed_of(pair)
    beside = replace(pair, drafter=before.parent / "drafter")
    assert _as_measured(beside, replace(CPU, mtp=True), settings.load(), print).target_keys == {FINAL_NORM: False}
    faults.change_json(before / "config.json", **{FINAL_NORM: True})
    assert normed_of(own_layer(before)), "what config.json says wins"
    with closing(load(pair, CPU)) as session:
        assert settle_final_norm(session, pair, prompts_of(pair)) is None
    assert cache is not None and not record.measured_keys(cache, before), "of other files nothing is known"


@ENGINES
def test_the_session_goes_on_with_what_is_better(engine: str, before: Path, short: None) -> None:
    pair = own_layer(before)
    with closing(load(pair, replace(CPU, engine=engine, context=512))) as session:
        at_load = session.runner.proposer
        figures = settled(session, pair).figures
        assert figures["final_norm"]["before"] > figures["final_norm"]["behind"] + 0.3
        assert session.runner.proposer is not at_load and not session.runner.proposer.config.normed
        assert settled(session, pair).figures == figures, "measured anew, not taken from what is loaded"
        assert not session.runner.proposer.config.normed


def test_what_was_remembered_is_forgotten_where_the_default_is_better(cli: Cli, short: None) -> None:  # noqa: F811
    pair, cache = own_layer("demo-hybrid"), settings.load().cache_dir
    assert cache is not None
    wrong = Finding("drafter", "ok", "", figures={"drafter_keys": {FINAL_NORM: False}})
    report = record.Report("x", "loaded", "2026-01-02T03:04:05+00:00", 1.0, (wrong,))
    record.remember_keys(record.path_of(cache, {}), pair, report)
    assert not normed_of(pair)
    found = cli("check", "demo-hybrid", "--drafter", "mtp", "--json", "--no-fit-check")
    (line,) = [each["text"] for each in found.json["findings"] if each["subject"] == "drafter"]
    assert found.code == 0 and "taken behind the final norm" in line
    assert record.measured_keys(cache, pair.target) == {} and normed_of(pair)


# The taps are the drafter's, the same in both; the faults above are told by the reference engine.
@pytest.mark.parametrize("engine", [pytest.param("reference", marks=pytest.mark.slow), "fused"])
def test_taps_that_are_right_have_no_better_ones_beside_them(engine: str, short: None) -> None:
    pair = bundled.find("demo")
    with closing(load(pair, replace(CPU, engine=engine, context=512))) as session:
        target = session.runner.target
        assert better_taps(session, prompts_of(pair)[:1], thinking=False) == ""
        target.use_taps((0, 2, 4, 5))
        assert "with [1, 3, 5, 6] instead of [0, 2, 4, 5]" in better_taps(session, prompts_of(pair)[:2], thinking=False)
        assert target.taps == (0, 2, 4, 5), "they are put back"

"""Checks of a loaded pair: both toys are found good, and every fault planted into their files is named."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_local.catalog import bundled
from dflash_local.catalog.bundled import Pair
from dflash_local.check import drafting, findings, first_cycles, likelihood, record, text
from dflash_local.check.drafting import check_drafter
from dflash_local.check.findings import Finding, Subject
from dflash_local.check.likelihood import Band, check_likelihood
from dflash_local.check.run import check, check_exactness, guarded
from dflash_local.check.template import check_template
from dflash_local.engine import load
from dflash_local.engine.session import Session
from dflash_local.errors import CheckpointError
from dflash_local.load_config import LoadConfig
from tests.bench.sessions import KV_ONLY, golden_pair, plant_drafted_bonus
from tests.check import faults
from tests.cli.conftest import Cli, cli  # noqa: F401  # a fixture

CPU = LoadConfig(device="cpu", dtype="float32")


def session_of(pair: Pair, **changes: Any) -> closing[Session]:
    return closing(load(pair, replace(CPU, **changes)))


@pytest.mark.parametrize("name", ["demo", pytest.param("demo-hybrid", marks=pytest.mark.slow)])  # fused: next file
def test_a_bundled_pair_is_good_in_every_line_and_remembered(name: str, cli: Cli, short: None) -> None:  # noqa: F811
    found = cli("check", name, "--json")
    states = {each["subject"]: each["state"] for each in found.json["findings"]}
    assert found.code == 0 and found.json["state"] == "ok" and not found.json["remembered"]
    skipped = [
        states.pop(subject) for subject in ("card", "format", "layers")
    ]  # the reference engine's are transformers'
    assert set(skipped) == {"skipped"} and set(states.values()) == {"ok"}
    assert set(states) == {"target", "drafter", "template", "exactness"}
    again = cli("check", name)
    assert again.code == 0 and "--again checks anew" in again.out and "acceptance length" in again.out


CHECKS: dict[Subject, Callable[[Session, Pair], Finding]] = {
    "target": check_likelihood,
    "drafter": check_drafter,
    "template": lambda session, _: check_template(session),
}


# Drafters of both pairs are of one kind: the same fault in the other one is in the long tests, and so are those that
# are found alike, as a drafter whose drafts are refused.
ALIKE = (faults.order_of_taps, faults.drafters_rope_base)
# Of a target: one whose texts are merely unlikely, one that is broken, one of another tokenizer, one that is stored.
TOLD_APART = (faults.rotated_share, faults.lost_shard, faults.other_vocabulary, faults.zero_points_off_by_one)


def is_like_another(fault: faults.Fault) -> bool:
    if fault.where == "drafter":
        return fault.of == faults.HYBRID or fault.plant in ALIKE
    return fault.subject == "target" and fault.dtype == "float32" and fault.plant not in TOLD_APART


IN_FILES = [pytest.param(each, marks=pytest.mark.slow if is_like_another(each) else ()) for each in faults.IN_FILES]


@pytest.mark.parametrize("fault", IN_FILES, ids=lambda fault: fault.name)
def test_a_fault_in_files_is_named(fault: faults.Fault, own_toys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault.where == "drafter":  # a target is told by all of them
        monkeypatch.setattr(text, "PROMPTS", 2)
    monkeypatch.setattr(first_cycles, "PARTS", 1)  # a quarter of the texts
    monkeypatch.setattr(first_cycles, "REPLY", 24)
    pair, folder = replace(bundled.find(fault.of), generations=()), own_toys / fault.of / fault.where

    def found(dtype: str = "float32") -> Finding:
        with session_of(pair, dtype=dtype) as session:
            return guarded(fault.subject, lambda: CHECKS[fault.subject](session, pair))

    if fault.prepare is not None:
        fault.prepare(folder)
        assert found().state == "ok"
    fault.plant(folder)
    if fault.dtype != "float32":
        assert found().state == "ok", "it shows in that dtype alone"
    finding = found(fault.dtype)
    assert finding.state == fault.state and fault.word in finding.text + finding.remedy, finding
    assert findings.exit_code([finding]) == (6 if fault.state == "failed" else 0)


def test_weights_beyond_float16_are_told_at_the_load(own_toys: Path) -> None:
    target = own_toys / "demo" / "target"
    faults.each_tensor("layers.3.mlp.up_proj.weight", lambda t: t * 2.0**20, target)
    with pytest.raises(CheckpointError) as told, session_of(bundled.find("demo"), dtype="float16"):
        pytest.fail("weights that are infinite")
    assert told.value.exit_code == 6 and "--dtype bfloat16" in told.value.hint
    with session_of(bundled.find("demo"), dtype="bfloat16") as session:
        assert session.facts.dtype == "bfloat16"


def test_every_line_has_a_fault_that_it_names() -> None:
    """But those that speak of a card, kernels or engine, whose faults are no model's."""
    assert {each.subject for each in faults.FAULTS} == set(findings.EXIT_CODES) - {"card", "format", "exactness"}


def test_bands_part_working_doubtful_and_broken_targets() -> None:
    band = Band(4.0, 7.0)
    states = [likelihood.judged({"prose": nats, "code": 1.0}, band).state for nats in (3.9, 4.0, 7.0, 7.1)]
    assert states == ["ok", "warning", "warning", "failed"]
    assert likelihood.judged({"prose": 1.0, "code": float("nan")}, band).state == "failed"


@pytest.mark.parametrize(
    ("lengths", "trained", "state", "word"),
    [
        ({"thinking": 3.0, "no thinking": 1.1}, "required", "ok", ""),
        ({"thinking": 1.1, "no thinking": 3.0}, "required", "failed", "with no thinking alone"),
        ({"thinking": 1.1, "no thinking": 3.0}, None, "ok", ""),
        ({"thinking": 1.3, "no thinking": 1.4}, "either", "warning", "target_layer_ids"),
        ({"no thinking": None}, None, "skipped", ""),
    ],
)
def test_the_band_holds_for_the_mode_that_a_drafter_was_trained_for(
    lengths: dict[str, float | None], trained: str | None, state: str, word: str
) -> None:
    pair = Pair("a", Path("a"), Path("b"), bundled=False, thinking=trained)
    found = drafting.judged(lengths, pair)
    assert found.state == state and word in found.remedy


def test_a_template_that_refuses_two_turns_is_not_judged(own_toys: Path) -> None:
    faults.template("{{- raise_exception('only one turn') }}", own_toys / "demo" / "target")
    with session_of(bundled.find("demo")) as session:
        found = guarded("template", lambda: check_template(session))
    assert found.state == "skipped" and "only one turn" in found.text


def test_a_reply_that_is_not_the_targets_own_breaks_the_engine(short: None) -> None:
    pair = bundled.find("demo")
    with session_of(replace(pair, drafter=bundled.FOLDER / "demo-hybrid" / "drafter", generations=())) as session:
        found = check_exactness(plant_drafted_bonus(session), pair)
    assert found.state == "failed" and findings.exit_code([found]) == 7 and "not the target's choice" in found.text


def test_without_a_tokenizer_nothing_is_judged() -> None:
    pair = golden_pair(KV_ONLY)
    with session_of(pair) as session:
        found = check(session, pair, None, quiet)
    assert {each.state for each in found} == {"skipped"} and findings.exit_code(found) == 0


def quiet(_text: str, _fraction: float) -> None:
    pass


def test_a_failure_has_its_exit_code_and_is_found_again(cli: Cli, own_toys: Path, short: None) -> None:  # noqa: F811
    faults.untied_head(own_toys / "demo" / "target")
    for _ in range(2):
        found = cli("check", "demo", "--mode", "ar", "--json")
        assert found.code == 6 and found.json["state"] == "failed" and not found.json["remembered"]
        assert "PairCheckError" in found.err
    assert [each["subject"] for each in found.json["findings"] if each["state"] == "failed"] == ["target"]


def test_the_engine_is_told_before_the_checkpoint(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    from dflash_local.check import run

    both = (Finding("target", "failed", "unlikely"), Finding("exactness", "failed", "other ids", "report it"))
    monkeypatch.setattr(run, "check", lambda *_: both)
    found = cli("check", "demo", "--mode", "ar")
    assert found.code == 7 and "exactness failed: other ids" in found.err and "report it" in found.out


def test_a_report_holds_for_one_state_of_the_files(tmp_path: Path, own_toys: Path) -> None:
    pair = bundled.find("demo")
    path = record.path_of(tmp_path, record.facts_of(pair, CPU))
    found = Finding("target", "ok", "fine", figures={"nats": {"a": 1.0}})
    report = record.Report("demo", "loaded", "2026-01-02T03:04:05+00:00", 1.0, (found,))
    record.remember(path, report)
    assert record.remembered(path) == replace(report, remembered=True)
    other = record.path_of(tmp_path, record.facts_of(pair, replace(CPU, exact=True)))
    faults.change_tensors(pair.target, lambda _: {})
    assert len({path, other, record.path_of(tmp_path, record.facts_of(pair, CPU))}) == 3
    assert path is not None
    path.write_text("{", encoding="utf-8")
    assert record.remembered(path) is None is record.remembered(None)


def test_a_check_that_the_memory_does_not_suffice_for_is_no_fault() -> None:
    def full() -> Finding:
        raise torch.OutOfMemoryError("no memory")

    found = guarded("target", full)
    assert found.state == "skipped" and "memory" in found.text and findings.exit_code([found]) == 0

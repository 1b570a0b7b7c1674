"""The probe of a CPU's memory, how it is kept, and the speed of plans on it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_local.load_config import LoadConfig
from dflash_local.planner import cpu_probe, cpu_speed
from dflash_local.planner.cpu_probe import CpuRates
from dflash_local.planner.cpu_speed import BLOCK_SHARE, STEP_SHARE, weights_read
from dflash_local.planner.machine import Machine
from dflash_local.planner.plan import plan
from dflash_local.planner.speed import ExpectedAcceptance, Prediction, predict
from dflash_local.ui.plan_text import speed_lines
from tests.drafter_configs import published_drafter, published_target

GIB = 2**30
RATES = CpuRates("a CPU", {1: 20e9, 8: 8e9, 16: 7e9})
CPU = Machine("CPU", "cpu", 256 * GIB, 224 * GIB, "", "cpu", free_now=224 * GIB, rates=RATES)


def predicted(config: LoadConfig, repo: str = "Qwen/Qwen3-4B", where: Machine = CPU) -> Prediction | None:
    model = published_target(repo)
    pair = published_drafter("z-lab/Qwen3-4B-DFlash-b16") if config.draft else None
    return predict(plan(model, pair, where, config), model, pair)


def test_a_probe_is_kept_for_the_machine_it_was_made_on(tmp_path: Path) -> None:
    cpu_probe.add(tmp_path / "speeds", RATES)
    assert cpu_probe.read(tmp_path / "speeds", "a CPU") == RATES
    assert cpu_probe.read(tmp_path / "speeds", "another CPU") is None
    assert cpu_probe.read(tmp_path, "a CPU") is None and cpu_probe.read(None, "a CPU") is None


@pytest.mark.parametrize("rates", [{"1": 1e9}, {"1": 0, "8": 1e9, "16": 1e9}, {"x": 1}, [], None, {"1": "fast"}])
def test_a_damaged_probe_is_none(tmp_path: Path, rates: object) -> None:
    (tmp_path / cpu_probe.FILE).write_text(json.dumps({"cpu": "a CPU", "rates": rates}))
    assert cpu_probe.read(tmp_path, "a CPU") is None


def test_a_step_is_the_weights_it_reads_by_the_rate_that_the_engine_reaches() -> None:
    found = predicted(LoadConfig(draft=False))
    assert found is not None and found.times[0].cycle_ms is None
    weights = 4 * weights_read(published_target("Qwen/Qwen3-4B"), 1)
    assert weights == pytest.approx(4 * 4.02e9, rel=0.01)
    kv = 1024 * 4 * 73728
    assert found.times[0].step_ms == pytest.approx(1e3 * (weights + kv) / (STEP_SHARE * 20e9), rel=1e-3)
    assert found.times[1].step_ms > found.times[0].step_ms


def test_a_cycle_drafts_and_verifies_at_the_rate_of_its_rows() -> None:
    found = predicted(LoadConfig())
    assert found is not None and found.times[0].rows == 16
    weights = 4 * (weights_read(published_target("Qwen/Qwen3-4B"), 16) + 537_427_200 + 151936 * 2560)
    assert found.times[0].cycle_ms == pytest.approx(1e3 * weights / (BLOCK_SHARE * 7e9), rel=0.03)


def test_in_bfloat16_the_bytes_are_half_and_a_cycle_is_predicted_where_the_cpu_computes_in_it() -> None:
    whole, half = predicted(LoadConfig(dtype="float32")), predicted(LoadConfig(dtype="bfloat16"))
    native = predicted(LoadConfig(), where=replace(CPU, bfloat16=True))
    assert whole is not None and half is not None and native is not None
    assert half.times[0].step_ms == native.times[0].step_ms == pytest.approx(whole.times[0].step_ms / 2, rel=0.01)
    assert half.times[0].cycle_ms is None and "does not compute in bfloat16" in half.basis
    assert whole.times[0].cycle_ms is not None and native.basis == whole.basis
    assert native.times[0].cycle_ms == pytest.approx(whole.times[0].cycle_ms / 2, rel=0.01)


def test_a_mixture_reads_the_experts_that_its_rows_take() -> None:
    model = published_target("Qwen/Qwen3-Coder-30B-A3B-Instruct")
    assert 2.5e9 < weights_read(model, 1) < 3.5e9 < 15e9 < weights_read(model, 16) < weights_read(model, 10**6) < 31e9


def test_nothing_is_predicted_without_a_probe_of_a_toy_or_of_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert predicted(LoadConfig(), where=replace(CPU, rates=None)) is None
    assert predicted(LoadConfig(quantize="bnb-nf4")) is None
    monkeypatch.setattr(cpu_speed, "SMALL", 10**12)
    assert predicted(LoadConfig()) is None


def test_the_gain_of_drafting_follows_from_the_acceptance_lengths() -> None:
    found = predicted(LoadConfig())
    assert found is not None and found.gain is None
    drafted, first = replace(found, acceptance=ExpectedAcceptance(1.0, 20.0, "")), found.times[0]
    assert first.cycle_ms is not None
    assert drafted.gain == pytest.approx((first.step_ms / first.cycle_ms, 20 * first.step_ms / first.cycle_ms))
    assert not speed_lines(found, 100)[-1].strip().startswith("drafting")
    for highest, words in ((1.0, "drafting does not help here: "), (20.0, "drafting helps with some texts only: ")):
        assert words in speed_lines(replace(found, acceptance=ExpectedAcceptance(1.0, highest, "")), 100)[-1]
    assert (
        "drafting helps here: " in speed_lines(replace(found, acceptance=ExpectedAcceptance(19.0, 20.0, "")), 100)[-1]
    )

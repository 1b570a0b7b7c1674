"""The choice of kernels for a mixture of experts: tried ones alone, remembered, refused where none is right.

PyTorch's products stand in for the kernels.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from dflash_local.errors import KernelError
from dflash_local.kernels import expert_gemm, nvrtc
from dflash_local.kernels.expert_gemm import Mixture
from dflash_local.kernels.experts import ExpertWeight
from dflash_local.kernels.fragment_packing import PLAIN
from dflash_local.kernels.kernel_record import KernelRecord
from dflash_local.kernels.kernel_trial import KernelTrial, OnProgress, TrialsImpossibleError
from dflash_local.kernels.product_trials import ExpertTrial, RouteTrial
from dflash_local.kernels.random_weight import random_weight
from dflash_local.kernels.split_kv import DeviceProperties
from dflash_local.models.fused import expert_choice
from dflash_local.models.fused.expert_choice import MixtureLayer, choose_expert_kernels
from dflash_local.models.fused.routed_experts import Matrices
from tests import expert_references
from tests.card_clock import CardClock

EXPERTS, HIDDEN, SIZE = 6, 128, 64


def layer(size: int = SIZE, biased: bool = False) -> MixtureLayer:
    def weight(n: int, k: int) -> ExpertWeight:
        return ExpertWeight(random_weight(PLAIN, (EXPERTS * n, k), torch.device("cpu")), EXPERTS)

    return MixtureLayer(Mixture(EXPERTS, 2), Matrices(weight(2 * size, HIDDEN), weight(HIDDEN, size)), "silu", biased)


@pytest.fixture
def record() -> KernelRecord:
    return KernelRecord(None, {})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> CardClock:
    return CardClock.plant(monkeypatch)


@pytest.fixture
def asked(record: KernelRecord, clock: CardClock, monkeypatch: pytest.MonkeyPatch) -> list[KernelTrial]:
    """The trials of a card on which all kernels are right and the last that is measured is the fastest."""
    found: list[KernelTrial] = []

    def all_right(
        trials: Iterable[KernelTrial], device: torch.device, record: KernelRecord, progress: OnProgress
    ) -> None:
        new = [trial for trial in trials if trial.kernel not in record.verdicts]
        found.extend(new)
        record.verdicts |= {trial.kernel: "right" for trial in new}

    monkeypatch.setattr(expert_gemm, "route", expert_references.route)
    for name in ("gate_up", "down"):
        monkeypatch.setattr(expert_gemm, name, clock.noting(getattr(expert_references, name), lambda *args: args[5]))
    monkeypatch.setattr(expert_choice, "record_of", lambda device: record)
    monkeypatch.setattr(expert_choice, "try_kernels", all_right)
    monkeypatch.setattr(expert_choice, "device_properties", lambda device: DeviceProperties(99 * 1024, 16, (9, 0)))
    monkeypatch.setattr(expert_gemm, "compiled", lambda device, spec: b"")
    monkeypatch.setattr(nvrtc, "why_not", lambda capability: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return found


def judged(monkeypatch: pytest.MonkeyPatch, verdict_of: Any) -> None:
    """Trials end as a function of them says; None: untried so far."""

    def try_kernels(
        trials: Iterable[KernelTrial], device: torch.device, record: KernelRecord, progress: OnProgress
    ) -> None:
        record.verdicts |= {trial.kernel: verdict_of(trial) for trial in trials}

    monkeypatch.setattr(expert_choice, "try_kernels", try_kernels)


def test_every_kernel_that_may_be_launched_is_tried_before(asked: list[KernelTrial], record: KernelRecord) -> None:
    heard: list[str] = []
    (found,) = choose_expert_kernels([layer(biased=True)], 16, progress=lambda text, part: heard.append(text))
    assert asked[0] == RouteTrial(Mixture(EXPERTS, 2), True) and heard == ["measuring experts"]
    products = [trial.spec for trial in asked if isinstance(trial, ExpertTrial)]
    for rows, configs in found.configs.items():
        assert all(any(spec.config == config and spec.rows == rows for spec in products) for config in configs)
    assert sorted({(spec.name, spec.rows) for spec in products}) == [
        ("expert_down", 8), ("expert_down", 16), ("expert_gate_up", 8), ("expert_gate_up", 16),
    ]  # fmt: skip


def test_what_was_measured_is_remembered_by_product_and_rows_and_timed_once_at_each_load(
    asked: list[KernelTrial], record: KernelRecord, clock: CardClock
) -> None:
    layers = [layer(), layer(), layer(32)]
    first = choose_expert_kernels(layers, 16)
    assert len(record.choices) == 8 and record.used == set(record.choices), "two products of two kinds at 8 and 16"
    assert first[0] == first[1] and all("2 a row" in name and "rows" in name for name in record.choices)
    asked.clear()
    clock.timed.clear()
    clock.warmed.clear()
    assert choose_expert_kernels(layers, 16) == first and not asked
    assert sorted(len(timed) for timed in clock.timed) == [1] * 4 + [2] * 4 and not clock.warmed
    assert choose_expert_kernels(layers[:1], 5)[0].configs == {8: first[0].configs[8]}


def test_a_choice_that_is_wrong_with_the_weights_at_hand_is_made_again(
    asked: list[KernelTrial], record: KernelRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first,) = choose_expert_kernels([layer()], 8)
    bad = first.configs[8]
    right = {name: getattr(expert_references, name) for name in ("gate_up", "down")}

    def wrong(name: str) -> Any:
        def product(*args: Any) -> torch.Tensor:
            found: torch.Tensor = right[name](*args)
            return found.add_(1) if args[5] in bad else found

        return product

    for name in right:
        monkeypatch.setattr(expert_gemm, name, wrong(name))
    (again,) = choose_expert_kernels([layer()], 8)
    assert not set(again.configs[8]) & set(bad)
    assert set(record.choices.values()) == {repr(config) for config in again.configs[8]}
    for name in right:
        monkeypatch.setattr(expert_gemm, name, lambda *args: args[4].zero_())
    with pytest.raises(KernelError, match="no kernel gave the right product of these experts at 8 rows"):
        choose_expert_kernels([layer()], 8)


def test_in_exact_mode_a_configuration_is_right_with_any_rows(
    asked: list[KernelTrial], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose kernel for a step is wrong would be launched there."""
    (last,) = choose_expert_kernels([layer()], 16)
    bad = last.configs[16]

    def verdict(trial: KernelTrial) -> str:
        failed = isinstance(trial, ExpertTrial) and trial.spec.config in bad and trial.spec.rows == 8
        return "wrong" if failed else "right"

    judged(monkeypatch, verdict)
    (exact,) = choose_expert_kernels([layer()], 16, exact=True)
    assert exact.configs[8] == exact.configs[16] and not set(exact.configs[16]) & set(bad)
    (free,) = choose_expert_kernels([layer()], 16)
    assert not set(free.configs[8]) & set(bad)


@pytest.mark.parametrize("exact", [False, True])
def test_where_none_is_right_for_more_rows_launches_have_few(
    exact: bool, asked: list[KernelTrial], monkeypatch: pytest.MonkeyPatch
) -> None:
    def verdict(trial: KernelTrial) -> str:
        many = isinstance(trial, ExpertTrial) and trial.spec.rows == 16 and trial.spec.name == "expert_down"
        return "fault" if many else "right"

    judged(monkeypatch, verdict)
    (found,) = choose_expert_kernels([layer()], 16, exact)
    assert list(found.configs) == [8]


@pytest.mark.parametrize("failed", ["route", "expert_gate_up", "expert_down"])
def test_without_a_right_kernel_the_engine_says_so(
    failed: str, asked: list[KernelTrial], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[object] = []
    judged(monkeypatch, lambda trial: "hang" if trial.kernel.startswith(failed) else "right")
    for name in ("route", "gate_up", "down") if failed == "route" else (failed.removeprefix("expert_"),):
        monkeypatch.setattr(expert_gemm, name, lambda *args: launched.append(args))
    with pytest.raises(KernelError, match=r"of \d+ kernels \d+ did not end on this card") as error:
        choose_expert_kernels([layer()], 8)
    assert "--engine reference" in error.value.hint and not launched


def test_where_no_child_can_use_the_device_the_engine_says_why(
    asked: list[KernelTrial], record: KernelRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    def impossible(*args: object) -> None:
        raise TrialsImpossibleError("another process has the device for itself")

    with monkeypatch.context() as patch:
        patch.setattr(expert_choice, "try_kernels", impossible)
        with pytest.raises(KernelError, match="another process has the device for itself"):
            choose_expert_kernels([layer()], 8)
        assert record.impossible
    assert choose_expert_kernels([layer()], 8) and not record.impossible


def test_experts_that_no_kernel_takes_are_refused(asked: list[KernelTrial]) -> None:
    odd = layer()
    plain = torch.zeros(EXPERTS * 24, HIDDEN).bfloat16()
    refused = odd._replace(matrices=odd.matrices._replace(gate_up=ExpertWeight(plain, EXPERTS)))
    with pytest.raises(KernelError, match="no kernel takes these experts: experts of 24 x 128"):
        choose_expert_kernels([refused], 16)
    assert not asked and choose_expert_kernels([], 16) == []

"""Trials of the kernels of a mixture of experts: what passes, and which faults do not, in a child process too."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_local.kernels import expert_gemm, trial_worker
from dflash_local.kernels.expert_check import RouteCheck
from dflash_local.kernels.expert_gemm import DownConfig, ExpertConfig, GateUpConfig, Mixture
from dflash_local.kernels.experts import ExpertWeight
from dflash_local.kernels.fragment_packing import PLAIN, FragmentFormat, FragmentWeight
from dflash_local.kernels.kernel_record import source_digest
from dflash_local.kernels.kernel_trial import KernelTrial, TrialRequest
from dflash_local.kernels.product_trials import ExpertTrial, RouteTrial, trial_of
from dflash_local.kernels.random_weight import random_weight
from dflash_local.kernels.split_kv import DeviceProperties
from tests import expert_references
from tests.host_cuda import HostKernel, compiler
from tests.quantized_weights import fp8, int4, int8, mxfp4, nvfp4

CPU = torch.device("cpu")
UP, DOWN = GateUpConfig(1, 2, 1, 2), DownConfig(2, 1, 2)
MIXTURES = (Mixture(5, 2), Mixture(6, 3, 2, False), Mixture(4, 2, 1, clamp=(1.0, 1.702)))
FORMATS = [
    PLAIN,
    FragmentWeight.of(int4(16, 128, 32, True)).format,
    FragmentWeight.of(int8(16, 128, 128)).format,
    FragmentWeight.of(fp8(16, 128, (16, 128))).format,
    FragmentWeight.of(mxfp4(16, 128)).format,
    FragmentWeight.of(nvfp4(16, 128)).format,
]


def weight_of(kind: FragmentFormat, experts: int, n: int, k: int, biased: bool = False) -> ExpertWeight:
    bias = torch.zeros(experts, n).bfloat16() if biased else None
    return ExpertWeight(random_weight(kind, (experts * n, k), CPU), experts, bias)


def trial(config: ExpertConfig, mixture: Mixture = MIXTURES[0], kind: FragmentFormat = PLAIN, rows: int = 8) -> ExpertTrial:  # fmt: skip  # noqa: E501
    return trial_of(weight_of(kind, mixture.all_experts, 64, 128, mixture.clamp is not None), mixture, config, rows)


@pytest.fixture
def references(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("route", "gate_up", "down"):
        monkeypatch.setattr(expert_gemm, name, getattr(expert_references, name))


def ask(asked: KernelTrial) -> object:
    """What the child answers, without one."""
    return json.loads(trial_worker.answer(pickle.dumps(TrialRequest.of(CPU, (asked,), False))))


def test_the_references_pass_in_every_format(references: None) -> None:
    for mixture, biased in zip(MIXTURES, (False, True, True)):
        assert ask(RouteTrial(mixture, biased)) == {"verdict": "right"}
    configs: tuple[ExpertConfig, ...] = (UP, DOWN)
    for kind, mixture, config in zip(FORMATS, cycle(MIXTURES), cycle(configs)):
        assert ask(trial(config, mixture, kind)) == {"verdict": "right"}, kind
    assert ask(trial(DOWN, rows=16)) == {"verdict": "right"}


@pytest.mark.skipif(sys.platform != "linux" or compiler() is None, reason="g++ on Linux stands in for the card")
def test_the_kernels_own_sources_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_gemm, "make_kernel", lambda source, options, *_: HostKernel.of(source, options))
    monkeypatch.setattr(expert_gemm, "_kernels", {})
    monkeypatch.setattr(expert_gemm, "device_properties", lambda device: DeviceProperties(99 * 1024, 3, (9, 0)))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    expert_gemm._route_kernel.cache_clear()
    clamped, gated = MIXTURES[2], MIXTURES[1]
    shared = DownConfig(2, 1, 2, shares_tiles=True)
    for each in (RouteTrial(gated, False), trial(UP, clamped, FORMATS[4]), trial(shared, clamped)):
        assert each.passes(CPU), each
    expert_gemm._route_kernel.cache_clear()


def behind(tensor: torch.Tensor) -> torch.Tensor:
    """The number behind a contiguous one's last."""
    return tensor.as_strided((1,), (1,), tensor.storage_offset() + tensor.numel())


UP_FAULTS: dict[str, Callable[[torch.Tensor], object]] = {
    "one feature of one slot": lambda out: out[1, 1, 5].add_(out.float().std()),
    "not written": lambda out: out[-1, -1, -1].fill_(float("nan")),
    "a row's slots exchanged": lambda out: out[0].copy_(out[0].flip(0).clone()),
    "behind the last row": lambda out: behind(out).zero_(),
    "before the first row": lambda out: out.as_strided((1,), (1,), out.storage_offset() - 1).zero_(),
}


@pytest.mark.parametrize("fault", [*UP_FAULTS, "another expert", "an unstable sum", "no clamp", "no bias"])
def test_a_wrong_first_product_does_not_pass(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right, calls, asked = expert_references.gate_up, [0], trial(UP, MIXTURES[2])

    def planted(*given: Any) -> None:
        x, weight, mixture, words, out, config = given
        calls[0] += 1
        if fault == "another expert":
            words = words.clone()
            words[1] = (words[1] + 1) % 4
        if fault == "no clamp":
            mixture = mixture._replace(clamp=(1e9, 1.702))
        if fault == "no bias":
            weight = ExpertWeight(weight.weight, weight.experts)
        right(x, weight, mixture, words, out, config)
        if fault in UP_FAULTS:
            UP_FAULTS[fault](out)
        elif fault == "an unstable sum" and calls[0] % 2:
            out.mul_(1 + 2**-7)

    monkeypatch.setattr(expert_gemm, "gate_up", planted)
    assert not asked.passes(CPU) and calls[0]


DOWN_FAULTS: dict[str, Callable[[torch.Tensor], object]] = {
    "one feature of one row": lambda out: out[1, 9].add_(out.float().std()),
    "not written": lambda out: out[-1, -1].fill_(float("nan")),
    "beside the result": lambda out: out.as_strided((1,), (1,), out.storage_offset() + out.shape[1]).zero_(),
}


@pytest.mark.parametrize("fault", [*DOWN_FAULTS, "another expert", "equal weights", "the residual left out"])
def test_a_wrong_second_product_does_not_pass(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right, calls, asked = expert_references.down, [0], trial(DOWN, MIXTURES[1], FORMATS[1])

    def planted(*given: Any) -> None:
        x, weight, mixture, (weights, experts, words), out, config, residual = given
        calls[0] += 1
        if fault == "another expert":
            words = words.clone()
            words[1] = (words[1] + 1) % 6
        if fault == "equal weights":
            weights = weights.mean(1, keepdim=True).expand_as(weights)
        if fault == "the residual left out":
            residual = None
        right(x, weight, mixture, (weights, experts, words), out, config, residual)
        if fault in DOWN_FAULTS:
            DOWN_FAULTS[fault](out)

    monkeypatch.setattr(expert_gemm, "down", planted)
    assert not asked.passes(CPU) and calls[0]


Buffers = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # weights, experts, list, distinct
ROUTE_FAULTS: dict[str, Callable[[Buffers], object]] = {
    "another expert": lambda made: made[1][0, :2].copy_(made[1][0, :2].flip(0).clone()),
    "weights that are not rounded": lambda made: made[0][-1].mul_(1.02),
    "a list in another order": lambda made: made[2][1:3].copy_(made[2][1:3].flip(0).clone()),
    "a count too many": lambda made: made[3].add_(1),
    "behind the weights": lambda made: (
        made[0].as_strided((1,), (1,), made[0].storage_offset() + made[0].numel()).zero_()
    ),
    "behind the list": lambda made: made[2].as_strided((1,), (1,), made[2].storage_offset() + made[2].numel()).zero_(),
}


@pytest.mark.parametrize("fault", [*ROUTE_FAULTS, "no bias", "ties to the last"])
def test_a_wrong_router_does_not_pass(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mixture = Mixture(12, 3, 1)

    def planted(*given: Any) -> None:
        logits, mixture, weights, experts, words, bias, distinct = given
        if fault == "ties to the last" and bool((logits == 0).all()):
            logits = logits + torch.arange(logits.shape[1]) * 2**-12
        bias = None if fault == "no bias" else bias
        expert_references.route(logits, mixture, weights, experts, words, bias, distinct)
        if fault in ROUTE_FAULTS:
            ROUTE_FAULTS[fault]((weights, experts, words, distinct))

    biased = fault == "no bias"
    monkeypatch.setattr(expert_gemm, "route", expert_references.route)
    assert RouteCheck(mixture, biased, CPU).passes(16)
    monkeypatch.setattr(expert_gemm, "route", planted)
    assert not RouteCheck(mixture, biased, CPU).passes(16)


@pytest.mark.parametrize("name", expert_gemm.SOURCES)
def test_the_source_of_a_record_is_the_experts_too(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, planted = source_digest(), tmp_path / "planted.cu"
    planted.write_text(expert_gemm.SOURCES[name].read_text(encoding="utf-8") + "\n")
    monkeypatch.setitem(expert_gemm.SOURCES, name, planted)
    assert source_digest() != before

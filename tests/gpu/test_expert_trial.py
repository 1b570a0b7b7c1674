"""Kernels of a mixture of experts that are wrong, fault or hang are found by the child process, and harm it alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from dflash_local.config.features import ClampedSwiGLU
from dflash_local.errors import KernelError
from dflash_local.kernels import expert_gemm, kernel_trial
from dflash_local.kernels.expert_gemm import Mixture
from dflash_local.kernels.experts import ExpertWeight
from dflash_local.kernels.fragment_packing import FragmentFormat
from dflash_local.kernels.kernel_record import KernelRecord, record_of
from dflash_local.kernels.random_weight import random_weight
from dflash_local.kernels.timing import KernelTimer
from dflash_local.models.fused.expert_choice import MixtureLayer, choose_expert_kernels
from dflash_local.models.fused.routed_experts import Matrices
from tests.kernels.few_rows import FORMATS

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
HIDDEN, SIZE = 1024, 256
INT4 = FORMATS["int4"]
NAMES = ("bfloat16", "int4", "int4, groups of 32 with zeros", "int8, rows", "fp8", "MXFP4", "NVFP4")
MIXTURES = (Mixture(32, 4, 2), Mixture(256, 8, 1), Mixture(64, 8, 0, False), Mixture(32, 4, 0, clamp=(7.0, 1.702)))
DIFFERENT = {
    "wrong": "{{ if (threadIdx.x < rows) {out}[threadIdx.x] = 0; }}",
    "fault": "{{ *(volatile int*)0 = rows; }}",
    "hang": "{{ while (((volatile const int*)list)[0] != -1) {{}} }}",
}
PRODUCTS = {"expert_gate_up": "intermediate", "expert_down": "out", "route": "experts"}


def planted(name: str, verdict: str) -> str:
    """A source whose kernel takes what the real one takes."""
    real = expert_gemm.SOURCES[name].read_text(encoding="utf-8")
    (arguments,) = re.findall(rf"\n{name}\((.*?)\) \{{", real, re.DOTALL)
    types = "typedef unsigned short u16; typedef unsigned char u8; typedef long long i64;"
    body = DIFFERENT[verdict].format(out=PRODUCTS[name])
    return f'{types}\nextern "C" __global__ void {name}({arguments}) {body}\n'


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_trial, "TRIAL_S", 15.0)
    monkeypatch.setattr(kernel_trial, "MAX_FAILURES", 2)
    monkeypatch.setattr(expert_gemm, "_kernels", {})
    expert_gemm._route_kernel.cache_clear()


def layer(kind: FragmentFormat = INT4, mixture: Mixture = MIXTURES[0]) -> MixtureLayer:
    def weight(n: int, k: int) -> ExpertWeight:
        experts = mixture.all_experts
        bias = torch.zeros(experts, n, device="cuda", dtype=BF16) if mixture.clamp else None
        return ExpertWeight(random_weight(kind, (experts * n, k), torch.device("cuda")), experts, bias)

    activation = ClampedSwiGLU(limit=7.0, alpha=1.702) if mixture.clamp else "silu"
    return MixtureLayer(
        mixture, Matrices(weight(2 * SIZE, HIDDEN), weight(HIDDEN, SIZE)), activation, bool(mixture.clamp)
    )


def record() -> KernelRecord:
    return record_of(torch.device("cuda", 0))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("verdict", DIFFERENT)
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_planted_fault_is_found_and_the_engine_gives_way(
    name: str, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / f"{name}.cu"
    source.write_text(planted(name, verdict))
    monkeypatch.setitem(expert_gemm.SOURCES, name, source)
    with pytest.raises(KernelError, match="no kernel for these experts is known to be right"):
        choose_expert_kernels([layer()], 16)
    verdicts = record().verdicts
    assert {verdicts[kernel] for kernel in verdicts if kernel.startswith(name)} - {"untried"} == {verdict}
    assert {verdicts[kernel] for kernel in verdicts if not kernel.startswith(name)} == {"right"}
    assert float(torch.ones(4, device="cuda").sum()) == 4, "this process goes on"


@pytest.mark.timeout(600)
def test_every_kernel_of_each_format_is_right_and_a_second_load_neither_tries_nor_chooses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = [*(layer(FORMATS[name]) for name in NAMES), *(layer(mixture=mixture) for mixture in MIXTURES[1:])]
    first = choose_expert_kernels(layers, 16)
    assert set(record().verdicts.values()) == {"right"}
    assert len(record().choices) == 4 * len(layers)
    monkeypatch.setattr(kernel_trial, "WorkerProcess", None)
    monkeypatch.setattr(KernelTimer, "fastest", None)
    monkeypatch.setattr(KernelTimer, "agrees", lambda *_: True)  # tests beside this one take time of the card
    assert choose_expert_kernels(layers, 16) == first

"""CUDA kernels that are wrong, fault or hang are found by the child process, and this process goes on without them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from dflash_local.kernels import fragment_gemm, kernel_trial
from dflash_local.kernels.fragment_packing import Codable, FragmentWeight
from dflash_local.kernels.kernel_record import record_of
from dflash_local.kernels.timing import KernelTimer
from dflash_local.models.fused.kernel_choice import choose_configs, without_kernel
from dflash_local.models.fused.linear import GateUp, Linear, finish
from tests.kernels import few_rows
from tests.quantized_weights import fp8, fp8_rows, int4, int8, mxfp4, nvfp4

pytestmark = pytest.mark.gpu

TYPES = "typedef unsigned short u16; typedef unsigned char u8; typedef long long i64;"
PLANTED = {
    "wrong": "{ if (threadIdx.x < rows) out[threadIdx.x * out_stride] = 0x3f80; }",
    "fault": "{ *(volatile int*)0 = rows; }",
    "hang": "{ while (((volatile int*)counters)[0] == 0) {} }",
}


def planted(verdict: str) -> str:
    """A source whose kernel takes what the real one takes."""
    real = fragment_gemm.SOURCE.read_text(encoding="utf-8")
    (arguments,) = re.findall(r"\nfragment_gemm\((.*?)\) \{", real, re.DOTALL)
    return f'{TYPES}\nextern "C" __global__ void fragment_gemm({arguments}) {PLANTED[verdict]}\n'


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_trial, "TRIAL_S", 15.0)
    monkeypatch.setattr(kernel_trial, "MAX_FAILURES", 2)


def weights(n: int = 1024, k: int = 2048, group: int = 128) -> list[Codable]:
    """Of every format."""
    return [
        *(int4(n, k, group, zeros, device="cuda") for group, zeros in ((group, False), (32, True))),
        *(int8(n, k, group, zeros, device="cuda") for group, zeros in ((k, False), (32, True))),
        fp8(n, k, device="cuda"),
        fp8_rows(n, k, device="cuda"),
        mxfp4(n, k, device="cuda"),
        nvfp4(n, k, device="cuda"),
    ]


def check_product(layer: Linear, wide: torch.Tensor) -> None:
    """It is what the weight stands for."""
    x = few_rows.random(16, wide.shape[1], device="cuda")
    want = x.double() @ wide.double().t()
    got = layer(x, torch.empty(16, len(wide), device="cuda", dtype=torch.bfloat16))
    assert few_rows.off(got, want) < 5e-3


@pytest.mark.parametrize("verdict", PLANTED)
def test_a_planted_fault_is_found_and_replaced(verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "fragment_gemm.cu"
    source.write_text(planted(verdict))
    monkeypatch.setattr(fragment_gemm, "SOURCE", source)
    layer = Linear(int4(1024, 2048, 128, device="cuda"))
    wide = layer.weight.dequantized()
    finish([layer])
    choose_configs([layer], 16)
    record = record_of(torch.device("cuda", 0))
    assert set(record.verdicts.values()) == {verdict, "untried"}
    assert layer.config is None and len(without_kernel([layer])) == 1
    check_product(layer, wide)


@pytest.mark.timeout(600)
def test_every_kernel_of_each_format_is_right_and_a_second_load_neither_tries_nor_chooses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = [Linear(weight) for weight in weights()] + [GateUp(weight) for weight in weights()]
    layers.append(Linear(FragmentWeight.of(weights()[0]).with_tail(few_rows.random(64, 2048, device="cuda"))))
    finish(layers)
    choose_configs(layers, 16)
    first = [layer.config for layer in layers]
    assert None not in first
    record = record_of(torch.device("cuda", 0))
    assert set(record.verdicts.values()) == {"right"} and len(record.choices) == len(layers)
    assert record.path is not None and record.path.is_file()
    monkeypatch.setattr(kernel_trial, "WorkerProcess", None)
    monkeypatch.setattr(KernelTimer, "fastest", None)
    for layer in layers:
        layer.config = None
    choose_configs(layers, 16)
    assert [layer.config for layer in layers] == first

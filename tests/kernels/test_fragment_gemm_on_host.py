"""The few-row kernel's own source, run on the CPU thread by thread: exact for one-hot rows, right for all others."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch

from dflash_local.kernels import fragment_gemm
from dflash_local.kernels.fragment_gemm import FragmentGemmConfig
from dflash_local.kernels.fragment_packing import Codable, FragmentFormat, FragmentWeight
from dflash_local.kernels.skinny_gemm import swiglu_reference
from dflash_local.kernels.split_kv import DeviceProperties
from tests.host_cuda import HostKernel, compiler
from tests.kernels.few_rows import empty, off, random
from tests.quantized_weights import fp8, fp8_rows, gguf, int4, int8, mxfp4, nvfp4

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or compiler() is None, reason="g++ on Linux stands in for the card"
)
ROUNDING = 3e-3  # of results to bfloat16, as a row's norm

Kernels = list[HostKernel]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """All that have been launched, on a card that runs six blocks at a time."""
    made: dict[object, HostKernel] = {}

    def kernel(
        device: torch.device,
        kind: FragmentFormat,
        in_features: int,
        config: FragmentGemmConfig,
        rows: int,
        paired: bool,
    ) -> HostKernel:
        key = kind, in_features, config, rows, paired
        if key not in made:
            options = fragment_gemm.compile_options(kind, in_features, config, rows, paired)
            made[key] = HostKernel.of(fragment_gemm.source_text(fragment_gemm.SOURCE), options)
            found.append(made[key])
        return made[key]

    found: Kernels = []
    monkeypatch.setattr(fragment_gemm, "_kernel", kernel)
    monkeypatch.setattr(fragment_gemm, "runs_kernels", lambda x: True)
    monkeypatch.setattr(fragment_gemm, "device_properties", lambda device: DeviceProperties(99 * 1024, 6, (9, 0)))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return found


def one_hot(rows: int, in_features: int) -> torch.Tensor:
    """The first and the last column among others, and a row of zeros."""
    x = torch.zeros(rows, in_features, dtype=torch.bfloat16)
    x[torch.arange(rows), (torch.arange(rows) * 37 + in_features - 1) % in_features] = 1
    x[rows // 2] = 0
    return x


WEIGHTS: dict[str, Callable[[], Codable]] = {
    "int4": lambda: int4(72, 384, 128),
    "int4, groups of 32 with zeros, float32": lambda: int4(72, 160, 32, True, torch.float32),
    "int4, rows of two steps": lambda: int4(48, 160, 160, True),
    "int8, groups of 64": lambda: int8(72, 192, 64),
    "int8, rows with zeros": lambda: int8(72, 288, 288, True, torch.float16),
    "int8, rows": lambda: int8(72, 288, 288, scales=torch.float32),
    "fp8": lambda: fp8(80, 288, (16, 128), scales=torch.bfloat16),
    "fp8, rows": lambda: fp8_rows(72, 288),
    "MXFP4": lambda: mxfp4(72, 288),
    "NVFP4": lambda: nvfp4(72, 288),
    "NVFP4 without scales of rows": lambda: nvfp4(72, 160, row_scales=False),
    "Q4_1": lambda: gguf("Q4_1", 72, 288),
    "Q5_0": lambda: gguf("Q5_0", 72, 160),
    "Q5_1": lambda: gguf("Q5_1", 72, 288),
    "Q4_K": lambda: gguf("Q4_K", 72, 512),
    "Q5_K": lambda: gguf("Q5_K", 72, 256),
    "Q6_K": lambda: gguf("Q6_K", 72, 512),
    "IQ4_NL": lambda: gguf("IQ4_NL", 72, 160),
    "IQ4_XS": lambda: gguf("IQ4_XS", 72, 512),
}


# Gated products of int8 by rows are below; one NVFP4 differs from the other by a factor that is one; the others go the
# way of two that stay.
LIKE_ANOTHER = ("int4", "int8, groups of 64", "int8, rows", "NVFP4 without scales of rows", "Q5_1", "Q5_K", "IQ4_NL")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LIKE_ANOTHER else ()) for name in WEIGHTS]
)
def test_products_with_a_tail_and_a_shared_k_are_right(name: str, kernels: Kernels) -> None:
    weight = WEIGHTS[name]()
    (n, k), tail = weight.shape, 40
    below = random(tail, k, seed=3) * weight.dequantized().std().bfloat16()
    packed = FragmentWeight.of(weight).with_tail(below.clone())
    wide = torch.cat((weight.dequantized(), below.float()))
    config, rows = FragmentGemmConfig(1, 2, 1, 3, split_k=2), 11
    x, residual = random(rows, k), random(rows, n + tail, seed=1)
    want = x.double() @ wide.double().t()
    out = fragment_gemm.linear(x, packed, empty(rows, n + tail), config)
    for part in (slice(n), slice(n, None)):
        assert off(out[:, part], want[:, part]) < ROUNDING
    hot = one_hot(rows, k)
    picked = fragment_gemm.linear(hot, packed, empty(rows, n + tail), config)
    assert torch.equal(picked, (hot.float() @ wide.t()).bfloat16())
    (kernel,) = kernels
    around = empty(rows, n + tail + 16)
    for kernel.seed in (1, 2):
        fragment_gemm._sums[x.device][-1].fill_(float("nan"))
        inner = around[:, 8:-8].copy_(residual)
        fragment_gemm.linear(x, packed, inner, config, inner)
        assert torch.equal(inner, (out.float() + residual.float()).bfloat16()), "whatever runs first"
        assert around[:, :8].isnan().all() and around[:, -8:].isnan().all()
    assert not fragment_gemm.zero_counters(x.device).any(), "as they were found"


def test_gated_products_of_any_number_of_rows_are_right(kernels: Kernels) -> None:
    weight = int8(96, 288, 288, scales=torch.float32)
    packed, x, config = FragmentWeight.of(weight), random(21, weight.shape[1]), FragmentGemmConfig(2, 1, 2, 2)
    want = swiglu_reference(x.double(), weight.dequantized().double(), torch.empty(21, 48).double())
    out = fragment_gemm.swiglu(x, packed, empty(21, 48), config)
    assert off(out, want) < 1e-2
    assert torch.equal(fragment_gemm.swiglu(x[4:5], packed, empty(1, 48), config), out[4:5]), "a row alone"
    for kernel in kernels:
        kernel.seed = 3
    assert torch.equal(fragment_gemm.swiglu(x, packed, empty(21, 48), config), out), "whatever runs first"


def test_plain_rows_are_multiplied_where_they_lie(kernels: Kernels) -> None:
    n, k, rows, config = 75, 288, 11, FragmentGemmConfig(1, 2, 1, 3, split_k=2)
    memory = torch.full((n + 32, k), float("nan"), dtype=torch.bfloat16)  # nothing behind a weight may be read
    memory[:n] = random(n, k)
    weight, x, residual = FragmentWeight.plain(memory[:n]), random(rows, k, seed=1), random(rows, n + 5, seed=2)
    want = x.double() @ memory[:n].double().t()
    wide = empty(rows, n + 5)
    out = fragment_gemm.linear(x, weight, wide[:, :n], config)
    assert off(out, want) < ROUNDING and wide[:, n:].isnan().all()
    assert torch.equal(fragment_gemm.linear(x[4:5], weight, empty(1, n), config), out[4:5]), "a row alone"
    added = fragment_gemm.linear(x, weight, residual[:, :n].clone(), config, residual[:, :n].clone())
    assert torch.equal(added, (out.float() + residual[:, :n].float()).bfloat16())
    bias = random(n, seed=3)
    assert torch.equal(fragment_gemm.linear(x, weight, empty(rows, n), config, None, bias), out + bias)
    both = fragment_gemm.linear(x, weight, residual[:, :n].clone(), config, residual[:, :n].clone(), bias)
    assert torch.equal(both, added + bias)
    hot = one_hot(rows, k)
    assert torch.equal(fragment_gemm.linear(hot, weight, empty(rows, n), config), hot @ memory[:n].t())


def test_every_unit_and_every_tile_of_a_tail_has_its_block(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, below = int8(200, 160, 160), random(72, 160)
    packed = FragmentWeight.of(weight).with_tail(below.clone())
    x = one_hot(5, 160)
    want = (x.float() @ torch.cat((weight.dequantized(), below.float())).t()).bfloat16()
    for sms in (1, 3, 6, 12, 40):
        card = DeviceProperties(99 * 1024, sms, (9, 0))
        monkeypatch.setattr(fragment_gemm, "device_properties", lambda device, card=card: card)
        for seed in range(4):
            for kernel in kernels:
                kernel.seed = seed
            assert torch.equal(fragment_gemm.linear(x, packed, empty(5, 272), FragmentGemmConfig(2, 1, 1)), want), (
                sms,
                seed,
            )


def test_no_scale_of_mxfp4_leaves_the_range_of_the_products(kernels: Kernels) -> None:
    weight = mxfp4(16, 256, scales=(0, 189))
    got = fragment_gemm.linear(
        torch.eye(256).bfloat16()[:64], FragmentWeight.of(weight), empty(64, 16), FragmentGemmConfig(2)
    )
    assert torch.equal(got, weight.dequantized().bfloat16()[:, :64].t())

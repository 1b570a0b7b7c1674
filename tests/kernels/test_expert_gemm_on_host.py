"""The kernels of a mixture of experts, their own sources, run on the CPU thread by thread."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch

from dflash_local.kernels import expert_gemm, fragment_gemm
from dflash_local.kernels.expert_gemm import DownConfig, GateUpConfig, Mixture
from dflash_local.kernels.experts import ExpertWeight
from dflash_local.kernels.fragment_packing import Codable, FragmentWeight
from dflash_local.kernels.split_kv import DeviceProperties
from tests.host_cuda import HostKernel, compiler
from tests.kernels.few_rows import empty, off, random
from tests.quantized_weights import fp8, fp8_rows, gguf, int4, int8, mxfp4, nvfp4

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or compiler() is None, reason="g++ on Linux stands in for the card"
)
CPU = torch.device("cpu")
ROUNDING, GATED_ROUNDING = 3e-3, 1e-2  # of results to bfloat16, as a row's norm
SIZE, HIDDEN = 64, 160  # neither a multiple of 128: the last step of both products is not full


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[HostKernel]:
    """All that have been launched, on a card of seven multiprocessors."""
    found: list[HostKernel] = []

    def make(source: str, options: list[str], name: str, threads: int, shared_bytes: int, device: object) -> HostKernel:
        found.append(HostKernel.of(source, options))
        return found[-1]

    monkeypatch.setattr(expert_gemm, "make_kernel", make)
    monkeypatch.setattr(expert_gemm, "_kernels", {})
    expert_gemm._route_kernel.cache_clear()
    monkeypatch.setattr(expert_gemm, "device_properties", lambda device: DeviceProperties(99 * 1024, 7, (9, 0)))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return found


class Routed:
    """Buffers of a few rows, full of what nobody should read."""

    def __init__(self, mixture: Mixture, rows: int) -> None:
        self.weights = torch.full((rows, mixture.slots), float("nan"))
        self.experts = torch.full((rows, mixture.slots), -7, dtype=torch.int32)
        self.list = torch.full((mixture.list_words,), -7, dtype=torch.int32)
        self.distinct = torch.full((1,), -7, dtype=torch.int32)
        self.mixture = mixture

    def route(self, logits: torch.Tensor, bias: torch.Tensor | None = None) -> Routed:
        expert_gemm.route(logits, self.mixture, self.weights, self.experts, self.list, bias, self.distinct)
        return self

    def listed(self) -> dict[int, list[int]]:
        """The slots of each expert that occurs."""
        count, base, words = int(self.list[0]), self.mixture.all_experts, self.list.tolist()
        starts = words[1 + base : 2 + base + count]
        return {words[1 + i]: words[2 + 2 * base + starts[i] : 2 + 2 * base + starts[i + 1]] for i in range(count)}


def wanted_routing(logits: torch.Tensor, mixture: Mixture) -> tuple[torch.Tensor, torch.Tensor]:
    order = torch.sort(torch.softmax(logits[:, : mixture.experts].float(), -1), dim=-1, descending=True, stable=True)
    weights = order.values[:, : mixture.top_k]
    weights = weights / weights.sum(-1, keepdim=True) if mixture.normed else weights
    experts = order.indices[:, : mixture.top_k]
    if mixture.shared:
        gate = torch.sigmoid(logits[:, -1:].float()) if mixture.shared == 2 else torch.ones(len(logits), 1)
        weights, experts = torch.cat((weights, gate), 1), torch.cat((experts, experts[:, :1] * 0 + mixture.experts), 1)
    return weights.bfloat16().float(), experts.int()


@pytest.mark.parametrize(
    ("mixture", "rows"),
    [(Mixture(40, 4), 16), (Mixture(128, 8, 2), 5), (Mixture(512, 10, 1, False), 16), (Mixture(7, 7), 3)],
)
def test_rows_take_the_likeliest_experts_and_the_list_holds_each_slot_once(
    mixture: Mixture, rows: int, kernels: list[HostKernel]
) -> None:
    logits = random(rows, mixture.experts + (mixture.shared == 2), seed=2)
    logits[0, : mixture.experts] = 0.5  # all are as likely
    weights, experts = wanted_routing(logits, mixture)
    for seed in (0, 1):
        found = Routed(mixture, rows)
        for kernel in kernels:
            kernel.seed = seed
        found.route(logits)
        assert torch.equal(found.experts, experts)
        assert torch.allclose(found.weights, weights, rtol=1e-2, atol=0)
        assert torch.equal(found.weights, found.weights.bfloat16().float())
        slots: dict[int, list[int]] = {expert: [] for expert in sorted(set(experts.flatten().tolist()))}
        for slot, expert in enumerate(experts.flatten().tolist()):
            slots[expert].append(slot)
        assert found.listed() == slots and list(found.listed()) == list(slots)
        assert int(found.distinct) == len(slots) - (mixture.shared > 0)


def test_a_bias_of_the_router_counts(kernels: list[HostKernel]) -> None:
    mixture, logits, bias = Mixture(8, 2), random(3, 8), torch.zeros(8).bfloat16()
    bias[5] = 20
    found = Routed(mixture, 3).route(logits, bias)
    assert found.experts[:, 0].tolist() == [5, 5, 5] and int(found.distinct) == len(found.listed())


FORMATS: dict[str, Callable[[int, int], Codable] | None] = {
    "bfloat16": None,
    "int4": lambda n, k: int4(n, k, k),
    "int4, groups of 32 with zeros": lambda n, k: int4(n, k, 32, True),
    "int8, rows": lambda n, k: int8(n, k, k, scales=torch.float32),
    "fp8": lambda n, k: fp8(n, k, (16, 128), scales=torch.bfloat16),
    "fp8, rows": lambda n, k: fp8_rows(n, k),
    "MXFP4": lambda n, k: mxfp4(n, k),
    "NVFP4": lambda n, k: nvfp4(n, k),
    "Q4_1": lambda n, k: gguf("Q4_1", n, k),
    "Q4_K": lambda n, k: gguf("Q4_K", n, k),
    "Q6_K": lambda n, k: gguf("Q6_K", n, k),
}


def matrices(name: str, experts: int, n: int, k: int, bias: bool) -> tuple[ExpertWeight, torch.Tensor]:
    """Of all experts, and what they stand for [experts, n, k] in float32."""
    make = FORMATS[name]
    plain = random(experts * n, k, seed=n) * k**-0.5
    coded = None if make is None else make(experts * n, k)
    biases = random(experts, n, seed=n + 1) if bias else None
    if coded is None:
        return ExpertWeight(plain, experts, biases), plain.float().view(experts, n, k)
    return ExpertWeight(FragmentWeight.of(coded), experts, biases), coded.dequantized().view(experts, n, k)


def gated(x: torch.Tensor, wide: torch.Tensor, bias: torch.Tensor | None, routed: Routed) -> torch.Tensor:
    """[M, S, I] in float64."""
    products = torch.einsum("mk,msnk->msn", x.double(), wide.double()[routed.experts.long()])
    if bias is not None:
        products += bias.double()[routed.experts.long()]
    gate, up = products.chunk(2, -1)
    if routed.mixture.clamp is None:
        return torch.nn.functional.silu(gate) * up
    limit, alpha = routed.mixture.clamp
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


# Without codes, with zero points and with scales of scales; test_fragment_gemm_on_host decodes every format.
LIKE_ANOTHER = ("int4", "int8, rows", "fp8", "fp8, rows", "MXFP4", "NVFP4", "Q4_1", "Q4_K")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LIKE_ANOTHER else ()) for name in FORMATS]
)
def test_products_are_right_and_a_row_has_its_bits_among_any_others(name: str, kernels: list[HostKernel]) -> None:
    mixture, rows = Mixture(5, 2, 1), 13  # more than eight rows of the shared expert, and of others
    clamped = name in ("MXFP4", "bfloat16")
    if clamped:
        mixture = mixture._replace(clamp=(1.0, 1.702))
    size, hidden = (256, 256) if name.endswith("_K") else (SIZE, HIDDEN)
    up_weight, up_wide = matrices(name, 6, 2 * size, hidden, bias=clamped)
    down_weight, down_wide = matrices(name, 6, hidden, size, bias=clamped)
    logits = random(rows, 5, seed=4)
    logits[:, 2] = 9  # taken by every row; nobody takes the last
    logits[:, 4] = -9
    x, residual = random(rows, hidden, seed=5), random(rows, hidden, seed=6)
    up_config = GateUpConfig(2, 2, 1, 2)

    def run(
        x: torch.Tensor,
        logits: torch.Tensor,
        residual: torch.Tensor,
        seed: int,
        down_config: DownConfig = DownConfig(3, 2, 2),  # noqa: B008  # it is frozen
    ) -> tuple[Routed, torch.Tensor, torch.Tensor]:
        for kernel in kernels:
            kernel.seed = seed
        routed = Routed(mixture, len(x)).route(logits)
        between = empty(len(x), mixture.slots, size)
        expert_gemm.gate_up(x, up_weight, mixture, routed.list, between, up_config)
        taken = routed.weights, routed.experts, routed.list
        out = residual.clone()
        expert_gemm.down(between, down_weight, mixture, taken, out, down_config, out)
        return routed, between, out

    routed, between, out = run(x, logits, residual, 0)
    assert off(between, gated(x, up_wide, up_weight.bias, routed)) < GATED_ROUNDING
    results = torch.einsum("msk,msnk->msn", between.double(), down_wide.double()[routed.experts.long()])
    if down_weight.bias is not None:
        results += down_weight.bias.double()[routed.experts.long()]
    want = (results * routed.weights.double().unsqueeze(2)).sum(1) + residual.double()
    assert off(out, want) < 2 * ROUNDING
    again = run(x, logits, residual, 3)
    assert torch.equal(again[1], between) and torch.equal(again[2], out), "whatever runs first"
    order = torch.tensor([7, 0, 12, 3])
    other = run(x[order], logits[order], residual[order], 0)
    assert torch.equal(other[1], between[order]) and torch.equal(other[2], out[order]), "among other rows"
    for seed in (0, 2) if clamped else ():  # ten tiles for seven blocks: most are shared
        assert torch.equal(run(x, logits, residual, seed, DownConfig(3, 2, 2, shares_tiles=True))[2], out)
        assert not fragment_gemm.zero_counters(x.device).any(), "as they were found"

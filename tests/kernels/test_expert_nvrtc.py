"""The kernels of a mixture of experts compile for every card, within its shared memory and its registers."""

from __future__ import annotations

import re

import pytest
import torch

from dflash_local.kernels import expert_gemm, nvrtc
from dflash_local.kernels.expert_gemm import Mixture
from dflash_local.kernels.experts import ExpertWeight
from dflash_local.kernels.fragment_gemm import source_text
from dflash_local.kernels.fragment_packing import PLAIN, FragmentFormat, FragmentWeight
from dflash_local.kernels.skinny_gemm import RESERVED_SHARED_MEMORY
from tests.cuda_cards import SHARED_MEMORY
from tests.kernels.few_rows import FORMATS

# Of Qwen3.5-35B-A3B, Qwen3-Coder-30B-A3B, Qwen3-Coder-Next, Qwen3.5-122B-A10B and gpt-oss: with H and I.
LAYERS = (
    (Mixture(256, 8, 2), 2048, 512),
    (Mixture(128, 8), 2048, 768),
    (Mixture(512, 10, 2), 2048, 512),
    (Mixture(256, 8, 2), 3072, 1024),
    (Mixture(32, 4, clamp=(7.0, 1.702)), 2880, 2880),
)


def on_meta(kind: FragmentFormat, mixture: Mixture, features: int, columns: int) -> ExpertWeight:
    """All experts' matrices, without memory."""
    shape = torch.Size((mixture.all_experts * features, columns))
    bias = torch.empty(mixture.all_experts, features, device="meta") if mixture.clamp else None
    if kind == PLAIN:
        return ExpertWeight(torch.empty(shape, dtype=torch.bfloat16, device="meta"), mixture.all_experts, bias)
    codes = torch.empty(-(-shape[0] // 16), -(-columns // 128), kind.step_words, dtype=torch.int32, device="meta")
    packed = FragmentWeight(codes, torch.empty(0, device="meta"), None, None, shape, kind, torch.bfloat16)
    return ExpertWeight(packed, mixture.all_experts, bias)


def check(compiler: nvrtc.Nvrtc, card: int, name: str, layer: tuple[Mixture, int, int], rows: int, most: int) -> None:
    """Some configurations of both products."""
    (mixture, hidden, size), memory = layer, SHARED_MEMORY[card] * 1024
    for gate_up, sizes in ((True, (2 * size, hidden)), (False, (hidden, size))):
        weight = on_meta(FORMATS[name], mixture, *sizes)
        source = source_text(expert_gemm.SOURCES["expert_gate_up" if gate_up else "expert_down"])
        configs = list(expert_gemm.candidates(gate_up, weight, mixture, rows, memory))
        assert configs or rows > 8, "eight rows fit every card"
        for config in configs[:most]:
            options = expert_gemm.spec_of(weight, mixture, config, rows).options
            compiled, log = compiler.compile(source, [f"--gpu-architecture=sm_{card}", "--ptxas-options=-v", *options])
            assert compiled.startswith(b"\x7fELF") and "warning" not in log and "bytes smem" not in log, log
            spilled = [int(number) for number in re.findall(r"(\d+) bytes spill stores", log)]
            assert spilled and max(spilled) <= 384, (config, log)
            taken = config.shared_bytes(FORMATS[name], sizes[1], mixture, rows) + RESERVED_SHARED_MEMORY
            assert taken * config.blocks_per_sm <= memory


# For each card another way to store codes or their scales.
HERE = ("bfloat16", "int4", "int4, groups of 32 with zeros", "fp8", "MXFP4", "int8, rows")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("card", "name"), list(zip(SHARED_MEMORY, HERE, strict=True)))
def test_each_card_compiles_a_format_and_routing(compiler: nvrtc.Nvrtc, card: int, name: str) -> None:
    check(compiler, card, name, LAYERS[4 if name == "MXFP4" else 0], 16, 1)
    source = expert_gemm.SOURCES["route"].read_text(encoding="utf-8")
    for mixture in (LAYERS[2][0], LAYERS[4][0]):
        options = [f"--gpu-architecture=sm_{card}", *expert_gemm.route_options(mixture, mixture.clamp is not None)]
        assert compiler.compile(source, options)[0].startswith(b"\x7fELF")


@pytest.mark.slow
@pytest.mark.parametrize("card", SHARED_MEMORY)
@pytest.mark.parametrize("name", FORMATS)
def test_every_configuration_compiles_for_every_card(compiler: nvrtc.Nvrtc, card: int, name: str) -> None:
    for rows in (8, 16):
        check(compiler, card, name, LAYERS[4 if name == "MXFP4" else 0], rows, 100)

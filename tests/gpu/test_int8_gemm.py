"""Eight-bit products and drafter precisions on a GPU: what the interpreter cannot run, and no changed reply."""

from __future__ import annotations

import pytest
import torch
from engine_sessions import ask, random_prompt

from dflash_local.catalog import bundled
from dflash_local.engine.drafter_precision import choose_precision
from dflash_local.engine.load import load
from dflash_local.kernels import int8_gemm
from dflash_local.kernels.int8_gemm import Int8Config, Int8Weight
from dflash_local.kernels.skinny_gemm import GemmConfig
from dflash_local.load_config import DRAFTER_PRECISIONS, LoadConfig
from dflash_local.models.fused.kernel_choice import candidates
from dflash_local.models.fused.linear import GateUp, Linear
from dflash_local.request import SamplingParams

pytestmark = pytest.mark.gpu


def shared_memory() -> int:
    properties = torch.cuda.get_device_properties(0)
    return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]


def test_every_code_becomes_its_own_bfloat16() -> None:
    """A row with a single one picks a column of codes out: all 255 of them must come back exactly, in order."""
    codes = torch.arange(-127, 128, dtype=torch.int8, device="cuda").repeat(64 * 256)[: 64 * 256].view(64, 256)
    weight = Int8Weight(codes.contiguous(), torch.ones(64, device="cuda"), torch.bfloat16)
    for k in range(0, 256, 16):
        x = torch.zeros(16, 256, device="cuda", dtype=torch.bfloat16)
        x[torch.arange(16), k + torch.arange(16)] = 1
        out = int8_gemm.linear(
            x, weight, torch.empty(16, 64, device="cuda", dtype=torch.bfloat16), Int8Config(GemmConfig(64, 128))
        )
        assert torch.equal(out, codes[:, k : k + 16].t().bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 15, 16, 33])
def test_every_config_equals_its_reference_and_itself(rows: int, dtype: torch.dtype) -> None:
    for kind, out_features in ((Linear, 512), (GateUp, 1024)):
        generator = torch.Generator("cuda").manual_seed(0)
        weight = torch.randn(out_features, 1024, device="cuda", generator=generator) / 32
        x = torch.randn(rows, 1024, device="cuda", generator=generator).to(dtype)
        layer = kind(Int8Weight.of(weight.to(dtype)))
        residual = torch.randn(rows, layer.out_features, device="cuda", generator=generator).to(dtype)
        for config in candidates(layer, shared_memory(), max(rows, 16)):
            layer.config = config
            reference = int8_gemm.linear_reference if kind is Linear else int8_gemm.swiglu_reference
            want = reference(x.float(), layer.weight, torch.empty(rows, layer.out_features, device="cuda"), config)
            out = layer(x, torch.empty_like(residual))
            tolerance = 2e-2 if dtype is torch.bfloat16 else 2e-3
            assert (out.float() - want).abs().max() <= tolerance * want.abs().max(), config
            assert torch.equal(layer(x, torch.empty_like(residual)), out), ("the same bits again", config)
            if isinstance(layer, Linear):
                added = layer(x, torch.empty_like(residual), residual)
                wanted = (out.float() + residual.float()).to(dtype)
                if dtype is torch.bfloat16:
                    assert torch.equal(added, wanted), config
                else:  # scale and sum may be one multiply-add there
                    assert torch.allclose(added, wanted, rtol=1e-5, atol=1e-5), config


@pytest.mark.parametrize("pair", ["demo", "demo-hybrid"])
@pytest.mark.parametrize("word", [word for word, side in DRAFTER_PRECISIONS.items() if side.head != "frequent"])
def test_no_drafter_precision_changes_a_reply(pair: str, word: str) -> None:
    session = load(bundled.find(pair), LoadConfig(dtype="float32", device="cuda", engine="fused"))
    samplings = (SamplingParams(), SamplingParams(temperature=1.5, seed=5))
    prompt = random_prompt(15)
    want = [ask(session, prompt, 200, sampling=how, mode="ar").ids for how in samplings]
    session.reset()
    session.runner._graphs.clear()
    choose_precision(session.runner.proposer, word, session.facts.block_size)
    assert [ask(session, prompt, 200, sampling=how, mode="dflash").ids for how in samplings] == want

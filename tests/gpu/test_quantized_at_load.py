"""Weights rounded as they are read, on a card: the codes of the CPU's, and the text of both engines."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dflash_local.catalog.bundled import find
from dflash_local.engine import LoadConfig, load
from dflash_local.kernels.quantize_weight import quantize as quantize_matrix
from dflash_local.kernels.quantized_weight import Fp8Weight, IntWeight
from dflash_local.load_config import QUANTIZED
from dflash_local.request import Limits, SamplingParams, user_request
from tests.engine_sessions import Reply

pytestmark = pytest.mark.gpu
ROWS, COLUMNS = 384, 4096


def empty_weight(quantize: str, device: str) -> IntWeight | Fp8Weight:
    if quantize == "fp8":
        codes = torch.empty(ROWS, COLUMNS, dtype=torch.float8_e4m3fn, device=device)
        scales = torch.empty(ROWS // 128, COLUMNS // 128, dtype=torch.bfloat16, device=device)
        return Fp8Weight(codes, scales, (128, 128), torch.bfloat16)
    bits = 8 if quantize == "int8" else 4
    codes = torch.empty(ROWS, COLUMNS * bits // 32, dtype=torch.int32, device=device)
    if bits == 8:
        return IntWeight(codes, torch.empty(ROWS, 1, device=device), None, torch.bfloat16, bits)
    scales = torch.empty(ROWS, COLUMNS // 128, dtype=torch.bfloat16, device=device)
    return IntWeight(codes, scales, None, torch.bfloat16, bits)


@pytest.mark.parametrize("quantize", QUANTIZED)
def test_a_card_makes_the_codes_of_the_cpu(quantize: str) -> None:
    """Of four bits as far as sums in another order do not tip the choice between scales that are as good."""
    plain = (torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    mine, wanted = empty_weight(quantize, "cuda"), empty_weight(quantize, "cpu")
    quantize_matrix(plain.cuda(), mine)
    quantize_matrix(plain, wanted)
    same = mine.scales.cpu() == wanted.scales
    assert bool(same.all()) if quantize != "int4" else float(same.float().mean()) > 0.99
    errors = [float((weight.dequantized().cpu() - plain).square().sum()) for weight in (mine, wanted)]
    assert errors[0] == pytest.approx(errors[1], rel=1e-4)


@pytest.mark.parametrize("quantize", QUANTIZED)
def test_exact_mode_holds_on_the_few_row_kernels(quantize: str) -> None:
    options = LoadConfig(device="cuda", context=256, quantize=quantize, exact=True, engine="fused")
    session = load(find("demo"), options)
    request = user_request("Count from 3 to 12.", sampling=SamplingParams(), limits=Limits(max_new_tokens=40))
    plain, drafted = (Reply(list(session.generate(replace(request, mode=mode)))) for mode in ("ar", "dflash"))
    session.close()
    assert plain.ids == drafted.ids

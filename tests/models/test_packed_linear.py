"""Weights that oneDNN has laid out: the same products, in the same bits beside any rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from dflash_local.models import packed_linear
from dflash_local.models.packed_linear import PackedLinear, can_pack, linear, pack, pack_linears

CPU = torch.device("cpu")
DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if can_pack(CPU, dtype)]
pytestmark = pytest.mark.skipif(not DTYPES, reason="no oneDNN for this processor")


def weight_of(dtype: torch.dtype, columns: int = 64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(96, columns, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 40])
def test_products_are_those_of_the_plain_weight(dtype: torch.dtype, rows: int) -> None:
    weight, bias = weight_of(dtype), torch.randn(96).to(dtype)
    x = torch.randn(1, rows, 64).to(dtype)
    found = linear(x, pack(weight), bias)
    wanted = functional.linear(x.double(), weight.double(), bias.double())
    assert found.shape == (1, rows, 96) and found.dtype == dtype
    bound = 0.02 if dtype == torch.bfloat16 else 1e-5
    assert (found - wanted).abs().max() <= bound * wanted.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [64, 1536, 9728])  # of float32, a row alone is added otherwise above 1,024
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(dtype: torch.dtype, columns: int) -> None:
    weight, x = pack(weight_of(dtype, columns)), torch.randn(16, columns).to(dtype)
    whole = linear(x, weight)
    for rows in range(1, 16):
        assert torch.equal(linear(x[:rows], weight), whole[:rows])


def test_a_weight_comes_back_as_it_was() -> None:
    weight = weight_of(torch.float32)
    assert torch.equal(pack(weight).to_dense(), weight)


def test_only_plain_layers_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "FEWEST_OUTPUTS", 0)

    class Coded(nn.Linear):
        """As a quantized one would be: its weight is not what it multiplies with."""

    inner = nn.Sequential(nn.Linear(8, 4, bias=False))
    model = nn.Sequential(nn.Linear(8, 8), inner, Coded(4, 4))
    x = torch.randn(3, 8)
    with torch.no_grad():
        before = model(x)
        pack_linears(model)
        torch.testing.assert_close(model(x), before)
    assert [type(part) for part in (model[0], inner[0], model[2])] == [PackedLinear, PackedLinear, Coded]


def test_narrow_float32_layers_stay_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(8, packed_linear.FEWEST_OUTPUTS - 1), nn.Linear(8, packed_linear.FEWEST_OUTPUTS))
    pack_linears(model)
    assert [type(part) for part in model] == [nn.Linear, PackedLinear]


def test_what_cannot_be_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not can_pack(torch.device("cuda"), torch.float32)
    assert not can_pack(CPU, torch.float16)
    monkeypatch.setattr(packed_linear, "PROCESSORS", ())
    assert not can_pack(CPU, torch.float32)

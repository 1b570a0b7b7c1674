"""Products of the fused engine against the decoded weights, named when one is wrong; sound: test_no_false_alarms.py."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch

from dflash_local.catalog import bundled
from dflash_local.check import findings
from dflash_local.check.products import check_products, decoded_product, try_product
from dflash_local.engine import load
from dflash_local.engine.session import Session
from dflash_local.load_config import LoadConfig
from dflash_local.models.fused.formats import format_of
from dflash_local.models.fused.linear import GateUp, Linear, in_eight_bits


def fused(**changes: Any) -> closing[Session]:
    return closing(load(bundled.find("demo-hybrid"), LoadConfig(device="cpu", engine="fused", context=64, **changes)))


def test_gate_and_up_exchanged_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with fused(dtype="bfloat16") as session:
        pair = next(each for each in session.runner.target.weights.products if each.paired)
        wanted = format_of(pair.weight).swiglu

        def exchanged(x: Any, weight: Any, out: Any, config: Any) -> Any:
            return wanted(x, torch.cat(weight.chunk(2)[::-1]), out, config)

        monkeypatch.setattr(type(format_of(pair.weight)), "swiglu", staticmethod(exchanged))
        found = check_products(session)
    assert found.state == "failed" and findings.exit_code([found]) == 7
    assert "gate and up at" in found.text and found.text.count("times the bound") == 4


def test_a_wrong_zero_point_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with fused(quantize="int4", dtype="bfloat16") as session:
        coded = next(
            each for each in session.runner.target.weights.products if not isinstance(each.weight, torch.Tensor)
        )
        wanted = format_of(coded.weight).prefill

        def off_by_one(x: Any, weight: Any, residual: Any = None) -> Any:
            groups = x.float().unflatten(1, (-1, weight.group_size)).sum(-1)
            return wanted(x, weight) + (groups @ weight.scales.float().t()).to(x.dtype)

        monkeypatch.setattr(type(format_of(coded.weight)), "prefill", staticmethod(off_by_one))
        found = check_products(session)
    assert found.state == "failed" and type(coded.weight).__name__ in found.text


def test_one_lost_column_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of a K that no tile divides, say: only the row with a one there, and the outlier's third tell."""
    product = Linear(torch.randn(48, 96, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16))
    assert all(each.error <= 1 for each in try_product(product, 1))

    def without_last(x: Any, weight: Any, residual: Any = None) -> Any:
        return x[:, :-1] @ weight[:, :-1].t()

    monkeypatch.setattr(type(format_of(product.weight)), "prefill", staticmethod(without_last))
    few, many = try_product(product, 8)
    assert few.error <= 1 < many.error


@pytest.mark.parametrize("kind", [Linear, GateUp])
def test_channels_of_large_weights_are_no_fault(kind: type[Linear | GateUp], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows 20 times as large, as of matrices that write to large channels: their rounding is as much larger."""
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(256, 2048, generator=generator)
    weight[:32] *= 20
    product = kind(weight.to(torch.bfloat16))
    rounded = product.weight.float() * (1 + 2**-9 * (2 * torch.rand(weight.shape, generator=generator) - 1))

    def prefill(x: Any, weight: Any, residual: Any = None) -> Any:
        return (x.float() @ rounded.t()).to(torch.bfloat16)

    monkeypatch.setattr(type(format_of(product.weight)), "prefill", staticmethod(prefill))
    few, many = try_product(product, 16)
    assert few.error < 1 and 0.1 < many.error < 1


def test_the_reference_decodes_a_slice_at_a_time() -> None:
    plain = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
    coded, x = in_eight_bits(plain), torch.eye(128)[:3]
    assert not isinstance(coded, torch.Tensor)
    assert torch.equal(decoded_product(x, coded)[0], coded.dequantized()[:, :3].t())
    assert torch.equal(decoded_product(x, plain)[0], plain[:, :3].t())


def test_the_reference_engine_has_none_of_its_own() -> None:
    session = load(bundled.find("demo"), LoadConfig(device="cpu", engine="reference", draft=False))
    found = check_products(session)
    session.close()
    assert found.state == "skipped" and "PyTorch" in found.text

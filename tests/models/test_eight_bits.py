"""Layers whose plain weights are kept in eight bits for drafting: what they hold, and what they multiply with."""

from __future__ import annotations

import pytest
import torch

from dflash_local.kernels.quantized_weight import IntWeight
from dflash_local.kernels.skinny_gemm import swiglu_reference
from dflash_local.models.fused.kernel_choice import choose_configs
from dflash_local.models.fused.linear import GateUp, JoinedLinear, Linear, gathered_rows, int8_copy, quantise_layer


def random(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


def codes(layer: Linear | GateUp) -> IntWeight:
    assert isinstance(layer.weight, IntWeight) and layer.weight.bits == 8
    return layer.weight


@pytest.mark.parametrize("rows", [1, 5, 80])
def test_a_layer_multiplies_with_what_its_codes_stand_for(rows: int) -> None:
    layer, x, residual = Linear(random(48, 64)), random(rows, 64, seed=1), random(rows, 48, seed=2)
    quantise_layer(layer)
    want = x @ codes(layer).dequantized().t()
    assert torch.allclose(layer(x, torch.empty(rows, 48)), want, atol=1e-4)
    assert torch.allclose(layer.prefill(x), want, atol=1e-4)
    added = layer(x, torch.empty(rows, 48), residual)
    assert torch.allclose(added, want + residual, atol=1e-4)
    prefilled = layer.prefill(x, into := residual.clone())
    assert prefilled is into and torch.allclose(prefilled, want + residual, atol=1e-4)
    assert torch.equal(layer(x, residual, residual), added), "the result may be the residual"
    assert choose_configs([layer], 16) == {}, "nothing is measured on the CPU"


def test_several_products_are_added_beside_each_other() -> None:
    joined = JoinedLinear((Linear(random(48, 64)), Linear(random(16, 64, seed=3))), {})
    x, residual = random(80, 64, seed=1), random(80, 64, seed=2)
    want = residual + joined.prefill(x)
    assert joined.prefill(x, residual) is residual and torch.allclose(residual, want, atol=1e-4)


def test_a_gated_layer_multiplies_with_what_its_codes_stand_for() -> None:
    layer, x = GateUp(random(96, 64)), random(5, 64, seed=1)
    quantise_layer(layer)
    want = swiglu_reference(x, codes(layer).dequantized(), torch.empty(5, 48))
    assert layer.out_features == 48
    assert torch.allclose(layer(x, torch.empty(5, 48)), want, rtol=1e-4, atol=1e-3)
    assert torch.allclose(layer.prefill(x), want, rtol=1e-4, atol=1e-3)


def test_other_heads_leave_the_first_one_as_it_is() -> None:
    head, x = Linear(random(64, 32)), random(3, 32, seed=1)
    ids = torch.tensor([3, 4, 40, 63])
    copy, some, coded = int8_copy(head), gathered_rows(head, ids, False), gathered_rows(head, ids, True)
    assert isinstance(head.weight, torch.Tensor) and isinstance(some.weight, torch.Tensor)
    assert torch.equal(some.weight, head.weight[ids])
    assert codes(copy).shape == head.weight.shape and int8_copy(copy) is copy
    assert torch.equal(coded.prefill(x), copy.prefill(x)[:, ids]), "each row has a scale of its own"


def test_inputs_that_fill_no_words_stay_plain() -> None:
    layer = Linear(random(48, 66))
    plain = layer.weight
    quantise_layer(layer)
    assert layer.weight is plain and int8_copy(layer) is layer

"""Weights in eight bits: how far codes are from what they stand for, and the seam that multiplies with them."""

from __future__ import annotations

import pytest
import torch

from dflash_local.kernels import int8_gemm
from dflash_local.kernels.int8_gemm import Int8Config, Int8Weight
from dflash_local.kernels.skinny_gemm import GemmConfig, swiglu_reference
from dflash_local.models.fused.formats import INT8_CONFIGS, INT8_SWIGLU_CONFIGS, SMALL_INT8_CONFIGS
from dflash_local.models.fused.kernel_choice import candidates, choose_configs
from dflash_local.models.fused.linear import GateUp, Linear, first_out_features, int8_copy, quantise_layer

W8A8 = Int8Config(GemmConfig(), w8a8=True)


def wide(weight: Int8Weight) -> torch.Tensor:
    return weight.codes.float() * weight.scales[:, None]


def random(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_are_within_half_a_step_of_their_weight(dtype: torch.dtype) -> None:
    weight = (random(40, 96) * torch.logspace(-6, 3, 40)[:, None]).to(dtype)
    before, coarse = weight.clone(), Int8Weight.of(weight)
    step = coarse.scales[:, None]
    assert ((wide(coarse) - weight.float()).abs() <= step * (0.5 + 1e-4)).all()
    assert (coarse.codes.abs().amax(1) == 127).all(), "the largest of each row has the largest code"
    assert torch.equal(weight, before), "the weight itself stays"
    assert (coarse.dtype, coarse.shape, coarse.numel()) == (dtype, weight.shape, weight.numel())
    assert coarse.nbytes == 40 * 96 + 40 * 4


def test_a_row_of_zeros_stays_one() -> None:
    coarse = Int8Weight.of(torch.zeros(3, 32))
    assert not coarse.codes.any() and torch.isfinite(coarse.scales).all()


def test_slices_give_what_the_whole_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = random(300, 64), random(3, 64, seed=1)
    coarse, want = Int8Weight.of(weight), int8_gemm.linear_reference(x, Int8Weight.of(weight), torch.empty(3, 300))
    monkeypatch.setattr(int8_gemm, "SLICE_SIZE", 1)  # 128 columns at a time, and a rest
    again = Int8Weight.of(weight)
    assert torch.equal(again.codes, coarse.codes) and torch.equal(again.scales, coarse.scales)
    assert torch.allclose(int8_gemm.linear_reference(x, again, torch.empty(3, 300)), want, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 5, 80])
def test_a_layer_multiplies_with_what_its_codes_stand_for(rows: int) -> None:
    layer, x, residual = Linear(random(48, 64)), random(rows, 64, seed=1), random(rows, 48, seed=2)
    quantise_layer(layer)
    want = x @ wide(layer.weight).t()  # type: ignore[arg-type]
    assert torch.allclose(layer(x, torch.empty(rows, 48)), want, atol=1e-4)
    assert torch.allclose(layer.prefill(x), want, atol=1e-4)
    added = layer(x, torch.empty(rows, 48), residual)
    assert torch.allclose(added, want + residual, atol=1e-4)
    assert torch.equal(layer(x, residual, residual), added), "the result may be the residual"


def test_a_gated_layer_multiplies_with_what_its_codes_stand_for() -> None:
    layer, x = GateUp(random(96, 64)), random(5, 64, seed=1)
    quantise_layer(layer)
    want = swiglu_reference(x, wide(layer.weight), torch.empty(5, 48))  # type: ignore[arg-type]
    assert layer.out_features == 48
    assert torch.allclose(layer(x, torch.empty(5, 48)), want, rtol=1e-4, atol=1e-3)
    assert torch.allclose(layer.prefill(x), want, rtol=1e-4, atol=1e-3)


def test_codes_for_the_activations_add_at_most_their_own_half_step() -> None:
    layer, x = Linear(Int8Weight.of(random(48, 64)), W8A8), random(5, 64, seed=1)
    x[2] *= 1000  # rows have scales of their own
    exact = x @ wide(layer.weight).t()  # type: ignore[arg-type]
    got = layer(x, torch.empty(5, 48))
    half = x.abs().amax(1, keepdim=True) / 127 / 2
    bound = half * wide(layer.weight).abs().sum(1)  # type: ignore[arg-type]
    assert ((got - exact).abs() <= bound * 1.001 + 1e-4).all()
    assert not torch.allclose(got, exact, atol=1e-4), "they were used"


def test_other_heads_leave_the_first_one_as_it_is() -> None:
    head, x = Linear(random(64, 32)), random(3, 32, seed=1)
    copy, first = int8_copy(head), first_out_features(head, 24)
    assert isinstance(head.weight, torch.Tensor) and isinstance(first.weight, torch.Tensor)
    assert first.weight.data_ptr() == head.weight.data_ptr(), "no memory of its own"
    assert torch.allclose(first.prefill(x), head.prefill(x)[:, :24])
    assert isinstance(copy.weight, Int8Weight) and int8_copy(copy) is copy
    assert torch.equal(first_out_features(copy, 24).prefill(x), copy.prefill(x)[:, :24])


def test_configs_offered_divide_the_weight_and_fit_the_card() -> None:
    def layer(kind: type, *sizes: int) -> Linear | GateUp:
        codes = torch.empty(sizes, dtype=torch.int8, device="meta")
        found = kind(Int8Weight(codes, torch.empty(sizes[0], device="meta"), torch.bfloat16))
        assert isinstance(found, (Linear, GateUp))
        return found

    for kind, sizes, configs in (
        (Linear, (248_320, 4096), INT8_CONFIGS),
        (Linear, (4096, 12_288), INT8_CONFIGS),
        (GateUp, (24_576, 4096), INT8_SWIGLU_CONFIGS),
    ):
        large, small = (candidates(layer(kind, *sizes), limit * 1024, 16) for limit in (227, 99))
        assert set(small) <= set(large) <= set(configs)
        assert {config.w8a8 for config in small} == {True, False}, "both kernels, on small cards too"
    assert set(candidates(layer(Linear, 48, 64), 99 * 1024, 16)) == set(SMALL_INT8_CONFIGS)
    assert not Int8Config(GemmConfig(64, 128), split_k=4).fits(4096, 256), "a share must hold a step"
    assert choose_configs([Linear(Int8Weight.of(random(48, 64)))], 16) == {}, "nothing is measured on the CPU"

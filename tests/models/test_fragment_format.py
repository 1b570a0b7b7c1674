"""Quantised weights become fragments where the kernels for them run, over their own memory; their products stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import save_model
from quantised_checkpoints import quantise
from quantized_weights import fp8, int4

from dflash_local.errors import MissingDependencyError
from dflash_local.kernels import cuda_driver, few_row_gemm, nvrtc
from dflash_local.kernels.fragment_packing import FragmentWeight
from dflash_local.kernels.quantized_weight import Fp8Weight, IntWeight
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.fused import fragment_format
from dflash_local.models.fused.formats import format_of
from dflash_local.models.fused.kernel_choice import candidates, without_kernel
from dflash_local.models.fused.linear import GateUp, Linear, finish, first_out_features
from dflash_local.models.fused.target import FusedTarget
from dflash_local.models.fused.weights import read_weights
from dflash_local.models.target_facts import TargetFacts

WHOLE = (lambda: int4(96, 256, 32, True), lambda: int4(96, 256, 128), lambda: fp8(96, 256))


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where kernels run; products stay PyTorch's, since activations lie on the CPU."""
    monkeypatch.setattr(fragment_format, "runs_kernels", lambda weight: True)
    monkeypatch.setattr(nvrtc, "why_not", lambda capability: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(cuda_driver, "driver_version", lambda: 13000)
    monkeypatch.setattr(nvrtc, "cubin", lambda source, options, capability, driver: b"")


@pytest.mark.parametrize("made", WHOLE)
def test_a_weight_is_packed_over_its_own_memory_and_multiplies_as_before(made: object, card: None) -> None:
    assert callable(made)
    weight: IntWeight | Fp8Weight = made()
    single, pair = Linear(weight), GateUp(made())
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0))
    want, gated = single(x, torch.empty(5, 96)), pair(x, torch.empty(5, 48))
    finish([single, pair])
    assert isinstance(single.weight, FragmentWeight) and isinstance(pair.weight, FragmentWeight)
    assert single.weight.codes.data_ptr() == weight.codes.data_ptr() and single.weight.nbytes == weight.nbytes
    assert torch.allclose(single(x, torch.empty(5, 96)), want, rtol=1e-4, atol=1e-3)
    in_bfloat16 = 2**-7  # without a kernel, weights are rounded to the dtype that they stand for
    assert torch.allclose(single.prefill(x), want, atol=in_bfloat16 * float(want.abs().max()))
    assert torch.allclose(pair(x, torch.empty(5, 48)), gated, atol=in_bfloat16 * float(gated.abs().max()))
    assert torch.allclose(pair.prefill(x), gated, atol=in_bfloat16 * float(gated.abs().max()))
    first = first_out_features(single, 32)
    assert torch.allclose(first(x, torch.empty(5, 32)), want[:, :32], rtol=1e-4, atol=1e-3)
    finish([single])
    assert torch.allclose(single(x, torch.empty(5, 96)), want, rtol=1e-4, atol=1e-3), "once is enough"


@pytest.mark.parametrize(
    "weight", [int4(96, 160, 32), int4(88, 256, 32), int4(96, 256, 16), fp8(96, 256, (8, 128)), fp8(90, 256)]
)
def test_what_the_kernels_do_not_take_stays(weight: IntWeight | Fp8Weight, card: None) -> None:
    layer = Linear(weight)
    finish([layer])
    assert layer.weight is weight


def test_nothing_is_packed_on_the_cpu() -> None:
    layer = Linear(int4(96, 256, 32))
    finish([layer])
    assert isinstance(layer.weight, IntWeight) and candidates(layer, 99 * 1024, 16) == []


def test_a_missing_compiler_leaves_the_generic_product_and_is_named_with_its_wheel(
    card: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = MissingDependencyError("the compiler NVRTC is not installed", "python -m pip install nvidia-cuda-nvrtc")
    monkeypatch.setattr(nvrtc, "why_not", lambda capability: missing)
    layer = Linear(int4(96, 256, 32))
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0))
    want = layer(x, torch.empty(5, 96))
    finish([layer])
    assert isinstance(layer.weight, FragmentWeight) and candidates(layer, 99 * 1024, 16) == []
    assert torch.allclose(layer(x, torch.empty(5, 96)), want, rtol=1e-4, atol=1e-3)
    (line,) = without_kernel([layer])
    assert "pip install nvidia-cuda-nvrtc" in line and "96 x 256" in line


def test_packed_products_are_grouped_by_format_and_offered_configurations(card: None) -> None:
    layers = [Linear(int4(96, 256, 32)), Linear(int4(96, 256, 128)), Linear(fp8(96, 256)), GateUp(int4(96, 256, 128))]
    finish(layers)
    assert len({layer.kind for layer in layers}) == 4
    for layer in layers:
        assert candidates(layer, 99 * 1024, 16) and not format_of(layer.weight).has_library
    odd = GateUp(int4(48, 256, 128))  # halves of 24 rows
    finish([odd])
    assert candidates(odd, 99 * 1024, 16) == []


def test_what_may_be_chosen_is_compiled_ahead(card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(nvrtc, "cubin", lambda source, options, capability, driver: asked.append(tuple(options)) or b"")
    layer = GateUp(int4(96, 256, 128))
    finish([layer])
    assert isinstance(layer.weight, FragmentWeight)
    kind = layer.weight.format
    found = candidates(layer, 99 * 1024, 16)
    assert set(asked) == {tuple(few_row_gemm.compile_options(kind, 256, config, 16, True)) for config in found}


@pytest.mark.parametrize("fault", ["one row", "one feature", "not written"])
def test_a_kernel_that_is_wrong_on_this_card_is_not_offered(
    fault: str, card: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    single, pair = Linear(int4(96, 256, 32, True)), GateUp(fp8(96, 256))
    finish([single, pair])
    assert all(candidates(layer, 227 * 1024, 16) for layer in (single, pair))
    bad = candidates(single, 227 * 1024, 16)[0]
    assert without_kernel([single]) and not without_kernel([Linear(int4(96, 256, 32))])
    for name in ("linear", "swiglu"):
        right = getattr(few_row_gemm, name)

        def wrong(
            x: torch.Tensor, weight: object, out: torch.Tensor, config: object, right: Any = right
        ) -> torch.Tensor:
            found: torch.Tensor = right(x, weight, out, None)
            if config == bad and fault == "one row":
                found[3] = 1e-3  # whose inputs are zeros
            elif config == bad and fault == "one feature":
                found[0, 5] += found[0].float().std()
            elif config == bad:
                found[-1, -1] = float("nan")
            return found

        monkeypatch.setattr(few_row_gemm, name, wrong)
    offered = candidates(single, 227 * 1024, 16)
    assert offered and bad not in offered


@pytest.mark.parametrize("dialect", ["gptq", "pack_quantized_zeros"])
def test_a_target_with_packed_weights_has_the_logits_of_one_that_is_decoded(
    dialect: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    save_model("qwen3_5", tmp_path / "twin", hidden_size=128, intermediate_size=256, head_dim=32)
    quantise(tmp_path / "twin", tmp_path / "quantised", dialect)
    checkpoint = Checkpoint.open(tmp_path / "quantised")
    facts = TargetFacts.from_checkpoint(checkpoint)

    def logits() -> torch.Tensor:
        weights = read_weights(checkpoint, facts, torch.device("cpu"), torch.bfloat16)
        kinds.append({type(product.weight) for product in weights.products})
        target = FusedTarget(weights, facts.model, (0, 2), 64, 4)
        target.prefill(torch.arange(5, 15), False)
        return target.head(target.verify(torch.tensor([15]), False).hidden).float()

    kinds: list[set[type]] = []
    want = logits()
    request.getfixturevalue("card")
    found = logits()
    assert FragmentWeight in kinds[1] and FragmentWeight not in kinds[0]
    assert torch.allclose(found, want, atol=2e-2 * float(want.abs().max()))

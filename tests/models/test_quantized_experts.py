"""Mixtures whose experts are published quantized, kept as they lie by the fused engine."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dflash_local.adapt.live_memory import LiveMemory
from dflash_local.errors import CheckpointError
from dflash_local.kernels.experts import ExpertWeight
from dflash_local.models import weight_stream
from dflash_local.models.fused.moe import MoEWeights
from dflash_local.models.fused.routed_experts import RoutedExperts
from dflash_local.models.fused.weights import TargetWeights
from tests.both_engines import assert_alike, fused_tokens, logits, reference_tokens, weights_of
from tests.models.test_quantized_checkpoints import kept_as
from tests.quantized_checkpoints import CODED, DIALECTS, join_experts, rewritten, save_quantized

EXPERTS, INNER = 5, 32
NO_SHARED = {"moe_intermediate_size": INNER, "num_experts": EXPERTS}
SIZES = {**NO_SHARED, "shared_expert_intermediate_size": INNER}
TWO_LAYERS = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
FAMILIES = {"qwen3_moe": NO_SHARED, "qwen3_5_moe": SIZES}


def save(family: str, folder: Path, dialect: str, **options: Any) -> tuple[Path, Path]:
    return save_quantized(family, folder, dialect, sizes=FAMILIES[family], **options)


def mixture(folder: Path, layer: int = 1) -> MoEWeights:
    part = weights_of(folder)[0].layers[layer].mlp
    assert isinstance(part, MoEWeights)
    return part


def decoded(weight: ExpertWeight) -> torch.Tensor:
    """[E, N, K] of what its codes stand for."""
    rows = slice(0, weight.out_features)
    return torch.stack([weight.rows(expert, rows, torch.float32) for expert in range(weight.experts)])


def without_shared(dialect: str) -> dict[str, Any]:
    """Options of ``save_quantized`` that leave the shared expert plain."""
    parts = (".gate_proj", ".up_proj", ".down_proj")
    coded = tuple(f".experts.{expert}{part}" for expert in range(EXPERTS) for part in parts)
    return {"coded": coded, "changes": {"dynamic": {"-:.*attn.*": {}, "-:.*shared_expert.*": {}}}}


# One dialect of each kind of weight; of the others the next test reads every expert to the bit.
EACH = ("fp8", "gptq_zeros", "int_quantized", "modelopt_nvfp4", "mxfp4_pack_quantized")
HERE_TOO = tuple(zip(cycle(FAMILIES), EACH))
LONG = (case for case in zip(cycle(FAMILIES), DIALECTS) if case not in HERE_TOO)
CASES = [*HERE_TOO, *(pytest.param(*case, marks=pytest.mark.slow) for case in LONG)]


@pytest.mark.parametrize(("family", "dialect"), CASES)
def test_both_engines_give_the_tokens_of_the_decoded_weights(family: str, dialect: str, tmp_path: Path) -> None:
    folder, twin = save(family, tmp_path, dialect)
    want = reference_tokens(twin)
    assert len(set(want)) > 2, "a reply of one token would show nothing"
    assert fused_tokens(folder) == want == reference_tokens(folder)
    assert torch.allclose(logits(folder), logits(twin), atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_expert_is_read_to_the_bit(dialect: str, tmp_path: Path) -> None:
    folder, twin = save_quantized("qwen3_5_moe", tmp_path, dialect, sizes={**SIZES, **TWO_LAYERS})
    part, stored = mixture(folder), load_file(twin / "model.safetensors")
    at = "model.layers.1.mlp"
    modules = [*(f"{at}.experts.{index}" for index in range(EXPERTS)), f"{at}.shared_expert"]

    def matrices(name: str) -> torch.Tensor:
        return torch.stack([stored[f"{module}.{name}_proj.weight"] for module in modules])

    experts = part.experts
    assert type(experts.gate_up.weight) is type(experts.down.weight) is kept_as(dialect)
    assert experts.joined and part.shared is None
    assert torch.equal(decoded(experts.gate_up), torch.cat([matrices("gate"), matrices("up")], 1))
    assert torch.equal(decoded(experts.down), matrices("down"))
    assert isinstance(part.router.products[0].weight, torch.Tensor) and len(part.router.products) == 1


def test_layers_may_differ_in_whether_the_shared_expert_is_joined(tmp_path: Path) -> None:
    """They share the rows between the products."""
    options = without_shared("gptq")
    folder, twin = save(
        "qwen3_5_moe",
        tmp_path,
        "gptq",
        coded=(
            *options["coded"],
            "2.mlp.shared_expert.down_proj",
            "2.mlp.shared_expert.gate_proj",
            "2.mlp.shared_expert.up_proj",
        ),
    )
    parts: list[Any] = [layer.mlp for layer in weights_of(folder)[0].layers]
    joined = [part.experts.joined for part in parts]
    assert joined == [False, False, True, False]
    assert_alike(folder, twin)


@pytest.mark.parametrize("lost", ["0.gate_proj.qweight", "3.up_proj.scales"])
def test_a_missing_tensor_of_an_expert_is_named(lost: str, tmp_path: Path) -> None:
    folder, _ = save("qwen3_moe", tmp_path, "gptq")
    with rewritten(folder) as tensors:
        del tensors[f"model.layers.2.mlp.experts.{lost}"]
    with pytest.raises(CheckpointError, match=rf"lacks the tensor model.layers.2.mlp.experts.{lost}"):
        weights_of(folder)


def test_an_expert_in_another_format_than_the_others_is_refused_by_name(tmp_path: Path) -> None:
    folder, twin = save(
        "qwen3_moe",
        tmp_path,
        "gptq",
        coded=[name for name in CODED if name != ".down_proj"]
        + [f".experts.{expert}.down_proj" for expert in range(EXPERTS) if expert != 3],
    )
    with pytest.raises(CheckpointError, match=r"experts\.3\.down_proj is not stored as int4 g32 like the other"):
        weights_of(folder)
    assert reference_tokens(folder) == reference_tokens(twin), "what the line sends to"


def test_rows_that_fp8_blocks_do_not_divide_are_refused_by_name(tmp_path: Path) -> None:
    sizes = {"moe_intermediate_size": 48}
    folder, _ = save_quantized("qwen3_moe", tmp_path, "fp8", sizes=sizes)
    with pytest.raises(CheckpointError, match=r"experts\.0\.gate_proj: blocks of fp8 32x32 do not divide its 48 rows"):
        weights_of(folder)


def test_plain_experts_in_one_tensor_beside_quantized_attention(tmp_path: Path) -> None:
    """What the file holds decides: the configuration says nothing of them."""
    attention = (".q_proj", ".k_proj", ".v_proj", ".o_proj")
    folder, twin = save("qwen3_5_moe", tmp_path, "fp8", coded=attention)
    join_experts(folder)
    part = mixture(folder)
    assert isinstance(part.experts.gate_up.weight, torch.Tensor) and part.experts.joined
    assert_alike(folder, twin)


def test_products_decode_in_slices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A row's bits do not depend on how many rows of a matrix are decoded at a time."""
    folder, _ = save("qwen3_moe", tmp_path, "gptq_zeros")
    experts: RoutedExperts = mixture(folder).experts
    x = torch.randn(1, experts.gate_up.in_features)
    whole = experts.gate_up.product(x, 3)
    monkeypatch.setattr("dflash_local.kernels.quantized_weight.DEQUANTIZED_SLICE", 16 * x.shape[1])
    assert len(list(experts.gate_up._slices())) == 4
    assert torch.allclose(experts.gate_up.product(x, 3), whole, rtol=1e-5, atol=1e-6)


# One format tells of the reader; what another adds is in the long tests.
@pytest.mark.parametrize(
    "dialect", ["fp8", *(pytest.param(each, marks=pytest.mark.slow) for each in ("modelopt_nvfp4", "gptq_zeros"))]
)
def test_codes_are_read_where_they_stay(dialect: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the weights: one buffer of the reader, and some tensors of one expert."""
    monkeypatch.setattr(weight_stream, "RING", 1)
    wide = {"hidden_size": 256, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
    sizes = {**SIZES, **wide, "num_experts": 16}
    folder, _ = save_quantized("qwen3_5_moe", tmp_path, dialect, sizes=sizes)
    stored = (folder / "model.safetensors").stat().st_size
    with LiveMemory() as memory:
        weights = weights_of(folder)[0]
    held = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors_in(weights)}
    total = sum(held.values())
    reader, largest = min(weight_stream.WINDOW, stored), 4 * 128 * 256
    assert total < 1.1 * stored and memory.peak < total + reader + 4 * largest


def tensors_in(weights: TargetWeights) -> Iterator[torch.Tensor]:
    yield from (place for place in weights.places.values() if isinstance(place, torch.Tensor))
    for product in (*weights.products, weights.head):
        coded = product.weight
        yield coded if isinstance(coded, torch.Tensor) else coded.codes

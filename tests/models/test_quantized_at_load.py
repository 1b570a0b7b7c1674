"""Plain checkpoints quantized as they are read: both engines compute what the codes stand for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_local.errors import UsageError
from dflash_local.kernels.quantize_weight import quantize as quantize_matrix
from dflash_local.kernels.quantized_weight import Fp8Weight, IntWeight
from dflash_local.load_config import QUANTIZED
from dflash_local.models.fused.moe import MoEWeights
from tests.both_engines import facts_of, fused_tokens, reference, reference_tokens, weights_of
from tests.families import save_model
from tests.quantized_checkpoints import CODED, SIZES, join_experts

FAMILIES = ("llama", "qwen3", "qwen3_5")


def meant(matrix: torch.Tensor, quantize: str, by_row: bool = False) -> torch.Tensor:
    """What a matrix becomes: blocks of 128 x 128 (or a scale for each row), a scale for each row, or groups."""
    rows, columns = matrix.shape
    weight: IntWeight | Fp8Weight
    if quantize == "fp8" and by_row:
        codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
        weight = Fp8Weight(codes, torch.empty(rows, 1), (1, columns), torch.float32)
    elif quantize == "fp8":
        codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
        scales = torch.empty(-(-rows // 128), -(-columns // 128), dtype=torch.bfloat16)
        weight = Fp8Weight(codes, scales, (128, 128), torch.float32)
    elif quantize == "int8":
        codes = torch.empty(rows, columns // 4, dtype=torch.int32)
        weight = IntWeight(codes, torch.empty(rows, 1), None, torch.float32, 8)
    else:
        group = next(size for size in (128, 64, 32) if columns % size == 0)
        codes = torch.empty(rows, columns // 8, dtype=torch.int32)
        scales = torch.empty(rows, columns // group, dtype=torch.bfloat16)
        weight = IntWeight(codes, scales, None, torch.float32)
    quantize_matrix(matrix, weight)
    return weight.dequantized()


# A family for each format, and those that are left in the long tests.
PAIRS = [
    pytest.param(family, quantize, marks=() if (family, quantize) in zip(FAMILIES, QUANTIZED) else pytest.mark.slow)
    for family in FAMILIES
    for quantize in QUANTIZED
]


@pytest.mark.parametrize(("family", "quantize"), PAIRS)
def test_both_engines_compute_what_the_codes_stand_for(family: str, quantize: str, tmp_path: Path) -> None:
    plain, twin = save_model(family, tmp_path / "plain", **SIZES), save_model(family, tmp_path / "twin", **SIZES)
    tensors = load_file(plain / "model.safetensors")
    rounded = {
        name: meant(tensor, quantize) if name.removesuffix(".weight").endswith(CODED) else tensor
        for name, tensor in tensors.items()
    }
    assert any(not torch.equal(rounded[name], tensors[name]) for name in tensors)
    save_file(rounded, twin / "model.safetensors", metadata={"format": "pt"})
    want = reference_tokens(twin, None)
    assert fused_tokens(plain, quantize) == reference_tokens(plain, quantize) == want
    assert quantize != "int4" or fused_tokens(plain, None) != want, "four bits show in a random target"


@pytest.mark.parametrize("quantize", QUANTIZED)
def test_only_the_matrices_of_layers_are_quantized(quantize: str, tmp_path: Path) -> None:
    folder = save_model("qwen3_5", tmp_path, **SIZES)
    tensors = load_file(folder / "model.safetensors")
    weights = weights_of(folder, quantize, torch.bfloat16)[0]
    assert isinstance(weights.embedding, torch.Tensor)
    assert torch.equal(weights.embedding, tensors["model.embed_tokens.weight"].bfloat16())
    assert isinstance(weights.head.weight, torch.Tensor)
    plain = {tuple(each.weight.shape) for each in weights.products if isinstance(each.weight, torch.Tensor)}
    decay = tensors["model.layers.0.linear_attn.in_proj_a.weight"]
    assert plain == {(2 * len(decay), decay.shape[1])}, "decay projections stay in 16 bits, side by side"
    kind = Fp8Weight if quantize == "fp8" else IntWeight
    coded = [each.weight for each in weights.products if not isinstance(each.weight, torch.Tensor)]
    assert coded and all(isinstance(weight, kind) for weight in coded)


def test_a_matrix_that_no_group_divides_stays_plain(tmp_path: Path) -> None:
    folder = save_model("qwen3", tmp_path, **{**SIZES, "hidden_size": 48})
    kinds = {each.weight.shape[1]: type(each.weight) for each in weights_of(folder, "int4")[0].products}
    assert kinds.pop(48) is torch.Tensor and set(kinds.values()) == {IntWeight}


def test_biases_beside_quantized_matrices_are_read(tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path, **SIZES, attention_bias=True)
    file = folder / "model.safetensors"
    tensors = {name: value.normal_() if name.endswith(".bias") else value for name, value in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    model = reference(folder, quantize="int8")
    bias = model.get_parameter("model.layers.0.self_attn.q_proj.bias")
    assert torch.equal(bias, tensors["model.layers.0.self_attn.q_proj.bias"])
    assert fused_tokens(folder, "int8") == reference_tokens(folder, "int8")


# Every format once, without or with a shared expert, stored in both ways; the other width is another case to fp8 alone.
HERE_TOO = (
    ("qwen3_moe", 32, "fp8", True),
    *(("qwen3_5_moe", 32, quantize, False) for quantize in ("int8", "int4")),
    ("qwen3_5_moe", 128, "fp8", True),
)
WIDTHS = (("qwen3_moe", 32), ("qwen3_5_moe", 32), ("qwen3_5_moe", 128))
LONG = ((*width, quantize, together) for width in WIDTHS for quantize in QUANTIZED for together in (False, True))
EXPERTS = [*HERE_TOO, *(pytest.param(*case, marks=pytest.mark.slow) for case in LONG if case not in HERE_TOO)]


@pytest.mark.parametrize(("family", "width", "quantize", "together"), EXPERTS)
def test_experts_are_quantized_too(family: str, width: int, quantize: str, together: bool, tmp_path: Path) -> None:
    """Stored one by one or together; in fp8 with a scale for each row where no blocks of 128 divide one's rows."""
    sizes = {**SIZES, "hidden_size": 128, "moe_intermediate_size": width, "shared_expert_intermediate_size": width}
    sizes["num_experts"] = 4
    plain, twin = save_model(family, tmp_path / "plain", **sizes), save_model(family, tmp_path / "twin", **sizes)
    if together:
        join_experts(plain)
    tensors = load_file(twin / "model.safetensors")
    rows = {f".{name}_proj.weight": width if name != "down" else 128 for name in ("gate", "up", "down")}

    def rounded(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not name.removesuffix(".weight").endswith(CODED):
            return tensor
        high = next((high for end, high in rows.items() if name.endswith(end)), 128)
        by_row = ".experts." in name and high % 128 != 0
        return meant(tensor, quantize, by_row)

    save_file(
        {name: rounded(name, value) for name, value in tensors.items()},
        twin / "model.safetensors",
        metadata={"format": "pt"},
    )
    want = reference_tokens(twin, None)
    assert fused_tokens(plain, quantize) == reference_tokens(plain, quantize) == want
    assert quantize != "int4" or fused_tokens(plain, None) != want, "four bits show in a random target"
    part = weights_of(plain, quantize)[0].layers[1].mlp
    assert isinstance(part, MoEWeights)
    kind = Fp8Weight if quantize == "fp8" else IntWeight
    assert isinstance(part.experts.gate_up.weight, kind) and isinstance(part.experts.down.weight, kind)
    assert all(isinstance(product.weight, torch.Tensor) for product in part.router.products), "routers stay"
    joins = family == "qwen3_5_moe" and (quantize != "fp8" or width == 128)
    assert part.experts.joined == joins


@pytest.mark.parametrize(
    ("hidden", "inner", "coded", "together"), [(64, 48, (True, False), True), (48, 32, (False, True), False)]
)
def test_one_matrix_of_the_experts_may_stay_plain(
    hidden: int, inner: int, coded: tuple[bool, bool], together: bool, tmp_path: Path
) -> None:
    """No group divides the inputs of gate and up, or of down."""
    sizes = {**SIZES, "hidden_size": hidden, "moe_intermediate_size": inner}
    folder = save_model("qwen3_moe", tmp_path, **sizes)
    if together:
        join_experts(folder)
    part = weights_of(folder, "int4")[0].layers[1].mlp
    assert isinstance(part, MoEWeights)
    kinds = tuple(isinstance(each.weight, IntWeight) for each in (part.experts.gate_up, part.experts.down))
    assert kinds == coded
    assert fused_tokens(folder, "int4") == reference_tokens(folder, "int4") != reference_tokens(folder)


@pytest.mark.parametrize(
    ("family", "quantize", "why"),
    [
        ("qwen3_moe", "bnb-nf4", "bnb-nf4 would leave its experts in 16 bits"),
        ("gpt_oss", "int4", "int4 is not supported where experts have biases"),
        ("deepseek_v3", "fp8", "fp8 is not supported where attention is latent"),
    ],
)
def test_what_would_stay_in_16_bits_is_refused_by_name(family: str, quantize: str, why: str, tmp_path: Path) -> None:
    folder = save_model(family, tmp_path)
    with pytest.raises(UsageError, match=why):
        facts_of(folder, quantize)

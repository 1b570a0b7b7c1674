"""Files as the quantisers' own libraries write them, beside what these libraries make of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_local.catalog.bundled import find
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.decoded_tensors import decoded_tensors
from dflash_local.models.target_facts import TargetFacts
from tests.both_engines import CPU, fused_tokens, reference_tokens

pytestmark = pytest.mark.slow
INT8_ROWS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
FP8_ROWS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
GROUPS = {"strategy": "group", "group_size": 32}
# Of compressed-tensors: weights, activations, and how this program calls what comes of it.
COMPRESSED: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any] | None]] = {
    "int4 g32": ({"num_bits": 4, "type": "int", **GROUPS}, None),
    "int4 g32 with zeros": ({"num_bits": 4, "type": "int", "symmetric": False, **GROUPS}, None),
    "int4 per channel": ({"num_bits": 4, "type": "int", "strategy": "channel"}, None),
    "int8 g32 with zeros": ({"num_bits": 8, "type": "int", "symmetric": False, **GROUPS}, None),
    "int8 per channel": ({"num_bits": 8, "type": "int", "strategy": "channel"}, INT8_ROWS),
    "int8 per channel with zeros": (
        {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False},
        INT8_ROWS,
    ),
    "fp8 per channel": ({"num_bits": 8, "type": "float", "strategy": "channel"}, FP8_ROWS),
    "fp8 per tensor": ({"num_bits": 8, "type": "float", "strategy": "tensor"}, FP8_ROWS),
    "fp8 16x32": ({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 32]}, FP8_ROWS),
    "nvfp4": (
        {
            "num_bits": 4,
            "type": "float",
            "strategy": "tensor_group",
            "group_size": 16,
            "scale_dtype": "torch.float8_e4m3fn",
        },
        None,
    ),
    "mxfp4": ({"num_bits": 4, "type": "float", **GROUPS, "scale_dtype": "torch.uint8"}, None),
}


def check(folder: Path, source: Path, name: str, want: Mapping[str, torch.Tensor], tmp_path: Path) -> None:
    """The reader's weights are ``want``, and both engines write what these write."""
    checkpoint = Checkpoint.open(folder)
    facts = TargetFacts.from_checkpoint(checkpoint)
    assert facts.model.quantization is not None and facts.model.quantization.name == name
    found = decoded_tensors(checkpoint, facts, CPU, torch.float32)
    assert len(want) > 10
    for module, weight in want.items():
        assert torch.allclose(found[module], weight.float(), rtol=1e-6, atol=1e-9), module
    twin = tmp_path / "twin"
    shutil.copytree(source, twin)
    plain = {key: value.float() for key, value in load_file(source / "model.safetensors").items()}
    save_file({**plain, **{key: value.float().contiguous() for key, value in want.items()}}, twin / "model.safetensors")
    assert fused_tokens(folder) == reference_tokens(folder) == reference_tokens(twin)


def extremes(weight: torch.Tensor, arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest and the largest number of what shares a scale."""
    rows, columns = weight.shape
    if arguments.strategy == "block":
        height, width = arguments.block_structure
        blocks = weight.view(rows // height, height, columns // width, width).transpose(1, 2).flatten(2)
    elif arguments.strategy in ("group", "tensor_group"):
        blocks = weight.view(rows, -1, arguments.group_size)
    else:
        blocks = weight.view(1, -1) if arguments.strategy == "tensor" else weight
    return blocks.amin(-1), blocks.amax(-1)


@pytest.mark.parametrize("name", COMPRESSED)
def test_files_of_compressed_tensors(name: str, tmp_path: Path) -> None:
    library = pytest.importorskip("compressed_tensors", reason="pip install compressed-tensors")
    from transformers import AutoModelForCausalLM

    quantization = library.quantization
    weights, activations = COMPRESSED[name]
    scheme = quantization.QuantizationScheme(
        targets=["Linear"],
        weights=quantization.QuantizationArgs(**weights),
        input_activations=None if activations is None else quantization.QuantizationArgs(**activations),
    )
    source = find("demo-hybrid").target
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    ignore = ["lm_head", "re:.*in_proj_[ab]$"]
    config = quantization.QuantizationConfig(config_groups={"group_0": scheme}, ignore=ignore)
    quantization.apply_quantization_config(model, config)
    want: dict[str, torch.Tensor] = {}
    for module_name, module in model.named_modules():
        arguments = getattr(getattr(module, "quantization_scheme", None), "weights", None)
        if arguments is None:
            continue
        low, high = extremes(module.weight.data, arguments)
        of_all = None
        if arguments.strategy == "tensor_group":
            of_all = quantization.utils.generate_gparam(low.min(), high.max())
            module.weight_global_scale.data.copy_(of_all)
        scales, zeros = quantization.utils.calculate_qparams(low, high, arguments, global_scale=of_all)
        module.weight_scale.data.copy_(scales.reshape(module.weight_scale.shape))
        if not arguments.symmetric:
            module.weight_zero_point.data.copy_(zeros.reshape(module.weight_zero_point.shape))
        points = getattr(module, "weight_zero_point", None)
        meant = quantization.fake_quantize(module.weight, module.weight_scale, points, arguments, global_scale=of_all)
        want[f"{module_name}.weight"] = meant.detach().clone()
    compressor = library.ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path / "quantised")
    compressor.update_config(tmp_path / "quantised")
    check(tmp_path / "quantised", source, name, want, tmp_path)


@pytest.mark.parametrize(
    ("name", "scheme", "options", "packing"),
    [
        ("int4 g32", "W4A16", {"iters": 2}, "auto_round:auto_gptq"),  # tuned: scales of either sign
        ("int4 g32 with zeros", "W4A16", {"sym": False}, "auto_round:auto_gptq"),
        ("int8 g32", "W8A16", {}, "auto_round:auto_gptq"),
        ("int4 g32", "W4A16", {}, "auto_gptq"),
        ("int4 g32 with zeros", "W4A16", {}, "auto_awq"),
    ],
)
def test_files_of_auto_round(
    name: str, scheme: str, options: dict[str, Any], packing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)  # it leaves a folder where it runs
    library = pytest.importorskip("auto_round", reason="pip install auto-round")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = find("demo").target
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tuned = {"dataset": ["Count from one to ten. " * 30] * 4, "seqlen": 32, "nsamples": 4}
    options = {"iters": 0, "disable_opt_rtn": True, **options} if "iters" not in options else {**options, **tuned}
    quantiser = library.AutoRound(
        model, AutoTokenizer.from_pretrained(source), scheme=scheme, group_size=32, device_map="cpu", **options
    )
    quantised, _ = quantiser.quantize()
    plain = load_file(source / "model.safetensors")
    state = quantised.state_dict()
    want = {key: state[key].clone() for key, value in plain.items() if not torch.equal(state[key], value.float())}
    quantiser.save_quantized(str(tmp_path / "quantised"), format=packing)
    folder = next((tmp_path / "quantised").rglob("config.json")).parent
    stored = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert stored["quant_method"] == (packing.removeprefix("auto_") if ":" not in packing else "auto-round")
    check(folder, source, name, want, tmp_path)

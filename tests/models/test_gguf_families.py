"""Files that llama.cpp's converter wrote, against the checkpoints that it wrote them of (tests/golden/gguf)."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dflash_local.checkpoint_files.gguf_config import config_of
from dflash_local.checkpoint_files.gguf_header import GgufHeader, read_gguf
from dflash_local.checkpoint_files.gguf_names import hf_tensors
from dflash_local.checkpoint_files.tensor_info import TensorInfo
from dflash_local.config.module_names import EXPERT
from dflash_local.config.read_model import read_model
from dflash_local.models.stored_tensor import StoredTensors
from tests.drafter_configs import read_decoder

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
FILES = sorted(file for file in (GOLDEN / "gguf").glob("*.gguf") if not file.name.startswith("drafter"))
DRAFTERS = sorted((GOLDEN / "gguf").glob("drafter-*.gguf"))

by_name = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def config_json(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((file.with_suffix("") / "config.json").read_text())
    return found


@cache
def source_model(file: Path) -> Any:
    """The checkpoint as transformers loads it, in float32: numbers of 16 bits, and of MXFP4, are such numbers."""
    from transformers import AutoModelForCausalLM, Mxfp4Config

    coded = {"quantization_config": Mxfp4Config(dequantize=True)} if file.stem.endswith("mxfp4") else {}
    model = AutoModelForCausalLM.from_pretrained(file.with_suffix(""), dtype=torch.float32, **coded)
    return model.float().eval()


def values(info: TensorInfo) -> torch.Tensor:
    """Its values as the model has them, float32."""
    return StoredTensors.open(info.file).read(info).float()


def state_of(header: GgufHeader) -> dict[str, torch.Tensor]:
    """The file's tensors under the names of transformers' modules, experts stacked as they want them."""
    found: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[str, list[torch.Tensor]]] = {}
    for name, info in hf_tensors(header).items():
        module, _, kind = name.rpartition(".")
        place = EXPERT.fullmatch(module)
        if place is not None:
            experts.setdefault(place[1], {}).setdefault(f"{place[4]}.{kind}", []).append(values(info))
        elif not name.startswith("mtp."):
            found[name] = values(info)
    for at, lists in experts.items():
        each = {key: torch.stack(matrices) for key, matrices in lists.items()}
        gate, up, down = (each[f"{matrix}.weight"] for matrix in ("gate", "up", "down"))
        if "gate.bias" in each:
            found[f"{at}.gate_up_proj"] = torch.stack([gate, up], 2).flatten(1, 2).transpose(1, 2)
            found[f"{at}.gate_up_proj_bias"] = torch.stack([each["gate.bias"], each["up.bias"]], 2).flatten(1, 2)
            found[f"{at}.down_proj"], found[f"{at}.down_proj_bias"] = down.transpose(1, 2), each["down.bias"]
        else:
            found[f"{at}.gate_up_proj"], found[f"{at}.down_proj"] = torch.cat([gate, up], 1), down
    return found


def stored_dtype(file: Path) -> torch.dtype:
    text = config_json(file)
    name = text.get("text_config", text)["dtype"]
    dtype: torch.dtype = getattr(torch, name)
    return dtype


@by_name
def test_the_configuration_says_what_config_json_says(file: Path) -> None:
    ours, theirs = read_model(config_of(read_gguf(file)), "x"), read_model(config_json(file), "x")
    # What is coded is said by each tensor of the file, not by its configuration.
    assert ours == replace(theirs, quantization=None)


@by_name
def test_every_tensor_is_the_checkpoints_bit_for_bit(file: Path) -> None:
    found, expected = state_of(read_gguf(file)), dict(source_model(file).state_dict())
    if "lm_head.weight" not in found:
        assert torch.equal(expected.pop("lm_head.weight"), expected["model.embed_tokens.weight"])
    assert found.keys() == expected.keys()
    dtype = stored_dtype(file)
    wrong = [name for name, tensor in expected.items() if not torch.equal(found[name].to(dtype).float(), tensor)]
    assert not wrong


def test_layers_that_predict_further_ahead_are_left_alone() -> None:
    header = read_gguf(GOLDEN / "gguf" / "qwen35.gguf")
    ahead = {name for name in hf_tensors(header) if name.startswith("mtp.")}
    assert "mtp.blk.2.nextn.eh_proj.weight" in ahead
    assert len(ahead) == sum(name.startswith("blk.2.") for name in header.tensors)


@pytest.mark.parametrize("file", DRAFTERS, ids=lambda file: file.stem)
def test_a_drafter_is_the_golden_pairs(file: Path) -> None:
    import gguf

    header, folder = read_gguf(file), GOLDEN / file.stem.removeprefix("drafter-") / "drafter"
    config = json.loads((folder / "config.json").read_text())
    found, expected = read_decoder(config_of(header), "x"), read_decoder(config, "x")
    assert found == replace(expected, num_target_layers=None)  # which the converter does not write
    tensors, stored = hf_tensors(header), load_file(folder / "model.safetensors")
    assert {name: info.shape for name, info in tensors.items()} == {name: tuple(t.shape) for name, t in stored.items()}
    for name, info in tensors.items():
        kind = gguf.GGMLQuantizationType[info.dtype]
        coded = gguf.quants.dequantize(gguf.quants.quantize(stored[name].numpy(), kind), kind)
        assert torch.equal(values(info), torch.from_numpy(coded)), name

"""Tiny targets quantised as published files have them, one value at a time, and what their codes stand for.

Each dialect is written out in NumPy after its description, none with the reader's functions.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from families import save_model
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
GROUP = 32
BLOCK = (32, 32)


@dataclass(frozen=True)
class Matrix:
    """Codes [N, K] with scales and zero points [N, K / group]: weight = (code - zero) * scale."""

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray

    @property
    def weight(self) -> torch.Tensor:
        group = self.codes.shape[1] // self.scales.shape[1]
        zeros, scales = (np.repeat(each, group, 1) for each in (self.zeros, self.scales))
        return torch.from_numpy((self.codes - zeros).astype(np.float32) * scales.astype(np.float32))


def quantised(weight: torch.Tensor, symmetric: bool, scale_dtype: torch.dtype, signs: bool = False) -> Matrix:
    """Rounded to sixteen levels by groups. ``signs``: every other scale is negative."""
    rows, columns = weight.shape
    groups = weight.float().view(rows, columns // GROUP, GROUP)
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scales = (groups.abs().amax(2) / 7 if symmetric else (high - low) / 15).clamp(min=1e-4).to(scale_dtype).float()
    zeros = torch.full_like(scales, 8) if symmetric else (-low / scales).round().clamp(1, 15)
    if signs:
        scales[:, ::2] *= -1
    codes = (groups / scales.unsqueeze(2)).round().add(zeros.unsqueeze(2)).clamp(0, 15)
    whole = codes.view(rows, columns).numpy().astype(np.int64)
    return Matrix(whole, scales.numpy(), zeros.numpy().astype(np.int64))


def words(nibbles: np.ndarray) -> torch.Tensor:
    """Nibbles [..., 8], the first in the lowest bits, as int32."""
    packed = np.zeros(nibbles.shape[:-1], np.uint64)
    for place in range(8):
        packed |= nibbles[..., place].astype(np.uint64) << np.uint64(4 * place)
    return torch.from_numpy(packed.astype(np.uint32).view(np.int32).copy())


def gptq(matrix: Matrix, scale_dtype: torch.dtype, zero_offset: int) -> Tensors:
    """qweight [K / 8, N], qzeros [K / G, N / 8], scales [K / G, N], g_idx [K]."""
    columns = matrix.codes.shape[1]
    zeros = (matrix.zeros.T - zero_offset) & 15
    return {
        "qweight": words(matrix.codes.T.reshape(columns // 8, 8, -1).transpose(0, 2, 1)),
        "qzeros": words(zeros.reshape(len(zeros), -1, 8)),
        "scales": torch.from_numpy(matrix.scales.T.copy()).to(scale_dtype),
        "g_idx": (torch.arange(columns) // GROUP).int(),
    }


AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # of an octet, from the lowest bits on


def awq(matrix: Matrix, scale_dtype: torch.dtype) -> Tensors:
    """qweight [K, N / 8], qzeros [K / G, N / 8], scales [K / G, N]."""

    def packed(rows: np.ndarray) -> torch.Tensor:
        return words(rows.reshape(len(rows), -1, 8)[..., AWQ_COLUMNS])

    return {
        "qweight": packed(matrix.codes.T),
        "qzeros": packed(matrix.zeros.T),
        "scales": torch.from_numpy(matrix.scales.T.copy()).to(scale_dtype),
    }


def pack_quantized(matrix: Matrix, scale_dtype: torch.dtype, symmetric: bool) -> Tensors:
    """weight_packed [N, K / 8], weight_scale [N, K / G], weight_zero_point [N / 8, K / G]."""
    rows, columns = matrix.codes.shape
    found = {
        "weight_packed": words(matrix.codes.reshape(rows, columns // 8, 8)),
        "weight_scale": torch.from_numpy(matrix.scales).to(scale_dtype),
        "weight_shape": torch.tensor([rows, columns]),
    }
    if not symmetric:
        zeros = matrix.zeros.reshape(rows // 8, 8, -1).transpose(0, 2, 1)
        found["weight_zero_point"] = words(zeros)
    return found


def fp8(weight: torch.Tensor, scale_dtype: torch.dtype) -> tuple[Tensors, torch.Tensor]:
    """Codes and scales of blocks; and what they stand for."""
    rows, columns = weight.shape
    scales = torch.zeros(-(-rows // BLOCK[0]), -(-columns // BLOCK[1]))
    codes, meant = torch.zeros_like(weight), torch.zeros_like(weight)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            part = (
                slice(row * BLOCK[0], (row + 1) * BLOCK[0]),
                slice(column * BLOCK[1], (column + 1) * BLOCK[1]),
            )
            scale = (weight[part].abs().max() / 448).clamp(min=1e-6).to(scale_dtype).float()
            scales[row, column] = scale
            codes[part] = (weight[part] / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
            meant[part] = codes[part] * scale
    return {"weight": codes.to(torch.float8_e4m3fn), "weight_scale_inv": scales.to(scale_dtype)}, meant


@dataclass(frozen=True)
class Dialect:
    """How a quantiser writes: its configuration, and a matrix's tensors with what they stand for."""

    config: Mapping[str, Any]
    encode: Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]


def _gptq(dtype: torch.dtype, *, symmetric: bool = True, version: int = 1, signs: bool = False) -> Any:
    def encode(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        matrix = quantised(weight, symmetric, dtype, signs)
        return gptq(matrix, dtype, 1 if version == 1 else 0), matrix.weight

    return encode


def _awq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    matrix = quantised(weight, False, HALF)
    return awq(matrix, HALF), matrix.weight


def _packed(dtype: torch.dtype, symmetric: bool) -> Any:
    def encode(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        matrix = quantised(weight, symmetric, dtype)
        return pack_quantized(matrix, dtype, symmetric), matrix.weight

    return encode


def _packed_config(symmetric: bool) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": symmetric}
    group = {"targets": ["Linear"], "weights": {**weights, "actorder": None, "dynamic": False}}
    ignore = ["lm_head", "re:.*linear_attn.in_proj_[ab]$"]
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": ignore,
    }


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False, "lm_head": False}
_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "sym": True, "data_type": "int"}
_ROUND |= {"packing_format": "auto_round:auto_gptq"}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
HALF, BRAIN = torch.float16, torch.bfloat16
DIALECTS: Mapping[str, Dialect] = {
    "fp8": Dialect(
        {"quant_method": "fp8", "weight_block_size": list(BLOCK), "modules_to_not_convert": ["lm_head"]},
        lambda weight: fp8(weight, BRAIN),
    ),
    "gptq": Dialect(_GPTQ, _gptq(HALF)),
    "gptq_zeros": Dialect({**_GPTQ, "sym": False}, _gptq(HALF, symmetric=False)),
    "gptq_v2_zeros": Dialect(
        {**_GPTQ, "sym": False, "checkpoint_format": "gptq_v2"}, _gptq(HALF, symmetric=False, version=2)
    ),
    "auto_round": Dialect(_ROUND, _gptq(HALF, signs=True)),
    "awq": Dialect({**_AWQ, "modules_to_not_convert": None}, _awq),
    "pack_quantized": Dialect(_packed_config(True), _packed(BRAIN, True)),
    "pack_quantized_zeros": Dialect(_packed_config(False), _packed(BRAIN, False)),
}
CODED = (".q_proj", ".k_proj", ".v_proj", ".o_proj", ".gate_proj", ".up_proj", ".down_proj")
CODED += (".in_proj_qkv", ".in_proj_z", ".out_proj")


def save_quantised(
    family: str,
    folder: Path,
    dialect: str,
    *,
    coded: tuple[str, ...] = CODED,
    changes: Mapping[str, Any] | None = None,
) -> tuple[Path, Path]:
    """A random target quantised, and its twin of the plain weights that it stands for.

    Args:
        coded: modules whose names end so are quantised. changes: of the quantization_config.
    """
    twin, quantised_folder = folder / "twin", folder / "quantised"
    save_model(family, twin, **SIZES)
    quantise(twin, quantised_folder, dialect, coded=coded, changes=changes)
    return quantised_folder, twin


def quantise(
    twin: Path,
    folder: Path,
    dialect: str,
    *,
    coded: tuple[str, ...] = CODED,
    changes: Mapping[str, Any] | None = None,
) -> None:
    """Quantise a checkpoint to another folder, and put the plain weights that this stands for in its place.

    Args:
        coded, changes: as of ``save_quantised``.
    """
    shutil.copytree(twin, folder)
    writer = DIALECTS[dialect]
    stored: Tensors = {}
    meant: Tensors = {}
    for name, tensor in load_file(twin / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.endswith(coded):
            found, weight = writer.encode(tensor.float())
            stored |= {f"{module}.{each}": value.contiguous() for each, value in found.items()}
            meant[name] = weight
        else:
            stored[name] = meant[name] = tensor
    save_file(meant, twin / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((twin / "config.json").read_text())
    config["quantization_config"] = {**writer.config, **(changes or {})}
    (folder / "config.json").write_text(json.dumps(config))


def edit(folder: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    """Rewrite a checkpoint's tensors one by one."""
    file = folder / "model.safetensors"
    tensors = {name: change(name, tensor).contiguous() for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})

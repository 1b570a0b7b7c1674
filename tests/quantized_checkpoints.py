"""Tiny targets quantized as published files have them, one value at a time, and what their codes stand for.

Each dialect is written out in NumPy after its description, none with the reader's functions.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.families import save_model

Tensors = dict[str, torch.Tensor]
Encoded = tuple[Tensors, torch.Tensor]  # a matrix's tensors, and what they stand for
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
GROUP = 32
BLOCK = (32, 32)
HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32


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


@dataclass(frozen=True)
class Grid:
    """How finely integers are quantized: their bits, the width of a group (0: a row), and how a scale is rounded."""

    bits: int = 4
    group: int = GROUP
    symmetric: bool = True
    scale_dtype: torch.dtype = HALF
    negative: bool = False  # the scales of every other row are

    @property
    def per_word(self) -> int:
        return 32 // self.bits

    def quantized(self, weight: torch.Tensor) -> Matrix:
        rows, columns = weight.shape
        middle = 2 ** (self.bits - 1)
        groups = weight.float().view(rows, -1, self.group or columns)
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scales = groups.abs().amax(2) / (middle - 1) if self.symmetric else (high - low) / (2 * middle - 1)
        scales = scales.clamp(min=1e-4).to(self.scale_dtype).float()
        zeros = torch.full_like(scales, middle) if self.symmetric else (-low / scales).round().clamp(1, 2 * middle - 1)
        if self.negative:
            scales[::2] *= -1
        codes = (groups / scales.unsqueeze(2)).round().add(zeros.unsqueeze(2)).clamp(0, 2 * middle - 1)
        whole = codes.view(rows, columns).numpy().astype(np.int64)
        return Matrix(whole, scales.numpy(), zeros.numpy().astype(np.int64))


def words(codes: np.ndarray) -> torch.Tensor:
    """Codes [..., 8] of four bits or [..., 4] of eight, the first in the lowest bits, as int32."""
    bits = 32 // codes.shape[-1]
    packed = np.zeros(codes.shape[:-1], np.uint64)
    for place in range(codes.shape[-1]):
        packed |= codes[..., place].astype(np.uint64) << np.uint64(bits * place)
    return torch.from_numpy(packed.astype(np.uint32).view(np.int32).copy())


def gptq(matrix: Matrix, grid: Grid, zero_offset: int) -> Tensors:
    """qweight [K / 8, N], qzeros [K / G, N / 8], scales [K / G, N], g_idx [K]; 4 for 8 in eight bits."""
    columns, per_word = matrix.codes.shape[1], grid.per_word
    zeros = (matrix.zeros.T - zero_offset) & (2**grid.bits - 1)
    return {
        "qweight": words(matrix.codes.T.reshape(columns // per_word, per_word, -1).transpose(0, 2, 1)),
        "qzeros": words(zeros.reshape(len(zeros), -1, per_word)),
        "scales": torch.from_numpy(matrix.scales.T.copy()).to(grid.scale_dtype),
        "g_idx": (torch.arange(columns) // (grid.group or columns)).int(),
    }


AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # of an octet, from the lowest bits on


def awq(matrix: Matrix, grid: Grid) -> Tensors:
    """qweight [K, N / 8], qzeros [K / G, N / 8], scales [K / G, N]."""

    def packed(rows: np.ndarray) -> torch.Tensor:
        return words(rows.reshape(len(rows), -1, 8)[..., AWQ_COLUMNS])

    return {
        "qweight": packed(matrix.codes.T),
        "qzeros": packed(matrix.zeros.T),
        "scales": torch.from_numpy(matrix.scales.T.copy()).to(grid.scale_dtype),
    }


def pack_quantized(matrix: Matrix, grid: Grid) -> Tensors:
    """weight_packed [N, K / 8], weight_scale [N, K / G], weight_zero_point [N / 8, K / G]; 4 for 8 in eight bits."""
    rows, columns = matrix.codes.shape
    found = {
        "weight_packed": words(matrix.codes.reshape(rows, -1, grid.per_word)),
        "weight_scale": torch.from_numpy(matrix.scales).to(grid.scale_dtype),
        "weight_shape": torch.tensor([rows, columns]),
    }
    if not grid.symmetric:
        zeros = matrix.zeros.reshape(rows // grid.per_word, grid.per_word, -1).transpose(0, 2, 1)
        found["weight_zero_point"] = words(zeros)
    return found


def int_quantized(matrix: Matrix, grid: Grid) -> Tensors:
    """weight [N, K] and weight_zero_point [N, K / G] as signed bytes, weight_scale [N, K / G]."""
    found = {
        "weight": torch.from_numpy((matrix.codes - 128).astype(np.int8)),
        "weight_scale": torch.from_numpy(matrix.scales).to(grid.scale_dtype),
    }
    if not grid.symmetric:
        found["weight_zero_point"] = torch.from_numpy((matrix.zeros - 128).astype(np.int8))
    return found


def fp8(weight: torch.Tensor, block: tuple[int, int], scale_dtype: torch.dtype, scales_name: str) -> Encoded:
    """weight [N, K] as e4m3, and scales [blocks of rows, blocks of columns]."""
    rows, columns = weight.shape
    scales = torch.zeros(-(-rows // block[0]), -(-columns // block[1]))
    codes, meant = torch.zeros_like(weight), torch.zeros_like(weight)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            part = (slice(row * block[0], (row + 1) * block[0]), slice(column * block[1], (column + 1) * block[1]))
            scale = (weight[part].abs().max() / 448).clamp(min=1e-6).to(scale_dtype).float()
            scales[row, column] = scale
            codes[part] = (weight[part] / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
            meant[part] = codes[part] * scale
    return {"weight": codes.to(torch.float8_e4m3fn), scales_name: scales.to(scale_dtype)}, meant


MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)  # of e2m1, by its lower three bits


def e2m1(scaled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest codes of numbers [N, K], two to a byte, the first in its lower half; and what they stand for."""
    numbers = scaled.numpy()
    nearest = np.abs(np.abs(numbers)[..., None] - MAGNITUDES).argmin(-1)
    codes = nearest + 8 * (numbers < 0)
    packed = (codes[:, ::2] + 16 * codes[:, 1::2]).astype(np.uint8)
    meant = np.where(codes >= 8, -1, 1).astype(np.float32) * MAGNITUDES[codes % 8]
    return torch.from_numpy(packed), torch.from_numpy(meant)


def nvfp4(weight: torch.Tensor, compressed: bool) -> Encoded:
    """Codes, a scale for each 16 (e4m3), and one for all: of ModelOpt, or its reciprocal of compressed-tensors."""
    groups = weight.view(len(weight), -1, 16)
    of_all = weight.abs().max() / 2688
    reciprocal = 1 / of_all
    if compressed:
        of_all = 1 / reciprocal
    scales = (groups.abs().amax(2) / 6 / of_all).clamp(min=2**-6).to(torch.float8_e4m3fn)
    factors = scales.float().repeat_interleave(16, 1)
    codes, values = e2m1(weight / (factors * of_all))
    meant = values * factors * of_all
    if compressed:
        unused = {"input_global_scale": torch.tensor([7.0])}
        stored = {"weight_packed": codes, "weight_scale": scales, "weight_global_scale": reciprocal.reshape(1)}
        return {**stored, **unused}, meant
    stored = {"weight": codes, "weight_scale": scales, "weight_scale_2": of_all, "input_scale": torch.tensor(7.0)}
    return stored, meant


def mxfp4(weight: torch.Tensor) -> Encoded:
    """weight_packed [N, K / 2], weight_scale [N, K / 32]: exponents of two, 127 more."""
    groups = weight.view(len(weight), -1, 32)
    exponents = groups.abs().amax(2).clamp(min=1e-6).log2().floor() - 2
    factors = torch.exp2(exponents).repeat_interleave(32, 1)
    codes, values = e2m1(weight / factors)
    return {"weight_packed": codes, "weight_scale": (exponents + 127).to(torch.uint8)}, values * factors


@dataclass(frozen=True)
class Dialect:
    """How a quantizer writes: its configuration, and a matrix's tensors with what they stand for."""

    config: Mapping[str, Any]
    encode: Callable[[torch.Tensor], Encoded]


def _integers(write: Callable[[Matrix, Grid], Tensors], grid: Grid) -> Callable[[torch.Tensor], Encoded]:
    def encode(weight: torch.Tensor) -> Encoded:
        matrix = grid.quantized(weight)
        return write(matrix, grid), matrix.weight

    return encode


def _gptq(grid: Grid, **changes: Any) -> Dialect:
    offset = 0 if changes.get("checkpoint_format") == "gptq_v2" else 1
    config = {"quant_method": "gptq", "desc_act": False, "lm_head": False, "bits": grid.bits, "sym": grid.symmetric}
    config["group_size"] = grid.group or -1
    return Dialect({**config, **changes}, _integers(lambda matrix, grid: gptq(matrix, grid, offset), grid))


def _auto_round(grid: Grid, write: Callable[[Matrix, Grid], Tensors], packing: str) -> Dialect:
    config = {"quant_method": "auto-round", "bits": grid.bits, "group_size": grid.group, "sym": grid.symmetric}
    return Dialect({**config, "data_type": "int", "packing_format": packing}, _integers(write, grid))


IGNORED = ["lm_head", "re:.*linear_attn.in_proj_[ab]$"]


def _compressed(layout: str, encode: Callable[[torch.Tensor], Encoded], **weights: Any) -> Dialect:
    group = {"targets": ["Linear"], "weights": {"type": "float", "symmetric": True, "dynamic": False, **weights}}
    groups = {"group_0": group}
    config = {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups, "ignore": IGNORED}
    return Dialect(config, encode)


def _compressed_int(write: Callable[[Matrix, Grid], Tensors], grid: Grid, layout: str = "pack-quantized") -> Dialect:
    told = {"num_bits": grid.bits, "type": "int", "symmetric": grid.symmetric, "group_size": grid.group or None}
    return _compressed(layout, _integers(write, grid), **told, strategy="group" if grid.group else "channel")


def _fp8_rows(strategy: str, scale_dtype: torch.dtype, shape: tuple[int, ...]) -> Callable[[torch.Tensor], Encoded]:
    """A scale for the matrix or for each row; in what shape a scale for the matrix is stored."""

    def encode(weight: torch.Tensor) -> Encoded:
        block = (len(weight) if strategy == "tensor" else 1, weight.shape[1])
        stored, meant = fp8(weight, block, scale_dtype, "weight_scale")
        stored["weight_scale"] = stored["weight_scale"].reshape(shape)
        return {**stored, "input_scale": torch.tensor(7.0)}, meant

    return encode


def _modelopt(algorithm: str, encode: Callable[[torch.Tensor], Encoded]) -> Dialect:
    ignore = ["lm_head", "*linear_attn.in_proj_a", "*linear_attn.in_proj_b"]
    return Dialect({"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ignore}, encode)


def fp8_blocks(block: tuple[int, int] = BLOCK) -> Dialect:
    """Of DeepSeek and Qwen, where blocks are 128 by 128; tests of tiny models take smaller ones."""
    config = {"quant_method": "fp8", "weight_block_size": list(block), "modules_to_not_convert": ["lm_head"]}
    return Dialect(config, lambda weight: fp8(weight, block, BRAIN, "weight_scale_inv"))


_ZEROS, _BRAIN = Grid(symmetric=False), Grid(scale_dtype=BRAIN)
_ROUND = Grid(negative=True)
_BYTES = Grid(bits=8)
_ROWS = Grid(bits=8, group=0, scale_dtype=FULL)
DIALECTS: dict[str, Dialect] = {
    "fp8": fp8_blocks(),
    "fp8_tensor": Dialect(
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        _fp8_rows("tensor", FULL, (1,)),
    ),
    "float_quantized_channel": _compressed(
        "float-quantized", _fp8_rows("channel", BRAIN, (-1, 1)), num_bits=8, strategy="channel"
    ),
    "float_quantized_tensor": _compressed(
        "float-quantized", _fp8_rows("tensor", BRAIN, (1,)), num_bits=8, strategy="tensor"
    ),
    "float_quantized_block": _compressed(
        "float-quantized",
        lambda weight: fp8(weight, BLOCK, BRAIN, "weight_scale"),
        num_bits=8,
        strategy="block",
        block_structure=list(BLOCK),
    ),
    "modelopt_fp8": _modelopt("FP8", _fp8_rows("tensor", FULL, ())),
    "modelopt_fp8_channel": _modelopt("FP8_PER_CHANNEL_PER_TOKEN", _fp8_rows("channel", FULL, (-1,))),
    "gptq": _gptq(Grid()),
    "gptq_zeros": _gptq(_ZEROS),
    "gptq_v2_zeros": _gptq(_ZEROS, checkpoint_format="gptq_v2"),
    "gptq_rows": _gptq(Grid(group=0)),
    "gptq_8": _gptq(_BYTES),
    "gptq_8_zeros": _gptq(Grid(bits=8, symmetric=False)),
    "auto_round": _auto_round(_ROUND, lambda matrix, grid: gptq(matrix, grid, 1), "auto_round:auto_gptq"),
    "auto_round_8": _auto_round(
        Grid(bits=8, negative=True), lambda matrix, grid: gptq(matrix, grid, 1), "auto_round:auto_gptq"
    ),
    "auto_round_awq": _auto_round(_ROUND, awq, "auto_round:auto_awq"),
    "awq": Dialect(
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
        _integers(awq, _ZEROS),
    ),
    "pack_quantized": _compressed_int(pack_quantized, _BRAIN),
    "pack_quantized_zeros": _compressed_int(pack_quantized, Grid(symmetric=False, scale_dtype=BRAIN)),
    "pack_quantized_8": _compressed_int(pack_quantized, Grid(bits=8, scale_dtype=BRAIN)),
    "pack_quantized_8_rows_zeros": _compressed_int(
        pack_quantized, Grid(bits=8, group=0, symmetric=False, scale_dtype=BRAIN)
    ),
    "int_quantized": _compressed_int(int_quantized, _ROWS, "int-quantized"),
    "int_quantized_zeros": _compressed_int(
        int_quantized, Grid(bits=8, group=0, symmetric=False, scale_dtype=BRAIN), "int-quantized"
    ),
    "modelopt_nvfp4": _modelopt("NVFP4", lambda weight: nvfp4(weight, compressed=False)),
    "nvfp4_pack_quantized": _compressed(
        "nvfp4-pack-quantized",
        lambda weight: nvfp4(weight, compressed=True),
        num_bits=4,
        strategy="tensor_group",
        group_size=16,
    ),
    "mxfp4_pack_quantized": _compressed("mxfp4-pack-quantized", mxfp4, num_bits=4, strategy="group", group_size=32),
}
CODED = (
    *(".q_proj", ".k_proj", ".v_proj", ".o_proj", ".gate_proj", ".up_proj", ".down_proj"),
    *(".in_proj_qkv", ".in_proj_z", ".out_proj"),
)


def save_quantized(
    family: str,
    folder: Path,
    dialect: str,
    *,
    coded: Iterable[str] = CODED,
    changes: Mapping[str, Any] | None = None,
    sizes: Mapping[str, Any] | None = None,
) -> tuple[Path, Path]:
    """A random target quantized, and its twin of the plain weights that it stands for.

    Args:
        coded: modules whose names end so are quantized; of a mapping each in a dialect of its own.
        changes: of the quantization_config. sizes: of the target, beside ``SIZES``.
    """
    twin, quantized_folder = folder / "twin", folder / "quantized"
    save_model(family, twin, **{**SIZES, **(sizes or {})})
    quantize_checkpoint(twin, quantized_folder, dialect, coded=coded, changes=changes)
    return quantized_folder, twin


def quantize_checkpoint(
    twin: Path, folder: Path, dialect: str, *, coded: Iterable[str] = CODED, changes: Mapping[str, Any] | None = None
) -> None:
    """Quantize a checkpoint to another folder, and put the plain weights that this stands for in its place.

    Args:
        coded, changes: as of ``save_quantized``.
    """
    shutil.copytree(twin, folder)
    dialects = coded if isinstance(coded, Mapping) else dict.fromkeys(coded, dialect)
    stored: Tensors = {}
    meant: Tensors = {}
    for name, tensor in load_file(twin / "model.safetensors").items():
        module = name.removesuffix(".weight")
        ending = next((each for each in dialects if module.endswith(each)), None)
        if ending is not None:
            found, weight = DIALECTS[dialects[ending]].encode(tensor.float())
            stored |= {f"{module}.{each}": value.contiguous() for each, value in found.items()}
            meant[name] = weight
        else:
            stored[name] = meant[name] = tensor
    save_file(meant, twin / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((twin / "config.json").read_text())
    config["quantization_config"] = {**DIALECTS[dialect].config, **(changes or {})}
    (folder / "config.json").write_text(json.dumps(config))


def join_experts(folder: Path) -> None:
    """Store the plain experts of each layer together, as published qwen3_5_moe files do."""
    with rewritten(folder) as tensors:
        count = 1 + max(int(name.split(".experts.")[1].split(".")[0]) for name in tensors if ".experts." in name)
        for at in sorted({name.split(".experts.")[0] for name in tensors if ".experts." in name}):

            def taken(part: str, at: str = at) -> torch.Tensor:
                return torch.stack([tensors.pop(f"{at}.experts.{each}.{part}_proj.weight") for each in range(count)])

            tensors[f"{at}.experts.gate_up_proj"] = torch.cat([taken("gate"), taken("up")], 1)
            tensors[f"{at}.experts.down_proj"] = taken("down")


def experts_in_mxfp4(folder: Path) -> Tensors:
    """Store random codes for the experts of a gpt_oss checkpoint, as it is published.

    Returns:
        what they stand for [E, in, out], by the names of the tensors that they replace.
    """
    file, generator = folder / "model.safetensors", torch.Generator().manual_seed(5)
    tensors, meant = load_file(file), Tensors()
    for name in [name for name in tensors if name.endswith((".gate_up_proj", ".down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape  # in memory [E, in, out], stored by output row
        shape = (experts, rows, columns // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 126, shape, generator=generator, dtype=torch.uint8)
        codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).long()  # the low half is the even element
        values = torch.from_numpy(MAGNITUDES)[codes & 7] * torch.where(codes > 7, -1, 1)
        meant[name] = (values * 2.0 ** (scales.float() - 127).unsqueeze(-1)).flatten(2).transpose(1, 2)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(config))
    return meant


@contextmanager
def rewritten(folder: Path) -> Iterator[Tensors]:
    """Give a checkpoint's tensors, and write what has become of them."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    yield tensors
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})


def edit(folder: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    """Rewrite a checkpoint's tensors one by one."""
    with rewritten(folder) as tensors:
        tensors.update({name: change(name, tensor) for name, tensor in tensors.items()})

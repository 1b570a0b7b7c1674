"""Random tensors of quantised checkpoints in their published layouts, drawn where they are made.

Codes are random; what hides faults in plain noise is not plain: a few channels of the residual stream are large (rows
of the matrices that write to it have outlier scales), scales differ by group, AutoRound's are half of them negative,
and norms of queries and keys have a few large weights, so that attention looks at few keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.random_pair import Stored
from dflash_local.checkpoint_files.gguf_quantization import METHOD as GGUF
from dflash_local.config.module_names import HEAD
from dflash_local.config.quantization import WHOLE, StoredFormat, StoredFp4, StoredFp8, StoredInt
from dflash_local.config.quantizers import USUAL

# Layouts by name: the usual ones, and other quantisers' dialects of them.
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    **{name: each for name, each in USUAL.items() if each["quant_method"] != GGUF},  # which has files of its own
    "autoround-g128": {"quant_method": "auto-round", "bits": 4, "sym": True, "group_size": 128},
    "pack-g32-zeros": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "strategy": "group",
                    "group_size": 32,
                    "symmetric": False,
                },
            }
        },
        "ignore": [HEAD],
    },
}
OUTLIER_CHANNELS, OUTLIER = 6, 20.0  # of the residual stream, and how many times as large
PEAKED, PEAK = 4, 3.0  # weights of a norm of queries or keys, and what is added to them
GPTQ_ZERO = {4: 0x77777777, 8: 0x7F7F7F7F}  # symmetric: the middle code less one
RESIDUAL = (".o_proj", ".out_proj", ".down_proj")


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix [rows, columns] to be stored. gain: of what it adds. signed: half of its scales are negative."""

    module: str
    rows: int
    columns: int
    gain: float
    generator: torch.Generator
    signed: bool = False

    def tensor(self, name: str, dtype: str, shape: tuple[int, ...], make: Callable[[], torch.Tensor]) -> Stored:
        """One of its tensors."""
        return Stored(f"{self.module}.{name}", dtype, shape, make)

    def words(self, *shape: int) -> torch.Tensor:
        """Random bits."""
        out = torch.empty(shape, dtype=torch.int32, device=self.generator.device)
        return out.random_(-(2**31), 2**31, generator=self.generator)

    def scales(self, groups: int, spread: float, dtype: torch.dtype, rows: int = 0) -> torch.Tensor:
        """[rows, groups] of codes that spread so far."""
        rows, outlier = (rows, OUTLIER / 4) if rows else (self.rows, OUTLIER)  # a block of rows is more than a few
        size = self.gain * self.columns**-0.5 / spread
        found = torch.randn(rows, groups, generator=self.generator, device=self.generator.device)
        found = found.mul_(0.2).exp_().mul_(size)
        if self.module.endswith(RESIDUAL):
            found[: max(1, rows * OUTLIER_CHANNELS // self.rows)] *= outlier
        if self.signed:
            found[1::2] *= -1
        return found.to(dtype)


def stored_tensors(matrix: Matrix, form: StoredFormat) -> list[Stored]:
    """A matrix as a checkpoint of that format has it.

    Raises:
        ValueError: the layout is not written here.
    """
    if isinstance(form, StoredInt):
        return _integers(matrix, form)
    if isinstance(form, StoredFp8):
        return _fp8(matrix, form)
    return _fp4(matrix, form)


def peaked(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A norm's weight as it is, but for a few large ones of queries and keys."""
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        tensor[:PEAKED] += PEAK
    return tensor


def _integers(matrix: Matrix, form: StoredInt) -> list[Stored]:
    n, k, per_word = matrix.rows, matrix.columns, 32 // form.bits
    size = k if form.group_size == WHOLE else form.group_size
    groups, spread = k // size, 4.64 if form.bits == 4 else 73.9
    device = matrix.generator.device

    def zeros(*shape: int) -> torch.Tensor:
        """Near the middle: each code of a word is 7 or 8, or 0x77 or 0x78."""
        low = GPTQ_ZERO[form.bits]
        ones = 0x11111111 if form.bits == 4 else 0x01010101
        return low + (matrix.words(*shape) & ones)

    if form.dialect == "pack-quantized":
        found = [
            matrix.tensor("weight_packed", "I32", (n, k // per_word), lambda: matrix.words(n, k // per_word)),
            matrix.tensor("weight_scale", "BF16", (n, groups), lambda: matrix.scales(groups, spread, torch.bfloat16)),
            matrix.tensor("weight_shape", "I64", (2,), lambda: torch.tensor([n, k])),
        ]
        shape = (n // per_word, groups)
        return [*found, matrix.tensor("weight_zero_point", "I32", shape, lambda: zeros(*shape))][: 3 + form.zeros]
    found = [
        matrix.tensor(
            "scales", "F16", (groups, n), lambda: matrix.scales(groups, spread, torch.float16).t().contiguous()
        )
    ]
    shape = (groups, n // per_word)
    if form.dialect == "awq":
        codes = matrix.tensor("qweight", "I32", (k, n // per_word), lambda: matrix.words(k, n // per_word))
        return [codes, *found, matrix.tensor("qzeros", "I32", shape, lambda: zeros(*shape))]
    if form.dialect not in ("gptq", "gptq_v2"):
        raise ValueError(f"{form.dialect} is not written here")
    constant = torch.full(shape, GPTQ_ZERO[form.bits], dtype=torch.int32)
    return [
        matrix.tensor("qweight", "I32", (k // per_word, n), lambda: matrix.words(k // per_word, n)),
        *found,
        matrix.tensor("qzeros", "I32", shape, lambda: zeros(*shape) if form.zeros else constant),
        matrix.tensor("g_idx", "I32", (k,), lambda: torch.arange(k, device=device, dtype=torch.int32) // size),
    ]


def _fp8(matrix: Matrix, form: StoredFp8) -> list[Stored]:
    n, k = matrix.rows, matrix.columns

    def codes() -> torch.Tensor:
        normal = torch.randn(n, k, generator=matrix.generator, device=matrix.generator.device)
        return normal.mul_(64).clamp_(-448, 448).to(torch.float8_e4m3fn)

    weight = matrix.tensor("weight", "F8_E4M3", (n, k), codes)
    rows, columns = form.block
    if columns == WHOLE and rows == WHOLE:
        return [weight, matrix.tensor("weight_scale", "F32", (), lambda: torch.tensor(matrix.gain * k**-0.5 / 64))]
    if columns == WHOLE:
        return [weight, matrix.tensor("weight_scale", "BF16", (n, 1), lambda: matrix.scales(1, 64, torch.bfloat16))]
    blocks = (-(-n // rows), -(-k // columns))
    make = partial(matrix.scales, blocks[1], 64, torch.bfloat16, blocks[0])
    return [weight, matrix.tensor("weight_scale_inv", "BF16", blocks, make)]


def _fp4(matrix: Matrix, form: StoredFp4) -> list[Stored]:
    n, k, groups = matrix.rows, matrix.columns, matrix.columns // form.group_size

    def codes() -> torch.Tensor:
        return matrix.words(n, k // 8).view(torch.uint8)

    if form.dialect == "nvfp4":  # ModelOpt's; random e2m1 codes spread 2.9
        size = matrix.gain * k**-0.5 / 2.9
        return [
            matrix.tensor("weight", "U8", (n, k // 2), codes),
            matrix.tensor(
                "weight_scale",
                "F8_E4M3",
                (n, groups),
                lambda: (matrix.scales(groups, 2.9, torch.float32) * 16 / size).to(torch.float8_e4m3fn),
            ),
            matrix.tensor("weight_scale_2", "F32", (), lambda: torch.tensor(size / 16)),
        ]
    if form.dialect != "mxfp4-pack-quantized":
        raise ValueError(f"{form.dialect} is not written here")
    return [
        matrix.tensor("weight_packed", "U8", (n, k // 2), codes),
        matrix.tensor("weight_scale", "U8", (n, groups), lambda: _exponents(matrix, groups)),
    ]


def stacked_mxfp4(matrix: Matrix, experts: int) -> list[Stored]:
    """gpt-oss's experts of a layer, whose rows lie below each other in ``matrix``: codes [E, N, K / 32, 16], exponents.

    Args:
        matrix: its module is the name of the tensor that they stand for.
    """
    groups = matrix.columns // 32
    shape = experts, matrix.rows // experts, groups

    def codes() -> torch.Tensor:
        return matrix.words(matrix.rows, matrix.columns // 8).view(torch.uint8).view(*shape, 16)

    return [
        Stored(f"{matrix.module}_blocks", "U8", (*shape, 16), codes),
        Stored(f"{matrix.module}_scales", "U8", shape, lambda: _exponents(matrix, groups).view(shape)),
    ]


def _exponents(matrix: Matrix, groups: int) -> torch.Tensor:
    """Of powers of two, as bytes."""
    return matrix.scales(groups, 2.9, torch.float32).log2().round().add(127).to(torch.uint8)

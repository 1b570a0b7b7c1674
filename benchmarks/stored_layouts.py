"""Random tensors of quantised checkpoints in their published layouts.

Codes are random; what hides faults in plain noise is not plain: a few channels of the residual stream are large (rows
of the matrices that write to it have outlier scales), scales differ by group, and half of AutoRound's are negative.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dflash_local.checkpoint_files.gguf_quantization import METHOD as GGUF
from dflash_local.config.quantization import WHOLE, StoredFormat, StoredFp4, StoredFp8, StoredInt
from dflash_local.config.quantizers import USUAL

# Layouts by name: the usual ones, and AutoRound's dialect; GGUF has files of its own.
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    **{name: each for name, each in USUAL.items() if each["quant_method"] != GGUF},
    "autoround-g128": {"quant_method": "auto-round", "bits": 4, "sym": True, "group_size": 128},
}
OUTLIER_CHANNELS, OUTLIER = 6, 20.0  # of the residual stream, and how many times as large
RESIDUAL = (".o_proj", ".out_proj", ".down_proj")
GPTQ_ZERO = {4: 0x77777777, 8: 0x7F7F7F7F}  # symmetric: the middle code less one
ONES = {4: 0x11111111, 8: 0x01010101}
INT_SPREAD = {4: 4.64, 8: 73.9}  # deviation of random codes
FP8_SPREAD, FP4_SPREAD = 64.0, 2.9

Tensors = Iterator[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix [rows, columns] to be stored. gain: of what it adds. signed: half of its scales are negative."""

    module: str
    rows: int
    columns: int
    gain: float
    generator: torch.Generator
    signed: bool = False

    def words(self, *shape: int) -> torch.Tensor:
        """Draw random bits, as int32."""
        out = torch.empty(shape, dtype=torch.int32, device=self.generator.device)
        return out.random_(-(2**31), 2**31, generator=self.generator)

    def scales(self, groups: int, spread: float, dtype: torch.dtype, rows: int = 0) -> torch.Tensor:
        """Draw [rows, groups] scales of codes that spread so far."""
        rows, outlier = (rows, OUTLIER / 4) if rows else (self.rows, OUTLIER)  # a block of rows is more than a few
        size = self.gain * self.columns**-0.5 / spread
        found = torch.randn(rows, groups, generator=self.generator, device=self.generator.device)
        found = found.mul_(0.2).exp_().mul_(size)
        if self.module.endswith(RESIDUAL):
            found[: max(1, rows * OUTLIER_CHANNELS // self.rows)] *= outlier
        if self.signed:
            found[1::2] *= -1
        return found.to(dtype)

    def exponents(self, groups: int) -> torch.Tensor:
        """Draw scales [rows, groups] that are powers of two, as bytes."""
        return self.scales(groups, FP4_SPREAD, torch.float32).log2().round().add(127).to(torch.uint8)


def stored_tensors(matrix: Matrix, form: StoredFormat) -> Tensors:
    """Yield names and tensors of a matrix as a checkpoint of that format has it. ValueError: it is not written here."""
    if isinstance(form, StoredInt):
        found = _integers(matrix, form)
    elif isinstance(form, StoredFp8):
        found = _fp8(matrix, form)
    else:
        found = _fp4(matrix, form)
    for name, tensor in found:
        yield f"{matrix.module}.{name}", tensor


def _integers(matrix: Matrix, form: StoredInt) -> Tensors:
    n, k, per_word = matrix.rows, matrix.columns, 32 // form.bits
    size = k if form.group_size == WHOLE else form.group_size
    groups = k // size
    if form.dialect not in ("awq", "gptq", "gptq_v2"):
        raise ValueError(f"{form.dialect} is not written here")
    awq = form.dialect == "awq"
    yield "qweight", matrix.words(k, n // per_word) if awq else matrix.words(k // per_word, n)
    yield "scales", matrix.scales(groups, INT_SPREAD[form.bits], torch.float16).t()
    # Near the middle: each code of a word is 7 or 8, or 0x77 or 0x78.
    near = matrix.words(groups, n // per_word) & (ONES[form.bits] if form.zeros else 0)
    yield "qzeros", near + GPTQ_ZERO[form.bits]
    if not awq:
        yield "g_idx", torch.arange(k, dtype=torch.int32) // size


def _fp8(matrix: Matrix, form: StoredFp8) -> Tensors:
    n, k = matrix.rows, matrix.columns
    normal = torch.randn(n, k, generator=matrix.generator, device=matrix.generator.device)
    yield "weight", normal.mul_(FP8_SPREAD).clamp_(-448, 448).to(torch.float8_e4m3fn)
    rows, columns = form.block
    if columns == WHOLE and rows == WHOLE:
        yield "weight_scale", torch.tensor(matrix.gain * k**-0.5 / FP8_SPREAD)
    elif columns == WHOLE:
        yield "weight_scale", matrix.scales(1, FP8_SPREAD, torch.bfloat16)
    else:
        yield "weight_scale_inv", matrix.scales(-(-k // columns), FP8_SPREAD, torch.bfloat16, -(-n // rows))


def _fp4(matrix: Matrix, form: StoredFp4) -> Tensors:
    n, k, groups = matrix.rows, matrix.columns, matrix.columns // form.group_size
    codes = matrix.words(n, k // 8).view(torch.uint8)
    if form.dialect == "nvfp4":  # ModelOpt's
        size = matrix.gain * k**-0.5 / FP4_SPREAD / 16
        yield "weight", codes
        yield "weight_scale", (matrix.scales(groups, FP4_SPREAD, torch.float32) / size).to(torch.float8_e4m3fn)
        yield "weight_scale_2", torch.tensor(size)
    elif form.dialect == "mxfp4-pack-quantized":
        yield "weight_packed", codes
        yield "weight_scale", matrix.exponents(groups)
    else:
        raise ValueError(f"{form.dialect} is not written here")


def stacked_mxfp4(matrix: Matrix, experts: int) -> Tensors:
    """Yield gpt-oss's experts of a layer: codes [E, N, K / 32, 16] and exponents.

    Args:
        matrix: their rows below each other; its module is the name of the tensor that they stand for.
    """
    groups = matrix.columns // 32
    shape = experts, matrix.rows // experts, groups
    yield f"{matrix.module}_blocks", matrix.words(matrix.rows, matrix.columns // 8).view(torch.uint8).view(*shape, 16)
    yield f"{matrix.module}_scales", matrix.exponents(groups).view(shape)

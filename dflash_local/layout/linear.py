"""Matrices in their formats: a product that joins several of a checkpoint's matrices, and the tensors it takes.

A format is one class here (its tensors) and one in ``models.fused.formats`` (how they are filled and multiplied). Parts
of a product may differ in format: neighbours of one format are one weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dflash_local.config.quantization import (
    GGUF_TYPES,
    SUPER_BLOCK,
    WHOLE,
    IntDialect,
    Quantization,
    StoredFormat,
    StoredFp4,
    StoredFp8,
    StoredGguf,
    StoredInt,
    StoredPlain,
)
from dflash_local.layout.buffer import Buffer, Group

WORD_BITS = 32  # of the words that integer codes and those of four bits are kept in
INT4_PER_WORD, INT8_PER_WORD = WORD_BITS // 4, WORD_BITS // 8
KEPT_AS: IntDialect = "pack-quantized"  # of what is quantised here: its words are in the order of our own
INT8_ROWS = StoredInt(KEPT_AS, WHOLE, bits=8)
DEQUANTIZED_SLICE = 2**22  # weights of a coded matrix that are decoded at a time where no kernel multiplies the codes
DECODED_SLICE = 2**25  # that a kernel decodes at a time to two bytes each, for a prompt's products
TILE_N, STEP_K = 16, 128  # rows and columns of a coded matrix that the skinny GEMM kernels take at a time
ROW_TILE, SLICE_ROWS = 8, 16  # rows of a block that one instruction multiplies, and a launch of the skinny GEMM kernels
DEQUANTIZED_BYTES = 24  # that each of them takes meanwhile: code, scale, zero and their products in 32 bits


def code_room(out_features: int, in_features: int, bits: int, item_bits: int = WORD_BITS) -> tuple[int, int]:
    """Return room for codes of so many bits of whole tiles and steps, in elements: they are packed where they lie."""
    return -(-out_features // TILE_N) * TILE_N, -(-in_features // STEP_K) * STEP_K * bits // item_bits


def scale_room(out_features: int, in_features: int, group_size: int) -> tuple[int, int]:
    """Return the room of scales of groups along the input, as ``code_room``."""
    steps = -(-in_features // STEP_K)
    of_step = STEP_K // group_size if STEP_K % group_size == 0 else 1
    return -(-out_features // TILE_N) * TILE_N, -(-steps // -(-group_size // STEP_K)) * of_step


def _roomy(name: str, shape: tuple[int, int], dtype: str, group: Group, room: tuple[int, int]) -> Buffer:
    return Buffer(name, shape, dtype, group, room=None if room == shape else room)


class WeightFormat:
    """Describe which tensors a matrix is kept as. ``stored``: the format in the file; a plain matrix has none."""

    __slots__ = ()
    stored: StoredFormat

    @property
    def name(self) -> str:
        """Name it as the memory breakdown and screens do."""
        return self.stored.name

    def can_concat(self, out_features: int) -> bool:
        """Return True where a matrix may stand below one of so many rows in one weight."""
        return True

    def buffers(self, name: str, out_features: int, in_features: int, dtype: str, group: Group) -> list[Buffer]:
        """Describe the tensors of a matrix [out_features, in_features] whose activations are of ``dtype``."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Unquantized(WeightFormat):
    @property
    def name(self) -> str:
        return "unquantized"

    def buffers(self, name: str, out_features: int, in_features: int, dtype: str, group: Group) -> list[Buffer]:
        return [Buffer(f"{name}.weight", (out_features, in_features), dtype, group)]


@dataclass(frozen=True, slots=True)
class IntGroups(WeightFormat):
    """Integer codes, with a scale and perhaps a zero point for each group along the input.

    Attributes:
        scales: the file's name for them. scale_dtype: of groups; those of whole rows are float32.
    """

    stored: StoredInt
    scale_dtype: str
    scales: str

    def buffers(self, name: str, out_features: int, in_features: int, dtype: str, group: Group) -> list[Buffer]:
        """Return codes, scales, zero points: see ``kernels.quantized_weight.IntWeight``."""
        size, per_word = self.stored.group_size, WORD_BITS // self.stored.bits
        groups = (out_features, 1 if size == WHOLE else -(-in_features // size))
        words = (out_features, -(-in_features // per_word))
        room = scale_room(out_features, in_features, in_features if size == WHOLE else size)
        if size == WHOLE and not self.stored.zeros:
            room = groups  # results are multiplied with them, and they stay as they are
        buffers = [
            _roomy(f"{name}.codes", words, "int32", group, code_room(out_features, in_features, self.stored.bits)),
            _roomy(f"{name}.scales", groups, "float32" if size == WHOLE else self.scale_dtype, group, room),
        ]
        return [*buffers, _roomy(f"{name}.zeros", groups, "uint8", group, room)] if self.stored.zeros else buffers


@dataclass(frozen=True, slots=True)
class Fp8Blocks(WeightFormat):
    """Codes of eight bits (e4m3) and a scale for each block. ``scales``, ``scale_dtype``: as of ``IntGroups``."""

    stored: StoredFp8
    scale_dtype: str
    scales: str

    @property
    def rows(self) -> int:
        """Return the rows of a block as kept: a scale for a whole matrix becomes one for each of its rows."""
        return self.stored.block[0] or 1

    def can_concat(self, out_features: int) -> bool:
        """Return True for whole blocks: they are counted from the first row of each matrix."""
        return out_features % self.rows == 0

    def buffers(self, name: str, out_features: int, in_features: int, dtype: str, group: Group) -> list[Buffer]:
        """Return codes and scales: see ``kernels.quantized_weight.Fp8Weight``."""
        columns = self.stored.block[1]
        blocks = (-(-out_features // self.rows), 1 if columns == WHOLE else -(-in_features // columns))
        return [
            _roomy(
                f"{name}.codes",
                (out_features, in_features),
                "float8_e4m3fn",
                group,
                code_room(out_features, in_features, 8, 8),
            ),
            Buffer(f"{name}.scales", blocks, "float32" if columns == WHOLE else self.scale_dtype, group),
        ]


@dataclass(frozen=True, slots=True)
class Fp4Groups(WeightFormat):
    """Codes of four bits (e2m1), with a scale for each group along the input; NVFP4 has one more for each row."""

    stored: StoredFp4

    @property
    def row_scales(self) -> bool:
        """Return True for NVFP4: a matrix has a scale beside those of its groups, kept as one for each of its rows."""
        return self.stored.matrix_scale

    def buffers(self, name: str, out_features: int, in_features: int, dtype: str, group: Group) -> list[Buffer]:
        """Return codes and scales: see ``kernels.quantized_weight.Fp4Weight``."""
        groups = (out_features, -(-in_features // self.stored.group_size))
        words = (out_features, -(-in_features // INT4_PER_WORD))
        codes = _roomy(f"{name}.codes", words, "int32", group, code_room(out_features, in_features, 4))
        room = scale_room(out_features, in_features, self.stored.group_size)
        if not self.row_scales:
            return [codes, _roomy(f"{name}.scales", groups, "uint8", group, room)]
        return [
            codes,
            _roomy(f"{name}.scales", groups, "float8_e4m3fn", group, room),
            Buffer(f"{name}.row_scales", (out_features,), "float32", group),
        ]


@dataclass(frozen=True, slots=True)
class GgufBlocks(WeightFormat):
    """Hold what the blocks of a GGUF type hold, each part of them in a tensor of its own."""

    stored: StoredGguf

    def buffers(self, name: str, out_features: int, in_features: int, dtype: str, group: Group) -> list[Buffer]:
        """Describe codes, scales, minima, and float16 factors of both: see ``kernels.quantized_weight.GgufWeight``."""
        kept = GGUF_TYPES[self.stored.type]
        words = (out_features, -(-in_features * kept.bits // WORD_BITS))
        groups = (out_features, -(-in_features // kept.group))
        room = scale_room(out_features, in_features, kept.group)
        found = [_roomy(f"{name}.codes", words, "int32", group, code_room(out_features, in_features, kept.bits))]
        found += [
            _roomy(f"{name}.{part}", groups, kept.scales, group, room)
            for part in ("scales", *(("minima",) if kept.minima else ()))
        ]
        if kept.nested:
            factors = 1 + kept.minima
            rows, blocks = scale_room(out_features, in_features, SUPER_BLOCK)
            shape = (out_features, in_features // SUPER_BLOCK * factors)
            found.append(_roomy(f"{name}.factors", shape, "float16", group, (rows, blocks * factors)))
        return found


@dataclass(frozen=True, slots=True)
class QuantizedAtLoad(WeightFormat):
    """Another format, whose codes are made of a plain matrix as it is read."""

    kept: WeightFormat

    @property
    def name(self) -> str:
        return self.kept.name

    def can_concat(self, out_features: int) -> bool:
        return self.kept.can_concat(out_features)

    def buffers(self, name: str, out_features: int, in_features: int, dtype: str, group: Group) -> list[Buffer]:
        return self.kept.buffers(name, out_features, in_features, dtype, group)


UNQUANTIZED = Unquantized()
FormatOf = Callable[[str], WeightFormat]  # of a module by the name that the checkpoint has for it


def unquantized(_module: str) -> WeightFormat:
    return UNQUANTIZED


def stored_formats(quantization: Quantization | None) -> FormatOf:
    """Return the formats of a published checkpoint's matrices, by its configuration alone."""
    if quantization is None:
        return unquantized
    return lambda module: weight_format(quantization.stored(module))


def weight_format(stored: StoredFormat | None, scale_dtype: str = "", scales: str = "") -> WeightFormat:
    """Return format that a stored one is kept in. ``scale_dtype``, ``scales``: the dialect's usual ones if empty."""
    if stored is None:
        return UNQUANTIZED
    if isinstance(stored, StoredPlain):
        return QuantizedAtLoad(weight_format(stored.kept))
    if isinstance(stored, StoredFp4):
        return Fp4Groups(stored)
    if isinstance(stored, StoredGguf):
        return GgufBlocks(stored)
    scales = scales or stored.scale_names[0]
    if isinstance(stored, StoredFp8):
        return Fp8Blocks(stored, scale_dtype or "bfloat16", scales)
    return IntGroups(stored, scale_dtype or ("float16" if scales == "scales" else "bfloat16"), scales)


def eight_bits(in_features: int) -> WeightFormat:
    """Return format of a matrix in eight bits with a scale for each output; plain where its inputs fill no words."""
    return UNQUANTIZED if in_features % INT8_PER_WORD else weight_format(INT8_ROWS)


@dataclass(frozen=True, slots=True)
class MatrixPart:
    module: str
    out_features: int


def matrix_rows(parts: Sequence[MatrixPart]) -> Iterator[tuple[MatrixPart, slice]]:
    """Return parts and their rows, one below the other."""
    begin = 0
    for part in parts:
        yield part, slice(begin, begin + part.out_features)
        begin += part.out_features


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """Matrices that one input is multiplied with, one below the other."""

    name: str
    in_features: int
    parts: tuple[MatrixPart, ...]

    @property
    def out_features(self) -> int:
        return sum(part.out_features for part in self.parts)


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring parts that are one weight. ``name``: of its buffers."""

    name: str
    format: WeightFormat
    parts: tuple[MatrixPart, ...]

    def buffers(self, in_features: int, dtype: str, group: Group) -> list[Buffer]:
        return self.format.buffers(self.name, sum(part.out_features for part in self.parts), in_features, dtype, group)


def segments(spec: LinearSpec, format_of: FormatOf) -> tuple[Segment, ...]:
    runs: list[tuple[WeightFormat, list[MatrixPart]]] = []
    for part in spec.parts:
        form = format_of(part.module)
        if runs and runs[-1][0] == form and form.can_concat(runs[-1][1][-1].out_features):
            runs[-1][1].append(part)
        else:
            runs.append((form, [part]))
    names = [spec.name] if len(runs) == 1 else [f"{spec.name}.{index}" for index in range(len(runs))]
    return tuple(Segment(name, form, tuple(parts)) for name, (form, parts) in zip(names, runs))


def linear_buffers(spec: LinearSpec, format_of: FormatOf, dtype: str, group: Group) -> Iterator[Buffer]:
    for segment in segments(spec, format_of):
        yield from segment.buffers(spec.in_features, dtype, group)

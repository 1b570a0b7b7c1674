"""Describe which format each matrix of a checkpoint is stored in, by its ``quantization_config`` (``quantizers`` reads
it).

What a file holds decides too, where there is one (``models.stored_formats``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from dflash_local.config.module_names import DECAY, HEAD_MODULES, PREFIXES, ROUTERS
from dflash_local.config.module_pattern import compiled

BITSANDBYTES = ("bnb-nf4", "bnb-fp4", "bnb-int8")  # formats that bitsandbytes stores
WHOLE = 0  # for a size of a group or block: all that there is along its axis

IntDialect = Literal["gptq", "gptq_v2", "awq", "pack-quantized", "int-quantized"]
Fp4Dialect = Literal["nvfp4", "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp4"]
FP4_GROUP_SIZES: Mapping[Fp4Dialect, int] = {
    "nvfp4": 16,
    "nvfp4-pack-quantized": 16,
    "mxfp4-pack-quantized": 32,
    "mxfp4": 32,
}
MXFP4 = "mxfp4"  # gpt-oss's method and dialect: the experts alone, all of a layer's in one tensor of blocks


@dataclass(frozen=True, slots=True)
class StoredInt:
    """Integer codes, and a scale for each group along the input.

    Attributes:
        dialect: how codes and zero points are packed; ``gptq`` stores zero points less one. group_size: or WHOLE.
        zeros: groups have zero points; without, the middle code is zero. bits: of a code, 4 or 8.
    """

    dialect: IntDialect
    group_size: int
    zeros: bool = False
    bits: int = 4

    @property
    def name(self) -> str:
        group = "per channel" if self.group_size == WHOLE else f"g{self.group_size}"
        return f"int{self.bits} {group}{' with zeros' if self.zeros else ''}"

    @property
    def scale_names(self) -> tuple[str, ...]:
        """Return what the tensor of scales may be called below a module."""
        return ("scales",) if self.codes[0] == "qweight" else ("weight_scale",)

    @property
    def codes(self) -> tuple[str, str]:
        """Return what the tensor of codes is called below a module, and its dtype as safetensors spells it."""
        if self.dialect == "int-quantized":
            return "weight", "I8"
        return ("weight_packed" if self.dialect == "pack-quantized" else "qweight"), "I32"


@dataclass(frozen=True, slots=True)
class StoredFp8:
    """Eight bits each (e4m3), and a scale for each block. ``block``: rows and columns, either of them perhaps WHOLE."""

    block: tuple[int, int]

    @property
    def name(self) -> str:
        rows, columns = self.block
        if columns == WHOLE:
            return "fp8 per tensor" if rows == WHOLE else "fp8 per channel"
        return f"fp8 {rows}x{columns}"

    @property
    def scale_names(self) -> tuple[str, ...]:
        """Return what the tensor of scales may be called below a module; multiplied, whatever the name says."""
        return ("weight_scale_inv", "weight_scale")

    @property
    def codes(self) -> tuple[str, str]:
        return "weight", "F8_E4M3"


@dataclass(frozen=True, slots=True)
class StoredFp4:
    """Four bits each (e2m1), and a scale for each 16 (e4m3, and one more for the matrix) or 32 (a power of two).

    Attributes:
        dialect: ``nvfp4`` is ModelOpt's; that of compressed-tensors stores the reciprocal of the matrix's scale.
            ``mxfp4`` is gpt-oss's.
    """

    dialect: Fp4Dialect

    @property
    def matrix_scale(self) -> bool:
        """Return True where a matrix has a scale beside those of its groups."""
        return self.dialect.startswith("nvfp4")

    @property
    def name(self) -> str:
        return self.dialect.partition("-")[0]

    @property
    def group_size(self) -> int:
        return FP4_GROUP_SIZES[self.dialect]

    @property
    def scale_names(self) -> tuple[str, ...]:
        return ("weight_scale",)

    @property
    def codes(self) -> tuple[str, str]:
        return ("weight" if self.dialect == "nvfp4" else "weight_packed"), "U8"


@dataclass(frozen=True, slots=True)
class GgufType:
    """Describe how the weights of a type of GGUF blocks are kept: nothing is lost, and few types take more than in the
    file.

    Attributes:
        bits: of a code. group: neighbours that share a scale. scales: their dtype; of bytes a float16 is a factor of
            all those of ``SUPER_BLOCK`` weights. minima: groups have what their smallest code stands for, too.
        coding: what a code of so many bits is.
    """

    bits: int
    group: int
    scales: Literal["float16", "uint8", "int8"] = "float16"
    minima: bool = False
    coding: Literal["integer", "iq4", "e2m1"] = "integer"

    @property
    def nested(self) -> bool:
        return self.scales != "float16" and self.coding != "e2m1"


SUPER_BLOCK = 256  # weights of a block of GGUF's newer types
# Bits of a weight as kept and, where those are more, in the file: Q4_0 and IQ4_NL 4.5, Q4_1 5, Q5_0 5.5, Q5_1 6,
# Q8_0 8.5, Q4_K 4.625 (4.5), Q5_K 5.625 (5.5), Q6_K 6.5625, IQ4_XS 4.3125 (4.25), MXFP4 4.25: scales and minima of six
# bits take a byte each.
GGUF_TYPES: Mapping[str, GgufType] = {
    "Q4_0": GgufType(4, 32),
    "Q4_1": GgufType(4, 32, minima=True),
    "Q5_0": GgufType(5, 32),
    "Q5_1": GgufType(5, 32, minima=True),
    "Q8_0": GgufType(8, 32),
    "Q4_K": GgufType(4, 32, "uint8", minima=True),
    "Q5_K": GgufType(5, 32, "uint8", minima=True),
    "Q6_K": GgufType(6, 16, "int8"),
    "IQ4_NL": GgufType(4, 32, coding="iq4"),
    "IQ4_XS": GgufType(4, 32, "int8", coding="iq4"),
    "MXFP4": GgufType(4, 32, "uint8", coding="e2m1"),
}


@dataclass(frozen=True, slots=True)
class StoredGguf:
    """Blocks of a GGUF file. ``type``: one of ``GGUF_TYPES``."""

    type: str

    @property
    def name(self) -> str:
        return self.type

    @property
    def scale_names(self) -> tuple[str, ...]:
        """Return none: a block holds its scales."""
        return ()

    @property
    def codes(self) -> tuple[str, str]:
        return "weight", self.type


@dataclass(frozen=True, slots=True)
class StoredPlain:
    """Store in a plain dtype, quantised as it is read. ``kept``: the format that it is kept in."""

    kept: StoredInt | StoredFp8

    @property
    def name(self) -> str:
        return self.kept.name


StoredFormat = StoredInt | StoredFp8 | StoredFp4 | StoredGguf | StoredPlain
Rule = tuple[str, StoredFormat | None]  # None: stays in 16 bits


@dataclass(frozen=True)
class Quantization:
    """Describe how a published checkpoint is quantised, or a plain one as it is read.

    Attributes:
        method: as its configuration calls it, or ``LoadConfig.quantize``.
        unread: what of it is not read here, in a few words; empty when all is.
        default: the format of a matrix that no rule names. names: modules or what they lie below; they come first.
        patterns: regular expressions in order, which match from the beginning of a module's name.
        below: only what lies below these is quantised; empty for everything.
        ignored: what servers quantise beside the weights and this program does not, so that replies differ there.
        at_load: the checkpoint is plain.
        exact: the rules were made of the file's tensors, not by people.
    """

    method: str
    unread: str = ""
    default: StoredFormat | None = None
    names: tuple[Rule, ...] = ()
    patterns: tuple[Rule, ...] = ()
    below: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    at_load: bool = False
    exact: bool = False

    @cached_property
    def name(self) -> str:
        """Name the formats of its matrices for screens, the usual one first; of plain weights what they become."""
        if self.at_load:
            return self.method
        return " and ".join(dict.fromkeys(stored.name for stored in self.formats)) or self.method

    @cached_property
    def formats(self) -> tuple[StoredFormat, ...]:
        """Return all that occur, the usual one first."""
        others = Counter(stored for _, stored in (*self.names, *self.patterns) if stored is not None)
        usual = () if self.default is None else (self.default,)
        return (*usual, *(stored for stored, _ in others.most_common() if stored != self.default))

    @property
    def remark(self) -> str:
        """Say for screens where replies differ from servers'; empty where they do not."""
        if not self.ignored:
            return ""
        meant = " and ".join(self.ignored)
        return (
            f"the target was quantised for {meant}; these stay as they are here, and replies may differ from servers'"
        )

    @property
    def bitsandbytes(self) -> str | None:
        """Return the format of weights that bitsandbytes has stored, and reads; None for others."""
        return self.method if self.method in BITSANDBYTES else None

    def stored(self, module: str) -> StoredFormat | None:
        """Return what a matrix is likely stored in, by its module's name below any of ``PREFIXES``; None: plain."""
        forgotten = not self.exact and module.rpartition(".")[2] in (*DECAY, *ROUTERS)
        return None if forgotten else self.rule(module)

    def rule(self, module: str) -> StoredFormat | None:
        """Return what the configuration alone says: it may forget to leave decay projections and routers out."""
        if module not in self._ruled:
            self._ruled[module] = self._rule(module)
        return self._ruled[module]

    def _rule(self, module: str) -> StoredFormat | None:
        spellings = _spellings(module)
        for spelling in spellings:
            for run in _runs(spelling, self._name_lengths):
                if run in self._by_name:
                    return self._by_name[run]
        for pattern, stored in self.patterns:
            if any(compiled(pattern)(spelling, 1) for spelling in spellings):
                return stored
        if self.below and not any(f"{name}.".startswith(f"{at}.") for name in spellings for at in self.below):
            return None
        return self.default

    @cached_property
    def _by_name(self) -> Mapping[str, StoredFormat | None]:
        return dict(self.names)

    @cached_property
    def _name_lengths(self) -> tuple[int, ...]:
        """Return words of the names, the most first: a mixture has tens of thousands of modules to look up."""
        return tuple(sorted({name.count(".") + 1 for name, _ in self.names}, reverse=True))

    @cached_property
    def _ruled(self) -> dict[str, StoredFormat | None]:
        return {}


def kept_format(quantization: Quantization | None, engine: str) -> str | None:
    """Return the format that an engine keeps a published target in; None for plain and for decoded weights."""
    if quantization is None or quantization.at_load:
        return None
    return quantization.name if engine == "fused" or quantization.bitsandbytes else None


def _spellings(module: str) -> tuple[str, ...]:
    """Return a module's name with each of the text model's prefixes: a file and its configuration may differ. One
    without a prefix is a drafter's, which servers, and so recipes, have below ``model.``.
    """
    if module in HEAD_MODULES:
        return HEAD_MODULES
    rest = next((module.removeprefix(prefix) for prefix in PREFIXES if module.startswith(prefix)), None)
    if rest is None:
        return (module, f"{PREFIXES[-1]}{module}")
    return tuple(dict.fromkeys((module, *(prefix + rest for prefix in PREFIXES))))


def _runs(name: str, lengths: Iterable[int]) -> Iterator[str]:
    """Return the name and its parts between dots that are of so many words."""
    words = name.split(".")
    for length in lengths:
        for first in range(len(words) - length + 1):
            yield ".".join(words[first : first + length])

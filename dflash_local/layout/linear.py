"""Matrices in their formats: a product that joins several of a checkpoint's matrices, and the tensors it takes.

A format is one class here (which tensors a matrix is) and one in ``models.fused.formats`` (how they are filled and
multiplied). Parts of a product may differ in format: neighbours of one format are one weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

from dflash_local.layout.buffer import Buffer, Group


class WeightFormat(Protocol):
    """Which tensors a matrix is kept as."""

    @property
    def name(self) -> str:
        """As the ledger and screens call it."""

    def buffers(self, name: str, out_features: int, in_features: int, dtype: str, group: Group) -> list[Buffer]:
        """The tensors of a matrix [out_features, in_features] whose activations are of ``dtype``."""


@dataclass(frozen=True, slots=True)
class Unquantized:
    """The model's own dtype."""

    name: str = "unquantized"

    def buffers(self, name: str, out_features: int, in_features: int, dtype: str, group: Group) -> list[Buffer]:
        """One tensor."""
        return [Buffer(f"{name}.weight", (out_features, in_features), dtype, group)]


@dataclass(frozen=True, slots=True)
class Int8PerChannel:
    """Symmetric codes of eight bits, with a float32 scale for each output."""

    name: str = "int8"

    def buffers(self, name: str, out_features: int, in_features: int, dtype: str, group: Group) -> list[Buffer]:
        """Codes and scales."""
        return [
            Buffer(f"{name}.codes", (out_features, in_features), "int8", group),
            Buffer(f"{name}.scales", (out_features,), "float32", group),
        ]


UNQUANTIZED, INT8 = Unquantized(), Int8PerChannel()
FormatOf = Callable[[str], WeightFormat]  # of a module by the name that the checkpoint has for it


def unquantized(_module: str) -> WeightFormat:
    """Every matrix in the model's own dtype."""
    return UNQUANTIZED


@dataclass(frozen=True, slots=True)
class Part:
    """A matrix of the checkpoint: its module's name, and its rows."""

    module: str
    out_features: int


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """Matrices that one input is multiplied with, one below the other.

    Attributes:
    """

    name: str
    in_features: int
    parts: tuple[Part, ...]

    @property
    def out_features(self) -> int:
        """Rows of all parts."""
        return sum(part.out_features for part in self.parts)


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring parts of one format: one weight. ``name``: of its buffers."""

    name: str
    format: WeightFormat
    parts: tuple[Part, ...]

    def buffers(self, in_features: int, dtype: str, group: Group) -> list[Buffer]:
        """Its weight's tensors."""
        return self.format.buffers(self.name, sum(part.out_features for part in self.parts), in_features, dtype, group)


def segments(spec: LinearSpec, format_of: FormatOf) -> tuple[Segment, ...]:
    """The weights of a product, in the order of its rows."""
    runs = [(form, tuple(run)) for form, run in groupby(spec.parts, key=lambda part: format_of(part.module))]
    names = [spec.name] if len(runs) == 1 else [f"{spec.name}.{index}" for index in range(len(runs))]
    return tuple(Segment(name, form, parts) for name, (form, parts) in zip(names, runs))


def linear_buffers(spec: LinearSpec, format_of: FormatOf, dtype: str, group: Group) -> Iterator[Buffer]:
    """The tensors of a product's weights."""
    for segment in segments(spec, format_of):
        yield from segment.buffers(spec.in_features, dtype, group)

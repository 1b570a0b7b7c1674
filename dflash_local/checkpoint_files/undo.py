"""What a converter to GGUF did to a tensor, said as what a reader does to take it back. Data only, torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SwapAxes:
    """Reorders the entries of one axis: those from ``start`` on, seen as [outer, first, second, inner], become
    [outer, second, first, inner]; entries before and behind stay.
    """

    axis: int
    start: int
    outer: int
    first: int
    second: int
    inner: int

    @property
    def size(self) -> int:
        """Entries that it reorders."""
        return self.outer * self.first * self.second * self.inner


@dataclass(frozen=True, slots=True)
class Interleave:
    """Reorders all rows: they lie kind by kind, ``groups`` times as many as its width of each kind, and are wanted
    group by group.
    """

    groups: int
    widths: tuple[int, ...]

    @property
    def size(self) -> int:
        """Rows that there are."""
        return self.groups * sum(self.widths)


@dataclass(frozen=True, slots=True)
class Add:
    """Adds a number to every value: a norm that is stored plus one loses what its model adds itself."""

    number: float


@dataclass(frozen=True, slots=True)
class LogOfNegated:
    """Takes the logarithm of the negated values: Gated DeltaNet's ``A_log`` is stored as ``-exp(A_log)``."""


Undo = SwapAxes | Interleave | Add | LogOfNegated


def moves_columns(step: Undo) -> bool:
    """True where it reorders all columns of a matrix, and no rows."""
    return isinstance(step, SwapAxes) and step.axis == 1 and step.start == 0


def moves_rows_only(undo: tuple[Undo, ...]) -> bool:
    """True where rows of undecoded blocks can be taken back without decoding them."""
    return all(isinstance(step, Interleave) or (isinstance(step, SwapAxes) and step.axis == 0) for step in undo)

"""What a runner hands out: finished cycles and steps of a prompt's processing. Knows no models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from dflash_local.engine.sampling import Likelihood
from dflash_local.errors import NumericsError


class Snapshot(Protocol):
    """A point that a recurrent target can be brought back to. Only the runner that made it looks inside."""

    @property
    def length(self) -> int:
        """Committed tokens."""


@dataclass(frozen=True, slots=True)
class Cycle:
    """One finished cycle: ids emitted (cut at a stop id), drafts proposed, drafts accepted (uncut), rows verified.
    ``experts``: different routed experts of a layer that the rows took, the mean of all layers; None where not counted.
    """

    ids: tuple[int, ...]
    drafted: int
    accepted: int
    rows: int
    draft_s: float
    verify_s: float
    likelihoods: tuple[Likelihood, ...] = ()
    experts: float | None = None


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """Tokens done of tokens to do; a snapshot if one was taken here; the first token's cycle with the last step."""

    done: int
    total: int
    point: Snapshot | None
    first: Cycle | None


def chunks(start: int, total: int, stable: int, size: int) -> Iterator[tuple[int, int]]:
    """The parts of a prompt from ``start`` on, none longer than ``size``; one ends at ``stable``, if that is inside."""
    while start < total:
        end = min(start + size, total)
        end = stable if start < stable < end else end
        yield start, end
        start = end


def not_finite() -> NumericsError:
    """What a runner raises when a row's logits hold NaN or infinity."""
    return NumericsError(
        "the target produced logits that are not finite", "the request ended; try --dtype float32 or bfloat16"
    )

"""Describe what a session needs of a runner: the seam between requests and engines. Nothing here says where the target
lives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from dflash_local.engine.cycle_costs import MeasuredExperts, MeasuredGrowth
from dflash_local.engine.sampling import Likelihood, Sampler
from dflash_local.errors import EngineError, NumericsError
from dflash_local.layout.cycle import SNAPSHOT_EVERY
from dflash_local.models.transformers_target import Forward

Cut = Callable[[Sequence[float]], int]  # from the confidences of a block's drafts to the rows that are verified


class ScoringTarget(Protocol):
    """A target in this process, with which a text can be scored row by row (``bench.certify``)."""

    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    prefill_chunk: int

    def prefill(self, ids: torch.Tensor, with_taps: bool) -> Forward:
        """Run committed tokens [M]."""

    def verify(self, ids: torch.Tensor, with_taps: bool) -> Forward:
        """Run a block [M] without committing it."""

    @property
    def tables(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return embedding and head as they are stored; None of one in codes."""

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows [M, H] of ids [M] as the first layer sees them."""

    def stored_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows [M, H] of ids [M] without the scale that some families give them."""

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [M, V] of hidden rows [M, H]."""

    def commit(self, rows: int) -> None:
        """Keep the first ``rows`` tokens of the last block."""

    def clear(self) -> None:
        """Forget everything."""


@dataclass(frozen=True, slots=True)
class PlainStep:
    """Say how long a step of the target alone takes here, and when that was measured, in words for the user."""

    seconds: float
    source: str


class Runner(Protocol):
    """One of these behind a session.

    Attributes:
        proposer: what fills the blocks, of the runner's own kind, or None; its ``length`` is the context it holds.
            Another one may take its place between requests.
        own: the target's own layer, where it drafts beside the proposer; else None.
        plain: as measured at load; None where it was not.
    """

    proposer: Any
    own: Any
    plain: PlainStep | None

    @property
    def name(self) -> str:
        """Return the engine's name, as ``--engine`` takes it."""

    @property
    def drafters(self) -> tuple[Any, ...]:
        """Return ``proposer`` and ``own``, as far as they are there."""

    @property
    def target(self) -> ScoringTarget | None:
        """Return the target where it is in this process; certificates score texts with it."""

    @property
    def vocab_size(self) -> int:
        """Count ids that the target knows."""

    @property
    def device(self) -> torch.device:
        """Return where the tensors of a request's sampler are to be."""

    @property
    def takes_snapshots(self) -> bool:
        """Return True when some committed tokens can only be forgotten by going back to a snapshot."""

    def holds(self, length: int) -> bool:
        """Return whether ``restart`` can keep so many committed tokens without a snapshot."""

    @property
    def exact(self) -> bool:
        """Return True when a row's logits are the same in every bit with and without drafting."""

    @property
    def drafter_precision(self) -> str:
        """Return what drafts are computed with, see ``engine.drafter_precision``."""

    @property
    def costs(self) -> Mapping[int, float]:
        """Return milliseconds of a cycle by its verified rows, 1 being the plain step; empty when not measured, or
        where there is no drafter.
        """

    @property
    def verify_costs(self) -> Mapping[int, float]:
        """Return the same of cycles whose drafts are given; empty when not measured."""

    @property
    def own_costs(self) -> Mapping[int, float]:
        """Return the same of cycles with the drafts of ``own``; empty when not measured, or where there is none."""

    @property
    def wait_ms(self) -> float:
        """Return milliseconds that a cycle takes longer where its drafts' confidences are waited for; infinite where
        it is chosen before how many are made.
        """

    @property
    def experts(self) -> MeasuredExperts | None:
        """Return what the costs were measured with; None without experts, or where costs were not measured."""

    @property
    def growth(self) -> MeasuredGrowth:
        """Return how costs grow with the context; nothing where that was not measured."""

    @property
    def ids(self) -> Sequence[int]:
        """Return the sequence, as far as it is known here."""

    @property
    def committed(self) -> Sequence[int]:
        """Return ids whose state the target holds: a prefix of the sequence."""

    def begin(
        self, sampler: Sampler, stop_ids: frozenset[int], block: int, with_drafts: bool, top: int | None = None
    ) -> None:
        """Set what the next request needs. ``block`` 1 proposes nothing; without drafts taps are not taken. ``top``
        asks for log-probabilities, with that many rivals beside each emitted token.
        """

    def end_at(self, length: int, exactly: bool) -> None:
        """End the reply at ``length`` ids or before. ``exactly``: perhaps at a token that only the host can tell."""

    def set_block(self, block: int, own: bool = False) -> None:
        """Change the block size from the next cycle on, and who proposes; 1 proposes nothing but keeps the drafters'
        contexts. ``own``: see the attribute.
        """

    def prefill(self, ids: Sequence[int], stable: int) -> Iterator[PrefillStep]:
        """Process prompt ``ids`` beyond what is committed, a chunk per step, and choose the first token.

        Args:
            ids: the whole prompt; ``committed`` is a proper prefix of it.
            stable: position to take a snapshot at, if it lies in the part to process; others are taken on the way.
        """

    def launch(self, cut: Cut | None = None, copied: Sequence[int] = ()) -> None:
        """Start one cycle; ``collect`` hands it out when it is known.

        Args:
            cut: called with the confidences of its drafts, if there are any.
            copied: drafts to verify in place of the proposer's; all of the sequence must be known (``settle``).
        """

    def settle(self, newest: int = 0) -> None:
        """Wait until all of the sequence is known here, but for what the ``newest`` cycles emit."""

    def collect(self) -> list[Cycle]:
        """Return cycles that have become known since the last call."""

    def notice(self) -> str:
        """Return something the user should know, once; empty when there is nothing."""

    def rewind(self, length: int) -> None:
        """Cut the sequence to ``length`` ids, of which the last stays uncommitted."""

    def reusable(self, length: int) -> int:
        """Return how many of so many committed tokens need not be run again for the drafter to have its context."""

    def restart(self, length: int, point: Any) -> None:
        """Keep the first ``length`` committed tokens; ``point``: their snapshot, where ``holds`` says no."""

    def snapshot(self) -> Snapshot:
        """Return what ``restart`` takes to go back to what is committed."""

    def hold(self, most_bytes: int) -> Any:
        """Return a copy of the state behind what is committed, in host memory; None where that takes more bytes, or
        cannot be.
        """

    def put(self, ids: Sequence[int], held: Any, rest: Sequence[int] = ()) -> None:
        """Go on from committed ``ids`` and a copy of what ``hold`` gave behind them. ``rest``: ids of the sequence that
        follow.
        """

    def oracle_drafter(self, text: Sequence[int]) -> Any:
        """Return a proposer that knows a text and is wrong now and then, for certificates. Raises UsageError: none
        here.
        """

    def close(self) -> None:
        """Drop the models."""


class Snapshot(Protocol):
    """A point that a target can be brought back to. Only the runner that made it looks inside."""

    @property
    def length(self) -> int:
        """Return committed tokens."""


@dataclass(frozen=True, slots=True)
class Cycle:
    """One finished cycle: ids emitted (cut at a stop id), drafts verified, drafts accepted (uncut), rows verified.

    Attributes:
        experts: different routed experts of a layer that the rows took, the mean of all layers; None where not counted.
        confidences: of all drafts that were made, see ``drafters.engines.Drafts``. copied: they were given. own: they
            are those of ``Runner.own``.
    """

    ids: tuple[int, ...]
    drafted: int
    accepted: int
    rows: int
    draft_s: float
    verify_s: float
    likelihoods: tuple[Likelihood, ...] = ()
    experts: float | None = None
    confidences: tuple[float, ...] = ()
    copied: bool = False
    own: bool = False


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """Tokens done of tokens to do; a snapshot if one was taken here; the first token's cycle with the last step."""

    done: int
    total: int
    point: Snapshot | None
    first: Cycle | None


def chunks(start: int, total: int, stable: int, size: int, every: int = 0) -> Iterator[tuple[int, int]]:
    """Yield the parts of a prompt from ``start`` on, of at most ``size``; one ends at ``stable`` inside it, and at each
    multiple of ``every``.
    """
    while start < total:
        end = min(start + size, total)
        end = min(end, (start // every + 1) * every) if every else end
        end = stable if start < stable < end else end
        yield start, end
        start = end


def not_finite() -> NumericsError:
    """Return what a runner raises when a row's logits hold NaN or infinity."""
    return NumericsError(
        "the target produced logits that are not finite", "the request ended; try --dtype float32 or bfloat16"
    )


class SequenceRunner:
    """Hold what both runners share: the target, and the token sequence as the host knows it; see ``Runner``."""

    target: Any  # of the engine's own kind
    proposer: Any
    own: Any
    ids: list[int]
    committed: list[int]  # ids whose state the target holds
    _block: int
    _uses_own: bool  # for the next blocks
    _with_taps: bool
    plain: PlainStep | None = None

    @property
    def vocab_size(self) -> int:
        return int(self.target.vocab_size)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.target.device
        return device

    @property
    def takes_snapshots(self) -> bool:
        return bool(self.target.is_recurrent)

    def holds(self, length: int) -> bool:
        return length == len(self.committed) or not self.target.is_recurrent

    @property
    def drafters(self) -> tuple[Any, ...]:
        """Return those that there are."""
        return tuple(each for each in (self.proposer, self.own) if each is not None)

    def set_block(self, block: int, own: bool = False) -> None:
        self._block, self._uses_own = block, own

    def prefill(self, ids: Sequence[int], stable: int) -> Iterator[PrefillStep]:
        start = len(self.committed)
        if start >= len(ids):
            raise EngineError("nothing of the prompt was left to process")
        self.ids = list(ids)
        tensor = torch.tensor(self.ids, dtype=torch.long, device=self.target.device)
        every = SNAPSHOT_EVERY if self.takes_snapshots else 0
        for at, end in chunks(start, len(ids), stable, self.target.prefill_chunk, every):
            out = self.target.prefill(tensor[at:end], self._with_taps)
            if out.taps is not None:
                self._extend(out.taps, tensor[at:end], at)
            self.committed += self.ids[at:end]
            first = self._first(out.hidden[-1:], tensor) if end == len(ids) else None
            del out  # the next chunk wants its memory
            # Templates render an old reply without its thinking: the next prompt goes back to where the text is stable.
            # A later prompt may also leave this one anywhere inside it.
            kept = every and (end == stable or end % every == 0)
            point = self.snapshot() if kept else None
            yield PrefillStep(end - start, len(ids) - start, point, first)

    def snapshot(self) -> Snapshot:
        """Return what ``restart`` takes to go back to what is committed."""
        point: Snapshot = self.target.snapshot()
        return point

    def reusable(self, length: int) -> int:
        return min(length, *(each.length for each in self.drafters))

    def _taps_of(self, drafter: Any, taps: torch.Tensor) -> torch.Tensor:
        """Return what a drafter reads of taps [M, all taps x H]: those of the proposer come first."""
        if self.own is None:
            return taps
        size = len(self.own.config.taps) * self.target.hidden_size
        first, last = taps.split((taps.shape[1] - size, size), 1)
        return (last if drafter is self.own else first).contiguous()

    def _extend(self, taps: torch.Tensor, ids: torch.Tensor, start: int) -> None:
        """Give the drafters the taps [M, taps x H] of committed tokens ``ids`` [M] at ``start ..``."""
        raise NotImplementedError

    def _first(self, hidden: torch.Tensor, prompt: torch.Tensor) -> Cycle:
        """Choose the first token of hidden rows [1, H]; it belongs to no cycle: one of no rows."""
        raise NotImplementedError

"""What a session needs of a runner: the seam between requests and engines. Nothing here says where the target lives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from dflash_local.engine.cycle import Cycle, PrefillStep
from dflash_local.engine.expert_costs import MeasuredExperts
from dflash_local.engine.sampling import Sampler
from dflash_local.models.transformers_target import Forward


class Target(Protocol):
    """A target in this process, with which a text can be scored row by row (``bench.certify``)."""

    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    prefill_chunk: int

    def prefill(self, ids: torch.Tensor, with_taps: bool) -> Forward:
        """Run committed tokens [M]."""

    def verify(self, ids: torch.Tensor, with_taps: bool) -> Forward:
        """Run a block [M] without committing it."""

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [M, V] of hidden rows [M, H]."""

    def commit(self, rows: int) -> None:
        """Keep the first ``rows`` tokens of the last block."""

    def clear(self) -> None:
        """Forget everything."""


class Runner(Protocol):
    """One of these behind a session.

    Attributes:
        proposer: what fills the blocks, of the runner's own kind, or None; its ``length`` is the context it holds.
            Another one may take its place between requests.
    """

    proposer: Any

    @property
    def name(self) -> str:
        """Of the engine, as ``--engine`` takes it."""

    @property
    def target(self) -> Target | None:
        """The target where it is in this process; certificates score texts with it."""

    @property
    def vocab_size(self) -> int:
        """Ids that the target knows."""

    @property
    def device(self) -> torch.device:
        """Where the tensors of a request's sampler are to be."""

    @property
    def is_recurrent(self) -> bool:
        """True when committed tokens can only be forgotten by going back to a snapshot."""

    @property
    def exact(self) -> bool:
        """True when a row's logits are the same in every bit with and without drafting."""

    @property
    def drafter_precision(self) -> str:
        """What drafts are computed with, see ``engine.drafter_precision``."""

    @property
    def costs(self) -> Mapping[int, float]:
        """Milliseconds of a cycle by its verified rows, 1 being the plain step; empty when not measured."""

    @property
    def experts(self) -> MeasuredExperts | None:
        """What the costs were measured with; None where the target has no experts, or costs were not measured."""

    @property
    def ids(self) -> Sequence[int]:
        """The sequence, as far as it is known here."""

    @property
    def committed(self) -> Sequence[int]:
        """Ids whose state the target holds: a prefix of the sequence."""

    def begin(
        self, sampler: Sampler, stop_ids: frozenset[int], block: int, with_drafts: bool, top: int | None = None
    ) -> None:
        """Set what the next request needs. ``block`` 1 proposes nothing; without drafts taps are not taken. ``top``
        asks for log-probabilities, with that many rivals beside each emitted token.
        """

    def end_at(self, length: int, exactly: bool) -> None:
        """The reply ends at ``length`` ids or before. ``exactly``: perhaps at a token that only the host can tell."""

    def set_block(self, block: int) -> None:
        """Change the block size from the next cycle on; 1 proposes nothing but keeps the drafter's context."""

    def prefill(self, ids: Sequence[int], stable: int) -> Iterator[PrefillStep]:
        """Process prompt ``ids`` beyond what is committed, a chunk per step, and choose the first token.

        Args:
            ids: the whole prompt; ``committed`` is a proper prefix of it.
            stable: position to take a snapshot at, if it lies in the part to process.
        """

    def launch(self) -> None:
        """Start one cycle; ``collect`` hands it out when it is known."""

    def collect(self) -> list[Cycle]:
        """Cycles that have become known since the last call."""

    def notice(self) -> str:
        """Something the user should know, once; empty when there is nothing."""

    def rewind(self, length: int) -> None:
        """Cut the sequence to ``length`` ids, of which the last stays uncommitted."""

    def restart(self, length: int, point: Any) -> None:
        """Keep the first ``length`` committed tokens; ``point``: their snapshot, which a recurrent target needs."""

    def planted(self, text: Sequence[int]) -> Any:
        """A proposer that knows a text and is wrong now and then, for certificates. Raises UsageError: none here."""

    def close(self) -> None:
        """Drop the models."""

"""Describe what a part of a decoder layer is to the model around it: its weights, and its forward passes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar, runtime_checkable

import torch

from dflash_local.kernels.allocate import Tensors
from dflash_local.kernels.delta_step import CycleState
from dflash_local.layout.part_layout import EngineSpec
from dflash_local.models.fused.linear import GateUp, JoinedGateUp, JoinedLinear, Linear
from dflash_local.models.place import Places
from dflash_local.models.recurrent_cache import RecurrentSnapshot


@dataclass(slots=True)
class UsedRows:
    """Count a block's rows that hold tokens, 0 for all; those behind only fill it up in exact mode."""

    count: int = 0


@dataclass(frozen=True, slots=True)
class RunState:
    """Hold what all parts share while a model runs. ``owner``: of shared buffers. ``start``: [1] int32, committed
    tokens.
    """

    owner: str
    tensors: Tensors
    spec: EngineSpec
    start: torch.Tensor
    cycle: CycleState
    used: UsedRows = field(default_factory=UsedRows)


class Mixer(Protocol):
    """The part of a layer that lets tokens see each other. Rows of a block stand at ``start ..``."""

    def block(
        self, normed: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None, max_seq_len: int
    ) -> torch.Tensor:
        """Compute ``out`` [M, H] = its result (+ residual) of a block's rows. A fixed list of launches.

        Args:
            normed: [M, H]. out: may be ``residual``. max_seq_len: no row stands at or behind this position.
        """

    def prefill(self, normed: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return its result [M, H] of a prompt's rows, which are committed at once; or ``residual`` with that added."""

    def state_bytes(self, positions: int) -> int:
        """Sum what a block reads of the sequence where so many positions are looked back on."""


@runtime_checkable
class RecurrentMixer(Mixer, Protocol):
    """A mixer with a state that cannot be cut back."""

    def commit(self, rows: int) -> None:
        """Bring the state up to the first ``rows`` of the last block now."""

    def rollback(self) -> None:
        """Forget the last block's rows: what had been kept before it is committed and stays so."""

    def snapshot(self) -> RecurrentSnapshot:
        """Return a copy of the committed state, to return to."""

    def restore(self, snapshot: RecurrentSnapshot) -> None:
        """Return to it."""

    def clear(self) -> None:
        """Return to the state before any token."""


class FeedForward(Protocol):
    """The part of a layer that works on each token by itself."""

    def block(self, normed: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Compute as a mixer's does."""

    def prefill(self, normed: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Compute as a mixer's does."""


Bound = TypeVar("Bound", bound=Mixer | FeedForward, covariant=True)


class PartWeights(Generic[Bound]):
    """The loaded weights of one part. ``places``: where each of its checkpoint's tensors is read to."""

    places: Places

    @property
    def joined(self) -> tuple[JoinedLinear | JoinedGateUp, ...]:
        """Return its products with large matrices, whose kernel configurations are to be chosen."""
        raise NotImplementedError

    @property
    def products(self) -> tuple[Linear | GateUp, ...]:
        return tuple(product for each in self.joined for product in each.products)

    def finish(self) -> None:
        """Turn what is stored to what is used, once all places are filled."""
        for each in self.joined:
            each.finish()

    def forget_places(self) -> None:
        """Let go of where tensors were read to: a weight that is replaced is free then."""
        self.places.clear()
        for each in self.joined:
            each.places.clear()

    def randomize(self, generator: torch.Generator) -> None:
        """Fill the places so that activations keep their scale: for measuring without a download."""
        for each in self.joined:
            each.randomize(generator)

    def bind(self, at: str, run: RunState) -> Bound:
        """Return the part as it runs, over what it keeps of the sequence, ``at`` the name of that."""
        raise NotImplementedError

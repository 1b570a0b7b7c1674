"""Describe what both engines ask of a loaded drafter, whatever its kind, and where they get it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from dflash_local.drafters.drafter import Drafter
from dflash_local.kernels.choose import RowChooser
from dflash_local.load_config import LoadConfig
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.fused.linear import GateUp, Linear
from dflash_local.models.fused.moe import MoEWeights
from dflash_local.models.fused.target import FusedTarget
from dflash_local.models.transformers_target import TransformersTarget

if TYPE_CHECKING:
    from dflash_local.drafters.dflash.layout import DFlashConfig
    from dflash_local.drafters.dflash.training import DraftModule
    from dflash_local.engine.sampling import Sampler


class Drafts(NamedTuple):
    """Hold drafted ids [m] and, of each, how sure the drafter is: ``confidences`` [m] float32, larger is surer.

    A kind's scale is its own: what a confidence is worth is learnt from what is accepted (``engine.verify_length``).
    """

    ids: torch.Tensor
    confidences: torch.Tensor


class Proposer(Protocol):
    """Hold what the reference engine needs of a drafter, or what tests plant."""

    @property
    def length(self) -> int:
        """Return context positions held."""

    def extend(self, taps: torch.Tensor, start: int) -> None:
        """Take the taps [m, T x H] of newly committed tokens at positions ``start ..``."""

    def truncate(self, length: int) -> None:
        """Forget context after ``length``."""

    def hold(self) -> Any:
        """Return a copy of the context."""

    def put(self, held: Any) -> None:
        """Go on from a copy of what ``hold`` gave."""

    def propose(self, ids: Sequence[int], count: int, sampler: Sampler, noise: torch.Tensor | None) -> Drafts:
        """Draft ``count`` ids behind ``ids``, all of the text, whose last one is the anchor."""


class OwnProposer(Proposer, Protocol):
    """One that is told of its taps, as it stands beside another."""

    @property
    def config(self) -> Drafter:
        """Return its configuration."""


class LoadableProposer(Protocol):
    """A kind's ``reference.PROPOSER``."""

    def load(
        self, files: Checkpoint, target: TransformersTarget, options: LoadConfig, packed: bool
    ) -> tuple[Proposer, tuple[str, ...]]:
        """Read a drafter that its pair has been checked with; returns it, bound to its target, and notices.

        Args:
            packed: matrices are laid out for ``packed_linear``.
        """

    def random(self, config: Drafter, target: TransformersTarget) -> Proposer:
        """Return a drafter of random weights, for measuring."""


class FusedDrafter(Protocol):
    """A drafter over static buffers, bound to its target: what the fused engine records.

    Attributes:
        chained: each draft takes the one before, in a pass of its own; else all are made at once, however many are
            verified.
        drafts: [block - 1, out_features of the head] logits of the drafted positions.
        stored_head: the drafter's own where it has one, else the target's.
        head: gives the logits; ``stored_head`` unless ``use_head`` brought another. head_ids: the ids [out_features]
            int32, ascending, that its rows stand for; None: the first ones.
        length: committed context rows, as the host knows.
    """

    target: FusedTarget
    chained: bool
    drafts: torch.Tensor
    stored_head: Linear
    head: Linear
    head_ids: torch.Tensor | None
    length: int

    @property
    def config(self) -> Drafter:
        """Return its configuration."""

    @property
    def selector(self) -> RowChooser | None:
        """Return what chooses ids by more than each row's logits, and may fill those of ``drafts`` behind the first row
        as it does, as many as ids are asked for; None: the logits alone decide.
        """

    @property
    def matrices(self) -> tuple[Linear | GateUp, ...]:
        """Return the matrices of the drafter's own that may be kept in eight bits."""

    @property
    def products(self) -> tuple[Linear | GateUp, ...]:
        """Return all products but those of routed experts; the head's when it is not the target's."""

    @property
    def mixtures(self) -> tuple[MoEWeights, ...]:
        """Return its mixtures of experts."""

    def quantize(self) -> None:
        """Replace the matrices by their codes, one after the other. Nothing may have been recorded yet."""

    def use_head(self, head: Linear, head_ids: torch.Tensor | None = None) -> None:
        """Draft the ids of a head's rows [<= V, H], see ``head_ids``. Nothing may have been recorded yet."""

    def block(self, max_seq_len: int) -> None:
        """Draft behind the target's ``tokens[0]``: fills ``drafts``, all of the trained block, or with a ``selector``
        that goes on from there the first row.
        """

    def inject(self, taps: torch.Tensor) -> None:
        """Write context rows of the target's last block at its ``start``; uncommitted ones are written again later.
        Taps are [rows, taps x H], and the ids are the target's ``tokens``.
        """

    def reusable(self, length: int) -> int:
        """Return how many of so many committed tokens need not be run again for the context to be complete."""

    @property
    def caches(self) -> Sequence[tuple[torch.Tensor, ...]]:
        """Return keys and values [key heads, capacity, head_dim] of layers that hold every position, with their
        scales.
        """

    def snapshot(self) -> Any:
        """Return what of the context cannot be gone back to otherwise, as the rings' rows that a block sees now. None:
        nothing.
        """

    def restore(self, point: Any) -> None:
        """Go back to a snapshot."""

    def write_context(self, taps: torch.Tensor, ids: torch.Tensor, start: int) -> None:
        """Write context rows of committed tokens ``ids`` [M] at positions ``start ..``; taps [M, taps x H]."""

    def block_bytes(self, context: int) -> int:
        """Sum what a block reads behind so many tokens: layers, head, and what each layer looks back on."""

    def inject_bytes(self) -> int:
        """Return bytes of the matrices that context rows alone go through."""


class BlockWeights(Protocol):
    """A drafter's weights as the fused engine reads them."""

    def coded(self) -> BlockWeights:
        """Return them with the matrices in eight bits; those in codes stay."""


class BindableBlocks(Protocol):
    """A kind's ``fused.BLOCKS``."""

    def read_weights(
        self,
        checkpoint: Checkpoint,
        config: Drafter,
        device: torch.device,
        dtype: torch.dtype,
        on_notice: Callable[[str], None],
    ) -> BlockWeights:
        """Read a checkpoint's, whose codes stay. ``on_notice``: called with suspicious but usable tensors."""

    def random_weights(
        self, config: Drafter, target_hidden: int, device: torch.device, dtype: torch.dtype
    ) -> BlockWeights:
        """Return random weights made where they lie, for measuring, in the formats of the drafter's own."""

    def __call__(self, config: Drafter, weights: BlockWeights, target: FusedTarget) -> FusedDrafter:
        """Bind weights to a target, without what a checkpoint may have beside."""

    def bound(
        self,
        config: Drafter,
        weights: BlockWeights,
        target: FusedTarget,
        files: Checkpoint,
        draft_window: int | None,
    ) -> FusedDrafter:
        """Bind weights to a target. ``draft_window``: context rows it looks back on; None is all."""


def proposer_of(config: Drafter) -> LoadableProposer:
    """Import the reference engine's side of a kind."""
    found: LoadableProposer = import_module(f"dflash_local.drafters.{config.kind}.reference").PROPOSER
    return found


def module_of(config: DFlashConfig) -> type[DraftModule]:
    """Import what a kind is trained as."""
    found: type[DraftModule] = import_module(f"dflash_local.drafters.{config.kind}.training").MODULE
    return found


def blocks_of(config: Drafter) -> BindableBlocks:
    """Import the fused engine's side of a kind."""
    found: BindableBlocks = import_module(f"dflash_local.drafters.{config.kind}.fused").BLOCKS
    return found

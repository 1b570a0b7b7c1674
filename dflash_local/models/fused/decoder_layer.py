"""A decoder layer: a mixer of tokens and a feed-forward part, each behind a norm and added to the residual stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from dflash_local.models.fused.part import FeedForward, Mixer
from dflash_local.models.fused.weight_tensors import RMSNorm

OnResidual = Callable[[torch.Tensor], None]


class Around(Protocol):
    """Hold what stands around a part of a block, as the convolutions of a drafter do."""

    def before(self, normed: torch.Tensor) -> torch.Tensor:
        """Return the part's input [M, H] of normed rows, in room of its own."""

    def after(self, result: torch.Tensor, x: torch.Tensor) -> None:
        """Add the part's result [M, H], as it is changed, to the residual stream ``x``."""


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer as it runs.

    Attributes:
        mixer_output, mlp_output: norms of the parts' results (Gemma 2), or None.
        around_mixer, around_mlp: what stands around the parts of a layer without such norms, or None.
    """

    mixer: Mixer
    mlp: FeedForward
    mixer_input: RMSNorm
    mlp_input: RMSNorm
    mixer_output: RMSNorm | None = None
    mlp_output: RMSNorm | None = None
    around_mixer: Around | None = None
    around_mlp: Around | None = None

    def block(
        self,
        x: torch.Tensor,
        normed: torch.Tensor,
        branch: torch.Tensor | None,
        max_seq_len: int,
        on_residual: OnResidual | None = None,
    ) -> None:
        """Add the layer's results to a block's rows ``x`` [M, H].

        Args:
            normed, branch: room for as many rows; ``branch`` where a part's result is normed or changed.
            max_seq_len: no row stands at or behind this position. on_residual: called with ``x`` behind each part.
        """
        self.mix(x, normed, branch, max_seq_len, on_residual)
        self.feed(x, normed, branch, on_residual)

    def mix(
        self,
        x: torch.Tensor,
        normed: torch.Tensor,
        branch: torch.Tensor | None,
        max_seq_len: int,
        on_residual: OnResidual | None,
    ) -> None:
        """Add the mixer's result; see ``block``."""
        self.mixer_input(x, normed)
        rows = normed if self.around_mixer is None else self.around_mixer.before(normed)
        after = self.mixer_output or self.around_mixer
        _added(after, x, branch, lambda out, rest: self.mixer.block(rows, out, rest, max_seq_len))
        if on_residual is not None:
            on_residual(x)

    def feed(
        self, x: torch.Tensor, normed: torch.Tensor, branch: torch.Tensor | None, on_residual: OnResidual | None
    ) -> None:
        """Add the feed-forward part's result; see ``block``."""
        self.mlp_input(x, normed)
        rows = normed if self.around_mlp is None else self.around_mlp.before(normed)
        _added(self.mlp_output or self.around_mlp, x, branch, lambda out, rest: self.mlp.block(rows, out, rest))
        if on_residual is not None:
            on_residual(x)

    def prefill(self, x: torch.Tensor, normed: torch.Tensor, on_residual: OnResidual | None = None) -> None:
        """Add the layer's results to a prompt's rows at ``start ..``."""
        self.mixer_input(x, normed)
        _add_prefilled(self.mixer, self.mixer_output, normed, x)
        if on_residual is not None:
            on_residual(x)
        self.mlp_input(x, normed)
        _add_prefilled(self.mlp, self.mlp_output, normed, x)
        if on_residual is not None:
            on_residual(x)


Part = Callable[[torch.Tensor, "torch.Tensor | None"], torch.Tensor]


def _added(after: RMSNorm | Around | None, x: torch.Tensor, branch: torch.Tensor | None, part: Part) -> None:
    if after is None or branch is None:
        part(x, x)
    elif isinstance(after, RMSNorm):
        x.add_(after(part(branch, None), branch))
    else:
        after.after(part(branch, None), x)


def _add_prefilled(part: Mixer | FeedForward, norm: RMSNorm | None, normed: torch.Tensor, x: torch.Tensor) -> None:
    if norm is None:
        part.prefill(normed, x)
    else:
        result = part.prefill(normed)
        x += norm(result, result)

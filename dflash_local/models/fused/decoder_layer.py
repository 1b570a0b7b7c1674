"""A decoder layer: a mixer of tokens and a feed-forward part, each behind a norm and added to the residual stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dflash_local.models.fused.norm import RMSNorm
from dflash_local.models.fused.part import FeedForward, Mixer

OnResidual = Callable[[torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer as it runs. ``mixer_output``, ``mlp_output``: norms of the parts' results (Gemma 2), or None."""

    mixer: Mixer
    mlp: FeedForward
    mixer_input: RMSNorm
    mlp_input: RMSNorm
    mixer_output: RMSNorm | None = None
    mlp_output: RMSNorm | None = None

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
            normed, branch: room for as many rows; ``branch`` where a part's result is normed.
            max_seq_len: no row stands at or behind this position. on_residual: called with ``x`` behind each part.
        """
        self.mixer_input(x, normed)
        _added(self.mixer_output, x, branch, lambda out, rest: self.mixer.block(normed, out, rest, max_seq_len))
        if on_residual is not None:
            on_residual(x)
        self.mlp_input(x, normed)
        _added(self.mlp_output, x, branch, lambda out, rest: self.mlp.block(normed, out, rest))
        if on_residual is not None:
            on_residual(x)

    def prefill(
        self, x: torch.Tensor, normed: torch.Tensor, committed: int, on_residual: OnResidual | None = None
    ) -> None:
        """The same for a prompt's rows behind ``committed`` tokens."""
        self.mixer_input(x, normed)
        x += _normed(self.mixer_output, self.mixer.prefill(normed, committed))
        if on_residual is not None:
            on_residual(x)
        self.mlp_input(x, normed)
        x += _normed(self.mlp_output, self.mlp.prefill(normed))
        if on_residual is not None:
            on_residual(x)


Part = Callable[[torch.Tensor, "torch.Tensor | None"], torch.Tensor]


def _added(norm: RMSNorm | None, x: torch.Tensor, branch: torch.Tensor | None, part: Part) -> None:
    if norm is None or branch is None:
        part(x, x)
    else:
        x.add_(norm(part(branch, None), branch))


def _normed(norm: RMSNorm | None, result: torch.Tensor) -> torch.Tensor:
    return result if norm is None else norm(result, result)

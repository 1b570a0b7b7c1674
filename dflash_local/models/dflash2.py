"""What a DFlash 2 drafter computes beside a DFlash one: convolutions over its block, and the choice of candidates."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from dflash_local.config.dflash2 import BlockConvolution, SelectorConfig
from dflash_local.models.drafter_weights import ConvolutionWeights, SelectorWeights

Choose = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]


def convolved(rows: torch.Tensor, base: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Each row with those before it, weighted channel by channel; before the first row there is nothing.

    Args:
        rows: [B, hidden]. base: [kernel size, hidden] of all rows, that of the row itself first.
        own: [B, kernel size, groups] what each row adds to them for each group of neighbouring channels.
    """
    count, groups = len(rows), own.shape[-1]
    values = rows.view(count, groups, -1)
    out = torch.zeros_like(values)
    for back, kernel in enumerate(base.view(len(base), groups, -1)):
        earlier = values[: max(count - back, 0)]
        out[back:] += kernel * earlier + own[back:, back, :, None] * earlier
    return out.view_as(rows)


class Convolution:
    """A convolution around a sublayer: on its input rows, which also decide the kernels for its output."""

    def __init__(self, config: BlockConvolution, weights: ConvolutionWeights) -> None:
        self._size = config.kernel_size
        self._weights = weights

    def before(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The sublayer's input of normed rows [B, hidden], and what ``after`` needs."""
        own = functional.linear(rows, self._weights.projection).view(len(rows), 2, self._size, -1)
        return convolved(rows, self._weights.base[0], own[:, 0]), own[:, 1]

    def after(self, rows: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """The sublayer's output [B, hidden] as it is added to the residual."""
        return convolved(rows, self._weights.base[1], own)


class CandidateSelector:
    """Chooses drafts one after the other among the likeliest ids of each row."""

    def __init__(self, config: SelectorConfig, weights: SelectorWeights) -> None:
        self._config = config
        self._weights = weights

    def candidates(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores in float32 and ids [m, top_k] of the likeliest ids by the head's logits [m, V]. Factor and soft cap
        change no order, so only the few that are taken get them.
        """
        scores, ids = logits.topk(min(self._config.top_k, logits.shape[-1]), dim=-1)
        scores, cap = scores.float() * self._config.output_multiplier, self._config.softcap
        return scores if cap is None else torch.tanh(scores / cap) * cap, ids

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """What a row [m, hidden] contributes to how well ids follow one another: [m, rank]."""
        return functional.linear(hidden, self._weights.projection)

    def following(self, previous: torch.Tensor, projected: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """How well ``ids`` [k] follow ``previous`` [1] at a row of ``project``."""
        mixed = self._weights.predecessors[previous] * projected
        return (mixed @ self._weights.successors[ids].T).view(-1)

    @torch.no_grad()
    def walk(self, hidden: torch.Tensor, logits: torch.Tensor, anchor: torch.Tensor, choose: Choose) -> torch.Tensor:
        """The ids [m] chosen row by row, each by the one before it.

        Args:
            hidden, logits: [m, hidden] and [m, V], of the drafted positions. anchor: [1] the id before the first.
            choose: of a row's number, its scores [1, k] in float32 and its ids [k], the index [1] of the chosen one.
        """
        unary, ids = self.candidates(logits)
        projected, previous, found = self.project(hidden), anchor, []
        for row in range(len(hidden)):
            scores = unary[row] + self.following(previous, projected[row], ids[row]).float()
            previous = ids[row][choose(row, scores.unsqueeze(0), ids[row])]
            found.append(previous)
        return torch.cat(found) if found else anchor[:0]

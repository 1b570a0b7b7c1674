"""Describe how a DSpark drafter's ids are chosen: one after the other, by each row's logits and what is likely behind
the id before (``drafters.dspark``); samples by the noise of ``kernels.noise``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from dflash_local.drafters.dspark.layout import MARKOV_BLOCK
from dflash_local.kernels.choose import (
    GREEDY,
    BlockBest,
    Choosing,
    Noise,
    RowChooser,
    argmax_of_blocks,
    best_with_margin,
    drawn,
    gumbel_of_word,
    ids_of,
    word_of,
)
from dflash_local.kernels.jit import (
    jit,
    overlapping,
    power_of_two,
    runs_kernels,
    start_next_kernel,
    tl,
    wait_for_earlier_kernels,
)

TILE_BYTES = 512  # of an id's row that a program reads at once
Choose = Callable[[int, torch.Tensor], "tuple[torch.Tensor, torch.Tensor]"]


class MarkovWeights(NamedTuple):
    """Hold a row [V, rank] by id of each: what follows the id before is likely where their product is large."""

    previous: torch.Tensor
    following: torch.Tensor


class ConfidenceHead(NamedTuple):
    """Hold what tells how sure a draft is: ``weight`` [1, H] of its hidden row, or [1, H + rank] with the row by id of
    the one before as well; ``bias`` [1].
    """

    weight: torch.Tensor
    bias: torch.Tensor

    def log_odds(self, hidden: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Return log odds [M] in float32 that drafts are accepted, of ``hidden`` [M, H] and ``before`` [M, rank]."""
        inputs = torch.cat((hidden.float(), before.float()), -1)[:, : self.weight.shape[1]]
        return functional.linear(inputs, self.weight, self.bias)[:, 0]

    def of_drafts(
        self, hidden: torch.Tensor, weights: MarkovWeights, anchor: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        """Return log odds [M] of the drafts ``ids`` [M] behind ``anchor`` [1]."""
        return self.log_odds(hidden, weights.previous[torch.cat((anchor, ids[:-1]))])


class MarkovWalk(RowChooser):
    """Each row's best id by its logits and by the id before it. A row that is not finite gets the id 0: drafts are
    verified anyway. Logits may be of fewer ids than the weights, the first ones or ``head_ids``.

    Args:
        anchor: [1] int64, the id before the first row. buffers: of ``DSparkConfig.own_buffers``.
        confidence: gives log odds in the place of margins. hidden: [rows, H], what it reads, filled before each choice.
    """

    def __init__(
        self,
        weights: MarkovWeights,
        anchor: torch.Tensor,
        buffers: Sequence[torch.Tensor],
        confidence: ConfidenceHead | None = None,
        hidden: torch.Tensor | None = None,
    ) -> None:
        self.weights = weights
        self._anchor = anchor
        self._best = BlockBest(*buffers)
        self._confidence, self._hidden = confidence, hidden

    def choose(self, logits: torch.Tensor, out: torch.Tensor, how: Choosing = GREEDY) -> None:
        if how.margins is None or self._confidence is None or self._hidden is None:
            return self._walk(logits, out, how)
        self._walk(logits, out, how._replace(margins=None))
        how.margins.copy_(self._confidence.of_drafts(self._hidden[: len(out)], self.weights, self._anchor, out))

    def _walk(self, logits: torch.Tensor, out: torch.Tensor, how: Choosing) -> None:
        noise, margins, head_ids = how
        rows, vocab = logits.shape
        if not runs_kernels(logits):
            weights = self.weights
            if head_ids is not None:
                weights = weights._replace(following=weights.following[head_ids.long()])
            ids, leads = walk(logits, weights, self._anchor, _chosen_with(noise, logits, head_ids))
            out.copy_(ids)
            if margins is not None:
                margins.copy_(leads)
            return
        previous, following = self.weights
        rank, blocks = following.shape[1], -(-vocab // MARKOV_BLOCK)
        tile = min(power_of_two(rank), TILE_BYTES // following.element_size())
        temperature, seed, start = noise or (logits, out, out)
        for row in range(rows):
            # The first row's many programs would crowd on what the head's product leaves free; those of the others
            # stand behind one program, and read their weights while it is at work.
            early = overlapping(logits) if row else {}
            _block_row_kernel[(blocks,)](
                logits, out if head_ids is None else head_ids, previous, following, self._anchor, temperature, seed,
                start, out, *self._best, row, vocab, rank, MARKOV_BLOCK, tile, noise is not None, margins is not None,
                head_ids is not None, num_warps=8, num_stages=1, **early,
            )  # fmt: skip
            margin = None if margins is None else margins[row : row + 1]
            argmax_of_blocks(self._best, out[row : row + 1], margin, blocks, not_finite_id=0)


def walk(
    logits: torch.Tensor, weights: MarkovWeights, anchor: torch.Tensor, choose: Choose
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose ids [M] row by row, each by the one before it, in plain PyTorch; returns their margins [M] beside them.

    Args:
        logits: [M, V] of the drafted positions, for the first V rows of ``weights.following``. anchor: [1] the id
            before the first.
        choose: of a row's number and its scores [1, V] in float32, the id [1] and its margin [1].
    """
    previous, found, margins = anchor, [anchor[:0]], [logits.new_empty(0, dtype=torch.float32)]
    following = weights.following[: logits.shape[1]]
    for row, own in enumerate(logits.float().split(1)):
        previous, margin = choose(row, own + functional.linear(weights.previous[previous], following).float())
        found.append(previous)
        margins.append(margin)
    return torch.cat(found), torch.cat(margins)


def _chosen_with(noise: Noise | None, logits: torch.Tensor, head_ids: torch.Tensor | None) -> Choose:
    added = None if noise is None else drawn(noise, logits, head_ids)

    def choose(row: int, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        finite = torch.isfinite(scores).all(-1)
        best, margin = best_with_margin(scores if noise is None or added is None else scores / noise[0] + added[row])
        return torch.where(finite, ids_of(best, head_ids), 0), torch.where(finite, margin, 0.0)

    return choose


@jit
def _in_order(w0, w1, w2, w3, BLOCK: tl.constexpr):
    """Return four vectors [BLOCK / 4] by turns, [BLOCK]."""
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (BLOCK,))


# fmt: off
@jit(do_not_specialize=("row",))
def _block_row_kernel(
    logits, head_ids, previous, following, anchor, temperature, seed, start, out, values, places, next_values, row,
    vocab, RANK: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, NOISY: tl.constexpr, MARGIN: tl.constexpr,
    NAMED: tl.constexpr,
):
    # fmt: on
    # One program: BLOCK ids of one row, whose weights are read from memory once, [BLOCK, TILE] at a time, where all
    # programs together take as long as V x rank numbers do; the row of the id before stays in registers. With the
    # published rank of 256 in 16 bits that is one tile of 32 KB, and 80 registers a thread (105 with noise): two or
    # three programs of eight warps have 64 to 96 KB on their way to a multiprocessor, about twice what hides memory's
    # latency. The first tile does not depend on the id before, and is asked for ahead of it.
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocab
    column = tl.arange(0, TILE)
    ids = at
    if NAMED:
        ids = tl.load(head_ids + at, mask=inside, other=0)
    source = following + ids.to(tl.int64)[:, None] * RANK + column[None, :]
    there = column < RANK
    part = tl.load(source, mask=inside[:, None] & there[None, :], other=0.0)
    wait_for_earlier_kernels()
    start_next_kernel()
    before = tl.load(anchor, mask=row == 0, other=0) + tl.load(out + row - 1, mask=row > 0, other=0)
    book = tl.load(previous + before * RANK + column, mask=there, other=0.0).to(tl.float32)
    score = tl.sum(part.to(tl.float32) * book[None, :], 1)
    for first in range(TILE, RANK, TILE):
        there = first + column < RANK
        book = tl.load(previous + before * RANK + first + column, mask=there, other=0.0).to(tl.float32)
        part = tl.load(source + first, mask=inside[:, None] & there[None, :], other=0.0)
        score += tl.sum(part.to(tl.float32) * book[None, :], 1)
    score += tl.load(logits + row * vocab + at, mask=inside, other=0.0).to(tl.float32)
    finite = tl.abs(score) < float("inf")
    if NOISY:
        position = tl.load(start) + 1 + row
        if NAMED:
            word = word_of(ids, tl.load(seed), position)
        else:  # a call of the generator serves four ids
            group = block * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
            zero = group * 0
            w0, w1, w2, w3 = tl.philox(tl.load(seed), group, zero + position, zero, zero)
            word = _in_order(w0, w1, w2, w3, BLOCK)
        score = score / tl.load(temperature) + gumbel_of_word(word)
    score = tl.where(inside & finite, score, float("-inf"))
    top = tl.max(score, 0)
    best = tl.min(tl.where(score == top, ids, 2147483647), 0)
    whole = tl.min(finite.to(tl.int32), 0)
    tl.store(values + block, tl.where(whole == 1, top, float("inf")))
    tl.store(places + block, tl.where(whole == 1, best, -1))
    if MARGIN:
        tl.store(next_values + block, tl.max(tl.where(ids == best, float("-inf"), score), 0))

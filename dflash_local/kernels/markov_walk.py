"""Describe how a DSpark drafter's ids are chosen: one after the other, by each row's logits and what is likely behind
the id before (``drafters.dspark``); samples by the noise of ``kernels.noise``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from dflash_local.drafters.dspark.layout import MARKOV_BLOCK
from dflash_local.kernels.choose import Noise, RowChooser, argmax_of_blocks, drawn, gumbel_of_word
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
Choose = Callable[[int, torch.Tensor], torch.Tensor]


class MarkovWeights(NamedTuple):
    """Hold a row [V, rank] by id of each: what follows the id before is likely where their product is large."""

    previous: torch.Tensor
    following: torch.Tensor


class MarkovWalk(RowChooser):
    """Each row's best id by its logits and by the id before it. A row that is not finite gets the id 0: drafts are
    verified anyway. Logits may be of fewer ids than the weights, the first ones.

    Args:
        anchor: [1] int64, the id before the first row. buffers: of ``DSparkConfig.own_buffers``.
    """

    def __init__(self, weights: MarkovWeights, anchor: torch.Tensor, buffers: Sequence[torch.Tensor]) -> None:
        self.weights = weights
        self._anchor = anchor
        self._values, self._ids = buffers

    def _run(self, logits: torch.Tensor, out: torch.Tensor, noise: Noise | None) -> None:
        rows, vocab = logits.shape
        if not runs_kernels(logits):
            out.copy_(walk(logits, self.weights, self._anchor, _chosen_with(noise, logits)))
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
                logits, previous, following, self._anchor, temperature, seed, start, out, self._values, self._ids, row,
                vocab, rank, MARKOV_BLOCK, tile, noise is not None, num_warps=8, num_stages=1, **early,
            )  # fmt: skip
            argmax_of_blocks(self._values, self._ids, out[row : row + 1], blocks, not_finite_id=0)


def walk(logits: torch.Tensor, weights: MarkovWeights, anchor: torch.Tensor, choose: Choose) -> torch.Tensor:
    """Choose ids [M] row by row, each by the one before it, in plain PyTorch.

    Args:
        logits: [M, V] of the drafted positions, for the first V ids. anchor: [1] the id before the first.
        choose: of a row's number and its scores [1, V] in float32, the id [1].
    """
    previous, found = anchor, []
    following = weights.following[: logits.shape[1]]
    for row, own in enumerate(logits.float().split(1)):
        previous = choose(row, own + functional.linear(weights.previous[previous], following).float())
        found.append(previous)
    return torch.cat(found) if found else anchor[:0]


def _chosen_with(noise: Noise | None, logits: torch.Tensor) -> Choose:
    added = None if noise is None else drawn(noise, logits)

    def choose(row: int, scores: torch.Tensor) -> torch.Tensor:
        noisy = scores if noise is None or added is None else scores / noise[0] + added[row]
        return torch.where(torch.isfinite(scores).all(-1), noisy.argmax(-1), 0)

    return choose


@jit
def _in_order(w0, w1, w2, w3, BLOCK: tl.constexpr):
    """Return four vectors [BLOCK / 4] by turns, [BLOCK]."""
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (BLOCK,))


# fmt: off
@jit(do_not_specialize=("row",))
def _block_row_kernel(
    logits, previous, following, anchor, temperature, seed, start, out, values, places, row, vocab,
    RANK: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, NOISY: tl.constexpr,
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
    source = following + at.to(tl.int64)[:, None] * RANK + column[None, :]
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
        # A call of the generator serves four ids.
        group = block * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
        zero = group * 0
        position = tl.load(start) + 1 + row
        w0, w1, w2, w3 = tl.philox(tl.load(seed), group, zero + position, zero, zero)
        score = score / tl.load(temperature) + gumbel_of_word(_in_order(w0, w1, w2, w3, BLOCK))
    score = tl.where(inside & finite, score, float("-inf"))
    top = tl.max(score, 0)
    best = tl.min(tl.where(score == top, at, 2147483647), 0)
    whole = tl.min(finite.to(tl.int32), 0)
    tl.store(values + block, tl.where(whole == 1, top, float("inf")))
    tl.store(places + block, tl.where(whole == 1, best, -1))

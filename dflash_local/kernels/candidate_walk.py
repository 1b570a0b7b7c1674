"""Describe how a DFlash 2 drafter's ids are chosen: one after the other among the likeliest of each row, by how well
each one follows the one before it (``drafters.dflash2.layout.SelectorConfig``); samples by the noise of
``kernels.noise``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from dflash_local.drafters.dflash2.layout import SelectorConfig
from dflash_local.kernels.choose import (
    GREEDY,
    Choosing,
    Noise,
    RowChooser,
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
from dflash_local.layout.cycle import CHOICE_BLOCK

TILE = 8192  # numbers of codebook rows that a program holds at once
Choose = Callable[[int, torch.Tensor, torch.Tensor], "tuple[torch.Tensor, torch.Tensor]"]


class Codebooks(NamedTuple):
    """A row [V, rank] of each id: as the one before, and as a candidate."""

    predecessors: torch.Tensor
    successors: torch.Tensor


class CandidateWalk(RowChooser):
    """Each row's best follower of the id before it, among the likeliest.

    Args:
        projected: [m, rank] what the rows contribute, filled before each choice. anchor: [1] int64, the id before the
            first row. buffers: of ``drafters.dflash2.layout.candidate_buffers``.
    """

    def __init__(
        self,
        config: SelectorConfig,
        codebooks: Codebooks,
        projected: torch.Tensor,
        anchor: torch.Tensor,
        buffers: Sequence[torch.Tensor],
    ) -> None:
        self._config, self.codebooks = config, codebooks
        self._projected, self._anchor = projected, anchor
        self._values, self._places, self._scores, self._ids, self._followers = buffers

    def choose(self, logits: torch.Tensor, out: torch.Tensor, how: Choosing = GREEDY) -> None:
        noise, margins, head_ids = how
        rows, vocab = logits.shape
        projected, config = self._projected[:rows], self._config
        if not runs_kernels(logits):
            scores, columns = candidates(config, logits)
            choose = _chosen_with(noise, logits, columns, head_ids)
            found = scores, ids_of(columns, head_ids)
            ids, leads = walk(*found, projected, self.codebooks, self._anchor, choose)
            out.copy_(ids)
            if margins is not None:
                margins.copy_(leads)
            return
        blocks, wide, top_k = -(-vocab // CHOICE_BLOCK), self._scores.shape[1], min(config.top_k, vocab)
        _block_candidates_kernel[(rows, blocks)](
            logits, out if head_ids is None else head_ids, self._values, self._places, vocab, blocks, top_k,
            CHOICE_BLOCK, wide, head_ids is not None, num_warps=4,
        )  # fmt: skip
        temperature, seed, start = noise or (logits, out, out)
        tile = min(power_of_two(config.rank), TILE // wide)
        cap = config.softcap
        _candidates_kernel[(rows,)](
            self._values, self._places, projected, self.codebooks.successors, temperature, seed, start, self._scores,
            self._ids, self._followers, config.output_multiplier, 1.0 if cap is None else cap, blocks, top_k,
            config.rank, projected.stride(0), power_of_two(blocks * wide), wide, tile, cap is not None,
            noise is not None, num_warps=8, **overlapping(logits),
        )  # fmt: skip
        _walk_kernel[(1,)](
            self._scores, self._ids, self._followers, self.codebooks.predecessors, self._anchor, temperature, out,
            out if margins is None else margins, rows, config.rank, wide, tile, noise is not None, margins is not None,
            num_warps=8, **overlapping(logits),
        )  # fmt: skip


def candidates(config: SelectorConfig, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores in float32 and ids [M, top_k] of the likeliest ids by logits [M, V], in plain PyTorch. Factor and
    soft cap change no order, so only the few that are taken get them.
    """
    values, ids = logits.topk(min(config.top_k, logits.shape[-1]), dim=-1)
    return candidate_scores(config, values), ids


def candidate_scores(config: SelectorConfig, logits: torch.Tensor) -> torch.Tensor:
    """Return the scores of logits in float32: after the factor and the soft cap."""
    scores, cap = logits.float() * config.output_multiplier, config.softcap
    return scores if cap is None else torch.tanh(scores / cap) * cap


def walk(
    scores: torch.Tensor,
    ids: torch.Tensor,
    projected: torch.Tensor,
    codebooks: Codebooks,
    anchor: torch.Tensor,
    choose: Choose,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose ids [M] row by row, each by the one before it, in plain PyTorch; returns their margins [M] beside them.

    Args:
        scores, ids: of ``candidates``. projected: [M, rank]. anchor: [1] the id before the first.
        choose: of a row's number, its scores [1, k] in float32 and its ids [k], the index [1] of the chosen one and
            its margin [1].
    """
    previous, found, margins = anchor, [anchor[:0]], [scores.new_empty(0)]
    for row in range(len(scores)):
        mixed = codebooks.predecessors[previous] * projected[row]
        following = (mixed @ codebooks.successors[ids[row]].T).view(-1)
        at, margin = choose(row, (scores[row] + following.float()).unsqueeze(0), ids[row])
        previous = ids[row][at]
        found.append(previous)
        margins.append(margin)
    return torch.cat(found), torch.cat(margins)


def _chosen_with(
    noise: Noise | None, logits: torch.Tensor, columns: torch.Tensor, head_ids: torch.Tensor | None
) -> Choose:
    if noise is None:
        return lambda _row, scores, _ids: best_with_margin(scores)
    temperature, added = noise[0], drawn(noise, logits, head_ids).gather(1, columns)
    return lambda row, scores, _ids: best_with_margin(scores / temperature + added[row])


@jit
def _largest(value, at):
    """Return the largest number of a vector and the first of the places ``at`` where it stands."""
    top = tl.max(value, 0)
    return top, tl.min(tl.where(value == top, at, 2147483647), 0)


# fmt: off
@jit
def _block_candidates_kernel(
    logits, head_ids, values, places, vocab, blocks, top_k, BLOCK: tl.constexpr, WIDE: tl.constexpr,
    NAMED: tl.constexpr,
):
    # fmt: on
    # One program: BLOCK logits of one row, read once and kept in registers, of which the largest is taken out ``top_k``
    # times.
    start_next_kernel()
    row = tl.program_id(0)
    block = tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row.to(tl.int64) * vocab + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    value = tl.where(tl.abs(value) < float("inf"), value, float("-inf"))  # of what is not finite none is drafted
    slot = tl.arange(0, WIDE)
    best = tl.full((WIDE,), float("-inf"), tl.float32)
    ids = tl.zeros((WIDE,), tl.int32)
    for number in range(top_k):
        top, place = _largest(value, at)
        best = tl.where(slot == number, top, best)
        ids = tl.where(slot == number, place, ids)
        value = tl.where(at == place, float("-inf"), value)
    if NAMED:
        ids = tl.load(head_ids + ids, mask=ids < vocab, other=0)
    to = (row * blocks + block) * WIDE + slot
    tl.store(values + to, best)
    tl.store(places + to, ids)


# fmt: off
@jit
def _candidates_kernel(
    values, places, projected, successors, temperature, seed, start, scores, ids, followers, multiplier, cap, blocks,
    top_k, rank, projected_stride, ALL: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr, CAPPED: tl.constexpr,
    NOISY: tl.constexpr,
):
    # fmt: on
    # One program: one row, the candidates of all its blocks in registers; the best of them are taken out one by one.
    # What does not depend on the id before is done here, side by side for all rows: scores and noise, and the products
    # of the candidates' codebook rows with what the row contributes, TILE columns at a time.
    row = tl.program_id(0)
    at = tl.arange(0, ALL)
    slot = tl.arange(0, WIDE)
    wait_for_earlier_kernels()
    start_next_kernel()
    inside = at < blocks * WIDE
    value = tl.load(values + row * blocks * WIDE + at, mask=inside, other=float("-inf"))
    best = tl.full((WIDE,), float("-inf"), tl.float32)
    taken = tl.zeros((WIDE,), tl.int32)
    for number in range(top_k):
        top, place = _largest(value, at)
        best = tl.where(slot == number, top, best)
        taken = tl.where(slot == number, place, taken)
        value = tl.where(at == place, float("-inf"), value)
    chosen = tl.load(places + row * blocks * WIDE + taken)
    score = best * multiplier
    if CAPPED:
        score = cap * (1.0 - 2.0 / (tl.exp(2.0 * score / cap) + 1.0))  # tanh
    score = tl.where((slot < top_k) & (best > float("-inf")), score, float("-inf"))
    if NOISY:
        word = word_of(chosen, tl.load(seed), tl.load(start) + 1 + row)
        score = score / tl.load(temperature) + gumbel_of_word(word)
    tl.store(scores + row * WIDE + slot, score)
    tl.store(ids + row * WIDE + slot, chosen)
    column = tl.arange(0, TILE)
    for first in range(0, rank, TILE):
        there = first + column < rank
        own = tl.load(projected + row * projected_stride + first + column, mask=there, other=0.0).to(tl.float32)
        source = successors + chosen.to(tl.int64)[:, None] * rank + first + column[None, :]
        book = tl.load(source, mask=there[None, :], other=0.0).to(tl.float32)
        to = (row * WIDE + slot)[:, None] * rank + first + column[None, :]
        tl.store(followers + to, book * own[None, :], mask=there[None, :])


# fmt: off
@jit
def _walk_kernel(
    scores, ids, followers, predecessors, anchor, temperature, out, margins, rows, rank, WIDE: tl.constexpr,
    TILE: tl.constexpr, NOISY: tl.constexpr, MARGIN: tl.constexpr,
):
    # fmt: on
    # One program does it all, row by row: [WIDE, TILE] products in registers, multiplied with the codebook row of the
    # id that was chosen last. That row comes from memory, everything else from the second-level cache.
    slot = tl.arange(0, WIDE)
    column = tl.arange(0, TILE)
    wait_for_earlier_kernels()
    previous = tl.load(anchor)
    hotness = 1.0
    if NOISY:
        hotness = tl.load(temperature)
    for row in range(rows):
        score = tl.load(scores + row * WIDE + slot)
        candidate = tl.load(ids + row * WIDE + slot)
        following = tl.zeros((WIDE,), tl.float32)
        for first in range(0, rank, TILE):
            there = first + column < rank
            book = tl.load(predecessors + previous * rank + first + column, mask=there, other=0.0).to(tl.float32)
            part = tl.load(
                followers + (row * WIDE + slot)[:, None] * rank + first + column[None, :],
                mask=there[None, :],
                other=0.0,
            )
            following += tl.sum(part * book[None, :], 1)
        total = score + following / hotness
        top, place = _largest(total, slot)
        previous = tl.sum(tl.where(slot == place, candidate, 0), 0).to(tl.int64)
        tl.store(out + row, previous)
        if MARGIN:
            tl.store(margins + row, top - tl.max(tl.where(slot == place, float("-inf"), total), 0))

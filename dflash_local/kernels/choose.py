"""Turn logits into ids on the device: each row's argmax, or the noisy argmax that is a sample (``kernels.noise``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from dflash_local.kernels.allocate import Tensors
from dflash_local.kernels.jit import (
    jit,
    overlapping,
    power_of_two,
    runs_kernels,
    start_next_kernel,
    tl,
    wait_for_earlier_kernels,
)
from dflash_local.kernels.noise import gumbel
from dflash_local.layout.cycle import CHOICE_BLOCK, choice_buffers

NOT_FINITE = -1  # instead of an id, for a row with NaN or infinity in it
# Temperature [1] float32, seed [1] int64, start [1] int32: row i is at start + 1 + i.
Noise = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Choosing(NamedTuple):
    """Say how rows are chosen: greedily, or with ``noise`` as a sample.

    Attributes:
        margins: [M] float32, get how far the chosen score, noise included, lies above the next one; 0 where a row is
            not finite.
        head_ids: [V] int32, ascending, what the columns stand for; None: a column stands for the id of its number. Ties
            and noise are by id.
    """

    noise: Noise | None = None
    margins: torch.Tensor | None = None
    head_ids: torch.Tensor | None = None


GREEDY = Choosing()


class RowChooser:
    """Chooses an id for each row of logits."""

    def choose(self, logits: torch.Tensor, out: torch.Tensor, how: Choosing = GREEDY) -> None:
        """Write the best id of each row of ``logits`` [M, V] to ``out`` [M] int64; the first of equal ones."""
        raise NotImplementedError


class Chooser(RowChooser):
    """Each row's argmax; holds the room for the partial results.

    Args:
        buffers: of ``layout.cycle.choice_buffers``.
        not_finite_id: the id of a row with NaN or infinity in it; 0 where ids must be ids, as of drafts, which are
            verified anyway.
    """

    def __init__(self, buffers: Sequence[torch.Tensor], not_finite_id: int = NOT_FINITE) -> None:
        self._best = BlockBest(*buffers)
        self._not_finite_id = not_finite_id

    @classmethod
    def allocate(cls, rows: int, vocab_size: int, device: torch.device, not_finite_id: int = NOT_FINITE) -> Chooser:
        buffers = choice_buffers("", rows, vocab_size)
        return cls(Tensors(buffers, device).take(buffers), not_finite_id)

    def choose(self, logits: torch.Tensor, out: torch.Tensor, how: Choosing = GREEDY) -> None:
        if not runs_kernels(logits):
            return _reference(logits, out, how, self._not_finite_id)
        noise, margins, head_ids = how
        rows, vocab = logits.shape
        blocks = -(-vocab // CHOICE_BLOCK)
        temperature, seed, start = noise or (logits, out, out)
        _block_argmax_kernel[(rows, blocks)](
            logits, out if head_ids is None else head_ids, temperature, seed, start, *self._best, vocab, blocks,
            CHOICE_BLOCK, noise is not None, margins is not None, head_ids is not None, num_warps=4,
        )  # fmt: skip
        argmax_of_blocks(self._best, out, margins, blocks, self._not_finite_id)


class BlockBest(NamedTuple):
    """Hold of each block of the vocabulary the largest score, its id, and the next score: [M, blocks] or [blocks].
    The id -1 stands for a block that is not finite.
    """

    values: torch.Tensor
    ids: torch.Tensor
    next_values: torch.Tensor


def argmax_of_blocks(
    best: BlockBest, out: torch.Tensor, margins: torch.Tensor | None, blocks: int, not_finite_id: int
) -> None:
    """Write each row's best id to ``out`` [M] int64, and its margin. A launch behind the one that wrote ``best``."""
    wide = power_of_two(blocks)
    _argmax_kernel[(len(out),)](
        *best, out, out if margins is None else margins, blocks, wide, not_finite_id, margins is not None,
        num_warps=max(1, min(8, wide // 256)), **overlapping(out),
    )  # fmt: skip


def best_with_margin(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's best id [M] by scores [M, V], the first of equal ones, and its margin [M] in float32: how far
    it lies above the next one, infinite where there is none.
    """
    top, ids = scores.max(-1, keepdim=True)
    scores.scatter_(-1, ids, float("-inf"))  # for a moment: copies of whole vocabularies take longer
    following = scores.amax(-1, keepdim=True)
    scores.scatter_(-1, ids, top)
    return ids[:, 0], (top - following)[:, 0].float()


def drawn(noise: Noise, logits: torch.Tensor, head_ids: torch.Tensor | None = None) -> torch.Tensor:
    """Return the noise [M, V] of all ``logits``, in plain PyTorch. ``head_ids``: see ``Choosing``."""
    _, seed, start = noise
    vocab = logits.shape[1] if head_ids is None else int(head_ids[-1]) + 1
    found = gumbel(int(seed) % 2**64, int(start) + 1, len(logits), vocab, logits.device)
    return found if head_ids is None else found[:, head_ids.long()]


def ids_of(columns: torch.Tensor, head_ids: torch.Tensor | None) -> torch.Tensor:
    """Return the ids int64 that columns of logits stand for, in plain PyTorch. ``head_ids``: see ``Choosing``."""
    return columns if head_ids is None else head_ids.long()[columns]


def _reference(logits: torch.Tensor, out: torch.Tensor, how: Choosing, not_finite_id: int) -> None:
    noise, margins, head_ids = how
    scores = logits.float()
    if noise is not None:
        scores = scores / noise[0] + drawn(noise, logits, head_ids)
    finite = torch.isfinite(logits).all(-1)
    if margins is None:
        columns = scores.argmax(-1)
    else:
        columns, leads = best_with_margin(scores)
        margins.copy_(torch.where(finite, leads, 0.0))
    out.copy_(torch.where(finite, ids_of(columns, head_ids), not_finite_id))


@jit
def gumbel_of_word(word):
    """Return the noise of one of the generator's words: see ``kernels.noise``."""
    uniform = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1.0 - 5.960464477539063e-08)
    # log1p(-uniform) by Kahan's quotient: exact where the sum rounds, which is where the largest noise comes from.
    rest = 1.0 - uniform
    ratio = tl.where(rest == 1.0, 1.0, tl.log(rest) / tl.where(rest == 1.0, 1.0, rest - 1.0))
    return -tl.log(uniform * ratio)


@jit
def word_of(ids, seed, position):
    """Return the generator's words of ids that need not be neighbours, int32: each is one of four of a call."""
    group = ids // 4
    zero = group * 0
    w0, w1, w2, w3 = tl.philox(seed, group, zero + position, zero, zero)
    return tl.where(ids % 4 == 0, w0, tl.where(ids % 4 == 1, w1, tl.where(ids % 4 == 2, w2, w3)))


@jit
def _part(logits, at, vocab, word, temperature, NOISY: tl.constexpr):
    """Return scores of the tokens ``at``, and whether their logits are finite."""
    inside = at < vocab
    value = tl.load(logits + at, mask=inside, other=0.0).to(tl.float32)
    finite = tl.abs(value) < float("inf")
    if NOISY:
        value = value / temperature + gumbel_of_word(word)
    return tl.where(inside & finite, value, float("-inf")), finite


# fmt: off
@jit
def _block_argmax_kernel(
    logits, head_ids, temperature, seed, start, values, places, next_values, vocab, blocks, BLOCK: tl.constexpr,
    NOISY: tl.constexpr, MARGIN: tl.constexpr, NAMED: tl.constexpr,
):
    # fmt: on
    # One program: BLOCK logits of one row. They are read once, as four strided quarters since a call of the generator
    # gives four words; the best of them, its id, and for a margin the next one are written. NAMED: ids of the columns
    # are read as well, and each takes a call of its own.
    start_next_kernel()
    row = tl.program_id(0)
    block = tl.program_id(1)
    group = block * (BLOCK // 4) + tl.arange(0, BLOCK // 4)  # one call of the generator serves four tokens
    source = logits + row.to(tl.int64) * vocab
    zero = group * 0
    if NOISY:
        temperature_value = tl.load(temperature)
        position = tl.load(start) + 1 + row
        w0, w1, w2, w3 = tl.philox(tl.load(seed), group, zero + position, zero, zero)
    else:
        temperature_value = 1.0
        w0 = zero
        w1 = zero
        w2 = zero
        w3 = zero
    i0 = group * 4
    i1 = group * 4 + 1
    i2 = group * 4 + 2
    i3 = group * 4 + 3
    if NAMED:
        i0 = tl.load(head_ids + i0, mask=i0 < vocab, other=0)
        i1 = tl.load(head_ids + i1, mask=i1 < vocab, other=0)
        i2 = tl.load(head_ids + i2, mask=i2 < vocab, other=0)
        i3 = tl.load(head_ids + i3, mask=i3 < vocab, other=0)
        if NOISY:
            seed_value = tl.load(seed)
            w0 = word_of(i0, seed_value, position)
            w1 = word_of(i1, seed_value, position)
            w2 = word_of(i2, seed_value, position)
            w3 = word_of(i3, seed_value, position)
    s0, f0 = _part(source, group * 4, vocab, w0, temperature_value, NOISY)
    s1, f1 = _part(source, group * 4 + 1, vocab, w1, temperature_value, NOISY)
    s2, f2 = _part(source, group * 4 + 2, vocab, w2, temperature_value, NOISY)
    s3, f3 = _part(source, group * 4 + 3, vocab, w3, temperature_value, NOISY)
    best = s0
    place = i0
    place = tl.where(s1 > best, i1, place)
    best = tl.maximum(best, s1)
    place = tl.where(s2 > best, i2, place)
    best = tl.maximum(best, s2)
    place = tl.where(s3 > best, i3, place)
    best = tl.maximum(best, s3)
    top = tl.max(best, 0)
    first = tl.min(tl.where(best == top, place, 2147483647), 0)
    finite = tl.min((f0 & f1 & f2 & f3).to(tl.int32), 0)
    tl.store(values + row * blocks + block, tl.where(finite == 1, top, float("inf")))
    tl.store(places + row * blocks + block, tl.where(finite == 1, first, -1))
    if MARGIN:
        rest = tl.maximum(_but(s0, i0, first), _but(s1, i1, first))
        rest = tl.maximum(rest, tl.maximum(_but(s2, i2, first), _but(s3, i3, first)))
        tl.store(next_values + row * blocks + block, tl.max(rest, 0))


@jit
def _but(score, at, place):
    """Return scores of the places ``at`` without that of one place."""
    return tl.where(at == place, float("-inf"), score)


# fmt: off
@jit
def _argmax_kernel(
    values, places, next_values, out, margins, blocks, BLOCKS: tl.constexpr, NOT_FINITE_ID: tl.constexpr,
    MARGIN: tl.constexpr,
):
    # fmt: on
    # One program: one row, the results of all its blocks in registers.
    wait_for_earlier_kernels()
    start_next_kernel()
    row = tl.program_id(0)
    at = tl.arange(0, BLOCKS)
    inside = at < blocks
    value = tl.load(values + row * blocks + at, mask=inside, other=float("-inf"))
    place = tl.load(places + row * blocks + at, mask=inside, other=2147483647)
    top = tl.max(value, 0)
    best = tl.min(tl.where(value == top, place, 2147483647), 0)
    tl.store(out + row, tl.where(best < 0, NOT_FINITE_ID, best).to(tl.int64))
    if MARGIN:
        # The next score is that of another block, or the next one of the block with the best.
        second = tl.load(next_values + row * blocks + at, mask=inside, other=float("-inf"))
        following = tl.max(tl.where(place == best, second, value), 0)
        tl.store(margins + row, tl.where(best < 0, 0.0, top - following))

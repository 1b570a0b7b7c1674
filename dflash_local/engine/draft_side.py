"""How exactly drafts are computed: a choice of weights that makes them cheaper and can change no reply.

Every draft is verified by the target's own weights and head, so all that these choices touch is how many are accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from dflash_local.errors import UsageError
from dflash_local.kernels.timing import replay_ms
from dflash_local.models.fused.drafter import FusedDrafter
from dflash_local.models.fused.linear import Linear, choose_configs, first_out_features, int8_copy

FREQUENT = 65_536  # rows of the head that serves frequent tokens
GAIN = 0.02  # of a cycle, that a coarser draft side must bring
MAX_SEQ_LEN = 2048  # positions that measured drafts may look back on
REPLAYS = 9


@dataclass(frozen=True, slots=True)
class DraftSide:
    """What drafts are computed with.

    Attributes:
        weights: the drafter's matrices, as they are stored or in eight bits.
        head: the target's own; a copy of it in eight bits; or its first 65,536 rows, which take no memory. Byte-pair
            ids are numbered in the order of their merges, so low ids are the frequent ones; others are never drafted,
            which costs acceptance in text that is made of them, such as scripts that few training texts used.
    """

    weights: Literal["full", "8bit"] = "full"
    head: Literal["full", "8bit", "frequent"] = "full"


FULL = DraftSide()
NAMED: Mapping[str, DraftSide] = {
    "full": FULL,
    "8bit-head": DraftSide("full", "8bit"),
    "8bit-drafter": DraftSide("8bit", "full"),
    "8bit": DraftSide("8bit", "8bit"),
    "frequent": DraftSide("full", "frequent"),
    "8bit-frequent": DraftSide("8bit", "frequent"),
}
WORDS = ("auto", *NAMED)
MEASURED = ("8bit-head", "8bit")  # by ``auto``; heads without all tokens are for the user to choose


@dataclass(frozen=True, slots=True)
class Settled:
    """What a drafter drafts with from now on.

    Attributes:
        word: one of ``NAMED``. draft_ms: a draft's milliseconds by word, empty when nothing was measured.
        cycle_ms: a whole draft and verify with the full draft side. fault: why a candidate was left out, or empty.
    """

    word: str
    draft_ms: Mapping[str, float]
    cycle_ms: float = 0.0
    fault: str = ""

    @property
    def side(self) -> DraftSide:
        """The choice behind the word."""
        return NAMED[self.word]

    @property
    def gain(self) -> float:
        """Share of the cycle that was saved."""
        return (self.draft_ms["full"] - self.draft_ms[self.word]) / self.cycle_ms if self.draft_ms else 0.0

    @property
    def notice(self) -> str:
        """A line for the user, empty when drafts are computed in full and nothing is to be said."""
        if self.fault:
            return f"drafts are computed with the {self.word} draft side: {self.fault}"
        if self.word == "full" or not self.draft_ms:
            return ""
        before, now = self.draft_ms["full"], self.draft_ms[self.word]
        return (
            f"drafts are computed with the {self.word} draft side: {now:.2f} ms instead of {before:.2f}, "
            f"{self.gain:.0%} of the cycle; no reply changes by it"
        )


def side_of(word: str, vocab_size: int) -> DraftSide | None:
    """The choice behind a word for a target with so many ids; None for ``auto``.

    Raises:
        UsageError: no such choice, or not for this target.
    """
    if word == "auto":
        return None
    if word not in NAMED:
        raise UsageError(f"unknown draft side {word!r}", f"use {', '.join(WORDS)}")
    if NAMED[word].head == "frequent" and vocab_size <= FREQUENT:
        raise UsageError(
            f"draft side {word}: the vocabulary of {vocab_size:,} ids is not larger than {FREQUENT:,}", "use 8bit-head"
        )
    return NAMED[word]


def settle(drafter: FusedDrafter, word: str, rows: int) -> Settled:
    """Give a drafter, fresh from loading, the draft side that was asked for; ``auto`` measures and chooses.

    The products of a side that is not full are chosen here; those of the full one are the caller's, before. ``auto``
    is ``full`` without CUDA and in float32.

    Args:
        rows: verified in a cycle.

    Raises:
        UsageError: not for this target. torch.OutOfMemoryError: a side that was asked for by name does not fit.
    """
    target = drafter.target
    side = side_of(word, target.vocab_size)
    if side is not None:
        apply(drafter, side)
        if side is not FULL:
            choose_configs(drafter.products, rows)
        return Settled(word, {})
    if target.device.type != "cuda" or target.dtype == torch.float32:
        return Settled("full", {})
    return _measured(drafter, rows)


def apply(drafter: FusedDrafter, side: DraftSide) -> None:
    """Draft with that side from now on. What it takes from the drafter's matrices cannot be brought back.

    The products are the library's until they are chosen. Nothing may have been recorded yet.
    """
    if side.weights == "8bit":
        drafter.in_eight_bits()
    _wear(drafter, side.head)


def give_head_back(drafter: FusedDrafter, word: str) -> str:
    """Draft with the target's own head instead of a copy of it; returns the word for what is left of ``word``."""
    _wear(drafter, "full")
    left = DraftSide(NAMED[word].weights, "full")
    return next(name for name, side in NAMED.items() if side == left)


def _wear(drafter: FusedDrafter, head: str, coarse: Linear | None = None) -> None:
    own = drafter.target.weights.head
    if head == "8bit":
        drafter.use_head(int8_copy(own) if coarse is None else coarse)
    else:
        drafter.use_head(own if head == "full" else first_out_features(own, FREQUENT))


def _measured(drafter: FusedDrafter, rows: int) -> Settled:
    """Try what ``auto`` may choose: each step to something coarser must save its share of the cycle."""
    target, fault, best = drafter.target, "", "full"
    max_seq_len = min(MAX_SEQ_LEN, target.capacity)

    def draft_ms() -> float:
        return replay_ms(lambda: drafter.block(max_seq_len), REPLAYS)

    times = {"full": draft_ms()}
    cycle_ms = times["full"] + replay_ms(lambda: target.block(rows, max_seq_len, True), REPLAYS)
    stored = [(matrix.weight, matrix.config) for matrix in drafter.matrices]
    coarse: Linear | None = None
    try:
        coarse = int8_copy(target.weights.head)
        for word in MEASURED:
            if NAMED[word].weights == "8bit":
                drafter.in_eight_bits()
            _wear(drafter, NAMED[word].head, coarse)
            choose_configs(drafter.products, rows)
            times[word] = draft_ms()
            best = word if times[best] - times[word] >= GAIN * cycle_ms else best
    except torch.OutOfMemoryError:
        fault = "the device had no room to try a coarser one"
    if NAMED[best].weights == "full":
        for matrix, (weight, config) in zip(drafter.matrices, stored, strict=True):
            matrix.weight, matrix.config = weight, config
    if NAMED[best].head == "full":
        _wear(drafter, "full")
    del stored, coarse
    torch.cuda.empty_cache()
    target.clear()
    return Settled(best, times, cycle_ms, fault)

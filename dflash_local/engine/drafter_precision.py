"""The precision that drafts are computed with: it changes how many are accepted, never a reply, as all are verified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import torch

from dflash_local.drafters.engines import FusedDrafter
from dflash_local.errors import UsageError
from dflash_local.kernels.allocate import Tensors
from dflash_local.kernels.kernel_trial import OnProgress
from dflash_local.kernels.timing import KernelTimer, replay_ms
from dflash_local.layout.draft_head import head_ids_buffer
from dflash_local.load_config import DRAFTER_PRECISIONS, FREQUENT, DrafterPrecision
from dflash_local.models.fused.kernel_choice import choose_configs
from dflash_local.models.fused.linear import Linear, gathered_rows, int8_copy

GAIN = 0.02  # of a cycle, that a coarser precision must bring
MAX_SEQ_LEN = 2048  # positions that measured drafts may look back on
REPLAYS = 9
MEASURED = ("8bit-head", "8bit")  # by ``auto``; heads without all tokens are for the user to choose
NOTHING_SAID = "no reply of this vocabulary was counted before, so its first"


@dataclass(frozen=True, slots=True)
class ChosenPrecision:
    """Hold what a drafter drafts with from now on.

    Attributes:
        name: in ``DRAFTER_PRECISIONS``. draft_ms: a draft's milliseconds by name, empty when nothing was measured.
        cycle_ms: a whole draft and verify with full precision. fault: why a candidate was left out, or what is not
            known of a requested one; or empty.
        peak_before: bytes that torch's allocator had held at most before any was tried; its peak counts anew since.
            What is tried takes room that is free, and gives way where there is none: no plan counts it.
    """

    name: str
    draft_ms: Mapping[str, float]
    cycle_ms: float = 0.0
    fault: str = ""
    peak_before: int = 0

    @property
    def precision(self) -> DrafterPrecision:
        return DRAFTER_PRECISIONS[self.name]

    @property
    def gain(self) -> float:
        """Share of the cycle that was saved."""
        return (self.draft_ms["full"] - self.draft_ms[self.name]) / self.cycle_ms if self.draft_ms else 0.0

    @property
    def notice(self) -> str:
        """Return a line for the user, empty when drafts are computed in full and nothing is to be said."""
        if self.fault:
            return f"drafter precision {self.name}: {self.fault}"
        if self.name == "full" or not self.draft_ms:
            return ""
        before, now = self.draft_ms["full"], self.draft_ms[self.name]
        return (
            f"drafter precision {self.name}: a draft takes {now:.2f} ms instead of {before:.2f}, "
            f"{self.gain:.0%} of the cycle; no reply changes by it"
        )


def precision_of(name: str, vocab_size: int) -> DrafterPrecision | None:
    """Return that precision for a target with so many ids; None for ``auto``. Raise UsageError if not for it."""
    if name == "auto":
        return None
    if DRAFTER_PRECISIONS[name].head == "frequent" and vocab_size <= FREQUENT:
        raise UsageError(
            f"--drafter-precision {name}: the vocabulary of {vocab_size:,} ids is not larger than {FREQUENT:,}",
            "use 8bit-head",
        )
    return DRAFTER_PRECISIONS[name]


def choose_precision(
    drafter: FusedDrafter,
    name: str,
    rows: int,
    progress: OnProgress = lambda text, part: None,
    timer: KernelTimer | None = None,
    said: Sequence[int] = (),
) -> ChosenPrecision:
    """Give a drafter, fresh from loading, the requested precision; ``auto`` measures and chooses.

    The products of a precision that is not full are chosen here; those of the full one are the caller's, before.
    ``auto`` is ``full`` without CUDA and in float32.

    Args:
        rows: verified in a cycle. progress, timer: see ``choose_configs``. said: see ``frequent_ids``.

    Raises:
        UsageError: not for this target. torch.OutOfMemoryError: a precision that was requested by name does not fit.
    """
    target = drafter.target
    precision = precision_of(name, target.vocab_size)
    if precision is not None:
        apply(drafter, precision, said)
        if name != "full":
            choose_configs(drafter.products, rows, progress, timer)
        unknown = precision.head == "frequent" and not said
        return ChosenPrecision(name, {}, fault=f"{NOTHING_SAID} {FREQUENT:,} ids are drafted" if unknown else "")
    if target.device.type != "cuda" or target.dtype == torch.float32:
        return ChosenPrecision("full", {})
    return _measured(drafter, rows, progress, timer or KernelTimer())


def apply(drafter: FusedDrafter, precision: DrafterPrecision, said: Sequence[int] = ()) -> None:
    """Draft with that precision from now on, by the library's products until others are chosen. What it takes from the
    drafter's matrices cannot be brought back. Nothing may have been recorded yet. ``said``: see ``frequent_ids``.
    """
    coarse = precision.weights == "8bit"
    if coarse:
        drafter.quantize()
    if precision.head != "frequent":
        return _use_head(drafter, precision.head)
    own, device = drafter.stored_head, drafter.target.device
    ids = frequent_ids(said, own.out_features)
    buffer = head_ids_buffer(len(ids))
    head_ids = Tensors([buffer], device)[buffer.name].copy_(torch.tensor(ids))
    coarse = coarse or not isinstance(own.weight, torch.Tensor)
    drafter.use_head(gathered_rows(own, head_ids.long(), coarse), head_ids)


def follow_precision(own: FusedDrafter, drafter: FusedDrafter, name: str, rows: int, timer: KernelTimer) -> None:
    """Give the target's own layer the precision that was chosen of the drafter beside it; its products are chosen here.
    ``rows``, ``timer``: see ``choose_precision``.
    """
    if DRAFTER_PRECISIONS[name].weights == "8bit":
        own.quantize()
    share_head(own, drafter)
    choose_configs(own.products, rows, timer=timer)


def share_head(own: FusedDrafter, drafter: FusedDrafter) -> None:
    """Let the target's own layer draft with the head of the drafter beside it, where that is the target's or a copy."""
    if drafter.stored_head is own.stored_head:
        own.use_head(drafter.head, drafter.head_ids)


def frequent_ids(said: Sequence[int], vocab_size: int) -> list[int]:
    """Return the ids that a frequent head drafts, ascending: of those ``said``, from the most frequent one on, then the
    lowest that are left.
    """
    known = (each for each in said if each < vocab_size)
    return sorted(islice(dict.fromkeys(chain(known, range(vocab_size))), FREQUENT))


def release_head_copy(drafter: FusedDrafter, name: str) -> str:
    """Draft with the stored head instead of a copy of it; returns the name of what is left of ``name``."""
    _use_head(drafter, "full")
    left = DrafterPrecision(DRAFTER_PRECISIONS[name].weights, "full")
    return next(each for each, precision in DRAFTER_PRECISIONS.items() if precision == left)


def _use_head(drafter: FusedDrafter, head: str, coarse: Linear | None = None) -> None:
    own = drafter.stored_head
    if head == "8bit":
        own = int8_copy(own) if coarse is None else coarse
    drafter.use_head(own)


def _measured(drafter: FusedDrafter, rows: int, progress: OnProgress, timer: KernelTimer) -> ChosenPrecision:
    """Try what ``auto`` may choose: each step to something coarser must save its share of the cycle."""
    target, fault, best = drafter.target, "", "full"
    max_seq_len = min(MAX_SEQ_LEN, target.capacity)
    peak_before = torch.cuda.max_memory_allocated(target.device)

    def draft() -> None:
        drafter.block(max_seq_len)
        if drafter.selector is not None:
            drafter.selector.choose(drafter.drafts, target.tokens[1 : len(drafter.drafts) + 1])

    def draft_ms() -> float:
        return replay_ms(draft, REPLAYS)

    times = {"full": draft_ms()}
    cycle_ms = times["full"] + replay_ms(lambda: target.block(rows, max_seq_len, True), REPLAYS)
    stored = [(matrix.weight, matrix.config) for matrix in drafter.matrices]
    coarse: Linear | None = None
    try:
        coarse = int8_copy(drafter.stored_head)
        for name in MEASURED:
            if DRAFTER_PRECISIONS[name].weights == "8bit":
                drafter.quantize()
            _use_head(drafter, DRAFTER_PRECISIONS[name].head, coarse)
            choose_configs(drafter.products, rows, progress, timer)
            times[name] = draft_ms()
            best = name if times[best] - times[name] >= GAIN * cycle_ms else best
    except torch.OutOfMemoryError:
        fault = "the device had no room to try a coarser one"
    if DRAFTER_PRECISIONS[best].weights == "full":
        for matrix, (weight, config) in zip(drafter.matrices, stored, strict=True):
            matrix.weight, matrix.config = weight, config
    if DRAFTER_PRECISIONS[best].head == "full":
        _use_head(drafter, "full")
    del stored, coarse
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(target.device)
    target.clear()
    return ChosenPrecision(best, times, cycle_ms, fault, peak_before)

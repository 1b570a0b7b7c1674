"""Figures of a task over the results of its prompts: both acceptance lengths, rates, waits. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dflash_local.bench.tasks.results import PromptResult, Reply


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of the replies' own values, by nearest rank; None where there is no reply."""

    p50: float | None
    p90: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles:
        return cls(*(percentile(values, share) for share in (0.5, 0.9, 0.99)))


@dataclass(frozen=True, slots=True)
class ModeFigures:
    """All replies of one mode; the first token of a reply belongs to its prefill.

    Attributes:
        tokens_per_s: decode rate, first tokens left out. end_to_end_tokens_per_s: prefill included.
    """

    tokens: int
    tokens_per_s: float | None
    end_to_end_tokens_per_s: float | None
    ttft_s: Percentiles
    decode_rates: Percentiles
    end_to_end_rates: Percentiles


@dataclass(frozen=True, slots=True)
class TaskFigures:
    """One task.

    Attributes:
        prompts: answered. failed: that ended in an error, and count nowhere else. replies: turns of those answered.
        acceptance_length: as the cards: the mean of each reply's cycles, averaged over replies.
        mean_acceptance_length: as vLLM: tokens of all drafting cycles / those cycles.
        cycles: that drafted. speedup: of the end-to-end rates; decode_speedup: of the decode rates.
        equal: replies with the same ids in both modes.
    """

    prompts: int
    failed: int
    replies: int
    cycles: int
    acceptance_length: float | None
    mean_acceptance_length: float | None
    speedup: float | None
    decode_speedup: float | None
    equal: int
    ar: ModeFigures
    dflash: ModeFigures


def acceptance_length(replies: Sequence[Sequence[int]]) -> float | None:
    """As the model cards: each reply's mean over its cycles, then the mean of these; replies without one left out.

    Args:
        replies: accepted drafts + 1 of each drafting cycle, for each reply.
    """
    means = [sum(lengths) / len(lengths) for lengths in replies if lengths]
    return sum(means) / len(means) if means else None


def mean_acceptance_length(replies: Sequence[Sequence[int]]) -> float | None:
    """As vLLM's "mean acceptance length": 1 + accepted drafts / drafting cycles, all replies together."""
    lengths = [length for reply in replies for length in reply]
    return sum(lengths) / len(lengths) if lengths else None


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that ``share`` of all do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)), 1) - 1] if ordered else None


def of_results(results: Sequence[PromptResult]) -> TaskFigures:
    """The figures of a task's prompts."""
    turns = [turn for result in results if not result.error for turn in result.turns]
    ar, dflash = _mode([turn.ar for turn in turns]), _mode([turn.dflash for turn in turns])
    lengths = [turn.dflash.acceptance_lengths for turn in turns]
    return TaskFigures(
        prompts=sum(not result.error for result in results),
        failed=sum(bool(result.error) for result in results),
        replies=len(turns),
        cycles=sum(map(len, lengths)),
        acceptance_length=acceptance_length(lengths),
        mean_acceptance_length=mean_acceptance_length(lengths),
        speedup=ratio(dflash.end_to_end_tokens_per_s, ar.end_to_end_tokens_per_s),
        decode_speedup=ratio(dflash.tokens_per_s, ar.tokens_per_s),
        equal=sum(turn.equal for turn in turns),
        ar=ar,
        dflash=dflash,
    )


def _mode(replies: Sequence[Reply]) -> ModeFigures:
    decode_s = sum(reply.decode_s for reply in replies)
    tokens = sum(reply.tokens for reply in replies)
    return ModeFigures(
        tokens=tokens,
        tokens_per_s=ratio(sum(max(reply.tokens - 1, 0) for reply in replies), decode_s),
        end_to_end_tokens_per_s=ratio(tokens, decode_s + sum(reply.prefill_s for reply in replies)),
        ttft_s=Percentiles.of([reply.ttft_s for reply in replies]),
        decode_rates=Percentiles.of([reply.tokens_per_s for reply in replies]),
        end_to_end_rates=Percentiles.of([reply.end_to_end_tokens_per_s for reply in replies]),
    )


def ratio(above: float | None, below: float | None) -> float | None:
    """The quotient; None where there is nothing to divide, or by."""
    return above / below if above is not None and below else None

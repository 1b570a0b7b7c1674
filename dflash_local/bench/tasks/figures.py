"""Figures of a task answered in one way: throughput, both acceptance lengths, rates, waits. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dflash_local.bench.tasks.results import Drafted, PromptResult, ResultsFile, TaskReply


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of the replies' own values, by nearest rank; None where there is no reply."""

    p50: float | None
    p90: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles:
        return cls(*(percentile(values, share) for share in (0.5, 0.9, 0.99)))


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest value that ``share`` of all do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)), 1) - 1] if ordered else None


@dataclass(frozen=True, slots=True)
class Throughput:
    """Output tokens over time: on a server the wall clock of the longest uninterrupted part, else that of the replies.

    Attributes:
        prompts: answered in it, which all prompts need not be after a run that went on.
        whole: the part came to its end; False: what was under way when it ended counts as time, not as tokens.
        tokens: None where a server does not count them.
    """

    prompts: frozenset[str]
    whole: bool
    tokens: int | None
    wall_s: float

    @property
    def tokens_per_s(self) -> float | None:
        return ratio(self.tokens, self.wall_s)


@dataclass(frozen=True, slots=True)
class Accepted:
    """What the drafts were worth.

    Attributes:
        length: as the cards: each reply's mean over its cycles, then over replies; only where replies report theirs.
        mean: as vLLM: 1 + accepted drafts / drafting cycles, of all of them together.
        prompts: that the figures are of. source: where they come from, or why there are none.
    """

    length: float | None
    mean: float | None
    prompts: int
    source: str


@dataclass(frozen=True, slots=True)
class TaskFigures:
    """One task.

    Attributes:
        prompts: answered. failed: that ended in an error, and count nowhere else. requests: turns of those answered.
        parts: runs that the answers come from. decode_rates, end_to_end_rates: of single requests, tokens per second.
        ttft_s, end_to_end_rates: of the replies that have a token.
        reused_tokens: of all prompts, that a server's prefix cache had, as far as it reports them.
    """

    prompts: int
    failed: int
    requests: int
    parts: int
    throughput: Throughput | None
    accepted: Accepted
    ttft_s: Percentiles
    latency_s: Percentiles
    decode_rates: Percentiles
    end_to_end_rates: Percentiles
    reused_tokens: int


def of_file(file: ResultsFile, ids: Sequence[str], alone: bool = False) -> TaskFigures:
    """Return the figures of these prompts.

    Args:
        alone: one request at a time and nothing beside, so that throughput is of the replies' own times and of all
            prompts; else it and the counters' acceptance are of whole parts, whose prompts may be others too.
    """
    results = [file.results[name] for name in ids]
    answered = [result for result in results if not result.error]
    turns = [turn for result in answered for turn in result.turns]
    parts = sorted({result.part for result in answered})
    counted = [(turn.tokens, turn.latency_s) for turn in turns if turn.tokens and turn.latency_s]
    return TaskFigures(
        prompts=len(answered),
        failed=len(results) - len(answered),
        requests=len(turns),
        parts=len(parts),
        throughput=_throughput(file, answered if alone else [], parts),
        accepted=_accepted(file, parts, turns, len(answered)),
        ttft_s=Percentiles.of([turn.ttft_s for turn in turns if turn.ttft_s]),
        latency_s=Percentiles.of([turn.latency_s for turn in turns]),
        decode_rates=Percentiles.of([turn.tokens_per_s for turn in turns if turn.tokens_per_s is not None]),
        end_to_end_rates=Percentiles.of([tokens / seconds for tokens, seconds in counted]),
        reused_tokens=sum(turn.reused_tokens for turn in turns),
    )


def speedup(drafted: TaskFigures, plain: TaskFigures) -> float | None:
    """Return the ratio of the throughputs; None where they are of different prompts."""
    above, below = drafted.throughput, plain.throughput
    if above is None or below is None or above.prompts != below.prompts:
        return None
    return ratio(above.tokens_per_s, below.tokens_per_s)


def equal(drafted: ResultsFile, plain: ResultsFile, ids: Sequence[str]) -> tuple[int, int]:
    """Count prompts all of whose replies are the same in both ways, and those answered in both."""
    pairs = [(drafted.results[name], plain.results[name]) for name in ids]
    both = [(one.turns, other.turns) for one, other in pairs if not one.error and not other.error]
    same = sum(all(left.equals(right) for left, right in zip(*turns, strict=True)) for turns in both)
    return same, len(both)


def ratio(above: float | None, below: float | None) -> float | None:
    """Divide; None where there is nothing to divide, or by."""
    return above / below if above is not None and below else None


def _throughput(file: ResultsFile, alone: Sequence[PromptResult], parts: Sequence[int]) -> Throughput | None:
    if not parts:
        return None
    longest = max(parts, key=lambda part: len(file.of_part(part)))
    results, ended = alone or file.of_part(longest), file.parts.get(longest)
    turns = [turn for result in results for turn in result.turns]
    counts = [turn.tokens for turn in turns if turn.tokens is not None]
    wall_s = ended.wall_s if ended is not None else max(result.ended_s for result in results)
    return Throughput(
        prompts=frozenset(result.id for result in results),
        whole=bool(alone) or ended is not None,
        tokens=sum(counts) if len(counts) == len(turns) else None,
        wall_s=sum(turn.latency_s for turn in turns) if alone else wall_s,
    )


def _accepted(file: ResultsFile, parts: Sequence[int], turns: Sequence[TaskReply], prompts: int) -> Accepted:
    """By the replies' own figures where all have them, else by the counters' differences of the whole parts."""
    own = [turn.drafted for turn in turns if turn.drafted is not None]
    if own and len(own) == len(turns):
        means = [mean for one in own if (mean := _mean([one])) is not None]
        return Accepted(ratio(sum(means), len(means)), _mean(own), prompts, "reported with each reply")
    known = {part: ended.drafted for part in parts if (ended := file.parts.get(part)) and ended.drafted is not None}
    if known:
        covered = sum(len(file.of_part(part)) for part in known)
        return Accepted(None, _mean(list(known.values())), covered, "the server's counters")
    last = file.parts.get(parts[-1]) if parts else None
    reason = last.reason if last is not None else "the run ended early" if parts else "nothing was answered"
    return Accepted(None, None, 0, reason)


def _mean(drafted: Sequence[Drafted]) -> float | None:
    cycles = sum(one.cycles for one in drafted)
    return 1 + sum(one.accepted for one in drafted) / cycles if cycles else None

"""Figures of one reply, collected cycle by cycle: acceptance, rates, phases. Host clock only."""

from __future__ import annotations

import statistics
import time
from collections import Counter, deque
from collections.abc import Sequence

from dflash_local.engine.runner import Cycle, PlainStep
from dflash_local.events import Mode, Stats
from dflash_local.loaded import SessionFacts

ALARM_CYCLES = 64  # acceptance is judged over this many cycles
LEAST_PLAIN = 16  # a reply of fewer steps does not tell how long one takes


def acceptance_per_position(cycles: Sequence[tuple[int, int]]) -> tuple[float, ...]:
    """Share of the ``cycles`` (drafted, accepted) that drafted slot k (1-based) in which it was accepted."""
    widest = max((drafted for drafted, _ in cycles), default=0)
    shares = []
    for slot in range(1, widest + 1):
        reached = [accepted >= slot for drafted, accepted in cycles if drafted >= slot]
        shares.append(sum(reached) / len(reached))
    return tuple(shares)


class ReplyFigures:
    """Running figures; ``stats()`` freezes them."""

    def __init__(
        self, engine: str, mode: Mode, block: int, seed: int, judged_rows: int, plain: PlainStep | None = None
    ) -> None:
        """Begin. ``judged_rows``: only cycles that verify as many are compared with the band. ``plain``: as known
        before.
        """
        self.engine, self.mode, self.block, self.seed = engine, mode, block, seed
        self.misses = 0  # cycles of the drafter's drafts in a row that accepted nothing
        self._judged_rows = judged_rows
        self._judged: deque[int] = deque(maxlen=ALARM_CYCLES)  # acceptance lengths
        self._rows: Counter[int] = Counter()
        self._experts: dict[int, list[float]] = {}  # of the cycles that were looked at, by their rows
        self._undrafted = self._copied = self._own = 0
        self.prefill_s = 0.0
        self._started = time.perf_counter()
        self._decoding = self._started
        self._lengths: list[int] = []  # acceptance lengths of the cycles that drafted
        self._drafts: list[tuple[int, int]] = []  # (drafted, accepted) of the same
        self._draft_s = self._verify_s = 0.0
        self._alarmed = False
        self._before = plain
        self._spans: list[float] = []  # seconds of a plain reply's steps
        self._last = self._started

    def elapsed(self) -> float:
        return time.perf_counter() - self._started

    def leave_out(self, seconds: float) -> None:
        """Count no time in which another reply had the device."""
        self._started += seconds
        self._decoding += seconds
        self._last += seconds

    def prefilled(self) -> None:
        """Note that the prompt is processed and the first token known."""
        self._decoding = self._last = time.perf_counter()
        self.prefill_s = self._decoding - self._started

    def add(self, cycle: Cycle) -> None:
        now = time.perf_counter()
        if self.mode == "ar":
            self._spans.append(now - self._last)
        self._last = now
        self._rows[cycle.rows] += 1
        if cycle.experts is not None:
            self._experts.setdefault(cycle.rows, []).append(cycle.experts)
        self._draft_s += cycle.draft_s
        self._verify_s += cycle.verify_s
        if not cycle.drafted and not cycle.confidences:
            self._undrafted += 1
            return
        length = cycle.accepted + 1  # not that of ``ids``, which end at a stop id
        self._lengths.append(length)
        self._drafts.append((cycle.drafted, cycle.accepted))
        if cycle.copied:  # says nothing of the drafter
            self._copied += 1
            return
        self._own += cycle.own
        if max(cycle.rows, len(cycle.confidences) + 1) >= self._judged_rows:
            self._judged.append(length)
        if cycle.drafted:
            self.misses = 0 if cycle.accepted else self.misses + 1

    def below(self, band: float, expected: float | None = None) -> bool:
        """Return True once, when the mean acceptance length of the last cycles is under ``band``. ``expected``: that of
        whole blocks, where blocks are cut.
        """
        if self._alarmed or len(self._judged) < ALARM_CYCLES:
            return False
        if (sum(self._judged) / ALARM_CYCLES if expected is None else expected) >= band:
            return False
        self._alarmed = True
        return True

    @property
    def plain(self) -> PlainStep | None:
        """Return the plain step: a plain reply's own median, which the first steps do not count in that record graphs
        or warm up; else what was known before.
        """
        if len(self._spans) < LEAST_PLAIN:
            return self._before
        return PlainStep(statistics.median(self._spans), f"of the last plain reply, {len(self._spans):,} steps")

    def stats(self, emitted: int) -> Stats:
        total = self.elapsed()
        decode = total - self.prefill_s if self.prefill_s else 0.0
        drafting = len(self._lengths)
        cycles = drafting + self._undrafted
        after_first, plain = max(emitted - 1, 0), self.plain
        return Stats(
            acceptance_lengths=tuple(self._lengths),
            acceptance_per_position=acceptance_per_position(self._drafts),
            mean_acceptance_length=sum(self._lengths) / drafting if drafting else None,
            turn_acceptance_length=emitted / cycles if drafting else None,
            tokens_per_s=after_first / decode if decode > 0 else 0.0,
            end_to_end_tokens_per_s=emitted / total if total > 0 else 0.0,
            ttft_s=self.prefill_s,
            prefill_s=self.prefill_s,
            decode_s=decode,
            draft_s=self._draft_s,
            verify_s=self._verify_s,
            other_s=max(decode - self._draft_s - self._verify_s, 0.0),
            engine=self.engine,
            mode=self.mode,
            block_size=self.block,
            seed=self.seed,
            verify_rows=tuple(sorted(self._rows.items())),
            mean_verify_rows=sum(rows * n for rows, n in self._rows.items()) / cycles if cycles else None,
            undrafted_cycles=self._undrafted,
            copied_cycles=self._copied,
            mtp_cycles=self._own,
            plain_step_s=None if plain is None else plain.seconds,
            plain_from="" if plain is None else plain.source,
            distinct_experts=tuple((rows, sum(seen) / len(seen)) for rows, seen in sorted(self._experts.items())),
        )


def likely_causes(facts: SessionFacts, thinking: bool | None, templated: bool = True) -> tuple[str, ...]:
    """List the likeliest first. ``thinking``: of replies, None: not known. ``templated``: the chat template was
    applied.
    """
    found: list[str] = []
    if facts.trained_thinking == "required" and thinking is False:
        found.append("thinking is off, and the drafter was trained on replies that think")
    elif facts.trained_thinking == "off" and thinking:
        found.append("thinking is on, and the drafter was trained without")
    if not templated:
        found.append("the prompt did not go through the chat template")
    elif facts.tuned_from is not None or not facts.generation_checked:  # else it is the published pair
        found.append("a chat template unlike the one that the drafter was trained with")
    if not facts.generation_checked:
        found.append("a drafter of another generation or target")
    if facts.dtype == "float16":
        found.append("the drafter is computed in float16, which it may overflow: --dtype bfloat16")
    target, precision = facts.load.quantize or facts.stored, facts.load.drafter_precision
    quantised = [f"the target in {target}"] if target else []
    quantised += [f"drafter precision {precision}"] if precision not in ("auto", "full") else []
    if quantised:
        found.append(f"quantisation: {', '.join(quantised)}")
    if facts.tuned_from is not None:
        found.append(f"a fine-tune that is far from {facts.tuned_from}")
    return tuple(found)

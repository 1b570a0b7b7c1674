"""Plain against drafted over a few prompts on the pair that is loaded, and the arithmetic over what came of it.

Every figure is of this very run. Draws nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from dflash_local.bench.prompts import Prompt
from dflash_local.bench.report import number
from dflash_local.errors import EngineError, Interrupted, UsageError
from dflash_local.events import Event, Mode, Started, Stats, Step
from dflash_local.request import Limits, Message, Request, check_integer
from dflash_local.service.race import NAMES, Lane, Race, Racer
from dflash_local.service.service import Service

MAX_TOKENS = 4096
SAMPLES = 40  # points of a curve
WINDOW = 0.08  # of the longer reply: tokens per second are taken over so much of it


@dataclass(frozen=True, slots=True)
class BenchRow:
    prompt: Prompt
    race: Race

    def cells(self, place: int) -> tuple[str, ...]:
        """Is the row of the table that counts as ``place``, from 1."""
        ar, dflash = self.race.ar.finished.stats, self.race.dflash.finished.stats
        return (
            f"{place} {self.prompt.kind}",
            number(ar.tokens_per_s or None, 1),
            number(dflash.tokens_per_s or None, 1),
            _times(self.race.speed_up),
            number(dflash.mean_acceptance_length, 2),
            self.race.verdict.removeprefix("identical: "),
        )


TITLES = ("Prompt", "Plain tok/s", "Drafted tok/s", "Ratio", "Acceptance length", "Identical")


class BenchRun:
    """Runs the prompts one after the other; ``stop`` may be called from any thread.

    Attributes:
        rows: the prompts that are done. line: what goes on now. fraction: how far it is (0..1).
    """

    def __init__(self, service: Service, prompts: Sequence[Prompt], max_tokens: int) -> None:
        """Take what is to be run.

        Raises:
            UsageError: no prompts, or a number of tokens that is none.
        """
        check_integer("max_tokens", max_tokens, 1, MAX_TOKENS)
        if not prompts:
            raise UsageError("no prompt is chosen", "choose one or more")
        self.rows: list[BenchRow] = []
        self.line, self.fraction = "starting", 0.0
        self.max_tokens = max_tokens
        self._service, self._prompts = service, tuple(prompts)
        self._racer: Racer | None = None
        self._stopped = False
        self._tokens = 0

    def run(self) -> None:
        """All prompts.

        Raises:
            Interrupted: it was stopped; the rows that are done stay. DFlashError: a request failed.
        """
        for place, prompt in enumerate(self._prompts):
            self.fraction = place / len(self._prompts)
            head = f"prompt {place + 1} of {len(self._prompts)}, {prompt.kind}"
            self.line, self._tokens = f"{head}: warming up", 0
            self._racer = Racer(self._service, self._request(prompt))
            if self._stopped:
                raise Interrupted("the bench was stopped")
            try:
                race = self._racer.run(lambda mode, event, head=head: self._on_event(head, mode, event))  # type: ignore[misc]
            except Interrupted as stop:
                if self._stopped:
                    raise Interrupted("the bench was stopped") from stop
                raise EngineError("the pair was unloaded meanwhile", "run it again") from stop
            self.rows.append(BenchRow(prompt, race))
        self.fraction = 1.0

    def stop(self) -> None:
        """End it within a cycle."""
        self._stopped = True
        if self._racer is not None:
            self._racer.cancel()

    def _request(self, prompt: Prompt) -> Request:
        limits = Limits(self.max_tokens)
        if prompt.ids:
            return Request(prompt_ids=prompt.ids, limits=limits)
        thinking = self._service.model.thinking
        return Request(messages=(Message("user", prompt.text),), limits=limits, thinking=thinking)

    def _on_event(self, head: str, mode: Mode, event: Event) -> None:
        if isinstance(event, Started):
            self._tokens = 0
        elif isinstance(event, Step):
            self._tokens += len(event.token_ids)
        self.line = f"{head}: {NAMES[mode]}, {self._tokens} tokens"


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums all rows: decode rates (first tokens left out), mean acceptance length over all cycles; None: not known."""

    ar: float | None
    dflash: float | None
    acceptance: float | None
    identical: int
    prompts: int

    @property
    def ratio(self) -> float | None:
        """Divides the decode rates."""
        return self.dflash / self.ar if self.dflash and self.ar else None

    @property
    def cells(self) -> tuple[str, ...]:
        """As the table's last row."""
        return (
            "all",
            number(self.ar, 1),
            number(self.dflash, 1),
            _times(self.ratio),
            number(self.acceptance, 2),
            f"{self.identical} of {self.prompts}",
        )


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def totals(rows: Sequence[BenchRow]) -> Totals:
    """Sum the rows."""
    counts = [_drafted(row.race.dflash.finished.stats) for row in rows]
    cycles = sum(count for count, _ in counts)
    return Totals(
        ar=_rate([row.race.ar for row in rows]),
        dflash=_rate([row.race.dflash for row in rows]),
        acceptance=1 + sum(accepted for _, accepted in counts) / cycles if cycles else None,
        identical=sum(row.race.first_difference is None for row in rows),
        prompts=len(rows),
    )


def _rate(lanes: Sequence[Lane]) -> float | None:
    tokens = sum(max(lane.tokens - 1, 0) for lane in lanes)
    seconds = sum(lane.finished.stats.decode_s for lane in lanes)
    return tokens / seconds if tokens and seconds else None


def _drafted(stats: Stats) -> tuple[int, int]:
    """Return the cycles that drafted and the drafts accepted in them; a server may tell their sums alone."""
    if stats.draft_counts is not None:
        cycles, _, accepted = stats.draft_counts
        return cycles, accepted
    return len(stats.acceptance_lengths), sum(stats.acceptance_lengths) - len(stats.acceptance_lengths)


def per_position(rows: Sequence[BenchRow]) -> list[tuple[int, float]]:
    """Return draft slot, from 1, and the share of cycles in which it was accepted, over all rows."""
    stats = [row.race.dflash.finished.stats for row in rows]
    found = []
    for slot in range(max((len(one.acceptance_per_position) for one in stats), default=0)):
        having = [one for one in stats if len(one.acceptance_per_position) > slot]
        cycles = sum(_drafted(one)[0] for one in having)
        if cycles:
            kept = sum(one.acceptance_per_position[slot] * _drafted(one)[0] for one in having)
            found.append((slot + 1, kept / cycles))
    return found


def per_prompt(rows: Sequence[BenchRow]) -> list[tuple[str, str, float]]:
    """Return prompt and mode as one name (bars of one name would be stacked), mode, tokens per second."""
    found = []
    for place, row in enumerate(rows, 1):
        for lane in (row.race.ar, row.race.dflash):
            name = NAMES[lane.mode]
            found.append((f"{place} {name}", name, lane.finished.stats.tokens_per_s))
    return found


def over_time(row: BenchRow) -> list[tuple[float, str, float]]:
    """Return seconds since the request began, mode, tokens per second around that moment; nothing of unnamed tokens."""
    ends = [lane.steps[-1].t_s for lane in (row.race.ar, row.race.dflash) if lane.steps]
    window = WINDOW * max(ends, default=0.0)
    return [point for lane in (row.race.ar, row.race.dflash) for point in _curve(lane, window, max(ends, default=0.0))]


def _curve(lane: Lane, window: float, whole: float) -> list[tuple[float, str, float]]:
    """Return the rate over the last ``window`` seconds at evenly spaced moments of a reply."""
    marks: list[tuple[float, int]] = []
    for step in lane.steps:
        marks.append((step.t_s, (marks[-1][1] if marks else 0) + len(step.token_ids)))
    begin, end = (marks[0][0], marks[-1][0]) if marks else (0.0, 0.0)
    if end <= begin or not lane.token_ids:
        return []
    points = []
    count = max(2, round(SAMPLES * (end - begin) / whole))
    for index in range(1, count + 1):
        at = begin + (end - begin) * index / count
        since = max(begin, at - window)
        points.append((round(at, 4), NAMES[lane.mode], (_known(marks, at) - _known(marks, since)) / (at - since)))
    return points


def _known(marks: Sequence[tuple[float, int]], at: float) -> float:
    """Count tokens that had come by a moment; those of a step are spread over the time since the one before."""
    for (begin, before), (end, after) in zip(marks, marks[1:]):
        if at < end:
            return before + (after - before) * (at - begin) / (end - begin) if end > begin else float(after)
    return float(marks[-1][1])


def report(run: BenchRun, source: Mapping[str, Any]) -> dict[str, Any]:
    """Report all of it, to be saved. ``source``: versions, machine and pair."""
    sums = totals(run.rows)
    return {
        "report": "dflash web bench",
        "schema": 1,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "measured": "here, in this run",
        **source,
        "max_new_tokens": run.max_tokens,
        "totals": {
            "prompts": sums.prompts,
            "identical": sums.identical,
            "ar_tokens_per_s": sums.ar,
            "dflash_tokens_per_s": sums.dflash,
            "decode_ratio": sums.ratio,
            "mean_acceptance_length": sums.acceptance,
            "acceptance_per_position": [share for _, share in per_position(run.rows)],
        },
        "prompts": [{"kind": row.prompt.kind, "prompt": row.prompt.text, **row.race.as_dict()} for row in run.rows],
    }

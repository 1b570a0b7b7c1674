"""What the meter shows, out of the events of replies. Arithmetic only; draws nothing."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from dflash_local.app.reply_text import speed_up
from dflash_local.events import Event, Finished, Mode, Notice, PrefillProgress, Queued, Started, Stats, Step
from dflash_local.loaded import SessionFacts
from dflash_local.planner.occupancy import Occupancy

WINDOW_S = 1.0  # "now" is the last second of the reply
HISTORY = 60  # samples of the sparkline
SAMPLE_S = 0.05
NOW_CYCLES = 8  # acceptance length "now" is of so many cycles


@dataclass(slots=True)
class Readings:
    """Figures of the reply under way or, between replies, of the last one.

    Attributes:
        now, mean: tokens per second. speeds: samples of ``now``, for a sparkline.
        cycles: those that drafted; acceptance is of them (``events.Stats``). rows: what the last cycle verified.
        copying, of_mtp: its drafts were copied from the text, or are those of the target's own layer.
        experts: different routed experts of a layer that so many rows took when that was last looked at.
        per_position: share of cycles in which draft slot k (1-based) was accepted.
        plain_step_s, plain_from: of the loaded pair, as last told, see ``Stats``.
        used, context: tokens in the context and how many it holds.
        memory: how full the device is that holds the pair.
    """

    mode: Mode = "dflash"
    state: str = "ready"
    tokens: int = 0
    now: float | None = None
    mean: float | None = None
    speeds: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))
    acceptance_now: float | None = None
    acceptance_mean: float | None = None
    cycles: int = 0
    rows: int = 0
    copying: bool = False
    of_mtp: bool = False
    experts: float | None = None
    stats: Stats | None = None
    used: int = 0
    context: int = 0
    memory: Occupancy = Occupancy()
    block_size: int = 0
    precision: str = ""
    plain_step_s: float | None = None
    plain_from: str = ""
    alarms: list[str] = field(default_factory=list)
    _times: deque[tuple[float, int]] = field(default_factory=deque)
    _lengths: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=NOW_CYCLES))
    _accepted: int = 0
    _kept: list[int] = field(default_factory=list)
    _single: int = 0  # cycles that came one to an event
    _first: tuple[float, int] | None = None

    def forget(self) -> None:
        """Forget what was measured of another conversation."""
        self.begin(self.mode)
        self.used, self.state = 0, "ready"

    def load(self, facts: SessionFacts) -> None:
        """Forget what was measured of another pair: a new one was loaded."""
        self.forget()
        self.context, self.block_size = facts.context, facts.block_size
        self.precision = ", ".join(filter(None, (facts.promise, facts.adapted)))
        self.plain_step_s, self.plain_from = None, ""
        self.alarms.clear()

    def begin(self, mode: Mode) -> None:
        """Begin the figures of a reply that was asked for."""
        self.mode, self.state = mode, "waiting"
        self.tokens = self.cycles = self.rows = self._accepted = self._single = 0
        self.now = self.mean = self.acceptance_now = self.acceptance_mean = self._first = None
        self.stats = self.experts = None
        self.copying = self.of_mtp = False
        for samples in (self.speeds, self._times, self._lengths):
            samples.clear()
        self._kept = []

    def take(self, event: Event | Occupancy) -> None:
        """Count one event in."""
        if isinstance(event, Step):
            self._step(event)
        elif isinstance(event, Occupancy):
            self.memory = event
        elif isinstance(event, Started):
            self.used, self.state = event.prompt_tokens, "replying"
        elif isinstance(event, PrefillProgress):
            self.state = f"reading the prompt {event.done}/{event.total}"
        elif isinstance(event, Queued):
            self.state = f"waiting, {event.position} before" if event.position else "waiting"
        elif isinstance(event, Notice) and event.level == "warning":
            self.alarms = [*self.alarms, event.message][-2:]
        elif isinstance(event, Finished):
            self._finish(event)

    @property
    def per_position(self) -> tuple[float, ...]:
        """Tells it of the finished reply, else of what has come."""
        if self.stats is not None:
            return self.stats.acceptance_per_position
        return tuple(count / self._single for count in self._kept) if self._single else ()

    @property
    def verifying(self) -> tuple[str, ...]:
        """Says in lines what a cycle verifies at the moment."""
        what = "copying" if self.copying else "verifying"
        rows = (f"{what} {self.rows} rows {'of mtp' if self.of_mtp else 'a cycle'}",) if self.rows else ()
        return rows if self.experts is None else (*rows, f"{self.experts:.0f} different experts a layer")

    @property
    def speed_up(self) -> float | None:
        """Compares with the loaded pair's own plain step, where that is known."""
        return speed_up(self.mode, self.mean, self.plain_step_s)

    def compare(self, stats: Stats) -> None:
        """Take the plain step that a reply of the loaded pair tells; one that was cancelled early tells none."""
        if stats.plain_step_s is not None:
            self.plain_step_s, self.plain_from = stats.plain_step_s, stats.plain_from

    @property
    def split(self) -> tuple[float, float, float] | None:
        """Shares the decode time out: draft, verify, other."""
        stats = self.stats
        whole = stats.draft_s + stats.verify_s + stats.other_s if stats is not None else 0.0
        return (stats.draft_s / whole, stats.verify_s / whole, stats.other_s / whole) if stats and whole else None

    def _step(self, step: Step) -> None:
        count, self.state = len(step.token_ids), "replying"  # again, where it was set aside
        self.tokens += count
        self.used += count
        if self._first is None:
            self._first = (step.t_s, self.tokens)
        elif step.t_s > self._first[0]:
            self.mean = (self.tokens - self._first[1]) / (step.t_s - self._first[0])
        self._times.append((step.t_s, self.tokens))
        while len(self._times) > 2 and self._times[0][0] < step.t_s - WINDOW_S:
            self._times.popleft()
        (since, before), (until, after) = self._times[0], self._times[-1]
        if until > since:
            self.now = (after - before) / (until - since)
            self.speeds.append(self.now)
        if step.rows and step.drafts <= 1:
            if step.rows != self.rows or step.experts is not None:
                self.experts = step.experts
            self.rows, self.copying, self.of_mtp = step.rows, step.copied > 0, step.mtp > 0
        if step.drafted:
            self._cycle(step)

    def _cycle(self, step: Step) -> None:
        self.cycles += step.drafts
        self._accepted += step.accepted
        self._lengths.append((step.accepted + step.drafts, step.drafts))
        self.acceptance_now = sum(n for n, _ in self._lengths) / sum(c for _, c in self._lengths)
        self.acceptance_mean = (self._accepted + self.cycles) / self.cycles
        if step.drafts == 1:
            self._single += 1
            self._kept += [0] * (step.drafted - len(self._kept))
            for slot in range(step.accepted):
                self._kept[slot] += 1

    def _finish(self, finished: Finished) -> None:
        stats = finished.stats
        self.stats, self.state = stats, "stopped" if finished.reason == "cancelled" else "ready"
        if finished.usage.completion_tokens:
            self.tokens, self.mean = finished.usage.completion_tokens, stats.tokens_per_s or None
            self.acceptance_mean = stats.mean_acceptance_length
        self.compare(stats)

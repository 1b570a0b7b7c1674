"""Which drafter makes the next cycle's drafts, or none. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dflash_local.engine.runner import Cut, Cycle
from dflash_local.engine.verify_length import VerifyLength

GAIN = 1.02  # what drafting must promise, relative to the plain step, to go on
# What the first drafter's promise counts for against another's. Its blocks are longer: where it is better, it often is
# by far. And passages differ so much that no average is known well. To leave it in vain loses more than to stay.
LEAN = 1.05
FIRST_WAIT, LONGEST_WAIT = 32, 512  # cycles from one streak of probes to the next; doubled when nothing came of it
FADING = 0.25  # of that wait: cycles of another drafter, until half of what set a drafter's last ones apart is gone
STREAK = 3  # probes that follow one another


class Chosen(NamedTuple):
    """A cycle that is launched: which drafter's drafts it has, and how many ``rows`` before it is ``cut``, if it is."""

    drafter: int
    rows: int
    cut: Cut | None = None
    probe: bool = False


class DrafterChoice:
    """The choice among a session's drafters and the plain step.

    What is in use goes on for as long as nothing else promises more tokens a millisecond. The plain step's rate is
    known. A drafter's is that of its last cycles; against another drafter its average counts as much, and more and more
    while that one drafts. Between two that promise the same it is the first one. What is known of one that is not in
    use may be old: now and then three cycles try it, as probes; while nothing comes of them, the wait doubles, from 32
    up to 512 cycles. One that promises more is tried at once.

    Attributes:
        controls: of the session's drafters. control: of the one in use, or of the last one that was. drafts: whether
            it is; else all cycles but probes are plain steps.
    """

    def __init__(self, controls: Sequence[VerifyLength]) -> None:
        """Begin a choice among these, of which there is at least one."""
        self.controls = tuple(controls)
        self._turn = self._wait = self._probes = 0
        self._on_its_way = False
        self.start()

    def start(self) -> None:
        """Begin with the one that promises most, as far as is known."""
        self.control, self.drafts = max(self.controls, key=lambda each: each.promise), True
        self._patience = FIRST_WAIT
        self._wait_again()

    def begin(self) -> None:
        """Begin a reply: what was on its way of another is lost, and its text may be easier."""
        self._on_its_way, self._wait = False, min(self._wait, FIRST_WAIT)

    def next(self) -> Chosen:
        """Return the cycle that is launched now; ask once per launch."""
        if self._probes_now():
            return Chosen(self.controls.index(self._tried), self._tried.longest, self._tried.cut_probe, probe=True)
        control = self.control
        drafter = self.controls.index(control)
        if not self.drafts:
            return Chosen(drafter, 1)
        return Chosen(drafter, control.next_rows(), control.cut if control.waits else None)

    def add(self, chosen: Chosen, cycle: Cycle) -> None:
        """Learn from a cycle that was launched as ``next`` said; that may be known several launches later."""
        control = self.controls[chosen.drafter]
        control.add(cycle.rows, cycle.accepted, cycle.confidences, cycle.experts, chosen.probe)
        if chosen.rows > 1:
            for each in self.controls:
                if each is not control:
                    each.leave(self._patience * FADING)
        if chosen.probe:
            self._judge_probe()
        elif control is self.control:
            self._judge()

    @property
    def rate(self) -> float:
        """Return tokens a millisecond, see ``VerifyLength.rate``."""
        return self.control.rate

    @property
    def value(self) -> float:
        """Return tokens that the next cycle is expected to emit above what its time brings at ``rate``."""
        return self.control.value if self.drafts else 1.0 - self.rate * self.control.costs[1]

    def _beats_present(self, other: VerifyLength) -> bool:
        """Return whether another drafter promises more than what is in use."""
        if self.drafts:
            return self._standing(other) > self._standing(self.control)
        return other.promise > 1.0 / self.control.costs[1]

    def _standing(self, control: VerifyLength) -> float:
        return control.lasting_promise * (LEAN if control is self.controls[0] else 1.0)

    @property
    def _others(self) -> list[VerifyLength]:
        return [each for each in self.controls if not self.drafts or each is not self.control]

    def _wait_again(self) -> None:
        """Wait for the next streak of probes."""
        others = self._others
        self._tried = others[self._turn % len(others)] if others else self.control
        self._wait, self._probes, self._on_its_way = self._patience, 0, False

    def _probes_now(self) -> bool:
        if not self._others or self._on_its_way:
            return False
        self._wait -= 1
        if self._wait > 0:
            return False
        if self._probes == 0:
            self._tried.judge_anew()
        self._on_its_way = True
        return True

    def _judge(self) -> None:
        """Go on with what is in use, or stop drafting, or try what has promised more."""
        if self.drafts and self.control.promise * GAIN < 1.0 / self.control.costs[1]:
            self.drafts = False
            self._wait_again()
        best = max(self._others, key=lambda each: each.promise, default=self.control)
        if self._probes == 0 and not self._on_its_way and self._beats_present(best):
            self._tried, self._wait = best, 1

    def _judge_probe(self) -> None:
        self._on_its_way = False
        self._probes += 1
        if self._probes < STREAK:
            self._wait = 1
            return
        better = self._beats_present(self._tried)
        self._patience = FIRST_WAIT if better else min(2 * self._patience, LONGEST_WAIT)
        if better:
            self.control, self.drafts = self._tried, True
        self._turn += 1
        self._wait_again()

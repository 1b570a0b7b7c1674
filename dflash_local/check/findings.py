"""What a check found: one line for each subject, with the figures behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from dflash_local.loaded import Verdict

Subject = Literal["target", "layers", "drafter", "format", "card", "template", "exactness"]
State = Literal["ok", "warning", "failed", "skipped"]
ENGINE_BROKEN, CHECKPOINT_INVALID = 7, 6
EXIT_CODES: Mapping[Subject, int] = {  # of a subject that failed
    "target": CHECKPOINT_INVALID,
    "drafter": CHECKPOINT_INVALID,
    "template": CHECKPOINT_INVALID,
    "layers": ENGINE_BROKEN,
    "format": ENGINE_BROKEN,
    "card": ENGINE_BROKEN,
    "exactness": ENGINE_BROKEN,
}

VERDICTS: Mapping[State, str] = {  # on a drafter
    "ok": "serves",
    "warning": "serves weakly",
    "failed": "does not serve",
    "skipped": "cannot be probed",
}


@dataclass(frozen=True, slots=True)
class Finding(Verdict):
    """A verdict with what it stands on: ``figures``, JSON-able."""

    subject: Subject
    state: State
    figures: Mapping[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        return Verdict(self.subject, self.state, self.text, self.remedy)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def worst(findings: Sequence[Finding]) -> State:
    """Of all; ``ok`` where there are none."""
    order: tuple[State, ...] = ("failed", "warning", "ok", "skipped")
    return next((state for state in order if any(each.state == state for each in findings)), "ok")


def exit_code(findings: Sequence[Finding]) -> int:
    """0, or that of the first subject that failed: a broken engine before an invalid checkpoint."""
    codes = {EXIT_CODES[each.subject] for each in findings if each.state == "failed"}
    return max(codes, default=0)

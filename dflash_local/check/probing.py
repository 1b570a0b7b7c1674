"""Does a drafter serve a target: acceptance by kind of prompt, and what it is worth with the costs measured here."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import mean

from dflash_local.catalog.bundled import Pair
from dflash_local.check.drafting import ON, better_taps, cycle_lengths, judged, modes_of
from dflash_local.check.findings import Finding, State
from dflash_local.check.text import prompts_of
from dflash_local.engine.low_acceptance import likely_causes
from dflash_local.engine.session import Session

SECONDS = 60.0  # after which no further prompt is begun
VERDICTS: dict[State, str] = {
    "ok": "serves",
    "warning": "serves weakly",
    "failed": "does not serve",
    "skipped": "cannot be probed",
}


def probe(session: Session, pair: Pair, progress: Callable[[float], None] = lambda _part: None) -> Finding:
    """The finding on the drafter, as ``check_drafter``; its figures have acceptance lengths by kind and mode besides.

    Of the figures ``speed_up`` is what a cycle of the trained block brings over plain steps; None without costs.

    Args:
        progress: told how far it is (0..1).

    Raises:
        DFlashError: a request failed.
    """
    if session.runner.proposer is None:
        return Finding("drafter", "skipped", "loaded without a drafter")
    if session.tokenizer is None:
        return Finding("drafter", "skipped", "the target has no tokenizer: no prompt can be given")
    prompts, begin = prompts_of(pair), time.monotonic()
    modes = modes_of(session, prompts[0])
    lengths: dict[str, dict[str, list[int]]] = {}  # by kind and mode
    asked = 0
    for prompt in prompts:
        if asked and time.monotonic() - begin > SECONDS:
            break
        for name, thinking in modes.items():
            lengths.setdefault(prompt.kind, {}).setdefault(name, []).extend(cycle_lengths(session, prompt, thinking))
        asked += 1
        progress(asked / len(prompts))
    every = {name: [length for kind in lengths.values() for length in kind[name]] for name in modes}
    means = {name: mean(found) if found else None for name, found in every.items()}
    found = judged(means, pair, asked)
    kinds = {kind: {name: mean(of) for name, of in by.items() if of} for kind, by in lengths.items()}
    found = _with_costs(replace(found, figures={**found.figures, "kinds": kinds, "prompts": asked}), session)
    if found.state not in ("warning", "failed") or found.remedy.startswith("drafts are accepted with"):
        return found
    shifted = better_taps(session, prompts[:1], means.get(ON) == max(means.values(), key=lambda one: one or 0.0))
    return replace(found, remedy=shifted or _causes(session, pair, ON in modes, found.state))


def _with_costs(found: Finding, session: Session) -> Finding:
    """The finding with what the engine measured a step and a cycle to cost; drafting that does not pay is a warning."""
    costs, block = session.runner.costs, session.facts.block_size
    best = max((length for length in found.figures.get("acceptance_length", {}).values() if length), default=None)
    step, cycle = costs.get(1), costs.get(block)
    known = best is not None and step is not None and cycle is not None
    speed_up = best * step / cycle if known else None  # type: ignore[operator]
    found = replace(found, figures={**found.figures, "step_ms": step, "cycle_ms": cycle, "speed_up": speed_up})
    if found.state == "ok" and speed_up is not None and speed_up <= 1:
        text = f"{found.text}; a cycle costs {cycle:.1f} ms, a plain step {step:.1f}"
        return replace(found, state="warning", text=text)
    return found


def _causes(session: Session, pair: Pair, can_think: bool, state: State) -> str:
    """The likeliest first, and what to do."""
    causes = likely_causes(session.facts, can_think if pair.thinking == "required" else None)
    listed = f"likely causes: {'; '.join(causes)}" if causes else "this load gives no likely cause"
    return f"{listed}; try another --drafter, or --mode ar" if state == "failed" else listed

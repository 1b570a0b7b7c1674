"""Does the drafter belong to the target: acceptance lengths of greedy replies; a probe says what drafting is worth."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from dflash_local.bench.prompts import Prompt
from dflash_local.bench.trial import prompt_ids, write
from dflash_local.catalog.bundled import Pair
from dflash_local.check.findings import Finding, State
from dflash_local.check.first_cycles import better_taps, settle_final_norm
from dflash_local.check.text import PROMPTS, prompts_of
from dflash_local.engine.reply_figures import likely_causes
from dflash_local.engine.session import Session
from dflash_local.request import Limits, Request

TOKENS = 64  # of a reply at most
NEAR_ONE = 1.2  # mean acceptance length of drafts that are right by chance
UNKNOWN_BAND = 1.5  # where the registry has none; the least published length is 3.1, so a damaged drafter may pass
TOY_BAND = 7.0  # of bundled pairs here, also quantised: 7.57 to 7.84; 6.5 with taps off by one; alarms: any prompt
ON, OFF = "thinking", "no thinking"
MODES = {ON: True, OFF: False}
TRAINED = {"required": (ON,), "off": (OFF,)}  # how a drafter was trained -> modes in which the band holds
SECONDS = 60.0  # after which a probe begins no further prompt
Lengths = Mapping[str, Mapping[str, Sequence[int]]]  # acceptance lengths of cycles by mode and kind of prompt


def check_drafter(session: Session, pair: Pair) -> Finding:
    """The finding on the drafter. DFlashError: a request failed."""
    if (skipped := _without_drafts(session)) is not None:
        return skipped
    prompts = prompts_of(pair)
    settled = settle_final_norm(session, pair, prompts)
    lengths, _ = reply_lengths(session, prompts)
    means = _means(lengths)
    found = _joined(judged(means, pair), settled)
    if found.state not in ("warning", "failed"):
        return found
    cause = better_taps(session, prompts, _best(means) == ON)
    return replace(found, remedy=cause) if cause else found


def probe(session: Session, pair: Pair, progress: Callable[[float], None] = lambda _part: None) -> Finding:
    """The finding on the drafter, as ``check_drafter``; its figures have acceptance lengths by kind and mode besides.

    ``speed_up`` of them is what a cycle of the trained block brings over plain steps; None without costs.
    """
    if (skipped := _without_drafts(session)) is not None:
        return skipped
    prompts = prompts_of(pair)
    settled = settle_final_norm(session, pair, prompts)
    lengths, count = reply_lengths(session, prompts, SECONDS, progress)
    means = _means(lengths)
    found = _joined(judged(means, pair, count), settled)
    kinds = {kind: {mode: _mean(of[kind]) for mode, of in lengths.items() if of[kind]} for kind in lengths[OFF]}
    found = _with_costs(replace(found, figures={**found.figures, "kinds": kinds, "prompts": count}), session)
    if found.state not in ("warning", "failed") or found.remedy.startswith("drafts are accepted with"):
        return found
    shifted = better_taps(session, prompts[:1], _best(means) == ON)
    return replace(found, remedy=shifted or _causes_of_load(session, pair, ON in means, found.state))


def _joined(found: Finding, more: Finding | None) -> Finding:
    """The finding with what else was found of the drafter."""
    if more is None:
        return found
    return replace(found, text=f"{found.text}; {more.text}", figures={**found.figures, **more.figures})


def _without_drafts(session: Session) -> Finding | None:
    if not session.facts.drafting:
        return Finding("drafter", "skipped", "loaded without a drafter")
    if session.runner.proposer is None:
        return Finding("drafter", "skipped", "its drafts are copies: how many are accepted says nothing of the pair")
    if session.tokenizer is None:
        return Finding("drafter", "skipped", "the target has no tokenizer: no prompt can be given")
    return None


def modes_of(session: Session, prompt: Prompt) -> dict[str, bool]:
    """Both ways to think by name, or one where the template makes no difference."""
    ids = {prompt_ids(session, prompt, thinking) for thinking in MODES.values()}
    return MODES if len(ids) > 1 else {OFF: False}


def reply_lengths(
    session: Session,
    prompts: Sequence[Prompt],
    seconds: float = math.inf,
    progress: Callable[[float], None] = lambda _part: None,
) -> tuple[Lengths, int]:
    """Of greedy replies, and to how many prompts; none but the first is begun after so many seconds."""
    begin, modes = time.monotonic(), modes_of(session, prompts[0])
    lengths: dict[str, dict[str, list[int]]] = {mode: {} for mode in modes}
    for done, prompt in enumerate(prompts):
        if done and time.monotonic() - begin > seconds:
            return lengths, done
        for mode, thinking in modes.items():
            lengths[mode].setdefault(prompt.kind, []).extend(cycle_lengths(session, prompt, thinking))
        progress((done + 1) / len(prompts))
    return lengths, len(prompts)


def _means(lengths: Lengths) -> dict[str, float | None]:
    """Mean acceptance lengths over all cycles that drafted, by mode; None where none did."""
    every = {mode: [length for of in kinds.values() for length in of] for mode, kinds in lengths.items()}
    return {mode: _mean(found) if found else None for mode, found in every.items()}


def _mean(lengths: Sequence[int]) -> float:
    return sum(lengths) / len(lengths)


def _best(means: Mapping[str, float | None]) -> str:
    return max(means, key=lambda mode: means[mode] or 0.0)


def cycle_lengths(session: Session, prompt: Prompt, thinking: bool) -> tuple[int, ...]:
    """Acceptance lengths of a greedy reply's cycles, each of the trained block."""
    request = Request(
        prompt_ids=prompt_ids(session, prompt, thinking),
        limits=Limits(TOKENS),
        mode="dflash",
        block_size=session.facts.block_size,
    )
    return write(session, request).stats.acceptance_lengths


def judged(lengths: Mapping[str, float | None], pair: Pair, prompts: int = PROMPTS) -> Finding:
    """The finding on mean acceptance lengths by mode, over so many prompts."""
    known = {name: length for name, length in lengths.items() if length is not None}
    if not known:
        return Finding("drafter", "skipped", "every reply ended before a draft")
    band = TOY_BAND if pair.bundled else pair.acceptance_band or UNKNOWN_BAND
    trained = [name for name in TRAINED.get(pair.thinking or "", tuple(known)) if name in known] or list(known)
    best = max(known[name] for name in trained)
    means = ", ".join(f"{length:.2f} ({name})" if len(known) > 1 else f"{length:.2f}" for name, length in known.items())
    text = f"acceptance length {means} over {prompts} prompt{'s' * (prompts != 1)}, expected at least {band:g}"
    figures = {
        "acceptance_length": lengths,
        "band": band,
        "band_known": pair.bundled or pair.acceptance_band is not None,
    }
    if best >= band:
        return Finding("drafter", "ok", text, "", figures)
    return Finding("drafter", "failed" if best < NEAR_ONE else "warning", text, _causes(known, band, trained), figures)


def _causes(known: dict[str, float], band: float, trained: list[str]) -> str:
    """What may be the reason, the likeliest first."""
    other = [name for name, length in known.items() if name not in trained and length >= band]
    if other:
        return f"drafts are accepted with {other[0]} alone: the drafter was trained so, use that mode"
    return (
        "likely causes: a drafter of another target or generation; target_layer_ids that are off by one; a chat "
        "template or thinking mode that it was not trained for; a target that is broken itself"
    )


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


def _causes_of_load(session: Session, pair: Pair, can_think: bool, state: State) -> str:
    """The likeliest first, and what to do."""
    causes = likely_causes(session.facts, can_think if pair.thinking == "required" else None)
    listed = f"likely causes: {'; '.join(causes)}" if causes else "this load gives no likely cause"
    return f"{listed}; try another --drafter, or --mode ar" if state == "failed" else listed

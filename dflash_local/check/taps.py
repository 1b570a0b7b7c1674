"""Whether a drafter was trained on the layers next to those it is given: acceptance with all taps one layer off.

Of the first cycle after a prompt alone: the fused engine's blocks are recorded with the taps they were loaded with.
"""

from __future__ import annotations

from collections.abc import Sequence

from dflash_local.bench.prompts import Prompt
from dflash_local.bench.trial import prompt_ids, write
from dflash_local.engine.session import Session
from dflash_local.models.fused.target import FusedTarget
from dflash_local.models.transformers_target import TransformersTarget
from dflash_local.request import Limits, Request

SHIFTS = (-1, 1)
REPLY = 48  # tokens of the target's own reply, of which parts lengthen a prompt
PARTS = 4  # cycles that a prompt is good for
ONE_CYCLE = 2  # tokens: the prompt's, and one of a cycle, whose acceptance is counted uncut
BETTER = 0.3  # tokens of acceptance length: less may be chance


def better_taps(session: Session, prompts: Sequence[Prompt], thinking: bool) -> str:
    """What to say when other taps are accepted better; empty where none are, or the target is elsewhere.

    Raises:
        DFlashError: a request failed.
    """
    target = session.runner.target
    if not isinstance(target, TransformersTarget | FusedTarget):
        return ""
    texts = [text for prompt in prompts for text in _beginnings(session, prompt_ids(session, prompt, thinking))]
    own = target.taps
    lengths = {own: _first_cycles(session, texts)}
    try:
        for shift in SHIFTS:
            moved = tuple(tap + shift for tap in own)
            if all(0 <= tap < target.num_layers for tap in moved):
                target.use_taps(moved)
                lengths[moved] = _first_cycles(session, texts)
    finally:
        target.use_taps(own)
        session.reset()
    best = max(lengths, key=lambda taps: lengths[taps])
    if lengths[best] < lengths[own] + BETTER:
        return ""
    return (
        f"target_layer_ids are likely off by one: with {list(best)} instead of {list(own)} first cycles have "
        f"{lengths[best]:.2f} instead of {lengths[own]:.2f}"
    )


def _beginnings(session: Session, prompt: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The prompt alone, and with parts of the target's own reply."""
    reply = write(session, Request(prompt_ids=prompt, limits=Limits(REPLY), mode="ar")).ids
    cuts = sorted({len(reply) * part // PARTS for part in range(PARTS)})
    return [(*prompt, *reply[:cut]) for cut in cuts]


def _first_cycles(session: Session, texts: Sequence[tuple[int, ...]]) -> float:
    """Mean acceptance length of the first cycle after each text; 0 where none drafted."""
    block = session.facts.block_size
    lengths: list[int] = []
    for text in texts:
        request = Request(prompt_ids=text, limits=Limits(ONE_CYCLE), mode="dflash", block_size=block)
        lengths += write(session, request).stats.acceptance_lengths[:1]
    return sum(lengths) / len(lengths) if lengths else 0.0

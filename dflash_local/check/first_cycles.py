"""What first cycles tell of how a drafter is fed: with the right taps, and behind the target's final norm or before it.

Of the first cycle after a prompt alone: the fused engine's blocks are recorded with what they were loaded with.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace

from dflash_local.bench.prompts import Prompt
from dflash_local.bench.trial import prompt_ids, write
from dflash_local.catalog.bundled import Pair
from dflash_local.check.findings import Finding
from dflash_local.checkpoint_files.source import open_source
from dflash_local.drafters.mtp.fused import MTPBlocks
from dflash_local.drafters.mtp.layout import FINAL_NORM
from dflash_local.drafters.mtp.reference import MTPProposer
from dflash_local.engine.session import Session
from dflash_local.models.fused.target import FusedTarget
from dflash_local.models.transformers_target import TransformersTarget
from dflash_local.request import Limits, Request

SHIFTS = (-1, 1)
REPLY = 48  # tokens of the target's own reply, of which parts lengthen a prompt
PARTS = 4  # cycles that a prompt is good for
ONE_CYCLE = 2  # tokens: the prompt's, and one of a cycle, whose acceptance is counted uncut
BETTER = 0.3  # tokens of acceptance length: less may be chance


def settle_final_norm(session: Session, pair: Pair, prompts: Sequence[Prompt]) -> Finding | None:
    """Whether a layer of the target's own takes hidden states behind the final norm, as it does by default, or before
    it; the session goes on with what is accepted better. None: the drafter is another one, or config.json tells.

    ``drafter_keys`` of its figures is what later loads are to know; empty for the default.

    Raises:
        DFlashError: a request failed.
    """
    proposer = session.runner.proposer
    if not isinstance(proposer, MTPProposer | MTPBlocks) or pair.drafter is None:
        return None
    if FINAL_NORM in (open_source(pair.drafter).config() or {}):
        return None
    texts, loaded, lengths = _texts(session, prompts, thinking=False), proposer.config, dict[bool, float]()
    try:
        for normed in (True, False):
            proposer.config = replace(loaded, normed=normed)
            lengths[normed] = _first_cycles(session, texts)
    finally:
        proposer.config = loaded
        session.reset()
    behind, before = lengths[True], lengths[False]
    normed = before < behind + BETTER
    if normed != loaded.normed:
        better = copy(proposer)
        better.config = replace(loaded, normed=normed)
        session.runner.proposer = better  # another one, so that what is recorded with this one is forgotten
    text = f"hidden states are taken behind the final norm: first cycles have {behind:.2f}, before it {before:.2f}"
    if not normed:
        text = (
            f"hidden states are taken before the final norm, by later loads too: first cycles have {before:.2f}, "
            f"behind it {behind:.2f}"
        )
    keys = {} if normed else {FINAL_NORM: False}
    return Finding(
        "drafter", "ok", text, "", {"final_norm": {"behind": behind, "before": before}, "drafter_keys": keys}
    )


def better_taps(session: Session, prompts: Sequence[Prompt], thinking: bool) -> str:
    """What to say when taps one layer off are accepted better; empty where none are, or the target is elsewhere.

    Raises:
        DFlashError: a request failed.
    """
    target = session.runner.target
    if not isinstance(target, TransformersTarget | FusedTarget):
        return ""
    texts = _texts(session, prompts, thinking)
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


def _texts(session: Session, prompts: Sequence[Prompt], thinking: bool) -> list[tuple[int, ...]]:
    """Each prompt alone, and with parts of the target's own reply."""
    return [text for prompt in prompts for text in _beginnings(session, prompt_ids(session, prompt, thinking))]


def _beginnings(session: Session, prompt: tuple[int, ...]) -> list[tuple[int, ...]]:
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

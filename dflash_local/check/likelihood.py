"""Does the target work: how likely it finds plain text, teacher-forced through the session's own target.

The bands are coarse: they part a working model from one whose weights, norms or positions are wrong. A text counts as
the likelier of two: by itself, and as a reply in the target's own chat template, where chat models are at home.
"""

from __future__ import annotations

import math
import os.path
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from dflash_local.bench.fidelity import log_probs
from dflash_local.bench.trial import scored_target
from dflash_local.catalog.bundled import Pair
from dflash_local.chat.template import render
from dflash_local.chat.tokenizer import Tokenizer
from dflash_local.check.findings import Finding, State
from dflash_local.check.text import ScoredText, plain_texts, toy_texts
from dflash_local.engine.session import Session
from dflash_local.errors import TemplateError, UsageError
from dflash_local.request import Message

FEWEST = 16  # tokens that a mean stands on
OTHER_REPLY, NEXT_QUESTION = "\u00a7", "And now?"  # such a reply begins and ends like no text here
ALONE, REPLY = "alone", "as a reply"


class Passage(NamedTuple):
    """Ids to score, and those that stand before them."""

    before: tuple[int, ...]
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Band:
    """Nats a token: below ``ok`` a target works, above ``broken`` it does not."""

    ok: float
    broken: float


PLAIN = Band(4.0, 7.0)  # assumed, not yet measured with these texts on a published model
TOY = Band(0.5, 2.0)  # held-out answers are at most 0.06 for both toys


def check_likelihood(session: Session, pair: Pair) -> Finding:
    """The finding on the target, by the least likely of the texts. UsageError: the target is in another process."""
    if session.tokenizer is None:
        return Finding("target", "skipped", "it has no tokenizer: no text can be scored")
    texts, band = (toy_texts(), TOY) if pair.toy else (plain_texts(), PLAIN)
    forms = {text.kind: nats_of(session, passages(session.tokenizer, text)) for text in texts}
    nats = {kind: _likelier(found) for kind, found in forms.items() if found}
    if not nats:
        why = f"a context of {session.facts.context} tokens is too short for it, or the chat template fails"
        return Finding("target", "skipped", f"no text was scored: {why}")
    found = judged(nats, band)
    return replace(found, figures={**found.figures, "forms": forms})


def _likelier(nats: Mapping[str, float]) -> float:
    """NaN where one of them is: what makes such numbers does not work."""
    return math.nan if any(math.isnan(value) for value in nats.values()) else min(nats.values())


def passages(tokenizer: Tokenizer, text: ScoredText) -> dict[str, Passage]:
    """The forms of a text by name: by itself, and as a reply where the chat template has a place for it."""
    found = {}
    if text.alone or tokenizer.template is None:
        ids = (*tokenizer.begin, *tokenizer.encode(text.text))
        first = max(len(tokenizer.begin), 1)
        found[ALONE] = Passage(ids[:first], ids[first:])
    if tokenizer.template is not None:
        reply = _as_reply(tokenizer, text)
        if reply is not None:
            found[REPLY] = reply
    return found


def _as_reply(tokenizer: Tokenizer, text: ScoredText) -> Passage | None:
    """What a conversation with this reply has other than one with another reply; None where the template fails."""

    def conversation(reply: str) -> tuple[int, ...]:
        messages = Message("user", text.question), Message("assistant", reply), Message("user", NEXT_QUESTION)
        return render(tokenizer, messages, thinking=False).ids

    try:
        ids, other = conversation(text.text), conversation(OTHER_REPLY)
    except (UsageError, TemplateError):
        return None
    begin, behind = (len(os.path.commonprefix([one, two])) for one, two in ((ids, other), (ids[::-1], other[::-1])))
    return Passage(ids[:begin], ids[begin : len(ids) - behind])


def nats_of(session: Session, forms: Mapping[str, Passage]) -> dict[str, float]:
    """Mean negative log-likelihood in nats a token, as far as the context reaches; none under ``FEWEST`` tokens."""
    found = {}
    for name, (before, ids) in forms.items():
        ids = ids[: max(session.facts.context - len(before), 0)]
        if len(ids) >= FEWEST:
            scores = [part.cpu() for part in log_probs(session, scored_target(session), before, ids)]
            chosen = torch.cat(scores).gather(1, torch.tensor(ids)[:, None])
            found[name] = float(-chosen.double().mean())
    return found


def judged(nats: dict[str, float], band: Band) -> Finding:
    """The finding on mean nats by kind of text."""
    worst = max(nats.values(), key=lambda value: math.inf if math.isnan(value) else value)
    state: State = "ok" if worst < band.ok else "warning" if worst <= band.broken else "failed"
    listed = ", ".join(f"{kind} {value:.2f}" for kind, value in nats.items())
    text = f"{listed} nats a token (a working target: below {band.ok:g})"
    remedy = ""
    if state == "warning":
        remedy = "a target for another language or a narrow task can be meant so; else see the causes of a broken one"
    if not math.isfinite(worst):
        remedy = "its numbers are not finite: in float16 activations may overflow (give --dtype bfloat16); else its "
        remedy += "files are damaged (dflash pull --update)"
    elif state == "failed":
        remedy = (
            "it does not predict plain text: damaged or incomplete files (dflash pull --update), weights quantised "
            "wrongly, or an architecture that is read wrongly here; --engine reference tells whether the engine is it"
        )
    figures = {"nats": nats, "ok": band.ok, "broken": band.broken}
    return Finding("target", state, text, remedy, figures)

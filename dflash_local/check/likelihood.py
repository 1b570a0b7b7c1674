"""Does the target work: how likely it finds plain text, teacher-forced through the session's own target.

The bands are coarse: they part a working model from one whose weights, norms or positions are wrong, not a good model
from a better one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from dflash_local.bench.fidelity import log_probs, scored_target
from dflash_local.bench.trial import prompt_ids
from dflash_local.catalog.bundled import Pair
from dflash_local.chat.tokenizer import Tokenizer
from dflash_local.check.findings import Finding, State
from dflash_local.check.text import ScoredText, plain_texts, toy_texts
from dflash_local.engine.session import Session

FEWEST = 16  # tokens that a mean stands on


@dataclass(frozen=True, slots=True)
class Band:
    """Nats a token: below ``ok`` a target works, above ``broken`` it does not."""

    ok: float
    broken: float


PLAIN = Band(4.0, 7.0)  # assumed, not yet measured with these texts on a published model
TOY = Band(0.5, 2.0)  # held-out answers are at most 0.06 for both toys


def check_likelihood(session: Session, pair: Pair) -> Finding:
    """The finding on the target, by the least likely of the texts.

    Raises:
        UsageError: the target is in another process. CheckpointError: prompts are missing from the installation.
    """
    if session.tokenizer is None:
        return Finding("target", "skipped", "it has no tokenizer: no text can be scored")
    texts, band = (toy_texts(), TOY) if pair.toy else (plain_texts(), PLAIN)
    nats = {}
    for text in texts:
        found = mean_nats(session, session.tokenizer, text)
        if found is not None:
            nats[text.kind] = found
    if not nats:
        return Finding("target", "skipped", f"a context of {session.facts.context} tokens is too short for a text")
    return judged(nats, band)


def mean_nats(session: Session, tokenizer: Tokenizer, text: ScoredText) -> float | None:
    """Mean negative log-likelihood of a token of the text, in nats; of its beginning where the context is short.

    None where fewer than ``FEWEST`` tokens are left.
    """
    ids = tokenizer.encode(text.text)
    before = list(prompt_ids(session, text.prompt, thinking=False)) if text.prompt else list(tokenizer.begin)
    if not before:
        before, ids = ids[:1], ids[1:]
    ids = ids[: max(session.facts.context - len(before), 0)]
    if len(ids) < FEWEST:
        return None
    scores = [part.cpu() for part in log_probs(session, scored_target(session), before, ids)]
    chosen = torch.cat(scores).gather(1, torch.tensor(ids)[:, None])
    return float(-chosen.double().mean())


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

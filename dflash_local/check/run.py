"""All checks of a loaded pair, one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

import torch

from dflash_local.bench.certificate import failure, statement
from dflash_local.bench.certify import CertifyPlan, cases, certify
from dflash_local.bench.prompts import a_few
from dflash_local.bench.trial import prompt_ids
from dflash_local.catalog.bundled import Pair
from dflash_local.check.card import check_card
from dflash_local.check.drafting import check_drafter, probe
from dflash_local.check.findings import Finding, Subject
from dflash_local.check.layers import check_layers
from dflash_local.check.likelihood import check_likelihood
from dflash_local.check.products import check_products
from dflash_local.check.record import Report, facts_of, path_of, remember, remember_keys, remembered
from dflash_local.check.template import check_template
from dflash_local.check.text import prompts_of
from dflash_local.engine.session import Session
from dflash_local.errors import CheckpointError, EngineError, UsageError
from dflash_local.load_config import LoadConfig

Progress = Callable[[str, float], None]
PROMPTS, TOKENS, SEED = 2, 32, 0  # of the certificate
REPORT = "dflash doctor --report writes an archive for an issue"


def check(session: Session, pair: Pair, planned: int | None, progress: Progress) -> tuple[Finding, ...]:
    """A finding for each subject. The session is left without cached tokens.

    Args:
        planned: bytes that the plan says the card holds at most, where one was made.
        progress: called with what is being checked and how far it is (0..1).

    Raises:
        DFlashError: what is neither the checkpoint's fault nor the engine's: interrupted, say.
    """
    checks: dict[Subject, Callable[[], Finding]] = {
        "card": lambda: check_card(session, planned),
        "format": lambda: check_products(session),
        "target": lambda: check_likelihood(session, pair),
        "layers": lambda: check_layers(session, pair).finding(),
        "template": lambda: check_template(session),
        "drafter": lambda: check_drafter(session, pair) if pair.tuned_from is None else probe(session, pair),
        "exactness": lambda: check_exactness(session, pair),
    }
    found = []
    for number, (subject, run) in enumerate(checks.items()):
        progress(f"checking the {subject}", number / len(checks))
        found.append(guarded(subject, run))
    session.reset()
    return tuple(found)


def check_exactness(session: Session, pair: Pair) -> Finding:
    """The finding on what drafting changes: nothing, or near-ties outside of strict mode. UsageError: remote target."""
    if not session.facts.drafting:
        return Finding("exactness", "skipped", "loaded without a drafter: nothing to compare")
    if session.tokenizer is None:
        return Finding("exactness", "skipped", "the target has no tokenizer: dflash certify takes prompts as ids")
    greedy, sampled, _ = cases(SEED)
    plan = CertifyPlan(
        prompts=tuple(prompt_ids(session, each, thinking=False) for each in a_few(prompts_of(pair), PROMPTS)),
        cases=(greedy, sampled),
        block_sizes=(session.facts.block_size,),
        max_new_tokens=TOKENS,
    )
    found = certify(session, plan)
    figures = {"verdict": found.verdict, "tokens": found.positions, "same_bits": found.same_bits}
    if found.verdict == "BUG":
        return Finding(
            "exactness",
            "failed",
            failure(found),
            "please report it with what dflash certify MODEL --report FILE writes",
            figures,
        )
    return Finding("exactness", "ok", statement(found, session.facts.dtype), "", figures)


def guarded(subject: Subject, run: Callable[[], Finding]) -> Finding:
    """What was found, or the failure that kept it from being found."""
    try:
        return run()
    except (CheckpointError, EngineError) as error:
        return Finding(subject, "failed", error.message, error.hint)
    except UsageError as error:
        return Finding(subject, "skipped", error.message, error.hint)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return Finding(subject, "skipped", "too little memory is free for it", "a shorter --context leaves some")
    except Exception as error:  # a fault of the check must not end the load that it is part of
        message = str(error).partition("\n")[0]
        return Finding(subject, "warning", f"the check itself failed: {type(error).__name__}: {message}", REPORT)


def checked_now(session: Session, pair: Pair, path: Path | None, planned: int | None, progress: Progress) -> Report:
    """All checks, remembered in a file. Arguments as of ``check`` and ``record.path_of``."""
    return _reported(session, pair, path, lambda: check(session, pair, planned, progress))


def _reported(session: Session, pair: Pair, path: Path | None, run: Callable[[], tuple[Finding, ...]]) -> Report:
    begin = time.monotonic()
    found = run()
    seconds, checked = time.monotonic() - begin, datetime.now(timezone.utc).isoformat(timespec="seconds")
    report = Report(pair.name, session.facts.loaded_as, checked, round(seconds, 2), found)
    remember(path, report)
    remember_keys(path, pair, report)
    return report


def checked_once(
    session: Session, pair: Pair, load: LoadConfig, cache: Path | None, planned: int | None, progress: Progress
) -> Report:
    """What was found before, good or not; at the first load of a pair what is found now. ``load``: as requested."""
    path = path_of(cache, facts_of(pair, load))
    return remembered(path) or checked_now(session, pair, path, planned, progress)


def probed_now(session: Session, pair: Pair, path: Path | None, progress: Progress) -> Report:
    """The drafter alone, remembered in a file. Arguments as of ``checked_now``."""

    def run() -> tuple[Finding, ...]:
        found = guarded("drafter", lambda: probe(session, pair, lambda part: progress("probing the drafter", part)))
        session.reset()
        return (found,)

    return _reported(session, pair, path, run)


def probe_path(pair: Pair, load: LoadConfig, cache: Path | None) -> Path | None:
    """Where what was found of a drafter alone lies, if there is a cache folder. ``load``: as requested."""
    return path_of(cache, {**facts_of(pair, load), "subject": "drafter"})

"""All checks of a loaded pair, one after the other."""

from __future__ import annotations

from collections.abc import Callable

from dflash_local.catalog.bundled import Pair
from dflash_local.check.card import check_card
from dflash_local.check.drafting import check_drafter
from dflash_local.check.exactness import check_exactness
from dflash_local.check.findings import Finding, Subject
from dflash_local.check.likelihood import check_likelihood
from dflash_local.check.products import check_products
from dflash_local.check.template import check_template
from dflash_local.engine.session import Session
from dflash_local.errors import CheckpointError, EngineError, UsageError

Progress = Callable[[str, float], None]


def check(session: Session, pair: Pair, planned: int | None, progress: Progress) -> tuple[Finding, ...]:
    """A finding for each subject. The session is left without cached tokens.

    Args:
        planned: bytes that the plan says the card holds at most, where one was made.
        progress: told what is being checked and how far it is (0..1).

    Raises:
        DFlashError: what is neither the checkpoint's fault nor the engine's: interrupted, out of memory.
    """
    checks: dict[Subject, Callable[[], Finding]] = {
        "card": lambda: check_card(session, planned),
        "format": lambda: check_products(session),
        "target": lambda: check_likelihood(session, pair),
        "template": lambda: check_template(session),
        "drafter": lambda: check_drafter(session, pair),
        "exactness": lambda: check_exactness(session, pair),
    }
    found = []
    for number, (subject, run) in enumerate(checks.items()):
        progress(f"checking the {subject}", number / len(checks))
        found.append(guarded(subject, run))
    session.reset()
    return tuple(found)


def guarded(subject: Subject, run: Callable[[], Finding]) -> Finding:
    """What was found, or the failure that kept it from being found."""
    try:
        return run()
    except (CheckpointError, EngineError) as error:
        return Finding(subject, "failed", error.message, error.hint)
    except UsageError as error:
        return Finding(subject, "skipped", error.message, error.hint)

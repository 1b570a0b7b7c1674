"""Sessions over tiny random targets."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from engine_sessions import BLOCK, target_of

from dflash_local.engine.reference import Proposer, ReferenceRunner
from dflash_local.engine.session import Session, SessionFacts


@pytest.fixture
def new_session() -> Callable[..., Session]:
    """Build a session: ``new_session(family, proposer, context=..., stop_ids=...)``."""

    def build(
        family: str, proposer: Proposer | None, context: int = 1000, stop_ids: frozenset[int] = frozenset()
    ) -> Session:
        target = target_of(family)
        target.clear()
        facts = SessionFacts(family, "planted", "reference", "float32", "cpu", BLOCK, context, False)
        return Session(ReferenceRunner(target, proposer, context), facts, None, stop_ids)

    return build

"""Sessions over tiny random targets, by each engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dflash_local.engine.reference_runner import ReferenceRunner
from dflash_local.engine.session import Session
from dflash_local.load_config import LoadConfig
from dflash_local.loaded import SessionFacts
from tests.chat.conftest import harmony as harmony  # a tokenizer, as there
from tests.engine.fused_sessions import fused_session
from tests.engine_sessions import BLOCK, target_of
from tests.proposers import Planted


@pytest.fixture(params=["reference", "fused"])
def new_session(request: pytest.FixtureRequest) -> Callable[..., Session]:
    """Build a session: ``new_session(family, proposer, context=..., stop_ids=...)``.

    ``proposer`` is a planted drafter, or makes the engine's own kind of one for the target it is given.
    """

    def build(
        family: str,
        proposer: Planted | Callable[[Any], Any] | None,
        context: int = 1000,
        stop_ids: frozenset[int] = frozenset(),
    ) -> Session:
        if request.param == "fused":
            return fused_session(family, proposer, context, stop_ids=stop_ids)
        load = LoadConfig(engine="reference", dtype="float32", device="cpu", context=context)
        facts = SessionFacts(family, "planted" if proposer is not None else None, BLOCK, False, load)
        target = target_of(family)
        target.clear()
        drafter = proposer if isinstance(proposer, Planted | None) else proposer(target)
        return Session(ReferenceRunner(target, drafter, context), facts, None, stop_ids)

    return build

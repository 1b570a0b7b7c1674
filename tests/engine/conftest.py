"""Sessions over tiny random targets, by each engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import fused_models
import pytest
from engine_sessions import BLOCK, target_of
from proposers import Planted

from dflash_local.engine.fused import FusedRunner
from dflash_local.engine.reference import ReferenceRunner
from dflash_local.engine.session import Session
from dflash_local.loaded import SessionFacts


@pytest.fixture(params=["reference", "fused"])
def new_session(request: pytest.FixtureRequest) -> Callable[..., Session]:
    """Build a session: ``new_session(family, proposer, context=..., stop_ids=...)``."""

    def build(
        family: str, proposer: Planted | None, context: int = 1000, stop_ids: frozenset[int] = frozenset()
    ) -> Session:
        facts = SessionFacts(family, "planted", "reference", "float32", "cpu", BLOCK, context, False)
        if request.param == "reference":
            target = target_of(family)
            target.clear()
            return Session(ReferenceRunner(target, proposer, context), facts, None, stop_ids)
        if family not in fused_models.FAMILIES:
            pytest.skip(f"the fused engine does not know {family} yet")
        fused = fused_models.fused_target(family, context, BLOCK)
        blocks = fused_models.PlantedBlocks(proposer, fused, BLOCK) if proposer is not None else None
        runner = FusedRunner(fused, blocks, context)  # type: ignore[arg-type]
        return Session(runner, replace(facts, engine="fused"), None, stop_ids)

    return build

"""Sessions of the fused engine over tiny random targets."""

from __future__ import annotations

from typing import Any

from dflash_local.engine.fused_runner import FusedRunner
from dflash_local.engine.session import Session
from dflash_local.load_config import LoadConfig
from dflash_local.loaded import SessionFacts
from dflash_local.models.fused.target import FusedTarget
from tests.engine_sessions import BLOCK
from tests.fused_models import PlantedBlocks, fused_target
from tests.proposers import Planted


def fused_target_of(session: Session) -> FusedTarget:
    assert isinstance(session.runner, FusedRunner)
    return session.runner.target


def fused_session(
    family: str, proposer: Any, context: int, stop_ids: frozenset[int] = frozenset(), device: str = "cpu", **facts: Any
) -> Session:
    """Build a session.

    Args:
        proposer: a planted drafter, None, or what makes blocks for the target that it is given.
        facts: fields of ``SessionFacts`` that are not as they stand.
    """
    target = fused_target(family, context, BLOCK, device)
    if isinstance(proposer, Planted):
        blocks: Any = PlantedBlocks(proposer, target, BLOCK)
    else:
        blocks = None if proposer is None else proposer(target)
    load = LoadConfig(engine="fused", dtype="float32", device=device, context=context)
    known = SessionFacts(family, None if proposer is None else "planted", BLOCK, False, load, **facts)
    return Session(FusedRunner(target, blocks, context), known, None, stop_ids)

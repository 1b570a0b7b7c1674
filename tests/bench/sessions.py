"""Golden pairs as sessions, and the bugs planted into them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dflash_local.catalog.bundled import Pair
from dflash_local.drafters.engines import Drafts
from dflash_local.engine import LoadConfig, Session, load
from dflash_local.engine.reference_runner import ReferenceRunner
from dflash_local.engine.runner import Cut, Cycle

GOLDEN = Path(__file__).parents[1] / "golden"
KV_ONLY, HYBRID = "qwen3-v1-b8", "qwen35-v2-swa-b8"


def golden_pair(name: str) -> Pair:
    return Pair(name, GOLDEN / name / "target", GOLDEN / name / "drafter", bundled=False)


def golden_session(name: str, dtype: str = "float32") -> Session:
    return load(golden_pair(name), LoadConfig(dtype=dtype, device="cpu"))


def golden_cases(name: str) -> list[dict[str, list[int]]]:
    return json.loads((GOLDEN / name / "expected.json").read_text(encoding="utf-8"))["cases"]


class DraftedBonus(ReferenceRunner):
    """The bug that counts on the drafter: after a rejection its own token is emitted, not the target's."""

    def _drafts(self, count: int, noise: torch.Tensor | None) -> Drafts:
        self.last = super()._drafts(count, noise)
        return self.last

    def launch(self, cut: Cut | None = None, copied: Sequence[int] = ()) -> None:
        super().launch(cut, copied)
        cycle = self._cycles[-1]
        if cycle.accepted < cycle.drafted and len(cycle.ids) == cycle.accepted + 1:
            wrong = int(self.last.ids[cycle.accepted])
            self.ids[-1] = wrong
            ids = (*cycle.ids[:-1], wrong)
            self._cycles[-1] = Cycle(ids, cycle.drafted, cycle.accepted, cycle.rows, cycle.draft_s, cycle.verify_s)


def plant_drafted_bonus(session: Session) -> Session:
    """The same session with a runner that has the bug."""
    old: Any = session.runner
    session.runner = session.conversations.runner = DraftedBonus(old.target, old.proposer, old.context)
    return session


def plant_tie(session: Session, token: int, twin: int, gap: float) -> None:
    """Give two tokens the same head row; a single row prefers the twin by ``gap``, a block the token."""
    target = session.runner.target
    with torch.no_grad():
        target.model.lm_head.weight[twin] = target.model.lm_head.weight[token]
    head = target.head

    def uneven(hidden: torch.Tensor) -> torch.Tensor:
        logits = head(hidden).clone()
        logits[:, twin] += gap if len(hidden) == 1 else -gap
        return logits

    target.head = uneven  # type: ignore[method-assign]

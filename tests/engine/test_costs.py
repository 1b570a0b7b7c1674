"""What a cycle costs is measured behind varied tokens, and leaves a fresh runner behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dflash_local.engine import costs
from dflash_local.engine.fused import FusedRunner
from tests.fused_models import fused_target


def test_ids_are_varied_and_the_same_every_time() -> None:
    ids = costs.varied_ids(500, 90)
    assert ids == costs.varied_ids(500, 90)
    assert len(set(ids)) == 90 and min(ids) == 0 and max(ids) == 89


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_replayed_cycles_move_nothing(family: str) -> None:
    target = fused_target(family, 128)
    runner = FusedRunner(target, None, 96)
    ids = costs.varied_ids(20, target.vocab_size)
    with runner.idle(ids), torch.inference_mode():
        assert runner.committed == ids
        for anchor in (3, 9):
            runner.set_anchor(anchor)
            runner.replay(1)
            assert (int(target.start), int(target.kept), int(target.tokens[0])) == (20, 0, anchor)
    assert (runner.ids, runner.committed, int(target.start)) == ([], [], 0)
    states: dict[int, Any] = target.states
    assert not any(state.log.state.any() for state in states.values())

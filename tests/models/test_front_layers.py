"""The first layers of a target apart from the rest: the same rows, taps, counts and snapshots as of one stack.

On the CPU both parts lie in the same memory; what crosses is copied all the same.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.fused.target import FusedTarget
from dflash_local.models.fused.weights import Front, read_weights
from dflash_local.models.target_facts import TargetFacts
from tests.families import save_model

CPU = torch.device("cpu")
ROWS = 8
TAPS = (0, 1, 2)


@pytest.mark.parametrize("family", ["qwen3", "gemma2_full", "gpt_oss", "qwen3_5", "qwen3_moe", "qwen3_5_moe"])
def test_a_target_in_two_parts_is_the_whole_one(family: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(save_model(family, tmp_path))
    facts = TargetFacts.from_checkpoint(checkpoint)
    whole, split = (
        FusedTarget(read_weights(checkpoint, facts, CPU, torch.float32, front=front), facts.model, TAPS, 64, ROWS)
        for front in (None, Front(2, CPU))
    )
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(facts.model.vocab_size, (24,), generator=generator)
    points = []
    for at, (count, kept) in enumerate([(11, 0), (ROWS, 5), (ROWS, ROWS), (1, 1)]):
        part = ids[at : at + count]
        found = [target.verify(part, True) if kept else target.prefill(part, True) for target in (whole, split)]
        for target in (whole, split):
            if kept:
                target.commit(kept)
        torch.testing.assert_close(found[1].hidden, found[0].hidden, rtol=0, atol=0)
        assert found[0].taps is not None and found[1].taps is not None
        torch.testing.assert_close(found[1].taps, found[0].taps, rtol=0, atol=0)
        assert split.distinct_of(count) == whole.distinct_of(count)
        points.append([target.snapshot() for target in (whole, split)])
    for target in (whole, split):
        target.use_taps((2, 1, 0))
    (first, second) = (target.prefill(ids, True).taps for target in (whole, split))
    torch.testing.assert_close(second, first, rtol=0, atol=0)
    for target, point in zip((whole, split), points[1], strict=True):
        target.restore(point)
    again = [target.verify(ids[:ROWS], False).hidden for target in (whole, split)]
    torch.testing.assert_close(again[1], again[0], rtol=0, atol=0)

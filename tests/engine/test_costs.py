"""What a cycle costs is measured behind varied tokens, and leaves a fresh runner behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dflash_local.catalog.bundled import find
from dflash_local.engine import costs, load, load_reference
from dflash_local.engine.fused_runner import FusedRunner
from dflash_local.load_config import LoadConfig
from dflash_local.models.packed_linear import PackedLinear, can_pack
from tests.engine_sessions import ask
from tests.fused_models import fused_target


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_replayed_cycles_move_nothing(family: str) -> None:
    target = fused_target(family, 128)
    runner = FusedRunner(target, None, 96)
    ids = costs.varied_ids(20, target.vocab_size)
    with runner.idle(ids), torch.inference_mode():
        assert runner.committed == ids
        for anchor in (3, 9):
            runner.set_tokens([anchor])
            runner.replay(1)
            assert (int(target.start), int(target.kept), int(target.tokens[0])) == (20, 0, anchor)
    assert (runner.ids, runner.committed, int(target.start)) == ([], [], 0)
    states: dict[int, Any] = target.states
    assert not any(state.log.state.any() for state in states.values())


def test_a_large_pair_on_a_cpu_is_packed_and_its_cycles_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    if not can_pack(torch.device("cpu"), torch.float32):
        pytest.skip("no oneDNN for this processor")
    config = LoadConfig(dtype="float32", device="cpu", engine="reference")
    small = load(find("demo-hybrid"), config)
    monkeypatch.setattr(load_reference, "SMALL_MODEL", 0)
    large = load(find("demo-hybrid"), config)
    assert small.runner.costs == {} and {1, large.facts.block_size} < set(large.runner.costs)
    assert all(ms > 0 for ms in large.runner.costs.values())
    assert large.runner.committed == [] and large.runner.collect() == [] and large.runner.proposer.length == 0
    assert isinstance(large.runner.target.model.get_output_embeddings(), PackedLinear)  # type: ignore[union-attr]
    assert torch.equal(large.runner.target.tables[1], small.runner.target.tables[1])  # type: ignore[arg-type, union-attr]
    prompt = list(range(40, 60))
    assert ask(large, prompt).ids == ask(small, prompt).ids


def test_a_slow_cpu_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    if not can_pack(torch.device("cpu"), torch.float32):
        pytest.skip("no oneDNN for this processor")
    monkeypatch.setattr(load_reference, "SMALL_MODEL", 0)
    monkeypatch.setattr(costs, "SLOWEST_STEP_S", 0.0)
    session = load(find("demo"), LoadConfig(dtype="float32", device="cpu", engine="reference"))
    assert session.runner.costs == {} and session.runner.committed == []

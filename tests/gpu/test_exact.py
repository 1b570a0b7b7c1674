"""Exact mode on a GPU in bfloat16, and long runs: every bit the same with and without drafting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_local.bench.certify import CertifyPlan, cases, certify
from dflash_local.catalog import bundled
from dflash_local.engine.fused_runner import FusedRunner
from dflash_local.engine.load_pair import load
from dflash_local.engine.oracle_drafter import OracleDrafter
from dflash_local.load_config import LoadConfig
from dflash_local.request import user_request
from tests.engine_sessions import random_prompt
from tests.fused_models import fused_target
from tests.recorded_log import record, replayed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
NEW = 8000
GOLDEN, PARTS = Path(__file__).parent.parent / "golden", ("target", "drafter")


@pytest.mark.parametrize("pair", ["demo", "demo-hybrid", "qwen3-dflash2-b8", "qwen3-dflash2-b16"])
def test_exact_mode_gives_the_same_bits_in_bfloat16(pair: str) -> None:
    bundle = pair.startswith("demo")
    files = bundled.find(pair) if bundle else bundled.find(*(str(GOLDEN / pair / part) for part in PARTS))
    session = load(files, LoadConfig(dtype="bfloat16", device="cuda", exact=True))
    assert session.facts.load.exact and session.facts.engine == "fused"
    prompt = session.render(user_request("Count from 3 to 17.")).ids if bundle else tuple(random_prompt(13))
    plan = CertifyPlan((prompt,), cases(3), (2, 5, session.facts.block_size), 120)
    target: Any = session.runner.target
    for plant in (None, lambda ids, text: OracleDrafter(target, [*ids, *text])):
        found = certify(session, plan, plant=plant)
        assert found.verdict == "identical" and found.exact
        assert found.same_bits == found.positions > 300


@pytest.mark.parametrize("exact", [False, True])
def test_verify_gives_the_logits_of_a_recorded_cycle(exact: bool) -> None:
    """Far enough into the context for several splits of the keys."""
    target, prompt = fused_target("qwen3_5", 2100, device="cuda", exact=exact), random_prompt(700)
    runner, ids = FusedRunner(target, None, 2048), torch.tensor(random_prompt(target.rows, 1), device="cuda")
    for rows in (1, 5, target.rows):
        with runner.idle(prompt):
            target.tokens.copy_(ids)
            runner.replay(rows)
            recorded = target.logits[:rows].clone()
        for way in ("eager", "recorded", "replayed"):
            with torch.inference_mode():
                target.clear()
                for chunk in torch.tensor(prompt, device="cuda").split(target.prefill_chunk):
                    target.prefill(chunk, False)
                target.logits.zero_()
                assert torch.equal(target.head(target.verify(ids[:rows], False).hidden), recorded), (rows, way)
        runner.restart(0, None)


def test_a_long_hybrid_run_ends_in_the_state_that_its_rows_give() -> None:
    prompt = random_prompt(11)
    target = fused_target("qwen3_5", NEW + 200, device="cuda")
    _, _, _ = record(FusedRunner(target, None, NEW + 100), prompt, 8, 1)
    plain = FusedRunner(target, None, NEW + 100)
    record(plain, prompt, NEW, 1)
    text, states = list(plain.ids), [state.snapshot().state[0] for state in _settled(target)]
    drafted = FusedRunner(target, OracleDrafter(target, text), NEW + 100)  # type: ignore[arg-type]
    before, rows, lengths = record(drafted, prompt, NEW, target.rows)
    assert drafted.ids[: len(text)] == text  # the last cycle may reach behind the end
    assert len(set(lengths)) > 4 and sum(lengths) == NEW - 1
    for index, (state, want) in enumerate(zip(_settled(target), states, strict=True)):
        layer = list(target.states)[index]
        expected = replayed(before[layer][0][0], rows[layer])
        got = state.log.state.double()
        scale = float(expected.abs().max())
        assert float((got - expected).abs().max()) <= 1e-5 * scale
        assert float((state.log.state - want).abs().max()) <= 1e-5 * scale


def _settled(target):  # type: ignore[no-untyped-def]
    target.snapshot()
    return target.states.values()

"""Exact mode through the kernels' PyTorch references: a row's bits do not depend on its block, in bfloat16 too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_local.bench.certify import CertifyPlan, cases, certify
from dflash_local.catalog import bundled
from dflash_local.engine.fused_runner import FusedRunner
from dflash_local.engine.load_pair import load
from dflash_local.engine.oracle_drafter import OracleDrafter
from dflash_local.engine.session import Session
from dflash_local.errors import EngineError, UsageError
from dflash_local.load_config import LoadConfig
from dflash_local.models.fused import kernel_choice
from dflash_local.models.fused.linear import Linear
from dflash_local.request import user_request
from tests.engine_sessions import ask, random_prompt
from tests.fused_models import fused_target
from tests.recorded_log import record, replayed


def asked(session: Session) -> tuple[int, ...]:
    return session.render(user_request("Count from 3 to 17.")).ids


@pytest.mark.parametrize(
    ("pair", "dtype"),
    [
        # All kinds of layers, and what bfloat16 rounds away; tests/cli/test_certify.py certifies a pair in bfloat16.
        ("demo-hybrid", "float32"),
        pytest.param("demo-hybrid", "bfloat16", marks=pytest.mark.slow),
        *(pytest.param("demo", dtype, marks=pytest.mark.slow) for dtype in ("float32", "bfloat16")),
    ],
)
def test_all_logits_are_the_same_in_every_bit_with_and_without_drafting(pair: str, dtype: str) -> None:
    session = load(bundled.find(pair), LoadConfig(dtype=dtype, device="cpu", exact=True))
    assert session.facts.load.exact and session.facts.engine == "fused"
    plan = CertifyPlan((asked(session),), cases(3)[:2], (3, session.facts.block_size), 8)
    target: Any = session.runner.target
    for plant in (None, lambda ids, text: OracleDrafter(target, [*ids, *text])):
        found = certify(session, plan, plant=plant)
        assert found.verdict == "identical"
        assert found.same_bits == found.positions > 30


def test_a_reply_leaves_the_same_bits_with_and_without_drafting() -> None:
    """So that the next turn of a conversation is exact, too: a drafted reply may end with several rows to commit."""
    session = load(bundled.find("demo-hybrid"), LoadConfig(dtype="float32", device="cpu", exact=True))
    states, replies = [], []
    for mode in ("ar", "dflash"):
        reply = ask(session, list(asked(session)), 24, mode=mode)
        states.append([state.log for state in session.runner.target.states.values()])
        states[-1] = [(log.state.clone(), log.conv_state.clone()) for log in states[-1]]
        replies.append(reply.ids)
        assert max(reply.finished.stats.acceptance_lengths, default=1) == (1 if mode == "ar" else 8)
        session.reset()
    assert replies[0] == replies[1]
    assert all(torch.equal(*each) for pair in zip(*states, strict=True) for each in zip(*pair, strict=True))


def test_without_exact_mode_bfloat16_promises_less() -> None:
    """The check above can fail: a block of another size rounds otherwise."""
    session = load(bundled.find("demo"), LoadConfig(dtype="bfloat16", device="cpu", engine="fused"))
    found = certify(session, CertifyPlan((asked(session),), cases(3)[:2], (8,), 40))
    assert found.same_bits < found.positions and not found.exact


def test_a_drafted_run_ends_in_the_state_that_its_rows_give() -> None:
    prompt = random_prompt(11)
    target = fused_target("qwen3_5", 400)
    plain = FusedRunner(target, None, 400)
    record(plain, prompt, 150, 1)
    text = list(plain.ids)
    drafted = FusedRunner(target, OracleDrafter(target, text), 400)  # type: ignore[arg-type]
    before, rows, lengths = record(drafted, prompt, 150, target.rows)
    assert drafted.ids[: len(text)] == text and len(set(lengths)) > 3
    target.snapshot()  # commits what is left
    states: dict[int, Any] = target.states
    for layer, state in states.items():
        expected = replayed(before[layer][0][0], rows[layer])
        assert float((state.log.state.double() - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


def test_products_whose_rows_depend_on_each_other_are_found_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Careless(Linear):
        """Its sums take in the row above."""

        def __call__(self, x: Any, out: Any, residual: Any = None, bias: Any = None) -> Any:
            return torch.mm(x + 1e-6 * x.roll(1, 0), self.weight.t(), out=out)

    sound, careless = Linear(torch.randn(32, 16)), Careless(torch.randn(32, 16))
    assert kernel_choice.independent(sound, 16) and not kernel_choice.independent(careless, 16)
    assert kernel_choice.settle_rows([sound], 16) == ()
    with pytest.raises(EngineError, match="32 x 16 gives a row other bits"):
        kernel_choice.settle_rows([careless], 16)


def test_a_target_elsewhere_cannot_be_certified() -> None:
    session: Any = SimpleNamespace(runner=SimpleNamespace(target=None), facts=SimpleNamespace(target="counting"))
    with pytest.raises(UsageError, match="counting is not in this process"):
        certify(session, CertifyPlan(((1, 2),), cases(1), (4,), 8))

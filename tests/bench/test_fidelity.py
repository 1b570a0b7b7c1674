"""Fidelity: divergences against a slow sum over transformers' own logits, and what no difference looks like."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from dflash_local.bench import fidelity
from dflash_local.bench.fidelity import Distance, Scored, distances, rows, score_original
from dflash_local.bench.plain import plain_rows
from dflash_local.bench.prompts import Prompt
from dflash_local.engine.load_pair import load
from dflash_local.engine.session import Session
from dflash_local.errors import PairError, UsageError
from dflash_local.load_config import LoadConfig
from tests.bench.sessions import KV_ONLY, golden_cases, golden_pair

PLAIN = LoadConfig(device="cpu", dtype="float32", draft=False)
TOKENS = 70  # more than are scored at a time


def quiet(_text: str, _fraction: float) -> None:
    """Progress that nobody watches."""


def session_of(**wanted: str) -> Session:
    return load(golden_pair(KV_ONLY), replace(PLAIN, **wanted))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def texts() -> list[Scored]:
    prompts = [Prompt(kind, ids=tuple(case["prompt_ids"])) for kind, case in zip("ab", golden_cases(KV_ONLY))]
    return score_original(session_of(), prompts, TOKENS, False, quiet)


def test_the_original_is_scored_where_it_chose(texts: list[Scored]) -> None:
    for text, case in zip(texts, golden_cases(KV_ONLY)):
        assert list(text.reply) == case["output_ids"][:TOKENS]
        assert text.log_probs.argmax(-1).tolist() == list(text.reply), "greedy: its likeliest token is the reply's"
        assert torch.allclose(text.log_probs.exp().sum(-1), torch.ones(len(text.reply)), atol=1e-4)


@pytest.mark.parametrize("engine", ["reference", "fused"])
def test_a_target_is_no_distance_from_itself(texts: list[Scored], engine: str) -> None:
    found = distances(session_of(engine=engine), texts, quiet)
    assert len(found) == sum(len(text.reply) for text in texts)
    assert all(one.agrees and 0 <= one.kl < 1e-6 for one in found)


@pytest.mark.parametrize("engine", ["reference", "fused"])
def test_divergences_are_those_of_a_slow_sum(texts: list[Scored], engine: str) -> None:
    plain, rounded = session_of(), session_of(quantize="int4", engine="reference")
    found = iter(distances(session_of(quantize="int4", engine=engine), texts, quiet))
    differ = 0
    for text in texts:
        sides = [plain_rows(each.runner.target.model, text.prompt, text.reply) for each in (plain, rounded)]
        for original, quantised in zip(*sides):
            p, q = (torch.softmax(row.double(), -1).tolist() for row in (original, quantised))
            slow = sum(a * math.log(a / b) for a, b in zip(p, q) if a > 0)
            one = next(found)
            assert one.kl == pytest.approx(slow, rel=1e-3, abs=1e-6)
            assert one.agrees == (p.index(max(p)) == q.index(max(q)))
            differ += not one.agrees
    assert differ > 0, "four bits change a choice of a random target"


def test_rows_sum_up_their_kinds() -> None:
    found = [Distance("a", kl, kl < 3) for kl in (1.0, 2.0, 6.0)] + [Distance("b", 3.0, True)]
    one, other, total = rows(found)
    assert (one.kind, one.positions, one.mean_kl, one.median_kl, one.top_1) == ("a", 3, 3.0, 2.0, 2 / 3)
    assert (other.mean_kl, total.kind, total.positions, total.mean_kl) == (3.0, "total", 4, 3.0)
    assert one.p99_kl == pytest.approx(2 + 4 * 0.98)


def test_another_vocabulary_is_refused(texts: list[Scored]) -> None:
    wide = [replace(text, log_probs=torch.zeros(len(text.reply), 1000)) for text in texts]
    with pytest.raises(PairError, match="the original has 1000 ids"):
        distances(session_of(), wide, quiet)


def test_more_than_is_kept_is_refused_before_anything_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fidelity, "MAX_KEPT", 2**10)
    with pytest.raises(UsageError, match="replies of up to 70 tokens"):
        score_original(session_of(), [Prompt("a", ids=(1, 2, 3))], TOKENS, False, quiet)

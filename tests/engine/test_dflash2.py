"""DFlash 2 drafters in both engines: never another text than the target's own."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_local.bench.trial import scored_target
from dflash_local.catalog.bundled import Pair, find
from dflash_local.drafters.dflash2 import layout as dflash2_layout
from dflash_local.engine import LoadConfig, Session, load, load_fused
from dflash_local.errors import PairError
from dflash_local.models.transformers_target import TransformersTarget
from dflash_local.request import SamplingParams
from tests.engine_sessions import ask
from tests.families import HIDDEN, random_model, save_model

GOLDEN = Path(__file__).parents[1] / "golden"
PAIRS = ("qwen3-dflash2-b8", "qwen3-dflash2-b16")
CPU32 = LoadConfig(dtype="float32", device="cpu")


def folders(pair: str) -> tuple[str, str]:
    return str(GOLDEN / pair / "target"), str(GOLDEN / pair / "drafter")


@cache
def session_of(pair: str, engine: str) -> Session:
    return load(find(*folders(pair)), replace(CPU32, engine=engine))


def prompts(pair: str) -> list[list[int]]:
    return [case["prompt_ids"] for case in json.loads((GOLDEN / pair / "expected.json").read_text())["cases"]]


FILTERED, PLAIN = SamplingParams(temperature=0.9, top_p=0.95), SamplingParams(temperature=1.0)
# How a token is chosen does not know of the block's size: each way of either engine is there in one of these. Greedy
# texts are golden ones (test_fused).
HERE = ((PAIRS[1], FILTERED, "reference"), (PAIRS[0], FILTERED, "fused"), (PAIRS[1], PLAIN, "fused"))


@pytest.mark.parametrize(("pair", "sampling", "engine"), HERE)
def test_a_drafted_text_is_the_plain_one_for_every_seed_and_block(
    pair: str, sampling: SamplingParams, engine: str
) -> None:
    session, accepted = session_of(pair, engine), 0
    for number, prompt in enumerate(prompts(pair)[:2]):
        own = replace(sampling, seed=number)
        want = ask(session, prompt, 40, sampling=own, mode="ar").ids
        for block in (3, None):
            reply = ask(session, prompt, 40, sampling=own, block_size=block)
            assert reply.ids == want, f"block {block}, seed {number}"
            accepted += max(reply.finished.stats.acceptance_lengths) > 1
    assert accepted == 4, "drafts that are hardly ever accepted prove little"


@cache
def plain(prompt: tuple[int, ...], sampling: SamplingParams) -> list[int]:
    return ask(session_of(PAIRS[1], "reference"), list(prompt), 40, sampling=sampling, mode="ar").ids


@pytest.mark.parametrize(
    "options",
    [{"exact": True}, {"draft_window": 8}, {"drafter_precision": "8bit"}],
    ids=["exact", "window", "eight bits"],
)
def test_the_fused_engines_options_change_no_text(options: dict[str, Any]) -> None:
    session = load(find(*folders(PAIRS[1])), replace(CPU32, engine="fused", **options))
    accepted = 0
    for number, prompt in enumerate(prompts(PAIRS[1])[:2]):
        for sampling in (SamplingParams(), SamplingParams(temperature=0.9, top_k=20, seed=number)):
            reply = ask(session, prompt, 40, sampling=sampling)
            assert reply.ids == plain(tuple(prompt), sampling)
            accepted += sum(reply.finished.stats.acceptance_lengths) - len(reply.finished.stats.acceptance_lengths)
    assert accepted > 30, "drafts that are hardly ever accepted prove little"


def test_the_block_is_of_stored_rows_and_the_logits_have_no_cap() -> None:
    """The drafter's own factors stand for those that Gemma gives its embedding and its logits."""
    target = TransformersTarget(random_model("gemma2"), (0, 2))
    ids, hidden = torch.tensor([3, 7]), 20 * torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(target.stored_rows(ids) * HIDDEN**0.5, target.embed(ids), atol=1e-4, rtol=1e-4)
    cap = target.config.final_logit_softcapping
    torch.testing.assert_close(cap * torch.tanh(target.uncapped(hidden) / cap), target.head(hidden))
    assert (target.uncapped(hidden) - target.head(hidden)).abs().max() > 1e-3


def test_both_engines_tell_a_targets_rows_with_and_without_its_scale(tmp_path: Path) -> None:
    save_model("gemma2_full", tmp_path)
    ids, found = torch.tensor([3, 7]), []
    for engine in ("reference", "fused"):
        session = load(Pair("gemma2", tmp_path, None, False), replace(CPU32, engine=engine))
        target = scored_target(session)
        table = target.tables[0]
        assert table is not None and torch.equal(target.stored_rows(ids), table[ids])
        found.append(target.embed(ids).clone())
        assert (found[-1] / target.stored_rows(ids)).mean() > 5
        session.close()
    torch.testing.assert_close(*found)


@pytest.fixture
def few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused engine's kernels take fewer candidates than the golden drafters choose among."""
    monkeypatch.setattr(dflash2_layout, "MOST_CANDIDATES", 4)


@pytest.mark.usefixtures("few_candidates")
def test_where_the_fused_engine_would_be_taken_a_line_says_why_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(find(*folders(PAIRS[0])), CPU32).facts.notices == ()  # a CPU: it would not
    monkeypatch.setattr(load_fused, "why_not_on", lambda device, dense: "")
    session = load(find(*folders(PAIRS[0])), CPU32)
    (line,) = session.facts.notices
    assert "its drafter chooses among 8 candidates" in line and "the reference engine" in line and "\n" not in line
    assert session.facts.engine == "reference"
    target, _ = folders(PAIRS[0])
    assert load(find(target, None), CPU32).facts.engine == "fused"  # without the drafter nothing keeps it


def test_codebooks_of_fewer_ids_than_the_target_has_are_refused(tmp_path: Path) -> None:
    target, drafter = (Path(folder) for folder in folders(PAIRS[0]))
    from safetensors.torch import load_file, save_file

    tensors = load_file(drafter / "model.safetensors")
    for name in ("predecessor_codebook", "successor_codebook"):
        tensors[f"candidate_selector.{name}"] = tensors[f"candidate_selector.{name}"][:95].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((drafter / "config.json").read_text()) | {"vocab_size": 95}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(PairError, match="codebooks have 95 rows, the target's vocabulary 96 ids"):
        load(find(str(target), str(tmp_path)), replace(CPU32, allow_mismatch=True))

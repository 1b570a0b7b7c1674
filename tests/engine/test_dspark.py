"""DSpark drafters in both engines: never another text than the target's own, and the same drafts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from shutil import copytree
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_local.catalog.bundled import find
from dflash_local.drafters.dflash.fused import DFlashBlocks
from dflash_local.drafters.dspark.layout import EMBEDDING, HEAD
from dflash_local.engine import LoadConfig, Session, drafter_precision, load
from dflash_local.engine.fused_runner import FusedRunner
from dflash_local.layout import draft_head
from dflash_local.request import SamplingParams
from tests.dspark_checkpoints import DRAFTS, TARGET, VOCAB, raw, save_drafter
from tests.engine_sessions import Reply, ask
from tests.quantized_checkpoints import CODED, quantize_checkpoint

CPU32 = LoadConfig(dtype="float32", device="cpu")
CASES = json.loads((TARGET.parent / "expected.json").read_text())["cases"]
PROMPTS = [case["prompt_ids"] for case in CASES]
ENGINES = pytest.mark.parametrize("engine", ["reference", "fused"])
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=0.9, seed=4),
    SamplingParams(temperature=0.9, top_p=0.95, repetition_penalty=1.1, seed=5),
)
# Where the tables come from and how an id is chosen do not know of each other: each is there in both engines.
HERE = (
    *((SAMPLINGS[0], True, "reference"), (SAMPLINGS[2], False, "reference")),
    *((SAMPLINGS[0], False, "fused"), (SAMPLINGS[1], True, "fused"), (SAMPLINGS[2], True, "fused")),
)


def session_with(drafter: Path | None, engine: str = "reference", **options: Any) -> Session:
    return load(find(str(TARGET), None if drafter is None else str(drafter)), replace(CPU32, engine=engine, **options))


def fused_drafter(session: Session) -> DFlashBlocks:
    drafter = cast(FusedRunner, session.runner).proposer
    assert isinstance(drafter, DFlashBlocks)
    return drafter


@cache
def plain(prompt: int, sampling: SamplingParams) -> list[int]:
    return ask(session_with(None), PROMPTS[prompt], 40, sampling=sampling, mode="ar").ids


def learnt(folder: Path, sampling: SamplingParams, **options: bool) -> Path:
    """A drafter that has the plain reply to the first prompt by heart, id by id."""
    config = raw(markov_rank=VOCAB) if options.get("tables", True) else raw({}, markov_rank=VOCAB)
    return save_drafter(folder, config, text=[PROMPTS[0][-1], *plain(0, sampling)], **options)


def with_tables(folder: Path, tables: Mapping[str, torch.Tensor]) -> Path:
    save_file({**load_file(folder / "model.safetensors"), **tables}, folder / "model.safetensors")
    return folder


def lengths(reply: Reply) -> tuple[int, ...]:
    return reply.finished.stats.acceptance_lengths


@pytest.mark.parametrize(("sampling", "tables", "engine"), HERE)
def test_a_drafted_text_is_the_plain_one_for_every_block(
    sampling: SamplingParams, tables: bool, engine: str, tmp_path: Path
) -> None:
    session = session_with(learnt(tmp_path / "drafter", sampling, tables=tables), engine)
    assert session.facts.block_size == DRAFTS + 1 and session.facts.engine == engine
    for number, block in ((1, None), (0, 3), (0, None)):
        reply = ask(session, PROMPTS[number], 40, sampling=sampling, block_size=block)
        assert reply.ids == plain(number, sampling), f"prompt {number}, block {block}"
    assert max(lengths(reply)) >= 4, "it drafts what it has by heart"


@pytest.mark.parametrize(("rank", "own"), [(12, True), (0, False)])
def test_both_engines_accept_the_same_drafts(rank: int, own: bool, tmp_path: Path) -> None:
    """Before either engine gives up drafts that are never right, which the fused one learns later."""
    padded = VOCAB + 4 if own else VOCAB
    folder = save_drafter(tmp_path / "drafter", raw(markov_rank=rank, vocab_size=padded))
    if own:
        generator = torch.Generator().manual_seed(2)
        embedding, head = (torch.randn(padded, 64, generator=generator) for _ in range(2))
        head[VOCAB:] *= 100  # the likeliest by far, and no ids of the target
        with_tables(folder, {EMBEDDING: embedding, HEAD: head})
    one, two = (session_with(folder, engine, allow_mismatch=own) for engine in ("reference", "fused"))
    found: list[int] = []
    for number, sampling in enumerate(SAMPLINGS):
        prompt = PROMPTS[number % 2]
        replies = [ask(session, prompt, 30, sampling=sampling, block_size=DRAFTS + 1) for session in (one, two)]
        assert replies[0].ids == replies[1].ids == plain(number % 2, sampling)[:30]
        assert lengths(replies[0]) == lengths(replies[1])
        found += lengths(replies[0])
    assert max(found) > 1, "a draft that is never accepted tells nothing"


@pytest.mark.parametrize(
    "options",
    [{"exact": True}, {"draft_window": 8}, {"drafter_precision": "8bit"}, {"drafter_precision": "8bit-frequent"}],
    ids=["exact", "window", "eight bits", "frequent"],
)
def test_the_fused_engines_options_change_no_text(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for room in (draft_head, drafter_precision):
        monkeypatch.setattr(room, "FREQUENT", VOCAB - 16)
    session = session_with(learnt(tmp_path / "drafter", SamplingParams()), "fused", **options)
    for sampling in SAMPLINGS[1::-1]:
        reply = ask(session, PROMPTS[0], 40, sampling=sampling)
        assert reply.ids == plain(0, sampling)
    assert max(lengths(reply)) >= 4, "it drafts what it has by heart"
    drafts = fused_drafter(session).drafts
    assert drafts.shape == (DRAFTS, VOCAB - 16 if "8bit-frequent" in options.values() else VOCAB)


def test_beside_a_targets_head_in_codes_it_keeps_none(tmp_path: Path) -> None:
    """No plan counts a plain one, and nothing tells that it is another than the target's."""
    copytree(TARGET, tmp_path / "twin")
    quantize_checkpoint(tmp_path / "twin", tmp_path / "target", "pack_quantized_8", coded=(*CODED, "lm_head"))
    folder = save_drafter(tmp_path / "drafter", raw())
    session = load(find(str(tmp_path / "target"), str(folder)), replace(CPU32, engine="fused"))
    drafter = fused_drafter(session)
    assert not isinstance(drafter.stored_head.weight, torch.Tensor)
    assert drafter.stored_head is drafter.target.weights.head and drafter._embedding is drafter.target.weights.embedding
    assert ask(session, PROMPTS[0], 30).ids == ask(session, PROMPTS[0], 30, mode="ar").ids


@ENGINES
def test_a_quantized_one_drafts_as_what_its_codes_stand_for(engine: str, tmp_path: Path) -> None:
    twin = learnt(tmp_path / "twin", SamplingParams())
    quantize_checkpoint(twin, tmp_path / "quantized", "pack_quantized_8", coded=(*CODED, "fc", "markov_w2"))
    found = [ask(session_with(folder, engine), PROMPTS[0], 30) for folder in (twin, tmp_path / "quantized")]
    assert found[0].ids == found[1].ids == plain(0, SamplingParams())[:30]
    both = [lengths(reply) for reply in found]
    assert both[0] == both[1] and max(both[0]) > 1

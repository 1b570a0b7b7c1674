"""DSpark drafters in the engines: never another text than the target's own, and the fused engine says no by name."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_local.catalog.bundled import find
from dflash_local.config.dspark import HEAD
from dflash_local.engine import LoadConfig, Session, load
from dflash_local.engine.reference import DFlashProposer
from dflash_local.errors import UsageError
from dflash_local.models.drafter import Drafter
from dflash_local.models.transformers_target import TransformersTarget
from dflash_local.request import SamplingParams
from tests.dspark_checkpoints import DRAFTS, TARGET, VOCAB, raw, save_drafter
from tests.engine_sessions import ask
from tests.families import HIDDEN, random_model
from tests.families import VOCAB as FAMILY_VOCAB
from tests.proposers import decode
from tests.quantised_checkpoints import CODED, quantise

CPU32 = LoadConfig(dtype="float32", device="cpu")
CASES = json.loads((TARGET.parent / "expected.json").read_text())["cases"]
PROMPTS = [case["prompt_ids"] for case in CASES]


def session_with(drafter: Path | None) -> Session:
    return load(find(str(TARGET), None if drafter is None else str(drafter)), CPU32)


@cache
def plain(prompt: int, sampling: SamplingParams) -> list[int]:
    return ask(session_with(None), PROMPTS[prompt], 40, sampling=sampling, mode="ar").ids


def learnt(folder: Path, sampling: SamplingParams, **options: bool) -> Path:
    """A drafter that has the plain reply to the first prompt by heart, id by id."""
    config = raw(markov_rank=VOCAB) if options.get("tables", True) else raw({}, markov_rank=VOCAB)
    return save_drafter(folder, config, text=[PROMPTS[0][-1], *plain(0, sampling)], **options)


@pytest.mark.parametrize("tables", [True, False])
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.9, top_p=0.95, seed=5)])
def test_a_drafted_text_is_the_plain_one_for_every_block(
    tables: bool, sampling: SamplingParams, tmp_path: Path
) -> None:
    session = session_with(learnt(tmp_path / "drafter", sampling, tables=tables))
    assert session.facts.block_size == DRAFTS + 1
    for number in range(4):
        for block in (2, 5, None):
            reply = ask(session, PROMPTS[number], 40, sampling=sampling, block_size=block)
            assert reply.ids == plain(number, sampling), f"prompt {number}, block {block}"
            if number == 0 and block is None:
                assert max(reply.finished.stats.acceptance_lengths) >= 4, "it drafts what it has by heart"


def test_its_drafts_follow_the_id_before_from_the_anchor_on(tmp_path: Path) -> None:
    """Which is where DSpark's rows and DFlash's differ by one: a cycle of 0, 1, 2 .. tells."""
    folder = save_drafter(tmp_path / "drafter", raw(markov_rank=VOCAB), text=range(VOCAB))
    proposer = session_with(folder).runner.proposer
    assert isinstance(proposer, DFlashProposer)
    from dflash_local.engine.sampling import Sampler

    sampler = Sampler(SamplingParams(), 0, VOCAB, torch.tensor([0]))
    proposer.extend(torch.randn(3, 3 * 64, generator=torch.Generator().manual_seed(0)), 0)
    for count in (1, 4, DRAFTS):
        assert proposer.propose(11, 3, count, sampler, None).tolist() == list(range(12, 12 + count))


def test_without_a_markov_head_each_row_decides_alone(tmp_path: Path) -> None:
    """As DeepSpec's own DFlash drafters are written: under DSpark's name, with a rank of 0."""
    folder = save_drafter(tmp_path / "drafter", raw(markov_rank=0, confidence_head_with_markov=False))
    session = session_with(folder)
    assert session.facts.notices == ()
    for number in range(2):
        assert ask(session, PROMPTS[number], 30).ids == ask(session, PROMPTS[number], 30, mode="ar").ids


def test_a_head_of_its_own_drafts(tmp_path: Path) -> None:
    """Drafts come from the drafter's head where that is another than the target's; the text does not."""
    folder = save_drafter(tmp_path / "drafter", raw(markov_rank=0, confidence_head_with_markov=False))
    tensors = load_file(folder / "model.safetensors")
    only = torch.zeros(VOCAB, 64)
    tensors[HEAD] = only
    save_file(tensors, folder / "model.safetensors")
    session = session_with(folder)
    proposer = session.runner.proposer
    assert isinstance(proposer, DFlashProposer) and proposer._tables.embedding is None
    assert proposer._tables.head is not None and torch.equal(proposer._tables.head, only)
    assert ask(session, PROMPTS[0], 30).ids == ask(session, PROMPTS[0], 30, mode="ar").ids


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "gpt_oss", "gemma2"])
def test_a_random_drafter_changes_no_text_of_any_kind_of_target(family: str) -> None:
    from dflash_local.config.drafter_config import DrafterConfig

    config = raw(hidden_size=HIDDEN, vocab_size=FAMILY_VOCAB, target_layer_ids=[0, 2], mask_token_id=5)
    target = TransformersTarget(random_model(family), (0, 2))
    drafter = Drafter.random(DrafterConfig.from_json(config, "x"), target_hidden=HIDDEN, seed=3)
    proposer, prompt = DFlashProposer(drafter, target), list(range(9))
    for params in (SamplingParams(), SamplingParams(temperature=1.0)):
        want = decode(target, prompt, 24, params=params)[0]
        for block in (2, DRAFTS + 1):
            assert decode(target, prompt, 24, proposer, block, params)[0] == want  # type: ignore[arg-type]


def test_a_quantised_one_drafts_as_what_its_codes_stand_for(tmp_path: Path) -> None:
    twin = learnt(tmp_path / "twin", SamplingParams())
    quantise(twin, tmp_path / "quantised", "pack_quantized_8", coded=(*CODED, "fc", "markov_w2"))
    found = [ask(session_with(folder), PROMPTS[0], 30) for folder in (twin, tmp_path / "quantised")]
    assert found[0].ids == found[1].ids == plain(0, SamplingParams())[:30]
    lengths = [reply.finished.stats.acceptance_lengths for reply in found]
    assert lengths[0] == lengths[1] and max(lengths[0]) > 1


def test_the_fused_engine_refuses_it_by_name(tmp_path: Path) -> None:
    folder = save_drafter(tmp_path / "drafter", raw())
    with pytest.raises(UsageError, match="the fused engine cannot run this: its drafter is a DSpark one") as caught:
        load(find(str(TARGET), str(folder)), replace(CPU32, engine="fused"))
    assert caught.value.hint == "use --engine reference"

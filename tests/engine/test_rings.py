"""Caches of layers with a window as rings: drafts and texts are those of caches that hold every position."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from dflash_local.drafters.dflash.fused import DFlashBlocks
from dflash_local.engine import LoadConfig, Session
from dflash_local.engine import load as load_pair
from dflash_local.engine.fused_runner import FusedRunner
from dflash_local.engine.oracle_drafter import OracleDrafter
from dflash_local.events import Started, Step
from dflash_local.layout import attention
from dflash_local.request import Limits, Request, SamplingParams
from tests.engine.fused_sessions import fused_session, fused_target_of
from tests.engine.named_pairs import DSPARK, named_pair
from tests.engine_sessions import BLOCK, ask, random_prompt
from tests.fused_models import fused_target

NAMES = ("qwen35-v2-swa-b8", "qwen3-v2-swa-b16", "qwen3-dflash2-b8", DSPARK)
FORMATS = [*((name, "auto") for name in NAMES), ("qwen3-v2-swa-b16", "int8")]  # of keys and values
ON_CARD = (("demo-hybrid", "auto"), *FORMATS)
PAIRS = [
    *((*named, "cpu") for named in FORMATS),
    *(pytest.param((*named, "cuda"), marks=pytest.mark.gpu) for named in ON_CARD),
]
CHUNK, SLACK = 32, 160  # a ring is longer than what a kernel reads at a time
LARGE = 430  # a chunk that a ring takes in slices, the last of them a part of one
CONTEXT = 800
NEW = 10  # tokens of a reply: drafts of random weights are refused, so these are about as many cycles


def open_pair(name: str, kv_cache: str, device: str, folder: Path) -> Session:
    asked = LoadConfig(device=device, dtype="float32", engine="fused", context=CONTEXT, kv_cache=kv_cache)
    session = load_pair(named_pair(name, folder), asked)
    fused_target_of(session).prefill_chunk = CHUNK
    return session


@pytest.fixture
def both(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Session, Session]:
    """One pair with rings, and with caches of the whole context."""
    name, kv_cache, device = request.param
    found = []
    for slack in (SLACK, 2 * CONTEXT):  # of the latter no cache is a ring
        monkeypatch.setattr(attention, "RING_SLACK", slack)
        found.append(open_pair(name, kv_cache, device, tmp_path / str(slack)))
    monkeypatch.setattr(attention, "RING_SLACK", SLACK)
    rows = [runner_of(session).proposer.cache[0].shape[0] for session in found]  # type: ignore[union-attr]
    assert rows[0] < rows[1]
    return found[0], found[1]


def runner_of(session: Session) -> FusedRunner:
    assert isinstance(session.runner, FusedRunner) and isinstance(session.runner.proposer, DFlashBlocks)
    return session.runner


def answer(session: Session, ids: list[int], mode: Any = "dflash") -> tuple[list[int], list[int], torch.Tensor]:
    """The reply's ids, accepted drafts of each cycle, and logits of drafts: of the last cycle, and on a CPU of each."""
    sampling, block = SamplingParams(temperature=0.7, seed=4), session.facts.block_size if mode == "dflash" else None
    # The block by name: else measured costs decide on it, which differ from load to load.
    request = Request(prompt_ids=tuple(ids), sampling=sampling, limits=Limits(NEW), mode=mode, block_size=block)
    drafter, steps, drafts = runner_of(session).proposer, list[Step](), list[torch.Tensor]()
    assert drafter is not None
    told_at_once = drafter.drafts.device.type == "cpu"  # a card's cycles are ahead of what is told
    for event in session.generate(request):
        if isinstance(event, Step):
            steps.append(event)
            drafts += [drafter.drafts.clone()] if event.drafted and told_at_once else []
    text = [token for step in steps for token in step.token_ids]
    return text, [step.accepted for step in steps], torch.cat([*drafts, drafter.drafts])


def same(both: tuple[Session, Session], ids: list[int], mode: Any = "dflash") -> list[int]:
    (text, accepted, drafts), want = (answer(session, ids, mode) for session in both)
    assert (text, accepted) == want[:2], len(ids)
    # Sums over other lengths round otherwise, which now and then makes another code of a key or value.
    near = 1e-2 if fused_target_of(both[0]).spec.kv_cache == "int8" else 1e-4
    assert torch.allclose(drafts, want[2], rtol=1e-3, atol=near), len(ids)
    return text


@pytest.mark.parametrize("both", PAIRS, indirect=True)
def test_rings_draft_as_whole_caches_do_wherever_a_text_begins(both: tuple[Session, Session]) -> None:
    # Rings have 184 rows: of the second text each cycle's block lies otherwise at their end.
    for length in (23, 176, 400):
        for session in both:
            session.reset()
        same(both, random_prompt(length, length))


@pytest.mark.parametrize("both", PAIRS, indirect=True)
def test_chunks_larger_than_rings_draft_as_whole_caches_do(both: tuple[Session, Session]) -> None:
    """Also behind a text, and behind one that went back by less than rings hold."""
    for session in both:
        fused_target_of(session).prefill_chunk = LARGE
    text = random_prompt(LARGE + 50)
    text += [*same(both, text), *random_prompt(SLACK + 31, 2)]
    same(both, [*text[:-7], *random_prompt(12, 3)])
    for session in both:
        session.reset()
    same(both, text)


@pytest.mark.parametrize("both", PAIRS, indirect=True)
def test_a_conversation_goes_on_and_goes_back(both: tuple[Session, Session]) -> None:
    """By less and by more than rings hold, and behind a plain reply."""
    text = random_prompt(150)
    for back, seed in ((5, 2), (SLACK + 10, 3), (60, 4)):
        text += [*same(both, text), *random_prompt(130, seed)]
        text += same(both, text)
        text = [*text[: len(text) - back], *random_prompt(4, seed + 10)]
    text += same(both, text, "ar")
    same(both, [*text, *random_prompt(30, 6)])


WINDOWED = ("mistral", "gpt_oss_dense")  # windows of 8 in all layers, and in every other one
TARGETS = [
    *((family, "cpu") for family in WINDOWED),
    *(pytest.param(family, "cuda", marks=pytest.mark.gpu) for family in WINDOWED),
]


def windowed(family: str, device: str) -> Session:
    session = fused_session(family, None, CONTEXT, device=device)
    fused_target_of(session).prefill_chunk = CHUNK
    return session


def next_reply(rings: Session, whole: Session, text: list[int]) -> tuple[list[int], int]:
    """The reply, drafted by who knows it, equal to the plain one of whole caches; and prompt tokens that were kept."""
    want = ask(whole, text, 3 * BLOCK, mode="ar").ids
    oracle = OracleDrafter(fused_target_of(rings), [*text, *want])
    oracle.length = len(rings.runner.committed)
    rings.runner.proposer = oracle
    found = ask(rings, text, 3 * BLOCK, block_size=BLOCK)
    assert found.ids == want
    return want, found.find(Started)[0].reused_tokens


@pytest.mark.parametrize(("family", "device"), TARGETS)
def test_a_target_with_windows_goes_on_and_goes_back(family: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what rings hold, and by more: to a snapshot, or to the beginning where that is older than all snapshots."""
    monkeypatch.setattr(attention, "RING_SLACK", 2 * CONTEXT)
    whole = windowed(family, device)
    monkeypatch.setattr(attention, "RING_SLACK", SLACK)
    rings = windowed(family, device)
    assert fused_target_of(rings).rings
    text = random_prompt(150)
    for seed in range(3):
        text += next_reply(rings, whole, text)[0]
        end = len(text)
        text += random_prompt(110, seed)
    assert next_reply(rings, whole, text)[1] == end - 1
    near = [*text[:-20], *random_prompt(9, 7)]
    reply, kept = next_reply(rings, whole, near)
    assert kept == len(text) - 20
    later = [*near, *reply, *random_prompt(120, 5)]
    next_reply(rings, whole, later)
    assert next_reply(rings, whole, [*later[: len(near) + 9], *random_prompt(9, 8)])[1] == len(near), "a snapshot"
    assert next_reply(rings, whole, [*near[:-5], *random_prompt(9, 10)])[1] == len(text) - 20, (
        "where it was left before"
    )
    assert next_reply(rings, whole, [*text[:100], *random_prompt(9, 9)])[1] == 0, "nothing is left of what is before"


# On a CPU windows in all layers are the shorter way of what is there beside layers without.
BORDERED = [pytest.param(*TARGETS[0], marks=pytest.mark.slow), *TARGETS[1:]]


@pytest.mark.parametrize(("family", "device"), BORDERED)
@pytest.mark.parametrize("options", [{}, {"exact": True}, {"kv_cache": "int8"}], ids=["fast", "exact", "int8"])
def test_blocks_and_prompts_cross_the_border_of_a_ring_at_every_offset(
    family: str, device: str, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of up to 60 rows, whose first row still sees the oldest key, and blocks of which any number is kept."""
    found = []
    for slack in (CONTEXT, SLACK):
        monkeypatch.setattr(attention, "RING_SLACK", slack)
        target, rows, random = fused_target(family, CONTEXT, BLOCK, device, **options), [], Random(4)
        text = iter(random_prompt(20_000))
        for _ in range(5):
            target.clear()
            while target.length < CONTEXT - SLACK:
                size = random.choice((1, BLOCK, SLACK if random.random() < 0.1 else 60))
                ids = torch.tensor([next(text) for _ in range(size)], device=device)
                if size <= BLOCK:
                    rows.append(target.verify(ids, False).hidden)
                    target.commit(random.randrange(1, size + 1))
                else:
                    rows.append(target.prefill(ids, False).hidden)
        found.append(torch.cat(rows))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("family", "device"), TARGETS)
@pytest.mark.parametrize("options", [{}, {"exact": True}, {"kv_cache": "int8"}], ids=["fast", "exact", "int8"])
def test_a_chunk_larger_than_a_ring_is_what_whole_caches_give(
    family: str, device: str, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and logits of chunks of several slices, whatever lies before them, and of blocks behind them."""
    found, sizes = [], (LARGE, 2 * SLACK, SLACK + 1)
    for slack in (3 * CONTEXT, SLACK):
        monkeypatch.setattr(attention, "RING_SLACK", slack)
        target, rows, logits = fused_target(family, 2 * CONTEXT, BLOCK, device, **options), [], []
        assert bool(target.rings) == (slack == SLACK)
        ids = torch.tensor(random_prompt(2 * CONTEXT), device=device)
        for before in (0, 7):
            target.clear()
            for size in (before, *sizes):
                start = target.length
                rows += [target.prefill(ids[start : start + size], False).hidden] if size else []
                rows.append(target.verify(ids[start + size :][:BLOCK], False).hidden)
                logits.append(target.head(rows[-1]))
                target.commit(BLOCK - 1)
        assert target.holds(target.length - SLACK // 2) and target.holds(SLACK) == (slack != SLACK)
        found.append((torch.cat(rows), torch.cat(logits)))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)

"""Drafter precisions: none changes a reply, the coarse ones give memory back, and ``auto`` keeps what pays."""

from __future__ import annotations

import gc
import weakref
from functools import cache

import pytest
import torch

from dflash_local.catalog import bundled
from dflash_local.drafters.dflash.fused import DFlashBlocks
from dflash_local.engine import drafter_precision, load_fused
from dflash_local.engine.drafter_precision import (
    ChosenPrecision,
    apply,
    choose_precision,
    frequent_ids,
    precision_of,
)
from dflash_local.engine.fused_runner import FusedRunner
from dflash_local.engine.load_pair import load
from dflash_local.engine.session import Session
from dflash_local.errors import UsageError
from dflash_local.kernels.choose import Chooser, Choosing
from dflash_local.kernels.quantized_weight import IntWeight
from dflash_local.kernels.timing import KernelTimer
from dflash_local.load_config import DRAFTER_PRECISIONS, DrafterPrecision, LoadConfig
from dflash_local.models.fused.linear import int8_copy
from dflash_local.request import SamplingParams
from tests.engine_sessions import ask, random_prompt

PAIRS = ("demo", "demo-hybrid")
FEW = 256  # of the toys' 1,024 ids
SAID = tuple(range(1000, 20, -7))  # ids from the most frequent one on
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=1.5, seed=5),
    SamplingParams(temperature=1.2, top_k=20, top_p=0.95, seed=6),
    SamplingParams(repetition_penalty=1.3),
)


def fresh(pair: str) -> Session:
    return load(bundled.find(pair), LoadConfig(dtype="float32", device="cpu", engine="fused"))


def drafter_of(session: Session) -> DFlashBlocks:
    assert isinstance(session.runner.proposer, DFlashBlocks)
    return session.runner.proposer


@cache
def alone(pair: str) -> tuple[list[int], ...]:
    """The target's own replies."""
    session = fresh(pair)
    return tuple(ask(session, random_prompt(13), 20, sampling=how, mode="ar").ids for how in SAMPLINGS)


# What a precision changes is the drafter, of which both pairs have the same kind: one drafts in the precision that all
# of its weights have, the other in the one of a part of the head. The rest is in the long tests.
WORDS = list(DRAFTER_PRECISIONS)
HERE = ((PAIRS[0], "8bit"), (PAIRS[1], "8bit-frequent"))
EACH = [
    pytest.param(pair, word, marks=() if (pair, word) in HERE else pytest.mark.slow) for pair in PAIRS for word in WORDS
]


@pytest.mark.parametrize(("pair", "word"), EACH)
def test_l1_no_drafter_precision_changes_a_reply(pair: str, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter_precision, "FREQUENT", FEW)
    session = fresh(pair)
    drafter = drafter_of(session)
    choose_precision(drafter, word, session.facts.block_size, said=SAID)
    for how, want in zip(SAMPLINGS, alone(pair), strict=True):
        reply = ask(session, random_prompt(13), 20, sampling=how, mode="dflash")
        assert reply.ids == want, (word, how)
        assert reply.finished.stats.acceptance_lengths, "it drafted"


@pytest.mark.parametrize("word", list(DRAFTER_PRECISIONS))
def test_a_drafter_precision_is_what_drafts_are_computed_with(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter_precision, "FREQUENT", FEW)
    session = fresh("demo")
    drafter = drafter_of(session)
    drafter.block(200)
    before, head = drafter.drafts.clone(), drafter.target.weights.head
    chosen = choose_precision(drafter, word, session.facts.block_size, said=SAID)
    drafter.block(200)
    side = DRAFTER_PRECISIONS[word]
    ids = torch.arange(before.shape[1]) if drafter.head_ids is None else drafter.head_ids.long()
    assert not chosen.notice
    assert {isinstance(matrix.weight, IntWeight) for matrix in drafter.matrices} == {side.weights == "8bit"}
    assert isinstance(drafter.head.weight, IntWeight) == (side.head == "8bit" or word == "8bit-frequent")
    assert ids.tolist() == (frequent_ids(SAID, 1024) if side.head == "frequent" else list(range(1024)))
    assert drafter.drafts.shape == (len(before), len(ids))
    change = float((drafter.drafts - before[:, ids]).abs().max() / before.abs().max())
    assert change < 1e-6 if "8bit" not in word else 1e-5 < change < 0.05
    assert isinstance(head.weight, torch.Tensor) and drafter.target.weights.head is head, "the target keeps its own"
    assert any(product is drafter.head for product in drafter.products) == (drafter.head is not head)


@pytest.mark.parametrize("coded", [False, True])
def test_a_frequent_head_drafts_what_the_whole_one_does_where_it_has_it(
    coded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also sampled, as noise is by id; of a head in codes, whose rows are taken out of them."""
    monkeypatch.setattr(drafter_precision, "FREQUENT", 512)
    drafter = drafter_of(fresh("demo"))
    if coded:
        drafter.stored_head = int8_copy(drafter.stored_head)
        drafter.use_head(drafter.stored_head)
    hidden = torch.randn(48, drafter.target.hidden_size, generator=torch.Generator().manual_seed(1))
    chooser, noise = Chooser.allocate(48, 1024, torch.device("cpu")), (torch.tensor([0.9]), torch.tensor([5]))

    def drafts() -> torch.Tensor:
        logits = drafter.head(hidden, torch.empty(48, drafter.head.out_features))
        out = torch.empty(2, 48, dtype=torch.int64)
        chooser.choose(logits, out[0], Choosing(head_ids=drafter.head_ids))
        chooser.choose(logits, out[1], Choosing((*noise, torch.tensor([7], dtype=torch.int32)), None, drafter.head_ids))
        return out

    whole = drafts()
    apply(drafter, DRAFTER_PRECISIONS["frequent"], SAID)
    few, kept = drafts(), torch.isin(whole, torch.tensor(frequent_ids(SAID, 1024)))
    assert torch.equal(few[kept], whole[kept])
    for found, there in zip(whole, kept, strict=True):
        assert 5 < int(there.sum()) < 43, "some are kept, some are not"
        assert (found[there] > 512).any(), "and these are not only the first"
    assert not torch.equal(whole[0], whole[1])


def test_frequent_ids_are_those_said_most_then_the_lowest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter_precision, "FREQUENT", 4)
    assert frequent_ids((), 9) == [0, 1, 2, 3]
    assert frequent_ids((8, 2, 99), 9) == [0, 1, 2, 8]
    assert frequent_ids((8, 7, 6, 5, 4), 9) == [5, 6, 7, 8]
    unknown = choose_precision(drafter_of(fresh("demo")), "frequent", 8)
    assert "its first 4 ids are drafted" in unknown.notice


def test_eight_bits_give_the_matrices_memory_back() -> None:
    session = fresh("demo")
    drafter = drafter_of(session)
    stored = [weakref.ref(matrix.weight) for matrix in drafter.matrices]
    before = sum(matrix.weight.nbytes for matrix in drafter.matrices)
    assert all(weight() is not None for weight in stored)
    apply(drafter, DRAFTER_PRECISIONS["8bit"])
    gc.collect()
    assert [weight() for weight in stored] == [None] * len(stored)
    assert sum(matrix.weight.nbytes for matrix in drafter.matrices) < before * 0.27  # a quarter of float32, and scales


HELD = 12345  # bytes of an allocator's peak


def times_of(monkeypatch: pytest.MonkeyPatch, *milliseconds: float | BaseException) -> list[str]:
    """Measurements in the order in which they are made: a full draft, a verify, then the candidates' drafts.

    Returns:
        what becomes of the allocator's peak: read before the first, begun anew behind the last.
    """
    left, seen = iter(milliseconds), list[str]()

    def peak(_device: torch.device) -> int:
        seen.append("read")
        return HELD

    def measured(_work: object, _replays: int) -> float:
        found = next(left)
        seen.append("measured")
        if isinstance(found, BaseException):
            raise found
        return found

    monkeypatch.setattr(drafter_precision, "replay_ms", measured)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", peak)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _device: seen.append("begun anew"))
    return seen


@pytest.mark.parametrize(
    ("milliseconds", "word"),
    [
        ((1.2, 4.8, 1.0, 0.95), "8bit-head"),  # the second step saves less than its share
        ((1.2, 4.8, 1.15, 1.0), "8bit"),  # the first step alone did not pay, both do
        ((1.2, 4.8, 1.15, 1.1), "full"),
    ],
)
def test_auto_keeps_what_saves_its_share_of_the_cycle(
    milliseconds: tuple[float, ...], word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = fresh("demo-hybrid")
    drafter = drafter_of(session)
    stored = [matrix.weight for matrix in drafter.matrices]
    seen = times_of(monkeypatch, *milliseconds)
    chosen = drafter_precision._measured(drafter, session.facts.block_size, lambda text, part: None, KernelTimer())
    assert (chosen.name, chosen.precision) == (word, DRAFTER_PRECISIONS[word])
    assert chosen.draft_ms == dict(zip(("full", "8bit-head", "8bit"), (milliseconds[0], *milliseconds[2:])))
    assert chosen.cycle_ms == 6.0 and chosen.peak_before == HELD
    assert seen == ["read", *["measured"] * len(milliseconds), "begun anew"], "what was tried is in no peak"
    assert chosen.gain == pytest.approx((1.2 - chosen.draft_ms[word]) / 6.0)
    assert (word in chosen.notice) == (word != "full")
    assert isinstance(drafter.head.weight, IntWeight) == (DRAFTER_PRECISIONS[word].head == "8bit")
    if word != "8bit":
        assert all(matrix.weight is weight for matrix, weight in zip(drafter.matrices, stored, strict=True))
    want = alone("demo-hybrid")[0]
    assert ask(session, random_prompt(13), 20).ids == want, "what was measured with is forgotten"


@pytest.mark.parametrize(("at", "word"), [(2, "full"), (3, "8bit-head")])
def test_auto_stays_with_what_fits(at: int, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = drafter_of(fresh("demo"))
    milliseconds: list[float | BaseException] = [1.2, 4.8, 1.0, 0.7]
    milliseconds[at] = torch.OutOfMemoryError("no room")
    times_of(monkeypatch, *milliseconds)
    chosen = drafter_precision._measured(drafter, 8, lambda text, part: None, KernelTimer())
    assert chosen.name == word and "no room" in chosen.notice
    assert not any(isinstance(matrix.weight, IntWeight) for matrix in drafter.matrices)
    assert isinstance(drafter.head.weight, IntWeight) == (word == "8bit-head")


@pytest.mark.parametrize(("word", "left"), [("8bit-head", "full"), ("8bit", "8bit-drafter")])
def test_a_copy_of_the_head_gives_way_to_the_context(word: str, left: str, monkeypatch: pytest.MonkeyPatch) -> None:
    session = fresh("demo")
    drafter, runner = drafter_of(session), session.runner
    assert isinstance(runner, FusedRunner)
    choose_precision(drafter, word, session.facts.block_size)
    runner.drafter_precision = word
    faults = [torch.OutOfMemoryError("no room")] * 3

    def reserve(_runner: FusedRunner) -> None:
        if faults:
            raise faults.pop()

    monkeypatch.setattr(load_fused, "reserve", reserve)
    with pytest.raises(torch.OutOfMemoryError):
        load_fused._reserve(runner, word)  # asked for by name
    assert runner.drafter_precision == word and isinstance(drafter.head.weight, IntWeight)
    with pytest.raises(torch.OutOfMemoryError):
        load_fused._reserve(runner, "auto")  # without the copy, too
    choose_precision(drafter, word, session.facts.block_size)
    runner.drafter_precision = word
    faults.append(torch.OutOfMemoryError("no room for both"))
    load_fused._reserve(runner, "auto")
    assert runner.drafter_precision == left and drafter.head is drafter.target.weights.head
    assert {isinstance(matrix.weight, IntWeight) for matrix in drafter.matrices} == {
        DRAFTER_PRECISIONS[left].weights == "8bit"
    }


def test_auto_is_full_where_nothing_can_be_measured() -> None:
    drafter = drafter_of(fresh("demo"))
    chosen = choose_precision(drafter, "auto", 8)
    assert chosen == ChosenPrecision("full", {}) and chosen.precision == DrafterPrecision()
    assert chosen.gain == 0.0 and chosen.notice == ""
    assert drafter.head is drafter.target.weights.head


def test_words_are_read_or_refused_by_name() -> None:
    assert precision_of("auto", 1024) is None
    assert precision_of("frequent", drafter_precision.FREQUENT + 1) == DrafterPrecision("full", "frequent")
    assert all(precision_of(word, 10**6) == precision for word, precision in DRAFTER_PRECISIONS.items())
    with pytest.raises(UsageError, match="--drafter-precision '4bit' is unknown"):
        LoadConfig(drafter_precision="4bit")
    for word in ("frequent", "8bit-frequent"):
        with pytest.raises(UsageError, match="65,536 ids is not larger than 65,536"):
            precision_of(word, drafter_precision.FREQUENT)

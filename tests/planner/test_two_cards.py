"""Layers over two GPUs: the split that fills both alike, and what each of the two holds."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="pairs by their shapes come from the benchmark, which needs torch")

from benchmarks.random_checkpoint import named_pair  # noqa: E402
from dflash_local.load_config import LoadConfig  # noqa: E402
from dflash_local.planner import fused_memory  # noqa: E402
from dflash_local.planner.ledger import GIB, Ledger  # noqa: E402
from dflash_local.planner.load import Load  # noqa: E402
from dflash_local.planner.machine import Machine, named  # noqa: E402
from dflash_local.planner.plan import plan  # noqa: E402
from dflash_local.planner.two_cards import even_split, split_of  # noqa: E402


def two(*free: float) -> Machine:
    cards = tuple(round(each * GIB) for each in free)
    return Machine("2 GPUs", "cuda", sum(cards), sum(cards), "", "balanced", cards=cards)


def lines(book: Ledger) -> Counter[str]:
    return Counter({line.name: line.bytes or 0 for line in book.lines})


@pytest.mark.parametrize("name", ["qwen3.5-9b", "qwen3.5-35b-a3b", "qwen3.6-27b"])
@pytest.mark.parametrize("free", [(24, 24), (16, 12), (12, 32)])
def test_no_other_split_fills_the_fuller_card_less(name: str, free: tuple[int, int]) -> None:
    pair = named_pair(name, "int4-g128")
    load = Load.of("cuda", LoadConfig(dtype="bfloat16"), 8192, pair.config.block_size)
    found = even_split(pair.model, pair.config, load, free)
    every = (split_of(pair.model, pair.config, load, layers) for layers in range(1, pair.model.num_layers))
    assert max(found.fullness(free)) == min(max(each.fullness(free)) for each in every)


def test_both_cards_hold_what_one_would_and_little_more() -> None:
    pair = named_pair("qwen3.5-35b-a3b", "int4-g128")
    load = Load.of("cuda", LoadConfig(dtype="bfloat16"), 32_768, pair.config.block_size)
    whole, split = (
        fused_memory.ledger(pair.model, pair.config, load),
        split_of(pair.model, pair.config, load, 17),
    )
    once, both = lines(whole), lines(split.together())
    for shared in ("head", "drafter weights", "drafter KV", "target KV", "recurrent state", "state snapshots"):
        assert both[shared] == once[shared], shared
    spare = 6 * pair.model.hidden_size  # an embedding of one id and a norm: sizes of a target of the front alone
    assert 0 <= both["target weights"] - once["target weights"] <= spare
    assert sum(split.needs) - (whole.total or 0) < 1.5 * GIB


def test_two_cards_hold_what_neither_of_them_does() -> None:
    pair = named_pair("qwen3.6-27b", "int4-g128")
    config = LoadConfig(context=32_768)
    assert not plan(pair.model, pair.config, named(None, 16), config).fits
    found = plan(pair.model, pair.config, two(15.5, 11.5), config)
    assert found.fits and found.engine == "fused" and "layers on the second GPU" in found.ledger.lines[0].note
    assert all(need <= free for need, free in zip(found.ledger.cards, two(15.5, 11.5).cards, strict=True))
    short = plan(pair.model, pair.config, two(9, 9), config)
    assert not short.fits and short.lacking > 0 and "too little" in short.reason
    # A card that is full is not made up for by the room of the other one.
    lopsided = plan(pair.model, pair.config, two(3, 60), config)
    assert not lopsided.fits and lopsided.lacking > 0 and lopsided.machine.free > (lopsided.ledger.total or 0)
    of_four = plan(pair.model, pair.config, replace(two(15.5, 11.5, 8, 8), name="4 GPUs"), config)
    assert of_four.fits and of_four.ledger.cards == found.ledger.cards and of_four.machine.name == "2 of 4 GPUs"

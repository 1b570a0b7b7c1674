"""Layers over two GPUs: the split that fills both alike, and what each of the two holds."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="pairs by their shapes come from the benchmark, which needs torch")

from benchmarks.random_checkpoint import named_pair  # noqa: E402
from dflash_local.app.fitting import too_big  # noqa: E402
from dflash_local.load_config import LoadConfig  # noqa: E402
from dflash_local.planner import fused_memory  # noqa: E402
from dflash_local.planner.card_probe import CardProbe, LinkProbe, crossing_us  # noqa: E402
from dflash_local.planner.ledger import GIB, Ledger  # noqa: E402
from dflash_local.planner.load import Load  # noqa: E402
from dflash_local.planner.machine import Machine, named  # noqa: E402
from dflash_local.planner.plan import Plan, plan  # noqa: E402
from dflash_local.planner.speed import Prediction, predict  # noqa: E402
from dflash_local.planner.two_cards import even_split, split_of  # noqa: E402


def two(*free: float, card: str = "a card") -> Machine:
    first, *rest = (Machine(card, "cuda", round(each * GIB), round(each * GIB), "") for each in free)
    return replace(first, others=tuple(rest)).together()


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


@pytest.mark.parametrize("plain", [range(8), range(56, 64)])
def test_layers_that_are_stored_otherwise_by_number_stay_those(plain: range) -> None:
    pair = named_pair("qwen3.6-27b", "int4-g128")
    stored = pair.model.quantization
    assert stored is not None
    names = (*stored.names, *((f"model.layers.{layer}", None) for layer in plain))
    model = replace(pair.model, quantization=replace(stored, names=names))
    load = Load.of("cuda", LoadConfig(dtype="bfloat16"), 8192, pair.config.block_size)
    once, split = fused_memory.ledger(model, pair.config, load), split_of(model, pair.config, load, 32)
    sizes = [lines(each)["target weights"] for each in (once, split.together(), split.home, split.front)]
    assert 0 <= sizes[1] - sizes[0] <= 6 * model.hidden_size
    assert sizes[2] > sizes[3] * 1.5 if plain[0] else sizes[3] > sizes[2] * 1.1  # the head is at home


def test_two_cards_hold_what_neither_of_them_does() -> None:
    pair = named_pair("qwen3.6-27b", "int4-g128")
    config = LoadConfig(context=32_768)
    assert not plan(pair.model, pair.config, named(None, 16), config).fits
    found = plan(pair.model, pair.config, two(15.5, 11.5), config)
    assert found.fits and found.engine == "fused" and "layers on the second GPU" in found.ledger.lines[0].note
    assert all(need <= free for need, free in zip(found.ledger.cards, two(15.5, 11.5).free_of_cards, strict=True))
    short = plan(pair.model, pair.config, two(9, 9), config)
    assert not short.fits and short.lacking > 0 and "too little" in short.reason
    # A card that is full is not made up for by the room of the other one.
    lopsided = plan(pair.model, pair.config, two(3, 60), config)
    assert not lopsided.fits and too_big(lopsided) and lopsided.machine.free > (lopsided.ledger.total or 0)
    assert re.search(r"of that \d\.\d GiB on a card, which has 3\.0 GiB free: \d\.\d GiB too little", lopsided.reason)
    of_four = plan(pair.model, pair.config, two(15.5, 11.5, 8, 8), config)
    assert of_four.fits and of_four.ledger.cards == found.ledger.cards and of_four.machine.name == "2 of 4 x a card"


def predicted(found: Plan, where: Machine) -> Prediction | None:
    pair = named_pair("qwen3.6-27b", "int4-g128")
    return predict(replace(found, machine=where), pair.model, pair.config)


def on_two(where: Machine) -> Plan:
    pair = named_pair("qwen3.6-27b", "int4-g128")
    return plan(pair.model, pair.config, where, LoadConfig(context=8192))


H100 = "NVIDIA H100 80GB HBM3"
MEASURED = CardProbe(H100, 3103.0, 9.14, 1.03, LinkProbe(H100, 20.0, 70.0))


@pytest.mark.parametrize(
    ("card", "probe", "us", "words"),
    [
        ("NVIDIA H200", None, 29.7, "30 us to the other card and back by peer copies, as between two NVIDIA H200"),
        ("NVIDIA GeForce RTX 4090", None, 57.9, "58 us to the other card and back through host memory, as between"),
        (H100, MEASURED, 20.0, "by peer copies, measured here"),
        (H100, replace(MEASURED, link=LinkProbe(H100, None, 70.0)), 70.0, "through host memory, measured here"),
        (H100, replace(MEASURED, link=LinkProbe("another", 20.0, 70.0)), 29.7, "as between two NVIDIA H200"),
    ],
)
def test_two_like_cards_are_one_and_the_way_there_and_back(
    card: str, probe: CardProbe | None, us: float, words: str
) -> None:
    where = two(30, 30, card=card)
    where = replace(where, cards=tuple(replace(each, probe=probe) for each in where.cards))
    found = on_two(where)
    both, one = predicted(found, where), predicted(found, where.cards[0])
    assert both is not None and one is not None and words in both.basis and words not in one.basis
    for there, here in zip(both.times, one.times, strict=True):
        assert there.cycle_ms is not None and here.cycle_ms is not None
        assert there.prompt_ms == pytest.approx(here.prompt_ms)
        passes = [(there.step_ms, here.step_ms), (there.cycle_ms, here.cycle_ms)]
        passes += [(slow[1], fast[1]) for slow, fast in zip(there.shorter, here.shorter, strict=True)]
        assert len(passes) > 3 and all(slow - fast == pytest.approx(us / 1e3) for slow, fast in passes)


@pytest.mark.parametrize("names", [("RTX 3090", "RTX 5060 Ti"), ("RTX 5060 Ti", "RTX 3090")])
def test_of_two_unlike_cards_each_runs_its_layers_at_its_own_speed(names: tuple[str, str]) -> None:
    home, away = (named(name, None) for name in names)
    where = replace(home, others=(away,)).together()
    found = on_two(where)
    both, at_home, there = (predicted(found, each) for each in (where, home, away))
    assert both is not None and at_home is not None and there is not None
    assert all(f"{name} scaled by data sheets" in both.basis for name in names)
    pair = named_pair("qwen3.6-27b", "int4-g128")
    load = Load.of("named", found.load, 8192, pair.config.block_size)
    layers = even_split(pair.model, pair.config, load, where.free_of_cards).layers / pair.model.num_layers
    step, *alone = (each.times[0].step_ms for each in (both, at_home, there))
    moved = (step - crossing_us(*names, None)[0] / 1e3 - alone[0]) / (alone[1] - alone[0])
    assert 0.8 * layers < moved < 0.9 * layers, "the head stays at home, a seventh of the bytes"
    prompts = [each.times[0].prompt_ms or 0.0 for each in (both, at_home, there)]
    assert prompts[0] == pytest.approx(prompts[1] + layers * (prompts[2] - prompts[1]), rel=0.02)


def test_where_a_card_is_not_known_no_speed_is_predicted() -> None:
    found = on_two(two(30, 30))
    known = named("RTX 3090", None)
    unknown = named("RTX 3060", None)
    assert found.fits and predicted(found, found.machine) is None
    for first, second in ((known, unknown), (unknown, known)):
        assert predicted(found, replace(first, others=(second,)).together()) is None

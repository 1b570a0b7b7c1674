"""What is recommended of a pair for a card: what fits, in the order of a preference, and what the better ones lack."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from dflash_local.app.fitting import shapes
from dflash_local.app.resolve import Choice, of_row
from dflash_local.catalog import registry
from dflash_local.catalog.row import Repo, Row
from dflash_local.drafters.drafter import Drafter
from dflash_local.load_config import LoadConfig
from dflash_local.planner.acceptance_record import Count
from dflash_local.planner.machine import named
from dflash_local.planner.plan import ROOMY, plan
from dflash_local.planner.recommend import Preference, Recommendation, Weights, recommend
from dflash_local.planner.room import more_context, room_made
from dflash_local.planner.speed import ExpectedAcceptance, acceptance


@cache
def published(name: str) -> tuple[list[Weights], Drafter | None, Row]:
    row = registry.load().find(name)
    assert row is not None
    known = shapes(of_row(row), None)
    assert known is not None
    found = [Weights(known.target)]
    for variant in row.variants:
        own = shapes(Choice(variant.repo, Repo(variant.repo, variant.revision), None, row), None)
        if own is not None:
            found.append(Weights(own.target, variant))
    return found, known.drafter, row


def best(name: str, gpu: str | None, gib: float | None, preference: Preference = "balanced") -> Recommendation:
    weights, drafter, row = published(name)
    lengths = None if drafter is None else acceptance(row.published, drafter.block_size)
    return recommend(weights, drafter, named(gpu, gib), None, preference, lengths)


@pytest.mark.parametrize(
    ("name", "gib", "fidelity"),
    [
        ("gpt-oss-20b", 16, "as trained"),
        ("qwen3.5-9b", 12, "published in 4 bits"),
        ("qwen3.6-27b", 24, "published in 4 bits"),
        ("qwen3.6-35b-a3b", 24, "published in 4 bits"),
        ("qwen3.5-9b", 24, "as trained"),
        ("qwen3.6-27b", 48, "published in 8 bits"),
    ],
)
def test_the_cards_that_people_have_run_what_they_should(name: str, gib: float, fidelity: str) -> None:
    found = best(name, None, gib)
    assert found.best is not None and found.best.fidelity == fidelity and found.best.plan.engine == "fused"
    assert (found.best.plan.context or 0) >= 8192


@pytest.mark.parametrize("preference", ["balanced", "quality", "speed", "context"])
def test_what_we_round_to_four_bits_comes_behind_every_published_file(preference: Preference) -> None:
    found = best("qwen3.5-9b", "RTX 4080", None, preference)
    names = [option.weights.name for option in found.fitting if (option.plan.context or 0) >= 8192]
    assert names[-1] == "int4, rounded at load" and len(names) > 2


def test_preferences_differ_where_they_should() -> None:
    quality, speed, context = (
        best("qwen3.5-9b", "RTX 4090", None, each).best for each in ("quality", "speed", "context")
    )
    assert quality is not None and speed is not None and context is not None
    assert quality.fidelity == "as trained"
    assert speed.prediction is not None and quality.prediction is not None
    assert speed.prediction.times[0].step_ms < quality.prediction.times[0].step_ms
    assert (context.plan.context or 0) > (quality.plan.context or 0)


def test_a_published_range_counts_by_its_least_where_speed_is_preferred() -> None:
    """Weights with replies of this machine, between the two ends of the others' range."""
    weights, drafter, _ = published("qwen3.5-9b")
    card = named("RTX 4090", None)
    lengths = ExpectedAcceptance(4.0, 8.0, "a card")
    first, *others = recommend(weights, drafter, card, None, "speed", lengths).fitting
    source = first.weights.target.source
    other = next(each for each in others if each.weights.target.source != source and not each.coded_kv)
    assert first.prediction is not None and other.prediction is not None and drafter is not None
    ms, other_ms = first.prediction.times[0].cycle_ms, other.prediction.times[0].cycle_ms
    assert ms is not None and other_ms is not None
    mean = 6.0 * other_ms / ms
    record = {other.weights.target.source: Count(200 * mean, {drafter.block_size: 200})}
    found = recommend(weights, drafter, card, None, "speed", lengths, (), record).best
    assert found is not None and found.weights.target.source == other.weights.target.source


def test_the_next_better_weights_say_what_they_lack() -> None:
    found = best("qwen3.6-27b", None, 24)
    assert found.best is not None and found.next_better is not None
    assert (found.best.fidelity, found.next_better.fidelity) == ("published in 4 bits", "rounded to 8 bits")
    assert not found.next_better.fits
    assert "too little" in found.next_better.plan.reason


SAME = {"drafter_precision": "8bit-drafter", "offload": "all"}


@pytest.mark.parametrize(
    ("asked", "options"),
    [
        ({}, "--drafter-precision 8bit-drafter --offload all"),
        ({"drafter_precision": "8bit-drafter"}, "--offload all"),
        (SAME, "--kv-cache int8"),
        ({**SAME, "kv_cache": "int8"}, None),
        ({"context": 8192}, None),
    ],
)
def test_more_context_is_brought_by_the_options_that_are_named(asked: dict[str, Any], options: str | None) -> None:
    weights, drafter, _ = published("qwen3.5-27b")
    where = named(None, 24)
    found = recommend(weights, drafter, where, LoadConfig(**asked)).best
    assert found is not None
    more = more_context(found)
    assert (more and more.options) == options
    if more is not None:
        words = more.options.removeprefix("--").replace(" --", " ").split()
        change: dict[str, Any] = {name.replace("-", "_"): value for name, value in zip(words[::2], words[1::2])}
        wider = plan(found.weights.target, drafter, where, replace(found.config, **change))
        assert wider.fits and wider.context == (found.plan.context or 0) + more.tokens
        assert ("changes replies" in more.cost) == ("kv_cache" in change)


def test_a_format_that_was_asked_for_leaves_only_that() -> None:
    weights, drafter, _ = published("qwen3.5-9b")
    found = recommend(weights, drafter, named(None, 24), LoadConfig(quantize="int8"))
    assert [option.weights.name for option in (*found.fitting, *found.rest)] == ["int8, rounded at load"]
    assert found.best is not None and found.best.arguments == "--quantize int8"


def test_what_is_published_in_as_few_bits_goes_before_rounding_at_load() -> None:
    """However much context rounding leaves, and whatever is preferred: it is a download of 16-bit weights."""
    weights, drafter, _ = published("qwen3.5-35b-a3b")
    weights = [each for each in weights if each.variant is None or each.name == "gptq-int8"]
    for preference in ("balanced", "quality", "speed", "context"):
        found = recommend(weights, drafter, named("RTX A6000", 40), None, preference)
        names = [option.weights.name for option in found.fitting]
        assert names[0] == "gptq-int8" and names[-1] == "int4, rounded at load"
        rounded = next(option for option in found.fitting if option.weights.name == "int8, rounded at load")
        assert (rounded.plan.context or 0) > (found.fitting[0].plan.context or 0)


def test_a_context_of_32768_tokens_goes_before_more_bits_and_more_bits_before_a_longer_one() -> None:
    small, large = best("qwen3.5-9b", None, 12), best("qwen3.5-9b", None, 24)
    assert small.best is not None and (small.best.plan.context or 0) >= ROOMY and small.best.weights.bits == 4
    assert any(each.weights.bits == 8 and (each.plan.context or 0) < ROOMY for each in small.fitting)
    assert large.best is not None and (large.best.plan.context or 0) >= ROOMY and large.best.weights.bits == 16
    assert any((each.plan.context or 0) > (large.best.plan.context or 0) for each in large.fitting)


@pytest.mark.parametrize(
    ("name", "gpu", "asked", "least"),
    [
        ("qwen3.8-27b", "RTX 4090", {}, 57_000),
        ("qwen3.8-27b", "RTX 4090", {"kv_cache": "int8"}, 128_000),
        ("qwen3.6-35b-a3b", "RTX 4090", {}, 130_000),
        ("qwen3.5-9b", "RTX 4090", {"dtype": "bfloat16"}, 85_000),
        ("qwen3.5-9b", "RTX 4070 Ti", {"quantize": "int4"}, 64_000),
    ],
)
def test_a_long_context_is_reached_by_all_that_changes_no_reply(
    name: str, gpu: str, asked: dict[str, Any], least: int
) -> None:
    """And by keys and values in 8 bits where they are asked for."""
    weights, drafter, _ = published(name)
    config = LoadConfig(**asked)
    longest = recommend(weights, drafter, named(gpu, None), config, "context")
    fitting = [each for each in longest.fitting if each.weights.fidelity == 0 or "dtype" not in asked]
    own = [each for each in fitting if each.coded_kv is ("kv_cache" in asked)]
    found = max(own, key=lambda each: each.plan.context or 0)
    assert (found.plan.context or 0) >= least
    # What it says loads the same.
    again = plan(found.weights.target, drafter, named(gpu, None), found.config)
    assert again.fits and again.context == found.plan.context
    for each in room_made(found.plan.load):
        assert each.option in found.arguments

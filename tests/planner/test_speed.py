"""Predicted steps and cycles against recorded ones of an H200, what a prediction rests on, and where there is none."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import fields, replace

import pytest
from msgspec import structs

pytest.importorskip("numpy")
from benchmarks import speed_table
from benchmarks.speed_table import Measured
from dflash_local.catalog.row import Kind, Published, Row
from dflash_local.config.features import ModelConfig
from dflash_local.drafters.dspark.layout import DSparkConfig
from dflash_local.layout.cycle import prompt_chunk
from dflash_local.layout.part_layout import EngineSpec
from dflash_local.layout.prompt_work import prompt_work
from dflash_local.load_config import LoadConfig
from dflash_local.planner import speed
from dflash_local.planner.card_probe import SAME, Scale, recorded_probe
from dflash_local.planner.cards import find_matrix_rate
from dflash_local.planner.machine import Machine, named
from dflash_local.planner.plan import Plan, plan
from dflash_local.planner.speed import (
    ExpectedAcceptance,
    LaunchTime,
    Times,
    acceptance,
    predict,
    tables,
    times_of,
    typical,
)

GIB = 2**30


@pytest.fixture(scope="module")
def measured() -> dict[str, Measured]:
    return {each.name: each for each in speed_table.records()}


def h200() -> Machine:
    return Machine("NVIDIA H200", "cuda", 140 * GIB, 139 * GIB, "", "cuda:0")


def planned(each: Measured, machine: Machine, **options: object) -> Plan:
    config = LoadConfig(context=4096, drafter_precision="8bit", **options)  # type: ignore[arg-type]
    return plan(each.target, each.drafter, machine, config)


def test_the_bytes_of_a_pass_are_those_that_were_counted_when_it_was_measured(measured: dict[str, Measured]) -> None:
    """All but recurrent states, biases and norms, which no product reads: below 4 %."""
    for each in measured.values():
        traffic, context = each.traffic, each.at["context"]
        found: float = sum(product.bytes * count for product, count in traffic.products.items())
        found += sum(
            experts.product.bytes * experts.distinct(1) * layers for experts, layers in traffic.experts.items()
        )
        found += traffic.context_bytes(context)
        assert 0.96 < found / each.at["ar_step"]["bytes"] <= 1, each.name


def test_predictions_lie_near_what_was_measured(measured: dict[str, Measured]) -> None:
    (table,) = tables()
    errors = {}
    for each in measured.values():
        found = times_of(each.target, each.drafter, each.load, table, SAME)
        assert found is not None and found.cycle_ms is not None and found.rows == each.drafter.block_size
        errors[each.name, "step"] = found.step_ms / each.at["ar_step"]["ms"] - 1
        for rows, cycle in each.at["cycle"].items():
            predicted = found.mixed({int(rows): 1}).cycle_ms
            errors[each.name, rows] = (predicted or 0.0) / cycle["ms"] - 1
    worst = {error: case for case, error in errors.items() if abs(error) > 0.125}
    assert {case[0] for case in worst.values()} <= {"qwen35_122b_a10b_int4_g128_uniform"}, worst
    assert max(map(abs, errors.values())) < 0.17


def test_a_mix_of_cycles_is_their_mean() -> None:
    one = Times(1024, 4.0, 16.0, 16, ((4, 6.0), (8, 8.0)))
    assert one.mixed({16: 3}) == one
    found = one.mixed({1: 5, 4: 2, 6: 2, 16: 1})
    assert found.rows == pytest.approx((5 + 8 + 12 + 16) / 10)
    assert found.cycle_ms == pytest.approx((20 + 12 + 14 + 16) / 10) and found.step_ms == 4.0
    assert one.mixed({2: 1, 99: 1}).cycle_ms == pytest.approx(11.0), "another drafter's, outside of what is known"
    alone = Times(1024, 4.0, None, 1)
    assert alone.mixed({4: 1}) == alone


def test_a_card_without_a_probe_is_predicted_by_data_sheets(measured: dict[str, Measured]) -> None:
    """Memory four times as slow, decoding about as fast: what waits for memory takes four times as long."""
    each = measured["qwen35_9b_int4_g128"]
    found = predict(planned(each, named("RTX 4090", None)), each.target, each.drafter)
    assert found is not None and "data sheets" in found.basis and "never measured" in found.basis
    h200_ms, ms = each.at["ar_step"]["ms"], found.times[0].step_ms
    assert 2.3 * h200_ms < ms < 4.76 * h200_ms


def test_a_probe_of_the_card_is_taken_before_the_recorded_one(measured: dict[str, Measured]) -> None:
    each, recorded = measured["qwen3_8b_auto"], recorded_probe("NVIDIA H200")
    assert recorded is not None
    slow = replace(h200(), probe=replace(recorded, read_gb_s=recorded.read_gb_s / 2))
    full, half = (predict(planned(each, where), each.target, each.drafter) for where in (h200(), slow))
    assert full is not None and half is not None
    assert 1.7 < half.times[0].step_ms / full.times[0].step_ms < 2 and "a probe of this card" in half.basis


def test_prompts_lie_near_what_was_measured() -> None:
    (table,) = tables()
    for each in speed_table.prompt_records():
        found = speed.prompt_ms(each.target, each.prompt["tokens"], table, each.scale, each.prompt["chunk"])
        assert abs(found / (1e3 * each.prompt["s"]) - 1) < 0.12, each


def test_experts_in_a_format_that_was_not_measured_count_as_those_of_int4(measured: dict[str, Measured]) -> None:
    (table,), target = tables(), measured["qwen35_35b_a3b_fp8_uniform"].target
    form = next(iter(prompt_work(target, 8192).experts))
    assert form not in table.prompt
    known = replace(table, prompt={**table.prompt, form: table.prompt["int4 g128"]})
    assert speed.prompt_ms(target, 8192, table, SAME) == speed.prompt_ms(target, 8192, known, SAME)


def test_a_slower_card_takes_longer_for_a_prompt_by_what_it_multiplies_and_by_what_it_reads(
    measured: dict[str, Measured],
) -> None:
    (table,) = tables()
    plain, coded, experts = (
        measured[name].target for name in ("qwen3_8b_auto", "qwen35_9b_int4_g128", "gpt_oss_20b_uniform")
    )

    def times(target: ModelConfig, **slower: float) -> float:
        one, other = (speed.prompt_ms(target, 8192, table, scale) for scale in (SAME, replace(SAME, **slower)))
        return other / one

    assert times(plain, matrix=2.0) == pytest.approx(2.0) and times(plain, bytes=2.0) == times(plain, work=2.0) == 1.0
    assert 1.0 < times(coded, bytes=2.0) < 1.2 < times(coded, matrix=2.0) < 2.0
    assert times(experts, work=2.0) > 1.6, "their codes take longer to decode than to read"
    assert find_matrix_rate("RTX 4090") == pytest.approx(165_000, rel=0.01)
    assert find_matrix_rate("RTX 6000 Ada Generation") == pytest.approx(364_000, rel=0.02)


def test_a_larger_chunk_of_a_prompt_decodes_less_often(measured: dict[str, Measured]) -> None:
    """The plan's chunk counts: codes are decoded once for each, and plain weights never."""
    names = "qwen3_8b_auto", "qwen35_9b_int4_g128", "gpt_oss_20b_uniform"
    plain, coded, experts = (measured[name].target for name in names)
    for target in (coded, experts):
        own, larger, largest = (prompt_work(target, 8192, chunk) for chunk in (None, 4096, 8192))
        times = 4096 // prompt_chunk(target, 8192)
        assert times > 1 and own.decoded == pytest.approx(times * larger.decoded)
        assert own.experts == pytest.approx({form: times * count for form, count in larger.experts.items()})
        assert largest.experts == larger.experts, "more than 4,369 rows go through gpt-oss' experts in two parts"
    assert prompt_work(plain, 8192, 8192) == prompt_work(plain, 8192)
    each = measured["qwen35_9b_int4_g128"]
    own_chunk, roomy = (
        predict(plan(each.target, each.drafter, h200(), load), each.target, each.drafter)
        for load in (LoadConfig(context=8192, prefill_chunk=2048), LoadConfig(context=8192))
    )
    assert own_chunk is not None and roomy is not None
    before, after = ([one.prompt_ms or 0.0 for one in found.times] for found in (own_chunk, roomy))
    assert after[0] == before[0] and after[1] < before[1], "a prompt of 1,024 tokens is one chunk of both"


def test_each_of_the_three_figures_of_a_probe_scales_its_part() -> None:
    """A format that the table's card decodes slower than it reads is not slowed by a slower memory alone."""
    assert SAME.of(0.3, 0.2) == 0.3
    assert Scale(1.4, 1.0, 1.0, 1.0).of(0.3, 0.2) == pytest.approx(0.3), "decoding is still the slower one"
    assert Scale(2.0, 1.0, 1.0, 1.0).of(0.3, 0.2) == pytest.approx(0.4), "reading is now"
    assert Scale(1.0, 2.0, 1.0, 1.0).of(0.3, 0.2) == pytest.approx(0.6)
    launch = LaunchTime(3.0, 0.3)
    assert launch.us(10, 0.2, Scale(1.0, 1.0, 2.0, 1.0)) == pytest.approx(2 * 3.0 + 10 * 0.3)


def test_the_table_is_the_one_that_the_records_give(measured: dict[str, Measured]) -> None:
    made = json.loads(json.dumps(speed_table.as_json(speed_table.fitted(list(measured.values())))))
    (kept,) = json.loads(speed_table.TABLE.read_text(encoding="utf-8"))["tables"]
    assert made == kept


def test_a_markov_head_is_read_for_each_draft(measured: dict[str, Measured]) -> None:
    each = next(one for one in measured.values() if one.drafter is not None)
    assert each.drafter is not None
    model, spec = each.target, EngineSpec("bfloat16", 4096, each.drafter.block_size)
    (table,) = tables()
    own = {part.name: getattr(each.drafter, part.name) for part in fields(each.drafter)}
    own["vocab_size"] = model.vocab_size
    times, traffic = [], []
    for rank in (256, 0):
        drafter = DSparkConfig(**own, markov_rank=rank, confidence_inputs=0)
        traffic.append(Counter(drafter.traffic(model, spec).products))
        times.append(times_of(model, drafter, each.load, table, SAME))
    ((product, count),) = (traffic[0] - traffic[1]).items()
    assert (product.bytes, count) == (model.vocab_size * 256 * 2, each.drafter.block_size - 1)
    slow, fast = times
    assert slow is not None and fast is not None and slow.cycle_ms is not None and fast.cycle_ms is not None
    least_ms = count * product.bytes * table.read / 1e9
    assert least_ms < slow.cycle_ms - fast.cycle_ms < 3 * least_ms


def test_a_longer_context_takes_longer_and_only_contexts_that_fit_are_told(measured: dict[str, Measured]) -> None:
    each = measured["qwen3_8b_auto"]
    found = predict(plan(each.target, each.drafter, h200(), LoadConfig(context=40960)), each.target, each.drafter)
    assert found is not None and [one.context for one in found.times] == [1024, 8192, 32_768]
    assert [one.step_ms for one in found.times] == sorted(one.step_ms for one in found.times)
    first = [one.prompt_ms or 0.0 for one in found.times]
    assert first[1] > 8 * first[0] and first[2] > 4 * first[1], "attention grows with the square"
    short = predict(plan(each.target, each.drafter, h200(), LoadConfig(context=512)), each.target, each.drafter)
    assert short is not None and [one.context for one in short.times] == [512]


@pytest.mark.parametrize(
    "machine",
    [
        Machine("CPU", "cpu", 64 * GIB, 60 * GIB, ""),
        replace(h200(), name="NVIDIA Some Card"),
        replace(h200(), kernels=False),
    ],
    ids=["a CPU", "an unknown card", "no kernels"],
)
def test_where_nothing_is_known_nothing_is_predicted(machine: Machine, measured: dict[str, Measured]) -> None:
    each = measured["qwen35_9b_int4_g128"]
    assert (
        predict(plan(each.target, each.drafter, machine, LoadConfig(context=4096)), each.target, each.drafter) is None
    )


def cell(
    length: float | None, block: int | None = 16, concurrency: int | None = 1, source: str = "a card", task: str = "a"
) -> Published:
    return Published(task, block, "v1", concurrency, length, None, None, source)


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ((), None),
        ((cell(None),), None),
        ((cell(6.4), cell(3.1, task="b"), cell(9.0, concurrency=8)), (3.1, 6.4)),
        ((cell(6.4), cell(2.0, block=8)), (6.4, 6.4)),
        ((cell(2.0, block=8), cell(3.0, block=10)), None),
    ],
)
def test_acceptance_is_what_is_published_for_single_requests(
    cells: tuple[Published, ...], expected: tuple[float, float] | None
) -> None:
    found = acceptance(cells, 16)
    assert (None if found is None else (found.low, found.high)) == expected
    assert found is None or found.source == "a card"


def row(name: str, kind: Kind, *cells: Published) -> Row:
    return Row(name, kind=kind, published=cells)


def test_typical_lengths_are_of_pairs_as_alike_as_there_are() -> None:
    """Of kind and generation, else of the kind, else of any with the same block; never of another block."""
    v2 = structs.replace(cell(9.0), generation="v2")
    rows = (
        row("a/a", "dflash", cell(4.0), cell(6.0, task="b")),
        row("b/b", "dflash", v2),
        row("c/c", "dspark", cell(2.0)),
    )

    def low_and_high(kind: Kind, block: int, generation: str | None) -> tuple[float, float] | None:
        found = typical(rows, kind, block, generation)
        assert found is None or found.source.startswith("typical of other pairs: ")
        return None if found is None else (found.low, found.high)

    assert low_and_high("dflash", 16, "v1") == (4.0, 6.0) and low_and_high("dflash", 16, "v2") == (9.0, 9.0)
    assert low_and_high("dflash", 16, None) == (4.0, 9.0) and low_and_high("dflash2", 16, "v1") == (2.0, 9.0)
    assert low_and_high("dflash", 8, "v1") is None


def test_tokens_per_second_follow_from_acceptance(measured: dict[str, Measured]) -> None:
    each = measured["qwen35_9b_bf16_beside"]
    found = predict(planned(each, h200()), each.target, each.drafter, ExpectedAcceptance(3.0, 6.0, "a card"))
    assert found is not None
    report = found.as_dict()
    first = report["at"][0]
    assert first["plain_tokens_per_s"] == pytest.approx(1e3 / first["step_ms"])
    assert first["drafted_tokens_per_s"] == pytest.approx([3e3 / first["cycle_ms"], 6e3 / first["cycle_ms"]])
    assert report["basis"] == "fitted to measurements of one NVIDIA H200 with random weights"

"""The measurement over random weights without kernels: whose bytes count, that nothing is left out, what is told."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from dflash_local.bench import random_report, random_run
from dflash_local.bench.baselines import Baseline
from dflash_local.bench.random_pair import build
from dflash_local.bench.random_report import Assumption, StatedAcceptance
from dflash_local.bench.random_run import Measures
from dflash_local.catalog.row import Published
from dflash_local.config.features import AttentionConfig
from dflash_local.errors import DoesNotFitError, UsageError
from dflash_local.load_config import LoadConfig
from dflash_local.planner.cards import DATA_SHEETS, find_bandwidth
from tests.bench.shapes import PLACE, tiny_dspark, tiny_mixture, tiny_pair
from tests.drafter_configs import decoder

MEASURES = Measures((40, 90), (1, 4, 8), 64)


def drafted_in(precision: str) -> LoadConfig:
    return LoadConfig(drafter_precision=precision)


def test_bytes_are_those_of_the_tensors_that_a_step_reads() -> None:
    pair = tiny_pair(hybrid=True)
    runner, _ = build(pair, 128, PLACE.device, PLACE.dtype, LoadConfig())
    target, drafter = runner.target, runner.proposer
    assert drafter is not None
    text, size = pair.facts.text_config, 4
    attending = sum(isinstance(layer.mixer, AttentionConfig) for layer in pair.model.layers)
    matrices = sum(p.weight.numel() for p in target.weights.products) + text["vocab_size"] * text["hidden_size"]
    row = 2 * attending * text["num_key_value_heads"] * text["head_dim"]
    states: Iterable[Any] = target.states.values()
    logged = sum(state.log.state.numel() for state in states)
    assert random_run.verify_bytes(target, 100, 8) == size * (matrices + 108 * row + logged)
    config = decoder(pair.config)
    whole = sum(torch.Size(one).numel() for name, one in config.tensors(pair.model.hidden_size).items() if len(one) > 1)
    fusion = config.hidden_size * len(config.taps) * pair.model.hidden_size
    keys = config.num_kv_heads * config.head_dim
    context_keys = 2 * config.num_layers * keys * config.hidden_size
    assert drafter.inject_bytes() == size * (fusion + context_keys)
    head = text["vocab_size"] * text["hidden_size"]
    seen = (24 + 8) + (100 + 8)  # the first layer has a window of 24, the second sees all
    assert drafter.block_bytes(100) == size * (whole - fusion + head + seen * 2 * keys)


def test_a_pair_is_built_with_the_chunk_of_its_load() -> None:
    runner, _ = build(tiny_pair(), 400, PLACE.device, PLACE.dtype, LoadConfig(prefill_chunk=256))
    assert runner.target.prefill_chunk == 256


@pytest.mark.parametrize("precision", ["full", "8bit"])
def test_a_markov_head_is_read_for_each_draft(precision: str) -> None:
    found = []
    for rank in (12, 0):
        runner, _ = build(tiny_dspark(rank), 128, PLACE.device, PLACE.dtype, drafted_in(precision))
        assert runner.proposer is not None and len(runner.proposer.drafts) == 7
        found.append(runner.proposer.block_bytes(100))
    assert found[0] - found[1] == 7 * 256 * 12 * 4
    measured = random_run.measure(
        tiny_dspark(), Measures((40,), (1, 8), 0, drafted_in(precision)), PLACE, lambda _text, _part: None
    )
    assert measured.at[0].draft.ms > 0 and set(measured.at[0].cycle) == {8}


def test_an_eight_bit_drafter_precision_reads_less_and_is_named() -> None:
    pair = tiny_pair()
    full = random_run.measure(pair, Measures((40,), (1, 8), 0, drafted_in("full")), PLACE, lambda _text, _part: None)
    coarse = random_run.measure(pair, Measures((40,), (1, 8), 0, drafted_in("8bit")), PLACE, lambda _text, _part: None)
    assert (full.drafter_precision, coarse.drafter_precision) == ("full", "8bit")
    assert coarse.at[0].draft.bytes < full.at[0].draft.bytes / 2
    assert coarse.at[0].step.bytes == full.at[0].step.bytes


@pytest.mark.parametrize("hybrid", [False, True])
def test_everything_is_measured_at_every_context(hybrid: bool) -> None:
    said: list[str] = []
    found = random_run.measure(tiny_pair(hybrid), MEASURES, PLACE, lambda text, _part: said.append(text))
    assert [at.context for at in found.at] == [40, 90]
    for at in found.at:
        assert set(at.verify) == {1, 4, 8} and set(at.cycle) == {4, 8}
        figures = [at.step, at.draft, at.inject, *at.verify.values(), *at.cycle.values()]
        assert all(one.ms > 0 and one.bytes > 0 for one in figures)
        assert at.cycle[8].bytes == at.draft.bytes + at.verify[8].bytes + at.inject.bytes
    assert found.bandwidth > 0 and found.prefill_s is not None and found.prefill_s > 0
    assert "a prompt of 64 tokens" in said and "cycles at 90 tokens" in said


def test_a_mixtures_rows_are_routed_as_is_said_and_their_experts_count() -> None:
    pair, found = tiny_mixture(), {}
    for routing in ("uniform", "correlated"):
        measures = Measures((40,), (1, 4, 8), 0, drafted_in("full"), routing)
        (at,) = random_run.measure(pair, measures, PLACE, lambda _text, _part: None).at
        assert set(at.experts) == {1, 4, 8} and at.experts[1] == 4
        of_expert = pair.model.num_layers * 3 * 16 * 64 * 4
        assert at.verify[8].bytes - at.verify[4].bytes > of_expert * (at.experts[8] - at.experts[4]) > 0
        lines = random_report.random_lines(pair, measures, PLACE, _found(at), Assumption("given", ()), ())
        assert any(routing in line for line in lines) and any(f"{at.experts[8]:.1f} at 8" in line for line in lines)
        found[routing] = at.experts
    assert found["correlated"][4] <= round(4 * 4**0.75) and found["correlated"][8] <= round(4 * 8**0.75)
    assert found["uniform"][4] > found["correlated"][4] and found["uniform"][8] > found["correlated"][8]
    assert 32 * (1 - (28 / 32) ** 8) == pytest.approx(found["uniform"][8], rel=0.15)


def _found(at: random_run.AtContext) -> random_run.RandomFigures:
    return random_run.RandomFigures(1.0, 1.0, (at,), None, None, {}, "full", ())


def test_memory_that_runs_out_all_the_same_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **_named: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(random_run, "build", full)
    with pytest.raises(DoesNotFitError, match="ran out"):
        random_run.measure(tiny_pair(), MEASURES, PLACE, lambda _text, _part: None)


def test_a_cpu_is_refused() -> None:
    with pytest.raises(UsageError, match="needs a CUDA GPU"):
        random_run.gpu("cpu", "auto")


def _cell(task: str, block: int | None, length: float | None, concurrency: int = 1) -> Published:
    return Published(task, block, "v1", concurrency, length, None, None, "card of X: one GPU")


def test_lengths_are_given_else_published_else_assumed() -> None:
    cells = [_cell("a", 16, 7.0), _cell("b", 8, 5.0), _cell("c", 8, 4.0), _cell("d", 8, None), _cell("e", 8, 6.0, 32)]
    published = random_report.assumption((), cells, 8)
    assert published.origin == "published" and [each.task for each in published.lengths] == ["c", "b"]
    assert published.rows == (8,) and not published.of(4)
    assert random_report.assumption((), [_cell("a", None, 3.0)], 8).rows == (8,)
    assert random_report.assumption((3.0,), cells, 8) == Assumption("given", (StatedAcceptance(3.0),))
    assumed = random_report.assumption((), [], 5)
    assert assumed.origin == "assumed" and [each.length for each in assumed.lengths] == [2.0, 4.0]


def test_the_report_tells_measured_from_projected() -> None:
    pair = tiny_pair()
    found = random_run.measure(pair, MEASURES, PLACE, lambda _text, _part: None)
    assert found.notices == ()
    found = replace(found, notices=("a generic product is used",))
    stated = Assumption("given", (StatedAcceptance(3.0), StatedAcceptance(7.5)))
    others = (Baseline("transformers, eager", 40, 2.5), Baseline("reference engine", 40, reason="it broke"))
    report = random_report.random_report(pair, MEASURES, PLACE, found, stated, others)
    json.dumps(report, allow_nan=False)
    measured, projected = report["measured"], report["projected"]
    assert report["weights"] == "random" and report["generation"] is None and report["machine"] and report["versions"]
    assert measured["at"][1]["cycle"]["8"]["ms"] == found.at[1].cycle[8].ms
    assert measured["at"][0]["ar_step"]["of_specified_bandwidth"] is None, "no specification is known of a CPU"
    cycles = [(one["rows"], one["acceptance_length"]) for one in projected[0]["cycles"]]
    assert cycles == [(4, 3.0), (8, 3.0), (8, 7.5)], "no cycle accepts more than it verifies"
    assert projected[0]["cycles"][2]["tokens_per_s"] == pytest.approx(7.5 / found.at[0].cycle[8].ms * 1e3)
    lines = random_report.random_lines(pair, MEASURES, PLACE, found, stated, others)
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    for words in (
        "random weights of its true shapes",
        "generation unknown",
        "specified: unknown",
        "given on the command line",
        "reference engine: not measured, it broke",
        "2.50 ms a token",
        "acceptance are not",
        "a generic product is used",
    ):
        assert words in text


def test_a_specification_is_of_the_card_itself() -> None:
    assert find_bandwidth("NVIDIA H200") == 4800
    assert find_bandwidth("NVIDIA H100 80GB HBM3") == 3350 and find_bandwidth("NVIDIA H100 PCIe") == 2000
    assert find_bandwidth("NVIDIA GeForce RTX 4090") == 1008
    assert find_bandwidth("NVIDIA GeForce RTX 4090 Laptop GPU") is None
    assert len({find_bandwidth(card) for card in DATA_SHEETS}) > 10

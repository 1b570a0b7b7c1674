"""A report of another machine: planned again, compared, and nothing in it taken on trust."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from dflash_local.app.fitting import Shapes
from dflash_local.catalog.shapes import shape
from dflash_local.config.read_model import read_model
from dflash_local.load_config import LoadConfig
from dflash_local.planner.machine import named
from dflash_local.planner.plan import plan
from tools.replay.replayed import replayed

MODEL = "Qwen/Qwen3.5-9B"


def known(model: str) -> Shapes | None:
    kept = shape(model)
    return None if kept is None else Shapes(read_model(kept, model), None)


def entry() -> dict[str, Any]:
    shapes = known(MODEL)
    assert shapes is not None
    found = plan(shapes.target, None, named("RTX 4090", None), LoadConfig(quantize="int4"))
    load = asdict(LoadConfig(quantize="int4"))
    return {
        "model": MODEL,
        "asked": load,
        "kernels": True,
        "compiler": True,
        "plan": {**found.as_dict(), "format": found.format},
    }


def parts(**more: Any) -> dict[str, Any]:
    machine = {"gpus": [{"name": "NVIDIA GeForce RTX 4090", "memory": 2**34}]}
    return {"report": {"schema": 1, "versions": {"torch": "2.13.0"}, "machine": machine}, **more}


def test_the_same_version_plans_the_same() -> None:
    (found,) = replayed(parts(plans=[entry()]), known)["plans"]
    assert found["changes"] == [] and found["now"] == found["then"] and found["now"]["format"] == "int4"
    assert found["now"]["engine"] == "fused"


def test_what_differs_is_listed_by_line() -> None:
    given = entry()
    line = given["plan"]["ledger"]["lines"][0]
    before, line["bytes"] = line["bytes"], 17
    (found,) = replayed(parts(plans=[given]), known)["plans"]
    assert found["changes"] == [(line["name"], 17, before)]


def test_an_old_card_stays_one() -> None:
    (found,) = replayed(parts(plans=[{**entry(), "kernels": False}]), known)["plans"]
    assert ("engine", "fused", "reference") in found["changes"]


def test_versions_are_compared_where_there_was_a_card() -> None:
    told = parts()
    assert replayed(told, known)["not_measured"] == {"torch": {"reported": "2.13.0", "measured": "2.11"}}
    told["report"]["machine"]["gpus"] = []
    assert replayed(told, known)["not_measured"] == {}


def test_a_version_without_an_end_is_another_one() -> None:
    told = parts()
    told["report"]["versions"]["torch"] = "2" * 100_000
    assert replayed(told, known)["not_measured"]["torch"]["measured"] == "2.11"


def check(planned: Any, peak: Any, model: str = MODEL) -> dict[str, Any]:
    figures = {"name": "NVIDIA GeForce RTX 4090", "planned_bytes": planned, "peak_bytes": peak}
    target = {"subject": "target", "figures": {"nats": {"prose": 2.1}}}
    return {"model": model, "findings": [target, {"subject": "card", "figures": figures}]}


def test_memory_is_compared_with_its_plan_then_and_now() -> None:
    given = entry()
    peak = given["plan"]["ledger"]["peak"]
    told = parts(
        plans=[given], check=[check(peak, peak * 3 // 2), check(peak + 1, peak), check(2**30, 2**29, "<path>")]
    )
    first, other, unknown = replayed(told, known)["memory"]
    assert first == {"model": MODEL, "planned": peak, "peak": peak * 3 // 2, "off": 0.5, "replanned": peak}
    assert other["replanned"] is None, "another load than the one that is planned again"
    assert (unknown["off"], unknown["replanned"]) == (-0.5, None)
    given["plan"]["ledger"]["peak"] = 17
    (first,) = replayed(parts(plans=[given], check=[check(17, 17)]), known)["memory"]
    assert first["replanned"] == peak, "by this version"


@pytest.mark.parametrize("planned, peak", [(None, 1), (1, None), (0, 1), (-1, 1), ("1", 1), (1, True), (1, 2**60)])
def test_memory_that_is_no_size_is_left_out(planned: Any, peak: Any) -> None:
    assert replayed(parts(check=[check(planned, peak)]), known)["memory"] == []


def test_kernels_that_failed_come_with_a_command() -> None:
    card = {"card": "NVIDIA GeForce RTX 4090", "failed": {"-DCODES=2 N=4096": "hang"}}
    (found,) = replayed(parts(plans=[entry()], kernels=[card]), known)["kernels"]
    assert found["verdict"] == "hang" and found["command"] == f"dflash check {MODEL} --only kernels --again"
    hostile = {**entry(), "model": "x; rm -rf ~"}
    (found,) = replayed(parts(plans=[hostile], kernels=[card]), known)["kernels"]
    assert found["command"] == "dflash check MODEL --only kernels --again"


@pytest.mark.parametrize(
    "change",
    [
        {"model": "local model"},
        {"model": 7},
        {"model": "nobody/Nothing"},
        {"error": "CheckpointError"},
        {"plan": []},
        {"plan": {"machine": {"kind": "cuda", "memory": "much", "free": 1}}},
        {"plan": {"machine": {"kind": "tpu", "memory": 1, "free": 1}}},
        {"plan": {"machine": {"kind": "cuda", "memory": 2**60, "free": 1}}},
        {"asked": {"quantize": "int1"}},
        {"asked": {"context": "long"}},
        {"asked": {"context": 10**9}},
    ],
)
def test_what_cannot_be_planned_again_says_so(change: dict[str, Any]) -> None:
    (found,) = replayed(parts(plans=[{**entry(), **change}]), known)["plans"]
    assert found["error"] and found["now"] is None


@pytest.mark.parametrize("junk", [None, 7, "x", [], [7, None], {"a": [1]}, [[]], [{}]])
def test_parts_of_any_kind_are_read(junk: Any) -> None:
    names = ("report", "doctor", "kernels", "plans", "errors", "check")
    found = replayed(dict.fromkeys(names, junk), known)
    assert found["not_measured"] == {} and found["kernels"] == []

"""The soak's bars: what counts as growth, what as noise, and that a wrong text is seen."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import pytest

from tests.soak import run
from tests.soak.load import Client, Load
from tests.soak.watch import MAX_GROWTH, MAX_MORE, Sample, complaints

MB = 10**6
IDLE = Sample(0.0, 500 * MB, 12, 20, 2)


def run_of(leak: float = 0.0, descriptors: int = 0, threads: int = 0) -> list[Sample]:
    """An hour in samples of 5 s: warm after a tenth, 0.3 MB of noise, and now and then a large request for a moment.

    Args:
        leak: bytes in the whole hour. descriptors, threads: further ones at the end.
    """
    chance = random.Random(7)
    samples = []
    for at in range(0, 3600, 5):
        share = at / 3600
        warm = 30 * MB * min(1.0, 10 * share)
        large = 40 * MB if chance.random() < 0.05 else 0
        resident = 500 * MB + warm + large + chance.uniform(0, 0.3 * MB) + leak * share
        samples.append(Sample(float(at), int(resident), 15 + int(descriptors * share), 20 + int(threads * share), 2))
    return samples


def test_a_steady_server_meets_every_bar() -> None:
    assert list(complaints(run_of(), IDLE, IDLE)) == []


def test_growth_in_the_last_half_is_named() -> None:
    leaking = run_of(leak=2.6 * MAX_GROWTH)
    (told,) = complaints(leaking, IDLE, IDLE)
    assert told.startswith("resident memory grew by 1.") and "1 MB is the bar" in told


def test_descriptors_threads_and_what_the_idle_server_keeps_are_named() -> None:
    told = list(complaints(run_of(descriptors=20, threads=20), IDLE, IDLE))
    assert [text.split()[0] for text in told] == ["descriptors", "threads"]
    kept = Sample(0.0, 500 * MB, 12 + MAX_MORE + 1, 20, 2)
    assert list(complaints(run_of(), IDLE, kept)) == ["descriptors of the idle server: 12 before the load, 15 after it"]


class Liar(Client):
    """Answers everything, and differently once it drafts."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1", "demo", "none")

    def ask(self, path: str, data: bytes | None = None, headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
        body: dict[str, Any] = json.loads(data or b"{}")
        text = "as before" if body.get("mode") == "ar" else "not quite"
        return 200, json.dumps({"choices": [{"text": text, "finish_reason": "stop"}]}).encode()


def test_a_wrong_text_is_counted_and_quoted() -> None:
    load = Load(Liar(), bad={})
    load._reply(random.Random(1))
    assert (load.compared, load.wrong, load.faulty) == (1, 1, 1)
    assert "'not quite'" in load.faults[0] and "'as before'" in load.faults[0]


@pytest.mark.slow
@pytest.mark.needs_torch
def test_a_short_soak_of_the_demo_pair() -> None:
    found = run.measured("demo", 0.5)
    assert found["compared"] > 20 and found["wrong"] == 0 and found["faults"] == []
    assert "texts compared" in "\n".join(run.lines(found))

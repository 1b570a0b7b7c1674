"""Commands that use the pair of a running ``dflash serve`` instead of loading it again."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_local import settings
from dflash_local.app.attaching import attached
from dflash_local.app.loading import start_service
from dflash_local.catalog.bundled import Pair, find
from dflash_local.cli.console import Console
from dflash_local.events import Finished, Started, Step
from dflash_local.load_config import LoadConfig
from dflash_local.request import user_request
from tests.cli.conftest import Opened, Result
from tests.cli.served import Client, record_by_hand
from tests.service.scripted import STATS, ScriptedFacts, ScriptedSession


def as_loaded(pair: Pair) -> ScriptedSession:
    """A session that calls its pair what the engine would."""
    return ScriptedSession(ScriptedFacts(target=pair.name, drafter=f"{pair.name} (bundled)"))


@pytest.fixture(autouse=True)
def named(opened: Opened) -> None:
    opened.make = as_loaded


def test_a_running_server_answers_for_run_and_nothing_is_loaded_twice(
    serving: Callable[..., Result], opened: Opened
) -> None:
    seen: dict[str, Any] = {}

    def visit(_client: Client) -> None:
        user = settings.load()
        console = Console({}, io.StringIO(), io.StringIO())
        with start_service(find("demo"), LoadConfig(), user, console.notify) as service:
            seen["facts"] = service.facts
            seen["events"] = list(service.submit(user_request("hi")).events())
        seen["said"] = console.err.getvalue()
        seen["loaded"] = len(opened.sessions)

    assert serving(visit, "demo").code == 0
    assert seen["loaded"] == 1 and "dflash serve keeps loaded" in seen["said"]
    steps = [event for event in seen["events"] if isinstance(event, Step)]
    assert "".join(piece.text for step in steps for piece in step.pieces) == "Hello, world!\n"
    assert steps[1].pieces[0].origin == "accepted" and steps[1].token_ids == (11, 12, 13)
    assert isinstance(seen["events"][-1], Finished) and seen["events"][-1].reason == "stop"
    assert seen["events"][-1].stats.acceptance_lengths == STATS.acceptance_lengths


@pytest.mark.parametrize(
    ("model", "change"),
    [
        ("demo-hybrid", {}),
        ("demo", {"dtype": "bfloat16"}),
        ("demo", {"device": "cuda"}),
        ("demo", {"context": 64}),
        ("demo", {"allow_mismatch": True}),
        ("demo", {"exact": True}),
        ("demo", {"kv_cache": "fp8"}),
        ("demo", {"drafter_precision": "8bit"}),
        ("demo", {"draft_window": 64}),
        ("demo", {"attention_factor": 1.5}),
        ("demo", {"quantize": "int4"}),
        ("demo", {"engine": "fused"}),
    ],
)
def test_a_server_with_another_pair_or_another_way_is_left_alone(
    serving: Callable[..., Result], opened: Opened, model: str, change: dict[str, Any]
) -> None:
    found: list[object] = []

    def visit(_client: Client) -> None:
        console = Console({}, io.StringIO(), io.StringIO())
        found.append(attached(find(model), LoadConfig(**change), settings.load(), console.notify))
        found.append(console.err.getvalue())

    assert serving(visit, "demo").code == 0
    session, said = found
    assert session is None
    given = " ".join(LoadConfig(**change).arguments())
    assert ("it is loaded here once more" in str(said) and given in str(said)) == bool(change)


def test_options_that_the_server_was_started_with_are_no_reason_to_load_again(
    serving: Callable[..., Result], opened: Opened
) -> None:
    started = LoadConfig(exact=True, engine="fused", kv_cache="fp8", dtype="bfloat16", device="cpu", context=300)
    opened.make = lambda pair: ScriptedSession(replace(as_loaded(pair).facts, load=started))
    said: list[str] = []

    def visit(_client: Client) -> None:
        for given in (LoadConfig(), LoadConfig(exact=True, kv_cache="fp8"), started, LoadConfig(fit_check=False)):
            console = Console({}, io.StringIO(), io.StringIO())
            assert attached(find("demo"), given, settings.load(), console.notify) is not None
            said.append(console.err.getvalue())

    assert serving(visit, "demo", "--exact", "--kv-cache", "fp8", "--no-fit-check").code == 0
    assert all("fused bfloat16 cpu, exact, kv cache fp8" in line for line in said), "and it says how it is loaded"
    assert (opened.loads[0].exact, opened.loads[0].kv_cache) == (True, "fp8")


def test_attaching_can_be_switched_off_and_a_stale_record_is_nobody(
    serving: Callable[..., Result], opened: Opened, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    console = Console({}, io.StringIO(), io.StringIO())

    def visit(client: Client) -> None:
        monkeypatch.setenv("DFLASH_ATTACH", "0")
        found.append(attached(find("demo"), LoadConfig(), settings.load(), console.notify))
        monkeypatch.delenv("DFLASH_ATTACH")
        found.append(client.record)

    assert serving(visit, "demo").code == 0
    record_by_hand(own_home, found.pop())
    found.append(attached(find("demo"), LoadConfig(), settings.load(), console.notify))
    assert found == [None, None]


def test_a_cancel_reaches_the_server_and_brings_its_figures_back(
    serving: Callable[..., Result], opened: Opened
) -> None:
    gate = threading.Event()
    opened.make = lambda pair: replace(as_loaded(pair), gate=gate)
    seen: dict[str, Any] = {}

    def visit(_client: Client) -> None:
        console = Console({}, io.StringIO(), io.StringIO())
        with start_service(find("demo"), LoadConfig(), settings.load(), console.notify) as service:
            ticket = service.submit(user_request("hi"))
            events = ticket.events()
            next(event for event in events if isinstance(event, Started))
            ticket.cancel()
            seen["last"] = list(events)[-1]

    assert serving(visit, "demo").code == 0
    assert isinstance(seen["last"], Finished) and seen["last"].reason == "cancelled"
    assert seen["last"].stats.tokens_per_s == STATS.tokens_per_s

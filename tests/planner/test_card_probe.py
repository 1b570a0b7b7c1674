"""A card's probe: taken in a process of its own, once, kept, and read again where it is as it should be."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from dflash_local import child_process
from dflash_local.app import fitting
from dflash_local.events import LoadProgress, Notice
from dflash_local.planner import card_probe, machine
from dflash_local.planner.card_probe import CardProbe, LinkProbe
from dflash_local.settings import Settings, load
from dflash_local.store.paths import speeds_folder

CARD = "NVIDIA H100 80GB HBM3"
PROBE = CardProbe(CARD, 3000.0, 9.0, 1.0)


@pytest.fixture
def user() -> Settings:
    return load()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands that would have measured; all answer as ``PROBE``."""
    commands: list[list[str]] = []

    def run(argv: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        commands.append(argv)
        return subprocess.CompletedProcess(argv, 0, json.dumps(asdict(PROBE)), "")

    monkeypatch.setattr(child_process, "run", run)
    return commands


def test_a_probe_is_taken_once_and_said(
    asked: list[list[str]], monkeypatch: pytest.MonkeyPatch, user: Settings
) -> None:
    free = machine.Machine(CARD, "cuda", 80 * 2**30, 79 * 2**30, "", "cuda:0")
    monkeypatch.setattr(machine, "this_machine", lambda *_args, **_named: free)
    told: list[Notice | LoadProgress] = []
    assert fitting.machine(user).probe is None and not asked, "nobody could be told"
    assert fitting.machine(user, notify=told.append).probe == PROBE
    assert fitting.machine(user, notify=told.append).probe == PROBE == fitting.machine(user).probe
    (command,), (notice,) = asked, told
    assert command[0] == sys.executable and command[-1] == "cuda:0" and "once" in str(notice)

    monkeypatch.setattr(
        machine, "this_machine", lambda *_args, **_named: replace(free, name="NVIDIA L4", free=59 * 2**30)
    )
    assert fitting.machine(user, notify=told.append).probe is None and len(asked) == 1, "another program is on the card"
    blind = replace(free, name="NVIDIA L4", compiler=False)
    monkeypatch.setattr(machine, "this_machine", lambda *_args, **_named: blind)
    assert fitting.machine(user, notify=told.append).probe is None and len(asked) == 1, "nothing compiles its kernel"


@pytest.mark.parametrize("device", ["auto", "balanced"])
def test_with_a_second_card_the_way_to_it_is_measured_once(
    device: str, monkeypatch: pytest.MonkeyPatch, user: Settings
) -> None:
    """A probe from before that card came is taken anew; one that is busy is asked for nothing."""
    commands: list[list[str]] = []

    def run(argv: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        commands.append(argv)
        link = LinkProbe(CARD, None, 60.0) if argv[-1] == "cuda:1" else None
        return subprocess.CompletedProcess(argv, 0, json.dumps(asdict(replace(PROBE, link=link))), "")

    monkeypatch.setattr(child_process, "run", run)
    one, other = (machine.Machine(CARD, "cuda", 80 * 2**30, 79 * 2**30, "", f"cuda:{index}") for index in range(2))

    def here(first: machine.Machine, second: machine.Machine) -> machine.Machine:
        both = replace(first, others=(second,))
        both = both.together() if device == "balanced" else both
        monkeypatch.setattr(machine, "this_machine", lambda *_args, **_named: both)
        return fitting.machine(user, device=device, notify=told.append)

    told: list[Notice | LoadProgress] = []
    busy = here(one, replace(other, free=2**30))
    assert [each.probe for each in busy.cards or busy.gpus] == [PROBE, PROBE] and len(commands) == 1
    for found in (here(other, one), here(one, other)):
        first, _ = found.cards or found.gpus
        assert first.device == "cuda:0" and first.probe is not None and first.probe.link == LinkProbe(CARD, None, 60.0)
    assert [command[-2:] for command in commands[1:]] == [["cuda:0", "cuda:1"]]
    assert f"and the way to {CARD} and back, once" in str(told[-1]) and len(told) == 2


def test_of_named_cards_the_first_is_that_from_which_the_way_begins(
    asked: list[list[str]], monkeypatch: pytest.MonkeyPatch, user: Settings
) -> None:
    first, second = (machine.Machine(CARD, "cuda", 80 * 2**30, 79 * 2**30, "", f"cuda:{at}") for at in (1, 0))
    both = replace(first, device="cuda:1,0", cards=(first, second))
    monkeypatch.setattr(machine, "this_machine", lambda *_args, **_named: both)
    fitting.machine(user, device="cuda:1,0", notify=lambda _event: None)
    assert [command[-2:] for command in asked] == [["cuda:1", "cuda:0"]]


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "[]",
            "{}",
            json.dumps(asdict(PROBE) | {"card": "another"}),
            json.dumps(asdict(PROBE) | {"launch_us": -1}),
        ),
        *(json.dumps(asdict(PROBE) | {"link": link}) for link in ({}, {"other": CARD})),
        json.dumps(asdict(replace(PROBE, link=LinkProbe(CARD, 0.0, 60.0)))),
    ],
)
def test_a_file_or_an_answer_that_is_not_as_it_should_be_is_no_probe(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = subprocess.CompletedProcess([], 0, text, "")
    monkeypatch.setattr(child_process, "run", lambda *_args, **_options: answer)
    assert card_probe.take(tmp_path, "cuda:0", CARD) is None and not list(tmp_path.iterdir())
    (tmp_path / "nvidia-h100-80gb-hbm3-probe.json").write_text(text, encoding="utf-8")
    assert card_probe.read(tmp_path, CARD) is None


def test_a_card_that_cannot_be_measured_is_no_failure(user: Settings) -> None:
    """The child itself, on a machine without that card."""
    folder = speeds_folder(user)
    assert card_probe.take(folder, "cuda:0", "no such card") is None

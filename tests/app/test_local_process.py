"""A pair in the engine's process: shared, cancelled, killed, left; and a screen that outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Pipe
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="loads a model, and torch is not installed here")

from dflash_local import __version__, settings  # noqa: E402
from dflash_local.app import local_process  # noqa: E402
from dflash_local.app.engine_process import EngineProcess  # noqa: E402
from dflash_local.app.local_process import LocalProcess, open_process  # noqa: E402
from dflash_local.app.model_sources import LocalModels  # noqa: E402
from dflash_local.app.process_messages import Cancel, Generate, Occupied, Open, Opened  # noqa: E402
from dflash_local.app.process_records import ProcessRecord, read_records  # noqa: E402
from dflash_local.catalog.bundled import Pair, find  # noqa: E402
from dflash_local.cli.ps import lines, served  # noqa: E402
from dflash_local.errors import CheckpointError, ContextError, DeviceLostError  # noqa: E402
from dflash_local.events import Event, Finished, LoadProgress, Notice, Started, Step  # noqa: E402
from dflash_local.load_config import LoadConfig  # noqa: E402
from dflash_local.request import Limits, SamplingParams, user_request  # noqa: E402
from dflash_local.service.service import Service  # noqa: E402
from dflash_local.settings import Settings  # noqa: E402
from dflash_local.store.owner import Owner  # noqa: E402
from tests.cli.conftest import Cli  # noqa: E402
from tests.service.scripted import ScriptedFacts, ScriptedSession  # noqa: E402

ASK = user_request("What is 3 + 4?")
# A reward for tokens that were said: it repeats one and never stops.
LONG = replace(ASK, mode="ar", sampling=SamplingParams(frequency_penalty=-100.0), limits=Limits(400))
LOAD = LoadConfig(engine="fused")  # a process loads it in a third of the time: transformers is not imported
ROOT = Path(__file__).resolve().parents[2]
GONE_S = 10.0  # two seconds, and what a busy machine adds

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def user(monkeypatch: pytest.MonkeyPatch) -> Settings:
    """One whose commands use the engine's process."""
    monkeypatch.delenv("DFLASH_IN_PROCESS")
    return settings.load()


@pytest.fixture
def opened(user: Settings) -> Iterator[Callable[..., LocalProcess]]:
    """Opens the toy, and leaves it in the end. Sessions have what was told of them."""
    sessions: list[LocalProcess] = []
    pair = find("demo")

    def open_demo(told: list[Event] | None = None, **options: object) -> LocalProcess:
        notify = (told if told is not None else []).append
        sessions.append(open_process(pair, replace(LOAD, **options), user, notify))  # type: ignore[arg-type]
        return sessions[-1]

    yield open_demo
    for session in sessions:
        session.close()


def serve(user: Settings) -> Service:
    return Service(LocalModels(user, LOAD, lambda _event: None).model(find("demo"), LOAD, False))


def text_of(events: list[Event]) -> str:
    return "".join(piece.text for event in events if isinstance(event, Step) for piece in event.pieces)


def wait_until_gone(pid: int) -> None:
    """What is gone for good; a zombie of this process is."""
    until = time.monotonic() + GONE_S
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return
        if state == "Z":
            return
        time.sleep(0.05)
    pytest.fail(f"process {pid} is still there")


def test_commands_share_a_process_that_ends_with_the_last(
    opened: Callable[..., LocalProcess], user: Settings, cli: Cli
) -> None:
    told: list[Event] = []
    first = opened(told)
    assert any(isinstance(event, LoadProgress) for event in told), "the load was followed"
    events = list(first.generate(ASK))
    assert text_of(events).startswith("3 plus 4 is 7.") and isinstance(events[-1], Finished)
    (started,) = (event for event in events if isinstance(event, Started))

    cancelled = threading.Event()
    for event in first.generate(LONG, cancelled.is_set):
        if isinstance(event, Step) and not cancelled.is_set():
            assert first.count(ASK) == started.prompt_tokens, "also while it replies"
            cancelled.set()
    with pytest.raises(ContextError):
        first.count(user_request("x " * 9000))
    assert isinstance(event, Finished) and event.reason == "cancelled" and event.usage.completion_tokens < 400
    with pytest.raises(AuthenticationError):
        Client(first.record.address, authkey=b"guessed")

    said: list[Event] = []
    second = opened(said, context=first.facts.context)
    assert second.facts == first.facts and second.process is None
    assert [event.message for event in said if isinstance(event, Notice)][0].startswith("using the pair that process")
    others = first.generate(LONG)
    while not isinstance(next(others), Step):
        pass
    assert text_of(list(second.generate(ASK))) == text_of(events), "although another command's reply is under way"
    del others  # its connection is closed, which frees its turn
    once_more: list[Event] = []
    third = opened(once_more, context=300)
    assert third.facts.pid != first.facts.pid and third.facts.context == 300
    assert any("--context 300" in event.message for event in once_more if isinstance(event, Notice))

    one, other = sorted(served(user), key=lambda row: -row["commands"])
    assert (one["model"], one["pid"], one["commands"]) == ("demo", first.facts.pid, 2)
    assert other["pid"] == third.facts.pid and "1 command" in lines([other], 200)[1]

    first.close()
    assert text_of(list(second.generate(ASK))) == text_of(events), "the other one still has it"
    second.close()
    assert cli("stop", "demo").out.startswith(f"stopped demo at process {third.facts.pid} in ")
    with pytest.raises(DeviceLostError, match=r"ended \(exit code 0\)"):
        list(third.generate(ASK))
    for session in (first, third):
        assert session.facts.pid is not None
        wait_until_gone(session.facts.pid)
    assert read_records(user) == () and not Path(first.record.folder).exists()


def test_of_two_commands_that_start_at_once_one_loads_the_pair(opened: Callable[..., LocalProcess]) -> None:
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda _: opened(), range(2))
    assert one.facts.pid == other.facts.pid is not None


def test_a_killed_process_costs_its_reply_and_the_next_message_works(user: Settings) -> None:
    with serve(user) as service:
        service.load()
        (record,) = read_records(user)
        pid = service.facts.pid
        assert pid is not None
        shown: list[Event] = []
        with pytest.raises(DeviceLostError, match="was loaded again"):
            for event in service.submit(LONG):
                if isinstance(event, Step) and not shown:
                    shown.append(event)
                    os.kill(pid, signal.SIGKILL)
        assert text_of(list(service.submit(ASK))).startswith("3 plus 4") and service.facts.pid != pid
        assert not Path(record.folder).exists(), "its socket and its log go with it"
        assert service.facts.pid is not None
        os.kill(service.facts.pid, signal.SIGKILL)
        idle = list(service.submit(ASK))
        assert text_of(idle).startswith("3 plus 4"), "a reply that had not begun is made all the same"
        assert any("SIGKILL" in event.message for event in idle if isinstance(event, Notice))
        last = service.facts.pid
    assert last is not None
    wait_until_gone(last)


def test_what_is_kept_stays_until_it_is_stopped(user: Settings, cli: Cli) -> None:
    command = ("run", "demo", "hi", "--engine", "fused", "--max-new-tokens", "4")
    ran = cli(*command, "--keep")
    (record,) = read_records(user)
    line = next(line for line in ran.err.splitlines() if "stays loaded" in line)
    assert "GiB" in line and line.endswith(f"process {record.owner.pid}: dflash stop demo ends it")
    again = cli(*command)
    assert f"using the pair that process {record.owner.pid} keeps loaded" in again.err
    own = cli(*command, "--own")
    assert own.code == 0 and "using the pair" not in own.err and read_records(user) == (record,)
    assert cli("stop", "demo").code == 0
    wait_until_gone(record.owner.pid)


def test_nobody_waits_for_the_load_of_another_pair(user: Settings, tmp_path: Path) -> None:
    engine = EngineProcess(user, ProcessRecord(Owner.me("engine"), "", "", str(tmp_path)))
    engine._name = "demo"
    with engine._loading:  # until it has loaded
        answer = engine._open(Pipe()[0], Open(__version__, find("demo-hybrid"), LoadConfig()))
    assert answer == Occupied("")


def test_what_is_measured_is_not_shared(user: Settings, tmp_path: Path) -> None:
    engine = EngineProcess(user, ProcessRecord(Owner.me("engine"), "", "", str(tmp_path)))
    engine._name, engine._measuring = "own", True
    asked = Open(__version__, Pair("own", tmp_path, None, False), LoadConfig(draft=False))
    assert engine._open(Pipe()[0], asked) == Occupied("")


def test_a_command_that_does_not_draft_shares_a_pair_that_has_a_drafter(user: Settings, tmp_path: Path) -> None:
    engine = EngineProcess(user, ProcessRecord(Owner.me("engine"), "", "", str(tmp_path)))
    facts, alone = ScriptedFacts(target=str(tmp_path)), Pair("own", tmp_path, None, False)
    with Service.over(ScriptedSession(facts)) as service:
        assert engine._shared(service, Open(__version__, alone, LoadConfig(draft=False))) == Opened(facts)
        assert engine._shared(service, Open(__version__, alone, LoadConfig())) == Occupied("")


def test_a_process_that_does_not_stop_its_reply_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told once, and not waited for any longer than that takes."""
    here, there = Pipe()
    monkeypatch.setattr(local_process, "_connect", lambda _record: here)
    monkeypatch.setattr(local_process, "CANCEL_S", 0.2)
    asked = iter((False, True))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        record = ProcessRecord(replace(Owner.me("engine"), pid=process.pid), "")
        session = LocalProcess(record, here, ScriptedFacts())
        with pytest.raises(DeviceLostError, match="did not stop a reply"):
            list(session.generate(ASK, lambda: next(asked)))
        assert process.wait(GONE_S) != 0 and [there.recv(), there.recv()] == [Generate(ASK), Cancel()]


def test_what_is_wrong_with_a_pair_is_the_same_error_and_leaves_nothing(user: Settings, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match="config.json"):
        open_process(Pair("broken", tmp_path, None, False), LoadConfig(draft=False), user, lambda _event: None)
    assert read_records(user) == ()


@pytest.mark.skipif(os.name != "posix", reason="Windows has no SIGKILL")
def test_a_killed_command_takes_its_process_along(user: Settings) -> None:
    code = (
        "import sys; from dflash_local import settings; from dflash_local.app.local_process import open_process\n"
        "from dflash_local.catalog.bundled import find; from dflash_local.load_config import LoadConfig\n"
        "found = open_process(find('demo'), LoadConfig(engine='fused'), settings.load(), lambda event: None)\n"
        "print(found.facts.pid, flush=True)\n"
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
    wait_until_gone(pid)


def test_a_service_in_this_process_starts_none(user: Settings) -> None:
    with serve(replace(user, in_process=True)) as service:
        assert service.load().pid is None
    assert read_records(user) == ()

"""What ``run`` loads after a load that ended the program, and with DFLASH_SAFE."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_local.app import loading
from dflash_local.catalog.bundled import Pair
from dflash_local.errors import DeviceLostError, KernelError
from dflash_local.planner import hardware
from dflash_local.planner.hardware import Driver, Gpu, TorchFacts
from tests.cli.conftest import Cli, Opened
from tests.service.scripted import ScriptedSession

pytestmark = pytest.mark.usefixtures("card")
RUN = ("run", "demo", "hello", "--no-fit-check")


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = TorchFacts("2.13.0", cuda="13.0", gpus=(Gpu("NVIDIA T4", 2**34, "7.5"),))
    monkeypatch.setattr(hardware, "nvidia_driver", lambda: Driver("580.95", ("NVIDIA T4",)))
    monkeypatch.setattr(hardware, "probe_torch", lambda: facts)


def leave_marker(opened: Opened, monkeypatch: pytest.MonkeyPatch, cli: Cli, folder: Path) -> None:
    """A load dies: its marker stays, and its process is another one."""
    kept: list[str] = []
    inner = loading.open_session

    def open_session(*arguments: object) -> object:
        (marker,) = folder.glob("loading-*")
        kept.append(marker.read_text())
        return inner(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as planted:
        planted.setattr(loading, "open_session", open_session)
        assert cli(*RUN).code == 0
    content = json.loads(kept[0])
    content["owner"]["started"] = 1.0
    (folder / "loading-left.json").write_text(json.dumps(content))


def test_after_a_crash_each_run_is_a_step_lower_and_answers(
    cli: Cli, opened: Opened, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DFLASH_HOME", str(tmp_path / "home"))
    folder = tmp_path / "home" / "data" / "loads"
    leave_marker(opened, monkeypatch, cli, folder)
    lower = cli(*RUN)
    assert lower.code == 0 and lower.out and opened.loads[-1].engine == "reference" and opened.loads[-1].draft
    assert opened.sessions[-1].drafts
    assert lower.err.count("an earlier load of demo ended the program, so the reference engine is taken") == 1
    leave_marker(opened, monkeypatch, cli, folder)
    plain = cli(*RUN)
    assert plain.code == 0 and "the reference engine without a drafter" in plain.err and not opened.loads[-1].draft
    assert not opened.sessions[-1].drafts
    named = cli(*RUN, "--engine", "fused")
    assert named.code == 0 and opened.loads[-1].engine == "fused" and "tried again" in named.err
    assert "earlier load" not in cli(*RUN).err and opened.loads[-1].engine == "auto"


def test_no_marker_is_left_by_a_load_on_the_cpu(cli: Cli, opened: Opened, tmp_path: Path) -> None:
    assert cli(*RUN, "--device", "cpu").code == 0
    assert not list(tmp_path.rglob("loads"))


def test_dflash_safe_starts_at_the_bottom(cli: Cli, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_SAFE", "1")
    found = cli(*RUN, "--exact")
    assert found.code == 0 and found.out and found.err.count("DFLASH_SAFE: the reference engine without a drafter") == 1
    (load,) = opened.loads
    assert (load.engine, load.draft, load.exact) == ("reference", False, False)
    assert not opened.sessions[-1].drafts


def test_drafts_that_were_not_asked_for_are_not_taken_away(cli: Cli, opened: Opened) -> None:
    """A request for them is refused, where one of a session that was to draft is answered without."""
    assert cli(*RUN, "--mode", "ar").code == 0 and not opened.loads[-1].draft
    assert opened.sessions[-1].drafts


def test_a_context_that_stays_lost_exits_7_with_advice(cli: Cli, opened: Opened) -> None:
    opened.make = lambda _pair: ScriptedSession(faults=[DeviceLostError("at once: CUDA error", "start it again")])
    found = cli(*RUN)
    assert found.code == 7 and "error: at once: CUDA error" in found.err and "hint: start it again" in found.err
    assert len(opened.sessions) == 2 and "Traceback" not in found.err


def test_kernels_that_fail_leave_the_reference_engine_whatever_the_plan_had_chosen(cli: Cli, opened: Opened) -> None:
    def make(_pair: Pair) -> ScriptedSession:
        if opened.loads[-1].engine != "reference":
            raise KernelError("Triton cannot compile kernels: no C compiler was found", "install gcc")
        return ScriptedSession()

    opened.make = make
    found = cli(*RUN)
    assert found.code == 0 and found.out and [load.engine for load in opened.loads] == ["auto", "reference"]
    assert found.err.count("the reference engine is taken, which is slower: Triton cannot compile") == 1
    assert "install gcc" in found.err and "Traceback" not in found.err
    for words in (("--engine", "fused"), ("--exact",)):
        refused = cli(*RUN, *words)
        assert refused.code == 7 and "no C compiler was found" in refused.err and not refused.out

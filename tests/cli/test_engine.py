"""``dflash engine``: environments are made by a real pip from a wheel of the test's own, listed and removed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_local.app import engine_install
from dflash_local.app.engine_install import RELEASES, check_machine, install
from dflash_local.errors import Interrupted
from dflash_local.planner import hardware
from dflash_local.planner.hardware import Driver, Folder
from dflash_local.settings import load as load_settings
from dflash_local.store import lock
from tests.cli.conftest import Cli
from tests.remote.launched_fake import is_alive

RELEASE = RELEASES["vllm"]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="programs are installed on Linux only")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card, room, a network that nothing is asked of."""
    monkeypatch.setattr(hardware, "nvidia_driver", lambda: Driver("580.1", ("NVIDIA H200",)))
    monkeypatch.setattr(hardware, "folder", lambda path: Folder(path, True, 2**40))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    minor = sys.version_info[1]
    releases = {name: replace(one, pythons=(10, max(minor, 14))) for name, one in RELEASES.items()}
    monkeypatch.setattr(engine_install, "RELEASES", releases)


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where pip finds all that it finds: vllm of the pinned version, with a program that says so."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    info = f"vllm-{RELEASE.version}.dist-info"
    with zipfile.ZipFile(folder / f"vllm-{RELEASE.version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("vllm.py", f"def main():\n    print('vllm {RELEASE.version}')\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: vllm\nVersion: {RELEASE.version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/entry_points.txt", "[console_scripts]\nvllm = vllm:main\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


@pytest.fixture
def engines(own_home: Path) -> Path:
    return own_home / ".local" / "share" / "dflash-local" / "engines"


def stub_python(folder: Path, pip: str) -> Path:
    """An interpreter whose environments have a pip that is a shell script."""
    python = folder / "python"
    lines = [
        "#!/bin/sh",
        'if [ "$2" = venv ]; then mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; exit; fi',
        f'if [ "$2" = pip ]; then {pip}; fi',
        f'exec {sys.executable} "$@"',
    ]
    python.write_text("\n".join(lines) + "\n", encoding="utf-8")
    python.chmod(0o755)
    return python


def test_programs_of_the_users_own_are_listed(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_SGLANG", "/opt/sglang/bin/python")
    assert cli("engine", "list", "--json").json == {"engines": [], "own": {"sglang": "/opt/sglang/bin/python"}}
    shown = cli("engine", "list").out
    assert shown.splitlines()[-1] == "used instead: /opt/sglang/bin/python (DFLASH_SGLANG, or settings.json)"


def test_install_list_and_remove(cli: Cli, wheels: Path, engines: Path, answers: Callable[..., list[str]]) -> None:
    assert "none; dflash engine install vllm" in cli("engine", "list").out
    asked = answers(True)
    done = cli("engine", "install", "vllm")
    assert done.code == 0 and asked == ["Install it?"] and f"vLLM {RELEASE.version} is installed" in done.out, done.err
    assert "about 5 GiB to download, 11 GiB on disk (approximate)" in done.err
    (found,) = cli("engine", "list", "--json").json["engines"]
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert (found["program"], found["version"], found["python"]) == ("vllm", RELEASE.version, python)
    assert found["finished"] and found["folder"] == str(engines / "vllm") and found["bytes"] > 1000
    said = subprocess.run([found["executable"]], capture_output=True, text=True, timeout=60)
    assert said.stdout == f"vllm {RELEASE.version}\n"
    assert f"vllm     {RELEASE.version}" in cli("engine", "list").out
    again = cli("engine", "install", "vllm")
    assert again.code == 0 and "is installed:" in again.out and len(asked) == 1
    asked = answers(False, True)
    assert cli("engine", "remove", "vllm").out == "nothing was removed\n" and (engines / "vllm").is_dir()
    removed = cli("engine", "remove", "vllm")
    assert removed.code == 0 and "freed" in removed.out and not (engines / "vllm").exists()
    assert len(asked) == 2 and "(" in asked[0]
    assert cli("engine", "remove", "vllm", "--yes").code == 3


def test_nobody_can_be_asked(cli: Cli, wheels: Path, engines: Path) -> None:
    refused = cli("engine", "install", "vllm")
    assert refused.code == 2 and "nobody can be asked" in refused.err and "--yes" in refused.err
    (engines / "vllm").mkdir(parents=True)
    assert "nobody can be asked" in cli("engine", "remove", "vllm").err and (engines / "vllm").is_dir()


def test_what_pip_cannot_do_is_a_line_and_leaves_nothing(cli: Cli, engines: Path, own_home: Path, local: Path) -> None:
    error = "ERROR: No matching distribution found for vllm"
    python = stub_python(local, f"echo Collecting vllm; echo '{error}' >&2; exit 1")
    failed = cli("engine", "install", "vllm", "--yes", "--python", str(python))
    log = own_home / ".local" / "state" / "dflash-local" / "engines" / "install-vllm.log"
    assert failed.code == 4 and not (engines / "vllm").exists()
    assert failed.err.splitlines()[-2:] == [
        f"error: vLLM {RELEASE.version}: installing {RELEASE.requirement} failed: {error}",
        f"hint: the log: {log}",
    ]
    assert "Collecting vllm" in log.read_text(encoding="utf-8")
    empty = stub_python(local, "exit 0")
    failed = cli("engine", "install", "vllm", "--yes", "--python", str(empty))
    assert failed.code == 4 and "without its program" in failed.err and not (engines / "vllm").exists()


def test_an_unfinished_environment_is_made_anew(cli: Cli, engines: Path, local: Path) -> None:
    (engines / "vllm" / "bin").mkdir(parents=True)
    (engines / "vllm" / "left").write_text("x", encoding="utf-8")
    (engines / "vllm" / "bin" / "vllm").write_text("", encoding="utf-8")
    (found,) = cli("engine", "list", "--json").json["engines"]
    assert not found["finished"] and found["version"] is None and "unfinished" in cli("engine", "list").out
    refused = cli("run", "demo", "hi", "--engine", "vllm")
    assert refused.code == 1 and "vLLM is not installed here" in refused.err
    there = '"$(dirname "$0")/vllm"'
    python = stub_python(local, f"touch {there}; chmod +x {there}; exit 0")
    done = cli("engine", "install", "vllm", "--yes", "--python", str(python))
    assert done.code == 0 and not (engines / "vllm" / "left").exists(), done.err
    marker = json.loads((engines / "vllm" / "installed.json").read_text(encoding="utf-8"))
    assert marker["version"] == RELEASE.version


def test_ctrl_c_ends_pip_and_leaves_nothing(engines: Path, local: Path) -> None:
    python = stub_python(local, f"echo $$ > {local}/pid; sleep 600; exit 1")
    user = load_settings()

    def stop() -> bool:
        return (local / "pid").is_file() and (local / "pid").stat().st_size > 0

    with pytest.raises(Interrupted, match="was not installed"):
        install(RELEASE, user, python, cancelled=stop)
    assert not (engines / "vllm").exists() and not is_alive(int((local / "pid").read_text(encoding="utf-8")))


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_other_machines_are_refused(cli: Cli, monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    monkeypatch.setattr(hardware, "nvidia_driver", lambda: None)
    monkeypatch.setattr(engine_install.sys, "platform", platform)
    for name in ("vllm", "sglang"):
        refused = cli("engine", "install", name, "--yes")
        assert refused.code == 2 and "Linux with an NVIDIA card" in refused.err and refused.err.count("\n") == 2
        assert "--url" in refused.err and f"DFLASH_{name.upper()}=PATH" in refused.err


def test_what_is_checked_before_the_download(
    cli: Cli, wheels: Path, engines: Path, monkeypatch: pytest.MonkeyPatch, local: Path
) -> None:
    monkeypatch.setattr(hardware, "folder", lambda path: Folder(path, True, 2**30))
    full = cli("engine", "install", "vllm", "--yes")
    assert full.code == 5 and "takes about 11 GiB" in full.err and "1.00 GiB are free" in full.err
    none = cli("engine", "install", "vllm", "--yes", "--python", str(local / "no"))
    assert none.code == 2 and "is no Python" in none.err
    monkeypatch.setattr(engine_install, "RELEASES", {"vllm": replace(RELEASE, pythons=(50, 51))})
    old = cli("engine", "install", "vllm", "--yes")
    assert old.code == 2 and "supports Python 3.50 to 3.51" in old.err and "--python PATH" in old.err
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert cli("engine", "install", "vllm", "--yes").code == 4
    assert not engines.exists()


def test_one_at_a_time_and_none_that_runs(cli: Cli, wheels: Path, engines: Path, local: Path) -> None:
    user = load_settings()
    with lock.exclusive(lock.folder_of(user), "engine/vllm"):
        busy = cli("engine", "install", "vllm", "--yes")
    assert busy.code == 1 and "is being pulled or removed" in busy.err
    program = engines / "vllm" / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.symlink_to(sys.executable)
    process = subprocess.Popen([str(program), "-S", "-c", "import time; time.sleep(600)"])
    try:
        time.sleep(0.2)
        used = cli("engine", "remove", "vllm", "--yes")
        assert used.code == 1 and f"process {process.pid} runs from" in used.err and program.exists()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert cli("engine", "remove", "vllm", "--yes").code == 0 and not program.exists()


def test_the_own_python_is_taken_unless_another_is_named(local: Path) -> None:
    release, user = engine_install.RELEASES["vllm"], load_settings()
    assert check_machine(release, user) == Path(sys.executable)
    stub = stub_python(local, "exit 1")
    assert check_machine(release, user, stub) == stub

"""Programs that a model might write: what passes, what fails, and what none of them reaches."""

from __future__ import annotations

import os
import platform
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_local.bench.tasks import sandbox
from dflash_local.bench.tasks.sandbox import SandboxLimits, isolation, run

QUICK = SandboxLimits(wall_s=30.0, cpu_s=2, memory_mib=512, file_mib=2)
linux = pytest.mark.skipif(sys.platform != "linux", reason="limits of the kernel of Linux")
LIBRARY = 'ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None'
IMPORTS = "import bisect, collections, datetime, heapq, itertools, math, random, re, string, typing\n"


@pytest.fixture(params=["kernel", "no namespaces", "audit hook alone"], autouse=True)
def walls(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> str:
    """Every test with what this kernel has, without namespaces as in many containers, and as on other systems."""
    source = sandbox.CHILD.read_text(encoding="utf-8")
    without = {"no namespaces": ("own_namespaces(library)", "False"), "audit hook alone": (LIBRARY, "None")}
    if request.param in without:
        old, new = without[request.param]
        assert old in source
        copy = tmp_path_factory.mktemp("child") / "child.py"
        copy.write_text(
            source.replace(f"and {old}" if new == "False" else old, f"and {new}" if new == "False" else new)
        )
        monkeypatch.setattr(sandbox, "CHILD", copy)
    return str(request.param)


@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        (IMPORTS + "assert math.floor(3.5) == 3", "passed"),
        ("assert 1 == 2", "failed"),
        ("def (", "failed"),
        ("import sys; sys.exit(0)", "failed"),
        ("import os; os._exit(0)", "failed"),
        ("raise KeyboardInterrupt", "failed"),
        ("def f(): return f()\nf()", "failed"),
        ("(" * 100_000, "failed"),
        ("import os; assert set(os.environ) <= {'LC_CTYPE', 'SYSTEMROOT'}", "passed"),
        ("import os; assert os.listdir('.') == []", "passed"),
        ("open('a', 'w').write('x'); assert open('a').read() == 'x'", "passed"),
        ("print('x' * 10_000_000)", "passed"),
    ],
)
def test_only_a_program_that_comes_to_its_end_passed(program: str, outcome: str) -> None:
    assert run(program, QUICK).outcome == outcome


def test_an_endless_loop_is_timed_out_by_the_processor_s_limit() -> None:
    assert run("while True: pass", replace(QUICK, cpu_s=1)).outcome == "timed out"


def test_one_that_waits_is_timed_out_by_the_wall() -> None:
    assert run("import time; time.sleep(600)", SandboxLimits(wall_s=0.5)).outcome == "timed out"


def test_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        port = server.getsockname()[1]
        program = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 5)"
        assert run(program, QUICK).outcome == "failed"
        with pytest.raises(TimeoutError):
            server.accept()


def test_no_files_outside_are_written_read_or_removed(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("secret", encoding="utf-8")
    for program in (
        f"open({str(tmp_path / 'new')!r}, 'w')",
        f"open({str(kept)!r}).read()",
        f"import os; os.remove({str(kept)!r})",
        f"import os; os.listdir({str(tmp_path)!r})",
        f"import os; os.symlink({str(kept)!r}, 'link'); open('link').read()",
        f"import os; os.symlink('a', {str(tmp_path / 'link')!r})",
        f"import sqlite3; sqlite3.connect({str(tmp_path / 'base')!r}).execute('create table a (b)')",
        f"import shutil; shutil.rmtree({str(tmp_path)!r})",
    ):
        assert run(program, QUICK).outcome == "failed", program
    assert sorted(tmp_path.iterdir()) == [kept] and kept.read_text(encoding="utf-8") == "secret"


BOMBS = {
    "fork": "import os\nwhile True: os.fork()",
    "processes": "import subprocess\nwhile True: subprocess.Popen(['sleep', '600'])",
    "threads": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(600,)).start()",
    "memory": "kept = []\nwhile True: kept.append(bytearray(1 << 20))",
    "file": "f = open('a', 'wb')\nfor _ in range(64): f.write(b'0' * (1 << 20))",
    "open files": "kept = [open('a', 'w') for _ in range(10_000)]",
}


@linux
@pytest.mark.parametrize("name", BOMBS)
def test_bombs_fail_within_their_limits(name: str) -> None:
    assert run(BOMBS[name], QUICK).outcome == "failed"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of its system calls")
@linux
def test_the_kernel_refuses_what_goes_around_the_audit_hook(tmp_path: Path, walls: str) -> None:
    """A program that finds the child's own handle of the C library calls the system without Python's knowledge."""
    if not isolation().endswith("Landlock, seccomp"):
        pytest.skip("this kernel shuts nothing off for us")
    (tmp_path / "secret").write_text("secret", encoding="utf-8")
    fork, make_socket, open_file = 57, 41, 2
    program = f"""
import sys
call = sys._getframe(2).f_locals["library"].syscall
assert call({fork}) == -1
assert call({make_socket}, 2, 1, 0) == -1
assert call({open_file}, {os.fsencode(tmp_path / "secret")!r}, 0) == -1
assert call({open_file}, b".", 0) > 0
"""
    assert run(program, QUICK).outcome == "passed"


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run("import os; os.mkdir('a'); open('a/b', 'w'); os.chmod('a', 0o500)", QUICK).outcome == "passed"
    assert os.listdir(tmp_path) == []


def test_what_shuts_programs_off_is_named(walls: str) -> None:
    if walls == "audit hook alone":
        assert isolation().count("in Python") == 3
    elif walls == "no namespaces":
        assert isolation().startswith("a socket guard in Python and no network namespace, ")
    else:
        assert "network" in isolation()

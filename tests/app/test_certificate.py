"""The certificate's own process: what it is asked, what it says, how it ends. The processes are real, not the work."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_local import child_process, settings
from dflash_local.app import certificate
from dflash_local.catalog.bundled import Pair
from dflash_local.errors import DoesNotFitError, EngineError, Interrupted
from dflash_local.load_config import LoadConfig

NOBODY = settings.load({})
PAIR = Pair("demo", Path("/t"), Path("/d"), bundled=True)


def python(script: str) -> list[str]:
    return [sys.executable, "-c", script]


def run(script: str, cancelled: object = None) -> tuple[dict[str, object], list[tuple[str, float]]]:
    heard: list[tuple[str, float]] = []
    report = certificate.run(
        python(script),
        os.environ,
        lambda text, fraction: heard.append((text, fraction)),
        cancelled if callable(cancelled) else lambda: False,
    )
    return report, heard


def test_it_is_called_with_the_options_of_the_loaded_pair() -> None:
    plain = certificate.command(PAIR, LoadConfig(), False, NOBODY)
    assert plain == child_process.python_command("dflash_local", ["certify", "demo", "--json", "--json-progress"])
    own = replace(PAIR, name="owner/name", bundled=False, thinking="required")
    config = LoadConfig(
        dtype="bfloat16",
        device="cuda:1",
        quantize="bnb-nf4",
        allow_mismatch=True,
        context=4096,
        fit_check=False,
        engine="fused",
    )
    assert " ".join(certificate.command(own, config, False, NOBODY)[4:]) == (
        "owner/name --json --json-progress --drafter /d --context 4096 --quantize bnb-nf4 --dtype bfloat16 "
        "--device cuda:1 --engine fused --allow-mismatch --no-fit-check --no-think"
    )
    assert certificate.command(own, LoadConfig(), True, NOBODY)[5:] == ["--json", "--json-progress", "--drafter", "/d"]


def test_its_progress_is_heard_and_its_report_comes_back_also_after_a_bug() -> None:
    report, heard = run(
        "import sys, time\n"
        "assert not sys.stderr.isatty() and not sys.stdin.isatty()\n"
        "for share in (0, 0.5):\n"
        '    print(f\'{{"progress": "certifying, run 1 of 2", "fraction": {share}}}\', flush=True); time.sleep(0.05)\n'
        "print('no JSON', '[1]', '3', sep='\\n'); print('a remark', file=sys.stderr)\n"
        'print(\'{"verdict": "BUG", "filler": "\' + \'x\' * 200000 + \'"}\')\n'
        "sys.exit(7)"
    )
    assert report["verdict"] == "BUG" and len(str(report["filler"])) == 200_000
    assert heard == [("certifying, run 1 of 2", 0.0), ("certifying, run 1 of 2", 0.5)]


def test_its_error_is_raised_as_what_it_was() -> None:
    error = DoesNotFitError("too big", "a smaller one").as_dict()
    with pytest.raises(DoesNotFitError) as raised:
        run(f"import sys; sys.stderr.write({json.dumps(error)!r} + '\\n'); sys.exit(5)")
    assert (raised.value.message, raised.value.hint) == ("too big", "a smaller one")
    with pytest.raises(EngineError, match="exit code 3: it went wrong"):
        run("import sys; sys.stderr.write('it went wrong'); sys.exit(3)")
    with pytest.raises(EngineError, match="could not be started"):
        certificate.run(["/nowhere/at/all"], os.environ, lambda _text, _share: None, lambda: False)


def test_cancelled_it_is_gone_within_two_seconds_with_all_that_it_started(tmp_path: Path) -> None:
    started = tmp_path / "started"
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    script = (
        f"{stubborn}; import os, subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', '''{stubborn}; time.sleep(60)'''])\n"
        f"open({str(started)!r} + '~', 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        f"os.rename({str(started)!r} + '~', {str(started)!r})\n"
        "time.sleep(60)"
    )
    since: list[float] = []

    def cancelled() -> bool:
        if started.exists() and not since:
            since.append(time.monotonic())
        return bool(since)

    with pytest.raises(Interrupted, match="stopped"):
        run(script, cancelled)
    assert time.monotonic() - since[0] < 30
    until = time.monotonic() + 60  # a killed process takes a moment to be gone
    for pid in map(int, started.read_text().split()):
        while alive(pid) and time.monotonic() < until:
            time.sleep(0.01)
        assert not alive(pid)


def alive(pid: int) -> bool:
    """Whether a process still runs; one that nobody has waited for yet does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")

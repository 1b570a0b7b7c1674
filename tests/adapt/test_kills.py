"""Killed ten times at moments spread over the run, it goes on or starts again, and nothing of the pair is touched."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_local import settings
from dflash_local.adapt.gain import RISE
from dflash_local.adapt.run import BEST, DONE, STATE
from dflash_local.app.adaptation_plan import adaptation_folders
from dflash_local.catalog import bundled
from dflash_local.store import adaptations
from tests.adapt.drifted import MINUTES, drift, questions

ROOT = Path(__file__).parents[2]
ANSWERS, TAPS, REPLIES, LEARNING = "the target answers", "keeping taps", "held-out replies", "learning"
BEFORE = ((ANSWERS, 3), (ANSWERS, 12), (TAPS, 2), (REPLIES, 2), (f"replace {DONE}", 1))  # the target begins again
LATER = ((LEARNING, 1), (f"replace {STATE}", 2), (f"replace {BEST}", 1), (REPLIES, 2))  # it is not asked again


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(os.name != "posix", reason="Windows has no SIGKILL")
def test_ten_kills_lose_nothing(tmp_path: Path) -> None:
    target, log = tmp_path / "target", tmp_path / "log"
    drift(target)
    asked = tmp_path / "asked.jsonl"
    lines = (json.dumps({"prompt": question, "kind": "counting"}) for question, _ in questions(20, 7))
    asked.write_text("\n".join(lines), encoding="utf-8")
    pair = bundled.find(str(target), str(bundled.find("demo").drafter))
    before = hashes(pair)
    work, kept = adaptation_folders(pair, settings.load())

    def run(moment: str, count: int = 1, code: int = -signal.SIGKILL) -> list[str]:
        """Return what came before the moment."""
        log.unlink(missing_ok=True)
        words = [
            "adapt",
            str(pair.target),
            "--drafter",
            str(pair.drafter),
            "--from",
            str(asked),
            "--minutes",
            f"{MINUTES}",
        ]
        command = [sys.executable, "-m", "tests.adapt.killed", str(log), moment, str(count), *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == code and hashes(pair) == before, (moment, done.stderr)
        return log.read_text(encoding="utf-8").splitlines()

    for moment in BEFORE:
        assert run(*moment)[0].startswith(ANSWERS) and not kept.exists()
    for moment in LATER:
        told = run(*moment)
        assert moment == LATER[0] or not [line for line in told if line.startswith(ANSWERS)], moment
        assert not kept.exists()
    told = run(f"replace {kept.name}")
    assert {line.split(",")[0] for line in told if not line.startswith("replace")} == {REPLIES}, "all is learnt"
    assert not kept.exists()
    run("nothing", code=0)
    found = adaptations.read(kept)
    assert found is not None and found.gain >= RISE
    minutes = [point["minutes"] for point in found.facts["curve"]]
    assert minutes == sorted(minutes) and not list(work.iterdir())


def hashes(pair: bundled.Pair) -> dict[Path, str]:
    """Of every file of a pair."""
    assert pair.drafter is not None
    files = [file for folder in (pair.target, pair.drafter) for file in folder.rglob("*") if file.is_file()]
    return {file: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}

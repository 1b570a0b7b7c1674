"""A load that ended the program: the next one begins a step slower, says so, and remembers it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from dflash_local.load_config import LoadConfig
from dflash_local.service.load_steps import RECORD, STALE_S, LoadSteps, lowered, step_of
from dflash_local.store.owner import Owner

ROOT = Path(__file__).resolve().parents[2]
AUTO = LoadConfig()
VERSIONS = {"dflash-local": "1.0", "torch": "2.13.0", "driver": "580.95"}
KILLED = """
import os, signal, sys
from pathlib import Path
from dflash_local.load_config import LoadConfig
from dflash_local.service.load_steps import LoadSteps
with LoadSteps(Path(sys.argv[1]), {VERSIONS}).loading("pair", LoadConfig(engine=sys.argv[2])):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def steps(folder: Path | None, **versions: str) -> LoadSteps:
    return LoadSteps(folder, {**VERSIONS, **versions})


def crash(folder: Path, load: LoadConfig = AUTO, name: str = "pair") -> None:
    """A marker as a process leaves it that died within the load."""
    before = set(folder.glob("loading-*"))
    with steps(folder).loading(name, load):
        (marker,) = set(folder.glob("loading-*")) - before
        content = json.loads(marker.read_text())
    content["owner"]["started"] = 1.0  # another process had this id
    marker.write_text(json.dumps(content))


def test_a_killed_load_starts_the_next_one_a_step_lower(tmp_path: Path) -> None:
    script = KILLED.replace("{VERSIONS}", repr(VERSIONS))
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path), "auto"], env=environ, timeout=60)
    assert done.returncode < 0 and list(tmp_path.glob("loading-*"))
    load, line = steps(tmp_path).begin_with("pair", AUTO)
    assert load == replace(AUTO, engine="reference") and not list(tmp_path.glob("loading-*"))
    assert "an earlier load of pair ended the program, so the reference engine is taken" in line
    assert "--engine fused" in line and "\n" not in line


def test_each_crash_is_a_step_and_the_last_step_stays(tmp_path: Path) -> None:
    found = []
    load = AUTO
    for _ in range(3):
        crash(tmp_path, load)
        load, line = steps(tmp_path).begin_with("pair", AUTO)
        found.append((step_of(load), load.draft))
        assert line
    assert found == [("reference", True), ("plain", False), ("plain", False)]


def test_a_load_that_succeeds_at_its_step_keeps_that_step(tmp_path: Path) -> None:
    crash(tmp_path)
    for _ in range(2):
        load, line = steps(tmp_path).begin_with("pair", AUTO)
        assert load.engine == "reference" and line
        with steps(tmp_path).loading("pair", load):
            pass
    assert steps(tmp_path).begin_with("other pair", AUTO) == (AUTO, "")


@pytest.mark.parametrize("asked", [LoadConfig(engine="fused"), LoadConfig(exact=True)])
def test_what_was_asked_for_by_name_is_tried_again_and_its_success_forgets(asked: LoadConfig, tmp_path: Path) -> None:
    crash(tmp_path)
    load, line = steps(tmp_path).begin_with("pair", asked)
    assert load == asked and "tried again" in line
    with steps(tmp_path).loading("pair", load):
        pass
    assert steps(tmp_path).begin_with("pair", AUTO) == (AUTO, "")


@pytest.mark.parametrize("fault", [KeyboardInterrupt, RuntimeError, MemoryError])
def test_a_load_that_ends_by_an_error_is_no_crash(fault: type[BaseException], tmp_path: Path) -> None:
    with pytest.raises(fault), steps(tmp_path).loading("pair", AUTO):
        raise fault
    assert steps(tmp_path).begin_with("pair", AUTO) == (AUTO, "")


def test_a_load_that_another_process_makes_now_is_no_crash(tmp_path: Path) -> None:
    with steps(tmp_path).loading("pair", AUTO):
        assert steps(tmp_path).begin_with("pair", AUTO) == (AUTO, "")
        assert len(list(tmp_path.glob("loading-*"))) == 1


def test_a_marker_whose_process_cannot_be_seen_goes_after_a_day(tmp_path: Path) -> None:
    owner = asdict(replace(Owner.me("load"), host="elsewhere"))
    marker = tmp_path / "loading-x.json"
    marker.write_text(json.dumps({"owner": owner, "name": "pair", "step": "fused", "versions": VERSIONS}))
    assert steps(tmp_path).begin_with("pair", AUTO) == (AUTO, "") and marker.exists()
    os.utime(marker, (time.time() - STALE_S - 60,) * 2)
    assert steps(tmp_path).begin_with("pair", AUTO) == (AUTO, "") and not marker.exists()


@pytest.mark.parametrize("changed", VERSIONS)
def test_another_version_or_driver_begins_anew(changed: str, tmp_path: Path) -> None:
    crash(tmp_path)
    assert steps(tmp_path, **{changed: "new"}).begin_with("pair", AUTO) == (AUTO, ""), "the marker is of another one"
    crash(tmp_path)
    assert steps(tmp_path).begin_with("pair", AUTO)[1]
    assert steps(tmp_path, **{changed: "new"}).begin_with("pair", AUTO) == (AUTO, "")


def test_forgetting_begins_anew(tmp_path: Path) -> None:
    crash(tmp_path)
    steps(tmp_path).forget()
    assert steps(tmp_path).begin_with("pair", AUTO) == (AUTO, "") and not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "[]", "{", '{"steps": 3}', '{"owner": {}, "name": 3}', "\x00"])
def test_files_that_make_no_sense_are_passed_over(text: str, tmp_path: Path) -> None:
    (tmp_path / RECORD).write_text(text)
    (tmp_path / "loading-y.json").write_text(text)
    assert steps(tmp_path).begin_with("pair", AUTO) == (AUTO, "")
    assert not (tmp_path / "loading-y.json").exists()


def test_a_folder_that_cannot_be_written_ends_no_load(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for folder in (None, tmp_path / "file" / "loads"):
        with steps(folder).loading("pair", AUTO):
            pass
        assert steps(folder).begin_with("pair", AUTO) == (AUTO, "")


def test_a_slower_step_leaves_out_what_only_the_fused_engine_knows() -> None:
    load = LoadConfig(exact=True, kv_cache="int8", offload="all", context=99)
    assert lowered(load, "plain") == LoadConfig(engine="reference", draft=False, context=99)
    assert lowered(load, "fused") == load and not lowered(load, "reference").needs_fused

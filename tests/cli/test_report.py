"""``dflash doctor --report``: nothing private in it, nothing written unasked, and read again anywhere."""

from __future__ import annotations

import getpass
import json
import runpy
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_local import settings
from dflash_local.cli import report_parts
from dflash_local.store.paths import CHECKS
from tests.cli.conftest import Cli, write_overlay

PLANTED = {
    "token": "hf_PlantedTokenPlantedTokenPlanted1",
    "other token": "sk-planted-0123456789abcdef",
    "password": "correct horse battery",
    "user": "annaplanted",
    "host": "planted-host",
    "model folder": "PlantedModel-7B",
    "prompt": "planted prompt about my illness",
    "reply": "planted reply with a diagnosis",
    "repository": "planted-company/Unreleased-9B",
    "address": "planted@mail.example",
    "ip": "10.77.66.55",
    "digest": "feedfacefeedfacefeedfacefeedfacefeedface",
}
OVERLAY = f"""schema: 1
pairs:
  - target: {PLANTED["repository"]}
    drafter: planted-company/Unreleased-9B-DFlash
    family: toy
    thinking: either
    gated: false
"""


@pytest.fixture
def planted(own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> Path:
    """A home, an environment, chats, kernels, a check and errors that are full of what must not leave them."""
    home = own_home / PLANTED["user"]
    state, cubins = home / "state", home / "cache" / "cubins"
    folder = home / "models" / PLANTED["model folder"]
    for each in (state, cubins, folder, home / "data" / "chats"):
        each.mkdir(parents=True)
    monkeypatch.setattr("socket.gethostname", lambda: PLANTED["host"])
    for name, value in (
        ("HOME", str(home)),
        ("DFLASH_HOME", str(home)),
        ("USER", PLANTED["user"]),
        ("HF_TOKEN", PLANTED["token"]),
        ("OPENAI_API_KEY", PLANTED["other token"]),
        ("DB_PASSWORD", PLANTED["password"]),
        ("DFLASH_MODEL", str(folder)),
    ):
        monkeypatch.setenv(name, value)
    everything = f"{folder} " + " ".join(value for name, value in PLANTED.items() if name not in ("prompt", "reply"))
    chat = {"version": 1, "seq": 1, "kind": "turn", "role": "user", "content": PLANTED["prompt"]}
    (home / "data" / "chats" / "one.jsonl").write_text(json.dumps(chat), encoding="utf-8")
    findings = {"findings": [{"subject": "target", "state": "failed", "text": everything, "figures": {"x": 1.5}}]}
    checks = home / "cache" / CHECKS
    checks.mkdir(parents=True)
    (checks / "one.json").write_text(json.dumps(findings), encoding="utf-8")
    record = {"card": "A card", "source": "0" * 64, "verdicts": {f"k {everything}": "hang", "good": "right"}}
    (cubins / "kernels-0.json").write_text(json.dumps({**record, "choices": {"p": everything}}), encoding="utf-8")
    overlay = own_home / "overlay"
    write_overlay(overlay, OVERLAY)
    (home / "config").mkdir()
    written = overlay / ".config" / "dflash-local" / "registry.yaml"
    (home / "config" / "registry.yaml").write_text(written.read_text(encoding="utf-8"), encoding="utf-8")
    assert cli("run", "demo", "a", PLANTED["prompt"], PLANTED["reply"]).code == 2
    assert cli("run", str(folder), PLANTED["prompt"]).code == 2
    assert cli("show", PLANTED["model folder"]).code == 3
    assert cli("plan", "demo", "--gpu", PLANTED["prompt"]).code == 2
    return home


@pytest.mark.needs_torch
def test_a_report_holds_nothing_that_was_planted(cli: Cli, planted: Path, tmp_path: Path) -> None:
    done = cli("doctor", "--show", "--yes", "--report", str(tmp_path / "r.zip"))
    assert done.code == 0 and "nothing was sent" in done.err
    with zipfile.ZipFile(tmp_path / "r.zip") as archive:
        raw = {name: archive.read(name) for name in archive.namelist()}
    assert set(raw) == {f"{name}.json" for name in report_parts.PARTS}
    private = {**PLANTED, "home": str(planted), "login": getpass.getuser()}
    shorter = (PLANTED["token"][3:], "planted", "illness", "diagnosis", "Unreleased", "feedface")
    for secret in (*private.values(), *shorter):
        hits = [name for name, content in raw.items() if secret.lower().encode() in content.lower()]
        assert secret in ("root", "user") or not hits, (secret, hits)
        assert secret in ("root", "user") or secret.lower() not in done.out.lower()
    errors = json.loads(raw["errors.json"])
    assert [entry["command"] for entry in errors] == ["run", "run", "show", "plan"]
    assert errors[-1]["message"] == "unknown GPU …" and errors[-1]["where"]
    kernels = json.loads(raw["kernels.json"])[0]
    assert kernels["card"] == "A card" and kernels["right"] == 1 and list(kernels["failed"].values()) == ["hang"]
    assert json.loads(raw["check.json"])[0]["findings"][0]["figures"] == {"x": 1.5}


@pytest.mark.needs_torch
def test_a_row_of_ones_own_beside_public_ones_hides_only_itself(
    cli: Cli, own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_overlay(own_home, OVERLAY.replace(PLANTED["repository"], "Qwen/Secret-Finetune"))
    monkeypatch.setenv("DFLASH_MODEL", "a-folder-of-mine")
    said = {"text": "Qwen/Qwen3.5-9B Qwen/Secret-Finetune a-folder-of-mine demo"}
    folder = settings.load().cache_dir
    assert folder is not None
    (folder / CHECKS).mkdir(parents=True)
    (folder / CHECKS / "one.json").write_text(json.dumps(said), encoding="utf-8")
    assert cli("doctor", "--yes", "--report", str(tmp_path / "r.zip")).code == 0
    with zipfile.ZipFile(tmp_path / "r.zip") as archive:
        assert json.loads(archive.read("check.json"))[0]["text"] == "Qwen/Qwen3.5-9B <path> <path> demo"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that need no look at the machine."""
    parts = {"report": {"schema": 1, "created": "today", "versions": {}, "machine": {}}, "errors": []}
    monkeypatch.setattr(report_parts, "collect", lambda user: parts)


@pytest.mark.usefixtures("quick")
def test_nothing_is_written_where_nobody_agrees(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = cli("doctor", "--report", "r.zip")
    assert done.code == 2 and "report.json" in done.out and "--yes" in done.err
    assert cli("doctor", "--report", "r.zip", "--json").out == ""
    shown = cli("doctor", "--show")
    assert shown.code == 0 and '"created": "today"' in shown.out
    assert cli("doctor", "--show", "--json").json["file"] is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("quick")
def test_a_question_is_asked_and_its_answer_holds(cli: Cli, tmp_path: Path, answers: Callable[..., list[str]]) -> None:
    file = tmp_path / "r.zip"
    asked = answers(False, True, False)
    assert cli("doctor", "--report", str(file)).code == 0 and not file.exists()
    assert cli("doctor", "--report", str(file)).code == 0 and file.stat().st_mode & 0o777 == 0o600
    before = file.read_bytes()
    assert cli("doctor", "--report", str(file)).code == 0 and file.read_bytes() == before
    assert [question.split()[0] for question in asked] == ["Write", "Write", "Replace"]


@pytest.mark.usefixtures("quick")
def test_json_tells_what_was_written(cli: Cli, tmp_path: Path) -> None:
    found = cli("doctor", "--yes", "--json", "--report", str(tmp_path / "r.zip")).json
    assert found["bytes"] == (tmp_path / "r.zip").stat().st_size and found["parts"]["report"]["schema"] == 1


@pytest.mark.usefixtures("quick")
def test_places_that_cannot_be_written_are_told(cli: Cli, tmp_path: Path) -> None:
    assert cli("doctor", "--yes", "--report", str(tmp_path / "no" / "r.zip")).code == 2
    assert cli("doctor", "--yes", "--report", str(tmp_path)).code == 2


def replay(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``python -m tools.replay FILE`` does it."""
    monkeypatch.setattr("sys.argv", ["replay", str(file)])
    runpy.run_module("tools.replay", run_name="__main__")


@pytest.mark.needs_torch
def test_a_report_is_read_again(
    cli: Cli, planted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "r.zip"
    assert cli("doctor", "--yes", "--report", str(file)).code == 0
    replay(file, monkeypatch)
    page = capsys.readouterr().out
    assert page.isascii()
    found = json.loads(page)
    assert [one["model"] for one in found["plans"]] == ["demo", "demo-hybrid"]
    assert all(one["now"]["fits"] and one["changes"] == [] for one in found["plans"])
    (kernel,) = found["kernels"]
    assert (kernel["verdict"], kernel["card"]) == ("hang", "A card") and "--only kernels --again" in kernel["command"]


def test_a_damaged_report_is_told_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "r.zip").write_bytes(b"PK\3\4 no zip")
    for name, words in (("r.zip", "is damaged or no report"), ("none.zip", "No such file")):
        with pytest.raises(SystemExit, match=words):
            replay(tmp_path / name, monkeypatch)

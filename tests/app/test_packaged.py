"""A pair whose target is a package's file: which copy is taken, how it comes here, and how it goes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dflash_local import settings
from dflash_local.app import fitting
from dflash_local.app.loading import held
from dflash_local.app.models import install_status, installed, model_store, registry
from dflash_local.app.resolve import choose, resolve
from dflash_local.catalog.row import Repo
from tests.app.test_fine_tune import snapshot
from tests.cli.conftest import Cli, Opened, write_overlay
from tests.fake_hub import safetensors
from tests.fake_pip import FakePip, fake_pip
from tests.smollm2 import GGUF, TARGET, in_package, with_drafter


@pytest.fixture
def pip(tmp_path: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    """The package of smollm2's row, served by a fake pip to somebody who is online."""
    found = fake_pip(tmp_path / "pip", monkeypatch)
    write_overlay(own_home, in_package(found))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    return found


@pytest.fixture
def drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return with_drafter(tmp_path / "own", monkeypatch)


@pytest.fixture
def file(own_home: Path, pip: FakePip) -> Path:
    """Where the package's file comes to lie."""
    return own_home / ".cache" / "dflash-local" / "packages" / "a-model-1.0" / "A-Model.Q8_0.gguf"


def hub_copy(home: Path) -> Path:
    folder = snapshot(home, TARGET, {"config.json": "{}"})
    (folder / "model.safetensors").write_bytes(safetensors(64))
    return folder


def test_pulled_it_is_a_pair_of_a_file_and_the_own_drafter(
    cli: Cli, opened: Opened, pip: FakePip, file: Path, drafter: Path
) -> None:
    pulled = cli("pull", "smollm2", "--yes")
    assert pulled.code == 0, pulled.err
    assert pulled.out.splitlines() == ["a-model 1.0: 0.1 MiB verified", "next: dflash chat smollm2"]
    assert "to fetch with pip into" in pulled.err and file.read_bytes() == GGUF.read_bytes()
    ran = cli("run", "smollm2", "hi", "--no-fit-check")
    assert ran.code == 0 and ran.out.strip(), ran.err
    (pair,) = opened.pairs
    assert (pair.name, pair.target, pair.drafter, pair.toy) == ("smollm2", file, drafter, False)
    assert pair.thinking == "off" and pair.generations[0]["taps"] == [1, 8, 15, 22, 28]
    again = cli("pull", "smollm2", "--json").json
    assert again["to_fetch"] == 0 and again["packages"][0]["was_ready"] and len(pip.calls) == 1
    assert "smollm2" in installed(settings.load())


def test_chats_sample_as_its_authors_advise_and_runs_are_greedy(
    cli: Cli, opened: Opened, pip: FakePip, drafter: Path
) -> None:
    assert cli("pull", "smollm2", "--yes").code == 0
    assert cli("chat", "smollm2", "--no-fit-check", stdin="hi\n").code == 0
    (chat,) = (request.sampling for request in opened.session.requests)
    assert (chat.temperature, chat.top_p) == (0.2, 0.9)
    assert cli("run", "smollm2", "hi", "--no-fit-check").code == 0 and opened.session.requests[0].sampling.greedy
    assert "temperature 0.2, top-p 0.9" in " ".join(cli("show", "smollm2").out.split())


def test_without_a_network_or_an_answer_the_command_is_named(
    cli: Cli, opened: Opened, pip: FakePip, drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nobody = cli("run", "smollm2", "hi")
    assert nobody.code == 4 and "hint: dflash pull smollm2" in nobody.err
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    offline = cli("run", "smollm2", "hi")
    assert offline.code == 4 and "this is offline" in offline.err
    pulled = cli("pull", "smollm2", "--yes")
    assert pulled.code == 4 and "a-model 1.0 cannot be fetched: offline" in pulled.err and not pip.calls


def test_the_hub_s_copy_is_taken_where_it_is_named_or_all_that_is_here(
    pip: FakePip, own_home: Path, drafter: Path, file: Path
) -> None:
    user = settings.load()
    assert choose("smollm2", None, user).target == file and choose("smollm2", None, user).package == pip.package
    folder = hub_copy(own_home)
    assert choose("smollm2", None, user).target == Repo(TARGET)
    assert resolve("smollm2", None, user, lambda _notice: None).target == folder
    file.parent.mkdir(parents=True)
    shutil.copy(GGUF, file)
    assert choose("smollm2", None, user).target == file
    for name in (TARGET, "smollm2-135m-instruct"):
        named = choose(name, None, user)
        assert named.target == Repo(TARGET) and named.package is None and named.name == TARGET and named.own_drafter
        assert named.drafter == drafter


def test_it_is_planned_before_and_after_the_download(cli: Cli, pip: FakePip, drafter: Path, file: Path) -> None:
    before = cli("plan", "smollm2", "--json").json
    assert before["fits"] and before["plan"]["draft"] and before["plan"]["block_size"] == 8
    assert before["summary"]["download_gib"] == pytest.approx(pip.package.wheel_bytes / 2**30)
    shown = " ".join(cli("show", "smollm2").out.split())
    assert "by pip; or 0.25 GiB from the Hub" in shown and "here no; dflash pull smollm2" in shown
    assert before["to_fetch_gib"] == before["summary"]["download_gib"] and "0.1 MiB to download" in shown
    file.parent.mkdir(parents=True)
    shutil.copy(GGUF, file)
    known = fitting.shapes(choose("smollm2", None, settings.load()), None)
    assert known is not None and known.target.hidden_size == 64, "the file's own, once it is here"
    assert cli("plan", "smollm2", "--json").json["to_fetch_gib"] == 0
    assert "nothing to download" in cli("plan", "smollm2").out


def test_lists_know_it_and_rm_takes_it_away(cli: Cli, pip: FakePip, drafter: Path, file: Path) -> None:
    assert cli("pull", "smollm2", "--yes").code == 0
    listed = cli("models", "--here").out
    assert "smollm2  target  0.1 MiB" in listed and "complete" in listed
    assert f"0.1 MiB in {file.parent.parent}\n" in listed
    row = registry(settings.load()).find("smollm2")
    assert row is not None and install_status(row, model_store(settings.load())).state == "local"
    pair = resolve("smollm2", None, settings.load(), lambda _notice: None)
    with held(pair, settings.load()):
        busy = cli("rm", "smollm2", "--yes")
        assert busy.code != 0 and "a-model is in use by process" in busy.err and file.exists()
    gone = cli("rm", "smollm2", "--yes")
    assert gone.code == 0 and gone.out == "removed a-model: 0.1 MiB freed\n"
    assert not file.parent.exists() and not list(file.parent.parent.iterdir())
    assert "nothing of smollm2 is on this machine" in cli("rm", "smollm2", "--yes").err


def test_an_installation_without_the_drafter_has_the_target(cli: Cli, opened: Opened, pip: FakePip, file: Path) -> None:
    assert cli("pull", "smollm2", "--yes").code == 0
    refused = cli("run", "smollm2", "hi", "--no-fit-check")
    assert refused.code == 2 and "no drafter is known for smollm2" in refused.err
    assert cli("run", "smollm2", "hi", "--mode", "ar", "--no-fit-check").code == 0
    assert opened.pairs[-1].drafter is None

"""``dflash pull`` against a hub on loopback: a whole pair fetched, proven and run; each fault in words."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_local import settings
from dflash_local.store import transfer
from dflash_local.store.file_transfer import FileDownload
from dflash_local.store.hub import Hub
from dflash_local.store.hub_client import HubClient
from dflash_local.store.xet import fetch_over_xet
from tests.cli.conftest import DRAFTER, OVERLAY, TARGET, Cli, Opened, contents, write_overlay
from tests.fake_hub import FakeHub

PROMPT = "Write a Python function that returns the sum of a list of numbers."
WEIGHTS = "model.safetensors"


@pytest.fixture
def no_sockets(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def block() -> None:
        def refused(*_: object) -> None:
            raise AssertionError("a socket was opened")

        monkeypatch.setattr(socket.socket, "connect", refused)
        monkeypatch.setattr(socket, "getaddrinfo", refused)

    return block


@pytest.mark.needs_torch
def test_a_whole_pair_is_pulled_and_run_like_the_bundled_one(cli: Cli, toy_hub: FakeHub) -> None:
    pulled = cli("pull", "toy-9b")
    assert pulled.code == 0, pulled.err
    assert f"{TARGET}: 5.8 MiB verified, commit" in pulled.out and f"next: dflash chat {TARGET}" in pulled.out
    assert "7.4 MiB to fetch into" in pulled.err and "GiB free" in pulled.err
    options = ("--max-new-tokens", "48", "--json")
    ours, theirs = (cli("run", name, PROMPT, *options) for name in ("toys/toy-9b", "demo"))
    assert ours.code == 0, ours.err
    assert ours.json["token_ids"] == theirs.json["token_ids"] and "def " in ours.json["text"]
    assert ours.json["acceptance_lengths"] == theirs.json["acceptance_lengths"]
    assert "snapshots" in ours.json["target"] and "snapshots" in ours.json["drafter"]
    talked = cli("chat", DRAFTER, "--temperature", "0", "--max-new-tokens", "48", stdin=f"{PROMPT}\n/quit\n")
    assert talked.code == 0 and talked.out.strip() == ours.json["text"].strip()


def test_a_pair_that_is_here_opens_no_socket(
    cli: Cli, toy_hub: FakeHub, opened: Opened, no_sockets: Callable[[], None]
) -> None:
    assert cli("pull", TARGET).code == 0
    no_sockets()
    again = cli("pull", TARGET)
    assert again.code == 0 and "was here and verified" in again.out and "to fetch" not in again.err
    assert cli("run", TARGET, "hi").code == 0 and opened.pairs[-1].name == TARGET
    assert opened.pairs[-1].generations and opened.pairs[-1].thinking == "either"
    assert cli("pull", TARGET, "--json").json["repos"][0]["was_ready"] is True


def test_a_dry_run_says_what_a_pull_would_do_and_fetches_no_file(cli: Cli, toy_hub: FakeHub) -> None:
    shown = cli("pull", TARGET, "--dry-run")
    lines = shown.out.splitlines()
    assert shown.code == 0 and lines[1].split()[:4] == [TARGET, "6", "5.8", "MiB"]
    assert not toy_hub.gets() and cli("models", "--here", "--json").json["pairs"] == []
    asked = cli("pull", TARGET, "--dry-run", "--json").json
    assert asked["dry_run"] and asked["to_fetch"] == sum(repo["bytes"] for repo in asked["repos"]) > 7_000_000
    assert [repo["role"] for repo in asked["repos"]] == ["target", "drafter"]
    assert asked["repos"][1]["files"] == ["config.json", WEIGHTS]


@pytest.mark.parametrize(
    ("kind", "options", "words"), [("404", {}, WEIGHTS), ("403", {"code": "GatedRepo"}, "https://")]
)
def test_a_fault_of_a_file_exits_4_and_says_what(
    cli: Cli, toy_hub: FakeHub, kind: str, options: dict[str, Any], words: str
) -> None:
    toy_hub.fault(WEIGHTS, kind, times=99, **options)
    failed = cli("pull", TARGET)
    error = next(line for line in failed.err.splitlines() if line.startswith("error: "))
    assert failed.code == 4 and words in failed.err and "Traceback" not in failed.err, failed.err
    assert TARGET in error or DRAFTER in error or WEIGHTS in error
    assert failed.out == "" and cli("models", "--json").json["pairs"][-1]["state"] != "local"
    run = cli("run", TARGET, "hi")
    assert run.code == 4 and f"dflash pull {TARGET}" in run.err


def test_a_drafter_of_another_shape_is_refused_before_any_weight(cli: Cli, toy_hub: FakeHub, own_home: Path) -> None:
    write_overlay(own_home, OVERLAY.replace("layers: 2", "layers: 6"))
    wrong = cli("pull", TARGET)
    assert wrong.code == 6 and DRAFTER in wrong.err and "layers 2, not 6" in wrong.err
    assert not toy_hub.gets(WEIGHTS)
    assert cli("pull", TARGET, "--allow-mismatch").code == 0


def test_any_target_can_be_pulled_with_a_drafter_named(cli: Cli, toy_hub: FakeHub, opened: Opened) -> None:
    toy_hub.add_repo("own/Tuned", contents(toy_hub, TARGET))
    assert cli("pull", "own/Tuned").code == 3
    pulled = cli("pull", "own/Tuned", "--drafter", DRAFTER)
    assert pulled.code == 0 and f"next: dflash chat own/Tuned --drafter {DRAFTER}" in pulled.out
    assert cli("run", "own/Tuned", "hi", "--drafter", DRAFTER).code == 0
    assert opened.pairs[-1].drafter is not None and opened.pairs[-1].generations == ()


def test_xet_is_for_the_pulls_that_ask_for_it(cli: Cli, toy_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def noted(hub: Hub, download: FileDownload, client: HubClient) -> None:
        asked.append(download.name)
        fetch_over_xet(hub, download, client)

    monkeypatch.setattr(transfer, "fetch_over_xet", noted)
    assert cli("pull", TARGET, "--dry-run", "--xet").code == 0 and asked == []
    done = cli("pull", TARGET, "--xet")
    assert done.code == 0 and "verified" in done.out
    assert f"model.safetensors of {TARGET}" in asked and not any("config.json" in name for name in asked)
    assert "makes its own connections" in " ".join(cli("pull", "--help").out.split())


def test_what_needs_no_pull_is_said(cli: Cli, toy_hub: FakeHub) -> None:
    bundled = cli("pull", "demo")
    assert bundled.code == 0 and "comes with the package" in bundled.out
    announced = cli("pull", "zai-org/GLM-5.1")
    assert announced.code == 4 and "announced" in announced.err
    unknown = cli("pull", "toy-8b")
    assert unknown.code == 3 and TARGET in unknown.err
    two = cli("pull", TARGET, "demo", "--drafter", DRAFTER)
    assert two.code == 2 and "one MODEL" in two.err


def test_what_does_not_fit_is_asked_about(
    cli: Cli, toy_hub: FakeHub, answers: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dflash_local.app import download
    from dflash_local.app.recommending import Summary
    from dflash_local.planner.machine import Machine

    monkeypatch.setattr(download, "summary", lambda choice, *_, variants: Summary(choice.name, "needs 99 GiB"))
    monkeypatch.setattr(download, "machine", lambda *_, **__: Machine("a toy GPU", "cuda", 2**30, 2**30, ""))
    alone = cli("pull", TARGET)
    assert alone.code == 5 and "needs 99 GiB" in alone.err and "--force" in alone.err and not toy_hub.gets()
    asked = answers(False)
    assert cli("pull", TARGET).code == 130 and "Download it all the same?" in asked[0] and not toy_hub.gets()
    assert cli("pull", TARGET, "--force").code == 0 and len(asked) == 1


def test_a_pull_takes_what_the_settings_load(cli: Cli, toy_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from dflash_local.app import recommending
    from dflash_local.planner.machine import named

    sizes = {"cuda:0": 24.0, "auto": 80.0}
    monkeypatch.setenv("DFLASH_DEVICE", "cuda:0")
    with monkeypatch.context() as patch:
        patch.setattr(recommending, "machine", lambda _user, device: named(None, sizes[device]))
        assert "Lorbus/Qwen3.6-27B-int4-AutoRound (published in 4 bits) is taken" in cli("pull", "qwen3.6-27b").err
    for name, value in (("DEVICE", "cuda:7"), ("DTYPE", "float16"), ("KV_CACHE", "int8")):
        monkeypatch.setenv(f"DFLASH_{name}", value)
    assert cli("pull", TARGET, "--dry-run").code == 0, "a load says what these do not suit"


def test_without_a_home_there_is_no_place_for_models(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HOME", "HF_HUB_CACHE", "HOME", "USERPROFILE", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert settings.load().hub.cache is None
    for argv in (("pull", "Qwen/Qwen3-4B"), ("run", "Qwen/Qwen3-4B", "hi")):
        result = cli(*argv)
        assert result.code in (3, 4) and "HF_HOME" in result.err

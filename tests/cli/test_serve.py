"""``dflash serve``: addresses and tokens, the record for other commands, exit codes. The signals are real."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import stat
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dflash_local.api.server import GRACE_S, WIND_DOWN_S, ApiServer
from dflash_local.catalog.bundled import Pair
from dflash_local.cli import serving as cli_serving
from dflash_local.cli.address import Address, curl_line, origins_of, parse_duration
from dflash_local.errors import CheckpointError, EngineError, UsageError
from tests.cli.conftest import Cli, Opened, Result
from tests.cli.served import Client, records_of
from tests.service.scripted import ScriptedSession

CHAT = "/v1/chat/completions"
ASKED = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}


def test_it_serves_until_sigterm_and_exits_0(serving: Callable[..., Result], opened: Opened, own_home: Path) -> None:
    seen: dict[str, Any] = {}

    def visit(client: Client) -> None:
        seen["chat"] = client.call(CHAT, ASKED)
        seen["models"] = client.call("/v1/models")
        seen["record"] = client.record
        seen["mode"] = stat.S_IMODE(records_of(own_home)[0].stat().st_mode)

    result = serving(visit)  # demo, where nothing else is here
    assert result.code == 0 and result.out == ""
    assert seen["chat"][0] == 200 and seen["chat"][1]["choices"][0]["message"]["content"] == "Hello, world!\n"
    assert [one["id"] for one in seen["models"][1]["data"]] == ["demo"]
    assert seen["record"]["owner"]["pid"] == os.getpid() and seen["record"]["model"] == "demo"
    assert seen["mode"] == 0o600, "the record is private"
    assert f"{seen['record']['address']}/v1" in result.err and "curl" in result.err
    assert opened.session.closed and len(opened.sessions) == 1


def test_the_context_is_told_before_anything_is_loaded_and_ctrl_c_is_an_orderly_end_too(
    serving: Callable[..., Result], opened: Opened
) -> None:
    seen: list[Any] = []
    options = ("--keep-alive", "0", "--context", "1000")
    ended = serving(lambda client: seen.append(client.call("/v1/models")[1]), "demo", *options, by=signal.SIGINT)
    assert ended.code == 0 and seen[0]["data"][0]["max_model_len"] == 1000 and not opened.sessions


def test_open_streams_end_with_an_error_event(
    serving: Callable[..., Result], opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert GRACE_S + WIND_DOWN_S < 5
    monkeypatch.setattr(cli_serving, "ApiServer", partial(ApiServer, grace_s=0.2))
    opened.make = lambda _pair: ScriptedSession(gate=threading.Event())
    streams: list[Future[tuple[int, str]]] = []
    with ThreadPoolExecutor(3) as pool:

        def visit(client: Client) -> None:
            streams.extend(pool.submit(client.ask, CHAT, {**ASKED, "stream": True}) for _ in range(3))
            while client.call("/health")[1]["waiting"] < 2:
                time.sleep(0.01)

        assert serving(visit, "demo").code == 0
    assert len(streams) == 3 and all("stopping" in stream.result()[1] for stream in streams)


def test_a_broken_engine_exits_7(serving: Callable[..., Result], opened: Opened) -> None:
    opened.make = lambda _pair: ScriptedSession(faults=[EngineError("the kernel died")])
    seen: list[tuple[int, Any]] = []

    def visit(client: Client) -> None:
        seen.extend([client.call(CHAT, ASKED), client.call("/health")])

    result = serving(visit, "demo")
    assert [status for status, _ in seen] == [500, 503]
    assert result.code == 7 and "the kernel died" in result.err


def test_a_model_that_does_not_load_ends_the_server_with_its_exit_code(
    serving: Callable[..., Result], opened: Opened
) -> None:
    def refuse(_pair: Pair) -> ScriptedSession:
        raise CheckpointError("a damaged file")

    def until_it_is_gone(client: Client) -> None:
        with pytest.raises(OSError):
            while True:
                client.call("/health", timeout=5)  # nobody takes up a connection that came too late

    opened.make = refuse
    result = serving(until_it_is_gone, "demo")
    assert result.code == 6 and "a damaged file" in result.err


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "myhost.lan"])
def test_an_open_address_without_a_token_is_refused(cli: Cli, opened: Opened, host: str) -> None:
    result = cli("serve", "demo", "--host", host)
    assert result.code == 2 and "token" in result.err and "DFLASH_TOKEN" in result.err and "ssh -L" in result.err
    assert not opened.sessions


def test_origins_are_written_as_browsers_do(cli: Cli, opened: Opened) -> None:
    given = ["HTTPS://App.Example:443", "http://localhost:3000", "app://obsidian.md", "http://[::1]:80"]
    assert origins_of(given) == {"https://app.example", "http://localhost:3000", "app://obsidian.md", "http://[::1]"}
    for wrong in ("*", "null", "app.example", "https://app.example/", "https://*.example", "https://a@b.example", ""):
        result = cli("serve", "demo", "--allow-origin", "https://fine.example", "--allow-origin", wrong)
        assert result.code == 2 and repr(wrong) in result.err and "https://app.example" in result.err
    assert not opened.sessions


def test_a_page_that_is_allowed_is_told_so(serving: Callable[..., Result], opened: Opened) -> None:
    seen: list[str | None] = []

    def visit(client: Client) -> None:
        asked = urllib.request.Request(f"{client.record['address']}/health", headers={"Origin": "https://app.example"})
        with urllib.request.urlopen(asked) as answer:
            seen.append(answer.headers["access-control-allow-origin"])

    assert serving(visit, "demo", "--allow-origin", "https://app.example").code == 0
    assert seen == ["https://app.example"]


@pytest.mark.parametrize("place", ["variable", "file"])
def test_a_token_opens_it_and_is_asked_for(
    serving: Callable[..., Result], opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    file = tmp_path / "token"
    file.write_text("a-secret-of-mine\n", encoding="utf-8")  # it may end with a line break
    if place == "variable":
        monkeypatch.setenv("DFLASH_TOKEN", "a-secret-of-mine")
    seen: list[int] = []

    def visit(client: Client) -> None:
        for headers in ({}, {"Authorization": "Bearer a-secret-of-mine"}):
            seen.append(client.call("/v1/models", headers=headers)[0])
        assert "a-secret-of-mine" not in json.dumps(client.record) and client.record["token"] is True

    result = serving(visit, "demo", "--host", "0.0.0.0", *(("--token-file", str(file)) if place == "file" else ()))
    assert result.code == 0 and seen == [401, 200]
    assert "a-secret-of-mine" not in result.err and "$DFLASH_TOKEN" in result.err


def test_tokens_that_no_header_can_carry_are_refused(cli: Cli, opened: Opened, tmp_path: Path) -> None:
    for token in ("short", "with space in it", "new\nline-in-it", "é" * 10):
        result = cli("serve", "demo", "--token", token)
        assert result.code == 2 and token not in result.err
    assert cli("serve", "demo", "--token", "x" * 20, "--token-file", "f").code == 2
    assert cli("serve", "demo", "--token-file", str(tmp_path / "none")).code == 2


def test_a_port_in_use_is_exit_2_before_anything_is_loaded(cli: Cli, opened: Opened) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = cli("serve", "demo", "--port", str(port))
    assert result.code == 2 and f"port {port}" in result.err and "--port" in result.err
    assert not opened.sessions


@pytest.mark.parametrize("argv", [("--port", "70000"), ("--host", "203.0.113.9", "--token", "long-enough-token")])
def test_impossible_ports_and_addresses_are_exit_2(cli: Cli, opened: Opened, argv: tuple[str, ...]) -> None:
    result = cli("serve", "demo", *argv)
    assert result.code == 2 and argv[0] in result.err and not opened.sessions


def test_a_folder_is_served_by_its_name_never_by_its_path(
    serving: Callable[..., Result], opened: Opened, toys: Path
) -> None:
    seen: list[Any] = []

    def visit(client: Client) -> None:
        seen.append(client.call("/v1/models")[1]["data"][0]["id"])
        seen.append(client.call("/dflash/v1/load", {"model": str(toys / "demo" / "target")})[0])

    argv = (str(toys / "demo" / "target"), "--drafter", str(toys / "demo" / "drafter"))
    assert serving(visit, *argv).code == 0
    assert seen == ["target", 404]


def test_the_model_can_be_switched_to_another_that_is_here(serving: Callable[..., Result], opened: Opened) -> None:
    seen: list[Any] = []

    def visit(client: Client) -> None:
        status, body = client.call("/dflash/v1/load", {"model": "demo-hybrid"})
        seen.extend([status, body["model"], client.call(CHAT, ASKED)[0]])
        seen.append(client.call(CHAT, {**ASKED, "model": "demo-hybrid"})[0])
        seen.append(client.call("/dflash/v1/load", {"model": "Qwen/Qwen3-8B"})[0])  # known, and not here

    assert serving(visit, "demo").code == 0
    assert seen == [200, "demo-hybrid", 404, 200, 404]
    assert [pair.name for pair in opened.pairs] == ["demo", "demo-hybrid"] and opened.sessions[0].closed


def test_keep_alive_zero_loads_with_the_first_request(serving: Callable[..., Result], opened: Opened) -> None:
    seen: list[Any] = []

    def visit(client: Client) -> None:
        seen.append((client.call("/health")[1]["state"], len(opened.sessions)))
        client.call(CHAT, ASKED)
        while client.call("/health")[1]["state"] != "unloaded":
            time.sleep(0.01)

    assert serving(visit, "demo", "--keep-alive", "0").code == 0
    assert seen == [("unloaded", 0)] and opened.session.closed


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30m", 1800), ("90s", 90), ("90", 90), ("2h", 7200), ("0", 0), ("0.5m", 30), ("never", None), (" 5 M ", 300)],
)
def test_durations(text: str, seconds: float | None) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-5", "5d", "m", "1e3", "nan", "9" * 400])
def test_durations_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="--keep-alive"):
        parse_duration(text)


def test_hosts_that_are_answered_to() -> None:
    named = cli_serving.rules_for(Address("box.lan", 1, "t", ("Other.Name",)))
    assert named.hosts == {"box.lan", "other.name"} and not named.any_address
    everywhere = cli_serving.rules_for(Address("0.0.0.0", 1, "t"))
    assert everywhere.any_address and "host.docker.internal" in everywhere.hosts and "0.0.0.0" not in everywhere.hosts


def test_the_curl_line_is_one_a_shell_understands() -> None:
    words = shlex.split(curl_line(Address("::1", 8000, "secret"), "a'b"))
    assert words[1] == "http://[::1]:8000/v1/chat/completions" and "secret" not in " ".join(words)
    assert json.loads(words[-1])["model"] == "a'b"

"""``dflash web``: the command, its record, what it attaches to, its token; variables that must not open anything."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cli.conftest import Cli, Opened, Result
from tests.cli.served import Client, records_of
from tests.remote.launched_fake import fake_program, wait_until_gone
from tests.remote.openai_fake import Fake, running

pytestmark = pytest.mark.usefixtures("opened")

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "a-secret-of-mine"
needs_page = pytest.mark.skipif(
    importlib.util.find_spec("gradio") is None, reason="gradio is not installed: pip install gradio"
)
Web = Callable[..., Result]


def test_without_its_library_it_says_how_to_get_it(cli: Cli, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("dflash_local.ui.web", "gradio"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "gradio", None)
    result = cli("web", "demo")
    assert result.code == 1 and "gradio is not installed" in result.err
    assert "pip install gradio" in result.err and not opened.sessions


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5"])
def test_other_machines_need_a_token(cli: Cli, opened: Opened, host: str) -> None:
    result = cli("web", "demo", "--host", host)
    assert result.code == 2 and "token" in result.err and not opened.sessions


@needs_page
def test_page_and_endpoint_are_one_server_with_a_record(web: Web, opened: Opened, own_home: Path) -> None:
    seen: dict[str, Any] = {}

    def visit(here: Client) -> None:
        seen["page"] = here.ask("/")
        seen["models"] = json.loads(here.ask("/v1/models")[1])
        seen["record"] = json.loads(records_of(own_home)[0].read_text(encoding="utf-8"))
        seen["port"] = here.port
        while not opened.sessions:
            time.sleep(0.01)

    result = web(visit, "demo")
    assert result.code == 0 and result.out == ""
    assert seen["page"][0] == 200 and '"title":"dflash"' in seen["page"][1]
    assert [one["id"] for one in seen["models"]["data"]] == ["demo"]
    assert seen["record"]["model"] == "demo" and seen["record"]["address"].endswith(f":{seen['port']}")
    assert f"in a browser: http://127.0.0.1:{seen['port']}/" in result.err
    assert not records_of(own_home) and all(session.closed for session in opened.sessions)


@needs_page
@pytest.mark.skipif(os.name != "posix", reason="the browser is a shell script")
def test_open_opens_the_page_in_a_browser_without_secrets(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    browser, seen = tmp_path / "browser", tmp_path / "seen"
    browser.write_text(f'#!/bin/sh\nenv > {seen}~\necho "$1" >> {seen}~\nmv {seen}~ {seen}\n', encoding="utf-8")
    browser.chmod(0o755)
    monkeypatch.setenv("BROWSER", f"{browser} %s")
    monkeypatch.setenv("HF_TOKEN", "a-secret")

    def visit(here: Client) -> None:
        while not seen.exists():
            time.sleep(0.01)
        assert seen.read_text(encoding="utf-8").endswith(f"\nhttp://127.0.0.1:{here.port}/\n")

    assert web(visit, "demo", "--open").code == 0 and "a-secret" not in seen.read_text(encoding="utf-8")


@needs_page
def test_page_and_endpoint_over_a_running_server(web: Web, opened: Opened, own_home: Path) -> None:
    seen: dict[str, Any] = {}

    def visit(here: Client) -> None:
        seen["page"] = here.ask("/")[0]
        while json.loads(here.ask("/dflash/v1/status")[1])["state"] != "ready":
            time.sleep(0.01)
        seen["models"] = json.loads(here.ask("/v1/models")[1])
        seen["record"] = json.loads(records_of(own_home)[0].read_text(encoding="utf-8"))

    with running(Fake(model="house-model")) as fake:
        result = web(visit, "--url", fake.url)
    assert result.code == 0 and not opened.sessions, result.err
    assert seen["page"] == 200 and [one["id"] for one in seen["models"]["data"]] == ["house-model"]
    assert "house-model in a browser: http://127.0.0.1:" in result.err and "replies come from vLLM" in result.err


@needs_page
def test_a_launched_server_ends_with_the_page(web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = fake_program(tmp_path / "bin", monkeypatch)

    def visit(here: Client) -> None:
        while json.loads(here.ask("/dflash/v1/status")[1])["state"] != "ready":
            time.sleep(0.01)

    result = web(visit, "--engine", "vllm", "--engine-args", "--max-model-len 512")
    started = json.loads(record.read_text(encoding="utf-8"))
    assert result.code == 0 and started["argv"][-2:] == ["--max-model-len", "512"], result.err
    assert "demo (toy pair) in a browser" in result.err and wait_until_gone(started["pid"])


@needs_page
@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (("demo", "--plain-url", "http://127.0.0.1:1"), 2, "--url is missing"),
        (("demo", "--url", "http://127.0.0.1:1"), 7, "no server answers"),
        (("demo", "--url", "http://127.0.0.1:1", "--keep-alive", "1h"), 2, "keeps its model loaded"),
        (("demo", "--url", "http://127.0.0.1:1", "--context", "512"), 2, "decides that when it is started"),
        (("demo", "--engine", "sglang"), 1, "SGLang is not on PATH"),
    ],
)
def test_a_server_that_will_not_do_ends_it(cli: Cli, argv: tuple[str, ...], code: int, words: str) -> None:
    result = cli("web", *argv, "--port", "0")
    assert result.code == code and words in result.err and "Traceback" not in result.err


@needs_page
def test_the_token_is_the_password_of_the_page_and_the_bearer_of_the_endpoint(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_TOKEN", TOKEN)
    seen: list[int] = []

    def visit(here: Client) -> None:
        password = base64.b64encode(f"me:{TOKEN}".encode()).decode()
        for path in ("/", "/v1/models"):
            for value in ("", f"Basic {password}", f"Bearer {TOKEN}"):
                seen.append(here.ask(path, headers={"Authorization": value} if value else {})[0])

    result = web(visit, "demo", "--host", "0.0.0.0")
    assert result.code == 0 and seen == [401, 200, 200] * 2
    assert TOKEN not in result.err and "password" in result.err


OPENERS = {
    "GRADIO_SHARE": "1",
    "GRADIO_SERVER_NAME": "0.0.0.0",
    "GRADIO_SERVER_PORT": "7999",
    "GRADIO_ALLOWED_PATHS": "/",
    "GRADIO_BLOCKED_PATHS": "",
    "GRADIO_ROOT_PATH": "/elsewhere",
    "GRADIO_MCP_SERVER": "True",
    "GRADIO_SSR_MODE": "True",
    "GRADIO_NODE_SERVER_NAME": "0.0.0.0",
    "GRADIO_ANALYTICS_ENABLED": "True",
    "GRADIO_RUN_HISTORY": "True",
    "GRADIO_HISTORY_BUCKET": "somebody/else",
    "GRADIO_VIBE_MODE": "1",
    "GRADIO_PROFILING": "1",
    "HF_HUB_DISABLE_TELEMETRY": "0",
    "FASTAPI_OTEL_AUTO_CONFIGURE": "true",
    "OTEL_EXPORTER_OTLP_ENDPOINT": "http://telemetry.example:4318",
    "SPACE_ID": "somebody/space",
    "SYSTEM": "spaces",
}
WATCHED = """
import json, socket, sys

reached = []
connect, look_up = socket.socket.connect, socket.getaddrinfo

def is_other(host):
    return host not in (None, "localhost", "::1") and not str(host).startswith("127.")

def watched(self, address):
    if self.family != socket.AF_UNIX and is_other(address[0]):
        reached.append(str(address))
        raise OSError("no network in a test")
    return connect(self, address)

def looked_up(host, *args, **more):
    if is_other(host):
        reached.append(str(host))
        raise OSError("no network in a test")
    return look_up(host, *args, **more)

socket.socket.connect, socket.getaddrinfo = watched, looked_up

from dflash_local.cli.main import main
code = main(["web", "demo", "--port", "0", "--keep-alive", "0"])
print(json.dumps(reached))
sys.exit(code)
"""
NOT_SERVED = (
    *("/gradio_api/file=/etc/hostname", "/gradio_api/mcp/", "/gradio_api/mcp/sse", "/monitoring"),
    *("/gradio_api/runs", "/gradio_api/profiling/summary", "/elsewhere/"),
)


@needs_page
@pytest.mark.skipif(os.name != "posix", reason="Windows has no such modes of a folder")
def test_no_variable_shares_opens_or_reports_anything_and_the_temporary_folder_is_private(
    own_home: Path, tmp_path: Path
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environ = {**os.environ, **OPENERS, "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with ExitStack() as stack:
        process = stack.enter_context(
            subprocess.Popen([sys.executable, "-c", WATCHED], env=environ, text=True, **pipes)
        )
        stack.callback(process.kill)  # what fails here must not be waited for
        assert process.stderr is not None
        assert any("in a browser" in line for line in process.stderr), "it never began"
        here = Client(json.loads(records_of(own_home)[0].read_text(encoding="utf-8")))
        page, config, known = (here.ask(path) for path in ("/", "/config", "/gradio_api/app_id"))
        assert page[0] == config[0] == known[0] == 200
        assert {path: here.ask(path)[0] for path in NOT_SERVED} == dict.fromkeys(NOT_SERVED, 404)
        assert json.loads(config[1])["analytics_enabled"] is False and "/elsewhere" not in page[1] + config[1]
        server = psutil.Process(process.pid)
        listening = {one.laddr.ip for one in server.net_connections("inet") if one.status == psutil.CONN_LISTEN}
        assert listening == {"127.0.0.1"} and server.children(recursive=True) == []
        (folder,) = temporary.iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700
        process.send_signal(signal.SIGTERM)
        reached, _ = process.communicate(timeout=60)
    assert json.loads(reached) == [] and list(temporary.iterdir()) == []

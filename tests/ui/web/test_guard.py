"""What the page's server refuses: foreign hosts and pages, uploads, and every path that the page does not need."""

from __future__ import annotations

import base64
import http.client
import json
import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from dflash_local.api import openapi
from dflash_local.api.guard import Rules
from tests.ui.web.stand import Site, site

TOKEN = "correct-horse-battery"
JOIN = "/gradio_api/queue/join"
UPLOAD = "/gradio_api/upload"
BOUNDARY = "xxxx"
PARTS = (
    f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="files"; filename="a.txt"\r\n\r\n'.encode()
    + b"x" * 100_000
    + f"\r\n--{BOUNDARY}--\r\n".encode()
)
MULTIPART = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
# Gradio's other routes, all of them.
CLOSED = """
file=/etc/passwd file/etc/passwd proxy=http://127.0.0.1:1/ upload upload_progress component_server dev/reload
stream/x stream/x/close stream/x/1/2/playlist.m3u8 stream/x/1/2/playlist-file stream/x/1/2/3.ts process_recording
queue/status deep_link openapi.json info run/_send api/_send call/_send call/v2/_send call/_send/x runs
run-history/records run-history/buckets run-history/connect monitoring monitoring/summary monitoring/x
profiling/summary profiling/traces profiling/clear vibe-edit vibe-code undo-vibe-edit vibe-starter-queries
mcp mcp/ mcp/sse mcp/schema login login_check logout token user custom_component/x/client/component/a.js pwa_icon
""".split()
OUTSIDE = """
/static/../../../pyproject.toml /static/%2e%2e/%2e%2e/routes.py /assets/..%2f..%2froutes.py //etc/passwd
/svelte/../../../routes.py /static//etc/passwd /assets/%2fetc%2fpasswd
""".split()


@pytest.fixture(scope="module")
def here() -> Iterator[Site]:
    """A page that nobody looks at."""
    with site() as running:
        yield running


def ask(
    here: Site, method: str, path: str, headers: Mapping[str, str] | None = None, body: bytes | None = None
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", here.port, timeout=60)
    try:
        connection.request(method, path, body, dict(headers or {}))
        answer = connection.getresponse()
        return answer.status, {key.lower(): value for key, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def test_the_page_is_there_says_what_the_browser_may_load_or_keep_and_has_no_name_for_programs(here: Site) -> None:
    for path in ("/", "/config", "/theme.css", "/gradio_api/app_id"):
        status, headers, body = ask(here, "GET", path)
        assert status == 200, path
        assert "default-src 'self'" in headers["content-security-policy"]
        assert headers["x-frame-options"] == "DENY" and "access-control-allow-origin" not in headers
        if path == "/config":
            assert headers["cache-control"] == "no-store"
            names = {one["api_visibility"] for one in json.loads(body)["dependencies"]}
            assert names == {"private"}, "programs have the OpenAI endpoint"
    _, headers, _ = ask(here, "GET", "/static/img/logo.svg")
    assert headers["cache-control"] == "private, max-age=86400", "it is named by its content"


@pytest.mark.parametrize("path", ["/", "/config", "/gradio_api/app_id", "/static/img/logo.svg"])
def test_the_page_does_not_answer_to_a_foreign_host(here: Site, path: str) -> None:
    for host in ("evil.example", "evil.example:7860", "127.0.0.1.nip.io"):
        status, headers, _ = ask(here, "GET", path, {"Host": host})
        assert status == 400 and "access-control-allow-origin" not in headers, host


@pytest.mark.parametrize("origin", ["http://evil.example", "https://evil.example", "null", "http://localhost:3000"])
def test_no_other_page_may_use_it(here: Site, origin: str) -> None:
    join = json.dumps({"data": [], "fn_index": 0, "session_hash": "x"}).encode()
    for method, path in (("POST", JOIN), ("GET", "/"), ("OPTIONS", JOIN), ("POST", "/gradio_api/cancel")):
        headers = {"Origin": origin, "Content-Type": "application/json"}
        status, answered, _ = ask(here, method, path, headers, join if method == "POST" else None)
        assert status == 403 and not [name for name in answered if name.startswith("access-control")]


def test_a_foreign_upload_is_refused_before_it_is_read(here: Site) -> None:
    for origin in ("http://evil.example", "null"):
        head = f"POST {UPLOAD} HTTP/1.1\r\nHost: 127.0.0.1\r\nOrigin: {origin}\r\nContent-Length: 30000000\r\n"
        with socket.create_connection(("127.0.0.1", here.port), 10) as sock:
            sock.sendall(f"{head}Content-Type: {MULTIPART['Content-Type']}\r\n\r\n".encode() + PARTS[:100])
            assert sock.recv(65536).split(b" ", 2)[1] == b"403"


def test_no_upload_of_its_own_is_taken_either(here: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))
    own = {"Origin": f"http://127.0.0.1:{here.port}", **MULTIPART}
    for path in (UPLOAD, "/upload", "/gradio_api/upload/"):
        assert ask(here, "POST", path, own, PARTS)[0] == 404
    assert list(tmp_path.rglob("*")) == []


def test_only_what_the_page_needs_is_served(here: Site) -> None:
    kind = {"Content-Type": "application/json"}
    for path in CLOSED:
        for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH"):
            body = b"{}" if method in ("POST", "PUT", "PATCH") else None
            for whole in (f"/gradio_api/{path}", f"/{path}"):
                ours = whole == openapi.PATH and method in ("GET", "HEAD")  # the endpoint's page, not Gradio's
                assert ask(here, method, whole, kind, body)[0] == (200 if ours else 404), f"{method} {whole}"
    for path in OUTSIDE:
        status, _, found = ask(here, "GET", path)
        assert status in (400, 403, 404) and b"root:" not in found and b"import " not in found, path


def test_the_token_is_the_password_of_the_page_and_the_bearer_of_the_endpoint() -> None:
    def basic(word: str) -> dict[str, str]:
        return {"Authorization": f"Basic {base64.b64encode(f'anybody:{word}'.encode()).decode()}"}

    with site(rules=Rules(token=TOKEN)) as guarded:
        for path in ("/", "/config", "/gradio_api/app_id", "/v1/models"):
            status, headers, _ = ask(guarded, "GET", path)
            assert status == 401 and "Basic" in headers["www-authenticate"]
            assert ask(guarded, "GET", path, basic("wrong-horse-battery"))[0] == 401
            assert ask(guarded, "GET", path, basic(TOKEN))[0] == 200
            assert ask(guarded, "GET", path, {"Authorization": f"Bearer {TOKEN}"})[0] == 200

"""Bodies that name a file, at any depth and in any disguise: refused before Gradio sees them, and nothing is copied."""

from __future__ import annotations

import gzip
import http.client
import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from dflash_local.api.log import send_lines_to
from dflash_local.errors import UsageError
from dflash_local.request import MAX_DEPTH
from dflash_local.ui.web.mount import MAX_VALUES, check_body
from tests.ui.web.stand import Site, join, listen_to, site

SECRET = "-----BEGIN OPENSSH PRIVATE KEY-----"
ROUTES = ("queue/join", "cancel", "reset")
ARGUMENTS = ("message", "history", "system", "temperature", "mode", "data", "event_data", "session_hash")
JSON_TYPES = ("application/json", "application/vnd.api+json", "text/plain", "application/x-www-form-urlencoded")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that Gradio would copy files to."""
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(folder))
    return folder


@pytest.fixture
def here(cache: Path) -> Iterator[Site]:
    with site() as running:
        yield running


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    file = tmp_path / "id_rsa"
    file.write_text(SECRET)
    return file


def buried(rng: random.Random, value: Any) -> Any:
    """The value inside of lists and objects, up to the depth that is let through."""
    for _ in range(rng.choice((0, 1, 2, 5, 20, MAX_DEPTH - 6))):
        around: list[Any] = [rng.choice((None, 1, "x", [], {"role": "user"})) for _ in range(rng.randrange(3))]
        if rng.random() < 0.5:
            value = {**{f"k{n}": one for n, one in enumerate(around)}, rng.choice(("value", "data", "meta")): value}
        else:
            value = [*around, value, *around]
    return value


def body_of(rng: random.Random, path: str) -> bytes:
    """A body for Gradio with one file in it."""
    file: dict[str, Any] = {"path": path, "meta": {"_type": "gradio.FileData"}}
    file |= rng.choice(
        ({}, {"url": path}, {"orig_name": "a", "size": 3, "is_stream": False}, {"mime_type": "image/svg"})
    )
    items = list(file.items())
    rng.shuffle(items)
    hidden = buried(rng, dict(items))
    body: dict[str, Any] = {"fn_index": rng.randrange(60), "session_hash": "x", "data": ["hi", None, ""]}
    if rng.random() < 0.5:
        body["data"][rng.randrange(3)] = hidden
    else:
        body[rng.choice(ARGUMENTS)] = hidden
    text = json.dumps(body)
    for plain, escaped in (('"path"', '"p\\u0061th"'), ('"_type"', '"\\u005ftype"'), ("FileData", "File\\u0044ata")):
        text = text.replace(plain, rng.choice((plain, escaped)))
    if rng.random() < 0.2:  # a key twice: the last one counts for most readers
        text = text.replace('"path":', '"path": 1, "path":') if rng.random() < 0.5 else text[:-1] + ', "data": []}'
    return text.encode(rng.choice(("utf-8", "utf-8", "utf-8", "utf-8-sig", "utf-16", "utf-32-le")))


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])  # minutes
def test_no_body_makes_the_page_copy_a_file(here: Site, cache: Path, secret: Path, count: int) -> None:
    rng = random.Random(count)
    before = set(cache.rglob("*"))
    connection = http.client.HTTPConnection("127.0.0.1", here.port, timeout=30)

    def send(path: str, body: bytes, headers: Mapping[str, str]) -> int:
        connection.request("POST", f"/gradio_api/{path}", body, dict(headers))
        answer = connection.getresponse()
        answer.read()
        return answer.status

    for _ in range(count):
        body = body_of(rng, rng.choice((str(secret), "http://127.0.0.1:9/x", "https://example.com/x")))
        kind = {"Content-Type": rng.choice(JSON_TYPES)}
        assert send(rng.choice(ROUTES), body, kind) == 400, body
        if rng.random() < 0.05:
            assert send("queue/join", gzip.compress(body), {**kind, "Content-Encoding": "gzip"}) == 415
            form = b'--b\r\nContent-Disposition: form-data; name="data"\r\n\r\n' + body + b"\r\n--b--\r\n"
            assert send("queue/join", form, {"Content-Type": "multipart/form-data; boundary=b"}) == 400
            assert [send(closed, body, kind) for closed in ("component_server", "upload", "run/chat")] == [404] * 3
    join(here, "a", "_export")
    assert "Save the conversation" in listen_to(here, "a")[2], "and it still answers"
    assert set(cache.rglob("*")) == before


def test_what_gradio_cannot_answer_is_a_line_of_the_log(here: Site, capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    stop = send_lines_to(lines.append)
    join(here, "a", "_send", 1)
    _, _, said = listen_to(here, "a")
    stop()
    assert '"success":false' in said and "Traceback" not in capsys.readouterr().err
    (line,) = (line for line in lines if "warning" in line)
    assert "didn't receive enough input values" in line and "\n" not in line


def test_a_text_that_speaks_of_a_file_is_a_text() -> None:
    text = json.dumps({"path": "/etc/passwd", "meta": {"_type": "gradio.FileData"}})
    check_body(json.dumps({"data": [text, [{"role": "user", "content": text}]], "session_hash": "path"}).encode())


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "not JSON"),
        (b"[" * 200_000, "nested too deep"),
        (b'{"data":' + b"[" * 70 + b"]" * 70 + b"}", "more than 64 deep"),
        (b'{"data":[' + b"[]," * MAX_VALUES + b"[]]}", "more than 50,000 values"),
        (b'{"data":[NaN]}', "NaN is not a JSON number"),
        (b'{"data":[],"data":[1]}', "stands twice"),
    ],
)
def test_what_the_page_never_sends_is_refused_in_one_line(body: bytes, why: str) -> None:
    with pytest.raises(UsageError, match=why) as refused:
        check_body(body)
    assert "\n" not in str(refused.value)

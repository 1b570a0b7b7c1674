"""What is refused before anything looks at it, over a real socket."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import select
import socket
from functools import partial

import pytest

from dflash_local.api import guard
from dflash_local.api.guard import Guard, Message, Rules, Scope
from tests.api.conftest import LIMIT_S, Running, Serve, body, read_all, set_read_s, wait_until

TOKEN = "correct-horse-battery"
CHAT = "/v1/chat/completions"


def post(headers: str, data: bytes = b"", host: str = "Host: localhost\r\n", method: str = "POST") -> bytes:
    return f"{method} {CHAT} HTTP/1.1\r\n{host}Content-Type: application/json\r\n{headers}\r\n".encode() + data


def basic(words: str) -> str:
    """What a browser sends that was told a name and a password."""
    return f"Basic {base64.b64encode(words.encode()).decode()}"


def status_of(raw: bytes) -> int:
    return int(raw.split(b" ", 2)[1])


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.nip.io", "[::1"]
    + ["evillocalhost", "evil.localhost:8000", "local", ".", "1127.0.0.1"],
)
def test_a_foreign_host_is_refused(server: Running, host: str) -> None:
    for path in ("/v1/models", "/health", "/metrics", "/"):
        answer = server.get(path, {"Host": host})
        assert answer.status == 400 and "Host" in answer.error["message"], path


def test_two_or_no_host_headers_are_refused(server: Running) -> None:
    for hosts in ("", "Host: localhost\r\nHost: evil.example\r\n"):
        raw = read_all(server.raw(post("Content-Length: 0\r\nConnection: close\r\n", host=hosts)))
        assert status_of(raw) == 400


@pytest.mark.parametrize("method", ["POST", "GET", "OPTIONS", "PUT", "DELETE", "PATCH"])
def test_a_foreign_origin_is_refused(server: Running, method: str) -> None:
    for origin in ("https://evil.example", "null", "http://localhost:3000", ""):
        answer = server.call(method, CHAT, headers={"Origin": origin, "Host": "localhost:8000", "Content-Length": "0"})
        assert answer.status == 403, origin
        assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("host", ["localhost", "localhost:8000"])
def test_an_origin_is_this_server_or_it_is_foreign(server: Running, host: str) -> None:
    """A name that begins or ends as ours does is another one."""
    for ours in (host, "LOCALHOST:1", "127.0.0.1:9", "[::1]:8000", "localhost."):
        assert server.get("/v1/models", {"Origin": f"http://{ours}", "Host": ours}).status == 200, ours
    for origin in (f"http://{host}.evil.com", f"http://{host}1", f"http://{host}@evil.com", f"http://evil{host}", host):
        assert server.get("/v1/models", {"Origin": origin, "Host": host}).status == 403, origin


APP = "https://app.example"


def test_a_named_page_may_call_and_read(serve: Serve) -> None:
    """A browser asks first, without a token, and shows its page nothing that lacks the header, errors neither."""
    server = serve(rules=Rules(token=TOKEN, origins=frozenset({APP, "http://localhost:3000"})))
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, x-stainless-os"}
    near = {**asked, "Access-Control-Request-Private-Network": "true"}
    answer = server.call("OPTIONS", CHAT, headers={"Origin": APP, **near})
    assert answer.status == 204 and answer.body == b""
    told = {name: text for name, text in answer.headers.items() if name.startswith("access-control")}
    assert told.pop("access-control-max-age")
    assert told == {
        "access-control-allow-origin": APP,
        "access-control-allow-methods": "GET, POST",
        "access-control-allow-headers": "authorization, x-stainless-os",
        "access-control-allow-private-network": "true",
    }
    right = {"Authorization": f"Bearer {TOKEN}"}
    for origin in (APP, "http://localhost:3000"):
        for headers, status in ((right, 200), ({}, 401)):
            answer = server.chat(headers={"Origin": origin, **headers})
            assert (answer.status, answer.headers["access-control-allow-origin"]) == (status, origin)
            assert answer.headers["vary"] == "Origin"
    for origin in (f"{APP}:8443", f"{APP}.evil.example", "http://app.example", "null", APP.upper()):
        for method in ("OPTIONS", "GET"):
            answer = server.call(method, "/v1/models", headers={"Origin": origin, **asked, **right})
            readable = any(name.startswith("access-control") for name in answer.headers)
            assert not readable and (answer.status == 403 or origin == APP.upper()), origin
    assert server.call("OPTIONS", CHAT, headers={"Origin": APP, **asked, "Host": "evil.example"}).status == 400
    assert "access-control-allow-origin" not in server.get("/v1/models", right).headers


def test_the_answer_comes_before_the_body_is_read(server: Running) -> None:
    sock = server.raw(post("Origin: null\r\nContent-Length: 1000000\r\n", b"{"))
    assert status_of(sock.recv(65536)) == 403
    sock.close()


def test_every_answer_has_security_headers_and_no_cors(server: Running) -> None:
    for answer in (server.get("/v1/models"), server.get("/none"), server.get("/health", {"Host": "evil.example"})):
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        assert "access-control-allow-origin" not in answer.headers and "server" not in answer.headers


def test_a_body_over_the_cap_is_refused_and_the_answer_arrives(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "LINGER_S", LIMIT_S)  # the client sends all of it first, as fast as it can
    server = serve(rules=Rules(max_body=10_000))
    for size in (10_001, 3_000_000):
        answer = server.chat("x" * size)
        assert answer.status == 413 and "10000" in answer.error["message"]
    assert server.chat().status == 200


def test_ten_gigabytes_are_refused_without_reading(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "LINGER_S", 0.05)
    sock = server.raw(post("Content-Length: 10000000000\r\n", b"{"))
    assert status_of(sock.recv(65536)) == 413
    read_all(sock)  # and the connection ends


def test_chunks_without_end_are_counted(serve: Serve) -> None:
    server = serve(rules=Rules(max_body=50_000))
    sock = server.raw(post("Transfer-Encoding: chunked\r\n"))
    chunk = b"2710\r\n" + b" " * 10_000 + b"\r\n"
    for _ in range(6):
        sock.sendall(chunk)
    assert status_of(sock.recv(65536)) == 413


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate, gzip"])
def test_compressed_bodies_are_refused(server: Running, encoding: str) -> None:
    data = gzip.compress(b" " * 1_000_000)
    assert server.call("POST", CHAT, data, {"Content-Encoding": encoding}).status == 415


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ("Content-Length: -1\r\n", 400),
        ("Content-Length: 1e3\r\n", 400),
        ("Content-Length: 5\r\nContent-Length: 6\r\n", 400),
        ("Content-Length: 2\r\nTransfer-Encoding: chunked\r\n", 400),
        ("", 411),
    ],
)
def test_a_content_length_that_is_none(
    server: Running, headers: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "LINGER_S", 0.05)
    assert status_of(read_all(server.raw(post(headers + "Connection: close\r\n", b"{}")))) == status


def test_a_body_longer_than_said_is_no_second_request(server: Running) -> None:
    data = json.dumps(body()).encode()
    sock = server.raw(post(f"Content-Length: {len(data)}\r\n", data + b"garbage\r\n\r\n"))
    raw = read_all(sock)
    assert raw.count(b"HTTP/1.1 ") == 2 and b"HTTP/1.1 400" in raw


def test_slow_clients_are_cut_off_and_real_ones_served(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "LINGER_S", 0.05)
    server = serve(read_s=LIMIT_S)
    patient = [server.raw() for _ in range(60)]
    assert server.chat().status == 200, "beside clients that say nothing"
    set_read_s(server, 0.3)
    silent = [server.raw() for _ in range(60)]
    header, drip = server.raw(b"POST /v1/chat"), server.raw(post("Content-Length: 100\r\n", b"{"))
    for sock, data in ((header, b"x"), (drip, b" ")):
        wait_until(partial(cut_off, sock, data))  # a byte now and then buys no time
    assert all(read_all(sock) == b"" for sock in silent)
    set_read_s(server, LIMIT_S)
    assert server.chat().status == 200
    for sock in patient:
        sock.close()


def cut_off(sock: socket.socket, data: bytes) -> bool:
    """True when the server has ended the connection; otherwise it gets more data."""
    sock.settimeout(0.02)
    try:
        answer = sock.recv(65536)
        if not answer:
            return True
        assert answer.startswith((b"HTTP/1.1 408 ", b'{"error":')), "head and body may come apart"
        sock.sendall(data)
    except TimeoutError:
        sock.sendall(data)
    except OSError:
        return True
    return False


def test_a_body_that_does_not_come_in_time_is_408() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        await asyncio.sleep(0.01)
        return {"type": "http.request", "body": b"x", "more_body": not sent}

    headers = [(b"host", b"localhost"), (b"transfer-encoding", b"chunked")]
    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": headers}
    asyncio.run(Guard(nothing, Rules(read_s=0.05))(scope, receive, send))
    assert sent[0]["status"] == 408


@pytest.mark.parametrize(
    "value",
    [None, "", "Bearer", "Bearer ", f"Bearer {TOKEN.upper()}", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", TOKEN]
    + [
        f"Basic {TOKEN}",
        "Bearer " + "x" * 60_000,
        "Bearer \xff\xfe",
        basic(f"x:{TOKEN}x"),
        basic(TOKEN),
        basic(f"{TOKEN}:"),
    ]
    + ["Basic !!!", "Basic /w==", "Basic " + "QUFB" * 15_000, f"Digest {TOKEN}"],
)
def test_a_wrong_token_is_401(guarded: Running, value: str | None) -> None:
    answer = guarded.get("/v1/models", {} if value is None else {"Authorization": value})
    assert answer.status == 401 and answer.error["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"] == 'Basic realm="dflash", Bearer'


def test_a_browser_sends_the_token_as_a_password_whatever_the_name(guarded: Running) -> None:
    for words in (f"anybody:{TOKEN}", f":{TOKEN}", f"é:{TOKEN}"):
        for scheme in ("Basic", "basic"):
            value = basic(words).replace("Basic", scheme)
            assert guarded.get("/v1/models", {"Authorization": value}).status == 200
            assert guarded.chat(headers={"Authorization": value}).status == 200


def test_the_right_token_is_let_in_in_any_case_of_the_scheme(guarded: Running) -> None:
    for scheme in ("Bearer", "bearer", "BEARER"):
        assert guarded.get("/v1/models", {"Authorization": f"{scheme} {TOKEN}"}).status == 200
    assert guarded.get("/health").status == 200  # watchers have none


def test_a_megabyte_of_token_is_refused(guarded: Running) -> None:
    raw = b""
    sock = guarded.raw()
    try:
        sock.sendall(
            b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer " + b"x" * 2**20 + b"\r\n\r\n"
        )
        raw = read_all(sock)
    except (BrokenPipeError, ConnectionResetError):
        pass
    assert not raw or status_of(raw) in (400, 401, 431)
    assert guarded.get("/health").status == 200


async def nothing(_scope: Scope, _receive: object, send: object) -> None:
    raise AssertionError("a refused request came through")


def test_many_large_bodies_together_do_not_fill_the_memory(serve: Serve) -> None:
    server = serve(rules=Rules(max_body=100_000, max_held=150_000))
    held = [server.raw(post("Content-Length: 90000\r\n", b" " * 80_000)) for _ in range(2)]
    refused, _, _ = select.select(held, [], [], LIMIT_S)  # either, as the system has it
    assert [status_of(sock.recv(65536)) for sock in refused] == [503]
    for sock in held:
        sock.close()
    wait_until(lambda: server.chat("x" * 90_000).status == 200)


def test_what_a_body_held_is_given_back_whatever_became_of_it(serve: Serve) -> None:
    """Each round holds more than half of what may be held: one that is not given back refuses the next."""
    server = serve(rules=Rules(max_body=100_000, max_held=150_000))
    large = "x" * 80_000
    for _ in range(3):
        wait_until(lambda: server.chat(large).status == 200)  # the server may not know yet that the last one left
        assert server.chat(large, n=0).status == 400
        assert status_of(read_all(server.raw(post("Transfer-Encoding: chunked\r\n", chunked(large, 2))))) == 413
        with server.raw(post("Content-Length: 90000\r\n", large.encode())) as sock:
            sock.shutdown(socket.SHUT_WR)
            assert read_all(sock) == b"", "the client left in the middle"


def chunked(text: str, count: int) -> bytes:
    """The text so many times, as chunks."""
    return f"{len(text):x}\r\n{text}\r\n".encode() * count + b"0\r\n\r\n"


def test_a_websocket_from_elsewhere_is_closed() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    scope = {"type": "websocket", "path": "/ws", "headers": [(b"host", b"evil.example")]}
    asyncio.run(Guard(nothing, Rules())(scope, receive, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]


def test_addresses_are_fine_when_listening_on_all(serve: Serve) -> None:
    server = serve(rules=Rules(hosts=frozenset({"box.lan"}), any_address=True))
    for host, status in (("192.168.1.9:8000", 200), ("box.lan", 200), ("[fe80::1]:80", 200), ("other.lan", 400)):
        assert server.get("/v1/models", {"Host": host}).status == status


def test_a_body_that_is_not_json_by_its_header_is_refused(server: Running) -> None:
    answer = server.call("POST", CHAT, b"a=1", {"Content-Type": "application/x-www-form-urlencoded"})
    assert answer.status == 415 and "application/json" in answer.error["message"]

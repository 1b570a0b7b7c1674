"""A hub that answers as no honest one does: a table of replies, and a server that gives one of them in one place.

Every reply that would not end does so by itself after ``SECONDS`` or ``BYTES``: the client ``outlasted`` it then, which
a client with bounds never does.
"""

from __future__ import annotations

import gzip
import json
import socket
import socketserver
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from itertools import chain, count, repeat
from typing import Any

from tests.fake_hub import File, safetensors

REPO = "owner/target"
SECONDS, BYTES = 20.0, 64 << 20
DRIP_S = 0.02
COMMIT = "1" * 40
FILES = [
    File.of(path, content)
    for path, content in {"config.json": b'{"model_type": "qwen3"}', "model.safetensors": safetensors(300_000)}.items()
]
PLACES = ("listing", "file", "behind a redirect")
Reply = Callable[[], Iterator[bytes]]


def head(*headers: str, status: str = "200 OK") -> bytes:
    lines = [f"HTTP/1.1 {status}", "Content-Type: application/json", *headers]
    return "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n"


def body(value: object, **options: Any) -> Reply:
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    return lambda: iter([head(f"Content-Length: {len(raw)}", **options), raw])


def endless(*first: bytes, then: bytes) -> Reply:
    return lambda: chain(first, repeat(then * max(1, (1 << 16) // len(then))))


def drip(first: bytes, then: bytes) -> Reply:
    def reply() -> Iterator[bytes]:
        yield first
        for at in count():
            time.sleep(DRIP_S)
            yield then[at % len(then) :][:1]

    return reply


def silence(*first: bytes) -> Reply:
    def reply() -> Iterator[bytes]:
        yield from first
        while True:
            time.sleep(DRIP_S)
            yield b""

    return reply


def ended(*pieces: bytes) -> Reply:
    return lambda: iter(pieces)


def chunks(piece: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(piece), piece)


def listing(**changes: Any) -> dict[str, Any]:
    return {"id": REPO, "sha": COMMIT, "siblings": [file.entry() for file in FILES], **changes}


def sibling(**changes: Any) -> dict[str, Any]:
    return listing(siblings=[{**FILES[0].entry(), **changes}, FILES[1].entry()])


CHUNKED, LENGTH = "Transfer-Encoding: chunked", f"Content-Length: {10**12}"
ZEROS = zlib.compressobj(9, wbits=31)
BOMB, MORE = (ZEROS.compress(bytes(1 << 20)) + ZEROS.flush(zlib.Z_SYNC_FLUSH) for _ in range(2))  # a MiB in each KiB
FAILED = ("401 Unauthorized", "403 Forbidden", "404 Not Found", "416 Range Not Satisfiable", "500 Broken", "503 Busy")

# What goes wrong on the line, wherever it happens.
LINES: dict[str, Reply] = {
    "gzip bomb": endless(head("Content-Encoding: gzip", LENGTH), BOMB, then=MORE),
    "gzip bomb in chunks": endless(head("Content-Encoding: gzip", CHUNKED), chunks(BOMB), then=chunks(MORE)),
    "brotli by name": endless(head("Content-Encoding: br"), then=b"\x00"),
    "gzip twice": ended(head("Content-Encoding: gzip, gzip"), gzip.compress(BOMB)),
    "endless list": endless(head(), b"[", then=b"{},"),
    "endless list of announced length": endless(head(LENGTH), b"[", then=b"{},"),
    "endless list in chunks": endless(head(CHUNKED), then=chunks(b"{}," * 5000)),
    "endless text": endless(head(LENGTH), b'{"id": "', then=b"a"),
    "endless spaces": endless(head(LENGTH), then=b" "),
    "endless web page": endless(head("Content-Type: text/html"), then=b"<p>"),
    "a byte at a time": drip(head(LENGTH), b" "),
    "a chunk of one byte at a time": drip(head(CHUNKED), chunks(b" ")),
    "a status line, a byte at a time": drip(b"HTTP/1.1 200 ", b"a"),
    "headers, a byte at a time": drip(head()[:-2], b"X-A: b\r\n"),
    "a chunk's length, a byte at a time": drip(head(CHUNKED), b"0"),
    "100 for ever": endless(then=b"HTTP/1.1 100 Continue\r\n\r\n"),
    "100 for ever, slowly": drip(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "102 for ever": endless(then=b"HTTP/1.1 102 Processing\r\n\r\n"),
    "103 with headers for ever": endless(then=b"HTTP/1.1 103 Early\r\nLink: <a>; rel=preload\r\n\r\n"),
    "endless headers": endless(head()[:-2], then=b"X-A: b\r\n"),
    "one endless header": endless(head()[:-2], b"X-A: ", then=b"b"),
    "endless status line": endless(b"HTTP/1.1 200 ", then=b"a"),
    "endless chunk extension": endless(head(CHUNKED), b"5;x=", then=b"a"),
    "endless chunk of 10^30": endless(head(CHUNKED), b"%x\r\n" % 10**30, then=b"a"),
    "endless trailers": endless(head(CHUNKED), b"0\r\n", then=b"X-A: b\r\n"),
    "no chunk": endless(head(CHUNKED), then=b"zz\r\n"),
    "ends too early": ended(head(LENGTH), b"{"),
    "more than announced": ended(head("Content-Length: 1"), b"{}" * 1000),
    "a negative length": ended(head("Content-Length: -1"), b"{}"),
    "two lengths": ended(head("Content-Length: 2", "Content-Length: 3"), b"{}}"),
    "a length of 400 digits": ended(head(f"Content-Length: {10**400}"), b"{}"),
    "a length in words": ended(head("Content-Length: two"), b"{}"),
    "a length and chunks": ended(head("Content-Length: 2", CHUNKED), b"{}"),
    "nothing, and closed": ended(),
    "silence": silence(),
    "silence after the headers": silence(head(LENGTH)),
    "silence in the body": silence(head(LENGTH), b"{"),
    "bytes of no protocol": endless(then=b"\x00\xff"),
    "the next version": ended(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    "an older version": endless(then=b"<html>"),
    "a switch of protocols": ended(b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"),
    "no content": ended(head(status="204 No Content")),
    "not modified": ended(head(status="304 Not Modified")),
    "a redirect to itself": ended(head("Location: /api/x", "Content-Length: 0", status="302 Found")),
    "a redirect with an endless body": endless(head("Location: /api/x", status="302 Found"), then=b"a"),
    "a redirect, a byte at a time": drip(head("Location: /api/x", LENGTH, status="302 Found"), b"a"),
    "a redirect to a long host": ended(head(f"Location: http://{'a' * 60_000}/", status="302 Found")),
    "a redirect without a place": ended(head("Location: ", "Content-Length: 0", status="302 Found")),
    "a wait of 10^9 seconds": ended(head(f"Retry-After: {10**9 - 1}", status="429 Too Many")),
    "a wait of 400 digits": ended(head(f"Retry-After: {10**400}", "Content-Length: 0", status="429 Too Many")),
    "a reason without an end": ended(head(f"X-Error-Message: {'a' * 60_000}", status="404 Not Found")),
    **{f"{status[:3]} with an endless body": endless(head(status=status), then=b"a") for status in FAILED},
    **{f"{status[:3]}, a byte at a time": drip(head(status=status), b"a") for status in FAILED[:5]},
    "404 as a gzip bomb": endless(head("Content-Encoding: gzip", status="404 Not Found"), BOMB, then=MORE),
}
# And in what a listing says.
LISTINGS: dict[str, Reply] = {
    "a next page for ever": ended(head('Link: </api/models/next>; rel="next"', "Content-Length: 2"), b"[]"),
    "nested 100,000 deep": body(b"[" * 100_000),
    "4 MiB of empty lists": body(b"[" + b"[]," * 1_390_000 + b"[]]"),
    "a million files": body(b'{"siblings": [' + b'{"rfilename": "a"},' * 200_000 + b"{}]}"),
    "a size of 400 digits": body(sibling(size=10**400)),
    "a size of 5,000 digits": body(b'{"siblings": [{"rfilename": "a", "size": ' + b"9" * 5000 + b"}]}"),
    "a size of infinity": body(sibling(size=float("inf"))),
    "a size of a word": body(sibling(size="1")),
    "a name of 7": body(sibling(rfilename=7)),
    "a name of a list": body(sibling(rfilename=[])),
    "a name of 100,000 letters": body(sibling(rfilename="a" * 100_000)),
    "half a character in a name": body(b'{"sha": "%s", "siblings": [{"rfilename": "\\ud800"}]}' % COMMIT.encode()),
    "a blob of 7": body(sibling(blobId=7)),
    "a checksum of 7": body(sibling(lfs={"sha256": 7, "size": 1, "pointerSize": 1})),
    "a commit of a list": body(listing(sha=[])),
    "a commit of 100,000 letters": body(listing(sha="a" * 100_000)),
    "siblings of 7": body(listing(siblings=7)),
    "siblings of words": body(listing(siblings="words")),
    "siblings of null": body(listing(siblings=[None])),
    "a card of 7": body(listing(cardData=7, siblings=[None])),
    "a date of words": body(listing(lastModified="yesterday")),
    "a date out of range": body(listing(createdAt="99999-01-01T00:00:00.000Z")),
    "not a number": body(b"NaN"),
    "no UTF-8": body(b'{"id": "\xff"}'),
    "only a quote": body(b'"'),
}


class HostileHub(socketserver.ThreadingTCPServer):
    """Gives ``reply`` to what is requested in ``place``; elsewhere it is a hub with one small model."""

    daemon_threads, block_on_close, allow_reuse_address = True, False, True

    def __init__(self, reply: Reply, place: str = PLACES[0]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.reply, self.place = reply, place
        self.sent, self.outlasted = 0, False
        self.requests = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> HostileHub:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def pieces(self, path: str) -> Iterator[bytes]:
        if path.startswith("/api/") and self.place != "listing":
            return body(listing())()
        if "/resolve/" in path and self.place == "behind a redirect":
            return ended(head("Location: /cdn", "Content-Length: 0", status="302 Found"))()
        return self.reply()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is what is tested."""


class _Handler(socketserver.StreamRequestHandler):
    server: HostileHub

    def handle(self) -> None:
        server, line = self.server, self.rfile.readline()
        while self.rfile.readline() not in (b"\r\n", b""):
            pass
        server.requests += 1
        path, end = line.split(b" ")[1].decode(), time.monotonic() + SECONDS
        self.connection.settimeout(SECONDS)
        for piece in server.pieces(path):
            if time.monotonic() > end or server.sent > BYTES:
                server.outlasted = True
                break
            if not piece and self._left():
                break
            self.wfile.write(piece)
            server.sent += len(piece)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 1))

    def _left(self) -> bool:
        """True once the client has closed the connection."""
        self.connection.setblocking(False)
        try:
            return self.connection.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        finally:
            self.connection.settimeout(SECONDS)

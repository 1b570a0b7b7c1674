"""A Hugging Face Hub on loopback with the real one's semantics, a log of requests, and faults to order.

Small files come from the hub itself, LFS files through a redirect to a second server under another
host name ("the CDN"), as on the real Hub. Needs nothing but the standard library.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import parse_qs, quote, unquote, urlsplit

TEXT = (".json", ".jinja", ".md", ".txt", ".py", ".gitattributes")
HTML = b"<!DOCTYPE html><html><head><title>Sign in to the network</title></head><body>Welcome</body></html>\n"
CHUNK = 16 * 1024
BODY_FAULTS = frozenset("cut reset corrupt short long stall trickle ignore_range html chunked bytes".split())
JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class File:
    """One file of one commit."""

    path: str
    content: bytes | Path
    size: int
    sha256: str
    blob: str
    lfs: bool

    @classmethod
    def of(cls, path: str, content: bytes | str | Path) -> File:
        content = content.encode() if isinstance(content, str) else content
        size = content.stat().st_size if isinstance(content, Path) else len(content)
        sha, blob = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % size)
        for piece in pieces(content, 0, size, 1 << 20):
            sha.update(piece)
            blob.update(piece)
        lfs = not path.endswith(TEXT) or path.rsplit("/", 1)[-1] == "tokenizer.json"
        return cls(path, content, size, sha.hexdigest(), blob.hexdigest(), lfs)

    @property
    def etag(self) -> str:
        return self.sha256 if self.lfs else self.blob

    def entry(self) -> dict[str, Any]:
        lfs = {"sha256": self.sha256, "size": self.size, "pointerSize": 135}
        return {"rfilename": self.path, "size": self.size, "blobId": self.blob, **({"lfs": lfs} if self.lfs else {})}


def pieces(content: bytes | Path, start: int, stop: int, step: int = CHUNK) -> Iterator[bytes]:
    if isinstance(content, bytes):
        for at in range(start, min(stop, len(content)), step):
            yield content[at : min(at + step, stop)]
        return
    with content.open("rb") as file:
        file.seek(start)
        while start < stop and (piece := file.read(min(step, stop - start))):
            yield piece
            start += len(piece)


def safetensors(size: int, seed: int = 0, *, tensors: tuple[str, ...] = ()) -> bytes:
    """A whole safetensors file with ``size`` bytes of weights, its tensors named after the seed unless given."""
    names = tensors or (f"layers.{seed}.weight",)
    ends = [size * (n + 1) // len(names) for n in range(len(names))]
    header = {
        name: {"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]}
        for name, start, end in zip(names, [0, *ends], ends)
    }
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + random.Random(seed).randbytes(size)


def shards(count: int, size: int) -> dict[str, bytes]:
    """The weights of a repository in ``count`` files of ``size`` bytes, with their index."""
    names = [f"model-{n + 1:05}-of-{count:05}.safetensors" for n in range(count)]
    index = {"metadata": {}, "weight_map": {f"layers.{n}.weight": name for n, name in enumerate(names)}}
    files = {name: safetensors(size, n) for n, name in enumerate(names)}
    return {"model.safetensors.index.json": json.dumps(index).encode(), **files}


@dataclass
class Repo:
    """A repository: its commits, newest last, and whether its licence must be accepted."""

    gated: bool
    commits: dict[str, dict[str, File]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)


@dataclass
class Fault:
    """What goes wrong with requests for files whose path matches, and how often still."""

    path: str
    kind: str
    times: float
    methods: tuple[str, ...]
    options: dict[str, Any]


@dataclass
class Request:
    """One request as it arrived, and what was answered."""

    method: str
    path: str
    headers: dict[str, str]
    server: str
    file: str = ""
    status: int = 0
    sent: int = 0


class FakeHub:
    """Start with ``with FakeHub() as hub``; ``hub.url`` is the ``HF_ENDPOINT``.

    ``hub.requests`` logs every request in order of arrival; ``headers`` there have lower-case names,
    ``server`` is "hub" or "cdn", ``file`` the path inside the repository, ``sent`` the body's bytes.
    """

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.requests: list[Request] = []
        self.tokens: dict[str, set[str]] = {}
        self.closing = threading.Event()
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._servers = [_Server(self, name) for name in ("hub", "cdn")]
        self.url, self.cdn = (
            f"http://{host}:{server.server_port}" for host, server in zip(("127.0.0.1", "localhost"), self._servers)
        )

    def __enter__(self) -> FakeHub:
        for server in self._servers:
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def add_repo(
        self, repo_id: str, files: Mapping[str, bytes | str | Path], *, gated: bool = False, branch: str = "main"
    ) -> str:
        """Add a repository, or a further commit to one that exists; returns the commit."""
        tree = {path: File.of(path, content) for path, content in files.items()}
        listing = "\n".join(f"{f.path} {f.blob}" for f in tree.values())
        repo = self.repos.setdefault(repo_id, Repo(gated))
        commit = hashlib.sha1(f"{repo_id}\n{len(repo.commits)}\n{listing}".encode()).hexdigest()
        repo.commits[commit] = tree
        repo.refs[branch] = commit
        return commit

    def add_folder(self, repo_id: str, folder: Path) -> str:
        """Add every file of a local folder as a repository; returns the commit."""
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        return self.add_repo(repo_id, {path.relative_to(folder).as_posix(): path for path in paths})

    def grant(self, token: str, *repo_ids: str) -> str:
        """Make a token known, with access to these gated repositories; returns it."""
        self.tokens.setdefault(token, set()).update(repo_ids)
        return token

    def drop_commit(self, repo_id: str, commit: str) -> None:
        """Let a commit vanish, as after a force push."""
        repo = self.repos[repo_id]
        del repo.commits[commit]
        repo.refs = {name: known for name, known in repo.refs.items() if known != commit}

    def fault(self, path: str, kind: str, *, times: float = 1, methods: tuple[str, ...] = (), **options: Any) -> None:
        """Order a fault for requests whose file path (or "api" for model info) matches the pattern.

        Kinds, each with its options. Of the body (GET only unless ``methods`` says otherwise): "cut" and
        "reset" (``at`` = share sent), "corrupt", "short", "long", "stall", "trickle" (``rate`` in bytes/s),
        "ignore_range", "html", "chunked" (``extra`` bytes, no length told), "bytes" (``body`` instead). Of the
        answer (every method): a status such as "404" (``code``), "500", "429" (``retry_after``); "redirect"
        (``to`` = a URL), "hops" (``count``), "answer" (``body``, as JSON), "headers" (that to HEAD of an LFS
        file, or the file itself, has these ``headers``).
        """
        default = ("GET",) if kind in BODY_FAULTS else ("GET", "HEAD")
        self._faults.append(Fault(path, kind, times, methods or default, options))

    def clear_faults(self) -> None:
        self._faults.clear()

    def take_fault(self, method: str, path: str) -> Fault | None:
        with self._lock:
            for fault in self._faults:
                if fault.times > 0 and method in fault.methods and fnmatch(path, fault.path):
                    fault.times -= 1
                    return fault
        return None

    def sent(self, pattern: str = "*") -> int:
        """Body bytes sent so far for files that match."""
        return sum(request.sent for request in list(self.requests) if request.file and fnmatch(request.file, pattern))

    def gets(self, pattern: str = "*") -> list[Request]:
        """The GET requests for files that match."""
        return [r for r in list(self.requests) if r.method == "GET" and r.file and fnmatch(r.file, pattern)]


class _Server(ThreadingHTTPServer):
    daemon_threads, block_on_close, request_queue_size = True, False, 64

    def __init__(self, hub: FakeHub, name: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub, self.name = hub, name

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        hub = self.hub = self.server.hub
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.record = Request(self.command, self.path, headers, self.server.name)
        hub.requests.append(self.record)
        # Repositories of data sets are known by ids of the same kind.
        path = unquote(urlsplit(self.path).path).replace("/api/datasets/", "/api/models/").replace("/datasets/", "/")
        try:
            if path.startswith("/api/models/"):
                self.api(*path[len("/api/models/") :].partition("/revision/"))
            elif path.startswith("/hop/"):
                left = int(path.rsplit("/", 1)[-1])
                self.to(f"{self.base}/hop/{left - 1}") if left else self.error(404, "", "end")
            elif "/resolve/" in path:
                self.resolve(*path[1:].split("/resolve/", 1))
            else:
                repo, commit, name = path[len("/cdn/") :].split("@", 2)
                self.file(hub.repos[repo].commits[commit][name], commit)
        except (ConnectionError, TimeoutError):
            self.close_connection = True

    do_HEAD = do_GET

    def api(self, repo_id: str, separator: str, revision: str) -> None:
        if self.refused(self.hub.take_fault(self.command, "api")):
            return
        commit = self.commit(repo_id, revision or "main")
        if commit is None:
            return
        repo, blobs = self.hub.repos[repo_id], "blobs" in parse_qs(urlsplit(self.path).query)
        siblings = [f.entry() if blobs else {"rfilename": f.path} for f in repo.commits[commit].values()]
        info = {"_id": "0", "id": repo_id, "modelId": repo_id, "sha": commit, "private": False}
        info |= {"gated": "manual" if repo.gated else False, "disabled": False, "tags": [], "downloads": 0, "likes": 0}
        self.reply(200, json.dumps({**info, "siblings": siblings}).encode(), JSON)

    def commit(self, repo_id: str, revision: str) -> str | None:
        """The commit of a revision; None once the request has been refused."""
        repo = self.hub.repos.get(repo_id)
        if repo is None:
            self.error(404 if "authorization" in self.record.headers else 401, "RepoNotFound", "not found")
            return None
        commit = repo.refs.get(revision, revision)
        if commit in repo.commits:
            return commit
        self.error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return None

    def resolve(self, repo_id: str, rest: str) -> None:
        hub, repo = self.hub, self.hub.repos.get(repo_id)
        known = (*repo.refs, *repo.commits) if repo else ()
        revision = next((one for one in known if rest.startswith(f"{one}/")), rest.partition("/")[0])
        path = self.record.file = rest[len(revision) + 1 :]
        token = self.record.headers.get("authorization", "").removeprefix("Bearer ")
        if repo and repo.gated and repo_id not in hub.tokens.get(token, set()):
            status = 403 if token in hub.tokens else 401
            return self.error(status, "GatedRepo", f"Access to model {repo_id} is restricted.")
        commit = self.commit(repo_id, revision)
        if commit is None:
            return None
        file = hub.repos[repo_id].commits[commit].get(path)
        if file is None:
            return self.error(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": commit})
        if not file.lfs:
            return self.file(file, commit)
        fault = hub.take_fault(self.command, path) if self.command == "HEAD" else None
        if self.refused(fault):
            return None
        extra = fault.options["headers"] if fault and fault.kind == "headers" else {}
        target = f"{hub.cdn}/cdn/{quote(f'{repo_id}@{commit}@{path}')}?signature=1"
        headers = {"X-Repo-Commit": commit, "X-Linked-Etag": f'"{file.etag}"', "X-Linked-Size": str(file.size)}
        self.to(target, {**headers, "ETag": f'"{file.blob}"', **extra})

    def file(self, file: File, commit: str) -> None:
        self.record.file = file.path
        fault = self.hub.take_fault(self.command, file.path)
        if self.refused(fault):
            return None
        kind, options = (fault.kind, fault.options) if fault else ("", {})
        start, status = 0, 200
        asked = self.record.headers.get("range", "")
        if asked.startswith("bytes=") and kind != "ignore_range":
            start, status = int(asked[6:].partition("-")[0] or 0), 206
        if start > file.size:
            return self.error(416, "", "Range Not Satisfiable")
        headers = {"X-Repo-Commit": commit, "ETag": f'"{file.etag}"', "Accept-Ranges": "bytes"}
        headers |= options.get("headers", {})
        if status == 206:
            headers["Content-Range"] = f"bytes {start}-{file.size - 1}/{file.size}"
        if kind == "bytes":
            return self.reply(200, options["body"], headers)
        if kind == "chunked":
            self.begin(200, {**headers, "Transfer-Encoding": "chunked"})
            for piece in (*pieces(file.content, 0, file.size), b"x" * options["extra"], b""):
                self.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            return None
        length = max(file.size - start + {"short": -1000, "long": 1000}.get(kind, 0), 0)
        self.begin(status, {**headers, "Content-Length": str(length)})
        if self.command == "GET":
            self.body(file, start, length, kind, options)

    def body(self, file: File, start: int, length: int, kind: str, options: dict[str, Any]) -> None:
        closing, stop = self.hub.closing, start + length
        if kind in ("cut", "reset"):
            stop = start + int(length * options["at"])
        if kind == "stall":
            closing.wait(60)
            self.close_connection = True
            return
        if not kind and isinstance(file.content, Path):
            with file.content.open("rb") as source:
                self.wfile.flush()
                self.record.sent += self.connection.sendfile(source, start, length)
            return
        step = CHUNK if kind != "trickle" else max(1, min(CHUNK, int(options["rate"] / 20)))
        sent = start
        for piece in pieces(file.content, start, stop, step):
            if kind == "corrupt" and sent <= file.size // 2 < sent + len(piece):
                middle = file.size // 2 - sent
                piece = piece[:middle] + bytes([piece[middle] ^ 0x55]) + piece[middle + 1 :]
            self.write(piece)
            sent += len(piece)
            if kind == "trickle" and closing.wait(len(piece) / options["rate"]):
                break
        if kind == "long":
            self.write(b"x" * (stop - sent))
        if kind in ("cut", "reset"):
            self.close_connection = True
        if kind == "reset":  # as a broken line does
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()

    def refused(self, fault: Fault | None) -> bool:
        """True when the fault decides the whole answer and it has been given."""
        if fault is None:
            return False
        kind, options = fault.kind, fault.options
        if kind == "html":
            self.reply(200, HTML, {"Content-Type": "text/html"})
        elif kind == "redirect":
            self.to(options["to"])
        elif kind == "hops":
            self.to(f"{self.base}/hop/{options['count']}")
        elif kind == "answer":
            self.reply(200, options["body"], JSON)
        elif kind.isdigit():
            after = {"Retry-After": str(options["retry_after"])} if "retry_after" in options else {}
            code = options.get("code", "EntryNotFound" if kind == "404" else "")
            self.error(int(kind), code, f"ordered {kind}", after)
        return kind not in BODY_FAULTS | {"headers"} or kind == "html"

    @property
    def base(self) -> str:
        return self.hub.url if self.server.name == "hub" else self.hub.cdn

    def to(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        self.reply(302, b"", {**(headers or {}), "Location": url})

    def error(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        codes = {"X-Error-Code": code, "X-Error-Message": message} if code else {}
        self.reply(status, json.dumps({"error": message}).encode(), {**JSON, **codes, **(headers or {})})

    def reply(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.begin(status, {**headers, "Content-Length": str(len(body))})
        if self.command != "HEAD":
            self.write(body)

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.record.status = status
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def write(self, data: bytes) -> None:
        self.wfile.write(data)
        self.record.sent += len(data)


@contextmanager
def online(hub: FakeHub | None = None) -> Iterator[None]:
    """Lift the tests' offline switch: the variable, and huggingface_hub's constant read at import.

    With a hub, ``HF_ENDPOINT`` points to it as well.
    """
    import huggingface_hub.constants

    variables = {"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0", **({"HF_ENDPOINT": hub.url} if hub else {})}
    with patch.dict(os.environ, variables), patch.object(huggingface_hub.constants, "HF_HUB_OFFLINE", False):
        yield


def wait_until(condition: Any, seconds: float = 60.0) -> bool:
    """Poll until the condition holds; False when it did not in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.005)
    return bool(condition())

"""The two servers of the fake hub: how a request is answered, and how an answer goes wrong."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from tests.hub_files import CHUNK, HTML, File, pieces

BODY_FAULTS = frozenset("cut reset corrupt short long stall trickle ignore_range html chunked bytes".split())


@dataclass
class Repo:
    """A repository: its commits, newest last, and who may read it."""

    id: str
    gated: bool
    private: bool
    commits: dict[str, dict[str, File]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    def commit(self, revision: str) -> str | None:
        commit = self.refs.get(revision, revision)
        return commit if commit in self.commits else None


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


class Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, hub: Any, name: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.hub = hub
        self.name = name

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is part of the tests."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        self.answer()

    def do_HEAD(self) -> None:
        self.answer()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def answer(self) -> None:
        hub = self.server.hub
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.record = Request(self.command, self.path, headers, self.server.name)
        hub.requests.append(self.record)
        path = unquote(urlsplit(self.path).path)
        for kind in ("/api/datasets/", "/datasets/"):  # their repositories are known by ids of the same kind
            if path.startswith(kind):
                path = kind.replace("datasets/", "models/" if "api" in kind else "") + path[len(kind) :]
        try:
            if path.startswith("/api/models/"):
                self.api(path[len("/api/models/") :])
            elif path.startswith("/hop/"):
                self.hop(path)
            elif "/resolve/" in path:
                repo, _, rest = path[1:].partition("/resolve/")
                self.resolve(repo, *self.split_revision(repo, rest))
            elif path.startswith("/cdn/"):
                repo, commit, name = path[len("/cdn/") :].split("@", 2)
                self.file(hub.repos[repo].commits[commit][name], commit)
            else:
                self.error(404, "", "Not Found")
        except (ConnectionError, TimeoutError):
            self.close_connection = True

    def split_revision(self, repo_id: str, rest: str) -> tuple[str, str]:
        repo = self.server.hub.repos.get(repo_id)
        for revision in (*(repo.refs if repo else ()), *(repo.commits if repo else ())):
            if rest.startswith(revision + "/"):
                return revision, rest[len(revision) + 1 :]
        return rest.partition("/")[0], rest.partition("/")[2]

    def api(self, rest: str) -> None:
        self.record.file = ""
        if self.refused(self.server.hub.take_fault(self.command, "api")):
            return
        for separator in ("/revision/", "/tree/"):
            repo_id, found, revision = rest.partition(separator)
            if found:
                break
        else:
            repo_id, separator, revision = rest, "", "main"
        repo = self.server.hub.repos.get(repo_id)
        if repo is None or not self.may_see(repo):
            return self.error(401 if "authorization" not in self.record.headers else 404, "RepoNotFound", "not found")
        commit = repo.commit(revision.rstrip("/"))
        if commit is None:
            return self.error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        tree = repo.commits[commit]
        if separator == "/tree/":
            entries = [{"type": "file", "path": f.path, "size": f.size, "oid": f.blob} for f in tree.values()]
            return self.json(entries)
        blobs = "blobs" in parse_qs(urlsplit(self.path).query)
        siblings = [f.entry() if blobs else {"rfilename": f.path} for f in tree.values()]
        gated: str | bool = "manual" if repo.gated else False
        info = {"_id": "0", "id": repo_id, "modelId": repo_id, "sha": commit, "private": repo.private, "gated": gated}
        self.json({**info, "disabled": False, "tags": [], "downloads": 0, "likes": 0, "siblings": siblings})

    def resolve(self, repo_id: str, revision: str, path: str) -> None:
        hub = self.server.hub
        self.record.file = path
        repo = hub.repos.get(repo_id)
        if repo is None or not self.may_see(repo):
            return self.error(401 if "authorization" not in self.record.headers else 404, "RepoNotFound", "not found")
        if repo.gated and repo_id not in hub.tokens.get(self.token(), set()):
            status = 403 if self.token() in hub.tokens else 401
            return self.error(status, "GatedRepo", f"Access to model {repo_id} is restricted.")
        commit = repo.commit(revision)
        if commit is None:
            return self.error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        file = repo.commits[commit].get(path)
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
        self.reply(302, b"", {**headers, "Location": target, "ETag": f'"{file.blob}"', **extra})

    def file(self, file: File, commit: str) -> None:
        self.record.file = file.path
        fault = self.server.hub.take_fault(self.command, file.path)
        if self.refused(fault):
            return
        kind = fault.kind if fault else ""
        options = fault.options if fault else {}
        start, status = 0, 200
        asked = self.record.headers.get("range", "")
        if asked.startswith("bytes=") and kind != "ignore_range":
            start, status = int(asked[6:].partition("-")[0] or 0), 206
        if start > file.size:
            return self.error(416, "", "Range Not Satisfiable")
        headers = {"X-Repo-Commit": commit, "ETag": f'"{file.etag}"', "Accept-Ranges": "bytes"}
        if status == 206:
            headers["Content-Range"] = f"bytes {start}-{file.size - 1}/{file.size}"
        length = file.size - start + {"short": -1000, "long": 1000}.get(kind, 0)
        if kind == "bytes":
            return self.reply(200, options["body"], headers)
        if kind == "chunked":
            return self.chunked(file, options["extra"], headers)
        self.begin(status, {**headers, "Content-Length": str(max(length, 0))})
        if self.command == "GET":
            self.body(file, start, max(length, 0), kind, options)

    def body(self, file: File, start: int, length: int, kind: str, options: dict[str, Any]) -> None:
        closing, stop = self.server.hub.closing, start + length
        if kind in ("cut", "reset"):
            stop = start + int(length * options.get("at", 0.3))
        if kind == "stall":
            closing.wait(options.get("seconds", 60))
            self.close_connection = True
            return
        if not kind and isinstance(file.content, Path):
            with file.content.open("rb") as source:
                self.wfile.flush()
                self.record.sent += self.connection.sendfile(source, start, length)
            return
        step = CHUNK if kind != "trickle" else max(1, min(CHUNK, int(options.get("rate", 100) / 20)))
        sent = start
        for piece in pieces(file.content, start, stop, step):
            if kind == "corrupt" and sent <= file.size // 2 < sent + len(piece):
                middle = file.size // 2 - sent
                piece = piece[:middle] + bytes([piece[middle] ^ 0x55]) + piece[middle + 1 :]
            self.write(piece)
            sent += len(piece)
            if kind == "trickle" and closing.wait(len(piece) / options.get("rate", 100)):
                break
        if kind == "long":
            self.write(b"x" * (stop - sent))
        if kind == "cut":
            self.close_connection = True
        if kind == "reset":
            self.drop()

    def chunked(self, file: File, extra: int, headers: Mapping[str, str]) -> None:
        self.begin(200, {**headers, "Transfer-Encoding": "chunked"})
        for piece in (*pieces(file.content, 0, file.size), b"x" * extra, b""):
            self.write(b"%x\r\n%s\r\n" % (len(piece), piece))

    def refused(self, fault: Fault | None) -> bool:
        """True when the fault decides the whole answer and it has been given."""
        if fault is None:
            return False
        kind, options = fault.kind, fault.options
        if kind == "html":
            page = HTML + b" " * (options.get("size", 0) - len(HTML))
            self.reply(200, page, {"Content-Type": "text/html"})
        elif kind == "redirect":
            self.reply(302, b"", {"Location": options["to"]})
        elif kind == "hops":
            self.reply(302, b"", {"Location": f"{self.base()}/hop/{options.get('count', 11)}"})
        elif kind == "drop":
            self.drop()
        elif kind == "answer":
            self.reply(200, options["body"], {"Content-Type": "application/json"})
        elif kind.isdigit():
            after = {"Retry-After": str(options["retry_after"])} if "retry_after" in options else {}
            code = options.get("code", {"404": "EntryNotFound", "403": "GatedRepo"}.get(kind, ""))
            self.error(int(kind), code, options.get("message", f"ordered {kind}"), after)
        return kind not in BODY_FAULTS | {"headers"} or kind == "html"

    def hop(self, path: str) -> None:
        left = int(path.rsplit("/", 1)[-1])
        self.reply(302, b"", {"Location": f"{self.base()}/hop/{left - 1}"}) if left else self.error(404, "", "end")

    def base(self) -> str:
        return self.server.hub.url if self.server.name == "hub" else self.server.hub.cdn

    def token(self) -> str:
        return self.record.headers.get("authorization", "").removeprefix("Bearer ")

    def may_see(self, repo: Repo) -> bool:
        return not repo.private or repo.id in self.server.hub.tokens.get(self.token(), set())

    def json(self, value: Any) -> None:
        self.reply(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def error(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        codes = {"X-Error-Code": code, "X-Error-Message": message} if code else {}
        body = json.dumps({"error": message}).encode()
        self.reply(status, body, {"Content-Type": "application/json", **codes, **(headers or {})})

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

    def drop(self) -> None:
        """Close the connection at once, as a broken line does."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

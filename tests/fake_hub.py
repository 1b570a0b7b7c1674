"""A Hugging Face Hub on loopback with the real one's semantics, a log of requests, and faults to order.

Small files come from the hub itself, LFS files through a redirect to a second server under another
host name ("the CDN"), as on the real Hub. Needs nothing but the standard library.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.hub_files import File
from tests.hub_server import BODY_FAULTS, Fault, Repo, Request, Server


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
        self._servers = [Server(self, name) for name in ("hub", "cdn")]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._servers[0].server_port}"

    @property
    def cdn(self) -> str:
        return f"http://localhost:{self._servers[1].server_port}"

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
        self,
        repo_id: str,
        files: Mapping[str, bytes | str | Path],
        *,
        gated: bool = False,
        private: bool = False,
        branch: str = "main",
    ) -> str:
        """Add a repository, or a further commit to one that exists; returns the commit."""
        tree = {path: File.of(path, content) for path, content in files.items()}
        listing = "\n".join(f"{f.path} {f.blob}" for f in tree.values())
        repo = self.repos.setdefault(repo_id, Repo(repo_id, gated, private))
        commit = hashlib.sha1(f"{repo_id}\n{len(repo.commits)}\n{listing}".encode()).hexdigest()
        repo.commits[commit] = tree
        repo.refs[branch] = commit
        return commit

    def add_folder(self, repo_id: str, folder: Path, **options: Any) -> str:
        """Add every file of a local folder as a repository; returns the commit."""
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        return self.add_repo(repo_id, {path.relative_to(folder).as_posix(): path for path in paths}, **options)

    def grant(self, token: str, *repo_ids: str) -> str:
        """Make a token known, with access to these gated or private repositories; returns it."""
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
        "reset" (``at`` = share sent), "corrupt", "short", "long", "stall" (``seconds``), "trickle"
        (``rate`` in bytes/s), "ignore_range", "html", "chunked" (``extra`` bytes, no length told), "bytes"
        (``body`` instead). Of the answer (every method): a status such as "404", "500", "429"
        (``retry_after``), "401", "403"; "redirect" (``to`` = a URL), "hops" (``count``), "drop" (connection
        closed without an answer), "answer" (``body``, as JSON), "headers" (the answer to HEAD of an LFS
        file has these ``headers``).
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

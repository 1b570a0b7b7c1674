"""What every test gets: a home of its own, no network, one thread, a plain terminal of fixed size."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import ipaddress
import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

# Libraries read these when they are first imported, so they stand before any fixture runs.
_SESSION_HOME = tempfile.TemporaryDirectory(prefix="dflash-tests-")
os.environ.update(
    HF_HOME=f"{_SESSION_HOME.name}/huggingface",
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    TOKENIZERS_PARALLELISM="false",
    OMP_NUM_THREADS="1",
)


def _one_certificate() -> None:
    """Every client of the hub reads all authorities that there are, for 30 ms; no test speaks TLS, so one will do."""
    spec = importlib.util.find_spec("certifi")
    if spec is None or spec.origin is None:
        return
    end = "-----END CERTIFICATE-----\n"
    first, found, _ = Path(spec.origin).with_name("cacert.pem").read_text(encoding="utf-8").partition(end)
    file = Path(_SESSION_HOME.name) / "authority.pem"
    file.write_text(first + found, encoding="utf-8")
    os.environ["SSL_CERT_FILE"] = str(file)


_one_certificate()

_UNSET = (
    *("FORCE_COLOR", "CLICOLOR_FORCE", "PYTHONSTARTUP", "CC"),
    *("HF_TOKEN", "HF_TOKEN_PATH", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_DISABLE_IMPLICIT_TOKEN"),
    *("HF_ENDPOINT", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_OFFLINE"),
)


gc.disable()  # until all is imported: nothing of it goes away


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Torch-free rooms are tested on Pythons without torch: what loads a model there is left out by name."""
    if importlib.util.find_spec("torch") is not None:
        return
    for item in items:
        if item.get_closest_marker("needs_torch"):
            item.add_marker(pytest.mark.skip(reason="loads a model, and torch is not installed here"))


class _Brisk:
    """asyncio as uvicorn's server sees it, which looks ten times a second whether it is to end: tests end hundreds."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    @staticmethod
    async def sleep(seconds: float) -> None:
        await asyncio.sleep(seconds / 20)


def pytest_collection_finish() -> None:
    """Libraries and tests are there for good: the collector need not look through millions of their objects again, nor
    so often through those of a test: a tree of syntax or a model has more than the usual 700.
    """
    server: Any = sys.modules.get("uvicorn.server")
    if server is not None:
        server.asyncio = _Brisk()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


class NetworkBlocked(RuntimeError):
    """A test tried to reach a machine other than this one."""


def _is_local(family: int, address: Any) -> bool:
    if family not in (socket.AF_INET, socket.AF_INET6):
        return True  # a Unix socket
    host = address[0]
    if host in ("", "localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections and look-ups reach loopback addresses only; pip, which is a process of its own, no index."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    connect, connect_ex, getaddrinfo = socket.socket.connect, socket.socket.connect_ex, socket.getaddrinfo

    def guarded_connect(self: socket.socket, address: Any) -> None:
        if not _is_local(self.family, address):
            raise NetworkBlocked(f"a test tried to connect to {address!r}")
        connect(self, address)

    def guarded_connect_ex(self: socket.socket, address: Any) -> int:
        if not _is_local(self.family, address):
            raise NetworkBlocked(f"a test tried to connect to {address!r}")
        return connect_ex(self, address)

    def guarded_getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        if name is not None and not _is_local(socket.AF_INET, (name,)):
            raise NetworkBlocked(f"a test tried to look up {name!r}")
        return getaddrinfo(host, *args, **kwargs)

    monkeypatch.setattr(socket.socket, "connect", guarded_connect)
    monkeypatch.setattr(socket.socket, "connect_ex", guarded_connect_ex)
    monkeypatch.setattr(socket, "getaddrinfo", guarded_getaddrinfo)


@pytest.fixture(scope="session")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Names of home folders; to number each by those that are there would read thousands of names for each test."""
    folder = tmp_path_factory.mktemp("homes")
    return (folder / str(number) for number in count())


@pytest.fixture(autouse=True)
def own_home(monkeypatch: pytest.MonkeyPatch, homes: Iterator[Path]) -> Path:
    """A fresh home folder; every variable that decides where files go points into it."""
    home = next(homes)
    home.mkdir()
    for name in [*(n for n in os.environ if n.startswith("DFLASH_")), *_UNSET]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USERPROFILE", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / ".config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(home / ".local" / "share"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / ".cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(home / ".local" / "state"))
    monkeypatch.setenv("HF_HOME", str(home / ".cache" / "huggingface"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("DFLASH_IN_PROCESS", "1")  # a process of its own would load torch anew for every test
    return home


@pytest.fixture(autouse=True)
def nothing_unkept(monkeypatch: pytest.MonkeyPatch) -> None:
    """No line about folders that another test could not write."""
    from dflash_local.store import kept

    monkeypatch.setattr(kept, "_unkept", {})


@pytest.fixture(autouse=True)
def probed_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that reads 20 GB/s, in no time."""
    from dflash_local.planner import cpu_probe

    monkeypatch.setattr(cpu_probe, "is_quiet", lambda: True)
    monkeypatch.setattr(cpu_probe, "probe", lambda cpu: cpu_probe.CpuRates(cpu, {1: 20e9, 8: 8e9, 16: 7e9}))


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred columns and no colour, whoever runs the tests."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "40")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """One torch thread: tiny models lose time to more, and sums keep one order."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)
    yield

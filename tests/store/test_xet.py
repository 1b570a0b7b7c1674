"""Xet, as far as a hub without it shows: what its client does is proven, bounded and ended like everything else."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_local.errors import DownloadError, Interrupted
from tests.fake_hub import FakeHub, safetensors, wait_until

TARGET, WEIGHTS = "owner/target", "model.safetensors"
XET_CLIENT = """
import os, pathlib, time
import huggingface_hub.file_download as library

def xet_get(*, incomplete_path, tqdm_class, **_):
    with open({called!r}, "a") as file:
        print(os.getpid(), file=file)
    {does}

library.xet_get = xet_get
library.is_xet_available = lambda: True
"""
FETCHES = "incomplete_path.write_bytes(pathlib.Path({data!r}).read_bytes())"


@pytest.fixture
def xet_client(
    puller: Any, fake: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Callable[[], list[int]]]:
    """Have the child's Xet client do a line of Python; what comes back tells the processes that did."""
    data, called, site = safetensors(200_000), tmp_path / "called", tmp_path / "site"
    fake.add_repo(TARGET, {"config.json": b"{}", WEIGHTS: data})
    headers = {"X-Xet-Hash": "a" * 64, "X-Xet-Refresh-Route": f"{fake.url}/api/xet-read-token"}
    fake.fault(WEIGHTS, "headers", methods=("HEAD",), times=9, headers=headers)
    (tmp_path / "right").write_bytes(data)
    (tmp_path / "wrong").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    site.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(site))
    puller.xet = True

    def install(does: str) -> Callable[[], list[int]]:
        # Python runs it when the child starts.
        (site / "sitecustomize.py").write_text(XET_CLIENT.format(called=str(called), does=does), encoding="utf-8")
        return lambda: list(map(int, called.read_text(encoding="utf-8").split())) if called.exists() else []

    return install


@pytest.mark.parametrize("wrong", [False, True])
def test_what_came_over_xet_is_proven_too(
    puller: Any, fake: FakeHub, xet_client: Any, tmp_path: Path, wrong: bool
) -> None:
    called = xet_client(FETCHES.format(data=str(tmp_path / ("wrong" if wrong else "right"))))
    if wrong:
        with pytest.raises(DownloadError, match="is damaged"):
            puller.pull(TARGET)
        assert len(called()) == 2 and WEIGHTS not in puller.names()
    else:
        assert puller.pull(TARGET)[0].verified and len(called()) == 1
    assert fake.gets(WEIGHTS) == []


def test_a_stop_ends_the_xet_client_at_once(puller: Any, xet_client: Any) -> None:
    called = xet_client("time.sleep(600)")
    asked: list[float] = []

    def cancelled() -> bool:
        if called() and not asked:
            asked.append(time.monotonic())
        return bool(asked)

    with pytest.raises(Interrupted):
        puller.pull(TARGET, cancelled=cancelled)
    assert time.monotonic() - asked[0] < 15.0
    assert wait_until(lambda: not _lives(called()[0]), 60)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system does not bound a process's memory")
def test_the_memory_of_the_xet_client_is_bounded(puller: Any, xet_client: Any) -> None:
    xet_client("bytearray(9 << 30)")
    with pytest.raises(DownloadError, match="the Xet client ended in the middle of model.safetensors of owner/target"):
        puller.pull(TARGET)


@pytest.mark.skipif(sys.platform == "win32", reason="there is no alarm")
def test_an_xet_client_with_nothing_to_say_is_ended(puller: Any, xet_client: Any) -> None:
    puller.impatient(whole_s=0.8)
    xet_client("time.sleep(100)")
    with pytest.raises(DownloadError, match="or nothing came for 1 s"):
        puller.pull(TARGET)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True

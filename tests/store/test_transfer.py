"""Bytes on the client: cuts, lies about length, damage, trickles, a full disk, and stopping in the middle."""

from __future__ import annotations

import errno
import hashlib
import io
import math
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dflash_local.errors import DoesNotFitError, DownloadError, Interrupted
from dflash_local.store import manifest
from tests.fake_hub import CHUNK, HTML, FakeHub, safetensors, wait_until

TARGET = "owner/target"
WEIGHTS = "model.safetensors"
SMALL_BYTES = len(safetensors(200_000))


def content(puller: Any, name: str = WEIGHTS) -> bytes:
    commit = puller.cache.commits(TARGET)[0]
    return bytes((puller.cache.snapshot(TARGET, commit) / name).read_bytes())


def failure(puller: Any, kept: int = 0, **options: Any) -> DownloadError:
    """``kept``: files of which a part stays."""
    with pytest.raises(DownloadError) as caught:
        puller.pull(TARGET, **options)
    assert caught.value.exit_code == 4 and "\n" not in caught.value.message
    assert len(puller.incomplete()) == kept
    return caught.value


def test_a_cut_connection_goes_on_where_it_was(puller: Any, fake: FakeHub, small: dict[str, bytes]) -> None:
    fake.fault(WEIGHTS, "cut", at=0.3)
    local = puller.pull(TARGET)[0]
    size = len(small[WEIGHTS])
    assert local.verified and content(puller) == small[WEIGHTS]
    assert size <= fake.sent(WEIGHTS) <= size + CHUNK
    assert [r.headers.get("range") for r in fake.gets(WEIGHTS) if r.server == "cdn"] == [
        None,
        f"bytes={int(size * 0.3)}-",
    ]
    assert any("going on at 30%" in notice for notice in puller.notices)


@pytest.mark.parametrize(
    ("kind", "options", "told"),
    [
        ("reset", {"at": 0.5, "times": 2}, "broke.*going on at"),
        ("corrupt", {}, "is damaged.*fetched again"),
        ("trickle", {"rate": 40}, "too slowly"),  # at which the file takes 5,000 s
        ("stall", {}, "does not answer in time"),  # after the headers
    ],
)
def test_what_a_line_or_a_hub_does_once_is_told_and_made_good(
    puller: Any, fake: FakeHub, small: dict[str, bytes], kind: str, options: dict[str, Any], told: str
) -> None:
    fake.fault(WEIGHTS, kind, **options)
    begin = time.monotonic()
    assert puller.pull(TARGET)[0].verified and content(puller) == small[WEIGHTS]
    assert any(re.search(told, notice) for notice in puller.notices)
    assert time.monotonic() - begin < 60


def test_cuts_without_end_are_given_up(puller: Any, fake: FakeHub, small: dict[str, bytes]) -> None:
    fake.fault(WEIGHTS, "cut", at=0.1, times=99)
    assert "given up after 3 tries" in failure(puller, kept=1).message
    assert len([r for r in fake.gets(WEIGHTS) if r.server == "cdn"]) == 3


def test_of_a_file_that_was_cut_each_try_is_one_request(puller: Any, fake: FakeHub, small: dict[str, bytes]) -> None:
    fake.fault(WEIGHTS, "cut", at=0.1)
    fake.fault(WEIGHTS, "500", times=99, methods=("GET",))
    assert "given up after 3 tries" in failure(puller, kept=1).message
    assert sum(request.status == 500 for request in fake.requests) == 2


def test_cuts_with_progress_between_them_are_borne(puller: Any, fake: FakeHub) -> None:
    fake.add_repo(TARGET, {"config.json": b"{}", WEIGHTS: safetensors(1_000_000)})
    fake.fault(WEIGHTS, "cut", at=0.2, times=5)
    assert puller.pull(TARGET)[0].verified


def test_bytes_that_stay_corrupt_leave_nothing_behind(puller: Any, fake: FakeHub, small: dict[str, bytes]) -> None:
    fake.fault(WEIGHTS, "corrupt", times=math.inf)
    assert "model.safetensors of owner/target is damaged" in failure(puller).message
    assert WEIGHTS not in puller.names() and hashlib.sha256(small[WEIGHTS]).hexdigest() not in puller.blobs()
    assert manifest.commits(puller.manifests, TARGET) == ()
    fake.clear_faults()
    assert puller.pull(TARGET)[0].verified


@pytest.mark.parametrize(("kind", "difference"), [("short", -1000), ("long", 1000)])
def test_a_wrong_length_is_told_in_numbers(
    puller: Any, fake: FakeHub, small: dict[str, bytes], kind: str, difference: int
) -> None:
    fake.fault(WEIGHTS, kind, times=math.inf)
    size = len(small[WEIGHTS])
    assert f"has {size + difference:,} bytes instead of {size:,}" in failure(puller).message
    assert fake.sent(WEIGHTS) < 2 * size + 2 * CHUNK


@pytest.mark.parametrize(
    ("file", "kind", "options", "told"),
    [
        ("config.json", "corrupt", {}, "config.json of owner/target is damaged"),
        (WEIGHTS, "chunked", {"extra": 500}, "has more than"),
        (WEIGHTS, "bytes", {"body": HTML + b" " * (SMALL_BYTES - len(HTML))}, "looks like a web page"),
    ],
)
def test_what_stays_wrong_is_refused(
    puller: Any, fake: FakeHub, small: Any, file: str, kind: str, options: dict[str, Any], told: str
) -> None:
    # Always, not twice: an answer that a slow machine holds back too long is asked for once more.
    fake.fault(file, kind, times=math.inf, **options)
    assert told in failure(puller).message and file not in puller.names()


def test_a_disk_that_fills_up_stops_everything(
    puller: Any, sharded: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    full_after(monkeypatch, puller, 4, errno.ENOSPC)
    with pytest.raises(DoesNotFitError, match="full") as caught:
        puller.pull(TARGET)
    assert caught.value.exit_code == 5 and "kept" in caught.value.hint
    # Of a shard that was under way beside it a part may stay, which the next pull goes on with.
    assert all(".dflash-" in name for name in puller.incomplete())
    assert shards_here(puller) >= 1
    monkeypatch.undo()
    puller.age()
    assert puller.pull(TARGET)[0].verified and puller.incomplete() == []


def test_a_read_only_cache_is_named(puller: Any, small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    full_after(monkeypatch, puller, 0, errno.EROFS)
    with pytest.raises(DownloadError, match="Read-only") as caught:
        puller.pull(TARGET)
    assert caught.value.exit_code == 4 and "HF_HUB_CACHE" in caught.value.hint
    # Of a small file that was under way beside the weights a part may stay: no byte of these was written.
    assert all(".dflash-" in name and len(name.split(".")[0]) == 40 for name in puller.incomplete())


class _Full(io.FileIO):
    """A file on a disk that takes no more bytes."""

    number = errno.ENOSPC

    def write(self, *_: Any) -> int:
        raise OSError(self.number, os.strerror(self.number))


def shards_here(puller: Any) -> int:
    return sum(name.endswith(".safetensors") for name in puller.names())


def full_after(monkeypatch: pytest.MonkeyPatch, puller: Any, files: int, number: int) -> None:
    """Let the disk refuse a puller's bytes after so many files of weights were begun, one of which is whole by then."""
    plain, left, lock = Path.open, [files], threading.Lock()

    def opened(self: Path, mode: str = "r", *rest: Any, **named: Any) -> Any:
        weights = self.name.endswith(".incomplete") and len(self.name.split(".")[0]) == 64
        # A thread of an earlier test's pull may outlive it by a moment, and writes elsewhere.
        if weights and "w" in mode and self.is_relative_to(puller.home):
            with lock:
                left[0] -= 1
            if left[0] < 0:
                wait_until(lambda: shards_here(puller) >= min(files, 1))
                return type("Full", (_Full,), {"number": number})(self, mode)
        return plain(self, mode, *rest, **named)

    monkeypatch.setattr(Path, "open", opened)


def test_a_slow_but_steady_line_is_not_broken_off(puller: Any, fake: FakeHub) -> None:
    puller.impatient(floor=100)
    fake.add_repo(TARGET, {"config.json": b"{}", WEIGHTS: safetensors(2000)})
    fake.fault(WEIGHTS, "trickle", rate=4000)
    assert puller.pull(TARGET)[0].verified and puller.notices == []


def test_a_pull_that_waits_for_bytes_stops_at_once(puller: Any, fake: FakeHub, sharded: dict[str, bytes]) -> None:
    puller.impatient(stall_s=30.0)
    fake.fault("model-0000[345]*", "stall", times=99)
    plan = puller.prepare(TARGET)
    asked: list[float] = []

    def cancelled() -> bool:
        if not asked and len([r for r in fake.gets("model-0000[345]*") if r.server == "cdn"]) >= 3:
            asked.append(time.monotonic())
        return bool(asked)

    with pytest.raises(Interrupted, match=r"[45] finished files .* are kept") as caught:
        puller.run(plan, cancelled=cancelled)
    assert time.monotonic() - asked[0] < 15.0 and caught.value.exit_code == 130, "half of what bytes are waited for"
    assert puller.incomplete() == [] and manifest.commits(puller.manifests, TARGET) == ()
    assert wait_until(lambda: not any(thread.name.startswith("pull-") for thread in threading.enumerate()))
    fake.clear_faults()
    before = fake.sent()
    assert puller.pull(TARGET)[0].verified
    assert fake.sent() - before <= 3 * 50_500


def test_a_pull_that_waits_to_try_again_stops_at_once(puller: Any, fake: FakeHub, small: Any) -> None:
    puller.impatient(longest_wait_s=100.0, whole_s=100.0)
    fake.fault(WEIGHTS, "429", retry_after=60, times=9)
    plan = puller.prepare(TARGET)
    begin = time.monotonic()
    with pytest.raises(Interrupted):
        puller.run(plan, cancelled=lambda: any(request.status == 429 for request in fake.requests))
    assert time.monotonic() - begin < 30.0, "half of what the hub asked to wait"


def test_progress_never_goes_back_without_reason_and_ends_whole(puller: Any, fake: FakeHub) -> None:
    fake.add_repo(TARGET, {"config.json": b"{}", WEIGHTS: safetensors(100_000)})
    fake.fault(WEIGHTS, "trickle", rate=200_000)
    puller.pull(TARGET)
    done = [event.done for event in puller.progress]
    assert done == sorted(done) and len(done) < 20
    assert (puller.progress[-1].done, puller.progress[-1].repo) == (puller.progress[-1].total, TARGET)


def test_a_fault_of_ours_ends_the_pull_in_words(puller: Any, small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr("dflash_local.store.transfer.receive", lambda *_: 1 / 0)
    with pytest.raises(DownloadError, match="fault of this program"):
        puller.pull(TARGET)

"""Two processes at one pull; a file in flight goes on in the next run, and is dropped when it is wrong."""

from __future__ import annotations

import math
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dflash_local.errors import DownloadError, Interrupted
from dflash_local.store import manifest, removal
from tests.fake_hub import HTML, FakeHub, safetensors, wait_until
from tests.store.cache_trees import process

TARGET = "owner/target"
WEIGHTS = "model.safetensors"
SIZE = 4_000_000


PULL = """
import sys
from pathlib import Path
from dflash_local.store.cache import Cache
from dflash_local.store.hub import Hub
from dflash_local.store.pull import Wanted, prepare, pull
print("begins", flush=True)
home = Path(sys.argv[2])
hub, cache = Hub(sys.argv[1], None, False, home / "hub"), Cache(home / "hub")
plan = prepare([Wanted("target", sys.argv[3])], hub, cache, home / "manifests")
(done,) = pull(plan, hub, cache, home / "manifests", home / "locks", on_event=lambda event: None)
print("verified", done.verified, flush=True)
"""


@pytest.fixture
def large(fake: FakeHub) -> dict[str, bytes]:
    """A target in one file of 4 MB beside ten small ones, at the hub."""
    small = {f"tokenizer_{number}.json": b'{"n": %d}' % number for number in range(10)}
    files = {"config.json": b"{}", "tokenizer.json": b"{}", WEIGHTS: safetensors(SIZE), **small}
    fake.add_repo(TARGET, files)
    return files


def parts(puller: Any) -> list[Path]:
    blobs = puller.cache.repo_folder(TARGET) / "blobs"
    return sorted(blobs.glob("*.incomplete"))


def part_bytes(puller: Any) -> int:
    """Bytes of all parts, of a pull that goes on: a small file's is renamed while it is looked at."""
    sizes = []
    for path in parts(puller):
        with suppress(FileNotFoundError):
            sizes.append(path.stat().st_size)
    return sum(sizes)


def sent_since(fake: FakeHub, requests: int) -> int:
    """Bytes of the weights in answer to all but the first requests for them."""
    return sum(request.sent for request in fake.gets(WEIGHTS)[requests:])


def content(puller: Any) -> bytes:
    return bytes((puller.cache.snapshot(TARGET, puller.cache.commits(TARGET)[0]) / WEIGHTS).read_bytes())


def left(puller: Any, data: bytes, name: str = "", age: float = 60.0) -> Path:
    """A partial file of the weights as an earlier pull leaves it."""
    file = puller.fake.repos[TARGET].commits[puller.fake.repos[TARGET].refs["main"]][WEIGHTS]
    path = puller.cache.repo_folder(TARGET) / "blobs" / f"{file.etag}{name or '.dflash-0123abcd'}.incomplete"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    os.utime(path, (time.time() - age, time.time() - age))
    return Path(path)


def test_a_kill_in_the_large_file_costs_what_was_not_written(
    puller: Any, fake: FakeHub, large: dict[str, bytes]
) -> None:
    fake.fault(WEIGHTS, "trickle", rate=2_500_000, times=99)
    with process(PULL, fake.url, puller.home, TARGET) as child:
        assert wait_until(lambda: part_bytes(puller) > 1_000_000, 60)
        child.send_signal(signal.SIGKILL)
        child.wait()
    (part,) = puller.age()
    had, before = part.stat().st_size, len(fake.gets(WEIGHTS))
    fake.clear_faults()
    small = len(fake.gets("*.json"))
    local = puller.pull(TARGET)[0]
    assert local.verified and parts(puller) == [] and content(puller) == large[WEIGHTS]
    assert sent_since(fake, before) == len(large[WEIGHTS]) - had < len(large[WEIGHTS]) - 1_000_000
    assert len(fake.gets("*.json")) == small
    assert any("of unfinished ones go on where they were" in notice for notice in puller.notices)
    last = puller.progress[-1]
    assert (last.done, last.verified) == (last.total, last.total) and last.resumed >= had


def test_a_stop_in_the_large_file_costs_nothing(puller: Any, fake: FakeHub, large: dict[str, bytes]) -> None:
    fake.fault(WEIGHTS, "trickle", rate=1_000_000)
    with pytest.raises(Interrupted) as caught:
        puller.pull(TARGET, cancelled=lambda: fake.sent(WEIGHTS) > 500_000)
    assert "in the middle of a file" in caught.value.hint
    had = puller.age()[0].stat().st_size
    before = len(fake.gets(WEIGHTS))
    assert had > 0 and puller.pull(TARGET)[0].verified and content(puller) == large[WEIGHTS]
    assert sent_since(fake, before) == len(large[WEIGHTS]) - had


@pytest.mark.parametrize("shared", [False, True])
def test_what_a_stopped_pull_left_is_ours_to_remove(puller: Any, fake: FakeHub, large: Any, shared: bool) -> None:
    theirs = puller.cache.snapshot(TARGET, "0" * 40) / "config.json"
    if shared:
        theirs.parent.mkdir(parents=True)
        theirs.write_bytes(b"{}")
    fake.fault(WEIGHTS, "trickle", rate=1_000_000, times=2)
    for _ in range(2):
        with pytest.raises(Interrupted):
            puller.pull(TARGET, cancelled=lambda: fake.sent(WEIGHTS) > 100_000)
        puller.age()
    plan = removal.plan_removal(puller.cache, puller.manifests, puller.locks, [TARGET], {})
    (item,) = plan.repos
    assert not item.delicate and item.others == (("0" * 40,) if shared else ()) and item.size > 0
    removal.remove(plan)
    assert puller.cache.commits(TARGET) == (("0" * 40,) if shared else ()) and theirs.exists() is shared
    assert manifest.begun(puller.manifests, TARGET) == () and not list(puller.manifests.glob("*/*"))
    fake.clear_faults()
    assert puller.pull(TARGET)[0].verified and manifest.begun(puller.manifests, TARGET) == ()


def test_a_part_with_wrong_bytes_is_found_by_its_hash(puller: Any, fake: FakeHub, large: Any) -> None:
    left(puller, b"x" * 1_000_000)
    assert puller.pull(TARGET)[0].verified and content(puller) == large[WEIGHTS]
    assert any("is damaged" in notice and "fetched again" in notice for notice in puller.notices)
    assert parts(puller) == []


def test_a_part_that_is_whole_is_hashed_and_not_fetched(puller: Any, fake: FakeHub, large: Any) -> None:
    left(puller, large[WEIGHTS])
    assert puller.pull(TARGET)[0].verified and fake.gets(WEIGHTS) == []


@pytest.mark.parametrize("name", ["", ".0123abcd"])
def test_a_part_that_is_too_long_or_another_program_s_is_dropped(
    puller: Any, fake: FakeHub, large: Any, name: str
) -> None:
    path = left(puller, large[WEIGHTS][: 1000 if name else None] + (b"" if name else b"x"), name)
    assert puller.pull(TARGET)[0].verified and not path.exists() and parts(puller) == []
    assert fake.sent(WEIGHTS) == len(large[WEIGHTS])


def test_a_server_that_ignores_the_range_of_another_run(puller: Any, fake: FakeHub, large: Any) -> None:
    left(puller, large[WEIGHTS][:1_000_000])
    fake.fault(WEIGHTS, "ignore_range")
    assert puller.pull(TARGET)[0].verified and content(puller) == large[WEIGHTS]
    assert not any("fetched again" in notice for notice in puller.notices)


def test_a_web_page_does_not_cost_the_part(puller: Any, fake: FakeHub, large: Any) -> None:
    left(puller, large[WEIGHTS][:1_000_000])
    fake.fault(WEIGHTS, "html", times=math.inf)
    with pytest.raises(DownloadError, match="web page"):
        puller.pull(TARGET)
    assert [path.stat().st_size for path in parts(puller)] == [1_000_000]
    assert HTML not in parts(puller)[0].read_bytes()


def test_a_part_counts_as_here(puller: Any, fake: FakeHub, large: Any) -> None:
    whole = puller.prepare(TARGET).to_fetch
    left(puller, large[WEIGHTS][:1_000_000])
    assert puller.prepare(TARGET).to_fetch == whole - 1_000_000


def test_two_files_of_one_content_are_fetched_once(puller: Any, fake: FakeHub) -> None:
    data = safetensors(200_000)
    fake.add_repo(TARGET, {"config.json": b"{}", "tokenizer.json": data, WEIGHTS: data})
    assert puller.pull(TARGET)[0].verified and fake.sent("*.json") + fake.sent(WEIGHTS) == len(data) + 2


def test_of_two_processes_one_downloads_and_one_waits(puller: Any, fake: FakeHub, small: dict[str, bytes]) -> None:
    fake.fault("model.safetensors", "trickle", rate=200_000)
    with process(PULL, fake.url, puller.home, TARGET) as first:
        assert wait_until(lambda: fake.sent("model.safetensors") > 0, 60)
        plan = puller.prepare(TARGET)
        assert not plan.ready and puller.run(plan)[0].verified
        out, _ = first.communicate(timeout=60)
    assert first.returncode == 0 and "verified True" in out
    assert [r.server for r in fake.gets("model.safetensors")] == ["hub", "cdn"]
    assert puller.notices == [f"owner/target is being pulled by process {first.pid}: waiting for it"]

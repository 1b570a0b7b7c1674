"""A hostile hub: whatever it sends, and wherever, the pull ends with one line, soon, and after few bytes."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_local.errors import DownloadError, Interrupted
from dflash_local.store.cache import Cache
from dflash_local.store.hub import Hub
from dflash_local.store.hub_client import MAX_ANSWER_BYTES, HubPatience
from dflash_local.store.pull import Wanted, prepare, pull
from tests.fake_hub import wait_until
from tests.hostile_hub import LINES, LISTINGS, PLACES, REPO, HostileHub

IMPATIENT = HubPatience(1.0, 0.2, 0.2, 0.6, tries=2, first_tries=2, pause_s=0.01, longest_wait_s=0.3)
BUFFERED = 12 << 20  # what the two sockets hold, for each of the tries


def refused(hostile: HostileHub, folder: Path, patience: HubPatience) -> DownloadError:
    hub = Hub(hostile.url, None, False, folder, patience=patience)
    with pytest.raises(DownloadError) as caught:
        cache = Cache(folder)
        pull(prepare([Wanted("target", REPO)], hub, cache, None), hub, cache, None, None)
    assert not hostile.outlasted, "the client waited until the server had enough"
    assert hostile.sent < MAX_ANSWER_BYTES + BUFFERED
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    return caught.value


@pytest.mark.parametrize("place", [*PLACES[:2], pytest.param(PLACES[2], marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", LINES)
def test_a_hostile_line_ends_in_one_line(name: str, place: str, tmp_path: Path) -> None:
    with HostileHub(LINES[name], place) as hostile:
        refused(hostile, tmp_path, IMPATIENT)


@pytest.mark.parametrize(
    ("name", "place"), [("gzip bomb", "listing"), ("brotli by name", "listing"), ("404 as a gzip bomb", "file")]
)
def test_nothing_is_unpacked(name: str, place: str, tmp_path: Path) -> None:
    with HostileHub(LINES[name], place) as hostile:
        assert "compressed an answer" in refused(hostile, tmp_path, IMPATIENT).message


@pytest.mark.parametrize("name", LISTINGS)
def test_a_hostile_listing_ends_in_one_line(name: str, tmp_path: Path) -> None:
    with HostileHub(LISTINGS[name]) as hostile:
        refused(hostile, tmp_path, replace(IMPATIENT, whole_s=10.0))


@pytest.mark.parametrize("name", ["silence", "100 for ever, slowly", "headers, a byte at a time"])
def test_a_stop_ends_a_request_that_has_no_answer_yet(name: str, tmp_path: Path) -> None:
    def pulling() -> bool:
        return any(thread.name.startswith("pull-") for thread in threading.enumerate())

    with HostileHub(LINES[name], "file") as hostile:
        hub, cache = Hub(hostile.url, None, False, tmp_path), Cache(tmp_path)
        plan = prepare([Wanted("target", REPO)], hub, cache, None)
        with pytest.raises(Interrupted):
            pull(plan, hub, cache, None, None, cancelled=lambda: hostile.requests > 1)
        assert wait_until(lambda: not pulling(), 5) and not hostile.outlasted

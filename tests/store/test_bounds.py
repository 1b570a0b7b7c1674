"""A hostile hub: whatever it sends, and wherever, the pull ends with one line, soon, and after few bytes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_local.errors import DownloadError, Interrupted
from dflash_local.store.cache import Cache
from dflash_local.store.hub import Hub
from dflash_local.store.hub_client import MAX_ANSWER_BYTES, HubPatience
from dflash_local.store.pull import Wanted, prepare, pull
from tests.fake_hub import wait_until
from tests.hostile_hub import LINES, LISTINGS, PLACES, REPO, HostileHub, Reply

IMPATIENT = HubPatience(1.0, 0.2, 0.2, 0.6, tries=2, first_tries=2, pause_s=0.01, longest_wait_s=0.3)
PACKED = {"listing": ("gzip bomb", "brotli by name"), "file": ("404 as a gzip bomb",)}  # not unpacked
BUFFERED = 12 << 20  # what the two sockets hold, for each of the tries


def refused(reply: Reply, place: str, folder: Path, whole_s: float) -> DownloadError:
    patience = replace(IMPATIENT, whole_s=whole_s)
    with HostileHub(reply, place) as hostile, pytest.raises(DownloadError) as caught:
        hub, cache = Hub(hostile.url, None, False, folder, patience=patience), Cache(folder)
        pull(prepare([Wanted("target", REPO)], hub, cache, None), hub, cache, None, None)
    assert not hostile.outlasted, "the client waited until the server had enough"
    assert hostile.sent < MAX_ANSWER_BYTES + BUFFERED
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    return caught.value


@pytest.mark.parametrize(
    ("place", "whole_s", "replies"),
    [
        *((place, 0.6, LINES) for place in PLACES[:2]),
        pytest.param(PLACES[2], 0.6, LINES, marks=pytest.mark.slow),
        (PLACES[0], 10.0, LISTINGS),
    ],
    ids=[*PLACES, "in the listing"],
)
def test_every_hostile_reply_ends_in_one_line(
    place: str, whole_s: float, replies: dict[str, Reply], tmp_path: Path
) -> None:
    """They mostly wait: some at a time."""
    with ThreadPoolExecutor(12) as clients:
        attacks = {
            name: clients.submit(refused, reply, place, tmp_path / str(number), whole_s)
            for number, (name, reply) in enumerate(replies.items())
        }
    assert {name: fault for name, attack in attacks.items() if (fault := attack.exception())} == {}
    for name in PACKED.get(place, ()) if replies is LINES else ():
        assert "compressed an answer" in attacks[name].result().message


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

"""Gated repositories and tokens; offline with a whole and with a torn cache."""

from __future__ import annotations

import shutil
import socket
from typing import Any

import pytest

from dflash_local.errors import DownloadError
from tests.fake_hub import FakeHub
from tests.store.conftest import DRAFTER, PAIR, TARGET

# Gates


def test_a_gated_repo_without_token(puller: Any, fake: FakeHub, small: Any) -> None:
    fake.repos[TARGET].gated = True
    plan = puller.prepare(TARGET)
    assert plan.repos[0].gated
    with pytest.raises(DownloadError, match="owner/target is gated: its licence must be accepted") as caught:
        puller.run(plan)
    hint = caught.value.hint
    assert caught.value.exit_code == 4 and "https://huggingface.co/owner/target" in hint and "hf auth login" in hint


def test_a_token_without_access_is_told_apart_and_never_shown(
    puller: Any, fake: FakeHub, small: Any, secret: str
) -> None:
    fake.repos[TARGET].gated = True
    puller.token = fake.grant(secret)
    with pytest.raises(DownloadError, match="owner/target is gated and your token has no access") as caught:
        puller.pull(TARGET)
    steps: list[str] = []
    error: BaseException | None = caught.value
    while error is not None:
        steps += [str(error), repr(error)]
        error = error.__cause__ or error.__context__
    assert secret not in "".join(steps) + repr(puller.hub) + repr(puller.said)
    assert "https://huggingface.co/owner/target" in caught.value.hint


# Offline


@pytest.fixture
def no_sockets(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    opened: list[Any] = []

    def refuse(*address: Any) -> Any:
        opened.append(address)
        raise OSError(101, "Network is unreachable")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return opened


@pytest.mark.parametrize("offline", [True, False])
def test_a_complete_cache_needs_no_socket(puller: Any, pair: Any, offline: bool, request: Any) -> None:
    puller.pull(*PAIR)
    opened = request.getfixturevalue("no_sockets")
    puller.offline = offline
    plan = puller.prepare(*PAIR)
    assert plan.ready and plan.to_fetch == 0 and plan.need == 0
    assert all(local.verified for local in puller.run(plan)) and opened == []


def test_offline_takes_what_another_program_fetched(puller: Any, small: Any, request: Any) -> None:
    puller.pull(TARGET)
    shutil.rmtree(puller.manifests)
    opened = request.getfixturevalue("no_sockets")
    puller.offline = True
    local = puller.pull(TARGET)[0]
    assert local.complete and not local.verified and opened == []


def test_offline_and_incomplete_lists_what_is_missing(puller: Any, sharded: Any, request: Any) -> None:
    local = puller.pull(TARGET)[0]
    gone = ["model-00002-of-00005.safetensors", "model-00004-of-00005.safetensors"]
    for name in gone:
        puller.cache.entry(TARGET, local.commit, name).blob.unlink()
    opened = request.getfixturevalue("no_sockets")
    puller.offline = True
    with pytest.raises(DownloadError) as caught:
        puller.pull(TARGET)
    assert caught.value.exit_code == 4 and all(name in caught.value.message for name in gone) and opened == []
    with pytest.raises(DownloadError, match="owner/drafter is not on this machine"):
        puller.pull(DRAFTER)

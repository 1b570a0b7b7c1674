"""Whole pulls: order, disk, updates, records, and what the source lacks."""

from __future__ import annotations

import json
import os
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from dflash_local.catalog.row import Fingerprint
from dflash_local.errors import DoesNotFitError, DownloadError, PairError
from dflash_local.store import manifest
from dflash_local.store.pull import Wanted
from tests.fake_hub import FakeHub, safetensors, shards
from tests.store.conftest import DRAFTER, PAIR, TARGET


def test_a_pair_is_pulled_proven_and_recorded(puller: Any, fake: FakeHub, pair: Any) -> None:
    plan = puller.prepare(*PAIR)
    assert len(fake.requests) == 2 and plan.to_fetch == plan.total == sum(item.total for item in plan.repos)
    target, drafter = puller.run(plan)
    assert (target.repo, drafter.repo) == (TARGET, DRAFTER)
    assert target.verified and drafter.verified and not target.missing
    record = manifest.read(puller.manifests, TARGET)
    assert record is not None and record.commit == target.commit == puller.cache.ref(TARGET)
    assert record.endpoint == fake.url and all(file.sha256 for file in record.files) and record.pulled_at.endswith("Z")
    last = {event.repo: event for event in puller.progress}
    assert all(last[repo].done == last[repo].total for repo in pair)


def test_small_files_of_both_come_before_any_weight(puller: Any, fake: FakeHub, pair: Any) -> None:
    puller.pull(*PAIR)
    order = [request.file.endswith(".safetensors") for request in fake.requests if request.file]
    assert order == sorted(order) and any(order) and not all(order)


def test_a_wrong_drafter_costs_no_weights(puller: Any, fake: FakeHub, pair: Any) -> None:
    other = Wanted("drafter", DRAFTER, None, (Fingerprint("x", layers=7),))
    plan = puller.prepare(PAIR[0], other)
    with pytest.raises(PairError, match="owner/drafter is no known drafter of owner/target: layers 2, not 7") as caught:
        puller.run(plan)
    assert caught.value.exit_code == 6 and fake.gets("*.safetensors") == []
    assert puller.run(plan, allow_mismatch=True)[1].verified
    assert any("taken all the same" in notice for notice in puller.notices)


def test_files_that_another_program_fetched_are_hashed_not_fetched(puller: Any, fake: FakeHub, pair: Any) -> None:
    puller.pull(*PAIR)
    shutil.rmtree(puller.manifests)
    before = fake.sent()
    plan = puller.prepare(*PAIR)
    assert plan.to_fetch == 0 and not plan.ready and plan.repos[0].unproven == plan.repos[0].total
    assert all(local.verified for local in puller.run(plan))
    assert fake.sent() == before and any("never verified" in notice for notice in puller.notices)


def test_only_what_is_missing_is_fetched_and_hashed(puller: Any, fake: FakeHub, sharded: dict[str, bytes]) -> None:
    local = puller.pull(TARGET)[0]
    name = "model-00002-of-00005.safetensors"
    entry = puller.cache.entry(TARGET, local.commit, name)
    entry.blob.unlink()
    plan = puller.prepare(TARGET)
    assert plan.to_fetch == len(sharded[name]) and plan.repos[0].unproven == 0
    assert puller.run(plan)[0].verified


def test_a_file_that_was_touched_is_hashed_again(puller: Any, fake: FakeHub, small: dict[str, bytes]) -> None:
    local = puller.pull(TARGET)[0]
    entry = puller.cache.entry(TARGET, local.commit, "model.safetensors")
    raw = bytearray(small["model.safetensors"])
    raw[-1] ^= 1
    entry.file.write_bytes(raw)
    os.utime(entry.file, ns=(1, 1))
    assert puller.pull(TARGET)[0].verified and entry.file.read_bytes() == small["model.safetensors"]


# Revisions


def test_the_recorded_commit_holds_until_update(puller: Any, fake: FakeHub, small: dict[str, bytes]) -> None:
    first = puller.pull(TARGET)[0]
    newer = fake.add_repo(TARGET, {**small, "config.json": b'{"model_type": "qwen2"}'})
    assert puller.pull(TARGET)[0].commit == first.commit
    before = fake.sent("model.safetensors")
    updated = puller.pull(TARGET, update=True)[0]
    assert updated.commit == newer == puller.cache.ref(TARGET) and updated.verified
    assert fake.sent("model.safetensors") == before  # the same blob
    assert puller.pull(TARGET)[0].commit == newer


def test_a_pinned_commit_is_pulled_and_moves_no_branch(puller: Any, fake: FakeHub, small: dict[str, bytes]) -> None:
    old = fake.repos[TARGET].refs["main"]
    fake.add_repo(TARGET, {**small, "config.json": b"{ }"})
    local = puller.pull(Wanted("target", TARGET, old))[0]
    assert local.commit == old and puller.cache.ref(TARGET) is None
    assert manifest.current(puller.manifests, TARGET) == old


def test_a_branch_is_resolved_and_recorded(puller: Any, fake: FakeHub, small: dict[str, bytes]) -> None:
    dev = fake.add_repo(TARGET, {**small, "config.json": b"{ }"}, branch="dev/x")
    assert puller.pull(Wanted("target", TARGET, "dev/x"))[0].commit == dev == puller.cache.ref(TARGET, "dev/x")


def test_going_back_to_a_commit_that_is_here(puller: Any, fake: FakeHub, small: dict[str, bytes]) -> None:
    first = puller.pull(TARGET)[0].commit
    fake.add_repo(TARGET, {**small, "config.json": b"{ }"})
    second = puller.pull(TARGET, update=True)[0].commit
    assert puller.pull(Wanted("target", TARGET, first), update=True)[0].commit == first
    assert manifest.current(puller.manifests, TARGET) == first != second


def test_a_repo_that_changes_in_between_does_not_mix(puller: Any, fake: FakeHub, small: dict[str, bytes]) -> None:
    plan = puller.prepare(TARGET)
    fake.add_repo(TARGET, {**small, "model.safetensors": safetensors(1000, 3)})
    local = puller.run(plan)[0]
    assert local.verified and local.commit == plan.repos[0].commit
    assert (local.folder / "model.safetensors").read_bytes() == small["model.safetensors"]


# Disk


def test_a_full_disk_is_seen_before_the_first_byte(
    puller: Any, fake: FakeHub, pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1 << 30, 1 << 30, 100_000))
    plan = puller.prepare(*PAIR)
    with pytest.raises(DoesNotFitError) as caught:
        puller.run(plan)
    assert caught.value.exit_code == 5 and plan.free == 100_000
    assert str(puller.home / "hub") in caught.value.message
    assert "0.25 GiB needed, 97.7 KiB free" in caught.value.message
    assert [request for request in fake.requests if request.file] == []


def test_a_read_only_cache_that_was_never_verified_will_do_as_well(
    puller: Any, fake: FakeHub, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    puller.pull(TARGET)
    shutil.rmtree(puller.manifests)

    def guarded(plain: Any) -> Any:
        def call(path: Any, *rest: Any, **named: Any) -> Any:
            if str(path).startswith(str(puller.cache.folder)):
                raise OSError(30, "Read-only file system")
            return plain(path, *rest, **named)

        return call

    for name in ("mkdir", "symlink", "rename", "replace", "unlink"):
        monkeypatch.setattr(os, name, guarded(getattr(os, name)))
    assert puller.pull(TARGET)[0].verified


def test_records_that_cannot_be_written_are_told_and_cost_nothing_else(puller: Any, small: Any) -> None:
    puller.manifests.write_text("in the way")
    local = puller.pull(TARGET)[0]
    assert local.complete and not local.verified
    assert any("could not be recorded" in notice for notice in puller.notices)


# What the source lacks


def test_a_shard_the_server_does_not_have(puller: Any, fake: FakeHub, sharded: dict[str, bytes]) -> None:
    fake.fault("model-00003-of-00005.safetensors", "404", times=99)
    with pytest.raises(DownloadError, match="model-00003-of-00005.safetensors") as caught:
        puller.pull(TARGET)
    assert caught.value.exit_code == 4 and "404" in caught.value.message
    assert manifest.read(puller.manifests, TARGET) is None and puller.cache.ref(TARGET) is None


def test_an_index_with_an_absent_shard_costs_no_weights(puller: Any, fake: FakeHub) -> None:
    files = {"config.json": b"{}", **shards(5, 50_000)}
    del files["model-00004-of-00005.safetensors"]
    fake.add_repo(TARGET, files)
    with pytest.raises(DownloadError, match="lacks model-00004-of-00005.safetensors"):
        puller.pull(TARGET)
    assert fake.gets("*.safetensors") == []


def test_weights_that_the_index_does_not_name_are_left(puller: Any, fake: FakeHub) -> None:
    files = {"config.json": b"{}", **shards(2, 1000), "model-extra.safetensors": safetensors(1000, 9)}
    fake.add_repo(TARGET, files)
    assert puller.pull(TARGET)[0].verified and "model-extra.safetensors" not in puller.names()


def test_the_cache_is_one_that_huggingface_hub_reads(puller: Any, small: dict[str, bytes]) -> None:
    import huggingface_hub

    puller.pull(TARGET)
    folder = huggingface_hub.snapshot_download(TARGET, cache_dir=puller.home / "hub", local_files_only=True)
    assert json.loads((Path(folder) / "config.json").read_bytes()) == {"model_type": "qwen3"}

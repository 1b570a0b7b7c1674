"""Which commit is taken, and whether what is on the disk can be loaded and was verified."""

from __future__ import annotations

import json
import os

import pytest

from dflash_local.checkpoint_files import safetensors_header
from dflash_local.checkpoint_files.safetensors_header import read_header
from dflash_local.errors import CheckpointError, DownloadError
from dflash_local.store import local, manifest
from dflash_local.store.local import Local
from tests.store.cache_trees import COMMIT, OLDER, REPO, SHARDS, SMALL, Tree, safetensors

INDEX = "model.safetensors.index.json"


def found(tree: Tree, revision: str | None = None) -> Local:
    here = local.find(tree.cache, tree.manifests, REPO, revision)
    assert here is not None
    return here


@pytest.mark.parametrize("linked", [True, False])
def test_what_was_pulled_is_complete_and_verified(tree: Tree, linked: bool) -> None:
    tree.add(SHARDS, links=linked)
    tree.record()
    here = found(tree)
    assert (here.repo, here.commit, here.folder) == (REPO, COMMIT, tree.cache.snapshot(REPO, COMMIT))
    assert here.complete and here.verified and here.missing == () and here.changed == () and here.notice == ""
    assert [entry.name for entry in here.files] == sorted(SHARDS)
    assert here.size == sum(map(len, SHARDS.values()))
    assert local.require(here, REPO, "dflash pull x") is here


@pytest.mark.parametrize("files", [SMALL, SHARDS])
def test_another_program_s_cache_is_usable_but_not_verified(tree: Tree, files: dict[str, bytes]) -> None:
    tree.add(files)
    for manifests in (tree.manifests, None):
        here = local.find(tree.cache, manifests, REPO)
        assert here is not None and here.complete and not here.verified and here.notice == ""


def test_nothing_there_is_none(tree: Tree) -> None:
    assert local.find(tree.cache, tree.manifests, REPO) is None
    assert local.scan(tree.cache, tree.manifests) == ()
    with pytest.raises(DownloadError, match="lab/Pair-8B is not on this machine") as caught:
        local.require(None, REPO, "dflash pull pair-8b")
    assert caught.value.hint == "fetch it with `dflash pull pair-8b`"


def test_the_recorded_commit_is_taken_before_the_branch(tree: Tree) -> None:
    tree.add(commit=OLDER, ref=None)
    tree.record(commit=OLDER)
    tree.add(commit=COMMIT)  # another program has fetched a newer main
    assert found(tree).commit == OLDER
    assert found(tree, "main").commit == OLDER
    assert found(tree, COMMIT).commit == COMMIT
    assert not found(tree, COMMIT).verified


def test_without_a_record_the_branch_then_the_only_snapshot_is_taken(tree: Tree) -> None:
    tree.add(commit=OLDER, ref="dev")
    assert found(tree).commit == OLDER  # the only one
    tree.add(commit=COMMIT)
    assert found(tree).commit == COMMIT  # main
    assert found(tree, "dev").commit == OLDER
    assert local.find(tree.cache, tree.manifests, REPO, "no-such-branch") is None
    (tree.cache.repo_folder(REPO) / "refs" / "main").unlink()
    assert local.find(tree.cache, tree.manifests, REPO) is None  # which of two is not guessed


def test_a_recorded_commit_whose_files_another_program_deleted_is_incomplete(tree: Tree) -> None:
    tree.add(commit=OLDER, ref=None)
    tree.record(commit=OLDER)
    tree.add(commit=COMMIT)
    for path in tree.cache.files(REPO, OLDER):
        path.unlink()
    tree.cache.snapshot(REPO, OLDER).rmdir()
    here = found(tree)
    assert here.commit == OLDER and here.missing == ("config.json", "model.safetensors") and not here.verified


def test_a_recorded_commit_of_which_nothing_is_left_gives_way(tree: Tree) -> None:
    tree.add()
    manifest.use(tree.manifests, REPO, OLDER)
    assert found(tree).commit == COMMIT


def test_missing_files_are_listed(tree: Tree) -> None:
    tree.add({**SHARDS, "tokenizer.json": b"{}"})
    tree.record()
    for name in ("tokenizer.json", "model-2.safetensors"):
        (tree.cache.snapshot(REPO, COMMIT) / name).unlink()
    here = found(tree)
    assert here.missing == ("model-2.safetensors", "tokenizer.json") and not here.verified and not here.complete
    with pytest.raises(DownloadError, match="not complete: model-2.safetensors, tokenizer.json missing") as caught:
        local.require(here, REPO, "dflash pull x")
    assert caught.value.exit_code == 4


@pytest.mark.parametrize("recorded", [True, False])
def test_a_shard_that_the_index_names_and_nobody_has_is_missing(tree: Tree, recorded: bool) -> None:
    tree.add({name: data for name, data in SHARDS.items() if name != "model-2.safetensors"})
    if recorded:  # the repo itself lacks it: everything that there was is here
        tree.record()
    here = found(tree)
    assert here.missing == ("model-2.safetensors",) and not here.verified


def test_a_tensor_that_the_index_lists_twice_is_refused(tree: Tree) -> None:
    text = '{"weight_map": {"a": "model-1.safetensors", "a": "model-2.safetensors"}}'
    tree.add({**SHARDS, INDEX: text.encode()})
    tree.record()
    with pytest.raises(CheckpointError, match="lists the tensor 'a' twice"):
        found(tree)


def test_a_tensor_in_two_shards_is_refused(tree: Tree) -> None:
    tree.add({**SHARDS, "model-2.safetensors": safetensors("b", "a")})
    with pytest.raises(CheckpointError, match="the tensor 'a' is in both model-1.safetensors and model-2.safetensors"):
        found(tree)


@pytest.mark.parametrize("shard", ["../model-1.safetensors", "sub/m.safetensors", "model.bin", "C:\\m.safetensors", 5])
def test_an_index_that_names_no_plain_weight_file_is_refused(tree: Tree, shard: object) -> None:
    tree.add({**SHARDS, INDEX: json.dumps({"weight_map": {"a": shard}}).encode()})
    with pytest.raises(CheckpointError, match="is no weight file"):
        found(tree)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"weight_map": {}}', b"[" * 100_000])
def test_a_damaged_index_is_to_be_fetched_again(tree: Tree, content: bytes) -> None:
    tree.add({**SHARDS, INDEX: content})
    assert found(tree).missing == (INDEX,)


@pytest.mark.parametrize("damage", ["cut", "long", "empty", "header", "huge", "offsets", "list"])
def test_a_weight_file_that_is_not_whole_is_to_be_fetched_again(tree: Tree, damage: str) -> None:
    data = SMALL["model.safetensors"]
    bad = {
        "cut": data[:-1],
        "long": data + b"x",
        "empty": b"",
        "header": data[:8] + b"?" + data[9:],
        "huge": (1 << 62).to_bytes(8, "little") + data[8:],
        "offsets": (17).to_bytes(8, "little") + b'{"a": {"x": "y"}}',
        "list": (2).to_bytes(8, "little") + b"[]",
    }
    tree.add({**SMALL, "model.safetensors": bad[damage]})
    here = found(tree)
    assert here.missing == ("model.safetensors",) and not here.verified


def test_a_config_is_needed_and_so_are_weights(tree: Tree) -> None:
    tree.add({"tokenizer.json": b"{}", "pytorch_model.bin": b"x", "sub/model.safetensors": SMALL["model.safetensors"]})
    assert found(tree).missing == ("config.json", "model.safetensors")


def test_a_file_cut_since_the_pull_is_missing_one_touched_since_is_changed(tree: Tree) -> None:
    snapshot = tree.add(links=False)
    tree.record()
    os.utime(snapshot / "config.json", (1, 1))
    here = found(tree)
    assert here.changed == ("config.json",) and here.complete and not here.verified
    assert here.notice == f"{REPO}: config.json changed since the download was verified"
    (snapshot / "config.json").write_bytes(b"{ }")
    assert found(tree).missing == ("config.json",)


@pytest.mark.parametrize("content", ['{"version": 9}', '["config.json"]', "{"])
def test_after_an_upgrade_old_records_and_caches_are_used_and_nothing_is_deleted(tree: Tree, content: str) -> None:
    tree.add(SHARDS)
    tree.record()
    (tree.manifests / "models--lab--Pair-8B" / f"{COMMIT}.json").write_text(content)
    # What huggingface_hub kept in the cache before 2022, and files of nobody.
    for name in ("0f0e" * 16, "0f0e" * 16 + ".json", "0f0e" * 16 + ".lock", "version.txt"):
        (tree.cache.folder / name).write_text("{}")
    before = tree.content()
    here = found(tree)
    assert here.complete and not here.verified
    assert REPO in here.notice and "count as not verified" in here.notice
    assert [item.repo for item in local.scan(tree.cache, tree.manifests)] == [REPO]
    assert tree.content() == before
    tree.record()  # verified again
    assert found(tree).verified
    assert set(before.values()) <= set(tree.content().values())


def test_scan_lists_every_repo_whatever_its_state(tree: Tree) -> None:
    tree.add()
    tree.record()
    tree.add(SHARDS, repo="gpt2")
    tree.add({"README.md": b"x"}, repo="a/unfinished")
    tree.add(repo="b/two", commit=OLDER, ref=None)
    tree.add(repo="b/two", commit=COMMIT, ref=None)
    os.utime(tree.cache.snapshot("b/two", COMMIT), (1, 1))
    tree.blob(b"no snapshot yet", repo="c/none")
    (tree.add(repo="d/evil") / "link").symlink_to("/etc/passwd")
    items = {item.repo: item for item in local.scan(tree.cache, tree.manifests)}
    assert list(items) == ["a/unfinished", "b/two", "d/evil", "gpt2", REPO]
    assert items[REPO].verified and items["gpt2"].complete and not items["gpt2"].verified
    assert not items["a/unfinished"].complete
    assert items["b/two"].commit == OLDER  # the latest written
    assert "link is a link to /etc/passwd" in items["d/evil"].problem and not items["d/evil"].complete


def test_a_header_that_a_pull_accepts_is_one_that_loads_and_the_other_way_round(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is one limit for both: the header of a mixture stored per expert lay between the two that there were."""
    monkeypatch.setattr(safetensors_header, "MAX_ENTRIES", 3)
    tree.add({"config.json": b"{}", "model.safetensors": safetensors(*"abc")})
    assert found(tree).complete
    assert len(read_header(tree.cache.snapshot(REPO, COMMIT) / "model.safetensors")) == 3
    hole = safetensors("a", "b").replace(b'"data_offsets": [0, 2]', b'"data_offsets": [2, 0]')
    for commit, refused in ((OLDER, hole), ("b" * 40, safetensors(*"abcd"))):
        tree.add({"config.json": b"{}", "model.safetensors": refused}, commit=commit)
        assert found(tree, commit).missing == ("model.safetensors",)
        with pytest.raises(CheckpointError):
            read_header(tree.cache.snapshot(REPO, commit) / "model.safetensors")

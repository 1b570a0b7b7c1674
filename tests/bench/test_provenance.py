"""Identities and versions of a report."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from dflash_local.bench import provenance
from tests.bench.sessions import GOLDEN, HYBRID


def test_a_folder_is_known_by_its_config_and_headers() -> None:
    folder = GOLDEN / HYBRID / "target"
    found = provenance.checkpoint_identity(folder)
    config = next(file for file in found.files if file.name == "config.json")
    weights = next(file for file in found.files if file.name == "model.safetensors")
    assert config.sha256 == hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
    raw = (folder / "model.safetensors").read_bytes()
    assert weights.bytes == len(raw)
    assert weights.sha256 == hashlib.sha256(raw[: 8 + int.from_bytes(raw[:8], "little")]).hexdigest()
    assert found.name == f"{HYBRID}/target" and found.revision is None


def test_a_hub_snapshot_tells_its_name_and_revision(tmp_path: Path) -> None:
    commit = "0123456789abcdef" * 2 + "01234567"
    folder = tmp_path / "models--Qwen--Qwen3-4B" / "snapshots" / commit
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}", encoding="utf-8")
    found = provenance.checkpoint_identity(folder)
    assert (found.name, found.revision) == ("Qwen/Qwen3-4B", commit)


def test_a_checkpoint_of_another_source_is_known_by_the_files_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = GOLDEN / HYBRID / "target"
    named = {folder / "weights.npy": 4}
    monkeypatch.setattr(provenance, "open_source", lambda _path: SimpleNamespace(headers=lambda: named))
    found = provenance.checkpoint_files(folder)
    assert found[folder / "weights.npy"] == 4 and folder / "model.safetensors" not in found
    assert found[folder / "config.json"] is None


def test_the_source_revision_is_read_from_loose_and_packed_refs(tmp_path: Path) -> None:
    commit = "a" * 40
    assert provenance.source_revision(tmp_path) is None
    git = tmp_path / ".git"
    (git / "refs/heads").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n", encoding="ascii")
    (git / "packed-refs").write_text(f"# pack-refs\n{commit} refs/heads/main\n", encoding="ascii")
    assert provenance.source_revision(tmp_path) == commit
    (git / "refs/heads/main").write_text("b" * 40 + "\n", encoding="ascii")
    assert provenance.source_revision(tmp_path) == "b" * 40
    (git / "HEAD").write_text("c" * 40, encoding="ascii")
    assert provenance.source_revision(tmp_path) == "c" * 40


def test_machine_and_versions_are_json_and_name_no_host() -> None:
    import platform

    text = json.dumps([provenance.machine(), provenance.versions()])
    assert '"torch"' in text and '"system"' in text
    node = platform.node()
    assert len(node) < 6 or node not in text

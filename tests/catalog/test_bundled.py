"""From a name or a folder to a pair."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_local.catalog import bundled
from dflash_local.catalog.bundled import find
from dflash_local.errors import CheckpointError, UnknownModelError, UsageError


@pytest.fixture
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in bundled.BUNDLED:
        for part in ("target", "drafter"):
            folder = tmp_path / "toys" / name / part
            folder.mkdir(parents=True)
            (folder / "config.json").write_text("{}", encoding="utf-8")
    monkeypatch.setattr(bundled, "FOLDER", tmp_path / "toys")
    return tmp_path / "toys"


def test_a_bundled_name_gives_both_folders_and_is_called_a_toy(toys: Path) -> None:
    pair = find("demo-hybrid")
    assert (pair.target, pair.drafter) == (toys / "demo-hybrid" / "target", toys / "demo-hybrid" / "drafter")
    assert pair.bundled and pair.acceptance_band and pair.label == "demo-hybrid (toy pair)"


def test_a_drafter_overrides_the_bundled_one_but_the_target_stays_a_toy(toys: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    pair = find("demo", str(tmp_path / "mine"))
    assert pair.drafter == tmp_path / "mine" and not pair.bundled and pair.toy and pair.acceptance_band is None


def test_a_local_folder_has_no_drafter_unless_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "drafter").mkdir()
    alone = find(str(tmp_path / "target"))
    assert alone.drafter is None and not alone.bundled and alone.label == str(tmp_path / "target")
    assert find(str(tmp_path / "target"), str(tmp_path / "drafter")).drafter == tmp_path / "drafter"


@pytest.mark.parametrize(("typed", "meant"), [("demo-hybird", "demo-hybrid"), ("Demo", "demo"), ("dmo", "demo")])
def test_a_typo_is_answered_with_the_nearest_name(typed: str, meant: str) -> None:
    with pytest.raises(UnknownModelError) as unknown:
        find(typed)
    assert typed in unknown.value.message and f"did you mean {meant!r}" in unknown.value.hint
    assert unknown.value.exit_code == 3


@pytest.mark.parametrize(
    "typed", ["", " ", "org/model", "../../etc/nothing", "\x1b]0;x", "x" * 5000, "a\0b", "~nobody/x"]
)
def test_what_is_nothing_is_refused_with_the_names_there_are(typed: str, tmp_path: Path) -> None:
    with pytest.raises(UnknownModelError) as unknown:
        find(typed)
    assert "demo" in unknown.value.hint or "folder" in unknown.value.hint


def test_a_drafter_that_is_no_folder_is_a_usage_error(tmp_path: Path) -> None:
    for drafter in (str(tmp_path / "none"), ""):
        with pytest.raises(UsageError, match="--drafter"):
            find(str(tmp_path), drafter)


def test_a_bundled_pair_that_is_not_there_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundled, "FOLDER", tmp_path)
    with pytest.raises(CheckpointError) as missing:
        find("demo")
    assert "'demo' is missing" in missing.value.message and "install dflash-local again" in missing.value.hint

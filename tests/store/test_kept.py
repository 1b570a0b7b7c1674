"""What cannot be kept ends nothing and is told once."""

from __future__ import annotations

from pathlib import Path

from dflash_local.store.kept import keep, take_unkept


def test_what_is_written_is_not_told(tmp_path: Path) -> None:
    assert keep(tmp_path / "new" / "file", "text") and (tmp_path / "new" / "file").read_text() == "text"
    assert take_unkept() == ""


def test_folders_that_cannot_be_written_are_told_once_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for name in ("one/a", "one/b", "two/a"):
        assert not keep(tmp_path / "file" / name, "text")
    line = take_unkept()
    assert line.count(str(tmp_path / "file")) == 2 and line.count("(Not a directory)") == 2
    assert take_unkept() == ""

"""A conversation as Markdown or JSON."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from dflash_local.errors import UsageError
from dflash_local.store.export import export
from dflash_local.store.records import Turn

TURNS = [Turn("user", "hi"), Turn("assistant", "ho\x1b]0;x\x07", "hm", True, {"tokens_per_s": 12.5, "seed": 7})]


def test_json_holds_figures_and_marks(tmp_path: Path) -> None:
    export(tmp_path / "talk.json", "demo", "brief", TURNS)
    content = json.loads((tmp_path / "talk.json").read_text())
    assert content["model"] == "demo" and content["system"] == "brief"
    assert content["messages"][1]["figures"] == {"tokens_per_s": 12.5, "seed": 7}
    assert content["messages"][1]["stopped"] is True and content["messages"][1]["thinking"] == "hm"


def test_markdown_holds_figures_and_no_control_characters(tmp_path: Path) -> None:
    path = tmp_path / "talk.md"
    export(path, "demo", "", TURNS)
    text = path.read_text(encoding="utf-8")
    assert "tokens_per_s 12.5" in text and "(stopped)" in text and "> hm" in text
    assert not any(ord(c) < 32 and c != "\n" for c in text)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_is_not_overwritten_and_an_unknown_ending_is_refused(tmp_path: Path) -> None:
    (tmp_path / "talk.md").write_text("mine")
    with pytest.raises(UsageError, match="already"):
        export(tmp_path / "talk.md", "demo", "", TURNS)
    with pytest.raises(UsageError, match="ends neither"):
        export(tmp_path / "talk.doc", "demo", "", TURNS)
    assert (tmp_path / "talk.md").read_text() == "mine"

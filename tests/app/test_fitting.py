"""What is known of a pair before it is loaded: a number that the registry lacks is unknown, a folder's is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_local import settings
from dflash_local.app import fitting, recommending
from dflash_local.app.resolve import Choice, of_row
from dflash_local.catalog import registry, shapes
from dflash_local.catalog.shapes import shape
from dflash_local.checkpoint_files.config_values import UnknownValue
from dflash_local.planner.machine import named
from dflash_local.ui import plan_text

ROW = next(row for row in registry.load().rows if row.name == "Qwen/Qwen3-8B")


def without(repo: str, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry as if it did not know a number of a repository."""

    def known(asked: str) -> dict[str, Any] | None:
        found = shape(asked)
        return {**found, key: None} if found is not None and asked == repo else found

    monkeypatch.setattr(shapes, "shape", known)


def test_a_row_whose_target_is_known_in_part_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    user, where = settings.load(), named("H200", None)
    assert recommending.row_summary(ROW, where, user).fits == "fits"
    without("Qwen/Qwen3-8B", "hidden_size", monkeypatch)
    assert fitting.shapes(of_row(ROW), None) is None
    found = recommending.row_summary(ROW, where, user)
    assert (found.fits, found.plan, found.best) == ("unknown", None, None)


def test_a_drafter_that_is_known_in_part_is_left_out_and_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    without("z-lab/Qwen3-8B-DFlash-b16", "intermediate_size", monkeypatch)
    known = fitting.shapes(of_row(ROW), None)
    assert known is not None and known.drafter is None and known.drafter_unknown
    assert plan_text.remarks(known, 100) == ["the drafter's shape is unknown: its memory is not counted"]


def test_a_folder_that_lacks_a_number_names_it(tmp_path: Path) -> None:
    config = {key: value for key, value in (shape("Qwen/Qwen3-8B") or {}).items() if not key.startswith("_")}
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": None}))
    with pytest.raises(UnknownValue, match="vocab_size is missing"):
        fitting.shapes(Choice(str(tmp_path), tmp_path, None), None)

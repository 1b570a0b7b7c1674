"""The log of errors: how many, what of them, and that no value of a message is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_local.errors import CheckpointError, DFlashError, UsageError
from dflash_local.planner.cards import card_memory
from dflash_local.planner.machine import named
from dflash_local.report import errors_log


def raised(kind: type[DFlashError], message: str) -> DFlashError:
    with pytest.raises(DFlashError) as caught:
        raise kind(message)
    return caught.value


def test_the_last_ones_are_kept_the_oldest_first(tmp_path: Path) -> None:
    for number in range(errors_log.KEPT + 3):
        errors_log.remember(tmp_path / "state", f"c{number}", raised(UsageError, "no"))
    found = errors_log.read(tmp_path / "state")
    assert [entry["command"] for entry in found] == [f"c{number}" for number in range(3, errors_log.KEPT + 3)]
    assert found[-1]["error"] == "UsageError" and found[-1]["exit_code"] == 2 and found[-1]["time"].endswith("Z")


def test_a_message_keeps_its_literal_and_its_numbers() -> None:
    with pytest.raises(UsageError) as caught:
        card_memory("my secret card")
    assert "secret" in caught.value.message
    assert errors_log.template(caught.value) == "unknown GPU …"
    assert errors_log.places(caught.value)[-1].startswith("planner/cards.py:")
    with pytest.raises(UsageError) as caught:
        named(None, -3)
    assert errors_log.template(caught.value) == "--gpu-memory -3 is not a size in GiB"


def test_a_message_of_no_literal_here_is_not_kept(tmp_path: Path) -> None:
    error = raised(CheckpointError, "said by a file of mine: hello")
    errors_log.remember(tmp_path, "run", error)
    assert errors_log.read(tmp_path)[0]["message"] == "" and errors_log.places(error) == []


def test_the_place_is_that_of_the_cause() -> None:
    outer = DFlashError("unexpected failure")
    with pytest.raises(UsageError) as caught:
        card_memory("x")
    outer.__cause__ = caught.value
    assert "in card_memory" in errors_log.places(outer)[-1]


@pytest.mark.parametrize("content", [b"", b"[1, 2", b"{}", b"[1, null]", b"\xff", b"[" * 100_000])
def test_a_damaged_log_is_an_empty_one_and_written_anew(tmp_path: Path, content: bytes) -> None:
    (tmp_path / errors_log.FILE).write_bytes(content)
    assert errors_log.read(tmp_path) == []
    errors_log.remember(tmp_path, "run", raised(UsageError, "no"))
    assert len(errors_log.read(tmp_path)) == 1


def test_a_folder_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    errors_log.remember(tmp_path / "file" / "state", "run", raised(UsageError, "no"))
    assert errors_log.read(tmp_path / "file" / "state") == []

"""Results kept line by line: taken up again, torn ends cut off, other runs' files left alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_local.bench.tasks.results import VERSION, Drafted, PromptResult, ResultsFile, TaskReply
from dflash_local.errors import UsageError

REPLY = TaskReply(5, 0, 3, "stop", 0.1, 1.1, 2.0, Drafted(2, 14, 1), "text \x1b[0m ü")
DONE = PromptResult("1", 1, 2.0, (REPLY,))
FAILED = PromptResult("2", 1, 3.0, error="ContextError: too long")


def opened(folder: Path, fresh: bool = False, **identity: object) -> ResultsFile:
    return ResultsFile(folder, "owner/name-gsm8k", {"block": 8, **identity}, fresh)


def test_what_was_kept_is_there_again(tmp_path: Path) -> None:
    file = opened(tmp_path)
    file.add(DONE)
    file.add(FAILED)
    assert opened(tmp_path).results == {"1": DONE, "2": FAILED}
    assert file.path.name.startswith("owner-name-gsm8k-") and file.path.stat().st_mode & 0o077 == 0
    file.add(replace(FAILED, error="", turns=DONE.turns))
    assert not opened(tmp_path).results["2"].error, "the last line of a prompt counts"


def test_a_file_of_the_version_before_goes_on_as_one_of_this(tmp_path: Path) -> None:
    """A torn end is cut off there, too; of its replies the thoughts are not known."""
    path = opened(tmp_path).path
    opened(tmp_path).add(DONE)
    line = json.loads(path.read_text(encoding="utf-8").splitlines()[1])
    del line["turns"][0]["thinking"]
    old = [json.dumps({"version": 2, "identity": {"block": 8}}), json.dumps(line), '{"id": "2", "tu']
    path.write_text("\n".join(old), encoding="utf-8")
    thought = replace(DONE, id="3", turns=(replace(REPLY, thinking="a"),))
    opened(tmp_path).add(thought)
    assert opened(tmp_path).results == {"1": DONE, "3": thought}
    head, *lines = path.read_text(encoding="utf-8").splitlines()
    assert json.loads(head)["version"] == VERSION and len(lines) == 2


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"ids": "a"}, {"ids": "a"}, True),
        ({"ids": "a"}, {"ids": "b"}, False),
        ({"ids": "a", "thinking": "x"}, {"ids": "a", "thinking": "y"}, False),  # a server names no ids of thoughts
        ({"thinking": "x"}, {"thinking": "x"}, True),
        ({"thinking": "x"}, {"thinking": ""}, False),
        ({"thinking": "x"}, {}, True),
        ({"thinking": "x"}, {"thinking": "x", "text": "other"}, False),
    ],
)
def test_replies_are_equal_by_all_that_is_known_of_both(one: dict[str, str], other: dict[str, str], same: bool) -> None:
    left, right = replace(REPLY, **one), replace(REPLY, **other)  # type: ignore[arg-type]
    assert left.equals(right) is right.equals(left) is same


def test_a_torn_line_is_cut_off_and_a_damaged_one_is_run_again(tmp_path: Path) -> None:
    file = opened(tmp_path)
    file.add(DONE)
    whole = file.path.read_bytes()
    file.path.write_bytes(whole + b'{"id": "7"}\n\xff\n{"id": "2", "tu')
    again = opened(tmp_path)
    assert again.results == {"1": DONE}
    again.add(FAILED)
    assert opened(tmp_path).results == {"1": DONE, "2": FAILED}


def test_other_settings_have_another_file(tmp_path: Path) -> None:
    opened(tmp_path).add(DONE)
    assert opened(tmp_path, thinking=True).results == {}
    assert opened(tmp_path, fresh=True).results == {} and opened(tmp_path).results == {}


@pytest.mark.parametrize("head", [b"", b"\n", b"[]\n", json.dumps({"version": 2, "identity": {}}).encode() + b"\n"])
def test_a_file_that_is_not_this_run_s_is_left_alone(tmp_path: Path, head: bytes) -> None:
    file = opened(tmp_path)
    file.path.write_bytes(head)
    with pytest.raises(UsageError, match="damaged"):
        opened(tmp_path)
    assert file.path.read_bytes() == head


def test_a_folder_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(UsageError, match="cannot be written"):
        opened(tmp_path / "file" / "folder")

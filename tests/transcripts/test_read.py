"""Hostile and odd files: each a line, and the others are read."""

from __future__ import annotations

import json
import os
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest

from dflash_local.errors import UsageError
from dflash_local.transcripts import read, turn
from dflash_local.transcripts.read import ReadReport, conversations

GOOD = {
    "model": "m",
    "system": "",
    "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
}


def problems(folder: Path, good: int = 1) -> dict[str, str]:
    """Read a folder; returns what is said of each file by its name."""
    report = ReadReport()
    turns = [each for found in conversations(folder, report, lambda _text, _part: None) for each in found.turns]
    assert len(turns) == good
    return {Path(line.partition(": ")[0]).name: line.partition(": ")[2] for line in report.problems}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder whose last file is a good one."""
    (tmp_path / "z.json").write_text(json.dumps(GOOD), encoding="utf-8")
    return tmp_path


def test_broken_files_are_named_and_the_rest_is_read(folder: Path) -> None:
    (folder / "deep.json").write_text("[" * 200_000, encoding="utf-8")
    (folder / "text.jsonl").write_bytes(b"\xff\xfe\x00no JSON\n")
    (folder / "digits.json").write_text(f'{{"n": {"9" * 5000}}}', encoding="utf-8")
    (folder / "torn.jsonl").write_text('{"version": 1, "seq": 0, "kind": "chat"}\n{"version": 1, "se', encoding="utf-8")
    (folder / "old.jsonl.zst").write_bytes(bytes.fromhex("28b52ffd0403190000") + b"{}\n\xa1\x00\x10\x00")
    (folder / "empty.json").touch()
    (folder / "other.json").write_text('{"name": "a package"}', encoding="utf-8")
    found = problems(folder)
    assert "zstd -d" in found.pop("old.jsonl.zst")
    assert found.pop("torn.jsonl") == "1 line is no JSON and left out"
    assert "nested too deeply" in found.pop("deep.json") and "5000 digits" in found.pop("digits.json")
    assert found.pop("text.jsonl").startswith("no JSON: ") and not found


def test_a_database_is_opencodes_or_broken_or_none_of_a_client(folder: Path) -> None:
    (folder / "text.db").write_text("no database, but a text of more than a hundred bytes " * 9, encoding="utf-8")
    (folder / "empty.db").touch()
    odd = [(1, 2, "m", b"{}"), (None, None, None, None), ("s", "n", "p", "no JSON")]
    for name, rows in (("other", None), ("odd", odd), ("torn", [("s", "m", "p", "{}")] * 4000)):
        with closing(sqlite3.connect(folder / f"{name}.db")) as database, database:
            database.execute("CREATE TABLE session (id)")
            if rows is not None:
                database.execute("CREATE TABLE message (session_id, id, time_created, data)")
                database.execute("CREATE TABLE part (session_id, message_id, id, data)")
                database.executemany("INSERT INTO message VALUES (?1, ?2, 0, ?4)", rows)
                database.executemany("INSERT INTO part VALUES (?1, ?2, ?3, ?4)", rows)
    with (folder / "torn.db").open("r+b") as file:
        file.seek(5 * 4096)
        file.write(b"\xff" * 20 * 4096)
    found = problems(folder)
    assert found.pop("torn.db") == "the database cannot be read: database disk image is malformed"
    assert found.pop("odd.db").startswith("a message in it is no JSON: ") and not found


def test_odd_values_where_a_client_has_text_are_no_text(folder: Path) -> None:
    odd: list[object] = [None, 7, "x", [], {}, [[None]], {"content": 3, "id": []}]
    for number, value in enumerate(odd):
        lines = [
            {"type": "user", "uuid": "u", "sessionId": "s", "message": {"content": value}},
            {"type": "assistant", "uuid": value, "sessionId": "s", "message": value, "agentId": value},
        ]
        codex = [{"type": "response_item", "payload": {"type": "message", "role": value, "content": value}}]
        codex += [{"type": kind, "payload": value} for kind in ("session_meta", "response_item", "compacted")]  # type: ignore[dict-item]
        chats = [{"chat": {"history": {"messages": {"a": value}, "currentId": "a"}}}, value]
        for name, records in (("claude", lines), ("codex", codex), ("own", [{**GOOD, "messages": [value]}])):
            text = "".join(f"{json.dumps(record)}\n" for record in records)
            (folder / f"{name}{number}.jsonl").write_text(text, encoding="utf-8")
        (folder / f"chats{number}.json").write_text(json.dumps(chats), encoding="utf-8")
        part = {"id": f"p{number}", "sessionID": "s", "messageID": "m", "type": "tool", "state": value, "tool": value}
        (folder / f"part{number}.json").write_text(json.dumps(part), encoding="utf-8")
    about = {"id": "m", "sessionID": "s", "role": "assistant", "time": {"created": 1}}
    (folder / "message.json").write_text(json.dumps(about), encoding="utf-8")
    assert problems(folder) == {}


def test_sizes_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (folder / "a.jsonl").open("wb") as huge:
        huge.truncate(2**31)
    monkeypatch.setattr(read, "MOST_AT_ONCE", 2000)
    monkeypatch.setattr(turn, "MOST_CHARS", 1000)
    lines = [json.dumps({"version": 1, "seq": n, "kind": "chat", "system": "s" * n}) for n in (0, 5000)]
    lines += [json.dumps({"version": 1, "seq": 2, "kind": "turn", "role": "user", "content": "x" * 990})]
    (folder / "b.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (folder / "c.json").write_text(json.dumps([[0] * 2000], indent=1), encoding="utf-8")
    found = problems(folder)
    assert found["a.jsonl"] == "it has 2.00 GiB, at most 1.00 GiB are read"
    assert "more than 1,000 characters" in found["b.jsonl"]
    assert "a document of more than" in found["c.json"]
    monkeypatch.setattr(turn, "MOST_CHARS", 10_000)
    assert problems(folder)["b.jsonl"].startswith("a line in it has more than")


@pytest.mark.skipif(sys.platform == "win32", reason="no pipes in its file system, and links only for administrators")
def test_links_and_pipes_are_neither_followed_nor_waited_for(folder: Path) -> None:
    os.mkfifo(folder / "pipe.jsonl")
    (folder / "round").symlink_to(folder)
    (folder / "itself.json").symlink_to(folder / "itself.json")
    (folder / "again.json").symlink_to(folder / "z.json")
    found = problems(folder, good=2)
    assert found["pipe.jsonl"] == "is not a plain file" and "not followed" in found["round"]
    assert found["itself.json"].startswith("cannot be read: ") and len(found) == 3


def test_many_bad_files_are_counted_and_one_file_may_be_named(folder: Path) -> None:
    for number in range(30):
        (folder / f"{number}.json").write_text("{", encoding="utf-8")
    report = ReadReport()
    assert len(list(conversations(folder, report, lambda _text, _part: None))) == 1
    assert (len(report.problems), report.untold, report.unknown) == (20, 10, 0)
    assert problems(folder / "z.json") == {}
    with pytest.raises(UsageError, match="no such folder"):
        problems(folder / "elsewhere")

"""The archive comes back as it was packed, and hostile or damaged files are refused in a line."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import pytest

from dflash_local.report import archive
from tools.replay import unpack
from tools.replay.unpack import Damaged

PARTS = {"report": {"schema": archive.SCHEMA, "created": "today"}, "errors": [{"error": "UsageError"}]}


def zipped(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return buffer.getvalue()


def refused(path: Path, raw: bytes) -> str:
    path.write_bytes(raw)
    with pytest.raises(Damaged) as caught:
        unpack.unpack(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_packed_comes_back(tmp_path: Path) -> None:
    (tmp_path / "r.zip").write_bytes(archive.pack(PARTS))
    assert unpack.unpack(tmp_path / "r.zip") == PARTS
    assert archive.pack(PARTS) == archive.pack(PARTS)


@pytest.mark.parametrize(
    "name", ["../report.json", "/etc/report.json", "a/report.json", "report.exe", "..\\report.json"]
)
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    good = zipped({"report.json": json.dumps(PARTS["report"]).encode(), name: b"{}"})
    assert "which no report does" in refused(tmp_path / "r.zip", good)
    assert [path.name for path in tmp_path.iterdir()] == ["r.zip"]


def test_bombs_are_refused_without_being_unpacked(tmp_path: Path) -> None:
    bomb = zipped({"report.json": b" " * (unpack.MAX_PART + 1)})
    assert len(bomb) < 2**16 and "unpacks to more than" in refused(tmp_path / "r.zip", bomb)
    many = zipped(
        {f"{'a' * count}.json": b"{}" for count in range(1, 28)} | {f"b{'b' * n}.json": b"" for n in range(9)}
    )
    assert "36 files" in refused(tmp_path / "r.zip", many)
    assert "larger than" in refused(tmp_path / "r.zip", b"\0" * (unpack.MAX_ARCHIVE + 1))


def test_damaged_and_foreign_files_are_refused(tmp_path: Path) -> None:
    good = archive.pack(PARTS)
    path = tmp_path / "r.zip"
    assert "damaged or no report" in refused(path, b"hello")
    assert "damaged or no report" in refused(path, good[: len(good) // 2])
    assert "no schema" in refused(path, zipped({"other.json": b"{}"}))
    assert "no schema" in refused(path, zipped({"report.json": b"[]"}))
    assert "not JSON" in refused(path, zipped({"report.json": b"[" * 100_000}))
    assert "schema 99" in refused(path, zipped({"report.json": b'{"schema": 99}'}))
    for at in range(0, len(good), 7):
        path.write_bytes(good[:at] + bytes([good[at] ^ 0x55]) + good[at + 1 :])
        try:
            assert isinstance(unpack.unpack(path), dict)
        except Damaged:
            continue


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_compressions_are_refused_unread(tmp_path: Path, method: int) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as file:
        file.writestr("report.json", json.dumps(PARTS["report"]))
    whole = buffer.getvalue()
    for raw in (whole, whole.replace(b"BZh9", b"XXXX").replace(b"\x09\x04\x05\x00]", b"\x09\x04\x05\x00\xff")):
        assert "compressed in another way" in refused(tmp_path / "r.zip", raw)
